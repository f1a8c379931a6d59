"""What the step of a module does besides returning: on micro-batches, made as if there had been one step on the batch.

On each stage `recording` surrounds the step on a micro-batch. On the last stage, where steps run to their end,
`merge_records` makes the records of a batch into one; it is broadcast, and `emit` does on every stage what it says.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_par.errors import ParallelConfigError, Problem
from lightning_par.parallel._compat import map_tensors
from lightning_par.parallel.pipeline.microbatches import merge, weighted
from lightning_par.strategies import step_attributes, step_metrics
from lightning_par.strategies.step_attributes import Change, Path
from lightning_par.strategies.step_metrics import (
    Result,
    moved,
    named_collections,
    named_metrics,
    replaced,
    share_metrics,
)

__all__ = ["MergedStep", "StepRecord", "discarding", "emit", "merge_records", "recording", "share_metrics"]

# As `self.log` takes them, and the name of each.
_REDUCTIONS: dict[Any, str] = {
    **dict.fromkeys((torch.mean, "avg", "mean"), "mean"),
    **dict.fromkeys((torch.sum, sum, "sum"), "sum"),
    **dict.fromkeys((torch.max, max, "max"), "max"),
    **dict.fromkeys((torch.min, min, "min"), "min"),
}


class MetricNamed(NamedTuple):
    """A metric object that was logged, by its name in the module."""

    name: str


class Logged(NamedTuple):
    """One call of `self.log`.

    Attributes:
        name: The name it was logged under.
        value: A number, a detached tensor or a metric's name.
        keywords: The other arguments, as they were given.
        result: What the value is, if a metric has just returned it.
        is_summed: Whether it is a loss that is a sum over samples.
    """

    name: str
    value: Any
    keywords: dict[str, Any]
    result: Result | None = None
    is_summed: bool = False


@dataclass
class StepRecord:
    """What the step on one micro-batch did.

    Attributes:
        logs: Its calls of `self.log`, and the items of `self.log_dict`.
        changes: The attributes that it changed.
        states: The states of metrics of the batch up to now, of each call; shared by the records of a batch.
        waiting: Calls of metrics with single numbers, by metric.
        caches: What metrics with a `forward` of their own returned last.
        grouping: The collections of metrics that have yet to find which share their states; shared like `states`.
        loss: The loss that the step returned, to be set where losses are sums: see `merge_records`.
    """

    logs: list[Logged] = field(default_factory=list)
    changes: dict[Path, Change] = field(default_factory=dict)
    states: dict[str, list[step_metrics.State]] = field(default_factory=dict)
    waiting: dict[str, list[step_metrics.Scalars]] = field(default_factory=dict)
    caches: dict[str, Any] = field(default_factory=dict)
    grouping: set[str] = field(default_factory=set)
    loss: Any = None


@dataclass
class MergedStep:
    """What one step on the batch would have done. It can be pickled if what the user appended to lists can.

    Attributes:
        logs: Calls of `self.log`.
        caches: For each metric that was called, what it returns for the batch.
        changes: Changed attributes.
    """

    logs: list[Logged]
    caches: dict[str, Any]
    changes: dict[Path, Change]


@contextmanager
def recording(module: pl.LightningModule, earlier: Sequence[StepRecord] = ()) -> Iterator[StepRecord]:
    """Surround the step on one micro-batch: what it logs and changes is noted and not done.

    `self.log` and `self.log_dict` note what they are given. Attributes (see `step_attributes`) are given back as they
    were. Metrics are updated, and compute without the other stages.

    Args:
        module: The module whose step runs inside.
        earlier: The records of the micro-batches of the same batch until now.

    Yields:
        The record, which is complete after the end.

    Raises:
        ParallelConfigError: From `self.log`, for what it cannot log or what cannot be repeated on other stages.
    """
    record = StepRecord(states=earlier[-1].states, grouping=earlier[-1].grouping) if earlier else StepRecord()
    metrics = named_metrics(module)
    caches = {name: metric._forward_cache for name, metric in metrics.items()}
    with (
        step_metrics.in_step(),
        step_metrics.deferred_groups(named_collections(module), record.grouping),
        step_metrics.following_calls(metrics, record.states, record.waiting) as returned,
        step_attributes.restored(module) as changes,
        replaced(module, **_noting(module, metrics, record.logs, returned)),
    ):
        yield record
    record.changes = changes
    for name, metric in metrics.items():
        if metric._forward_cache is not caches[name] and not record.states.get(name):
            record.caches[name] = map_tensors(Tensor.detach, metric._forward_cache)


@contextmanager
def discarding(module: pl.LightningModule) -> Iterator[None]:
    """Surround a step on values that mean nothing: nothing is logged, metrics are not updated and return NaN.

    Attributes (see `step_attributes`) are given back as they were.
    """
    nothing: dict[str, Callable[..., None]] = {name: lambda *args, **kwargs: None for name in ("log", "log_dict")}
    with step_metrics.no_metrics(module), step_attributes.restored(module), replaced(module, **nothing):
        yield


def _noting(
    module: pl.LightningModule,
    metrics: Mapping[str, Metric],
    logs: list[Logged],
    returned: Mapping[int, tuple[Any, Result]],
) -> dict[str, Callable[..., None]]:
    """Stand-ins for `log` and `log_dict` that take what those of the module take, overridden by the user or not."""
    names = {id(metric): name for name, metric in metrics.items()}
    of_log, of_log_dict = inspect.signature(module.log), inspect.signature(module.log_dict)

    def log(*args: Any, **kwargs: Any) -> None:
        keywords = _arguments(of_log, args, kwargs)
        name, value = keywords.pop("name"), keywords.pop("value")
        result = returned[id(value)][1] if id(value) in returned else None
        logs.append(Logged(name, _loggable(name, value, names), _repeatable(name, keywords), result))

    def log_dict(*args: Any, **kwargs: Any) -> None:
        keywords = _arguments(of_log_dict, args, kwargs)
        dictionary = keywords.pop("dictionary")
        # As `log_dict` does: with prefixes, and without copying the states of compute groups.
        is_collection = isinstance(dictionary, MetricCollection)
        options = {"keep_base": False, "copy_state": False} if is_collection else {}
        for name, value in dictionary.items(**options):
            log(name=name, value=value, **keywords)

    return {"log": log, "log_dict": log_dict}


def _arguments(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    given = dict(bound.arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given.update(given.pop(parameter.name, {}))
    return given


def _loggable(name: str, value: Any, names: Mapping[int, str]) -> Any:
    if isinstance(value, Metric):
        if id(value) not in names:
            raise ParallelConfigError(
                Problem(
                    f"the {type(value).__name__} that is logged as {name!r} is no submodule of the module, so that "
                    "other stages cannot find theirs",
                    "make it an attribute of the module: self.metric = ...",
                )
            )
        return MetricNamed(names[id(value)])
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, numbers.Number):
        return value
    raise ParallelConfigError(
        Problem(f"a {type(value).__name__} is logged as {name!r}", "log numbers, tensors of one element or metrics")
    )


def _repeatable(name: str, keywords: dict[str, Any]) -> dict[str, Any]:
    if keywords.get("sync_dist_group") is not None:
        raise ParallelConfigError(
            Problem(
                f"{name!r} is logged with sync_dist_group, a group that other stages do not have",
                "leave it out: sync_dist=True reduces over the data ranks of each stage",
            )
        )
    if "reduce_fx" in keywords:
        reduction = keywords["reduce_fx"]
        reduction = reduction.lower() if isinstance(reduction, str) else reduction
        if reduction not in _REDUCTIONS:
            raise ParallelConfigError(
                Problem(
                    f"{name!r} is logged with reduce_fx={reduction!r}, where only mean, sum, max and min are possible",
                    "log a torchmetrics.Metric for another reduction",
                )
            )
        keywords["reduce_fx"] = _REDUCTIONS[reduction]
    return keywords


def merge_records(
    module: pl.LightningModule, records: Sequence[StepRecord], weights: Sequence[float], sizes: Sequence[int]
) -> MergedStep:
    """Make what the steps on micro-batches did into what one step on the batch would have done.

    - A logged value becomes the sum with the weights, as the loss does, or the sum, maximum or minimum that its
      `reduce_fx` says. What a metric has returned becomes what it returns for the whole batch. A value that only some
      micro-batches have logged is weighted over those.
    - Where losses are sums, with weights that do not sum to 1, a logged value that equals the `loss` of its record is
      summed, and others, and attributes, are weighted by the numbers of samples.
    - A logged `batch_size` is summed. Without it Lightning finds that of the batch itself.
    - A metric object is logged once.
    - For attributes see `step_attributes.merge_changes`.

    Args:
        module: The module whose steps they are.
        records: From `recording`, in the order of the micro-batches.
        weights: The weight of each micro-batch, from `loss_weights.combine`.
        sizes: The number of samples of each micro-batch.

    Raises:
        ParallelConfigError: If a name is logged with different arguments, or the changes cannot be made into one.
    """
    metrics = named_metrics(module)
    are_sums = abs(sum(weights) - 1) > 1e-6
    by_size = [size / sum(sizes) for size in sizes]
    for name, states in records[-1].states.items():
        waiting = [record.waiting.get(name, []) for record in records]
        losses = [record.loss for record in records]
        shares = by_size if are_sums else weights
        step_metrics.update_with_scalars(metrics[name], states, waiting, losses, weights, shares)
    for name in records[-1].grouping:
        step_metrics.form_groups(named_collections(module)[name])
    values = {
        name: [step_metrics.value_of_batch(metrics[name], state) for state in states]
        for name, states in records[-1].states.items()
    }
    caches = {name: results[-1] for name, results in values.items() if results}
    for name in records[-1].caches:
        called = [(r.caches[name], weight) for r, weight in zip(records, weights, strict=True) if name in r.caches]
        caches[name] = merge([cache for cache, _ in called], [weight for _, weight in called], f"a value of {name}")
    if are_sums:
        weights = by_size
    entries: dict[tuple[str, int], list[tuple[Logged, float]]] = {}
    for record, weight in zip(records, weights, strict=True):
        times: dict[str, int] = {}
        for logged in record.logs:
            key = logged.name, times.get(logged.name, 0)
            times[logged.name] = key[1] + 1
            if are_sums and _is_loss(logged, record.loss):
                logged = logged._replace(is_summed=True)
            entries.setdefault(key, []).append((logged, weight))
    logs = [_merge_log(found, values, len(found) < len(records)) for found in entries.values()]
    changes = step_attributes.merge_changes([record.changes for record in records], weights, sizes)
    return MergedStep(logs, caches, changes)


def _is_loss(logged: Logged, loss: Any) -> bool:
    value = logged.value
    return loss is not None and not isinstance(value, MetricNamed) and float(value) == float(loss)


def _merge_log(found: Sequence[tuple[Logged, float]], values: Mapping[str, list[Any]], partial: bool) -> Logged:
    first = found[0][0]
    keywords = dict(first.keywords)
    for logged, _ in found:
        if {**logged.keywords, "batch_size": None} != {**keywords, "batch_size": None}:
            raise ParallelConfigError(
                Problem(
                    f"{first.name!r} is logged with {keywords} in one micro-batch and {logged.keywords} in another",
                    "log it with the same arguments in each step",
                )
            )
    if keywords.get("batch_size") is not None:
        keywords["batch_size"] = sum(logged.keywords["batch_size"] for logged, _ in found)
    if isinstance(first.value, MetricNamed):
        return Logged(first.name, first.value, keywords)
    if first.result is not None and not partial and all(logged.result == first.result for logged, _ in found):
        value = values[first.result.metric][first.result.call]
        return Logged(first.name, value if first.result.key is None else value[first.result.key], keywords)
    weights = [weight for _, weight in found]
    if partial:
        have = sum(weights)
        weights = [weight / have if have else 1 / len(weights) for weight in weights]
    reduction = "sum" if all(logged.is_summed for logged, _ in found) else keywords.get("reduce_fx", "mean")
    return Logged(first.name, _reduced([logged.value for logged, _ in found], weights, reduction), keywords)


def _reduced(values: Sequence[Any], weights: Sequence[float], reduction: str) -> Any:
    if not any(isinstance(value, Tensor) for value in values):
        values = [float(value) for value in values]
        if reduction == "mean":
            return merge(values, weights)
        return sum(values) if reduction == "sum" else max(values) if reduction == "max" else min(values)
    like = next(value for value in values if isinstance(value, Tensor))
    # As `self.log` does: at least the precision of the default dtype.
    dtype = torch.promote_types(like.dtype, torch.get_default_dtype())
    values = [torch.as_tensor(value, device=like.device).to(dtype) for value in values]
    if reduction == "mean":
        return weighted(values, weights)
    stacked = torch.stack(values)
    return stacked.sum(0) if reduction == "sum" else stacked.amax(0) if reduction == "max" else stacked.amin(0)


def emit(module: pl.LightningModule, merged: MergedStep) -> None:
    """Do what one step would have done besides returning: log, give metrics their values, change attributes.

    To be called on all stages, where the Trainer expects the step to log. Tensors are moved to the module's device.

    Args:
        module: The module whose steps were recorded.
        merged: From `merge_records` on the last stage.
    """
    metrics = named_metrics(module)
    step_attributes.apply_changes(module, merged.changes, module.device)
    for name, value in merged.caches.items():
        metrics[name]._forward_cache = moved(value, metrics[name].device)
    for logged in merged.logs:
        value = logged.value
        if isinstance(value, MetricNamed):
            value = metrics[value.name]
        elif isinstance(value, Tensor):
            value = value.to(module.device)
        module.log(name=logged.name, value=value, **logged.keywords)
