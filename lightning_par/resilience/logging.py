"""Log records of many ranks: who prints what, which rank said it, and a complete file for each rank.

INFO of every rank is noise, an error of any rank is news. So on the console a record below WARNING comes from the ranks
of a policy, a WARNING from one rank a node, an ERROR from any rank; repeated messages are folded. Files get everything.
Nothing here communicates.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_par.errors import Problems

Policy = Literal["rank0", "node0", "all"]
LOGGERS = ("", "lightning", "lightning.pytorch", "lightning.fabric", "lightning_par")
MAX_REMEMBERED = 1024
_FOLDED = "_lightning_par_folded"


def check_policy(policy: str) -> None:
    """Raise `ParallelConfigError` unless `policy` is one of ``rank0``, ``node0`` and ``all``."""
    if policy not in get_args(Policy):
        problems = Problems()
        legal = ", ".join(get_args(Policy))
        problems.add(f"policy is {policy!r}; it is one of {legal}", "policy='rank0'", "policy: rank0")
        problems.raise_if_any()


class RankLogging:
    """Handles the log records of one rank between `install` and `remove`.

    Console handlers of the root logger, of Lightning's and of this package's are filtered; handlers that write files
    stay complete. Every record gets the attributes ``rank``, ``local_rank``, ``host`` and ``step``, for formatters.

    Args:
        policy: Who prints records below WARNING: ``rank0``, ``node0`` (local rank 0 of each node) or ``all``.
        rank: Global rank.
        local_rank: Rank within the node.
        host: Name of the node; None asks the system.
        directory: Where all records of this rank are appended to ``rank-N.jsonl``, one JSON object a line; or None.
        repeat_interval: A message that comes again within this many seconds is counted, not printed; 0 prints all.
        clock: Time in seconds.

    Attributes:
        step: The training step that records are marked with.
    """

    def __init__(
        self,
        policy: Policy = "rank0",
        *,
        rank: int,
        local_rank: int,
        host: str | None = None,
        directory: str | Path | None = None,
        repeat_interval: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_policy(policy)
        self.policy = policy
        self.rank = rank
        self.local_rank = local_rank
        self.host = host or socket.gethostname()
        self.step: int | None = None
        self._directory = None if directory is None else Path(directory)
        self._repeats = _Repeats(repeat_interval, clock)
        self._filtered: list[tuple[logging.Handler, logging.Filter]] = []
        self._added: list[tuple[logging.Logger, logging.Handler]] = []
        self._levels: list[tuple[logging.Logger, int]] = []

    @property
    def installed(self) -> bool:
        """Whether records are handled now."""
        return bool(self._filtered)

    def install(self) -> None:
        """Start; a second call does nothing."""
        if self.installed:
            return
        if self._directory is not None:
            file = _JSONLinesHandler(self._directory / f"rank-{self.rank}.jsonl")
            for logger in _top_loggers():
                self._add(logger, file)
        ours = logging.getLogger("lightning_par")
        if ours.level == logging.NOTSET:
            self._levels.append((ours, ours.level))
            ours.setLevel(logging.INFO)
        if all(isinstance(handler, _JSONLinesHandler) for handler in _handlers_of(ours)):
            console = logging.StreamHandler()
            console.setFormatter(_ConsoleFormatter())
            self._add(ours, console)
        handlers = {h: None for name in LOGGERS for h in logging.getLogger(name).handlers}
        # Without any handler, Python prints warnings through this one.
        if logging.lastResort is not None:
            handlers[logging.lastResort] = None
        for handler in handlers:
            new = _RankFilter(self, everything=isinstance(handler, logging.FileHandler))
            handler.addFilter(new)
            self._filtered.append((handler, new))

    def remove(self) -> None:
        """Print what is still folded and put loggers and handlers back as they were; a second call does nothing."""
        if not self.installed:
            return
        self.tell_repetitions()
        for handler, filter_ in self._filtered:
            handler.removeFilter(filter_)
        for logger, handler in self._added:
            logger.removeHandler(handler)
            handler.close()
        for logger, level in self._levels:
            logger.setLevel(level)
        self._filtered, self._added, self._levels = [], [], []

    def tell_repetitions(self) -> None:
        """Print what is folded now."""
        for record in self._repeats.pending():
            logging.getLogger(record.name).handle(record)

    def prints(self, level: int) -> bool:
        """Whether records of a level are printed on this rank."""
        if level >= logging.ERROR:
            return True
        chosen = {"rank0": self.rank == 0, "node0": self.local_rank == 0, "all": True}[self.policy]
        return chosen or (level >= logging.WARNING and self.local_rank == 0)

    def _add(self, logger: logging.Logger, handler: logging.Handler) -> None:
        logger.addHandler(handler)
        self._added.append((logger, handler))

    def _mark(self, record: logging.LogRecord) -> None:
        for name in ("rank", "local_rank", "host", "step"):
            setattr(record, name, getattr(self, name))

    def _folds(self, record: logging.LogRecord) -> bool:
        # A record passes several handlers, and counts once.
        if not hasattr(record, _FOLDED):
            setattr(record, _FOLDED, self._repeats.folds(record))
        return bool(getattr(record, _FOLDED))


class _RankFilter(logging.Filter):
    def __init__(self, owner: RankLogging, *, everything: bool) -> None:
        super().__init__()
        self._owner = owner
        self._everything = everything

    def filter(self, record: logging.LogRecord) -> bool:
        self._owner._mark(record)
        return self._everything or (self._owner.prints(record.levelno) and not self._owner._folds(record))


@dataclass
class _Repeat:
    """A message that was printed at `since`, and how often it came again."""

    since: float
    count: int = 0


class _Repeats:
    """Recognises messages that were printed a short while ago."""

    def __init__(self, interval: float, clock: Callable[[], float]) -> None:
        self._interval = interval
        self._clock = clock
        self._known: dict[tuple[str, int, str], _Repeat] = {}
        self._lock = threading.Lock()

    def folds(self, record: logging.LogRecord) -> bool:
        """Whether to count `record` instead of printing it. One that is printed tells how many were not."""
        key = (record.name, record.levelno, record.getMessage())
        now = self._clock()
        with self._lock:
            known = self._known.get(key)
            if known is not None and now - known.since < self._interval:
                known.count += 1
                return True
            self._known[key] = _Repeat(now)
            if len(self._known) > MAX_REMEMBERED:
                self._forget(now)
        if known is not None and known.count:
            record.msg, record.args = _with_count(key[2], known.count), None
        return False

    def pending(self) -> list[logging.LogRecord]:
        """Make a record for each message that has repetitions which were not told, and forget all."""
        with self._lock:
            found = [(key, known.count) for key, known in self._known.items() if known.count]
            self._known.clear()
        records = []
        for (name, level, message), count in found:
            record = logging.LogRecord(name, level, __file__, 0, _with_count(message, count), None, None)
            setattr(record, _FOLDED, False)
            records.append(record)
        return records

    def _forget(self, now: float) -> None:
        self._known = {k: r for k, r in self._known.items() if r.count or now - r.since < self._interval}
        for key in [k for k, r in self._known.items() if not r.count][: len(self._known) - MAX_REMEMBERED]:
            del self._known[key]


def _with_count(message: str, count: int) -> str:
    return f"{message} ... and {count} more"


def _handlers_of(logger: logging.Logger | None) -> list[logging.Handler]:
    """List the handlers that get the records of a logger."""
    found: list[logging.Handler] = []
    while logger is not None:
        found.extend(logger.handlers)
        logger = logger.parent if logger.propagate else None
    return found


def _top_loggers() -> list[logging.Logger]:
    """List the loggers where each record of `LOGGERS` and their children passes exactly one."""
    return [logger for name in LOGGERS if (logger := logging.getLogger(name)).parent is None or not logger.propagate]


class _ConsoleFormatter(logging.Formatter):
    """The plain message from rank 0; rank and host before it from others."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname}: {text}"
        rank = getattr(record, "rank", 0)
        return f"[rank {rank}, {getattr(record, 'host', '')}] {text}" if rank else text


class _JSONLinesHandler(logging.FileHandler):
    """Appends records as JSON objects, each on a line of its own even where a killed process left half a line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as written:
            if written.tell():
                written.seek(-1, os.SEEK_END)
                if written.read() != b"\n":
                    written.write(b"\n")
        super().__init__(path, mode="a", encoding="utf-8")

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "rank": getattr(record, "rank", None),
            "local_rank": getattr(record, "local_rank", None),
            "host": getattr(record, "host", None),
            "step": getattr(record, "step", None),
            "message": record.getMessage(),
        }
        # Extras of this package: numbers, and an exception whose traceback would repeat itself on the console.
        metrics = getattr(record, "metrics", None)
        if isinstance(metrics, Mapping):
            # JSON knows no NaN and no infinity.
            finite = {k: not isinstance(v, float) or math.isfinite(v) for k, v in metrics.items()}
            entry["metrics"] = {k: v if finite[k] else str(v) for k, v in metrics.items()}
        exception = record.exc_info[1] if record.exc_info else getattr(record, "exception", None)
        if isinstance(exception, BaseException):
            entry["exception"] = "".join(traceback.format_exception(exception))
        return json.dumps(entry, default=str)
