"""One page about a run, in a file that needs nothing else: no network, no scripts."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from lightning_par.resilience.charts import Area, Line, Mark, area_chart, bar, legend, line_chart, short
from lightning_par.resilience.events import number
from lightning_par.resilience.phases import PHASES
from lightning_par.resilience.run_summary import RunSummary, Start, loss_text, numbers, several_runs, verdicts

_LISTED = 12  # rows of a table of events
_RANK_LINES = 6
_MARKS = 400  # of a kind in a chart
_NO_STEPS = (
    "Not recorded: ThroughputMonitor does so each every_n_steps steps and at the end, but for the first two of a start."
)
_PHASE_COLOURS = {
    "forward_backward": "c0",
    "communication": "c1",
    "data": "c2",
    "optimizer": "c3",
    "checkpoint": "c4",
    "other": "c7",
}
_LOSS_COLOURS = ("c6", "c2", "c1", "c5", "c4", "c3", "c8", "c7")

_STYLE = """
:root { color-scheme: light dark; --page: #f7f7f5; --card: #fff; --ink: #1c1f23; --soft: #5d646c; --rule: #e2e3e0;
  --c0: #2f6fb3; --c1: #d9822b; --c2: #3a9a5b; --c3: #8a63b8; --c4: #c2456b; --c5: #2a9aa0; --c6: #a88a18;
  --c7: #a3a9b0;
  --c8: #6b7178; --bad: #c0272d; }
@media (prefers-color-scheme: dark) { :root { --page: #15181b; --card: #1d2125; --ink: #e7e9eb; --soft: #9aa2aa;
  --rule: #32383e; --c0: #6ea8e4; --c1: #efa75f; --c2: #6cc48b; --c3: #b594e0; --c4: #e8799a; --c5: #5fc7cc;
  --c6: #d8bd55; --c7: #6d757d; --c8: #8d959d; --bad: #ff7b7b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 22px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 8px; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 16px; margin-top: 16px; }
.lead { color: var(--soft); margin: 4px 0 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(100px, 1fr)); gap: 12px; margin-top: 16px; }
.tiles div { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 10px 12px; }
.tiles b { display: block; font-size: 18px; font-weight: 600; white-space: nowrap; }
.tiles span { display: block; line-height: 1.3; }
.tiles span { color: var(--soft); font-size: 13px; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.faint { opacity: .45; stroke-dasharray: 4 3; }
.area { stroke: var(--card); stroke-width: .6; }
.mark { stroke-width: 1.5; }
.hit { fill: transparent; }
.m-restart { stroke: var(--soft); stroke-dasharray: 5 4; }
.m-rewind { stroke: var(--c3); stroke-dasharray: 2 3; stroke-width: 2; }
.m-skip { fill: var(--bad); }
.m-checkpoint { fill: var(--c2); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 0 0 8px; color: var(--soft); font-size: 13px; }
.key { display: inline-block; width: 14px; height: 10px; margin-right: 6px; border-radius: 2px; }
.key.m-restart, .key.m-rewind { background: none; border-left: 2px dashed var(--soft); width: 4px; border-radius: 0; }
.key.m-rewind { border-left: 2px dotted var(--c3); }
.key.m-skip { background: var(--bad); clip-path: polygon(0 100%, 100% 100%, 50% 0); width: 11px; }
.key.m-checkpoint { background: var(--c2); clip-path: polygon(0 100%, 100% 100%, 50% 0); width: 11px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--soft); font-weight: 500; white-space: nowrap; }
th, td { padding: 5px 14px 5px 0; min-width: 36px; overflow-wrap: anywhere;
  border-bottom: 1px solid var(--rule); vertical-align: top; }
td:last-child:not(.n) { min-width: 180px; }
td.w, th.w { white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
.note { color: var(--soft); margin: 8px 0; }
.verdict { margin: 12px 0 0; }
""" + "".join(
    f".c{i}.line {{ stroke: var(--c{i}); }} .c{i}.area, .c{i}.dot {{ fill: var(--c{i}); }} "
    f".c{i}.key {{ background: var(--c{i}); }}\n"
    for i in range(9)
)


def page(run: RunSummary, name: str) -> str:
    """Write the page.

    Args:
        run: What happened.
        name: Of the run, for the title.
    """
    sections = [
        _loss(run),
        _throughput(run),
        _split(run),
        _memory(run),
        _goodput(run),
        _starts(run.starts),
        _stalls(run),
        _checkpoints(run),
        _stragglers(run),
    ]
    title = escape(name)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><main><h1>{title}</h1>{_lead(run)}{_tiles(run)}"
        f"{''.join(sections)}</main></body></html>\n"
    )


def _lead(run: RunSummary) -> str:
    if not run.starts:
        return '<p class="lead">No events are here yet: they are written from the first start of training on.</p>'
    facts = run.starts[-1].facts
    words = [str(facts[key]) for key in ("strategy", "layout") if facts.get(key)]
    if number(facts, "world_size") is not None:
        words.append(f"{facts['world_size']} ranks")
    words.append(f"{_date(run.starts[0].began)} to {_date(run.starts[-1].began + run.starts[-1].seconds)}")
    lines = f'<p class="lead">{escape(" · ".join(words))}</p>'
    if run.last is not None and run.last.get("verdict"):
        lines += f'<p class="verdict">Last report: {escape(str(run.last["verdict"]))}</p>'
    return lines


def _tiles(run: RunSummary) -> str:
    last = run.last or {}
    rate, mfu = number(last, "per_second"), number(last, "mfu")
    tiles = [
        ("last step", _count(max(start.last for start in run.starts)) if run.starts else "–"),
        ("loss", loss_text(last) or "–"),
        (f"{last.get('units', 'units')} per second", "–" if rate is None else short(rate)),
    ]
    if mfu is not None:
        tiles.append(("MFU", f"{100 * mfu:.1f} %"))
    tiles += [
        ("goodput", f"{100 * run.goodput.share:.0f} %" if run.goodput.wall else "–"),
        ("starts", str(len(run.starts))),
        ("skipped steps", _count(run.counts.get("skip", 0))),
        ("rewinds", _count(run.counts.get("rewind", 0))),
    ]
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>" for label, value in tiles)
    return f'<div class="tiles">{cells}</div>'


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _lines(run: RunSummary, name: str, colour: str) -> list[Line]:
    """A fact of the steps; where steps were done again later, the first ones are faint."""
    lines: list[Line] = []
    series = run.points(name)
    for i, points in enumerate(series):
        again = min((later[0][0] for later in series[i + 1 :]), default=float("inf"))
        kept = [point for point in points if point[0] < again]
        replaced = [point for point in points if point[0] >= again]
        lines += [Line(kept, colour, name)] if kept else []
        # The faint part begins where the other ends.
        lines += [Line([*kept[-1:], *replaced], colour, name, faint=True)] if replaced else []
    return lines


def _loss(run: RunSummary) -> str:
    lines = _lines(run, "loss", "c0")
    odd = [e for steps in run.steps for e in steps if number(e, "loss") is None and loss_text(e)]
    notes = [
        _note(f"The loss is {loss_text(e)} in {len(odd)} of the reports, first in step {e['step']:,}.") for e in odd[:1]
    ]
    if not lines:
        return _section("Loss", *(notes or [_note(_NO_STEPS)]))
    known = Counter(mark.kind for mark in run.marks)
    names = {"restart": "restart", "rewind": "rewind", "skip": "skipped step", "checkpoint": "checkpoint"}
    entries = [("c0", "mean loss of the data ranks")]
    marks: list[Mark] = []
    for kind, label in names.items():
        every = math.ceil(known[kind] / _MARKS)
        marks += [mark for mark in run.marks if mark.kind == kind][:: max(1, every)]
        said = f" (each {every}th is shown)" if every > 1 else ""
        entries += [(f"m-{kind}", label + said)] if known[kind] else []
    return _section("Loss", legend(entries), line_chart(lines, "loss", "loss by step", marks), *notes)


def _throughput(run: RunSummary) -> str:
    lines = _lines(run, "per_second", "c0")
    if not lines:
        return _section("Throughput", _note(_NO_STEPS))
    unit = f"{(run.last or {}).get('units', 'units')}/s"
    restarts = [mark for mark in run.marks if mark.kind == "restart"]
    return _section("Throughput", line_chart(lines, unit, "throughput by step", restarts))


def _split(run: RunSummary) -> str:
    known = [e for steps in run.steps for e in steps if isinstance(e.get("split"), dict)]
    if not known:
        return ""
    # A step that was done again counts as it was done last.
    by_step = {e["step"]: e["split"] for e in known}
    steps = sorted(by_step)
    order = sorted(PHASES, key=list(_PHASE_COLOURS).index)
    values = {phase: [1e3 * (number(by_step[step], phase) or 0.0) for step in steps] for phase in order}
    areas = [Area(values[phase], _PHASE_COLOURS[phase], _words(phase)) for phase in order]
    shown = legend([(area.colour, area.label) for area in areas])
    return _section("Where the time of a step goes", shown, area_chart(steps, areas, "ms", "step time by phase"))


def _memory(run: RunSummary) -> str:
    chart = _by_rank(run, "memory_bytes", 2**-30, "GiB")
    return _section("Memory by rank", chart) if chart else ""


def _by_rank(run: RunSummary, name: str, scale: float, unit: str) -> str:
    """Draw a fact that each rank has; nothing where it was not recorded."""
    found = {e["step"]: numbers(e, name) for steps in run.steps for e in steps}
    rows = sorted((step, [scale * value for value in row]) for step, row in found.items() if any(row))
    if not rows:
        return ""
    # A restart may have fewer ranks, or more.
    ranks = max(len(row) for _, row in rows)
    if ranks <= _RANK_LINES:
        named = [(f"rank {r}", [(step, row[r]) for step, row in rows if r < len(row)]) for r in range(ranks)]
    else:
        at: dict[str, Callable[[list[float]], float]] = {"most": max, "median": statistics.median, "least": min}
        named = [(f"{word} of the ranks", [(step, pick(row)) for step, row in rows]) for word, pick in at.items()]
    lines = [Line(points, f"c{i}", label) for i, (label, points) in enumerate(named)]
    return legend([(line.colour, line.label) for line in lines]) + line_chart(lines, unit, f"{name} by step and rank")


def _goodput(run: RunSummary) -> str:
    found = run.goodput
    if found.wall <= 0:
        return ""
    losses = [(name, _LOSS_COLOURS[i], found.lost[name]) for i, name in enumerate(found.lost)]
    parts = [("productive steps", "c0", found.productive), *losses]
    picture = bar([(name, colour, seconds / found.wall) for name, colour, seconds in parts], "where the time went")
    shown = [part for part in parts if part[2] > 0]
    names = legend([(colour, name) for name, colour, _ in shown])
    rows = [(name, _duration(seconds), f"{100 * seconds / found.wall:.1f} %") for name, _, seconds in shown]
    said = _note(f"Of {_duration(found.wall)} since the first start, {100 * found.share:.1f} % made the run go on.")
    return _section("Goodput", names, picture, said, _table(["", ">time", ">share"], rows))


def _starts(starts: Sequence[Start]) -> str:
    if not starts:
        return ""
    heads = ["start", "=when", ">lasted", ">steps", ">status", "=ranks and layout", "=host", "how it ended"]
    rows = []
    for start in starts:
        facts = start.facts
        layout = " · ".join(str(facts[key]) for key in ("world_size", "layout") if facts.get(key) is not None)
        status = "–" if start.status is None else str(start.status)
        steps = f"{start.first} to {start.last}"
        row = (str(start.number), _date(start.began), _duration(start.seconds), steps, status)
        rows.append((*row, layout, str(facts.get("host", "")), start.end))
    return _section("Starts", _table(heads, rows), *map(_note, several_runs(starts)))


def _checkpoints(run: RunSummary) -> str:
    found = run.checkpoints
    if not found:
        return _section("Checkpoints", _note("None was recorded; CommittedCheckpoint does so."))
    blocked = sorted(value for e in found if (value := number(e, "blocked")) is not None)
    said = f"{len(found)} were written."
    if blocked:
        said += f" Training waited {blocked[len(blocked) // 2]:.2f} s for one (median), {sum(blocked):.1f} s in all."
    rows = [
        (str(e.get("step", "")), _date(e["time"]), _seconds(e, "blocked"), _seconds(e, "written"), str(e.get("path")))
        for e in found[-_LISTED:][::-1]
    ]
    heads = ["=step", "=when", ">training waited", ">on the disk after", "path"]
    return _section("Checkpoints", _table(heads, rows), _note(said))


def _stragglers(run: RunSummary) -> str:
    found = run.stragglers
    own = _by_rank(run, "own_seconds", 1e3, "ms a step")
    parts = (
        [_note("A rank's own work: data, forward and backward, optimizer; no waiting for others."), own] if own else []
    )
    if found:
        rows = [
            (str(e.get("step", "")), str(e.get("rank", "")), str(e.get("host", "")), _words(str(e.get("phase", ""))),
             _score(e, "relative"), _score(e, "individual"))
            for e in found[-_LISTED:][::-1]
        ]  # fmt: skip
        parts.append(_table(["=step", "=rank", "=host", "=phase", ">to the fastest", ">to its best"], rows))
    else:
        parts.append(_note("No rank was flagged as slow."))
    if run.parity:
        differed = [
            tuple(str(e.get(name, "")) for name in ("step", "rank", "parameter")) for e in run.parity[-_LISTED:]
        ]
        parts.append("<h2>Replicas that differed</h2>" + _table(["=step", "=rank", "parameter"], differed))
    return _section("Work by rank, and stragglers", *parts)


def _stalls(run: RunSummary) -> str:
    if not run.stalls:
        return ""
    rows = [
        (str(stall.event.get("step", "")), _date(stall.event["time"]), _duration(stall.seconds),
         "; ".join(verdicts(stall.event)), str(stall.event.get("report", "")))
        for stall in run.stalls[-_LISTED:][::-1]
    ]  # fmt: skip
    heads = ["=step", "=when", ">lasted", "held up by", "report"]
    return _section("Stalls", _table(heads, rows))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table; a head that begins with > is of numbers, one with = of words that stay in one line."""
    classes = [{">": ' class="n"', "=": ' class="w"'}.get(head[:1], "") for head in heads]
    head = "".join(f"<th{cls}>{escape(text.lstrip('>='))}</th>" for text, cls in zip(heads, classes, strict=True))
    body = ""
    for row in rows:
        cells = (f"<td{cls}>{escape(cell)}</td>" for cell, cls in zip(row, classes, strict=True))
        body += f"<tr>{''.join(cells)}</tr>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def text(run: RunSummary, name: str) -> str:
    """Write the same for a terminal, in a few lines."""
    if not run.starts:
        return f"{name}: no events yet\n"
    lines = [name]
    for start in run.starts:
        status = "" if start.status is None else f" (status {start.status})"
        steps = f"steps {start.first} to {start.last}"
        lines.append(
            f"  start {start.number}: {_date(start.began)}, {_duration(start.seconds)}, {steps}: {start.end}{status}"
        )
    lines += [f"  {said}" for said in several_runs(run.starts)]
    last: Any = run.last
    if last is not None:
        rate, mfu, loss = number(last, "per_second"), number(last, "mfu"), loss_text(last)
        facts = [f"step {last['step']:,}"]
        facts += [f"loss {loss}"] if loss else []
        facts += [] if rate is None else [f"{short(rate)} {last.get('units', 'units')}/s"]
        facts += [] if mfu is None else [f"MFU {100 * mfu:.1f} %"]
        lines.append(f"  last report: {', '.join(facts)}")
        lines += [f"  {last['verdict']}"] if last.get("verdict") else []
    kinds = {
        "skip": "skipped step",
        "rewind": "rewind",
        "checkpoint": "checkpoint",
        "stall": "stall",
        "straggler": "straggler report",
    }
    # Few runs compare copies.
    kinds |= {"parity": "parity difference"} if run.parity else {}
    counts = [(run.counts.get(kind, 0), word) for kind, word in kinds.items()]
    lines.append("  " + ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts))
    found = run.goodput
    if found.wall > 0:
        lost = sorted(((seconds, what) for what, seconds in found.lost.items() if seconds > 0), reverse=True)
        words = ", ".join(f"{what} {_duration(seconds)}" for seconds, what in lost)
        lines.append(f"  goodput {100 * found.share:.0f} % of {_duration(found.wall)}; lost: {words or 'nothing'}")
    return "\n".join(lines) + "\n"


def _words(phase: str) -> str:
    return {"forward_backward": "forward and backward", "communication": "waiting for other ranks"}.get(phase, phase)


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _count(number: int) -> str:
    return f"{number:,}" if number < 1e6 else short(number)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours} h {rest // 60:02d} min" if hours else f"{rest // 60} min {rest % 60:02d} s"


def _seconds(event: Any, name: str) -> str:
    value = number(event, name)
    return "–" if value is None else f"{value:.2f} s"


def _score(event: Any, name: str) -> str:
    value = number(event, name)
    return "–" if value is None else f"{value:.2f}"
