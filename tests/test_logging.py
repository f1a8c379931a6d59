"""What is logged on several ranks: every form of `self.log`, torchmetrics, and callbacks that decide by a metric."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import grad_norm
from probe import TWO, Probe, every_layout, numbers, own, some, strategies, trainer
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric, MeanSquaredError, Metric, MetricCollection, MinMaxMetric, SumMetric
from torchmetrics.classification import BinaryAUROC

from lightning_par.testing import run_ranks


class Memory(Logger):
    """Keeps what it is given."""

    name = "memory"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, list[float]] = defaultdict(list)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            assert isinstance(value, float | int), name
            self.rows[name].append(value)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def floats(metrics: Any) -> dict[str, float]:
    assert all(type(value) is Tensor for value in metrics.values())
    return {name: float(value) for name, value in metrics.items()}


# -- self.log -------------------------------------------------------------------------------------------------------

# Two batches a rank; the last one of rank 1 is smaller.
SAMPLES = [[0, 1, 2, 3], [10, 11, 12]]
REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": math.fsum,
    "min": min,
    "max": max,
    "mean": lambda values: math.fsum(values) / len(values),
}
FORMS = [
    (on_step, on_epoch, sync, fx)
    for on_step, on_epoch, sync, fx in itertools.product([True, False], [True, False], [True, False], REDUCTIONS)
    if on_step or on_epoch
]


def name_of(stage: str, form: tuple[bool, bool, bool, str]) -> str:
    on_step, on_epoch, sync, fx = form
    return f"{stage}/{'step ' * on_step}{'epoch ' * on_epoch}{'sync ' * sync}{fx}"


class LogsEveryForm(Probe):
    def log_all(self, batch: Tensor, stage: str) -> None:
        for form in FORMS:
            on_step, on_epoch, sync, fx = form
            mean = batch.double().mean()
            # Python numbers are as good as tensors.
            value = mean.item() if fx == "max" else mean
            self.log(name_of(stage, form), value, on_step=on_step, on_epoch=on_epoch, sync_dist=sync, reduce_fx=fx)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log_all(batch, "train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log_all(batch, "val")
        self.loss(batch, "val")


def log_every_form(strategy: str) -> tuple[dict[str, float], dict[str, list[float]]]:
    logger = Memory()
    run = trainer(strategy, logger=logger, log_every_n_steps=1)
    run.fit(LogsEveryForm(), own(*SAMPLES, batch_size=2), own(*SAMPLES, batch_size=2))
    return floats(run.callback_metrics), dict(logger.rows)


@strategies("par_ddp")
def test_every_form_of_log_has_the_value_it_says(strategy: str) -> None:
    batches = [[samples[i : i + 2] for i in (0, 2)] for samples in SAMPLES]
    for rank, (metrics, rows) in enumerate(run_ranks(2, log_every_form, strategy)):
        for form in FORMS:
            on_step, on_epoch, sync, fx = form
            ranks = batches if sync else [batches[rank]]
            reduced = REDUCTIONS[fx]
            steps = [reduced([REDUCTIONS["mean"](mine[b]) for mine in ranks]) for b in (0, 1)]
            everything = [sample for mine in ranks for batch in mine for sample in batch]
            means = [REDUCTIONS["mean"](batch) for mine in ranks for batch in mine]
            epoch = reduced(everything if fx == "mean" else means)
            train, val = name_of("train", form), name_of("val", form)
            assert metrics[train] == pytest.approx(epoch if on_epoch else steps[1]), train
            if on_epoch:
                assert metrics[val] == pytest.approx(epoch), val
                assert rows[f"{train}_epoch" if on_step else train] == pytest.approx([epoch])
            if on_step:
                assert rows[f"{train}_step" if on_epoch else train] == pytest.approx(steps), train


class LogsElsewhere(Probe):
    """Logs in hooks, from a callback, to a group, on rank 0 only, and into the progress bar."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        rank = float(dist.get_rank())
        self.log("group", rank, sync_dist=True, sync_dist_group=dist.group.WORLD, on_epoch=True, on_step=False)
        self.log("integer", dist.get_rank(), sync_dist=True, prog_bar=True)
        self.log_dict({"a": rank, "b": torch.tensor(2 * rank)}, sync_dist=True)
        if dist.get_rank() == 0:
            self.log("only rank 0", 7.0, rank_zero_only=True, sync_dist=True, on_epoch=True)
        return {"loss": loss, "extra": 3}  # type: ignore[return-value]

    def on_train_epoch_end(self) -> None:
        self.log("hook", float(dist.get_rank()), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val_hook", float(dist.get_rank()), sync_dist=True, reduce_fx="sum")


class LogsFromCallback(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.log("callback", float(dist.get_rank()), sync_dist=True, reduce_fx="max", on_epoch=True)


def log_elsewhere(strategy: str) -> dict[str, float]:
    run = trainer(strategy, callbacks=[LogsFromCallback()])
    run.fit(LogsElsewhere(), numbers(2), numbers(2))
    return floats(run.callback_metrics)


@pytest.mark.parametrize("strategy", TWO)
def test_hooks_callbacks_groups_and_rank_zero(strategy: str) -> None:
    first, second = run_ranks(2, log_elsewhere, strategy)
    expected = {"group": 0.5, "integer": 0.5, "a": 0.5, "b": 1.0, "hook": 0.5, "val_hook": 1.0, "callback": 1.0}
    for metrics in (first, second):
        assert {name: metrics[name] for name in expected} == expected
    assert first["only rank 0"] == 7.0
    assert "only rank 0" not in second


# -- parameters and gradients ---------------------------------------------------------------------------------------


class LogsGradients(Probe):
    """Looks at gradients and parameters in hooks, where a sharded module has DTensors."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log_dict(grad_norm(self, 2), prog_bar=True)
        weight = self.blocks[0][0].weight  # type: ignore[index]
        assert weight.grad is not None
        self.log("norm", weight.norm(), sync_dist=True, on_step=True, on_epoch=True)
        self.log("largest", weight.grad.abs().max().item())
        self.log("some above the mean", float(bool((weight > weight.mean()).any())))
        self.gathered = self.all_gather(weight.grad.norm())

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("inf", self.first.weight.norm(float("inf")))
        weight = self.blocks[0][0].weight  # type: ignore[index]
        self.log("norm as a number", weight.norm().item())
        self.log("one is the largest", float(bool((weight >= weight.max()).any())))


def log_gradients(strategy: str) -> tuple[dict[str, float], list[float]]:
    module, ranks = LogsGradients(), dist.get_world_size()
    run = trainer(strategy, max_steps=2, accumulate_grad_batches=2 // ranks)
    run.fit(module, numbers(4, sampler=range(dist.get_rank(), 4, ranks)))  # type: ignore[arg-type]
    return floats(run.callback_metrics), module.gathered.flatten().tolist()


@every_layout
def test_gradients_and_parameters_are_logged_whole(strategy: str) -> None:
    [(expected, [norm])] = run_ranks(1, log_gradients, "auto")
    assert len(expected) > 15
    for metrics, gathered in run_ranks(2, log_gradients, strategy):
        assert metrics == pytest.approx(expected, rel=1e-12)
        assert gathered == pytest.approx([norm, norm], rel=1e-12)


# -- torchmetrics ---------------------------------------------------------------------------------------------------


class Measures(Probe):
    """Metrics logged as objects, as a collection, computed by hand, and with list states."""

    def __init__(self) -> None:
        super().__init__()
        self.train_error = MeanSquaredError()
        self.error = MeanSquaredError()
        self.several = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()}, prefix="several/")
        self.range = MinMaxMetric(MeanMetric())
        self.all = CatMetric()
        self.auroc = BinaryAUROC()
        self.found: dict[str, Any] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.train_error(self(batch).detach(), batch.to(self.dtype))
        self.log("train_error", self.train_error, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        output = self(batch)
        self.error(output, batch.to(self.dtype))
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.several.update(output)
        self.log_dict(self.several)
        self.all.update(batch)
        self.auroc.update(torch.sigmoid(output), batch % 2)
        self.range.update(output)

    def on_validation_epoch_end(self) -> None:
        self.found["all"] = sorted(self.all.compute().tolist())
        self.found["range"] = {name: float(v) for name, v in self.range.compute().items()}
        self.log("auroc", self.auroc.compute())
        self.found["reset"] = []
        for metric in (self.all, self.auroc, self.range):
            metric.reset()
        self.found["groups"] = sum(isinstance(m, Metric) and m.process_group is not None for m in self.modules())


def measure(strategy: str) -> tuple[dict[str, float], dict[str, Any]]:
    ranks = dist.get_world_size()
    parts = [[0, 1, 2, 3, 4], [5, 6, 7]] if ranks == 2 else [[0, 1, 2, 3, 4, 5, 6, 7]]
    module = Measures()
    # The learning rate is 0: one process and two see other windows of the same samples.
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)  # type: ignore[method-assign]
    run = trainer(strategy, max_epochs=2)
    run.fit(module, own([0, 1], [2, 3]) if ranks == 2 else numbers(4), own(*parts, batch_size=2))
    metrics = floats(run.callback_metrics)
    metrics.pop("train_error_step")
    return metrics, module.found


@strategies("par_ddp")
def test_metrics_are_those_of_one_process(strategy: str) -> None:
    [(expected, found)] = run_ranks(1, measure, "auto")
    for metrics, mine in run_ranks(2, measure, strategy):
        assert metrics == pytest.approx(expected, rel=1e-6)
        assert mine["all"] == found["all"] == [float(i) for i in range(8)]
        assert mine["range"] == pytest.approx(found["range"])
        assert mine["groups"] >= 7


# -- callbacks that decide by a metric ------------------------------------------------------------------------------


class Monitored(Probe):
    """Logs a series of values, which differs between the ranks."""

    def __init__(self, series: list[list[float]], sync: bool) -> None:
        super().__init__()
        self.series = series[dist.get_rank() % len(series)]
        self.sync = sync

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("score", self.series[self.current_epoch], sync_dist=self.sync)


def monitor(strategy: str, folder: str, series: list[list[float]], sync: bool) -> dict[str, Any]:
    best = ModelCheckpoint(folder, "{epoch}-{score:.2f}", monitor="score", save_top_k=2, save_last=True)
    stopping = EarlyStopping("score", patience=1)
    callbacks = [best, stopping, LearningRateMonitor()]
    run = trainer(strategy, callbacks=callbacks, max_epochs=6, enable_checkpointing=True, logger=Memory())
    run.fit(Monitored(series, sync), numbers(2), numbers(2))
    return {
        "epochs": run.current_epoch,
        "stopped": stopping.stopped_epoch,
        "best": Path(best.best_model_path).name,
        "score": None if best.best_model_score is None else float(best.best_model_score),
        "kept": sorted(path.name for path in Path(folder).iterdir()),
    }


@strategies("par_ddp")
def test_monitors_agree_on_all_ranks(strategy: str, tmp_path: Path) -> None:
    # The means: 3, 2, 2.5, 2.5; alone, rank 0 would go on and rank 1 would stop earlier.
    series = [[4.0, 3.0, 2.0, 1.0, 0.0, 0.0], [2.0, 1.0, 3.0, 4.0, 5.0, 5.0]]
    first, second = run_ranks(2, monitor, strategy, str(tmp_path), series, True)
    assert first == second
    assert (first["epochs"], first["best"], first["score"]) == (3, "epoch=1-score=2.00.ckpt", 2.0)
    assert first["kept"] == ["epoch=1-score=2.00.ckpt", "epoch=2-score=2.50.ckpt", "last.ckpt"]


@pytest.mark.parametrize("strategy", some(TWO, "par_fsdp"))
def test_a_monitor_that_was_not_reduced_stops_all_ranks_together(strategy: str, tmp_path: Path) -> None:
    series = [[4.0, 3.0, 2.0, 1.0, 0.0, 0.0], [2.0, 1.0, 3.0, 4.0, 5.0, 5.0]]
    first, second = run_ranks(2, monitor, strategy, str(tmp_path), series, False, timeout=20)
    assert (first["epochs"], second["epochs"]) == (3, 3)
    assert first["kept"] == second["kept"]


def log_to_files(folder: str) -> int:
    run = trainer("par_fsdp", logger=CSVLogger(folder, "run", "0"), log_every_n_steps=1)
    run.fit(Probe(), numbers(4), numbers(2))
    return len(list(Path(folder).rglob("metrics.csv")))


def test_rank_0_writes_the_log(tmp_path: Path) -> None:
    run_ranks(2, log_to_files, str(tmp_path))
    rows = (tmp_path / "run" / "0" / "metrics.csv").read_text().splitlines()
    assert rows[0].split(",") == ["epoch", "step", "val_loss"]
    assert len(rows) == 2
