"""Tensor-parallel plans: right ones are found and give one process' numbers, wrong ones are rejected."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from probe import some
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils.parametrizations import weight_norm

from lightning_par.errors import ParallelConfigError
from lightning_par.parallel.shards import full_tensor
from lightning_par.parallel.tensor import BlockTensorPlan, cache, plan_block, propose, shard_block
from lightning_par.parallel.tensor import verify as verify_module
from lightning_par.parallel.tensor._compat import CAN_SIMULATE, rank_values, simulated_mesh
from lightning_par.parallel.tensor.plan import AttributePatch
from lightning_par.parallel.tensor.verify import Verdict, prepare, verify
from lightning_par.testing import run_ranks
from tensor_blocks import (
    CASES,
    HEADS,
    SIZES,
    TOKENS,
    WIDTH,
    Case,
    difference,
    in_double,
    llama,
    make,
    planned,
    step,
    tp_mesh,
)

STYLES = {"column": "c", "row": "r", "fused column": "f", "gather": "g", "replicate": "-"}
# Styles of the Linears in the order of the block's modules, patched attributes, parameters whose gradient is summed.
EXPECTED: dict[str, tuple[str, dict[str, int], tuple[str, ...]]] = {
    "nano": ("ggcr", {}, ()),
    "example": ("frcr", {"heads": 2}, ()),
    "sized": ("frcr", {"attention.heads": 2, "attention.width": 16}, ()),
    "llama": ("cccrccr", {}, ()),
    "qwen3": ("cccrccr", {}, ("self_attn.k_norm.weight", "self_attn.q_norm.weight")),
    "mistral": ("cccrccr", {}, ()),
    "gemma2": ("cccrccr", {}, ()),
    "phi3": ("rffr", {"self_attn.config.num_attention_heads": 2, "self_attn.num_key_value_heads": 1}, ()),
    "mixtral": ("cccr", {}, ()),
    "gpt2": ("frcr", {"attn.split_size": 16}, ()),
    "bert": ("cccrcr", {}, ()),
    "vit": ("cccrcr", {}, ()),
    "t5_encoder": ("ggggcr", {}, ()),
    "t5_decoder": ("ggggggggcr", {}, ()),
    "torch_encoder": ("-cr", {}, ()),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_PAR_CACHE", str(tmp_path))


def linear_styles(plan: BlockTensorPlan, block: nn.Module) -> str:
    linear = [name for name, module in block.named_modules() if isinstance(module, nn.Linear) or hasattr(module, "nf")]
    return "".join(STYLES[plan[name].style] for name in linear)


QUICK = ("nano", "sized", "example", "llama", "qwen3", "phi3", "mixtral", "gpt2", "torch_encoder")


@pytest.mark.parametrize("name", some(CASES, *QUICK))
def test_the_plan_of_a_real_model(name: str) -> None:
    block, plan = make(name).block, planned(name)
    styles, patches, partial = EXPECTED[name]
    assert linear_styles(plan, block) == styles
    assert {f"{p.module}.{p.attribute}".lstrip("."): p.value for p in plan.patches} == patches
    assert plan.partial_gradients == partial
    assert [name for name, _ in plan.narrowed] == (["attention"] if name == "sized" else [])
    assert "largest error" in plan.verified
    assert {module.name for module in plan.modules if not module.reason} == {
        module.name for module in plan.modules if module.style not in ("gather", "replicate")
    }
    assert sum(module.numel for module in plan.modules) == sum(p.numel() for p in block.parameters())
    assert 0 < plan.sharded_share < 1


def compare_on_ranks(name: str, plan: BlockTensorPlan) -> tuple[float, Verdict, Verdict]:
    case, mesh = in_double(make(name)), tp_mesh()
    trial = prepare(case.block, case.args, case.kwargs)
    communicating = verify(trial, plan, mesh, simulate=False)
    simulated = verify(trial, plan, mesh)
    expected = step(copy.deepcopy(case.block), case)
    shard_block(case.block, plan, mesh)
    for module in plan.modules:
        for param in case.block.get_submodule(module.name).parameters(recurse=False):
            divided = isinstance(param, DTensor) and isinstance(param.placements[0], Shard)
            assert divided == (module.style != "replicate" and not (module.style == "row" and param.dim() == 1))
            if divided:
                # No rank keeps the whole: a slice is no view of it.
                assert param.to_local().untyped_storage().nbytes() == param.numel() * param.element_size() / mesh.size()
    return difference(step(case.block, case), expected), communicating, simulated


# Quick: fused projections, parameters whose gradients are summed, experts, a number that a module keeps.
@pytest.mark.parametrize("name", some(CASES, "gpt2", "qwen3", "mixtral", "sized"))
def test_two_ranks_give_the_numbers_of_one_process(name: str) -> None:
    for error, communicating, simulated in run_ranks(2, compare_on_ranks, name, planned(name)):
        assert error < 1e-9
        assert communicating.accepted
        assert simulated.accepted


# More ranks than two differ where heads are fused, shared or normalised, and where there are experts.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "mixtral", "sized"])
def test_four_ranks_give_the_numbers_of_one_process(name: str) -> None:
    for error, communicating, simulated in run_ranks(4, compare_on_ranks, name, planned(name, 4)):
        assert error < 1e-9
        assert communicating.accepted
        assert simulated.accepted


# Wrong plans


def changed(plan: BlockTensorPlan, **styles: Any) -> BlockTensorPlan:
    modules = tuple(replace(m, **styles.get(m.name.replace(".", "_"), {})) for m in plan.modules)
    return replace(plan, modules=modules)


def verdict_of(name: str, plan: BlockTensorPlan) -> Verdict:
    case = make(name)
    return verify(prepare(case.block, case.args, case.kwargs), plan)


@pytest.mark.parametrize(
    ("name", "spoil", "where"),
    [
        ("qwen3", lambda plan: replace(plan, partial_gradients=()), "_norm.weight"),
        ("qwen3", lambda plan: replace(plan, partial_gradients=("input_layernorm.weight",)), "layernorm.weight"),
        ("example", lambda plan: changed(plan, qkv={"style": "column"}), ""),
        ("example", lambda plan: replace(plan, patches=()), ""),
        ("example", lambda plan: changed(plan, qkv={"parts": (48, 48)}), ""),
        ("gpt2", lambda plan: replace(plan, patches=(AttributePatch("attn", "split_size", 8),)), ""),
        ("phi3", lambda plan: changed(plan, self_attn_qkv_proj={"parts": (16, 16, 32)}), ""),
        ("phi3", lambda plan: changed(plan, mlp_gate_up_proj={"style": "column"}), ""),
        ("llama", lambda plan: changed(plan, mlp_down_proj={"style": "replicate"}), ""),
        ("llama", lambda plan: changed(plan, mlp_up_proj={"style": "gather"}), ""),
    ],
)
def test_a_wrong_plan_is_rejected(name: str, spoil: Callable[[BlockTensorPlan], BlockTensorPlan], where: str) -> None:
    verdict = verdict_of(name, spoil(planned(name)))
    assert verdict.error > 1e-3
    assert where in verdict.worst


def test_only_a_gradient_tells_that_heads_share_a_norm() -> None:
    case = make("qwen3")
    trial = prepare(case.block, case.args, case.kwargs)
    plan = replace(planned("qwen3"), partial_gradients=("self_attn.k_norm.weight",))
    worst = "gradient of self_attn.q_norm.weight"
    assert verify(trial, plan).worst == worst
    # Without that one, everything is right: a test of outputs would have passed it.
    others = {name: value for name, value in trial.expected.items() if name != worst}
    run = verify_module._run
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(verify_module, "_run", lambda *args: {k: v for k, v in run(*args).items() if k != worst})
        assert verify(replace(trial, expected=others), plan).accepted


def test_a_row_without_reduction_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce = DTensor.redistribute

    def redistribute(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        at_exit = self.placements[0].is_partial() and not args and kwargs.keys() == {"placements"}
        return self if at_exit else reduce(self, *args, **kwargs)

    plan = planned("llama")
    case = make("llama")
    trial = prepare(case.block, case.args, case.kwargs)
    monkeypatch.setattr(DTensor, "redistribute", redistribute)
    assert 1e-3 < verify(trial, plan).error < math.inf


class ZeroAtFirst(nn.Module):
    """As many start: the last projection and all biases are zero, so nothing before them has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.ones(1))
        for param in (*self.down.parameters(), self.up.bias):
            nn.init.zeros_(param)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x) * self.scale)


def test_zeros_hide_nothing() -> None:
    block, args = ZeroAtFirst(), (torch.randn(3, 8),)
    plan = plan_block(block, args)
    assert plan.partial_gradients == ("scale",)
    verdict = verify(prepare(block, args, {}), replace(plan, partial_gradients=()))
    assert verdict.worst == "gradient of scale"
    assert verdict.error > 1e-3
    assert not block.down.weight.any()


# What cannot be divided


class Attention(nn.Module):
    def __init__(self, heads: int = 4, kv_heads: int = 4, full_norm: bool = False) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, 8 * heads), nn.Linear(WIDTH, 8 * kv_heads)
        self.v, self.o = nn.Linear(WIDTH, 8 * kv_heads), nn.Linear(8 * heads, WIDTH)
        self.repeats = heads // kv_heads
        self.norm = nn.RMSNorm(8 * heads) if full_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.norm(self.q(x)), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in parts)
        k, v = (part.repeat_interleave(self.repeats, 1) for part in (k, v))
        return x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Feed(nn.Module):
    def __init__(self, inner: int = 64, out: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Tied(Feed):
    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.down.weight = self.up.weight


class Convolved(Feed):
    """A depthwise convolution over the inner features, as in Mamba."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(64, 64, 3, padding=1, groups=64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.conv(self.up(x).transpose(1, 2)).transpose(1, 2))


def weight_normed() -> nn.Module:
    block = Feed()
    weight_norm(block.up)
    return block


class Int8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) / 100, self.bias)


def frozen_in_int8() -> nn.Module:
    block = Feed()
    block.up = Int8Linear(WIDTH, 64)
    block.up.weight = nn.Parameter((block.up.weight * 100).to(torch.int8), requires_grad=False)
    return block


LIMITED = [
    (
        lambda: Attention(heads=3, kv_heads=3),
        2,
        "gggg",
        "q makes 3 heads of 8 features, which tp_size=2 does not divide",
    ),
    (lambda: Attention(kv_heads=1), 2, "gggg", "k makes 1 head of 8 features, which tp_size=2 does not divide"),
    (lambda: Attention(kv_heads=2), 4, "gggg", "a tp_size of 1 or 2, or"),
    (lambda: Attention(full_norm=True), 2, "gggg", "mean over 32 features of q, which no rank has all of"),
    (lambda: Feed(inner=63), 2, "--", "up has 63 inner features, which tp_size=2 does not divide"),
    (Convolved, 2, "gg", "no way to compute with slices gives the same numbers (closest:"),
    (weight_normed, 2, "--", "the weight of up is computed from other parameters"),
    (frozen_in_int8, 2, "--", "up is quantised: its weight is torch.int8"),
    (Tied, 2, "--", "up shares a parameter with another module"),
    (
        lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True),
        2,
        "-cr",
        "nn.MultiheadAttention computes",
    ),
]


@pytest.mark.parametrize(("build", "tp_size", "styles", "text"), LIMITED)
def test_limits(build: Callable[[], nn.Module], tp_size: int, styles: str, text: str) -> None:
    torch.manual_seed(0)
    block, args = build(), (torch.randn(2, TOKENS, WIDTH),)
    plan = plan_block(block, args, tp_size=tp_size)
    assert linear_styles(plan, block) == styles
    if not text.startswith("a tp_size"):
        assert text in plan.report()
    pattern = "self_attn.*" if "-cr" in styles else "[quk]*"
    with pytest.raises(ParallelConfigError) as caught:
        plan_block(block, args, tp_size=tp_size, styles={pattern: "shard"})
    assert text in str(caught.value)


def test_sizes_that_do_not_fit_are_told_with_those_that_would() -> None:
    args = (torch.randn(2, TOKENS, WIDTH),)
    [problem] = plan_block(Feed(inner=63), args).misfits
    assert problem.what == "up has 63 inner features, which tp_size=2 does not divide"
    assert problem.python == 'a tp_size of 1, 3, 7, 9, 21 or 63, or tp_plan={"*up": "replicate"}'
    keys, values = plan_block(Attention(kv_heads=2), args, tp_size=4).misfits
    assert keys.what == "k makes 2 heads of 8 features, which tp_size=4 does not divide"
    assert keys.python == 'a tp_size of 1 or 2, or tp_plan={"*k": "gather"}'
    assert values.what.startswith("v makes 2 heads")
    assert not plan_block(Feed(inner=63), args, styles={"*": "replicate"}).misfits


def test_a_row_may_have_any_number_of_outputs() -> None:
    block, args = Feed(out=31), (torch.randn(2, TOKENS, WIDTH),)
    assert linear_styles(plan_block(block, args), block) == "cr"
    with pytest.raises(ParallelConfigError, match="down has 31 output features, which tp_size=2 does not divide"):
        plan_block(block, args, styles={"down": "gather"})


class OnlyFloat32(Feed):
    def forward(self, x: Tensor) -> Tensor:
        if self.up.weight.dtype is not torch.float32:
            raise TypeError("float32 is wanted")
        return super().forward(x)


def test_a_block_that_cannot_be_verified_is_replicated() -> None:
    block, args = OnlyFloat32(), (torch.randn(2, TOKENS, WIDTH),)
    plan = plan_block(block, args)
    assert linear_styles(plan, block) == "--"
    assert "it does not run in float64, so nothing can be verified (TypeError: float32 is wanted)" in plan["up"].reason
    with pytest.raises(ParallelConfigError, match="it does not run in float64"):
        plan_block(block, args, styles={"up": "shard"})


def test_a_block_without_values_has_the_same_plan() -> None:
    args = (torch.randn(2, TOKENS, WIDTH),)
    found, expected = (plan_block(block, args, use_cache=False) for block in (Feed().to("meta"), Feed()))
    assert replace(found, verified="") == replace(expected, verified="")


def test_styles_that_were_asked_for() -> None:
    case = make("llama")
    styles = {"self_attn.*": "gather", "mlp.*": "replicate"}
    plan = plan_block(case.block, case.args, case.kwargs, styles=styles)  # type: ignore[arg-type]
    assert linear_styles(plan, case.block) == "gggg---"
    assert plan["self_attn.q_proj"].reason == plan["mlp.up_proj"].reason == "as styles say"
    plan = plan_block(case.block, case.args, case.kwargs, styles={"*": "shard"})
    assert plan == planned("llama")


def test_styles_that_are_wrong() -> None:
    case = make("llama")
    with pytest.raises(ParallelConfigError) as caught:
        plan_block(case.block, case.args, case.kwargs, styles={"attn.*": "shard", "mlp.*": "slice"})  # type: ignore[dict-item]
    assert "styles['attn.*'] matches none of the Linears self_attn.q_proj" in str(caught.value)
    assert "styles['mlp.*'] is 'slice'" in str(caught.value)


def test_planning_changes_nothing() -> None:
    case = make("gpt2")
    before = copy.deepcopy(case.block)
    plan_block(case.block, case.args, case.kwargs)
    assert not dist.is_initialized()
    for (name, module), (_, old) in zip(case.block.named_modules(), before.named_modules(), strict=True):
        assert type(module) is type(old), name
        assert len(module._forward_hooks) + len(module._forward_pre_hooks) == 0
        assert {k: v for k, v in vars(module).items() if isinstance(v, int)} == {
            k: v for k, v in vars(old).items() if isinstance(v, int)
        }
    assert all(torch.equal(p, q) for p, q in zip(case.block.parameters(), before.parameters(), strict=True))
    assert all(p.grad is None for p in case.block.parameters())


# The cache


def cached(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[BlockTensorPlan, int]:
    """A plan, and how many comparisons it took."""
    calls: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Verdict:
        calls.append(1)
        return verify(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(propose, "verify", counted)
        return plan_block(case.block, case.args, case.kwargs), len(calls)


def small() -> Case:
    torch.manual_seed(0)
    return Case(Feed(), (torch.randn(2, TOKENS, WIDTH),), {})


def test_a_plan_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, calls = cached(small(), monkeypatch)
    assert calls
    again, calls = cached(small(), monkeypatch)
    assert (again, calls) == (plan, 0)
    [file] = (tmp_path / "tensor_plans").iterdir()
    for damage in (file.read_text()[:50], "{}", "[1]", ""):
        file.write_text(damage)
        again, calls = cached(small(), monkeypatch)
        assert again == plan
        assert calls
    other = small()
    other.block.heads = 8
    assert cached(other, monkeypatch)[1]
    assert not list((tmp_path / "tensor_plans").glob("*.tmp"))


def test_writers_do_not_disturb_readers() -> None:
    plan = planned("phi3")
    cache.store("key", plan)

    def work(_: int) -> bool:
        cache.store("key", plan)
        return cache.load("key") == plan

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(100)))


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LIGHTNING_PAR_CACHE", str(tmp_path / "file"))
    assert cached(make("example"), monkeypatch)[1]


def key(case: Case) -> str | None:
    return cache.key_of(case.block, case.args, case.kwargs, 2, {})


@pytest.mark.parametrize("name", CASES)
def test_every_real_model_has_a_key(name: str) -> None:
    assert key(make(name)) is not None
    assert key(make(name)) == key(make(name))


def test_what_changes_the_key() -> None:
    assert key(llama()) != key(llama(num_key_value_heads=4))
    assert key(llama()) != key(llama(rms_norm_eps=1e-3))
    case = make("llama")
    case.block.mlp.act_fn = nn.Softmax(dim=-1)
    assert key(case) != key(make("llama"))
    case = Case(Feed(), (torch.randn(1, WIDTH),), {})
    keys = [key(case)]
    case.block.activation = functools.partial(torch.softmax, dim=-1)
    keys.append(key(case))
    case.block.activation = torch.relu
    keys.append(key(case))
    assert len(set(keys)) == 3
    assert None not in keys
    case.block.activation = lambda x: x
    assert key(case) is None


def test_layers_of_a_model_share_a_key() -> None:
    config = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 2})
    first, second = transformers.LlamaModel(config).layers
    assert cache.key_of(first, (), {}, 2, {}) == cache.key_of(second, (), {}, 2, {}) is not None


def plan_on_a_part_of_the_ranks() -> BlockTensorPlan:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))["tp"]
    case = make("example")
    return plan_block(case.block, case.args, case.kwargs, mesh=mesh, use_cache=False)


def test_ranks_plan_alike_on_their_mesh() -> None:
    assert run_ranks(4, plan_on_a_part_of_the_ranks) == [planned("example")] * 4


# Private API


@pytest.mark.skipif(not CAN_SIMULATE, reason="this torch has no LocalTensorMode")
def test_simulated_ranks() -> None:
    with simulated_mesh(3) as mesh:
        parts = DTensor.from_local(torch.ones(2), mesh, [Shard(0)]).to_local()
        assert len(rank_values(parts)) == 3
        assert full_tensor(DTensor.from_local(torch.ones(2), mesh, [Shard(0)])).shape == (6,)
    assert not dist.is_initialized()
    assert len(rank_values(torch.ones(2))) == 1


def test_nothing_divided_gives_the_same_numbers_where_code_adds_in_place() -> None:
    # An ordinary tensor would be shared by the simulated ranks, and the experts of each would add to it.
    assert verdict_of("mixtral", BlockTensorPlan(2, ())) == Verdict(0.0, "")


def test_without_simulation_a_mesh_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_par.parallel.tensor.verify.CAN_SIMULATE", False)
    with pytest.raises(ValueError, match="this torch cannot simulate ranks, .* pass mesh"):
        verdict_of("example", planned("example"))


def plan_without_mesh() -> None:
    case = make("example")
    with pytest.raises(ValueError, match="a process group is initialised, .* pass mesh"):
        plan_block(case.block, case.args, case.kwargs, use_cache=False)


def test_among_other_ranks_a_mesh_is_needed() -> None:
    run_ranks(1, plan_without_mesh)
