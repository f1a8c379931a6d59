"""Bytes of model state per rank, by formula: what the README's table says and what a test measures.

ZeRO counts 16 bytes a parameter under mixed precision with Adam: 2 + 2 for the low-precision parameters and gradients
and 12 for fp32 master weights and two moments (Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1). Here it is 16
too, in another split: the fp32 shard is the master weight (4), gradients are reduced and stored in fp32 (4), the
moments take 8; the low-precision parameters (2) exist only while they are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_par.parallel.precision import PrecisionPolicy

Phase = Literal["end of forward", "end of backward", "after step"]
PHASES: tuple[Phase, ...] = ("end of forward", "end of backward", "after step")


@dataclass(frozen=True)
class ModelState:
    """Model-state bytes of one rank at one moment.

    Attributes:
        parameters: The parameters the optimizer owns: all of them, or this rank's shard.
        gathered: Unsharded copies for computation.
        gradients: What is stored of the gradients.
        optimizer: The two moments of Adam.
    """

    parameters: float
    gathered: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gathered + self.gradients + self.optimizer


def model_state(
    parameters: int,
    shards: int,
    policy: PrecisionPolicy,
    phase: Phase,
    *,
    zero_stage: int,
    last: bool = True,
    first: bool = True,
    gathered: int = 0,
    sync_every_batch: bool | None = None,
) -> ModelState:
    """Count model-state bytes under Adam.

    Args:
        parameters: P, the trainable parameters of the model.
        shards: N, the ranks they are sharded over.
        policy: Dtypes.
        phase: The moment in the step. Gradients live until `zero_grad`, which a Lightning Trainer calls between the
            next forward and its backward; so they are there after the step, and "end of forward" is after `zero_grad`.
        zero_stage: 0 for replicated parameters (DDP), 1, 2 or 3.
        last: Whether this is the last accumulation step of the window (where gradients are reduced).
        first: Whether it is the first (before whose backward there are no gradients).
        gathered: ZeRO-3: parameters that stay gathered between forward and backward, which are those beside the blocks
            (embedding, norm and head, the root); a block is gathered only while it computes.
        sync_every_batch: As the strategy's option; None for the default of the stage.

    Returns:
        Bytes of each part, on one rank.
    """
    if sync_every_batch is None:
        sync_every_batch = zero_stage >= 2
    storage = policy.storage.itemsize
    compute = (policy.param or policy.storage).itemsize
    reduce = (policy.reduce or policy.storage).itemsize
    share = parameters / (shards if zero_stage else 1)
    weights, moments = storage * share, 2 * storage * share

    if phase == "after step":
        return ModelState(weights, 0, storage * share, moments)
    unsharded_gradients = zero_stage > 0 and not sync_every_batch
    stored = reduce * parameters if unsharded_gradients else storage * share
    if phase == "end of forward":
        kept = 0 if zero_stage == 0 or shards == 1 else compute * (parameters if zero_stage < 3 else gathered)
        return ModelState(weights, kept, 0 if first else stored, moments)
    if last:
        return ModelState(weights, 0, storage * share, moments)
    kept = compute * parameters if zero_stage in (1, 2) and shards > 1 else 0
    return ModelState(weights, kept, stored, moments)


def human(size: float) -> str:
    """Write bytes as a person reads them, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
