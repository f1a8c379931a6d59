"""A divided block: what it sends, its state dicts, and how it composes with FSDP, recomputation and copies."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import transformers
from probe import long_run, some
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from lightning_par.parallel.shards import full_tensor
from lightning_par.parallel.tensor import BlockTensorPlan, plan_block, shard_block
from lightning_par.parallel.tensor._compat import simulated_mesh
from lightning_par.parallel.tensor.apply import rank_order
from lightning_par.parallel.tensor.verify import InDouble
from lightning_par.testing import run_ranks
from tensor_blocks import HEADS, WIDTH, captured, difference, in_double, make, planned, step, tokens, tp_mesh


def test_order_of_ranks() -> None:
    assert rank_order((4, 2), 2).tolist() == [0, 1, 4, 2, 3, 5]
    assert rank_order((3,), 3).tolist() == [0, 1, 2]


def count_collectives(plan: BlockTensorPlan) -> list[dict[str, int]]:
    case, mesh = in_double(make("qwen3")), tp_mesh()
    shard_block(case.block, plan, mesh)
    x = case.args[0].requires_grad_()
    counts = []
    with CommDebugMode() as mode:
        out = case.block(x, **case.kwargs)
    counts.append({str(op).rpartition(".")[2]: n for op, n in mode.get_comm_counts().items()})
    with CommDebugMode() as mode:
        out.sum().backward()
    counts.append({str(op).rpartition(".")[2]: n for op, n in mode.get_comm_counts().items()})
    return counts


def test_the_communication_is_that_of_megatron() -> None:
    # Forward: one sum for attention and MLP each. Backward: the same, and the norms of heads at once.
    for forward, backward in run_ranks(2, count_collectives, planned("qwen3")):
        assert forward == {"all_reduce": 2}
        assert backward == {"all_reduce": 3}


def round_trip(name: str, plan: BlockTensorPlan) -> None:
    mesh = tp_mesh()
    original = make(name).block
    expected = {key: value.clone() for key, value in original.state_dict().items()}
    shard_block(original, plan, mesh)
    saved = original.state_dict()
    fused = next(module for module in plan.modules if module.style == "fused column")
    weight = original.get_submodule(fused.name).weight
    assert not torch.equal(full_tensor(weight), expected[f"{fused.name}.weight"])
    for key, value in expected.items():
        assert saved[key].shape == value.shape
        assert torch.equal(full_tensor(saved[key]), value)
    assert saved[f"{fused.name}.weight"].placements == weight.placements

    other = make(name).block
    for param in other.parameters():
        nn.init.zeros_(param)
    shard_block(other, plan, mesh)
    other.load_state_dict(saved)
    for mine, theirs in zip(other.parameters(), original.parameters(), strict=True):
        assert torch.equal(full_tensor(mine), full_tensor(theirs))


@pytest.mark.parametrize("name", ["gpt2", long_run("phi3")])
def test_state_dicts_have_the_order_of_the_undivided_block(name: str) -> None:
    run_ranks(2, round_trip, name, planned(name))


def with_fsdp(name: str, plan: BlockTensorPlan) -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    case = in_double(make(name))
    expected = step(copy.deepcopy(case.block), case)
    shard_block(case.block, plan, mesh["tp"])
    fully_shard(case.block, mesh=mesh["data"])
    found = step(case.block, case)
    # The gradient of the input is that of this data rank.
    return difference(found, expected)


@pytest.mark.parametrize("name", [long_run("qwen3"), "gpt2"])
def test_fsdp_composes(name: str) -> None:
    for error in run_ranks(4, with_fsdp, name, planned(name)):
        assert error < 1e-9


def whole_model(kind: str, blocks: str) -> float:
    """All blocks divided by the plan of one, the rest of the model replicated."""
    mesh = tp_mesh()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=64, pad_token_id=0, eos_token_id=0, **MODELS[kind])
    model = getattr(transformers, f"{kind}ForCausalLM" if kind != "GPT2" else "GPT2LMHeadModel")(config)
    case = captured(model, f"{blocks}.0", tokens(), use_cache=False)
    reference = copy.deepcopy(model.double())
    plan = plan_block(case.block, case.args, case.kwargs, mesh=mesh, use_cache=False)
    assert not any(module.style == "gather" for module in plan.modules)
    for block in model.get_submodule(blocks).children():
        shard_block(block, plan, mesh)
    with InDouble():
        losses = [m(input_ids=tokens(), labels=tokens(), use_cache=False).loss for m in (model, reference)]
    torch.stack(losses).sum().backward()
    errors = [(losses[0] - losses[1]).abs() / losses[1]]
    largest = max(param.grad.abs().max() for param in reference.parameters())
    for name, param in model.named_parameters():
        expected = reference.get_parameter(name).grad
        fused = next((m for m in plan.modules if m.parts and f".{m.name}." in name), None)
        if fused is not None:
            order = rank_order(fused.parts, 2)
            expected = expected.index_select(expected.dim() - 1 if fused.transposed else 0, order)
        errors.append((full_tensor(param.grad) - expected).abs().max() / largest)
    return max(error.item() for error in errors)


SMALL = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": HEADS, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {**SMALL, "intermediate_size": 48},
    "Qwen3": {**SMALL, "intermediate_size": 48, "head_dim": 8},
    "Phi3": {**SMALL, "intermediate_size": 48},
    "GPT2": {"n_positions": 8, "n_embd": WIDTH, "n_layer": 3, "n_head": HEADS, "bos_token_id": 0},
}


@pytest.mark.parametrize("kind", some(MODELS, "GPT2"))
def test_blocks_of_a_whole_model(kind: str) -> None:
    blocks = "transformer.h" if kind == "GPT2" else "model.layers"
    assert max(run_ranks(2, whole_model, kind, blocks)) < 1e-9


def recomputed(plan: BlockTensorPlan) -> float:
    case, mesh = in_double(make("qwen3")), tp_mesh()
    expected = step(copy.deepcopy(case.block), case)
    shard_block(case.block, plan, mesh)
    before = list(case.block.parameters())
    forward = case.block.forward

    def in_mode(*args: Any, **kwargs: Any) -> Any:
        with InDouble():
            return case.block(*args, **kwargs)

    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = case.block

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            # Autograd recomputes outside the mode of the caller.
            return checkpoint(in_mode, *args, use_reentrant=False, **kwargs)

    found = step(Recomputing(), case)
    assert forward == case.block.forward
    assert all(mine is old for mine, old in zip(case.block.parameters(), before, strict=True))
    return difference({key.removeprefix("block."): value for key, value in found.items()}, expected)


def test_recomputation_composes() -> None:
    assert max(run_ranks(2, recomputed, planned("qwen3"))) < 1e-9


def copied(plan: BlockTensorPlan) -> float:
    case, mesh = in_double(make("qwen3")), tp_mesh()
    expected = step(copy.deepcopy(case.block), case)
    shard_block(case.block, plan, mesh)
    return difference(step(copy.deepcopy(case.block), case), expected)


def test_a_copy_of_a_divided_block_works() -> None:
    assert max(run_ranks(2, copied, planned("qwen3"))) < 1e-9


@pytest.mark.parametrize("name", ["qwen3", long_run("nano")])
def test_the_graph_of_a_forward_is_freed(name: str) -> None:
    case, plan = in_double(make(name)), planned(name)
    with simulated_mesh(2) as mesh:
        shard_block(case.block, plan, mesh)
        source = case.args[0].clone().requires_grad_()
        alive = weakref.ref(source)
        case.block(source, **case.kwargs)
        del source
        gc.collect()
        assert alive() is None


def test_parameters_return_after_a_failed_forward() -> None:
    case, plan = make("qwen3"), planned("qwen3")
    with simulated_mesh(2) as mesh:
        shard_block(case.block, plan, mesh)
        before = dict(case.block.named_parameters())
        with pytest.raises(RuntimeError):
            case.block(torch.randn(1, 2, WIDTH), **case.kwargs)
        assert all(param is before[name] for name, param in case.block.named_parameters())


def test_what_users_attach_stays() -> None:
    case, plan = make("llama"), planned("llama")
    case.block.mlp.up_proj.weight.mark = "mine"
    case.block.mlp.gate_proj.weight.requires_grad_(False)
    with simulated_mesh(2) as mesh:
        shard_block(case.block, plan, mesh)
    assert case.block.mlp.up_proj.weight.mark == "mine"
    assert not case.block.mlp.gate_proj.weight.requires_grad


def test_a_patch_changes_no_other_module() -> None:
    case, plan = make("phi3"), planned("phi3")
    config = case.block.self_attn.config
    assert case.block.mlp.config is config
    with simulated_mesh(2) as mesh:
        shard_block(case.block, plan, mesh)
    assert config.num_attention_heads == HEADS
    assert case.block.self_attn.config.num_attention_heads == HEADS // 2


def test_a_mesh_of_another_size_is_refused() -> None:
    plan = planned("llama")
    with simulated_mesh(4) as mesh, pytest.raises(ValueError, match="the plan is for 2 ranks"):
        shard_block(make("llama").block, plan, mesh)
