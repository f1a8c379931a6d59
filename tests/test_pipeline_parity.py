"""Pipelines train with the numbers of one process: every schedule, model and product of axes (design section 7)."""

from __future__ import annotations

from typing import Any

import pytest
from probe import crossed, long_run, some

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


def run_of(model: str = "nano", layers: int = 4, **options: Any) -> Run:
    name, given = MODELS[model]
    return Run(name, batch_size=8, model_options=(*given.items(), ("num_hidden_layers", layers)), **options)


def same(ranks: int = 2, run: Run | None = None, pp_size: int = 2, **options: Any) -> list[Record]:
    spec = ("MeshStrategy", {"pp_size": pp_size, "dp_shard_size": 1, **options})
    return assert_same_training(run or run_of(), ranks, spec)


@pytest.mark.parametrize(
    ("model", "schedule"),
    crossed(
        MODELS,
        SCHEDULES,
        quick=[
            *(("nano", schedule) for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")),
            ("llama", "1F1B"),
            ("vit", "1F1B"),
        ],
    ),
)
def test_every_schedule(model: str, schedule: str) -> None:
    same(run=run_of(model), pp_schedule=schedule, pp_microbatches=4)


@pytest.mark.parametrize(("model", "schedule"), crossed(MODELS, ("1F1B", "Interleaved1F1B"), quick=[("nano", "1F1B")]))
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


@pytest.mark.parametrize(
    ("layout", "model", "schedule"),
    crossed(
        LAYOUTS,
        ("nano", "llama"),
        ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"),
        quick=[("fsdp", "nano", "1F1B"), ("ddp", "nano", "Interleaved1F1B"), ("tp", "llama", "1F1B")],
    ),
)
def test_with_other_axes(layout: str, model: str, schedule: str) -> None:
    ranks, options = LAYOUTS[layout]
    run = run_of(model, accumulate=2, clip=0.05)
    same(ranks, run, pp_schedule=schedule, pp_microbatches=4, **options)


@pytest.mark.parametrize("layout", some(("fsdp", "zero1", "zero2", "ddp", "hsdp"), "fsdp"))
@pytest.mark.parametrize("sync", [long_run(True), False])
def test_sync_every_batch_changes_no_number(layout: str, sync: bool) -> None:
    ranks, options = LAYOUTS[layout]
    same(ranks, run_of(accumulate=3), pp_microbatches=4, sync_every_batch=sync, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": "full"},
        long_run({"activation_checkpointing": "selective"}),
        {"compile": "aot_eager"},
        long_run({"compile": "aot_eager", "activation_checkpointing": "full"}),
        long_run({"dp_shard_size": 2, "activation_checkpointing": "full", "compile": "aot_eager"}),
        long_run({"dp_shard_size": 2, "cpu_offload": True}),
        long_run({"pp_split": [1, 3]}),
        long_run({"pp_microbatches": 2}),
        long_run({"pp_microbatches": 8}),
    ],
    ids=str,
)
@pytest.mark.parametrize("schedule", some(("1F1B", "Interleaved1F1B"), "1F1B"))
def test_options_change_no_number(options: dict[str, Any], schedule: str) -> None:
    if "pp_split" in options and schedule != "1F1B":
        options = {"pp_split": [1, 1, 1, 1]}
    ranks = 2 * options.get("dp_shard_size", 1) * options.get("tp_size", 1)
    same(ranks, run_of("nano", accumulate=2, clip=0.05), **{"pp_schedule": schedule, "pp_microbatches": 4, **options})


@pytest.mark.parametrize("model", some(("nano", "llama"), "nano"))
def test_single_precision(model: str) -> None:
    same(run=run_of(model, precision="32-true", clip=0.05), pp_microbatches=4)


@pytest.mark.slow
def test_sequence_parallel() -> None:
    same(4, run_of("llama", accumulate=2, clip=0.05), pp_microbatches=4, tp_size=2, sequence_parallel=True)


@pytest.mark.parametrize("precision", ["bf16-mixed", long_run("bf16-true")])
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
