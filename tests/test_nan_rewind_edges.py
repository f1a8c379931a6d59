"""NaNRewind where hooks, callbacks, optimizers and schedulers do more than a plain step: the run without the batch."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from guard_runs import SIZE, Fragile, compared, data, differences, fit, plan, state_of
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from probe import crossed, long_run
from test_nan_rewind import Average, Decay, ranks_of
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from lightning_par.callbacks import CommittedCheckpoint, NaNRewind
from lightning_par.testing import RanksFailed, run_ranks

SKIP, BACK = ("..n...", [2]), ("...nnn..", [2, 3, 4, 5])
EVERY_TWO = {"snapshot_every_n_steps": 2}
ON_DEVICE = {"mode": "device", "spikes": False, "restore_buffers": False}


def same(letters: str, without: list[int], build: Any, guard: dict[str, Any] | None = None, **options: Any) -> Any:
    layout = options.pop("layout", "one")
    found = run_ranks(ranks_of(layout), compared, layout, letters, without, guard, build=build, **options)
    assert all(one["differences"] == [] for one in found)
    return found[0]


# Hooks and callbacks


class Following(Fragile):
    """A network that follows another one, in a hook of the module or of the optimizer."""

    def __init__(self, hook: str, **options: Any) -> None:
        super().__init__(**options)
        self.target = copy.deepcopy(self.first).requires_grad_(False)
        self.hook, self.accepted = hook, 0

    @torch.no_grad()
    def follow(self, *_: Any) -> None:
        for param, followed in zip(self.target.parameters(), self.first.parameters(), strict=True):
            param.lerp_(followed, 0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        [guard] = [one.guard for one in self.trainer.callbacks if isinstance(one, NaNRewind)]
        if self.hook == "module" and guard.counters.accepted > self.accepted:
            self.follow()
        self.accepted = guard.counters.accepted

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
        if self.hook == "optimizer":
            optimizer.register_step_post_hook(self.follow)
        return optimizer


@pytest.mark.parametrize(
    ("hook", "layout"), crossed(["module", "optimizer"], ["one", "ddp", "fsdp", "tp"], quick=[("module", "one")])
)
def test_what_hooks_move_is_that_of_a_run_without_the_batch(hook: str, layout: str) -> None:
    same(*SKIP, partial(Following, hook), layout=layout)
    same(*BACK, partial(Following, hook), EVERY_TWO, layout=layout)


def hooked_on_device() -> None:
    class Hooked(Fragile):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), fused=True)
            optimizer.register_step_post_hook(lambda *_: None)
            return optimizer

    fit("one", plan(".."), ON_DEVICE, Hooked())


def test_A19_hooks_of_steps_are_refused() -> None:
    with pytest.raises(RanksFailed, match="AdamW has hooks of steps"):
        run_ranks(1, hooked_on_device)


class Looks(Fragile):
    """Looks at all gradients before each step, and clips them by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(torch.stack([param.grad.norm() for param in self.parameters()]).norm()))

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        for param in self.parameters():
            param.grad.clamp_(-1.0, 1.0)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_hooks_may_look_at_the_gradients_of_a_bad_batch(precision: str) -> None:
    same(*SKIP, Looks, precision=precision)
    same(*BACK, Looks, EVERY_TWO, precision=precision)


class Starts(Fragile):
    """Initialises itself when training begins."""

    @torch.no_grad()
    def on_train_start(self) -> None:
        for param in self.parameters():
            param.normal_()


def test_what_hooks_do_when_training_starts_is_not_taken_back() -> None:
    same("nnn...", [0, 1, 2], Starts)


class Validates(Fragile):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch % 1000, batch_idx))


def validated(letters: str, without: list[int], guard: dict[str, Any]) -> list[str]:
    states = []
    for left_out in ((), without):
        module, loaders = Validates(), {"train": data(plan(letters, left_out)), "val": data(plan("..."))}
        options = {"val_check_interval": 1, "limit_val_batches": 1}
        trainer, *_ = fit("one", [], guard, module, loader=loaders, **options)
        states.append(state_of(trainer, module))
    return differences(*states)


@pytest.mark.parametrize(("letters", "without"), [SKIP, BACK])
def test_a_validation_after_a_batch_that_never_was_has_drawn_nothing(letters: str, without: list[int]) -> None:
    assert run_ranks(1, validated, letters, without, EVERY_TWO) == [[]]


def averaged(letters: str, without: list[int], make: Callable[[], WeightAveraging], **options: Any) -> list[str]:
    states = []
    for left_out in ((), without):
        average = make()
        module = options.get("build", Fragile)()
        trainer, *_ = fit("one", plan(letters, left_out), options.get("guard"), module, callbacks=[average])
        tensors = [*average._average_model.parameters(), *average._average_model.buffers()]
        states.append({**state_of(trainer, module), **{f"average {i}": t.clone() for i, t in enumerate(tensors)}})
    return differences(*states)


@pytest.mark.parametrize(
    ("letters", "without"), [("...n....", [3]), long_run(*BACK), long_run(".n..nnn.....", [1, 3, 4, 5, 6])]
)
def test_G14_averages_of_every_second_step_count_those_that_were_taken(letters: str, without: list[int]) -> None:
    make = partial(EMAWeightAveraging, update_every_n_steps=2, decay=0.5)
    assert run_ranks(1, averaged, letters, without, make, guard=EVERY_TWO) == [[]]


class Nothing(Fragile):
    """Returns no loss for its fourth batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if int(batch[0]) == 3 * SIZE else loss


def test_a_batch_without_a_loss_is_none_that_was_left_out() -> None:
    assert run_ranks(1, averaged, *SKIP, Average, build=Nothing) == [[]]
    same("....n...", [4], Nothing)
    same("......", [], partial(Nothing, Decay))


class Leaves(Fragile):
    """Leaves its first epoch in the middle of a window, of which a batch was bad; the second one is good."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 3 else None

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(batch % 1000 if self.current_epoch else batch, batch_idx)


def left_epoch() -> Any:
    return fit("one", plan("..n..."), None, Leaves(), max_epochs=2, accumulate_grad_batches=2)[2].guard.counters


def test_a_window_that_an_epoch_has_left_behind_says_nothing_of_the_next() -> None:
    [counters] = run_ranks(1, left_epoch)
    assert (counters.accepted, counters.skipped) == (4, 0)


# What a module and an optimizer may hold


class Sparse(Fragile):
    def __init__(self) -> None:
        super().__init__("SGD")
        self.embedding = nn.Embedding(50, 4, sparse=True)

    def forward(self, numbers: Tensor) -> Tensor:
        return super().forward(numbers) + self.embedding(numbers % 50).sum(-1)


def test_gradients_may_be_sparse() -> None:
    same(*SKIP, Sparse)
    same(*BACK, Sparse, EVERY_TWO)


class Grows(Fragile):
    """Has a buffer whose shape changes, and one whose elements share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(1))
        self.register_buffer("shared", torch.ones(1).expand(3, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.cache = torch.full((len(self.cache) + 1,), float(batch.max()))
        return super().training_step(batch, batch_idx)


def test_buffers_may_change_their_shape_or_share_memory() -> None:
    same(*SKIP, Grows)
    same(*BACK, Grows, EVERY_TWO)


class Forbids(Fragile):
    def __init__(self) -> None:
        super().__init__()
        self.forbidden = nn.Parameter(torch.tensor([0.0, -math.inf]), requires_grad=False)


def test_a_parameter_that_was_never_finite_is_not_corrupt() -> None:
    assert same(*SKIP, Forbids)["counters"]["rewinds"] == []


class Counting(torch.optim.Optimizer):
    """Keeps a number and a tensor beside the states of its parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.state["steps"], self.state["mean"] = 0, {"value": torch.zeros(1)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.state["steps"] += 1
        self.state["mean"]["value"] += 1
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad, alpha=-group["lr"] / self.state["steps"] / self.state["mean"]["value"].item())
        return loss


def test_optimizers_may_keep_more_than_the_states_of_parameters() -> None:
    same(*SKIP, partial(Fragile, Counting))
    same(*BACK, partial(Fragile, Counting), EVERY_TWO)


class Later(Fragile):
    """Good in its first epochs, whatever the batches."""

    def __init__(self, epochs: int = 1, **options: Any) -> None:
        super().__init__(dropout=0.0, **options)
        self.epochs = epochs

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(batch % 1000 if self.current_epoch < self.epochs else batch, batch_idx)

    def configure_optimizers(self) -> Any:
        for param in self.parameters():
            if not param.requires_grad:
                return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
        return super().configure_optimizers()


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks, optimizer)


def unfrozen() -> Any:
    """The snapshot is of before the blocks were unfrozen, the bad batches come after it."""
    trainer, module, callback, _ = fit(
        "one", plan("nnn."), {"snapshot_every_n_steps": 3}, Later(), callbacks=[Unfreezes()], max_epochs=2
    )
    [optimizer] = trainer.optimizers
    steps = [int(optimizer.state[group["params"][0]]["step"]) for group in optimizer.param_groups]
    return len(callback.guard.counters.rewinds), callback.guard.counters.accepted, steps


def test_parameter_groups_that_came_after_the_snapshot_stay_and_begin_anew() -> None:
    # Three steps are gone back to, and one follows.
    assert run_ranks(1, unfrozen) == [(1, 4, [4, 1])]


class Changes(pl.Callback):
    """Puts another optimizer in the place of the one of the fit."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            trainer.strategy.optimizers = [torch.optim.AdamW(pl_module.parameters(), lr=1e-2)]


def changed(letters: str) -> Any:
    _, module, callback, _ = fit("one", plan(letters), None, callbacks=[Changes()])
    return callback.guard.counters.skipped, all(bool(param.isfinite().all()) for param in module.parameters())


def test_an_optimizer_that_came_later_is_left_out_too_and_does_not_go_back() -> None:
    assert run_ranks(1, changed, "...n..") == [(1, True)]
    with pytest.raises(RanksFailed, match="the Trainer has other optimizers"):
        run_ranks(1, changed, "...nnn..")


# Schedulers


class HandsOver(LRScheduler):
    def __init__(self, optimizer: Any, after: LRScheduler) -> None:
        self.after = after
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [0.01 * (self.last_epoch + 1) for _ in self.base_lrs]

    def step(self, epoch: Any = None) -> None:
        if getattr(self, "last_epoch", 0) >= 2:
            self.after.step()
        else:
            super().step()


class HandedOver(Fragile):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = HandsOver(optimizer, CosineAnnealingLR(optimizer, 20))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_a_scheduler_that_holds_another_one_goes_on_with_the_same_optimizer() -> None:
    one = same("...nnn....", [2, 3, 4, 5], HandedOver, EVERY_TWO)
    rates, expected = one["rates"]
    assert rates[-4:] == expected[-4:]
    assert len(set(rates[-4:])) == 4


def with_another_scheduler() -> Any:
    average = StochasticWeightAveraging(1e-3, swa_epoch_start=2, annealing_epochs=2)
    guard = {"snapshot_every_n_steps": 50}
    trainer, _, callback, _ = fit("one", plan("nnn."), guard, Later(2), callbacks=[average], max_epochs=3)
    [config] = trainer.lr_scheduler_configs
    return len(callback.guard.counters.rewinds), type(config.scheduler).__name__


def test_a_scheduler_may_have_come_after_the_snapshot() -> None:
    assert run_ranks(1, with_another_scheduler) == [(1, "SWALR")]


def replayed(build: Any, letters: str, guard: dict[str, Any], **options: Any) -> Any:
    """Gone back to a batch, or only left out: the good batches are the same, each trained on once."""
    states = []
    for more in ({"data": "replay", **guard}, {"max_consecutive_skips": 99}):
        module = build()
        trainer, _, callback, _ = fit("ddp", plan(letters), more, module, **options)
        states.append((state_of(trainer, module), len(callback.guard.counters.rewinds)))
    return differences(states[0][0], states[1][0]), [rewinds for _, rewinds in states]


class GoodLater(Fragile):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(batch % 1000 if self.current_epoch else batch, batch_idx)


def test_A14_an_epoch_whose_last_batches_come_again_ends_once() -> None:
    build = partial(GoodLater, schedule="epoch", dropout=0.0)
    assert run_ranks(1, replayed, build, "....nnn", {"snapshot_every_n_steps": 3}, max_epochs=2) == [([], [1, 0])]


def test_A14_no_scheduler_sees_the_bad_batch_when_the_epoch_begins_again() -> None:
    build = partial(Fragile, schedule="plateau", dropout=0.0)
    assert run_ranks(1, replayed, build, "..nnn....", {"snapshot_every_n_steps": 50}) == [([], [1, 0])]


class Corrupts(Fragile):
    """A bit of a moment flips once."""

    flipped = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and not self.flipped:
            self.flipped = True
            next(iter(self.trainer.optimizers[0].state.values()))["exp_avg"].view(-1)[0] = math.nan


def corrupted() -> Any:
    states = []
    for build in (Corrupts, Fragile):
        module = build()
        guard = {"data": "replay", "check_params_every": 1, **EVERY_TWO}
        trainer, _, callback, _ = fit("ddp", plan("......"), guard, module)
        states.append(state_of(trainer, module))
    return differences(*states)


def test_A17_a_batch_in_which_a_bit_flipped_is_trained_on_again() -> None:
    assert run_ranks(1, corrupted) == [[]]


def with_average(directory: str) -> Any:
    states = []
    for left_out in ((), (2, 3, 4)):
        average, module = Average(), Fragile()
        committed = CommittedCheckpoint(Path(directory) / str(len(left_out)), every_n_steps=2, keep_last=9)
        guard = {**EVERY_TWO, "max_rewinds": 0, "min_age": 1}
        callbacks = [average, committed]
        trainer, _, callback, _ = fit(
            "ddp", plan("..nnn...", left_out), guard, module, callbacks=callbacks, enable_checkpointing=True
        )
        tensors = [*average._average_model.parameters(), *average._average_model.buffers()]
        states.append({**state_of(trainer, module), **{f"average {i}": t.clone() for i, t in enumerate(tensors)}})
    return differences(*states)


@pytest.mark.slow
def test_G14_averages_go_back_to_a_checkpoint(tmp_path: Path) -> None:
    assert run_ranks(1, with_average, str(tmp_path)) == [[]]


def warned() -> set[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit("one", plan("n...."), None, Fragile(Decay, "cosine"))
    return {str(one.message) for one in found if "optimizer.step()" in str(one.message)}


def test_schedulers_do_not_take_the_guard_for_a_change_of_the_step() -> None:
    assert run_ranks(1, warned) == [set()]
