"""Numbers that the modules of a block read in their forward, such as a count of heads."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.parallel._compat import map_leaves
from lightning_par.parallel.tensor._compat import fresh
from lightning_par.parallel.tensor.plan import AttributePatch

# More would be tried for minutes, and no attention is known that needs them.
_MOST = 3


def attributes_read(
    block: nn.Module, owners: Collection[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[tuple[str, str], int]:
    """Run a block and note the integers that it reads from some of its modules, or from what these hold ("config.x").

    Args:
        block: A copy that may be run.
        owners: Names of the modules to watch.
        args: Positional arguments of its forward.
        kwargs: Keyword arguments.

    Returns:
        Values by module name and attribute.
    """
    with torch.no_grad(), watching(block, owners) as seen:
        block(*map_leaves(fresh, args), **map_leaves(fresh, dict(kwargs)))
    return seen


@contextmanager
def watching(block: nn.Module, owners: Collection[str]) -> Iterator[dict[tuple[str, str], int]]:
    """Note the integers that are read meanwhile; see `attributes_read`."""
    seen: dict[tuple[str, str], int] = {}
    before: list[tuple[nn.Module, type, dict[str, Any]]] = []
    try:
        for owner in owners:
            module = block.get_submodule(owner)
            before.append((module, type(module), dict(vars(module))))
            for name, held in list(vars(module).items()):
                if _is_settings(name, held):
                    # Several modules hold the same object; with a copy each, the reader is known.
                    module.__dict__[name] = _watched(copy.copy(held), owner, f"{name}.", seen)
            _watched(module, owner, "", seen)
        yield seen
    finally:
        for module, cls, attributes in before:
            module.__class__ = cls
            vars(module).update(attributes)


def _watched(thing: Any, owner: str, prefix: str, seen: dict[tuple[str, str], int]) -> Any:
    """Let an object note which of its integers are read."""

    before: Any = type(thing)

    def read(self: Any, name: str) -> Any:
        value = before.__getattribute__(self, name)
        if type(value) is int and name in vars(self):
            seen[owner, prefix + name] = value
        return value

    cls = type(before.__name__, (before,), {"__getattribute__": read, "__module__": before.__module__})
    with suppress(TypeError):  # a class that cannot be changed, so its numbers are not found
        thing.__class__ = cls
    return thing


def _is_settings(name: str, held: Any) -> bool:
    known = Tensor | nn.Module | torch.dtype | torch.device
    return not name.startswith("_") and hasattr(held, "__dict__") and not callable(held) and not isinstance(held, known)


def patch_sets(
    read: Mapping[tuple[str, str], int], sizes: Collection[int], tp_size: int
) -> Iterator[tuple[AttributePatch, ...]]:
    """Sets of attributes to divide by `tp_size`, smaller ones first; the first is empty.

    Args:
        read: From `attributes_read`.
        sizes: Numbers that shrink: counts of heads and of features.
        tp_size: Number of ranks.
    """
    patches = [
        AttributePatch(module, attribute, value // tp_size)
        for (module, attribute), value in sorted(read.items())
        if value in sizes and value % tp_size == 0
    ]
    for count in range(min(len(patches), _MOST) + 1):
        yield from combinations(patches, count)
