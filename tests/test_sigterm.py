"""SIGTERM without `PreemptionGuard`: all ranks leave the fit before the same batch, and no rank hangs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException
from probe import Probe, numbers

from lightning_par import strategies
from lightning_par.callbacks import CommittedCheckpoint, NaNRewind
from lightning_par.resilience.control import StepControl
from lightning_par.testing import run_ranks
from parity import make_trainer

STEP = 2


class Told(Probe):
    """Hears SIGTERM on some ranks in the third call of a hook."""

    def __init__(self, hook: str, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.calls = 0
        original = getattr(self, hook)

        def tell(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == STEP + 1 and self.trainer.global_rank in ranks:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(*args, **kwargs)

        setattr(self, hook, tell)


def ends(hook: str, ranks: tuple[int, ...], kind: str, folder: str, callbacks: str) -> tuple[str, int, int, bool]:
    """How a fit ends, after which step, how many collectives it had for signals alone, and what it leaves."""
    chosen: dict[str, list[Any]] = {
        "": [],
        "NaNRewind": [NaNRewind()],
        "CommittedCheckpoint": [CommittedCheckpoint(folder, every_n_steps=1, asynchronous=False)],
    }
    strategy: Any = getattr(strategies, kind)()
    trainer = make_trainer(
        2, strategy, max_steps=6, callbacks=chosen[callbacks], enable_checkpointing=callbacks == "CommittedCheckpoint"
    )
    handler, how, alone = signal.getsignal(signal.SIGTERM), "", 0
    anybody = StepControl.any

    def count(control: StepControl, mine: bool) -> bool:
        nonlocal alone
        alone += 1
        return anybody(control, mine)

    with mock.patch.object(StepControl, "any", count):
        try:
            trainer.fit(Told(hook, ranks), numbers(40))
        except SIGTERMException as error:
            how = type(error).__name__
    left = "_sigterm_notifier_fn" in vars(trainer._signal_connector) or signal.getsignal(signal.SIGTERM) != handler
    return how, trainer.global_step, alone, left


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)], ids=str)
def test_all_ranks_leave_before_the_same_batch(ranks: tuple[int, ...], tmp_path: Path) -> None:
    """Before the handler waited for a collective, in which it met those of the step."""
    told = run_ranks(2, ends, "training_step", ranks, "FSDP2Strategy", str(tmp_path), "")
    assert told == [("SIGTERMException", STEP + 1, STEP + 2, False)] * 2


@pytest.mark.parametrize("kind", ["DataParallelStrategy", "FSDP2Strategy"])
@pytest.mark.parametrize(("hook", "steps"), [("on_after_backward", 1), ("on_train_batch_end", 2)])
def test_the_exchange_of_a_step_tells_of_it(hook: str, steps: int, kind: str, tmp_path: Path) -> None:
    """Only the first batch follows no step, and one after whose exchange the signal came is followed by another."""
    told = run_ranks(2, ends, hook, (1,), kind, str(tmp_path), "NaNRewind")
    assert told == [("SIGTERMException", STEP + steps, 1, False)] * 2


def test_a_checkpoint_is_there_of_the_last_step(tmp_path: Path) -> None:
    told = run_ranks(2, ends, "on_after_backward", (0,), "FSDP2Strategy", str(tmp_path), "CommittedCheckpoint")
    assert [one[:2] for one in told] == [("SIGTERMException", STEP + 1)] * 2
    assert (tmp_path / "step-00000003").is_dir()


def test_one_process_is_left_to_lightning(tmp_path: Path) -> None:
    strategy = strategies.DataParallelStrategy()
    trainer = make_trainer(1, strategy, max_steps=6)
    with pytest.raises(SIGTERMException):
        trainer.fit(Told("training_step", (0,)), numbers(20))
    assert trainer.global_step == STEP + 1
