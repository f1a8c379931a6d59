"""What happened in a run, over all its starts: one JSON object a line, appended, in ``events.jsonl`` of its directory.

Each line has ``time`` (seconds since the epoch), ``kind`` and, where there is one, ``step``; the rest is of the kind.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FILE = "events.jsonl"
_LARGEST = 1e30  # no fact of a run is larger, and sums and products of such numbers stay finite
_log = logging.getLogger(__name__)


class EventLog:
    """Appends events of a run to a file; a file that cannot be written costs a warning, never the run.

    Args:
        directory: Of the run, the same in each start; None writes nothing, as on all ranks but the first. With a URL,
            to whose files nothing can be appended, neither.
        clock: Seconds since the epoch.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, *, clock: Callable[[], float] = time.time) -> None:
        self._file = None if directory is None or "://" in str(directory) else Path(directory) / FILE
        self._clock = clock
        self._failed = False

    def write(self, kind: str, step: int | None = None, **facts: Any) -> None:
        """Append one event.

        Args:
            kind: What happened.
            step: The optimizer step at which it did.
            facts: More, of plain types; numbers that are not finite are written as text.
        """
        if self._file is None:
            return
        event = {"time": self._clock(), "kind": kind} | ({} if step is None else {"step": step}) | facts
        # One write of one line: several writers and a crash leave whole lines.
        line = json.dumps(_plain(event), default=str) + "\n"
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            number = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                os.write(number, line.encode())
            finally:
                os.close(number)
        except OSError as e:
            if not self._failed:
                _log.warning("Events of this run cannot be written to %s: %s", self._file, e)
            self._failed = True


def read_events(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of a run in the order in which they were written; lines that a crash cut off are left out."""
    file = Path(directory) / FILE
    events = []
    # What a crash of the machine or another program has left between the lines need not be text.
    for line in file.read_bytes().split(b"\n") if file.is_file() else []:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def number(event: Mapping[str, Any], name: str) -> float | None:
    """A fact that is a finite number, else None."""
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        return None
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
