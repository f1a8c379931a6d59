"""Writes a safetensors file with one tensor in memory at a time.

The format (https://github.com/huggingface/safetensors): the length of the header as 8 bytes, least significant first;
the header, a JSON object that says of each tensor its dtype, its shape and which bytes of the rest it is; the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO

import torch

from lightning_par.checkpoint._compat import bytes_of
from lightning_par.checkpoint.errors import checkpoint_error
from lightning_par.checkpoint.reading import StoredTensor
from lightning_par.errors import Problem

_ALIGNMENT = 8
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


def check_dtypes(tensors: Mapping[str, StoredTensor]) -> None:
    """Raise `CheckpointError` for tensors of which the format knows no name."""
    problems = [
        Problem(f"{name} is {tensor.dtype}, which a safetensors file cannot hold", "to='lightning'", "--to lightning")
        for name, tensor in tensors.items()
        if tensor.dtype not in _DTYPES
    ]
    if problems:
        raise checkpoint_error("the model cannot be written as safetensors", problems)


def write_safetensors(stream: IO[bytes], tensors: Mapping[str, StoredTensor]) -> None:
    """Write tensors under their keys."""
    # Large numbers first, so that each tensor begins where a number of its size may.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    stream.write(len(encoded).to_bytes(8, "little"))
    stream.write(encoded)
    for tensor in tensors.values():
        stream.write(bytes_of(tensor.read()))
