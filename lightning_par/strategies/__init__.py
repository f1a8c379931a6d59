"""Strategies for `lightning.pytorch.Trainer`; the same names for Fabric are in `lightning_par.strategies.fabric`.

Importing this package registers the names `par_ddp`, `par_zero1`, `par_zero2`, `par_zero3`, `par_fsdp`, `par_hsdp` and
`par_tp` for `Trainer(strategy="...")` and `Fabric(strategy="...")`.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_par.strategies import _compat, fabric, foreign
from lightning_par.strategies.presets import (
    DataParallelDefaults,
    FSDP2Defaults,
    HSDPDefaults,
    PipelineParallelDefaults,
    TensorParallelDefaults,
    ZeRODefaults,
)
from lightning_par.strategies.trainer import MeshStrategy

__all__ = [
    "DataParallelStrategy",
    "FSDP2Strategy",
    "HSDPStrategy",
    "MeshStrategy",
    "PipelineParallelStrategy",
    "TensorParallelStrategy",
    "ZeROStrategy",
    "register",
]


class DataParallelStrategy(DataParallelDefaults, MeshStrategy):
    __doc__ = DataParallelDefaults.__doc__


class ZeROStrategy(ZeRODefaults, MeshStrategy):
    __doc__ = ZeRODefaults.__doc__


class FSDP2Strategy(FSDP2Defaults, MeshStrategy):
    __doc__ = FSDP2Defaults.__doc__


class HSDPStrategy(HSDPDefaults, MeshStrategy):
    __doc__ = HSDPDefaults.__doc__


class PipelineParallelStrategy(PipelineParallelDefaults, MeshStrategy):
    __doc__ = PipelineParallelDefaults.__doc__


class TensorParallelStrategy(TensorParallelDefaults, MeshStrategy):
    __doc__ = TensorParallelDefaults.__doc__


_PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "par_ddp": ("DataParallelStrategy", {}),
    "par_zero1": ("ZeROStrategy", {"stage": 1}),
    "par_zero2": ("ZeROStrategy", {"stage": 2}),
    "par_zero3": ("ZeROStrategy", {"stage": 3}),
    "par_fsdp": ("FSDP2Strategy", {}),
    "par_hsdp": ("HSDPStrategy", {}),
    "par_pp": ("PipelineParallelStrategy", {}),
    "par_tp": ("TensorParallelStrategy", {}),
}


def register() -> None:
    """Make the preset names known to both of Lightning's registries; calling it again changes nothing."""
    for_trainer, for_fabric = {}, {}
    for name, (class_name, options) in _PRESETS.items():
        trainer_class = globals()[class_name]
        description = (trainer_class.__doc__ or "").splitlines()[0]
        StrategyRegistry.register(name, trainer_class, description, override=True, **options)
        STRATEGY_REGISTRY.register(name, getattr(fabric, class_name), description, override=True, **options)
        for_trainer[name], for_fabric[name] = trainer_class, getattr(fabric, class_name)
    foreign.register(for_trainer, for_fabric)
    _compat.before_checking_the_module(lambda module: foreign.refuse([("module", module)]))


register()
