"""Cross entropy over divided classes is torch's, in value and gradient."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_par.parallel.tensor.cross_entropy import _RowLosses, divided_cross_entropy
from lightning_par.testing import RanksFailed, run_ranks

CLASSES, ROWS = 12, 7


def losses(cases: list[dict[str, Any]], dtype: torch.dtype, scale: float) -> list[tuple[float, float]]:
    """The largest errors of value and gradient against torch on the whole logits, for each case."""
    group, errors = dist.group.WORLD, []
    assert group is not None
    here = CLASSES // group.size()
    for case in cases:
        generator = torch.Generator().manual_seed(0)
        whole = (torch.randn(ROWS, CLASSES, generator=generator, dtype=torch.float64) * scale).to(dtype)
        target = torch.randint(CLASSES, (ROWS,), generator=generator)
        options = dict(case)
        ignored = options.pop("ignored", 0)
        target[:ignored] = options.get("ignore_index", -100)
        if options.pop("weighted", False):
            options["weight"] = torch.rand(CLASSES, generator=generator, dtype=dtype)
        cotangent = torch.linspace(1, 2, ROWS, dtype=dtype) if options.get("reduction") == "none" else torch.tensor(1.5)
        expected_logits = whole.clone().requires_grad_()
        logits = whole[:, group.rank() * here : (group.rank() + 1) * here].clone().requires_grad_()
        expected = F.cross_entropy(expected_logits, target, **options)
        expected.backward(cotangent.to(dtype).expand_as(expected))
        loss = divided_cross_entropy(logits, target, group, **options)
        loss.backward(cotangent.to(dtype).expand_as(loss))
        gradient = expected_logits.grad[:, group.rank() * here : (group.rank() + 1) * here]  # type: ignore[index]
        assert loss.dtype == expected.dtype
        difference = torch.nan_to_num(loss - expected, nan=1.0 if ignored < ROWS else 0.0)
        errors.append((difference.abs().max().item(), torch.nan_to_num(logits.grad - gradient).abs().max().item()))  # type: ignore[operator]
    return errors


ALL = [
    {"reduction": reduction, "label_smoothing": smoothing, "weighted": weighted, "ignored": ignored}
    for reduction, smoothing, weighted, ignored in itertools.product(
        ("mean", "sum", "none"), (0.0, 0.1, 1.0), (False, True), (0, 3)
    )
]


@pytest.mark.parametrize(("ranks", "scale"), [(2, 1.0), (2, 300.0), (3, 1.0)])
def test_every_option_gives_the_numbers_of_torch(ranks: int, scale: float) -> None:
    cases = [*ALL, {"ignore_index": 5, "ignored": 2}, {"ignore_index": -1, "ignored": 1}]
    for errors in run_ranks(ranks, losses, cases, torch.float64, scale):
        for case, error in zip(cases, errors, strict=True):
            assert max(error) < 1e-12 * scale, case


def test_all_rows_ignored_is_nan_as_in_torch() -> None:
    for errors in run_ranks(2, losses, [{"ignored": ROWS}], torch.float64, 1.0):
        assert errors == [(0.0, 0.0)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)])
def test_smaller_floats(dtype: torch.dtype, bound: float) -> None:
    for errors in run_ranks(2, losses, ALL[:6], dtype, 1.0):
        assert max(itertools.chain(*errors)) <= bound


def wrong_target() -> None:
    divided_cross_entropy(torch.zeros(2, 4), torch.tensor([0, 8]), dist.group.WORLD)  # type: ignore[arg-type]


def test_a_target_that_is_no_class_is_an_error() -> None:
    with pytest.raises(RanksFailed, match="not in 0 ... 7"):
        run_ranks(2, wrong_target)


def out_of_range() -> None:
    # A GPU reports an index that is out of range when it gets there; the CPU at once.
    with pytest.raises(RuntimeError, match="index 4 is out of bounds"):
        _RowLosses.apply(torch.zeros(2, 4), torch.tensor([0, 8]), None, 0.0, dist.group.WORLD)


def test_a_gpu_would_report_what_is_no_class() -> None:
    run_ranks(2, out_of_range)
