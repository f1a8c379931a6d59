"""The processes of one node, started by the first of them: how they end, and what is printed last."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_par.resilience.failures import VARIABLE, read_failures, verdict
from lightning_par.strategies import _compat

# How long the ranks of a node have to end by themselves when one has ended with an error.
GRACE = 30.0  # seconds
# The same where it is the first one: the others notice when it has gone.
SHORT_GRACE = 5.0  # seconds
_INTERVAL = 0.5  # seconds


class RankLauncher(_SubprocessScriptLauncher):
    """Starts the other ranks of the node as Lightning's launcher does, and sees them to their end.

    When a rank has ended with an error, Lightning kills all others within five seconds, those that are saving too, and
    the last thing on the console is the error of any of them. Here they have half a minute to end by themselves, and
    the error that came first is printed last.
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
            folder = tempfile.mkdtemp(prefix="lightning-par-")
            os.environ[VARIABLE] = folder
            # Registered first and so called last, when this rank has let go of the process group.
            atexit.register(self._finish, folder)
            self._call_children_scripts()
            threading.Thread(target=self._observe, args=(folder,), name="observer of ranks", daemon=True).start()
        _compat.set_threads(self.num_processes)
        return function(*args, **kwargs)

    def _failed(self) -> dict[int, int]:
        """By rank on this node, the statuses of those that have ended with an error."""
        statuses = {i: process.poll() for i, process in enumerate(self.procs, 1)}
        return {rank: status for rank, status in statuses.items() if status}

    def _observe(self, folder: str) -> None:
        """End this process where it does not notice itself that another one has failed."""
        while not (failed := self._failed()):
            if all(process.poll() == 0 for process in self.procs):
                return
            time.sleep(_INTERVAL)
        time.sleep(GRACE)
        self._finish(folder, 0.0)
        os._exit(next(iter(failed.values())) % 256)

    def _finish(self, folder: str, patience: float | None = None) -> None:
        """Where a rank has failed, wait for the others, end those that do not, and print what came first."""
        failed, failures = self._failed(), read_failures(folder)
        if self._ended_by_us or not (failed or failures):
            shutil.rmtree(folder, ignore_errors=True)
            return
        first = self.cluster_environment.node_rank() * self.num_processes
        if patience is None:
            ours = [failure for failure in failures if failure.rank == first and not failure.consequence]
            patience = SHORT_GRACE if ours else GRACE
        deadline = time.monotonic() + patience
        while any(process.poll() is None for process in self.procs) and time.monotonic() < deadline:
            time.sleep(_INTERVAL / 10)
        failed = self._failed()
        for process in self.procs:
            if process.poll() is None:
                process.kill()
        told = verdict(read_failures(folder), {first + rank: status for rank, status in failed.items()})
        shutil.rmtree(folder, ignore_errors=True)
        if told is not None:
            sys.stdout.flush()
            print(f"\nlightning-par: {told}", file=sys.stderr, flush=True)
