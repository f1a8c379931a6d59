"""Private Lightning APIs about signals; `tests/test_compat.py` tells what breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_BROADCAST = "_broadcast_sigterm_tensor"


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


def fail_with_the_broadcast(trainer: Any) -> Callable[[], None]:
    """Let a batch begin with an error where another rank is gone (`_TrainingEpochLoop`, 2.6).

    Its broadcast that tells of SIGTERM takes every error for no signal: the rank goes on, and those to which it would
    have passed the broadcast on wait for it until the time of collectives is over.

    Returns:
        Lets errors pass again.
    """
    loop = trainer.fit_loop.epoch_loop
    if _BROADCAST in vars(loop) or not hasattr(loop, _BROADCAST):
        return lambda: None
    original = getattr(loop, _BROADCAST)

    def broadcast() -> None:
        told = torch.tensor([int(trainer.received_sigterm)], device=trainer.strategy.root_device)
        dist.broadcast(told, src=0)
        if told.item():
            original()

    setattr(loop, _BROADCAST, broadcast)
    return lambda: loop.__dict__.pop(_BROADCAST, None) and None
