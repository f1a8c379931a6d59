"""Batches cut into micro-batches, and what the steps on them return made into what one step on the batch returns.

Containers are dicts and other mappings (Hugging Face's `BatchEncoding` and `ModelOutput`), lists, tuples, named tuples,
dataclasses and plain objects that hold tensors or containers. They keep their class; what is no container is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
import numbers
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_par.errors import ParallelConfigError, Problem


def batch_size(batch: Any) -> int:
    """Return the number of samples in a batch.

    Each tensor and array says its first size, and the batch size is what most of them say. Those inside a list of
    mappings do not count, as the list may have a mapping for each sample. Without tensors beside it the lengths of
    lists of strings or numbers count, and without those the tensors inside.

    Args:
        batch: What a dataloader gives, of any structure.

    Raises:
        ParallelConfigError: If no entry has rows, if several sizes are equally frequent, or if the first entry has
            another size than most: then the entries and their shapes are named.
    """
    return _size_and_records(batch)[0]


def _size_and_records(batch: Any) -> tuple[int, bool]:
    """The batch size, and whether lists of mappings may have one for each sample."""
    beside = list(_entries(batch, records=True))
    inside = list(_entries(batch, records=False))
    for entries, is_voter in ((beside, _is_rows), (beside, _is_list_of_samples), (inside, _is_rows)):
        voters = {name: entry for name, entry in entries if is_voter(entry)}
        if voters:
            return _most_frequent(voters), entries is beside
    raise ParallelConfigError(
        Problem(
            f"a batch of type {type(batch).__name__} has no tensor with rows, so there is nothing to cut into "
            "micro-batches",
            "pp_microbatches=1",
        )
    )


def _most_frequent(voters: Mapping[str, Any]) -> int:
    lengths = [len(entry) for entry in voters.values()]
    ranking = Counter(lengths).most_common(2)
    is_tie = len(ranking) == 2 and ranking[0][1] == ranking[1][1]
    if is_tie or ranking[0][0] != lengths[0]:
        shapes = ", ".join(f"{name} {_shape(entry)}" for name, entry in voters.items())
        raise ParallelConfigError(
            Problem(
                f"which size of this batch is the batch size is ambiguous: {shapes}",
                "repeat what is not per sample to as many rows as there are samples, or keep it in the module",
            )
        )
    return lengths[0]


def sizes(size: int, parts: int) -> list[int]:
    """Return the sizes of micro-batches, larger ones first, as `torch.tensor_split` does: ``sizes(7, 3) == [3, 2, 2]``.

    Raises:
        ParallelConfigError: If there are fewer samples than micro-batches.
    """
    if size < parts:
        raise ParallelConfigError(
            Problem(
                f"a batch of {size} samples cannot be cut into {parts} micro-batches",
                f"pp_microbatches={size}, or a batch size of at least {parts} (drop_last=True if it is the last batch)",
            )
        )
    small, larger = divmod(size, parts)
    return [small + 1] * larger + [small] * (parts - larger)


def split(batch: Any, parts: int) -> list[Any]:
    """Cut a batch into micro-batches by rows.

    Tensors, arrays and lists of strings, numbers or mappings that are as long as there are samples are cut: tensors
    into views. Everything else goes into each micro-batch as it is.

    Args:
        batch: What a dataloader gives, of any structure.
        parts: Number of micro-batches, at most the number of samples.

    Returns:
        The micro-batches, of the structure of the batch.

    Raises:
        ParallelConfigError: If the batch size is ambiguous or less than `parts`, or for a `PackedSequence`, whose rows
            are no samples.
    """
    size, records = _size_and_records(batch)
    ends = np.cumsum([0, *sizes(size, parts)]).tolist()

    def part(start: int, end: int) -> Any:
        def cut(entry: Any) -> Any:
            if not (_is_rows(entry) or _is_values(entry) or _is_records(entry)):
                return entry
            if len(entry) == size:
                return entry.narrow(0, start, end - start) if isinstance(entry, Tensor) else entry[start:end]
            return _map_entries(cut, entry, records=False) if _is_records(entry) else entry

        return _map_entries(cut, batch, records=records)

    return [part(start, end) for start, end in zip(ends, ends[1:], strict=False)]


def merge(outputs: Sequence[Any], weights: Sequence[float], name: str = "output") -> Any:
    """Make what the steps on micro-batches returned into what one step on the batch would have returned.

    - Tensors and arrays with dimensions are concatenated along the first; lists of strings, of numbers or of mappings
      with the same keys too, and other lists where their lengths differ.
    - Floating point numbers and tensors without dimensions become their sum with the weights, as the loss does. A value
      with weight 0 is left out: it may be NaN.
    - Integer tensors without dimensions are counts and are added up. Python integers are kept where all are equal (the
      index of the batch), and added up where not.
    - Everything else has to be equal, and is kept.

    Args:
        outputs: One for each micro-batch, in order.
        weights: One for each micro-batch, from `loss_weights.combine`.
        name: What the outputs are called in errors.

    Raises:
        ParallelConfigError: If the structures, the shapes beyond the first dimension, or values that have to be equal
            differ: the difference is named.
    """
    first = outputs[0]
    kind = "number" if _is_number(first) else type(first)
    for index, other in enumerate(outputs):
        if ("number" if _is_number(other) else type(other)) is not kind:
            raise _difference(name, f"a {type(first).__name__} in the first", f"a {type(other).__name__}", index)
    if isinstance(first, Tensor):
        return _merge_tensors(outputs, weights, name)
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(outputs)
    if _is_number(first):
        return _merge_numbers(outputs, weights)
    if isinstance(first, list) and (
        all(_is_values(one) or _is_records(one) for one in outputs) or len({len(one) for one in outputs}) > 1
    ):
        return type(first)(item for one in outputs for item in one)
    children = _children(first)
    if children is None:
        for index, other in enumerate(outputs):
            if not _equal(first, other):
                raise _difference(name, f"{first!r} in the first", f"{other!r}", index)
        return first
    of_all = [dict(_children(one) or []) for one in outputs]
    for index, others in enumerate(of_all):
        if others.keys() != of_all[0].keys():
            raise _difference(name, f"made of {', '.join(of_all[0])} in the first", ", ".join(others), index)
    return _rebuilt(
        first, {key: merge([others[key] for others in of_all], weights, f"{name}{key}") for key in of_all[0]}
    )


def weighted(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the sum of numbers or tensors times their weights, without those of weight 0, which may be NaN.

    Where all weights are 0 it is the sum of the values times 0.
    """
    counted = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    total: Any = sum(value * weight for value, weight in counted or zip(values, weights, strict=True))
    return total


def _difference(name: str, first: str, other: str, index: int) -> ParallelConfigError:
    return ParallelConfigError(
        Problem(
            f"the steps on micro-batches cannot be made into one: {name} is {first} micro-batch and {other} in "
            f"micro-batch {index}",
            "return the same structure from each step, or pp_microbatches=1",
        )
    )


def _merge_tensors(tensors: Sequence[Tensor], weights: Sequence[float], name: str) -> Tensor:
    first = tensors[0]
    for index, other in enumerate(tensors):
        if other.shape[1:] != first.shape[1:] or other.dim() != first.dim():
            raise _difference(name, f"of shape {tuple(first.shape)} in the first", f"{tuple(other.shape)}", index)
    if first.dim():
        return torch.cat(list(tensors))
    if first.is_floating_point() or first.is_complex():
        total: Tensor = weighted(tensors, weights)
        return total
    stacked = torch.stack(list(tensors))
    if first.dtype is not torch.bool:
        return stacked.sum(dtype=first.dtype)
    for index, other in enumerate(tensors):
        if not torch.equal(first, other):
            raise _difference(name, f"{bool(first)} in the first", f"{bool(other)}", index)
    return first


def _merge_numbers(values: Sequence[Any], weights: Sequence[float]) -> Any:
    # Exactly, where rounding of the weights would change it.
    if all(value == values[0] for value in values) and abs(sum(weights) - 1) < 1e-6:
        return values[0]
    if all(isinstance(value, numbers.Integral) for value in values):
        return values[0] if all(value == values[0] for value in values) else sum(values)
    return weighted(values, weights)


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    equal = one == other
    return equal is True or isinstance(equal, np.bool_) and bool(equal)


def _is_number(entry: Any) -> bool:
    return isinstance(entry, numbers.Number) and not isinstance(entry, bool)


def _is_values(entry: Any) -> bool:
    """Whether a list or tuple may have one value for each sample."""
    if not isinstance(entry, (list, tuple)) or hasattr(entry, "_fields") or not entry:
        return False
    if all(isinstance(item, (str, bytes)) for item in entry):
        return True
    # A tuple of numbers is rather a size or a pair of results.
    return isinstance(entry, list) and all(isinstance(item, (str, bytes, numbers.Number)) for item in entry)


def _is_records(entry: Any) -> bool:
    """Whether a list may have one mapping for each sample."""
    if not isinstance(entry, list) or not entry or not isinstance(entry[0], Mapping):
        return False
    return all(isinstance(item, Mapping) and item.keys() == entry[0].keys() for item in entry)


def _is_rows(entry: Any) -> bool:
    return isinstance(entry, (Tensor, np.ndarray)) and entry.ndim > 0


def _is_list_of_samples(entry: Any) -> bool:
    if _is_values(entry):
        return True
    return _is_records(entry) and not any(_is_rows(leaf) for _, leaf in _entries(entry, records=False))


def _shape(entry: Any) -> str:
    return f"{len(entry)} items" if isinstance(entry, (list, tuple)) else str(tuple(entry.shape))


def _children(node: Any) -> list[tuple[str, Any]] | None:
    """The parts of a container and how to write that they are read, or None for a leaf."""
    if isinstance(node, PackedSequence):
        raise ParallelConfigError(
            Problem(
                "the rows of a PackedSequence are positions of all samples in turn: it cannot be cut or joined",
                "pad the sequences in the batch, and pack them in the step",
            )
        )
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", value) for key, value in node.items()]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return [(f".{name}", getattr(node, name)) for name in node._fields]
    if isinstance(node, (list, tuple)):
        return [(f"[{index}]", value) for index, value in enumerate(node)]
    if isinstance(node, type):
        return None
    if dataclasses.is_dataclass(node):
        return [(f".{field.name}", getattr(node, field.name)) for field in dataclasses.fields(node)]
    if hasattr(node, "__dict__") and not isinstance(node, (Tensor, nn.Module)) and not callable(node):
        held = [(f".{name}", value) for name, value in vars(node).items()]
        return held if any(_holds_rows(value) for _, value in held) else None
    return None


def _holds_rows(entry: Any) -> bool:
    """Whether an attribute makes an object a container: not one that leads to other objects, which may be anything."""
    if isinstance(entry, (Tensor, np.ndarray)) or _is_values(entry):
        return True
    values: Any = entry.values() if isinstance(entry, Mapping) else entry
    return isinstance(entry, (Mapping, list, tuple)) and any(_holds_rows(value) for value in values)


def _rebuilt(node: Any, children: Mapping[str, Any]) -> Any:
    """A container like `node` with other parts, given as `_children` lists them."""
    values = list(children.values())
    if isinstance(node, Mapping):
        items = dict(zip(node, values, strict=True))
        if not hasattr(node, "__setitem__"):
            return type(node)(items)  # type: ignore[call-arg]
        new: Any = copy.copy(node)
        for key, value in items.items():
            new[key] = value
        return new
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*values)
    if isinstance(node, (list, tuple)):
        return type(node)(values)
    new = copy.copy(node)
    for name, value in children.items():
        object.__setattr__(new, name[1:], value)
    return new


def _entries(node: Any, name: str = "batch", *, records: bool) -> Iterator[tuple[str, Any]]:
    """The leaves of a batch with their names; a list of values is one, and with `records` a list of mappings."""
    children = _children_of_batch(node, records)
    if children is None:
        yield name, node
        return
    for key, value in children:
        yield from _entries(value, name + key, records=records)


def _map_entries(function: Callable[[Any], Any], node: Any, *, records: bool) -> Any:
    """A batch with a function applied to what `_entries` lists."""
    children = _children_of_batch(node, records)
    if children is None:
        return function(node)
    return _rebuilt(node, {key: _map_entries(function, value, records=records) for key, value in children})


def _children_of_batch(node: Any, records: bool) -> list[tuple[str, Any]] | None:
    return None if _is_values(node) or (records and _is_records(node)) else _children(node)
