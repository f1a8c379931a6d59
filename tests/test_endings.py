"""How runs end: an exception on one rank or on all (trap 17 of Lightning), and the exit of the processes (trap 18)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from probe import listed, long_run
from torch import Tensor

import lightning_par
from lightning_par import checkpoint as ckpt
from lightning_par.parallel.shards import full_tensor
from lightning_par.strategies import DataParallelStrategy, FSDP2Strategy
from lightning_par.strategies import trainer as trainer_shell
from lightning_par.testing import _agent_store, _torchrun_environment, run_ranks
from models import NanoGPT, loader
from parity import make_trainer

BATCHES = [[2 * i, 2 * i + 1] for i in range(4)]


class Failing(NanoGPT):
    """Fails in the middle of the second step's forward, or of the first validation step, on some ranks."""

    def __init__(self, where: str, ranks: list[int]) -> None:
        super().__init__()
        self.where = where
        self.ranks = ranks

    def fail(self) -> None:
        if dist.get_rank() in self.ranks:
            raise ArithmeticError("the user's error")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.where == "training" and batch_idx == 1:
            self.model.norm.register_forward_pre_hook(lambda *_: self.fail())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.where == "validation":
            self.fail()


def callback(kind: str, folder: str) -> pl.Callback:
    if kind == "OnExceptionCheckpoint":
        return OnExceptionCheckpoint(folder)
    return ModelCheckpoint(folder, filename="on_exception", save_on_exception=True, every_n_train_steps=100)


def ending(kind: str, folder: str, where: str, ranks: list[int], options: dict[str, Any]) -> tuple[str, str, float]:
    """Type and text of the exception with which this rank ends, and the time it took to end."""
    strategy = (DataParallelStrategy if options.pop("replicate", False) else FSDP2Strategy)(**options)
    callbacks = [callback(kind, folder)]
    trainer = make_trainer(
        2, strategy, max_steps=4, val_check_interval=2, callbacks=callbacks, enable_checkpointing=True
    )
    start = time.monotonic()
    with mock.patch.object(trainer_shell, "EXCEPTION_AGREEMENT", timedelta(seconds=1 if len(ranks) == 1 else 20)):
        try:
            trainer.fit(Failing(where, ranks), loader(BATCHES), loader(BATCHES))
        except Exception as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", [])])
            return type(error).__name__, text, time.monotonic() - start
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("kind", "where", "options"),
    [
        ("OnExceptionCheckpoint", "training", {}),
        pytest.param("ModelCheckpoint", "validation", {"state_dict_type": "full"}, marks=pytest.mark.slow),
        long_run("ModelCheckpoint", "training", {"replicate": True}),
    ],
    ids=str,
)
def test_17_one_failing_rank_shows_its_error_and_nobody_hangs(
    tmp_path: Path, kind: str, where: str, options: dict[str, Any]
) -> None:
    # The other rank waits in a collective until its time is up, here 3 s.
    first, second = run_ranks(2, ending, kind, str(tmp_path), where, [1], options, timeout=6)
    assert second[0] == "ArithmeticError"
    assert "the user's error\nrank 1 saves no checkpoint on this exception" in second[1]
    assert first[0] != "ArithmeticError"
    assert "rank 0 saves no checkpoint on this exception" in first[1]
    assert second[2] < first[2] < 7
    assert not any(tmp_path.iterdir())


def restored(path: str) -> dict[str, Tensor]:
    module = NanoGPT()
    trainer = make_trainer(dist.get_world_size(), FSDP2Strategy())
    trainer.validate(module, loader(BATCHES), ckpt_path=path, verbose=False)
    return {name: full_tensor(p).detach() for name, p in module.named_parameters()}


def ended_together(kind: str, folder: str, where: str, options: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
    seen: dict[str, Tensor] = {}

    def remember(trainer: Any, module: Any, *_: Any) -> None:
        seen.update({name: full_tensor(p).detach().clone() for name, p in module.named_parameters()})

    with mock.patch.object(Failing, "on_train_batch_end", lambda self, *_: remember(None, self)):
        name, text, _ = ending(kind, folder, where, [0, 1], options)
    return f"{name}: {text}", seen


# Either callback saves in the same way: each meets every kind of file, and both places.
@pytest.mark.parametrize(
    ("kind", "options", "where"),
    listed(
        [
            ("OnExceptionCheckpoint", {}, "training"),
            ("OnExceptionCheckpoint", {"state_dict_type": "full"}, "validation"),
            ("OnExceptionCheckpoint", {"replicate": True}, "validation"),
            ("ModelCheckpoint", {}, "validation"),
            ("ModelCheckpoint", {"state_dict_type": "full"}, "training"),
            ("ModelCheckpoint", {"replicate": True}, "training"),
        ],
        ("OnExceptionCheckpoint", {}, "training"),
        ("ModelCheckpoint", {"replicate": True}, "training"),
    ),
    ids=str,
)
def test_17_ranks_that_fail_together_save_the_checkpoint(
    tmp_path: Path, kind: str, options: dict[str, Any], where: str
) -> None:
    (text, seen), (other, _) = run_ranks(2, ended_together, kind, str(tmp_path), where, options, timeout=30)
    assert text == other == "ArithmeticError: the user's error"
    (path,) = tmp_path.iterdir()
    assert ckpt.is_sharded_checkpoint(path) == ("state_dict_type" not in options)
    assert seen
    for name, value in run_ranks(2, restored, str(path))[0].items():
        assert torch.equal(value, seen[name]), name


SCRIPT = """
import sys
import torch
from models import NanoGPT, loader
from parity import make_trainer
import lightning_par.strategies
from lightning_par.parallel.shards import full_tensor

module = NanoGPT()
if "fail" in sys.argv:
    from lightning.pytorch.callbacks import OnExceptionCheckpoint
    from test_endings import Failing
    module = Failing("training", [1])
    trainer = make_trainer(2, "par_fsdp", max_steps=2, callbacks=OnExceptionCheckpoint("."), enable_checkpointing=True)
    trainer.fit(module, loader([[0, 1], [2, 3]]))
trainer = make_trainer(2, "par_fsdp", max_steps=2)
trainer.fit(module, loader([[0, 1], [2, 3]]))
weight = full_tensor(module.model.head.weight)
print(f"rank {trainer.global_rank} of {trainer.world_size}: {torch.distributed.get_backend()}", flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def start(script: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    folders = [str(Path(__file__).parent), str(Path(lightning_par.__file__).parents[1])]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", str(script), *arguments],
        cwd=script.parent,
        env=clean | environment | {"PYTHONPATH": os.pathsep.join(folders)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def output_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def finish(process: subprocess.Popen[str]) -> str:
    """What it printed, if it ended without an error and was not aborted on its way out."""
    out, err = output_of(process)
    assert process.returncode == 0, err
    assert "Abort" not in err
    assert "terminate called" not in err
    return out


@pytest.mark.slow
def test_18_processes_of_torchrun_exit_cleanly(script: Path) -> None:
    with _agent_store(init_group=False) as port:
        processes = [start(script, **_torchrun_environment(rank, 2, port)) for rank in range(2)]
        outputs = [finish(process) for process in processes]
    assert [f"rank {rank} of 2: gloo\n" == output for rank, output in enumerate(outputs)] == [True, True]


@pytest.mark.slow
def test_18_a_script_starts_its_second_process_and_exits_cleanly(script: Path) -> None:
    assert sorted(finish(start(script)).splitlines()) == ["rank 0 of 2: gloo", "rank 1 of 2: gloo"]


@pytest.mark.slow
def test_17_a_script_ends_with_the_error_of_its_failing_rank(script: Path) -> None:
    process = start(script, "fail")
    _, err = output_of(process)
    assert process.returncode != 0
    assert "ArithmeticError: the user's error\n[rank1]: rank 1 saves no checkpoint" in err
    assert [path.name for path in script.parent.iterdir()] == [script.name]
