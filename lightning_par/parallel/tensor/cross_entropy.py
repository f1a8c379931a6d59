"""Cross entropy of logits whose classes are divided over ranks, without gathering them.

For one row x with target y, weights w and smoothing e over C classes, with log p = x - logsumexp(x):

    loss = -(1 - e) w_y log p_y - e/C sum_c w_c log p_c

which is what `torch.nn.functional.cross_entropy` computes (smoothing as in Szegedy et al. 2015, equation 5). Two
all-reduces: the largest logit, then the sums (Shoeybi et al. 2019, section 3; here also those of the smoothing).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.parallel.tensor.collectives import refuse_second_order


class _RowLosses(torch.autograd.Function):
    """Unreduced losses of rows; zero where the target is ignored.

    Forward takes logits (N, C / ranks), targets (N,) with -1 for ignored rows and C for what is no class, weights (C,)
    or None.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, smoothing: float, group: dist.ProcessGroup
    ) -> Tensor:
        here = logits.shape[1]
        classes, start = here * group.size(), here * group.rank()
        exponents = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits.clone()
        largest = exponents.amax(1) if here else exponents.new_full((len(logits),), -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        exponents.sub_(largest[:, None])
        mine = (target >= start) & (target < start + here)
        # What is no class is out of range here too, so that a GPU reports it as it does for torch.
        index = (target - start).clamp(0, here - 1).masked_fill(target == classes, here)
        at_target = exponents.gather(1, index[:, None]).squeeze(1) * mine
        own_weight = None if weight is None else weight[start : start + here].to(exponents.dtype)
        weighted = exponents.sum(1) if own_weight is None else exponents @ own_weight
        exponents.exp_()
        sums = torch.stack([exponents.sum(1), at_target, weighted])
        dist.all_reduce(sums, group=group)
        total, at_target, weighted = sums
        log_total = total.log()
        counted = (target >= 0).to(sums.dtype)
        of_target = counted if weight is None else counted * weight.to(sums.dtype)[target.clamp(min=0)]
        all_weight = float(classes) if weight is None else weight.to(sums.dtype).sum()
        losses = (1 - smoothing) * of_target * (log_total - at_target)
        if smoothing:
            losses = losses + smoothing / classes * counted * (all_weight * log_total - weighted)
        ctx.smoothing, ctx.classes, ctx.all_weight, ctx.dtype = smoothing, classes, all_weight, logits.dtype
        ctx.save_for_backward(exponents.div_(total[:, None]), index, mine, of_target, counted, own_weight)
        return losses.to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_order()
        softmax, index, mine, of_target, counted, own_weight = ctx.saved_tensors
        share = ctx.smoothing / ctx.classes * counted
        scale = (1 - ctx.smoothing) * of_target
        gradient = softmax * (scale + share * ctx.all_weight)[:, None]
        gradient.scatter_add_(1, index[:, None], -(scale * mine)[:, None])
        if ctx.smoothing:
            gradient -= share[:, None] if own_weight is None else share[:, None] * own_weight
        gradient *= gradients[0].to(gradient.dtype)[:, None]
        return gradient.to(ctx.dtype), None, None, None, None


def divided_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: dist.ProcessGroup,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of logits of which each rank has a slice of the classes.

    Args:
        logits: Shape (N, C / ranks); rank r has the classes from r * C / ranks on.
        target: Indices of classes, shape (N,), the same on all ranks.
        group: The ranks, in the order of their slices.
        weight: A weight for each class, shape (C,), without gradient.
        ignore_index: Target of rows that do not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: Part of the target that is spread over all classes, 0 to 1.

    Returns:
        A scalar, or with "none" shape (N,); the same on all ranks.

    Raises:
        ValueError: If the reduction is unknown.
        IndexError: If a target is no class and not ignored.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    ignored = target == ignore_index
    classes = logits.shape[1] * group.size()
    wrong = ((target < 0) | (target >= classes)) & ~ignored
    # As torch: an error on the CPU; on a GPU looking would wait for the device.
    if target.device.type == "cpu" and bool(wrong.any()):
        raise IndexError(f"a target is not in 0 ... {classes - 1}")
    rows = target.masked_fill(ignored, -1).masked_fill(wrong, classes)
    losses: Tensor = _RowLosses.apply(logits, rows, weight, label_smoothing, group)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    counted = ~ignored if weight is None else weight[target.masked_fill(ignored, 0)].masked_fill(ignored, 0)
    return losses.sum() / counted.sum().to(losses.dtype)
