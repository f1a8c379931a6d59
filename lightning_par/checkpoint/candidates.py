"""Which checkpoint of a directory to load: the newest that every rank sees whole, or the one before it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from lightning_par.checkpoint.errors import CheckpointError, CheckpointMismatch, NoValidCheckpointError
from lightning_par.checkpoint.manifest import MANIFEST, META, METADATA, Manifest, Verify, read_manifest
from lightning_par.checkpoint.manifest import verify as verify_files
from lightning_par.checkpoint.ranks import Ranks
from lightning_par.checkpoint.storage import StrPath, storage_of
from lightning_par.errors import Problem

_log = logging.getLogger(__name__)

# A file in a checkpoint that a run has gone back behind, so that no later start goes on from it.
SUPERSEDED = "SUPERSEDED"
_T = TypeVar("_T")


class Candidate(NamedTuple):
    """A directory that is a checkpoint, or should be one.

    Attributes:
        path: The directory.
        manifest: What it says about itself; None where it cannot be read.
        problem: Why.
    """

    path: str
    manifest: Manifest | None
    problem: str = ""


def candidates(directory: StrPath) -> list[Candidate]:
    """List the checkpoints in a directory, the newest first; looks at manifests only.

    A later start of a run comes before an earlier one, as it may have gone back on purpose; then the step decides, then
    the time of the commit. Dates of files say nothing. Those that the run itself has gone back behind are left out.
    """
    storage, root = storage_of(directory)
    found: list[Candidate] = []
    for name in storage.names(root):
        path = storage.join(root, name)
        if name.startswith(".") or os.path.islink(path):
            continue
        content = storage.names(path)
        # On an object store files without a manifest are a save that has not come to an end.
        if SUPERSEDED in content:
            continue
        broken = storage.renames and (META in content or METADATA in content or name.startswith("step-"))
        if MANIFEST not in content and not broken:
            continue
        try:
            found.append(Candidate(path, read_manifest(path)))
        except (CheckpointError, OSError) as e:
            found.append(Candidate(path, None, str(e)))
    return sorted(found, key=_age, reverse=True)


def whole_checkpoints(directory: StrPath) -> Iterator[tuple[str, Manifest]]:
    """Give the path and the manifest of each candidate whose files have the sizes of its manifest, the newest first."""
    for path, manifest, _ in candidates(directory):
        if manifest is not None and not verify_files(path):
            yield path, manifest


def _age(candidate: Candidate) -> tuple[int, int, int, float]:
    manifest = candidate.manifest
    if manifest is None:
        return -1, -1, -1, 0.0
    step = -1 if manifest.step is None else manifest.step
    return 0, manifest.incarnation or 0, step, manifest.time


def load_newest(
    directory: StrPath,
    load: Callable[[str], _T],
    *,
    verify: Verify = "size",
    process_group: dist.ProcessGroup | None = None,
) -> _T | None:
    """Load the newest checkpoint that is whole; collective.

    The first rank lists them, and every rank looks at each; one that some rank does not see whole, or that cannot be
    read to its end, is passed over by all of them, with a warning.

    Args:
        directory: Holds the checkpoints.
        load: Loads one, alike on all ranks; what it has changed when it fails is changed again by the next.
        verify: See `lightning_par.checkpoint.verify`.
        process_group: The ranks that load together; the default group when None.

    Returns:
        What `load` returned; None if there is no checkpoint yet.

    Raises:
        NoValidCheckpointError: If there are checkpoints and none is whole.
        CheckpointMismatch: If the newest whole one does not fit: an older one is no better.
    """
    ranks = Ranks.of(process_group)
    found = ranks.broadcast(candidates(directory) if ranks.rank == 0 else [])
    rejected: list[Problem] = []
    for path, manifest, problem in found:
        try:
            if manifest is None:
                raise CheckpointError(problem)
            agree_on_manifest(path, verify, ranks)
            result = load(path)
        except CheckpointMismatch:
            raise
        except CheckpointError as e:
            rejected.append(Problem(f"{path}: {e}"))
            continue
        if rejected and ranks.rank == 0:
            reasons = "".join(f"\n  - {one}" for one in rejected)
            _log.warning("FELL BACK to the checkpoint %s; passed over as not whole:%s", path, reasons)
        if ranks.rank == 0:
            _tell_of_later(path, manifest, found)
        return result
    if rejected:
        raise NoValidCheckpointError(
            f"{os.fspath(directory)} holds checkpoints and none is whole; nothing was changed there. Repair or move "
            "them, or start in an empty directory:" + "".join(f"\n  - {one}" for one in rejected)
        )
    return None


def _tell_of_later(path: str, manifest: Manifest, found: list[Candidate]) -> None:
    """Say that an earlier start had come further."""
    steps = [(one.manifest.step or 0, one.path) for one in found if one.manifest is not None]
    step, latest = max(steps)
    if step > (manifest.step or 0):
        _log.warning(
            "%s is the newest checkpoint, as the last start that saved here saved it; an earlier start had come "
            "further, to %s. If that one is meant, give its path as ckpt_path, and another directory.",
            path,
            latest,
        )


def explain_path(path: StrPath) -> str:
    """Say what is meant by a path that is no checkpoint; empty where nothing is known of it."""
    storage, place = storage_of(path)
    if storage.is_directory(place):
        whole = next((path for path, _ in whole_checkpoints(place)), None)
        if whole is None:
            return f"{place} is a directory and holds no whole checkpoint"
        return f"{place} is a directory of checkpoints; the newest whole one is {whole}"
    inside = storage.parent(place)
    for directory in (inside, storage.parent(inside)):
        if MANIFEST in storage.names(directory):
            return f"{place} is a file of the checkpoint {directory}: give the directory"
    if place.endswith("LATEST"):
        return f"{place} only has the name of a checkpoint; {explain_path(inside)}"
    return ""


def newest_checkpoint(
    directory: StrPath, *, verify: Verify = "size", process_group: dist.ProcessGroup | None = None
) -> str | None:
    """Return the newest checkpoint that every rank sees whole, or None if there is no checkpoint yet; collective.

    For loops of your own: ``path = newest_checkpoint(directory)``, then ``fabric.load(path, state)``.

    Raises:
        NoValidCheckpointError: If there are checkpoints and none is whole.
    """
    return load_newest(directory, lambda path: path, verify=verify, process_group=process_group)


def agree_on_manifest(path: str, level: Verify, ranks: Ranks, *, suggest: bool = False) -> Manifest:
    """Let every rank look at a checkpoint, and read its manifest; collective.

    Args:
        path: The directory.
        level: See `lightning_par.checkpoint.verify`.
        ranks: Those that look.
        suggest: Name a whole one beside it in the error.

    Raises:
        CheckpointError: On all ranks, if any of them does not see a whole checkpoint.
    """

    def look() -> Manifest:
        problems = verify_files(path, level, share=(ranks.rank, ranks.size))
        if problems:
            alone = len(problems) == 1 and path in problems[0]
            text = problems[0] if alone else f"{path} is not a whole checkpoint: {'; '.join(problems)}"
            raise CheckpointError(text + (_beside(path) if suggest else ""))
        return read_manifest(path)

    return ranks.together(f"cannot load the checkpoint {path}", look)


def _beside(path: str) -> str:
    storage, directory = storage_of(path)
    others = (other for other, _ in whole_checkpoints(storage.parent(directory)) if other != directory)
    other = next(others, None)
    return "" if other is None else f". The newest whole one beside it is {other}"
