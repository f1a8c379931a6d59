"""Saves that fail while nobody is killed: all ranks hear of it, what was there stays, and the next save succeeds.

The names of the cases are rows of the fault matrix.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from fault_runs import digest, watch_points
from fault_saves import fill, save
from fault_stories import checkpoints, valid_steps
from probe import long_run, some

from checkpoint_runs import build, train, view
from lightning_par.checkpoint import CheckpointError, SupersededError, crash_points, load_sharded, read_manifest, verify
from lightning_par.checkpoint.crash_points import EVERY_RANK, NAMES
from lightning_par.checkpoint.ranks import Ranks
from lightning_par.checkpoint.run_directory import Retention, RunDirectory
from lightning_par.checkpoint.saver import CheckpointSaver
from lightning_par.checkpoint.storage import LocalStorage
from lightning_par.testing import run_ranks

MODES = ("sync", "async")


# -- disks that fail --------------------------------------------------------------------------------------------------


@contextmanager
def full_at_once(rank: int) -> Iterator[None]:
    """The shard of this rank is written to /dev/full, where every write fails as on a full disk."""
    create = LocalStorage.create

    def linked(self: LocalStorage, path: str) -> Any:
        if path.endswith(f"__{rank}_0.distcp"):
            os.symlink("/dev/full", path)
        return create(self, path)

    with mock.patch.object(LocalStorage, "create", linked):
        yield


@contextmanager
def full_in_the_middle(rank: int) -> Iterator[None]:
    """No file of this process may have more than 3 kB: of a shard the kernel writes the beginning only."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def failing_at(rank: int, point: str) -> Iterator[None]:
    """An error of the disk at a crash point."""
    crash_points._reached.clear()
    with mock.patch.dict(os.environ, {crash_points.VARIABLE: f"{point}@{rank}@1:raise"}):
        yield


@contextmanager
def nameless(rank: int) -> Iterator[None]:
    """Directories cannot be renamed."""

    def publish(self: LocalStorage, attempt: str, target: str) -> None:
        raise PermissionError(13, "Permission denied", attempt)

    with mock.patch.object(LocalStorage, "publish", publish):
        yield


@contextmanager
def messages() -> Iterator[list[str]]:
    """What the package logs meanwhile."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_par")
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)


DISKS: dict[str, Callable[[int], Any]] = {
    "full-at-once": full_at_once,
    "full-in-the-middle": full_in_the_middle,
    "nameless": nameless,
}


def three_saves(root: str, disk: str, failing: int, mode: str, point: str = "") -> dict[str, Any]:
    """Save at steps 1, 2 and 3, the second time with a disk that fails one rank; what is told and what is there."""
    net, optimizers = build("shard", "adamw")
    saver, directory = CheckpointSaver(), RunDirectory(root, Retention(keep_last=2))
    directory.begin(Ranks.of(None), 3)
    found: dict[str, Any] = {"saved": {}}
    for step in (1, 2, 3):
        train(net, optimizers, 1, seed=step)
        found["saved"][step] = digest(view(net, optimizers))
        if step != 2:
            save(saver, directory, step, net, optimizers, asynchronous=mode == "async", may_fail=True)
            saver.join()
            # The first rank tidies up after it has told the others of the commit.
            dist.barrier()
            continue
        fault = DISKS[disk](failing) if disk else failing_at(failing, point)
        with messages() as told, fault if dist.get_rank() == failing else nothing():
            save(saver, directory, step, net, optimizers, asynchronous=mode == "async", may_fail=True)
            saver.join()
        dist.barrier()
        found["told"] = told
        found["after the second"] = sorted(os.listdir(root))
        dist.barrier()
    found["after the third"] = sorted(os.listdir(root))
    return found


@contextmanager
def nothing() -> Iterator[None]:
    yield


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("row", "disk", "failing", "cause"),
    [
        ("C1", "full-at-once", 1, "No space left on device"),
        long_run("C1", "full-at-once", 0, "No space left on device"),
        long_run("C3", "full-in-the-middle", 1, "File too large"),
        long_run("C3", "full-in-the-middle", 0, "File too large"),
        long_run("C6", "nameless", 0, "Permission denied"),
    ],
)
def test_a_disk_that_fails_one_rank(tmp_path: Path, row: str, disk: str, failing: int, cause: str, mode: str) -> None:
    for rank, found in enumerate(run_ranks(2, three_saves, str(tmp_path), disk, failing, mode)):
        assert len(found["told"]) == 1
        assert f"rank {failing}: " in found["told"][0].partition("in a row")[2], f"rank {rank}: {found['told']}"
        assert cause in found["told"][0]
        assert found["after the second"] == [".starts", "LATEST", "step-00000001"]
        assert found["after the third"] == [".starts", "LATEST", "step-00000001", "step-00000003"]
    assert valid_steps(tmp_path) == [1, 3]


# Where nothing is done that can fail: between two questions of the ranks, and when everything is over.
NOTHING_DONE = {"before_attempt", "attempt_made", "outcome_gathered", "committed", "in_load"}
SAVING = [name for name in NAMES if name not in NOTHING_DONE]
PLACES = [(name, rank) for name in SAVING for rank in range(2 if name in EVERY_RANK else 1)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("point", "rank"), [(name, rank) if name == "manifest_temporary" else long_run(name, rank) for name, rank in PLACES]
)
def test_C5_an_error_anywhere_ends_one_save_only(tmp_path: Path, point: str, rank: int, mode: str) -> None:
    """Before the commit the save has failed, for all; after it there is a checkpoint whatever else goes wrong."""
    before = NAMES.index(point) < NAMES.index("renamed")
    for found in run_ranks(2, three_saves, str(tmp_path), "", rank, mode, point):
        if before:
            assert any("asked for by" in told for told in found["told"]), f"the cause is not told: {found['told']}"
            assert found["after the second"] == [".starts", "LATEST", "step-00000001"]
        assert not [name for name in found["after the third"] if name.startswith(".attempt-")]
    assert valid_steps(tmp_path) == ([1, 3] if before else [2, 3])


def failing_saves(root: str, mode: str) -> tuple[int, str]:
    """Train with a disk that is full for rank 1 from step 2 on; the step at which this rank gives up, and why."""
    net, optimizers = build("shard", "adamw")
    saver, directory = CheckpointSaver(max_failed_saves=3), RunDirectory(root, Retention())
    directory.begin(Ranks.of(None), 3)
    for step in range(1, 10):
        train(net, optimizers, 1, seed=step)
        with full_at_once(1) if step > 1 and dist.get_rank() == 1 else nothing():
            try:
                save(saver, directory, step, net, optimizers, asynchronous=mode == "async", may_fail=True)
                saver.join()
            except CheckpointError as error:
                return step, str(error)
    return 0, ""


@pytest.mark.parametrize("mode", MODES)
def test_C8_too_many_failed_saves_end_the_run_on_all_ranks(tmp_path: Path, mode: str) -> None:
    first, second = run_ranks(2, failing_saves, str(tmp_path), mode)
    assert first == second
    assert first[0] == 4
    assert "3 saves in a row failed" in first[1]
    assert "rank 1: OSError: [Errno 28] No space left on device" in first[1]
    assert valid_steps(tmp_path) == [1]


def one_save_that_must_not_fail(root: str) -> str:
    net, optimizers = build("shard", "adamw")
    saver, directory = CheckpointSaver(), RunDirectory(root, Retention())
    directory.begin(Ranks.of(None), 3)
    with full_at_once(1) if dist.get_rank() == 1 else nothing(), pytest.raises(CheckpointError) as raised:
        save(saver, directory, 1, net, optimizers)
    return str(raised.value)


def test_C1_a_save_that_must_not_fail_raises_on_all_ranks(tmp_path: Path) -> None:
    for text in run_ranks(2, one_save_that_must_not_fail, str(tmp_path)):
        assert "rank 1: OSError: [Errno 28] No space left on device" in text
    assert os.listdir(tmp_path) == [".starts"]


# -- writers that take their time -------------------------------------------------------------------------------------


class Gate:
    """Holds the writer of this rank at a crash point until it is opened; only inside the context."""

    def __init__(self, point: str, *ranks: int) -> None:
        self.point = point
        self.ranks = ranks
        self.opened = threading.Event()
        self.reached = threading.Event()

    def __enter__(self) -> Gate:
        self.watching = watch_points(self.hold) if dist.get_rank() in self.ranks else ExitStack()
        return self

    def __exit__(self, *_: Any) -> None:
        self.watching.close()

    def hold(self, point: str, rank: int) -> None:
        if point == self.point:
            self.reached.set()
            assert self.opened.wait(30.0)


def slow_writer(root: str, when_busy: str) -> dict[str, Any]:
    """Three saves, in the first of which the writer of rank 1 comes to an end only after the second was asked for."""
    net, optimizers = build("shard", "adamw")
    saver, directory = CheckpointSaver(), RunDirectory(root, Retention(keep_last=5))
    directory.begin(Ranks.of(None), 3)
    begun: list[bool] = []
    saved: list[str] = []

    def one_step(step: int) -> None:
        train(net, optimizers, 1, seed=step)
        how = {"asynchronous": True, "when_busy": when_busy}
        begun.append(save(saver, directory, step, net, optimizers, **how))
        saved.append(digest(view(net, optimizers)))

    with Gate("shard_written", 1) as gate:
        one_step(1)
        join = saver.join
        with mock.patch.object(saver, "join", side_effect=lambda: (gate.opened.set(), join())):
            one_step(2)
        gate.opened.set()
        saver.join()
        one_step(3)
        train(net, optimizers, 1, seed=4)
        saver.join()
    return {"begun": begun, "saved": saved}


@pytest.mark.parametrize("when_busy", ["skip", "wait"])
def test_C9_one_slow_writer_counts_for_all_ranks(tmp_path: Path, when_busy: str) -> None:
    found = run_ranks(2, slow_writer, str(tmp_path), when_busy)
    assert found[0] == found[1]
    assert found[0]["begun"] == [True, when_busy == "wait", True]
    steps = [step for step, begun in zip((1, 2, 3), found[0]["begun"], strict=True) if begun]
    assert valid_steps(tmp_path) == steps
    # Training went on meanwhile: what was saved is what was there when the save was asked for.
    for step in steps:
        assert of_step(tmp_path, step) == found[0]["saved"][step - 1]


def of_step(root: Path, step: int) -> str:
    """What a checkpoint holds."""
    (only,) = run_ranks(1, load_alone, str(root / f"step-{step:08d}"))
    return only


def load_alone(path: str) -> str:
    net, optimizers = build("plain", "adamw", seed=5)
    load_sharded(path, net, optimizers, random_state=False)
    return digest(view(net, optimizers))


def changed_while_written(root: str) -> str:
    """Ask for a save, and train before any of it is written."""
    net, optimizers = build("shard", "adamw")
    saver, directory = CheckpointSaver(), RunDirectory(root, Retention())
    directory.begin(Ranks.of(None), 3)
    train(net, optimizers, 2)
    with Gate("before_attempt", 0, 1) as gate:
        save(saver, directory, 2, net, optimizers, asynchronous=True)
        saved = digest(view(net, optimizers))
        train(net, optimizers, 3)
        gate.opened.set()
        saver.join()
    return saved


def test_C10_what_is_saved_is_what_was_there_when_the_save_was_asked_for(tmp_path: Path) -> None:
    first, second = run_ranks(2, changed_while_written, str(tmp_path))
    assert first == second == of_step(tmp_path, 2)


def superseded(root: str, point: str, tidy: bool) -> list[str]:
    """A start of a run is held in its save, another start begins in the same directory, then the first goes on."""
    net, optimizers = build("shard", "adamw")
    saver, directory = CheckpointSaver(), RunDirectory(root, Retention())
    directory.begin(Ranks.of(None), 9)
    train(net, optimizers, 1)
    save(saver, directory, 1, net, optimizers)
    train(net, optimizers, 1)
    tidying = "lightning_par.checkpoint.run_directory.remove_abandoned"
    with messages() as told, Gate(point, 0) as gate:
        save(saver, directory, 2, net, optimizers, asynchronous=True, may_fail=True)
        if dist.get_rank() == 0:
            assert gate.reached.wait(30.0)
        with nothing() if tidy else mock.patch(tidying, list_nothing):
            RunDirectory(root, Retention()).begin(Ranks.of(None), 9)
        gate.opened.set()
        # To be taken over does not pass, where it was seen before what the older start wrote was gone.
        with contextlib.suppress(SupersededError):
            saver.join()
    return told


def list_nothing(*args: Any, **kwargs: Any) -> list[str]:
    return []


@pytest.mark.parametrize(
    ("point", "tidy"),
    [
        ("manifest_in_place", False),
        long_run("manifest_in_place", True),
        long_run("shard_written", True),
        long_run("shard_written", False),
        long_run("before_attempt", True),
    ],
)
def test_C12_an_older_start_commits_nothing_any_more(tmp_path: Path, point: str, tidy: bool) -> None:
    """Whether or not the newer one has removed what the older had begun to write."""
    for told in run_ranks(2, superseded, str(tmp_path), point, tidy):
        (failure,) = [one for one in told if "was not saved" in one]
        assert tidy or "start 2" in failure
        assert tidy or "has taken over" in failure
    assert valid_steps(tmp_path) == [1]
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".attempt-")]


# -- what is there already --------------------------------------------------------------------------------------------


def one_save(root: str, step: int = 2) -> str:
    net, optimizers = build("shard", "adamw")
    saver, directory = CheckpointSaver(), RunDirectory(root, Retention(keep_last=2))
    try:
        directory.begin(Ranks.of(None), 9)
        train(net, optimizers, 1)
        save(saver, directory, step, net, optimizers)
    except CheckpointError as error:
        return str(error)
    dist.barrier()
    return "saved"


def file_there(path: Path) -> None:
    path.write_text("a file")


def half_a_checkpoint(path: Path) -> None:
    path.mkdir()
    (path / ".metadata").write_bytes(b"")


def other_things(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")


@pytest.mark.parametrize("there", [half_a_checkpoint, long_run(file_there)])
def test_C6_what_is_no_checkpoint_makes_way(tmp_path: Path, there: Callable[[Path], None]) -> None:
    there(tmp_path / "step-00000002")
    assert run_ranks(2, one_save, str(tmp_path)) == ["saved"] * 2
    assert valid_steps(tmp_path) == [2]


def test_C6_other_things_stay(tmp_path: Path) -> None:
    other_things(tmp_path / "step-00000002")
    for text in run_ranks(2, one_save, str(tmp_path)):
        assert "holds other things than a checkpoint (thesis.tex" in text
    assert (tmp_path / "step-00000002" / "thesis.tex").read_text() == "years of work"
    assert run_ranks(2, one_save, str(tmp_path), 3) == ["saved"] * 2


@pytest.mark.parametrize("where", ["root", "starts"])
def test_C7_a_directory_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path, where: str) -> None:
    """We may be root, to whom no directory is read-only: a file is in its place."""
    root = tmp_path / "root"
    if where == "starts":
        root.mkdir()
    (root if where == "root" else root / ".starts").write_text("a file")
    for text in run_ranks(2, one_save, str(root)):
        assert f"cannot use the directory of checkpoints {root}" in text
        assert "rank 0: " in text


def test_C13_nothing_of_an_older_run_gets_into_a_checkpoint(tmp_path: Path) -> None:
    """It has left attempts with files of more ranks."""
    run_ranks(4, fill, str(tmp_path), (1,))
    for name in (".attempt-step-00000002.00000000.1.aaaaaaaa", ".attempt-step-00000001.00000000.1.aaaaaaaa"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    assert run_ranks(2, one_save, str(tmp_path)) == ["saved"] * 2
    assert valid_steps(tmp_path) == [1, 2]
    new = tmp_path / "step-00000002"
    assert read_manifest(new).world_size == 2
    there = {str(path.relative_to(new)) for path in new.rglob("*") if path.is_file()}
    assert there == {*read_manifest(new).files, "MANIFEST.json"}
    assert len([name for name in there if name.endswith(".distcp")]) == 2
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".attempt-")]


def test_C18_only_whole_checkpoints_count_for_what_is_kept(tmp_path: Path) -> None:
    run_ranks(2, fill, str(tmp_path), (1, 2))
    for step in (3, 4):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / f"step-{step:08d}")
        (tmp_path / f"step-{step:08d}" / "MANIFEST.json").unlink()
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000005")
    (tmp_path / "step-00000005" / "__0_0.distcp").unlink()
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".trash-00000000")
    assert run_ranks(2, one_save, str(tmp_path), 6) == ["saved"] * 2
    names = [path.name for path in checkpoints(tmp_path)]
    assert names == [f"step-{step:08d}" for step in (2, 3, 4, 5, 6)]
    assert [name for name in names if not verify(tmp_path / name)] == ["step-00000002", "step-00000006"]
    assert not (tmp_path / ".trash-00000000").exists()


def kept(root: str, keep_last: int, mode: str) -> list[int]:
    """How many whole checkpoints there are at each crash point of five saves."""
    net, optimizers = build("shard", "adamw")
    saver, directory = CheckpointSaver(), RunDirectory(root, Retention(keep_last=keep_last))
    directory.begin(Ranks.of(None), 3)
    counts: list[int] = []

    def look(point: str, rank: int) -> None:
        # Nothing is renamed between the parts of a shard, of which there are many.
        if point != "in_shard":
            counts.append(len(valid_steps(Path(root))))

    with watch_points(look) if dist.get_rank() == 0 else nothing():
        for step in range(1, 6):
            train(net, optimizers, 1, seed=step)
            save(saver, directory, step, net, optimizers, asynchronous=mode == "async")
            saver.join()
    return counts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keep_last", some([1, 2, 3], 1))
def test_C17_there_is_always_a_checkpoint_and_never_many(tmp_path: Path, keep_last: int, mode: str) -> None:
    counts, _ = run_ranks(2, kept, str(tmp_path), keep_last, mode)
    first = counts.index(1)
    assert set(counts[:first]) == {0}
    assert set(counts[first:]) <= set(range(1, keep_last + 2))
    assert valid_steps(tmp_path) == [3, 4, 5][-keep_last:]
