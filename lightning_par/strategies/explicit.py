"""Stages of a pipeline that a module names itself: `configure_pipeline`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_par.errors import ParallelConfigError, Problem

HOOK = "configure_pipeline"


def explicit_stages(module: pl.LightningModule) -> tuple[list[str], Callable[[], None]] | None:
    """Let the step of a module go through the stages that its `configure_pipeline` returns.

    The hook returns modules and a loss: the first module is called with the batch, each other one with what the one
    before it returned (the elements of a tuple as arguments), and the loss with the last output and the batch. It may
    log. There may be more modules than stages; neighbours then share one.

    Args:
        module: Its `training_step` is replaced on the instance.

    Returns:
        The names of the modules, and a function that undoes it; None for a module without the hook.

    Raises:
        ParallelConfigError: If the hook returns something else.
    """
    hook = getattr(module, HOOK, None)
    if not callable(hook):
        return None
    names = {child: name for name, child in module.named_modules()}
    result = hook()
    stages, loss = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
    if not isinstance(stages, list | tuple | nn.ModuleList) or not callable(loss):
        raise _refused(f"returns {type(result).__name__}", "return [first, ..., last], loss_function")
    strange = [type(stage).__name__ for stage in stages if stage not in names]
    if strange or len(set(stages)) != len(stages):
        what = f"returns a {strange[0]} that is no submodule of it" if strange else "returns a module twice"
        raise _refused(what, "make each stage an attribute of the module, and return each once")

    def training_step(batch: Any, *indices: Any) -> Tensor:
        hidden = stages[0](batch)
        for stage in stages[1:]:
            hidden = stage(*hidden) if isinstance(hidden, tuple) else stage(hidden)
        found: Tensor = loss(hidden, batch)
        return found

    def undo() -> None:
        module.__dict__.pop("training_step", None)

    module.__dict__["training_step"] = training_step
    return [names[stage] for stage in stages], undo


def _refused(what: str, fix: str) -> ParallelConfigError:
    return ParallelConfigError(
        Problem(f"{HOOK} {what}; it returns a list of modules and a function of (output, batch)", fix)
    )
