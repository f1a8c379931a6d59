"""Blocks are found on models as people write them, and every parameter ends up in exactly one FSDP unit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from architectures import (
    GPT,
    HUGGING_FACE,
    MLP,
    WIDTH,
    Block,
    Chain,
    MoEBlock,
    OtherBlock,
    ResNet,
    Root,
    check_partition,
    families,
    groups,
    llama,
    message,
)
from lightning_par import ParallelLayout, parallelize
from lightning_par.blocks import find_blocks


def test_nano_gpt() -> None:
    plan = find_blocks(GPT())
    assert families(plan) == {"Block": ["transformer.h.0", "transformer.h.1", "transformer.h.2"]}
    assert plan.names == plan.families[0].names
    assert groups(plan) == {"tied embedding+norm+head": [["transformer.wte", "transformer.ln_f", "lm_head"]]}
    assert plan.root_parameters == ("scale", "transformer.wpe.weight")
    assert plan.root_numel == WIDTH + 4 * WIDTH
    assert plan.seen["Block"] == 3
    assert plan.seen["Linear"] == 7
    check_partition(GPT(), plan)


def test_a_parameter_without_dimensions_makes_no_group() -> None:
    model = Chain(Block(), Block())
    model.temperature = nn.Parameter(torch.tensor(1.0))
    assert groups(find_blocks(Root(model))) == {}


LAYERS = "model.model.layers."
EXPECTED_HUGGING_FACE = {
    "llama": (
        {"LlamaDecoderLayer": [f"{LAYERS}{i}" for i in range(3)]},
        {
            "embedding": [["model.model.embed_tokens"]],
            "norm+head": [["model.model.norm", "model.lm_head"]],
        },
    ),
    "gpt2": (
        {"GPT2Block": [f"model.transformer.h.{i}" for i in range(3)]},
        {
            "tied embedding+norm+head": [["model.transformer.wte", "model.transformer.ln_f", "model.lm_head"]],
        },
    ),
    "bert": (
        {"BertLayer": [f"model.bert.encoder.layer.{i}" for i in range(3)]},
        {
            "tied embedding+head": [["model.bert.embeddings.word_embeddings", "model.cls.predictions"]],
            "embedding": [["model.bert.embeddings.position_embeddings"]],
        },
    ),
    "t5": (
        {"T5Block": [f"model.{stack}.block.{i}" for stack in ("encoder", "decoder") for i in range(2)]},
        {
            "tied embedding+norm+head": [
                [
                    "model.shared",
                    "model.encoder.embed_tokens",
                    "model.decoder.embed_tokens",
                    "model.decoder.final_layer_norm",
                    "model.lm_head",
                ]
            ],
        },
    ),
    "vit": (
        {"ViTLayer": [f"model.vit.layers.{i}" for i in range(3)]},
        {"embedding": [["model.vit.embeddings"]]},
    ),
    "mixtral": (
        {"MixtralDecoderLayer": [f"{LAYERS}{i}" for i in range(2)]},
        {
            "embedding": [["model.model.embed_tokens"]],
            "norm+head": [["model.model.norm", "model.lm_head"]],
        },
    ),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        model = Root(HUGGING_FACE[name]())
    plan = find_blocks(model)
    assert (families(plan), groups(plan)) == EXPECTED_HUGGING_FACE[name]
    assert plan.coverage > 0.75
    check_partition(model, plan)


# An inner part that leaves out the head, and with it some modules of a joint group.
BODIES = {"llama": "model", "mixtral": "model", "gpt2": "transformer", "bert": "bert", "t5": "encoder"}


def first_output(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    result = model(**inputs)
    return result if isinstance(result, Tensor) else result[0]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("name", ["nano", *HUGGING_FACE])
def test_fsdp_over_the_plan_equals_the_plain_model(name: str) -> None:
    """Over one rank all hooks run: a parameter that is used while it is not gathered is an error, or has no gradient.

    Between steps the inner model is called on its own, whole and in part, as sampling code does.
    """
    torch.manual_seed(0)
    plain = Root(HUGGING_FACE[name]() if name in HUGGING_FACE else GPT()).double().eval()
    inputs = {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64)}
    if name != "vit":
        inputs = {"x" if name == "nano" else "input_ids": torch.randint(64, (2, 5))}
    if name == "t5":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    sharded = copy.deepcopy(plain)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    handle = parallelize(sharded, ParallelLayout(), "64-true")
    for _ in range(2):
        outputs = [first_output(model, inputs) for model in (plain, sharded)]
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-9, atol=1e-9)
        for output in outputs:
            output.square().mean().backward()
        with torch.no_grad():
            torch.testing.assert_close(first_output(sharded.model, inputs), outputs[0], rtol=1e-9, atol=1e-9)
            if name in BODIES:
                ids = {"input_ids": inputs["input_ids"]}
                bodies = [first_output(m.model.get_submodule(BODIES[name]), ids) for m in (plain, sharded)]
                torch.testing.assert_close(bodies[1], bodies[0], rtol=1e-9, atol=1e-9)
        handle.data.reshard()
        assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    found = dict(sharded.named_parameters())
    for parameter_name, parameter in plain.named_parameters():
        grad = found[parameter_name].grad
        assert isinstance(grad, DTensor) == (parameter.grad is not None), parameter_name
        if isinstance(grad, DTensor):
            torch.testing.assert_close(grad.full_tensor(), parameter.grad, rtol=1e-9, atol=1e-9)


def test_torch_transformers() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32)
    encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
    assert families(find_blocks(encoder)) == {"TransformerEncoderLayer": ["layers.0", "layers.1", "layers.2"]}
    plan = find_blocks(nn.Transformer(WIDTH, 2, 2, 2, 32, batch_first=True))
    assert families(plan) == {
        "TransformerEncoderLayer": ["encoder.layers.0", "encoder.layers.1"],
        "TransformerDecoderLayer": ["decoder.layers.0", "decoder.layers.1"],
    }
    assert groups(plan) == {}


def test_resnet_merges_its_stages() -> None:
    plan = find_blocks(ResNet())
    assert families(plan) == {"BasicBlock": [f"layer{i}.{j}" for i in range(1, 5) for j in range(2)]}
    assert groups(plan) == {"head": [["fc"]]}
    assert set(plan.root_parameters) == {"conv1.weight", "conv1.bias", "bn1.weight", "bn1.bias"}
    check_partition(ResNet(), plan)


def test_numbered_attributes() -> None:
    model = nn.Module()
    for i in (1, 2, 3):
        model.add_module(f"block{i}", Block())
    assert families(find_blocks(model)) == {"Block": ["block1", "block2", "block3"]}
    unnumbered = nn.Module()
    unnumbered.first, unnumbered.second = Block(), Block()
    assert not find_blocks(unnumbered, require=False).names


def test_dictionary_of_blocks() -> None:
    model = nn.Module()
    model.layers = nn.ModuleDict({str(i): Block() for i in range(3)})
    assert find_blocks(model).names == ("layers.0", "layers.1", "layers.2")


def test_hybrid_keeps_the_order_of_registration() -> None:
    plan = find_blocks(Chain(Block(), OtherBlock(), Block(), OtherBlock()))
    assert families(plan) == {"Block": ["layers.0", "layers.2"], "OtherBlock": ["layers.1", "layers.3"]}
    assert plan.names == ("layers.0", "layers.1", "layers.2", "layers.3")


def test_the_odd_one_out_in_a_list_of_blocks_is_a_block() -> None:
    plan = find_blocks(Chain(Block(), MoEBlock(4), Block()))
    assert families(plan) == {"Block": ["layers.0", "layers.2"], "MoEBlock": ["layers.1"]}


def test_experts_are_no_blocks() -> None:
    plan = find_blocks(Root(GPT(lambda: MoEBlock(8), layers=2)))
    assert families(plan) == {"MoEBlock": ["model.transformer.h.0", "model.transformer.h.1"]}


def test_what_repeats_inside_blocks_does_not_count_outside() -> None:
    model = GPT(lambda: MoEBlock(4), layers=2)
    model.adapter1 = MLP()
    assert families(find_blocks(model)) == {"MoEBlock": ["transformer.h.0", "transformer.h.1"]}


def test_a_candidate_that_does_not_repeat_is_opened() -> None:
    model = nn.Module()
    model.stage1 = Chain(*(Block() for _ in range(4)))
    model.block0 = Block()
    assert set(find_blocks(model).names) == {"block0", *(f"stage1.layers.{i}" for i in range(4))}


def test_small_families_do_not_count() -> None:
    model = Chain(Block(), Block())
    model.tiny = nn.ModuleList(nn.Sequential(nn.Linear(1, 1)) for _ in range(2))
    model.small = nn.ModuleList(Chain(nn.Linear(2, 2)) for _ in range(2))
    assert families(find_blocks(model)) == {"Block": ["layers.0", "layers.1"]}


def test_plain_sequentials_are_blocks_where_nothing_else_is() -> None:
    model = nn.Module()
    model.layer1 = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model.layer2 = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    assert families(find_blocks(model)) == {"Sequential": ["layer1", "layer2"]}


def test_a_hint_for_a_small_part_falls_through() -> None:
    class Hinted(Chain):
        _no_split_modules = ["MLP"]

    # The hint reaches into the blocks, and holds most of them: it is followed.
    assert find_blocks(Hinted(*(Chain(MLP(), MLP()) for _ in range(2)))).families[0].class_name == "MLP"
    big = Chain(Hinted(MLP(), MLP()), *(OtherBlock() for _ in range(3)))
    plan = find_blocks(big)
    assert "layers.0" in plan.names
    assert "layers.0.layers.0" not in plan.names
    assert find_blocks(Chain(Hinted(Block(), Block()), OtherBlock())).names == (
        "layers.0.layers.0",
        "layers.0.layers.1",
    )


def test_a_hint_leaves_the_rest_of_the_model_to_structure() -> None:
    model = nn.Module()
    with torch.device("meta"):
        model.text = llama()
        model.vision = Chain(Block(), Block())
    assert families(find_blocks(model)) == {
        "LlamaDecoderLayer": [f"text.model.layers.{i}" for i in range(3)],
        "Block": ["vision.layers.0", "vision.layers.1"],
    }


def test_a_block_used_under_several_names_is_listed_once() -> None:
    block = Block()
    plan = find_blocks(Chain(*[block] * 6))
    assert plan.names == ("layers.0",)
    assert plan.block_numel == plan.total_numel == sum(p.numel() for p in block.parameters())
    check_partition(Chain(*[block] * 6), plan)


def test_wrapped_blocks_keep_their_class() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    compiled = Chain(*(torch.compile(Block(), backend="eager") for _ in range(2)))
    assert families(find_blocks(compiled)) == {"Block": ["layers.0", "layers.1"]}
    assert families(find_blocks(compiled, Block)) == {"Block": ["layers.0", "layers.1"]}
    checkpointed = Chain(*(checkpoint_wrapper(Block()) for _ in range(2)))
    assert families(find_blocks(checkpointed)) == {"Block": ["layers.0", "layers.1"]}


def test_metrics_are_not_searched() -> None:
    class Perceptual(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.net = Chain(*(OtherBlock() for _ in range(8)))

        def update(self) -> None: ...

        def compute(self) -> None: ...

    model = Root(Chain(Block(), Block()))
    model.val_acc = Perceptual()
    plan = find_blocks(model)
    assert families(plan) == {"Block": ["model.layers.0", "model.layers.1"]}
    assert "OtherBlock" not in plan.seen
    assert plan.root_numel == sum(p.numel() for p in model.val_acc.parameters())
    check_partition(model, plan)


def test_frozen_parts_count_like_others() -> None:
    model = Root(GPT())
    expected = find_blocks(model)
    model.requires_grad_(False)
    assert find_blocks(model) == expected


def test_nothing_repeats() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    text = message(model)
    assert "Linear x 2 (100.0%)" in text
    assert "ReLU x 1 (0.0%)" in text
    assert "280 parameters" in text
    assert 'blocks=["MyBlock"]' in text
    assert "YAML: blocks: [MyBlock]" in text
    plan = find_blocks(model, require=False)
    assert plan.families == plan.groups == plan.names == ()
    assert plan.coverage == 0
    assert plan.root_numel == plan.total_numel == 280
    assert "nothing repeats" in plan.report()
    assert find_blocks(nn.Identity(), require=False).coverage == 0


@pytest.mark.parametrize(
    "blocks",
    [
        Block,
        [Block],
        "Block",
        ["Block"],
        "model.transformer.h.*",
        ["model.transformer.h.[0-2]"],
        f"{Block.__module__}.Block",
        [Block, "model.transformer.h.?"],
    ],
)
def test_user_choice(blocks: Any) -> None:
    model = Root(GPT())
    assert find_blocks(model, blocks) == find_blocks(model)


def test_user_choice_wins_over_structure_and_hint() -> None:
    plan = find_blocks(Root(GPT()), "MLP")
    assert families(plan) == {"MLP": [f"model.transformer.h.{i}.mlp" for i in range(3)]}
    check_partition(Root(GPT()), plan)
    with torch.device("meta"):
        model = llama()
    plan = find_blocks(model, ["LlamaMLP", "LlamaAttention"])
    assert [f.class_name for f in plan.families] == ["LlamaAttention", "LlamaMLP"]
    check_partition(model, plan)
    single = find_blocks(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), nn.Linear)
    assert single.names == ("0", "2")
    assert find_blocks(Chain(Block(), OtherBlock()), Block).names == ("layers.0", "layers.1")


def test_every_entry_must_match() -> None:
    text = message(Root(GPT()), ["Block", "Blok", "model.transformer.layers.*"])
    assert "2 problems" in text
    assert "'Blok' matches no module of Root; near misses: Block" in text
    assert "Block x 3" in text
    assert "blocks=['Block']" in text
    assert "YAML: blocks: [Block]" in text
    assert "'model.transformer.layers.*' matches no module" in text
    assert "'block' matches no module of GPT; near misses: Block" in message(GPT(), "block")
    assert "'OtherBlock' matches no module" in message(GPT(), OtherBlock)
    assert "matches no module of GPT; near misses: none" in message(GPT(), "Zzzzzz", require=False)


def test_entries_that_cannot_be_blocks() -> None:
    text = message(GPT(), nn.ModuleList)
    assert "'ModuleList' matches 1 modules such as 'transformer.h'" in text
    assert "blocks=['transformer.h.*']" in text
    assert "matches only modules inside other blocks" in message(GPT(), ["Block", "MLP"])
    assert "no repeated blocks" in message(GPT(), [])


def test_parameter_shared_between_blocks() -> None:
    model = Root(GPT())
    blocks = model.model.transformer["h"]
    blocks[2].mlp.up.weight = blocks[0].mlp.up.weight
    text = message(model)
    assert "'model.transformer.h.0.mlp.up.weight' in block 'model.transformer.h.0'" in text
    assert "'model.transformer.h.2.mlp.up.weight' in block 'model.transformer.h.2'" in text
    assert "fix: blocks=['model'] makes one unit of both" in text
    assert "YAML: blocks: [model]" in text
    assert find_blocks(model, "model").names == ("model",)
    assert "fix: blocks=['model.layers.0'] makes" in message(Root(Chain(model.model)))
    # Replication does not care.
    assert find_blocks(model, require=False).names == ()
    assert "same parameter" in message(model, Block, require=False)


def test_module_shared_between_blocks() -> None:
    model = GPT()
    blocks = model.transformer["h"]
    blocks[1].mlp = blocks[0].mlp
    text = message(model)
    assert "(and 3 more parameters)" in text
    assert "1 problem in" in text
    assert "give each its own parameter" in text


def test_parameter_shared_between_a_block_and_outside() -> None:
    model = GPT()
    model.first_up = model.transformer["h"][0].mlp.up
    text = message(model)
    assert "'transformer.h.0.mlp.up.weight' in block 'transformer.h.0'" in text
    assert "'first_up.weight' outside the blocks" in text
    # A second name for a whole block or a list of them is no conflict.
    model = GPT()
    model.blocks = model.transformer["h"]
    model.last = model.transformer["h"][2]
    assert len(find_blocks(model).names) == 3


def test_tied_modules_without_a_head_are_one_group() -> None:
    model = Chain(Block(), Block())
    wrapper = nn.Module()
    wrapper.source, wrapper.target, wrapper.model = nn.Embedding(2, WIDTH), nn.Embedding(2, WIDTH), model
    wrapper.target.weight = wrapper.source.weight
    assert groups(find_blocks(wrapper)) == {"tied embedding": [["source", "target"]]}
    check_partition(wrapper, find_blocks(wrapper))


def test_chains_of_ties_are_one_group() -> None:
    """The last module shares one parameter with each of the two before it."""
    model = GPT(tied=False)
    model.head2 = nn.Linear(WIDTH, 64)
    model.both = nn.Bilinear(WIDTH, 1, 64)
    model.both.weight = nn.Parameter(torch.ones(64, WIDTH, 1))
    model.both.extra, model.both.other = model.lm_head.weight, model.head2.weight
    plan = find_blocks(model)
    assert groups(plan)["tied norm+head"] == [["transformer.ln_f", "lm_head", "head2", "both"]]
    check_partition(model, plan)


def test_a_tie_with_a_parameter_of_an_enclosing_module_stays_with_that_module() -> None:
    model = GPT()
    model.alias = model.lm_head.weight
    plan = find_blocks(Root(model))
    assert groups(plan) == {}
    check_partition(Root(model), plan)


def test_a_module_that_another_one_holds_too_is_no_group() -> None:
    """Such a head computes with the weight and never calls the embedding."""

    class Head(nn.Module):
        def __init__(self, embedding: nn.Embedding, bias: bool) -> None:
            super().__init__()
            self.embedding = embedding
            if bias:
                self.bias = nn.Parameter(torch.zeros(64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.embedding.weight.T

    for bias in (False, True):
        model = GPT(tied=False)
        model.lm_head = Head(model.transformer["wte"], bias)
        plan = find_blocks(model)
        assert groups(plan) == {}
        check_partition(model, plan)


def test_parameters_in_a_container_are_no_group() -> None:
    model = Root(GPT())
    model.model.prompts = nn.ParameterList([torch.ones(64, WIDTH)])
    plan = find_blocks(model)
    assert "model.prompts.0" in plan.root_parameters
    check_partition(model, plan)


def test_the_norm_of_the_head_comes_before_it() -> None:
    model = GPT()
    model.norm_of_something_else = nn.LayerNorm(WIDTH)
    assert groups(find_blocks(model)) == groups(find_blocks(GPT()))
    # A norm that would be large enough for a group of its own is in that of the head only.
    tiny = Chain(Chain(nn.Linear(4, 4)), Chain(nn.Linear(4, 4)))
    tiny.norm, tiny.head = nn.LayerNorm(4), nn.Linear(4, 4)
    assert groups(find_blocks(tiny)) == {"norm+head": [["norm", "head"]]}


def test_attention_is_not_taken_apart() -> None:
    """`nn.MultiheadAttention` uses the weight of its projection and never calls it."""
    model = GPT()
    model.pool = nn.MultiheadAttention(WIDTH, 2)
    plan = find_blocks(model)
    assert groups(plan)["module"] == [["pool"]]
    check_partition(model, plan)


def test_report() -> None:
    assert find_blocks(GPT()).report().splitlines() == [
        "blocks: 3, with 85.1% of 7,616 parameters",
        "  Block x 3: transformer.h.0 ... transformer.h.2 (6,480 parameters, 85.1%)",
        "group tied embedding+norm+head: transformer.wte, transformer.ln_f, lm_head (1,056 parameters, 13.9%)",
        "root: scale, transformer.wpe.weight (80 parameters, 1.1%)",
    ]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_sharing_outside_the_blocks_leaves_each_parameter_in_one_unit(data: st.DataObject) -> None:
    """Random trees around the blocks, with modules and parameters that are tied at random."""
    holders: list[nn.Linear | nn.Embedding] = []

    def node(depth: int) -> nn.Module:
        module = data.draw(st.sampled_from([Chain, nn.Sequential, nn.Module]))()
        for i in range(data.draw(st.integers(1, 3))):
            kind = data.draw(st.sampled_from(["linear", "embedding", "node", "again", "own", "norm"]))
            name = f"part_{'abc'[i]}"
            if kind == "own":
                module.register_parameter(name, nn.Parameter(torch.ones(data.draw(st.sampled_from([1, 999])))))
            elif kind == "norm":
                module.add_module(name, nn.LayerNorm(WIDTH))
            elif kind == "again" and holders:
                module.add_module(name, data.draw(st.sampled_from(holders)))
            elif kind == "node" and depth:
                module.add_module(name, node(depth - 1))
            else:
                rows = data.draw(st.sampled_from([2, 64]))
                leaf = nn.Embedding(rows, WIDTH) if kind == "embedding" else nn.Linear(WIDTH, rows)
                if holders and data.draw(st.booleans()):
                    leaf.weight = data.draw(st.sampled_from(holders)).weight
                holders.append(leaf)
                module.add_module(name, leaf)
        if depth == 2 or data.draw(st.booleans()):
            module.add_module("blocks", nn.ModuleList(Block() for _ in range(2)))
        return module

    root = Root(node(2))
    plan = find_blocks(root, Block)
    check_partition(root, plan)
