"""The suite of published packages: its table is that of its cases, and it sees what it is there to see."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from examples.compat.cases import CASES
from examples.compat.harness import BATCH, BOUND, RANKS, STEPS, Record, batches, compare, train
from examples.compat.run import LAYOUTS, columns, run_case
from lightning_par.parallel.replicate import GradientReducer
from lightning_par.testing import run_ranks

ROOT = Path(__file__).parent.parent
COMPAT = ROOT / "examples" / "compat"


def test_the_table_has_a_row_for_each_case() -> None:
    pins = (ROOT / "constraints.txt").read_text() + (COMPAT / "requirements.txt").read_text()
    versions = {name.replace("_", "-"): version for name, version in re.findall(r"([\w-]+)==([\w.]+)", pins)}
    rows = [line for line in (COMPAT / "README.md").read_text().splitlines() if line.startswith("| ")]
    assert rows[0] == f"| {' | '.join(columns(LAYOUTS))} |"
    for row, case in zip(rows[1:], CASES.values(), strict=True):
        release = versions[case.package.replace("_", "-")]
        assert row.startswith(f"| {case.package} | {release} | {case.module} | {case.kind} | ")
        differences = [float(cell.split(",")[0]) for cell in row.strip("| ").split(" | ")[-len(LAYOUTS) :]]
        assert max(differences) <= BOUND


def test_one_process_takes_the_batches_of_the_ranks() -> None:
    ranks = [batches(rank) for rank in range(RANKS)]
    assert batches(None) == [batch for step in zip(*ranks, strict=True) for batch in step]
    assert sum(batches(None, whole_steps=True), []) == sum(batches(None), [])
    assert sorted(sum(batches(None), [])) == list(range(RANKS * STEPS * BATCH))


def record(**changes: torch.Tensor) -> Record:
    tensors = {"a": torch.ones(3), "b": torch.full((2,), 4.0)}
    return Record([1.0, 2.0], [tensors | changes], tensors)


def test_a_difference_of_any_kind_is_measured() -> None:
    one = Record([1.0, 1.0, 2.0, 2.0], record().gradients, record().weights)
    assert compare([record(), record()], one).largest == 0
    off = compare([record(), record(a=torch.tensor([1.0, 1.0, 3.0]))], one)
    assert (off.losses, off.gradients, off.weights) == (0, 0.5, 0)
    assert compare([record(), record(a=torch.full((3,), float("nan")))], one).gradients == float("inf")
    late = record()
    late.losses = [1.0, 3.0]
    assert compare([record(), late], one).losses == 0.5
    other = copy.deepcopy(one)
    other.weights["b"] += 1
    assert compare([record(), record()], other).weights == pytest.approx(0.2)


def test_other_steps_and_names_are_no_comparison() -> None:
    one = Record([1.0, 1.0, 2.0, 2.0], record().gradients, record().weights)
    with pytest.raises(ValueError, match=r"rank 1 has gradients and weights \[3, 2\], one process \[2, 2\]"):
        compare([record(), record(c=torch.ones(1))], one)
    with pytest.raises(ValueError, match="nothing was trained"):
        compare([Record(weights=one.weights)], Record(weights=one.weights))
    with pytest.raises(ValueError, match="2 losses of all ranks, 4 of one process"):
        compare([record()], one)


def train_without_averaging(name: str, strategy: str) -> Record:
    def forget(reducer: GradientReducer, bucket: object) -> None:
        bucket.work.wait()  # type: ignore[attr-defined]
        bucket.work = bucket.flat = None  # type: ignore[attr-defined]

    with mock.patch.object(GradientReducer, "_receive", forget):
        return train(name, strategy)


def test_a_case_agrees_and_its_gradients_matter() -> None:
    cells, same = run_case(CASES["lightning-demo"], LAYOUTS)
    assert same, cells
    [alone] = run_ranks(1, train, "lightning-demo", None)
    broken = compare(run_ranks(RANKS, train_without_averaging, "lightning-demo", "par_ddp"), alone)
    assert broken.gradients > 1e-2
    assert broken.weights > 1e-4


def test_a_package_that_is_missing_is_no_success() -> None:
    cells, same = run_case(replace(CASES["lightning-demo"], package="no-such-package"), LAYOUTS)
    assert not same
    assert "not installed" in cells
