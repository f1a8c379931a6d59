"""State beside the parameters: averages, buffers, running statistics, what hooks save, and what finders change."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from probe import Probe, batches, each_layout, same, strategy_of, trainer, weights
from torch import Tensor, nn

from lightning_par.parallel.shards import copy_full_into, full_tensor
from lightning_par.testing import run_ranks
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


@each_layout
@pytest.mark.parametrize("accumulate", [1, 2])
def test_own_averages_follow_as_in_one_process(layout: str, accumulate: int, tmp_path: Path) -> None:
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
    run.fit(first, batches(3), batches(1))
    run.save_checkpoint(path)
    first.take("inside")
    trainer(strategy_of(layout, state_dict_type=kind), max_epochs=2).fit(second, batches(3), ckpt_path=path)
    return first.history, second.history


@each_layout
@pytest.mark.parametrize("kind", ["sharded", "full"])
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


@each_layout
@pytest.mark.parametrize("accumulate", [1, 2])
def test_sync_batchnorm_normalises_by_the_whole_batch(layout: str, accumulate: int) -> None:
    [expected] = run_ranks(1, normalise, "one", accumulate_grad_batches=accumulate)
    for found in run_ranks(LAYOUTS[layout][0], normalise, layout, accumulate_grad_batches=accumulate):
        assert same(found[0], expected[0])
        assert same(found[1], expected[1])
        assert found[2] == pytest.approx(expected[2], rel=1e-9)
