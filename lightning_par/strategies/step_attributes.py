"""Attributes that the steps on micro-batches change: as if one step on the batch had.

Each micro-batch finds the attributes as they were before the batch. Afterwards they become what one step would have
made of them, on all ranks, as far as that can be told:

- lists that were appended to, and lists in a dict: items become one for those that each micro-batch has appended;
- numbers and tensors without dimensions, and those in a dict.

Other attributes stay as the last micro-batch left them on each stage, and so do buffers, what submodules hold and dicts
of more than 1000 items.
"""

from __future__ import annotations

import functools
import numbers
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_par.errors import ParallelConfigError, Problem
from lightning_par.parallel._compat import map_tensors, tensor_version
from lightning_par.parallel.pipeline.microbatches import merge
from lightning_par.strategies.step_metrics import moved

# Vocabularies are not looked through at each micro-batch.
_LARGEST_DICT = 1000
# The name of an attribute, and a key where it is a dict.
Path = tuple[str, *tuple[Any, ...]]


class Change(NamedTuple):
    """What was done to an attribute: items appended to a list, all its items replaced, or another value set.

    `before` is the value before, of a number or tensor.
    """

    kind: Literal["appended", "replaced", "set"]
    value: Any
    before: Any = None


class _Before(NamedTuple):
    value: Any
    content: Any
    version: int


@functools.cache
def _internal() -> frozenset[str]:
    return frozenset(vars(pl.LightningModule())) | {"log", "log_dict"}


def _followed(module: nn.Module) -> dict[Path, Any]:
    found: dict[Path, Any] = {}
    for name, value in vars(module).items():
        if name in _internal():
            continue
        items: list[tuple[Path, Any]] = [((name,), value)]
        if isinstance(value, dict):
            small = len(value) <= _LARGEST_DICT
            items = [((name, key), item) for key, item in value.items()] if small else []
        for path, item in items:
            is_scalar = isinstance(item, Tensor) and not item.dim()
            if is_scalar or isinstance(item, (list, numbers.Number)):
                found[path] = item
    return found


def _before(value: Any) -> _Before:
    if isinstance(value, Tensor):
        return _Before(value, value.detach().clone(), tensor_version(value))
    return _Before(value, list(value) if isinstance(value, list) else value, 0)


@contextmanager
def restored(module: nn.Module) -> Iterator[dict[Path, Change]]:
    """Give the attributes back as they were, and tell afterwards what was changed inside."""
    dicts = {name: value for name, value in vars(module).items() if isinstance(value, dict)}
    before = {path: _before(value) for path, value in _followed(module).items()}
    all_before = dict(vars(module))
    changes: dict[Path, Change] = {}
    try:
        yield changes
    finally:
        for path, value in _followed(module).items():
            change = _change(value, before.get(path))
            if change is not None:
                # Without the graph, which would be kept until the end of the batch.
                changes[path] = change._replace(value=map_tensors(Tensor.detach, change.value))
        for path in changes:
            name, *key = path
            if key and name in dicts:
                vars(module)[name] = dicts[name]
            if path in before:
                _put(module, path, _as_before(before[path]))
            elif key and name in dicts:
                dicts[name].pop(key[0], None)
            elif name in all_before:
                vars(module)[name] = all_before[name]
            else:
                vars(module).pop(name, None)


def _change(value: Any, before: _Before | None) -> Change | None:
    if isinstance(value, list):
        start = before.content if before is not None and isinstance(before.value, list) else []
        if len(value) >= len(start) and all(map(operator.is_, value, start)):
            return Change("appended", value[len(start) :]) if len(value) > len(start) or before is None else None
        return Change("replaced", list(value))
    if before is None:
        return Change("set", value)
    if isinstance(value, Tensor):
        same = value is before.value and tensor_version(value) == before.version
    else:
        same = type(value) is type(before.value) and value == before.value
    return None if same else Change("set", value, before.content)


def _as_before(before: _Before) -> Any:
    if isinstance(before.value, list):
        before.value[:] = before.content
        return before.value
    unchanged = not isinstance(before.value, Tensor) or tensor_version(before.value) == before.version
    return before.value if unchanged else before.content


def _put(module: nn.Module, path: Path, value: Any) -> None:
    name, *key = path
    if key:
        vars(module).setdefault(name, {})[key[0]] = value
    else:
        vars(module)[name] = value


def merge_changes(
    changes: Sequence[Mapping[Path, Change]], weights: Sequence[float], sizes: Sequence[int]
) -> dict[Path, Change]:
    """Make the changes of micro-batches into those of one step.

    - If each micro-batch has appended k items, their first items become one with `microbatches.merge`, and so on; if
      each has appended as many items as it has samples, they are all kept.
    - Floating point values become their sum with the weights, which is right for running means.
    - A counter that each micro-batch has changed alike (``n += 1``) is changed once; by numbers of samples or by
      different numbers (``n += len(x)``): by their sum. Micro-batches of one sample each do not tell these apart.
    - Where only some micro-batches have set a value, or no rule fits, it is that of the last one.

    Args:
        changes: From `restored`, for each micro-batch.
        weights: The weight of each micro-batch.
        sizes: The number of samples of each micro-batch.

    Raises:
        ParallelConfigError: If micro-batches have appended different numbers of items, or it is ambiguous whether items
            are samples.
    """
    merged: dict[Path, Change] = {}
    for path in dict.fromkeys(path for one in changes for path in one):
        found = [one[path] for one in changes if path in one]
        name = "self." + path[0] + "".join(f"[{key!r}]" for key in path[1:])
        if all(change.kind == "appended" for change in found):
            items = [one[path].value if path in one else [] for one in changes]
            merged[path] = Change("appended", _merge_items(items, weights, sizes, name))
        elif len(found) < len(changes) or len({change.kind for change in found}) > 1:
            merged[path] = found[-1]
        elif found[0].kind == "replaced":
            values = [change.value for change in found]
            same_length = len({len(value) for value in values}) == 1
            merged[path] = Change("replaced", _itemwise(values, weights, name) if same_length else values[-1])
        else:
            merged[path] = Change("set", _merge_values(found, weights, sizes))
    return merged


def _itemwise(items: Sequence[list[Any]], weights: Sequence[float], name: str) -> list[Any]:
    return [merge(of_all, weights, f"an item of {name}") for of_all in zip(*items, strict=True)]


def _merge_items(items: Sequence[list[Any]], weights: Sequence[float], sizes: Sequence[int], name: str) -> list[Any]:
    counts = [len(one) for one in items]
    equal = len(set(counts)) == 1
    may_be_samples = counts == list(sizes)
    if may_be_samples and not equal:
        return [item for one in items for item in one]
    flat = [item for one in items for item in one]
    if may_be_samples and counts[0] > 1 and all(isinstance(item, (str, int, Mapping)) for item in flat):
        return flat
    is_count = counts[0] == 1 and all(isinstance(item, int) for item in flat) and len(set(flat)) > 1
    if equal and not (may_be_samples and (counts[0] > 1 or is_count)):
        return _itemwise(items, weights, name)
    what = (
        f"the micro-batches, of {', '.join(map(str, sizes))} samples, have appended {', '.join(map(str, counts))} items"
    )
    raise ParallelConfigError(
        Problem(
            f"{what} to {name}: what one step on the batch would append cannot be told",
            "append the same number of items in each step, other than the size of a micro-batch, e.g. one tensor with "
            "a row for each sample",
        )
    )


def _merge_values(changes: Sequence[Change], weights: Sequence[float], sizes: Sequence[int]) -> Any:
    values = [change.value for change in changes]
    last, before = values[-1], changes[-1].before
    tensors = isinstance(last, Tensor)
    if tensors and any(not isinstance(value, Tensor) or value.dtype != last.dtype for value in values):
        return last
    if isinstance(last, bool) or (tensors and last.dtype is torch.bool) or len({type(value) for value in values}) > 1:
        return last
    if last.is_floating_point() or last.is_complex() if tensors else not isinstance(last, numbers.Integral):
        return merge(values, weights)
    whole = [int(value) for value in values]
    start = int(before) if isinstance(before, (numbers.Integral, Tensor)) else 0
    steps = [value - start for value in whole]
    counts_samples = steps == list(sizes) and set(steps) != {1}
    if len(set(whole)) == 1 and not counts_samples:
        return last
    total = start + sum(steps)
    return torch.full_like(last, total) if tensors else total


def apply_changes(module: nn.Module, changes: Mapping[Path, Change], device: torch.device) -> None:
    """Change the attributes of a module as `merge_changes` says; lists in place. Tensors are moved to the device."""
    now = _followed(module)
    for path, change in changes.items():
        value = moved(change.value, device)
        current = now.get(path)
        if change.kind == "set" or not isinstance(current, list):
            _put(module, path, value)
        elif change.kind == "appended":
            current.extend(value)
        else:
            current[:] = value
