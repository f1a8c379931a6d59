"""Runs that are killed, stopped or told to end, and started again: what they leave is what an uninterrupted run leaves.

The names of the cases are rows of the fault matrix: B kills in a save, C errors, E signals, G restarts.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import fault_runs
import pytest
import torch
import torch.distributed as dist
from fault_runs import At, AtPoint, Job, digest, train
from fault_saves import fill
from fault_stories import (
    Story,
    checkpoints,
    died,
    outcome,
    read_record,
    reference,
    states,
    succeeded,
    valid_steps,
)
from faults import Exit, launch
from lightning.pytorch.callbacks import ModelCheckpoint
from probe import listed, long_run, some

from checkpoint_runs import assert_same, build, view
from checkpoint_runs import train as train_steps
from lightning_par.checkpoint import load_sharded, model_state, optimizer_state, read_manifest, save_sharded, verify
from lightning_par.checkpoint.candidates import load_newest
from lightning_par.checkpoint.crash_points import EVERY_RANK, NAMES
from lightning_par.strategies.torchrun import group_of_this_start
from lightning_par.testing import run_ranks

ASYNC = (("asynchronous", True),)
MODES = {"sync": (), "async": ASYNC}


# -- killed in a step (G) ---------------------------------------------------------------------------------------------


# One process: within and at the end of the time between two saves.
@pytest.mark.parametrize(
    ("ranks", "step"), listed([*((1, i) for i in (1, 3, 8)), *((2, i) for i in range(1, 13))], (2, 8))
)
def test_G4_killed_in_any_step(tmp_path: Path, ranks: int, step: int) -> None:
    story = Story(tmp_path, Job(ranks=ranks))
    died(story.run(At(step, "kill", ranks - 1)), ranks - 1)
    story.finish()
    assert story.starts == [0, (step - 1) // 3 * 3]


VALIDATING = (("val_check_interval", 4), ("check_val_every_n_epoch", None))
FEATURES = {
    "G5-epochs": Job(every=5, steps=15),
    "G5-accumulation-over-epochs": Job(accumulate=3, steps=8, every=2),
    "G5-accumulation-async": Job(accumulate=2, steps=8, every=3, saver=ASYNC),
    "G6-save-before-validation": Job(every=4, trainer=VALIDATING),
    "G6-save-between-validations": Job(every=3, trainer=VALIDATING),
    "G6-validation-of-each-epoch": Job(every=5, trainer=(("val_check_interval", 1.0),)),
    "G9-stateful-loader": Job(data="stateful"),
    "G9-stateful-loader-async": Job(data="stateful", saver=ASYNC),
    "G4-ddp": Job(strategy="DataParallelStrategy"),
    "G4-zero1": Job(strategy="ZeROStrategy", options=(("stage", 1),)),
    "G4-hsdp": Job(ranks=4, strategy="HSDPStrategy", options=(("dp_shard_size", 2),), timeout=40.0),
    "G4-checksums": Job(saver=(("verify", "checksum"),)),
    "G4-clipping": Job(trainer=(("gradient_clip_val", 0.1),)),
    "G14-averages": Job(averaged=True),
    "G14-two-optimizers": Job(pair=True, steps=18),
    "G14-scaler": Job(trainer=(("precision", "16-mixed"),)),
}


BESIDE = [
    *((name, 0) for name in FEATURES),
    # The steps beside it differ where there is more than a save: epochs, validations, windows, writers.
    *((name, after) for name in FEATURES if name.startswith(("G5", "G6")) for after in (-1, 1)),
]


@pytest.mark.parametrize(("name", "after"), listed(BESIDE, ("G6-save-before-validation", 0)))
def test_killed_beside_a_save(tmp_path: Path, name: str, after: int) -> None:
    """In the step at whose end the second checkpoint is saved, in the one before, and in the one after."""
    job = FEATURES[name]
    story = Story(tmp_path, job)
    died(story.run(At(2 * job.every + after, "kill", 1)), 1)
    story.finish()
    begun = (2 * job.every + after - 1) // job.every * job.every
    # What is written while training goes on may not have been committed yet.
    assert story.starts[1] in ((begun - job.every, begun) if ASYNC[0] in job.saver else (begun,))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_G1_torchrun_starts_a_run_again(tmp_path: Path) -> None:
    """Twice killed: rank 1 in step 7, and in step 11."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--max_restarts=3"]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--local_addr=localhost"]
    command += ["--monitor_interval=0.1", fault_runs.__file__, str(tmp_path), "7", "11"]
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert outcome(tmp_path, 2) == reference(Job())
    assert list(read_record(tmp_path, 0, "start").values()) == [0, 6, 9]


@pytest.mark.parametrize(("restarts", "shared"), [("3", "True"), ("0", "True"), ("3", "False")])
def test_starts_on_several_nodes_are_told_to_share_no_store(
    restarts: str, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"USE_AGENT_STORE": shared, "MAX_RESTARTS": restarts}
    for name, value in {"GROUP_WORLD_SIZE": "2", **{f"TORCHELASTIC_{n}": v for n, v in told.items()}}.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert group_of_this_start(timedelta(seconds=1)) == {}
    assert len(caught) == (restarts == "3" and shared == "True")


@pytest.mark.parametrize(
    ("step", "action", "words", "fate"),
    [
        (5, "raise", "without a checkpoint after step 3", "ArithmeticError: the fault that the test asked for"),
        long_run(5, "kill", "without a checkpoint after step 3", "ended"),
        long_run(2, "kill", "before the first checkpoint", "ended"),
    ],
    ids=["G2-error", "G2-killed", "G3-before-the-first-checkpoint"],
)
def test_a_run_that_gets_no_further_is_started_no_more(
    tmp_path: Path, step: int, action: str, words: str, fate: str
) -> None:
    story = Story(tmp_path, Job())
    ranks = (0, 1) if action == "raise" else (1,)
    for _ in range(3 if step < 3 else 4):
        assert all(e.code != 0 and not e.left for e in story.run(At(step, action, *ranks)))
    for e in story.run():
        assert e.code == 1
        assert "NoProgressError" in e.log
        assert f"the last 3 starts in {story.root} ended {words}" in e.log
        assert e.log.count(fate) >= 3
    assert story.starts == [0] * 3 if step < 3 else [0, 3, 3, 3]
    shutil.rmtree(story.root / ".starts")
    story.finish()


def test_G15_a_run_that_has_ended_does_nothing_when_started_again(tmp_path: Path) -> None:
    story = Story(tmp_path, Job())
    story.finish()
    before = {path.name: read_manifest(path).time for path in checkpoints(story.root)}
    for _ in range(4):
        story.finish()
    assert story.starts == [0]
    assert {path.name: read_manifest(path).time for path in checkpoints(story.root)} == before


# -- other numbers of ranks (G) ---------------------------------------------------------------------------------------


FOUR = Job(ranks=4, states=True, timeout=60.0)


@pytest.mark.parametrize("ranks", some([1, 2, 3, 8], 1))
def test_G10_saved_on_four_ranks_resumed_on_others(tmp_path: Path, ranks: int) -> None:
    """Bit for bit what was saved; then the same samples in each step where the batch is the same, else each once."""
    story = Story(tmp_path, FOUR)
    died(story.run(At(8, "kill", 3)), 3)
    batch = 8 if 8 % ranks == 0 else 2 * ranks
    story.job = replace(FOUR, ranks=ranks, batch=batch)
    succeeded(story.run())
    assert story.starts == [0, 6]
    assert states(tmp_path, 1)[6] == states(tmp_path, 0)[6]
    whole = samples(reference(FOUR))
    here = {step: seen for step, seen in samples(outcome(tmp_path, ranks)).items() if step > 6}
    if ranks == 1:
        # The next epoch, from step 11 on, is drawn by torch's sampler for one process.
        assert all(here[step] == whole[step] for step in range(7, 11))
    elif batch == 8:
        assert here == {step: seen for step, seen in whole.items() if step > 6}
    else:
        # An epoch was five batches of eight, so step 6 was the first of the second one.
        rest = 32 // batch
        used = sum((here[step] for step in range(7, 7 + rest)), whole[6])
        assert len(used) == len(set(used)) == 8 + rest * batch


def samples(run: dict[str, Any]) -> dict[int, list[int]]:
    """The samples of each step, of all ranks together."""
    return {
        step: sorted(i for batches in by_rank.values() for seen, _, _ in batches for i in seen)
        for step, by_rank in run["steps"].items()
    }


def loaded_with_gradients(root: str) -> tuple[str, str]:
    """Load when a window has begun: a fresh optimizer, and gradients on the parameters."""
    results = []
    for busy in (False, True):
        net, optimizers = build("shard", "adamw", seed=4)
        if busy:
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        load_newest(root, lambda path, n=net, o=optimizers: load_sharded(path, n, o))
        assert all(len(optimizer.state) > 0 for optimizer in optimizers)
        results.append(digest(view(net, optimizers)))
    return results[0], results[1]


def test_G18_gradients_do_not_blank_the_optimizer(tmp_path: Path) -> None:
    saved = run_ranks(2, fill, str(tmp_path), (3,))[0]
    assert run_ranks(2, loaded_with_gradients, str(tmp_path)) == [(saved[3], saved[3])] * 2


def saved_and_loaded(root: str) -> None:
    """Save right after a load, and load right after a save, in one process."""
    net, optimizers = build("shard", "adamw")
    train_steps(net, optimizers, 2)
    for i in range(3):
        before = view(net, optimizers)
        states_now = [optimizer_state(net, optimizer) for optimizer in optimizers]
        save_sharded(f"{root}/{i}", model=model_state(net), optimizers=states_now)
        train_steps(net, optimizers, 1, seed=i)
        load_sharded(f"{root}/{i}", net, optimizers)
        assert_same(view(net, optimizers), before)
        dist.barrier()


def test_G19_saves_and_loads_in_one_process(tmp_path: Path) -> None:
    run_ranks(2, saved_and_loaded, str(tmp_path))


def test_G17_what_a_rank_keeps_is_made_of_plain_types(tmp_path: Path) -> None:
    run_ranks(2, fill, str(tmp_path), (3,))
    for rank in range(2):
        own = torch.load(tmp_path / "step-00000003" / "ranks" / f"rank-{rank:05d}.pt", weights_only=True)
        assert {"python", "numpy", "torch"} <= own["random"].keys()


# -- killed in a save, in other ways than the crash points are (B) ----------------------------------------------------


@pytest.mark.parametrize("mode", some(MODES, "async"))
def test_B12_all_ranks_killed_in_the_middle_of_a_shard(tmp_path: Path, mode: str) -> None:
    story = Story(tmp_path, Job(saver=MODES[mode]))
    first, _ = story.run(AtPoint("shard_written", 2, "kill", 0), grace=0.0)
    assert first.killed
    story.finish()
    assert story.starts == [0, 3]


@pytest.mark.parametrize("mode", some(MODES, "sync"))
def test_B13_killed_in_the_first_save_of_all(tmp_path: Path, mode: str) -> None:
    story = Story(tmp_path, Job(saver=MODES[mode]))
    died(story.run(AtPoint("shard_written", 1, "kill", 0)), 0)
    exits = story.run()
    succeeded(exits)
    assert "no checkpoint was ever committed here, so the run starts afresh" in exits[0].log
    assert outcome(tmp_path, 2) == reference(story.job)
    assert story.starts == [0, 0]


@pytest.mark.parametrize("step", [8, long_run(7)])
def test_B14_killed_when_training_is_ahead_of_the_save(tmp_path: Path, step: int) -> None:
    story = Story(tmp_path, Job(saver=ASYNC))
    exits = story.run(AtPoint("shard_written", 2, "hold", 0), At(step, "kill", 1))
    died(exits, 1)
    story.finish()
    assert story.starts == [0, 3]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(9))
def test_B16_killed_anywhere_until_it_ends(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    job = Job(ranks=draw.choice([2, 2, 4]), every=draw.choice([1, 2, 3]), saver=draw.choice(list(MODES.values())))
    story = Story(tmp_path, replace(job, timeout=60.0))
    for _ in range(3):
        point, rank = draw.choice(NAMES), draw.randrange(job.ranks)
        rank = rank if point in EVERY_RANK else 0
        story.run(
            At(draw.randint(1, 14), "kill", draw.randrange(job.ranks))
            if draw.random() < 0.3
            else AtPoint(point, draw.randint(1, 6), "kill", rank)
        )
    story.finish()


# -- damaged between two starts (D) ------------------------------------------------------------------------------------

CHECKED = (("verify", "checksum"),)


@pytest.mark.parametrize(
    ("name", "saver"),
    [
        ("__1_0.distcp", CHECKED),
        long_run("__0_0.distcp", CHECKED),
        long_run("ranks/rank-00001.pt", CHECKED),
        long_run("meta.pt", CHECKED),
    ],
    ids=["D2-shard-1", "D2-shard-0", "D2-rank-file", "D2-meta"],
)
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(tmp_path: Path, name: str, saver: Any) -> None:
    story = Story(tmp_path, Job(saver=saver))
    died(story.run(At(8, "kill", 1)), 1)
    damage(story.root / "step-00000006" / name)
    story.damaged = {"step-00000006"}
    exits = story.run()
    succeeded(exits)
    assert "FELL BACK to the checkpoint" in exits[0].log
    assert story.starts == [0, 3]
    assert outcome(tmp_path, 2) == reference(story.job)
    # It has been saved again, in the place of the damaged one or after its time.
    assert valid_steps(story.root) == [9, 12]


def test_D10_a_run_whose_checkpoints_are_all_damaged_does_not_begin(tmp_path: Path) -> None:
    story = Story(tmp_path, Job(saver=CHECKED))
    died(story.run(At(8, "kill", 1)), 1)
    story.damaged = {"step-00000003", "step-00000006"}
    kept = {name: (story.root / name / "__0_0.distcp").read_bytes() for name in story.damaged}
    for name in story.damaged:
        damage(story.root / name / "__0_0.distcp")
    broken = launch_without_check(story)
    for e in broken:
        assert e.code == 1
        assert "NoValidCheckpointError" in e.log
    for name, content in kept.items():
        (story.root / name / "__0_0.distcp").write_bytes(content)
    story.finish()
    assert story.starts == [0, 6]


def launch_without_check(story: Story) -> list[Exit]:
    """A start in a directory where no invariant holds any more."""
    logs = story.folder / "logs-broken"
    return launch(story.job.ranks, train, story.job, story.folder, 99, None, (), logs=logs)


def damage(file: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


# -- errors and signals (C, E, F) -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [(0, 1), long_run((1,))], ids=str)
def test_C14_an_error_in_training_while_a_save_is_under_way(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    """The error is that of training; the save comes to its end where all ranks live to write it."""
    story = Story(tmp_path, Job(saver=ASYNC))
    exits = story.run(AtPoint("shard_written", 2, "hold", 1), At(8, "raise", *ranks))
    for rank, e in enumerate(exits):
        assert e.code == 1
        assert not e.left
        assert rank not in ranks or "ArithmeticError: the fault that the test asked for" in e.log
    story.finish()
    assert story.starts[1] in (3, 6)
    assert len(ranks) == 1 or story.starts == [0, 6]


@pytest.mark.slow
def test_C19_where_a_run_began_stays_until_it_has_saved(tmp_path: Path) -> None:
    """A new run goes back to an older checkpoint, and keeps one."""
    story = Story(tmp_path, Job(saver=(("keep_last", 9),)))
    story.finish()
    begin = story.root / "step-00000003"
    story.job = replace(story.job, every=4, saver=(("keep_last", 1), ("resume", None)))
    died(story.run(AtPoint("manifest_in_place", 1, "kill", 0), ckpt_path=begin, goes_back=True), 0)
    assert valid_steps(story.root) == [3, 6, 9, 12]
    died(story.run(AtPoint("committed", 1, "kill", 0), ckpt_path=begin), 0)
    assert valid_steps(story.root) == [4, 6, 9, 12]
    story.job = replace(story.job, saver=(("keep_last", 1),))
    succeeded(story.run())
    assert story.starts == [0, 3, 3, 4]


@pytest.mark.parametrize(
    ("mode", "point"),
    [
        ("async", "renamed"),
        long_run("async", "shard_written"),
        long_run("async", "manifest_in_place"),
        long_run("sync", "shard_written"),
        long_run("sync", "manifest_in_place"),
        long_run("sync", "renamed"),
    ],
)
def test_C20_lightnings_own_callback_always_has_its_best_and_its_last(tmp_path: Path, mode: str, point: str) -> None:
    """Two checkpoints and a link are kept; killed in the fourth save, in the middle of their exchange."""
    story = Story(tmp_path, Job(every=50, options=(("async_save", mode == "async"),)))
    folder = tmp_path / "best"
    stock = ModelCheckpoint(
        folder, filename="{step}", monitor="step", mode="max", save_top_k=2, save_last="link", every_n_train_steps=2
    )
    died(story.run(stock, AtPoint(point, 4, "kill", 0)), 0)
    kept = sorted(path.name for path in folder.iterdir() if not path.name.startswith(".") and not path.is_symlink())
    assert kept[-2:] == ["step=4.ckpt", "step=6.ckpt"] if point != "renamed" else "step=8.ckpt" in kept
    assert not [problem for name in kept for problem in verify(folder / name, "checksum")]
    assert (folder / "last.ckpt").is_symlink()
    assert (folder / "last.ckpt").resolve().name in kept
    succeeded(story.run(stock, ckpt_path=folder / "last.ckpt"))
    assert outcome(tmp_path, 2) == reference(Job())


SIGNALS = [
    # With Lightning's own handlers; those of PreemptionGuard have a file of their own.
    ("E4-shard-all", "term", "shard_written", (0, 1)),
    ("E4-gather-rank1", "term", "outcome_gathered", (1,)),
    ("E8-no-time-left-rank0", "hold", "shard_written", (0,)),
    ("F2-stopped-rank1", "stop", "shard_written", (1,)),
]


# Each waits until the time is over; the ways of saving take turns.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "point", "ranks", "mode"),
    [pytest.param(*row[1:], mode, id=f"{row[0]}-{mode}") for row, mode in zip(SIGNALS, itertools.cycle(MODES))],
)
def test_told_to_end_in_a_save(tmp_path: Path, action: str, point: str, ranks: tuple[int, ...], mode: str) -> None:
    """Whether the ranks end by themselves or are killed when the time that they had is over."""
    story = Story(tmp_path, Job(saver=MODES[mode], timeout=5.0))
    story.run(*(AtPoint(point, 2, action, rank) for rank in ranks), timeout=8.0)
    story.finish()
    if action in ("hold", "stop"):
        assert story.starts == [0, 3]


@pytest.mark.parametrize("ranks", some([(0,), (1,), (0, 1)], (0, 1)), ids=str)
def test_E7_told_to_end_again_when_it_is_ending(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    """SIGTERM in a step, and the end of patience while the last save is under way."""
    story = Story(tmp_path, Job(timeout=5.0))
    story.run(At(5, "term", *ranks), *(AtPoint("shard_written", 2, "kill", rank) for rank in (0, 1)), timeout=8.0)
    story.finish()
    assert story.starts[1] == 3
