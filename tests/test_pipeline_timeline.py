"""The simulation of a schedule against what can be counted by hand and against published formulas."""

from __future__ import annotations

import random
from xml.etree import ElementTree

import pytest
from probe import some

from lightning_par.parallel.pipeline.picture import draw
from lightning_par.parallel.pipeline.schedules import (
    SCHEDULES,
    Action,
    compute_actions,
    default_stages_per_rank,
    schedule_problems,
)
from lightning_par.parallel.pipeline.timeline import Timeline, bubble_formula, simulate


def timeline(name: str, pp_size: int, n_microbatches: int, stages_per_rank: int = 0) -> Timeline:
    v = stages_per_rank or default_stages_per_rank(name)
    return simulate(compute_actions(name, pp_size, n_microbatches, v), 1, 1, 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_closed_forms_are_the_bubble_of_the_simulation(name: str) -> None:
    compared = 0
    for v in range(1, 4):
        for p in (1, 2, 3, 4, 8):
            for m in (*range(1, 17), 20, 24):
                formula = bubble_formula(name, p, m, v)
                if formula is not None and not schedule_problems(name, p, m, v):
                    assert timeline(name, p, m, v).bubble == pytest.approx(formula, abs=1e-12), (p, m, v)
                    compared += 1
    assert compared > 60 or name == "DualPipeV"


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "bubble", "in_flight"),
    [
        ("GPipe", 4, 8, 1, 9 / 33, 8),
        ("1F1B", 16, 128, 1, 45 / 429, 16),
        ("Interleaved1F1B", 8, 32, 2, 21 / 213, 11.5),
        ("LoopedBFS", 4, 8, 2, 9 / 57, 8),
        ("InterleavedZeroBubble", 4, 8, 2, 3 / 51, 4),
        ("ZBVZeroBubble", 4, 8, 2, 3 / 51, 4),
        ("DualPipeV", 4, 8, 2, 6 / 54, 4.5),
    ],
)
def test_idle_time_and_memory(name: str, p: int, m: int, v: int, bubble: float, in_flight: float) -> None:
    simulated = timeline(name, p, m, v)
    assert simulated.bubble == pytest.approx(bubble, abs=1e-12)
    assert simulated.in_flight[0] == in_flight


def test_1f1b_by_hand() -> None:
    """Two ranks, two micro-batches, forward 1, backward 2 + 3, transfer 0.5."""
    result = simulate(compute_actions("1F1B", 2, 2, 1), 1, 2, 3, 0.5)
    assert [(t.start, t.end) for t in result.ranks[0]] == [(0, 1), (1, 2), (8, 13), (14, 19)]
    assert [(t.start, t.end) for t in result.ranks[1]] == [(1.5, 2.5), (2.5, 7.5), (7.5, 8.5), (8.5, 13.5)]
    assert result.step_time == 19
    assert result.idle == {0: pytest.approx(7 / 19), 1: pytest.approx(7 / 19)}
    assert result.in_flight == {0: 2, 1: 1}


def test_the_first_stage_does_its_whole_backward_with_the_weights() -> None:
    actions = {0: [Action(kind, 0, 0) for kind in ("F", "I", "W")], 1: [Action(kind, 1, 0) for kind in ("F", "I", "W")]}
    result = simulate(actions, {0: 1, 1: 10}, {0: 2, 1: 20}, {0: 3, 1: 30})
    assert [(t.start, t.end) for t in result.ranks[0]] == [(0, 1), (31, 31), (31, 36)]
    assert [(t.start, t.end) for t in result.ranks[1]] == [(1, 11), (11, 31), (31, 61)]


def test_a_pair_sends_when_both_are_done() -> None:
    actions = {
        0: [Action("F", 0, 0), Action("F", 0, 1, True), Action("B", 3, 0), Action("F", 3, 1)],
        1: [Action("F", 1, 0), Action("F", 2, 0), Action("F", 1, 1), Action("F", 2, 1)],
    }
    actions[0].insert(1, Action("F", 3, 0))
    result = simulate(actions, 1, 1, 1, 0.5)
    of_rank_1 = {t.action: t.start for t in result.ranks[1]}
    # Rank 0: F0(0) 0-1, F3(0) from 1 + 2 transfers + 2 forwards, F0(1) and B3(0) right after it.
    assert [t.start for t in result.ranks[0]] == [0, 4, 5, 6, 10.5 + 0.5]
    assert of_rank_1[Action("F", 1, 1)] == 8.5


def test_no_transfer_within_a_rank() -> None:
    result = simulate(compute_actions("ZBVZeroBubble", 2, 3, 2), 1, 1, 1, 10)
    starts = {t.action: t.start for timed in result.ranks.values() for t in timed}
    assert starts[Action("F", 1, 0)] == 11
    assert starts[Action("F", 2, 0)] < 22


def test_actions_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        simulate({0: [Action("B", 0, 0), Action("F", 0, 0)]}, 1, 1, 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_rank_does_two_things_at_once_nor_anything_too_early(name: str) -> None:
    """With times drawn at random, checked against the rules of a pipeline rather than against the simulation."""
    rng = random.Random(0)
    p, m, v = 3, 9, default_stages_per_rank(name)
    times = [{stage: rng.uniform(0.5, 2) for stage in range(p * v)} for _ in range(3)]
    result = simulate(compute_actions(name, p, m, v), *times, transfer=0.25)
    when = {}
    for rank, actions in result.ranks.items():
        assert all(a.end <= b.start for a, b in zip(actions, actions[1:], strict=False))
        when |= {(t.action.kind, t.action.stage, t.action.microbatch): (t, rank) for t in actions}
    for (kind, stage, i), (timed, rank) in when.items():
        neighbour = when.get(("F", stage - 1, i)) if kind == "F" else None
        if kind in ("B", "I"):
            neighbour = when.get(("B", stage + 1, i)) or when.get(("I", stage + 1, i))
        if neighbour is not None:
            assert timed.start >= neighbour[0].end + (0.25 if neighbour[1] != rank else 0)
    work = sum(sum(t.values()) for t in times) * m
    idle = sum(result.idle.values()) * result.step_time
    assert idle == pytest.approx(p * result.step_time - work)


# -- the picture -----------------------------------------------------------------------------------------------------


def boxes(picture: str) -> dict[str, ElementTree.Element]:
    """The boxes of a picture by what a viewer says about them."""
    svg = "{http://www.w3.org/2000/svg}"
    groups = ElementTree.fromstring(picture).findall(f"{svg}g")
    return {str(g.findtext(f"{svg}title")).split(":")[0]: g[1] for g in groups}


@pytest.mark.parametrize("name", some(SCHEDULES, "1F1B", "ZBVZeroBubble", "DualPipeV"))
def test_a_picture_has_a_box_for_each_computation_where_and_as_long_as_it_runs(name: str) -> None:
    shown = timeline(name, 4, 8)
    drawn = boxes(draw(shown))
    names = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradient of the weights"}
    first = shown.ranks[0][0]
    begin = float(drawn["forward, stage 0, micro-batch 0"].attrib["x"])
    scale = float(drawn["forward, stage 0, micro-batch 0"].attrib["width"]) / (first.end - first.start)
    expected = {}
    for (kind, stage, i, _), start, end in (t for actions in shown.ranks.values() for t in actions):
        if end > start:
            label = "backward" if (kind, stage) == ("W", 0) else names[kind]
            expected[f"{label}, stage {stage}, micro-batch {i}"] = (begin + start * scale, (end - start) * scale)
    assert drawn.keys() == expected.keys()
    for about, (x, width) in expected.items():
        assert float(drawn[about].attrib["x"]) == pytest.approx(x, abs=0.3)
        assert float(drawn[about].attrib["width"]) == pytest.approx(width, abs=0.3)


def test_kinds_and_stages_of_a_rank_have_colours_of_their_own_and_the_legend_shows_them() -> None:
    picture = draw(timeline("InterleavedZeroBubble", 2, 4, 3), "a < b")
    colours = {about.split(",")[0] + about.split(",")[1]: box.attrib["fill"] for about, box in boxes(picture).items()}
    on_rank_1 = {what: colour for what, colour in colours.items() if what[-1] in "135"}
    assert len(on_rank_1) == len(set(on_rank_1.values())) == 9
    legend = picture.rpartition("</g>")[2]
    assert all(colour in legend for colour in colours.values())
    assert "a &lt; b: " in picture


def test_a_large_picture_is_of_a_sensible_size() -> None:
    picture = draw(timeline("1F1B", 8, 64))
    width, height = (float(ElementTree.fromstring(picture).attrib[side]) for side in ("width", "height"))
    assert 2000 < width < 2600
    assert height < 400
    assert ">63</text>" in picture
    assert "bubble 9.9%" in picture
