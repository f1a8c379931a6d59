"""Lightning's precision plugins with what they lack: clipping over any mesh and a scaler for sharded gradients.

The Trainer never asks its strategy to clip; it asks the precision plugin. So the plugin it made from `precision=` is
replaced by the class of the same meaning below, and stays an instance of Lightning's own class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from lightning.fabric.plugins.precision import DoublePrecision as FabricDoublePrecision
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType

from lightning_par.errors import ParallelConfigError, Problem
from lightning_par.parallel.gradients import clip_grad_norm_, clip_grad_value_
from lightning_par.parallel.precision import ShardedGradScaler


class _GlobalClipping:
    """Clips by the true global norm over all meshes, or by value.

    Attributes:
        clip_norm: Clips parameters by a norm; a strategy whose ranks hold different parameters sets its own.
    """

    clip_norm: Callable[[list[Any], float], Any] = staticmethod(clip_grad_norm_)

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if clip_val <= 0:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            clip_grad_value_(parameters, clip_val)
        else:
            self.clip_norm(parameters, clip_val)


class ParallelPrecision(_GlobalClipping, Precision):
    """`32-true`, and the mixed forms without autocast."""


class ParallelMixedPrecision(_GlobalClipping, MixedPrecision):
    """`bf16-mixed` and `16-mixed` with autocast."""


class ParallelHalfPrecision(_GlobalClipping, HalfPrecision):
    """`bf16-true` and `16-true`."""


class ParallelDoublePrecision(_GlobalClipping, DoublePrecision):
    """`64-true`."""


class FabricDouble(FabricDoublePrecision):
    """`64-true` in Fabric: what a step method returns keeps its dtype, as in one process.

    Attributes:
        keep_next_output: Set by the module that Fabric calls when it runs a method in place of `forward`. Fabric casts
            the outputs of all that goes through `forward`; step methods do so only where a strategy wraps the module.
    """

    keep_next_output = False

    def convert_output(self, data: Any) -> Any:
        if self.keep_next_output:
            self.keep_next_output = False
            return data
        return super().convert_output(data)


# What Lightning makes from `precision=` -> what takes its place. Anything else has semantics of its own.
_SUPPORTED = {"32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"}


def trainer_plugin(plugin: Precision, device_type: str, autocast: bool) -> Precision:
    """Replace a Trainer's precision plugin by the one of the same meaning that works on sharded gradients.

    Raises:
        ParallelConfigError: If the plugin is none of Lightning's plain, half, double or mixed ones.
    """
    name = _supported_name(plugin, (Precision, HalfPrecision, DoublePrecision, MixedPrecision))
    if isinstance(plugin, _GlobalClipping):
        return plugin
    if name.endswith("-mixed"):
        if not autocast and name == "bf16-mixed":
            pure = ParallelPrecision()
            pure.precision = cast(Any, name)
            return pure
        scaler = _sharded_scaler(getattr(plugin, "scaler", None), device_type) if name == "16-mixed" else None
        return ParallelMixedPrecision(cast(Any, name), device_type, scaler)
    if name in ("bf16-true", "16-true"):
        return ParallelHalfPrecision(cast(Any, name))
    return ParallelDoublePrecision() if name == "64-true" else ParallelPrecision()


def fabric_plugin(plugin: FabricPrecision, device_type: str, autocast: bool) -> FabricPrecision:
    """The same for Fabric, which asks its strategy to clip; only the scaler and `autocast=False` need a change."""
    name = _supported_name(plugin, (FabricPrecision,))
    if name == "64-true":
        return FabricDouble()
    if not isinstance(plugin, FabricMixedPrecision):
        return plugin
    if not autocast and name == "bf16-mixed":
        pure = FabricPrecision()
        pure.precision = cast(Any, name)
        return pure
    scaler = _sharded_scaler(plugin.scaler, device_type) if name == "16-mixed" else None
    return FabricMixedPrecision(cast(Any, name), device_type, scaler)


def _sharded_scaler(scaler: torch.amp.GradScaler | None, device_type: str) -> ShardedGradScaler:
    if isinstance(scaler, ShardedGradScaler):
        return scaler
    sharded = ShardedGradScaler(device_type)
    if scaler is not None:
        sharded.load_state_dict(scaler.state_dict())
    return sharded


def _supported_name(plugin: Any, classes: tuple[type, ...]) -> str:
    name = str(getattr(plugin, "precision", ""))
    known = isinstance(plugin, classes) and name in _SUPPORTED
    # A subclass of the plain plugin (DeepSpeed, FSDP, bitsandbytes, TransformerEngine) brings semantics of its own.
    plain = type(plugin).__module__.rsplit(".", 1)[-1] in ("precision", "amp", "half", "double")
    if not (known and plain):
        raise ParallelConfigError(
            Problem(
                f"the precision plugin {type(plugin).__name__} (precision={name!r}) knows no sharded parameters",
                "precision='bf16-mixed'",
                "precision: bf16-mixed",
            )
        )
    return name
