"""A small training whose batches go wrong on request, and what it leaves behind, bit for bit."""

from __future__ import annotations

import contextlib
import logging
import math
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset

from lightning_par.callbacks import NaNRewind
from lightning_par.parallel.shards import to_local
from lightning_par.strategies.rewinding import scaler_of
from parity import LAYOUTS, build_strategy, make_trainer, model_size

DIVIDED = {
    "tp": (2, ("TensorParallelStrategy", {"tp_size": 2})),
    "pp": (2, ("PipelineParallelStrategy", {"pp_size": 2, "pp_microbatches": 2})),
    "tp2xdp2": (4, ("TensorParallelStrategy", {"tp_size": 2})),
}
GUARDED = LAYOUTS | DIVIDED

# What is wrong with a batch, by the letter that stands for it in a plan; "." is a good one.
KINDS = {"n": 1000, "s": 2000, "h": 3000, "o": 4000, "i": 5000, "f": 6000}
SIZE = 4


class Samples(Dataset[Tensor]):
    """Sample `i` is the number `i`."""

    def __len__(self) -> int:
        return 10000

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


class Fragile(pl.LightningModule):
    """The loss of a sample is not finite, a spike or far too steep, or its gradient is not finite, as its number says.

    Args:
        optimizer: Of `torch.optim`, or a function of the parameters.
        schedule: A name of `SCHEDULES`.
        norm: Whether there is a BatchNorm.
        dropout: The rate.
    """

    def __init__(self, optimizer: Any = "AdamW", schedule: str = "", norm: bool = False, dropout: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.last = nn.Linear(8, 1)
        self.optimizer, self.schedule = optimizer, schedule
        self.example_input_array = torch.arange(SIZE)
        self.seen: list[list[int]] = []
        self.rates: list[float] = []

    def forward(self, numbers: Tensor) -> Tensor:
        powers = torch.arange(1, 5, device=numbers.device)
        h = self.norm(self.first(torch.sin(numbers[:, None] * powers)))
        for block in self.blocks:
            h = block(h)
        return self.last(h)[:, 0]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch.tolist())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        kinds = batch // 1000 * 1000
        factors = torch.ones(len(batch))
        for kind, factor in ((KINDS["n"], math.nan), (KINDS["s"], 1e4), (KINDS["o"], 1e25), (KINDS["i"], math.inf)):
            factors[kinds == kind] = factor
        loss = ((self(batch % 1000) - torch.cos(batch)).square() * factors).mean()
        steep = {KINDS["h"]: math.nan, KINDS["f"]: 1e8}.get(int(kinds.max()))
        if steep is not None and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * steep)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        make = getattr(torch.optim, self.optimizer) if isinstance(self.optimizer, str) else self.optimizer
        optimizer = make(self.parameters(), lr=1e-2)
        if not self.schedule:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": SCHEDULES[self.schedule](optimizer)}


SCHEDULES: dict[str, Any] = {
    "cosine": lambda o: {"scheduler": lr_scheduler.CosineAnnealingLR(o, 20), "interval": "step"},
    "one cycle": lambda o: {"scheduler": lr_scheduler.OneCycleLR(o, 0.1, total_steps=20), "interval": "step"},
    "plateau": lambda o: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
        "interval": "step",
        "monitor": "loss",
    },
    "epoch": lambda o: {"scheduler": lr_scheduler.StepLR(o, 1, 0.5), "interval": "epoch"},
}


def indices(item: tuple[int, str], data_rank: int, data_ranks: int, poisoned: int) -> list[int]:
    """The samples of this rank of the batch at a place in a plan; the last one of the poisoned rank is bad."""
    place, letter = item
    own = SIZE // data_ranks
    samples = [place * SIZE + data_rank * own + i for i in range(own)]
    if letter != "." and data_rank == min(poisoned, data_ranks - 1):
        samples[-1] += KINDS[letter]
    return samples


def plan(letters: str, without: Iterable[int] = ()) -> list[tuple[int, str]]:
    """Batches in their order, by place and letter; those of some places left out, the others as they were."""
    return [item for item in enumerate(letters) if item[0] not in set(without)]


def data(
    items: list[tuple[int, str]], data_rank: int = 0, data_ranks: int = 1, poisoned: int = 1
) -> DataLoader[Tensor]:
    batches = [indices(item, data_rank, data_ranks, poisoned) for item in items]
    return DataLoader(Samples(), batch_sampler=batches)


class Listed:
    """A loader of the user's own with a state."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches
        self.next = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        self.next %= len(self)
        while self.next < len(self):
            self.next += 1
            yield torch.tensor(self.batches[self.next - 1])

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def state_of(trainer: pl.Trainer, module: nn.Module, *, random: bool = True) -> dict[str, Any]:
    """What of this rank has to be the same in two runs."""
    found: dict[str, Any] = {}
    for values in (module.named_parameters(), module.named_buffers()):
        found |= {name: to_local(value).detach().clone() for name, value in values if not value.is_meta}
    for i, optimizer in enumerate(trainer.optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for k, param in enumerate(group["params"]):
                for name, value in optimizer.state.get(param, {}).items():
                    tensor = torch.as_tensor(to_local(value) if isinstance(value, Tensor) else value)
                    found[f"optimizer {i}.{j}.{k}.{name}"] = tensor.clone()
            found |= {f"group {i}.{j}.{n}": torch.tensor(v) for n, v in group.items() if type(v) in (int, float)}
    for i, config in enumerate(trainer.lr_scheduler_configs):
        state = config.scheduler.state_dict()
        found |= {f"scheduler {i}.{n}": torch.tensor(v) for n, v in state.items() if type(v) in (int, float)}
    scaler = scaler_of(trainer)
    if scaler is not None:
        found |= {f"scaler {name}": torch.tensor(value) for name, value in scaler.state_dict().items()}
    if random:
        found["random"] = torch.get_rng_state()
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of what is not the same, bit for bit."""
    common = sorted(one.keys() & other.keys())
    return sorted(one.keys() ^ other.keys()) + [name for name in common if not torch.equal(one[name], other[name])]


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def listening() -> Any:
    handler, logger = Lines(), logging.getLogger("lightning_par")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


def fit(
    layout: str,
    items: list[tuple[int, str]],
    guard: dict[str, Any] | None = None,
    module: pl.LightningModule | None = None,
    poisoned: int = 1,
    loader: Any = None,
    **options: Any,
) -> tuple[pl.Trainer, Any, NaNRewind, list[str]]:
    """Train on the batches of a plan; "one" is one process without a strategy."""
    spec = None if layout == "one" else GUARDED[layout][1]
    ranks = dist.get_world_size() if spec is not None else 1
    callback = NaNRewind(**({"min_age": 0} | (guard or {})))
    module = module or Fragile()
    if loader is None:
        same = model_size(spec) if spec is not None else 1
        rank = dist.get_rank() if spec is not None else 0
        inner = int(spec[1].get("tp_size", 1)) if spec is not None else 1
        loader = data(items, rank // inner % (ranks // same), ranks // same, poisoned)
    options.setdefault("max_epochs", 1)
    options["callbacks"] = [callback, *options.get("callbacks", [])]
    strategy = "auto" if spec is None else build_strategy(spec, "trainer")
    with listening() as lines, tempfile.TemporaryDirectory() as root:
        trainer = make_trainer(ranks, strategy, **({"default_root_dir": root} | options))
        torch.manual_seed(5)
        trainer.fit(module, *(loader.values() if isinstance(loader, dict) else [loader]))
    return trainer, module, callback, lines


def compared(layout: str, letters: str, without: Iterable[int], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Train with and without the batches of some places; what differs, and how the first run went."""
    build = kwargs.pop("build", Fragile)
    runs = [fit(layout, plan(letters, left_out), *args, module=build(), **kwargs) for left_out in ((), without)]
    (trainer, module, callback, lines), (oracle, expected, _, said) = runs
    return {
        "differences": differences(state_of(trainer, module), state_of(oracle, expected)),
        "counters": vars(callback.guard.counters),
        "lines": lines,
        "said": said,
        "steps": (trainer.global_step, oracle.global_step),
        "rates": (module.rates, expected.rates),
        "scales": [scaler.get_scale() for one in (trainer, oracle) if (scaler := scaler_of(one)) is not None],
        "compared": len(state_of(trainer, module)),
    }
