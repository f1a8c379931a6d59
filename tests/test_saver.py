"""Saves one after the other, also while training goes on: what waits for what, and what a failure does."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from checkpoint_runs import build
from lightning_par.checkpoint import (
    CheckpointError,
    CheckpointSaver,
    Facts,
    NoProgressError,
    NoValidCheckpointError,
    Retention,
    RunDirectory,
    best_interval,
    candidates,
    content_of,
    load_newest,
    load_sharded,
    model_state,
    newest_checkpoint,
    optimizer_state,
    read_manifest,
    read_meta,
    save_sharded,
    verify,
)
from lightning_par.checkpoint.ranks import Ranks
from lightning_par.checkpoint.writer import ShardWriter
from lightning_par.parallel.shards import full_tensor
from lightning_par.testing import run_ranks

WRITE = "lightning_par.checkpoint.writer.ShardWriter.write_data"


def content(net: nn.Module, **meta: Any) -> Any:
    return lambda: content_of(model_state(net), meta=meta)


def facts(step: int | None = None) -> Facts:
    return Facts(dist.get_rank() if dist.is_initialized() else 0, step)


class Gate:
    """Holds the writers of this process until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        original = ShardWriter.write_data

        def wait_and_write(writer: Any, *args: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(30)
            return original(writer, *args)

        self.patch = mock.patch(WRITE, wait_and_write)


# -- asynchronous saves ---------------------------------------------------------------------------------------------


def values_of_the_moment(path: str) -> None:
    net, (optimizer,) = build("fsdp", "adamw")
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    at_the_save = {name: full_tensor(value).clone() for name, value in model_state(net).items()}
    saver, gate = CheckpointSaver(), Gate()
    with gate.patch:
        made = lambda: content_of(model_state(net), [optimizer_state(net, optimizer)], meta={"step": 1})
        assert saver.save(path, made, facts(1), asynchronous=True)
        assert gate.reached.wait(30)
        assert saver.is_busy
        # Training goes on: parameters, moments and counters change in place.
        optimizer.step()
        gate.opened.set()
        saver.wait()
    assert not saver.is_busy
    assert saver.written >= saver.blocked > 0
    expected = [float(next(iter(optimizer.state.values()))["step"]) - 1]
    net2, (optimizer2,) = build("fsdp", "adamw")
    load_sharded(path, net2, [optimizer2])
    for name, value in model_state(net2).items():
        assert torch.equal(full_tensor(value), at_the_save[name]), name
    changed = [name for name, value in net.named_parameters() if not torch.equal(full_tensor(value), at_the_save[name])]
    assert len(changed) > 5
    assert [float(next(iter(optimizer2.state.values()))["step"])] == expected
    saver.close()


def test_an_asynchronous_save_holds_the_values_of_its_moment(tmp_path: Path) -> None:
    run_ranks(2, values_of_the_moment, str(tmp_path / "c"))
    assert not verify(tmp_path / "c", "checksum")
    assert read_manifest(tmp_path / "c").step == 1


def same_buffers(path: str) -> None:
    net, saver = nn.Linear(64, 64), CheckpointSaver()
    addresses = []
    for i in range(3):
        saver.save(f"{path}/{i}", content(net), facts(), asynchronous=True)
        addresses.append({index.fqn: copy.data_ptr() for index, copy in saver._buffers._buffers.items()})
    saver.close()
    assert addresses[0] == addresses[1] == addresses[2]
    # What all ranks hold alike is copied by the one that writes it.
    assert bool(addresses[0]) == (dist.get_rank() == 0)


def test_host_memory_is_taken_once_and_only_where_it_is_written(tmp_path: Path) -> None:
    run_ranks(2, same_buffers, str(tmp_path))


def plans_are_exchanged_once(path: str) -> list[int]:
    net, _ = build("fsdp", "adamw")
    saver, counts = CheckpointSaver(), []
    with mock.patch("torch.distributed.scatter_object_list", wraps=dist.scatter_object_list) as scattered:
        for i in range(3):
            saver.save(f"{path}/{i}", content(net), facts())
            counts.append(scattered.call_count)
        saver.save(f"{path}/other", content(nn.Linear(3, 3)), facts())
        counts.append(scattered.call_count)
    saver.close()
    return counts


def test_a_plan_is_made_anew_only_for_other_tensors(tmp_path: Path) -> None:
    assert run_ranks(2, plans_are_exchanged_once, str(tmp_path)) == [[1, 1, 1, 2]] * 2
    assert not [problem for i in (0, 1, 2, "other") for problem in verify(tmp_path / str(i), "checksum")]


def never_two(path: str, policy: str) -> tuple[bool, list[str]]:
    """Only rank 1 writes slowly; all ranks have to decide alike."""
    net, saver, gate = nn.Linear(2, 2), CheckpointSaver(), Gate()
    slow = dist.get_rank() == 1
    if not slow:
        gate.opened.set()
    with gate.patch:
        saver.save(f"{path}/a", content(net), facts(), asynchronous=True)
        assert gate.reached.wait(30)
        opener = threading.Timer(0.2, gate.opened.set)
        if policy == "wait":
            opener.start()
        begun = saver.save(f"{path}/b", content(net), facts(), asynchronous=True, when_busy=policy)  # type: ignore[arg-type]
        if policy == "wait":
            # The former one is committed before the next begins.
            assert newest_names(path)
        gate.opened.set()
        saver.close()
    return begun, newest_names(path)


def newest_names(path: str) -> list[str]:
    return sorted(os.path.basename(one.path) for one in candidates(path))


@pytest.mark.parametrize("policy", ["wait", "skip"])
def test_there_are_never_two_saves(tmp_path: Path, policy: str) -> None:
    for begun, names in run_ranks(2, never_two, str(tmp_path), policy):
        assert begun == (policy == "wait")
        assert "a" in names
    assert newest_names(str(tmp_path)) == (["a", "b"] if policy == "wait" else ["a"])


# -- failures -------------------------------------------------------------------------------------------------------


def failing_saves(path: str, asynchronous: bool) -> list[str]:
    net, saver = nn.Linear(2, 2), CheckpointSaver(max_failed_saves=3)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_par.checkpoint.saver").addHandler(handler)
    one = dist.get_rank() == 1
    for attempt in range(1, 7):
        # The third is good, so the count begins again.
        failing: Any = mock.patch(WRITE, side_effect=OSError(28, "No space left on device"))
        with failing if one and attempt != 3 else contextlib.nullcontext():
            last = attempt == 6
            expected: Any = pytest.raises(
                CheckpointError, match=r"3 saves in a row failed(.|\n)*rank 1: (.|\n)*No space"
            )
            with expected if last else contextlib.nullcontext():
                saver.save(f"{path}/{attempt}", content(net), facts(), asynchronous=asynchronous, may_fail=True)
                saver.join()
    saver.close()
    logging.getLogger("lightning_par.checkpoint.saver").removeHandler(handler)
    return [line for line in said if "not saved" in line]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_failed_saves_are_told_on_all_ranks_and_end_the_run_after_some(tmp_path: Path, asynchronous: bool) -> None:
    results = run_ranks(2, failing_saves, str(tmp_path), asynchronous)
    for rank, said in enumerate(results):
        assert len(said) == 5
        assert all(f"rank {rank}: a checkpoint was not saved" in line and "rank 1: " in line for line in said)
    assert newest_names(str(tmp_path)) == ["3"]
    assert os.listdir(tmp_path) == ["3"]


def test_a_save_that_a_person_asked_for_raises(tmp_path: Path) -> None:
    saver = CheckpointSaver()
    with mock.patch(WRITE, side_effect=OSError("full")), pytest.raises(CheckpointError, match="full"):
        saver.save(tmp_path / "a", content(nn.Linear(2, 2)), facts())
    saver.save(tmp_path / "a", content(nn.Linear(2, 2)), facts())
    assert not verify(tmp_path / "a")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_saves_work_again_when_the_disk_does(tmp_path: Path, asynchronous: bool) -> None:
    saver, net = CheckpointSaver(), nn.Linear(2, 2)

    def save_and_wait() -> None:
        saver.save(tmp_path / "a", content(net), facts(), asynchronous=asynchronous)
        saver.wait()

    for _ in range(5):
        with mock.patch(WRITE, side_effect=OSError("full")), pytest.raises(CheckpointError, match="full"):
            save_and_wait()
    save_and_wait()
    assert not verify(tmp_path / "a")


def test_waiting_tells_of_the_failure_once(tmp_path: Path) -> None:
    saver, net = CheckpointSaver(), nn.Linear(2, 2)
    with mock.patch(WRITE, side_effect=OSError("full")):
        saver.save(tmp_path / "a", content(net), facts(), asynchronous=True)
        with pytest.raises(CheckpointError, match="full"):
            saver.wait()
    assert saver.failed
    saver.wait()


def test_what_follows_a_commit_may_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("a hook")

    CheckpointSaver().save(tmp_path / "a", content(nn.Linear(2, 2)), facts(), committed=fail)
    assert not verify(tmp_path / "a")
    assert "is committed; what was to follow failed: a hook" in caplog.text


# -- removal --------------------------------------------------------------------------------------------------------


def test_a_removal_waits_for_the_commit_that_makes_it_superfluous(tmp_path: Path) -> None:
    saver, gate, net = CheckpointSaver(), Gate(), nn.Linear(2, 2)
    saver.save(tmp_path / "old", content(net), facts(1))
    with gate.patch:
        saver.save(tmp_path / "new", content(net), facts(2), asynchronous=True)
        assert gate.reached.wait(30)
        saver.remove(tmp_path / "old")
        assert newest_names(str(tmp_path)) == ["old"]
        gate.opened.set()
        saver.wait()
    assert newest_names(str(tmp_path)) == ["new"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_removal_is_forgotten_if_that_save_fails(tmp_path: Path, asynchronous: bool) -> None:
    saver, net = CheckpointSaver(), nn.Linear(2, 2)
    saver.save(tmp_path / "older", content(net), facts(0))
    saver.save(tmp_path / "old", content(net), facts(1))
    with mock.patch(WRITE, side_effect=OSError("full")):
        saver.save(tmp_path / "new", content(net), facts(2), asynchronous=asynchronous, may_fail=True)
        saver.remove(tmp_path / "old")
        saver.join()
    assert newest_names(str(tmp_path)) == ["old", "older"]


def test_the_only_whole_checkpoint_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver, net = CheckpointSaver(), nn.Linear(2, 2)
    saver.save(tmp_path / "a", content(net), facts(1))
    saver.save(tmp_path / "b", content(net), facts(2))
    (tmp_path / "b" / "meta.pt").unlink()
    saver.remove(tmp_path / "a")
    assert "is kept: it is the only whole checkpoint" in caplog.text
    saver.remove(tmp_path / "b")
    assert newest_names(str(tmp_path)) == ["a"]
    saver.save(tmp_path / ".temporary", content(net), facts(2))
    saver.remove(tmp_path / ".temporary")
    assert os.listdir(tmp_path) == ["a"]


# -- candidates -----------------------------------------------------------------------------------------------------


def test_the_newest_is_told_by_start_and_step_and_not_by_dates(tmp_path: Path) -> None:
    saver, net = CheckpointSaver(), nn.Linear(2, 2)
    for name, step, start in (("x", 9, 1), ("y", 3, 2), ("z", 6, 2)):
        saver.save(tmp_path / name, content(net), Facts(0, step, incarnation=start))
    os.utime(tmp_path / "z", (1, 1))
    assert [os.path.basename(one.path) for one in candidates(tmp_path)] == ["z", "y", "x"]


def falls_back(directory: str) -> tuple[Any, list[float]]:
    """The newest is broken for one rank only, and the one before ends in the middle of a file."""
    net = build("fsdp", "adamw")[0]
    for step in (1, 2, 3):
        for param in net.parameters():
            nn.init.constant_(param, step)
        save_sharded(f"{directory}/{step}", model=model_state(net), meta={"step": step})
    dist.barrier()
    if dist.get_rank() == 0:
        shard = f"{directory}/2/__1_0.distcp"
        with open(shard, "r+b") as file:
            file.truncate(os.path.getsize(shard) // 2)
    dist.barrier()

    def look(path: str, *args: Any, **kwargs: Any) -> list[str]:
        return ["not here"] if path.endswith("/3") and dist.get_rank() == 1 else verify(path, *args, **kwargs)

    with mock.patch("lightning_par.checkpoint.candidates.verify_files", look):
        # Sizes would tell; without them the read has to.
        meta = load_newest(directory, lambda path: load_sharded(path, net, verify="none"), verify="none")
    return meta, sorted({float(full_tensor(value).unique()) for value in net.parameters()})


def test_all_ranks_fall_back_to_the_same_checkpoint_as_a_whole(tmp_path: Path) -> None:
    assert run_ranks(2, falls_back, str(tmp_path)) == [({"step": 1}, [1.0])] * 2


def test_broken_checkpoints_are_no_fresh_start(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "nothing") is None
    save_sharded(tmp_path / "a", model=model_state(nn.Linear(2, 2)))
    (tmp_path / "a" / ".metadata").unlink()
    with pytest.raises(NoValidCheckpointError, match=r"none is whole(.|\n)*\.metadata is missing"):
        newest_checkpoint(tmp_path)
    assert (tmp_path / "a" / "meta.pt").exists()


# -- the directory of a run -----------------------------------------------------------------------------------------


def begin(path: Path, keep_last: int = 2, every: int | None = None, limit: int = 3) -> RunDirectory:
    directory = RunDirectory(path, Retention(keep_last, every))
    directory.begin(Ranks.of(None), limit)
    return directory


def commit(directory: RunDirectory, *steps: int) -> None:
    for step in steps:
        path = directory.path_of(step)
        CheckpointSaver().save(
            path,
            content(nn.Linear(2, 2), step=step),
            Facts(0, step, incarnation=directory.start),
            may_commit=directory.refuse_if_superseded,
            committed=lambda path=path: directory.committed(path),
        )


@pytest.mark.parametrize(
    ("keep_last", "every", "kept"), [(1, None, [6]), (2, None, [5, 6]), (3, None, [4, 5, 6]), (1, 2, [2, 4, 6])]
)
def test_retention(tmp_path: Path, keep_last: int, every: int | None, kept: list[int]) -> None:
    commit(begin(tmp_path, keep_last, every), *range(1, 7))
    assert newest_names(str(tmp_path)) == [f"step-{step:08d}" for step in kept]
    assert (tmp_path / "LATEST").read_text() == "step-00000006\n"


def test_retention_counts_whole_checkpoints_and_leaves_later_and_foreign_ones(tmp_path: Path) -> None:
    commit(begin(tmp_path, 9), 1, 2, 3, 8)
    (tmp_path / "step-00000003" / "meta.pt").unlink()
    save_sharded(tmp_path / "best.ckpt", model=model_state(nn.Linear(2, 2)))
    commit(begin(tmp_path, 2), 4)
    assert newest_names(str(tmp_path)) == [
        "best.ckpt",
        "step-00000002",
        "step-00000003",
        "step-00000004",
        "step-00000008",
    ]
    # This start has gone back behind step 8, and the next one goes on from it.
    assert newest_checkpoint(tmp_path) == str(tmp_path / "step-00000004")


def test_a_later_start_takes_over(tmp_path: Path) -> None:
    first = begin(tmp_path)
    commit(first, 1)
    second = begin(tmp_path)
    with pytest.raises(CheckpointError, match=rf"start 2 \(process {os.getpid()} on .*\) has taken over"):
        commit(first, 2)
    assert newest_names(str(tmp_path)) == ["step-00000001"]
    commit(second, 2)
    assert read_meta(tmp_path / "step-00000002") == {"step": 2}
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".attempt")]


def test_a_start_removes_what_others_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".attempt-step-00000004.elsewhere.1.00000000").mkdir()
    (tmp_path / ".trash-00000000").mkdir()
    begin(tmp_path)
    assert os.listdir(tmp_path) == [".starts"]
    assert "2 saves that did not come to an end" in caplog.text
    assert "the run starts afresh" in caplog.text


def test_starts_without_progress_are_refused_with_their_story(tmp_path: Path) -> None:
    begin(tmp_path).end("ValueError: bad batch", 7)
    begin(tmp_path)
    begin(tmp_path).end("interrupted", 7)
    for _ in range(3):
        begin(tmp_path)
    with pytest.raises(NoProgressError, match=r"3 starts .* before the first checkpoint(.|\n)*without a word"):
        begin(tmp_path)
    commit(begin(tmp_path, limit=4), 5)
    for end in ("OSError: a", "OSError: b", None):
        directory = begin(tmp_path)
        if end:
            directory.end(end, 7)
    with pytest.raises(NoProgressError, match=r"checkpoint after step 5(.|\n)*ended at step 7 with OSError: b"):
        begin(tmp_path)
    begin(tmp_path, limit=4).end("finished", 9)
    begin(tmp_path)


def test_a_directory_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot use the directory of checkpoints(.|\n)*NotADirectory"):
        begin(tmp_path / "file" / "run")


# -- the interval ---------------------------------------------------------------------------------------------------


def test_the_best_interval_is_youngs_where_saves_are_short() -> None:
    assert best_interval(6, 8 * 3600) == pytest.approx((2 * 6 * 8 * 3600) ** 0.5, rel=0.02)
    assert best_interval(150, 8 * 3600) / 60 == pytest.approx(49, abs=2)
    assert best_interval(10, 4) == 4
    with pytest.raises(ValueError, match="above 0"):
        best_interval(0, 1)
