"""Writes a directory of `torch.distributed.checkpoint` with a few tensors in memory at a time."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_par.checkpoint.errors import checkpoint_error
from lightning_par.checkpoint.reading import StoredTensor
from lightning_par.checkpoint.storage import LocalStorage
from lightning_par.checkpoint.writer import ShardWriter
from lightning_par.errors import Problem

# Bytes: fewer files where all tensors are small.
_LEAST_BATCH = 1 << 22


def write_dcp(directory: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write what ``torch.distributed.checkpoint.save(state)`` would, where `state` may hold `StoredTensor`s.

    Args:
        directory: Exists, and is empty.
        state: Nested dicts and lists; other values are pickled.

    Raises:
        CheckpointError: If a tensor cannot be read or written.
    """
    writer = _BatchWriter(LocalStorage(), os.fspath(directory), 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save(_without_data(state), storage_writer=writer, planner=_ReadingPlanner(state), no_dist=True)
        except CheckpointException as e:
            # It is no `Exception`, and its message a traceback.
            causes = [Problem(f"{type(cause).__name__}: {cause}") for cause, _ in e.failures.values()]
            raise checkpoint_error(f"cannot write {directory}", causes) from e


def _without_data(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return {key: _without_data(item) for key, item in value.items()} if isinstance(value, dict) else value


class _ReadingPlanner(DefaultSavePlanner):
    """Reads a tensor when it is to be written."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__()
        self._state = state

    def lookup_object(self, index: MetadataIndex) -> Any:
        value: Any = self._state
        for key in self.mappings[index.fqn]:
            value = value[key]
        return value.read() if isinstance(value, StoredTensor) else value


class _BatchWriter(ShardWriter):
    """Writes several files, each of few bytes or no more than the largest tensor has: torch keeps a file's tensors."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for i, items in enumerate(_batches(plan.items)):
            prefix = dataclasses.replace(plan.storage_data, prefix=f"__{i}_")
            part = dataclasses.replace(plan, items=items, storage_data=prefix)
            results += super().write_data(part, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _batches(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    most = max(_LEAST_BATCH, *map(_bytes, items))
    batch: list[WriteItem] = []
    size = 0
    for item in items:
        if batch and size + _bytes(item) > most:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += _bytes(item)
    if batch:
        yield batch


def _bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
