"""Unmodified LightningModules train over tensor-parallel ranks with the numbers of one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from probe import listed, some
from tensor_models import KINDS

from lightning_par.testing import run_ranks
from parity import Run, assert_same_training, reference, train

TWO = {"tp_size": 2}
WITH_DATA = {
    "ddp": (4, {"dp_shard_size": 1, "dp_replicate_size": 2}),
    "zero1": (4, {"zero_stage": 1}),
    "zero2": (4, {"zero_stage": 2}),
    "fsdp": (4, {}),
    "hsdp": (8, {"dp_replicate_size": 2, "dp_shard_size": 2}),
}


def tensor_run(kind: str, *model_options: tuple[str, Any], **options: Any) -> Run:
    name, its_options = KINDS[kind]
    return Run(f"tensor_models:{name}", model_options=(*its_options.items(), *model_options), **options)


@pytest.mark.parametrize("kind", some(KINDS, "llama"))
def test_two_ranks(kind: str) -> None:
    assert_same_training(tensor_run(kind, accumulate=2, clip=0.05), 2, ("TensorParallelStrategy", TWO))


SLICES = TWO | {"sequence_parallel": True}


@pytest.mark.parametrize("kind", some(KINDS, "nano"))
def test_slices_of_the_sequence(kind: str) -> None:
    assert_same_training(tensor_run(kind, accumulate=2, clip=0.05), 2, ("TensorParallelStrategy", SLICES))


# The models take turns.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("nano", "ddp"), ("llama", "zero1"), ("nano", "zero2"), ("llama", "fsdp"), ("llama", "hsdp")],
)
def test_slices_with_the_data_family(kind: str, layout: str) -> None:
    ranks, options = WITH_DATA[layout]
    run = tensor_run(kind, accumulate=2, clip=0.05, host="fabric" if kind == "llama" else "trainer")
    assert_same_training(run, ranks, ("MeshStrategy", SLICES | options))


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("run", [tensor_run("nano"), tensor_run("llama", ("num_key_value_heads", 4))], ids=str)
def test_four_ranks(run: Run, sequence_parallel: bool) -> None:
    options = {"tp_size": 4, "sequence_parallel": sequence_parallel}
    assert_same_training(run, 4, ("TensorParallelStrategy", options))


def with_data() -> list[tuple[str, str, str]]:
    """Every layout; models and hosts take turns, and FSDP has both."""
    hosts, models = itertools.cycle(("trainer", "fabric")), itertools.cycle(("llama", "llama", "nano", "nano"))
    return [*zip(models, WITH_DATA, hosts, strict=False), ("nano", "fsdp", "trainer")]


@pytest.mark.parametrize(("kind", "layout", "host"), listed(with_data(), ("nano", "fsdp", "trainer")))
def test_with_the_data_family(kind: str, layout: str, host: str) -> None:
    ranks, options = WITH_DATA[layout]
    assert_same_training(tensor_run(kind, accumulate=2, clip=0.05, host=host), ranks, ("MeshStrategy", TWO | options))


OPTIONS: list[dict[str, Any]] = [
    {"activation_checkpointing": "full"},
    {"loss_parallel": False},
    {"activation_checkpointing": "selective"},
    {"compile": "aot_eager", "activation_checkpointing": "full"},
    {"cpu_offload": True},
    {"sequence_parallel": True, "activation_checkpointing": "full"},
    {"sequence_parallel": True, "activation_checkpointing": "selective"},
    {"sequence_parallel": True, "loss_parallel": False},
]


# The second model has a norm of slices inside of attention, and casts: what is computed again or compiled sees them.
@pytest.mark.parametrize(
    ("kind", "options"),
    listed(
        [("nano", options) for options in OPTIONS]
        + [("qwen3", options) for options in OPTIONS if options.get("activation_checkpointing") == "full"]
        + [("qwen3", {"cpu_offload": True})],
        *(("nano", options) for options in OPTIONS[:2]),
    ),
    ids=str,
)
def test_options_change_no_number(kind: str, options: dict[str, Any]) -> None:
    # A recomputation casts to float32 as the model says; the loss then must too.
    casts = (("in_double", False),) if kind == "qwen3" else ()
    options = TWO | ({"loss_parallel": False} if casts else {}) | options
    run = tensor_run(kind, *casts, accumulate=2, clip=0.05)
    assert_same_training(run, 2, ("TensorParallelStrategy", options))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nano", "qwen3"])
@pytest.mark.parametrize("dp_shard_size", [1, 2])
def test_single_precision(kind: str, dp_shard_size: int) -> None:
    options = TWO | {"dp_shard_size": dp_shard_size}
    run = tensor_run(kind, accumulate=2, clip=0.05, precision="32-true")
    assert_same_training(run, 2 * dp_shard_size, ("MeshStrategy", options))


@pytest.mark.parametrize(
    ("kind", "data_ranks", "precision"),
    listed(
        [
            (kind, data_ranks, precision)
            for kind, data_ranks in (("nano", 1), ("qwen3", 2))
            for precision in ("bf16-mixed", "bf16-true", "16-mixed")
        ],
        ("nano", 1, "bf16-mixed"),
    ),
)
def test_low_precision_follows_lightnings_plugin(kind: str, data_ranks: int, precision: str) -> None:
    run = tensor_run(kind, precision=precision, steps=10, losses_only=True)
    ranks = 2 * data_ranks
    records = run_ranks(ranks, train, run, ranks, ("MeshStrategy", TWO | {"dp_shard_size": data_ranks}))
    expected = torch.tensor(reference(run, data_ranks).losses).view(-1, data_ranks).mean(1)
    curve = torch.tensor([record.losses for record in records]).mean(0)
    assert expected[-1] < expected[0], "the reference does not learn: a flat curve would prove nothing"
    torch.testing.assert_close(curve, expected, rtol=0.02, atol=0)
