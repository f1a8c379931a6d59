"""Numbers that the modules of a block read in their forward, such as a count of heads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

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
    seen: dict[tuple[str, str], int] = {}
    with torch.no_grad(), _watching(block, owners, seen):
        block(*args, **kwargs)
    return seen


@contextmanager
def _watching(block: nn.Module, owners: Collection[str], seen: dict[tuple[str, str], int]) -> Iterator[None]:
    watched: list[tuple[Any, type]] = []

    def watch(thing: Any, module: str, prefix: str) -> None:
        def read(self: Any, name: str) -> Any:
            value = super(cls, self).__getattribute__(name)
            if type(value) is int and name in self.__dict__:
                seen[module, prefix + name] = value
            return value

        before = type(thing)
        cls = type(before.__name__, (before,), {"__getattribute__": read, "__module__": before.__module__})
        try:
            thing.__class__ = cls
        except TypeError:  # a class with slots or of an extension
            return
        watched.append((thing, before))

    for owner in owners:
        module = block.get_submodule(owner)
        for name, held in list(vars(module).items()):
            if not name.startswith("_") and hasattr(held, "__dict__") and not callable(held) and not _is_known(held):
                if not any(held is thing for thing, _ in watched):
                    watch(held, owner, f"{name}.")
        watch(module, owner, "")
    try:
        yield
    finally:
        for thing, before in watched:
            thing.__class__ = before


def _is_known(held: Any) -> bool:
    return isinstance(held, Tensor | nn.Module | torch.dtype | torch.device)


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
