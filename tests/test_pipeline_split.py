"""A chain is cut into stages of equal work; `show` says how, and draws the schedule."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lightning_par.cli import main
from lightning_par.errors import ParallelConfigError
from lightning_par.parallel.pipeline.probe import Chain, Cut
from lightning_par.parallel.pipeline.split import split_chain

CONFIG = str(Path(__file__).parent.parent / "examples" / "nanogpt" / "fsdp.yaml")
PIPELINE = ("--trainer.strategy", "par_pp")


def chain(flops: list[float], prefix: float = 0.0, suffix: float = 0.0, refused: tuple[int, ...] = ()) -> Chain:
    cuts = [Cut((), "a skip goes over it", "pp_size=1") if i in refused else Cut(()) for i in range(len(flops))]
    names = tuple(f"h.{i}" for i in range(len(flops)))
    return Chain(names, (), (), tuple(cuts), {}, {}, tuple(flops), prefix, suffix)


def counts(found: list[Any]) -> list[int]:
    return [stage.end - stage.begin for stage in found]


@pytest.mark.parametrize(
    ("flops", "prefix", "suffix", "stages", "expected"),
    [
        ([1] * 8, 0, 0, 4, [2, 2, 2, 2]),
        # A head as heavy as two blocks takes their place on the last stage.
        ([1] * 10, 0, 2, 3, [4, 4, 2]),
        ([1] * 6, 2, 0, 2, [2, 4]),
        ([4, 1, 1, 1, 1], 0, 0, 2, [1, 4]),
        # Nothing counted: blocks are equal.
        ([0] * 6, 0, 0, 3, [2, 2, 2]),
    ],
)
def test_the_busiest_stage_has_as_little_work_as_can_be(
    flops: list[float], prefix: float, suffix: float, stages: int, expected: list[int]
) -> None:
    found = split_chain(chain(flops, prefix, suffix), stages)
    assert counts(found) == expected
    assert sum(stage.share for stage in found) == pytest.approx(1)


def test_memory_decides_between_splits_of_nearly_equal_work() -> None:
    # 7 blocks on 2 stages: 3 + 4 or 4 + 3. The first stage holds more micro-batches.
    found = split_chain(chain([1] * 7), 2, memory=lambda index, begin, end: (end - begin) * (2 - index))
    assert counts(found) == [3, 4]
    other_way = split_chain(chain([1] * 7), 2, memory=lambda index, begin, end: (end - begin) * (1 + index))
    assert counts(other_way) == [4, 3]
    # Work comes first, however much memory says.
    steep = split_chain(chain([1] * 8), 2, memory=lambda index, begin, end: float(end - begin) * 9**-index)
    assert counts(steep) == [4, 4]


def test_cuts_are_made_where_the_chain_can_be_cut() -> None:
    assert counts(split_chain(chain([1] * 8, refused=(3, 4, 5)), 2)) in ([2, 6], [6, 2])
    with pytest.raises(ParallelConfigError, match=r"at 1 of 3 places, and 3 stages need 2: a skip goes over"):
        split_chain(chain([1] * 4, refused=(1, 2)), 3)


@pytest.mark.parametrize(
    ("split", "expected"), [([1, 3], [1, 3]), (["h.3"], [3, 1])], ids=["counts", "names of first blocks"]
)
def test_a_split_of_ones_own(split: Any, expected: list[int]) -> None:
    assert counts(split_chain(chain([1] * 4), 2, split)) == expected


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ([1, 1], [r"pp_split=[1, 1] is no division of 4 blocks into 2 stages", "pp_split=[2, 2]"]),
        ([4, 0], ["at least one each", "pp_split=[2, 2]"]),
        ([2, 1, 1], ["into 2 stages"]),
        (["h.9"], ["'h.9'", "pp_split=['h.2']"]),
        (["h.0"], ["'h.0'", "pp_split=['h.2']"]),
        (["h.1", "h.2"], ["does not name the first block of each of the stages 1 to 1"]),
        (["h.2"], ["a skip goes over it", "pp_size=1"]),
    ],
)
def test_a_wrong_split_is_refused_with_one_that_fits(split: Any, words: list[str]) -> None:
    with pytest.raises(ParallelConfigError) as error:
        split_chain(chain([1] * 4, refused=(2,)), 2, split)
    for word in words:
        assert word in str(error.value)


def test_fewer_blocks_than_stages_are_refused() -> None:
    with pytest.raises(ParallelConfigError, match=r"3 blocks, fewer than the 4 stages.*\n.*pp_size=3"):
        split_chain(chain([1] * 3), 4)


def show(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    # To read the default text takes longer than all that is shown.
    arguments = ["show", "--config", CONFIG, "--data.path", "README.md", *options]
    monkeypatch.setattr(sys, "argv", ["lightning-par", *arguments])
    monkeypatch.chdir(Path(__file__).parent.parent)
    return main()


def test_show_prints_the_stages_and_draws_the_schedule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "schedule.svg"
    assert show(monkeypatch, *PIPELINE, "--svg", str(picture)) == 0
    said = capsys.readouterr().out
    assert "2 stages on 2 ranks, 1F1B, 4 micro-batches; predicted bubble" in said
    assert re.search(r"0 +0 +blocks.0 ... blocks.1 \(2\)", said)
    assert re.search(r"1 +1 +blocks.2 ... blocks.3 \(2\)", said)
    assert "shared by the ranks 0, 1, their gradients summed: tokens.weight" in said
    # What a rank holds is what the largest rank owns, and less than the model.
    [whole] = re.findall(r"of ([\d,]+) parameters\n", said)
    [largest] = re.findall(r"([\d,]+) trainable parameters over 1 shards", said)
    owned = re.findall(r"([\d,]+) \(\d+\.\d%\) +[12]\n", said)
    assert largest in owned
    assert int(largest.replace(",", "")) < int(whole.replace(",", ""))
    drawing = ElementTree.parse(picture).getroot()
    assert drawing.tag.endswith("svg")
    assert "1F1B" in picture.read_text()


def test_show_draws_no_schedule_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert show(monkeypatch, "--svg", str(tmp_path / "none.svg")) == 2
    assert "pp_size is 1" in capsys.readouterr().err
