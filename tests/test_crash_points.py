"""Runs killed at every point of a save and of a load, on every rank that comes there: none loses what was committed.

Each case ends with a run that goes on from what is there, and must leave bit for bit what an uninterrupted run leaves.
"""

from __future__ import annotations

import ast
import functools
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from fault_runs import Job, Points, train
from fault_stories import Story, died, succeeded
from faults import launch

import lightning_par.checkpoint
from lightning_par.checkpoint.crash_points import EVERY_RANK, NAMES

STEPS = 12
EVERY = 3
SAVES = STEPS // EVERY
KEEP = 2
MODES = ("sync", "async")
# Of four ranks whose writers are threads it is enough to lose one that is no neighbour of the first in each collective.
FAR_FROM_THE_FIRST = [("before_attempt", 2), ("in_shard", 2), ("shard_written", 2), ("outcome_gathered", 2)]
# From this point on the new checkpoint is the one to resume from.
COMMITTED = NAMES[NAMES.index("renamed") :]


def job_of(ranks: int, mode: str) -> Job:
    return Job(ranks=ranks, steps=STEPS, every=EVERY, saver=(("keep_last", KEEP), ("asynchronous", mode == "async")))


def places(ranks: int) -> list[tuple[str, int]]:
    """Each point with each rank that comes there."""
    return [(name, rank) for name in NAMES for rank in range(ranks if name in EVERY_RANK else 1)]


def matrix() -> list[object]:
    """Every place, in runs of two ranks that save while training waits and while it goes on."""
    quick = {
        (2, "sync", "in_shard", 1),
        (2, "async", "shard_written", 1),
        (2, "async", "latest_written", 0),
        (2, "sync", "in_load", 1),
    }
    cases = [(2, mode, *place) for mode in MODES for place in places(2)]
    # There is a removal once in a run.
    cases.append((4, "sync", "trash_renamed", 0))
    assert quick <= set(cases)
    slow = {True: (), False: (pytest.mark.slow,)}
    return [
        pytest.param(*case, id=f"{case[2]}-rank{case[3]}of{case[0]}-{case[1]}", marks=slow[case in quick])
        for case in cases
    ]


def chains() -> list[object]:
    """Every place in runs of four ranks, a few in each: a start is killed where the one before has led it."""
    alone = ("in_load", "trash_renamed")
    saves = [place for place in places(4) if place[0] not in alone]
    loads = [("in_load", rank) for rank in range(4)]
    # More loads in a row would be starts without progress.
    found = [("sync", saves[i : i + 3]) for i in range(0, len(saves), 3)]
    found += [("sync", [("committed", 0), *loads[i : i + 2]]) for i in (0, 2)]
    found += [("async", FAR_FROM_THE_FIRST[i : i + 2]) for i in (0, 2)]
    assert {place for _, chain in found for place in chain} == set(places(4)) - {("trash_renamed", 0)}
    name = lambda chain: "+".join(f"{point}-rank{rank}" for point, rank in chain)
    return [pytest.param(mode, chain, id=f"{name(chain)}-{mode}") for mode, chain in found]


@functools.cache
def reached(job: Job) -> Counter[tuple[str, int]]:
    """How often each rank comes to each point, in a run and in a start after its end."""
    with tempfile.TemporaryDirectory() as folder:
        points = Points(Path(folder))
        for i in range(2):
            succeeded(launch(job.ranks, train, job, Path(folder), i, None, (points,), logs=Path(folder, f"logs-{i}")))
        return points.reached(job.ranks)


def called_in_the_source() -> set[str]:
    """The names with which the package calls `crash_point`, from its source."""
    names = set()
    for file in Path(lightning_par.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "crash_point":
                names |= {n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant) and n.value in NAMES}
                assert any(isinstance(n, ast.Constant) for n in ast.walk(node.args[0])), f"{file}: {ast.dump(node)}"
    return names


def test_the_matrix_has_every_point() -> None:
    assert called_in_the_source() == set(NAMES)
    assert {case.values[2] for case in matrix()} == set(NAMES)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_come_to_the_points_that_the_matrix_has(ranks: int) -> None:
    assert set(reached(job_of(ranks, "sync"))) == set(places(ranks))


@pytest.mark.parametrize(("ranks", "mode", "point", "rank"), matrix())
def test_killed(tmp_path: Path, ranks: int, mode: str, point: str, rank: int) -> None:
    job = job_of(ranks, mode)
    story = Story(tmp_path, job)
    times = reached(job)[point, rank]
    if point == "in_load":
        died(story.run(crash="committed@0@2:kill"), 0)
        died(story.run(crash=f"in_load@{rank}@{1}:kill"), rank)
        resumed = 2 * EVERY
    elif point == "trash_renamed":
        # There is nothing to remove before.
        died(story.run(crash=f"{point}@{rank}@1:kill"), rank)
        resumed = (KEEP + 1) * EVERY
    else:
        # In the middle of what happens in the second save.
        assert times % SAVES == 0
        each = times // SAVES
        died(story.run(crash=f"{point}@{rank}@{each + (each + 1) // 2}:kill"), rank)
        resumed = 2 * EVERY if point in COMMITTED else EVERY
    story.finish()
    # When all have told the first rank that they are done, it commits alone, or hears first that one is gone.
    either = point == "outcome_gathered" and rank != 0
    assert story.starts[-1] in ((EVERY, 2 * EVERY) if either else (resumed,))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "chain"), chains())
def test_killed_again_and_again(tmp_path: Path, mode: str, chain: list[tuple[str, int]]) -> None:
    job = job_of(4, mode)
    story = Story(tmp_path, job)
    # Where the next start may begin.
    at = {0}
    for point, rank in chain:
        first = not story.starts
        each = reached(job)[point, rank] // SAVES
        nth = 1 if point == "in_load" else first * each + (each + 1) // 2
        died(story.run(crash=f"{point}@{rank}@{nth}:kill"), rank)
        assert point == "in_load" or story.starts[-1] in at
        at = set() if point != "in_load" else at
        begun = story.starts[-1] + EVERY * (1 + first)
        if point != "in_load":
            at |= {begun} if point in COMMITTED else {begun - EVERY}
        if point == "outcome_gathered" and rank != 0:
            at.add(begun)
    starts = len(story.starts)
    story.finish()
    # A start at the last step has nothing to train.
    assert story.starts[starts:] in ([[step] for step in at] if STEPS not in at else [[], *([step] for step in at)])
