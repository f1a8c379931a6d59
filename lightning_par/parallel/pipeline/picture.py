"""A picture of a schedule: one row for each rank, one box for each computation, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from lightning_par.parallel.pipeline.timeline import Timed, Timeline

# Of the palette of Okabe and Ito, which people with any kind of colour blindness can tell apart.
_COLOURS = {"F": (86, 180, 233), "B": (230, 159, 0), "I": (0, 158, 115), "W": (204, 121, 167)}
_NAMES = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradient of the weights"}
_LEFT, _RIGHT, _TOP, _ROW, _GAP = 64, 86, 44, 26, 5
_NARROWEST, _WIDEST = 680, 2400
_BOX = 17  # pixels of the shortest computation: room for two digits
_DIGIT = 0.6  # width of a digit, in sizes of the font


def draw(timeline: Timeline, title: str = "") -> str:
    """Draw a schedule as an SVG document that needs nothing else.

    Each box has the number of its micro-batch; colours tell forward from backward, and lighter shades the later of
    several stages of a rank. Grey is idle time. A viewer shows stage, micro-batch and times of the box under the mouse.

    Args:
        timeline: What `simulate` returned.
        title: What stands above the picture, before the bubble.
    """
    durations = [t.end - t.start for actions in timeline.ranks.values() for t in actions if t.end > t.start]
    width = min(max(timeline.step_time * _BOX / min(durations), _NARROWEST), _WIDEST)
    scale = width / timeline.step_time
    bottom = _TOP + len(timeline.ranks) * (_ROW + _GAP)
    shown = {_kind(timed) for actions in timeline.ranks.values() for timed in actions if timed.end > timed.start}
    kinds = [kind for kind in _COLOURS if kind in shown]
    stages = {rank: sorted({t.action.stage for t in actions}) for rank, actions in timeline.ranks.items()}
    most = max(map(len, stages.values()))
    unit, factor = _unit(timeline.step_time)
    heading = f"{title}: " if title else ""
    heading += f"{timeline.step_time * factor:.4g} {unit} a step, bubble {timeline.bubble:.1%}"
    parts = [_text(_LEFT, 26, heading, 16, "start")]
    for row, (rank, actions) in enumerate(timeline.ranks.items()):
        y = _TOP + row * (_ROW + _GAP)
        parts.append(_text(_LEFT - 8, y + 18, f"rank {rank}", 13, "end"))
        parts.append(_text(_LEFT + width + 8, y + 18, f"idle {timeline.idle[rank]:.1%}", 12, "start"))
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_ROW}" fill="#e6e6e6"/>')
        parts += [_box(t, stages[rank].index(t.action.stage), most, y, scale) for t in actions if t.end > t.start]
    parts += [*_axis(timeline.step_time, scale, bottom), *_legend(kinds, most, bottom + 58)]
    total_width, height = _LEFT + width + _RIGHT, bottom + 72
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total_width:.0f}" height="{height}" '
        f'viewBox="0 0 {total_width:.0f} {height}" font-family="sans-serif">\n<rect width="100%" height="100%" '
        'fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _box(timed: Timed, chunk: int, chunks: int, y: float, scale: float) -> str:
    action, kind, (unit, factor) = timed.action, _kind(timed), _unit(timed.end)
    x, width = _LEFT + timed.start * scale, (timed.end - timed.start) * scale
    times = f"{timed.start * factor:.4g} to {timed.end * factor:.4g} {unit}"
    about = f"{_NAMES[kind]}, stage {action.stage}, micro-batch {action.microbatch}: {times}"
    number = str(action.microbatch)
    size = min(12.0, (width - 2) / (_DIGIT * len(number)))
    label = _text(x + width / 2, y + _ROW / 2 + 0.36 * size, number, size, "middle") if size >= 5 else ""
    return (
        f'<g><title>{about}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" '
        f'fill="{_shade(kind, chunk, chunks)}" stroke="white" stroke-width="0.8"/>{label}</g>'
    )


def _kind(timed: Timed) -> str:
    """What is computed: torch leaves the whole backward of stage 0 to the part for the weights."""
    return "B" if timed.action[:2] == ("W", 0) else timed.action.kind


def _shade(kind: str, chunk: int, chunks: int) -> str:
    """The colour of a computation, mixed with white by up to 60 % for the last stage of a rank."""
    white = 0.6 * chunk / max(chunks - 1, 1)
    return "#" + "".join(f"{round(c + (255 - c) * white):02x}" for c in _COLOURS[kind])


def _axis(step_time: float, scale: float, y: float) -> Iterator[str]:
    unit, factor = _unit(step_time)
    interval = _round_up(90 / scale * factor)
    end = step_time * factor
    yield f'<path d="M{_LEFT} {y + 2}h{step_time * scale:.1f}" stroke="#444"/>'
    for i in range(math.floor(end / interval + 1e-9) + 1):
        x = _LEFT + i * interval / factor * scale
        yield f'<path d="M{x:.1f} {y + 2}v5" stroke="#444"/>'
        yield _text(x, y + 20, f"{i * interval:.4g}" + (f" {unit}" if i == 0 else ""), 11, "middle")


def _legend(kinds: list[str], chunks: int, y: float) -> Iterator[str]:
    x = float(_LEFT)
    entries = [(_NAMES[kind], [_shade(kind, chunk, chunks) for chunk in range(chunks)]) for kind in kinds]
    for name, shades in [*entries, ("idle", ["#e6e6e6"])]:
        for shade in shades:
            yield f'<rect x="{x:.0f}" y="{y - 11:.0f}" width="14" height="14" fill="{shade}"/>'
            x += 14
        yield _text(x + 5, y, name, 12, "start")
        x += 20 + 6.6 * len(name)
    if chunks > 1:
        yield _text(x, y, f"darkest to lightest: first to last of the {chunks} stages of a rank", 12, "start")


def _text(x: float, y: float, text: str, size: float, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.3g}" text-anchor="{anchor}">{escape(text)}</text>'


def _unit(seconds: float) -> tuple[str, float]:
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50 ... and of their tenths."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))
