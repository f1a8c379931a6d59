"""The processes that save or load together, and how they fail together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_par.checkpoint.errors import CheckpointError, checkpoint_error
from lightning_par.errors import Problem

_T = TypeVar("_T")


@dataclass(frozen=True)
class Ranks:
    """The processes that save or load together; `alone` without a process group."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    alone: bool

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        if not dist.is_initialized():
            return cls(None, 0, 1, alone=True)
        return cls(group, dist.get_rank(group), dist.get_world_size(group), alone=False)

    def together(self, failure: str, action: Callable[[], _T]) -> _T:
        """Run `action` on every rank and wait for all; if it raises on one, raise on all."""
        result: list[_T] = []
        self._exchange(failure, lambda: result.append(action()))
        return result[0]

    def gather(self, failure: str, action: Callable[[], _T]) -> list[_T]:
        """As `together`, and return what the action gave on each rank."""
        return self._exchange(failure, action)

    def gather_to_first(self, failure: str, action: Callable[[], _T]) -> list[_T]:
        """As `gather`, but only the first rank gets the values; the others get an empty list."""
        mine: list[_T] = []
        self._exchange(failure, lambda: mine.append(action()))
        if self.alone:
            return mine
        told: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(mine[0], told, group=self.group, group_dst=0)
        return told or []

    def broadcast(self, value: _T) -> _T:
        """Return the value of the first rank."""
        if self.alone:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        told: _T = values[0]
        return told

    def _exchange(self, failure: str, action: Callable[[], _T]) -> list[_T]:
        error: Exception | None = None
        result: Any = None
        try:
            result = action()
        except Exception as e:
            error = e
        report = f"{type(error).__name__}: {error}" if error else None
        kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
        told: list[Any] = [(report, kind, result)] * self.size
        if not self.alone:
            dist.all_gather_object(told, (report, kind, result), group=self.group)
        reports = [text for text, _, _ in told]
        if isinstance(error, CheckpointError) and set(reports) == {report}:
            raise error
        failed = [Problem(f"rank {rank}: {text}") for rank, text in enumerate(reports) if text]
        if failed:
            kinds = {kind for text, kind, _ in told if text}
            raise checkpoint_error(failure, failed, kinds.pop() if len(kinds) == 1 else CheckpointError) from error
        return [value for _, _, value in told]


def together(failure: str, action: Callable[[], _T]) -> _T:
    """`Ranks.together` of the default group."""
    return Ranks.of(None).together(failure, action)
