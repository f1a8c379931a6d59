"""Blocks on slices of the sequence: where it is put together, what is sent, and the numbers of one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from probe import long_run, some
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_par.errors import ParallelConfigError
from lightning_par.parallel._compat import leaves
from lightning_par.parallel.tensor import BlockTensorPlan, SequenceEntry, cache, plan_block, shard_block, slice_sequence
from lightning_par.parallel.tensor._compat import DispatchMode, simulated_mesh
from lightning_par.parallel.tensor.verify import InDouble, prepare, verify
from lightning_par.testing import run_ranks
from tensor_blocks import (
    CASES,
    HEADS,
    TOKENS,
    WIDTH,
    Case,
    causal,
    difference,
    in_double,
    make,
    randomised,
    step,
    tp_mesh,
)

# Modules at which the whole sequence is put together, "|" those that run on it alike on all ranks; or why not.
EXPECTED = {
    "nano": "Block computes from qkv to out in its own forward",
    "example": "|",
    "sized": "attention mlp|",
    "llama": "self_attn mlp|",
    "qwen3": "self_attn mlp|",
    "mistral": "self_attn mlp|",
    "gemma2": "self_attn mlp|",
    "phi3": "self_attn mlp|",
    "mixtral": "self_attn|mlp",
    "gpt2": "attn mlp|",
    "bert": "attention.self|",
    "vit": "5 positions",
    "t5_encoder": "layer.1.DenseReluDense|layer.0.SelfAttention",
    "t5_decoder": "layer.2.DenseReluDense|layer.0.SelfAttention layer.1.EncDecAttention",
    "torch_encoder": "|self_attn",
}
QUICK = ("example", "llama", "mixtral", "vit", "torch_encoder")
ACCEPTED = [name for name in EXPECTED if "|" in EXPECTED[name]]


@functools.cache
def planned(name: str, tp_size: int = 2) -> BlockTensorPlan:
    case = make(name)
    return plan_block(case.block, case.args, case.kwargs, tp_size, sequence_parallel=True, use_cache=False)


def described(plan: BlockTensorPlan) -> str:
    assert plan.sequence is not None, plan.sequence_refused
    entries = plan.sequence.entries
    groups, whole = ([e.module for e in entries if (e.group == -1) == alike] for alike in (False, True))
    return f"{' '.join(groups)}|{' '.join(whole)}"


@pytest.mark.parametrize("name", some(CASES, *QUICK))
def test_the_plan_of_a_real_model(name: str) -> None:
    plan = planned(name)
    if name in ACCEPTED:
        assert described(plan) == EXPECTED[name]
        assert plan.sequence.dim == 1
        assert "with slices of the sequence" in plan.verified
    else:
        assert plan.sequence is None
        assert EXPECTED[name] in plan.sequence_refused
        assert plan.sequence_refused in plan.report()


def test_gradients_of_what_runs_on_slices_are_summed() -> None:
    assert planned("qwen3").sequence.partial_gradients == (
        "self_attn.k_norm.weight",
        "self_attn.q_norm.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    )
    # Of what is whole they are whole.
    assert not [name for name in planned("mixtral").sequence.partial_gradients if name.startswith("mlp")]


@pytest.mark.parametrize("name", [long_run("llama"), "vit"])
def test_plans_are_kept_on_disk(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_PAR_CACHE", str(tmp_path))
    case = make(name)
    plan = plan_block(case.block, case.args, case.kwargs, sequence_parallel=True)
    [file] = cache.cache_folder().glob("*.json")
    assert cache.load(file.stem) == plan
    assert plan_block(case.block, case.args, case.kwargs, sequence_parallel=True) == plan
    plain = plan_block(case.block, case.args, case.kwargs)
    assert plain.sequence is None
    assert not plain.sequence_refused


# One process


def chained(name: str, count: int) -> Case:
    """Blocks in a row, each with values of its own, that hand on the hidden state."""
    case = in_double(make(name))
    blocks = [case.block, *(in_double(randomised(make(name))).block for _ in range(count - 1))]
    for number, block in enumerate(blocks):
        for param in block.parameters():
            param.data *= 1 + 0.1 * number
    return Case(Chain(blocks), case.args, case.kwargs)


class Chain(nn.Module):
    def __init__(self, blocks: list[nn.Module], between: Tensor | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.between = between

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for block in self.blocks:
            out = block(hidden, *args, **kwargs)
            hidden = out[0] if isinstance(out, tuple) else out
            if self.between is not None:
                hidden = hidden + self.between
        return hidden


def divided(chain: nn.Module, plan: BlockTensorPlan, mesh: DeviceMesh) -> None:
    for block in chain.blocks:
        shard_block(block, plan, mesh)
    slice_sequence(list(chain.blocks), mesh, plan.sequence.dim)


def chain_error(name: str, plan: BlockTensorPlan, count: int) -> float:
    chain = chained(name, count)
    expected = step(copy.deepcopy(chain.block), chain)
    divided(chain.block, plan, tp_mesh())
    return difference(step(chain.block, chain), expected)


@pytest.mark.parametrize("name", some(("example", "llama", "qwen3", "gpt2", "bert"), "gpt2"))
def test_two_blocks_on_two_ranks_give_the_numbers_of_one_process(name: str) -> None:
    assert max(run_ranks(2, chain_error, name, planned(name), 2)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCEPTED)
def test_every_block_on_two_ranks_gives_the_numbers_of_one_process(name: str) -> None:
    assert max(run_ranks(2, chain_error, name, planned(name), 1)) < 1e-9


def verdict_on_ranks(name: str, plan: BlockTensorPlan) -> float:
    case = make(name)
    return verify(prepare(case.block, case.args, case.kwargs), plan, tp_mesh(), simulate=False).error


def test_plans_can_be_verified_on_real_ranks() -> None:
    assert max(run_ranks(2, verdict_on_ranks, "gpt2", planned("gpt2"))) < 1e-9


def long_llama() -> Case:
    torch.manual_seed(0)
    case = randomised(causal("Llama", num_key_value_heads=HEADS))
    hidden = torch.randn(2, 8, WIDTH)
    rotary = torch.randn(2, 1, 8, WIDTH // HEADS)
    return Case(case.block, (hidden,), case.kwargs | {"position_embeddings": tuple(rotary)})


def four_ranks() -> float:
    case, mesh = in_double(long_llama()), tp_mesh()
    plan = plan_block(case.block, case.args, case.kwargs, 4, mesh=mesh, sequence_parallel=True, use_cache=False)
    expected = step(copy.deepcopy(case.block), case)
    shard_block(case.block, plan, mesh)
    slice_sequence([case.block], mesh, plan.sequence.dim)
    return difference(step(case.block, case), expected)


@pytest.mark.slow
def test_four_ranks_give_the_numbers_of_one_process() -> None:
    assert max(run_ranks(4, four_ranks)) < 1e-9


@pytest.mark.parametrize("batch", [2, 4])
def test_the_sequence_may_come_first(batch: int) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48).eval()
    plan = plan_block(layer, (torch.randn(TOKENS, batch, WIDTH),), sequence_parallel=True, use_cache=False)
    assert plan.sequence.dim == 0
    assert described(plan) == "|self_attn"


def test_a_batch_is_never_taken_for_the_sequence() -> None:
    # Slices of the batch would give the same numbers.
    case = make("nano")
    plan = plan_block(case.block, (torch.randn(4, 8, WIDTH),), sequence_parallel=True, use_cache=False)
    assert plan.sequence is None


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        q, k, v = (
            linear(of).view(*of.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)
            for linear, of in ((self.q, x), (self.k, states), (self.v, states))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), CrossAttention()

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        return x + self.attention(self.norm(x), states)


def test_states_of_an_encoder_stay_whole() -> None:
    block, states = Decoder(), torch.randn(2, 5, WIDTH, requires_grad=True)
    args = (torch.randn(2, 8, WIDTH), states)
    plan = plan_block(block, args, sequence_parallel=True, use_cache=False)
    assert described(plan) == "attention|"
    assert plan.sequence.entries[0].inputs == (0,)
    assert plan.sequence.whole_inputs == ("attention.k", "attention.v")
    # Their gradient is that of all heads.
    assert not verify(prepare(block, args, {}), spoiled(plan, whole_inputs=())).accepted


class Experts(nn.Module):
    """All experts for all tokens, which come in one row."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        shares = self.router(tokens).softmax(-1).unbind(-1)
        return sum(s[:, None] * e(tokens) for s, e in zip(shares, self.experts, strict=True)).view_as(x)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(WIDTH), Experts(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


def test_divided_experts_get_the_tokens_of_the_whole_sequence() -> None:
    plan = plan_block(Sparse(), (torch.randn(2, 8, WIDTH),), sequence_parallel=True, use_cache=False)
    assert described(plan) == "|moe"
    assert plan["moe.experts.0.0"].style == "column"
    assert plan.sequence.partial_gradients == ("norm.weight", "norm.bias")


def test_a_call_without_the_slices_is_refused() -> None:
    block = Decoder()
    plan = plan_block(
        block, (torch.randn(2, 8, WIDTH), torch.randn(2, 5, WIDTH)), sequence_parallel=True, use_cache=False
    )
    with simulated_mesh(2) as mesh:
        shard_block(block, plan, mesh)
        with pytest.raises(ParallelConfigError, match="attention is called without its argument 0"):
            block.attention(x=torch.randn(2, 4, WIDTH), states=torch.randn(2, 5, WIDTH))


def inferred(plan: BlockTensorPlan) -> float:
    chain = chained("llama", 2)
    with torch.inference_mode(), InDouble():
        expected = chain.block(*chain.args, **chain.kwargs)
    divided(chain.block, plan, tp_mesh())
    with torch.inference_mode(), InDouble():
        found = chain.block(*chain.args, **chain.kwargs)
    assert type(found) is Tensor
    return ((found - expected).abs().max() / expected.abs().max()).item()


def test_inference_gives_the_numbers_of_one_process() -> None:
    assert max(run_ranks(2, inferred, planned("llama"))) < 1e-9


# Communication


class Collectives(DispatchMode):
    """Counts them; torch's `CommDebugMode` fails where a module is called twice, as the example's dropout is."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        namespace, _, name = func._schema.name.partition("::")
        if "c10d" in namespace and name.startswith(("all_", "reduce_", "broadcast")):
            self.count[name] = self.count.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def count_collectives(name: str, plan: BlockTensorPlan) -> list[dict[str, int]]:
    case, mesh = in_double(make(name)), tp_mesh()
    hidden = case.args[0]
    if plan.sequence is not None:
        hidden = hidden.chunk(2, plan.sequence.dim)[mesh.get_local_rank()]
    hidden = hidden.clone().requires_grad_()
    shard_block(case.block, plan, mesh)
    with Collectives() as forward:
        out = case.block(hidden, *case.args[1:], **case.kwargs)
    with Collectives() as backward:
        next(leaf for leaf in leaves(out) if isinstance(leaf, Tensor)).sum().backward()
    return [forward.count, backward.count]


@pytest.mark.parametrize("name", ["example", long_run("llama")])
def test_the_communication_is_that_of_megatron(name: str) -> None:
    twice = {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
    # And the gradients of norms, once.
    assert run_ranks(2, count_collectives, name, planned(name)) == [[twice, twice | {"all_reduce": 1}]] * 2
    whole = replace(planned(name), sequence=None)
    assert run_ranks(2, count_collectives, name, whole) == [[{"all_reduce": 2}] * 2] * 2


# Wrong plans


def spoiled(plan: BlockTensorPlan, **changes: Any) -> BlockTensorPlan:
    return replace(plan, sequence=replace(plan.sequence, **changes))


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        # A norm's gradient that is not summed, and one that is whole and is summed.
        ("llama", lambda plan: {"partial_gradients": ("input_layernorm.weight",)}),
        ("mixtral", lambda plan: {"partial_gradients": (*plan.partial_gradients, "mlp.gate.weight")}),
        # Attention that is entered at its Linears makes more heads of shorter sequences.
        ("llama", lambda plan: {"entries": tuple(e for e in plan.entries if e.module != "self_attn")}),
        # Attention on slices.
        ("torch_encoder", lambda plan: {"entries": ()}),
        long_run("bert", lambda plan: {"entries": (SequenceEntry("attention", (0,), plan.entries[0].group),)}),
        long_run(
            "t5_decoder", lambda plan: {"whole_inputs": ("layer.1.EncDecAttention.q",), "entries": plan.entries[::2]}
        ),
    ],
)
def test_wrong_plans_are_rejected(name: str, spoil: Callable[[Any], dict[str, Any]]) -> None:
    case, plan = make(name), planned(name)
    trial = prepare(case.block, case.args, case.kwargs)
    assert verify(trial, plan).accepted
    assert not verify(trial, spoiled(plan, **spoil(plan.sequence))).accepted


# Chains


@pytest.mark.parametrize(
    ("length", "between", "message"),
    [
        (7, None, r"7 positions cannot be cut into 2 equal slices[\s\S]*such as 6 or 8"),
        (1, None, "such as 2"),
        # Slices of one position would be broadcast.
        (2, 2, "called with a hidden state of 2 positions, where slices of 1"),
        (4, 1, None),
    ],
)
def test_lengths_are_checked(length: int, between: int | None, message: str | None) -> None:
    plan = planned("example")
    with simulated_mesh(2) as mesh:
        chain = chained("example", 2)
        divided(chain.block, plan, mesh)
        chain.block.between = None if between is None else torch.ones(1, between, WIDTH, dtype=torch.float64)
        hidden = torch.randn(1, length, WIDTH, dtype=torch.float64)
        if message is None:
            chain.block(hidden)
        else:
            with pytest.raises(ParallelConfigError, match=message):
                chain.block(hidden)


def test_blocks_out_of_order_are_refused() -> None:
    with simulated_mesh(2) as mesh:
        chain = chained("example", 2)
        divided(chain.block, planned("example"), mesh)
        with pytest.raises(ParallelConfigError, match="no sequence has entered"):
            chain.block.blocks[1](torch.randn(1, 4, WIDTH, dtype=torch.float64))


def composed(plan: BlockTensorPlan, how: str) -> float:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size() // 2, 2), mesh_dim_names=("data", "tp"))
    chain = chained("gpt2", 2)
    expected = step(copy.deepcopy(chain.block), chain)
    for block in chain.block.blocks:
        shard_block(block, plan, mesh["tp"])
        if "recompute" in how:
            recompute(block)
        if "fsdp" in how:
            fully_shard(block, mesh=mesh["data"])
    slice_sequence(list(chain.block.blocks), mesh["tp"], plan.sequence.dim)
    block = copy.deepcopy(chain.block) if how == "copy" else chain.block
    return difference(step(block, chain), expected)


def recompute(block: nn.Module) -> None:
    forward = block.forward

    def in_mode(*args: Any, **kwargs: Any) -> Any:
        with InDouble():
            return forward(*args, **kwargs)

    # Autograd recomputes outside the mode of the caller.
    block.forward = lambda *args, **kwargs: checkpoint(in_mode, *args, use_reentrant=False, **kwargs)


@pytest.mark.parametrize("how", ["recompute", "copy", "fsdp recompute"])
def test_slices_compose_with(how: str) -> None:
    ranks = 4 if "fsdp" in how else 2
    assert max(run_ranks(ranks, composed, planned("gpt2"), how)) < 1e-9
