"""The directory of the checkpoints of one run: their names, who may commit there, what is kept, how often it restarted.

- ``step-00001200/``: a committed checkpoint.
- ``LATEST``: the name of the newest, for people and scripts; no load relies on it.
- ``.starts/00000003.json``: one file for each start of a run here, with the step that it went on from and how it ended.
  The newest start is the only one that may commit.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_par.checkpoint.candidates import SUPERSEDED, candidates, whole_checkpoints
from lightning_par.checkpoint.commit import remove_abandoned
from lightning_par.checkpoint.crash_points import crash_point
from lightning_par.checkpoint.errors import NoProgressError, SupersededError
from lightning_par.checkpoint.ranks import Ranks
from lightning_par.checkpoint.storage import StrPath, storage_of

_log = logging.getLogger(__name__)

LATEST = "LATEST"
_STARTS = ".starts"
_CLEAN = ("finished", "interrupted", "preempted", "refused")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay.

    Attributes:
        keep_last: How many of the newest.
        keep_every_n_steps: Those of steps that this divides stay too.
    """

    keep_last: int = 2
    keep_every_n_steps: int | None = None

    def keeps(self, step: int) -> bool:
        return self.keep_every_n_steps is not None and step % self.keep_every_n_steps == 0


class RunDirectory:
    """The checkpoints of one run, started any number of times; one start at a time may save.

    Args:
        path: The directory, or a URL for fsspec.
        retention: What is kept.
    """

    def __init__(self, path: StrPath, retention: Retention) -> None:
        self._storage, self.path = storage_of(path)
        self._retention = retention
        self.start = 0
        """The number of this start of the run, from 1."""

    def begin(self, ranks: Ranks, max_no_progress: int | None) -> int | None:
        """Become the run that saves here; collective.

        Args:
            ranks: All of them.
            max_no_progress: How many starts may end without a new checkpoint, one after the other; None for any.

        Returns:
            The step of the newest checkpoint that is here.

        Raises:
            CheckpointError: If the directory cannot be written.
            NoProgressError: If that many starts have ended so; the message tells their story.
        """
        failure = f"cannot use the directory of checkpoints {self.path}"
        newest = ranks.together(failure, lambda: self._begin(max_no_progress) if ranks.rank == 0 else None)
        self.start, newest = ranks.broadcast((self.start, newest))
        return newest

    def end(self, how: str, step: int) -> None:
        """Note how this start ended; on the first rank.

        Args:
            how: ``"finished"``, ``"interrupted"`` (by a person), ``"preempted"``, ``"refused"`` (a mistake that a
                person mends), or the error.
            step: The number of optimizer steps taken.
        """
        file = self._start_file(self.start)
        self._storage.put(file, json.dumps(self._read_start(self.start) | {"end": how, "step": step}).encode())

    def path_of(self, step: int) -> str:
        """The checkpoint of a step."""
        return self._storage.join(self.path, f"step-{step:08d}")

    def refuse_if_superseded(self) -> None:
        """Raise if another run has started here since; on the first rank, before each commit.

        Raises:
            SupersededError: If so.
        """
        newest = max(self._starts(), default=self.start)
        if newest > self.start:
            other = self._read_start(newest)
            raise SupersededError(
                f"start {newest} (process {other.get('pid')} on {other.get('host')}) has taken over {self.path} from "
                f"start {self.start}, which may not save there any more. Two runs need two directories."
            )

    def committed(self, path: str) -> None:
        """Point `LATEST` at a new checkpoint and remove those that need not be kept; on the first rank.

        A failure only warns: the checkpoint is committed.
        """
        try:
            name = path.removeprefix(self.path).strip("/")
            self._storage.put(
                self._storage.join(self.path, LATEST),
                f"{name}\n".encode(),
                before_name=lambda: crash_point("latest_temporary", 0),
            )
            crash_point("latest_written", 0)
            for old in [*self._superfluous(path), *self._superseded(path)]:
                self._storage.discard(old, renamed=lambda: crash_point("trash_renamed", 0))
        except OSError as e:
            _log.warning("The checkpoint %s is committed; tidying up after it failed: %s", path, e)

    def go_back(self, step: int) -> bool:
        """Let no later start go on from checkpoints of steps after this one; on the first rank.

        Returns:
            Whether that was done: not as long as there is none of this step or before.
        """
        whole = [
            (path, -1 if manifest.step is None else manifest.step) for path, manifest in whole_checkpoints(self.path)
        ]
        if all(later > step for _, later in whole):
            return not whole
        for path, later in whole:
            if later > step:
                self._storage.put(self._storage.join(path, SUPERSEDED), f"{step}\n".encode())
        return True

    def step_at_most(self, step: int) -> int | None:
        """The step of the newest whole checkpoint of this step or before, or else of the oldest; on the first rank."""
        steps = sorted(m.step for _, m in whole_checkpoints(self.path) if m.step is not None)
        return max((one for one in steps if one <= step), default=steps[0] if steps else None)

    def _superseded(self, newest: str) -> list[str]:
        """Checkpoints that the run has gone back behind and has come past again."""
        names = [name for name in self._storage.names(self.path) if name.startswith("step-")]
        paths = [self._storage.join(self.path, name) for name in names]
        return [path for path in paths if path < newest and SUPERSEDED in self._storage.names(path)]

    def _superfluous(self, newest: str) -> list[str]:
        """Checkpoints that retention does not keep; only whole ones of steps before that of the newest count."""
        step_of = {path: manifest.step for path, manifest in whole_checkpoints(self.path) if manifest.step is not None}
        mine = step_of.pop(newest, None)
        if mine is None:
            return []
        # Those of later steps belong to a start that this one has gone back behind: they are not ours to remove.
        before = [path for path, step in step_of.items() if step <= mine and path == self.path_of(step)]
        return [path for path in before[self._retention.keep_last - 1 :] if not self._retention.keeps(step_of[path])]

    def _begin(self, max_no_progress: int | None) -> int | None:
        self._storage.make_directory(self._storage.join(self.path, _STARTS))
        found = [one for one in candidates(self.path) if one.manifest is not None]
        newest = found[0].manifest.step if found and found[0].manifest is not None else None
        if max_no_progress is not None:
            self._refuse_without_progress(newest, max_no_progress)
        removed = remove_abandoned(self._storage, self.path, all_attempts=True)
        if removed:
            what = "" if found else "; no checkpoint was ever committed here, so the run starts afresh"
            _log.warning("%s held %d saves that did not come to an end, now removed%s.", self.path, len(removed), what)
        facts = {"from": newest, "time": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
        saved = (one.manifest.incarnation or 0 for one in found if one.manifest is not None)
        number = max([*self._starts(), *saved], default=0) + 1
        while not self._storage.claim(self._start_file(number), json.dumps(facts).encode()):
            number += 1
        self.start = number
        return newest

    def _refuse_without_progress(self, newest: int | None, limit: int) -> None:
        story: list[str] = []
        for number in sorted(self._starts(), reverse=True):
            start = self._read_start(number)
            if start.get("end") in _CLEAN or start.get("from", "unknown") != newest:
                break
            end = start.get("end")
            how = f"ended at step {start.get('step')} with {end}" if end else "ended without a word (killed?)"
            story.append(f"start {number} on {start.get('host')}, {_when(start)}: {how}")
        if len(story) >= limit:
            what = "before the first checkpoint" if newest is None else f"without a checkpoint after step {newest}"
            raise NoProgressError(
                f"the last {len(story)} starts in {self.path} ended {what}:\n"
                + "\n".join(f"  - {line}" for line in story)
                + f"\nTo try again remove {self._storage.join(self.path, _STARTS)}, or raise max_no_progress."
            )

    def _starts(self) -> list[int]:
        names = self._storage.names(self._storage.join(self.path, _STARTS))
        return [int(name.removesuffix(".json")) for name in names if name.removesuffix(".json").isdigit()]

    def _start_file(self, number: int) -> str:
        return self._storage.join(self.path, _STARTS, f"{number:08d}.json")

    def _read_start(self, number: int) -> dict[str, Any]:
        try:
            with self._storage.open(self._start_file(number)) as stream:
                content: dict[str, Any] = json.loads(stream.read())
                return content
        except (OSError, ValueError):
            return {}


def _when(start: Mapping[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.get("time", 0)))
