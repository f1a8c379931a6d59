"""Fits that are saved at every point where a callback may save, and resumed from each of these checkpoints."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_par import checkpoint as ckpt
from lightning_par.parallel.shards import full_tensor
from parity import make_trainer

# A batch that has begun was read with random numbers that a resume draws again: those points need quiet samples.
POINTS = ("on_train_batch_end", "on_validation_end", "on_train_epoch_end")
ALL_POINTS = ("on_train_batch_start", *POINTS)


class Noisy(Dataset[Tensor]):
    """Sample `i` is `i` and a number that is drawn anew each time."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


class Quiet(Noisy):
    """Without the noise, for workers, which draw their own."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), 0.0])


class Counting:
    """Batches that this rank counts up to, with a state of its own."""

    def __init__(self, batches: int = 6) -> None:
        self.batches, self.begin, self.done = batches, 0, 0
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def __iter__(self) -> Iterator[Tensor]:
        begin, self.begin = self.begin, 0
        for i in range(begin, self.batches):
            self.done = i + 1
            yield torch.tensor([[100.0 * self.rank + i, 0.0]])

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done, "rank": self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state["rank"] == self.rank
        self.begin = self.done = state["done"]


class SizedCounting(Counting):
    def __len__(self) -> int:
        return self.batches


class Streamed(IterableDataset[Tensor]):
    """As `Counting`, and without a state."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(i), 0.0]) for i in range(6))


class Unfair(Sampler[int]):
    """Draws from what nobody can bring back."""

    draws = itertools.count()

    def __iter__(self) -> Iterator[int]:
        first = next(self.draws)
        return ((first + i) % 8 for i in range(8))

    def __len__(self) -> int:
        return 8


class Lazy(Sampler[int]):
    """Draws each sample when it is asked for, from Python's generator."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(10):
            yield random.randrange(10)

    def __len__(self) -> int:
        return 10


class Shuffled:
    """A batch sampler with a generator of its own, which is no `Sampler`."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(4)

    def __iter__(self) -> Iterator[list[int]]:
        yield from torch.randperm(24, generator=self.generator).view(6, 4).tolist()

    def __len__(self) -> int:
        return 6


@dataclass
class Case:
    """A fit.

    Attributes:
        loaders: Makes the loader or loaders for training.
        options: Of the Trainer.
        points: The hooks in which it is saved.
        every: Save each so many times.
        state_dict_type: Of the strategy.
        schedule: ``"one cycle"`` over the steps that the Trainer estimates, or ``"plateau"`` after every step.
        callbacks: Makes more callbacks.
        validation: Options of the loader for validation.
    """

    loaders: Any
    options: dict[str, Any] = field(default_factory=dict)
    points: tuple[str, ...] = POINTS
    every: int = 1
    strategy: str = "DataParallelStrategy"
    state_dict_type: str = "sharded"
    dropout: float = 0.2
    plateau: bool = False
    schedule: str = ""
    callbacks: Any = list
    validation: dict[str, Any] = field(default_factory=dict)


def map_style(samples: int = 22, batch_size: int = 2, dataset: Any = Noisy, **options: Any) -> DataLoader[Tensor]:
    return DataLoader(dataset(samples), batch_size=batch_size, **({"shuffle": True} | options))


class Net(pl.LightningModule):
    """Remembers what happens to it, step by step."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.case = case
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(case.dropout), nn.Linear(4, 1))
        self.trace: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batches = list(batch.values()) if isinstance(batch, dict) else [batch]
        self.trace.append(["batch", self.current_epoch, batch_idx, [b[:, 0].int().tolist() for b in batches]])
        loss = torch.cat([self.net(b.to(self.dtype)) for b in batches]).square().mean()
        if self.case.schedule == "plateau":
            self.log("loss", loss, sync_dist=True)
        self.trace[-1].append(loss.item())
        self.trace[-1].append([self.global_step, self.trainer.fit_loop.epoch_loop._batches_that_stepped])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.trace.append(["val", self.current_epoch, batch_idx, self.trainer.fit_loop.total_batch_idx])
        self.log("val_loss", self.net(batch.to(self.dtype)).square().mean(), sync_dist=True)

    def on_train_epoch_start(self) -> None:
        self.trace.append(["epoch starts", self.current_epoch])

    def on_train_epoch_end(self) -> None:
        self.trace.append(["epoch ends", self.current_epoch])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)
        schedulers: list[Any] = [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9), "interval": "step"}]
        if self.case.plateau:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            schedulers = [{"scheduler": plateau, "monitor": "val_loss"}]
        if self.case.schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            schedulers = [{"scheduler": plateau, "monitor": "loss", "interval": "step"}]
        if self.case.schedule == "one cycle":
            steps = int(self.trainer.estimated_stepping_batches)
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=steps)
            schedulers = [{"scheduler": cycle, "interval": "step"}]
        return [optimizer], schedulers


class Saver(pl.callbacks.Checkpoint):
    """Saves in the hooks named, after the module's own, and notes how long the trace was then."""

    def __init__(self, case: Case, folder: str) -> None:
        self.case, self.folder = case, folder
        self.saved: list[tuple[str, int]] = []
        self.calls = 0
        self.module: Any = None
        for point in case.points if folder else ():
            setattr(self, "on_train_batch_end" if point == "on_step" else point, self._save(point))

    def _save(self, point: str) -> Any:
        def hook(trainer: Any, module: Any, *args: Any) -> None:
            if point == "on_step" and trainer.fit_loop._should_accumulate():
                return
            if 0 < trainer.max_steps <= trainer.global_step:
                return  # nothing goes on from there
            if (
                point == "on_train_epoch_end"
                and trainer.fit_loop.epoch_progress.current.processed == trainer.max_epochs
            ):
                return
            self.calls += 1
            if self.calls % self.case.every == 0:
                path = str(Path(self.folder, f"{self.calls:03d}-{point}.ckpt"))
                trainer.save_checkpoint(path)
                self.saved.append((path, len(module.trace)))

        return hook


def digest(module: Any, trainer: Any) -> str:
    """Over parameters, state of the optimizer, and learning rates."""
    seen = hashlib.sha256()
    optimizer = trainer.optimizers[0]
    state = ckpt.optimizer_state(module, optimizer)
    for name, value in sorted(ckpt.model_state(module).items()):
        seen.update(name.encode() + full_tensor(value).detach().numpy().tobytes())
    for name, values in sorted(state["state"].items()):
        for key, value in sorted(values.items()):
            value = full_tensor(value).numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
            seen.update(f"{name}.{key}".encode() + value)
    seen.update(repr([group["lr"] for group in state["param_groups"]]).encode())
    return seen.hexdigest()


def fit(case: Case, folder: str = "", resume: str | None = None, **changed: Any) -> tuple[Any, str, Saver]:
    """Run a fit; what it did, a digest of what it has become, and what was saved in `folder`."""
    from lightning_par import strategies

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed((3 if resume is None else 17) + 100 * rank)
    module, saver = Net(case), Saver(case, folder)
    torch.manual_seed((5 if resume is None else 19) + 100 * rank)
    lost = {name: changed.pop(name) for name in changed.keys() & {"on_lost_place"}}
    strategy = getattr(strategies, case.strategy)(state_dict_type=case.state_dict_type, **lost)
    options = (
        {"max_epochs": 2, "num_sanity_val_steps": 0, "enable_checkpointing": True, "use_distributed_sampler": True}
        | case.options
        | changed
    )
    trainer = make_trainer(ranks, strategy, callbacks=[*case.callbacks(), saver], precision="64-true", **options)
    saver.module = module
    trainer.fit(module, case.loaders(), DataLoader(Quiet(6), batch_size=2, **case.validation), ckpt_path=resume)
    return module.trace, digest(module, trainer), saver


def resume_everywhere(case: Case, folder: str) -> list[str]:
    """Fit once, then resume from each checkpoint; what differs from the run that never stopped."""
    trace, end, saver = fit(case, folder)
    assert saver.saved
    problems = []
    for path, length in saver.saved:
        resumed, other_end, _ = fit(case, resume=path)
        if resumed != trace[length:]:
            first = next(
                (i for i, (a, b) in enumerate(zip(resumed, trace[length:], strict=False)) if a != b),
                min(len(resumed), len(trace) - length),
            )
            problems.append(f"{Path(path).stem}: event {first}: {resumed[first:][:2]} != {trace[length + first :][:2]}")
        elif other_end != end:
            problems.append(f"{Path(path).stem}: the end differs")
    return problems


def resumed(case: Case, path: str, **changed: Any) -> Any:
    """What a fit does that is resumed from a checkpoint; for `run_ranks`."""
    return fit(case, resume=path, **changed)[0]


def saved(case: Case, folder: str) -> tuple[Any, list[tuple[str, int]]]:
    """What a fit does, and the checkpoints it leaves; for `run_ranks`."""
    trace, _, saver = fit(case, folder)
    return trace, saver.saved


def global_batches(traces: list[Any], epoch: int = 0) -> list[list[int]]:
    """The samples of each batch in the order of all ranks."""
    batches = [[event[3][0] for event in trace if event[0] == "batch" and event[1] == epoch] for trace in traces]
    return [
        [ids[j] for j in range(max(map(len, step))) for ids in step if j < len(ids)]
        for step in zip(*batches, strict=True)
    ]


def fabric_run(
    strategy: Any, loader: Any, folder: str, stop: int | None = None, resume: bool = False, epochs: int = 2
) -> tuple[list[Any], str]:
    """A user's loop that saves after each step, or stops after one, or goes on where it stopped.

    Returns:
        Epoch, samples and loss of each step, and a digest of the weights.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy, precision="64-true")
    fabric.launch()
    torch.manual_seed(17 if resume else 3)
    net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(loader)
    state = {"net": net, "optimizer": optimizer, "loader": loader, "epoch": 0}
    torch.manual_seed((19 if resume else 5) + fabric.global_rank)
    if resume:
        fabric.load(str(Path(folder, "fabric.ckpt")), state)
    trace: list[Any] = []
    for epoch in range(state["epoch"], epochs):
        state["epoch"] = epoch
        for batch in loader:
            loss = net(batch).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            trace.append([epoch, batch[:, 0].int().tolist(), loss.item()])
            if len(trace) == stop:
                fabric.save(str(Path(folder, "fabric.ckpt")), state)
                return trace, ""
    seen = hashlib.sha256()
    for value in ckpt.model_state(net.module).values():
        seen.update(full_tensor(value).detach().numpy().tobytes())
    return trace, seen.hexdigest()


def fabric_resumes(strategy: Any, make: Any, folder: str, stops: list[int]) -> list[str]:
    """What differs from a loop that never stopped."""
    trace, end = fabric_run(strategy(), make(), folder)
    problems = []
    for stop in stops:
        begun, _ = fabric_run(strategy(), make(), folder, stop=stop)
        rest, other_end = fabric_run(strategy(), make(), folder, resume=True)
        if begun + rest != trace or other_end != end:
            problems.append(f"after {stop}: {(begun + rest)[stop - 1 : stop + 2]} != {trace[stop - 1 : stop + 2]}")
    return problems
