"""How much of the time of a run, over all its starts, made it go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_par.resilience.events import number

Event = Mapping[str, Any]
LOSSES = (
    "setting up",
    "loading",
    "replayed steps",
    "skipped steps",
    "saves",
    "stalls",
    "between starts",
    "other",
)


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run.

    Args:
        wall: From the begin of the first start to the last event.
        productive: In steps whose result the run kept.
        lost: By what took them, each of `LOSSES`; with `productive` they add up to `wall`. ``between starts`` is from
            the last event of a start to the begin of the next one, so with what was not recorded any more; ``other``
            has validations, the first steps of a start, and what no event tells of.
    """

    wall: float
    productive: float
    lost: dict[str, float]

    @property
    def share(self) -> float:
        """Of the time that was productive."""
        return self.productive / self.wall if self.wall > 0 else 0.0


def goodput(events: Sequence[Event]) -> Goodput:
    """Compute it from the events of a run.

    Steps up to the furthest one that an earlier start or a rewind had reached count as replayed.
    """
    lost = dict.fromkeys(LOSSES, 0.0)
    productive = 0.0
    reached = 0.0
    first = last = None
    latest = 0.0
    for start in split_starts(events):
        setting_up, loading = (max(0.0, _number(start[0], name)) for name in ("init_seconds", "load_seconds"))
        begin = start[0]["time"] - setting_up - loading
        first = begin if first is None else min(first, begin)
        lost["between starts"] += 0.0 if last is None else max(0.0, begin - last)
        lost["setting up"] += setting_up
        lost["loading"] += loading
        productive, reached = _steps(start, productive, reached, lost)
        last = max([begin, *(event["time"] for event in start)])
        latest = max(latest, last)
    # Clocks that go back and two runs in one directory must not make more of the time than there was.
    known = productive + sum(lost.values())
    wall = max(known, 0.0 if first is None else latest - first)
    lost["other"] = wall - known
    return Goodput(wall, productive, lost)


def split_starts(events: Sequence[Event]) -> list[list[Event]]:
    """The events of each start; what comes before the first ``start`` is one too."""
    starts: list[list[Event]] = []
    for event in events:
        if not isinstance(event.get("time"), int | float):
            continue
        if event.get("kind") == "start" or not starts:
            starts.append([])
        starts[-1].append(event)
    return starts


def _steps(start: Sequence[Event], productive: float, reached: float, lost: dict[str, float]) -> tuple[float, float]:
    """Share out the windows between the ``step`` events of a start."""
    furthest = reached
    for window in _windows(start):
        seconds, steps = window.seconds, max(window.end - window.begin, 1e-9)
        saves = seconds * window.checkpoint_share
        replayed = (seconds - saves) * min(1.0, max(0.0, max(reached, window.rewound) - window.begin) / steps)
        skipped = min(window.skips / steps, 1.0) * (seconds - saves - replayed)
        lost["saves"] += saves
        lost["replayed steps"] += replayed
        lost["skipped steps"] += skipped
        productive += seconds - saves - replayed - skipped
        furthest = max(furthest, window.end, window.rewound)
    lost["stalls"] += sum(stall.seconds for stall in stalls_of(start))
    return productive, furthest


@dataclass(frozen=True)
class Stall:
    """A stall: its event, and from when to when it lasted, in seconds since the epoch."""

    event: Event
    since: float
    over: float

    @property
    def seconds(self) -> float:
        """How long it lasted; none where clocks went back."""
        return max(0.0, self.over - self.since)


def stalls_of(start: Sequence[Event]) -> list[Stall]:
    """The stalls of a start. One is over with the next event of another kind, or with the last one of the start."""
    found: list[Stall] = []
    stall, since = None, 0.0
    for before, event in zip([start[0], *start], start, strict=False):
        if event["kind"] == "stall" and stall is None:
            # Without word of how long it lasts by then: from the last sign of life on.
            still = number(event, "still")
            since = before["time"] if still is None else max(before["time"], event["time"] - still)
            stall = event
        elif event["kind"] != "stall" and stall is not None:
            found.append(Stall(stall, since, event["time"]))
            stall = None
    return found if stall is None else [*found, Stall(stall, since, start[-1]["time"])]


@dataclass
class _Window:
    begin: float
    end: float
    seconds: float
    checkpoint_share: float
    skips: int
    rewound: float


def _windows(start: Sequence[Event]) -> Iterator[_Window]:
    begin, since = _number(start[0], "step"), start[0]["time"]
    skips, rewound = 0, 0.0
    stalls = stalls_of(start)
    for event in start:
        kind = event["kind"]
        if kind == "skip":
            skips += 1
        elif kind == "rewind":
            rewound = max(rewound, _number(event, "from_step"))
            begin = min(begin, _number(event, "to_step"))
        elif kind == "step" and _number(event, "step_seconds"):
            end = _number(event, "step")
            split = event.get("split")
            split = split if isinstance(split, Mapping) else {}
            total = sum(_number(split, phase) for phase in split) or 1.0
            stood = sum(max(0.0, min(s.over, event["time"]) - max(s.since, since)) for s in stalls)
            # Several optimizers count several steps for one that was timed; and the time of a stall is in that of a
            # step, but not productive.
            there = max(0.0, event["time"] - since - stood)
            seconds = min(max(0.0, _number(event, "step_seconds")) * max(end - begin, 0.0), there)
            saves = min(max(0.0, _number(split, "checkpoint") / total), 1.0)
            yield _Window(begin, end, seconds, saves, skips, rewound)
            begin, since, skips = end, event["time"], 0


def _number(event: Mapping[str, Any], name: str) -> float:
    return number(event, name) or 0.0
