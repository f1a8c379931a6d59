"""Run a function on several ranks from inside a test: real gloo processes that are started once and used again.

A worker costs seconds to start because it imports torch and Lightning; a call to workers that are there costs
milliseconds. A call that fails or hangs ends with an exception that tells what every rank did, never with a hang.

Example::

    def total(value):
        tensor = torch.tensor(float(value * dist.get_rank()))
        dist.all_reduce(tensor)
        return tensor

    def test_total():
        assert run_ranks(2, total, 3) == [torch.tensor(3.0)] * 2
"""

from __future__ import annotations

import atexit
import functools
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import connection as mp_connection
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist

from lightning_par._rank_worker import GRACE, STOP_SIGNAL, Report, Task, pack, serve

__all__ = ["MAX_RANKS", "RanksFailed", "RanksTimedOut", "run_ranks", "stop_pool"]

T = TypeVar("T")

MAX_RANKS = 8
"""The most ranks a call can have."""

_START_TIMEOUT = 180.0
# A worker with more is replaced: groups that something still refers to keep their threads, each of which gloo wakes
# a hundred times a second.
_MOST_THREADS = 120
_PRELOAD = ["__main__", "torch", "lightning.pytorch", "lightning.fabric", "pytest", "lightning_par._rank_worker"]


class RanksFailed(RuntimeError):
    """A function that `run_ranks` ran did not return on every rank; the message says what each of the others did."""


class RanksTimedOut(RanksFailed):
    """Ranks were still busy when the time was up; the message has the Python stack of each."""


def run_ranks(
    n: int, fn: Callable[..., T], *args: Any, timeout: float = 60.0, init_group: bool = True, **kwargs: Any
) -> list[T]:
    """Run `fn(*args, **kwargs)` on `n` processes that form one gloo process group, and return what each rank returned.

    Each process sees what `torchrun` would have set (`RANK`, `WORLD_SIZE`, ...), else the environment, the working
    directory and the import path of the caller, and one thread. Each call starts with seed 0 and torch's default
    settings; the process group and the environment are taken down after it, modules stay imported.

    Args:
        n: Number of ranks, 1 to `MAX_RANKS`.
        fn: A function at the top level of a module that the workers can import.
        args: Positional arguments, the same for each rank; they and the results are copied (pickle).
        timeout: Seconds for the whole call, without the start of workers. Collectives give up a little earlier, so
            that a rank that waits in one reports where.
        init_group: False leaves it to `fn` to make the process group: `init_process_group("gloo")` works, and so does
            Lightning, which finds a `torchrun` environment.
        kwargs: Keyword arguments for `fn`.

    Raises:
        RanksFailed: Some rank raised or died. The first to fail comes first in the message, as the others often fail
            only because it left.
        RanksTimedOut: Some rank needed more than `timeout`.
        TypeError: `fn` or its arguments cannot be sent to another process.
    """
    if not 1 <= n <= MAX_RANKS:
        raise ValueError(f"run_ranks needs 1 to {MAX_RANKS} ranks, got {n}")
    call = _pack_call(fn, args, kwargs)
    workers = dict(enumerate(_ready_workers(n)))
    deadline = time.monotonic() + timeout
    # The default is a store in a file: no port that another process could take, and no look-up of names.
    with tempfile.TemporaryDirectory(prefix="run_ranks-") as folder, _agent_store(init_group) as port:
        file = str(Path(folder, "store")) if init_group else None
        try:
            for rank, worker in workers.items():
                environment = os.environ | _torchrun_environment(rank, n, port)
                worker.send(Task(call, environment, os.getcwd(), _import_path(fn), timeout, file))
            reports = _gather(workers, deadline)
            for rank, report in reports.items():
                if report.kind == "returned":
                    workers[rank].send(None)
            answering = {r: workers[r] for r, report in reports.items() if report.kind in ("returned", "raised")}
            cleaned = _gather(answering, max(deadline, time.monotonic() + GRACE))
        except BaseException:
            for worker in workers.values():
                worker.kill()
            raise
    problems = {r: x for r, x in reports.items() if x.kind != "returned"} or {
        r: x for r, x in cleaned.items() if x.kind != "returned"
    }
    for rank, worker in workers.items():
        if rank not in cleaned or cleaned[rank].kind != "returned":
            worker.kill()
    if problems:
        _fail(f"{_plain(fn).__module__}.{_name(fn)}", n, timeout, problems)
    return [torch.load(io.BytesIO(reports[rank].content), weights_only=False) for rank in range(n)]


class _Worker:
    """One process of the pool, seen from the parent."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.connection, connection = context.Pipe()
        # A pipe and no file: it needs no cleaning up, and the kernel keeps what a killed process wrote last.
        self._stacks, stacks = context.Pipe(duplex=False)
        os.set_blocking(self._stacks.fileno(), False)
        # No daemon: those may not have children, so a DataLoader with workers would fail.
        self.process = context.Process(target=serve, args=(connection, stacks), name="run_ranks")
        self.process.start()
        connection.close()
        stacks.close()

    @property
    def threads(self) -> int:
        """Number of its threads; 0 where the system does not tell."""
        with suppress(OSError):
            return len(os.listdir(f"/proc/{self._pid}/task"))
        return 0

    def wait_until_ready(self) -> None:
        try:
            if not self.connection.poll(_START_TIMEOUT):
                raise RuntimeError(f"a worker of run_ranks did not start within {_START_TIMEOUT:.0f} s")
            self.connection.recv()
        except EOFError:
            raise RuntimeError(f"a worker of run_ranks {self._describe_exit()} while it started") from None

    def send(self, message: Task | None) -> None:
        with suppress(OSError):  # it is dead: receive() tells how it died
            self.connection.send(message)

    def receive(self) -> Report:
        """Return the next report; the process has sent one or is dead."""
        try:
            if self.connection.poll():
                report: Report = self.connection.recv()
                return report
        except (EOFError, OSError):
            pass
        return Report.now("died", f"{self._describe_exit()}\n{self._read_stacks()}")

    def stop(self, kind: Literal["stopped", "timed out"]) -> Report:
        """End the process whatever it is doing, and report the Python stack of each of its threads."""
        if self.process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self._pid, STOP_SIGNAL)
        self.process.join(2.0)
        stacks = self._read_stacks()
        self.kill()
        return Report.now(kind, stacks or "(no stack: it did not react to the signal)")

    def kill(self) -> None:
        """End the process and its children."""
        if self in _workers:
            _workers.remove(self)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        if self.process.is_alive():
            self.process.kill()
        self.process.join(GRACE)
        self.connection.close()
        self._stacks.close()

    @property
    def _pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def _describe_exit(self) -> str:
        self.process.join(GRACE)
        code = self.process.exitcode
        if code is None:
            return "closed its connection but did not exit"
        return f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"

    def _read_stacks(self) -> str:
        with suppress(BlockingIOError):
            return os.read(self._stacks.fileno(), 1 << 20).decode(errors="replace").strip()
        return ""


_workers: list[_Worker] = []


def _ready_workers(n: int) -> list[_Worker]:
    for worker in [w for w in _workers if not w.process.is_alive() or w.threads > _MOST_THREADS]:
        worker.kill()
    new: list[_Worker] = []
    with _patched_environment(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        while len(_workers) < n:
            new.append(_Worker())
            _workers.append(new[-1])
    for worker in new:
        try:
            worker.wait_until_ready()
        except BaseException:
            stop_pool()
            raise
    return _workers[:n]


@atexit.register
def stop_pool() -> None:
    """End the processes of `run_ranks`; its next call starts new ones."""
    for worker in _workers:
        worker.connection.close()
    for worker in list(_workers):
        worker.process.join(1.0)
        worker.kill()


@contextmanager
def _patched_environment(**changes: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _agent_store(init_group: bool) -> Iterator[int]:
    """Serve the store that the ranks find at `MASTER_PORT`, as the agent of torchrun does, if they make their group."""
    if init_group:
        yield 0
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    yield store.port


def _torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    same = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank}
    sizes = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "ROLE_WORLD_SIZE": world_size}
    node = {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    numbers = {name: str(number) for name, number in (same | sizes | node | {"MASTER_PORT": port}).items()}
    return numbers | {
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": f"run_ranks-{uuid.uuid4().hex[:8]}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        # Else gloo asks for the address of the host name, which may be slow or on a network with a firewall.
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }


def _pack_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    name = _name(fn)
    if "<" in name or _plain(fn).__module__ == "__main__":
        where = "is a lambda or defined inside a function" if "<" in name else "is defined in the script that runs"
        raise TypeError(
            f"run_ranks needs a function that other processes can import, but {name} {where}: move it to the top level "
            "of a module (a test file is one), and pass what it closes over as arguments"
        )
    try:
        return pack((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"run_ranks cannot send {name} and its arguments to other processes: {error}") from error


def _plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    return _plain(fn.func) if isinstance(fn, functools.partial) else fn


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(_plain(fn), "__qualname__", type(_plain(fn)).__qualname__))


def _import_path(fn: Callable[..., Any]) -> list[str]:
    """Return `sys.path` and the directory from which the module of `fn` can be imported."""
    module = sys.modules.get(_plain(fn).__module__)
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        return sys.path
    depth = module.__name__.count(".") + (Path(file).stem == "__init__")
    return [*sys.path, str(Path(file).absolute().parents[depth])]


def _gather(workers: Mapping[int, _Worker], deadline: float) -> dict[int, Report]:
    """Return one report for each rank, and end the workers that have sent none in time."""
    reports: dict[int, Report] = {}
    kind: Literal["stopped", "timed out"] = "timed out"
    while pending := {rank: worker for rank, worker in workers.items() if rank not in reports}:
        sources: dict[Any, int] = {worker.connection: rank for rank, worker in pending.items()}
        sources |= {worker.process.sentinel: rank for rank, worker in pending.items()}
        ready = mp_connection.wait(list(sources), max(0.0, deadline - time.monotonic()))
        if not ready:
            return reports | {rank: worker.stop(kind) for rank, worker in pending.items()}
        for rank in {sources[source] for source in ready}:
            reports[rank] = workers[rank].receive()
            if reports[rank].kind != "returned" and time.monotonic() + GRACE < deadline:
                deadline, kind = time.monotonic() + GRACE, "stopped"
    return reports


def _fail(name: str, n: int, timeout: float, problems: dict[int, Report]) -> NoReturn:
    # The parent hears late of a dead process, the ranks that talked to it at once; and those stopped came last.
    order = {"died": 0, "raised": 1, "stopped": 2, "timed out": 2}
    by_time = sorted(problems.items(), key=lambda item: (order[item[1].kind], item[1].when))
    parts = []
    for rank, report in by_time:
        title = {
            "raised": "raised",
            "died": "died: it",
            "stopped": f"was still busy {GRACE:g} s after the first failure",
            "timed out": f"was still busy after {timeout:g} s",
        }[report.kind]
        text = report.content.decode()
        parts.append(f"rank {rank} {title} {text}" if report.kind == "died" else f"rank {rank} {title}\n{text}")
    ranks = ", ".join(str(rank) for rank, _ in by_time)
    late = ", ".join(str(rank) for rank, report in by_time if report.kind == "timed out")
    head = f"{name} did not finish within {timeout:g} s on ranks {late} of {n}" if late else ""
    head = head or f"{name} failed on ranks {ranks} of {n}"
    raise (RanksTimedOut if late else RanksFailed)("\n\n".join([head, *parts]))
