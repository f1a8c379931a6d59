"""The collective of each optimizer step, and the events of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_par.resilience.control import WIDTH, StepControl
from lightning_par.resilience.errors import DesyncError
from lightning_par.resilience.events import FILE, EventLog, read_events
from lightning_par.testing import run_ranks


def largest() -> Any:
    rank = dist.get_rank()
    control = StepControl()
    take_away = control.add("stop", lambda: int(rank == 1))
    first = dict(control.exchange(7, nonfinite=rank, spike=-rank))
    take_away()
    second = dict(control.exchange(8))
    heard = control.take("stop"), control.take("stop"), control.take("nonfinite")
    control.close()
    return first, second, heard, control.exchanges


def test_every_rank_hears_the_largest_number() -> None:
    for told in run_ranks(2, largest):
        assert told == ({"stop": 1, "nonfinite": 1, "spike": 0}, {}, (1, None, 1), 2)


def differ(what: str) -> str:
    rank = dist.get_rank()
    control = StepControl()
    if what == "alike":
        control.add("fingerprint", lambda: 40 + rank, alike=True)
    try:
        control.exchange(5 + rank * (what == "step"), **({"spike": 1} if rank and what == "names" else {}))
    except DesyncError as error:
        return str(error)
    finally:
        control.close()
    return "nothing"


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("step", "step: rank 0: 5; rank 1: 6"),
        ("names", "numbers: rank 0: ; rank 1: spike"),
        ("alike", "fingerprint: rank 0: 40; rank 1: 41"),
    ],
)
def test_ranks_that_differ_are_named(what: str, line: str) -> None:
    for message in run_ranks(2, differ, what):
        assert line in message
        assert len(message.splitlines()) == 2


def test_one_process_needs_no_group() -> None:
    control = StepControl()
    assert control.exchange(1, nonfinite=1) == {"nonfinite": 1}


def test_too_many_numbers_and_names_that_are_there_are_refused() -> None:
    control = StepControl()
    control.add("stop", lambda: 0)
    with pytest.raises(ValueError, match="a source 'stop' already"):
        control.add("stop", lambda: 0, alike=True)
    with pytest.raises(ValueError, match=f"room for {WIDTH}"):
        control.exchange(1, **{f"n{i}": 0 for i in range(WIDTH)})


def test_events_are_lines_that_survive_a_cut(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "run", clock=lambda: 12.5)
    log.write("skip", 3, value=float("nan"), ranks=(1,), nested={"a": [float("inf")]})
    EventLog(tmp_path / "run", clock=lambda: 13.5).write("end")
    EventLog(None).write("nobody")
    with (tmp_path / "run" / FILE).open("a") as file:
        file.write('{"time": 1, "ki')
    skip = {"time": 12.5, "kind": "skip", "step": 3, "value": "nan", "ranks": [1], "nested": {"a": ["inf"]}}
    assert read_events(tmp_path / "run") == [skip, {"time": 13.5, "kind": "end"}]
    for line in (tmp_path / "run" / FILE).read_text().splitlines()[:2]:
        json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert read_events(tmp_path) == []


def test_events_that_cannot_be_written_cost_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    log = EventLog(tmp_path / "file" / "run")
    log.write("start")
    log.write("end")
    assert len(caplog.records) == 1
