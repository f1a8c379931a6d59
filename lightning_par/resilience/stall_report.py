"""Which rank holds up the others, and why: a verdict for each rank, and a report for whoever has to look at it."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

Kind = Literal["missing", "ended", "mismatch", "late", "behind", "elsewhere", "waiting", "still"]
GUILTY: tuple[Kind, ...] = ("missing", "ended", "mismatch", "late", "behind", "elsewhere")
STACK_LINES = 6
_AROUND_WAITS = str(Path(__file__).with_name("_compat.py"))


@dataclass(frozen=True)
class RankView:
    """What is known about a rank.

    Attributes:
        rank: Global rank.
        host: Name of its node.
        step: Optimizer step.
        phase: Phase of the step.
        micro: Batch of the step.
        still: Seconds without progress.
        silent: Seconds without a sign of life, where that is long; None where the rank was never heard of.
        ended: How its training ended, where it did.
        stack: Lines of its Python stack, the innermost first.
        call: The function of torch's communication that it is in, as far as the stack tells; None outside.
        groups: Its collectives, see `lightning_par.resilience._compat.collectives`.
    """

    rank: int
    host: str = "?"
    step: int = 0
    phase: str = "init"
    micro: int = 0
    still: float = 0.0
    silent: float | None = 0.0
    ended: str | None = None
    stack: list[str] = field(default_factory=list)
    call: str | None = None
    groups: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a rank, of a kind and in words."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class _Wait:
    """Ranks that wait in a collective for others."""

    call: str
    waiting: list[int]
    for_whom: list[int]


def judge(views: Mapping[int, RankView]) -> dict[int, Verdict]:
    """Say of each rank whether it holds up the others, or waits, and for whom.

    Args:
        views: By rank.

    Returns:
        By rank.
    """
    verdicts = {rank: v for rank, view in views.items() if (v := _gone(view)) is not None}
    there = {rank: view for rank, view in views.items() if rank not in verdicts}
    for rank, text in _mismatches(there).items():
        verdicts[rank] = Verdict("mismatch", text)
    waits = _waits(there, verdicts)
    for rank in there.keys() - verdicts.keys():
        verdicts[rank] = _of_waits(views[rank], waits, there) or _of_places(views[rank], there)
    return dict(sorted(verdicts.items()))


def guilty(verdicts: Mapping[int, Verdict]) -> list[int]:
    """The ranks that hold up the others, those that are known best first."""
    return sorted((r for r, v in verdicts.items() if v.kind in GUILTY), key=lambda r: GUILTY.index(verdicts[r].kind))


def report(views: Mapping[int, RankView], verdicts: Mapping[int, Verdict], folder: str = "") -> str:
    """Write it for someone who was just woken up: where to look first, then all ranks, those that wait together.

    Args:
        views: By rank.
        verdicts: By rank.
        folder: Where stacks and flight recorders are.
    """
    first = guilty(verdicts)
    longest = max(view.still for view in views.values())
    lines = [f"Training stands still, {len(views)} {'rank' if len(views) == 1 else 'ranks'}, for {longest:.1f} s."]
    if first:
        names = "; ".join(f"rank {rank} on {views[rank].host}" for rank in first[:8])
        more = f" and {len(first) - 8} more" if len(first) > 8 else ""
        lines.append(f"Look first at {names}{more}.")
    elif len(views) > 1:
        lines.append(
            "No rank stands out. If all wait in the same collective, look at the network; if in different ones, the "
            "ranks call their collectives in different orders."
        )
    together: dict[str, list[int]] = defaultdict(list)
    for rank in [*first, *(rank for rank in sorted(views) if rank not in first)]:
        view = views[rank]
        together[f"{_place(view)}: {verdicts[rank].text}"].append(rank)
    for text, ranks in together.items():
        view = views[ranks[0]]
        host = f" ({view.host})" if len({views[rank].host for rank in ranks}) == 1 else ""
        lines.append(f"  {numbers(ranks)}{host}, {text}. No progress for {view.still:.1f} s.")
        lines += [f"      {line}" for line in view.stack]
    if folder:
        lines.append(f"Stacks of all threads and flight recorders: {folder}")
    return "\n".join(lines)


def numbers(ranks: Iterable[int]) -> str:
    """Name ranks, runs of them short: ``ranks 0-3, 6``."""
    ranks = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def stack_of(thread: int) -> list[str]:
    """The lines of a thread's Python stack that tell something, the innermost first.

    That is where it is, the package that called that, and code that belongs neither to Python nor to a package.

    Args:
        thread: Its `threading.get_ident()`.
    """
    frame = _innermost(thread)
    if frame is None:
        return []
    stack = list(reversed(traceback.extract_stack(frame)))
    # What waits in `select` may be a loader of data or a client of a database.
    package = next((i for i, entry in enumerate(stack) if not _is_of_python(entry.filename)), 0)
    shown = [entry for i, entry in enumerate(stack) if i in (0, package) or _is_users(entry.filename)]
    return [f"{e.filename}:{e.lineno} in {e.name}: {e.line or '?'}" for e in shown[:STACK_LINES]]


def call_of(thread: int) -> str | None:
    """The function of torch's communication that a thread is in, as far as its stack tells; None outside.

    Args:
        thread: Its `threading.get_ident()`.
    """
    frame = _innermost(thread)
    module = "" if frame is None else str(frame.f_globals.get("__name__"))
    if frame is None or not module.startswith("torch.distributed."):
        return None
    return f"{frame.f_code.co_name} of {module}"


def _innermost(thread: int) -> FrameType | None:
    """Where a thread is; what times the waits for collectives stands around each of them, and is no place."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename == _AROUND_WAITS:
        frame = frame.f_back
    return frame


def _is_of_python(file: str) -> bool:
    # Packages are in a folder inside that of Python's own files, outside of virtual environments.
    return file.startswith((sysconfig.get_paths()["stdlib"], "<")) and not _is_of_a_package(file)


def _is_of_a_package(file: str) -> bool:
    paths = sysconfig.get_paths()
    # Among the scripts is the command of this package.
    kept = (paths["purelib"], paths["platlib"], paths["scripts"])
    return file.startswith((*kept, str(Path(__file__).parent.parent)))


def _is_users(file: str) -> bool:
    return not (_is_of_python(file) or _is_of_a_package(file))


def _place(view: RankView) -> str:
    heard = "last heard of in " if view.silent else ""
    return f"{heard}step {view.step}, {view.phase}" + (f" of batch {view.micro}" if view.micro else "")


def _gone(view: RankView) -> Verdict | None:
    if view.silent is None:
        return Verdict("missing", "missing; it was never heard of, so its process did not come as far as training")
    if view.silent:
        text = (
            f"missing; no sign of life for {view.silent:.0f} s: its process is dead or stopped, its node cannot be "
            "reached, or it keeps Python's global lock"
        )
        return Verdict("missing", text)
    return Verdict("ended", f"its training has ended: {view.ended}") if view.ended else None


def _title(group: Mapping[str, Any]) -> str:
    """Name a group; with its ranks, as groups of different ranks may have the same name."""
    about = "" if group["about"] in ("", "undefined") else f" ({group['about']})"
    return f"group {group['name']}{about}" + (f" of {numbers(group['ranks'])}" if group["ranks"] else "")


def _mismatches(views: Mapping[int, RankView]) -> dict[int, str]:
    """Ranks that call another collective than the others under the same number of the same group."""
    calls: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    for rank, view in views.items():
        for group in view.groups:
            for number, call in group["calls"].items():
                calls[_title(group), int(number)][rank] = call
    texts: dict[int, str] = {}
    for (title, number), of in sorted(calls.items()):
        counts = Counter(of.values()).most_common()
        # What comes after the first difference differs because of it.
        if len(counts) < 2 or texts:
            continue
        usual = counts[0][0] if counts[0][1] > counts[1][1] else None
        for rank, call in of.items():
            if call != usual:
                others = {c: numbers(r for r, v in of.items() if v == c) for c in sorted(set(of.values()) - {call})}
                told = "; ".join(f"{who}: {what}" for what, who in others.items())
                texts[rank] = f"mismatch; it calls {call} as number {number} in {title}, {told}"
    return texts


def _waits(views: Mapping[int, RankView], gone: Collection[int]) -> list[_Wait]:
    """For each group in which ranks wait: who, in which call, and which ranks have not come to it."""
    members: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for rank, view in views.items():
        for group in view.groups:
            members[_title(group)][rank] = group
    waits = []
    for states in members.values():
        waiting = {rank: state for rank, state in states.items() if state["called"] > state["over"]}
        if not waiting:
            continue
        number = max(state["over"] for state in waiting.values()) + 1
        some = next(state for state in waiting.values() if state["called"] >= number)
        everyone = some["ranks"] or sorted(states)
        late = [r for r in everyone if r not in states or states[r]["called"] < number or r in gone]
        call = f"{some['calls'].get(str(number), 'a collective')}, number {number} in {_title(some)}"
        waits.append(_Wait(call, sorted(waiting), late))
    return waits


def _of_waits(view: RankView, waits: list[_Wait], views: Mapping[int, RankView]) -> Verdict | None:
    mine = [wait for wait in waits if view.rank in wait.waiting]
    if mine:
        wait = next((w for w in mine if w.for_whom), mine[0])
        others = [rank for rank in wait.for_whom if rank != view.rank]
        for_whom = f" for {numbers(others)}" if others else ", as all its ranks do"
        return Verdict("waiting", f"waits{for_whom} in {wait.call}")
    for wait in waits:
        if view.rank in wait.for_whom:
            return Verdict(
                "late", f"{_behind(view, views)}in no collective; {_wait(wait.waiting)} for it in {wait.call}"
            )
    return None


def _behind(view: RankView, views: Mapping[int, RankView]) -> str:
    return "behind, and " if view.step < max(other.step for other in views.values()) else ""


def _wait(ranks: list[int]) -> str:
    return f"{numbers(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _of_places(view: RankView, views: Mapping[int, RankView]) -> Verdict:
    """Without collectives that tell more: by who is in a call of `torch.distributed`, by step and phase."""
    calling = [other.rank for other in views.values() if other.call]
    if view.call:
        return Verdict("waiting", f"waits in {view.call}")
    if calling:
        behind = _behind(view, views)
        return Verdict("late", f"{behind}in no call of torch.distributed, in which {_wait(calling)}")
    furthest = max(other.step for other in views.values())
    if view.step < furthest:
        ahead = numbers(other.rank for other in views.values() if other.step == furthest)
        return Verdict("behind", f"behind; {ahead} came as far as step {furthest}")
    phases = Counter(other.phase for other in views.values() if other.step == furthest).most_common()
    if len(phases) > 1 and view.phase != phases[0][0]:
        most = numbers(other.rank for other in views.values() if other.phase == phases[0][0])
        return Verdict("elsewhere", f"in the same step as {most}, which are in {phases[0][0]}")
    return Verdict("still", "makes no progress")
