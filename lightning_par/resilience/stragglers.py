"""Which ranks are slow: by the time of their own work, as all ranks of a synchronous step take equally long."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_par.resilience.gathering import gather_numbers
from lightning_par.resilience.phases import Phase
from lightning_par.resilience.step_timer import StepTimes

OWN: tuple[Phase, ...] = ("data", "forward_backward", "optimizer")


@dataclass(frozen=True)
class Straggler:
    """A rank that has been slow for some intervals.

    Args:
        rank: Of the process.
        host: Where it runs.
        phase: In which it loses most against the fastest.
        relative: Own time of the fastest rank with the same work, as a share of this one's (medians): 1 is as fast.
        individual: Own time in its best interval, as a share of that in this one.
        intervals: For how many intervals in a row.
    """

    rank: int
    host: str
    phase: Phase
    relative: float
    individual: float
    intervals: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on {self.host} is slow in {self.phase.replace('_', ' and ')}: {self.relative:.2f} of "
            f"the speed of the fastest, {self.individual:.2f} of its own best, for {self.intervals} intervals"
        )


class StragglerDetector:
    """Compares the ranks' own time (data, forward and backward, optimizer) interval by interval.

    A rank is slow in an interval where its relative score is below `threshold`, or its individual score is while that
    of the median rank is not (where all become slower at once, the work became more). After `patience` such intervals
    in a row it is a straggler.

    Args:
        stage: Ranks are compared with those of the same stage: stages of a pipeline have different work.
        host: The name of this machine.
        threshold: Of the scores.
        patience: Intervals in a row.
        device: Of the tensor that is gathered.
    """

    def __init__(
        self,
        *,
        stage: int = 0,
        host: str = "",
        threshold: float = 0.75,
        patience: int = 2,
        device: torch.device | str = "cpu",
    ) -> None:
        self._stage, self._host = stage, host
        self._threshold, self._patience = threshold, patience
        self._device = device
        self._times: list[StepTimes] = []
        self._hosts: list[str] | None = None
        self._best: dict[int, float] = {}
        self._slow: dict[int, int] = {}

    def add(self, times: StepTimes) -> None:
        """Take a step of this rank into the interval."""
        self._times.append(times)

    def report(self) -> list[Straggler]:
        """End the interval; collective over all ranks.

        Returns:
            The stragglers, the same on all ranks; none where a rank had no step.
        """
        times, self._times = self._times, []
        mine = [statistics.median(t.split[phase] for t in times) if times else 0.0 for phase in OWN]
        own = statistics.median(t.own for t in times) if times else 0.0
        ranks = gather_numbers([float(len(times)), float(self._stage), own, *mine], self._device)
        if self._hosts is None:
            self._hosts = _gather_hosts(self._host)
        if min(row[0] for row in ranks) == 0:
            return []
        return self._evaluate(ranks, self._hosts)

    def _evaluate(self, ranks: Sequence[Sequence[float]], hosts: Sequence[str]) -> list[Straggler]:
        owns = [max(row[2], 1e-9) for row in ranks]
        stages = [row[1] for row in ranks]
        fastest = {
            stage: min((i for i, s in enumerate(stages) if s == stage), key=owns.__getitem__) for stage in stages
        }
        for rank, own in enumerate(owns):
            self._best[rank] = min(self._best.get(rank, own), own)
        individual = [self._best[rank] / own for rank, own in enumerate(owns)]
        # Of two ranks the faster one: a rank that became slow by itself must not hide it.
        usual = statistics.median_high(individual)
        found = []
        for rank, own in enumerate(owns):
            first = fastest[stages[rank]]
            relative = owns[first] / own
            alone = individual[rank] < self._threshold <= usual
            self._slow[rank] = self._slow.get(rank, 0) + 1 if relative < self._threshold or alone else 0
            if self._slow[rank] >= self._patience:
                lost = {phase: ranks[rank][3 + i] - ranks[first][3 + i] for i, phase in enumerate(OWN)}
                phase = max(lost, key=lost.__getitem__) if first != rank else self._largest(ranks[rank])
                found.append(Straggler(rank, hosts[rank], phase, relative, individual[rank], self._slow[rank]))
        return found

    def _largest(self, row: Sequence[float]) -> Phase:
        return max(OWN, key=lambda phase: row[3 + OWN.index(phase)])


def changes(before: Sequence[Straggler], now: Sequence[Straggler]) -> list[str]:
    """What is new for people: ranks that became stragglers, and those that are none any more."""
    slow: Mapping[int, Straggler] = {one.rank: one for one in before}
    still = {one.rank for one in now}
    return [str(one) for one in now if one.rank not in slow] + [
        f"rank {rank} on {one.host} is as fast as the others again" for rank, one in slow.items() if rank not in still
    ]


def _gather_hosts(host: str) -> list[str]:
    hosts = [host]
    if dist.is_available() and dist.is_initialized():
        hosts = [""] * dist.get_world_size()
        dist.all_gather_object(hosts, host)
    return hosts
