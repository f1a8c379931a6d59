"""Random streams of divided blocks: equal where ranks compute the same, independent where each has a part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from probe import long_run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_par.parallel.random import begin_own_stream, begin_shared_stream
from lightning_par.parallel.tensor import BlockTensorPlan, plan_block, shard_block, slice_sequence
from lightning_par.testing import run_ranks
from tensor_blocks import HEADS, WIDTH, make, tp_mesh

CPU = torch.device("cpu")


def draw() -> Tensor:
    return torch.rand(4)


def test_own_streams_differ_and_leave_the_default_generator_in_step() -> None:
    drawn, after = [], []
    for rank in range(3):
        torch.manual_seed(1)
        stream = begin_own_stream(CPU, rank)
        drawn.append(draw())
        stream.end()
        after.append(draw())
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
    assert torch.equal(after[0], after[1])
    assert torch.equal(after[1], after[2])
    # The next stream is another one.
    begin_own_stream(CPU, 2)
    assert not torch.equal(draw(), drawn[2])


def test_shared_streams_agree_inside_own_ones() -> None:
    drawn = []
    for rank in range(2):
        torch.manual_seed(1)
        begin_own_stream(CPU, rank)
        state = torch.get_rng_state()
        stream = begin_shared_stream(CPU, rank, 0)
        first = draw()
        stream.end()
        assert torch.equal(torch.get_rng_state(), state)
        begin_shared_stream(CPU, rank, 1)
        drawn.append(torch.stack([first, draw()]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0][0], drawn[0][1])


def test_a_stream_knows_whether_it_runs() -> None:
    state = torch.get_rng_state()
    stream = begin_own_stream(CPU, 1)
    assert stream.is_running
    torch.set_rng_state(state)
    assert not stream.is_running


def test_nothing_is_drawn_on_meta() -> None:
    state = torch.get_rng_state()
    assert begin_own_stream(torch.device("meta"), 0) is None
    assert begin_shared_stream(torch.device("meta"), 0, 0) is None
    assert torch.equal(torch.get_rng_state(), state)


# Plans


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.inner = nn.Dropout(0.5)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(F.softplus(self.up(x))))


class Block(nn.Module):
    """Attention that no plan divides, and an MLP with dropout inside."""

    def __init__(self, mlp: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = MLP() if mlp else None
        self.residual = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.mlp is not None:
            x = x + self.residual(self.mlp(self.norm(x)))
        x = self.norm(x)
        # What is last here is where a recomputation stops.
        return x + self.attention(x, x, x, need_weights=False)[0]


class Interleaved(MLP):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.softplus(self.up(x))
        return self.inner(x) + self.down(hidden)


def planned(block: nn.Module) -> BlockTensorPlan:
    return plan_block(block, (torch.randn(2, 8, WIDTH),), sequence_parallel=True, use_cache=False)


def test_plans_tell_where_random_numbers_are_drawn() -> None:
    block, example = Block(), torch.randn(2, 8, WIDTH)
    state = torch.get_rng_state()
    plan = plan_block(block, (example,), sequence_parallel=True, use_cache=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert plan.random_groups == (plan["mlp.up"].group,)
    assert plan.sequence.random
    case = make("llama")
    plan = plan_block(case.block, case.args, case.kwargs, sequence_parallel=True, use_cache=False)
    assert plan.random_groups == ()
    assert not plan.sequence.random


@pytest.mark.parametrize(("name", "module"), [("gpt2", "attn.c_attn"), long_run("bert", "attention.self.query")])
def test_plans_tell_that_attention_draws(name: str, module: str) -> None:
    case = make(name)
    plan = plan_block(case.block, case.args, case.kwargs, use_cache=False)
    assert plan.random_groups == (plan[module].group,)


def test_what_cannot_be_told_apart_is_not_divided() -> None:
    plan = planned(Interleaved())
    assert plan["up"].style == "gather"
    assert "random numbers" in plan["up"].reason


# Steps on two ranks


def train(plan: BlockTensorPlan, slices: bool, how: str = "", mlp: bool = True) -> dict[str, Any]:
    """Two forwards and then two backwards: masks, gradients, and what the default generator draws next."""
    mesh = tp_mesh()
    torch.manual_seed(0)
    block, inputs = Block(mlp).double(), torch.randn(2, 2, 8, WIDTH, dtype=torch.float64)
    shard_block(block, plan, mesh)
    masks: dict[str, list[Tensor]] = {}
    for name, module in block.named_modules():
        if isinstance(module, nn.Dropout):
            note = masks.setdefault(name, [])
            module.register_forward_hook(lambda _, args, out, note=note: note.append((out == 0).clone()))
    if how == "recompute":
        forward = block.forward
        block.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    if slices:
        slice_sequence([block], mesh, 1)
    if how == "compile":
        block.compile(backend="eager")
    losses = [block(x.requires_grad_()).square().sum() for x in inputs.unbind()]
    following = draw()
    for loss in losses:
        loss.backward()
    gradients = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in block.named_parameters()}
    return {"masks": masks, "gradients": gradients, "next": following}


def whole(plan: BlockTensorPlan, slices: bool) -> BlockTensorPlan:
    return plan if slices else replace(plan, sequence=None)


@pytest.mark.parametrize("slices", [False, True])
def test_masks_are_equal_or_independent(slices: bool) -> None:
    plan = whole(planned(Block()), slices)
    first, second = run_ranks(2, train, plan, slices)
    for mine, other in zip(first["masks"]["mlp.inner"], second["masks"]["mlp.inner"], strict=True):
        assert not torch.equal(mine, other)
    for mine, other in zip(first["masks"]["residual"], second["masks"]["residual"], strict=True):
        assert torch.equal(mine, other) != slices
    assert not torch.equal(*first["masks"]["residual"])
    assert torch.equal(first["next"], second["next"])
    # Attention is computed alike by all ranks.
    for name, gradient in first["gradients"].items():
        assert torch.allclose(gradient, second["gradients"][name], rtol=0, atol=1e-12), name


def same_masks(slices: bool, how: str, mlp: bool = True) -> None:
    plan = whole(planned(Block(mlp)), slices)
    plain, other = (run_ranks(2, train, plan, slices, way, mlp) for way in ("", how))
    for mine, its in zip(plain, other, strict=True):
        assert torch.equal(mine["next"], its["next"])
        for name, gradient in mine["gradients"].items():
            assert torch.allclose(gradient, its["gradients"][name], rtol=0, atol=1e-12), name


@pytest.mark.parametrize(("slices", "mlp"), [long_run(False, True), (True, True), (True, False)])
def test_recomputation_replays_the_masks(slices: bool, mlp: bool) -> None:
    same_masks(slices, "recompute", mlp)


@pytest.mark.slow
@pytest.mark.parametrize("slices", [False, True])
def test_compilation_keeps_the_masks(slices: bool) -> None:
    same_masks(slices, "compile")
