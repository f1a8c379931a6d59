"""A small module that remembers the samples it sees, and the data it sees them from."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_par.parallel.shards import full_tensor
from parity import LAYOUTS, build_strategy, make_trainer

FAMILY = ["par_ddp", "par_zero1", "par_zero2", "par_fsdp", "par_hsdp"]
TWO = ["par_ddp", "par_fsdp"]
GLOBAL_BATCH = 4


def long_run(*values: Any) -> Any:
    """Values of `parametrize` that run with `-m slow` only."""
    return pytest.param(*values, marks=pytest.mark.slow)


def some(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Values of `parametrize`, of which those that are not named run with `-m slow` only."""
    return [value if value in quick else long_run(value) for value in values]


def listed(cases: Iterable[tuple[Any, ...]], *quick: tuple[Any, ...]) -> list[Any]:
    """Cases of several arguments, of which those that are not named run with `-m slow` only."""
    cases = list(cases)
    assert not [case for case in quick if case not in cases]
    return [case if case in quick else long_run(*case) for case in cases]


def crossed(*values: Iterable[Any], quick: list[tuple[Any, ...]]) -> list[Any]:
    """Each combination of the values of several arguments, of which those not in `quick` run with `-m slow` only."""
    return listed(itertools.product(*values), *quick)


def layouts(*quick: str) -> Any:
    """Run a test in each layout of `parity.LAYOUTS`, in those that are not named in the long run only."""
    return pytest.mark.parametrize("layout", some(LAYOUTS, *quick))


def strategies(*quick: str) -> Any:
    """Run a test under each name of `FAMILY`, under those that are not given in the long run only."""
    return pytest.mark.parametrize("strategy", some([*TWO, *(name for name in FAMILY if name not in TWO)], *quick))


every_layout = strategies(*TWO)
ddp_and_fsdp = layouts("ddp", "fsdp")


class Numbers(Dataset[Tensor]):
    """Sample `i` is the number `i`."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Stream(IterableDataset[Tensor]):
    """As many numbers as `samples` says for this rank; disjoint ones, unless `shared`."""

    def __init__(self, *samples: int, shared: bool = False) -> None:
        self.samples = samples
        self.shared = shared

    def __iter__(self) -> Iterator[Tensor]:
        rank = dist.get_rank()
        for i in range(self.samples[rank % len(self.samples)]):
            yield torch.tensor(i if self.shared else 100 * rank + i)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.samples[dist.get_rank() % len(self.samples)]


class Probe(pl.LightningModule):
    """A stack of equal blocks between a first and a last layer; its output depends on every sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(1, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(4, 1)
        self.seen: dict[str, list[int]] = defaultdict(list)

    def forward(self, numbers: Tensor) -> Tensor:
        h = self.first(numbers[:, None].to(self.first.weight.dtype) / 10)
        for block in self.blocks:
            h = block(h)
        return self.last(h)[:, 0]

    def loss(self, batch: Any, stage: str) -> Tensor:
        self.seen[stage] += batch.int().tolist()
        return (self(batch) - batch).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch, "val"), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self.loss(batch, "test"), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> list[int]:
        self.loss(batch, "predict")
        return batch.int().tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def numbers(samples: int, batch_size: int = 1, **options: Any) -> DataLoader[Tensor]:
    return DataLoader(Numbers(samples), batch_size=batch_size, **options)


def part(samples: int, batch_size: int = 1) -> Any:
    """This rank's samples; one process takes all of them, in the order of the ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return numbers(100, batch_size, sampler=range(rank, samples, ranks))


def batches(steps: int, size: int = GLOBAL_BATCH) -> Any:
    """The samples of a rank; whatever the layout, a step sees the same ones, and the loss is their mean."""
    return part(steps * size, size // dist.get_world_size())


def own(*samples: list[int], batch_size: int = 1) -> DataLoader[Tensor]:
    """A loader whose sampler gives each rank the samples listed for it."""
    mine = samples[dist.get_rank() % len(samples)]
    return DataLoader(Numbers(100), sampler=mine, batch_size=batch_size)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(p).detach().clone() for name, p in module.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-9) -> bool:
    largest = max(float(w.abs().max()) for w in other.values())
    return one.keys() == other.keys() and all(
        float((one[name] - other[name]).abs().max()) <= tolerance * largest for name in other
    )


def trainer(strategy: Any, **options: Any) -> pl.Trainer:
    """A quiet Trainer on all ranks there are, in float64."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return make_trainer(ranks, strategy, **({"max_epochs": 1, "precision": "64-true"} | options))


def launched(strategy: Any, **options: Any) -> Fabric:
    """A Fabric on all ranks there are, in float64."""
    fabric = Fabric(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **({"precision": "64-true"} | options)
    )
    fabric.launch()
    return fabric


def strategy_of(layout: str, host: str = "trainer", **more: Any) -> Any:
    """The strategy of a layout of `parity.LAYOUTS`, with more options; "one" is one process without any."""
    if layout == "one":
        return "auto"
    name, options = LAYOUTS[layout][1]
    return build_strategy((name, options | more), host)
