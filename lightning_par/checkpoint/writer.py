"""Writes and reads the tensors of a checkpoint with `torch.distributed.checkpoint`, on any `Storage`.

DCP's own writer leaves no checksum, and a failed writer thread of it reports success; this one uses one file and no
thread, sums up what it writes before the disk sees it, and is on the disk when it returns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_par.checkpoint.crash_points import crash_point
from lightning_par.checkpoint.storage import Checksummed, FileFacts, Storage


class ShardWriter(FileSystemWriter):
    """Writes one file a rank, and the index on the first rank.

    Attributes:
        files: What was written, by the name in the directory.
    """

    def __init__(self, storage: Storage, directory: str, rank: int) -> None:
        # The synchronisation with the disk is the storage's.
        super().__init__(os.devnull, single_file_per_rank=True, sync_files=False, thread_count=1, overwrite=False)
        self.files: dict[str, FileFacts] = {}
        self.rank = rank
        self.fs = _Files(storage, rank, self.files)  # type: ignore[assignment]
        self.path = directory

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with _no_second_checksum():
            written = super().write_data(plan, planner)
        assert self.rank is not None
        crash_point("shard_written", self.rank)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        assert self.rank is not None
        crash_point("metadata_written", self.rank)


class ShardReader(FileSystemReader):
    """Reads what `ShardWriter` wrote."""

    def __init__(self, storage: Storage, directory: str) -> None:
        super().__init__(os.devnull)
        self.fs = _Files(storage, 0, {})  # type: ignore[assignment]
        self.path = directory


@contextmanager
def _no_second_checksum() -> Iterator[None]:
    """Leave out the CRC-32 that torch puts into its archives: it takes as long as that of the manifest.

    What another thread saves meanwhile goes without too; `torch.load` does not look at it.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


class _Files(FileSystemBase):
    """DCP's view of a `Storage`."""

    def __init__(self, storage: Storage, rank: int, files: dict[str, FileFacts]) -> None:
        self._storage = storage
        self._rank = rank
        self._files = files

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        path = os.fspath(path)
        if mode == "rb":
            with self._storage.open(path) as stream:
                yield stream
            return
        with self._storage.create(path) as written:
            watched = _Watched(written, self._rank)
            try:
                yield watched
            except Exception as e:
                # torch's writer of archives says only that it is where it should not be.
                raise watched.error or e from None
        self._files[os.path.basename(path)] = written.facts

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return self._storage.join(os.fspath(path), suffix)

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """DCP gives the index its name by this; the directory of an attempt needs no care, so it is written again."""
        path, new_path = os.fspath(path), os.fspath(new_path)
        with self._storage.open(path) as stream, self._storage.create(new_path) as copy:
            copy.write(stream.read())
        self._storage.discard(path)
        del self._files[os.path.basename(path)]
        self._files[os.path.basename(new_path)] = copy.facts

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self._storage.make_directory(os.fspath(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self._storage.exists(os.fspath(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._storage.discard(os.fspath(path))


class _Watched:
    """A stream with a crash point in its middle: after the first part of it has gone to the disk."""

    def __init__(self, stream: Checksummed, rank: int) -> None:
        self._stream = stream
        self._rank = rank
        self.error: OSError | None = None
        """What the disk said."""
        self.tell, self.flush, self.close = stream.tell, stream.flush, stream.close

    def write(self, data: Any) -> int:
        try:
            if self._stream.tell() > 0:
                crash_point("in_shard", self._rank)
            return self._stream.write(data)
        except OSError as e:
            self.error = self.error or e
            raise
