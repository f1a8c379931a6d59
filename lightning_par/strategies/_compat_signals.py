"""Private Lightning APIs about signals; `tests/test_compat.py` tells what breaks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_par.resilience.control import StepControl

_log = logging.getLogger(__name__)
_BROADCAST = "_broadcast_sigterm_tensor"
_TOLD = "sigterm"


def without_signal_handlers(trainer: Any) -> Callable[[], None]:
    """Keep Lightning from handling SIGTERM and SLURM's signals in the next run of a Trainer; on all ranks.

    Its handler of SIGTERM waits inside for a collective, and that of SLURM saves there (`_SignalConnector`, 2.6). The
    broadcast before each batch that tells of the former goes with it (`_TrainingEpochLoop`, 2.6).

    Returns:
        Lets it do so again.
    """
    left_out = (
        (trainer._signal_connector, "register_signal_handlers"),
        (trainer.fit_loop.epoch_loop, _BROADCAST),
    )

    def undo() -> None:
        for owner, name in left_out:
            owner.__dict__.pop(name, None)

    for owner, name in left_out:
        setattr(owner, name, lambda: None)
    return undo


def end_together(trainer: Any, control: StepControl) -> Callable[[], None]:
    """After SIGTERM on any rank let all of them leave the next fit before the same batch; on all ranks.

    Lightning's handler waits inside for a collective, which meets another one of the ranks that are in a step, and the
    signalled rank leaves by itself. Each batch begins with a broadcast that tells of the signal and takes every error
    for no signal, so a rank goes on where another is gone (`_SignalConnector`, `_TrainingEpochLoop`, 2.6). Here the
    handler only notes the signal. The note travels in the exchange of a step; before a batch that follows none it has
    a collective of its own.

    Args:
        trainer: About to fit, on several ranks; one whose handlers were left out keeps it so.
        control: Of the fit.

    Returns:
        Lets Lightning do so again.
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    if trainer.world_size == 1 or _BROADCAST in vars(loop) or not hasattr(loop, _BROADCAST):
        return lambda: None
    told, exchanges = False, control.exchanges

    def note(number: int, frame: Any) -> None:
        nonlocal told
        first, told = not told, True
        _log.info("rank %d was told to end by signal %d", trainer.global_rank, number)
        launcher = trainer.strategy.launcher
        if first and launcher is not None:
            launcher.kill(number)

    def end_if_told() -> None:
        nonlocal exchanges
        before, exchanges = exchanges, control.exchanges
        if control.any(told) if exchanges == before else control.take(_TOLD):
            # What else looks at it does so on each rank by itself.
            connector.received_sigterm = True
            trainer.strategy.barrier("told to end")
            raise SIGTERMException

    connector._sigterm_notifier_fn = note
    setattr(loop, _BROADCAST, end_if_told)
    no_more_note = control.add(_TOLD, lambda: int(told))

    def undo() -> None:
        no_more_note()
        connector.__dict__.pop("_sigterm_notifier_fn", None)
        loop.__dict__.pop(_BROADCAST, None)

    return undo
