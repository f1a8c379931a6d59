"""Checkpoints of parallel models: sharded directories that any layout reads, and single files of full values."""

from lightning_par.checkpoint.errors import CheckpointError
from lightning_par.checkpoint.full import (
    full_model_state,
    full_optimizer_state,
    load_full_model_state,
    load_full_optimizer_state,
)
from lightning_par.checkpoint.sharded import (
    LoadedMeta,
    is_sharded_checkpoint,
    load_beside,
    load_sharded,
    read_meta,
    remove_checkpoint,
    save_sharded,
)
from lightning_par.checkpoint.state import load_optimizer_state, model_state, optimizer_state, stage_state

__all__ = [
    "CheckpointError",
    "LoadedMeta",
    "full_model_state",
    "full_optimizer_state",
    "is_sharded_checkpoint",
    "load_beside",
    "load_full_model_state",
    "load_full_optimizer_state",
    "load_optimizer_state",
    "load_sharded",
    "model_state",
    "optimizer_state",
    "read_meta",
    "remove_checkpoint",
    "save_sharded",
    "stage_state",
]
