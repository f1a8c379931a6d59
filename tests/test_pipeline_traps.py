"""Models that a pipeline could get wrong without a word, on two processes: the numbers of one process, or an error."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pipeline_models
import pytest
import torch
import torch.distributed as dist
from pipeline_models import Small, samples
from probe import crossed, some
from torch import Tensor, nn

from lightning_par.errors import ParallelConfigError
from lightning_par.layout import ParallelLayout
from lightning_par.parallel.apply import Parallelized, parallelize
from lightning_par.parallel.options import ParallelOptions
from lightning_par.parallel.pipeline.batch import Step
from lightning_par.parallel.pipeline.microbatches import sizes, split
from lightning_par.parallel.tensor.examples import Example
from lightning_par.testing import RanksFailed, run_ranks

MICROBATCHES = 4


def build(name: str, **options: Any) -> tuple[Any, nn.Module, Parallelized]:
    """A model of `pipeline_models` as two stages, and a whole copy of it."""
    torch.manual_seed(3)
    model = getattr(pipeline_models, name)().double()
    whole = copy.deepcopy(model)
    return model, whole, divided(model, **options)


def divided(model: Any, **options: Any) -> Parallelized:
    return parallelize(
        model,
        ParallelLayout(pp_size=2, dp_shard_size=1),
        "64-true",
        ParallelOptions(blocks="blocks.*", **{"pp_microbatches": MICROBATCHES, **options}),
        example_inputs=Example("the step", lambda: model.loss(samples(2))),
        device=torch.device("cpu"),
    )


def step_of(model: Any, seeds: list[int] | None = None) -> Step:
    def run(part: Any) -> Tensor:
        if seeds is not None:
            seeds.append(torch.initial_seed())
        return model.loss(part)

    return Step(run, model.loss, lambda loss: loss, "train")


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Of a stage without any to train torch would refuse an optimizer.
    trained = [p for p in model.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(1))]
    return torch.optim.AdamW(trained, lr=1e-2, foreach=False)


def reference_loss(whole: Any, batch: Any, seeds: list[int]) -> Tensor:
    """The loss on micro-batches, each with the random numbers that it had in the pipeline."""
    rows = len(batch["ids"])
    total = torch.zeros((), dtype=torch.float64)
    for part, size, seed in zip(split(batch, MICROBATCHES), sizes(rows, MICROBATCHES), seeds, strict=True):
        torch.manual_seed(seed)
        total = total + whole.loss(part) * (size / rows)
    return total


def differences(name: str, options: dict[str, Any], *, draws: bool = False) -> dict[str, float]:
    """Train on this rank, and return how far all it has is from one process, relative to the largest of the kind."""
    model, whole, par = build(name, **options)
    pipeline = par.pipeline
    assert pipeline is not None
    optimizer, expected = optimizer_of(model), optimizer_of(whole)
    found = {"loss": 0.0, "gradients": 0.0, "weights": 0.0}
    for i in range(2):
        batch, seeds = samples(seed=i), []
        result = pipeline.train(step_of(model, seeds), batch)
        par.finish_backward()
        seeds = pipeline.share(seeds)
        loss = reference_loss(whole, batch, seeds[-MICROBATCHES:]) if draws else whole.loss(batch)  # type: ignore[operator]
        loss.backward()
        mine = pipeline.share(result.loss if result.loss is not None else None)
        found["loss"] = max(found["loss"], abs(float(mine) - loss.item()) / loss.item())
        theirs = dict(whole.named_parameters())
        largest = max(float(p.grad.abs().max()) for p in theirs.values() if p.grad is not None)
        for key, param in model.named_parameters():
            gradient = theirs[key].grad
            assert (param.grad is None) == (gradient is None), key
            if gradient is not None:
                worst = float((param.grad - gradient).abs().max()) / largest
                assert worst == worst, f"the gradient of {key} is NaN"
                found["gradients"] = max(found["gradients"], worst)
        for one in (optimizer, expected):
            one.step()
            one.zero_grad()
    for key, param in model.named_parameters():
        found["weights"] = max(found["weights"], float((param - theirs[key]).abs().max()))
    return found


CHAINS = [
    *("PassedEmbedding", "AddedEmbedding", "OuterResidual", "SkippedScale", "Keyword", "Pairs", "Outputs", "Families"),
    *("InPlace", "InPlaceLater", "Pooling", "ExpandedSamples", "Unused", "FrozenStart", "FrozenButOne", "Autoencoder"),
    *("HandedOn", "Checkpointed"),
]


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("schedule", some(("1F1B", "Interleaved1F1B", "ZBVZeroBubble"), "1F1B"))
def test_unusual_chains_have_the_numbers_of_one_process(name: str, schedule: str) -> None:
    for found in run_ranks(2, differences, name, {"pp_schedule": schedule}):
        assert max(found.values()) < 1e-9, found


@pytest.mark.parametrize("name", ["DroppedPrefix", "Denoise"])
def test_random_numbers_outside_of_blocks_are_those_of_one_process(name: str) -> None:
    for found in run_ranks(2, differences, name, {}, draws=True):
        assert max(found.values()) < 1e-9, found


def refused(name: str) -> str:
    model, _, par = build(name)
    assert par.pipeline is not None
    with pytest.raises((ParallelConfigError, RuntimeError)) as error:
        par.pipeline.train(step_of(model, []), samples(seed=0))
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Reentrant", "called without gradients in a training step, as reentrant checkpointing does"),
        ("CheckpointedResidual", "called inside a checkpoint of your own"),
    ],
)
def test_checkpoints_that_the_graph_would_not_go_through_are_refused(name: str, said: str) -> None:
    for found in run_ranks(2, refused, name):
        assert said in found
        assert "activation_checkpointing='full'" in found


# Memory


def held_bytes() -> dict[int, int]:
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and not thing.is_meta:
            storage = thing.untyped_storage()
            if storage.device.type == "cpu":
                found[storage.data_ptr()] = storage.nbytes()
    return found


def parameter_bytes(name: str) -> tuple[int, int, int]:
    """Of the whole model, of what this rank should have, and of what is alive."""
    before = held_bytes()
    torch.manual_seed(3)
    model = getattr(pipeline_models, name)().double()
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    handle = divided(model)
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    alive = sum(size for pointer, size in held_bytes().items() if pointer and pointer not in before)
    assert handle.pipeline is not None
    return total, own, alive


def test_a_rank_holds_the_parameters_of_its_stages_alone() -> None:
    found = run_ranks(2, parameter_bytes, "Wide")
    total = found[0][0]
    assert sum(own for _, own, _ in found) == total
    for _, own, alive in found:
        assert own <= 0.6 * total
        # Besides: stand-ins of one element, and a few tensors of torch's own.
        assert own <= alive < own + 0.02 * total


# Errors


class Catches(Small):
    def loss(self, batch: Any) -> Tensor:
        try:
            return super().loss(batch)
        except BaseException:
            return torch.zeros((), dtype=torch.float64, requires_grad=True)


class Sneaks(Small):
    """Once it was looked at, the model adds a tensor of the prefix at the end."""

    steps = 0

    def body(self, x: Tensor) -> Tensor:
        kept = x.sin()
        Sneaks.steps += 1
        return super().body(x) + (kept if Sneaks.steps > 1 else 0)


class Detours(Small):
    """Once it was looked at, the model calls its blocks in another order."""

    steps = 0

    def body(self, x: Tensor) -> Tensor:
        Detours.steps += 1
        order = range(self.layers) if Detours.steps == 1 else reversed(range(self.layers))
        for i in order:
            x = self.blocks[i](x)
        return x


class Contrastive(Small):
    """Compares the samples of a batch with one another."""

    def loss(self, batch: Any) -> Tensor:
        means = self(batch["ids"]).mean(1)
        return nn.functional.cross_entropy(means @ means.t(), torch.arange(len(means)))


def train_once(name: str) -> None:
    model: Any = globals()[name]().double()
    par = divided(model)
    assert par.pipeline is not None
    par.pipeline.train(step_of(model), samples())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Catches", "caught the exception that ends it at the end of a pipeline stage"),
        ("Sneaks", "received no NaN and made one"),
        ("Detours", "the step calls block 'blocks.3' where 'blocks.0' is expected"),
        ("Contrastive", "as the weighted mean of the losses of two"),
    ],
)
def test_what_would_be_wrong_is_an_error(name: str, said: str) -> None:
    with pytest.raises(RanksFailed, match=said):
        run_ranks(2, train_once, name, timeout=20)


class Scaled(Small):
    """Scales its logits by numbers of the batch."""

    def loss(self, batch: Any) -> Tensor:
        logits = self(batch["ids"]) * batch["noisy"].mean(-1, keepdim=True)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def bad_samples(count: int) -> bool:
    model = Scaled().double()
    par = divided(model)
    assert par.pipeline is not None
    batch = samples()
    batch["noisy"][:count] = float("nan")
    results = par.pipeline.train(step_of(model), batch)
    return bool(results.loss.isnan()) if dist.get_rank() else True


def test_a_sample_of_the_first_batch_may_be_bad() -> None:
    """A start may go on right where one is; what looks like a value of another stage is in all micro-batches."""
    assert run_ranks(2, bad_samples, 1) == [True, True]
    with pytest.raises(RanksFailed, match="received no NaN and made one"):
        run_ranks(2, bad_samples, 8, timeout=20)


def fails_once(on_stage: int, when: str) -> list[str]:
    """One batch fails on one stage, the next one does not."""
    model, _, par = build("Small")
    pipeline = par.pipeline
    assert pipeline is not None
    step = step_of(model)
    block = model.blocks[0 if on_stage == 0 else 3]
    said = []
    for failing in (False, True, False):
        calls = [0]

        def fail(*args: Any, calls: list[int] = calls) -> None:
            calls[0] += 1
            if calls[0] == 3:
                raise KeyError("third micro-batch")

        handle = block.register_forward_pre_hook(fail) if failing else None
        try:
            pipeline.train(step, samples()) if when == "train" else pipeline.evaluate(step, samples())
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        if handle is not None:
            handle.remove()
        model.zero_grad()
    return said


@pytest.mark.parametrize(
    ("stage", "when"), crossed((0, 1), ("train", "evaluate"), quick=[(0, "train"), (1, "evaluate")])
)
def test_an_error_on_one_stage_is_one_on_all_and_the_next_batch_works(stage: int, when: str) -> None:
    for rank, (before, said, after) in enumerate(run_ranks(2, fails_once, stage, when, timeout=20)):
        assert before == after == ""
        assert "third micro-batch" in said
        assert said.startswith("KeyError" if rank == stage else f"RuntimeError: the step failed on rank {stage}")
