"""Collectives with gradients for ranks that all compute the same loss, each from its own part.

Megatron's pair is `sum_values` and `sum_gradients` (Shoeybi et al. 2019, section 3, g and f). What follows a sum or a
gathering is computed alike by all ranks, so their gradients are equal and are not summed again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.errors import ParallelConfigError, Problem


def refuse_second_order() -> None:
    """Raise in a backward that will be differentiated itself: that would leave out what other ranks contribute.

    Raises:
        ParallelConfigError: Under `create_graph=True`.
    """
    if torch.is_grad_enabled():
        raise ParallelConfigError(
            Problem(
                "gradients are differentiated (create_graph=True) through modules that are divided over tp ranks, "
                "which would leave out what the other ranks contribute",
                "tp_size=1 (the data-parallel family differentiates gradients)",
                "tp_size: 1",
            )
        )


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_order()
        return gradients[0]


def first_order(tensor: Tensor) -> Tensor:
    """Return a tensor whose gradient cannot be differentiated again; see `refuse_second_order`."""
    same: Tensor = _FirstOrder.apply(tensor)
    return same


class _SumValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_order()
        return gradients[0], None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_order()
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group, ctx.size = dim, group, tensor.shape[dim]
        tensor = tensor.contiguous()
        pieces = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(pieces, tensor, group=group)
        return torch.cat(pieces, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_order()
        start = ctx.group.rank() * ctx.size
        return gradients[0].narrow(ctx.dim, start, ctx.size).contiguous(), None, None


def sum_values(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum a tensor over the ranks; its gradient passes as it is."""
    total: Tensor = _SumValues.apply(tensor, group)
    return total


def sum_gradients(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor, which all ranks have; its gradient, to which each rank contributes, is summed over them."""
    same: Tensor = _SumGradients.apply(tensor, group)
    return same


def gather(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate parts of one shape, one from each rank, along a dimension; each gets its slice of the gradient."""
    whole: Tensor = _Gather.apply(tensor, dim, group)
    return whole
