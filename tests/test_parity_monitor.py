"""Copies of parameters that are not the same any more: one flipped bit is found, rank and parameter are named (F13)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from probe import Probe, batches, long_run, trainer
from torch import Tensor

from lightning_par.callbacks import ParityMonitor
from lightning_par.errors import ParallelConfigError
from lightning_par.parallel.shards import to_local
from lightning_par.resilience.errors import ParityError
from lightning_par.resilience.events import read_events
from lightning_par.resilience.parity import Difference, ParityCheck
from lightning_par.testing import run_ranks
from models import NanoGPT, loader
from parity import build_strategy

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"dp_replicate_size": 2, "dp_shard_size": 1}),
    "ddp3": (3, {"dp_replicate_size": 3, "dp_shard_size": 1}),
    "zero1": (2, {"zero_stage": 1}),
    "zero2": (2, {"zero_stage": 2}),
    "fsdp": (2, {}),
    "hsdp": (4, {"dp_replicate_size": 2, "dp_shard_size": 2}),
    "tp": (2, {"dp_shard_size": 1, "tp_size": 2}),
    "tp x fsdp": (4, {"dp_shard_size": 2, "tp_size": 2}),
    "pp x ddp": (4, {"pp_size": 2, "pp_microbatches": 2, "dp_shard_size": 1, "dp_replicate_size": 2}),
}


class Flip(pl.Callback):
    """Flips the lowest bit of one element of a parameter after a step, on some ranks."""

    def __init__(self, step: int, name: str, *ranks: int) -> None:
        self.step, self.name, self.ranks = step, name, ranks

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == self.step and dist.get_rank() in self.ranks:
            flip(dict(pl_module.named_parameters())[self.name])


def flip(parameter: Tensor) -> None:
    words = to_local(parameter.detach()).view(-1).view(torch.int64)
    words[words.numel() // 2] ^= 1


def differences(layout: str, name: str, rank: int, folder: str) -> tuple[list[list[Difference]], list[str]]:
    """What was found after each of three steps, and the names of the parameters of this rank."""
    seen: list[list[Difference]] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            seen.append(monitor.found)

    monitor = ParityMonitor(every_n_steps=1)
    module = NanoGPT()
    strategy = build_strategy(("MeshStrategy", LAYOUTS[layout][1]), "trainer")
    callbacks = [Flip(2, name, rank), monitor, Watch()]
    samples = [[4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3] for i in range(3)]
    trainer(strategy, callbacks=callbacks, default_root_dir=folder, max_steps=3).fit(module, loader(samples))
    return seen, sorted(dict(module.named_parameters()))


NORM = "model.norm.weight"
CASES = {
    "ddp": (NORM, 1, (0, 1), ()),
    "ddp3": (NORM, 1, (1,), (0, 2)),
    # Between steps each rank has a shard of its own.
    "zero1": (NORM, 1, None, ()),
    "zero2": (NORM, 1, None, ()),
    "fsdp": (NORM, 1, None, ()),
    "hsdp": (NORM, 3, (1, 3), ()),
    "tp": (NORM, 1, (0, 1), ()),
    "tp x fsdp": (NORM, 2, (2, 3), ()),
    "pp x ddp": (NORM, 3, (2, 3), ()),
}


@pytest.mark.parametrize("layout", [long_run(name) if name not in ("ddp3", "hsdp") else name for name in CASES])
def test_F13_one_flipped_bit_is_found(tmp_path: Path, layout: str) -> None:
    name, rank, ranks, others = CASES[layout]
    for seen, names in run_ranks(LAYOUTS[layout][0], differences, layout, name, rank, str(tmp_path)):
        assert seen[0] == []
        if ranks is None:
            assert seen == [[], [], []]
            continue
        assert name in names or layout.startswith("pp")
        assert seen[1] == [Difference(name, ranks, others)]
        # No step undoes it.
        assert seen[1][0] in seen[2]
    events = [(e["kind"], e["step"], e["parameter"]) for e in read_events(tmp_path)]
    assert events[:1] == ([("parity", 2, name)] if ranks is not None else [])


def aborted(folder: str) -> str:
    callbacks = [Flip(2, "first.weight", 1), ParityMonitor(every_n_steps=2, action="abort")]
    with pytest.raises(ParityError) as error:
        trainer("par_ddp", callbacks=callbacks, default_root_dir=folder).fit(Probe(), batches(4))
    return str(error.value)


def test_F13_a_run_can_be_ended(tmp_path: Path) -> None:
    for told in run_ranks(2, aborted, str(tmp_path)):
        assert "at step 2" in told
        assert "first.weight: ranks 0, 1 differ, and no value is held by most of them" in told


def test_a_strategy_of_lightning_is_refused() -> None:
    with pytest.raises(ParallelConfigError, match='SingleDeviceStrategy\n    fix: strategy="par_ddp"'):
        trainer("auto", callbacks=[ParityMonitor()]).fit(Probe(), None)
    with pytest.raises(ParallelConfigError) as error:
        ParityMonitor(every_n_steps=0, action="copy")  # type: ignore[arg-type]
    assert len(error.value.problems) == 2


def raw() -> list[Difference]:
    module = Probe()
    if dist.get_rank() == 2:
        module.last.weight.data[0, 3] += 1e-3
        module.first.bias.data[0] = 7.0
    return ParityCheck().check(dict(module.named_parameters()))


def test_in_a_loop_of_ones_own() -> None:
    found = run_ranks(4, raw)
    assert found[0] == [Difference(name, (2,), (0, 1, 3)) for name in ("first.bias", "last.weight")]
    assert all(one == found[0] for one in found)
    assert str(found[0][0]) == "first.bias: rank 2 differs from ranks 0, 1, 3"
    assert ParityCheck().check({"alone": torch.ones(2)}) == []
