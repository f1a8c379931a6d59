"""How much of the time of a run, over all its starts, made it go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    for start in split_starts(events):
        begin = start[0]["time"] - _number(start[0], "init_seconds") - _number(start[0], "load_seconds")
        first = begin if first is None else first
        lost["between starts"] += 0.0 if last is None else max(0.0, begin - last)
        lost["setting up"] += _number(start[0], "init_seconds")
        lost["loading"] += _number(start[0], "load_seconds")
        productive, reached = _steps(start, productive, reached, lost)
        last = max(begin, start[-1]["time"])
    wall = 0.0 if first is None or last is None else last - first
    lost["other"] = max(0.0, wall - productive - sum(lost.values()))
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
    lost["stalls"] += _stalled(start)
    return productive, furthest


def _stalled(start: Sequence[Event]) -> float:
    """Seconds from the last sign of life before a stall to the next one, or to the end of the start."""
    seconds, since = 0.0, None
    for before, event in zip([start[0], *start], start, strict=False):
        if event["kind"] == "stall":
            since = before["time"] if since is None else since
        elif since is not None:
            seconds, since = seconds + event["time"] - since, None
    return seconds + (0.0 if since is None else start[-1]["time"] - since)


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
            # Several optimizers count several steps for one that was timed.
            seconds = min(_number(event, "step_seconds") * max(end - begin, 0.0), max(0.0, event["time"] - since))
            yield _Window(begin, end, seconds, _number(split, "checkpoint") / total, skips, rewound)
            begin, since, skips = end, event["time"], 0


def _number(event: Mapping[str, Any], name: str) -> float:
    value = event.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
