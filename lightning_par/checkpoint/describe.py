"""What a checkpoint holds, without the model and without reading its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_par.checkpoint.candidates import candidates
from lightning_par.checkpoint.errors import CheckpointError
from lightning_par.checkpoint.manifest import Manifest, Verify, read_manifest
from lightning_par.checkpoint.manifest import verify as compare
from lightning_par.checkpoint.reading import StoredCheckpoint, StoredTensor, open_checkpoint
from lightning_par.checkpoint.storage import StrPath, storage_of


@dataclass(frozen=True)
class TensorFacts:
    """One tensor of a checkpoint.

    Attributes:
        dtype: Without ``torch.``.
        chunks: In how many parts it is stored.
        files: In how many files they are.
        tied_to: The first name of the same parameter, where this is another one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: int
    files: int
    numel: int
    bytes: int
    tied_to: str | None = None


@dataclass(frozen=True)
class Description:
    """One checkpoint; what cannot be known because it is not whole is None or empty.

    Attributes:
        problems: What is not valid; empty where nothing is.
        verified: How the files were compared with the manifest.
        manifest: What the checkpoint says about itself.
        epoch: As Lightning counts, from 0; None for other programs.
        model: Parameters and buffers.
        optimizers: The state of each optimizer.
        beside: Tensors that belong to neither, such as those of an average of the weights.
        notes: What could not be read though the checkpoint is valid.
    """

    path: str
    problems: tuple[str, ...]
    verified: Verify
    manifest: Manifest | None = None
    epoch: int | None = None
    model: tuple[TensorFacts, ...] = ()
    optimizers: tuple[tuple[TensorFacts, ...], ...] = ()
    beside: tuple[TensorFacts, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """The number of values in the model; those of tied parameters count once."""
        return sum(one.numel for one in self.model if one.tied_to is None)


@dataclass(frozen=True)
class ListedCheckpoint:
    """One of the checkpoints in a directory.

    Attributes:
        problems: What is not valid; empty where nothing is.
        manifest: None where it cannot be read.
        newest: Whether it is the one from which training would go on.
    """

    path: str
    problems: tuple[str, ...]
    manifest: Manifest | None
    newest: bool


def describe(path: StrPath, verify: Verify = "size") -> Description:
    """Say what a checkpoint directory holds; of its files the index of the tensors and ``meta.pt`` are read.

    Both are pickles: describe only what you trust.

    Args:
        path: The directory.
        verify: How its files are compared with the manifest; see `lightning_par.checkpoint.verify`.
    """
    _, directory = storage_of(path)
    problems = compare(path, verify)
    try:
        stored = open_checkpoint(path)
    except (CheckpointError, OSError) as error:
        return Description(directory, tuple(problems or [str(error)]), verify, _manifest(path))
    notes: tuple[str, ...] = ()
    epoch, tied = None, {}
    try:
        epoch, tied = stored.meta.get("epoch"), stored.about.get("tied", {})
    except CheckpointError as error:
        notes = (str(error),)
    return Description(
        directory,
        tuple(problems),
        verify,
        stored.manifest,
        epoch if isinstance(epoch, int) else None,
        _facts(stored.under("model."), tied),
        tuple(_facts(one) for one in _optimizers(stored)),
        _facts(stored.under("beside.")),
        notes,
    )


def list_checkpoints(root: StrPath, verify: Verify = "size") -> list[ListedCheckpoint]:
    """Say which checkpoints are directly in a directory, the newest first; see `describe` for the level."""
    found = [(one.path, one.manifest, tuple(compare(one.path, verify))) for one in candidates(root)]
    newest = next((path for path, _, problems in found if not problems), None)
    return [ListedCheckpoint(path, problems, manifest, path == newest) for path, manifest, problems in found]


def _manifest(path: StrPath) -> Manifest | None:
    try:
        return read_manifest(path)
    except (CheckpointError, OSError):
        return None


def _optimizers(stored: StoredCheckpoint) -> Iterable[Mapping[str, StoredTensor]]:
    i = 0
    while state := stored.under(f"optimizer.{i}.state."):
        yield state
        i += 1


def _facts(tensors: Mapping[str, StoredTensor], tied: Mapping[str, str] | None = None) -> tuple[TensorFacts, ...]:
    return tuple(
        TensorFacts(
            name,
            one.shape,
            str(one.dtype).removeprefix("torch."),
            one.chunks,
            len(one.files),
            one.numel,
            one.nbytes,
            (tied or {}).get(name),
        )
        for name, one in tensors.items()
    )
