"""The private parts of FSDP2 that the package uses, in one place; other private torch API is in `_compat.py`.

Each function says what it needs and since which version it is known; `tests/test_compat.py` tells what breaks when
torch changes one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fully_shard import _unimplemented_deepcopy, get_cls_to_fsdp_cls

from lightning_par.parallel._compat import gradient_hooks, set_gradient_hooks


def reset_fsdp_iteration(module: nn.Module) -> None:
    """Bring FSDP2 back to rest after an exception (`FSDPModule.reset_iter_state`, torch >= 2.13; else only reshard)."""
    reset: Callable[[], None] | None = getattr(module, "reset_iter_state", None)
    if reset is not None:
        reset()
        return
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def make_fsdp_class(module: nn.Module) -> None:
    """Make FSDP2's class for a module class such as `Net(ABC, nn.Module)`, whose first base has no `__dict__`.

    torch puts `FSDPModule` in front of the class. Python lets an instance change to that class only if both get their
    `__dict__` in a class over the same base, so where it does not, a stand-in of `FSDPModule` gets it over the same.
    What is made here is what torch finds in its cache (`get_cls_to_fsdp_cls`, `_unimplemented_deepcopy`, torch >= 2.6).

    Args:
        module: Gives its class; not changed.

    Raises:
        TypeError: If no such class can be made: the reason that torch would fail with.
    """
    cls = type(module)
    bases = _line_of_bases(cls)
    if cls is nn.Module or bases[0] is nn.Module or cls in get_cls_to_fsdp_cls():
        return
    refusal: TypeError | None = None
    for base in (None, *bases):
        try:
            made = _fsdp_class(cls, base)
            module.__class__ = made
        except TypeError as error:
            refusal = refusal or error
            continue
        module.__class__ = cls
        # In front of `nn.Module`, as it has an `_apply` of its own.
        if made.__mro__.index(FSDPModule) < made.__mro__.index(nn.Module):
            get_cls_to_fsdp_cls()[cls] = made
            return
    if refusal is not None:
        raise refusal


def _line_of_bases(cls: type) -> list[type]:
    """The classes that give an instance its layout in memory, the first one first, without `object`."""
    line: list[type] = []
    base: type | None = cls.__base__
    while base is not None and base is not object:
        line.insert(0, base)
        base = base.__base__
    return line


def _fsdp_class(cls: type[nn.Module], base: type | None) -> type[nn.Module]:
    front: type = FSDPModule
    if base is not None:
        # Without original bases Generic takes the stand-in for a class that forgot its parameters.
        front = type("FSDPModule", (base, FSDPModule), {"__orig_bases__": ()})
    return type(f"FSDP{cls.__name__}", (front, cls), {"__deepcopy__": _unimplemented_deepcopy})


def finalize_fsdp(root: nn.Module) -> None:
    """Tell FSDP2 which module is the root (`FSDPState._lazy_init`, torch >= 2.6).

    torch does it in the first forward, and then refuses a submodule that runs before the root, as sampling code does.
    It also takes the dtype in which a unit reduces from the parameters that are trainable then; a unit that is frozen
    altogether and trained later needs it too (`FSDPParamGroup._orig_dtype` and `_reduce_dtype`, torch >= 2.4).
    """
    fully_shard.state(root)._lazy_init()  # type: ignore[attr-defined]
    for group in fsdp_groups(root):
        dtypes = {(p.orig_dtype, p.reduce_dtype) for p in group.fsdp_params if p.orig_dtype.is_floating_point}
        if group._orig_dtype is None and len(dtypes) == 1:
            [(group._orig_dtype, group._reduce_dtype)] = dtypes


def kept_gathered(module: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method before `register_fsdp_forward_method` so that it may call the module's own forward.

    FSDP2 takes the end of that inner forward for the end of the whole, and after the method it would then free units
    that stay gathered until backward, to gather them again (`_training_state` of `FSDPState` and its groups, and
    `FSDPParamGroup.is_unsharded`, torch >= 2.4).
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
        if torch.is_grad_enabled():
            for group in _groups(state):
                if group.is_unsharded:
                    group._training_state = TrainingState.FORWARD
        return result

    return call


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def fsdp_groups(root: nn.Module) -> list[Any]:
    """List the parameter groups of all FSDP2 units in a module, in the order of its modules (`FSDPState`, 2.11)."""
    states = (fully_shard.state(m) for m in root.modules() if isinstance(m, FSDPModule))  # type: ignore[attr-defined]
    return [group for state in dict.fromkeys(states) for group in _groups(state)]


def announce_backward(root: nn.Module, loss: Tensor) -> None:
    """Let the backward of `loss` begin as if it were an output of the root (`FSDPState._pre_backward`, torch >= 2.4).

    torch hangs this on what the root's forward returns, which is too late for a backward inside that forward.
    """
    loss.register_hook(fully_shard.state(root)._pre_backward)  # type: ignore[attr-defined]


def end_of_backward(root: nn.Module) -> None:
    """Reduce and free what the units of a root hold, as the end of a backward does that autograd runs.

    Calls `FSDPParamGroup.post_backward` of each unit and `FSDPState._root_post_backward_final_callback`, as
    `_PipelineStageBase.perform_reduce_grad` of torch's pipelines does (torch >= 2.11).
    """
    for group in fsdp_groups(root):
        group.post_backward()
    fully_shard.state(root)._root_post_backward_final_callback()  # type: ignore[attr-defined]


class FSDPGroup:
    """Parameters that FSDP2 gathers and reduces together: one unit (`FSDPParamGroup`, torch >= 2.11).

    Replaces the methods `unshard`, `wait_for_unshard`, `reshard`, `pre_backward` and `post_backward` of this one group
    by ones that call back, and uses its `fsdp_params` with `sharded_param`, `_unsharded_param`, `_module_info` and
    `unsharded_accumulated_grad`, its `is_unsharded`, `reduce_grads` and `_all_gather_result` (torch >= 2.4).

    Args:
        group: The group.
        before_gather: Called before parameters are gathered, not where they are already.
        before_reduce: Called before gradients are reduced, also where there may be none.
        before_backward: Called before the backward of the unit, in the grad mode of that backward.

    Attributes:
        used: Whether the unit ran with gradients; the owner sets it back.
        kept: Whether the unit stays gathered, and its gradients whole, until `end_backward`.
    """

    def __init__(
        self,
        group: Any,
        before_gather: Callable[[], None],
        before_reduce: Callable[[], None],
        before_backward: Callable[[], None],
    ) -> None:
        self._group = group
        self._trainable = [param.sharded_param.requires_grad for param in group.fsdp_params]
        self._held: dict[nn.Module, list[int]] = {}
        for i, param in enumerate(group.fsdp_params):
            info = param._module_info
            for holder in (info.module, *info.shared_modules):
                self._held.setdefault(holder, []).append(i)
        self.used = self.kept = False
        unshard, wait_for_unshard, reshard = group.unshard, group.wait_for_unshard, group.reshard
        pre_backward, post_backward = group.pre_backward, group.post_backward

        def watched_unshard(*args: Any, **kwargs: Any) -> None:
            self.used = self.used or torch.is_grad_enabled()
            if not group.is_unsharded and group._all_gather_result is None:
                before_gather()
            unshard(*args, **kwargs)

        def watched_wait() -> None:
            wait_for_unshard()
            self.align()

        def watched_reshard() -> None:
            self.align()
            if not self.kept:
                reshard()

        def watched_pre_backward(*args: Any) -> None:
            before_backward()
            pre_backward(*args)

        def watched_post_backward(*args: Any) -> None:
            if self.kept:
                return
            if group.reduce_grads and self.used:
                before_reduce()
            post_backward(*args)

        group.unshard, group.wait_for_unshard = watched_unshard, watched_wait
        group.reshard = watched_reshard
        group.pre_backward, group.post_backward = watched_pre_backward, watched_post_backward

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules of the unit."""
        return tuple(self._group.modules)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters."""
        return [param.sharded_param for param in self._group.fsdp_params]

    def align(self, module: nn.Module | None = None) -> None:
        """Give what was set on a parameter, gathered or sharded, to the other form: `requires_grad` and hooks.

        Args:
            module: Only the parameters that this module itself holds.
        """
        for i in range(len(self._trainable)) if module is None else self._held.get(module, ()):
            param = self._group.fsdp_params[i]
            sharded, gathered = param.sharded_param, getattr(param, "_unsharded_param", None)
            if gathered is None:
                continue
            if self._group.is_unsharded:
                changed = sharded if sharded.requires_grad != self._trainable[i] else gathered
                self._trainable[i] = changed.requires_grad
                for form in (sharded, gathered):
                    if form.requires_grad != self._trainable[i]:
                        form.requires_grad_(self._trainable[i])
            if gradient_hooks(sharded) is not gradient_hooks(gathered):
                hooks = gradient_hooks(gathered) if gradient_hooks(sharded) is None else gradient_hooks(sharded)
                for form in (sharded, gathered):
                    set_gradient_hooks(form, hooks)

    def add_missing_gradients(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Add zeros for the trainable parameters without gradient, all in the dtype in which gradients accumulate.

        Returns:
            The sharded parameters that had a gradient, and those that had none.
        """
        params = [p for p in self._group.fsdp_params if getattr(p, "_unsharded_param", None) is not None]
        accumulated = [p.unsharded_accumulated_grad for p in params if p.unsharded_accumulated_grad is not None]
        present, missing = [], []
        for param in params:
            gathered = param._unsharded_param
            if param.unsharded_accumulated_grad is not None or gathered.grad is not None:
                present.append(param.sharded_param)
            elif gathered.requires_grad:
                missing.append(param.sharded_param)
                gathered.grad = torch.zeros_like(gathered)
            if accumulated and param.unsharded_accumulated_grad is None and gathered.grad is not None:
                # torch reduces a unit in one dtype.
                param.unsharded_accumulated_grad = gathered.grad.to(accumulated[0].dtype)
                gathered.grad = None
        return present, missing

    def join_gather(self) -> None:
        """Gather and free as a forward without gradients does, where nothing is to be computed.

        Uses `unshard_async_op`, and `_training_state` as `pre_forward` and `post_forward` do (torch >= 2.4).
        """
        if self._group.is_unsharded:
            return
        self._group._training_state = TrainingState.FORWARD
        self._group.unshard(self._group.unshard_async_op)
        self._group.wait_for_unshard()
        self._group.reshard()
        self._group._training_state = TrainingState.IDLE

    def end_backward(self) -> None:
        """Do what FSDP2 does at the end of a backward, for a unit that was kept (`finalize_backward`, torch >= 2.4)."""
        self.kept = False
        self._group.post_backward()
        self._group._training_state = TrainingState.IDLE
        self._group.finalize_backward()

    def free(self) -> None:
        """Free the gathered parameters, also while the forward of the unit runs (`_to_sharded`, torch >= 2.4)."""
        self.align()
        self.kept = False
        self._group._to_sharded()


class FSDPTensors(NamedTuple):
    """What FSDP2 holds beside the parameters and gradients that are registered on the modules now."""

    sharded: list[Tensor]
    gathered: list[Tensor]
    gradients: list[Tensor]


def fsdp_tensors(module: nn.Module) -> FSDPTensors:
    """Return the tensors of FSDP2's units in `module`.

    Reads `FSDPState._fsdp_param_groups` (torch >= 2.11; before, `_fsdp_param_group`), the `FSDPParam`s of each group
    (torch >= 2.4) and `_partial_reduce_output`, where HSDP keeps gradients that are not reduced over the replicas yet.
    """
    found = FSDPTensors([], [], [])
    for group in fsdp_groups(module):
        found.gradients.extend(_present(getattr(group, "_partial_reduce_output", None)))
        for param in group.fsdp_params:
            unsharded = getattr(param, "_unsharded_param", None)
            found.sharded.append(param.sharded_param)
            found.gathered.extend([*param.all_gather_outputs, *param._unsharded_inner_tensors])
            found.gathered.extend(_present(unsharded, getattr(param, "_sharded_post_forward_param_data", None)))
            found.gradients.extend(
                _present(
                    param.sharded_param.grad,
                    None if unsharded is None else unsharded.grad,
                    param.unsharded_accumulated_grad,
                )
            )
    return found


def _present(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]
