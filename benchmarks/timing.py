"""Fair timing on a machine that drifts: variants take turns, and what is compared was measured in the same round."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Interval:
    """A median and the interval that covers the true median with at least 90 % probability."""

    median: float
    low: float
    high: float

    def format(self, scale: float = 1.0, digits: int = 3) -> str:
        """Write it as ``median [low, high]``."""
        m, low, high = (f"{scale * x:.{digits}f}" for x in (self.median, self.low, self.high))
        return f"{m} [{low}, {high}]"


def median_interval(values: Sequence[float], confidence: float = 0.9) -> Interval:
    """Return the median with its order-statistic interval, which assumes nothing about the distribution.

    The k-th smallest and k-th largest of n independent values enclose the true median with probability
    1 - 2 P(Binomial(n, 1/2) < k); k is the largest for which that reaches `confidence`, or 1 where n is too small.
    """
    ordered, n = sorted(values), len(values)
    k, below = 0, 0.0
    while below <= (1 - confidence) / 2:
        below += math.comb(n, k) / 2**n
        k += 1
    k = max(k - 1, 1)
    return Interval(statistics.median(ordered), ordered[k - 1], ordered[n - k])


@dataclass
class Samples:
    """Seconds of a step, one value a round: on the wall until the last rank is done, and of this rank's processor."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


def interleave(
    variants: Mapping[str, Iterator[None]], rounds: int, steps: int, seconds: float = math.inf
) -> dict[str, Samples]:
    """Time variants in turns, in another order each round; every rank calls it.

    Args:
        variants: Each `next` of a variant is one optimizer step; they have made one already.
        rounds: Turns of each variant.
        steps: Steps of a turn.
        seconds: No round but the first begins later than this; rank 0's clock decides.

    Returns:
        What was measured, by variant.
    """
    samples = {name: Samples() for name in variants}
    order = random.Random(0)
    begin = time.perf_counter()
    for i in range(rounds):
        late = torch.tensor(int(i > 0 and time.perf_counter() - begin > seconds))
        dist.broadcast(late, 0)
        if late:
            break
        names = list(variants)
        order.shuffle(names)
        for name in names:
            gc.collect()
            dist.barrier()
            start, processor = time.perf_counter(), time.process_time()
            for _ in range(steps):
                next(variants[name])
            dist.barrier()
            samples[name].wall.append((time.perf_counter() - start) / steps)
            samples[name].processor.append((time.process_time() - processor) / steps)
    return samples


def ratios(ours: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Compare two variants round by round."""
    return median_interval([a / b for a, b in zip(ours, baseline, strict=True)])


class HighWater:
    """How far the resident memory of this process rises above what it was at the start (Linux)."""

    def __init__(self) -> None:
        libc = ctypes.CDLL("libc.so.6")
        # Give blocks of 64 KiB and more back at once when they are freed, else earlier tensors hide later ones.
        libc.mallopt(ctypes.c_int(-3), ctypes.c_int(2**16))
        gc.collect()
        libc.malloc_trim(0)
        self._base = _status("VmRSS")

    def restart(self) -> None:
        """Forget the peak so far."""
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")

    def bytes(self) -> int:
        """Return the peak since `restart`, above the start."""
        return _status("VmHWM") - self._base


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def load() -> float:
    """Return how many threads wanted a processor in the last minute, on average."""
    return os.getloadavg()[0]
