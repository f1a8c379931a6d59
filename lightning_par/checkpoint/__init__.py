"""Checkpoints of parallel models: sharded directories that any layout reads, and single files of full values."""

from lightning_par.checkpoint.about import about_model, pretrained_configs
from lightning_par.checkpoint.candidates import Candidate, candidates, explain_path, load_newest, newest_checkpoint
from lightning_par.checkpoint.commit import Facts
from lightning_par.checkpoint.describe import Description, ListedCheckpoint, TensorFacts, describe, list_checkpoints
from lightning_par.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatch,
    NoProgressError,
    NoValidCheckpointError,
    SupersededError,
)
from lightning_par.checkpoint.export import Converted, ExportError, convert
from lightning_par.checkpoint.full import (
    full_model_state,
    full_optimizer_state,
    load_full_model_state,
    load_full_optimizer_state,
)
from lightning_par.checkpoint.interval import best_interval
from lightning_par.checkpoint.manifest import Manifest, Verify, is_sharded_checkpoint, read_manifest, verify
from lightning_par.checkpoint.prepare import Content
from lightning_par.checkpoint.ranks import together
from lightning_par.checkpoint.reading import NoCheckpointError
from lightning_par.checkpoint.run_directory import Retention, RunDirectory
from lightning_par.checkpoint.sampler import ResumableSampler
from lightning_par.checkpoint.saver import GRACE, CheckpointSaver
from lightning_par.checkpoint.sharded import (
    LoadedMeta,
    content_of,
    load_beside,
    load_sharded,
    read_meta,
    remove_checkpoint,
    save_sharded,
)
from lightning_par.checkpoint.state import load_optimizer_state, model_state, optimizer_state, stage_state

__all__ = [
    "GRACE",
    "Candidate",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointSaver",
    "Content",
    "Converted",
    "Description",
    "ExportError",
    "Facts",
    "ListedCheckpoint",
    "LoadedMeta",
    "Manifest",
    "NoCheckpointError",
    "NoProgressError",
    "NoValidCheckpointError",
    "ResumableSampler",
    "Retention",
    "RunDirectory",
    "SupersededError",
    "TensorFacts",
    "Verify",
    "Verify",
    "about_model",
    "best_interval",
    "candidates",
    "content_of",
    "convert",
    "describe",
    "explain_path",
    "full_model_state",
    "full_optimizer_state",
    "is_sharded_checkpoint",
    "list_checkpoints",
    "load_beside",
    "load_full_model_state",
    "load_full_optimizer_state",
    "load_newest",
    "load_optimizer_state",
    "load_sharded",
    "model_state",
    "newest_checkpoint",
    "optimizer_state",
    "pretrained_configs",
    "read_manifest",
    "read_meta",
    "remove_checkpoint",
    "save_sharded",
    "stage_state",
    "together",
    "verify",
]
