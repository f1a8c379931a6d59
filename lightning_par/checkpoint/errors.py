"""The error of everything that saves and loads."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_par.errors import Problem


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or that cannot be loaded."""


class CheckpointMismatch(CheckpointError):
    """The module or the optimizer does not fit the checkpoint, and an older one would not help."""


class NoValidCheckpointError(CheckpointError):
    """There are checkpoints, and none of them is whole."""


class SupersededError(CheckpointError):
    """Another start of the run has taken over the directory of its checkpoints."""


class NoProgressError(CheckpointError):
    """Runs have been started again and again without a new checkpoint."""


def checkpoint_error(
    title: str, problems: Iterable[Problem], kind: type[CheckpointError] = CheckpointError
) -> CheckpointError:
    """One error that lists every problem."""
    return kind(f"{title}:\n" + "\n".join(f"  - {problem}" for problem in problems))
