"""One run of a step shows the chain of blocks, what each cut must carry and what cannot be cut; in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pipeline_models
import pytest
import torch
import transformers
from pipeline_models import LAYERS, Families, Pairs, SkippedScale, Small, samples
from torch import Tensor, nn

import architectures
from lightning_par.blocks import find_blocks
from lightning_par.errors import ParallelConfigError
from lightning_par.parallel.options import ParallelOptions
from lightning_par.parallel.pipeline import _probe_compat, calls
from lightning_par.parallel.pipeline.build import plan_pipeline
from lightning_par.parallel.pipeline.probe import Chain, Slot, probe
from lightning_par.parallel.pipeline.split import split_chain
from lightning_par.parallel.tensor.examples import Example

CPU = torch.device("cpu")
BATCH = samples()


def chain_of(model: nn.Module, run: Callable[[], Any] | None = None, blocks: Sequence[str] | None = None) -> Chain:
    names = find_blocks(model, "auto").names if blocks is None else blocks
    return probe(model, names, run or (lambda: model.loss(BATCH)), "the step", CPU)  # type: ignore[operator]


def message(call: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(ParallelConfigError) as caught:
        call(*args)
    return str(caught.value)


def crossing(chain: Chain) -> list[list[Slot]]:
    return [list(cut.slots) for cut in chain.cuts]


def argument(block: int, leaf: int = 0) -> Slot:
    return Slot(f"blocks.{block}", 0, False, leaf)


def returned(block: int, leaf: int = 0) -> Slot:
    return Slot(f"blocks.{block}", 0, True, leaf)


# What crosses


@pytest.mark.parametrize(
    ("name", "is_returned"),
    [
        # What the block before has returned, where it is what the next one is called with.
        ("Small", True),
        ("Outputs", True),
        ("Families", True),
        ("Pooling", True),
        # Else the argument: what code between the blocks made of it, or wrote into it.
        ("OuterResidual", False),
        ("SkippedScale", False),
        ("InPlace", False),
    ],
)
def test_one_hidden_state_crosses_each_cut(name: str, is_returned: bool) -> None:
    model = getattr(pipeline_models, name)()
    blocks = [f"blocks.{i}" for i in range(LAYERS)]
    chain = chain_of(model, blocks=blocks)
    assert chain.blocks == tuple(blocks)
    assert crossing(chain) == [[], *([returned(i - 1) if is_returned else argument(i)] for i in range(1, LAYERS))]
    assert not any(cut.refused for cut in chain.cuts)
    assert chain.beside == ("embed", "norm", "head")
    assert chain.around == ("",)


def test_two_families_are_one_chain() -> None:
    chain = chain_of(Families())
    assert [len(cut.slots) for cut in chain.cuts] == [0, 1, 1, 1]
    assert len(chain.blocks) == LAYERS


def test_an_embedding_that_each_block_takes_crosses_beside_the_hidden_state() -> None:
    chain = chain_of(pipeline_models.PassedEmbedding())
    # To the first block both are one tensor.
    assert crossing(chain) == [[], *([returned(i - 1), argument(i, 1)] for i in range(1, LAYERS))]


def test_an_embedding_that_is_added_outside_crosses_where_it_was_returned() -> None:
    chain = chain_of(pipeline_models.AddedEmbedding())
    for block, cut in enumerate(chain.cuts[1:], 1):
        hidden, embedding = sorted(cut.slots)
        assert hidden == argument(block)
        assert embedding in (Slot("embed", 0, True, 0), argument(0))


def test_pairs_cross_together() -> None:
    chain = chain_of(Pairs())
    # The first block hands on the embedding as the residual.
    assert crossing(chain)[:2] == [[], [returned(0), argument(1, 1)]]
    assert crossing(chain)[2:] == [[returned(i - 1, 0), returned(i - 1, 1)] for i in range(2, LAYERS)]


def test_named_arguments_are_found_and_a_mask_is_made_on_each_stage() -> None:
    chain = chain_of(pipeline_models.Keyword())
    assert crossing(chain) == [[], *([returned(i - 1)] for i in range(1, LAYERS))]


def test_parameters_lie_where_they_are_used() -> None:
    uses = chain_of(SkippedScale()).uses
    assert uses["embed.weight"] == uses["token"] == uses["positions"] == {0}
    assert uses["scales"] == {1, 2, 3, 4}
    assert uses["blocks.2.inner.weight"] == {3}
    assert uses["head.weight"] == uses["norm.bias"] == {4}
    assert "idle.weight" not in chain_of(pipeline_models.Unused()).uses


def test_a_tied_weight_is_used_at_both_ends() -> None:
    model = architectures.GPT(layers=4)
    chain = chain_of(model, lambda: model(BATCH["ids"]).sum())
    assert chain.uses["transformer.wte.weight"] == {0, 4}


def test_work_is_counted_where_it_is_done() -> None:
    chain = chain_of(Small())
    rows, width = BATCH["ids"].numel(), Small.width
    assert chain.block_flops == (2 * 2 * rows * width * width,) * LAYERS
    assert chain.prefix_flops == 0
    assert chain.suffix_flops == 2 * rows * width * Small.vocabulary


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mixtral", "vit"])
def test_models_of_hugging_face_are_chains(name: str) -> None:
    model = architectures.HUGGING_FACE[name]()
    inputs = {"pixel_values": torch.randn(2, 3, 8, 8)} if name == "vit" else {"input_ids": BATCH["ids"]}
    chain = chain_of(model, lambda: model(**inputs).logits.sum())
    assert not any(cut.refused for cut in chain.cuts)
    assert {len(cut.slots) for cut in chain.cuts[1:]} == {1}


def test_mamba_is_a_chain() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 3, "state_size": 4, "intermediate_size": 16}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, time_step_rank=2, use_mambapy=False))
    chain = chain_of(model, lambda: model(input_ids=BATCH["ids"], use_cache=False).logits.sum())
    assert not any(cut.refused for cut in chain.cuts)


# What a run leaves behind


class Counting(Small):
    """Normalises with statistics, draws random numbers and fails at will."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(self.width)

    def body(self, x: Tensor) -> Tensor:
        if self.fails:
            raise KeyError("no such key")
        x = super().body(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))
        return x + torch.randn(()) * 0


@pytest.mark.parametrize("reads", [False, True])
def test_the_module_is_afterwards_as_before(reads: bool) -> None:
    model = Counting()
    classes = [type(module) for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.get_rng_state()

    def run() -> None:
        x = model(BATCH["ids"])
        # With shapes alone that cannot be known, so that the step is run for real.
        assert not reads or len(x[x > 0]) > 0

    chain_of(model, run)
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(torch.get_rng_state(), before)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert not any(calls.is_intercepted(module) for module in model.modules())


def test_a_step_that_fails_leaves_nothing_and_is_told() -> None:
    model = Counting()
    model.fails = True
    said = message(chain_of, model)
    assert "the step fails when it is run for real: KeyError: 'no such key'" in said
    assert "example_inputs=" in said
    assert type(model) is Counting
    assert not any(calls.is_intercepted(module) for module in model.modules())


def test_a_model_without_values_is_run_with_shapes() -> None:
    with torch.device("meta"):
        model = Small()
    assert crossing(chain_of(model)) == crossing(chain_of(Small()))


# What is refused


def cut(model: nn.Module, count: int = 2, split: Any = "auto", run: Any = None) -> Any:
    return split_chain(chain_of(model, run), count, split)


def test_a_skip_is_refused_where_it_is_cut() -> None:
    said = message(cut, pipeline_models.UNet(), 2, [2, 2])
    assert "pp_split cuts before 'blocks.2'" in said
    assert "after block 'blocks.0' is used past the next block 'blocks.1', by add in the forward of UNet" in said
    assert "fix: pp_split that keeps both on one stage, or pp_size=1" in said


def test_the_only_places_without_a_skip_are_taken() -> None:
    assert [stage.end for stage in cut(pipeline_models.UNet(), 3)] == [1, 3, 4]
    assert "can be cut at 2 of 3 places, and 4 stages need 3" in message(cut, pipeline_models.UNet(), 4)


def test_a_live_encoder_is_refused_past_the_first_block_of_the_decoder() -> None:
    model = architectures.t5()
    ids = BATCH["ids"]

    def run() -> Any:
        return model(input_ids=ids, decoder_input_ids=ids).logits

    assert [stage.end for stage in cut(model, 3, "auto", run)] == [1, 2, 4]
    said = message(cut, model, 4, "auto", run)
    assert "is used past the next block 'decoder.block.0', by" in said
    assert "the live output of an encoder" in said
    assert "pp_size=1" in said


def test_a_block_that_is_called_twice_is_refused() -> None:
    said = message(chain_of, pipeline_models.Twice())
    assert "block 'blocks.0' (Mix) is called twice in one step" in said
    assert "fix: pp_size=1; or, where the step calls the whole model twice" in said
    assert "(YAML: pp_size: 1)" in said


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_decision_on_the_hidden_state_is_refused(device: str) -> None:
    with torch.device(device):
        model = pipeline_models.Decides()
    said = message(chain_of, model)
    assert "the forward of Decides reads a value of the hidden state after 2 of 4 blocks" in said
    assert "fix: keep decisions on hidden values inside a block, or use torch.where instead of `if`" in said


def test_a_decision_after_the_last_block_and_a_loss_that_is_read_are_allowed() -> None:
    model = Small()

    def run() -> None:
        loss = model.loss(BATCH)
        if loss > 1e9:
            raise ValueError
        print(f"{loss.item():.3f}", end="")

    assert crossing(chain_of(model, run)) == crossing(chain_of(model))


def test_a_leak_is_refused() -> None:
    said = message(cut, pipeline_models.Leaks())
    assert "a tensor that the forward of Leaks makes is used past the cut before 'blocks.1', by add in" in said
    assert "fix: pass it to the blocks as an argument, or compute it in a module of its own" in said


def test_a_step_without_blocks_is_refused() -> None:
    model = Small()
    said = message(chain_of, model, lambda: model.embed(BATCH["ids"]))
    assert "the step calls none of the 4 blocks, such as 'blocks.0'" in said
    assert "blocks=[" in said


@pytest.mark.parametrize(
    ("split", "count", "found", "fix"),
    [
        ([2, 1], 2, "pp_split=[2, 1] is no division of 4 blocks into 2 stages", "pp_split=[2, 2]"),
        ([4, 0], 2, "at least one each", "pp_split=[2, 2]"),
        ([1, 1, 2], 2, "pp_split=[1, 1, 2] is no division", "pp_split=[2, 2]"),
        ([], 2, "pp_split=[] is no division", "pp_split=[2, 2]"),
        ([True, 3], 2, "does not name the first block", "pp_split=['blocks.2']"),
        (["blocks.9"], 2, "no block begins a later stage under the name 'blocks.9'", "pp_split=['blocks.2']"),
        (["blocks.0"], 2, "no block begins a later stage under the name 'blocks.0'", "pp_split=['blocks.2']"),
        (["blocks.1", "blocks.2"], 2, "the stages 1 to 1 in order", "pp_split=['blocks.2']"),
        (["blocks.2", "blocks.1"], 3, "in order", "pp_split=['blocks.1', 'blocks.2']"),
        (["blocks.1", "blocks.1"], 3, "in order", "pp_split=['blocks.1', 'blocks.2']"),
    ],
    ids=str,
)
def test_a_split_that_does_not_fit_is_refused(split: Any, count: int, found: str, fix: str) -> None:
    said = message(cut, Small(), count, split)
    assert found in said
    assert f"fix: {fix}" in said


def test_fewer_blocks_than_stages() -> None:
    said = message(cut, Small(), 8)
    assert "the model has 4 blocks, fewer than the 8 stages of the pipeline" in said
    assert "fix: pp_size=4, with pp_stages_per_rank=1" in said
    assert "YAML: pp_size: 4" in said


def test_splits_are_as_asked() -> None:
    assert [(s.begin, s.end) for s in cut(Small(), 2, [1, 3])] == [(0, 1), (1, 4)]
    assert [(s.begin, s.end) for s in cut(Small(), 2, ["blocks.3"])] == [(0, 3), (3, 4)]
    assert [(s.begin, s.end) for s in cut(Small(), 4)] == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_all_stages_have_their_parameters_and_no_other() -> None:
    model = pipeline_models.Unused()
    example = Example("the step", lambda: model.loss(BATCH))
    plan = plan_pipeline(model, [f"blocks.{i}" for i in range(4)], [example], ParallelOptions(), 2, CPU)
    assert set(plan.parameters) == {name for name, _ in model.named_parameters()}
    cut_at = plan.stages[0].end
    for name, ranks in plan.parameters.items():
        if name.startswith("blocks."):
            assert ranks == (int(int(name.split(".")[1]) >= cut_at),), name
    assert plan.parameters["embed.weight"] == (0,)
    assert plan.parameters["head.weight"] == plan.parameters["norm.weight"] == (1,)
    # Nothing uses it: any one stage, so that it is saved and loaded.
    assert all(len(plan.parameters[name]) == 1 for name in ("idle.weight", "own", "blocks.2.idle.bias"))


# torch's own


def test_private_api_of_torch() -> None:
    mode = _probe_compat.fake_mode()
    parameter = nn.Parameter(torch.ones(3, 2), requires_grad=False)
    fake = _probe_compat.fake_copy(mode, parameter, CPU)
    assert _probe_compat.is_fake(fake), "torch._subclasses.fake_tensor.FakeTensor: probes of large models run for real"
    assert isinstance(fake, nn.Parameter)
    assert (fake.shape, fake.requires_grad) == (parameter.shape, False)
    with mode:
        made = torch.ones(2, 3) @ parameter.detach()
    assert _probe_compat.is_fake(made), "FakeTensorMode(allow_non_fake_inputs=True)"
    seen: dict[str, tuple[bool, float]] = {}

    class Note(_probe_compat.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            flops = _probe_compat.flops_of(func, args, kwargs or {}, result)
            seen[_probe_compat.schema_name(func)] = _probe_compat.is_view(func), flops
            return result

    x = torch.ones(2, 3)
    with Note():
        x.mm(x.t()).add_(1).detach()
    assert seen == {"t": (True, 0.0), "mm": (False, 24.0), "add_": (False, 0.0), "detach": (True, 0.0)}, (
        "OpOverload.is_view, _schema.name or flop_registry: the probe follows tensors and balances stages with them"
    )
