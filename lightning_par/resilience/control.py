"""One small collective per optimizer step, by which the ranks of all axes take the same branch (design 5.5)."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_par.resilience.errors import DesyncError

T = TypeVar("T")

# Numbers in the vector, always as many, so that ranks that name different things still meet.
WIDTH = 32


class StepControl:
    """Tells every rank the largest of all ranks' numbers, once per optimizer step.

    Whoever needs such a number adds a source, or gives it to `exchange`; all of them travel in one all-reduce on a
    group of its own. Every rank must come to each exchange; that they name the same numbers and are at the same step
    is checked by the exchange itself. Works without a process group.

    Args:
        timeout: How long a rank waits for the others.

    Attributes:
        exchanges: How many there have been.

    Example::

        control = StepControl()
        control.add("stop", lambda: int(stop_was_asked_for))
        ...
        if control.exchange(step)["stop"]: ...
    """

    def __init__(self, *, timeout: timedelta = timedelta(minutes=30)) -> None:
        self.exchanges = 0
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = None
        self._sources: dict[str, Callable[[], int]] = {}
        self._alike: dict[str, Callable[[], int]] = {}
        self._heard: dict[str, int] = {}

    def add(self, name: str, source: Callable[[], int], *, alike: bool = False) -> Callable[[], None]:
        """Let a number travel in each exchange; on all ranks.

        Args:
            name: Its name, the same on all ranks.
            source: Gives this rank's number, of 63 bits, when it is needed.
            alike: Whether ranks whose numbers differ are an error.

        Returns:
            A function that takes the source away again.
        """
        sources = self._alike if alike else self._sources
        if name in self._sources or name in self._alike:
            raise ValueError(f"StepControl has a source {name!r} already")
        sources[name] = source
        return lambda: sources.pop(name, None) and None

    def exchange(self, step: int, **mine: int) -> Mapping[str, int]:
        """Tell all ranks the largest of their numbers; collective over all of them.

        Args:
            step: The optimizer step that this rank is at.
            mine: Numbers beside those of the sources.

        Returns:
            By name, the largest over the ranks.

        Raises:
            DesyncError: On all ranks, if they are at different steps or name different numbers, or if numbers differ
                that must be alike.
        """
        largest = {name: source() for name, source in self._sources.items()} | mine
        alike = {"step": step} | {name: source() for name, source in self._alike.items()}
        names = sorted(largest) + sorted(alike)
        alike["names"] = zlib.crc32(" ".join(names).encode())
        order = ["names", *(name for name in sorted(alike) if name != "names")]
        vector = [sign * alike[name] for name in order for sign in (1, -1)] + [largest[n] for n in sorted(largest)]
        if len(vector) > WIDTH:
            raise ValueError(f"StepControl has room for {WIDTH} numbers, and these are {len(vector)}: {names}")
        told = self._largest(vector)
        if any(told[2 * i] != -told[2 * i + 1] for i in range(len(order))):
            raise DesyncError(self._difference(alike, sorted(largest)))
        result = dict(zip(sorted(largest), told[2 * len(order) :], strict=False))
        for name, value in result.items():
            self._heard[name] = max(self._heard.get(name, value), value)
        self.exchanges += 1
        return result

    def attend(self, step: int, before: int) -> int:
        """Have the exchange of a step, unless another has had it for all; collective, after the step.

        Args:
            step: As in `exchange`.
            before: How many exchanges there were when the caller last asked.

        Returns:
            How many there are now.
        """
        if self.exchanges == before:
            self.exchange(step)
        return self.exchanges

    def any(self, mine: bool) -> bool:
        """Whether any rank says so; a collective of its own and no exchange, for where no step has had one."""
        return bool(self._largest([int(mine)])[0])

    def take(self, name: str) -> int | None:
        """The largest number of a name in the exchanges since this was last asked; None if there was none."""
        return self._heard.pop(name, None)

    def gather(self, facts: T) -> list[T]:
        """Tell all ranks what each of them knows, for the rare step in which a number is not enough; collective.

        Args:
            facts: Of this rank; they are pickled.

        Returns:
            Those of all ranks, in their order.
        """
        if not dist.is_initialized():
            return [facts]
        group = self._group_of_all()
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, facts, group=group)
        return everyone

    def close(self) -> None:
        """Let go of the group; on all ranks."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)

    def _largest(self, vector: list[int]) -> list[int]:
        if not dist.is_initialized():
            return vector
        numbers = torch.zeros(WIDTH, dtype=torch.int64)
        numbers[: len(vector)] = torch.tensor(vector)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group_of_all())
        return numbers.tolist()

    def _group_of_all(self) -> dist.ProcessGroup:
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._group

    def _difference(self, alike: Mapping[str, int], names: list[str]) -> str:
        """Say which rank differs in what; collective, and on this path only."""
        mine = {name: value for name, value in alike.items() if name != "names"} | {"numbers": ", ".join(names)}
        everyone = self.gather(mine)
        lines = []
        for name in sorted({name for told in everyone for name in told}):
            values = [told.get(name) for told in everyone]
            if len(set(values)) > 1:
                ranks = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
                lines.append(f"  - {name}: {ranks}")
        return "the ranks differ where they must be alike:\n" + "\n".join(lines)
