"""Model-state bytes of a rank, counted from live tensors, follow the formula of each stage within 5 %."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from probe import listed

from lightning_par.parallel.accounting import PHASES, Phase, model_state
from lightning_par.parallel.memory import live_tensor_bytes, model_state_bytes
from lightning_par.parallel.precision import resolve_precision
from lightning_par.testing import run_ranks
from models import NanoGPT, loader
from parity import BATCH, build_strategy, make_trainer

WIDTH, LAYERS = 64, 6
STAGES: dict[str, tuple[int, tuple[str, dict[str, Any]]]] = {
    "ddp": (0, ("DataParallelStrategy", {})),
    "zero1": (1, ("ZeROStrategy", {"stage": 1})),
    "zero2": (2, ("ZeROStrategy", {"stage": 2})),
    "zero3": (3, ("FSDP2Strategy", {})),
}


class ByteCounter(pl.Callback):
    """Counts at the three moments of each accumulation step."""

    def __init__(self) -> None:
        self.before = live_tensor_bytes()
        self.seen: list[tuple[int, Phase, dict[str, int], int]] = []

    def _count(self, trainer: Any, module: Any, phase: Phase) -> None:
        measured = model_state_bytes(module, trainer.optimizers)
        self.seen.append((trainer.fit_loop.batch_idx, phase, measured, live_tensor_bytes() - self.before))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._count(trainer, pl_module, "end of forward")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._count(trainer, pl_module, "end of backward")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._count(trainer, pl_module, "after step")


def count(ranks: int, spec: tuple[str, dict[str, Any]], accumulate: int, precision: str) -> Any:
    counter = ByteCounter()
    torch.manual_seed(0)
    module = NanoGPT(WIDTH, LAYERS)
    numel = sum(p.numel() for p in module.parameters())
    rank = torch.distributed.get_rank()
    batches = [[(b * ranks + rank) * BATCH + j for j in range(BATCH)] for b in range(3 * accumulate)]
    trainer = make_trainer(
        ranks,
        build_strategy(spec, "trainer"),
        max_steps=3,
        accumulate_grad_batches=accumulate,
        precision=precision,
        callbacks=[counter],
    )
    trainer.fit(module, loader(batches))
    handle = trainer.strategy.parallelized
    blocks = sum(p.numel() for name in handle.plan.names for p in module.get_submodule(name).parameters())
    norms = sum(
        p.numel()
        for name in handle.plan.names
        for m in module.get_submodule(name).modules()
        if isinstance(m, torch.nn.LayerNorm)
        for p in m.parameters()
    )
    return numel, numel - blocks + (norms if precision == "bf16-mixed" else 0), counter.seen


# A precision changes the bytes of a number, a window how many of them there are.
@pytest.mark.parametrize(
    ("precision", "stage", "accumulate"),
    listed(
        [
            *(("bf16-mixed", stage, 2) for stage in STAGES),
            *(("32-true", stage, 1) for stage in STAGES),
            ("bf16-mixed", "zero3", 1),
            ("32-true", "zero3", 2),
        ],
        ("bf16-mixed", "ddp", 2),
        ("bf16-mixed", "zero3", 2),
    ),
)
def test_bytes_follow_the_formula(precision: str, stage: str, accumulate: int) -> None:
    zero_stage, spec = STAGES[stage]
    ranks = 2
    numel, gathered, seen = run_ranks(ranks, count, ranks, spec, accumulate, precision)[0]
    policy = resolve_precision(precision)
    checked = set()
    # The first window creates the optimizer state; the second is in the steady state.
    for batch, phase, measured, live in seen:
        if not accumulate <= batch < 2 * accumulate:
            continue
        first, last = batch % accumulate == 0, batch % accumulate == accumulate - 1
        expected = model_state(
            numel,
            ranks,
            policy,
            phase,
            zero_stage=zero_stage,
            first=first,
            last=last,
            gathered=gathered,
        )
        total = sum(measured.values())
        assert total == pytest.approx(expected.total, rel=0.05), f"batch {batch}, {phase}: {measured} and {expected}"
        # Beside the model's state Python sees only the batch and the loss; before backward also some activations.
        assert total <= live
        # A thread of gloo may let go of the last bucket of gradients a little after backward.
        bucket = 4 * numel if stage == "ddp" else 0
        assert phase == "end of forward" or live <= total * 1.01 + bucket
        checked.add((first, last, phase))
    assert len(checked) == 2 * accumulate + 1
    assert {phase for _, _, phase in checked} == set(PHASES)
