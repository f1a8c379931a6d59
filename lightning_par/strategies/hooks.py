"""Hooks of Lightning in which ranks would part, or would see other parameters than between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_par.errors import Problems


def decide_alike(module: pl.LightningModule, gather: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """Let the schedulers of a module see one metric on all ranks: the mean where the ranks have different ones.

    Lightning hands each rank its own value of what is logged without `sync_dist`, by which the rates, and then the
    parameters, would part.

    Args:
        module: Its `lr_scheduler_step` is replaced.
        gather: Stacks a tensor of all data ranks.

    Returns:
        A function that undoes it.
    """
    step = module.lr_scheduler_step

    def step_alike(scheduler: Any, metric: Any) -> None:
        if metric is not None:
            values = gather(torch.as_tensor(metric, device=module.device).detach())
            metric = metric if bool((values == values[0]).all()) else values.double().mean()
        step(scheduler, metric)

    def undo() -> None:
        del module.__dict__["lr_scheduler_step"]

    module.lr_scheduler_step = step_alike  # type: ignore[method-assign]
    return undo


def look_at_parameters_between_steps(trainer: Any) -> bool:
    """Whether a user's own hook runs after each batch, and may read or change parameters there (an average of them)."""
    callbacks = [c for c in trainer.callbacks if not type(c).__module__.startswith(("lightning.", "lightning_par."))]
    return is_overridden("on_train_batch_end", trainer.lightning_module) or any(
        is_overridden("on_train_batch_end", callback, pl.Callback) for callback in callbacks
    )


def refuse_manual_optimization(module: pl.LightningModule) -> None:
    """Refuse what a pipeline cannot train.

    Raises:
        ParallelConfigError: If the module optimises manually.
    """
    problems = Problems()
    if not module.automatic_optimization:
        problems.add(
            f"{type(module).__name__} optimises manually, and a pipeline runs forward and backward of its stages "
            "itself, before training_step returns",
            "self.automatic_optimization = True, or pp_size=1",
            "pp_size: 1",
        )
    problems.raise_if_any()


def refuse_lbfgs(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that run a step several times.

    Raises:
        ParallelConfigError: For LBFGS.
    """
    problems = Problems()
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        problems.add(
            "LBFGS looks at the gradient of all parameters as one vector, and each stage of a pipeline has its own",
            "another optimizer, or pp_size=1",
            "pp_size: 1",
        )
    problems.raise_if_any()
