"""Lightning's `WeightAveraging` callbacks over a module of any layout: the average is laid out as the module is."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_par import checkpoint as ckpt
from lightning_par.checkpoint.stages import on_all_stages
from lightning_par.errors import Problems
from lightning_par.parallel import apply
from lightning_par.parallel.optimizers import step_on_shards
from lightning_par.parallel.precision import resolve_precision
from lightning_par.parallel.stages import stages_of
from lightning_par.strategies import _compat

# Keys under which the callback puts the weights that go on, and its counter.
_CURRENT = "current_model_state"
_COUNTS = "averaging_state"


def refuse(module: pl.LightningModule, *, divided: bool) -> None:
    """Refuse callbacks that average the weights in a way that cannot work, before they copy the module.

    Args:
        module: Its trainer has the callbacks.
        divided: Whether a rank will have a part of the parameters: shards, or those of a stage.

    Raises:
        ParallelConfigError: Naming the callbacks.
    """
    trainer: Any = module.trainer
    names = [type(c).__name__ for c in trainer.callbacks if isinstance(c, WeightAveraging)]
    problems = Problems()
    for callback in trainer.callbacks:
        if isinstance(callback, StochasticWeightAveraging) and divided:
            problems.add(
                f"{type(callback).__name__} copies the module before it is divided, and averages its whole parameters "
                "with the part of a rank",
                "WeightAveraging(), which averages that part, or strategy='par_ddp'",
            )
    if len(names) > 1:
        problems.add(
            f"{' and '.join(names)} would each put its average in the place of the weights, in validation and in "
            "checkpoints",
            f"keep one of them, such as {names[0]}",
        )
    if names and trainer.state.fn == TrainerFn.FITTING:
        handle = apply.parallelized(module)
        if handle is not None and _is_divided(handle):
            problems.add(
                f"{names[0]} copies the module when a fit begins, and an earlier run has divided it already",
                "build the module anew, and load its checkpoint",
            )
        if any(p.is_meta for p in module.parameters()):
            problems.add(
                f"{names[0]} copies the module when a fit begins, and its parameters have no values yet",
                "build the module without empty_init, or in configure_model",
            )
    problems.raise_if_any()


def _is_divided(handle: apply.Parallelized) -> bool:
    return handle.holds_shards or handle.pipeline is not None


def follow(trainer: pl.Trainer, handle: apply.Parallelized) -> Average | None:
    """Lay out the average that a callback of this fit has made of the module, as the module is; None without one."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging) and trainer.state.fn == TrainerFn.FITTING:
            return Average(callback, handle)
    return None


class Average:
    """The averaged model of a callback, updated, swapped, saved and restored as shards."""

    def __init__(self, callback: WeightAveraging, handle: apply.Parallelized) -> None:
        self._handle = handle
        self._model = _compat.averaged_model(callback)
        if _is_divided(handle):
            # It runs no step, and keeps the dtype in which it was copied.
            options = replace(handle.options, compile=False, activation_checkpointing=None)
            device = next((p.device for p in handle.module.parameters()), torch.device("cpu"))
            policy = resolve_precision("32-true")
            # One rank to shard over is still FSDP, which a size of 1 would not ask for.
            layout = replace(handle.layout, dp_shard_size=-1) if handle.data.sharded else handle.layout
            apply.parallelize(
                self._module,
                layout,
                policy,
                options,
                mesh=handle.mesh,
                device=device,
                tensor_plan=handle.tensor_plan,
                pipeline_plan=handle.pipeline_plan,
            )
        update = type(self._model).update_parameters
        self._model.update_parameters = lambda model: self._between_steps(update, self._model, model)
        _compat.wrap_moves_of_average(callback, self._move)
        callback.on_load_checkpoint = self._on_load_checkpoint  # type: ignore[method-assign]

    @property
    def _module(self) -> nn.Module:
        module: nn.Module = self._model.module
        return module

    def prepare_checkpoint(self, checkpoint: dict[str, Any], *, full: bool) -> dict[str, Tensor]:
        """Make what the callback has put into a checkpoint savable; collective.

        Returns:
            Tensors for `save_sharded` to store beside the model.
        """
        if _COUNTS not in checkpoint:
            return {}
        if full:
            checkpoint["state_dict"] = ckpt.full_model_state(self._module)
            return {}
        checkpoint["state_dict"] = ckpt.model_state(self._module)
        current = checkpoint[_CURRENT]
        beside = {name: value for name, value in current.items() if isinstance(value, Tensor)}
        plain = {name: value for name, value in current.items() if name not in beside}
        stages = on_all_stages(stages_of(self._module), lambda: plain)
        checkpoint[_CURRENT] = {name: value for one in stages for name, value in one.items()}
        return beside

    def restore(self, path: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
        """After a sharded checkpoint was loaded into the module: take the average from there, then load the weights."""
        state = ckpt.stage_state(self._handle.module)
        self._module.load_state_dict(state, strict=False)
        if _COUNTS in meta:
            current = {name: value for name, value in state.items() if isinstance(value, Tensor)}
            ckpt.load_beside(path, current)
            self._handle.module.load_state_dict({**current, **meta[_CURRENT]}, strict=False)
            self._model.load_state_dict(meta[_COUNTS], strict=False)

    def _on_load_checkpoint(self, trainer: pl.Trainer, pl_module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
        # Of a sharded checkpoint `restore` has taken everything.
        if trainer.state.fn != TrainerFn.FITTING or "state_dict" not in checkpoint:
            return
        ckpt.load_full_model_state(self._module, checkpoint["state_dict"])
        if _COUNTS in checkpoint:
            ckpt.load_full_model_state(pl_module, checkpoint[_CURRENT])
            self._model.load_state_dict(checkpoint[_COUNTS], strict=False)

    def _move(self, move: Callable[..., None], *args: Any) -> None:
        self._between_steps(move, *args)
        # The ranks' running statistics are averaged apart, and evaluated by together.
        self._handle.data.sync_buffers()

    def _between_steps(self, action: Callable[..., None], *args: Any) -> None:
        self._handle.data.reshard()
        with torch.no_grad(), step_on_shards(self._handle.holds_shards):
            action(*args)
