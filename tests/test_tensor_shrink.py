"""Plans found with a narrow copy of a block are those of the block; a copy of another structure is not used."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from probe import listed, long_run
from torch import Tensor, nn

import tensor_blocks
from lightning_par.errors import ParallelConfigError
from lightning_par.parallel.tensor import BlockTensorPlan, LinearGraph, plan_block, propose
from lightning_par.parallel.tensor.shrink import Shrunk, shrink
from tensor_blocks import CASES, TOKENS, make


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
# More ranks leave fewer heads on each: for blocks with heads that are fused, shared, normalised, and with experts.
@pytest.mark.parametrize(
    ("tp_size", "name"),
    listed(
        [*((2, name) for name in CASES), *((4, name) for name in ("gpt2", "llama", "qwen3", "mixtral"))], (2, "mixtral")
    ),
)
def test_the_plan_is_that_of_the_wide_block(tp_size: int, name: str) -> None:
    case = make(name)
    full = planned(case.block, *case.args, **case.kwargs, tp_size=tp_size, large=10**9)
    small = planned(case.block, *case.args, **case.kwargs, tp_size=tp_size, large=0)
    assert "on a copy 1/" in small.verified
    assert "on a copy" not in full.verified
    assert said(small) == said(full)


# What the copy is


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(("tp_size", "factor"), [(2, 4), (3, 4), (32, 2)])
def test_what_divides_the_sizes_of_the_copy_divides_those_of_the_block(tp_size: int, factor: int) -> None:
    case = make("llama")
    small = shrunk(case.block, *case.args, **case.kwargs, tp_size=tp_size)
    assert small is not None
    for name, node in small.original.linears.items():
        narrow = small.graph.linears[name]
        assert math.gcd(narrow.out_features, tp_size) == math.gcd(node.out_features, tp_size)
        assert math.gcd(narrow.in_features, tp_size) == math.gcd(node.in_features, tp_size)
        assert [(view.heads, view.size * factor) for view in narrow.heads] == [view[1:] for view in node.heads]
    assert widths(small.graph) == {size // factor for size in widths(small.original)}


def widths(graph: LinearGraph) -> set[int]:
    return {size for node in graph.linears.values() for size in (node.in_features, node.out_features)}


class Attention(nn.Module):
    """Attention whose code allows some widths only, or does something else with others."""

    def __init__(self, heads: int = 6, inner: int = 448, *, fixed: bool = False, decides: bool = False) -> None:
        super().__init__()
        self.heads, self.size, self.fixed, self.decides = heads, 32, fixed, decides
        self.repeats, self.limit = heads, 0
        self.norm = nn.LayerNorm(192)
        self.q, self.k, self.v = (nn.Linear(192, 32 * heads) for _ in range(3))
        self.o = nn.Linear(32 * heads, 192)
        self.up, self.down = nn.Linear(192, inner), nn.Linear(inner, 192)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        parts = (linear(self.norm(x)) for linear in (self.q, self.k, self.v))
        # A number that is written into the code: heads have always 32 features.
        sizes = (self.heads, 32) if self.fixed else (-1, self.size)
        q, k, v = (part.unflatten(-1, sizes).transpose(1, 2) for part in parts)
        for _ in range(self.repeats):
            q = q.sin()
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        if self.decides and x.abs().sum() < 0:
            return x
        hidden = self.up(x)
        return x + self.down(hidden.relu() if x.shape[-1] < self.limit else hidden.tanh())


def hidden(width: int = 192) -> Tensor:
    return torch.randn(2, TOKENS, width, generator=torch.Generator().manual_seed(2))


def test_numbers_that_differ_go_on_to_differ() -> None:
    small = shrunk(Attention(heads=8), hidden())
    assert small is not None
    assert [view[1:] for view in small.graph.linears["q"].heads] == [(8, 16)]


@pytest.mark.parametrize("decides", [long_run(False), True])
def test_a_block_that_computes_something_else_when_narrow_is_planned_at_its_width(decides: bool) -> None:
    block = Attention(decides=decides)
    assert "on a copy 1/4 as wide" in planned(block, hidden(), large=0).verified
    # The copies of it would compute another function of the inner features.
    block.limit = 150
    assert shrunk(block, hidden()) is None
    plan = planned(block, hidden(), large=0)
    assert "on a copy" not in plan.verified
    assert plan["up"].style == "column"


def test_where_heads_keep_their_size_there_are_fewer() -> None:
    block = Attention(fixed=True)
    small = shrunk(block, hidden())
    assert small is not None
    [view] = small.graph.linears["q"].heads
    assert (view.heads, view.size) == (2, 32)
    # The same number as that of heads, and yet no number of heads: with fewer repeats it would be another block.
    assert (small.trial.block.heads, small.trial.block.repeats) == (2, 6)
    full = planned(block, hidden(), large=10**9)
    assert said(planned(block, hidden(), large=0)) == said(full)
    assert [(patch.attribute, patch.value) for patch in full.patches] == [("heads", 3)]


@pytest.mark.parametrize("decides", [False, long_run(True)])
def test_a_block_without_values_has_the_same_plan(decides: bool) -> None:
    block = Attention(decides=decides)
    expected, found = (planned(it, hidden(), large=0) for it in (block, copy.deepcopy(block).to("meta")))
    assert said(found) == said(expected)
    assert "on a copy 1/4 as wide" in found.verified


def test_limits_have_the_numbers_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Attention(heads=3, inner=447)
    full, small = (planned(block, hidden(), large=large) for large in (10**9, 0))
    assert "up has 447 inner features" in small.report()
    assert "q makes 3 heads of" in small.report()
    assert (said(small), small.misfits) == (said(full), full.misfits)
    monkeypatch.setattr(propose, "LARGE", 0)
    with pytest.raises(ParallelConfigError, match="up has 447 inner features"):
        plan_block(block, (hidden(),), styles={"up": "shard"}, use_cache=False)


@pytest.mark.parametrize("decides", [long_run(False), True])
def test_planning_changes_nothing(decides: bool) -> None:
    block, x = Attention(decides=decides), hidden()
    before = copy.deepcopy(block)
    planned(block, x, large=0)
    assert torch.equal(x, hidden())
    assert all(type(module) is type(old) for module, old in zip(block.modules(), before.modules(), strict=True))
    assert {k: v for k, v in vars(block).items() if isinstance(v, int)} == {
        k: v for k, v in vars(before).items() if isinstance(v, int)
    }
    assert block.state_dict().keys() == before.state_dict().keys()
    for name, value in block.state_dict().items():
        assert torch.equal(value, before.state_dict()[name]), name
    assert block.training


# What it costs

MEASURE = """
import json, resource, sys, time
import torch
from transformers.models.llama import modeling_llama as llama
from examples.nanogpt.model import Block
from lightning_par.parallel.tensor import plan_block, propose

config = llama.LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, attn_implementation="sdpa"
)
x = torch.randn(2, 16, 4096)
with torch.device("meta"):
    block = llama.LlamaDecoderLayer(config, 0) if sys.argv[1] == "llama" else Block(4096, 32, 0.0)
block = block.to_empty(device="cpu")
for param in block.parameters():
    param.data.fill_(0.01)  # so that its memory counts before the plan is made
tables = llama.LlamaRotaryEmbedding(config)(x, torch.arange(16)[None])
kwargs = {"position_embeddings": tables} if sys.argv[1] == "llama" else {}
peak, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
plan = plan_block(block, (x,), kwargs, int(sys.argv[2]))
seconds = time.process_time() - start
extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
propose._find_plan = None
start = time.process_time()
assert plan_block(block, (x,), kwargs, int(sys.argv[2])) == plan
again = time.process_time() - start
print(json.dumps([seconds, extra / 2**20, again, plan.sharded_share, plan.verified]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tp_size"), [("llama", 2), ("llama", 8), ("example", 2)])
def test_a_wide_block_is_planned_in_seconds_and_little_memory(kind: str, tp_size: int, tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    environment = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "LIGHTNING_PAR_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", MEASURE, kind, str(tp_size)]
    ran = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr
    seconds, extra_gib, again, share, verified = json.loads(ran.stdout.splitlines()[-1])
    assert "on a copy 1/" in verified
    assert share > 0.99
    assert seconds < 10
    assert extra_gib < 2
    assert again < 1
