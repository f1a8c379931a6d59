"""How the losses of micro-batches combine to the loss of the whole batch.

A mean over the targets of a batch is the mean over micro-batches weighted by how many targets each has:

    mean(batch) = sum_i  n_i / (n_1 + ... + n_m)  mean(micro-batch i)

where n is what the reduction of the loss divides by. For `F.cross_entropy` and `F.nll_loss` that is the number of
targets that are not ignored, or the sum of their class weights; with label smoothing too. For targets that are
probabilities it is the number of rows, class weights or not. `F.mse_loss` and its like divide by the number of
elements. Losses with another reduction than "mean" tell nothing: what the step does with them is not seen.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_par.errors import ParallelConfigError, Problem

LossWeight = Literal["auto", "samples", "sum"]

_OF_CLASSES: list[Callable[..., Tensor]] = [F.cross_entropy, F.nll_loss]
if hasattr(F, "linear_cross_entropy"):  # torch >= 2.13
    _OF_CLASSES.append(F.linear_cross_entropy)
_OF_ELEMENTS: list[Callable[..., Tensor]] = [
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
]
_SIGNATURES = {function: inspect.signature(function) for function in (*_OF_CLASSES, *_OF_ELEMENTS)}


class _Watch(TorchFunctionMode):
    """Sees each loss function however it is reached: by its name, a module, or from inside another library."""

    def __init__(self, count_only: bool) -> None:
        super().__init__()
        self.counts: list[Tensor | int] = []
        self.count_only = count_only

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        signature = _SIGNATURES.get(func)
        if signature is None:
            return func(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = bound.arguments
        reduction = _reduction(call)
        if reduction == "mean":
            self.counts.append(_of_classes(call) if func in _OF_CLASSES else _of_elements(call))
        return _nan(func, call, reduction) if self.count_only else func(*args, **kwargs)


@contextmanager
def watch_targets(*, count_only: bool = False) -> Iterator[list[Tensor | int]]:
    """Count the targets of the losses computed inside.

    Args:
        count_only: Compute no loss: the call returns NaN of the right shape and dtype, and reads its targets alone. For
            steps whose logits are an expanded NaN, where reading them would allocate the whole.

    Yields:
        What each call with ``reduction="mean"`` divides by, in order: a tensor without dimensions on the device of the
        targets, so that nothing waits for it, or a number.
    """
    with _Watch(count_only) as watch:
        yield watch.counts


def combine(
    counts: Sequence[Sequence[Tensor | float]], sizes: Sequence[int], mode: LossWeight | str = "auto"
) -> list[float]:
    """Return the weight of the loss of each micro-batch, with which the sum is the loss of the whole batch.

    With "auto" the weights are the shares of the targets that `watch_targets` counted, and those of the samples where
    it saw none. A micro-batch without targets has weight 0 and a loss of NaN (0 / 0): leave it out, as NaN times 0 is
    NaN. Where no micro-batch has targets all losses are NaN, as that of the batch is, and the weights are those of the
    samples.

    Args:
        counts: What `watch_targets` counted in each micro-batch.
        sizes: Number of samples in each micro-batch.
        mode: "auto"; "samples": weights by number of samples, for losses that are means over samples; "sum": all
            weights are 1, for losses that are sums.

    Returns:
        Weights that sum to 1, except with "sum".

    Raises:
        ParallelConfigError: If the mode is unknown; with "auto", if several losses have targets in different
            proportions, or micro-batches have different numbers of them.
    """
    if mode not in get_args(LossWeight):
        raise ParallelConfigError(
            Problem(
                f"pp_loss_weight is {mode!r}, and has to be one of {', '.join(map(repr, get_args(LossWeight)))}",
                "pp_loss_weight='auto'",
                "pp_loss_weight: auto",
            )
        )
    if mode == "sum":
        return [1.0] * len(sizes)
    by_samples = _shares(sizes)
    if mode == "samples":
        return by_samples
    numbers = [[float(count) for count in row] for row in counts]
    if len({len(row) for row in numbers}) > 1:
        raise _no_single_weight(
            f"the micro-batches compute different numbers of mean losses, {', '.join(str(len(row)) for row in numbers)}"
        )
    calls = [call for call in zip(*numbers, strict=True) if sum(call)]
    if not calls:
        return by_samples
    first, *others = (_shares(call) for call in calls)
    for number, other in enumerate(others, 1):
        if not all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(first, other, strict=True)):
            raise _no_single_weight(
                f"the step has {len(calls)} mean losses, of which the micro-batches have different shares of targets: "
                f"{_listed(calls[0])} of one and {_listed(calls[number])} of another"
            )
    return first


def _no_single_weight(what: str) -> ParallelConfigError:
    return ParallelConfigError(
        Problem(
            f"{what}. No single weight of a micro-batch gives the loss of the whole batch",
            "return the sum of the losses divided by numbers of the whole batch and set pp_loss_weight='sum', or "
            "accept the mean by samples with pp_loss_weight='samples'",
            "pp_loss_weight: samples",
        )
    )


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _shares(values: Sequence[float]) -> list[float]:
    total = sum(values)
    return [value / total for value in values]


def _reduction(call: dict[str, Any]) -> str:
    average, reduce = call.get("size_average"), call.get("reduce")
    if average is None and reduce is None:
        return str(call["reduction"])
    # The deprecated spelling: either one overrides the reduction, and the other is true by default.
    if reduce is False:
        return "none"
    return "sum" if average is False else "mean"


def _of_classes(call: dict[str, Any]) -> Tensor | int:
    target: Tensor = call["target"]
    if target.is_floating_point():
        classes = target.shape[min(target.dim() - 1, 1)]
        return target.numel() // classes if classes else 0
    ignore_index = -100 if call["ignore_index"] is None else call["ignore_index"]
    counted = target != ignore_index
    weight: Tensor | None = call["weight"]
    if weight is None:
        return counted.sum()
    # By selecting, a single target that is out of range would fail here instead of in the loss.
    of_targets = weight.detach().double()[target.masked_fill(~counted, 0).long().clamp(0, len(weight) - 1)]
    return of_targets.masked_fill(~counted, 0).sum()


def _of_elements(call: dict[str, Any]) -> int:
    return math.prod(torch.broadcast_shapes(call["input"].shape, call["target"].shape))


def _nan(func: Any, call: dict[str, Any], reduction: str) -> Tensor:
    given, target = call["input"], call["target"]
    # What the real function makes of one row has its dtype, under autocast too.
    if func in _OF_ELEMENTS:
        row = func(given.new_zeros(1), target.new_zeros(1))
    else:
        like = F.nll_loss if func is F.nll_loss else F.cross_entropy
        row = like(given.new_zeros(1, 1), torch.zeros(1, dtype=torch.long, device=given.device))
    nan = torch.full((), math.nan, dtype=row.dtype, device=row.device)
    if reduction != "none":
        return nan
    if func in _OF_ELEMENTS:
        return nan.expand(torch.broadcast_shapes(given.shape, target.shape))
    probabilities = target.is_floating_point()
    shape = target.shape[:1] + target.shape[2:] if probabilities and target.dim() > 1 else target.shape
    return nan.expand(() if probabilities and target.dim() == 1 else shape)
