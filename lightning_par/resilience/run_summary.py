"""What the events of a run say, put together for people; tolerates kinds and facts that are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lightning_par.resilience.charts import Mark, Point
from lightning_par.resilience.events import number
from lightning_par.resilience.goodput import Event, Goodput, Stall, goodput, split_starts, stalls_of

_LAST_TIME = 32_503_680_000.0  # the year 3000: what is beyond is no date
_MOVES = ("stall", "stall_over", "step")  # the last of them says whether a start ended in a stall
_RANKS = 4


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
    stalls: list[Stall]
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
    events = [e for e in events if isinstance(e.get("kind"), str) and 0 <= (number(e, "time") or -1) < _LAST_TIME]
    by_start = split_starts(events)
    counts: dict[str, int] = {}
    for event in events:
        counts[event["kind"]] = counts.get(event["kind"], 0) + 1
    return RunSummary(
        starts=[_start(i + 1, start) for i, start in enumerate(by_start)],
        steps=[[e for e in start if e["kind"] == "step" and number(e, "step") is not None] for start in by_start],
        marks=[mark for i, start in enumerate(by_start) for event in start for mark in _marks(event, i)],
        stalls=[stall for start in by_start for stall in stalls_of(start)],
        checkpoints=[e for e in events if e["kind"] == "checkpoint"],
        stragglers=[e for e in events if e["kind"] == "straggler"],
        parity=[e for e in events if e["kind"] == "parity"],
        goodput=goodput(events),
        counts=counts,
    )


def loss_text(event: Event) -> str:
    """The loss of a ``step`` event, also where it is no finite number; empty where it has none."""
    value = event.get("loss")
    if (loss := number(event, "loss")) is not None:
        return f"{loss:.4g}"
    return str(value) if str(value) in ("nan", "inf", "-inf") else ""


def numbers(event: Mapping[str, Any], name: str) -> list[float]:
    """A fact that is a list of numbers, else an empty one."""
    value = event.get(name)
    return [number({"": one}, "") or 0.0 for one in value] if isinstance(value, list) else []


def several_runs(starts: Sequence[Start]) -> list[str]:
    """Say so where the events of several runs seem to lie in one file, as their numbers mean little together."""
    for before, start in pairwise(starts):
        if before.status == 0 and before.last > 0 and start.first == 0:
            return [
                f"Start {start.number} began at step 0 after start {before.number} had finished: these seem to be "
                "several runs in one directory, and goodput and replayed steps count them as one. Give each run a "
                "default_root_dir of its own."
            ]
    return []


def _start(index: int, events: Sequence[Event]) -> Start:
    facts = events[0] if events[0]["kind"] == "start" else {}
    steps = [int(step) for e in events if (step := number(e, "step")) is not None]
    how, status = _end(events)
    return Start(
        number=index,
        began=events[0]["time"],
        seconds=max(event["time"] for event in events) - events[0]["time"],
        first=int(number(events[0], "step") or 0),
        last=max(steps, default=0),
        facts=facts,
        end=how,
        status=status,
    )


def _end(events: Sequence[Event]) -> tuple[str, int | None]:
    last = {event["kind"]: event for event in events}
    end, stop = last.get("end"), last.get("stop")
    stall = next((e for e in reversed(events) if e["kind"] in _MOVES), {})
    status = None if end is None else number(end, "status")
    said = "" if end is None else str(end.get("how", "ended"))
    error = next((e for e in events if e["kind"] == "error"), None)
    if stop is not None:
        saved = f"saved {stop['saved']}" if stop.get("saved") else "nothing saved"
        said = f"stopped by {stop.get('signal', 'a signal')} on rank {stop.get('rank', '?')}, {saved}"
    elif error is not None and (end is None or end.get("follows")):
        # Where rank 0 has but lost another one, or left no word, the first one that did knows more.
        said = f"rank {error.get('rank', '?')}: {error.get('how', 'failed')}"
    elif stall.get("kind") == "stall" and status != 0:
        said = "; ".join(["stalled", *verdicts(stall)])
    if not said:
        is_noted = events[0]["kind"] == "start"
        said = "left no word: killed, or still running" if is_noted else "not recorded: ThroughputMonitor does so"
    return said, None if status is None else int(status)


def verdicts(stall: Event) -> list[str]:
    """What was said of the ranks that held up the others; of all where none was named."""
    by_rank, guilty = stall.get("verdicts"), stall.get("guilty")
    found = list(by_rank.items()) if isinstance(by_rank, Mapping) else []
    names = {str(rank) for rank in guilty} if isinstance(guilty, list) else set()
    found = [(rank, said) for rank, said in found if rank in names] or found
    more = [f"and {len(found) - _RANKS} more ranks"] if len(found) > _RANKS else []
    return [f"rank {rank}: {said}" for rank, said in found[:_RANKS]] + more


def _marks(event: Event, index: int) -> list[Mark]:
    step = number(event, "step")
    if step is None:
        return []
    kind = event["kind"]
    if kind == "start" and index > 0:
        return [Mark("restart", step, f"start {index + 1} at step {step:.0f}")]
    if kind == "skip":
        known = event.get("ranks")
        ranks = ", ".join(map(str, known)) if isinstance(known, list) and known else "?"
        text = f"step {step:.0f} skipped: {event.get('rule', 'guard')}, value {event.get('value')}, ranks {ranks}"
        return [Mark("skip", step, text)]
    if kind == "rewind":
        there, back = event.get("from_step", step), event.get("to_step", "?")
        return [Mark("rewind", step, f"rewind from step {there} to {back}, from {event.get('source', '?')}")]
    if kind == "checkpoint":
        return [Mark("checkpoint", step, f"checkpoint of step {step:.0f}: {event.get('path', '')}")]
    return []
