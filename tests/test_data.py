"""Data on several ranks: batches of any kind, samplers, iterable datasets, and loaders that end at different times."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from probe import TWO, Probe, numbers, trainer

from lightning_par.testing import run_ranks


def warned(caught: list[warnings.WarningMessage], text: str) -> int:
    return sum(text in str(w.message) for w in caught)


# -- evaluation: every sample once --------------------------------------------------------------------------------


def evaluated(strategy: str, samples: list[int], batch_size: int, **options: Any) -> tuple[dict[str, Any], float, int]:
    module = Probe()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(strategy, use_distributed_sampler=True)
        run.test(module, [numbers(n, batch_size, **options) for n in samples], verbose=False)
    return dict(module.seen), {k: float(v) for k, v in run.callback_metrics.items()}, warned(caught, "evaluated twice")


@pytest.mark.parametrize("strategy", TWO)
@pytest.mark.parametrize(("samples", "batch_size"), [([5], 2), ([7], 3), ([9], 4), ([3, 6], 2)], ids=str)
def test_every_sample_is_evaluated_once(strategy: str, samples: list[int], batch_size: int) -> None:
    (first, metrics, warned), (second, others, _) = run_ranks(2, evaluated, strategy, samples, batch_size)
    [(alone, expected, _)] = run_ranks(1, evaluated, "auto", samples, batch_size)
    assert sorted(first["test"] + second["test"]) == sorted(alone["test"])
    assert metrics == others == pytest.approx(expected, rel=1e-12)
    assert not warned
