"""Activation checkpointing and compilation of blocks."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe import long_run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_par.errors import ParallelConfigError
from lightning_par.parallel.memory import (
    ActivationCheckpointing,
    _SelectivePolicy,
    apply_activation_checkpointing,
    apply_compile,
)

SETTINGS = ["full", "selective"]


class Block(nn.Module):
    """Attention and an MLP between two norms: six linear layers, one attention kernel, dropout on both paths."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        """Shapes: (batch, length, width)."""
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(h), self.dropout, self.training)
        x = self.last(x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training))
        return x if scale is None else x * scale


class Stack(nn.Module):
    def __init__(self, depth: int = 4, dropout: float = 0.0, block: Callable[..., nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(dropout=dropout) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def named_blocks(self) -> list[tuple[str, nn.Module]]:
        return [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]


class OpCounter(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name().removeprefix("aten::").partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def one_rank() -> Iterator[Any]:
    """A mesh of one rank, without network."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def make(depth: int = 4, dropout: float = 0.0, **options: Any) -> tuple[Stack, Tensor]:
    torch.manual_seed(0)
    return Stack(depth, dropout, **options).double(), torch.randn(2, 8, 16, dtype=torch.float64)


def gradients(model: nn.Module, x: Tensor, *, seed: int = 1) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    model(x).square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes of distinct storages that autograd holds between forward and backward, parameters aside."""
    ignored = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in ignored:
            held[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x.clone().requires_grad_())
    return sum(t.untyped_storage().nbytes() for t in held.values())


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_are_the_same_bit_for_bit(setting: str, dropout: float) -> None:
    model, x = make(dropout=dropout)
    expected = gradients(model, x)
    assert not torch.equal(expected[1], gradients(model, x, seed=2)[1]) or dropout == 0
    apply_activation_checkpointing(model.named_blocks(), setting)
    assert_equal(gradients(model, x), expected)


def test_full_checkpointing_holds_only_the_inputs_of_the_blocks() -> None:
    model, x = make()
    before = saved_bytes(model, x)
    apply_activation_checkpointing(model.named_blocks())
    # What is packed by hooks from outside are the inputs that checkpoints keep.
    assert saved_bytes(model, x) <= len(model.blocks) * x.nbytes < before / 10


def test_names_classes_and_reports_stay() -> None:
    model, _ = make(depth=2)
    names = [n for n, _ in model.named_parameters()], [n for n, _ in model.named_modules()]
    wrapped = apply_activation_checkpointing(model.named_blocks())
    assert wrapped == ["blocks.0", "blocks.1"]
    assert ([n for n, _ in model.named_parameters()], [n for n, _ in model.named_modules()]) == names
    cls = type(model.blocks[0])
    assert isinstance(model.blocks[0], Block)
    assert cls is not Block
    assert cls is type(model.blocks[1])
    assert (cls.__name__, cls.__qualname__, cls.__module__) == (Block.__name__, Block.__qualname__, Block.__module__)
    assert repr(model) == repr(make(depth=2)[0])


def test_applied_again_it_takes_the_new_setting() -> None:
    model, x = make(depth=1)
    apply_activation_checkpointing(model.named_blocks(), "full")
    full = type(model.blocks[0])
    apply_activation_checkpointing(model.named_blocks(), "selective")
    apply_activation_checkpointing(model.named_blocks(), "full")
    assert type(model.blocks[0]) is full
    assert forward_calls(model, x) == 2


def forward_calls(model: Stack, x: Tensor) -> int:
    """How often the first linear layer of any block runs in one training step."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    handles = [b.q.register_forward_pre_hook(count) for b in model.blocks]
    gradients(model, x)
    for handle in handles:
        handle.remove()
    return calls


@pytest.mark.parametrize(
    ("setting", "wrapped"),
    [
        (None, []),
        (False, []),
        (True, [0, 1, 2, 3, 4]),
        ("full", [0, 1, 2, 3, 4]),
        ("selective", [0, 1, 2, 3, 4]),
        (1, [0, 1, 2, 3, 4]),
        (2, [0, 2, 4]),
        (9, [0]),
        (ActivationCheckpointing(every=3), [0, 3]),
        (ActivationCheckpointing("selective", 2), [0, 2, 4]),
        (lambda name, module: name.endswith(("1", "3")) and isinstance(module, Block), [1, 3]),
    ],
)
def test_settings_choose_the_blocks(setting: Any, wrapped: list[int]) -> None:
    model, x = make(depth=5)
    names = apply_activation_checkpointing(model.named_blocks(), setting)
    assert names == [f"blocks.{i}" for i in wrapped]
    assert [i for i, b in enumerate(model.blocks) if type(b) is not Block] == wrapped
    assert forward_calls(model, x) == 5 + len(wrapped)


@pytest.mark.parametrize(
    "setting", ["ful", 0, -1, 1.5, [], ActivationCheckpointing("none"), ActivationCheckpointing(every=0)]
)  # type: ignore[arg-type]
def test_a_bad_setting_names_the_legal_ones(setting: Any) -> None:
    model, _ = make(depth=1)
    with pytest.raises(ParallelConfigError, match=r"activation_checkpointing.*(selective|int >= 1)"):
        apply_activation_checkpointing(model.named_blocks(), setting)
    assert type(model.blocks[0]) is Block


def test_a_forward_on_the_instance_is_refused_by_name() -> None:
    model, _ = make(depth=2)
    model.blocks[1].forward = model.blocks[0].forward  # type: ignore[method-assign]
    with pytest.raises(ParallelConfigError, match=r"blocks\.1"):
        apply_activation_checkpointing(model.named_blocks())
    assert type(model.blocks[0]) is Block


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_are_checkpointed_too(setting: str, duplicate: Callable[[Stack], Stack]) -> None:
    model, x = make(depth=2)
    expected = gradients(model, x)
    apply_activation_checkpointing(model.named_blocks(), setting)
    other = duplicate(model)
    assert type(other.blocks[0]) is type(model.blocks[0])
    assert other.blocks[0].q.weight is not model.blocks[0].q.weight
    assert_equal(gradients(other, x), expected)
    assert forward_calls(other, x) == 4


@pytest.mark.parametrize("grad", [True, False])
def test_without_gradients_nothing_is_checkpointed(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(
        "lightning_par.parallel.memory.checkpoint", lambda *a, **k: (calls.append(1), original(*a, **k))[1]
    )
    model, x = make(depth=2)
    expected = model(x)
    apply_activation_checkpointing(model.named_blocks())
    model.eval()
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert len(calls) == (2 if grad else 0)


class Structured(nn.Module):
    """Takes everything as keywords and returns nested containers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 4)

    def forward(self, *, x: Tensor, parts: dict[str, Any]) -> Any:
        y = torch.tanh(self.linear(x)) * parts["scale"][0]
        match self.kind:
            case "tuple":
                return y, None, [y + 1]
            case "dict":
                return {"y": y, "more": (y + 1, "text")}
            case _:
                from transformers.modeling_outputs import BaseModelOutput

                return BaseModelOutput(last_hidden_state=y, hidden_states=(y + 1,))


@pytest.mark.parametrize("kind", ["tuple", "dict", "model output"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_keywords_and_structured_outputs(kind: str, setting: str) -> None:
    torch.manual_seed(0)
    plain = Structured(kind)
    wrapped = copy.deepcopy(plain)
    apply_activation_checkpointing([("block", wrapped)], setting)
    results = []
    for module in (plain, wrapped):
        scale = torch.ones(3, 4, requires_grad=True)
        out = module(x=torch.ones(3, 4), parts={"scale": [scale]})
        first = out[0] if kind == "tuple" else out["y"] if kind == "dict" else out.last_hidden_state
        second = out[2][0] if kind == "tuple" else out["more"][0] if kind == "dict" else out.hidden_states[0]
        (first * second).sum().backward()
        results.append([scale.grad, *(p.grad for p in module.parameters())])
        assert type(out).__name__ == {"tuple": "tuple", "dict": "dict"}.get(kind, "BaseModelOutput")
    assert_equal(results[1], results[0])


@pytest.mark.parametrize(("setting", "recomputed", "kernels"), [("full", 6, 2), ("selective", 3, 1)])
def test_selective_recomputes_every_second_matmul_and_no_attention(setting: str, recomputed: int, kernels: int) -> None:
    """Of q, k, v, out, up and down selective keeps q, v and up."""
    model, x = make(depth=1)
    plain, wrapped = OpCounter(), OpCounter()
    with plain:
        gradients(model, x)
    apply_activation_checkpointing(model.named_blocks(), setting)
    with wrapped:
        gradients(model, x)
    assert plain.calls["addmm"] == 6
    assert wrapped.calls["addmm"] == 6 + recomputed
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    assert (plain.calls[kernel], wrapped.calls[kernel]) == (1, kernels)


def test_selective_counts_anew_in_each_block_call() -> None:
    """Three matmuls a call: a counter that ran on would keep one of the first call and two of the second."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).double()
    apply_activation_checkpointing([("block", block)], "selective")
    recomputed = []
    for _ in range(2):
        y = block(torch.ones(2, 8, dtype=torch.float64))
        with OpCounter() as counter:
            y.sum().backward()
        recomputed.append(counter.calls["addmm"])
    assert recomputed == [1, 1]


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "keeps"),
    [
        (torch.ops.aten._scaled_dot_product_flash_attention.default, (None, None, None, 0.0), {}, True),
        (torch.ops.aten._scaled_dot_product_flash_attention.default, (None, None, None), {}, True),
        (torch.ops.aten._scaled_dot_product_flash_attention.default, (None, None, None, 0.1), {}, False),
        (torch.ops.aten._scaled_dot_product_efficient_attention.default, (None,) * 5, {"dropout_p": 0.1}, False),
        (torch.ops.aten._scaled_dot_product_cudnn_attention.default, (None,) * 5, {}, True),
        (torch.ops._c10d_functional.reduce_scatter_tensor.default, (), {}, True),
        (torch.ops._c10d_functional.all_reduce_.default, (), {}, False),
        (torch.ops._c10d_functional.all_gather_into_tensor_out.default, (), {}, False),
        (torch.ops.aten.gelu.default, (), {}, False),
    ],
)
def test_selective_policy(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], keeps: bool) -> None:
    """An attention kernel that draws a dropout mask must run again, or later dropouts draw other masks."""
    assert _SelectivePolicy()._keeps(op, args, kwargs) is keeps


class Stateful(nn.Module):
    """Batch statistics, a counter that is rebound, and a power iteration that the output depends on."""

    count: Tensor
    direction: Tensor
    mean: Tensor
    variance: Tensor
    rebound: Tensor
    written: Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("variance", torch.ones(16))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("direction", torch.ones(16))
        for name in ("constant", "rebound", "written"):
            self.register_buffer(name, torch.ones(300, 300))

    def forward(self, x: Tensor) -> Tensor:
        self.count, self.rebound = self.count + 1, self.rebound * 2
        self.written.mul_(2)
        with torch.no_grad():
            self.direction.copy_(F.normalize(self.linear.weight @ self.direction, dim=0))
        sigma = self.direction.dot(self.linear.weight.mv(self.direction))
        y = self.norm((x @ self.linear.weight / sigma).transpose(1, 2))
        return F.batch_norm(y, self.mean, self.variance, training=True).transpose(1, 2)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("compiled", [False, long_run(True)])
def test_buffers_are_written_once_and_the_recomputation_sees_the_old_ones(setting: str, compiled: bool) -> None:
    torch._dynamo.reset()
    model, x = make(depth=2, block=Stateful)
    reference = copy.deepcopy(model)
    apply_activation_checkpointing(model.named_blocks(), setting)
    if compiled:
        apply_compile(model.named_blocks(), "aot_eager")
    for _ in range(3):
        assert_equal(gradients(model, x), gradients(reference, x))
        assert_equal(list(model.buffers()), list(reference.buffers()))
    assert model.blocks[0].count == 3
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in reference.named_buffers()]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("compiled", [False, long_run(True)])
def test_a_hugging_face_model_fills_its_cache_once(setting: str, compiled: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=30
    )
    reference = LlamaForCausalLM(config).double().train()
    model = copy.deepcopy(reference)
    blocks = [(str(i), b) for i, b in enumerate(model.model.layers)]
    assert apply_activation_checkpointing(blocks, setting) == ["0", "1"]
    if compiled:
        apply_compile(blocks, "aot_eager")
    ids = torch.randint(0, 30, (2, 8))
    found = []
    for m in (model, reference):
        out = m(input_ids=ids, labels=ids)
        out.loss.backward()
        found.append([out.loss, *(p.grad for p in m.parameters())])
        assert out.past_key_values.get_seq_length() == 8
    assert_equal(*found)


class Cache:
    """As those of transformers: parts for the layers, made when they are first used."""

    def __init__(self, parts: int) -> None:
        self.layers = [Cache(0) for _ in range(parts)]
        self.keys: list[Tensor] = []

    def get_seq_length(self) -> int:
        return len(self.keys)


class Caching(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.linear = index, nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        if len(cache.layers) <= self.index:
            cache.layers.append(Cache(0))
        keys = cache.layers[self.index].keys
        keys.append(self.linear(x))
        return torch.stack(keys).square().mean(0)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("parts", [0, 2])
def test_the_recomputation_sees_the_cache_as_it_was(setting: str, parts: int) -> None:
    torch.manual_seed(0)
    reference = nn.ModuleList([Caching(0), Caching(1)]).double()
    blocks = copy.deepcopy(reference)
    apply_activation_checkpointing([(str(i), b) for i, b in enumerate(blocks)], setting)
    found = []
    for modules in (blocks, reference):
        cache, x = Cache(parts), torch.ones(3, 4, dtype=torch.float64)
        for _ in range(2):
            for block in modules:
                x = block(x, cache)
        x.sum().backward()
        assert [part.get_seq_length() for part in cache.layers] == [2, 2]
        found.append([p.grad for p in modules.parameters()])
    assert_equal(*found)


@pytest.mark.parametrize("setting", SETTINGS)
def test_backward_twice(setting: str) -> None:
    model, x = make(depth=1, block=Stateful)
    apply_activation_checkpointing(model.named_blocks(), setting)
    x.requires_grad_()
    loss = model(x).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    if setting == "full":
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0], first, rtol=0, atol=0)
    else:
        with pytest.raises(RuntimeError, match="backward an extra time"):
            torch.autograd.grad(loss, x)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [None, *SETTINGS])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_after_checkpointing(setting: str | None, backend: str) -> None:
    torch._dynamo.reset()
    model, x = make(depth=2)
    expected = gradients(model, x)
    apply_activation_checkpointing(model.named_blocks(), setting)
    apply_compile(model.named_blocks(), backend)
    assert all(b._compiled_call_impl is not None for b in model.blocks)
    for a, b in zip(gradients(model, x), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert_equal(gradients(copy.deepcopy(model), x), expected)


def test_checkpointing_reaches_the_compiled_graph() -> None:
    """With full checkpointing the backward graph holds the matmuls of the forward once more."""
    torch._dynamo.reset()
    model, x = make(depth=1)
    apply_activation_checkpointing(model.named_blocks())
    apply_compile(model.named_blocks(), "aot_eager_decomp_partition")
    y = model(x)
    with OpCounter() as counter:
        y.sum().backward()
    plain, _ = make(depth=1)
    y = plain(x)
    with OpCounter() as reference:
        y.sum().backward()
    matmuls = [c.calls["mm"] + c.calls["addmm"] for c in (counter, reference)]
    assert matmuls[0] > matmuls[1]


def test_an_unknown_backend_is_refused() -> None:
    model, _ = make(depth=1)
    with pytest.raises(ParallelConfigError, match="inductor"):
        apply_compile(model.named_blocks(), "indctor")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("compiled", [None, long_run("eager"), long_run("aot_eager")])
def test_with_fsdp_around_blocks_and_inside_them(one_rank: Any, setting: str, compiled: str | None) -> None:
    torch._dynamo.reset()
    model, x = make(depth=3, dropout=0.5)
    expected = gradients(model, x)
    apply_activation_checkpointing(model.named_blocks(), setting)
    if compiled:
        apply_compile(model.named_blocks(), compiled)
    for block in model.blocks:
        # A norm as a unit of its own, as under autocast: its hooks run inside of the checkpoint.
        fully_shard(block.norm, mesh=one_rank, reshard_after_forward=False)
        fully_shard(block.last, mesh=one_rank, reshard_after_forward=False)
        fully_shard(block, mesh=one_rank, reshard_after_forward=True)
    fully_shard(model, mesh=one_rank)
    assert all(isinstance(b, FSDPModule) and isinstance(b, Block) for b in model.blocks)
    assert type(model.blocks[0]).__name__ == "FSDPBlock"
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)
        model(x.clone()).square().sum().backward()
        found = [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]
        for a, b in zip(found, expected[1:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("setting", SETTINGS)
def test_hooks_inside_a_block_run_in_pairs(setting: str) -> None:
    """The recomputation could stop before the end of the last norm; a hook pair that communicates must not."""
    model, x = make(depth=1)
    apply_activation_checkpointing(model.named_blocks(), setting)
    seen = []
    model.blocks[0].last.register_forward_pre_hook(lambda *_: seen.append("before"))
    model.blocks[0].last.register_forward_hook(lambda *_: seen.append("after"))
    gradients(model, x)
    assert seen == ["before", "after"] * 2
