"""`lightning-par report`: the page, the text, and where the time of a run went."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lightning_par.cli import main
from lightning_par.resilience.charts import MAX_POINTS, Line, line_chart, short, thin
from lightning_par.resilience.events import FILE, read_events
from lightning_par.resilience.goodput import LOSSES, goodput
from lightning_par.resilience.report_page import page, text
from lightning_par.resilience.run_summary import summarise

STEP_SECONDS = 0.5
SPLIT = {
    "data": 0.05,
    "forward_backward": 0.25,
    "communication": 0.1,
    "optimizer": 0.05,
    "checkpoint": 0.05,
    "other": 0,
}


class Story:
    """Events of a run, told by hand."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.events: list[dict[str, Any]] = []

    def tell(self, kind: str, step: int | None = None, after: float = 0.0, **facts: Any) -> None:
        self.time += after
        self.events.append({"time": self.time, "kind": kind, **({} if step is None else {"step": step}), **facts})

    def start(self, step: int, after: float = 0.0) -> None:
        facts = {"world_size": 2, "layout": "dp_shard 2", "host": "node<1>&", "strategy": "FSDP2Strategy"}
        self.tell("start", step, after + 5.0, init_seconds=4.0, load_seconds=1.0, **facts)

    def steps(self, begin: int, end: int, every: int = 10, **facts: Any) -> None:
        for step in range(begin + every, end + 1, every):
            known = {"loss": 1 + 9 * math.exp(-step / 50), "step_seconds": STEP_SECONDS, "split": SPLIT}
            known |= {"units": "tokens", "per_second": 1234.0, "memory_bytes": [2**30, 2**31], "mfu": 0.4}
            known["own_seconds"] = [0.3, 0.5]
            self.tell("step", step, STEP_SECONDS * every, **(known | facts))


def whole_story() -> Story:
    story = Story()
    story.start(0)
    story.steps(0, 60)
    story.tell("checkpoint", 50, path="/runs/<a>/step-00000050", blocked=0.2, written=1.5)
    story.tell("skip", 65, 2.5, rule="nonfinite", ranks=[1], value="nan", batches={"1": [3]})
    story.steps(60, 90)
    story.tell("rewind", 90, from_step=90, to_step=70, source="memory")
    story.steps(70, 100)
    # Killed; the next start replays 50 steps.
    story.start(50, after=20.0)
    story.steps(50, 120)
    story.tell("straggler", 120, rank=1, host="node<1>&", phase="forward_backward", relative=0.6, individual=0.7)
    story.tell("stall", 120, 30.0, verdicts={"1": "is <behind>"}, report="/runs/a/stall")
    story.tell("end", 120, how="StallError: hung", status=76)
    story.start(120, after=10.0)
    story.steps(120, 150)
    story.tell("stop", 150, signal="SIGTERM", rank=0, saved="/runs/a/step-00000150")
    story.tell("end", 150, how="SystemExit: 75", status=75)
    return story


def test_goodput_adds_up_to_the_wall() -> None:
    story = whole_story()
    found = goodput(story.events)
    assert set(found.lost) == set(LOSSES)
    assert found.productive + sum(found.lost.values()) == pytest.approx(found.wall)
    assert found.wall == pytest.approx(story.time - 1000.0)
    timed = 9 + 3 + 7 + 3  # windows of ten steps
    saves = timed * 10 * STEP_SECONDS * 0.1
    again = (2 + 5) * 10 * STEP_SECONDS * 0.9
    skipped = STEP_SECONDS * 0.9
    assert found.lost["saves"] == pytest.approx(saves)
    assert found.lost["replayed steps"] == pytest.approx(again)
    assert found.lost["skipped steps"] == pytest.approx(skipped)
    assert found.lost["setting up"] == pytest.approx(12.0)
    assert found.lost["loading"] == pytest.approx(3.0)
    assert found.lost["stalls"] == pytest.approx(30.0)
    assert found.lost["between starts"] == pytest.approx(30.0)
    assert found.productive == pytest.approx(timed * 10 * STEP_SECONDS * 0.9 - again - skipped)


def test_time_that_is_not_there_is_in_no_step() -> None:
    story = Story()
    story.start(0)
    # Two optimizers count two steps for each that was timed.
    story.tell("step", 20, 5.0, step_seconds=0.5)
    assert goodput(story.events).productive == pytest.approx(5.0)
    assert goodput([]).share == 0.0


class Checker(HTMLParser):
    """Notes what is open, and what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.fetched: list[str] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href") or "url(" in (value or "")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def checked(events: list[dict[str, Any]], name: str = "run") -> Checker:
    written = page(summarise(events), name)
    checker = Checker()
    checker.feed(written)
    checker.close()
    assert checker.open == []
    assert checker.fetched == []
    assert "script" not in checker.tags
    assert "url(" not in written
    assert not re.search(r'="[^"]*\b(nan|inf)\b', written), "a coordinate"
    return checker


def test_the_page_has_every_part_and_needs_nothing_else() -> None:
    page_of = checked(whole_story().events, "a <b>run</b> & more")
    for words in (
        "Loss", "Throughput", "Where the time of a step goes", "Memory by rank", "Goodput", "Starts", "Checkpoints",
        "Work by rank, and stragglers",
        "a <b>run</b> & more", "node<1>&", "stopped by SIGTERM on rank 0, saved /runs/a/step-00000150",
        "left no word: killed, or still running", "stalled; rank 1: is <behind>", "start 2 at step 50",
        "rewind from step 90 to 70, from memory",
        "checkpoint of step 50: /runs/<a>/step-00000050", "step 65 skipped: nonfinite, value nan, ranks 1", "0.60",
    ):  # fmt: skip
        assert words in page_of.words, words
    assert "b" in page_of.tags, "those of the tiles"


@pytest.mark.parametrize(
    "events",
    [
        [],
        [{"time": 1.0, "kind": "step", "step": 3, "loss": "nan"}],
        [{"time": 1.0, "kind": "start", "step": 0}, {"time": 1.0, "kind": "step", "step": 1, "loss": 2.0}],
        [{"time": 1.0, "kind": "skip"}, {"kind": "step"}, {"time": 2.0}, {"time": "x", "kind": "end"}],
        [{"time": 1.0, "kind": "stall", "verdicts": None}, {"time": 2.0, "kind": "rewind", "step": 4}],
        [{"time": 1.0, "kind": "step", "step": 5, "step_seconds": 0.1, "split": {}, "memory_bytes": [None, 3]}],
        [{"time": 1.0, "kind": "step", "step": 5, "loss": 0.0, "per_second": 0.0, "split": {"data": 0.0}}],
        [
            {"time": 1e20, "kind": "start"},
            {"time": -1.0, "kind": "start"},
            {"time": 1.0, "kind": "step", "step": 10**400},
        ],
        [{"time": 1.0, "kind": "start", "init_seconds": math.nan, "load_seconds": math.inf, "step": 10**400}],
        [{"time": 1.0, "kind": "skip", "step": 3, "ranks": 1}, {"time": 2.0, "kind": "stall", "guilty": 3}],
        [{"time": 1.0, "kind": "step", "step": 5, "memory_bytes": [math.nan, 10**400], "own_seconds": [math.inf, 1]}],
        [{"time": 1.0, "kind": "checkpoint"}, {"time": 1.0, "kind": "straggler"}, {"time": 1.0, "kind": "parity"}],
    ],
)
def test_any_events_make_a_page_and_a_text(events: list[dict[str, Any]]) -> None:
    checked(events)
    assert text(summarise(events), "run").startswith("run")


def test_a_stall_inside_of_a_step_is_lost_once_and_told_though_training_went_on() -> None:
    story = Story()
    story.start(0)
    story.steps(0, 20)
    # Ten steps of half a second, of which one stood still for a minute: seen after fifty seconds.
    story.tell("stall", 22, 51.0, verdicts={"0": "waits", "1": "is late"}, guilty=[1], still=50.0, report="stalls/1")
    story.tell("stall_over", 22, 10.0, seconds=10.0)
    story.tell("step", 30, 4.0, step_seconds=6.5, split=SPLIT)
    story.tell("end", 30, how="ValueError: other", status=1)
    found = goodput(story.events)
    assert found.lost["stalls"] == pytest.approx(60.0)
    assert found.productive + found.lost["saves"] == pytest.approx(15.0)
    assert found.productive + sum(found.lost.values()) == pytest.approx(found.wall)
    run = summarise(story.events)
    assert run.starts[0].end == "ValueError: other"
    words = checked(story.events).words
    assert "rank 1: is late" in words
    assert "waits" not in words
    assert "1 min 00 s" in words


def test_times_that_go_back_and_starts_that_overlap_make_no_more_time_than_there_was() -> None:
    story = Story()
    story.start(0)
    story.steps(0, 100)
    story.time -= 40
    story.start(0)
    story.steps(0, 200)
    story.time -= 500
    story.tell("end", 100, how="finished", status=0)
    found = goodput(story.events)
    assert 0 < found.share <= 1
    assert min(found.lost.values()) >= 0
    assert found.productive + sum(found.lost.values()) == pytest.approx(found.wall)
    checked(story.events)


@pytest.mark.parametrize(("first", "count", "step"), [(1.0, 2, 30), ("nan", 4, 10), (math.nan, 4, 10)])
def test_a_loss_that_is_no_number_is_told(first: Any, count: int, step: int) -> None:
    story = Story()
    story.start(0)
    story.steps(0, 20, loss=first)
    story.steps(20, 40, loss="nan")
    told = checked(story.events).words
    assert (
        f"The loss is nan in {2 if first == 1.0 else 4} of the reports, first in step {30 if first == 1.0 else 10}."
        in told
    )
    assert "Not recorded" not in told
    assert "step 40, loss nan," in text(summarise(story.events), "run")


def test_ranks_that_a_restart_has_not_are_drawn_as_far_as_they_were() -> None:
    story = Story()
    story.start(0)
    story.steps(0, 50, memory_bytes=[2**30] * 4)
    story.start(50)
    story.steps(50, 100, memory_bytes=[2**30] * 2)
    assert "rank 3" in checked(story.events).words


def test_several_runs_in_one_directory_are_told_from_restarts() -> None:
    story = Story()
    story.start(0)
    story.steps(0, 50)
    story.tell("end", 50, how="finished", status=0)
    story.start(0)
    said = "Start 2 began at step 0 after start 1 had finished"
    assert said in checked(story.events).words
    assert said in text(summarise(story.events), "run")
    assert "had finished" not in checked(whole_story().events).words


def test_the_rank_that_failed_is_told_and_not_the_one_that_lost_it() -> None:
    story = Story()
    story.start(0)
    story.tell("error", 7, rank=1, how="ValueError: no image")
    story.tell("stall", 7, verdicts={"1": "its training has ended"}, guilty=[1])
    story.tell("end", 7, how="RuntimeError: gloo: connection closed by peer", status=1, follows=True)
    story.start(0)
    story.tell("error", 7, rank=1, how="OSError: no disk")
    story.start(0)
    story.tell("end", 7, how="ValueError: mine", status=1, follows=False)
    story.tell("error", 7, rank=1, how="ValueError: yours")
    ends = ["rank 1: ValueError: no image", "rank 1: OSError: no disk", "ValueError: mine"]
    assert [start.end for start in summarise(story.events).starts] == ends


def test_a_run_without_a_throughput_monitor_is_not_told_to_be_killed() -> None:
    story = Story()
    story.tell("checkpoint", 50, path="/runs/a/step-00000050", blocked=0.2, written=1.5)
    story.tell("parity", 60, rank=1, ranks=[1], parameter="norm.weight")
    said = text(summarise(story.events), "run")
    assert "steps 50 to 60: not recorded: ThroughputMonitor does so" in said
    assert "1 checkpoint, 0 stalls, 0 straggler reports, 1 parity difference\n" in said


def test_lines_that_are_no_events_are_left_out(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b'\xff\xfe\n{"time": 1.0, "kind": "start"}\n[]\n' + b"[" * 100_000 + b'\n{"time": 2')
    assert read_events(tmp_path) == [{"time": 1.0, "kind": "start"}]


def test_thousands_of_steps_are_thinned_out_and_peaks_stay() -> None:
    points = [(float(i), 100.0 if i == 7777 else 1.0 + i % 7) for i in range(20_000)]
    thinned = thin(points)
    assert len(thinned) <= MAX_POINTS + 2
    assert (7777.0, 100.0) in thinned
    assert thinned == sorted(thinned)
    story = Story()
    story.start(0)
    story.steps(0, 60_000)
    for step in range(0, 60_000, 10):
        story.tell("checkpoint", step)
    assert "checkpoint (each 15th is shown)" in page(summarise(story.events), "long")
    assert len(page(summarise(story.events), "long")) < 200_000


def test_values_far_apart_are_drawn_on_a_logarithmic_scale() -> None:
    assert "(log)" in line_chart([Line([(0, 0.01), (1, 10)], "c0", "loss")], "loss", "loss")
    assert "(log)" not in line_chart([Line([(0, 0.0), (1, 10)], "c0", "loss")], "loss", "loss")
    assert [short(value) for value in (0.00123, 1500, 12_345, 2e6, 3e9)] == ["0.00123", "1500", "12.35k", "2M", "3G"]


def write(directory: Path, events: list[dict[str, Any]]) -> None:
    lines = [json.dumps(event) for event in events]
    (directory / FILE).write_text("\n".join(lines) + '\n{"time": 1, "cut o')


def test_the_command_writes_text_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, whole_story().events)
    html = tmp_path / "out.html"
    monkeypatch.setattr(sys, "argv", ["lightning-par", "report", str(tmp_path), "--html", str(html)])
    assert main() == 0
    said = capsys.readouterr().out
    assert "start 3: " in said
    assert "1 skipped step, 1 rewind, 1 checkpoint, 1 stall, 1 straggler report\n" in said
    assert "goodput" in said
    assert html.read_text().startswith("<!doctype html>")
    monkeypatch.setattr(sys, "argv", ["lightning-par", "report", str(tmp_path / "nowhere")])
    assert main() == 2
    assert "there is no events.jsonl in" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["lightning-par", "report", str(tmp_path), "--html", str(tmp_path / "no" / "a")])
    assert main() == 2
    assert "the page cannot be written" in capsys.readouterr().err


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    write(tmp_path, whole_story().events)
    code = (
        "import sys; from lightning_par.cli import main; status = main(); "
        "sys.exit(status or 3 * any(name in sys.modules for name in ('torch', 'lightning')))"
    )
    subprocess.run([sys.executable, "-c", code, "report", str(tmp_path)], check=True, capture_output=True)


BROWSER = next((path for name in ("chromium", "google-chrome", "chrome") if (path := shutil.which(name))), None)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs a browser (Debian: chromium)")
@pytest.mark.parametrize(("scheme", "background"), [(1, (0xF7, 0xF7, 0xF5)), (0, (0x15, 0x18, 0x1B))])
def test_a_browser_shows_it_in_light_and_dark(scheme: int, background: tuple[int, ...], tmp_path: Path) -> None:
    html, picture = tmp_path / "out.html", tmp_path / "out.png"
    html.write_text(page(summarise(whole_story().events), "run"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1000,1400"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", f"--blink-settings=preferredColorScheme={scheme}"]
    command = [str(BROWSER), *flags, f"--screenshot={picture}", f"file://{html}"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    shown = Image.open(picture).convert("RGB")
    assert shown.getpixel((3, 3)) == background
    colours = {colour for _, colour in shown.getcolors(1 << 20)}
    lines = [(0x2F, 0x6F, 0xB3), (0xD9, 0x82, 0x2B)] if scheme else [(0x6E, 0xA8, 0xE4), (0xEF, 0xA7, 0x5F)]
    assert colours >= set(lines), "a line and a layer of the stack"
