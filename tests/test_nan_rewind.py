"""NaNRewind in the Trainer: a run with bad batches is the run without them, bit for bit, under every layout."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from guard_runs import GUARDED, SCHEDULES, Fragile, compared, data, differences, fit, plan, state_of
from lightning.pytorch.callbacks import WeightAveraging
from probe import listed, long_run, some
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn

from lightning_par.parallel.shards import to_local
from lightning_par.resilience.spikes import SpikeRule
from lightning_par.testing import run_ranks
from parity import make_trainer

LAYOUTS = some(GUARDED, "ddp", "fsdp", "tp", "pp")


def ranks_of(layout: str) -> int:
    return 1 if layout == "one" else GUARDED[layout][0]


def same(layout: str, letters: str, without: Any, **options: Any) -> list[dict[str, Any]]:
    found = run_ranks(ranks_of(layout), compared, layout, letters, list(without), **options)
    for rank, one in enumerate(found):
        assert one["differences"] == [], f"rank {rank}: {one['lines']}"
        assert one["compared"] > 10
        assert one["counters"] == found[0]["counters"]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_A1_a_loss_that_is_nan_on_one_rank_is_never_seen(layout: str) -> None:
    found = same(layout, "..n..", [2])
    assert found[0]["counters"] == {
        "attempts": 5,
        "accepted": 4,
        "skipped": 1,
        "overflows": 0,
        "rewinds": [],
        "reloads": 0,
    }
    assert found[0]["steps"] == (5, 4)
    lines = found[0]["lines"]
    assert len(lines) == 1, lines
    assert lines[0].startswith("step 2 (epoch 0, batch 2): the loss is not finite, on rank ")
    assert all(one["lines"] == [] for one in found[1:])


STEEP = [
    *((layout, "h") for layout in ("ddp", "zero1", "zero2", "fsdp", "tp", "pp")),
    ("ddp", "o"),
    ("tp", "o"),
    ("pp", "o"),
    ("zero2", "i"),
]


@pytest.mark.parametrize(("layout", "letter"), listed(STEEP, ("fsdp", "h")))
def test_A2_A3_gradients_of_one_rank_or_too_large_ones_are_never_seen(layout: str, letter: str) -> None:
    [first, *_] = same(layout, f".{letter}..", [1], poisoned=0)
    assert first["counters"]["skipped"] == 1
    if letter != "i":
        assert "gradients are not finite" in first["lines"][0]


PLACES = [("one", "...n......"), ("one", ".....n....")] + [(layout, "....n.....") for layout in ("one", *GUARDED)]


@pytest.mark.parametrize(("layout", "letters"), listed(PLACES, ("one", ".....n...."), ("ddp", "....n.....")))
def test_A4_a_window_is_left_out_as_a_whole(layout: str, letters: str) -> None:
    found = same(layout, letters, [3, 4, 5], accumulate_grad_batches=3)
    assert found[0]["counters"]["skipped"] == 1
    assert found[0]["steps"] == (4, 3)  # the last window is short
    assert found[0]["lines"][0].startswith("step 1 (epoch 0, batch 5)")


def test_A5_from_the_first_step_on() -> None:
    found = same("ddp", "nnn...", [0, 1, 2])
    assert found[0]["counters"]["rewinds"] == [3]
    assert found[0]["steps"] == (3, 3)
    assert "goes back from step 3 to step 0 (memory)" in found[0]["lines"][-1]


@pytest.mark.parametrize(
    "layout", some(["one", "ddp", "zero1", "zero2", "fsdp", "hsdp2x2", "tp"], "one", "ddp", "fsdp")
)
def test_A6_A7_too_large_a_scale_is_no_reason_to_go_back(layout: str) -> None:
    found = run_ranks(ranks_of(layout), compared, layout, "..f...", [2], precision="16-mixed")
    for one in found:
        assert one["differences"] == ["scaler _growth_tracker", "scaler scale"]
        assert (one["counters"]["overflows"], one["counters"]["skipped"]) == (1, 0)
        assert one["scales"] == found[0]["scales"]
        assert one["scales"][0] * 2 == one["scales"][1]
        assert one["lines"] == []
    # Of a loss that is not finite the scale is not to blame, and stays.
    assert same(layout, "..n...", [2], precision="16-mixed")[0]["counters"]["skipped"] == 1


# Spikes; the windows are made short by the rule that is given.

SHORT = SpikeRule(window=8, active_after=4)


@pytest.mark.parametrize("layout", some(["ddp", "fsdp", "tp", "pp"], "ddp"))
def test_A8_a_spike_is_never_seen(layout: str) -> None:
    found = same(layout, "......s..", [6], guard={"spikes": SHORT})
    assert found[0]["counters"]["skipped"] == 1
    assert "is above" in found[0]["lines"][0]


def test_A10_after_the_patience_a_spike_is_the_new_level() -> None:
    [one] = run_ranks(1, compared, "one", "......ssss..", [], guard={"spikes": SHORT, "spike_patience": 2})
    assert one["counters"]["skipped"] == 2
    assert one["counters"]["accepted"] == 10
    assert one["lines"][-1].endswith("again, taken as the new level")
    assert len(one["lines"]) == 3


# Schedulers, averages, buffers


@pytest.mark.parametrize("schedule", some(SCHEDULES, "one cycle", "plateau"))
def test_A18_rates_are_those_of_a_run_without_the_batch(schedule: str) -> None:
    build = partial(Fragile, schedule=schedule)
    # Two epochs of seven batches, of which the oracle has one less: schedulers of epochs count the same ones.
    [one] = run_ranks(1, compared, "one", "...n...", [3], build=build, max_epochs=2)
    assert one["differences"] == []
    rates, expected = one["rates"]
    del rates[3], rates[9]
    assert rates == expected
    assert len(set(rates)) > 1


class Average(WeightAveraging):
    """Updates with every second step that is taken."""

    def __init__(self) -> None:
        super().__init__(avg_fn=get_ema_avg_fn(0.5))


def averaged(layout: str, letters: str, without: list[int], **options: Any) -> dict[str, Any]:
    states = []
    for left_out in ((), without):
        average = Average()
        trainer, module, callback, _ = fit(layout, plan(letters, left_out), callbacks=[average], **options)
        tensors = [to_local(t) for t in (*average._average_model.parameters(), *average._average_model.buffers())]
        states.append({**state_of(trainer, module), **{f"average {i}": t.clone() for i, t in enumerate(tensors)}})
    return {"differences": differences(*states), "compared": len(states[0])}


SKIP, BACK, WINDOW = ("..n...", [2], 1), ("...nnn..", [2, 3, 4, 5], 1), ("..n...", [2, 3], 2)


@pytest.mark.parametrize(
    ("layout", "letters", "without", "accumulate"),
    [
        ("fsdp", *BACK),
        *(long_run(layout, *BACK) for layout in ("one", *GUARDED) if layout != "fsdp"),
        *(long_run(layout, *SKIP) for layout in ("one", "ddp", "fsdp")),
        *(long_run(layout, *WINDOW) for layout in ("one", "fsdp")),
    ],
)
def test_G14_averages_of_weights_are_those_of_a_run_without_the_batch(
    layout: str, letters: str, without: list[int], accumulate: int
) -> None:
    options = {"accumulate_grad_batches": accumulate, "guard": {"snapshot_every_n_steps": 2}}
    for one in run_ranks(ranks_of(layout), averaged, layout, letters, without, **options):
        assert one["differences"] == []
        assert one["compared"] > 30


@pytest.mark.parametrize("restore", [True, False])
def test_A23_statistics_of_a_batch_norm_do_not_keep_a_bad_batch(restore: bool) -> None:
    build = partial(Fragile, norm=True)
    [one] = run_ranks(1, compared, "one", "..n...", [2], {"restore_buffers": restore}, build=build)
    buffers = ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
    assert sorted(one["differences"]) == ([] if restore else buffers)


# Optimizers


class Decay(torch.optim.Optimizer):
    """Moves its parameters whether they have a gradient or not."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["steps"] = self.state[param].get("steps", 0) + 1
                param.mul_(0.9)
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"])
        return loss


class Twice(Decay):
    """Runs its closure twice in a step."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        return super().step(closure)


def runs_of_steps(guarded: bool) -> Any:
    if guarded:
        trainer, module, _, _ = fit("one", plan("...."), module=Fragile(Twice))
    else:
        module = Fragile(Twice)
        torch.manual_seed(5)
        trainer = make_trainer(1, "auto", max_epochs=1)
        trainer.fit(module, data(plan("....")))
    return len(module.seen), state_of(trainer, module)


def test_a_closure_that_an_optimizer_runs_again_is_run_again() -> None:
    [(count, state)], [(expected, other)] = (run_ranks(1, runs_of_steps, guarded) for guarded in (True, False))
    assert count == expected == 8
    assert differences(state, other) == []


@pytest.mark.parametrize(
    ("layout", "precision"),
    [("one", "32-true"), long_run("ddp", "32-true"), long_run("fsdp", "32-true"), long_run("one", "16-mixed")],
)
def test_optimizers_that_move_without_gradients_stand_still(layout: str, precision: str) -> None:
    same(layout, "..n...", [2], build=partial(Fragile, Decay, "cosine"), precision=precision)
    same(layout, "...nnn..", [2, 3, 4, 5], guard={"snapshot_every_n_steps": 2}, build=partial(Fragile, Decay, "cosine"))


@pytest.mark.parametrize(
    "optimizer", ["SGD", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "Adadelta", "Adafactor"]
)
@pytest.mark.slow
def test_optimizers_of_torch_stand_still_without_gradients(optimizer: str) -> None:
    same("one", "..n...", [2], build=partial(Fragile, optimizer))
    same("one", "...nnn..", [2, 3, 4, 5], guard={"snapshot_every_n_steps": 2}, build=partial(Fragile, optimizer))


class Adversaries(Fragile):
    """Two networks with an optimizer each, of which one may be poisoned; stepped by hand."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.automatic_optimization = False
        self.other = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer, output in (
            (first, self(batch % 1000)),
            (second, self.other(torch.sin(batch[:, None] * torch.arange(4)))[:, 0]),
        ):
            loss = (output - torch.cos(batch)).square().mean()
            if optimizer is first and batch.max() >= 1000:
                loss = loss * math.nan
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers()[0 if optimizer is first else 1].step()

    def configure_optimizers(self) -> Any:
        own = [p for name, p in self.named_parameters() if not name.startswith("other")]
        optimizers = [torch.optim.AdamW(own, lr=1e-2), torch.optim.AdamW(self.other.parameters(), lr=1e-2)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in optimizers]


def two_optimizers(layout: str) -> dict[str, Any]:
    (trainer, module, callback, _), (oracle, expected, _, _) = (
        fit(layout, plan("..n..", left_out), module=Adversaries()) for left_out in ((), [2])
    )
    found = differences(state_of(trainer, module, random=False), state_of(oracle, expected, random=False))
    return {"differences": found, "counters": vars(callback.guard.counters)}


@pytest.mark.parametrize("layout", some(["one", "ddp", "fsdp"], "one"))
def test_A20_only_the_poisoned_one_of_two_optimizers_is_left_out(layout: str) -> None:
    for one in run_ranks(ranks_of(layout), two_optimizers, layout):
        # The other one has stepped once more.
        assert one["differences"]
        assert all(name.startswith(("other", "optimizer 1", "group 1", "scheduler 1")) for name in one["differences"])
        assert (one["counters"]["skipped"], one["counters"]["accepted"]) == (1, 9)
