"""What optimizers need to step over sharded parameters as over whole ones, and which of them cannot.

An optimizer sees each parameter as a DTensor of the full shape, so formulas that look at a whole parameter (a norm, a
row mean) stay right. torch lacks a few operations on DTensors; `step_on_shards` supplies them while a step runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_par.errors import Problem
from lightning_par.parallel import _compat
from lightning_par.parallel.shards import sharded_like, to_local, without_partials

T = TypeVar("T")

# Element by element, so that they run on the local shards; torch has no sharding rule for them.
_ELEMENTWISE = frozenset(
    [
        torch.ops.aten._fused_sgd_.default,
        torch.ops.aten._fused_sgd_.tensor_lr,
        torch.ops.aten._fused_adagrad_.default,
        torch.ops.aten._fused_adagrad_.tensor_lr,
        torch.ops.aten._foreach_copy_.default,
        torch.ops.aten.index_put_.default,  # `x[x > 0] = number`, with a mask of the tensor's own layout
    ]
)
_MATRIX_PRODUCTS = frozenset(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm"))
_HALF = (torch.bfloat16, torch.float16)


class _ShardedOperations(TorchDispatchMode):
    """Completes what torch lacks for the operations of optimizers on DTensors.

    - A result that is a partial sum (a norm or a mean over the sharded dimension) is reduced at once: torch would keep
      it, and refuse to change it in place.
    - State that an optimizer made as a plain tensor is the same on all ranks; changing it in place by a DTensor works.
    - A tensor that changes another one of its shape in place gets the layout of that one.
    - Elementwise operations without a sharding rule run on the local shards, as do those in place, for speed: most of
      the time of a step over small shards is what DTensor does around each operation.
    - Partial sums of half-precision tensors are not rounded: norms add up in fp32, and matrix products (those of Muon)
      take whole matrices.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        local = _local_operands(args) if _is_pointwise_in_place(func) else None
        if local is not None:
            func(*local, **kwargs)
            return args[0]
        if func in _ELEMENTWISE and _same_layout(args):
            func(*_compat.map_tensors(to_local, args), **_compat.map_tensors(to_local, kwargs))
            return args[0] if isinstance(args[0], Tensor) else None
        target = args[0] if args else None
        if func._schema.is_mutable and isinstance(target, Tensor) and not isinstance(target, DTensor):
            partner = next((t for t in _compat.leaves((args, kwargs)) if isinstance(t, DTensor)), None)
            if partner is not None:
                func(_replicated(target, partner.device_mesh), *args[1:], **kwargs)
                return target
        if func._schema.is_mutable and args:
            args = (target, *(_laid_out_as(target, operand) for operand in args[1:]))
        if isinstance(target, DTensor) and target.dtype in _HALF:
            if func in _MATRIX_PRODUCTS:
                args = _compat.map_tensors(_gathered, args)
            elif func is torch.ops.aten.linalg_vector_norm.default and kwargs.get("dtype") is None:
                return without_partials(func(*args, **{**kwargs, "dtype": torch.float32})).to(target.dtype)
        out = func(*args, **kwargs)
        return without_partials(out) if isinstance(out, Tensor) else _compat.map_tensors(without_partials, out)


@functools.cache
def _is_pointwise_in_place(func: Any) -> bool:
    return bool(func._schema.name.endswith("_") and torch.Tag.pointwise in func.tags)


def _local_operands(args: Any) -> list[Any] | None:
    """The shards of an operation's operands, if all of them are numbers or DTensors laid out as the first."""
    target, *_ = args
    if not isinstance(target, DTensor) or _has_partials(target.placements):
        return None
    operands = []
    for operand in args:
        if isinstance(operand, DTensor):
            if operand.shape != target.shape or operand.placements != target.placements:
                return None
            if operand.device_mesh is not target.device_mesh:
                return None
            operand = operand.to_local()
        elif isinstance(operand, Tensor | list | tuple):
            return None
        operands.append(operand)
    return operands


@functools.cache
def _has_partials(placements: tuple[Placement, ...]) -> bool:
    return any(placement.is_partial() for placement in placements)


@contextmanager
def step_on_shards(enabled: bool = True) -> Iterator[Callable[[Callable[[], T]], Callable[[], T]]]:
    """Let an optimizer step over DTensors, beside plain parameters too.

    Example::

        with step_on_shards() as outside:
            optimizer.step(outside(closure))

    Args:
        enabled: False does nothing, for replicated parameters.

    Yields:
        A function that wraps a closure, so that forward and backward run without what is meant for the step.
    """
    if not enabled:
        yield lambda closure: closure
        return
    # Here: it brings context parallelism along, 20 ms that `import lightning_par` need not take.
    from torch.distributed.tensor.experimental import implicit_replication

    mode = _ShardedOperations()

    def outside(closure: Callable[[], T]) -> Callable[[], T]:
        def call() -> T:
            mode.__exit__(None, None, None)
            try:
                return closure()
            finally:
                mode.__enter__()

        return call

    with implicit_replication(), mode:
        yield outside


def step_problems(optimizer: Optimizer, *, sharded: bool) -> list[Problem]:
    """Find out whether an optimizer cannot step over shards."""
    if not sharded or not isinstance(optimizer, torch.optim.LBFGS):
        return []
    return [
        Problem(
            f"{type(optimizer).__name__} makes one vector of all parameters, and they are sharded",
            "strategy='par_ddp', or another optimizer",
            "strategy: par_ddp",
        )
    ]


@torch.no_grad()
def move_state(optimizer: Optimizer, old: Tensor, new: Tensor) -> None:
    """Give the state that an optimizer has for a parameter to what has become of it: on a device, or sharded."""
    state = optimizer.state.pop(old, None)
    if state is not None:
        optimizer.state[new] = {key: _like(key, value, old, new) for key, value in state.items()}


def has_state_on_meta(optimizer: Optimizer, param: Tensor) -> bool:
    """Whether an optimizer has state for a parameter that nothing gives a value to."""
    values = optimizer.state.get(param, {}).values()
    return any(isinstance(value, Tensor) and value.is_meta for value in values)


def _like(key: str, value: Any, old: Tensor, new: Tensor) -> Any:
    # torch keeps the number of steps where it wants it.
    if not isinstance(value, Tensor) or key == "step":
        return value
    value = value.to(new.device)
    if not isinstance(new, DTensor) or isinstance(value, DTensor) or value.shape != old.shape:
        return value
    return sharded_like(value, new)


def _laid_out_as(target: Any, operand: Any) -> Any:
    """Give an operand the layout of a target of its shape; lists item by item."""
    if isinstance(target, list | tuple):
        alike = isinstance(operand, list | tuple) and len(operand) == len(target)
        return [_laid_out_as(t, x) for t, x in zip(target, operand, strict=True)] if alike else operand
    if not isinstance(target, DTensor) or not isinstance(operand, Tensor) or operand.shape != target.shape:
        return operand
    if not isinstance(operand, DTensor):
        operand = _replicated(operand, target.device_mesh)
    same_mesh = operand.device_mesh == target.device_mesh
    return operand.redistribute(placements=target.placements) if same_mesh else operand


def _gathered(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=[Replicate()] * len(tensor.placements))


def _replicated(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _same_layout(args: Any) -> bool:
    """Whether all DTensors of a call are cut alike; in lists, those at the same place."""
    lists = [arg for arg in args if isinstance(arg, list | tuple)]
    # The operands of `index_put_` are one row, with its mask in a list of one.
    rows = zip(*(x for x in lists if x), strict=False) if not isinstance(args[0], Tensor) else [_compat.leaves(args)]
    layouts = [{(t.device_mesh, t.placements) for t in row if isinstance(t, DTensor)} for row in rows]
    return any(layouts) and all(len(layout) <= 1 for layout in layouts)
