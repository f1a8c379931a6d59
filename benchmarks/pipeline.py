"""Measured against simulated steps of each pipeline schedule, with stages that sleep instead of computing.

Four ranks on gloo. A stage sleeps in its forward, in the gradient of its input and in the gradient of its weight, so
that the time of a step is the schedule's and not the machine's, however few cores there are. Each schedule runs plain
stages, and the replayed stages of one model under `parallelize`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from benchmarks.timing import Interval, load, median_interval
from lightning_par import ParallelLayout, parallelize
from lightning_par.layout import ParallelMesh
from lightning_par.parallel.options import ParallelOptions
from lightning_par.parallel.pipeline import schedules
from lightning_par.parallel.pipeline.batch import Step, loss_of
from lightning_par.parallel.pipeline.schedules import SCHEDULES, default_stages_per_rank
from lightning_par.parallel.pipeline.timeline import Timeline, bubble_formula, simulate
from lightning_par.testing import run_ranks

RANKS = 4
WARM_UP, MEASURED = 1, 3
TOLERANCE = 0.1


@dataclass(frozen=True)
class Size:
    """Numbers of micro-batches, and the seconds of one part of one stage: forward, input and weight gradient alike."""

    microbatches: tuple[int, ...]
    seconds: float


FULL = Size((4, 8, 16), 0.040)
QUICK = Size((4,), 0.010)

Stepper = Callable[[], None]
Runner = Callable[[str, int, float, ParallelMesh], Stepper]
"""Makes of a schedule, a number of micro-batches, the seconds of a part of a stage and the ranks what runs one step."""


class Sleep(torch.autograd.Function):
    """Hands a tensor on; sleeps in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, None, None


class SleepingBlock(nn.Module):
    """Sleeps for equal times in the forward and in each of the two gradients.

    The gradients are nodes of their own, which meet in the sum: a split backward runs each of them when its turn is.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x, self.seconds, self.seconds) + Sleep.apply(self.weight, 0.0, self.seconds)


class Stage(nn.Module):
    """One block; the first stage has an embedding before it, so that its block's input has a gradient too."""

    def __init__(self, seconds: float, first: bool) -> None:
        super().__init__()
        self.block = SleepingBlock(seconds)
        self.embedding = nn.Parameter(torch.zeros(1)) if first else None

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x if self.embedding is None else x + self.embedding)


class SleepingModel(nn.Module):
    """The same blocks in one model, whose forward is the loss."""

    def __init__(self, blocks: int, seconds: float) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(1))
        self.blocks = nn.ModuleList(SleepingBlock(seconds) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.embedding
        for block in self.blocks:
            h = block(h)
        return F.mse_loss(h, torch.zeros_like(h))


def plain_stages(name: str, n_microbatches: int, seconds: float, mesh: ParallelMesh) -> Stepper:
    """Stages of plain modules in torch's schedule, without a strategy."""
    stages_per_rank = default_stages_per_rank(name)
    count = RANKS * stages_per_rank
    boundary = torch.zeros(1, requires_grad=True)
    stages = [
        PipelineStage(
            Stage(seconds, first=index == 0),
            index,
            count,
            torch.device("cpu"),
            input_args=torch.zeros(1) if index == 0 else boundary,
            output_args=boundary,
        )
        for index in schedules.stages_of_rank(name, dist.get_rank(), RANKS, stages_per_rank)
    ]
    schedule = schedules.build_schedule(name, stages, n_microbatches, lambda output, target: (output * target).sum())
    rows = torch.ones(n_microbatches)

    def step() -> None:
        schedules.run(schedule, (rows,), rows)

    return step


def replayed_stages(name: str, n_microbatches: int, seconds: float, mesh: ParallelMesh) -> Stepper:
    """Stages of one block each of a model that knows nothing of them."""
    count = RANKS * default_stages_per_rank(name)
    model = SleepingModel(count, seconds)
    rows = torch.ones(n_microbatches)
    options = ParallelOptions(
        blocks=[SleepingBlock],
        pp_schedule=name,
        pp_microbatches=n_microbatches,
        pp_split=[1] * count,
        # Losses without targets to count would be compared in the batches that are measured.
        pp_loss_weight="samples",
    )
    handle = parallelize(model, mesh.layout, options=options, mesh=mesh, example_inputs=(rows[:2],))
    pipeline = handle.pipeline
    assert pipeline is not None

    def step() -> None:
        pipeline.train(Step(model, model, loss_of, "train"), rows)
        handle.finish_backward()

    return step


RUNNERS: dict[str, Runner] = {"torch": plain_stages, "replayed": replayed_stages}


def measure(runners: list[Runner], cases: list[tuple[str, int]], seconds: float) -> list[list[float]]:
    """Return the seconds of steps of each runner with each case, until the last rank is done; each rank calls it.

    They take turns, so that other work on the machine disturbs one step of each and not all of one.
    """
    torch.set_num_threads(1)
    mesh = ParallelLayout(pp_size=RANKS, dp_shard_size=1).build_mesh("cpu")
    steppers = [runner(*case, seconds, mesh) for runner in runners for case in cases]
    rounds = [[timed(step) for step in steppers] for _ in range(WARM_UP + MEASURED)]
    return [list(steps) for steps in zip(*rounds[WARM_UP:], strict=True)]


def timed(step: Stepper) -> float:
    dist.barrier()
    begin = time.perf_counter()
    step()
    took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def run(size: Size) -> str:
    """Run every schedule with each number of micro-batches that it can have; return the report in Markdown."""
    begin, busy = time.monotonic(), load()
    cases = [
        (name, m)
        for name in SCHEDULES
        for m in size.microbatches
        if not schedules.schedule_problems(name, RANKS, m, default_stages_per_rank(name))
    ]
    timelines = [
        simulate(schedules.compute_actions(name, RANKS, m, default_stages_per_rank(name)), *[size.seconds] * 3)
        for name, m in cases
    ]
    limit = 90 + 3 * len(RUNNERS) * (WARM_UP + MEASURED) * sum(timeline.step_time for timeline in timelines)
    seconds = run_ranks(RANKS, measure, list(RUNNERS.values()), cases, size.seconds, timeout=limit)[0]
    measured = [median_interval(values) for values in seconds]
    by_case = [measured[index :: len(cases)] for index in range(len(cases))]
    lines = [
        f"{RANKS} gloo ranks on {os.cpu_count()} cores, whose load was {busy:.1f} before and {load():.1f} after; "
        f"{1000 * size.seconds:.0f} ms for the forward, the input gradient and the weight gradient of each stage; "
        f"median of {MEASURED} steps after {WARM_UP}, in turns; torch {torch.__version__}, "
        f"{time.monotonic() - begin:.0f} s in all.",
        "",
        "| schedule | stages a rank | micro-batches | simulated ms |"
        + "".join(f" {runner} ms | ratio |" for runner in RUNNERS)
        + " bubble: closed form | simulated |"
        + "".join(f" {runner} |" for runner in RUNNERS),
        "|---" * (6 + 3 * len(RUNNERS)) + "|",
        *(row(*case, size.seconds, t, found) for case, t, found in zip(cases, timelines, by_case, strict=True)),
        "",
    ]
    for index, runner in enumerate(RUNNERS):
        worst = max(abs(m[index].median / t.step_time - 1) for m, t in zip(by_case, timelines, strict=True))
        lines.append(
            f"- {runner} within {TOLERANCE:.0%} of simulated: {'met' if worst <= TOLERANCE else 'missed'} "
            f"(worst {worst:.1%})"
        )
    return "\n".join(lines)


def row(name: str, n_microbatches: int, seconds: float, simulated: Timeline, measured: list[Interval]) -> str:
    stages_per_rank = default_stages_per_rank(name)
    formula = bubble_formula(name, RANKS, n_microbatches, stages_per_rank)
    work = 3 * seconds * stages_per_rank * n_microbatches
    cells = [name, stages_per_rank, n_microbatches, f"{1000 * simulated.step_time:.0f}"]
    for found in measured:
        cells += [found.format(1000, 0), f"{found.median / simulated.step_time:.3f}"]
    cells += ["-" if formula is None else f"{formula:.1%}", f"{simulated.bubble:.1%}"]
    cells += [f"{1 - work / found.median:.1%}" for found in measured]
    return f"| {' | '.join(map(str, cells))} |"
