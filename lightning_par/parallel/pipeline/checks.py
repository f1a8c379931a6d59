"""What the first training step of a pipeline is asked: whether a batch in micro-batches is the batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_par.errors import ParallelConfigError, Problem

# How far the loss of a few samples may be from the weighted mean of those of their halves: rounding is far below it.
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 5e-2
# In so many batches the loss is compared, where it is none whose targets are counted: weights of samples may agree with
# it by chance in one.
BATCHES = 4
# A loss that changes by more than this part of the difference, when it is computed once more, is random.
_RANDOM = 1e-3


class Loss(NamedTuple):
    """A loss.

    Attributes:
        value: Its value.
        is_half: Whether it has few digits.
    """

    value: float
    is_half: bool


def combined(losses: Sequence[Tensor], weights: Sequence[float]) -> Loss:
    """The loss of a batch, from those of its micro-batches."""
    counted = [float(loss.float().sum()) * weight for loss, weight in zip(losses, weights, strict=True) if weight]
    return Loss(sum(counted), losses[0].dtype in (torch.float16, torch.bfloat16))


def refuse_other_loss(loss_in: Callable[[int], Loss], size: int, loss_weight: str) -> bool:
    """Refuse a loss that is no weighted mean of those of micro-batches.

    Args:
        loss_in: Computes the loss of the same samples, cut into a number of micro-batches; the same on all stages.
        size: The number of samples.
        loss_weight: How losses are combined, for the message.

    Returns:
        Whether the losses could be compared: one that is not finite either way is the data's.

    Raises:
        ParallelConfigError: If the samples have another loss in two parts than in one, unless it is random.
    """
    whole, halves = loss_in(1), loss_in(2)
    if not math.isfinite(whole.value) and not math.isfinite(halves.value):
        return False
    difference = abs(whole.value - halves.value)
    if difference <= (_HALF_TOLERANCE if whole.is_half else _TOLERANCE) * max(abs(whole.value), 1e-3):
        return True
    if abs(whole.value - loss_in(1).value) > _RANDOM * difference:
        if dist.get_rank() == 0:
            warnings.warn(
                f"the loss of {size} samples is another one each time, also in evaluation mode, because the step draws "
                "random numbers: that it is the weighted mean of the losses of micro-batches is not checked",
                stacklevel=2,
            )
        return True
    what = (
        f"the loss of {size} samples is {whole.value:.6g}, and {halves.value:.6g} as the weighted mean of the losses "
        f"of two micro-batches (pp_loss_weight={loss_weight!r}): the step computes something over the whole batch, or "
        "its loss is no mean over samples or targets"
    )
    if loss_weight == "samples":  # as the user has said
        if dist.get_rank() == 0:
            warnings.warn(what, stacklevel=2)
        return True
    raise ParallelConfigError(
        Problem(
            what,
            "return a sum and set pp_loss_weight='sum'; or pp_loss_weight='samples' to take the mean over "
            "micro-batches for the loss; a loss between samples (contrastive) needs pp_size=1",
            "pp_loss_weight: samples",
        )
    )


def warn_of_samples() -> None:
    """Warn that nothing tells how the losses of micro-batches make that of the batch."""
    if dist.get_rank() == 0:
        warnings.warn(
            "the step computes no loss whose targets can be counted, such as F.cross_entropy with reduction='mean': "
            "the losses of micro-batches are weighted by their numbers of samples. A loss that divides by something "
            "else, such as a mask, is right only as long as each micro-batch has as much of it: return a sum divided "
            f"by a number of the whole batch and set pp_loss_weight='sum'. It is compared in the first {BATCHES} "
            "batches; pp_loss_weight='samples' says that it is a mean over samples",
            stacklevel=2,
        )


def warn_of_statistics(module: nn.Module, count: int) -> None:
    """Warn of normalisation that makes another model of each micro-batch.

    Args:
        module: The root module.
        count: Micro-batches of a batch.
    """
    found = [name for name, child in module.named_modules() if isinstance(child, _BatchNorm) and child.training]
    if found and dist.get_rank() == 0:
        warnings.warn(
            f"{found[0]!r} (BatchNorm) normalises each of the {count} micro-batches of a batch by the statistics of "
            "this micro-batch alone, and updates its running ones after each: another model than in one process. "
            "LayerNorm and GroupNorm have no such statistics",
            stacklevel=2,
        )
