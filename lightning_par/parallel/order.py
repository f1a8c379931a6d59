"""Do all ranks run the same FSDP units in the same order? Found out before they meet in the wrong collectives.

A unit is gathered and reduced by all ranks together. A rank that leaves one out meets the others one collective later:
they hang, or, where the sizes fit, each computes with parameters of another unit. So events are

- compared one by one, before they happen, in the first steps;
- compared as a whole, by a hash that travels with another message, at the end of each step, before the optimizer runs;
- compared by each rank with its own last step: where they part, it leaves a note in the store, so that the error with
  which a later mix-up of collectives ends can say what happened.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_par.errors import ParallelConfigError, Problem
from lightning_par.parallel import _compat

GATHER, REDUCE, END, ELSEWHERE = range(4)
_KINDS = ("gathers {}", "reduces the gradients of {}", "ends the backward", "reduces something else, such as a log")
# Events of a step that are compared one by one; more than this also in the first steps of training, whatever their
# length, and of evaluation.
_COMPARED_PER_UNIT = {True: 6, False: 2}
_TRAIL_LENGTH = 4096
DIGEST_BYTES = 6

_numbers = itertools.count()


class UnitOrder:
    """The sequence of events of one sharded module since the last agreement.

    Args:
        group: The data ranks.
        root: Name of the module in messages.
        names: The names of its units in messages.
    """

    def __init__(self, group: dist.ProcessGroup, root: str, names: Sequence[str]) -> None:
        self._group = group
        self._root = root
        self._names = list(names)
        # Modules are sharded in the same order on all ranks, so a number tells them apart.
        self._key = f"lightning_par/units/{next(_numbers)}"
        self._trail: list[int] = []
        self._hash = 0
        self._agreements = 0
        # What a step and an evaluation were the last time, those of them that this one follows yet, and where it left.
        self._usual: dict[bool, list[int]] = {}
        self._following: list[list[int]] = []
        self._departure: tuple[int, int] | None = None
        self._compared = {True: 0, False: 0}

    def note(self, kind: int, index: int = 0) -> None:
        """Record an event before it happens; every rank must have it at this place.

        Raises:
            ParallelConfigError: On all ranks, if they differ and this is one of the first events.
        """
        if self._group.size() == 1:
            return
        event = kind * len(self._names) + index
        self._hash = (self._hash * 1_000_003 + event + 1) % 256**DIGEST_BYTES
        if len(self._trail) < _TRAIL_LENGTH:
            self._trail.append(event)
        if self._departure is None:
            self._follow(event)
        training = kind != GATHER or torch.is_grad_enabled() or _compat.in_backward()
        first_step = training and True not in self._usual and len(self._trail) < _TRAIL_LENGTH
        if first_step or self._compared[training] < _COMPARED_PER_UNIT[training] * len(self._names):
            self._compared[training] += 1
            self._compare(event)

    def _follow(self, event: int) -> None:
        place = len(self._trail) - 1
        following = [trail for trail in self._following if trail[place : place + 1] == [event]]
        if following:
            self._following = following
        elif self._following:
            self._departure = place, event
            _compat.default_store().set(
                f"{self._key}/{self._group.rank()}", json.dumps([self._agreements, *self._departure])
            )

    def digest(self) -> bytes:
        """A number that is the same on ranks with the same events."""
        return self._hash.to_bytes(DIGEST_BYTES, "big")

    def agreed(self, *, training: bool) -> None:
        """The ranks have compared their digests, which are equal: begin anew."""
        self._agreements += 1
        self._usual[training] = self._trail
        self.forget()

    def forget(self) -> None:
        """Begin anew after an exception."""
        self._trail = []
        self._hash = 0
        self._following = list(self._usual.values())
        self._departure = None

    def difference(self) -> ParallelConfigError:
        """Find the first event in which the ranks differ; collective."""
        trails: list[Any] = [None] * self._group.size()
        dist.all_gather_object(trails, self._trail, group=self._group)
        place = _where_they_part(trails)
        return self._error([self._event(trail, place) for trail in trails])

    def explain_failure(self) -> ParallelConfigError | None:
        """After a collective failed: say where ranks left the order of the step before, if they did so differently.

        Not collective: other processes may be gone.
        """
        departures = dict(self._departures_of_others())
        if self._departure is not None:
            departures[self._group.rank()] = self._departure
        if not departures or not self._following:
            return None
        place = min(where for where, _ in departures.values())
        usual = self._event(self._following[0], place)
        events = [usual] * self._group.size()
        for rank, (where, event) in departures.items():
            events[rank] = event if where == place else usual
        return self._error(events) if len(set(events)) > 1 else None

    def _departures_of_others(self) -> Iterator[tuple[int, tuple[int, int]]]:
        store = _compat.default_store()
        for rank in range(self._group.size()):
            key = f"{self._key}/{rank}"
            try:
                if rank != self._group.rank() and store.check([key]):
                    agreements, place, event = json.loads(store.get(key))
                    if agreements == self._agreements:
                        yield rank, (place, event)
            except RuntimeError:  # the store has gone with the rank that serves it
                return

    def _compare(self, event: int) -> None:
        mine = torch.tensor([event])
        mine = mine.to(_compat.collective_device(self._group, mine.device))
        everyone = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(everyone, mine, group=self._group)
        events = torch.cat(everyone).tolist()
        if len(set(events)) > 1:
            raise self._error(events)

    def _event(self, trail: Sequence[int], place: int) -> int:
        return trail[place] if place < len(trail) else ELSEWHERE * len(self._names)

    def _error(self, events: Sequence[int]) -> ParallelConfigError:
        doing: dict[int, list[int]] = {}
        for rank, event in enumerate(events):
            doing.setdefault(event, []).append(rank)
        parts = "; ".join(f"data {_ranks(ranks)} {self._describe(event)}" for event, ranks in doing.items())
        return ParallelConfigError(
            Problem(
                f"the ranks run the blocks of {self._root} differently: {parts}. A sharded block is gathered by all "
                "ranks together, so all must run the same blocks in the same order, forward and backward",
                "let what all ranks share decide which blocks run (a common seed, not the rank's own batch), or run "
                "the block and multiply what it adds by 0, or strategy='par_ddp'",
                "strategy: par_ddp",
            )
        )

    def _describe(self, event: int) -> str:
        kind, index = divmod(event, len(self._names))
        return _KINDS[kind].format(self._names[index])


def _where_they_part(trails: Sequence[Sequence[int]]) -> int:
    """The first place at which the sequences differ, one of which may end there."""
    longest = max(len(trail) for trail in trails)
    return next((i for i in range(longest) if len({tuple(trail[i : i + 1]) for trail in trails}) > 1), longest)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
