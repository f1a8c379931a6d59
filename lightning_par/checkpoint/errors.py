"""The error of everything that saves and loads."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_par.errors import Problem


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or that does not fit the module or the optimizer it is loaded into."""


def checkpoint_error(title: str, problems: Iterable[Problem]) -> CheckpointError:
    """One error that lists every problem."""
    return CheckpointError(f"{title}:\n" + "\n".join(f"  - {problem}" for problem in problems))
