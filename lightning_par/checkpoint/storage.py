"""Where checkpoints are kept: the few operations on files that a save needs, on a local file system or on a URL.

A local directory gets its name by a rename when it is complete. Object stores have no rename of a directory that either
happens or does not: there one small file, the manifest, is written last (see `manifest.py`).
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, cast

StrPath = str | os.PathLike[str]
TRASH = ".trash-"
REPLACED = ".replaced-"


class FileFacts(NamedTuple):
    """What a manifest says about a file.

    Attributes:
        bytes: Its size.
        crc32: CRC-32 of the content, as eight hexadecimal digits.
    """

    bytes: int
    crc32: str


class Checksummed:
    """A stream for writing that sums up what goes through it, before it reaches the disk."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._bytes = 0
        self._crc = 0

    def write(self, data: Any) -> int:
        """Write everything; forward only, so that the sum is that of the file."""
        view = memoryview(data).cast("B")
        self._stream.write(view)
        self._crc = zlib.crc32(view, self._crc)
        self._bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self._bytes

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        """Nothing: the storage closes the stream when it is on the disk."""

    @property
    def facts(self) -> FileFacts:
        return FileFacts(self._bytes, f"{self._crc:08x}")


class Storage(Protocol):
    """Files by path. A path is a string, joined by `join`."""

    renames: bool
    """Whether a directory can be renamed in one step that either happens or does not."""

    def join(self, *parts: str) -> str: ...

    def parent(self, path: str) -> str: ...

    def exists(self, path: str) -> bool: ...

    def is_directory(self, path: str) -> bool: ...

    def names(self, path: str) -> list[str]:
        """The names in a directory, sorted; none where it does not exist."""
        ...

    def size(self, path: str) -> int: ...

    def open(self, path: str) -> IO[bytes]:
        """Open a file for reading."""
        ...

    def create(self, path: str) -> contextlib.AbstractContextManager[Checksummed]:
        """Write a file, which is on the disk when the context ends without an error."""
        ...

    def put(self, path: str, data: bytes, before_name: Callable[[], None] = ...) -> None:
        """Write a small file that has either its former content or all of the new one.

        Args:
            path: The file.
            data: Its content.
            before_name: Called when everything is written under another name.
        """
        ...

    def make_directory(self, path: str) -> None: ...

    def publish(self, attempt: str, target: str) -> None:
        """Give a complete directory its name, in the place of what had it."""
        ...

    def claim(self, path: str, data: bytes) -> bool:
        """Write a small new file; False where it exists already."""
        ...

    def put_back(self, path: str) -> None:
        """Give what `publish` had put aside its name again, if the new one did not get it; else discard it."""
        ...

    def discard(self, path: str, renamed: Callable[[], None] = ...) -> None:
        """Take a file or directory away so that it is never seen as a part of itself; nothing there is no error.

        Args:
            path: What is removed.
            renamed: Called when a directory has lost its name and not yet its content.
        """
        ...


class LocalStorage:
    """A file system that is mounted here, on all ranks."""

    renames = True

    def join(self, *parts: str) -> str:
        return os.path.join(*parts)

    def parent(self, path: str) -> str:
        return os.path.dirname(path)

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(path)

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, path: str) -> int:
        return os.path.getsize(path)

    def open(self, path: str) -> IO[bytes]:
        return open(path, "rb")

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[Checksummed]:
        with open(path, "wb", buffering=1 << 20) as stream:
            yield Checksummed(stream)
            stream.flush()
            os.fsync(stream.fileno())

    def put(self, path: str, data: bytes, before_name: Callable[[], None] = lambda: None) -> None:
        directory, name = os.path.split(path)
        temporary = os.path.join(directory, f".{name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            with self.create(temporary) as stream:
                stream.write(data)
            before_name()
            os.replace(temporary, path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
        self.sync_directory(directory)

    def make_directory(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def publish(self, attempt: str, target: str) -> None:
        self.sync_directory(attempt)
        if os.path.lexists(target):
            exchange(attempt, target)
            self.sync_directory(os.path.dirname(target))
            # What had the name has that of the attempt now.
            self.discard(attempt)
        else:
            os.rename(attempt, target)
            self.sync_directory(os.path.dirname(target))

    def claim(self, path: str, data: bytes) -> bool:
        try:
            with open(path, "xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
        except FileExistsError:
            return False
        return True

    def put_back(self, path: str) -> None:
        directory, name = os.path.split(path)
        target = os.path.join(directory, name.removeprefix(REPLACED).rsplit("-", 1)[0])
        if os.path.lexists(target):
            self.discard(path)
        else:
            os.rename(path, target)

    def discard(self, path: str, renamed: Callable[[], None] = lambda: None) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            trash = os.path.join(os.path.dirname(path), f"{TRASH}{uuid.uuid4().hex[:8]}")
            os.rename(path, trash)
            renamed()
            # Another process may be at it too.
            shutil.rmtree(trash, ignore_errors=True)
        else:
            Path(path).unlink(missing_ok=True)

    def sync_directory(self, path: str) -> None:
        """Bring the names in a directory to the disk, where the system can do that for directories."""
        with contextlib.suppress(OSError):
            number = os.open(path, os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)


class ObjectStorage:
    """Anything that fsspec reaches by a URL."""

    renames = False

    def __init__(self, url: str) -> None:
        import fsspec

        self._fs, _ = fsspec.core.url_to_fs(url)

    def join(self, *parts: str) -> str:
        return posixpath.join(*parts)

    def parent(self, path: str) -> str:
        return posixpath.dirname(path)

    def exists(self, path: str) -> bool:
        return bool(self._fs.exists(path))

    def is_directory(self, path: str) -> bool:
        return bool(self._fs.isdir(path))

    def names(self, path: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            return sorted({posixpath.basename(name.rstrip("/")) for name in self._fs.ls(path, detail=False)})
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, path: str) -> int:
        return int(self._fs.size(path))

    def open(self, path: str) -> IO[bytes]:
        return cast(IO[bytes], self._fs.open(path, "rb"))

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[Checksummed]:
        with self._fs.open(path, "wb") as stream:
            yield Checksummed(stream)

    def put(self, path: str, data: bytes, before_name: Callable[[], None] = lambda: None) -> None:
        before_name()
        self._fs.pipe_file(path, data)

    def make_directory(self, path: str) -> None:
        self._fs.makedirs(path, exist_ok=True)

    def publish(self, attempt: str, target: str) -> None:
        """Nothing: a manifest that names the attempt is what makes it valid."""

    def claim(self, path: str, data: bytes) -> bool:
        if self.exists(path):
            return False
        self.put(path, data)
        return True

    def put_back(self, path: str) -> None:
        """Nothing is put aside."""

    def discard(self, path: str, renamed: Callable[[], None] = lambda: None) -> None:
        manifest = self.join(path, "MANIFEST.json")
        if self.exists(manifest):
            self._fs.rm_file(manifest)
        renamed()
        if self.exists(path):
            self._fs.rm(path, recursive=True)


def storage_of(path: StrPath) -> tuple[Storage, str]:
    """Return the storage of a path or URL, and the path in its own spelling: absolute and without ``~`` if local."""
    text = os.fspath(path)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" in text:
        return ObjectStorage(text), text.rstrip("/")
    return LocalStorage(), os.path.abspath(os.path.expanduser(text))


def exchange(one: str, other: str) -> None:
    """Exchange the names of two files or directories of one file system, in one step where the system offers that.

    Elsewhere `other` has no name for a moment, and a process that ends then leaves it under a hidden one, from which
    the next save or start in the directory brings it back.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    renameat2 = getattr(libc, "renameat2", None)
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of linux/fs.h
    if renameat2 is not None and renameat2(here, os.fsencode(one), here, os.fsencode(other), swap) == 0:
        return
    aside = os.path.join(os.path.dirname(other), f"{REPLACED}{os.path.basename(other)}-{uuid.uuid4().hex[:8]}")
    os.rename(other, aside)
    try:
        os.rename(one, other)
    except OSError:
        os.rename(aside, other)
        raise
    os.rename(aside, one)
