"""Keeps the ranks of a sharded module together: what FSDP2 leaves to a training loop that does the same everywhere.

FSDP2 gathers and reduces unit by unit, in the order in which each rank runs them, and reduces only the gradients that a
rank has. Where ranks differ, collectives meet that do not belong together: a hang, or gradients of one parameter added
to another. So every parameter of a unit that ran is reduced, as zeros where a rank did not use it; one that no rank
used has no gradient in the end, as in one process; and ranks that ran other units, or in another order, are told so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_par.errors import ParallelConfigError, Problem
from lightning_par.parallel import _compat, _compat_fsdp
from lightning_par.parallel.order import DIGEST_BYTES, ELSEWHERE, END, GATHER, REDUCE, UnitOrder
from lightning_par.parallel.shards import class_name, is_cut_by_fsdp


class Units:
    """The FSDP units of one root module, watched.

    Args:
        root: The sharded module.
        group: The data ranks, which must run the same units.

    Attributes:
        announced: Whether each backward is announced by `begin_backward`. The root's parameters may then be used, with
            gradients, outside its forward and after a backward inside it, and a backward that is not announced, such
            as `torch.autograd.grad(..., create_graph=True)` for forces or a gradient penalty, is part of a step.
    """

    def __init__(self, root: nn.Module, group: dist.ProcessGroup) -> None:
        self.announced = False
        self._root = root
        self._group = group
        self._units: list[_compat_fsdp.FSDPGroup] = []
        for i, param_group in enumerate(_compat_fsdp.fsdp_groups(root)):
            before_gather, before_reduce = partial(self._before_gather, i), partial(self._before_reduce, i)
            self._units.append(_compat_fsdp.FSDPGroup(param_group, before_gather, before_reduce, self._before_backward))
        self._root_units = [unit for unit in self._units if root in unit.modules]
        self._order = UnitOrder(group, class_name(root), _names(root, self._units))
        self._inside = 0
        self._strayed = False
        self._ending = False
        self._used: set[nn.Parameter] = set()
        self._missing: set[nn.Parameter] = set()
        self._gathers: list[int] | None = None
        self._serve_root()
        root.register_forward_pre_hook(_compat.not_compiled(lambda module, args: self._enter()))
        root.register_forward_hook(_compat.not_compiled(lambda module, args, output: self._leave()), always_call=True)

    # -- the root's own parameters ---------------------------------------------------------------------------------

    def counted_as_forward(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of the root that runs as its forward does."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._enter()
            try:
                return method(*args, **kwargs)
            finally:
                self._leave()

        return call

    def _enter(self) -> None:
        self._inside += 1

    def _leave(self) -> None:
        self._inside -= 1

    def _serve_root(self) -> None:
        """Let modules that the root unit serves run where its forward does not, as sampling in an epoch hook does."""
        hook = _compat.not_compiled(lambda module, args: self._before_root_module(module))
        pending = list(self._root.children())
        while pending:
            module = pending.pop()
            if isinstance(module, FSDPModule):
                continue
            pending.extend(module.children())
            if any(is_cut_by_fsdp(p) for p in module.parameters(recurse=False)):
                module.register_forward_pre_hook(hook)

    def _before_root_module(self, module: nn.Module) -> None:
        params = list(module.parameters(recurse=False))
        if not any(is_cut_by_fsdp(p) for p in params):
            for unit in self._root_units:
                unit.align(module)
            return
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in params)
        if trains and not self.announced:
            raise RuntimeError(
                f"{class_name(module)} is called with gradients outside training_step (or forward) of "
                f"{class_name(self._root)}, where its parameters are not gathered and its gradients would not be "
                "reduced; call it inside the step, or under torch.no_grad()"
            )
        self._strayed = self._strayed or trains
        cast(FSDPModule, self._root).unshard()

    def free(self) -> None:
        """Free all gathered parameters, wherever the training loop is."""
        for unit in self._units:
            unit.free()

    # -- backward --------------------------------------------------------------------------------------------------

    def begin_backward(self, loss: Tensor) -> None:
        """Call before a backward that may begin inside the root's forward, such as a manual one in a training step.

        Raises:
            ParallelConfigError: If the loss depends on shards beside what the units gather.
        """
        if isinstance(loss, DTensor):
            raise ParallelConfigError(
                Problem(
                    f"the loss is a DTensor: the step of {class_name(self._root)} computes with parameters of blocks "
                    "outside of the blocks' forward, where they are sharded, as a weight penalty does",
                    "weight_decay of the optimizer, or lightning_par.parallel.shards.full_tensor(penalty) on the value "
                    "of each parameter, or strategy='par_zero2' with the penalty after the forward, when all are whole",
                    "strategy: par_zero2",
                )
            )
        self._ending = True
        if (self._inside or self._strayed) and isinstance(loss, Tensor) and loss.requires_grad:
            _compat_fsdp.announce_backward(self._root, loss)

    def finish_backward(self, *, complete: bool) -> None:
        """Call after each backward, on every rank.

        Args:
            complete: Whether this was the last one of its accumulation window. Then the ranks agree on what they did.
        """
        self._strayed = self._ending = False
        for unit in reversed(self._units):
            if unit.kept:
                unit.end_backward()
        if not complete:
            return
        for unit in self._units:
            unit.used = False
        self._order.note(END)
        self._agree(training=True)

    def remember_gathers(self) -> None:
        """Call before a step of an evaluation that `join_step` may have to repeat."""
        self._gathers = []

    def join_step(self) -> None:
        """Take part in an evaluation step that only other ranks run: gather, and free, what the last step gathered."""
        gathers, self._gathers = self._gathers or [], None
        for index in gathers:
            self._units[index].join_gather()
        self._gathers = gathers

    def finish_evaluation(self) -> None:
        """Call at the end of an evaluation, on every rank: the ranks must have run the same units."""
        self._agree(training=False)

    def before_reduce_of_user(self) -> None:
        """Call before the data ranks reduce something else: a rank that left out a unit comes here too early."""
        self._order.note(ELSEWHERE)

    def explain_failure(self) -> ParallelConfigError | None:
        """After a collective failed: whether the ranks ran different units; see `UnitOrder`."""
        return self._order.explain_failure()

    def reset(self) -> None:
        """Forget what an exception has ended."""
        self._forget()
        self._order.forget()
        self._inside = 0
        self._strayed = self._ending = False
        for unit in self._units:
            unit.used = unit.kept = False

    def _before_backward(self) -> None:
        """See whether the backward of a unit is one in a step whose results have a graph (`create_graph=True`).

        That graph holds gathered parameters of all units, and the backward that goes through it does not come by where
        FSDP2 would gather them again. So they stay until that one has ended.
        """
        # autograd runs a backward with gradients enabled only if it makes a graph.
        if torch.is_grad_enabled() and self.announced and not self._ending:
            for unit in self._units:
                unit.kept = True

    def _before_gather(self, index: int) -> None:
        if self._gathers is not None:
            self._gathers.append(index)
        self._order.note(GATHER, index)

    def _before_reduce(self, index: int) -> None:
        if self._group.size() == 1:
            return
        present, missing = self._units[index].add_missing_gradients()
        if present or missing:
            self._order.note(REDUCE, index)
            self._used.update(present)
            self._missing.update(param for param in missing if param.grad is None)

    def _agree(self, *, training: bool) -> None:
        """Compare what the ranks did since the last agreement, and find the parameters that none of them used."""
        if self._group.size() == 1:
            return
        params = [param for unit in self._units for param in unit.parameters]
        missing = [i for i, param in enumerate(params) if param in self._missing and param not in self._used]
        flags = bytearray(b"\1") * len(params)
        for i in missing:
            flags[i] = 0
        # The largest digest of all ranks, and the largest complement: the smallest digest.
        digest = self._order.digest()
        sent = torch.frombuffer(bytearray(digest + bytes(255 - byte for byte in digest) + flags), dtype=torch.uint8)
        most = sent.to(_compat.collective_device(self._group, sent.device))
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        highest, lowest, used = most.cpu().split([DIGEST_BYTES, DIGEST_BYTES, len(params)])
        if not torch.equal(highest, 255 - lowest):
            raise self._order.difference()
        for i in missing:
            if not used[i]:
                params[i].grad = None
        self._order.agreed(training=training)
        self._forget()

    def _forget(self) -> None:
        self._used.clear()
        self._missing.clear()


def _names(root: nn.Module, units: list[_compat_fsdp.FSDPGroup]) -> list[str]:
    names = {module: f"`{name}`" if name else "the root" for name, module in root.named_modules()}
    return [", ".join(names[module] for module in unit.modules) for unit in units]
