"""Runs of ranks that a test may kill, stop or corrupt: each has processes of its own.

Importing torch and Lightning takes seconds, so the ranks are forked from one process that has imported everything and
has neither a process group nor a second thread. It also does what an agent of torchrun does: when a rank has failed,
the others have a short while to end by themselves, then they are killed.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import logging
import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_par import testing
from lightning_par._rank_worker import STOP_SIGNAL, _set_lightning_rank

GRACE = 8.0
"""Seconds in which ranks end by themselves after one has failed; on a busy machine, usually they need a tenth."""


@dataclass(frozen=True)
class Exit:
    """How a rank ended.

    Attributes:
        code: Its exit status, or minus the signal that ended it.
        left: It was still there when the time was over, and was killed.
        log: What it wrote, with the traceback.
    """

    code: int
    left: bool
    log: str = field(repr=False)

    @property
    def killed(self) -> bool:
        """By the fault that the test asked for."""
        return self.code == -signal.SIGKILL and not self.left


@dataclass(frozen=True)
class _Task:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    environments: list[dict[str, str]]
    logs: list[str]
    import_path: list[str]
    timeout: float
    grace: float


def launch(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    logs: Path,
    environment: dict[str, str] | None = None,
    timeout: float = 40.0,
    grace: float = GRACE,
) -> list[Exit]:
    """Run `fn(*args)` on `n` new processes that see what torchrun would have set, until all have ended.

    Args:
        n: Number of ranks.
        fn: A function at the top level of a module.
        args: Copied (pickle).
        logs: A directory for what the ranks write.
        environment: More variables.
        timeout: Seconds after which those that still run are killed.
        grace: The same, counted from the first rank that ended with an error.
    """
    logs.mkdir(parents=True, exist_ok=True)
    files = [str(logs / f"rank-{rank}.log") for rank in range(n)]
    # The strategy makes the process group itself, as under torchrun.
    with testing._agent_store(False) as port:
        environments = [
            os.environ | testing._torchrun_environment(rank, n, port) | (environment or {}) for rank in range(n)
        ]
        task = _Task(fn, args, environments, files, testing._import_path(fn), timeout, grace)
        ends = _zygote().ask(task)
    texts = [Path(file).read_text(errors="replace") for file in files]
    return [Exit(code, left, text) for (code, left), text in zip(ends, texts, strict=True)]


class _Zygote:
    """The process from which the ranks are forked, seen from the test."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(testing._PRELOAD)
        self.connection, theirs = context.Pipe()
        path = os.pathsep.join(filter(None, sys.path))
        with testing._patched_environment(OMP_NUM_THREADS="1", PYTHONPATH=path):
            # No daemon: those may not have children.
            self.process = context.Process(target=_serve, args=(theirs,), name="zygote")
            self.process.start()
        theirs.close()
        self._receive(120.0)

    def ask(self, task: _Task) -> list[tuple[int, bool]]:
        self.connection.send(task)
        return self._receive(task.timeout + 30.0)

    def stop(self) -> None:
        self.connection.close()
        self.process.join(5.0)
        self.process.kill()

    def _receive(self, seconds: float) -> Any:
        if not self.connection.poll(seconds):
            raise RuntimeError(f"the process that forks ranks did not answer within {seconds:.0f} s")
        return self.connection.recv()


_zygotes: list[_Zygote] = []


def _zygote() -> _Zygote:
    if not _zygotes or not _zygotes[0].process.is_alive():
        _zygotes[:] = [_Zygote()]
    return _zygotes[0]


@atexit.register
def _stop() -> None:
    for zygote in _zygotes:
        zygote.stop()


# -- in the process that forks ----------------------------------------------------------------------------------------


def _serve(connection: Connection) -> None:
    import lightning_par.strategies

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    torch.set_num_threads(1)
    _import_what_runs_import(lightning_par.strategies)
    gc.freeze()
    connection.send(None)
    with suppress(EOFError, ConnectionError):
        while True:
            task = connection.recv()
            _refuse_threads()
            connection.send(_run(task))


def _import_what_runs_import(strategies: Any) -> None:
    """Load what is imported when it is first needed; building a strategy does it."""
    import lightning.pytorch.callbacks  # noqa: F401
    import torch.distributed.checkpoint  # noqa: F401

    import lightning_par.callbacks  # noqa: F401

    assert strategies.FSDP2Strategy


def _refuse_threads() -> None:
    """A process with threads would fork with locks that nobody gives back."""
    with suppress(FileNotFoundError):
        threads = len(os.listdir("/proc/self/task"))
        assert threads == 1, f"the process that forks ranks has {threads} threads"


def _run(task: _Task) -> list[tuple[int, bool]]:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(task, i), name=f"rank {i}") for i in range(len(task.logs))]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + task.timeout
    left: set[int] = set()
    while running := [i for i, process in enumerate(ranks) if process.exitcode is None]:
        sentinels = {ranks[i].sentinel: i for i in running}
        ended = mp_connection.wait(list(sentinels), max(0.0, deadline - time.monotonic()))
        if not ended:
            left.update(running)
            _ask_for_stacks([ranks[i] for i in running])
        for i in running if not ended else [sentinels[sentinel] for sentinel in ended]:
            _end_group(ranks[i])
            ranks[i].join()
            if ranks[i].exitcode != 0:
                deadline = min(deadline, time.monotonic() + task.grace)
    return [(int(process.exitcode), i in left) for i, process in enumerate(ranks)]


def _ask_for_stacks(processes: list[Any]) -> None:
    """Let ranks that are about to be killed write where they are, and end; one that is stopped cannot."""
    for process in processes:
        os.kill(process.pid, STOP_SIGNAL)
    mp_connection.wait([process.sentinel for process in processes], 1.0)


def _end_group(process: Any) -> None:
    """End a rank, if it has not ended, and its children, such as workers of a loader."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _rank(task: _Task, rank: int) -> None:
    os.setsid()
    number = os.open(task.logs[rank], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(number, stream)
    sys.stdout, sys.stderr = open(1, "w", closefd=False, buffering=1), open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    faulthandler.enable()
    faulthandler.register(STOP_SIGNAL, chain=True)
    # Should nobody be there to end it.
    faulthandler.dump_traceback_later(2 * task.timeout, exit=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(task.environments[rank])
    sys.path[:] = task.import_path
    multiprocessing.set_start_method(None, force=True)
    _set_lightning_rank(rank)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    task.fn(*task.args)
