"""LightningModules whose steps do what users' steps do, and what a callback sees of their runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pipeline_models import Small
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics import CatMetric, MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_par.strategies import MeshStrategy
from parity import make_trainer

LENGTH = 4


class Sentences(Dataset[Any]):
    """Nested samples with strings and None; most targets of some samples are not counted."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(Small.vocabulary, (size, LENGTH), generator=generator)
        self.targets = self.ids.roll(1, 1)
        self.targets[::3, 1:] = -100
        self.targets[1::7] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        return {"input": {"ids": self.ids[index]}, "targets": self.targets[index], "name": f"sample {index}"}


def collate(items: list[Any]) -> Any:
    batch = torch.utils.data.default_collate(items)
    return {**batch, "weights": None}


def sentences(size: int, batch_size: int = 8) -> DataLoader[Any]:
    return DataLoader(Sentences(size), batch_size=batch_size, collate_fn=collate)


class Steps(pl.LightningModule):
    """Trains `Small`; the steps call it in the way that `call` says."""

    def __init__(self, call: str = "self(x)", schedule: str = "step") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = Small()
        self.call, self.schedule = call, schedule
        self.accuracy, self.val_accuracy = (MulticlassAccuracy(Small.vocabulary, average="micro") for _ in range(2))
        self.total, self.rows, self.mean = SumMetric(), CatMetric(), MeanMetric()
        # Of the loss itself, which is one number a step.
        self.mean_loss, self.loss_sum = MeanMetric(), SumMetric()
        for metric in (self.total, self.rows, self.mean, self.mean_loss, self.loss_sum):
            metric.set_dtype(torch.float64)
        self.outputs: list[Tensor] = []
        self.seen: list[Any] = []

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)

    def logits(self, batch: Any) -> Tensor:
        calls: dict[str, Callable[[], Tensor]] = {
            "self(x)": lambda: self(batch["input"]["ids"]),
            "self.model(x)": lambda: self.model(batch["input"]["ids"]),
            "self.model(**batch)": lambda: self.model(**batch["input"]),
        }
        return calls[self.call]()

    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        assert batch["weights"] is None
        assert len(batch["name"]) == len(batch["targets"])
        # A mask made before the model is used after it; two losses are combined.
        mask = batch["input"]["ids"] > 1
        logits = self.logits(batch)
        counted = logits * mask[..., None]
        targets = batch["targets"].flatten()
        return F.cross_entropy(counted.flatten(0, 1), targets) + 0.3 * F.cross_entropy(
            logits.flatten(0, 1), targets, label_smoothing=0.1
        ), logits.detach()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits = self.losses(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.accuracy(logits.flatten(0, 1), batch["input"]["ids"].flatten())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.mean_loss(loss)
        self.log("mean_loss", self.mean_loss, on_step=True, on_epoch=True)
        self.loss_sum.update(loss)
        self.log("loss_sum", self.loss_sum, on_step=False, on_epoch=True)
        self.outputs.append(loss.detach())
        return {"loss": loss, "logits": logits, "name": batch["name"]}

    def on_train_epoch_end(self) -> None:
        self.seen.append(list(self.outputs))
        self.outputs.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits = self.losses(batch)
        self.log("val_loss", loss)
        self.val_accuracy.update(logits.flatten(0, 1), batch["input"]["ids"].flatten())
        self.log("val_accuracy", self.val_accuracy)
        self.total.update((logits > 0).double().sum())
        self.log("total", self.total)
        self.rows.update(logits[:, 0, 0])
        self.mean.update(loss, len(logits))
        self.outputs.append(loss)
        return loss

    def on_validation_epoch_end(self) -> None:
        rows = self.rows.compute()
        self.log("rows", rows.sum())
        self.seen += [rows, self.mean.compute(), torch.stack(self.outputs)]
        for metric in (self.rows, self.mean):
            metric.reset()
        self.outputs.clear()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.losses(batch)[0])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"best": self(batch["input"]["ids"]).argmax(-1), "name": batch["name"], "index": batch_idx}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)
        if self.schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.schedule}}


class Sees(pl.Callback):
    """The hooks in their order, and what outputs, metrics and the rate are in them."""

    def __init__(self) -> None:
        self.hooks: list[str] = []
        self.steps: list[Any] = []
        for name in vars(pl.Callback):
            if name.startswith("on_") and "exception" not in name:
                setattr(self, name, self._noting(name, getattr(self, name, None)))

    def _noting(self, name: str, own: Any) -> Callable[..., None]:
        def note(trainer: pl.Trainer, module: Any, *args: Any, **kwargs: Any) -> None:
            self.hooks.append(name)
            if name == "on_train_batch_end":
                outputs = {key: value for key, value in args[0].items() if key != "name"}
                rate = trainer.optimizers[0].param_groups[0]["lr"]
                self.steps.append((outputs, dict(trainer.logged_metrics), dict(trainer.callback_metrics), rate))
                assert args[0]["name"] == args[1]["name"]
            if name in ("on_before_backward", "on_after_backward", "on_before_optimizer_step"):
                self.steps.append((name, sorted(self._norms(module))))

        return note

    def _norms(self, module: pl.LightningModule) -> list[str]:
        """Which kinds of parameters have a gradient, alike on each stage."""
        return list({str(param.grad is not None) for param in module.parameters()})


def trainer(pipelined: bool, pp_options: dict[str, Any] | None = None, **options: Any) -> pl.Trainer:
    """A Trainer for one process, or for a pipeline of all; what begins with pp_ is for the strategy."""
    ranks = dist.get_world_size()
    parallel = {key: options.pop(key) for key in list(options) if key.startswith("pp_")} | (pp_options or {})
    strategy: Any = "auto"
    if pipelined:
        strategy = MeshStrategy(**{"pp_size": ranks, "dp_shard_size": 1, "blocks": "model.blocks.*", **parallel})
    defaults: dict[str, Any] = {"max_epochs": 2, "precision": "64-true", "log_every_n_steps": 1}
    return make_trainer(ranks if pipelined else 1, strategy, **{**defaults, **options})
