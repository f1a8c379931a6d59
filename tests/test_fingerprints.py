"""Numbers by which ranks find out whether they hold the same bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightning_par.parallel.fingerprints import Fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool])
def test_fingerprints_see_each_bit_and_the_order(dtype: torch.dtype) -> None:
    fingerprint = Fingerprint()
    value = (torch.arange(5 if dtype != torch.float64 else 70_000) % 251).to(dtype)
    before = fingerprint(value)
    assert fingerprint(value.clone()) == before
    content = value.view(torch.uint8)
    for i in range(0, content.numel(), max(1, content.numel() // 16)):
        for bit in range(8 if dtype != torch.bool else 1):
            content[i] ^= 1 << bit
            assert fingerprint(value) != before
            content[i] ^= 1 << bit
    for i, j in ((0, 1), (-1, 0)):
        changed = value.clone()
        changed[[i, j]] = changed[[j, i]]
        assert fingerprint(changed) != before or value[i] == value[j]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_fingerprints_do_not_depend_on_the_number_of_threads() -> None:
    """The first rank of a Trainer that starts the others has more threads than they."""
    torch.manual_seed(0)
    value = torch.randn(300_000)
    found = set()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.add(int(Fingerprint()(value)))
    assert len(found) == 1
