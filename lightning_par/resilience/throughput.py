"""Tokens or samples per second, TFLOP/s and MFU over all ranks, and what holds the step up."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_par.resilience.gathering import gather_numbers
from lightning_par.resilience.phases import PHASES, Phase
from lightning_par.resilience.step_timer import StepTimes

# Shares of the step above which a phase is what to look at, the most telling first, and what to do about it.
_ADVICE: tuple[tuple[Phase, float, str, str], ...] = (
    ("data", 0.10, "data loading", "more workers (num_workers), pin_memory, or less work in __getitem__"),
    ("checkpoint", 0.10, "saving", "save less often, or asynchronously (CommittedCheckpoint)"),
    ("communication", 0.25, "waiting for other ranks", "a larger batch a rank, or another layout"),
    ("other", 0.15, "what is outside of the steps", "callbacks, loggers and hooks of each batch"),
    ("optimizer", 0.25, "the optimizer", "fused=True, or par_zero1 where each rank has the whole state"),
)
_UNEVEN = 0.8  # of the time of the slowest rank: less than that is worth a word


@dataclass(frozen=True)
class ThroughputReport:
    """What some steps came to, the same on all ranks.

    Args:
        steps: How many they were.
        step_seconds: Of one, on the slowest rank.
        split: Seconds of one step by phase, the mean of the ranks.
        units: What was counted.
        per_second: Units of all data ranks; ranks of one model group see the same ones, which count once.
        per_second_per_rank: Units that each rank saw.
        own_seconds: Of each rank's own work in a step, without waiting for others.
        tflops: 1e12 model FLOPs per second and rank; None where FLOPs were not counted.
        hardware_tflops: The same with what was computed again.
        mfu: Model FLOPs of all ranks as a share of their peak; None where that is not known.
        memory_bytes: Of each rank.
        loss: The mean of the data ranks; None where no rank knew it.
    """

    steps: int
    step_seconds: float
    split: Mapping[Phase, float]
    units: str
    per_second: float
    per_second_per_rank: list[float]
    own_seconds: list[float]
    tflops: float | None
    hardware_tflops: float | None
    mfu: float | None
    memory_bytes: list[int]
    loss: float | None

    @property
    def shares(self) -> dict[Phase, float]:
        """Of the step, by phase."""
        total = sum(self.split.values()) or 1.0
        return {phase: self.split[phase] / total for phase in PHASES}

    @property
    def bottleneck(self) -> Phase:
        """The phase to look at first; ``forward_backward`` where no other takes much."""
        found = {phase: self.shares[phase] - limit for phase, limit, *_ in _ADVICE if self.shares[phase] >= limit}
        return max(found, key=lambda phase: found[phase]) if found else "forward_backward"

    @property
    def verdict(self) -> str:
        """The bottleneck in words."""
        share = f"{100 * self.shares[self.bottleneck]:.0f} % of the step"
        for phase, _, name, advice in _ADVICE:
            if phase != self.bottleneck:
                continue
            slow, fast = max(self.own_seconds), min(self.own_seconds)
            if phase == "communication" and fast < _UNEVEN * slow:
                advice = f"rank {self.own_seconds.index(slow)} works {slow / fast:.1f} x as long as the fastest"
            return f"{name} is {share}: {advice}"
        return f"computation is {share}: nothing else holds it up"

    def metrics(self) -> dict[str, float]:
        """For loggers, by name."""
        found: dict[str, float | None] = {
            f"{self.units}_per_second": self.per_second,
            f"{self.units}_per_second_per_rank": sum(self.per_second_per_rank) / len(self.per_second_per_rank),
            "step_seconds": self.step_seconds,
            "tflops_per_rank": self.tflops,
            "hardware_tflops_per_rank": self.hardware_tflops,
            "mfu": self.mfu,
            **{f"{phase}_share": share for phase, share in self.shares.items()},
        }
        return {f"throughput/{name}": value for name, value in found.items() if value is not None}


class Throughput:
    """Adds up steps of this rank, and reports on all ranks.

    Args:
        units: What is counted, ``"tokens"`` or ``"samples"``.
        data_rank: Of this rank; ranks with the same one see the same data.
        peak_flops: FLOP per second of this rank's device; None where it is not known.
        device: Of the tensor that is gathered.
    """

    def __init__(
        self,
        units: str = "samples",
        *,
        data_rank: int = 0,
        peak_flops: float | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.units = units
        self._data_rank = data_rank
        self._peak = peak_flops
        self._device = device
        self._flops_per_unit = (0.0, 0.0)
        self._clear()

    def _clear(self) -> None:
        self._steps, self._count = 0, 0.0
        self._split = dict.fromkeys(PHASES, 0.0)

    @property
    def steps(self) -> int:
        """How many there were since the last report."""
        return self._steps

    def add(self, times: StepTimes) -> None:
        """Count a step."""
        self._steps += 1
        for phase, seconds in times.split.items():
            self._split[phase] += seconds

    def count(self, units: int) -> None:
        """Count the units of this rank in steps that are added."""
        self._count += units

    def calibrate(self, model_flops: float, hardware_flops: float, units: int) -> None:
        """Say how many FLOPs this rank needed for so many units."""
        if units:
            self._flops_per_unit = model_flops / units, hardware_flops / units

    def report(self, loss: float | None = None) -> ThroughputReport | None:
        """Report on the steps since the last one; collective over all ranks.

        Args:
            loss: Of this rank, where it knows one.

        Returns:
            The report; None if a rank has added no steps.
        """
        mine = [self._steps, self._count, self._data_rank, *self._flops_per_unit, self._peak or 0.0]
        mine += [memory_in_use(self._device), float(loss is not None), 0.0 if loss is None else loss]
        everyone = gather_numbers([*mine, *(self._split[phase] for phase in PHASES)], self._device)
        self._clear()
        if min(row[0] for row in everyone) == 0:
            return None
        return _evaluate(everyone, self.units)


def _evaluate(ranks: list[list[float]], units: str) -> ThroughputReport:
    splits = [dict(zip(PHASES, row[-len(PHASES) :], strict=True)) for row in ranks]
    seconds = [sum(split.values()) for split in splits]
    slowest = max(max(seconds), 1e-9)
    # Ranks of a model group see the same data.
    counted = {int(row[2]): row[1] for row in ranks}
    losses = {int(row[2]): row[8] for row in ranks if row[7]}
    model, hardware = (sum(row[i] * row[1] for row in ranks) / slowest for i in (3, 4))
    peak = sum(row[5] for row in ranks)
    known = peak > 0 and all(row[5] for row in ranks)
    return ThroughputReport(
        steps=int(ranks[0][0]),
        step_seconds=slowest / ranks[0][0],
        split={phase: sum(split[phase] for split in splits) / len(ranks) / ranks[0][0] for phase in PHASES},
        units=units,
        per_second=sum(counted.values()) / slowest,
        per_second_per_rank=[row[1] / slowest for row in ranks],
        own_seconds=[(s["data"] + s["forward_backward"] + s["optimizer"]) / ranks[0][0] for s in splits],
        tflops=model / len(ranks) / 1e12 if model else None,
        hardware_tflops=hardware / len(ranks) / 1e12 if hardware else None,
        mfu=model / peak if model and known else None,
        memory_bytes=[int(row[6]) for row in ranks],
        loss=sum(losses.values()) / len(losses) if losses else None,
    )


def memory_in_use(device: torch.device | str) -> int:
    """Bytes: on CUDA the most that the allocator has held; else of this process, resident now (elsewhere: at most)."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    statm = Path("/proc/self/statm")
    if statm.is_file():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
