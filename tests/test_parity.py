"""Every layout of the data-parallel family trains with the numbers of one process (design sections 5.4, 6 and 7)."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from probe import crossed, layouts, listed, long_run
from torch.utils.data import DataLoader

from lightning_par.testing import RanksFailed, run_ranks
from models import Tokens
from parity import LAYOUTS, Run, assert_same_training, build_strategy, make_trainer, train


def matrix() -> list[object]:
    """Every layout in Trainer and Fabric with both models, most of it in the long run only.

    One model accumulates and clips; for the other the remaining ways take turns. So any two of the five values meet.
    """
    quick = {"trainer": ("ddp", "fsdp"), "fabric": ("zero1", "zero2", "hsdp2x2")}
    turns = itertools.cycle([(1, None), (3, None), (1, 0.05)])
    cases = []
    for host, layout in itertools.product(quick, LAYOUTS):
        first, second = ("nanogpt", "llama") if host == "trainer" else ("llama", "nanogpt")
        for model, (accumulate, clip) in ((first, (3, 0.05)), (second, next(turns))):
            marks = [] if model == first and layout in quick[host] else [pytest.mark.slow]
            name = f"{model}-{host}-{layout}-accumulate{accumulate}-{'clip' if clip else 'no clip'}"
            cases.append(pytest.param(model, host, layout, accumulate, clip, marks=marks, id=name))
    return cases


@pytest.mark.parametrize(("model", "host", "layout", "accumulate", "clip"), matrix())
def test_data_parallel_family(model: str, host: str, layout: str, accumulate: int, clip: float | None) -> None:
    ranks, spec = LAYOUTS[layout]
    assert_same_training(Run(model=model, host=host, accumulate=accumulate, clip=clip), ranks, spec)


# Quick: hsdp2x2 above, and below what is gathered over two of four ranks.
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "fsdp"])
def test_four_ranks(layout: str) -> None:
    assert_same_training(Run(accumulate=2, clip=0.05), 4, LAYOUTS[layout][1])


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_one_rank(layout: str) -> None:
    assert_same_training(Run(accumulate=2, clip=0.05), 1, LAYOUTS[layout][1])


@pytest.mark.parametrize(
    ("layout", "host"),
    crossed(("zero1", "fsdp"), ("trainer", "fabric"), quick=[("fsdp", "fabric")]),
)
def test_bases_without_a_dict(layout: str, host: str) -> None:
    assert_same_training(Run("unusual:AbstractFirst", accumulate=2, clip=0.05, host=host), 2, LAYOUTS[layout][1])


@pytest.mark.parametrize(
    ("layout", "model"),
    crossed(LAYOUTS, ("InputGradients", "Adversarial"), quick=[("ddp", "Adversarial"), ("fsdp", "InputGradients")]),
)
def test_backward_inside_the_step(layout: str, model: str) -> None:
    ranks, spec = LAYOUTS[layout]
    host = "fabric" if layout == "zero1" else "trainer"
    assert_same_training(Run(f"unusual:{model}", accumulate=3, clip=0.05, host=host), ranks, spec)


# The quick ones are those that "auto" would not choose.
@pytest.mark.parametrize(
    ("layout", "sync"),
    listed(
        [*((layout, layout in ("ddp", "zero1")) for layout in LAYOUTS), ("zero2", True), ("fsdp", True)],
        ("ddp", True),
        ("fsdp", False),
    ),
)
def test_sync_every_batch_changes_no_number(layout: str, sync: bool) -> None:
    ranks, (name, options) = LAYOUTS[layout]
    assert_same_training(Run(accumulate=3), ranks, (name, options | {"sync_every_batch": sync}))


@pytest.mark.parametrize(
    "options",
    [
        long_run({"activation_checkpointing": "full"}),
        long_run({"activation_checkpointing": "selective"}),
        long_run({"activation_checkpointing": 2}),
        long_run({"compile": "aot_eager"}),
        {"compile": "aot_eager", "activation_checkpointing": "full"},
        long_run({"reshard_after_forward": False}),
        {"cpu_offload": True},
    ],
    ids=str,
)
def test_options_change_no_number(options: dict[str, object]) -> None:
    run = Run(accumulate=2, clip=0.05)
    if "compile" in options:  # which takes most of a second for each block
        run = replace(run, steps=2, model_options=(("layers", 2),))
    assert_same_training(run, 2, ("FSDP2Strategy", options))


# Kinds of recomputation differ inside of blocks, where layouts are alike: one is enough beside FSDP.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        *((layout, {"compile": "aot_eager"}) for layout in ("ddp", "zero1", "hsdp2x2")),
        *((layout, {"cpu_offload": True}) for layout in ("ddp", "zero2", "fsdp", "hsdp2x2")),
        *((layout, {"activation_checkpointing": "full"}) for layout in ("zero2", "fsdp")),
        *((layout, {"activation_checkpointing": "selective"}) for layout in ("ddp", "zero1", "hsdp2x2")),
    ],
    ids=str,
)
def test_every_option_under_every_layout(layout: str, options: dict[str, object]) -> None:
    if layout == "ddp" and "cpu_offload" in options:
        with pytest.raises(RanksFailed, match="offloading moves the shards"):
            run_ranks(2, train, Run(), 2, ("DataParallelStrategy", options))
        return
    ranks, (name, defaults) = LAYOUTS[layout]
    assert_same_training(Run(model="llama", accumulate=2, clip=0.05), ranks, (name, defaults | options))


def test_reshard_over_fewer_ranks() -> None:
    assert_same_training(Run(steps=2), 4, ("FSDP2Strategy", {"reshard_after_forward": 2}))


@pytest.mark.parametrize("layout", [long_run("ddp"), "fsdp"])
def test_single_precision(layout: str) -> None:
    ranks, spec = LAYOUTS[layout]
    assert_same_training(Run(accumulate=2, clip=0.05, precision="32-true"), ranks, spec)


@layouts("ddp")
def test_steps_without_batch_idx(layout: str) -> None:
    ranks, spec = LAYOUTS[layout]
    assert_same_training(Run(model="short-steps", accumulate=2), ranks, spec)


def evaluate_short_steps(spec: tuple[str, dict[str, object]]) -> tuple[float, int]:
    trainer = make_trainer(2, build_strategy(spec, "trainer"), use_distributed_sampler=True)
    module = Run(model="short-steps").build()
    data = DataLoader(Tokens(12), batch_size=2)
    metrics = trainer.validate(module, data, verbose=False)[0]
    return metrics["val_loss"], len(trainer.predict(module, data))


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_evaluation_steps_without_batch_idx(layout: str) -> None:
    (first, batches), (second, _) = run_ranks(2, evaluate_short_steps, LAYOUTS[layout][1])
    assert first == second > 0
    assert batches == 3
