"""What looking after a run adds to its steps, and what a snapshot costs beside a plain copy of the same bytes.

Two ranks on gloo, one thread each; all variants live in the same two processes and take turns.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning
import torch
from torch import Tensor

from benchmarks.data import GPT, RANKS, InTrainer, Module, Size, optimizer, quietly, verdict
from benchmarks.timing import Samples, interleave, load, ratios
from lightning_par import strategies
from lightning_par.callbacks import NaNRewind, PreemptionGuard, StallWatchdog, ThroughputMonitor
from lightning_par.resilience.snapshots import SnapshotRing
from lightning_par.testing import run_ranks

FULL = Size(width=256, layers=6, vocabulary=2048, length=128, batch=4)
QUICK = Size(width=32, layers=2, vocabulary=64, length=8, imports=0)
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


# The first one is what the others are compared with.
CALLBACKS: dict[str, Callable[[], list[Any]]] = {
    "": list,
    ", NaNRewind, StallWatchdog, ThroughputMonitor": guards,
    ", these and PreemptionGuard": all_guards,
}
STEPS: dict[str, dict[str, tuple[Callable[[], Any], Callable[[], list[Any]]]]] = {
    name: {f"{name}{what}": (strategy, callbacks) for what, callbacks in CALLBACKS.items()}
    for name, strategy in (("par_ddp", strategies.DataParallelStrategy), ("par_fsdp", strategies.FSDP2Strategy))
}


@dataclass
class Measured:
    steps: dict[str, Samples]
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


def measure(size: Size, rounds: int, steps: int, limit: float) -> Measured:
    """Time everything on this rank, see `interleave`."""
    quietly()
    # Fits take turns in threads, where PreemptionGuard hears no signals and says so.
    logging.getLogger("lightning_par").setLevel(logging.ERROR)
    busy = [load()]
    steppers = {
        name: InTrainer(Module, strategy, size, 1 + rounds * steps, callbacks=callbacks)
        for variants in STEPS.values()
        for name, (strategy, callbacks) in variants.items()
    }
    for stepper in steppers.values():
        next(stepper)
    timed: dict[str, Iterator[None]] = dict(steppers)
    found = interleave(timed, rounds, steps, limit)
    for stepper in steppers.values():
        stepper.close()
    copied, size_of_one = copies(replace(size, width=2 * size.width))
    return Measured(found, interleave(copied, rounds, 1, limit), size_of_one, [*busy, load()])


def run(size: Size, rounds: int, steps: int, minutes: float) -> str:
    """Run everything and return the report in Markdown; no round but the first begins after so many minutes."""
    start, limit = time.monotonic(), 60 * minutes
    measured = run_ranks(RANKS, measure, size, rounds, steps, limit, timeout=600 + 3 * limit)[0]
    count = sum(p.numel() for p in GPT(size).parameters())
    before, after = measured.busy
    lines = [
        f"GPT of {count / 1e6:.1f}M parameters (width {size.width}, {size.layers} blocks), fp32, AdamW, {size.batch} x "
        f"{size.length} tokens a rank and batch; {RANKS} gloo ranks of one thread each on {os.cpu_count()} cores, "
        f"whose load was {before:.1f} before and {after:.1f} after; torch {torch.__version__}, lightning "
        f"{lightning.__version__}; {len(measured.copies[PLAIN].wall)} rounds of {steps} steps a variant, "
        f"{time.monotonic() - start:.0f} s in all. The snapshot is of one of "
        f"twice the width and has {measured.bytes / 1e6:.0f} MB.",
        "",
        "| | ms | of the first | processor, ms | of the first |",
        "|---|---|---|---|---|",
    ]
    goals = []
    compared = [(measured.steps, list(names), 1.03) for names in STEPS.values()]
    for samples, (base, *others), bound in [*compared, (measured.copies, [PLAIN, TAKEN], 1.2)]:
        lines.append(_row(base, samples[base], "", ""))
        for name in others:
            ratio = ratios(samples[name].wall, samples[base].wall)
            busy = ratios(samples[name].processor, samples[base].processor)
            lines.append(_row(name, samples[name], ratio.format(), busy.format()))
            goals.append(verdict(f"{name} takes <= {bound} of {base}", ratio, bound))
    return "\n".join([*lines, "", *goals])


def _row(name: str, samples: Samples, wall: str, processor: str) -> str:
    times = [1000 * statistics.median(values) for values in (samples.wall, samples.processor)]
    return f"| {name} | {times[0]:.2f} | {wall} | {times[1]:.2f} | {processor} |"
