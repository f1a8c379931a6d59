"""torchmetrics objects of a module whose steps run on micro-batches, and to their end on the last stage alone.

A metric that returns values for a batch (`metric(...)`, its `forward`) computes them from states that it starts anew.
Here such states are kept for the whole batch beside those of the epoch, so that the value of a batch is exact. Only
states that are means of updates (`dist_reduce_fx="mean"`) weigh micro-batches equally, and `update_count` counts them.

A metric that is given one number, such as the mean loss of its samples, takes it for the value of an update: it is
given that of the batch once, after the last micro-batch. Metrics inside wrappers are given those of micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, SumMetric

from lightning_par.parallel._compat import flatten, leaves, map_tensors, unflatten
from lightning_par.parallel.pipeline.microbatches import merge

State = dict[str, Any]

# What belongs to the states of a `Metric` without being one (torchmetrics >= 0.8).
_BESIDE_STATES = ("_update_count", "_computed", "_forward_cache")
_in_step: ContextVar[bool] = ContextVar("in_step", default=False)


class Scalars(NamedTuple):
    """A call of a metric with single numbers among its arguments, which waits for the other micro-batches.

    Attributes:
        args: Its positional arguments, detached.
        kwargs: Its named arguments, detached.
        call: Which of the calls that return values of the batch it is; None for `update`.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: int | None


class Result(NamedTuple):
    """What a metric returned when it was called: which one, at which of its calls in the step, and a key of a dict."""

    metric: str
    call: int
    key: str | None


def named_metrics(module: nn.Module) -> dict[str, Metric]:
    """List the metrics of a module by the names that `get_submodule` takes; those of collections and wrappers too."""
    return {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}


def named_collections(module: nn.Module) -> dict[str, MetricCollection]:
    """List the collections of metrics of a module by the names that `get_submodule` takes."""
    return {name: one for name, one in module.named_modules() if isinstance(one, MetricCollection)}


@contextmanager
def in_step() -> Iterator[None]:
    """Let metrics compute without the other stages (see `share_metrics`), which do not come to the same call."""
    token = _in_step.set(True)
    try:
        yield
    finally:
        _in_step.reset(token)


@contextmanager
def following_calls(
    metrics: Mapping[str, Metric], states: dict[str, list[State]], waiting: dict[str, list[Scalars]]
) -> Iterator[dict[int, tuple[Any, Result]]]:
    """Gather the states of the whole batch while the step runs on a micro-batch.

    Costs one more `update` for each call. Metrics with a `forward` of their own (wrappers) are left alone.

    Args:
        metrics: The metrics by name.
        states: For each metric and each of its calls in a step, the states of the batch up to now; updated.
        waiting: For each metric its calls with single numbers; those of the micro-batch are added.

    Yields:
        What was returned, with the metric that did, by the `id` of the tensor.
    """
    returned: dict[int, tuple[Any, Result]] = {}
    with ExitStack() as stack:
        for name, metric in metrics.items():
            has_own_forward = type(metric).forward is not Metric.forward
            update = metric.update
            is_inside = any(name.startswith(f"{other}.") for other in metrics)
            if not has_own_forward and not is_inside:
                stand_in = _waiting(metric, waiting.setdefault(name, []))
                stack.enter_context(replaced(metric, update=stand_in))
            if not has_own_forward:
                calls = states.setdefault(name, []), waiting.get(name)
                stack.enter_context(replaced(metric, forward=_following(name, metric, update, *calls, returned)))
        yield returned


def _waiting(metric: Metric, waiting: list[Scalars]) -> Callable[..., None]:
    original = metric.update

    @functools.wraps(original)
    def update(*args: Any, **kwargs: Any) -> None:
        if _has_numbers((args, kwargs)):
            waiting.append(Scalars(map_tensors(_kept, args), map_tensors(_kept, kwargs), None))
        else:
            original(*args, **kwargs)

    return update


def _following(
    name: str,
    metric: Metric,
    update: Callable[..., Any],
    states: list[State],
    waiting: list[Scalars] | None,
    returned: dict[int, tuple[Any, Result]],
) -> Callable[..., Any]:
    original = metric.forward
    calls = 0

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if calls == len(states):
            states.append(_empty_state(metric))
        waits = waiting is not None and _has_numbers((args, kwargs))
        with replaced(metric, update=update), _holding(metric, _empty_state(metric)) if waits else nullcontext():
            value = original(*args, **kwargs)
        if waits:
            assert waiting is not None
            waiting.append(Scalars(map_tensors(_kept, args), map_tensors(_kept, kwargs), calls))
        else:
            with _holding(metric, states[calls]):
                update(*args, **kwargs)
        for key, item in value.items() if isinstance(value, dict) else [(None, value)]:
            returned[id(item)] = item, Result(name, calls, key)
        calls += 1
        return value

    return forward


def _has_numbers(arguments: Any) -> bool:
    """Whether a floating point number without dimensions is among arguments."""
    return any(_is_number(leaf) for leaf in leaves(arguments))


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, float) or (isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.is_floating_point())


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def update_with_scalars(
    metric: Metric,
    states: Sequence[State],
    waiting: Sequence[Sequence[Scalars]],
    losses: Sequence[Any],
    loss_weights: Sequence[float],
    weights: Sequence[float],
) -> None:
    """Give a metric the numbers of a batch that its micro-batches have left waiting.

    Numbers are combined with the weights, and those of a `SumMetric` are added up; but the loss as losses are. Counts
    are added up.

    Args:
        metric: The metric.
        states: Those of the batch, by call.
        waiting: The calls in each micro-batch.
        losses: What the step returned on them, or None.
        loss_weights: The weights of losses.
        weights: The weights of other numbers, which sum to 1.

    Raises:
        ParallelConfigError: If the arguments cannot be made into one.
    """
    for number in range(max(map(len, waiting), default=0)):
        having = [part for part, calls in enumerate(waiting) if len(calls) > number]
        calls = [waiting[part][number] for part in having]
        if all(_is_given(losses[part], call) for part, call in zip(having, calls, strict=True)):
            shares = [loss_weights[part] for part in having]
        elif isinstance(metric, SumMetric):
            shares = [1.0] * len(having)
        else:
            have = sum(weights[part] for part in having)
            shares = [weights[part] / have if have else 1 / len(having) for part in having]
        arguments = [_countable((call.args, call.kwargs)) for call in calls]
        args, kwargs = merge(arguments, shares, "an argument of a metric")
        metric.update(*args, **kwargs)
        if calls[0].call is not None:
            with _holding(metric, states[calls[0].call]):
                metric.update(*args, **kwargs)


def _is_given(loss: Any, call: Scalars) -> bool:
    """Whether the loss is an argument of a call."""
    numbers = [float(leaf) for leaf in leaves((call.args, call.kwargs)) if _is_number(leaf)]
    # A loss of no target is NaN.
    return loss is not None and any(n == float(loss) or (n != n and loss != loss) for n in numbers)


def _countable(arguments: Any) -> Any:
    """Whole numbers as tensors, which `merge` takes for counts."""
    flat, spec = flatten(arguments)
    return unflatten([torch.tensor(leaf) if type(leaf) is int else leaf for leaf in flat], spec)


def value_of_batch(metric: Metric, state: State) -> Any:
    """Compute what the metric returns for a batch from the states of the batch, detached.

    It is synchronised over data ranks as `metric(...)` is: only with `dist_sync_on_step`.
    """
    to_sync = metric._to_sync
    with _holding(metric, state), in_step(), torch.no_grad():
        metric._to_sync = metric.dist_sync_on_step
        try:
            return map_tensors(Tensor.detach, metric.compute())
        finally:
            metric._to_sync = to_sync


def share_metrics(module: nn.Module, share: Callable[[Any], Any]) -> Callable[[], None]:
    """Let each metric take its states from the last stage before it computes, except inside a step.

    Then all stages compute the same value, after merging the states over their data ranks as torchmetrics does: so all
    ranks must call `compute`, as Lightning does at the end of an epoch for what was logged. Metrics that are made later
    are not shared.

    Args:
        module: Holds the metrics as submodules, in the same order on all ranks.
        share: Given an object, returns the one that the last stage has given: a collective over the pipeline's ranks.

    Returns:
        A function that undoes it.
    """
    originals = [(metric, metric.compute) for metric in named_metrics(module).values()]
    for metric, _ in originals:
        metric.compute = _sharing(metric, share)  # type: ignore[method-assign]

    def undo() -> None:
        for metric, compute in originals:
            metric.compute = compute  # type: ignore[method-assign]

    return undo


def _sharing(metric: Metric, share: Callable[[Any], Any]) -> Callable[..., Any]:
    original = metric.compute

    @functools.wraps(original)
    def compute(*args: Any, **kwargs: Any) -> Any:
        if not _in_step.get():
            # In lists of its own, as a metric empties its lists in place.
            vars(metric).update(moved(share(_state(metric)), metric.device))
            if metric.compute_on_cpu:
                metric._move_list_states_to_cpu()
        return original(*args, **kwargs)

    return compute


def moved(data: Any, device: torch.device) -> Any:
    """Move the tensors in nested containers to a device."""
    return map_tensors(lambda tensor: tensor.to(device), data)


@contextmanager
def deferred_groups(collections: Mapping[str, MetricCollection], asked: set[str]) -> Iterator[None]:
    """Keep collections from finding metrics that share their states until they have seen a whole batch.

    They take those for the same whose states are equal after the first update: on a few samples that may be chance
    (`MetricCollection._merge_compute_groups` and `_groups_checked`, torchmetrics >= 0.11).

    Args:
        collections: The collections by name.
        asked: The names of those that would have formed groups are added; see `form_groups`.
    """
    with ExitStack() as stack:
        for name, collection in collections.items():
            if not collection._groups_checked:
                stand_in = functools.partial(asked.add, name)
                stack.enter_context(replaced(collection, _merge_compute_groups=stand_in))
        try:
            yield
        finally:
            for name in asked:
                collections[name]._groups_checked = False


def form_groups(collection: MetricCollection) -> None:
    """Let a collection find the metrics that share their states, as its first `update` does."""
    collection._merge_compute_groups()
    collection._compute_groups_create_state_ref()
    collection._groups_checked = True


@contextmanager
def no_metrics(module: nn.Module) -> Iterator[None]:
    """Let metrics do nothing: what they return is NaN."""
    with ExitStack() as stack:
        for metric in named_metrics(module).values():
            nan = functools.partial(_nan, metric.device)
            stack.enter_context(replaced(metric, forward=nan, compute=nan, update=_nothing))
        for collection in named_collections(module).values():
            nans = functools.partial(_nans, collection)
            stack.enter_context(replaced(collection, forward=nans, compute=nans, update=_nothing))
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for what has no effect and returns nothing."""


def _nans(collection: MetricCollection, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    metrics = collection.items(keep_base=False, copy_state=False)
    return {name: _nan(metric.device) for name, metric in metrics}


def _nan(device: torch.device, *args: Any, **kwargs: Any) -> Tensor:
    return torch.tensor(torch.nan, device=device)


@contextmanager
def replaced(owner: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    """Replace methods of one instance for a while, with what may be there already kept."""
    attributes = vars(owner)
    before = {name: attributes[name] for name in functions if name in attributes}
    attributes.update(functions)
    try:
        yield
    finally:
        for name in functions:
            attributes.pop(name, None)
        attributes.update(before)


def _state(metric: Metric) -> State:
    return {name: getattr(metric, name) for name in (*metric._defaults, *_BESIDE_STATES)}


def _empty_state(metric: Metric) -> State:
    state: State = dict.fromkeys(_BESIDE_STATES) | {"_update_count": 0}
    for name, default in metric._defaults.items():
        now = getattr(metric, name)
        device = now.device if isinstance(now, Tensor) else metric.device
        state[name] = default.detach().clone().to(device) if isinstance(default, Tensor) else []
    return state


@contextmanager
def _holding(metric: Metric, state: State) -> Iterator[None]:
    """Let a metric hold other states for a while, which are updated."""
    before = _state(metric)
    vars(metric).update(state)
    try:
        yield
    finally:
        state.update(_state(metric))
        # The same lists as before, which metrics of one compute group share.
        vars(metric).update(before)
