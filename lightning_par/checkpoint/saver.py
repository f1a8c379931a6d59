"""Saves checkpoints one after the other, on request while training goes on, and tells all ranks what became of them."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from lightning_par.checkpoint.candidates import whole_checkpoints
from lightning_par.checkpoint.commit import Facts, commit
from lightning_par.checkpoint.crash_points import crash_point
from lightning_par.checkpoint.errors import CheckpointError, SupersededError
from lightning_par.checkpoint.manifest import verify
from lightning_par.checkpoint.prepare import Content, HostBuffers, Planning, prepare
from lightning_par.checkpoint.ranks import Ranks
from lightning_par.checkpoint.storage import StrPath, storage_of

_log = logging.getLogger(__name__)

# How long the end of a process waits for a save that is under way.
GRACE = 60.0


class CheckpointSaver:
    """Saves of all ranks together; at most one is under way.

    Args:
        max_failed_saves: How many saves that may fail can do so, one after the other, before the next call raises.
        timeout: How long a rank waits for another one while saving.

    Attributes:
        blocked: Seconds that the last save kept training waiting.
        written: Seconds from the begin of the last save that was committed to its commit.
        during: What runs around that which keeps training waiting; for whoever watches training.
    """

    def __init__(self, *, max_failed_saves: int = 3, timeout: timedelta = timedelta(minutes=30)) -> None:
        self.max_failed_saves = max_failed_saves
        self.blocked = 0.0
        self.written = 0.0
        self.during: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._timeout = timeout
        self._asking: Ranks | None = None
        self._writing: Ranks | None = None
        self._planning = Planning()
        self._buffers = HostBuffers()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._removals: list[str] | None = None
        self._failures = 0
        self._error: CheckpointError | None = None
        self._untold: CheckpointError | None = None
        # A rank is gone: to go on would be to wait in training for ranks that wait for others here.
        self._lost: CheckpointError | None = None
        self._outlives_main = False

    def save(
        self,
        path: StrPath,
        content: Callable[[], Content],
        facts: Facts,
        *,
        asynchronous: bool = False,
        when_busy: Literal["wait", "skip"] = "wait",
        may_fail: bool = False,
        may_commit: Callable[[], None] = lambda: None,
        committed: Callable[[], None] = lambda: None,
    ) -> bool:
        """Save a checkpoint; collective over all ranks.

        Args:
            path: The directory.
            content: Makes what is saved; called when the former save is over.
            facts: For the manifest.
            asynchronous: Return when copies are made, and write them in a thread. Its failure is like one that may be.
            when_busy: Whether to wait for a save that is under way on any rank, or not to save.
            may_fail: Report a failure in the log of every rank, and raise only after `max_failed_saves` of them.
            may_commit: Called on the first rank before the commit; an error from it ends the save.
            committed: Called on the first rank after it; an error from it is a warning.

        Returns:
            Whether a save was begun.

        Raises:
            CheckpointError: On all ranks, if this save failed and may not, or too many did; always if a rank is gone.
            SupersededError: If another run saves there now; always.
        """
        began = time.monotonic()
        self._raise_if_too_many()
        asking, writing = self._ranks()
        if when_busy == "skip" and any(asking.gather("cannot ask for saves", lambda: self.is_busy)):
            return False
        self.join()
        storage, target = storage_of(path)
        made = asking.together(f"cannot make the checkpoint {target}", content)
        prepared = prepare(made, storage, writing, self._planning, self._buffers if asynchronous else None)

        def write() -> None:
            try:
                self._buffers.wait()
                commit(prepared, storage, target, facts, writing, may_commit=may_commit)
                self.written = time.monotonic() - began
            except CheckpointError as e:
                self._finish(writing, target, committed, e)
                if isinstance(e, SupersededError):
                    # That does not pass.
                    self._lost = e
            except Exception as e:  # a rank that died is a RuntimeError of the group
                # Without `e` as its cause: the frames of that would keep the group, see `_lose`.
                error = CheckpointError(f"cannot write the checkpoint {target}: {type(e).__name__}: {e}")
                self._finish(writing, target, committed, error)
                self._lose(error)
            else:
                self._finish(writing, target, committed, None)

        with self._lock:
            self._removals = []
        if asynchronous:
            self._finish_at_exit()
            self._thread = threading.Thread(target=write, name="checkpoint writer", daemon=True)
            # Before the thread begins, so that `committed` can read it.
            self.blocked = time.monotonic() - began
            self._thread.start()
        else:
            write()
            self.blocked = time.monotonic() - began
        if not asynchronous and self._error is not None and not may_fail:
            self._untold, self._failures = None, 0
            raise self._error
        self._raise_if_too_many()
        return True

    @property
    def failed(self) -> bool:
        """Whether the last save that came to its end was not committed."""
        return self._error is not None

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the save that is under way; on all ranks.

        Raises:
            CheckpointError: If it failed, or the last one that has ended since this was asked for.
        """
        self.join()
        error, self._untold = self._untold, None
        if error is not None:
            self._failures = 0
            raise error

    def join(self) -> None:
        """As `wait`, but a failure is one that may be: it was reported in the log.

        Raises:
            CheckpointError: If too many have failed, or a rank is gone.
        """
        if self._thread is not None:
            with self.during():
                self._thread.join()
            self._thread = None
        self._raise_if_too_many()

    def remove(self, path: StrPath) -> None:
        """Remove a checkpoint that a save has made superfluous; on the first rank.

        While that save is under way this waits for its commit, and is forgotten if it fails. The only whole checkpoint
        of a directory stays, with a warning.
        """
        with self._lock:
            if self._removals is not None:
                self._removals.append(os.fspath(path))
                return
        if self._error is not None:
            _log.warning("%s is kept, as the save that was to replace it failed.", path)
        else:
            _remove(path)

    def close(self, limit: float | None = None) -> None:
        """Wait for the save that is under way, at most `limit` seconds, and let go of the ranks."""
        if self._thread is not None:
            self._thread.join(limit)
            if self._thread.is_alive():
                _log.warning("A save that was under way after %s s is abandoned; it is not seen by any load.", limit)
                return
        self._thread = None
        for ranks in (self._asking, self._writing):
            if ranks is not None and ranks.group is not None and dist.is_initialized():
                with contextlib.suppress(RuntimeError, ValueError):
                    dist.destroy_process_group(ranks.group)
        self._asking = self._writing = None

    def _ranks(self) -> tuple[Ranks, Ranks]:
        """Groups of its own: the thread's collectives must not meet those of training, nor of the next question."""
        if self._asking is None or self._writing is None:
            groups = [
                dist.new_group(backend="gloo", timeout=self._timeout) if dist.is_initialized() else None for _ in "12"
            ]
            self._asking, self._writing = Ranks.of(groups[0]), Ranks.of(groups[1])
        return self._asking, self._writing

    def _finish_at_exit(self) -> None:
        """Let the end of the process, which ends its threads, wait for a save that is under way."""
        if not self._outlives_main:
            self._outlives_main = True
            close = weakref.WeakMethod(self.close)
            atexit.register(lambda: (method := close()) and method(GRACE))

    def _finish(self, ranks: Ranks, target: str, committed: Callable[[], None], error: CheckpointError | None) -> None:
        """Do what was put off until the end of a save; on the thread that wrote it."""
        if error is None and ranks.rank == 0:
            try:
                committed()
            except Exception as e:
                _log.warning("The checkpoint %s is committed; what was to follow failed: %s", target, e)
        with self._lock:
            removals, self._removals = self._removals or [], None
            self._error, self._failures = error, 0 if error is None else self._failures + 1
            self._untold = error
        if error is None:
            for path in removals:
                _remove(path)
            crash_point("committed", ranks.rank)
            return
        kept = f" Kept: {', '.join(removals)}." if removals else ""
        _log.warning("rank %d: a checkpoint was not saved (%d in a row). %s%s", ranks.rank, self._failures, error, kept)

    def _lose(self, error: CheckpointError) -> None:
        """Let go of the writing group, of which a rank is gone: those that still wait there for this one hear of it.

        gloo closes a group when nobody holds it any more, and in no other way.
        """
        self._lost = error
        ranks, self._writing = self._writing, None
        if ranks is not None and ranks.group is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(ranks.group)

    def _raise_if_too_many(self) -> None:
        if self._lost is not None:
            raise self._lost
        if self._failures >= self.max_failed_saves:
            failures, self._failures, self._untold = self._failures, 0, None
            raise CheckpointError(f"{failures} saves in a row failed, the last one so: {self._error}")


def _remove(path: StrPath) -> None:
    storage, target = storage_of(path)
    name = target.rsplit("/", 1)[-1]
    visible = not name.startswith(".") and not os.path.islink(target) and storage.is_directory(target)
    others = (other for other, _ in whole_checkpoints(storage.parent(target)) if other != target)
    if visible and not verify(target) and next(others, None) is None:
        _log.warning("%s is kept: it is the only whole checkpoint of its directory.", target)
        return
    storage.discard(target)
