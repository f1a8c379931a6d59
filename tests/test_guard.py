"""StepGuard, SpikeRule and SnapshotRing by themselves: decisions, windows, copies; and in a loop of one's own."""

from __future__ import annotations

import copy
import json
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probe import Probe, launched, some
from torch import nn
from torch.nn.utils import prune

from lightning_par.errors import ParallelConfigError
from lightning_par.parallel.random import random_state
from lightning_par.parallel.shards import to_local
from lightning_par.resilience.control import StepControl
from lightning_par.resilience.guard import Action, Reading, StepGuard, Verdict, _from_ordered, _ordered, read
from lightning_par.resilience.snapshots import SnapshotRing, host_memory
from lightning_par.resilience.spikes import SpikeRule
from lightning_par.testing import run_ranks


def judged(guard: StepGuard, *losses: float, norm: float = 1.0, **options: Any) -> list[Verdict]:
    return [guard.judge(i, Reading((loss,), norm), **options) for i, loss in enumerate(losses)]


def healthy(count: int, level: float = 3.0, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [level + draw.gauss(0, 0.05) for _ in range(count)]


def spiky(**options: Any) -> StepGuard:
    return StepGuard(StepControl(), spikes=SpikeRule(), **options)


# Spikes


def test_A8_a_spike_does_not_change_what_is_usual() -> None:
    guard = spiky()
    judged(guard, *healthy(128))
    before = guard.position()
    [verdict] = judged(guard, 60.0)
    assert (verdict.action, verdict.rule, verdict.what, verdict.value) == (Action.SKIP, "spike", "loss", 60.0)
    assert 3.0 < verdict.limit < 4.0
    assert guard.position() == before | {"left_out": 1}
    [verdict] = judged(guard, 3.0, norm=20.0)
    assert (verdict.rule, verdict.what) == ("spike", "gradients")


def test_A9_one_nan_costs_one_step() -> None:
    guard = spiky()
    verdicts = judged(guard, 3.0, math.nan, *healthy(200))
    assert [verdict.taken for verdict in verdicts].count(False) == 1
    assert guard.counters.skipped == 1


@pytest.mark.parametrize("patience", [0, 3])
def test_A10_a_new_level_is_accepted_after_the_patience(patience: int) -> None:
    guard = spiky(spike_patience=patience)
    judged(guard, *healthy(128))
    verdicts = judged(guard, *healthy(50, level=9.0))
    assert [verdict.taken for verdict in verdicts] == [False] * patience + [True] * (50 - patience)
    assert [verdict.new_level for verdict in verdicts].index(True) == patience
    assert sum(verdict.new_level for verdict in verdicts) == 1


def test_A10_a_new_level_may_be_a_reason_to_go_back() -> None:
    guard = spiky(spike_patience=2, on_new_level="rewind")
    guard.can_rewind = True
    judged(guard, *healthy(128))
    verdicts = judged(guard, 90.0, 90.0, 90.0)
    assert [verdict.action for verdict in verdicts] == [Action.SKIP, Action.SKIP, Action.REWIND]


def test_A11_a_constant_loss_may_rise_a_little() -> None:
    guard = spiky()
    assert all(verdict.taken for verdict in judged(guard, *[2.0] * 100, 2.1, 2.0))
    assert not judged(guard, 3.0)[0].taken


@pytest.mark.parametrize("robust", [False, True])
def test_A11_zeros_do_not_make_a_spike_of_what_follows(robust: bool) -> None:
    rule = SpikeRule(window=8, active_after=4, robust=robust)
    for _ in range(8):
        rule.accept(0.0)
    assert rule.limit() == math.inf
    rule.accept(0.5)
    # Most are zeros yet, and the largest tells what is too large.
    assert 0.5 < rule.limit() <= 5.0


def test_a_slow_rise_and_noise_are_no_spikes() -> None:
    guard = spiky()
    rising = [value + 0.005 * i for i, value in enumerate(healthy(600))]
    assert all(verdict.taken for verdict in judged(guard, *rising))


def test_nothing_is_a_spike_before_enough_is_known() -> None:
    guard = spiky()
    assert all(verdict.taken for verdict in judged(guard, *healthy(63), 1e6))
    assert not judged(guard, 1e12)[0].taken


def test_robust_limits_do_not_widen_with_a_tail() -> None:
    values = healthy(100) + [6.0] * 12
    limits = {}
    for robust in (False, True):
        rule = SpikeRule(robust=robust)
        for value in values:
            rule.accept(value)
        limits[robust] = rule.limit()
    assert limits[True] < 4.0 < 8.0 < limits[False]


def test_the_cap_holds_where_the_spread_is_large() -> None:
    rule = SpikeRule(window=4, active_after=4, sigmas=1000.0)
    for value in (1.0, 2.0, 1.0, -3.0):
        rule.accept(value)
    assert rule.limit() == 30.0
    rule.accept(math.inf)
    assert rule.state_dict() == {"values": [1.0, 2.0, 1.0, -3.0]}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sigmas": 0.0}, "sigmas is 0.0"),
        ({"cap": 1.0}, "cap is 1.0"),
        ({"active_after": 1}, "active_after is 1"),
        ({"window": 32}, "window 32"),
    ],
)
def test_rules_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ParallelConfigError, match=words):
        SpikeRule(**options)


# The ladder


def test_A12_A15_the_ladder() -> None:
    guard = StepGuard(StepControl(), max_rewinds=2, max_reloads=1)
    guard.can_rewind = guard.can_reload = True
    start = guard.position()
    for expected in (Action.REWIND, Action.REWIND, Action.RELOAD, Action.REWIND, Action.REWIND, Action.STOP):
        verdicts = judged(guard, math.nan, math.inf, math.nan)
        assert [verdict.action for verdict in verdicts] == [Action.SKIP, Action.SKIP, expected]
        guard.gone_back(start, reloaded=expected is Action.RELOAD)


def test_rewinds_long_ago_do_not_count() -> None:
    guard = StepGuard(StepControl(), max_rewinds=1, rewind_window=20)
    guard.can_rewind = True
    for good in (0, 16, 20):
        judged(guard, *healthy(good))
        action = judged(guard, *[math.nan] * 3)[-1].action
        assert action is (Action.STOP if good == 16 else Action.REWIND)
        guard.gone_back(guard.position(), reloaded=False) if action is Action.REWIND else None


def test_a_good_step_ends_a_streak() -> None:
    verdicts = judged(spiky(), *[math.nan, math.nan, 1.0] * 20)
    assert {verdict.action for verdict in verdicts} == {Action.SKIP, Action.STEP}


def test_without_a_rung_training_ends() -> None:
    assert judged(StepGuard(StepControl()), *[math.nan] * 3)[-1].action is Action.STOP
    assert judged(StepGuard(StepControl(), max_total_skips=1), math.nan, 1.0, math.nan)[-1].action is Action.STOP


def test_too_large_a_scale_counts_apart_until_it_is_no_scale() -> None:
    guard = StepGuard(StepControl())
    verdicts = judged(guard, *[1.0] * 9, norm=math.inf, scale=1024.0)
    assert {(verdict.action, verdict.rule) for verdict in verdicts} == {(Action.SKIP, "overflow")}
    assert (guard.counters.overflows, guard.counters.skipped) == (9, 0)
    assert judged(guard, 1.0, norm=math.inf, scale=0.5)[0].rule == "nonfinite"
    assert judged(guard, math.nan, norm=math.nan, scale=1024.0)[0].rule == "nonfinite"


def test_each_optimizer_has_its_own_streak() -> None:
    guard = StepGuard(StepControl())
    for _ in range(2):
        judged(guard, math.nan, optimizer=0)
        judged(guard, 1.0, optimizer=1)
    assert judged(guard, math.nan, optimizer=0)[0].action is Action.STOP


def test_A22_a_guard_that_was_saved_decides_as_one_that_went_on() -> None:
    values = [*healthy(70), math.nan, *healthy(58, seed=1), 30.0, math.nan, *healthy(40, seed=2), 30.0, 30.0]
    straight = spiky()
    expected = judged(straight, *values)
    assert [verdict.rule for verdict in expected].count("spike") >= 2
    for place in (70, 71, 130, 131):
        first, second = spiky(), spiky()
        found = judged(first, *values[:place])
        state = json.loads(json.dumps(first.state_dict()), object_hook=_with_ints)
        second.load_state_dict(state)
        found += judged(second, *values[place:])
        assert repr(found) == repr(expected)
        assert second.state_dict() == straight.state_dict()


def _with_ints(state: dict[str, Any]) -> dict[Any, Any]:
    return {int(key) if key.isdigit() else key: value for key, value in state.items()}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_consecutive_skips": 0}, "max_consecutive_skips is 0; it is an int >= 1"),
        ({"max_rewinds": -1}, "max_rewinds is -1"),
        ({"rewind_window": 1.5}, "rewind_window is 1.5"),
        ({"check_parameters_every": 0}, "check_parameters_every is 0"),
        ({"on_new_level": "stop"}, "on_new_level is 'stop'"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ParallelConfigError, match=words):
        StepGuard(StepControl(), **options)


@settings(max_examples=200, deadline=None)
@given(st.floats(), st.floats())
def test_the_order_of_floats_travels_in_ints(one: float, other: float) -> None:
    first, second = _ordered(one), _ordered(other)
    assert -(2**63) < first < 2**63
    assert _from_ordered(first) == one or math.isnan(one)
    if not math.isnan(one) and not math.isnan(other):
        assert (first > second) == (one > other) or one == other


def test_what_a_rank_reads() -> None:
    gradients = [torch.tensor([3.0]), torch.tensor([[4.0]], dtype=torch.bfloat16), torch.empty(0)]
    reading = read([torch.tensor(1.0), torch.tensor([3.0])], gradients, [torch.tensor([1.0, 2.0]), torch.tensor(7)])
    assert reading == Reading((1.0, 3.0), 5.0)
    assert reading.loss == 2.0
    assert read([], [torch.tensor([1e30, 1e30])]).norm == math.inf
    assert read([], [], [torch.tensor([1.0, math.inf])]).corrupt
    assert read([], [], [torch.tensor([1e30])]) == Reading((), 0.0)


# Snapshots


def trained(steps: int = 2, optimizer: Any = torch.optim.AdamW) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    adam = optimizer(module.parameters(), lr=0.1)
    train(module, adam, steps)
    return module, adam


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()


def content(module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((module.state_dict(), optimizer.state_dict(), random_state()))


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("steps", [0, 2])
def test_A16_a_snapshot_shares_nothing_with_what_goes_on(steps: int) -> None:
    module, adam = trained(steps)
    ring = SnapshotRing({"module": module}, [adam])
    expected = content(module, adam)
    places = {name: value.data_ptr() for name, value in module.state_dict().items()}
    extra = {"list": [1]}
    ring.take(steps, extra)
    extra["list"].append(2)
    adam.param_groups[0]["lr"] = 0.5
    train(module, adam, 3)
    random.random()
    assert not equal(content(module, adam), expected)
    ring.go_back(ring.choose(steps))
    assert equal(content(module, adam), expected)
    assert ring.last.extra == {"list": [1]}
    assert {name: value.data_ptr() for name, value in module.state_dict().items()} == places
    assert all(param.grad is None for param in module.parameters())
    # And again: what was restored does not share with the copy either.
    train(module, adam, 1)
    ring.go_back(ring.last)
    assert equal(content(module, adam), expected)


def test_behind_a_change_of_the_parameters_nothing_goes_back() -> None:
    module, sgd = trained(2, partial(torch.optim.SGD, momentum=0.9))
    ring = SnapshotRing({"module": module}, [sgd])
    ring.take(2)
    prune.random_unstructured(module[0], "weight", 0.5)
    expected = content(module, sgd)
    with pytest.raises(RuntimeError, match=r"2 steps had been accepted, and parameters .* \(such as 0.weight"):
        ring.go_back(ring.last)
    assert equal(content(module, sgd), expected)


def test_behind_a_reset_of_an_optimizer_nothing_goes_back() -> None:
    module, adam = trained(2)
    ring = SnapshotRing({"module": module}, [adam])
    ring.take(2)
    adam.state.clear()
    train(module, adam, 1)
    ring.go_back(ring.last)
    adam.state.clear()
    with pytest.raises(RuntimeError, match="optimizers have lost their state"):
        ring.go_back(ring.last)


def test_memory_is_taken_once() -> None:
    module, adam = trained()
    ring = SnapshotRing({"module": module}, [adam], keep=2)
    places = []
    for accepted in range(5):
        train(module, adam, 1)
        places.append({tensor.data_ptr() for tensor in ring.take(accepted).tensors.values()})
    assert places[0] == places[2] == places[4]
    assert places[1] == places[3]
    assert not places[0] & places[1]


def test_the_newest_that_is_old_enough_is_gone_back_to() -> None:
    module, adam = trained()
    ring = SnapshotRing({"module": module}, [adam], keep=3, min_age=20)
    assert [ring.take(accepted) and ring.choose(accepted).accepted for accepted in range(0, 80, 10)] == [
        0,
        0,
        0,
        10,
        20,
        30,
        40,
        50,
    ]
    assert ring.choose(75).accepted == 50
    ring.go_back(ring.choose(75))
    assert [snapshot.accepted for snapshot in ring] == [50]
    ring.clear()
    assert len(ring) == 0


def test_A24_more_than_the_memory_is_refused_with_numbers() -> None:
    module, adam = trained(0)
    ring = SnapshotRing({"module": module}, [adam], keep=3)
    estimate = ring.bytes()
    train(module, adam, 1)
    # Adam's counts of steps are what the estimate leaves out.
    assert estimate <= ring.bytes() <= estimate + 4 * len(list(module.parameters()))
    assert ring.problems(3 * ring.bytes()) == []
    [problem] = ring.problems(2 * ring.bytes())
    assert "3 snapshots of" in problem.what
    assert problem.python == "keep_snapshots=2"
    [problem] = ring.problems(10)
    assert "snapshot_every_n_steps=None" in problem.python
    assert 0 < host_memory(4) < host_memory(2)


# A loop of one's own


def own_loop(strategy: str, steps: list[int]) -> Any:
    from lightning_par.strategies import fabric as strategies

    fabric = launched(getattr(strategies, strategy)())
    module = Probe()
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    guard = StepGuard(fabric.strategy.control)
    guard.can_rewind = True
    ring = SnapshotRing({"model": model}, [optimizer.optimizer], keep=1)
    ring.take(0)
    actions = []
    for step in steps:
        batch = torch.tensor([float(step + fabric.global_rank)])
        loss = (model(batch) - batch).square().mean()
        if step in BAD and fabric.global_rank == 1:
            loss = loss * math.nan
        fabric.backward(loss)
        reading = read([loss], [p.grad for p in module.parameters() if p.grad is not None])
        verdict = guard.judge(step, reading)
        actions.append(verdict.action.value)
        if verdict.taken:
            optimizer.step()
            if guard.counters.accepted == 2:
                ring.take(2, {"guard": guard.position()})
        elif verdict.action is Action.REWIND:
            snapshot = ring.choose(guard.counters.accepted)
            ring.go_back(snapshot)
            guard.gone_back(snapshot.extra["guard"], reloaded=False)
        optimizer.zero_grad(set_to_none=True)
    return actions, [to_local(p).detach().clone() for p in module.parameters()]


BAD = (2, 4, 5, 6)


@pytest.mark.parametrize("strategy", some(["DataParallelStrategy", "FSDP2Strategy"], "FSDP2Strategy"))
def test_a_loop_of_ones_own_is_guarded(strategy: str) -> None:
    found = run_ranks(2, own_loop, strategy, list(range(8)))
    expected = run_ranks(2, own_loop, strategy, [0, 1, 7])
    for (actions, weights), (_, others) in zip(found, expected, strict=True):
        assert actions == ["step", "step", "skip", "step", "skip", "skip", "rewind", "step"]
        assert equal(weights, others)


def test_the_loop_of_the_docs_runs() -> None:
    page = (Path(__file__).parent.parent / "docs" / "nan_rewind.md").read_text()
    code = page.split("## In a loop of one's own")[1].split("```python\n")[1].split("```")[0]
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    names: dict[str, Any] = {"torch": torch, "model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    names["batches"] = [torch.randn(3, 2) * (math.nan if i in (2, 4, 5, 6) else 1.0) for i in range(9)]
    exec(code, names)
    counters = names["guard"].counters
    # Back to the snapshot of the begin, and two steps after it.
    assert (counters.accepted, counters.skipped, counters.rewinds) == (2, 4, [7])
