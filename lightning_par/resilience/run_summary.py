"""What the events of a run say, put together for people; tolerates kinds and facts that are missing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_par.resilience.charts import Mark, Point
from lightning_par.resilience.goodput import Event, Goodput, goodput, split_starts


@dataclass(frozen=True)
class Start:
    """One start of a run.

    Args:
        number: From 1.
        began: Seconds since the epoch.
        seconds: Until its last event.
        first: The step it began at.
        last: The furthest step that an event of it names.
        facts: Of its ``start`` event.
        end: How it ended, in words.
        status: The exit status; None where it left none.
    """

    number: int
    began: float
    seconds: float
    first: int
    last: int
    facts: Mapping[str, Any]
    end: str
    status: int | None


@dataclass(frozen=True)
class RunSummary:
    """A run: its starts, its ``step`` events by start, what to mark in charts, and its goodput."""

    starts: list[Start]
    steps: list[list[Event]]
    marks: list[Mark]
    checkpoints: list[Event]
    stragglers: list[Event]
    parity: list[Event]
    goodput: Goodput
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def last(self) -> Event | None:
        """The last ``step`` event."""
        return next((steps[-1] for steps in reversed(self.steps) if steps), None)

    def points(self, name: str) -> list[list[Point]]:
        """A fact of the steps, each stretch in which they go up by itself; what is no finite number is left out."""
        stretches: list[list[Point]] = []
        for steps in self.steps:
            stretches.append([])
            for event in steps:
                value = number(event, name)
                if value is None:
                    continue
                if stretches[-1] and event["step"] <= stretches[-1][-1][0]:
                    stretches.append([])
                stretches[-1].append((event["step"], value))
        return [stretch for stretch in stretches if stretch]


def summarise(events: Sequence[Event]) -> RunSummary:
    """Put the events of a run together."""
    events = [e for e in events if number(e, "time") is not None and isinstance(e.get("kind"), str)]
    by_start = split_starts(events)
    counts: dict[str, int] = {}
    for event in events:
        counts[event["kind"]] = counts.get(event["kind"], 0) + 1
    return RunSummary(
        starts=[_start(i + 1, start) for i, start in enumerate(by_start)],
        steps=[[e for e in start if e["kind"] == "step" and number(e, "step") is not None] for start in by_start],
        marks=[mark for i, start in enumerate(by_start) for event in start for mark in _marks(event, i)],
        checkpoints=[e for e in events if e["kind"] == "checkpoint"],
        stragglers=[e for e in events if e["kind"] == "straggler"],
        parity=[e for e in events if e["kind"] == "parity"],
        goodput=goodput(events),
        counts=counts,
    )


def number(event: Mapping[str, Any], name: str) -> float | None:
    """A fact that is a finite number, else None."""
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def numbers(event: Mapping[str, Any], name: str) -> list[float]:
    """A fact that is a list of numbers, else an empty one."""
    value = event.get(name)
    return [float(v) if isinstance(v, int | float) else 0.0 for v in value] if isinstance(value, list) else []


def _start(index: int, events: Sequence[Event]) -> Start:
    facts = events[0] if events[0]["kind"] == "start" else {}
    steps = [int(step) for e in events if (step := number(e, "step")) is not None]
    how, status = _end(events)
    return Start(
        number=index,
        began=events[0]["time"],
        seconds=events[-1]["time"] - events[0]["time"],
        first=int(number(events[0], "step") or 0),
        last=max(steps, default=0),
        facts=facts,
        end=how,
        status=status,
    )


def _end(events: Sequence[Event]) -> tuple[str, int | None]:
    last = {event["kind"]: event for event in events}
    end, stop, stall = last.get("end"), last.get("stop"), last.get("stall")
    status = None if end is None else number(end, "status")
    said = "" if end is None else str(end.get("how", "ended"))
    if stop is not None:
        saved = f"saved {stop['saved']}" if stop.get("saved") else "nothing saved"
        said = f"stopped by {stop.get('signal', 'a signal')} on rank {stop.get('rank', '?')}, {saved}"
    elif stall is not None and status != 0:
        verdicts = stall.get("verdicts")
        found = verdicts.items() if isinstance(verdicts, Mapping) else ()
        said = "; ".join(["stalled", *(f"rank {rank} {text}" for rank, text in found)])
    return said or "left no word: killed, or still running", None if status is None else int(status)


def _marks(event: Event, index: int) -> list[Mark]:
    step = number(event, "step")
    if step is None:
        return []
    kind = event["kind"]
    if kind == "start" and index > 0:
        return [Mark("restart", step, f"start {index + 1} at step {step:g}")]
    if kind == "skip":
        ranks = ", ".join(map(str, event.get("ranks") or [])) or "?"
        text = f"step {step:g} skipped: {event.get('rule', 'guard')}, value {event.get('value')}, ranks {ranks}"
        return [Mark("skip", step, text)]
    if kind == "rewind":
        there, back = event.get("from_step", step), event.get("to_step", "?")
        return [Mark("rewind", step, f"rewind from step {there} to {back}, from {event.get('source', '?')}")]
    if kind == "checkpoint":
        return [Mark("checkpoint", step, f"checkpoint of step {step:g}: {event.get('path', '')}")]
    return []
