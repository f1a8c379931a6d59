"""Saves of the same sharded state: ours, synchronous and asynchronous, torch's own, and those of Lightning's strategy.

Two ranks on gloo, each with half of the parameters and of AdamW's state. All variants live in the same two processes
and take turns; each writes to the same disk, brings it there (fsync), and what it has written is removed before the
next.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, async_save, save
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.data import GPT, Size, optimizer, quietly, shard_by_hand, verdict
from benchmarks.timing import Interval, load, median_interval, ratios
from lightning_par.checkpoint import model_state, optimizer_state
from lightning_par.parallel.memory import model_state_bytes
from lightning_par.strategies import fabric as fabric_strategies
from lightning_par.testing import run_ranks

RANKS = 2
FULL = Size(width=1024, layers=6, vocabulary=16384, length=256, batch=2)
QUICK = Size(width=32, layers=2, vocabulary=64, length=8, batch=2)
ASYNC_GOAL, COST_GOAL = 1 / 5, 1.15

OURS, OURS_ASYNC = "Fabric, par_fsdp", "Fabric, par_fsdp, async_save"
DCP, DCP_ASYNC = "torch, dcp.save", "torch, dcp.async_save"
LIGHTNING = "Fabric, ModelParallelStrategy"

Save = Callable[[str], Callable[[], None]]
"""Begins a save into a directory, and returns what waits for its end."""


def _nothing() -> None:
    pass


def with_state(module: nn.Module) -> Any:
    """Give the module gradients and let the optimizer make its state."""
    adam = optimizer(module)
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    adam.step()
    adam.zero_grad()
    return adam


def in_fabric(size: Size, strategy: Any, wait: Callable[[], None] = _nothing) -> Save:
    """A script of Fabric; `wait` waits for what its strategy has begun to save."""
    fabric: Any = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup_module(GPT(size))
    adam = fabric.setup_optimizers(with_state(model))

    def begin(path: str) -> Callable[[], None]:
        fabric.save(path, {"model": model, "optimizer": adam, "step": 1})
        return wait

    return begin


def ours(size: Size, asynchronous: bool) -> Save:
    strategy = fabric_strategies.FSDP2Strategy(async_save=asynchronous)
    return in_fabric(size, strategy, strategy.saver.wait)


def by_torch(size: Size, asynchronous: bool) -> Save:
    torch.manual_seed(0)
    model = GPT(size)
    shard_by_hand(model, init_device_mesh("cpu", (RANKS,)))
    adam = with_state(model)

    def begin(path: str) -> Callable[[], None]:
        states = optimizer_state(model, adam)["state"]
        moments = {f"{name}.{key}": value for name, state in states.items() for key, value in state.items()}
        state = {"model": model_state(model), "optimizer": moments}
        if not asynchronous:
            save(state, storage_writer=FileSystemWriter(path))
            return _nothing
        future: Any = async_save(state, storage_writer=FileSystemWriter(path))
        return lambda: future.result()

    return begin


def by_lightning(size: Size) -> Save:
    def parallelise(model: Any, mesh: Any) -> Any:
        shard_by_hand(model, mesh["data_parallel"])
        return model

    return in_fabric(size, ModelParallelStrategy(parallelise, data_parallel_size=RANKS, tensor_parallel_size=1))


VARIANTS: dict[str, Callable[[Size], Save]] = {
    DCP: lambda size: by_torch(size, asynchronous=False),
    DCP_ASYNC: lambda size: by_torch(size, asynchronous=True),
    LIGHTNING: by_lightning,
    OURS: lambda size: ours(size, asynchronous=False),
    OURS_ASYNC: lambda size: ours(size, asynchronous=True),
}


@dataclass
class Times:
    """Seconds until the last rank may train on, and until the checkpoint is on the disk; one value a round."""

    blocked: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


@dataclass
class Measured:
    times: dict[str, Times]
    first: dict[str, float]
    state: int
    written: int
    busy: list[float]


def measure(size: Size, rounds: int, limit: float, root: str) -> Measured:
    """Let each variant save once, then time them in turns."""
    quietly()
    gloo = dist.new_group(backend="gloo")
    busy, begun = [load()], time.perf_counter()
    saves = {name: build(size) for name, build in VARIANTS.items()}
    times, first, written = {name: Times() for name in saves}, {}, 0
    order = random.Random(0)
    for i in range(1 + rounds):
        late = torch.tensor(int(i > 1 and time.perf_counter() - begun > limit))
        dist.broadcast(late, 0)
        if late:
            break
        names = list(saves)
        order.shuffle(names)
        for name in names:
            with _directory(root) as path:
                gc.collect()
                dist.barrier(gloo)
                start = time.perf_counter()
                wait = saves[name](path)
                dist.barrier(gloo)
                blocked = time.perf_counter() - start
                wait()
                dist.barrier(gloo)
                whole = time.perf_counter() - start
                written = max(written, sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file()))
            if i == 0:
                # Host memory is taken, plans are made.
                first[name] = blocked
                continue
            times[name].blocked.append(blocked)
            times[name].whole.append(whole)
    model = GPT(size)
    state = sum(model_state_bytes(model, [with_state(model)]).values())
    return Measured(times, first, state, written, [*busy, load()])


@contextmanager
def _directory(root: str) -> Iterator[str]:
    """A name that nothing has, on all ranks the same; what is there afterwards is removed."""
    path = Path(root) / "checkpoint"
    dist.barrier()
    yield str(path)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()


def run(size: Size, rounds: int, steps: int, minutes: float) -> str:
    """Run everything and return the report in Markdown; no round but the first begins after so many minutes."""
    del steps
    start = time.monotonic()
    limit = 60 * minutes
    with tempfile.TemporaryDirectory() as root:
        measured = run_ranks(RANKS, measure, size, rounds, limit, root, timeout=900 + 3 * limit)[0]
    times = measured.times
    lines = [
        f"{measured.state / 1e9:.2f} GB of parameters and AdamW's state in fp32 (width {size.width}, {size.layers} "
        f"blocks), halved over {RANKS} gloo ranks of one thread each on {os.cpu_count()} cores, whose load was "
        f"{measured.busy[0]:.1f} before and {measured.busy[1]:.1f} after; torch {torch.__version__}, lightning "
        f"{lightning.__version__}; {len(times[DCP].whole)} rounds, {time.monotonic() - start:.0f} s in all.",
        "",
        "| save | training waits, s | the first time, s | on the disk after, s |",
        "|---|---|---|---|",
    ]
    for name, ours in times.items():
        lines.append(
            f"| {name} | {median_interval(ours.blocked).format()} | {measured.first[name]:.3f} | "
            f"{median_interval(ours.whole).format()} |"
        )
    lines.append("")
    bounds: dict[str, tuple[Interval, float]] = {
        f"{OURS_ASYNC} keeps training waiting <= {ASYNC_GOAL} of {OURS}": (
            ratios(times[OURS_ASYNC].blocked, times[OURS].blocked),
            ASYNC_GOAL,
        ),
        f"{OURS} takes <= {COST_GOAL} of {DCP}": (ratios(times[OURS].whole, times[DCP].whole), COST_GOAL),
    }
    lines += [verdict(goal, value, bound) for goal, (value, bound) in bounds.items()]
    for name in (DCP_ASYNC, LIGHTNING):
        against = OURS_ASYNC if name == DCP_ASYNC else OURS
        ratio = ratios(times[against].blocked, times[name].blocked)
        lines.append(f"- {against} keeps training waiting {ratio.format()} of {name}")
    return "\n".join(lines)
