"""Leaving out steps without asking the device: a fused optimizer reads the verdict there, the host one step later."""

from __future__ import annotations

import copy
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
        schedulers: Their states before the step.
        rates: The hyper-parameters of the optimizers before the step.
        at: Which step it is.
    """

    flags: Tensor
    numbers: Tensor
    schedulers: list[dict[str, Any]]
    rates: list[list[dict[str, Any]]]
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
    return Unread(flags, numbers, rewinding.capture_schedulers(trainer), rates, at)


def release(optimizers: Sequence[Any]) -> None:
    """Let optimizers step as usual; what `veto_on_device` has set must not be there when they are saved."""
    for optimizer in optimizers:
        _compat_steps.leave_step_to(optimizer, None)


def put_schedulers_back(trainer: pl.Trainer, unread: Unread) -> None:
    """Undo what schedulers have done for a step that was left out."""
    for config, state in zip(trainer.lr_scheduler_configs, unread.schedulers, strict=True):
        if config.interval != "step":
            continue
        config.scheduler.load_state_dict(copy.deepcopy(state))
        number = trainer.optimizers.index(config.scheduler.optimizer)
        for group, values in zip(trainer.optimizers[number].param_groups, unread.rates[number], strict=True):
            group.update(values)


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
