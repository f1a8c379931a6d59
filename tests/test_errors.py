"""The error that lists every problem with its fix."""

from __future__ import annotations

import copy
import pickle

import pytest

from lightning_par.errors import ParallelConfigError, Problem, Problems


def test_a_problem_without_a_fix_is_its_text() -> None:
    assert str(Problem("3 ranks are lost")) == "3 ranks are lost"


@pytest.mark.parametrize(
    ("python", "yaml"),
    [
        ("tp_size=2", "tp_size: 2"),
        ("compile=True", "compile: true"),
        ("compile=False", "compile: false"),
        ("mixed_precision=None", "mixed_precision: null"),
        ('cp_method="ring"', 'cp_method: "ring"'),
    ],
)
def test_yaml_is_derived_from_a_keyword_argument(python: str, yaml: str) -> None:
    assert str(Problem("no", python)) == f"no\n    fix: {python}    (YAML: {yaml})"


@pytest.mark.parametrize("python", ["start 8 ranks", "model.tie_weights()", "trainer.devices=8", "layout = resolve(8)"])
def test_an_instruction_has_no_yaml(python: str) -> None:
    assert str(Problem("no", python)) == f"no\n    fix: {python}"


def test_a_given_yaml_wins() -> None:
    text = str(Problem("no", "a=1, b=2", "{a: 1, b: 2}"))
    assert text.endswith("fix: a=1, b=2    (YAML: {a: 1, b: 2})")


def test_the_error_lists_every_problem() -> None:
    problems = Problem("tp is 3", "tp_size=2"), Problem("pp is 5", "pp_size=4"), Problem("ep is 7")
    error = ParallelConfigError(*problems)
    assert isinstance(error, ValueError)
    assert error.problems == problems
    assert str(error).splitlines() == [
        "3 problems in the parallel configuration:",
        "  - tp is 3",
        "    fix: tp_size=2    (YAML: tp_size: 2)",
        "  - pp is 5",
        "    fix: pp_size=4    (YAML: pp_size: 4)",
        "  - ep is 7",
    ]
    assert str(ParallelConfigError(problems[0])).startswith("1 problem in the")


@pytest.mark.parametrize("through", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_the_error_survives_the_way_between_processes(through) -> None:  # type: ignore[no-untyped-def]
    error = ParallelConfigError(Problem("tp is 3", "tp_size=2", "tp_size: 2"), Problem("ep is 7"))
    twin = through(error)
    assert type(twin) is ParallelConfigError
    assert twin.problems == error.problems
    assert str(twin) == str(error)


def test_collecting_keeps_order_and_drops_repetitions() -> None:
    first = Problems()
    first.add("tp is 3", "tp_size=2")
    first.add("tp is 3", "tp_size=2")
    first.add("tp is 3", "tp_size=4")
    second = Problems()
    second.add("ep is 7")
    second.extend(iter(first))
    second.extend([Problem("ep is 7")])
    assert len(first) == 2
    assert [problem.what for problem in second] == ["ep is 7", "tp is 3", "tp is 3"]
    with pytest.raises(ParallelConfigError) as info:
        second.raise_if_any()
    assert info.value.problems == tuple(second)


def test_nothing_found_raises_nothing() -> None:
    problems = Problems()
    problems.raise_if_any()
    assert list(problems) == []
