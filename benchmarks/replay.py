"""Replayed pipelines against the same stages written by hand as modules in torch's own schedule.

Two ranks on gloo, one thread each, 1F1B. Times: all variants live in the same two processes and take turns. Memory:
each variant by itself, counted and not sampled: what Python can reach between two steps, and what the allocator gave
and took back within one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.profiler import ProfilerActivity, profile

from benchmarks.data import GPT, InTrainer, Module, Size, batches, optimizer, quietly, verdict
from benchmarks.timing import Samples, interleave, load, median_interval, ratios
from lightning_par import ParallelLayout, parallelize, strategies
from lightning_par.parallel.memory import live_tensor_bytes, model_state_bytes
from lightning_par.parallel.options import ParallelOptions
from lightning_par.parallel.pipeline.batch import Step, loss_of
from lightning_par.strategies import fabric as fabric_strategies
from lightning_par.testing import run_ranks, stop_pool

RANKS = 2
MICROBATCHES = 4
GOAL = 1.05
SEED = 0

FULL = Size(width=384, layers=6, vocabulary=2048, length=256, batch=2 * MICROBATCHES)
QUICK = Size(width=32, layers=2, vocabulary=64, length=8, batch=MICROBATCHES)

State = tuple[nn.Module, torch.optim.Optimizer]
Stepper = Iterator[State | None]


class FirstStage(nn.Module):
    """What a user writes for the first rank."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.tokens, self.positions = model.tokens, model.positions
        self.blocks = model.blocks[: len(model.blocks) // RANKS]

    def forward(self, tokens: Tensor) -> Tensor:
        h: Tensor = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            h = block(h)
        return h


class LastStage(nn.Module):
    """And for the last one."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.blocks = model.blocks[len(model.blocks) // RANKS :]
        self.norm, self.head = model.norm, model.head

    def forward(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


def share_of_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """All micro-batches have as many targets."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / MICROBATCHES


# Each variant is an iterator: a `next` is one optimizer step, the first builds everything. They yield what holds the
# state of the model, where it is at hand.


def by_hand(size: Size, steps: int) -> Stepper:
    """Stages of plain modules in torch's schedule, which is told what crosses the cut."""
    torch.manual_seed(SEED)
    is_first = dist.get_rank() == 0
    model = GPT(size)
    stage = FirstStage(model) if is_first else LastStage(model)
    shape = size.batch // MICROBATCHES, size.length
    tokens = torch.empty(shape, dtype=torch.long, device="meta")
    hidden = torch.empty(*shape, size.width, device="meta", requires_grad=True)
    logits = torch.empty(*shape, size.vocabulary, device="meta", requires_grad=True)
    given, made = (tokens, hidden) if is_first else (hidden, logits)
    pipelined = PipelineStage(stage, dist.get_rank(), RANKS, torch.device("cpu"), input_args=given, output_args=made)
    schedule = Schedule1F1B(pipelined, MICROBATCHES, loss_fn=share_of_loss, scale_grads=False)
    tied = stage.tokens.weight if isinstance(stage, FirstStage) else stage.head.weight
    del model
    adam = optimizer(stage)
    for (batch,) in batches(size, steps, SEED):
        if is_first:
            schedule.step(batch[:, :-1])
        else:
            schedule.step(target=batch[:, 1:])
        assert tied.grad is not None
        dist.all_reduce(tied.grad)
        adam.step()
        adam.zero_grad()
        yield stage, adam


def replayed(size: Size, steps: int) -> Stepper:
    """The same in a plain loop with `parallelize`."""
    torch.manual_seed(SEED)
    model = GPT(size)
    options = ParallelOptions(pp_microbatches=MICROBATCHES, pp_split=even(size))
    layout = ParallelLayout(pp_size=RANKS, dp_shard_size=1)
    handle = parallelize(model, layout, options=options, example_inputs=example(size))
    assert handle.pipeline is not None
    adam = optimizer(model)
    step = Step(model, model, loss_of, "train")
    for (batch,) in batches(size, steps, SEED):
        handle.pipeline.train(step, batch)
        handle.finish_backward()
        adam.step()
        adam.zero_grad()
        yield model, adam


def in_fabric(size: Size, steps: int) -> Stepper:
    """A Fabric script."""
    strategy = fabric_strategies.PipelineParallelStrategy(
        pp_microbatches=MICROBATCHES, pp_split=even(size), example_inputs=example(size)
    )
    fabric: Any = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    torch.manual_seed(SEED)
    bare = GPT(size)
    model, adam = fabric.setup(bare, optimizer(bare))
    for (batch,) in fabric.setup_dataloaders(batches(size, steps, SEED), use_distributed_sampler=False):
        strategy.forward_backward(model, batch)
        adam.step()
        adam.zero_grad()
        yield bare, adam.optimizer


def in_trainer(size: Size, steps: int) -> Stepper:
    """A Trainer, whose module also logs its loss."""

    def strategy() -> strategies.PipelineParallelStrategy:
        return strategies.PipelineParallelStrategy(pp_microbatches=MICROBATCHES, pp_split=even(size))

    return InTrainer(Module, strategy, size, steps, seed=SEED)


def even(size: Size) -> list[int]:
    return [size.layers // RANKS, size.layers - size.layers // RANKS]


def example(size: Size) -> tuple[Tensor]:
    return (torch.zeros(2, size.length + 1, dtype=torch.long),)


BY_HAND, TRAINER = "torch, Schedule1F1B, stages by hand", "Trainer, par_pp"
VARIANTS: dict[str, Callable[[Size, int], Any]] = {
    BY_HAND: by_hand,
    "parallelize, pipeline.train": replayed,
    "Fabric, par_pp, forward_backward": in_fabric,
    TRAINER: in_trainer,
}


def measure_times(size: Size, rounds: int, steps: int, limit: float) -> tuple[dict[str, Samples], list[float]]:
    """Time all variants on this rank, see `interleave`; also the load of the machine before and after."""
    quietly()
    busy = [load()]
    variants = {name: build(size, 2 + rounds * steps) for name, build in VARIANTS.items()}
    for stepper in [*variants.values()] * 2:  # the first step of a kind looks for NaN
        next(stepper)
    samples = interleave(variants, rounds, steps, limit)
    for stepper in variants.values():
        stepper.close()
    return samples, [*busy, load()]


@dataclass(frozen=True)
class Memory:
    """Bytes of a variant on this rank.

    Attributes:
        state: Parameters and optimizer state; between steps there are no gradients.
        beside: All other tensors that Python can reach between two steps.
        step: How far what a step allocates rises above that.
        sent: What it sends to the next and the previous stage.
    """

    state: int
    beside: int
    step: int
    sent: int


def measure_memory(size: Size, build: Callable[[Size, int], Any]) -> Memory:
    """Count the bytes of one variant on this rank; of a Trainer, whose thread the profiler does not see, it cannot."""
    quietly()
    with closing(build(QUICK, 1)) as stepper:  # what is loaded on first use is no memory of the model
        next(stepper)
    before = live_tensor_bytes()
    with closing(build(size, 3)) as stepper:
        next(stepper)
        model, adam = next(stepper)
        held = live_tensor_bytes() - before
        state = sum(model_state_bytes(model, [adam]).values())
        del model, adam
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record, sent_bytes() as sent:
            next(stepper)
    return Memory(state, held - state, _peak(record), sum(sent))


@contextmanager
def sent_bytes() -> Iterator[list[int]]:
    """Note the bytes that torch's schedules send; all that they do goes through one function."""
    sent: list[int] = []
    original = dist.batch_isend_irecv

    def counted(operations: list[dist.P2POp]) -> Any:
        sent.extend(operation.tensor.nbytes for operation in operations if operation.op is dist.isend)
        return original(operations)

    dist.batch_isend_irecv = counted
    try:
        yield sent
    finally:
        dist.batch_isend_irecv = original


def _peak(record: Any) -> int:
    """How far the allocations of a profile rise; each event tells what was given, or negative, what was taken back."""
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def run(size: Size, rounds: int, steps: int, minutes: float) -> str:
    """Run everything and return the report in Markdown; no round but the first begins after so many minutes of them."""
    start = time.monotonic()
    memory = {
        name: run_ranks(RANKS, measure_memory, size, build, timeout=600)
        for name, build in VARIANTS.items()
        if name != TRAINER
    }
    stop_pool()
    print(f"{time.monotonic() - start:4.0f} s: memory is measured", file=sys.stderr)
    limit = 60 * minutes
    measured = run_ranks(RANKS, measure_times, size, rounds, steps, limit, timeout=600 + 3 * limit)
    samples, busy = measured[0]
    for name, ours in samples.items():
        ours.processor = [sum(ranks) for ranks in zip(*(each[name].processor for each, _ in measured), strict=True)]
    count = sum(p.numel() for p in GPT(size).parameters())
    lines = [
        f"GPT of {count / 1e6:.1f}M parameters (width {size.width}, {size.layers} blocks, tied head), fp32, AdamW, "
        f"{MICROBATCHES} micro-batches of {size.batch // MICROBATCHES} x {size.length} tokens under 1F1B; {RANKS} gloo "
        f"ranks of one thread each on {os.cpu_count()} cores, whose load was {busy[0]:.1f} before and {busy[1]:.1f} "
        f"after; torch {torch.__version__}, lightning {lightning.__version__}; {len(samples[BY_HAND].wall)} rounds of "
        f"{steps} steps a variant, {time.monotonic() - start:.0f} s in all.",
        "",
        *time_table(samples),
        "",
        *memory_table(memory),
        "",
    ]
    for name in list(VARIANTS)[1:]:
        ratio = ratios(samples[name].wall, samples[BY_HAND].wall)
        lines.append(verdict(f"{name} <= {GOAL} of the stages by hand", ratio, GOAL))
    return "\n".join(lines)


def time_table(samples: dict[str, Samples]) -> Iterator[str]:
    base = samples[BY_HAND]
    yield "| variant | ms a step | ratio | processor ms of both ranks | ratio |"
    yield "|---|---|---|---|---|"
    for name, ours in samples.items():
        cells = []
        for values, theirs in ((ours.wall, base.wall), (ours.processor, base.processor)):
            cells += [median_interval(values).format(1000, 0), "1" if ours is base else ratios(values, theirs).format()]
        yield f"| {name} | {' | '.join(cells)} |"


def memory_table(memory: dict[str, list[Memory]]) -> Iterator[str]:
    yield "| variant | rank | sent KiB | state KiB | other tensors | peak within a step | more than by hand |"
    yield "|---|---|---|---|---|---|---|"
    for name, ranks in memory.items():
        for rank, (ours, base) in enumerate(zip(ranks, memory[BY_HAND], strict=True)):
            more = sum((ours.state - base.state, ours.beside - base.beside, ours.step - base.step))
            cells = [f"{n / 2**10:.0f}" for n in (ours.sent, ours.state, ours.beside, ours.step, more)]
            yield f"| {name} | {rank} | {' | '.join(cells)} |"
