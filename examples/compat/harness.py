"""One training of a case, in one process or on a rank of a layout, and the comparison of the two."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

RANKS = 2
STEPS = 3
BATCH = 2
SAMPLES = RANKS * STEPS * BATCH
SEED = 3
# Largest difference, relative to the largest value of the kind, that the order of float64 sums explains.
BOUND = 1e-9


@dataclass
class Record:
    """What a training leaves behind, as whole tensors.

    Attributes:
        losses: One a batch, or one a step where a module steps its optimizers itself.
        gradients: Of each step of an optimizer, by the name of the parameter, before clipping.
        weights: After the last step.
        units: Number of modules that FSDP2 shards.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    units: int = 0

    def take_gradients(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Keep the gradients that the optimizer is about to use."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = [(n, p.grad) for n, p in module.named_parameters() if id(p) in stepped and p.grad is not None]
        self.gradients.append({name: _whole(grad) for name, grad in named})

    def take_weights(self, module: nn.Module) -> None:
        """Keep the parameters, and how much is sharded."""
        self.weights = {name: _whole(p) for name, p in module.named_parameters()}
        self.units = sum(isinstance(m, FSDPModule) for m in module.modules())


def _whole(tensor: Tensor) -> Tensor:
    # By torch alone, so that the comparison leans on nothing of what it checks.
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@dataclass(frozen=True)
class Case:
    """A module of a published package, and how to train it.

    Attributes:
        name: What `--case` takes.
        package: Name in the package index.
        module: What of the package is trained, in words.
        kind: Vision, speech, ...
        build: Makes the LightningModule; called with a fixed seed.
        samples: Makes a dataset of `SAMPLES` samples, the same on each call.
        loader: Makes the loader of a dataset; it gets `batch_sampler`.
        train: Trains by a script of the package instead of `build`; gets a strategy and the number of ranks.
    """

    name: str
    package: str
    module: str
    kind: str
    build: Callable[[], pl.LightningModule] | None = None
    samples: Callable[[], Any] | None = None
    loader: Callable[..., Any] = DataLoader
    train: Callable[[str, int], Record] | None = None


class Recorder(pl.Callback):
    """Keeps what a Trainer computes; a module with manual optimisation returns its loss under `loss`."""

    def __init__(self) -> None:
        self.record = Record()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Lightning hands out the loss divided by the accumulation steps.
        self.record.losses.append(float(outputs["loss"].detach()) * trainer.accumulate_grad_batches)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.record.take_gradients(pl_module, optimizer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.record.take_weights(pl_module)


def train(name: str, strategy: str | None) -> Record:
    """Train a case on this rank; without a strategy by plain Lightning, which accumulates over all ranks' batches."""
    from examples.compat.cases import CASES

    if strategy is not None:
        import lightning_par.strategies  # noqa: F401  (makes the names known)
    case = CASES[name]
    if case.train is not None:
        return case.train(strategy or "auto", 1 if strategy is None else RANKS)
    assert case.build is not None
    assert case.samples is not None
    torch.manual_seed(SEED)
    module = case.build()
    without_dropout(module)
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(module, strategy, recorder, folder)
        sampler = batches(None if strategy is None else _rank(), whole_steps=isinstance(module, Manual))
        trainer.fit(module, case.loader(case.samples(), batch_sampler=sampler))
    return recorder.record


def _rank() -> int:
    # Known before Lightning makes the process group.
    return int(os.environ["RANK"])


def make_trainer(module: pl.LightningModule, strategy: str | None, recorder: Recorder, folder: str) -> pl.Trainer:
    ranks = 1 if strategy is None else RANKS
    accumulate = RANKS // ranks
    if isinstance(module, Manual):
        module.accumulate, accumulate = accumulate, 1
    return pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy or "auto",
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        precision="64-true",
        callbacks=[recorder],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


class Manual(pl.LightningModule):
    """Optimizers stepped by hand: one process gets the batches of all ranks as one, to go through in parts.

    Batch by batch, as with automatic optimisation, would be another training: an optimizer that steps on the last of
    them changes what the next optimizer sees of the last, but not what it saw of the others.
    """

    accumulate = 1

    def parts(self, batch: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        return list(zip(*(column.chunk(self.accumulate) for column in batch), strict=True))

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def batches(rank: int | None, whole_steps: bool = False) -> list[list[int]]:
    """Batches of samples of one rank, as a distributed sampler deals them out; with None those of all ranks.

    Args:
        rank: The rank; None is one process, which takes each step's batches in the order of the ranks.
        whole_steps: One process takes each step's batches as one.
    """
    everyone = [[[(b * BATCH + j) * RANKS + r for j in range(BATCH)] for r in range(RANKS)] for b in range(STEPS)]
    if rank is not None:
        return [row[rank] for row in everyone]
    return [sum(row, []) for row in everyone] if whole_steps else sum(everyone, [])


def without_dropout(module: nn.Module) -> None:
    """Ranks draw other masks than one process does, as they should: compare without."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        elif isinstance(part, nn.MultiheadAttention | nn.RNNBase):
            part.dropout = 0.0


@dataclass(frozen=True)
class Difference:
    """Largest differences of any rank from one process, relative to the largest value of the kind."""

    losses: float
    gradients: float
    weights: float

    @property
    def largest(self) -> float:
        return max(self.losses, self.gradients, self.weights)


def compare(records: Sequence[Record], expected: Record) -> Difference:
    """Measure how far the ranks are from one process.

    Raises:
        ValueError: The ranks took other steps or have other parameters, or nothing was trained.
    """
    for rank, record in enumerate(records):
        if _outline(record) != _outline(expected):
            counts = [[len(names) for names in _outline(r)] for r in (record, expected)]
            raise ValueError(f"rank {rank} has gradients and weights {counts[0]}, one process {counts[1]}")
    losses, wanted = _doubles([r.losses for r in records]), _doubles(expected.losses)
    if not expected.gradients or not wanted.numel():
        raise ValueError("nothing was trained")
    # Either each batch has its loss, in the order of `batches`, or each step its mean.
    losses = losses.mean(0) if losses.shape[1] == len(wanted) else losses.T.flatten()
    if losses.shape != wanted.shape:
        raise ValueError(f"{len(losses)} losses of all ranks, {len(wanted)} of one process")
    steps = [_relative(g, e) for r in records for g, e in zip(r.gradients, expected.gradients, strict=True)]
    return Difference(
        _relative({"": losses}, {"": wanted}), max(steps), max(_relative(r.weights, expected.weights) for r in records)
    )


def _outline(record: Record) -> list[list[str]]:
    return [sorted(names) for names in (*record.gradients, record.weights)]


def _relative(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest difference of tensors, as a part of the largest value."""
    largest = max(float(w.abs().max()) for w in want.values())
    worst = torch.stack([(got[n].double() - w.double()).abs().max() for n, w in want.items()])
    return float(worst.max()) / largest if worst.isfinite().all() and largest else float("inf")


def _doubles(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
