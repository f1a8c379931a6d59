"""The data-parallel family against the same work in a plain torch loop and under Lightning's own strategies.

Two ranks on gloo, one thread each. Times: all variants live in the same two processes and take turns. Memory: each
variant by itself, as the high-water mark of resident memory in its second step above what the process had
before the model was built.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.timing import HighWater, Interval, Samples, interleave, load, median_interval, ratios
from lightning_par import strategies
from lightning_par.strategies import fabric as fabric_strategies
from lightning_par.testing import run_ranks, stop_pool

RANKS = 2
ACCUMULATE = 4
MEMORY_STEPS = 2
Stepper = Iterator[None]
Variants = dict[str, Callable[..., Any]]


@dataclass(frozen=True)
class Size:
    """A GPT, the batch of one rank, and how often the import is timed."""

    width: int
    layers: int
    vocabulary: int
    length: int
    batch: int = 2
    imports: int = 5


FULL = Size(width=512, layers=9, vocabulary=8192, length=32)
QUICK = Size(width=32, layers=2, vocabulary=64, length=8, imports=0)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = max(width // 64, 1)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A GPT with tied embedding and head; its forward is the loss of predicting each next token."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x, y = tokens[:, :-1], tokens[:, 1:]
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def shard_by_hand(model: GPT, mesh: Any) -> None:
    """The units that `par_fsdp` finds: each block, and the root for the rest."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


class Module(pl.LightningModule):
    """What a user writes for one GPU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = GPT(size)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.model(batch[0])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self)


class ShardedModule(Module):
    """What a user writes for Lightning's `ModelParallelStrategy`."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        shard_by_hand(self.model, self.device_mesh["data_parallel"])


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-4)


def batches(size: Size, count: int, seed: int | None = None) -> DataLoader[Any]:
    """Random batches, others on each rank if there is no seed."""
    generator = torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
    tokens = torch.randint(size.vocabulary, (count * size.batch, size.length + 1), generator=generator)
    return DataLoader(TensorDataset(tokens), batch_size=size.batch)


# Each variant is an iterator: a `next` is one optimizer step, the first builds everything.


def raw(kind: str, size: Size, steps: int) -> Stepper:
    """The plain torch loop."""
    torch.manual_seed(0)
    model = GPT(size)
    if kind == "fsdp":
        shard_by_hand(model, init_device_mesh("cpu", (RANKS,)))
    run_model = DistributedDataParallel(model) if kind == "ddp" else model
    adam = optimizer(model)
    for (tokens,) in batches(size, steps):
        run_model(tokens).backward()
        adam.step()
        adam.zero_grad()
        yield


def in_fabric(strategy: Callable[[], Any], size: Size, steps: int) -> Stepper:
    """A Fabric script."""
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy())
    fabric.launch()
    torch.manual_seed(0)
    bare = GPT(size)
    model, adam = fabric.setup(bare, optimizer(bare))
    for (tokens,) in fabric.setup_dataloaders(batches(size, steps), use_distributed_sampler=False):
        fabric.backward(model(tokens))
        adam.step()
        adam.zero_grad()
        yield


class InTrainer(pl.Callback):
    """A Trainer in a thread of its own, which waits after each optimizer step for the next `next`."""

    def __init__(
        self,
        module: type[Module],
        strategy: Callable[[], Any],
        size: Size,
        steps: int,
        accumulate: int = 1,
        seed: int | None = None,
        callbacks: Callable[[], list[pl.Callback]] = list,
    ) -> None:
        self._module, self._strategy, self._size = module, strategy, size
        self._steps, self._accumulate, self._seed = steps, accumulate, seed
        self._callbacks = callbacks
        self._turn, self._stepped = threading.Semaphore(0), threading.Semaphore(0)
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fit, daemon=True)
        self._thread.start()

    def __iter__(self) -> InTrainer:
        return self

    def __next__(self) -> None:
        self._turn.release()
        self._stepped.acquire()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Let the Trainer end, wherever it is."""
        self._closing = True
        self._turn.release()
        self._thread.join()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self._accumulate == 0:
            self._stepped.release()
            self._turn.acquire()
            trainer.should_stop = self._closing

    def _fit(self) -> None:
        self._turn.acquire()
        with tempfile.TemporaryDirectory() as folder:
            self._train(folder)

    def _train(self, folder: str) -> None:
        try:
            torch.manual_seed(0)
            trainer = pl.Trainer(
                accelerator="cpu",
                devices=RANKS,
                strategy=self._strategy(),
                max_steps=self._steps,
                accumulate_grad_batches=self._accumulate,
                callbacks=[*self._callbacks(), self],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
                # What callbacks write.
                default_root_dir=folder,
            )
            trainer.fit(self._module(self._size), batches(self._size, self._steps * self._accumulate, self._seed))
        except BaseException as error:
            self._error = error
            self._stepped.release()


DDP: Variants = {
    "torch, DistributedDataParallel": partial(raw, "ddp"),
    "Fabric, par_ddp": partial(in_fabric, fabric_strategies.DataParallelStrategy),
    "Trainer, par_ddp": partial(InTrainer, Module, strategies.DataParallelStrategy),
    "Trainer, DDPStrategy": partial(InTrainer, Module, DDPStrategy),
}
FSDP: Variants = {
    "torch, fully_shard": partial(raw, "fsdp"),
    "Fabric, par_fsdp": partial(in_fabric, fabric_strategies.FSDP2Strategy),
    "Trainer, par_fsdp": partial(InTrainer, Module, strategies.FSDP2Strategy),
    "Trainer, ModelParallelStrategy": partial(InTrainer, ShardedModule, partial(ModelParallelStrategy, RANKS, 1)),
}
UNSYNCHRONISED = partial(strategies.FSDP2Strategy, sync_every_batch=False)
ACCUMULATING: Variants = {
    "Trainer, ModelParallelStrategy, accumulation 4": partial(
        InTrainer, ShardedModule, partial(ModelParallelStrategy, RANKS, 1), accumulate=ACCUMULATE
    ),
    "Trainer, par_fsdp, accumulation 4, sync_every_batch=False": partial(
        InTrainer, Module, UNSYNCHRONISED, accumulate=ACCUMULATE
    ),
}
GROUPS = (DDP, FSDP, ACCUMULATING)
VARIANTS = {name: build for group in GROUPS for name, build in group.items()}


def quietly() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")


def measure_times(size: Size, rounds: int, steps: int, limit: float) -> tuple[dict[str, Samples], list[float]]:
    """Time all variants on this rank, see `interleave`; also the load of the machine before and after."""
    quietly()
    busy = [load()]
    variants = {name: build(size, 1 + rounds * steps) for name, build in VARIANTS.items()}
    for stepper in variants.values():
        next(stepper)
    samples = interleave(variants, rounds, steps, limit)
    for stepper in variants.values():
        stepper.close()
    return samples, [*busy, load()]


def measure_memory(size: Size, name: str) -> int:
    """Return the peak of resident bytes of one variant on this rank, above what the process had before."""
    quietly()
    with closing(VARIANTS[name](QUICK, 1)) as stepper:  # what is loaded on first use is no memory of the model
        next(stepper)
    memory = HighWater()
    with closing(VARIANTS[name](size, MEMORY_STEPS)) as stepper:
        next(stepper)
        memory.restart()
        for _ in range(MEMORY_STEPS - 1):
            next(stepper)
        return memory.bytes()


def import_seconds() -> float:
    """Time `import lightning_par` in a process that has imported Lightning."""
    code = "import time, lightning; t = time.perf_counter(); import lightning_par; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def run(size: Size, rounds: int, steps: int, minutes: float) -> str:
    """Run everything and return the report in Markdown; no round but the first begins after so many minutes of them."""
    start = time.monotonic()
    peaks = {}
    for name in VARIANTS:
        peaks[name] = max(run_ranks(RANKS, measure_memory, size, name, timeout=300))
        print(f"{time.monotonic() - start:4.0f} s: {peaks[name] / 2**20:5.0f} MiB, {name}", file=sys.stderr)
    # In new processes: measuring memory has changed how these allocate.
    stop_pool()
    limit = 60 * minutes
    samples, busy = run_ranks(RANKS, measure_times, size, rounds, steps, limit, timeout=600 + 3 * limit)[0]
    imports = [import_seconds() for _ in range(size.imports)]
    count = sum(p.numel() for p in GPT(size).parameters())
    done = len(next(iter(samples.values())).wall)
    lines = [
        f"GPT of {count / 1e6:.1f}M parameters (width {size.width}, {size.layers} blocks, tied head), fp32, AdamW, "
        f"{size.batch} x {size.length} tokens a rank and batch; {RANKS} gloo ranks of one thread each on "
        f"{os.cpu_count()} cores, whose load was {busy[0]:.1f} before and {busy[1]:.1f} after; torch "
        f"{torch.__version__}, lightning {lightning.__version__}; {done} rounds of {steps} steps a variant, "
        f"{time.monotonic() - start:.0f} s in all.",
        "",
    ]
    for group in GROUPS:
        lines += [*group_table(list(group), samples, peaks), ""]
    if imports:
        lines += [f"`import lightning_par` after `import lightning`: {statistics.median(imports):.3f} s.", ""]
    return "\n".join([*lines, *goals(samples, imports)])


def group_table(names: list[str], samples: dict[str, Samples], peaks: dict[str, int]) -> Iterable[str]:
    """The first variant of a group is what the others are compared with."""
    base = samples[names[0]]
    yield "| variant | ms a step | ratio | processor ms a step | ratio | peak MiB |"
    yield "|---|---|---|---|---|---|"
    for name in names:
        cells = []
        for ours, theirs in ((samples[name].wall, base.wall), (samples[name].processor, base.processor)):
            ratio = "1" if ours is theirs else ratios(ours, theirs).format()
            cells += [median_interval(ours).format(1000, 0), ratio]
        yield f"| {name} | {' | '.join(cells)} | {peaks[name] / 2**20:.0f} |"


def goals(samples: dict[str, Samples], imports: list[float]) -> list[str]:
    """Say of each goal whether the median meets it."""
    lines = []
    for group, preset in ((DDP, "par_ddp"), (FSDP, "par_fsdp")):
        for host, bound in (("Fabric", 1.03), ("Trainer", 1.05)):
            ratio = ratios(samples[f"{host}, {preset}"].wall, samples[next(iter(group))].wall)
            lines.append(verdict(f"{preset} in {host} <= {bound} of the torch loop", ratio, bound))
    lightnings, ours = (samples[name].wall for name in ACCUMULATING)
    lines.append(verdict("accumulation 4 faster than ModelParallelStrategy", ratios(ours, lightnings), 1.0))
    if imports:
        lines.append(verdict("import <= 0.15 s", median_interval(imports), 0.15))
    return lines


def verdict(goal: str, value: Interval, bound: float) -> str:
    return f"- {goal}: {value.format()}, {'met' if value.median <= bound else 'missed'}"
