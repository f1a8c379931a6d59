"""Every private or unstable torch API that the package uses, in one place.

Each function says what it needs and since which version it is known; `tests/test_compat.py` tells what breaks when
torch changes one of them.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, _random
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

F = TypeVar("F", bound=Callable[..., Any])


def run_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once, when the backward that is running now has ended (`Engine.queue_callback`, torch >= 1.0)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def reset_fsdp_iteration(module: nn.Module) -> None:
    """Bring FSDP2 back to rest after an exception (`FSDPModule.reset_iter_state`, torch >= 2.13; else only reshard)."""
    reset: Callable[[], None] | None = getattr(module, "reset_iter_state", None)
    if reset is not None:
        reset()
        return
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


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


class FSDPGroup:
    """Parameters that FSDP2 gathers and reduces together: one unit (`FSDPParamGroup`, torch >= 2.11).

    Replaces the methods `unshard`, `wait_for_unshard`, `reshard` and `post_backward` of this one group by ones that
    call back, and uses its `fsdp_params` with `sharded_param`, `_unsharded_param`, `unsharded_accumulated_grad` and
    `_module_info`, its `is_unsharded`, `reduce_grads` and `_all_gather_result` (torch >= 2.4).

    Args:
        group: The group.
        before_gather: Called before parameters are gathered, not where they are already.
        before_reduce: Called before gradients are reduced, also where there may be none.

    Attributes:
        used: Whether the unit ran with gradients; the owner sets it back.
    """

    def __init__(self, group: Any, before_gather: Callable[[], None], before_reduce: Callable[[], None]) -> None:
        self._group = group
        self._trainable = [param.sharded_param.requires_grad for param in group.fsdp_params]
        self._held: dict[nn.Module, list[int]] = {}
        for i, param in enumerate(group.fsdp_params):
            info = param._module_info
            for holder in (info.module, *info.shared_modules):
                self._held.setdefault(holder, []).append(i)
        self.used = False
        unshard, wait_for_unshard, reshard = group.unshard, group.wait_for_unshard, group.reshard
        post_backward = group.post_backward

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
            reshard()

        def watched_post_backward(*args: Any) -> None:
            if group.reduce_grads and self.used:
                before_reduce()
            post_backward(*args)

        group.unshard, group.wait_for_unshard = watched_unshard, watched_wait
        group.reshard, group.post_backward = watched_reshard, watched_post_backward

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

    def free(self) -> None:
        """Free the gathered parameters, also while the forward of the unit runs (`_to_sharded`, torch >= 2.4)."""
        self.align()
        self._group._to_sharded()


def read_whole_scalars() -> None:
    """Let `item()`, `float()` and `bool()` of a DTensor give its value, where torch gives this rank's part of it.

    So `grad.norm().item()` and `if grad.isnan().any():` in a hook mean what they say. It is a collective, like every
    other operation that needs all parts (`OpDispatcher._custom_op_handlers`, torch >= 2.2; wrong until at least 2.13).
    Left in place, as the parameters stay sharded after training.
    """

    def item(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        return op(*(arg.full_tensor() if isinstance(arg, DTensor) else arg for arg in args))

    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(torch.ops.aten._local_scalar_dense.default, item)  # type: ignore[arg-type]


def fsdp_groups(root: nn.Module) -> list[Any]:
    """List the parameter groups of all FSDP2 units in a module, in the order of its modules (`FSDPState`, 2.11)."""
    states = (fully_shard.state(m) for m in root.modules() if isinstance(m, FSDPModule))  # type: ignore[attr-defined]
    return [group for state in dict.fromkeys(states) for group in _groups(state)]


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread (`torch._C._current_graph_task_id`, torch >= 2.1)."""
    return torch._C._current_graph_task_id() != -1


def not_compiled(function: F) -> F:
    """Keep `torch.compile` out of a function, no method (`torch._disable_dynamo`, torch >= 2.1)."""
    return torch._disable_dynamo(function)  # type: ignore[attr-defined, return-value]


def default_store() -> Any:
    """The key-value store of the default process group (`_get_default_store`, torch >= 1.8)."""
    return distributed_c10d._get_default_store()


def announce_backward(root: nn.Module, loss: Tensor) -> None:
    """Let the backward of `loss` begin as if it were an output of the root (`FSDPState._pre_backward`, torch >= 2.4).

    torch hangs this on what the root's forward returns, which is too late for a backward inside that forward.
    """
    loss.register_hook(fully_shard.state(root)._pre_backward)  # type: ignore[attr-defined]


def foreach_norm(tensors: list[Tensor], order: float) -> list[Tensor]:
    """Return the p-norm of each tensor, at least in float32 (`torch._foreach_norm`, its `dtype` since torch 2.4).

    The tensors share device and dtype and none is empty: the infinite norm of nothing is an error there.
    """
    dtype = torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else None
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def foreach_mul_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one device and dtype in place by a 0-dim tensor (`torch._foreach_mul_`, torch >= 2.1)."""
    torch._foreach_mul_(tensors, factor)


def foreach_clamp_(tensors: list[Tensor], limit: float) -> None:
    """Clamp tensors of one device and dtype in place to [-limit, limit] (`torch._foreach_clamp_*_`, torch >= 2.0)."""
    torch._foreach_clamp_min_(tensors, -limit)
    torch._foreach_clamp_max_(tensors, limit)


def unscale_and_check_(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply by `inv_scale` in place, and set `found_inf` to 1 if an element is not finite.

    The gradients share device and dtype (`torch._amp_foreach_non_finite_check_and_unscale_`; on CPU since torch 2.3).
    """
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)


def collective_device(group: ProcessGroup, preferred: torch.device) -> torch.device:
    """Return `preferred` if `group` can communicate there, else its accelerator (`ProcessGroup._device_types`, 2.0)."""
    kinds = [device.type for device in group._device_types]
    if not kinds or preferred.type in kinds:
        return preferred
    kind = next((kind for kind in kinds if kind != "cpu"), "cpu")
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def map_tensors(function: Callable[[Tensor], Any], data: Any) -> Any:
    """Apply `function` to each tensor in nested containers, and keep all else (`torch.utils._pytree`, torch >= 2.2)."""
    return tree_map_only(Tensor, function, data)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Make the 1-D mesh over all ranks of `mesh`, once for each name (`DeviceMesh._flatten`, torch >= 2.4)."""
    return mesh._flatten(name)


def unflatten_mesh(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Cut a 1-D mesh into several dimensions, outermost first (`DeviceMesh._unflatten`, torch >= 2.10)."""
    return mesh._unflatten(0, sizes, names)


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Join meshes of one root into one; makes no groups (`DeviceMesh._concatenate`, torch >= 2.10)."""
    return DeviceMesh._concatenate(meshes)


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply `function` to all non-containers in nested containers (`torch.utils._pytree`, torch >= 2.2)."""
    return tree_map(function, data)


def leaves(data: Any) -> list[Any]:
    """List everything in nested containers that is no container (`torch.utils._pytree`, torch >= 2.2)."""
    return tree_leaves(data)


def storage_note(tensor: Tensor) -> Any:
    """Return what `set_storage_note` attached to the storage of a tensor, or None.

    Relies on torch keeping the Python object of a storage, with its attributes, while the storage lives (torch >= 2.1).
    """
    return getattr(tensor.untyped_storage(), "_lightning_par_note", None)


def set_storage_note(tensor: Tensor, note: Any) -> None:
    """Attach an object to the storage of a tensor; every view of it, and nothing else, sees it. It dies with it."""
    tensor.untyped_storage()._lightning_par_note = note  # type: ignore[attr-defined]


def shares_storage(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors are views of one storage, also on meta (`UntypedStorage._cdata`, torch >= 2.0)."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Tell whether `register_hook` or `register_post_accumulate_grad_hook` was called on a tensor (torch >= 2.1)."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def gradient_hooks(tensor: Tensor) -> Any:
    """Return the hooks that `register_hook` added to a leaf, or None (`Tensor._backward_hooks`, torch >= 1.0)."""
    return tensor._backward_hooks


def set_gradient_hooks(tensor: Tensor, hooks: Any) -> None:
    """Let a leaf run the hooks of another one; the handles that the user has go on removing them."""
    tensor._backward_hooks = hooks


def has_accumulation_hooks(tensor: Tensor) -> bool:
    """Tell whether `register_post_accumulate_grad_hook` was called on a tensor (torch >= 2.1)."""
    return bool(tensor._post_accumulate_grad_hooks)


def factory_functions() -> set[Any]:
    """Return the functions that `torch.device(...)` as a context redirects (`torch.utils._device`, torch >= 2.0)."""
    return _device_constructors()


@contextmanager
def around_inner_meta_context(around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter `around()` for calls under a ``with torch.device("meta")`` begun in this context (`DeviceContext`, 2.0)."""
    outer = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    original = DeviceContext.__torch_function__

    def call(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.device.type != "meta" or any(self is mode for mode in outer):
            return original(self, func, types, args, kwargs)
        with around():
            return original(self, func, types, args, kwargs)

    DeviceContext.__torch_function__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeviceContext.__torch_function__ = original  # type: ignore[method-assign]


def no_function_modes() -> AbstractContextManager[None]:
    """Switch `__torch_function__` off, with all its modes (`torch._C.DisableTorchFunction`, torch >= 2.0)."""
    return torch._C.DisableTorchFunction()


@contextmanager
def no_torch_modes() -> Iterator[None]:
    """Switch all function and dispatch modes off (`torch.utils._python_dispatch`, torch >= 2.0)."""
    with no_function_modes(), _disable_current_modes():
        yield


@contextmanager
def replaced_trunc_normal(function: Callable[..., Tensor]) -> Iterator[None]:
    """Let `nn.init.trunc_normal_` call `function(original, tensor, ...)` (`_no_grad_trunc_normal_`, torch >= 1.9)."""
    original = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = lambda *args, **kwargs: function(original, *args, **kwargs)
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


def has_inner_forward_hooks(module: nn.Module) -> bool:
    """Whether a submodule of `module` has a forward hook or pre-hook (`Module._forward_hooks`, torch >= 1.0)."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in module.modules() if m is not module)


def tensor_version(tensor: Tensor) -> int:
    """Return how often a tensor was written in place, 0 for inference tensors (`Tensor._version`, torch >= 0.4)."""
    return 0 if tensor.is_inference() else tensor._version


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold the memory of a wrapper subclass such as DTensor, or the tensor itself.

    Uses `torch.utils._python_dispatch.is_traceable_wrapper_subclass`, torch >= 2.1.
    """
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):  # since torch 2.13 the mesh of a DTensor is listed too
            yield from plain_tensors(inner)


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


_mesh_caches: WeakSet[Any] = WeakSet()


def forget_meshes() -> None:
    """Empty the caches of DTensor, for a process that makes a new process group.

    Equal meshes count as one in them, though their groups differ: a mesh whose groups are destroyed would come back in
    results. They are functools caches, some in closures where only the garbage collector finds them, a cache in C++
    (`_clear_DTensor_sharding_propagator_cache`, torch >= 2.10) and the random state (`_random._rng_tracker`, >= 2.0).
    The number that names the next group (`_world.group_count`, torch >= 2.0) differs on ranks where making one failed.
    """
    caches = (x for x in gc.get_objects() if type(x) is functools._lru_cache_wrapper)
    _mesh_caches.update(cache for cache in caches if str(cache.__module__).startswith("torch.distributed.tensor"))
    for cache in _mesh_caches:
        cache.cache_clear()
    if hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):
        torch._C._clear_DTensor_sharding_propagator_cache()
    _random._rng_tracker = None
    distributed_c10d._world.group_count = 0
