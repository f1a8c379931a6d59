"""Notices that training stands still on any rank, says which rank holds up the others, and ends the run where asked."""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Literal, Self, TextIO

import torch.distributed as dist

from lightning_par.errors import Problems, is_number
from lightning_par.resilience import _compat
from lightning_par.resilience.board import Board
from lightning_par.resilience.errors import STALLED
from lightning_par.resilience.events import EventLog
from lightning_par.resilience.heartbeat import PHASES, TRAINING, Heartbeat
from lightning_par.resilience.stall_report import (
    STACK_LINES,
    RankView,
    Verdict,
    call_of,
    guilty,
    judge,
    report,
    stack_of,
)

_log = logging.getLogger(__name__)

Action = Literal["report", "abort"]
QUIET_PHASES = ("init", "first_step", "load", "save", "validation")
QUIET = 900.0
"""Seconds without progress that are normal in `QUIET_PHASES`, at the least."""
USUAL = 5.0
"""Nothing is a stall that takes less than so many times what such a phase usually takes."""
LATE = 4.0
"""A thread that comes so many intervals after the last time was stopped, with its process."""
LATE_AT_LEAST = 2.0
"""The same in seconds: on a busy machine a thread has to wait."""


def check_options(owner: str, timeout: float, phase_timeouts: Mapping[str, float], action: str) -> None:
    """Raise `ParallelConfigError` unless the options of a watchdog make sense.

    Args:
        owner: Whose options they are, for the message.
        timeout: See `Watchdog`.
        phase_timeouts: See `Watchdog`.
        action: See `Watchdog`.
    """
    problems = Problems()
    if not is_number(timeout) or not timeout > 0:
        problems.add(f"{owner}: timeout is {timeout!r}; it is above 0, in seconds", "timeout=300.0")
    if action not in ("report", "abort"):
        problems.add(f"{owner}: action is {action!r}; it is 'report' or 'abort'", 'action="report"', "action: report")
    names = ("first_step", *PHASES)
    if not isinstance(phase_timeouts, Mapping):
        problems.add(
            f"{owner}: phase_timeouts is {phase_timeouts!r}; it gives seconds by phase",
            'phase_timeouts={"save": 900.0}',
            "phase_timeouts: {save: 900.0}",
        )
        phase_timeouts = {}
    for name, seconds in phase_timeouts.items():
        if name not in names or not is_number(seconds) or not seconds > 0:
            problems.add(
                f"{owner}: phase_timeouts has {name!r}: {seconds!r}; it gives seconds above 0 for {', '.join(names)}",
                'phase_timeouts={"save": 900.0}',
                "phase_timeouts: {save: 900.0}",
            )
    problems.raise_if_any()


def leaders_of(ranks: int) -> list[int]:
    """The ranks that look at all the others, each when those before it are silent; the last is on another node."""
    return sorted({0, min(1, ranks - 1), ranks - 1})


class Watchdog:
    """Watches training from a thread of each rank.

    A rank stands still when it comes to no new phase within the limit of the phase it is in: `timeout`, what
    `phase_timeouts` says, or five times what the phase usually takes here, whichever is longest. Rank 0 looks at all
    ranks, rank 1 does when rank 0 is silent and the last rank when both are, and each rank looks at itself when the
    store of the process group does not answer. Clocks of different nodes are never compared, only how long something
    takes.

    Ranks tell each other through a connection of their own to that store; training makes no collective for it. While
    it runs, `faulthandler.dump_traceback_later` belongs to it.

    Args:
        directory: A folder ``<n>`` for each stall is made in it: ``report.txt``, and for each rank the stacks of all
            threads and torch's flight recorder.
        timeout: Seconds without progress in data, forward, backward and optimizer.
        phase_timeouts: The same for other phases, and ``first_step`` for the training phases until a step is done; 900
            or `timeout` for ``init``, ``first_step``, ``load``, ``save`` and ``validation`` where it says nothing.
            ``idle`` is not watched.
        action: ``"report"``, or ``"abort"`` to end all processes with status 76 after it.
        board: Through which the ranks talk; None makes one of the default process group at the start.
        events: Where a stall is noted.
        interval: Seconds between two looks; a tenth of `timeout`, 5 at most, when None.
        clock: Seconds that never go back.

    Attributes:
        heartbeat: What is watched.
        rank: This rank.

    Raises:
        ParallelConfigError: If an option makes no sense.

    Example::

        with Watchdog("run/stalls", timeout=120) as watchdog:
            for step, batch in enumerate(loader):
                watchdog.enter("forward", step)
                ...
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        timeout: float = 300.0,
        phase_timeouts: Mapping[str, float] | None = None,
        action: Action = "report",
        board: Board | None = None,
        events: EventLog | None = None,
        interval: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_options("Watchdog", timeout, phase_timeouts or {}, action)
        self.heartbeat = Heartbeat(clock)
        self.directory = Path(directory)
        self.interval = min(5.0, timeout / 10) if interval is None else interval
        self._late = max(LATE * self.interval, LATE_AT_LEAST)
        self._limits: dict[str, float] = dict.fromkeys(TRAINING, timeout) | {"idle": math.inf}
        self._limits |= dict.fromkeys(QUIET_PHASES, max(QUIET, timeout)) | dict(phase_timeouts or {})
        self._action = action
        self._board = board
        self.rank, self._ranks = (0, 1) if board is None else (board.rank, board.ranks)
        self._events = events or EventLog(None)
        self._clock = clock
        self._host = socket.gethostname()
        self._watched = threading.get_ident()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._stuck: TextIO | None = None
        self._beats = 0
        self._ended: str | None = None
        now = clock()
        # When a look began, by thread, and since when this process runs without having been stopped.
        self._looked = {"tick": now, "guard": now}
        self._awake = now
        self._lost: str | None = None
        self._heard: dict[int, tuple[int, float]] = {}
        self._answered = 0
        self._stall: _Stall | None = None
        self._exit_at = math.inf

    # -- what training says --------------------------------------------------------------------------------------

    def enter(self, phase: str, step: int | None = None, micro: int = 0) -> None:
        """Training comes to a phase; see `Heartbeat.enter`."""
        self.heartbeat.enter(phase, step, micro)

    def phase(self, phase: str) -> AbstractContextManager[None]:
        """Be in a phase for a while, then again in the one before."""
        return self.heartbeat.phase(phase)

    # -- begin and end -------------------------------------------------------------------------------------------

    def start(self, name: str | None = None) -> Self:
        """Begin to watch the thread that calls this; on all ranks.

        Args:
            name: The same on all ranks and new for each watchdog; None lets rank 0 choose one and send it.
        """
        self._watched = threading.get_ident()
        if self._board is None and dist.is_available() and dist.is_initialized():
            names = [name or uuid.uuid4().hex]
            if name is None:
                dist.broadcast_object_list(names)
            self._board = Board.of_default_group(names[0])
            self.rank, self._ranks = dist.get_rank(), dist.get_world_size()
            if self._board is None and self._ranks > 1:
                _log.warning("The store of the process group gives no second connection; each rank watches itself.")
        self._stuck = self._open_stuck_file()
        self._looked = dict.fromkeys(self._looked, self._clock())
        self._awake = self._clock()
        for look in (self.tick, self.guard):
            thread = threading.Thread(target=self._run, args=(look,), name="stall watchdog", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def close(self, ended: str = "it came to its end") -> None:
        """Stop watching, and tell the others that this rank has ended.

        Args:
            ended: How, in words.
        """
        if not self._threads:
            return
        self._ended = ended
        # What ends a rank after that decision is that others have gone already; `guard` ends it.
        if math.isinf(self._exit_at):
            self._stop.set()
        for thread in self._threads:
            # One may wait for a store that does not answer.
            thread.join(2 * self.interval + 1)
        self._threads = []
        faulthandler.cancel_dump_traceback_later()
        if self._stuck is not None:
            self._stuck.close()
            self._stuck = None
        # Nothing is left behind where no stall was found; a process that was stopped for a while has dumped, too.
        with suppress(OSError):
            file = self._stuck_file(self.rank)
            if not file.stat().st_size or not any(path.is_dir() for path in self.directory.iterdir()):
                file.unlink()
            self.directory.rmdir()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close() if error is None else self.close(f"{type(error).__name__}: {error}".splitlines()[0])

    def _run(self, look: Callable[[], None]) -> None:
        look()
        while not self._stop.wait(self.interval):
            look()
        # Once more, to tell that this rank has ended.
        look()

    # -- looks ---------------------------------------------------------------------------------------------------

    def limit(self, phase: str) -> float:
        """Seconds without progress that are normal in a phase."""
        is_first = phase in TRAINING and not self.heartbeat.has_stepped
        limit = max(self._limits["first_step"], self._limits[phase]) if is_first else self._limits[phase]
        return max(limit, USUAL * self.heartbeat.usual(phase))

    def tick(self) -> None:
        """Tell the others where this rank is, answer a question, and look at the others where that is its part."""
        now = self._begin("tick")
        board = self._board
        if board is None or self._lost is not None:
            return
        try:
            board.publish(self._record(now))
            self._answer(board)
            self._look_at_all(board, now)
        except (RuntimeError, ValueError) as e:  # a store that is gone is a DistError, half an answer a ValueError
            self._lost = f"{type(e).__name__}: {e}".splitlines()[0]

    def guard(self) -> None:
        """Look at this rank where nobody else can, and end it when that was decided; never waits for the store."""
        now = self._begin("guard")
        if now >= self._exit_at:
            os._exit(STALLED)
        record = self._record(now)
        limit = record["limit"]
        if self._stuck is not None and self._ended is None:
            # The dump is made by a thread that needs no lock of Python, should this one not come again.
            later = min(max(0.8 * self._limits["forward"], 1.0), threading.TIMEOUT_MAX)
            faulthandler.dump_traceback_later(later, file=self._stuck)
        alone = self._board is None or self._lost is not None or now - self._looked["tick"] > self._late
        if not alone or self._ended is not None:
            return
        if record["still"] <= limit:
            if self._stall is not None:
                self._go_on(now)
        elif self._stall is None or not self._stall.is_reported:
            self._report_alone(now, record)

    def _begin(self, look: str) -> float:
        now = self._clock()
        if now - self._looked[look] > self._late:
            # Time in which nothing could move is no stall; a thread that waited for the store was not stopped.
            other = max(self._looked.values())
            if now - other > self._late:
                self._awake = now
        self._looked[look] = now
        return now

    def _record(self, now: float) -> dict[str, Any]:
        beat = self.heartbeat.now
        self._beats += 1
        return {
            "beat": self._beats,
            "host": self._host,
            "step": beat.step,
            "phase": beat.phase,
            "micro": beat.micro,
            "still": max(0.0, now - max(beat.since, self._awake)),
            "limit": self.limit(beat.phase),
            "thread": self._watched,
            "ended": self._ended,
        }

    # -- questions -----------------------------------------------------------------------------------------------

    def _answer(self, board: Board) -> None:
        question = board.question()
        if question is None:
            return
        number, folder = question
        if number > self._answered:
            self._answered = number
            board.answer(number, self._facts(Path(folder)))
        # The rank that has found the stall ends later, see `guard`.
        if board.is_aborted and self._stall is None:
            os._exit(STALLED)

    def _facts(self, folder: Path) -> dict[str, Any]:
        """What this rank knows of itself; what is long goes to files."""
        records, groups = [], []
        # A recorder of another torch, whose words mean something else, tells nothing.
        with suppress(KeyError, RuntimeError, TypeError, ValueError):
            records = _compat.flight_records()
            groups = _compat.collectives(records)
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"rank-{self.rank}-stacks.txt").open("w") as file:
                faulthandler.dump_traceback(file)
            if records:
                (folder / f"rank-{self.rank}-flight-recorder.json").write_text("\n".join(records))
        return {"stack": stack_of(self._watched), "call": call_of(self._watched), "groups": groups}

    # -- all ranks -----------------------------------------------------------------------------------------------

    def _look_at_all(self, board: Board, now: float) -> None:
        leaders = leaders_of(board.ranks)
        if board.rank not in leaders:
            return
        records = board.records()
        for rank, record in records.items():
            if record["beat"] != self._heard.get(rank, (0, 0.0))[0]:
                self._heard[rank] = record["beat"], now
        silent = {r: now - max(self._heard.get(r, (0, 0.0))[1], self._awake) for r in range(board.ranks)}
        earlier = leaders[: leaders.index(board.rank)]
        leads = all(rank in records and self._is_gone(silent[rank], records[rank]) for rank in earlier)
        if self._ended is not None or not (leads or self._stall is not None):
            return
        still = [rank for rank in range(board.ranks) if self._stands_still(silent[rank], records.get(rank))]
        if not still and self._stall is not None:
            self._go_on(now)
        elif still and self._stall is None:
            folder = self._next_folder()
            self._stall = _Stall(folder, now, board.ask(str(folder)))
        elif still and self._stall is not None and not self._stall.is_reported:
            self._conclude(board, self._stall, records, silent, now)

    def _stands_still(self, silent: float, record: Mapping[str, Any] | None) -> bool:
        if record is None:
            return silent > self._limits["init"]
        if record["ended"] is not None:
            return False
        return record["still"] > record["limit"] or silent > max(record["limit"], self._late)

    def _is_gone(self, silent: float, record: Mapping[str, Any]) -> bool:
        return record["ended"] is not None or self._is_missing(silent, record)

    def _is_missing(self, silent: float, record: Mapping[str, Any]) -> bool:
        return record["ended"] is None and silent > max(self._late, 5 * self.interval)

    def _conclude(
        self,
        board: Board,
        stall: _Stall,
        records: Mapping[int, dict[str, Any]],
        silent: Mapping[int, float],
        now: float,
    ) -> None:
        """Report a stall when all ranks that can have answered."""
        answers = board.answers(stall.question)
        missing = {rank for rank, record in records.items() if self._is_missing(silent[rank], record)}
        awaited = {rank for rank, record in records.items() if record["ended"] is None} - missing - answers.keys()
        if awaited and now - stall.asked < 3 * self.interval + 1:
            return
        views = {rank: RankView(rank, still=silent[rank], silent=None) for rank in range(board.ranks)}
        for rank, record in records.items():
            answer = answers.get(rank, {})
            views[rank] = RankView(
                rank,
                record["host"],
                record["step"],
                record["phase"],
                record["micro"],
                record["still"] + silent[rank],
                silent[rank] if rank in missing else 0.0,
                record["ended"],
                self._stuck_stack(rank, record["thread"]) if rank in missing else answer.get("stack", []),
                answer.get("call"),
                answer.get("groups", []),
            )
        self._tell(stall, views, judge(views))
        if self._action == "abort":
            board.abort()

    def _stuck_stack(self, rank: int, thread: int) -> list[str]:
        """What a rank that keeps Python's lock has dumped, where the folder is the same for all."""
        with suppress(OSError):
            last = self._stuck_file(rank).read_text().rpartition("Timeout (")[2]
            stacks = [text for text in last.split("hread 0x") if text.startswith(f"{thread:016x} ")]
            return [line.strip() for line in stacks[0].splitlines()[1:] if line.strip()][:STACK_LINES] if stacks else []
        return []

    # -- reports -------------------------------------------------------------------------------------------------

    def _report_alone(self, now: float, record: Mapping[str, Any]) -> None:
        folder = self._next_folder(f"-rank-{self.rank}" if self._ranks > 1 else "")
        self._stall = stall = _Stall(folder, now, 0)
        facts = self._facts(folder)
        view = RankView(
            self.rank,
            self._host,
            record["step"],
            record["phase"],
            record["micro"],
            record["still"],
            **facts,
        )
        verdicts = judge({self.rank: view})
        if self._board is not None:
            why = self._lost or "no answer"
            text = f"{verdicts[self.rank].text}. Rank 0 or the agent that serves the store is missing ({why})"
            verdicts = {self.rank: Verdict("waiting", text)}
        self._tell(stall, {self.rank: view}, verdicts)

    def _tell(self, stall: _Stall, views: Mapping[int, RankView], verdicts: Mapping[int, Verdict]) -> None:
        stall.is_reported = True
        text = report(views, verdicts, str(stall.folder))
        with suppress(OSError):
            stall.folder.mkdir(parents=True, exist_ok=True)
            (stall.folder / "report.txt").write_text(f"{text}\n")
        verdict_texts = {rank: verdict.text for rank, verdict in verdicts.items()}
        step = max(view.step for view in views.values())
        still = max(view.still for view in views.values())
        facts = {"verdicts": verdict_texts, "guilty": guilty(verdicts), "still": still, "report": str(stall.folder)}
        self._events.write("stall", step, **facts)
        if self._action == "abort":
            self._events.write("end", step, how="stalled", status=STALLED)
            # The others hear of it first. Decided before the log, whose lock the thread that hangs may have.
            self._exit_at = self._clock() + 3 * self.interval
        _log.error("%s", text)

    def _go_on(self, now: float) -> None:
        stall, self._stall = self._stall, None
        if stall is not None and stall.is_reported:
            seconds = now - stall.asked
            _log.warning("Training goes on, %.1f s after it was found to stand still (%s).", seconds, stall.folder)
            self._events.write("stall_over", self.heartbeat.now.step, seconds=seconds, report=str(stall.folder))

    def _next_folder(self, suffix: str = "") -> Path:
        taken = [int(name) for path in self.directory.glob("*") if (name := path.name.partition("-")[0]).isdigit()]
        return self.directory / f"{max(taken, default=0) + 1}{suffix}"

    def _open_stuck_file(self) -> TextIO | None:
        for attempts_left in (1, 0):
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                return self._stuck_file(self.rank).open("w")
            except OSError as e:
                # Another rank may just have ended and removed the folder, as it was empty.
                if not attempts_left:
                    _log.warning("Reports of stalls go to the log only; %s cannot be written: %s", self.directory, e)
        return None

    def _stuck_file(self, rank: int) -> Path:
        return self.directory / f"stuck-rank-{rank}.txt"


class _Stall:
    """A stall that was found: where it is told, when all ranks were asked about it, and by which question."""

    def __init__(self, folder: Path, asked: float, question: int) -> None:
        self.folder = folder
        self.asked = asked
        self.question = question
        self.is_reported = False
