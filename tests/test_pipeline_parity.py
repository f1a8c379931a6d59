"""Pipelines train with the numbers of one process: every schedule, model and product of axes (design section 7)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from probe import listed, some

from lightning_par.parallel.pipeline.schedules import SCHEDULES
from lightning_par.testing import run_ranks
from parity import Record, Run, assert_same_training, reference, train

# Class and options; blocks by the class name where the model has several repeated parts.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "nano": ("pipeline_models:Nano", {}),
    "llama": ("tensor_models:Causal", {"kind": "Llama"}),
    "qwen3": ("tensor_models:Causal", {"kind": "Qwen3", "head_dim": 8}),
    "gpt2": ("pipeline_models:GPT2", {}),
    "gemma2": (
        "tensor_models:Causal",
        {"kind": "Gemma2", "head_dim": 8, "attn_implementation": "eager"},
    ),
    "mixtral": (
        "tensor_models:Causal",
        {"kind": "Mixtral", "num_local_experts": 4, "experts_implementation": "eager"},
    ),
    "bert": ("pipeline_models:BertClassifier", {}),
    "vit": ("pipeline_models:ViTClassifier", {}),
}


LAYERS = {"1F1B": 4, "Interleaved1F1B": 8}
THREE = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")


def run_of(model: str = "nano", layers: int = 4, **options: Any) -> Run:
    name, given = MODELS[model]
    return Run(name, batch_size=8, model_options=(*given.items(), ("num_hidden_layers", layers)), **options)


def same(ranks: int = 2, run: Run | None = None, pp_size: int = 2, **options: Any) -> list[Record]:
    spec = ("MeshStrategy", {"pp_size": pp_size, "dp_shard_size": 1, **options})
    return assert_same_training(run or run_of(), ranks, spec)


# A schedule knows nothing of models: one has them all, the others a chain, a loop and a V with a split backward.
@pytest.mark.parametrize(
    ("model", "schedule"),
    listed(
        [(model, schedule) for model in MODELS for schedule in (SCHEDULES if model == "nano" else THREE)],
        *(("nano", schedule) for schedule in THREE),
        ("llama", "1F1B"),
    ),
)
def test_every_schedule(model: str, schedule: str) -> None:
    same(run=run_of(model), pp_schedule=schedule, pp_microbatches=4)


# Eight stages of one block each, which is as few as there can be: for models that differ in what crosses.
@pytest.mark.parametrize(
    ("model", "schedule"),
    listed(
        [
            *((model, "1F1B") for model in MODELS),
            *((model, "Interleaved1F1B") for model in ("nano", "llama", "gemma2", "vit")),
        ],
        ("nano", "1F1B"),
    ),
)
def test_four_stages(model: str, schedule: str) -> None:
    same(4, run_of(model, layers=LAYERS[schedule]), pp_size=4, pp_schedule=schedule, pp_microbatches=4)


@pytest.mark.parametrize("schedule", some(("1F1B", "Interleaved1F1B", "ZBVZeroBubble"), "1F1B"))
@pytest.mark.parametrize("model", some(("nano", "llama", "gemma2"), "nano"))
def test_accumulation_and_clipping(model: str, schedule: str) -> None:
    same(run=run_of(model, accumulate=3, clip=0.05), pp_schedule=schedule, pp_microbatches=4)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (4, {"dp_shard_size": 2}),
    "zero1": (4, {"dp_shard_size": 2, "zero_stage": 1}),
    "zero2": (4, {"dp_shard_size": 2, "zero_stage": 2}),
    "ddp": (4, {"dp_replicate_size": 2}),
    "tp": (4, {"tp_size": 2}),
    "hsdp": (8, {"dp_replicate_size": 2, "dp_shard_size": 2}),
    "fsdp x tp": (8, {"dp_shard_size": 2, "tp_size": 2}),
}


def products() -> list[tuple[str, str, str]]:
    """Every layout with two schedules; schedules and models take turns, so that each meets every layout."""
    pairs = [p for p in itertools.product(enumerate(LAYOUTS), enumerate(THREE)) if (p[0][0] + p[1][0]) % 3 != 2]
    return [(layout, ("nano", "llama")[(i + j) % 2], schedule) for (i, layout), (j, schedule) in pairs]


@pytest.mark.parametrize(
    ("layout", "model", "schedule"),
    listed(products(), ("fsdp", "nano", "1F1B"), ("tp", "nano", "1F1B")),
)
def test_with_other_axes(layout: str, model: str, schedule: str) -> None:
    ranks, options = LAYOUTS[layout]
    run = run_of(model, accumulate=2, clip=0.05)
    same(ranks, run, pp_schedule=schedule, pp_microbatches=4, **options)


@pytest.mark.parametrize(
    ("layout", "sync"),
    listed(
        [("fsdp", False), ("zero1", True), ("zero2", False), ("ddp", True), ("hsdp", False), ("fsdp", True)],
        ("fsdp", False),
    ),
)
def test_sync_every_batch_changes_no_number(layout: str, sync: bool) -> None:
    ranks, options = LAYOUTS[layout]
    same(ranks, run_of(accumulate=3, steps=2), pp_microbatches=4, sync_every_batch=sync, **options)


# With two stages on a rank, what differs from one: which modules are compiled and recomputed, and how many they are.
@pytest.mark.parametrize(
    ("schedule", "options"),
    listed(
        [
            *(
                ("1F1B", options)
                for options in (
                    {"activation_checkpointing": "full"},
                    {"activation_checkpointing": "selective"},
                    {"compile": "aot_eager"},
                    {"dp_shard_size": 2, "activation_checkpointing": "full", "compile": "aot_eager"},
                    {"dp_shard_size": 2, "cpu_offload": True},
                    {"pp_split": [1, 3]},
                    {"pp_microbatches": 2},
                    {"pp_microbatches": 8},
                )
            ),
            ("Interleaved1F1B", {"compile": "aot_eager", "activation_checkpointing": "full"}),
            ("Interleaved1F1B", {"pp_split": [1, 1, 1, 1]}),
            ("Interleaved1F1B", {"pp_microbatches": 8}),
        ],
        ("1F1B", {"activation_checkpointing": "full"}),
    ),
    ids=str,
)
def test_options_change_no_number(schedule: str, options: dict[str, Any]) -> None:
    ranks = 2 * options.get("dp_shard_size", 1) * options.get("tp_size", 1)
    same(ranks, run_of("nano", accumulate=2, clip=0.05), **{"pp_schedule": schedule, "pp_microbatches": 4, **options})


@pytest.mark.parametrize("model", some(("nano", "llama"), "nano"))
def test_single_precision(model: str) -> None:
    same(run=run_of(model, precision="32-true", clip=0.05), pp_microbatches=4)


@pytest.mark.slow
def test_sequence_parallel() -> None:
    same(4, run_of("llama", accumulate=2, clip=0.05), pp_microbatches=4, tp_size=2, sequence_parallel=True)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_is_that_of_one_process(precision: str) -> None:
    # Rounding of a sum in other parts; one process runs Lightning's own plugin.
    run = run_of(precision=precision)
    records = run_ranks(2, train, run, 2, ("MeshStrategy", {"pp_size": 2, "dp_shard_size": 1, "pp_microbatches": 4}))
    expected = reference(run, 1)
    # With bf16-true a loss itself has 8 bits.
    digits = 2e-3 if precision == "bf16-mixed" else 2**-7
    for record in records:
        assert record.losses == pytest.approx(expected.losses, rel=digits)
        assert record.norms == pytest.approx(expected.norms, rel=2e-2)
