"""Which Linear feeds which: found without names in models that people use, and in odd ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_par.parallel.tensor.trace import HeadView, LinearGraph, trace_linears
from tensor_blocks import CASES, make

LLAMA_GROUPS = (
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj > self_attn.o_proj",
    ("mlp.gate_proj mlp.up_proj > mlp.down_proj"),
)
GROUPS = {
    "nano": ("qkv > out", "mlp.0 > mlp.2"),
    "example": ("qkv > attention_out", "mlp_in > mlp_out"),
    "sized": ("attention.qkv > attention.out", "mlp.0 > mlp.2"),
    "llama": LLAMA_GROUPS,
    "qwen3": LLAMA_GROUPS,
    "mistral": LLAMA_GROUPS,
    "gemma2": LLAMA_GROUPS,
    "phi3": ("self_attn.qkv_proj > self_attn.o_proj", "mlp.gate_up_proj > mlp.down_proj"),
    "mixtral": LLAMA_GROUPS[:1],
    "gpt2": ("attn.c_attn > attn.c_proj", "mlp.c_fc > mlp.c_proj"),
    "bert": (
        "attention.self.query attention.self.key attention.self.value > attention.output.dense",
        "intermediate.dense > output.dense",
    ),
    "vit": ("attention.q_proj attention.k_proj attention.v_proj > attention.o_proj", "mlp.fc1 > mlp.fc2"),
    "t5_encoder": (
        "layer.0.SelfAttention.q layer.0.SelfAttention.k layer.0.SelfAttention.v > layer.0.SelfAttention.o",
        "layer.1.DenseReluDense.wi > layer.1.DenseReluDense.wo",
    ),
    "t5_decoder": (
        "layer.0.SelfAttention.q layer.0.SelfAttention.k layer.0.SelfAttention.v > layer.0.SelfAttention.o",
        "layer.1.EncDecAttention.q layer.1.EncDecAttention.k layer.1.EncDecAttention.v > layer.1.EncDecAttention.o",
        "layer.2.DenseReluDense.wi > layer.2.DenseReluDense.wo",
    ),
    "torch_encoder": ("linear1 > linear2",),
}
WIDTH = 16


def graph_of(block: nn.Module) -> LinearGraph:
    return trace_linears(block, (torch.randn(2, 3, WIDTH),))


def written(graph: LinearGraph) -> tuple[str, ...]:
    return tuple(f"{' '.join(group.columns)} > {' '.join(group.rows)}".rstrip("> ") for group in graph.groups)


@pytest.mark.parametrize("name", CASES)
def test_groups_of_real_models(name: str) -> None:
    case = make(name)
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in case.block.modules()]
    graph = trace_linears(case.block.eval(), case.args, case.kwargs)
    assert written(graph) == GROUPS[name]
    assert not any(group.leaks or group.reductions for group in graph.groups)
    assert graph.uncalled == (("self_attn.out_proj",) if name == "torch_encoder" else ())
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in case.block.modules()]


def test_heads_and_parts_of_real_models() -> None:
    def nodes(name: str) -> dict[str, tuple[tuple[int, ...], tuple[HeadView, ...]]]:
        case = make(name)
        graph = trace_linears(case.block.eval(), case.args, case.kwargs)
        return {key: (node.parts, node.heads) for key, node in graph.linears.items()}

    llama, phi3, gpt2 = nodes("llama"), nodes("phi3"), nodes("gpt2")
    assert llama["self_attn.q_proj"] == ((32,), (HeadView(0, 4, 8),))
    assert llama["self_attn.k_proj"] == ((16,), (HeadView(0, 2, 8),))
    assert phi3["self_attn.qkv_proj"] == ((32, 16, 16), (HeadView(0, 4, 8), HeadView(32, 2, 8), HeadView(48, 2, 8)))
    assert phi3["mlp.gate_up_proj"] == ((48, 48), ())
    assert gpt2["attn.c_attn"][0] == (32, 32, 32)
    assert nodes("nano")["qkv"][0] == (32, 32, 32)


def test_parameters_inside_the_region() -> None:
    def inner(name: str) -> list[tuple[str, ...]]:
        case = make(name)
        return [group.inner_parameters for group in trace_linears(case.block.eval(), case.args, case.kwargs).groups]

    assert inner("qwen3") == [("self_attn.k_norm.weight", "self_attn.q_norm.weight"), ()]
    assert inner("t5_decoder")[0] == ("layer.0.SelfAttention.relative_attention_bias.weight",)
    assert inner("llama") == [(), ()]


class Pair(nn.Module):
    """Two Linears, and a place for what happens between them."""

    def __init__(self, inner: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.norm = nn.LayerNorm(inner)

    def between(self, x: Tensor) -> Tensor:
        return x.relu()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(x)))


class NormBetween(Pair):
    def between(self, x: Tensor) -> Tensor:
        return self.norm(x)


class OwnNormBetween(Pair):
    def between(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class SoftmaxBetween(Pair):
    def between(self, x: Tensor) -> Tensor:
        return F.softmax(x, dim=-1)


class SoftmaxOverLength(Pair):
    def between(self, x: Tensor) -> Tensor:
        return F.softmax(x, dim=1)


class OneHead(Pair):
    def between(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, 32).transpose(1, 2).transpose(1, 2).flatten(-2)


class Interleaved(Pair):
    """The parts lie inside each head, as in GPT-NeoX: each rank's slice has whole heads already."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * 32)

    def between(self, x: Tensor) -> Tensor:
        q, k, v = x.view(*x.shape[:-1], 4, -1).chunk(3, dim=-1)
        return (q * k + v).flatten(-2)


class Leaking(Pair):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = self.up(x)
        return self.down(hidden), hidden


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.only(x)


class ThreeInARow(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


class TwoRoles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.twice(x))


class SharedColumn(nn.Module):
    """Two rows take the same column, so all three belong together."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        return self.c(hidden) + self.d(input=hidden * self.b(x))


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (NormBetween(), "layer_norm over 32 features of up"),
        (OwnNormBetween(), "mean over 32 features of up"),
        (SoftmaxBetween(), "softmax over 32 features of up"),
    ],
)
def test_reductions_over_divided_features(block: nn.Module, text: str) -> None:
    [group] = graph_of(block).groups
    assert group.reductions == (text,)


def test_a_norm_between_is_an_inner_parameter() -> None:
    assert graph_of(NormBetween()).groups[0].inner_parameters == ("norm.bias", "norm.weight")


def test_other_dimensions_are_no_reductions() -> None:
    assert graph_of(SoftmaxOverLength()).groups[0].reductions == ()


def test_one_head_is_seen() -> None:
    assert graph_of(OneHead()).linears["up"].heads == (HeadView(0, 1, 32),)


def test_interleaved_parts_are_no_parts() -> None:
    node = graph_of(Interleaved()).linears["up"]
    assert node.parts == (96,)
    assert node.heads == (HeadView(0, 4, 24),)


def test_features_that_reach_the_output() -> None:
    for block in (Leaking(), Residual()):
        assert all(group.leaks for group in graph_of(block).groups)
    first, last = graph_of(ThreeInARow()).groups
    assert (first.columns, first.rows, first.leaks) == (("0",), ("1",), False)
    assert (last.columns, last.rows, last.leaks) == (("2",), (), True)


def test_a_linear_with_two_roles() -> None:
    graph = graph_of(TwoRoles())
    assert graph.linears["twice"].role == "conflict"


def test_columns_that_share_a_row_are_one_group() -> None:
    assert written(graph_of(SharedColumn())) == ("a b > c d",)


def test_the_trace_leaves_no_mode_behind() -> None:
    class Failing(Residual):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("in forward")

    block = Failing()
    with pytest.raises(KeyError, match="in forward"):
        graph_of(block)
    assert torch.backends.mha.get_fastpath_enabled()
    assert not block.only._forward_hooks
    assert not block.only._forward_pre_hooks
