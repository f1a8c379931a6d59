"""Checkpoints as text for people, and as JSON for programs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from lightning_par.checkpoint.describe import Description, ListedCheckpoint, TensorFacts
from lightning_par.checkpoint.manifest import Manifest
from lightning_par.parallel.accounting import human

_MORE = {"none": "the manifest alone", "size": "sizes; --verify checksum reads the files", "checksum": "checksums"}
_Index = tuple[int, ...]


def description_data(one: Description) -> dict[str, Any]:
    """Everything that a description says, for `json.dumps`, each tensor for itself."""
    content = asdict(one)
    del content["manifest"]
    valid = {"valid": not one.problems, "parameters": one.parameters}
    return content | valid | _manifest_data(one.manifest, with_files=True)


def list_data(root: str, found: Sequence[ListedCheckpoint]) -> dict[str, Any]:
    """A list of checkpoints, for `json.dumps`."""
    checkpoints = [
        {"path": one.path, "valid": not one.problems, "problems": list(one.problems), "newest": one.newest}
        | _manifest_data(one.manifest, with_files=False)
        for one in found
    ]
    return {"path": root, "checkpoints": checkpoints}


def description_text(one: Description) -> str:
    """A page about a checkpoint; blocks that repeat share a line."""
    lines = [f"{one.path}: {'not valid' if one.problems else f'valid ({_MORE[one.verified]})'}"]
    lines += [f"  {problem}" for problem in one.problems]
    lines += [f"  {note}" for note in one.notes]
    manifest = one.manifest
    if manifest is not None:
        step = "step unknown" if manifest.step is None else f"step {manifest.step}"
        epoch = "" if one.epoch is None else f", epoch {one.epoch}"
        lines += [
            f"  {step}{epoch}, saved {_when(manifest)} by {_ranks(manifest)}",
            f"  {len(manifest.files)} files, {human(manifest.bytes)}",
        ]
    if one.model:
        lines += ["", *_table(_folded(one.model)), "", f"model: {_total(one.model)}, {one.parameters:,} values"]
    for i, state in enumerate(one.optimizers):
        lines.append(f"optimizer {i}: {_total(state)}{_by_key(state)}")
    if one.beside:
        lines.append(f"beside the model: {_total(one.beside)}")
    return "\n".join(lines) + "\n"


def list_text(root: str, found: Sequence[ListedCheckpoint]) -> str:
    """A line for each checkpoint, and below it what is wrong with it."""
    rows = [("checkpoint", "step", "saved", "size", "")]
    for one in found:
        manifest = one.manifest
        step = "" if manifest is None or manifest.step is None else str(manifest.step)
        when, size = ("", "") if manifest is None else (_when(manifest), human(manifest.bytes))
        state = "valid, the newest" if one.newest else "not valid" if one.problems else "valid"
        rows.append((os.path.basename(one.path), step, when, size, state))
    head, *lines = _aligned(rows, right=(1, 3))
    text = [root, f"  {head}"]
    for line, one in zip(lines, found, strict=True):
        text += [f"  {line}", *(f"    {problem}" for problem in one.problems)]
    return "\n".join(text) + "\n"


def fold(tensors: Iterable[TensorFacts]) -> list[tuple[str, list[TensorFacts]]]:
    """Put tensors together that differ in the numbers in their names alone.

    Returns:
        The names, such as ``layers.0-31.mlp.weight``, each with the tensors it stands for, in the order of the first.
    """
    groups: dict[Any, dict[_Index, TensorFacts]] = {}
    for one in tensors:
        parts = one.name.split(".")
        index = tuple(int(part) for part in parts if part.isdecimal())
        pattern = tuple("*" if part.isdecimal() else part for part in parts)
        alike = (pattern, one.shape, one.dtype, one.chunks, one.files, one.tied_to is None)
        groups.setdefault(alike, {})[index] = one
    return [
        (_named(pattern, indices), [group[index] for index in indices])
        for (pattern, *_), group in groups.items()
        for indices in _products(list(group))
    ]


def _products(indices: list[_Index]) -> list[list[_Index]]:
    """Divide tuples of numbers into sets that are all combinations of some numbers for each place."""
    places = [len(set(place)) for place in zip(*indices, strict=True)]
    combinations = 1
    for number in places:
        combinations *= number
    if combinations == len(indices) or not indices[0]:
        return [indices]
    # By the first place at which they differ.
    at = next(i for i, number in enumerate(places) if number > 1)
    parts: dict[int, list[_Index]] = {}
    for index in indices:
        parts.setdefault(index[at], []).append(index)
    return [product for part in parts.values() for product in _products(part)]


def _named(pattern: Sequence[str], indices: Sequence[_Index]) -> str:
    places = iter([_ranges(sorted(set(place))) for place in zip(*indices, strict=True)])
    return ".".join(next(places) if part == "*" else part for part in pattern)


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as 0-2,5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _folded(tensors: Iterable[TensorFacts]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("tensor", "count", "shape", "dtype", "chunks", "files", "size")]
    for name, group in fold(tensors):
        one = group[0]
        shape = " x ".join(map(str, one.shape)) or "scalar"
        tied = f" = {one.tied_to}" if len(group) == 1 and one.tied_to else ""
        size = human(sum(other.bytes for other in group))
        rows.append((name + tied, str(len(group)), shape, one.dtype, str(one.chunks), str(one.files), size))
    return rows


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    return _aligned(rows, right=(1, 4, 5, 6))


def _aligned(rows: Sequence[tuple[str, ...]], right: Sequence[int]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _total(tensors: Sequence[TensorFacts]) -> str:
    count = "1 tensor" if len(tensors) == 1 else f"{len(tensors)} tensors"
    return f"{count}, {human(sum(one.bytes for one in tensors))}"


def _by_key(state: Sequence[TensorFacts]) -> str:
    """The bytes of each kind of state; its name is the last part of that of the tensor."""
    kinds: dict[tuple[str, str], int] = {}
    for one in state:
        kind = one.name.rpartition(".")[2], one.dtype
        kinds[kind] = kinds.get(kind, 0) + one.bytes
    return "".join(f"; {key} {dtype} {human(size)}" for (key, dtype), size in kinds.items())


def _ranks(manifest: Manifest) -> str:
    sizes = {name.removesuffix("_size"): size for name, size in (manifest.layout or {}).items() if size != 1}
    layout = ", ".join(f"{name} {size}" for name, size in sizes.items())
    ranks = "1 rank" if manifest.world_size == 1 else f"{manifest.world_size} ranks"
    return f"{ranks} ({layout})" if layout else ranks


def _when(manifest: Manifest) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))


def _manifest_data(manifest: Manifest | None, *, with_files: bool) -> dict[str, Any]:
    if manifest is None:
        return {}
    content = asdict(manifest) | {"bytes": manifest.bytes}
    del content["files"]
    if with_files:
        content["files"] = {name: facts._asdict() for name, facts in sorted(manifest.files.items())}
    return content
