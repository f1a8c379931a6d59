"""The processes of one node, started by the first of them: how they end, and what is printed last."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_par.errors import Problems
from lightning_par.resilience.errors import PREEMPTED
from lightning_par.resilience.failures import VARIABLE, forget_failure, read_failures, verdict
from lightning_par.strategies import _compat

# How long the ranks of a node have to end by themselves when one has ended with an error.
GRACE = 30.0  # seconds
# The same where it is the first one: the others notice when it has gone.
SHORT_GRACE = 5.0  # seconds
_INTERVAL = 0.5  # seconds
_PARENT = "parent"
"""A file with the id of the process that has started the others."""
_WATCHER = "watcher of the first rank"


class RankLauncher(_SubprocessScriptLauncher):
    """Starts the other ranks of the node as Lightning's launcher does, and sees them to their end.

    When a rank has ended with an error, Lightning kills all others within five seconds, those that are saving too, and
    the last thing on the console is the error of any of them. Here they have half a minute to end by themselves, and
    the error that came first is printed last. If the first rank is killed, the others end by themselves.
    """

    _ended_by_us = False

    @override
    def kill(self, signum: Any) -> None:
        # Lightning does so when a person interrupts the run.
        self._ended_by_us = True
        super().kill(signum)

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        # Only the first time: then the environment says that they are there.
        if not self.cluster_environment.creates_processes_externally:
            prepare_to_start_ranks(self.num_processes)
            folder = tempfile.mkdtemp(prefix="lightning-par-")
            os.environ[VARIABLE] = folder
            Path(folder, _PARENT).write_text(str(os.getpid()))
            # Registered first and so called last, when this rank has let go of the process group.
            atexit.register(self._at_exit, folder)
            self._call_children_scripts()
            threading.Thread(target=self._observe, args=(folder,), name="observer of ranks", daemon=True).start()
        return function(*args, **kwargs)

    def _failed(self) -> dict[int, int]:
        """By rank on this node, the statuses of those that have ended with an error."""
        statuses = {i: process.poll() for i, process in enumerate(self.procs, 1)}
        return {rank: status for rank, status in statuses.items() if status}

    def _observe(self, folder: str) -> None:
        """End this process where it does not notice itself that another one has failed."""
        while not self._failed():
            if all(process.poll() == 0 for process in self.procs):
                return
            time.sleep(_INTERVAL)
        time.sleep(GRACE)
        os._exit(self._finish(folder, 0.0) or 1)

    @property
    def _first(self) -> int:
        """The rank of this process."""
        return self.cluster_environment.node_rank() * self.num_processes

    def _at_exit(self, folder: str) -> None:
        """The end of this process: it does not say that all went well where another rank has failed."""
        told_to_end = any(process.poll() == PREEMPTED for process in self.procs)
        failed_here = any(failure.rank == self._first and not failure.succeeds for failure in read_failures(folder))
        status = self._finish(folder)
        if status and not (failed_here or told_to_end):
            # What is left of the exit of the interpreter cannot change the status any more.
            logging.shutdown()
            sys.stdout.flush()
            os._exit(status)

    def _finish(self, folder: str, patience: float | None = None) -> int:
        """Where a rank has failed, wait for the others, end those that do not, and print what came first.

        Returns:
            The exit status of one that has failed, 1 where one had to be ended, else 0.
        """
        failed, failures = self._failed(), read_failures(folder)
        if self._ended_by_us or not (failed or failures):
            shutil.rmtree(folder, ignore_errors=True)
            return 0
        if patience is None:
            ours = [failure for failure in failures if failure.rank == self._first and not failure.consequence]
            patience = SHORT_GRACE if ours else GRACE
        deadline = time.monotonic() + patience
        while any(process.poll() is None for process in self.procs) and time.monotonic() < deadline:
            time.sleep(_INTERVAL / 10)
        statuses = {self._first + rank: status for rank, status in self._failed().items()}
        hung = [process for process in self.procs if process.poll() is None]
        for process in hung:
            process.kill()
        told = verdict(read_failures(folder), statuses)
        shutil.rmtree(folder, ignore_errors=True)
        if told is not None:
            sys.stdout.flush()
            print(f"\nlightning-par: {told}", file=sys.stderr, flush=True)
        return _shown(next(iter(statuses.values()))) if statuses else int(bool(hung))


def _shown(status: int) -> int:
    """What a shell shows of a process that ended so."""
    return status if status > 0 else 128 - status


def prepare_to_start_ranks(processes: int) -> None:
    """Divide the cores among the ranks of a node; those that are started take the number from the environment.

    Raises:
        ParallelConfigError: If they cannot be started as this process was.
    """
    import __main__

    problems = Problems()
    if __main__.__spec__ is None and not Path(sys.argv[0]).exists():
        problems.add(
            f"{processes} processes run the same script, and this program was given to Python as text: there is no "
            f"file {sys.argv[0]!r} to run",
            "a file (python train.py), or devices=1",
        )
    problems.raise_if_any()
    _compat.set_threads(processes)


def begin_run(rank: int, local_rank: int) -> None:
    """At the begin of a run of a Trainer: take back an earlier error, which was caught, and watch the first process.

    Where that one was killed this process ends: it might wait for it for half an hour, before there is a process group.

    Args:
        rank: Global rank.
        local_rank: The rank on this node; 0 has started the others.
    """
    forget_failure(rank)
    folder = os.environ.get(VARIABLE)
    if folder is None or local_rank == 0:
        return
    if not any(thread.name == _WATCHER for thread in threading.enumerate()):
        threading.Thread(target=_end_with_parent, args=(Path(folder),), name=_WATCHER, daemon=True).start()


def _end_with_parent(folder: Path) -> None:
    try:
        parent = int((folder / _PARENT).read_text())
    except (OSError, ValueError):
        return
    while os.getppid() == parent:
        time.sleep(_INTERVAL)
    # One that ends in order removes the folder.
    if folder.exists():
        # In a run it is noticed in other ways, and something may be left to do.
        time.sleep(GRACE if dist.is_initialized() else 0.0)
        shutil.rmtree(folder, ignore_errors=True)
        print("lightning-par: the process that has started this rank was killed", file=sys.stderr, flush=True)
        os._exit(1)
