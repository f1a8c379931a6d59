"""What an older torch does not have is refused by name."""

from __future__ import annotations

import pytest

from lightning_par import ParallelLayout
from lightning_par.parallel.options import ParallelOptions
from lightning_par.parallel.precision import resolve_precision


@pytest.mark.parametrize(
    ("axis", "name"),
    [
        ("tp_size", "lightning_par.parallel.tensor._compat.CAN_SIMULATE"),
        ("pp_size", "lightning_par.parallel.pipeline._compat.CAN_DESCRIBE_STAGES"),
    ],
)
def test_axes_that_need_a_newer_torch_are_refused(axis: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ParallelLayout(**{axis: 2})
    assert ParallelOptions().problems(layout, resolve_precision("32-true")) == []
    monkeypatch.setattr(name, False)
    (problem,) = ParallelOptions().problems(layout, resolve_precision("32-true"))
    assert f"{axis} is 2" in str(problem)
    assert 'fix: pip install "torch>=2.12"' in str(problem)
    assert ParallelOptions().problems(ParallelLayout(), resolve_precision("32-true")) == []
