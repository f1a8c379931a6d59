"""Plans that are found with a narrow copy of a block are those of the block; a copy of another structure is not used."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tensor_blocks
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_par.errors import ParallelConfigError
from lightning_par.parallel.tensor import BlockTensorPlan, plan_block, propose
from lightning_par.parallel.tensor import shrink as shrink_module
from lightning_par.parallel.tensor.shrink import Shrunk, shrink
from tensor_blocks import CASES, TOKENS, make

QUICK = ("llama", "phi3", "gpt2", "mixtral")
# What else is in the way where a group is not divided: its numbers are those of the copy.
ON_A_COPY = "no way to compute with slices gives the same numbers"


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks with heads of 32 features, which may become 8."""
    sizes = {"WIDTH": 192, "HEADS": 6, "KV_HEADS": 2, "HEAD_SIZE": 32, "FFN": 448}
    for name, size in sizes.items():
        monkeypatch.setattr(tensor_blocks, name, size)
    for config in (tensor_blocks.SIZES, tensor_blocks.GQA):
        monkeypatch.setitem(config, "hidden_size", 192)
        monkeypatch.setitem(config, "intermediate_size", 448)
        monkeypatch.setitem(config, "num_attention_heads", 6)
    monkeypatch.setitem(tensor_blocks.GQA, "num_key_value_heads", 2)


def planned(block: nn.Module, *args: Any, large: int, tp_size: int = 2, **kwargs: Any) -> BlockTensorPlan:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(propose, "LARGE", large)
        return plan_block(block, args, kwargs, tp_size, use_cache=False)


def said(plan: BlockTensorPlan) -> BlockTensorPlan:
    """A plan without the numbers of the copy it was found with."""
    modules = tuple(replace(m, reason=m.reason.partition(" (closest")[0]) for m in plan.modules)
    return replace(plan, modules=modules, verified="")


def shrunk(block: nn.Module, *args: Any, tp_size: int = 2, **kwargs: Any) -> Shrunk | None:
    return shrink(block, args, kwargs, tp_size)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
@pytest.mark.parametrize("tp_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_plan_is_that_of_the_wide_block(name: str, tp_size: int) -> None:
    case = make(name)
    full = planned(case.block, *case.args, **case.kwargs, tp_size=tp_size, large=10**9)
    small = planned(case.block, *case.args, **case.kwargs, tp_size=tp_size, large=0)
    assert "on a copy 1/" in small.verified
    assert "on a copy" not in full.verified
    assert said(small) == said(full)
