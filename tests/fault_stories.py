"""Runs of `fault_runs` in one directory, one after the other, and what must be true of what they leave behind."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from fault_runs import Job, train
from faults import Exit, launch

from lightning_par.checkpoint import read_manifest, verify
from lightning_par.checkpoint.crash_points import VARIABLE


class Story:
    """A job in a directory, run again and again; after each run the invariants of the directory are asserted.

    I1: what has the name of a checkpoint is complete. I2: once there was one, there is one. I3: all ranks resume at the
    same step. I4: that step never decreases.
    """

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder = folder
        self.job = job
        self.runs = 0
        self.starts: list[int] = []
        self.damaged: set[str] = set()
        """The names of checkpoints that the test has damaged."""
        self._valid: list[int] = []

    @property
    def root(self) -> Path:
        """Where the checkpoints are."""
        return self.folder / "root"

    def run(
        self,
        *callbacks: pl.Callback,
        crash: str = "",
        ckpt_path: Path | None = None,
        goes_back: bool = False,
        **options: Any,
    ) -> list[Exit]:
        """Start the ranks once, wait until they have ended, and return how.

        Args:
            callbacks: More callbacks, such as faults.
            crash: A crash point and what happens there, as in `lightning_par.checkpoint.crash_points`.
            ckpt_path: The checkpoint from which the first start begins.
            goes_back: Whether this start may begin at an earlier step than the one before it.
            options: Of `faults.launch`.
        """
        logs = self.folder / f"logs-{self.runs}"
        options.setdefault("environment", {VARIABLE: crash})
        exits = launch(
            self.job.ranks, train, self.job, self.folder, self.runs, ckpt_path, callbacks, logs=logs, **options
        )
        self.runs += 1
        self.check(goes_back)
        return exits

    def check(self, goes_back: bool = False) -> None:
        """Assert the invariants, looking at nothing but the directory."""
        complete = valid_steps(self.root, self.damaged)
        assert complete or not self._valid, f"all checkpoints are gone, there were {self._valid}"
        self._valid = complete
        starts = [read_record(self.folder, rank, "start").get(self.runs - 1) for rank in range(self.job.ranks)]
        begun = {start for start in starts if start is not None}
        assert len(begun) <= 1, f"the ranks resumed at different steps: {starts}"
        for start in begun:
            assert goes_back or not self.starts or start >= self.starts[-1], f"resumed at {start} after {self.starts}"
            self.starts.append(start)

    def finish(self, *callbacks: pl.Callback, **options: Any) -> None:
        """Run once more, to the end, and assert that it leaves what an uninterrupted run leaves."""
        starts = len(self.starts)
        succeeded(self.run(*callbacks, **options))
        left, expected = outcome(self.folder, self.job.ranks), reference(self.job)
        if len(self.starts) == starts:
            left, expected = of_what_was_loaded(left), of_what_was_loaded(expected)
        assert left == expected


def succeeded(exits: list[Exit]) -> None:
    """Assert that each rank came to its end."""
    failed = {rank: e for rank, e in enumerate(exits) if e.code != 0}
    assert not failed, f"{failed}\n" + "\n".join(e.log[-3000:] for e in failed.values())


def died(exits: list[Exit], *ranks: int) -> None:
    """Assert that these ranks were killed by the fault, and that the others noticed and ended with an error."""
    for rank, e in enumerate(exits):
        assert not e.left, f"rank {rank} did not notice that rank {ranks} had died:\n{e.log[-3000:]}"
        assert e.killed == (rank in ranks), f"rank {rank}: {e}\n{e.log[-3000:]}"
        assert e.code != 0, f"rank {rank} ended as if nothing had happened"


def valid_steps(root: Path, damaged: Collection[str] = ()) -> list[int]:
    """The steps of the checkpoints in a directory, each of which must be complete but for those that are damaged."""
    steps = []
    for path in checkpoints(root):
        problems = verify(path, "checksum")
        assert not problems or path.name in damaged, f"{path.name} is no whole checkpoint: {problems}"
        steps += [] if problems else [read_manifest(path).step]
    return sorted(steps)


def checkpoints(root: Path) -> list[Path]:
    """What has the name of a checkpoint, the oldest first."""
    return sorted(root.glob("step-*")) if root.is_dir() else []


def states(folder: Path, incarnation: int) -> dict[int, dict[str, str]]:
    """The states that were recorded in a start, by step."""
    entries = _entries(folder, 0)
    return {e["at"]: e["digests"] for e in entries if "at" in e and e["incarnation"] == incarnation}


def read_record(folder: Path, rank: int, kind: str) -> dict[int, Any]:
    """The last entry of a kind that a rank has written, by incarnation."""
    entries = _entries(folder, rank)
    return {entry["incarnation"]: entry[kind] for entry in entries if kind in entry}


def _entries(folder: Path, rank: int) -> list[dict[str, Any]]:
    file = folder / f"record-{rank}"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def outcome(folder: Path, ranks: int) -> dict[str, Any]:
    """What the training was, of all incarnations what counts: the steps by rank, and the state at the end."""
    steps: dict[int, dict[int, list[Any]]] = {}
    ends = {}
    for rank in range(ranks):
        seen: dict[int, list[Any]] = {}
        for entry in _entries(folder, rank):
            if "start" in entry:
                seen = {step: batches for step, batches in seen.items() if step <= entry["start"]}
            elif "end" in entry:
                ends[rank] = entry["end"]
            elif "step" in entry:
                seen.setdefault(entry["step"], []).append([entry["samples"], entry["loss"], entry["lr"]])
        for step, batches in seen.items():
            steps.setdefault(step, {})[rank] = batches
    return {"steps": dict(sorted(steps.items())), "ends": ends}


def of_what_was_loaded(outcome: dict[str, Any]) -> dict[str, Any]:
    """An outcome but for what only training sets: a start that finds the last checkpoint has nothing to train.

    Generators are taken up where training goes on, and an epoch is counted when its loop ends.
    """
    ends = {
        rank: {k: v for k, v in end.items() if k not in ("random", "epoch")} for rank, end in outcome["ends"].items()
    }
    return outcome | {"ends": ends}


@functools.cache
def reference(job: Job) -> dict[str, Any]:
    """What the job leaves when nothing happens to it."""
    with tempfile.TemporaryDirectory() as folder:
        succeeded(launch(job.ranks, train, job, Path(folder), 0, None, (), logs=Path(folder, "logs")))
        return outcome(Path(folder), job.ranks)
