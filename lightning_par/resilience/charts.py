"""Charts as inline SVG; colours are classes of the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 880, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 24, 34
MAX_POINTS = 600

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """Points joined by a line, in a colour class ``c0`` .. ``c7``; a faint one is of steps that were done again."""

    points: Sequence[Point]
    colour: str
    label: str
    faint: bool = False


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step: a ``restart``, ``rewind``, ``skip`` or ``checkpoint``."""

    kind: str
    step: float
    text: str


@dataclass(frozen=True)
class Area:
    """A layer of a stack: a value at each step."""

    values: Sequence[float]
    colour: str
    label: str


class _Plane:
    """Where steps and values lie in the picture."""

    def __init__(self, steps: Sequence[float], low: float, high: float, *, log: bool = False) -> None:
        self.first, self.last = min(steps), max(steps)
        if self.first == self.last:
            self.first, self.last = self.first - 1, self.last + 1
        self.log = log
        if not log:
            pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
            low, high = (0.0 if low == 0 else low - pad), high + pad
        self.low, self.high = low, high
        if log:
            self.low, self.high = low / 1.1, high * 1.1

    def x(self, step: float) -> float:
        return _LEFT + (step - self.first) / (self.last - self.first) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
        return _TOP + (1 - (value - low) / (high - low)) * (HEIGHT - _TOP - _BOTTOM)

    def axes(self, unit: str) -> str:
        parts = []
        for value in _ticks(self.low, self.high, 5, log=self.log):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
        for step in _ticks(self.first, self.last, 8):
            if step == int(step):
                at = f'x="{self.x(step):.1f}" y="{HEIGHT - _BOTTOM + 18}"'
                parts.append(f'<text {at} text-anchor="middle">{short(step)}</text>')
        parts.append(f'<text x="0" y="12">{escape(unit)}</text>')
        parts.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 2}" text-anchor="end">step</text>')
        return "".join(parts)


def line_chart(lines: Sequence[Line], unit: str, title: str, marks: Sequence[Mark] = ()) -> str:
    """Draw lines over steps, with marks; logarithmic where values differ by more than 50 times.

    Args:
        lines: At least one with points.
        unit: What the values are.
        title: For those who cannot see it.
        marks: What happened.
    """
    values = [value for line in lines for _, value in line.points]
    steps = [step for line in lines for step, _ in line.points] + [mark.step for mark in marks]
    log = min(values) > 0 and max(values) > 50 * min(values)
    plane = _Plane(steps, min(values), max(values), log=log)
    parts = [plane.axes(f"{unit} (log)" if log else unit)]
    parts += [_mark(plane, mark) for mark in marks if mark.kind == "restart"]
    for line in lines:
        points = thin(line.points)
        style = f"line {line.colour}{' faint' if line.faint else ''}"
        if len(points) == 1:
            (step, value), *_ = points
            parts.append(f'<circle class="dot {style}" cx="{plane.x(step):.1f}" cy="{plane.y(value):.1f}" r="3"/>')
        else:
            path = " ".join(f"{plane.x(step):.1f},{plane.y(value):.1f}" for step, value in points)
            parts.append(f'<polyline class="{style}" points="{path}"/>')
    parts += [_mark(plane, mark) for mark in marks if mark.kind != "restart"]
    return _svg(parts, title)


def area_chart(steps: Sequence[float], areas: Sequence[Area], unit: str, title: str) -> str:
    """Draw values at the same steps on top of each other."""
    chosen = range(0, len(steps), max(1, math.ceil(len(steps) / MAX_POINTS)))
    steps = [steps[i] for i in chosen]
    if len(steps) == 1:
        steps = [steps[0] - 0.5, steps[0] + 0.5]
        chosen = range(0, 1)
    tops = [0.0] * len(steps)
    layers = []
    for area in areas:
        bottoms = tops
        values = [area.values[i] for i in chosen]
        tops = [below + value for below, value in zip(bottoms, values * (len(steps) // len(values)), strict=True)]
        layers.append((area, bottoms, tops))
    plane = _Plane(steps, 0.0, max(tops) or 1.0)
    parts = []
    for area, bottoms, above in layers:
        there = [f"{plane.x(step):.1f},{plane.y(top):.1f}" for step, top in zip(steps, above, strict=True)]
        back = [f"{plane.x(step):.1f},{plane.y(low):.1f}" for step, low in zip(steps, bottoms, strict=True)]
        parts.append(f'<polygon class="area {area.colour}" points="{" ".join(there + back[::-1])}"/>')
    return _svg([*parts, plane.axes(unit)], title)


def bar(parts: Sequence[tuple[str, str, float]], title: str) -> str:
    """Draw one bar of parts, each of a label, a colour class and a share."""
    at, drawn = 0.0, []
    for label, colour, share in parts:
        width = WIDTH * share
        text = f"<title>{escape(label)} {100 * share:.1f} %</title>"
        drawn.append(f'<rect class="area {colour}" x="{at:.1f}" width="{width:.1f}" y="0" height="28">{text}</rect>')
        at += width
    return _svg(drawn, title, 28)


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Name colours (``c0``) and marks (``m-skip``)."""
    spans = (f'<span><i class="key {colour}"></i>{escape(label)}</span>' for colour, label in entries)
    return f'<p class="legend">{"".join(spans)}</p>'


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Leave out points that nobody would see: of each of `limit` / 2 parts the lowest and the highest stay."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept = []
    for i in range(0, len(points), size):
        part = points[i : i + size]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def short(value: float) -> str:
    """A number in a few characters."""
    size = abs(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = 1e3 if letter == "k" else limit
            return f"{value / scale:.4g}{letter}"
    return f"{value:.4g}"


def _svg(parts: Sequence[str], title: str, height: int = HEIGHT) -> str:
    opening = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return f"{opening}{''.join(parts)}</svg>"


def _mark(plane: _Plane, mark: Mark) -> str:
    x, text = plane.x(mark.step), f"<title>{escape(mark.text)}</title>"
    bottom = HEIGHT - _BOTTOM
    if mark.kind in ("restart", "rewind"):
        line = f'<line class="mark m-{mark.kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>'
        # A line is hard to point at.
        return f'<g>{text}{line}<rect class="hit" x="{x - 4:.1f}" y="{_TOP}" width="8" height="{bottom - _TOP}"/></g>'
    y = bottom - (4 if mark.kind == "skip" else 0)
    shape = f"M{x - 5:.1f} {y} L{x + 5:.1f} {y} L{x:.1f} {y - 9} Z"
    return f'<g>{text}<path class="mark m-{mark.kind}" d="{shape}"/></g>'


def _ticks(low: float, high: float, count: int, *, log: bool = False) -> list[float]:
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [m * 10.0**p for p in powers for m in ((1, 2, 5) if len(powers) <= 3 else (1,))]
        return [value for value in found if low <= value <= high]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw)
    first = math.ceil(low / step)
    return [i * step for i in range(first, math.floor(high / step) + 1)]
