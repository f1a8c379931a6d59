"""NaNRewind with steps by hand, with the verdict on the device, and in several fits: where something else goes on."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from guard_runs import Fragile, data, fit, plan
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from test_nan_rewind import Adversaries
from test_nan_rewind_edges import EVERY_TWO, ON_DEVICE, Validates, same
from torch import Tensor

from lightning_par.callbacks import NaNRewind
from lightning_par.resilience.spikes import SpikeRule
from lightning_par.strategies.rewinding import scaler_of
from lightning_par.testing import run_ranks
from parity import build_strategy, make_trainer

# Manual optimisation


class ByHand(Adversaries):
    """Two optimizers that do as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.scales: list[float] = []

    def losses(self, batch: Tensor) -> list[Tensor]:
        goal = torch.cos(batch)
        outputs = (self(batch % 1000), self.other(torch.sin(batch[:, None] * torch.arange(4)))[:, 0])
        return [(output - goal).square().mean() for output in outputs]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        bad = bool(batch.max() >= 1000)
        if self.kind == "twice":
            for turn in range(2):
                loss = self.losses(batch)[0]
                first.zero_grad()
                self.manual_backward(loss * math.nan if bad and turn == 0 else loss)
                first.step()
                self.lr_schedulers()[0].step()
                assert "step" not in self.lr_schedulers()[0].state_dict()
        elif self.kind == "one loss":
            first.zero_grad()
            second.zero_grad()
            self.manual_backward(sum(self.losses(batch)) + (1e6 if bad else 0.0))
            first.step()
            second.step()
        else:
            for number, optimizer in enumerate((first, second)):
                loss = self.losses(batch)[number]
                self.scales.append(scaler_of(self.trainer).get_scale())
                optimizer.zero_grad()
                self.manual_backward(loss * math.nan if bad and number == 0 else loss)
                optimizer.step()


def by_hand(kind: str, **options: Any) -> Any:
    trainer, module, callback, _ = fit("one", plan("......n.."), {"spikes": False}, ByHand(kind), **options)
    scaler = scaler_of(trainer)
    count = trainer.lr_scheduler_configs[0].scheduler.last_epoch
    return callback.guard.counters, count, module.scales, scaler.state_dict() if scaler else None


def test_A20_a_scheduler_goes_on_with_the_next_step_of_the_same_batch() -> None:
    [(counters, count, *_)] = run_ranks(1, by_hand, "twice")
    assert (counters.accepted, counters.skipped) == (17, 1)
    assert count == 17


def test_A20_a_scale_is_kept_for_the_other_optimizer_of_the_batch() -> None:
    [(counters, _, scales, scaler)] = run_ranks(1, by_hand, "scaled", precision="16-mixed")
    assert (counters.accepted, counters.skipped) == (17, 1)
    assert len(set(scales)) == 1
    assert scaler["_growth_tracker"] == 17


def test_A20_optimizers_that_step_by_one_loss_are_left_out_together() -> None:
    guard = {"spikes": SpikeRule(window=8, active_after=4)}
    assert same("......n..", [6], partial(ByHand, "one loss"), guard)["counters"]["skipped"] == 2


class Raw(Fragile):
    """Steps without Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def unseen() -> Any:
    _, _, callback, lines = fit("one", plan("..."), None, Raw())
    return callback.guard.counters.attempts, lines


def test_A20_steps_without_lightning_are_not_judged_which_is_said_once() -> None:
    [(attempts, lines)] = run_ranks(1, unseen)
    assert attempts == 0
    [line] = lines
    assert "use_pl_optimizer=False" in line


class Overlaps(Fragile):
    """The next window begins in the batch in which the last one steps, behind its step."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer, goal = self.optimizers(), torch.cos(batch)
        for turn in range(2):
            loss = (self(batch % 1000) - goal).square().mean()
            self.manual_backward(loss * math.nan if turn == 0 and batch.max() >= 1000 else loss)
            if turn == 0:
                optimizer.step()


def overlapping(precision: str) -> Any:
    _, module, callback, _ = fit("one", plan("..n.."), {"spikes": False}, Overlaps(), precision=precision)
    gradients = [param.grad for param in module.parameters()]
    return callback.guard.counters.skipped, all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_A20_gradients_that_come_behind_a_step_that_was_left_out_are_kept(precision: str) -> None:
    assert run_ranks(1, overlapping, precision) == [(1, True)]


# The verdict on the device


@pytest.mark.parametrize("kind", [partial(torch.optim.SGD, momentum=0.9), torch.optim.AdamW])
@pytest.mark.parametrize("letters", ["n...", "n"])
def test_A19_a_first_step_that_is_left_out_leaves_no_state(kind: Any, letters: str) -> None:
    build = partial(Fragile, partial(kind, fused=True), dropout=0.0)
    # What a step leaves unwritten would be what was in the memory before.
    junk = [torch.full((size,), math.nan) for size in (8, 32, 128) for _ in range(20)]
    del junk
    same(letters, [0], build, ON_DEVICE)


def saved_on_exception(directory: str) -> Any:
    class Raises(Fragile):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                raise KeyError("killed")

    module = Raises(partial(torch.optim.AdamW, fused=True), "cosine", dropout=0.0)
    callbacks = [OnExceptionCheckpoint(directory)]
    with contextlib.suppress(KeyError):
        fit("one", plan("..n...."), ON_DEVICE, module, callbacks=callbacks, enable_checkpointing=True)
    [file] = Path(directory).glob("*.ckpt")
    saved = torch.load(file, weights_only=False)
    return saved["lr_schedulers"][0]["last_epoch"], saved["callbacks"]["NaNRewind"]["counters"]["skipped"]


def test_A19_a_checkpoint_of_an_exception_knows_of_the_last_step(tmp_path: Path) -> None:
    assert run_ranks(1, saved_on_exception, str(tmp_path)) == [(2, 1)]


# One callback in several fits


def validated_after_a_fit(letters: str) -> Tensor:
    module, loaders = Validates(), (data(plan(letters)), data(plan("..")))
    trainer = make_trainer(1, "auto", max_epochs=1, limit_val_batches=2, callbacks=[NaNRewind()])
    trainer.fit(module, *loaders)
    torch.manual_seed(7)
    trainer.validate(module, loaders[1])
    return torch.get_rng_state()


def test_a_validation_after_the_fit_is_not_one_after_a_batch() -> None:
    assert torch.equal(*(run_ranks(1, validated_after_a_fit, letters)[0] for letters in ("...", "..n")))


def two_fits(guard: dict[str, Any], letters: tuple[str, str], strategy: Any, factor: float) -> Any:
    callback, skipped = NaNRewind(**guard), []
    for number, word in enumerate(letters):
        module = Fragile()
        step = module.training_step
        module.training_step = lambda batch, i, n=number, s=step: s(batch, i) * factor**n
        made = "auto" if strategy is None else build_strategy(strategy, "trainer")
        make_trainer(1, made, max_epochs=1, callbacks=[callback]).fit(module, data(plan(word)))
        skipped.append(callback.guard.counters.skipped)
    return skipped


def test_a_second_fit_of_another_module_begins_anew() -> None:
    guard = {"spikes": SpikeRule(window=8, active_after=4)}
    assert run_ranks(1, two_fits, guard, ("........", "........"), None, 1e3) == [[0, 0]]
    replay = {"data": "replay", **EVERY_TWO}
    assert run_ranks(1, two_fits, replay, ("..n...", "......"), ("DataParallelStrategy", {}), 1.0) == [[1, 0]]
