"""Writes the file of `torch.save` with one tensor in memory at a time.

The file is a zip archive without compression: a pickle, in which storages are numbers, and the bytes of each storage.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from dataclasses import dataclass
from typing import IO, Any

import torch

from lightning_par.checkpoint._compat import bytes_of, rebuilding, storage_parts
from lightning_par.checkpoint.reading import StoredTensor

# As torch does it, so that a file that is mapped into memory has its numbers where the processor likes them.
_ALIGNMENT = 64
_PROTOCOL = 2
# The field of a zip header with this tag is padding.
_PADDING_TAG = b"FB"
# Of a header in front of a file: its fixed part, and the field with the sizes of large files.
_HEADER = 30 + 20


def write_torch_file(stream: IO[bytes], content: Any) -> None:
    """Write what ``torch.save(content)`` would, where `content` may hold `StoredTensor`s for tensors.

    A `StoredTensor` that is there twice becomes one tensor. Tensors are on the CPU when they are loaded.

    Args:
        stream: Seekable.
        content: Anything that `torch.save` takes.
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled, _PROTOCOL)
    pickler.dump(content)
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        _write(stream, archive, "data.pkl", pickled.getbuffer())
        _write(stream, archive, ".format_version", b"1")
        _write(stream, archive, ".storage_alignment", str(_ALIGNMENT).encode())
        _write(stream, archive, "byteorder", sys.byteorder.encode())
        for number, source in enumerate(pickler.sources):
            # Without a name for the bytes, which would keep them while the next ones are read.
            _write(stream, archive, f"data/{number}", _data(source))
        _write(stream, archive, "version", b"3\n")


@dataclass(frozen=True, eq=False)
class _StorageOf:
    tensor: StoredTensor


class _Pickler(pickle.Pickler):
    """Notes the storages, in the order of their numbers."""

    def __init__(self, stream: IO[bytes], protocol: int) -> None:
        super().__init__(stream, protocol)
        self.sources: list[StoredTensor | torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, StoredTensor):
            return NotImplemented
        rebuild, _, rest = rebuilding(value.dtype)
        strides = torch.empty(value.shape, device="meta").stride()
        return rebuild, (_StorageOf(value), 0, value.shape, strides, *rest)

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _StorageOf):
            _, kind, _ = rebuilding(value.tensor.dtype)
            length = value.tensor.nbytes if kind is torch.UntypedStorage else value.tensor.numel
            return "storage", kind, self._number(id(value.tensor), value.tensor), "cpu", length
        parts = storage_parts(value)
        if parts is None:
            return None
        kind, storage, length = parts
        return "storage", kind, self._number(storage.data_ptr() or id(storage), storage), "cpu", length

    def _number(self, key: int, source: StoredTensor | torch.UntypedStorage) -> str:
        if key not in self._numbers:
            self._numbers[key] = len(self.sources)
            self.sources.append(source)
        return str(self._numbers[key])


def _data(source: StoredTensor | torch.UntypedStorage) -> memoryview:
    return bytes_of(source.read() if isinstance(source, StoredTensor) else source)


def _write(stream: IO[bytes], archive: zipfile.ZipFile, name: str, content: bytes | memoryview) -> None:
    info = zipfile.ZipInfo(f"archive/{name}")
    info.file_size = len(content)
    padding = -(stream.tell() + _HEADER + len(info.filename) + len(_PADDING_TAG) + 2) % _ALIGNMENT
    info.extra = _PADDING_TAG + padding.to_bytes(2, "little") + bytes(padding)
    # The header of a large file for all of them, so that its length is known.
    with archive.open(info, "w", force_zip64=True) as target:
        target.write(content)
