"""What ended each rank, so that whoever started the ranks can print last what came first.

When one rank fails, the others fail of its absence, with errors that name nobody. Each rank writes its own error as it
is raised; the first one that is no mere consequence is the cause.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from lightning_par.resilience.errors import PREEMPTED

# Set by the launcher: a directory for one file of each rank.
VARIABLE = "LIGHTNING_PAR_FAILURES"
# Set by the agent of torchrun: a file for this rank's error, of which the earliest is printed as the root cause.
TORCHRUN_VARIABLE = "TORCHELASTIC_ERROR_FILE"

_RECORDED = "_lightning_par_recorded"
# What gloo says on ranks that have lost another one, or have waited for it in vain.
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Timed out waiting",
    "timeout caused pair closure",
)
MAX_TRACEBACK_LINES = 40


@dataclass(frozen=True)
class Failure:
    """The error of one rank.

    Attributes:
        rank: Global rank.
        error: Its type and text.
        time: Seconds since the epoch.
        consequence: Whether it only says that another rank is gone or has not come.
        stack: The traceback.
    """

    rank: int
    error: str
    time: float
    consequence: bool
    stack: str

    @property
    def succeeds(self) -> bool:
        """Whether the process ended with status 0."""
        return self.error in ("SystemExit: 0", "SystemExit: None", "SystemExit: ")

    def __str__(self) -> str:
        lines = self.stack.rstrip().splitlines()
        if len(lines) > MAX_TRACEBACK_LINES:
            lines = ["  ...", *lines[-MAX_TRACEBACK_LINES:]]
        return f"rank {self.rank} failed first: {self.error}\n" + "\n".join(lines)


def record_failure(
    exception: BaseException,
    rank: int,
    *,
    environment: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.time,
) -> None:
    """Write the error of this rank for whoever has started it; once for each exception, and nothing else is done.

    A `sys.exit` and an interrupt count: the other ranks need this one. The end of a run that was told to end does not.

    Args:
        exception: As early as it is caught: what follows may take time, in which other ranks fail.
        rank: Global rank.
        environment: Says where.
        clock: Seconds since the epoch.
    """
    if getattr(exception, "code", None) == PREEMPTED or hasattr(exception, _RECORDED):
        return
    stack = "".join(traceback.format_exception(exception))
    lost = is_consequence(exception)
    failure = Failure(rank, f"{type(exception).__name__}: {exception}", clock(), lost, stack)
    try:
        setattr(exception, _RECORDED, True)
        if VARIABLE in environment:
            _write(Path(environment[VARIABLE]) / f"rank-{rank}.json", json.dumps(asdict(failure)))
        if TORCHRUN_VARIABLE in environment:
            _write(Path(environment[TORCHRUN_VARIABLE]), _for_torchrun(failure))
    except (OSError, AttributeError):
        # To report an error must not take its place.
        return


def forget_failure(rank: int, *, environment: Mapping[str, str] = os.environ) -> None:
    """Take back what this rank has written for the launcher, if anything: it goes on."""
    if VARIABLE in environment:
        with contextlib.suppress(OSError):
            (Path(environment[VARIABLE]) / f"rank-{rank}.json").unlink(missing_ok=True)


def is_consequence(exception: BaseException) -> bool:
    """Whether an error of a collective only says that another rank is gone or has not come."""
    if isinstance(exception, dist.DistError):
        return True
    return isinstance(exception, RuntimeError) and any(text in str(exception) for text in _LOST)


def read_failures(directory: str | Path) -> list[Failure]:
    """The errors that ranks have written into a directory, causes before consequences, then by time."""
    found = []
    for file in Path(directory).glob("rank-*.json"):
        try:
            found.append(Failure(**json.loads(file.read_text())))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(found, key=lambda failure: (failure.consequence, failure.time))


def verdict(failures: Collection[Failure], statuses: Mapping[int, int]) -> str | None:
    """What to print last: the error that came first; None where nobody failed.

    Args:
        failures: As `read_failures` gives them.
        statuses: By rank, the exit status of those that ended by themselves with an error, minus the signal for those
            that one has killed.
    """
    first = next(iter(failures), None)
    killed = {rank: -status for rank, status in statuses.items() if status < 0}
    if killed and (first is None or first.consequence):
        return "; ".join(f"rank {rank} was killed by signal {number}" for rank, number in sorted(killed.items())) + (
            " (9 is what the kernel sends when memory is used up)" if 9 in killed.values() else ""
        )
    said_something = {failure.rank for failure in failures}
    others = {rank: s for rank, s in statuses.items() if s not in (0, PREEMPTED) and rank not in said_something}
    if others and (first is None or first.consequence):
        return "; ".join(f"rank {rank} ended with status {s}, of no error" for rank, s in sorted(others.items()))
    all_say_the_same = len(failures) > 1 and len({failure.error for failure in failures}) == 1
    return None if first is None or all_say_the_same else str(first)


def _write(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(file)


def _for_torchrun(failure: Failure) -> str:
    """The format of torchrun's agent (`ErrorHandler.record_exception`, torch >= 1.9).

    It compares whole seconds and takes the lowest rank of equals, so what is a consequence comes a second later.
    """
    extra = {"py_callstack": failure.stack, "timestamp": str(int(failure.time) + failure.consequence)}
    return json.dumps({"message": {"message": f"rank {failure.rank}: {failure.error}", "extraInfo": extra}})
