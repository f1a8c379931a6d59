"""Modules whose steps log, collect and count, and what the last stage of a pipeline does with them."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, Metric, MetricCollection, PearsonCorrCoef, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score, MulticlassRecall

from lightning_par.parallel.pipeline.loss_weights import combine, watch_targets
from lightning_par.parallel.pipeline.microbatches import merge, sizes, split
from lightning_par.strategies.step_records import MergedStep, StepRecord, merge_records, recording

CLASSES, PARTS = 4, 3


class Logging(pl.LightningModule):
    """Logs all that Lightning takes, collects in lists and counts in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, CLASSES)
        # `training_step` and `validation_step` have metrics of their own, as Lightning wants it.
        self.metrics = nn.ModuleDict({stage: self._metrics() for stage in ("train_", "val_")})
        self.losses: list[Tensor] = []
        self.by_kind: dict[str, list[Any]] = defaultdict(list)
        self.steps = self.samples = 0
        self.running, self.window = 0.0, [0.0, 0.0]
        self.total = torch.tensor(0.0)
        self.at_end: list[Any] = []

    def _metrics(self) -> nn.ModuleDict:
        collection = {"recall": MulticlassRecall(CLASSES), "f1": MulticlassF1Score(CLASSES, average="macro")}
        return nn.ModuleDict(
            {
                "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
                "f1": MulticlassF1Score(CLASSES, average="macro"),
                "auroc": MulticlassAUROC(CLASSES),
                "updated": MulticlassAUROC(CLASSES),
                "mean": MeanMetric(),
                "sum": SumMetric(),
                "correlation": PearsonCorrCoef(),
                "called": MetricCollection(collection, prefix="called_"),
                "grouped": MetricCollection(dict(collection), prefix="grouped_", postfix="_g"),
            }
        )

    def _step(self, batch: Any, kind: str) -> Tensor:
        x, labels, classes = batch
        logits = self.layer(x)
        loss = F.cross_entropy(logits, labels)
        m: Any = self.metrics[kind]
        both = {"on_step": True, "on_epoch": True}
        self.log(kind + "loss", loss, prog_bar=True, **both)
        self.log(name=kind + "half", value=loss.item() / 2, batch_size=int((labels >= 0).sum()), on_epoch=True)
        self.log_dict({kind + "largest": x.max()}, reduce_fx="max", on_step=False, on_epoch=True)
        self.log(kind + "count", float(len(x)), reduce_fx=torch.sum, on_step=False, on_epoch=True)
        # A value that a metric returns, a metric that was called, and one that was updated only.
        self.log(kind + "accuracy", m["accuracy"](logits, classes), **both)
        m["f1"](logits, classes)
        m["auroc"](logits, classes)
        m["updated"].update(logits, classes)
        m["mean"](logits[:, 0], x[:, 0].abs())
        m["correlation"](logits[:, 0], x[:, 0])
        for name in ("f1", "auroc", "mean", "correlation"):
            self.log(kind + name, m[name], **both)
        self.log(kind + "updated", m["updated"], on_step=False, on_epoch=True)
        self.log(kind + "sum", m["sum"](logits), **both)
        self.log_dict({kind + name: value for name, value in m["called"](logits, classes).items()}, **both)
        m["grouped"].update(logits, classes)
        self.log_dict(m["grouped"], on_step=False, on_epoch=True)
        self.losses.append(loss)
        self.by_kind[kind].append((logits, len(x)))
        self.steps += 1
        self.samples += len(x)
        self.running = 0.9 * self.running + 0.1 * loss.item()
        self.window = [*self.window[1:], loss.item()]
        self.total += loss.detach()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self._step(batch, "train_"), "logits": self.layer(batch[0]).detach(), "batch_idx": batch_idx}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self._step(batch, "val_")

    def on_validation_epoch_end(self) -> None:
        metric: Any = self.metrics["val_"]
        self.at_end.append((list(self.losses), metric["grouped"].compute(), self.by_kind["val_"][-1]))
        self.losses.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def seen(self) -> Any:
        names = ("at_end", "losses", "steps", "samples", "running", "window", "total")
        return {name: getattr(self, name) for name in names} | {"by_kind": dict(self.by_kind)}


def loader() -> DataLoader[tuple[Tensor, ...]]:
    """Batches of 7, 7 and 5 with padded labels, unequal among the micro-batches, and classes."""
    torch.manual_seed(0)
    x, classes = torch.randn(19, 3, dtype=torch.float64), torch.randint(CLASSES, (19,))
    labels = classes.clone()
    labels[[0, 1, 4, 7, 9, 10, 12, 13, 15, 18]] = -100
    return DataLoader(TensorDataset(x, labels, classes), batch_size=7)


def in_parts(module: Any, step: Callable[..., Any], batch: Any, *rest: Any) -> tuple[MergedStep, Any]:
    """What the last stage does."""
    records: list[StepRecord] = []
    outputs, counts = [], []
    for part in split(batch, PARTS):
        with recording(module, records) as record, watch_targets() as seen:
            outputs.append(step(part, *rest))
        records.append(record)
        counts.append(list(seen))
    part_sizes = sizes(len(batch[0]), PARTS)
    weights = combine(counts, part_sizes)
    # As if it came from another process.
    merged = pickle.loads(pickle.dumps(merge_records(module, records, weights, part_sizes)))
    return merged, merge(outputs, weights)


class Note(Logging):
    """A module outside a Trainer, of which it is noted what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["noted"] = []

    def log(self, name: str, value: Any, **kwargs: Any) -> None:
        given = {key: kwargs[key] for key in ("on_step", "on_epoch", "batch_size", "sync_dist") if key in kwargs}
        reduction = kwargs.get("reduce_fx", "mean")
        value = value._forward_cache if isinstance(value, Metric) else value
        if isinstance(value, Tensor):
            value = value.detach().clone()
        self.noted.append((name, value, given, getattr(reduction, "__name__", reduction)))


class Plain(Note):
    """Runs the function that it is given as its step."""

    def __init__(self, step: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.step = step


def close(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, check_dtype=False, equal_nan=True)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            close(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            close(a, b)
    else:
        assert one == (pytest.approx(other) if isinstance(other, float) else other)
