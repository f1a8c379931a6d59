"""NaNRewind goes back: to memory, with the batches that follow or the same ones again, to a checkpoint, and ends."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from guard_runs import GUARDED, Fragile, Listed, Samples, compared, data, differences, fit, plan, state_of
from probe import long_run, some
from torch.utils.data import DataLoader

from lightning_par.callbacks import CommittedCheckpoint, NaNRewind
from lightning_par.checkpoint import Retention, RunDirectory, candidates
from lightning_par.checkpoint.candidates import SUPERSEDED
from lightning_par.errors import ParallelConfigError
from lightning_par.resilience.errors import TrainingDivergedError
from lightning_par.resilience.events import read_events
from lightning_par.resilience.spikes import SpikeRule
from lightning_par.strategies import MeshStrategy
from lightning_par.testing import RanksFailed, run_ranks
from parity import make_trainer, model_size

EVERY_TWO = {"snapshot_every_n_steps": 2}


def ranks_of(layout: str) -> int:
    return 1 if layout == "one" else GUARDED[layout][0]


@pytest.mark.parametrize("layout", some(GUARDED, "ddp", "fsdp", "pp"))
def test_A12_batches_since_the_snapshot_were_never_seen(layout: str) -> None:
    build = partial(Fragile, schedule="cosine")
    found = run_ranks(ranks_of(layout), compared, layout, "...nnn...", [2, 3, 4, 5], guard=EVERY_TWO, build=build)
    for one in found:
        assert one["differences"] == []
        assert one["counters"]["rewinds"] == [6]
        assert one["steps"] == (5, 5)
        assert one["counters"]["accepted"] == 5


@pytest.mark.parametrize("layout", some(["one", "fsdp"], "one"))
@pytest.mark.parametrize("precision", ["32-true", long_run("16-mixed")])
def test_A13_a_snapshot_is_of_a_whole_window(layout: str, precision: str) -> None:
    # Snapshots after windows 2 (batches 0 to 3) and not in the middle of the third, which is good.
    letters, without = "......n..nn.....", list(range(4, 12))
    options = {"accumulate_grad_batches": 2, "precision": precision}
    for one in run_ranks(ranks_of(layout), compared, layout, letters, without, guard=EVERY_TWO, **options):
        assert one["differences"] == []
        assert one["steps"] == (4, 4)


def over_an_epoch(schedule: str, **options: Any) -> Any:
    """The last batch of the first epoch and the first two of the second are bad, and the snapshot is of the first."""
    found = []
    for left_out in ((), (0, 1, 4)):
        module = Fragile(schedule=schedule, dropout=0.0)
        trainer, _, callback, lines = fit("one", plan("nn..n", left_out), EVERY_TWO, module, max_epochs=2, **options)
        found.append((state_of(trainer, module, random=False), vars(callback.guard.counters), trainer, lines))
    (state, counters, trainer, lines), (expected, *_) = found
    return differences(state, expected), counters, (trainer.current_epoch, trainer.global_step), lines


@pytest.mark.parametrize("schedule", ["epoch", long_run("cosine")])
def test_an_epoch_that_is_over_is_not_begun_again(schedule: str) -> None:
    [(differs, counters, ends, _)] = run_ranks(1, over_an_epoch, schedule)
    assert differs == []
    # Two good steps of each epoch; the first of the second epoch is taken from the state after those of the first.
    assert (counters["accepted"], counters["skipped"]) == (4, 6)
    assert len(counters["rewinds"]) == 1
    assert ends[0] == 2


class Validates(Fragile):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch % 1000, batch_idx), sync_dist=True)


def with_validation(layout: str) -> Any:
    found = []
    for left_out in ((), (2, 3, 4, 5)):
        # Validation draws random numbers for its loader, so nothing else may.
        module = Validates(dropout=0.0)
        options = {"val_check_interval": 1, "num_sanity_val_steps": 1, "limit_val_batches": 1}
        loader = data(plan("...nnn..", left_out), dist.get_rank(), dist.get_world_size())
        trainer, *_ = fit(layout, [], EVERY_TWO, module, loader={"train": loader, "val": loader}, **options)
        found.append(state_of(trainer, module, random=False))
    return differences(*found)


@pytest.mark.parametrize("layout", some(["ddp", "fsdp"], "fsdp"))
def test_parameters_are_copied_as_shards_after_a_validation(layout: str) -> None:
    assert run_ranks(2, with_validation, layout) == [[], []]


BAD = (5, 6, 7)


def replayed(layout: str, directory: str, workers: int | None, accumulate: int, min_age: int) -> Any:
    """Batches in some order, of which a few are bad; the oracle has the same order without those windows."""
    spec = GUARDED[layout][1]
    ranks = dist.get_world_size() // model_size(spec)
    rank = dist.get_rank() // model_size(spec)
    order = torch.randperm(48 * accumulate, generator=torch.Generator().manual_seed(3)).tolist()
    windows = [
        [order[4 * i : 4 * i + 4][rank::ranks] for i in range(w * accumulate, (w + 1) * accumulate)] for w in range(12)
    ]
    for window in BAD:
        windows[window][0][-1] += 1000
    runs = []
    for kept in (windows, [window for i, window in enumerate(windows) if i not in BAD]):
        batches = [batch for window in kept for batch in window]
        if workers is None:
            loader: Any = Listed(batches)
        else:
            loader = DataLoader(Samples(), batch_sampler=batches, num_workers=workers)
        guard = {"snapshot_every_n_steps": 3, "data": "replay", "keep_snapshots": 3, "min_age": min_age}
        options = {"default_root_dir": directory, "accumulate_grad_batches": accumulate}
        runs.append(fit(layout, [], guard, Fragile(schedule="cosine"), loader=loader, **options))
    (trainer, module, callback, _), (oracle, expected, _, _) = runs
    return {
        "differences": differences(state_of(trainer, module), state_of(oracle, expected)),
        "counters": vars(callback.guard.counters),
        "seen": (module.seen, expected.seen),
    }


@pytest.mark.parametrize(
    ("layout", "workers", "accumulate", "min_age"),
    [
        ("ddp", 0, 1, 0),
        long_run("fsdp", 0, 1, 4),
        long_run("ddp", 2, 2, 0),
        long_run("ddp", None, 1, 0),
        long_run("fsdp", None, 2, 0),
        long_run("tp2xdp2", 0, 1, 0),
    ],
)
def test_A14_good_batches_come_again_once_and_bad_ones_change_nothing(
    tmp_path: Path, layout: str, workers: int | None, accumulate: int, min_age: int
) -> None:
    options = (layout, str(tmp_path), workers, accumulate, min_age)
    for one in run_ranks(ranks_of(layout), replayed, *options):
        # A loader of the user's own draws from nothing, and the order of another one was drawn at its begin.
        assert one["differences"] == []
        counters = one["counters"]
        assert (counters["accepted"], counters["skipped"], len(counters["rewinds"])) == (9, 3, 1)
        seen, expected = one["seen"]
        # Back to the snapshot of step 3, or to that of step 0, which alone is four steps old: all from there again.
        back = 3 if min_age == 0 else 0
        again = seen[8 * accumulate :]
        assert len(again) == (12 - back) * accumulate
        windows = [again[i : i + accumulate] for i in range(0, len(again), accumulate)]
        good = [batch for i, window in enumerate(windows, back) if i not in BAD for batch in window]
        assert good == expected[back * accumulate :]


def diverges(layout: str, letters: str, directory: str, **guard: Any) -> tuple[str, int]:
    module = Fragile()
    try:
        fit(layout, plan(letters), {"max_rewinds": 1, **EVERY_TWO, **guard}, module=module, default_root_dir=directory)
    except TrainingDivergedError as error:
        return str(error), len(module.seen)
    return "trained on", 0


@pytest.mark.parametrize("layout", some(["ddp", "fsdp", "pp"], "ddp"))
def test_A15_what_goes_on_ends_on_all_ranks_in_the_same_step(tmp_path: Path, layout: str) -> None:
    found = run_ranks(ranks_of(layout), diverges, layout, "...nnnnnnnnnn", str(tmp_path))
    messages = {message for message, _ in found}
    [message] = messages
    assert "step 4 (epoch 0, batch 8): the loss is not finite, on rank" in message
    assert "Of 9 steps 6 were left out. Training has gone back to a checkpoint 0 times" in message
    assert "to memory 1 times (snapshots of steps [0, 2])" in message
    assert "loss nan" in message
    assert "samples" in message
    assert {batches % 9 for _, batches in found} == {0}
    events = read_events(tmp_path)
    assert [event["kind"] for event in events] == ["skip"] * 3 + ["rewind"] + ["skip"] * 3
    assert events[3] | {"time": 0} == {
        "time": 0,
        "kind": "rewind",
        "step": 6,
        "from_step": 6,
        "to_step": 2,
        "source": "memory",
    }
    assert events[0]["rule"] == "nonfinite"
    assert events[0]["value"] == "nan"
    [bad] = {sample for samples in events[0]["batches"].values() for sample in samples if sample >= 1000}
    assert f"samples {', '.join(map(str, events[0]['batches'][str(events[0]['ranks'][0])]))}" in message or bad


def test_A15_a_budget_of_steps_that_are_left_out(tmp_path: Path) -> None:
    [(message, _)] = run_ranks(1, diverges, "one", "..n.n.n..", str(tmp_path), max_total_skips=2)
    assert "step 6 " in message
    [(message, _)] = run_ranks(1, diverges, "one", "..n.n.n..", str(tmp_path), max_total_skips=3)
    assert message == "trained on"


class Corrupts(Fragile):
    """A bit of a moment flips once."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            state = next(iter(self.trainer.optimizers[0].state.values()))
            state["exp_avg"].view(-1)[0] = math.nan


def corrupted(every: int | None) -> Any:
    trainer, module, callback, lines = fit(
        "one", plan("......"), {**EVERY_TWO, "check_params_every": every}, Corrupts()
    )
    oracle, expected, _, _ = fit("one", plan("......", [2, 3] if every else [2, 3, 4]))
    return differences(state_of(trainer, module), state_of(oracle, expected)), vars(callback.guard.counters), lines


def test_A17_corrupt_optimizer_state_is_not_left_out_for_ever() -> None:
    [(differs, counters, lines)] = run_ranks(1, corrupted, 1)
    assert differs == []
    assert counters["rewinds"] == [4]
    assert "parameters or optimizer state are not finite" in lines[0]


# To a checkpoint


def reloaded(layout: str, directory: str, letters: str, without: list[int]) -> Any:
    guard = {**EVERY_TWO, "max_rewinds": 0, "min_age": 1}
    saving = {"enable_checkpointing": True, "default_root_dir": directory}
    runs = []
    for left_out in ((), without):
        committed = CommittedCheckpoint(Path(directory) / f"{len(left_out)}", every_n_steps=2, keep_last=9)
        build = Fragile(schedule="cosine")
        runs.append(fit(layout, plan(letters, left_out), guard, build, callbacks=[committed], **saving))
    (trainer, module, callback, lines), (oracle, expected, _, _) = runs
    return {
        "differences": differences(state_of(trainer, module), state_of(oracle, expected)),
        "counters": vars(callback.guard.counters),
        "steps": (trainer.global_step, oracle.global_step),
        "lines": lines,
    }


@pytest.mark.parametrize("layout", some(["fsdp", "ddp", "zero1", "pp", "tp2xdp2"], "fsdp"))
def test_after_memory_training_goes_back_to_a_checkpoint_in_place(tmp_path: Path, layout: str) -> None:
    # Checkpoints of steps 2, 4 (in the bad streak) and 6: of them that of step 2 is the newest old enough.
    for one in run_ranks(ranks_of(layout), reloaded, layout, str(tmp_path), "..nnn...", [2, 3, 4]):
        assert one["differences"] == []
        assert one["counters"]["reloads"] == 1
        assert one["steps"] == (5, 5)
    events = read_events(tmp_path)
    assert [(e["to_step"], e["source"]) for e in events if e["kind"] == "rewind"] == [(2, "disk")]
    assert [one.manifest.step for one in candidates(tmp_path / "0")] == [5, 4, 2]


def superseded(directory: str, keep: int) -> Any:
    """Checkpoints of steps 1, 2, 3 and a rewind from step 6 to memory of step 2."""
    committed = CommittedCheckpoint(directory, every_n_steps=1, keep_last=keep, asynchronous=False)
    guard = {**EVERY_TWO, "keep_snapshots": 1}
    saving = {"enable_checkpointing": True, "callbacks": [committed]}
    trainer, _, callback, _ = fit("ddp", plan("...nnn."), guard, **saving)
    return trainer.global_step, len(callback.guard.counters.rewinds)


@pytest.mark.parametrize("keep", [1, long_run(9)])
def test_G16_no_later_start_goes_on_from_what_was_gone_back_behind(tmp_path: Path, keep: int) -> None:
    # Kept are those of the last step alone, or of all: where none would be left, the state gone back to is saved first.
    assert run_ranks(2, superseded, str(tmp_path), keep) == [(3, 1)] * 2
    steps = [one.manifest.step for one in candidates(tmp_path)]
    assert steps == ([3] if keep == 1 else [3, 2, 1])
    later = [path.name for path in tmp_path.glob("step-*") if (path / SUPERSEDED).exists()]
    assert sorted(later) == (["step-00000005"] if keep == 1 else ["step-00000004", "step-00000005"])
    # They go when the run has come past them.
    RunDirectory(tmp_path, Retention()).committed(str(tmp_path / "step-00000009"))
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-{step:08d}" for step in sorted(steps)]


class Stops(pl.Callback):
    """Ends a run before its next batch."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batches:
            raise KeyError("killed")


def killed(directory: str) -> Any:
    def run(letters: str, **more: Any) -> Any:
        committed = CommittedCheckpoint(directory, every_n_steps=2, keep_last=9, resume="auto", asynchronous=False)
        guard = {**EVERY_TWO, "keep_snapshots": 1}
        callbacks = [committed, *more.pop("callbacks", [])]
        return fit("ddp", plan(letters), guard, callbacks=callbacks, enable_checkpointing=True, **more)

    with contextlib.suppress(KeyError):
        run("...nnn...", callbacks=[Stops(6)])
    steps = [one.manifest.step for one in candidates(directory)]
    trainer, _, callback, _ = run("...nnn...")
    return steps, trainer.global_step, vars(callback.guard.counters)


def test_G16_a_start_after_a_crash_goes_on_from_before(tmp_path: Path) -> None:
    # Those of steps 4 and 6 were saved in the bad streak; the snapshot was of step 2.
    for steps, step, counters in run_ranks(2, killed, str(tmp_path)):
        assert steps == [2]
        # It goes on behind the second batch, so that the same bad ones come again.
        assert (counters["attempts"], len(counters["rewinds"]), step) == (9, 1, 5)


def killed_while_loading(directory: str) -> Any:
    """The process ends when later checkpoints are marked and the one to go back to is not loaded yet."""

    def run() -> Any:
        committed = CommittedCheckpoint(directory, every_n_steps=2, keep_last=9, resume="auto")
        guard = {**EVERY_TWO, "max_rewinds": 0, "min_age": 1}
        saving = {"enable_checkpointing": True, "callbacks": [committed]}
        return fit("ddp", plan("....nnn..."), guard, Fragile(schedule="cosine"), **saving)

    with contextlib.suppress(KeyError), mock.patch.object(MeshStrategy, "go_back", side_effect=KeyError("killed")):
        run()
    left = [one.manifest.step for one in candidates(directory)]
    trainer, module, callback, _ = run()
    return left, trainer.global_step, vars(callback.guard.counters), module.seen


def test_G16_a_crash_in_the_middle_goes_on_from_where_it_was_going(tmp_path: Path) -> None:
    for left, step, counters, seen in run_ranks(2, killed_while_loading, str(tmp_path)):
        # Of the checkpoints of steps 2, 4 and 6 (in the bad streak) that of step 2 is the newest that is old enough.
        assert left == [2]
        assert len(seen) == 8  # its place in the data is that of the checkpoint
        # The same bad batches come again, and it goes back again, this time to the end.
        assert counters["reloads"] == 1
        assert step == 5


# Refusals, and what is not a rewind


def saved_and_resumed(directory: str) -> Any:
    """As one run, or ended within it and started again: the same decisions."""
    guard = {"spikes": SpikeRule(window=8, active_after=4)}
    found = []
    for stops in ([], [8]):
        for stop in [*stops, 99]:
            committed = CommittedCheckpoint(Path(directory) / str(len(stops)), every_n_steps=1, resume="auto")
            options = {"enable_checkpointing": True, "callbacks": [committed, Stops(stop)]}
            module = Fragile()
            with contextlib.suppress(KeyError):
                trainer, module, callback, _ = fit("ddp", plan(".....s...s.."), guard, module, **options)
        found.append((vars(callback.guard.counters), callback.guard.position(), state_of(trainer, module)))
    return found[0][:2], found[1][:2], differences(found[0][2], found[1][2])


def test_A22_a_run_that_was_resumed_decides_as_one_that_went_on(tmp_path: Path) -> None:
    for straight, resumed, differs in run_ranks(2, saved_and_resumed, str(tmp_path)):
        assert straight == resumed
        assert straight[0]["skipped"] == 2
        assert differs == []


class Silent(Fragile):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 and dist.get_rank() == dist.get_world_size() - 1 else loss


def silent(layout: str) -> Any:
    return fit(layout, plan("...."), module=Silent())[2].guard.counters.accepted


def test_A21_a_step_that_returns_nothing_on_one_rank_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(RanksFailed) as error:
        run_ranks(2, silent, "ddp", timeout=30)
    assert "rank 1 raised" in str(error.value)
    assert "rank 1, step 1: the other ranks wait for gradients" in str(error.value)
    # One process skips it, as Lightning does.
    assert run_ranks(1, silent, "one") == [3]


def test_A24_snapshots_that_do_not_fit_are_refused_before_the_first_step() -> None:
    with pytest.raises(RanksFailed, match="rank 1: 2 snapshots of .* half of what is free"):
        run_ranks(2, without_memory, "..", {"snapshot_every_n_steps": 5})


def without_memory(letters: str, guard: dict[str, Any]) -> tuple[int, list[str]]:
    available = 100 if dist.get_rank() else 10**9
    with mock.patch("lightning_par.callbacks._guarding.host_memory", return_value=available):
        _, _, callback, lines = fit("ddp", plan(letters), guard)
    assert callback.guard is not None
    return callback.guard.counters.skipped, lines


def test_A24_without_a_number_steps_are_left_out_all_the_same() -> None:
    (skipped, lines), (also, _) = run_ranks(2, without_memory, "..n.", {})
    assert skipped == also == 1
    assert "rank 1: 2 snapshots of" in "\n".join(lines)
    assert "cannot go back to memory" in "\n".join(lines)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"snapshot_every_n_steps": 0}, "snapshot_every_n_steps is 0"),
        ({"min_age": 300}, "keep_snapshots=4"),
        ({"min_age": -1}, "min_age=0"),
        ({"data": "shuffle"}, "data is 'shuffle'"),
        ({"max_consecutive_skips": 0}, "max_consecutive_skips is 0"),
        ({"mode": "fast"}, "mode is 'fast'"),
        ({"mode": "device"}, "spikes=False(.|\n)*restore_buffers=False"),
        ({"mode": "device", "data": "replay"}, "data='skip_past'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ParallelConfigError, match=words):
        NaNRewind(**options)


def test_all_options_that_make_no_sense_come_at_once() -> None:
    with pytest.raises(ParallelConfigError) as error:
        NaNRewind(0, mode="device", data="replay", max_rewinds=-1)
    assert len(error.value.problems) == 5


def refused(what: str) -> str:
    options: dict[str, Any] = {}
    guard: dict[str, Any] = {}
    module = Fragile("LBFGS") if what == "LBFGS" else Fragile()
    if what == "replay":
        guard["data"] = "replay"
    if what == "scaler":
        options["precision"] = "16-mixed"
        module = Fragile(partial(torch.optim.AdamW, fused=True))
    try:
        fit("one", plan(".."), guard, module=module, **options)
    except ParallelConfigError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("scaler", "a fused AdamW with the fp16 scaler that SingleDeviceStrategy uses"),
        ("LBFGS", "cannot leave out a step of LBFGS"),
        ("replay", "needs a strategy of lightning_par, also on one device"),
    ],
)
def test_what_cannot_work_is_refused_by_name(what: str, words: str) -> None:
    [message] = run_ranks(1, refused, what)
    assert words in message


def under_lightnings_ddp(directory: str) -> Any:
    found = []
    for left_out in ((), [2, 3, 4, 5]):
        guard = {**EVERY_TWO, "min_age": 0}
        module, callback = Fragile(), NaNRewind(**guard)
        trainer = make_trainer(2, "ddp", max_epochs=1, callbacks=[callback], default_root_dir=directory)
        torch.manual_seed(5)
        trainer.fit(
            module,
            data(plan("...nnn..", left_out), dist.get_rank() if dist.is_initialized() else trainer.global_rank, 2),
        )
        found.append((state_of(trainer, module), callback.guard.counters))
    return differences(found[0][0], found[1][0]), len(found[0][1].rewinds)


@pytest.mark.slow
def test_it_works_under_lightnings_own_ddp(tmp_path: Path) -> None:
    assert run_ranks(2, under_lightnings_ddp, str(tmp_path)) == [([], 1)] * 2


# The verdict on the device


def on_device(layout: str, letters: str, without: list[int], every: int, **options: Any) -> Any:
    build = partial(Fragile, partial(torch.optim.AdamW, fused=True), "cosine", dropout=0.0)
    guard = {"mode": "device", "spikes": False, "restore_buffers": False, "snapshot_every_n_steps": every}
    return compared(layout, letters, without, guard, build=build, **options)


@pytest.mark.parametrize("layout", some(["one", "ddp", "fsdp", "hsdp2x2", "tp", "pp"], "one", "fsdp"))
def test_A19_a_fused_optimizer_leaves_out_a_step_by_itself(layout: str) -> None:
    for one in run_ranks(ranks_of(layout), on_device, layout, "..n....", [2], 9):
        # No random numbers are drawn, but by the loader, for each epoch one.
        assert one["differences"] == []
        assert (one["counters"]["skipped"], one["counters"]["accepted"]) == (1, 6)
        # The host learns of it before the next step: rates are right from there on.
        rates, expected = one["rates"]
        assert rates[:3] == expected[:3]
        assert rates[4:] == expected[3:]


@pytest.mark.parametrize(
    ("layout", "accumulate", "every"),
    [
        ("ddp", 1, 3),
        *(long_run(layout, 1, 3) for layout in ("one", "fsdp", "pp", "tp2xdp2")),
        long_run("fsdp", 2, 3),
        long_run("one", 1, 2),
    ],
)
def test_A19_the_host_goes_back_one_step_later(layout: str, accumulate: int, every: int) -> None:
    letters = "".join(letter * accumulate for letter in "...nnn....")
    # It learns of the third bad step in the one that follows; where a snapshot is due, at its end.
    last = 7 if every == 3 else 6
    without = list(range(every * accumulate, last * accumulate))
    options = {"accumulate_grad_batches": accumulate}
    for one in run_ranks(ranks_of(layout), on_device, layout, letters, without, every, **options):
        assert one["differences"] == []
        assert one["steps"] == (6, 6)
        assert len(one["counters"]["rewinds"]) == 1


@pytest.mark.parametrize(
    ("module", "words"),
    [(partial(Fragile), "AdamW is not fused"), (partial(Fragile, "SGD"), "SGD is not fused")],
)
def test_A19_other_optimizers_are_refused(module: Any, words: str) -> None:
    guard = {"mode": "device", "spikes": False, "restore_buffers": False}
    with pytest.raises(RanksFailed, match=words):
        run_ranks(1, fits, guard, module)


def fits(guard: dict[str, Any], module: Any) -> None:
    fit("one", plan(".."), guard, module())


def saved_on_device(directory: str) -> Any:
    """A checkpoint right after a step that the device has left out."""
    guard = {"mode": "device", "spikes": False, "restore_buffers": False, "snapshot_every_n_steps": 9}
    build = partial(Fragile, partial(torch.optim.AdamW, fused=True), "cosine", dropout=0.0)
    states = []
    for stops in ([], [3]):
        for stop in [*stops, 99]:
            committed = CommittedCheckpoint(Path(directory) / str(len(stops)), every_n_steps=1, resume="auto")
            callbacks = [Stops(stop), committed]
            with contextlib.suppress(KeyError):
                trainer, module, callback, _ = fit(
                    "ddp", plan("..n....."), guard, build(), enable_checkpointing=True, callbacks=callbacks
                )
        states.append((vars(callback.guard.counters), state_of(trainer, module)))
    return states[0][0], states[1][0], differences(states[0][1], states[1][1])


def test_A19_a_checkpoint_knows_what_the_device_has_left_out(tmp_path: Path) -> None:
    for straight, resumed, differs in run_ranks(2, saved_on_device, str(tmp_path)):
        assert differs == []
        assert straight == resumed
        assert (straight["skipped"], straight["accepted"]) == (1, 7)
