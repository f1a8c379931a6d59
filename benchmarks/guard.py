"""What looking after a run adds to its steps, and what a snapshot costs beside a plain copy of the same bytes.

Two ranks on gloo, one thread each; all variants live in the same two processes and take turns. Two Trainers that do the
same differ by up to 2 % as long as they live, by where their memory lies; so each variant is built several times.
"""

from __future__ import annotations

import logging
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning
import torch
from torch import Tensor

from benchmarks.data import GPT, RANKS, InTrainer, Module, Size, optimizer, quietly, verdict
from benchmarks.timing import Interval, Samples, interleave, load, median_interval, ratios
from lightning_par import strategies
from lightning_par.callbacks import NaNRewind, PreemptionGuard, StallWatchdog, ThroughputMonitor
from lightning_par.resilience.snapshots import SnapshotRing
from lightning_par.testing import run_ranks

FULL = Size(width=256, layers=6, vocabulary=2048, length=128, batch=4)
QUICK = Size(width=32, layers=2, vocabulary=64, length=8, imports=0)
# Of Trainers, in another order each.
SETS = 8
PLAIN, TAKEN = "plain copy of the same bytes", "SnapshotRing.take"


def guards() -> list[Any]:
    """Without snapshots, which are measured apart."""
    return [
        NaNRewind(snapshot_every_n_steps=None, check_params_every=None),
        StallWatchdog(),
        ThroughputMonitor(every_n_steps=10),
    ]


def all_guards() -> list[Any]:
    """With the one that takes Lightning's broadcast before each batch away."""
    return [*guards(), PreemptionGuard()]


ONCE_MORE = ", once more"
# The first one is what the others are compared with, and the second one what such a comparison is worth.
CALLBACKS: dict[str, Callable[[], list[Any]]] = {
    "": list,
    ONCE_MORE: list,
    ", NaNRewind, StallWatchdog, ThroughputMonitor": guards,
    ", these and PreemptionGuard": all_guards,
}
Variant = tuple[Callable[[], Any], Callable[[], list[Any]]]
STEPS: dict[str, dict[str, Variant]] = {
    name: {f"{name}{what}": (strategy, callbacks) for what, callbacks in CALLBACKS.items()}
    for name, strategy in (("par_ddp", strategies.DataParallelStrategy), ("par_fsdp", strategies.FSDP2Strategy))
}


@dataclass
class Measured:
    """`steps`: one for each set of Trainers."""

    steps: list[dict[str, Samples]]
    copies: dict[str, Samples]
    bytes: int
    busy: list[float]


def in_turn(action: Callable[[], Any]) -> Iterator[None]:
    while True:
        action()
        yield


def copies(size: Size) -> tuple[dict[str, Iterator[None]], int]:
    """A ring that has its memory, and tensors of the same sizes to copy into."""
    torch.manual_seed(0)
    model = GPT(size)
    adam = optimizer(model)
    model(torch.zeros(1, size.length + 1, dtype=torch.int64)).backward()
    adam.step()
    ring = SnapshotRing({"model": model}, [adam], keep=1)
    sources = [*model.parameters(), *model.buffers()]
    sources += [value for state in adam.state.values() for value in state.values() if isinstance(value, Tensor)]
    places = [torch.empty_like(source) for source in sources]

    @torch.no_grad()
    def copy() -> None:
        for place, source in zip(places, sources, strict=True):
            place.copy_(source)

    copy()
    ring.take(0)
    return {PLAIN: in_turn(copy), TAKEN: in_turn(partial(ring.take, 0))}, ring.bytes()


def measure_set(
    variants: Mapping[str, Variant], size: Size, rounds: int, steps: int, limit: float, order: random.Random
) -> dict[str, Samples]:
    """Time Trainers that are built for it, in some order."""
    steppers = {
        name: InTrainer(Module, strategy, size, 1 + rounds * steps, callbacks=callbacks)
        for name, (strategy, callbacks) in order.sample(list(variants.items()), len(variants))
    }
    for stepper in steppers.values():
        next(stepper)
    timed: dict[str, Iterator[None]] = dict(steppers)
    found = interleave(timed, rounds, steps, limit)
    for stepper in steppers.values():
        stepper.close()
    return found


def measure(size: Size, rounds: int, steps: int, limit: float) -> Measured:
    """Time everything on this rank, see `interleave`."""
    quietly()
    # Fits take turns in threads, where PreemptionGuard hears no signals and says so.
    logging.getLogger("lightning_par").setLevel(logging.ERROR)
    busy, begin = [load()], time.monotonic()
    found: list[dict[str, Samples]] = []
    for number in range(min(SETS, rounds)):
        turns, order = len(range(number, rounds, SETS)), random.Random(number)
        found.append({})
        # One strategy after the other: the shorter a round, the less it sees of what drifts.
        for variants in STEPS.values():
            found[-1] |= measure_set(variants, size, turns, steps, begin + limit - time.monotonic(), order)
    copied, size_of_one = copies(replace(size, width=2 * size.width))
    return Measured(found, interleave(copied, rounds, 1, limit), size_of_one, [*busy, load()])


def run(size: Size, rounds: int, steps: int, minutes: float) -> str:
    """Run everything and return the report in Markdown; no round but the first begins after so many minutes."""
    start, limit = time.monotonic(), 60 * minutes
    measured = run_ranks(RANKS, measure, size, rounds, steps, limit, timeout=600 + 3 * limit)[0]
    count = sum(p.numel() for p in GPT(size).parameters())
    before, after = measured.busy
    first = [one["par_ddp"] for one in measured.steps]
    lines = [
        f"GPT of {count / 1e6:.1f}M parameters (width {size.width}, {size.layers} blocks), fp32, AdamW, {size.batch} x "
        f"{size.length} tokens a rank and batch; {RANKS} gloo ranks of one thread each on {os.cpu_count()} cores, "
        f"whose load was {before:.1f} before and {after:.1f} after; torch {torch.__version__}, lightning "
        f"{lightning.__version__}; {sum(len(turns.wall) for turns in first)} rounds of {steps} steps a variant on "
        f"{len(first)} sets of Trainers, {time.monotonic() - start:.0f} s in all. The snapshot is of one of twice the "
        f"width and has {measured.bytes / 1e6:.0f} MB.",
        "",
        "| | ms | of the first | processor, ms | of the first |",
        "|---|---|---|---|---|",
    ]
    goals = []
    for names in STEPS.values():
        base, *others = names
        lines.append(_row(base, [one[base] for one in measured.steps]))
        for name in others:
            wall, busy = (_over_sets(measured.steps, name, base, what) for what in ("wall", "processor"))
            lines.append(_row(name, [one[name] for one in measured.steps], wall.format(), busy.format()))
            if not name.endswith(ONCE_MORE):
                goals.append(verdict(f"{name} takes <= 1.03 of {base}", wall, 1.03))
    plain, taken = measured.copies[PLAIN], measured.copies[TAKEN]
    ratio = ratios(taken.wall, plain.wall)
    lines.append(_row(PLAIN, [plain]))
    lines.append(_row(TAKEN, [taken], ratio.format(), ratios(taken.processor, plain.processor).format()))
    goals.append(verdict(f"{TAKEN} takes <= 1.2 of {PLAIN}", ratio, 1.2))
    return "\n".join([*lines, "", *goals])


def _over_sets(sets: list[dict[str, Samples]], name: str, base: str, what: str) -> Interval:
    """Compare two variants round by round, and take the median of each set as one value."""
    found = [(getattr(one[name], what), getattr(one[base], what)) for one in sets]
    return median_interval([ratios(ours, theirs).median for ours, theirs in found])


def _row(name: str, samples: list[Samples], wall: str = "", processor: str = "") -> str:
    walls = [1000 * seconds for one in samples for seconds in one.wall]
    busy = [1000 * seconds for one in samples for seconds in one.processor]
    return f"| {name} | {statistics.median(walls):.2f} | {wall} | {statistics.median(busy):.2f} | {processor} |"
