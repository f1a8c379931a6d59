"""Models built without memory get, bit for bit, the weights of an ordinary build; under any layout."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_par.errors import ParallelConfigError
from lightning_par.parallel import deferred, materialize
from lightning_par.parallel.materialize import capture_init, deferred_init
from lightning_par.parallel.shards import full_tensor
from models import LENGTH, VOCABULARY, Block

Build = Callable[[], nn.Module]


class GPT(nn.Module):
    """Initialised the nano-GPT way: a function for all modules, then the residual projections again; tied head."""

    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, LENGTH, LENGTH), persistent=False)
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("out.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))
            if name.endswith("qkv.weight"):
                parameter.data.mul_(0.5)
        self.norm.requires_grad_(False)
        self.positions.no_decay = True

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions[: x.shape[1]] + self.mask.sum()
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Custom(nn.Module):
    """One parameter for each way to make one; every line draws, so a slip shows in all that follow."""

    def __init__(self) -> None:
        super().__init__()

        def add(name: str, value: Tensor) -> None:
            setattr(self, name, nn.Parameter(value))

        add("randn", torch.randn(5, 7) / math.sqrt(7))
        add("normal", torch.normal(0.0, 1.0, (3, 4)))
        add("normal_tensor", torch.normal(torch.ones(5), torch.rand(5)))
        add("xavier", nn.init.xavier_uniform_(torch.empty(5, 7)))
        add("kaiming", nn.init.kaiming_normal_(torch.empty(5, 7)))
        add("truncated", nn.init.trunc_normal_(torch.empty(40, 7), std=0.02))
        add("truncated_hard", nn.init.trunc_normal_(torch.empty(40, 7), a=-0.1, b=0.1))
        add("orthogonal", nn.init.orthogonal_(torch.empty(9, 7)))
        add("orthogonal_wide", nn.init.orthogonal_(torch.empty(7, 9), gain=2.0))
        add("sparse", nn.init.sparse_(torch.empty(9, 7), 0.3))
        add("dirac", nn.init.dirac_(torch.empty(4, 4, 3)))
        add("eye", nn.init.eye_(torch.empty(4, 4)))
        add("permuted", torch.rand(5)[torch.randperm(5)])
        add("counts", torch.poisson(torch.rand(8) * 4))
        add("drawn", torch.multinomial(torch.rand(8), 3).float())
        add("dropped", nn.functional.dropout(torch.rand(30)))
        add("data", torch.tensor([1.0, 2.0]) * torch.rand(2))
        add("new_data", self.randn.new_tensor([1.0, 2.0]))
        add("array", torch.as_tensor(np.arange(3.0)))
        add("lines", torch.linspace(0, 1, 3))
        add("copied", torch.empty(3))
        self.copied.data.copy_(torch.from_numpy(np.arange(3.0)))


class Order(nn.Module):
    """Views, in-place changes, and randomness that is not deferred, in between."""

    def __init__(self) -> None:
        super().__init__()
        w = torch.rand(6, 6)
        w[[0, 2]] = 0.0
        w[:, [1, 2]] *= 3
        w[torch.tensor([True, False] * 3)] += 1
        w[1:3].copy_(w[3:5])
        torch.add(w, w, out=w)
        w[1, 2] = 5
        self.w = nn.Parameter(w)
        with torch.no_grad():
            self.w[0].zero_()
            self.w.data[1].fill_(2.0)
            torch._foreach_mul_([self.w.data, self.w.data[2:]], 2.0)
        self.real = nn.Parameter(torch.randn(3, device="cpu"))
        self.after_real = nn.Parameter(torch.randn(3))
        with torch.random.fork_rng():
            torch.manual_seed(99)
            self.forked = nn.Parameter(torch.randn(4))
        generator = torch.Generator().manual_seed(3)
        self.own_generator = nn.Parameter(torch.randn(20, generator=generator))
        self.own_generator_again = nn.Parameter(torch.empty(20).uniform_(generator=generator))
        self.after = nn.Parameter(torch.randn(4))
        self.looked_at = nn.Parameter(self.after.detach() * self.after.max().item() + float(self.after.tolist()[1]))
        self.as_array = nn.Parameter(self.after.detach() + float(self.after.detach().numpy()[2]))
        if self.after.sum() > -100:
            self.mixed = nn.Parameter(self.after.detach() + torch.arange(4.0, device="cpu"))
        self.register_buffer("found", torch.nonzero(torch.rand(10) > 0.5).flatten())
        self.linear = nn.Linear(3, 3).to(torch.float64).half()
        self.twin = copy.deepcopy(self.linear)
        self.norm = copy.deepcopy(nn.BatchNorm1d(3))
        self.rope = torch.outer(torch.arange(4.0), 1 / 10 ** torch.arange(0, 1, 0.5)).cos()  # no buffer
        self.parts = [self.rope.sin(), self.after]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_dtype(dtype: torch.dtype, build: Build) -> nn.Module:
    with default_dtype(dtype):
        return build()


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes, **options))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, **ids))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)


MODELS: dict[str, Build] = {
    "gpt": GPT,
    "custom": Custom,
    "order": Order,
    "linear": lambda: nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 7)),
    "encoder": encoder,
    "convolution": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Embedding(9, 4, padding_idx=2)),
    "lstm": lambda: nn.LSTM(5, 6, 2, bidirectional=True, proj_size=3),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 5)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 5)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 5)),
    "float64": lambda: in_dtype(torch.float64, encoder),
    "bfloat16": lambda: in_dtype(torch.bfloat16, GPT),
    "llama": llama,
    "llama_tied": lambda: llama(tie_word_embeddings=True),
    "gpt2": gpt2,
}


def deferred_build(build: Build, seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    with deferred_init():
        return build()


def ordinary_build(build: Build, seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def tensors(module: nn.Module) -> dict[str, Tensor]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: full_tensor(tensor.detach()) for name, tensor in named}


def assert_same(actual: nn.Module, expected: nn.Module) -> None:
    assert list(actual.state_dict()) == list(expected.state_dict())
    assert list(dict(actual.named_parameters())) == list(dict(expected.named_parameters()))
    assert [p.requires_grad for p in actual.parameters()] == [p.requires_grad for p in expected.parameters()]
    mine, theirs = tensors(actual), tensors(expected)
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        assert mine[name].dtype == value.dtype, name
        assert torch.equal(mine[name], value), name


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_an_ordinary_build(name: str) -> None:
    expected = ordinary_build(MODELS[name])
    draws = torch.get_rng_state()
    model = deferred_build(MODELS[name])
    assert torch.equal(torch.get_rng_state(), draws)
    assert [n for n, t in tensors(model).items() if t.device.type != "meta"] == (["real"] if name == "order" else [])
    plan = capture_init(model)
    torch.rand(3)  # what is drawn before or after materialising changes nothing
    draws = torch.get_rng_state()
    with default_dtype(torch.float16):
        plan.materialize(model, "cpu")
    assert torch.equal(torch.get_rng_state(), draws)
    assert_same(model, expected)


def test_forward_and_ties() -> None:
    x = torch.arange(LENGTH)[None]
    expected, model = ordinary_build(GPT), deferred_build(GPT)
    capture_init(model).materialize(model, "cpu")
    assert model.head.weight is model.tokens.weight
    assert model.positions.no_decay
    assert not hasattr(model.positions, deferred.VERSION_MARK)
    assert torch.equal(model(x), expected(x))
    model, expected = (m.eval() for m in (deferred_build(MODELS["lstm"]), ordinary_build(MODELS["lstm"])))
    capture_init(model).materialize(model, "cpu")
    assert torch.equal(model(torch.ones(2, 5))[0], expected(torch.ones(2, 5))[0])


def test_plain_attributes() -> None:
    expected, model = ordinary_build(Order), deferred_build(Order)
    capture_init(model).materialize(model, "cpu")
    assert torch.equal(model.rope, expected.rope)
    assert torch.equal(model.parts[0], expected.parts[0])
    assert model.parts[1] is model.after


def test_pretrained_weights(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    def load() -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(tmp_path)

    def load_state() -> nn.Module:
        model = llama()
        model.load_state_dict(saved.state_dict())
        return model

    saved = llama()
    saved.save_pretrained(tmp_path)
    for build in (load, load_state):
        expected = ordinary_build(build)
        draws = torch.get_rng_state()
        model = deferred_build(build)
        assert torch.equal(torch.get_rng_state(), draws)
        capture_init(model).materialize(model, "cpu")
        assert_same(model, expected)


def test_nothing_to_do() -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    plan = capture_init(model)
    assert not plan.needed
    plan.materialize(model, "cpu")
    assert model.weight is weight


def test_a_stage_fills_only_what_it_has() -> None:
    expected, model = ordinary_build(GPT), deferred_build(GPT)
    plan = capture_init(model)
    del model.tokens, model.head, model.positions, model.blocks[0]
    model.blocks = nn.ModuleDict({"1": model.blocks[0]})
    plan.materialize(model, "cpu")
    assert all(torch.equal(t, tensors(expected)[name]) for name, t in tensors(model).items())
    assert sorted({name.split(".")[0] for name in tensors(model)}) == ["blocks", "mask", "norm"]


def test_patches_end_with_the_context() -> None:
    before = nn.init._no_grad_trunc_normal_, torch.utils._device.DeviceContext.__torch_function__
    with pytest.raises(RuntimeError, match="boom"), deferred_init():
        raise RuntimeError("boom")
    assert (nn.init._no_grad_trunc_normal_, torch.utils._device.DeviceContext.__torch_function__) == before
    with deferred_init(), deferred_init():
        assert torch.empty(2).device.type == "meta"
        assert not torch.empty(2).is_meta
    assert torch.empty(2).device.type == "cpu"


# ---- memory ----------------------------------------------------------------------------------------------------------

SIZE = 200


def stack_then_scale() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(8)))
    with torch.no_grad():
        for layer in model:
            layer.weight.normal_(std=0.1)
        for layer in model:
            layer.weight.mul_(0.5)
            layer.weight.data = (layer.weight.data * 2 + 1).sin().cos()
    return model


def count_big() -> int:
    """Count the full-size real storages that anything holds."""
    big: set[int] = set()
    for obj in gc.get_objects():
        if issubclass(type(obj), torch.UntypedStorage):
            storage = obj
        elif issubclass(type(obj), Tensor) and type(obj) in (Tensor, nn.Parameter) and obj.device.type == "cpu":
            storage = obj.untyped_storage()
        else:
            continue
        if storage.device.type == "cpu" and storage.nbytes() >= 4 * SIZE * SIZE:
            big.add(storage.data_ptr())
    return len(big)


def test_memory_is_about_one_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tensors(ordinary_build(stack_then_scale))["7.weight"][0].clone()
    peaks: list[int] = []
    kept: list[Tensor] = []
    run = deferred._run

    def spying_run(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        peaks.append(count_big() - base)
        return out

    def shard(target: Tensor, full: Tensor) -> None:
        peaks.append(count_big() - base)
        kept.append(full[0].clone())

    monkeypatch.setattr(deferred, "_run", spying_run)
    monkeypatch.setattr(materialize, "copy_full_into", shard)
    gc.freeze()  # `gc.get_objects` leaves out what is frozen
    base = count_big()
    model = deferred_build(stack_then_scale)
    assert 1 <= max(peaks) <= 2
    recorded = len(peaks)
    plan = capture_init(model)
    monkeypatch.setattr(materialize, "_allocate", lambda module, device, ids: None)
    plan.materialize(model, "cpu")
    gc.unfreeze()
    assert 1 <= max(peaks[recorded:]) <= 2
    assert torch.equal(kept[14], expected)  # parameter 14: the last weight


def test_replaced_draws_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deferred_build(lambda: nn.Linear(4, 4, bias=False).apply(lambda m: nn.init.normal_(m.weight)))
    ran: list[Any] = []
    run = deferred._run
    monkeypatch.setattr(
        deferred, "_run", lambda op, *args, **kwargs: (ran.append(op.func), run(op, *args, **kwargs))[1]
    )
    capture_init(model).materialize(model, "cpu")
    assert ran == [torch.ops.aten.normal_.default]


# ---- models that were not recorded -----------------------------------------------------------------------------------


class Valueless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.inner[1].register_buffer("table", torch.ones(2), persistent=False)
        self.plain = torch.ones(3)


class Broken(nn.Linear):
    built = False

    def reset_parameters(self) -> None:
        if self.built:
            raise ValueError("no second time")
        self.built = True


@pytest.mark.parametrize("name", ["linear", "encoder", "convolution", "lstm", "llama_tied", "gpt2"])
def test_reset_parameters(name: str) -> None:
    with torch.device("meta"):
        models = [MODELS[name](), MODELS[name]()]
    for model in models:
        torch.manual_seed(7)
        capture_init(model).materialize(model, "cpu")
    assert_same(*models)
    if name in ("linear", "convolution", "lstm"):  # their constructors do no more
        assert_same(models[0], ordinary_build(MODELS[name]))
    if name == "gpt2":
        assert models[0].lm_head.weight is models[0].transformer.wte.weight
        assert models[0].transformer.h[0].attn.c_proj.weight.std() < 0.015  # scaled by the depth
        assert models[0].transformer.h[0].attn.c_attn.weight.std() > 0.015


def test_refusals_name_everything() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Valueless(), nn.Linear(2, 2))
    with pytest.raises(ParallelConfigError) as error:
        capture_init(model)
    text = str(error.value)
    assert "in Valueless: 0.scale" in text
    assert "in BatchNorm1d: 0.inner.1.table" in text
    assert "attribute plain of Valueless" in text
    assert "configure_model()" in text
    assert "give Valueless a reset_parameters()" in text
    assert "0.inner.0.weight" not in text
    with torch.device("meta"):
        broken = Broken(2, 2)
    with pytest.raises(ParallelConfigError, match="Broken.reset_parameters failed on the meta device: no second time"):
        capture_init(broken)
    with deferred_init():
        unset = Valueless()
    with pytest.raises(ParallelConfigError, match=r"in Valueless: scale\n"):
        capture_init(unset)
    with deferred_init():
        lazy = nn.LazyLinear(3)
    with pytest.raises(ParallelConfigError, match="in LazyLinear: weight .lazy.*bias"):
        capture_init(lazy)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to(torch.float64),
        lambda m: nn.init.ones_(m.weight),
        lambda m: m.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)}),
    ],
    ids=["cast", "init", "load"],
)
@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
def test_changes_after_the_context_are_refused(change: Callable[[nn.Module], Any]) -> None:
    model = deferred_build(lambda: nn.Linear(2, 2))
    capture_init(model)
    change(model)
    with pytest.raises(ParallelConfigError, match="weight was changed, cast or copied after"):
        capture_init(model)


def test_meta_tensors_that_appear_later_are_refused() -> None:
    model = deferred_build(lambda: nn.Linear(2, 2))
    plan = capture_init(model)
    model.extra = nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(ParallelConfigError, match="extra is on the meta device and was not there"):
        plan.materialize(model, "cpu")


def test_gradient_hooks_on_meta_are_refused() -> None:
    model = deferred_build(lambda: nn.Linear(2, 2))
    plan = capture_init(model)
    model.weight.register_hook(print)
    model.bias.register_post_accumulate_grad_hook(print)
    with pytest.raises(ParallelConfigError, match=r"(?s)weight has a gradient hook.*bias has a gradient hook"):
        plan.materialize(model, "cpu")


def test_unknown_values_are_not_invented() -> None:
    outside = torch.ones(3, device="meta")
    with deferred_init():
        with pytest.raises(RuntimeError, match=r"code that looks at a value reads a meta tensor of shape \(3,\)"):
            outside.sum(), outside.tolist()
        with pytest.raises(RuntimeError, match=r"copy_.* reads a meta tensor of shape \(3,\)"):
            torch.zeros(3).copy_(outside)
        model = nn.Linear(3, 1)
        model.bias = nn.Parameter(outside * 2)
    with pytest.raises(ParallelConfigError, match=r"in Linear: bias\n"):
        capture_init(model)
