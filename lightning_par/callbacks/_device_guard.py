"""Leaving out steps without asking the device: a fused optimizer reads the verdict there, the host one step later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor
from torch.optim import Optimizer

from lightning_par.callbacks._guarding import At
from lightning_par.errors import Problem, Problems
from lightning_par.parallel.gradients import all_reduce_scalars
from lightning_par.resilience.guard import Reading, read_on_device
from lightning_par.strategies import _compat_steps, rewinding


@dataclass
class Unread:
    """The verdict on a step that the host has not read yet.

    Attributes:
        flags: Whether a loss, the gradients, and parameters or optimizer state were not finite on any rank.
        numbers: What this rank saw; see `read_on_device`.
        schedulers: The states of the schedulers before the step.
        rates: The hyper-parameters of the optimizers before the step.
        new: Parameters of which the optimizer has had no state before the step.
        at: Which step it is.
    """

    flags: Tensor
    numbers: Tensor
    schedulers: dict[int, dict[str, Any]]
    rates: list[list[dict[str, Any]]]
    new: list[Tensor]
    at: At

    def reading(self) -> Reading:
        """What this rank saw."""
        norm, largest, *losses = self.numbers.tolist()
        return Reading(tuple(losses), norm, not math.isfinite(largest))


@torch.no_grad()
def veto_on_device(
    trainer: pl.Trainer, optimizer: Optimizer, losses: Sequence[Tensor], checked: Sequence[Tensor], at: At
) -> Unread:
    """Let a fused optimizer leave out its step where something is not finite on any rank; collective, but no wait.

    Args:
        trainer: Runs the fit.
        optimizer: About to step; `release` has to be called afterwards.
        losses: Of the window.
        checked: Parameters and optimizer state to be looked at.
        at: Which step it is.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    numbers = read_on_device(losses, gradients, checked)
    bad = (~numbers.isfinite()).float()
    flags = torch.stack([bad[2:].sum().clamp(max=1.0), bad[0], bad[1]])
    if dist.is_initialized():
        world = dist.group.WORLD
        assert world is not None
        flags = all_reduce_scalars(flags, dist.ReduceOp.MAX, world)
    _compat_steps.leave_step_to(optimizer, flags.amax())
    rates = rewinding.hyper_parameters(trainer)
    new = [p for group in optimizer.param_groups for p in group["params"] if not optimizer.state.get(p)]
    return Unread(flags, numbers, rewinding.capture_schedulers(trainer), rates, new, at)


def release(optimizers: Sequence[Any]) -> None:
    """Let optimizers step as usual; what `veto_on_device` has set must not be there when they are saved."""
    for optimizer in optimizers:
        _compat_steps.leave_step_to(optimizer, None)


def undo_step(trainer: pl.Trainer, unread: Unread) -> None:
    """Undo what the schedulers and the host's part of the optimizer have done for a step that was left out."""
    for param in unread.new:
        # The device has left it as it was made: SGD's momentum with whatever was in the memory.
        trainer.optimizers[0].state.pop(param, None)
    for config in trainer.lr_scheduler_configs:
        state = unread.schedulers.get(id(config.scheduler))
        if config.interval == "step" and state is not None:
            rewinding.load_scheduler(trainer, config.scheduler, state)
            rewinding.set_rates(trainer, config.scheduler.optimizer, unread.rates)


def mode_problems(mode: str, spikes: bool, restore_buffers: bool, data: str) -> list[Problem]:
    """Which options a mode does not look after."""
    problems = Problems()
    if mode == "sync":
        return []
    if mode != "device":
        problems.add(f"NaNRewind: mode is {mode!r}; it is 'sync' or 'device'", "mode='sync'")
    else:
        for name, is_on in (("spikes", spikes), ("restore_buffers", restore_buffers)):
            if is_on:
                problems.add(f"NaNRewind: mode is 'device', in which there are no {name}", f"{name}=False")
        if data == "replay":
            problems.add("NaNRewind: mode is 'device', in which data cannot be 'replay'", "data='skip_past'")
    return list(problems)


def device_problems(trainer: pl.Trainer, module: pl.LightningModule) -> list[Problem]:
    """What of a fit cannot be put right one step later."""
    problems, callbacks = Problems(), list(trainer.callbacks)  # type: ignore[attr-defined]
    for optimizer in trainer.optimizers:
        fused = any(group.get("fused") for group in optimizer.param_groups)
        # Adagrad of torch 2.11 is fused and reads no verdict.
        if fused and not _compat_steps.takes_out_scale(optimizer):
            problems.add(
                f"NaNRewind: mode is 'device', and fused {type(optimizer).__name__} of torch {torch.__version__} "
                "cannot leave out a step by itself",
                "mode='sync'",
            )
        elif not fused:
            problems.add(
                f"NaNRewind: mode is 'device', and {type(optimizer).__name__} is not fused: only fused optimizers of "
                "torch can leave out a step by themselves",
                "fused=True in the optimizer, or mode='sync'",
                "mode: sync",
            )
        if _compat_steps.has_step_hooks(optimizer):
            problems.add(
                f"NaNRewind: mode is 'device', and {type(optimizer).__name__} has hooks of steps, which would run "
                "before it is known whether the step was left out",
                "mode='sync'",
            )
    if not module.automatic_optimization:
        problems.add("NaNRewind: mode is 'device', and the module optimises manually", "mode='sync'")
    if rewinding.scaler_of(trainer) is not None:
        problems.add("NaNRewind: mode is 'device', and an fp16 scaler decides by itself", "mode='sync'")
    for callback in callbacks:
        if isinstance(callback, WeightAveraging):
            problems.add(
                f"NaNRewind: mode is 'device', and {type(callback).__name__} would average a step before it is known "
                "whether it was left out",
                "mode='sync'",
            )
    return list(problems)
