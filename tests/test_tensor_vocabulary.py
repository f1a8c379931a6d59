"""Embedding, head and loss over the vocabulary give the numbers of the undivided model."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from probe import long_run, some
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import models
from examples.nanogpt.model import NanoGPT as ExampleGPT
from lightning_par.blocks import find_blocks
from lightning_par.parallel.shards import full_tensor
from lightning_par.parallel.tensor import plan_block, shard_block
from lightning_par.parallel.tensor._compat import simulated_mesh
from lightning_par.parallel.tensor.verify import InDouble
from lightning_par.parallel.tensor.vocabulary import divide_vocabulary
from lightning_par.parallel.tensor.vocabulary_plan import VocabularyPlan, plan_vocabulary, watching
from lightning_par.testing import RanksFailed, run_ranks
from tensor_blocks import captured, tp_mesh

VOCABULARY = 32
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
}
GQA = {**SIZES, "num_key_value_heads": 1, "pad_token_id": 5, "bos_token_id": 0, "eos_token_id": 0}


def tokens(seed: int = 1) -> Tensor:
    ids = torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))
    ids[0, :3] = torch.tensor([0, 5, VOCABULARY - 1])
    return ids


class Tiny(nn.Module):
    """An embedding and a head around nothing much."""

    def __init__(self, tied: bool = False, bias: bool = True, **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 6, **options)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.tokens(ids)))


def tiny() -> nn.Module:
    return Tiny(padding_idx=5)


def nano() -> nn.Module:
    before, models.VOCABULARY = models.VOCABULARY, VOCABULARY
    try:
        return models.NanoGPT(layers=2)
    finally:
        models.VOCABULARY = before


def example() -> nn.Module:
    return ExampleGPT(VOCABULARY, block_size=8, layers=2, heads=2, width=16)


def hugging_face(kind: str, **options: Any) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**(GQA | options))
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def llama() -> nn.Module:
    return hugging_face("Llama")


def gemma2() -> nn.Module:
    return hugging_face("Gemma2", head_dim=8, final_logit_softcapping=5.0, attn_implementation="eager")


def gemma3() -> nn.Module:
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**GQA, head_dim=8))


def gpt2() -> nn.Module:
    sizes = {"n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **drop))


def bert() -> nn.Module:
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **drop))
    nn.init.normal_(model.cls.predictions.bias)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tiny": tiny,
    "nano": nano,
    "example": example,
    "llama": llama,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gpt2": gpt2,
    "bert": bert,
}
# What is to be divided: embeddings and heads.
FOUND: dict[str, tuple[set[str], set[str]]] = {
    "tiny": ({"tokens"}, {"head"}),
    "nano": ({"model.tokens"}, {"model.head"}),
    "example": ({"tokens"}, {"head"}),
    "llama": ({"model.embed_tokens"}, {"lm_head"}),
    "gemma2": ({"model.embed_tokens"}, {"lm_head"}),
    "gemma3": ({"model.embed_tokens"}, {"lm_head"}),
    "gpt2": ({"transformer.wte"}, {"lm_head"}),
    "bert": (
        {"bert.embeddings.word_embeddings", "bert.embeddings.position_embeddings"},
        {"cls.predictions.decoder"},
    ),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double().train()


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """The loss as the model's users write it."""
    with InDouble():
        if isinstance(model, Tiny):
            return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(1).flatten())
        if isinstance(model, models.NanoGPT | ExampleGPT):
            return model.loss((ids, ids.roll(1)))
        labels = ids.clone()
        labels[:, -2:] = -100
        return model(input_ids=ids, labels=labels).loss


def seen_plan(
    model: nn.Module, blocks: Sequence[str], tp_size: int, run: Callable[[], Any] | None = None
) -> VocabularyPlan:
    """The plan with what one run shows, if there is one."""
    if run is None:
        return plan_vocabulary(model, blocks, tp_size)
    with watching(model, blocks) as watched:
        run()
    return plan_vocabulary(model, blocks, tp_size, watched)


def plan_of(model: nn.Module, tp_size: int = 2) -> VocabularyPlan:
    blocks = ["block"] if isinstance(model, Tiny) else find_blocks(model).names
    return seen_plan(model, blocks, tp_size, lambda: loss_of(model, tokens()))


def compare(model: nn.Module, expected: dict[str, Tensor], rows: slice = slice(None), ids: Any = None) -> float:
    """Train one step; the largest relative difference to `trained` in loss, gradients and weights."""
    found = trained(model, tokens()[rows] if ids is None else ids)
    assert found.keys() == expected.keys()
    largest = max(value.abs().max() for name, value in expected.items() if name.startswith("gradient"))
    errors = []
    for name, value in expected.items():
        assert type(found[name]) is Tensor, name
        # A gradient that is truly zero, as that of a key's bias, is all that a bias may have become.
        scale = max(largest, value.abs().max())
        errors.append(((found[name] - value).abs().max() / scale).item())
    return max(errors)


def trained(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    loss = loss_of(model, ids)
    loss.backward()
    found = {"loss": loss.detach()}
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.grad is not None:
                found[f"gradient of {name}"] = full_tensor(param.grad).clone()
                param -= param.grad
        found |= {name: full_tensor(value).clone() for name, value in model.state_dict().items()}
    return found


class Collectives(TorchDispatchMode):
    """Counts them by name; `CommDebugMode` fails where a module is left by an exception or called by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.counts[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def parity(name: str) -> list[Any]:
    """With loss parallel, then without: collectives of the forward and of the backward, and the error of a step."""
    model, mesh = make(name), tp_mesh()
    plan = plan_of(model, mesh.size())
    assert (set(plan.embeddings), set(plan.heads)) == FOUND[name], plan.report()
    expected = trained(copy.deepcopy(model), tokens())
    results: list[Any] = []
    for loss_parallel in (True, False):
        twin = copy.deepcopy(model)
        divide_vocabulary(twin, plan, mesh, loss_parallel=loss_parallel)
        for one in (*plan.embeddings, *plan.heads):
            weight = twin.get_submodule(one).weight
            assert isinstance(weight, DTensor)
            assert weight.placements == (Shard(0),)
        before = dict(twin.named_parameters())
        with Collectives() as forward:
            loss = loss_of(twin, tokens())
        with Collectives() as backward:
            loss.backward()
        twin.zero_grad()
        results += [dict(forward.counts), dict(backward.counts)]
        assert all(param is before[name] for name, param in twin.named_parameters())
        results.append(compare(twin, expected))
    return results


@pytest.mark.parametrize("name", some(MODELS, "nano", "llama", "bert"))
def test_a_step_gives_the_numbers_of_one_process(name: str) -> None:
    embeddings = len(FOUND[name][0])
    # The gradient of what enters the head, and of the parameter that the step of nano-GPT multiplies slices with.
    gradients = {"allreduce_": 1 + (name == "nano")}
    for forward, backward, error, *without in run_ranks(2, parity, name):
        assert error < 1e-12
        # The embeddings, then the largest logit and the sums of the loss.
        assert forward == {"allreduce_": embeddings + 2}
        assert backward == gradients
        assert without[:2] == [{"allreduce_": embeddings, "allgather_": 1}, {"allreduce_": 1}]
        assert without[2] < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_four_ranks(name: str) -> None:
    for *_, error, _, _, other in run_ranks(4, parity, name):
        assert max(error, other) < 1e-12


def with_fsdp(name: str, units: bool) -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    model = make(name)
    plan = plan_of(model)
    reference = copy.deepcopy(model)
    loss = torch.stack([loss_of(reference, tokens(seed)) for seed in (1, 2)]).mean()
    loss.backward()
    divide_vocabulary(model, plan, mesh["tp"], loss_parallel=True)
    for one in (*plan.embeddings, *plan.heads) if units else ():
        fully_shard(model.get_submodule(one), mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    for one in (*plan.embeddings, *plan.heads) if not units else ():
        with pytest.raises(RuntimeError, match="is called past the module that gathers its parameters"):
            model.get_submodule(one)(tokens())
    mine = loss_of(model, tokens(1 + mesh.get_local_rank("data")))
    mine.backward()
    largest = max(param.grad.abs().max() for param in reference.parameters())
    errors = [
        (full_tensor(param.grad) - reference.get_parameter(key).grad).abs().max() / largest
        for key, param in model.named_parameters()
    ]
    return max(error.item() for error in errors)


@pytest.mark.parametrize(("name", "units"), [("tiny", True), long_run("llama", False), long_run("bert", False)])
def test_fsdp_composes(name: str, units: bool) -> None:
    assert max(run_ranks(4, with_fsdp, name, units)) < 1e-12


def with_blocks() -> float:
    """Llama with everything divided over tp, then sharded."""
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp")), make("llama")
    names, reference = find_blocks(model).names, copy.deepcopy(model)
    loss_of(reference, tokens()).backward()
    plan = plan_of(model)
    case = captured(copy.deepcopy(model), names[0], input_ids=tokens(), use_cache=False)
    blocks = plan_block(case.block, case.args, case.kwargs, mesh=mesh["tp"], use_cache=False)
    for name in names:
        shard_block(model.get_submodule(name), blocks, mesh["tp"])
    divide_vocabulary(model, plan, mesh["tp"], loss_parallel=True)
    for name in names:
        fully_shard(model.get_submodule(name), mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    loss_of(model, tokens()).backward()
    largest = max(param.grad.abs().max() for param in reference.parameters())
    errors = [
        (full_tensor(param.grad) - reference.get_parameter(name).grad).abs().max() / largest
        for name, param in model.named_parameters()
    ]
    return max(error.item() for error in errors)


def test_divided_blocks_compose() -> None:
    assert max(run_ranks(4, with_blocks)) < 1e-12


class Recomputing(Tiny):
    def forward(self, ids: Tensor) -> Tensor:
        return checkpoint(super().forward, ids, use_reentrant=False)


def recomputed_and_copied() -> list[float]:
    torch.manual_seed(0)
    model, mesh = Recomputing(tied=True, padding_idx=20).double(), tp_mesh()
    expected = trained(copy.deepcopy(model), tokens())
    divide_vocabulary(model, plan_of(model), mesh, loss_parallel=True)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.tokens.weight
    assert twin.head.weight is not model.head.weight
    return [compare(twin, expected), compare(model, expected)]


def test_recomputation_and_copies_compose() -> None:
    for errors in run_ranks(2, recomputed_and_copied):
        assert max(errors) < 1e-12


class Accuracy(Tiny):
    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        self.right = (logits.argmax(-1) % 4 == ids % 4).double().mean()
        return logits


def reads_logits() -> tuple[float, list[str]]:
    torch.manual_seed(0)
    model, mesh = Accuracy().double(), tp_mesh()
    twin = copy.deepcopy(model)
    expected = trained(twin, tokens())
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("lightning_par.parallel.tensor.logits")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        divide_vocabulary(model, plan_of(model), mesh, loss_parallel=True)
        error = compare(model, expected)
        assert model.right == twin.right > 0
        loss_of(model, tokens())
    finally:
        logger.removeHandler(handler)
    return error, records


def test_a_step_that_reads_the_logits_trains_right_and_says_so() -> None:
    for error, records in run_ranks(2, reads_logits):
        assert error < 1e-12
        assert records == ["loss parallel is off: the step reads the logits with Tensor.argmax"]


def own_hooks() -> None:
    """Hooks of the user see whole embeddings."""
    model, seen = Tiny().double(), []
    reference = model.tokens(tokens()).detach().clone()
    model.tokens.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    divide_vocabulary(model, plan_of(model), tp_mesh(), loss_parallel=True)
    seen.clear()
    model(tokens())
    assert torch.equal(seen[0][0], tokens())
    assert torch.equal(seen[0][1], reference)


def test_hooks_of_users_see_whole_embeddings() -> None:
    run_ranks(2, own_hooks)


def no_token() -> None:
    model = Tiny()
    divide_vocabulary(model, plan_of(model), tp_mesh(), loss_parallel=True)
    before = dict(model.named_parameters())
    for wrong in (VOCABULARY, -1):
        with pytest.raises(IndexError):
            model(torch.tensor([[wrong]]))
    assert all(param is before[name] for name, param in model.named_parameters())
    model(torch.tensor([[VOCABULARY]]))


def test_what_is_no_token_is_an_error_on_every_rank() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, no_token)
    assert str(caught.value).count("IndexError: index out of range in self") == 2


class Reader(Tiny):
    """Tied by hand: the head is no module."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.block(self.tokens(ids)), self.tokens.weight)


class Regularised(Tiny):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.head.weight.norm()


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3


class Normalised(nn.Embedding):
    """Its rows depend on one another."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight - self.weight.mean(0), self.padding_idx)


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out - out.mean(-1, keepdim=True)


def changed(**modules: nn.Module) -> nn.Module:
    model = Tiny()
    for name, module in modules.items():
        setattr(model, name, module)
    return model


def odd() -> nn.Module:
    return changed(tokens=nn.Embedding(33, 6), head=nn.Linear(6, 33))


REASONS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "odd": (odd, "tokens", "33 rows, which tp_size=2 does not divide; pad to 34"),
    "by hand": (Reader, "tokens", "F.linear reads tokens.weight outside the forward"),
    "uncalled": (Reader, "head", "its forward was not called in the example"),
    "regularised": (Regularised, "head", "Tensor.norm reads head.weight outside the forward"),
    "max_norm": (lambda: Tiny(max_norm=1.0), "tokens", "max_norm changes its rows"),
    "sparse": (lambda: Tiny(sparse=True), "tokens", "its gradients are sparse"),
    "frequency": (lambda: Tiny(scale_grad_by_freq=True), "tokens", "scale_grad_by_freq counts all tokens"),
    "tied": (lambda: Tiny(tied=True, max_norm=1.0), "head", "tokens: max_norm changes its rows"),
    "normalised": (lambda: changed(tokens=Normalised(VOCABULARY, 6)), "tokens", "Normalised does not treat its rows"),
    "centred": (lambda: changed(head=Centred(6, VOCABULARY)), "head", "Centred does not treat its rows alike"),
    "parametrized": (
        lambda: changed(head=parametrizations.weight_norm(nn.Linear(6, VOCABULARY))),
        "head",
        "computed from other parameters",
    ),
}


@pytest.mark.parametrize("case", REASONS)
def test_what_stays_replicated_says_why(case: str) -> None:
    build, name, reason = REASONS[case]
    plan = plan_of(build())
    assert name not in (*plan.embeddings, *plan.heads)
    assert reason in plan.reasons[name]
    assert reason in plan.report()


def test_an_embedding_with_a_forward_of_its_own_is_divided_if_rows_are_alike() -> None:
    plan = plan_of(changed(tokens=Scaled(VOCABULARY, 6, padding_idx=1)))
    assert plan.embeddings == ("tokens",)


def test_a_plan_without_an_example() -> None:
    model = Tiny(tied=True, bias=False)
    plan = seen_plan(model, ["block"], 2)
    assert (plan.embeddings, plan.heads) == (("tokens",), ("head",))
    assert plan.sharded_share == VOCABULARY * 6 / sum(p.numel() for p in model.parameters())
    assert "tokens: embedding, rows divided" in plan.report()
    model.kept = model.tokens.weight
    assert "its parameter is kept too" in seen_plan(model, ["block"], 2).reasons["tokens"]


def test_small_embeddings_and_blocks_are_left_alone() -> None:
    model = changed(block=nn.Sequential(nn.Linear(6, 3000), nn.Linear(3000, 6)), head=nn.Identity())
    assert "less than 2%" in seen_plan(model, ["block"], 2).reasons["tokens"]
    assert seen_plan(Tiny(), ["tokens", "head"], 2) == VocabularyPlan(2)


def test_what_users_attach_stays() -> None:
    model = Tiny(tied=True)
    model.tokens.weight.mark = "mine"
    model.head.bias.requires_grad_(False)
    plan = plan_of(model)
    with simulated_mesh(2) as mesh:
        divide_vocabulary(model, plan, mesh, loss_parallel=True)
    assert isinstance(model.tokens.weight, DTensor)
    assert model.head.weight is model.tokens.weight
    assert model.tokens.weight.mark == "mine"
    assert not model.head.bias.requires_grad
    assert [type(module).__name__ for module in (model.tokens, model.head)] == ["Embedding", "Linear"]


def test_a_mesh_of_another_size_is_refused() -> None:
    with simulated_mesh(4) as mesh, pytest.raises(ValueError, match="the plan is for 2 ranks"):
        divide_vocabulary(Tiny(), VocabularyPlan(2), mesh, loss_parallel=True)
