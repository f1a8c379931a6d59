"""How a strategy saves: what both hosts hand to the engine of `lightning_par.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lightning_par.checkpoint import CheckpointSaver, Content, Facts, explain_path
from lightning_par.checkpoint.storage import StrPath
from lightning_par.errors import ParallelConfigError, Problem
from lightning_par.layout import ParallelMesh

# Under which names loops of one's own keep the number of their steps.
_STEPS = ("global_step", "step", "iteration", "iter")


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class SaveOptions:
    """How one checkpoint is saved; see `CheckpointSaver.save`.

    Attributes:
        incarnation: The number of the run's start in its directory of checkpoints.
    """

    asynchronous: bool = False
    when_busy: Literal["wait", "skip"] = "wait"
    may_fail: bool = False
    may_commit: Callable[[], None] = _nothing
    committed: Callable[[], None] = _nothing
    incarnation: int | None = None


def save(
    saver: CheckpointSaver,
    mesh: ParallelMesh,
    path: StrPath,
    content: Callable[[], Content],
    options: SaveOptions,
    *,
    step: int | None,
    run: str | None = None,
) -> bool:
    """Save a sharded checkpoint; collective. Returns whether a save was begun."""
    facts = Facts(mesh.data_rank, step, asdict(mesh.layout), run, options.incarnation)
    with saver.during():
        return saver.save(
            path,
            content,
            facts,
            asynchronous=options.asynchronous,
            when_busy=options.when_busy,
            may_fail=options.may_fail,
            may_commit=options.may_commit,
            committed=options.committed,
        )


def step_of(meta: Mapping[str, Any]) -> int | None:
    """The number of steps in the state of a loop of one's own, where it is under a usual name."""
    return next((meta[name] for name in _STEPS if type(meta.get(name)) is int), None)


def refuse_wrong_path(path: StrPath) -> None:
    """Raise for a path that lies beside or inside a checkpoint.

    Raises:
        ParallelConfigError: With what was meant, where that can be told.
    """
    found = explain_path(path)
    if found:
        _, told, newest = found.rpartition("the newest whole one is ")
        raise ParallelConfigError(Problem(f"ckpt_path: {found}", f'ckpt_path="{newest}"' if told else ""))
