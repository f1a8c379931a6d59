"""The processes that save or load together, and how they fail together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

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
        error: Exception | None = None
        try:
            result = action()
        except Exception as e:
            error = e
        report = f"{type(error).__name__}: {error}" if error else None
        reports = [report] * self.size
        if not self.alone:
            dist.all_gather_object(reports, report, group=self.group)
        if isinstance(error, CheckpointError) and set(reports) == {report}:
            raise error
        failed = [Problem(f"rank {rank}: {text}") for rank, text in enumerate(reports) if text]
        if failed:
            raise checkpoint_error(failure, failed) from error
        return result
