"""Every way of training a large model in parallel, as a drop-in strategy for an unmodified LightningModule.

Names load on first use, so that `import lightning_par` costs nothing; torch and Lightning come with the first name that
needs them. Where Lightning is imported already, the strategy names (`par_fsdp`, ...) are registered at once; otherwise
`import lightning_par.strategies` does it.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_par.checkpoint.sampler import ResumableSampler
    from lightning_par.errors import ParallelConfigError
    from lightning_par.layout import ParallelLayout
    from lightning_par.parallel.apply import Parallelized, parallelize
    from lightning_par.parallel.options import ParallelOptions
    from lightning_par.parallel.precision import MixedPrecision

__version__ = "0.1.0.dev0"
__all__ = [
    "MixedPrecision",
    "ParallelConfigError",
    "ParallelLayout",
    "ParallelOptions",
    "Parallelized",
    "ResumableSampler",
    "__version__",
    "parallelize",
]

_HOME = {
    "MixedPrecision": "lightning_par.parallel.precision",
    "ParallelConfigError": "lightning_par.errors",
    "ParallelLayout": "lightning_par.layout",
    "ParallelOptions": "lightning_par.parallel.options",
    "Parallelized": "lightning_par.parallel.apply",
    "ResumableSampler": "lightning_par.checkpoint.sampler",
    "parallelize": "lightning_par.parallel.apply",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lightning_par' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


if sys.modules.keys() & {"lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"}:
    importlib.import_module("lightning_par.strategies")
