"""State beside the parameters: averages, buffers, running statistics, what hooks save, and what finders change."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from probe import (
    GLOBAL_BATCH,
    Probe,
    batches,
    crossed,
    listed,
    part,
    same,
    strategy_of,
    trainer,
    weights,
)
from torch import Tensor, nn

from lightning_par.parallel.shards import copy_full_into, full_tensor
from lightning_par.testing import RanksFailed, run_ranks
from parity import LAYOUTS

State = dict[str, Tensor]


def two_halves(
    layout: str, folder: str, build: Callable[[], Any], observe: Callable[[Any], State], **options: Any
) -> State:
    """What is to be seen after two epochs: in one process at once, else resumed by another module after the first."""
    path = f"{folder}/{layout}.ckpt"
    epochs = 2 if layout == "one" else 1
    module = build()
    run = trainer(strategy_of(layout), max_epochs=epochs, **options)
    run.fit(module, batches(4), batches(1))
    if layout != "one":
        run.save_checkpoint(path)
        module = build()
        nn.init.zeros_(module.last.weight)
        trainer(strategy_of(layout), max_epochs=2, **options).fit(module, batches(4), batches(1), ckpt_path=path)
    return observe(module)


# -- a user's own averages ------------------------------------------------------------------------------------------


class OwnAverages(Probe):
    """A copy of its layers that follows them, and a plain dict of tensors that does; both in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(nn.ModuleList([self.first, self.blocks, self.last])).requires_grad_(False)
        self.kept: State = {}
        self.saved: State = {}

    def current(self) -> State:
        return {name: p for name, p in self.named_parameters() if not name.startswith("average.")}

    def on_fit_start(self) -> None:
        self.kept = {name: p.detach().clone() for name, p in self.current().items()}

    def on_train_start(self) -> None:
        for name, value in self.saved.items():
            copy_full_into(self.kept[name], value)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for average, p in zip(self.average.parameters(), self.current().values(), strict=True):
            average.lerp_(p, 0.3)
        for name, p in self.current().items():
            self.kept[name].mul_(0.5).add_(p, alpha=0.5)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        first, blocks, last = self.average
        h = first(batch[:, None].to(first.weight.dtype))
        for block in blocks:
            h = block(h)
        self.log("average", last(h).mean(), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = {name: full_tensor(value) for name, value in self.kept.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saved = checkpoint["kept"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.current().values(), lr=0.01)


def averages(module: Any) -> State:
    kept = {f"kept {name}": full_tensor(value) for name, value in module.kept.items()}
    return weights(module) | kept | {"logged": module.trainer.callback_metrics["average"]}


@functools.cache
def own_averages_in_one_process(accumulate: int) -> State:
    return run_ranks(1, two_halves, "one", "", OwnAverages, averages, accumulate_grad_batches=accumulate)[0]


# A window has steps that reduce nothing: it is the harder case, and has all layouts.
WINDOWS = [*((2, layout) for layout in LAYOUTS), (1, "ddp"), (1, "fsdp")]


@pytest.mark.parametrize(("accumulate", "layout"), listed(WINDOWS, (2, "fsdp")))
def test_own_averages_follow_as_in_one_process(accumulate: int, layout: str, tmp_path: Path) -> None:
    expected = own_averages_in_one_process(accumulate)
    for found in run_ranks(
        LAYOUTS[layout][0],
        two_halves,
        layout,
        str(tmp_path),
        OwnAverages,
        averages,
        accumulate_grad_batches=accumulate,
    ):
        assert same(found, expected)


# -- buffers and running statistics ---------------------------------------------------------------------------------


class Buffered(Probe):
    """Normalises by batches, and counts in a buffer that is saved and in one that is not."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.append(nn.BatchNorm1d(4))
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.history: dict[str, list[State]] = {"start": [], "before": [], "inside": []}

    def take(self, moment: str) -> None:
        self.history[moment].append({name: buffer.double() + 0 for name, buffer in self.named_buffers()})

    def on_train_start(self) -> None:
        self.take("start")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.total += batch.sum()
        self.scratch += batch.float().mean()
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.take("before")

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.take("inside")
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def keep_buffers(layout: str, folder: str, kind: str) -> tuple[dict[str, list[State]], dict[str, list[State]]]:
    """What the buffers are in a fit that validates in its middle and saves at its end, and after a resume."""
    first, second, path = Buffered(), Buffered(), f"{folder}/buffers-{layout}.ckpt"
    run = trainer(strategy_of(layout, state_dict_type=kind), val_check_interval=2)
    run.fit(first, batches(3, 8), batches(1, 8))
    run.save_checkpoint(path)
    first.take("inside")
    trainer(strategy_of(layout, state_dict_type=kind), max_epochs=2).fit(second, batches(3, 8), ckpt_path=path)
    return first.history, second.history


@pytest.mark.parametrize(
    ("kind", "layout"), crossed(("sharded", "full"), LAYOUTS, quick=[("sharded", "fsdp"), ("full", "ddp")])
)
def test_buffers_are_those_of_the_first_rank_where_they_are_read(layout: str, kind: str, tmp_path: Path) -> None:
    ranks = run_ranks(LAYOUTS[layout][0], keep_buffers, layout, str(tmp_path), kind)
    (first, _), (other, _) = ranks[:2]
    assert not same(first["before"][0], other["before"][0], 1e-3), "the ranks see the same data"
    saved = {name: value for name, value in first["before"][0].items() if name != "scratch"}
    for history, resumed in ranks:
        # In the middle of the epoch, and in the checkpoint, where rank 0 has gone on.
        assert same(history["inside"][0], first["inside"][0])
        assert same(history["inside"][1], first["before"][0])
        assert same({name: resumed["start"][0][name] for name in saved}, saved)
        assert not resumed["start"][0]["scratch"].any()


def normalise(layout: str, **options: Any) -> tuple[State, State, float]:
    module = Buffered()
    run = trainer(strategy_of(layout), max_epochs=2, sync_batchnorm=layout != "one", **options)
    run.fit(module, batches(3), batches(2))
    buffers = {name: b.double() for name, b in module.named_buffers() if name not in ("total", "scratch")}
    return weights(module), buffers, float(run.callback_metrics["val_loss"])


@pytest.mark.parametrize(("accumulate", "layout"), listed(WINDOWS, (2, "fsdp")))
def test_sync_batchnorm_normalises_by_the_whole_batch(accumulate: int, layout: str) -> None:
    [expected] = run_ranks(1, normalise, "one", accumulate_grad_batches=accumulate)
    for found in run_ranks(LAYOUTS[layout][0], normalise, layout, accumulate_grad_batches=accumulate):
        assert same(found[0], expected[0])
        assert same(found[1], expected[1])
        assert found[2] == pytest.approx(expected[2], rel=1e-9)


# -- finders --------------------------------------------------------------------------------------------------------


class Searching(Probe):
    """Has what the finders change, and its own data."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = GLOBAL_BATCH // dist.get_world_size()
        self.lr = 0.01

    def train_dataloader(self) -> Any:
        return part(8 * GLOBAL_BATCH, self.batch_size)

    def val_dataloader(self) -> Any:
        return []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def find_rate(layout: str, folder: str, how: str) -> Any:
    """The rates that were tried, the one that was chosen, and the weights of the training that follows."""
    module, options = Searching(), {"min_lr": 1e-4, "max_lr": 0.5, "early_stop_threshold": None}
    finder: Any = LearningRateFinder(num_training_steps=20, **options)
    callbacks = [finder] if how == "callback" else []
    run = trainer(strategy_of(layout), callbacks=callbacks, default_root_dir=folder, max_epochs=2)
    found = Tuner(run).lr_find(module, num_training=20, **options) if how == "tuner" else None
    run.fit(module)
    found = found or finder.optimal_lr
    return found.results["lr"], module.lr, weights(module), run.global_step


def find_batch_size(layout: str, folder: str, how: str) -> int:
    module = Searching()
    callbacks = [BatchSizeFinder(max_trials=3)] if how == "callback" else []
    run = trainer(strategy_of(layout), callbacks=callbacks, default_root_dir=folder)
    if how == "tuner":
        Tuner(run).scale_batch_size(module, max_trials=3)
    run.fit(module)
    return module.batch_size


@functools.cache
def found_in_one_process(how: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(1, find_rate, "one", folder, how)[0]


# Both ways call the same search.
@pytest.mark.parametrize(
    ("how", "layout"),
    listed([*(("callback", layout) for layout in LAYOUTS), ("tuner", "ddp"), ("tuner", "fsdp")], ("callback", "fsdp")),
)
def test_learning_rate_finder(how: str, layout: str, tmp_path: Path) -> None:
    tried, chosen, expected, steps = found_in_one_process(how)
    for found in run_ranks(LAYOUTS[layout][0], find_rate, layout, str(tmp_path), how):
        assert found[0] == pytest.approx(tried)
        assert found[1] == pytest.approx(chosen) != 0.01
        assert same(found[2], expected)
        assert found[3] == steps
    assert not list(tmp_path.glob(".lr_find*")), "the finder's own checkpoint is left"


@pytest.mark.parametrize(
    ("how", "layout"), crossed(("callback", "tuner"), LAYOUTS, quick=[("callback", "ddp"), ("tuner", "fsdp")])
)
def test_batch_size_finder_works_on_one_rank_and_is_refused_on_several(layout: str, how: str, tmp_path: Path) -> None:
    if layout != "hsdp2x2":
        assert run_ranks(1, find_batch_size, layout, str(tmp_path), how) == [8]
    with pytest.raises(
        RanksFailed, match=r"[Bb]atch size (finder )?is (currently )?not supported with distributed strat"
    ):
        run_ranks(LAYOUTS[layout][0], find_batch_size, layout, str(tmp_path), how)


# -- averages of Lightning's callbacks ------------------------------------------------------------------------------


class Doubled(Probe):
    """In fp64 from the start, as nobody converts the copies that callbacks make of it; with a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.last.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("total", torch.zeros(()))
        self.double()

    def forward(self, numbers: Tensor) -> Tensor:
        return super().forward(numbers) * self.scale

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}


AVERAGES: dict[str, Callable[[], Any]] = {
    "SWA": lambda: StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=2),
    "mean": WeightAveraging,
    "mean without buffers": lambda: WeightAveraging(use_buffers=False),
    "EMA": lambda: EMAWeightAveraging(decay=0.6),
    "EMA of some steps": lambda: EMAWeightAveraging(decay=0.6, update_every_n_steps=3, update_starting_at_step=2),
    "EMA by epoch": lambda: EMAWeightAveraging(decay=0.6, update_every_n_steps=0, update_starting_at_epoch=1),
}


def average(layout: str, name: str, folder: str, kind: str = "sharded") -> tuple[State, State, list[float]]:
    """The weights of a fit that never stops and of one that does, and the losses of validation by the averages."""
    options = {} if layout == "one" else {"state_dict_type": kind}
    found, losses = [], []
    for ckpt_path in (None, f"{folder}/epoch=1.ckpt"):
        module, seen = Doubled(), Losses()
        # After the second epoch the average differs from the weights.
        saver = ModelCheckpoint(folder, "{epoch}", every_n_epochs=2, save_top_k=-1, save_on_train_epoch_end=True)
        run = trainer(
            strategy_of(layout, **options),
            max_epochs=4,
            callbacks=[AVERAGES[name](), seen, saver],
            enable_checkpointing=True,
        )
        run.fit(module, batches(3), batches(2), ckpt_path=ckpt_path)
        found.append(weights(module))
        losses.append(seen.losses)
    assert losses[1] == pytest.approx(losses[0][2:], rel=1e-9)
    return found[0], found[1], losses[0]


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


@functools.cache
def average_in_one_process(name: str) -> tuple[State, State, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(1, average, "one", name, folder)[0]


def average_wrongly(how: str) -> None:
    callbacks = [WeightAveraging(), EMAWeightAveraging()] if how == "two" else [EMAWeightAveraging()]
    run = trainer("par_fsdp", callbacks=callbacks)
    with run.init_module(empty_init=how == "meta"):
        module = Probe()
    run.fit(module, batches(1))
    run.fit(module, batches(1))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("two", "WeightAveraging and EMAWeightAveraging would each put"),
        ("meta", "EMAWeightAveraging copies the module when a fit begins, and its parameters have no values"),
        ("again", "EMAWeightAveraging copies the module when a fit begins, and an earlier run has divided it"),
    ],
)
def test_averages_that_cannot_work_are_refused(how: str, words: str) -> None:
    with pytest.raises(RanksFailed, match=f"ParallelConfigError(?s:.)*{words}"):
        run_ranks(2, average_wrongly, how)


def average_statistics(layout: str, folder: str, kind: str) -> tuple[State, State, State]:
    """Averages of running statistics, in validation and in a file; what plain Lightning loads from that, if it can."""
    module, path = Buffered(), f"{folder}/file.ckpt"
    run = trainer(
        strategy_of(layout, state_dict_type=kind), callbacks=[EMAWeightAveraging(decay=0.5)], accumulate_grad_batches=2
    )
    run.fit(module, batches(4, 8), batches(1, 8))
    run.save_checkpoint(path)
    again, plain = Buffered(), Buffered()
    trainer(strategy_of(layout, state_dict_type=kind)).validate(again, batches(1, 8), ckpt_path=path, verbose=False)
    if kind == "full":
        plain.load_state_dict(torch.load(path, weights_only=False)["state_dict"])
    return module.history["inside"][0], weights(module), weights(plain if kind == "full" else again)


@pytest.mark.parametrize(
    ("kind", "layout"), crossed(("sharded", "full"), LAYOUTS, quick=[("sharded", "ddp"), ("full", "fsdp")])
)
def test_averages_of_statistics_and_files_of_averages(layout: str, kind: str, tmp_path: Path) -> None:
    ranks = run_ranks(LAYOUTS[layout][0], average_statistics, layout, str(tmp_path), kind)
    for inside, trained, loaded in ranks:
        assert same(inside, ranks[0][0]), "the ranks evaluate by different statistics"
        assert same(loaded, trained, 1e-6 if kind == "full" else 1e-9)  # Plain Lightning has built it in fp32.


# Averages are cut as their parameters are: one kind shows it under every layout, the others when they average.
CASES = [
    *((name, "sharded", layout) for name in ("SWA", "EMA") for layout in LAYOUTS),
    *((name, "sharded", layout) for name in AVERAGES if name not in ("SWA", "EMA") for layout in ("ddp", "fsdp")),
    *(("EMA", "full", layout) for layout in ("ddp", "hsdp2x2")),
    ("SWA", "full", "ddp"),
]


@pytest.mark.parametrize(
    ("name", "kind", "layout"),
    listed(
        CASES,
        ("SWA", "sharded", "ddp"),
        ("SWA", "sharded", "fsdp"),
        ("EMA", "sharded", "fsdp"),
        ("EMA by epoch", "sharded", "ddp"),
    ),
)
def test_averages_of_callbacks(layout: str, name: str, kind: str, tmp_path: Path) -> None:
    if name == "SWA" and layout != "ddp":
        with pytest.raises(RanksFailed, match="ParallelConfigError(?s:.)*StochasticWeightAveraging copies the module"):
            run_ranks(LAYOUTS[layout][0], average, layout, name, str(tmp_path))
        return
    expected, resumed_alone, losses = average_in_one_process(name)
    assert same(resumed_alone, expected), "Lightning does not go on as if never stopped"
    for straight, resumed, found in run_ranks(LAYOUTS[layout][0], average, layout, name, str(tmp_path), kind):
        assert found == pytest.approx(losses, rel=1e-9)
        assert same(straight, expected)
        assert same(resumed, expected)
