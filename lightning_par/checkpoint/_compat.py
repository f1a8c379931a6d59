"""What `torch.save` knows of tensors and storages that torch does not offer to others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def storage_parts(value: Any) -> tuple[type, torch.UntypedStorage, int] | None:
    """What a ``torch.save`` file says of a storage: its class, its bytes and its length; None for anything else."""
    if isinstance(value, torch.storage.TypedStorage):
        return getattr(torch, value._pickle_storage_type()), value._untyped_storage, value._size()
    if isinstance(value, torch.UntypedStorage):
        return torch.UntypedStorage, value, value.nbytes()
    return None


def rebuilding(dtype: torch.dtype) -> tuple[Any, type, tuple[Any, ...]]:
    """How a ``torch.save`` file builds a contiguous tensor.

    Returns:
        The function, the class of the storage that it takes, and its arguments after (storage, offset, shape, strides).
    """
    rebuild, (storage, _, _, _, *rest) = torch.empty(0, dtype=dtype).__reduce_ex__(2)
    parts = storage_parts(storage)
    assert parts is not None
    return rebuild, parts[0], tuple(rest)


def bytes_of(value: Tensor | torch.UntypedStorage) -> memoryview:
    """The bytes of a contiguous CPU tensor or of a storage, without a copy."""
    if isinstance(value, Tensor):
        # A view as bytes needs a dimension.
        flat = value.detach().reshape(-1).view(torch.uint8)
    else:
        flat = torch.empty(0, dtype=torch.uint8).set_(value)
    array: Any = flat.numpy()
    return memoryview(array)
