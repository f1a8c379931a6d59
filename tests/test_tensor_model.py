"""The plan of a whole model: what it is seen with, wishes, refusals; in one process."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from probe import some
from torch import Tensor, nn

from lightning_par.blocks import find_blocks
from lightning_par.errors import ParallelConfigError
from lightning_par.parallel.materialize import deferred_init
from lightning_par.parallel.tensor import Example, ModelTensorPlan, examples_of, observe, plan_model
from lightning_par.parallel.tensor import examples as examples_module
from models import LENGTH, VOCABULARY, NanoGPT
from tensor_blocks import FFN, GQA, SIZES, WIDTH

IDS = torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, inner: int = FFN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu()) + (0 if shift is None else shift)


class Model(nn.Module):
    def __init__(self, inner: int = FFN, vocabulary: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH, inner) for _ in range(3))
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def planned(module: nn.Module, given: Any = None, tp_size: int = 2, **options: Any) -> ModelTensorPlan:
    names = find_blocks(module).names
    seen = observe(module, names, examples_of(module, names, given))
    return plan_model(module, names, tp_size, seen=seen, **options)


def styles(plan: ModelTensorPlan) -> dict[str, str]:
    [(_, block)] = plan.families
    return {module.name: module.style for module in block.modules}


def refusal(*args: Any, **options: Any) -> str:
    with pytest.raises(ParallelConfigError) as caught:
        planned(*args, **options)
    return str(caught.value)


# What it is seen with


def test_inputs_are_taken_from_what_says_most() -> None:
    model = Model()
    assert planned(model, (IDS,)).source == planned(model, {"ids": IDS}).source == "example_inputs"
    assert planned(model, Example("the step", lambda: model(IDS))).source == "the step"
    assert planned(model).source == "a made-up input of each block"
    model.example_input_array = IDS
    assert planned(model).source == "example_input_array"
    config = transformers.LlamaConfig(**GQA)
    assert planned(transformers.LlamaForCausalLM(config)).source == "dummy_inputs of LlamaForCausalLM"


def test_an_example_that_fails_is_followed_by_the_next() -> None:
    model = Model()
    model.example_input_array = IDS
    assert planned(model, Example("the step", lambda: model(None))).source == "example_input_array"


def test_a_run_that_fails_after_the_blocks_has_shown_them() -> None:
    model = Model()

    def run() -> None:
        model(IDS)
        raise RuntimeError("no logger yet")

    assert planned(model, Example("the step", run)).source == "the step"


def test_a_run_leaves_no_trace() -> None:
    class Stateful(Model):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.batch_norm = nn.Dropout(0.5), nn.BatchNorm1d(WIDTH)
            self.register_buffer("calls", torch.zeros(()))
            self.batch_norm.eval()

        def forward(self, ids: Tensor) -> Tensor:
            self.calls += 1
            random.random(), np.random.rand(), torch.rand(3)
            return super().forward(ids)

    model = Stateful()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    expected = copy.deepcopy(random.getstate()), torch.get_rng_state(), np.random.get_state()[1].copy()
    planned(model, (IDS,))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert modes == [module.training for module in model.modules()]
    assert expected[0] == random.getstate()
    assert torch.equal(expected[1], torch.get_rng_state())
    assert np.array_equal(expected[2], np.random.get_state()[1])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(param.grad is None for param in model.parameters())


def test_a_large_model_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples_module, "_LARGE", 0)
    model, computed = Model(), []

    def run() -> None:
        computed.append(type(model(IDS)))

    plan = planned(model, Example("the step", run))
    assert plan.source == "the step"
    assert [cls.__name__ for cls in computed] == ["FakeTensor"]
    assert plan.families == planned(model, (IDS,)).families


def test_a_large_model_that_reads_values_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples_module, "_LARGE", 0)

    class Reads(Model):
        def forward(self, ids: Tensor) -> Tensor:
            assert ids.max().item() < 64
            return super().forward(ids)

    assert planned(Reads(), (IDS,)).source == "example_inputs"


def test_blocks_with_unknown_arguments_are_refused() -> None:
    class Shifted(Model):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                layer.forward = lambda x, shift: x + shift  # type: ignore[method-assign]

    text = refusal(Shifted())
    assert "a tensor-parallel plan is proven on one call of Block, and its arguments are not known" in text
    assert "example_inputs=" in text


def test_a_model_without_values_has_the_plan_of_one_with_values() -> None:
    with deferred_init():
        without = NanoGPT()
    inputs = torch.randint(VOCABULARY, (2, LENGTH))
    assert all(param.is_meta for param in without.parameters())
    mine, theirs = planned(without, (inputs,)), planned(NanoGPT(), (inputs,))
    assert [names for names, _ in mine.families] == [names for names, _ in theirs.families]
    assert styles(mine) == styles(theirs)
    assert mine.vocabulary == theirs.vocabulary
    assert all(param.is_meta for param in without.parameters())


# Blocks that differ


def test_blocks_that_differ_have_plans_of_their_own() -> None:
    model = Model()
    model.layers[1] = Block(WIDTH, 2 * FFN)
    plan = planned(model, (IDS,))
    assert [names for names, _ in plan.families] == [("layers.0", "layers.2"), ("layers.1",)]
    total = sum(p.numel() for p in model.parameters())
    norms = sum(p.numel() for layer in model.layers for p in layer.norm.parameters())
    # And the bias of each row is whole.
    assert plan.divided_numel == total - norms - 3 * WIDTH
    assert f"{plan.divided_numel / total:.1%} of {total:,} parameters are divided" in plan.report()


# Wishes


def test_wishes_by_globs() -> None:
    plan = planned(Model(), (IDS,), tp_plan={"layers.*.up": "gather", "head": "replicate"})
    assert styles(plan) == {"norm": "replicate", "up": "gather", "down": "gather"}
    assert plan.vocabulary.embeddings == ("tokens",)
    assert plan.vocabulary.reasons == {"head": "as tp_plan says"}


def test_a_wish_for_a_module_is_one_for_what_is_in_it() -> None:
    plan = planned(Model(), (IDS,), tp_plan={"layers.1": "replicate", "layers.2": "gather"})
    assert [block["up"].style for _, block in plan.families] == ["column", "replicate", "gather"]


def test_wishes_for_some_blocks() -> None:
    plan = planned(Model(), (IDS,), tp_plan={"layers.1.*": "replicate"})
    assert [(names, block["up"].style) for names, block in plan.families] == [
        (("layers.0", "layers.2"), "column"),
        (("layers.1",), "replicate"),
    ]


def test_a_function_may_give_the_wishes() -> None:
    seen: list[nn.Module] = []

    def wishes(module: nn.Module) -> dict[str, str]:
        seen.append(module)
        return {"head": "gather"}

    model = Model()
    assert planned(model, (IDS,), tp_plan=wishes).vocabulary.gathered == ("head",)
    assert seen == [model]


@pytest.mark.parametrize("kind", some(("Llama", "Qwen3", "Mistral", "Gemma2"), "Qwen3"))
def test_plans_of_hugging_face_are_taken(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(**(GQA | {"attn_implementation": "eager"}), head_dim=8)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    theirs = {**config.base_model_tp_plan, **model._tp_plan}
    assert "colwise" in theirs.values()
    families = planned(model, {"input_ids": IDS}, tp_plan=theirs).families
    assert families == planned(model, {"input_ids": IDS}).families


def test_wishes_that_are_wrong() -> None:
    wishes = {"layers.*.upp": "shard", "layers.*.down": "colums", "layers.*.norm": "shard", "head": "shard"}
    text = refusal(Model(), (IDS,), tp_plan=wishes)
    assert "tp_plan['layers.*.upp'] matches no module of Model" in text
    assert 'fix: tp_plan={"*layers.*.up": "shard"}' in text
    assert "tp_plan['layers.*.down'] is 'colums'; the styles are shard, gather, replicate, colwise" in text
    assert text.count("layers.*.upp") == 1
    assert "tp_plan['layers.*.norm'] wants 'shard', and what it matches is no Linear and no embedding" in text
    assert "tp_plan is 3; it is 'auto', a mapping" in refusal(Model(), (IDS,), tp_plan=3)


def test_wishes_that_cannot_be_had() -> None:
    assert "head cannot be divided: 63 rows, which tp_size=2 does not divide; pad to 64" in refusal(
        Model(vocabulary=63), (IDS % 63,), tp_plan={"head": "shard"}
    )
    with_gate = Model()
    with_gate.gate = nn.Linear(WIDTH, 2)
    text = refusal(with_gate, (IDS,), tp_plan={"gate": "shard"})
    assert "gate lies outside the blocks and is neither an embedding nor a head" in text


# Sizes that do not divide


def test_sizes_that_do_not_divide_are_refused_all_at_once() -> None:
    sizes = {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "intermediate_size": 50}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    text = refusal(model, {"input_ids": IDS}, tp_size=4)
    assert "LlamaDecoderLayer: self_attn.q_proj makes 6 heads of 8 features, which tp_size=4 does not divide" in text
    assert "LlamaDecoderLayer: self_attn.k_proj makes 3 heads of 8 features, which tp_size=4 does not divide" in text
    assert 'fix: a tp_size of 1 or 3, or tp_plan={"*self_attn.k_proj": "gather"}' in text
    assert "LlamaDecoderLayer: mlp.gate_proj has 50 inner features, which tp_size=4 does not divide" in text
    assert 'a tp_size of 1, 2, 5, 10, 25 or 50, or tp_plan={"*mlp.gate_proj": "replicate"}' in text
    wishes = {"*self_attn.*": "gather", "*mlp.*": "replicate"}
    assert planned(model, {"input_ids": IDS}, tp_size=4, tp_plan=wishes).divided_numel


def test_a_vocabulary_that_does_not_divide_stays_whole_and_the_padding_is_told() -> None:
    plan = planned(Model(vocabulary=63), (IDS % 63,))
    assert not plan.vocabulary.names
    assert "pad to 64" in plan.report()


def test_a_model_of_which_nothing_can_be_divided_is_refused() -> None:
    class Mixing(Block):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return x + self.down(nn.functional.layer_norm(self.up(x), (self.up.out_features,)))

    model = Model(vocabulary=63)
    model.layers = nn.ModuleList(Mixing(WIDTH, 33) for _ in range(3))
    text = refusal(model, (IDS % 63,))
    assert "nothing of Model can be divided over tp ranks: " in text
    assert "up has 33 inner features, which tp_size=2 does not divide" in text
    assert "tokens: 63 rows" in text


def test_the_report_says_what_is_divided_and_why_not() -> None:
    config = transformers.LlamaConfig(**GQA)
    text = planned(transformers.LlamaForCausalLM(config), {"input_ids": IDS}).report()
    assert "column: self_attn.q_proj, self_attn.k_proj, self_attn.v_proj, mlp.gate_proj, mlp.up_proj" in text
    assert "replicate: input_layernorm, post_attention_layernorm (LlamaRMSNorm is no Linear)" in text
    assert "compared with the undivided block in float64, largest error" in text
