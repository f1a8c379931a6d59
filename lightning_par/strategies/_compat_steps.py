"""Private APIs for leaving out steps and taking them back, of Lightning's loops and of optimizers.

`tests/test_compat.py` tells what breaks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

State = dict[str, Any]


def step_counts(trainer: Any) -> State:
    """How many optimizer steps and steps of schedulers the Trainer has counted.

    Needs `optim_progress`, `optim_step_progress`, `scheduler_progress` and `_batches_that_stepped` of its loops (2.6).
    """
    loop = trainer.fit_loop.epoch_loop
    return {
        "automatic": loop.automatic_optimization.optim_progress.state_dict(),
        "manual": loop.manual_optimization.optim_step_progress.state_dict(),
        "schedulers": loop.scheduler_progress.state_dict(),
        "logged": loop._batches_that_stepped,
    }


def set_step_counts(trainer: Any, counts: State) -> None:
    """Restore what `step_counts` gave."""
    loop = trainer.fit_loop.epoch_loop
    loop.automatic_optimization.optim_progress.load_state_dict(counts["automatic"])
    loop.manual_optimization.optim_step_progress.load_state_dict(counts["manual"])
    loop.scheduler_progress.load_state_dict(counts["schedulers"])
    loop._batches_that_stepped = counts["logged"]


def saved_step_counts(checkpoint: State) -> State:
    """What `step_counts` gave when a checkpoint was saved (keys of the loops' state, 2.6)."""
    fit = checkpoint["loops"]["fit_loop"]
    return {
        "automatic": fit["epoch_loop.automatic_optimization.optim_progress"],
        "manual": fit["epoch_loop.manual_optimization.optim_step_progress"],
        "schedulers": fit["epoch_loop.scheduler_progress"],
        "logged": fit["epoch_loop.state_dict"]["_batches_that_stepped"],
    }


def go_back_to_batch(trainer: Any, batches: int) -> None:
    """Let the loop read on after that many batches of its epoch; called at the end of a batch.

    The loaders have been told where to go on. Needs the fit loop's `_data_fetcher`, its `fetched`, and
    `batch_progress` (2.6); the loop itself counts the batch that ends as completed afterwards.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    back = progress.current.processed - batches
    for counts in (progress.current, progress.total):
        for name in ("ready", "started", "processed", "completed"):
            setattr(counts, name, getattr(counts, name) - back)
    progress.is_last_batch = False
    fetcher = trainer.fit_loop._data_fetcher
    iter(fetcher)
    fetcher.fetched += batches


def takes_out_scale(optimizer: Any) -> bool:
    """Whether an optimizer takes the scale of a scaler out of gradients itself (`_step_supports_amp_scaling`, 1.12)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def has_step_hooks(optimizer: Any) -> bool:
    """Whether hooks run with each step of an optimizer (`_optimizer_step_pre_hooks` and `_post_hooks`, torch 2.0)."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def leave_step_to(optimizer: Any, found_inf: Tensor | None) -> None:
    """Let a fused optimizer change nothing if a tensor on its device is 1, without asking; None: step as usual.

    Fused kernels read `found_inf` of the optimizer (torch >= 2.0), as a scaler sets it.
    """
    if found_inf is not None:
        optimizer.found_inf, optimizer.grad_scale = found_inf, None
        return
    for name in ("found_inf", "grad_scale"):
        optimizer.__dict__.pop(name, None)
