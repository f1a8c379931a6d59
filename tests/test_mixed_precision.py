"""Mixed precision: the loss curve of Lightning's own plugin, and modules that need some of their numbers in fp32."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from probe import crossed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_par.parallel.shards import full_tensor
from lightning_par.strategies import DataParallelStrategy, FSDP2Strategy
from lightning_par.testing import run_ranks
from models import LENGTH, VOCABULARY, NanoGPT
from parity import Run, make_trainer, reference, train

FSDP = ("FSDP2Strategy", {})
DDP = ("DataParallelStrategy", {})


@pytest.mark.parametrize(
    ("model", "spec"),
    crossed(("nanogpt", "llama", "sensitive", "convnet"), (FSDP, DDP), quick=[("nanogpt", DDP), ("sensitive", FSDP)]),
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_loss_curve_follows_lightnings_plugin(model: str, spec: Any) -> None:
    run = Run(model=model, precision="bf16-mixed", steps=12, clip=1.0, losses_only=True)
    records = run_ranks(2, train, run, 2, spec)
    expected = torch.tensor(reference(run, 2).losses).view(-1, 2).mean(1)
    curve = torch.tensor([r.losses for r in records]).mean(0)
    assert expected[-1] < expected[0], "the reference does not learn: a flat curve would prove nothing"
    torch.testing.assert_close(curve, expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("spec", [FSDP, DDP], ids=["fsdp", "ddp"])
def test_fp16_follows_lightnings_plugin(spec: Any) -> None:
    run = Run(precision="16-mixed", steps=6, losses_only=True)
    records = run_ranks(2, train, run, 2, spec)
    expected = torch.tensor(reference(run, 2).losses).view(-1, 2).mean(1)
    torch.testing.assert_close(torch.tensor([r.losses for r in records]).mean(0), expected, rtol=0.02, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize(
    ("ranks", "spec"),
    [
        (2, DDP),
        (2, ("ZeROStrategy", {"stage": 1})),
        (2, ("ZeROStrategy", {"stage": 2})),
        (2, FSDP),
        (4, ("HSDPStrategy", {"dp_shard_size": 2})),
    ],
    ids=["ddp", "zero1", "zero2", "fsdp", "hsdp"],
)
def test_every_low_precision_under_every_layout(ranks: int, spec: Any, precision: str) -> None:
    run = Run(precision=precision, steps=6, losses_only=True)
    records = run_ranks(ranks, train, run, ranks, spec)
    expected = torch.tensor(reference(run, ranks).losses).view(-1, ranks).mean(1)
    torch.testing.assert_close(torch.tensor([r.losses for r in records]).mean(0), expected, rtol=0.02, atol=0)


class DtypeProbe(pl.LightningModule):
    """Notes the dtypes its block computes in and what the step sees."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
        self.register_buffer("table", torch.ones(8))
        self.seen: dict[str, str] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen["input"] = str(batch.dtype)
        h = batch
        for block in self.blocks:
            h = block(h)
        self.seen["computed"] = str(h.dtype)
        self.seen["buffer"] = str(self.table.dtype)
        self.seen["autocast"] = str(torch.is_autocast_enabled("cpu"))
        return h.float().pow(2).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        param = next(self.parameters())
        self.seen["stored"] = str(param.dtype)
        self.seen["gradient"] = str(param.grad.dtype)
        self.seen["sharded"] = str(isinstance(param, DTensor))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def probe_dtypes(ranks: int, precision: str, sharded: bool) -> dict[str, str]:
    module = DtypeProbe()
    strategy = FSDP2Strategy() if sharded else DataParallelStrategy()
    trainer = make_trainer(ranks, strategy, max_steps=1, precision=precision)
    trainer.fit(module, DataLoader(torch.ones(8, 8), batch_size=2))
    module.seen["saved"] = str(full_tensor(trainer.strategy.lightning_module_state_dict()["blocks.0.0.weight"]).dtype)
    return module.seen


EXPECTED = {
    # precision: (input, computed, buffer, autocast, stored, gradient, saved)
    "32-true": ("float32", "float32", "float32", "False", "float32", "float32", "float32"),
    "64-true": ("float64", "float64", "float64", "False", "float64", "float64", "float64"),
    "bf16-true": ("bfloat16", "bfloat16", "bfloat16", "False", "bfloat16", "bfloat16", "bfloat16"),
    "bf16-mixed": ("float32", "bfloat16", "float32", "True", "float32", "float32", "float32"),
    "16-mixed": ("float32", "float16", "float32", "True", "float32", "float32", "float32"),
}


@pytest.mark.parametrize(
    ("precision", "ranks", "strategy"),
    # Quick: each precision on one rank and on two, and under both strategies.
    crossed(
        EXPECTED,
        (1, 2),
        ("fsdp", "ddp"),
        quick=[(precision, *case) for precision in EXPECTED for case in ((1, "ddp"), (2, "fsdp"))],
    ),
)
def test_dtypes_are_the_same_on_one_rank_and_on_two(precision: str, ranks: int, strategy: str) -> None:
    sharded = strategy == "fsdp"
    keys = ("input", "computed", "buffer", "autocast", "stored", "gradient", "saved")
    want = {k: v if v in ("True", "False") else f"torch.{v}" for k, v in zip(keys, EXPECTED[precision], strict=True)}
    for seen in run_ranks(ranks, probe_dtypes, ranks, precision, sharded):
        assert seen.pop("sharded") == str(sharded)
        assert seen == want


def pure_policy(ranks: int) -> dict[str, str]:
    module = DtypeProbe()
    trainer = make_trainer(ranks, FSDP2Strategy(autocast=False), max_steps=1, precision="bf16-mixed")
    trainer.fit(module, DataLoader(torch.ones(8, 8), batch_size=2))
    return module.seen


def test_pure_policy_has_no_autocast() -> None:
    for seen in run_ranks(2, pure_policy, 2):
        assert seen["autocast"] == "False"
        assert seen["computed"] == "torch.bfloat16"
        assert seen["stored"] == seen["gradient"] == "torch.float32"


def overflow(ranks: int) -> tuple[float, bool]:
    """One rank's loss overflows in fp16: every rank must skip the step and halve the scale."""
    module = NanoGPT()
    rank = torch.distributed.get_rank()
    weights = {n: full_tensor(p).clone() for n, p in module.named_parameters()}

    def step(batch: Any, batch_idx: int) -> Tensor:
        return module.loss(batch) * (float("inf") if rank == 1 else 1.0)

    module.training_step = step  # type: ignore[method-assign]
    trainer = make_trainer(ranks, FSDP2Strategy(), max_steps=1, precision="16-mixed")
    data = torch.zeros(4, LENGTH, dtype=torch.long).remainder(VOCABULARY)
    trainer.fit(module, DataLoader([(row, row) for row in data], batch_size=2))
    same = all(torch.equal(weights[n], full_tensor(p)) for n, p in module.named_parameters())
    return trainer.precision_plugin.scaler.get_scale(), same


def test_overflow_on_one_rank_skips_the_step_on_all() -> None:
    torch.manual_seed(0)
    assert run_ranks(2, overflow, 2) == [(2.0**9, True)] * 2
