"""One error that lists every problem of a configuration, each with the change that fixes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and how to mend it.

    Args:
        what: What is wrong, with the numbers in it.
        python: The change that fixes it, as a Python keyword argument (``"tp_size=2"``) or a short instruction.
        yaml: The same change in the spelling of a Lightning CLI file (``"tp_size: 2"``). Derived from ``python`` when
            that is a plain ``name=value``.
    """

    what: str
    python: str = ""
    yaml: str = ""

    def __str__(self) -> str:
        if not self.python:
            return self.what
        name, equals, value = self.python.partition("=")
        yaml = self.yaml or (f"{name}: {_yaml_value(value)}" if equals and name.isidentifier() else "")
        return f"{self.what}\n    fix: {self.python}" + (f"    (YAML: {yaml})" if yaml else "")


def _yaml_value(python_value: str) -> str:
    return {"True": "true", "False": "false", "None": "null"}.get(python_value, python_value)


class ParallelConfigError(ValueError):
    """A configuration that cannot work, raised before any process group is made and before the first step.

    Args:
        problems: Every problem found; the message has one bullet for each.

    Attributes:
        problems: The same, for programs.
    """

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{count} in the parallel configuration:\n" + "\n".join(f"  - {p}" for p in problems))

    def __reduce__(self) -> tuple[type[ParallelConfigError], tuple[Problem, ...]]:
        return type(self), self.problems


def is_number(value: object) -> TypeGuard[float]:
    """Whether an option is a number at all: a text from a shell or a form is not, though it may look like one."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: object) -> bool:
    """Whether an option is an int of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class Problems:
    """Collects problems, so that the user sees all of them at once.

    Example::

        problems = Problems()
        if tp_size < 1:
            problems.add(f"tp_size is {tp_size}, sizes are positive", "tp_size=1")
        problems.raise_if_any()
    """

    def __init__(self) -> None:
        self._found: list[Problem] = []

    def add(self, what: str, python: str = "", yaml: str = "") -> None:
        """Record one problem; see `Problem` for the arguments. Repeated ones are kept once."""
        problem = Problem(what, python, yaml)
        if problem not in self._found:
            self._found.append(problem)

    def extend(self, other: Iterator[Problem] | tuple[Problem, ...] | list[Problem]) -> None:
        """Record the problems of another check."""
        for problem in other:
            self.add(problem.what, problem.python, problem.yaml)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def raise_if_any(self) -> None:
        """Raise `ParallelConfigError` with everything recorded, or return if there is nothing."""
        if self._found:
            raise ParallelConfigError(*self._found)
