"""The processes of `lightning_par.testing.run_ranks`, as they see themselves: wait for a task, run it, clean up."""

from __future__ import annotations

import faulthandler
import gc
import io
import logging
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from lightning_par.parallel._compat import forget_meshes

GRACE = 5.0
"""Seconds that the other ranks have to come back once one has failed."""

STOP_SIGNAL = signal.SIGUSR2
"""Makes a worker write its stacks and end."""

Kind = Literal["returned", "raised", "died", "stopped", "timed out"]


@dataclass(frozen=True)
class Task:
    """What a worker is told to do."""

    call: bytes
    environment: dict[str, str]
    directory: str
    import_path: list[str]
    timeout: float
    store_file: str | None


@dataclass(frozen=True)
class Report:
    """How a call ended on one rank, by the worker itself or, if it cannot tell any more, by the parent."""

    kind: Kind
    content: bytes
    when: float

    @staticmethod
    def now(kind: Kind, content: bytes | str) -> Report:
        return Report(kind, content.encode() if isinstance(content, str) else content, time.monotonic())


def pack(data: Any) -> bytes:
    # The pickler of multiprocessing would share the memory of tensors through file descriptors.
    buffer = io.BytesIO()
    torch.save(data, buffer)
    return buffer.getvalue()


def serve(connection: Connection, stacks: Connection) -> None:
    """Work until the parent closes the connection."""
    os.setsid()  # the parent can end this process with its children
    multiprocessing.set_start_method(None, force=True)  # children start as anywhere else
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Both write from C, so they also tell where a process is that waits in a collective or has crashed.
    faulthandler.enable(stacks.fileno())
    faulthandler.register(STOP_SIGNAL, stacks.fileno(), chain=True)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    _restore_defaults()
    gc.freeze()  # the imported modules never become garbage: without them collecting takes a millisecond
    with suppress(EOFError, ConnectionError):
        connection.send(None)
        while True:
            task = connection.recv()
            # A Trainer restores the handlers that Python knows; this one is set from C and would be gone after a fit.
            faulthandler.unregister(STOP_SIGNAL)
            faulthandler.register(STOP_SIGNAL, stacks.fileno(), chain=True)
            # Should the parent be gone, nobody else would end this process.
            faulthandler.dump_traceback_later(task.timeout + 3 * GRACE, exit=True, file=stacks.fileno())
            report = _answer(task)
            connection.send(report)
            if report.kind == "returned":
                connection.recv()  # keep the group until all are through, or their last collective fails
            connection.send(_answer_cleanup())
            faulthandler.cancel_dump_traceback_later()


def _answer(task: Task) -> Report:
    try:
        os.environ.clear()
        os.environ.update(task.environment)
        os.chdir(task.directory)
        sys.path[:] = task.import_path
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        _set_lightning_rank(rank)
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        if task.store_file is not None:
            store = dist.FileStore(task.store_file, world_size)  # type: ignore[attr-defined]
            wait = timedelta(seconds=max(task.timeout - GRACE, task.timeout / 2))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=wait)
        fn, args, kwargs = torch.load(io.BytesIO(task.call), weights_only=False)
        return Report.now("returned", pack(fn(*args, **kwargs)))
    except BaseException as error:
        return _raised(error)


def _answer_cleanup() -> Report:
    try:
        _restore_defaults()
        sys.stdout.flush()
        sys.stderr.flush()
        return Report.now("returned", b"")
    except BaseException as error:
        return _raised(error)


def _raised(error: BaseException) -> Report:
    trace = error.__traceback__
    return Report.now("raised", "".join(traceback.format_exception(error.with_traceback(trace and trace.tb_next))))


def _set_lightning_rank(rank: int) -> None:
    """Do what importing Lightning under torchrun does; here it was imported before the rank was known."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    rank_zero_only.rank = rank  # type: ignore[attr-defined]


def _restore_defaults() -> None:
    """Forget the process group and what was set globally in this process."""
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_meshes()
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] == "lightning_par":
            logging.getLogger(name).setLevel(logging.NOTSET)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
