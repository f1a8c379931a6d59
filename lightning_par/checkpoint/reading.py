"""Reads a checkpoint without the model: what it holds, and one tensor at a time.

The only file of convert and inspect that opens files of a checkpoint.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from lightning_par.checkpoint.candidates import candidates
from lightning_par.checkpoint.errors import CheckpointError, checkpoint_error
from lightning_par.checkpoint.manifest import (
    META,
    Manifest,
    Verify,
    data_directory,
    is_sharded_checkpoint,
    rank_file,
    read_manifest,
    read_metadata,
    verify,
)
from lightning_par.checkpoint.storage import Storage, StrPath, storage_of
from lightning_par.errors import Problem


class NoCheckpointError(CheckpointError):
    """There is nothing that looks like a checkpoint."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is not read yet.

    Attributes:
        name: In the checkpoint.
        shape: Of the whole tensor.
        dtype: Of what `read` returns.
        chunks: In how many parts it is stored.
        files: The files that have them.
        read: Reads the whole tensor into new memory.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: int
    files: tuple[str, ...]
    read: Callable[[], Tensor] = field(repr=False)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def to(self, dtype: torch.dtype) -> StoredTensor:
        """The same tensor, converted when it is read."""
        return self if dtype == self.dtype else replace(self, dtype=dtype, read=lambda: self.read().to(dtype))


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint directory that is open for reading.

    Attributes:
        path: The directory.
        manifest: What it says about itself.
        tensors: Every tensor, by its name in the checkpoint.
    """

    path: str
    manifest: Manifest
    tensors: Mapping[str, StoredTensor]
    _open: Callable[[str], IO[bytes]] = field(repr=False)

    @cached_property
    def record(self) -> dict[str, Any]:
        """The content of ``meta.pt``; a pickle, which may run code.

        Raises:
            CheckpointError: If it cannot be read, as when a class in it is not known here.
        """
        try:
            with self._open(META) as stream:
                record: dict[str, Any] = torch.load(stream, map_location="cpu", weights_only=False)
                return record
        except (ImportError, AttributeError) as e:
            problem = Problem(
                f"{META} holds objects of classes that are not found here: {e}",
                "run this where the code of the training is importable, such as its directory",
            )
            raise checkpoint_error(f"the checkpoint {self.path} cannot be read", [problem]) from e
        except Exception as e:
            raise CheckpointError(f"{META} of the checkpoint {self.path} cannot be read: {e}") from e

    def rank_state(self, rank: int) -> dict[str, Any]:
        """What a rank has stored for itself.

        Raises:
            CheckpointError: If it cannot be read.
        """
        try:
            with self._open(rank_file(rank)) as stream:
                state: dict[str, Any] = torch.load(stream, map_location="cpu", weights_only=True)
                return state
        except Exception as e:
            raise CheckpointError(f"{rank_file(rank)} of the checkpoint {self.path} cannot be read: {e}") from e

    @property
    def meta(self) -> Mapping[str, Any]:
        """What the caller of the save has stored beside the model and the optimizers."""
        meta: Mapping[str, Any] = self.record["meta"]
        return meta

    @property
    def about(self) -> Mapping[str, Any]:
        """What `about_model` said of the model; empty where it was not asked."""
        return self.record.get("about") or {}

    def under(self, prefix: str) -> dict[str, StoredTensor]:
        """The tensors whose names begin with a prefix, by what follows it."""
        return {name.removeprefix(prefix): one for name, one in self.tensors.items() if name.startswith(prefix)}


def open_checkpoint(path: StrPath, level: Verify = "none") -> StoredCheckpoint:
    """Open a checkpoint directory.

    Args:
        path: The directory.
        level: How its files are compared with the manifest first.

    Raises:
        CheckpointError: If it is not a valid one, with everything that is wrong.
    """
    problems = verify(path, level)
    if problems:
        raise checkpoint_error(f"the checkpoint {path} is not valid", map(Problem, problems))
    storage, directory = storage_of(path)
    manifest = read_manifest(path)
    data = data_directory(storage, directory, manifest)
    try:
        metadata = read_metadata(storage, data)
    except Exception as e:
        raise CheckpointError(f"the index of the tensors of the checkpoint {path} cannot be read: {e}") from e
    tensors = {
        name: _stored_tensor(storage, data, metadata, name, item)
        for name, item in metadata.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }
    return StoredCheckpoint(directory, manifest, tensors, lambda name: storage.open(storage.join(data, name)))


def newest_valid(path: StrPath, level: Verify) -> tuple[str, dict[str, list[str]]]:
    """Choose a checkpoint: the one given, or the newest valid one of a directory of several.

    Returns:
        Its path, and the newer ones of the directory with what is wrong with them.

    Raises:
        CheckpointError: If there is none, or none is valid.
    """
    several = [] if is_sharded_checkpoint(path) else [one.path for one in candidates(path)]
    wrong: dict[str, list[str]] = {}
    for one in several or [storage_of(path)[1]]:
        wrong[one] = verify(one, level)
        if not wrong[one]:
            return one, {other: problems for other, problems in wrong.items() if problems}
    problems = [Problem(f"{one}: {text}" if several else text) for one, found in wrong.items() for text in found]
    exists = several or is_sharded_checkpoint(path)
    raise checkpoint_error(f"no valid checkpoint in {path}", problems, CheckpointError if exists else NoCheckpointError)


def _stored_tensor(
    storage: Storage, directory: str, metadata: Metadata, name: str, item: TensorStorageMetadata
) -> StoredTensor:
    places = metadata.storage_data or {}
    shape, dtype = tuple(item.size), item.properties.dtype

    def chunk(i: int) -> Tensor:
        place = places[MetadataIndex(name, item.chunks[i].offsets)]
        file = storage.join(directory, place.relative_path)
        try:
            with storage.open(file) as stream:
                section: Any = _Section(stream, place.offset, place.length)
                part: Tensor = torch.load(section, weights_only=True)
        except Exception as e:
            raise CheckpointError(f"{name} cannot be read from {file}: {e}") from e
        if part.shape != item.chunks[i].sizes or part.dtype != dtype:
            raise CheckpointError(
                f"{file} has a tensor of shape {tuple(part.shape)} and {part.dtype} at {place.offset}; the index says "
                f"that it is a part of {name} of shape {tuple(item.chunks[i].sizes)} and {dtype}"
            )
        return part

    def read() -> Tensor:
        if len(item.chunks) == 1 and item.chunks[0].sizes == item.size:
            return chunk(0)
        whole = torch.empty(shape, dtype=dtype)
        for i, one in enumerate(item.chunks):
            target = whole
            for dim, (start, length) in enumerate(zip(one.offsets, one.sizes, strict=True)):
                target = target.narrow(dim, start, length)
            target.copy_(chunk(i))
        return whole

    if sum(math.prod(one.sizes) for one in item.chunks) != math.prod(shape):
        raise CheckpointError(f"the parts of {name} in {directory} do not make up its shape {shape}")
    files = dict.fromkeys(places[MetadataIndex(name, one.offsets)].relative_path for one in item.chunks)
    return StoredTensor(name, shape, dtype, len(item.chunks), tuple(files), read)


class _Section(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, stream: IO[bytes], start: int, length: int) -> None:
        self._stream = stream
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._length - self._at)]
        self._stream.seek(self._start + self._at)
        done = 0
        while done < len(view):
            count = self._stream.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                break
            done += count
        self._at += done
        return done
