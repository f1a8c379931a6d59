"""The second half of a save: files, outcome, check, manifest, name. Any failure leaves what was there before.

1. The first rank makes a directory for the attempt, beside the target, with a name that nothing else has.
2. Every rank writes its files into it; each is on the disk, and summed up, before the rank says that it is done.
3. All ranks learn whether all are done; if not, which one failed and why.
4. The first rank compares the index of the tensors with what was written, writes the manifest, and renames the
   directory. **The rename is the commit**: before it the former checkpoint is valid, after it the new one.

A process that ends anywhere leaves at most a hidden directory, which no load looks at.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.storage import WriteResult

from lightning_par.checkpoint.crash_points import crash_point
from lightning_par.checkpoint.errors import CheckpointError
from lightning_par.checkpoint.manifest import MANIFEST, META, METADATA, Manifest, read_metadata, structural_problems
from lightning_par.checkpoint.prepare import Prepared
from lightning_par.checkpoint.ranks import Ranks
from lightning_par.checkpoint.storage import REPLACED, TRASH, FileFacts, Storage

ATTEMPT = ".attempt-"


@dataclass(frozen=True)
class Facts:
    """What a manifest tells about the run.

    Attributes:
        data_rank: Of this rank.
        step: The number of optimizer steps taken.
        layout: The sizes of the axes.
        run: Identifies the run.
        incarnation: How often runs have been started in the directory of checkpoints.
    """

    data_rank: int
    step: int | None = None
    layout: Mapping[str, int] | None = None
    run: str | None = None
    incarnation: int | None = None


def commit(
    prepared: Prepared,
    storage: Storage,
    target: str,
    facts: Facts,
    ranks: Ranks,
    *,
    may_commit: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint; collective.

    Args:
        prepared: What is written.
        storage: Where `target` is.
        target: The name of the directory. A checkpoint or file with this name stays until the new one is complete.
        facts: For the manifest.
        ranks: Those that save together.
        may_commit: Called on the first rank before the rename; an error from it ends the save.

    Raises:
        CheckpointError: On all ranks, naming the ranks that failed and why.
    """
    crash_point("before_attempt", ranks.rank)
    attempt = ranks.broadcast(_attempt_path(storage, target))
    try:
        ranks.together(f"cannot start the checkpoint {target}", lambda: _start(storage, target, attempt, ranks))
        crash_point("attempt_made", ranks.rank)
        ranks.together(f"cannot see the directory of the checkpoint {target}", lambda: _see(storage, attempt))
        parts = ranks.gather_to_first(
            f"cannot write the checkpoint {target}", lambda: _write_own(prepared, storage, attempt, facts, ranks)
        )
        crash_point("outcome_gathered", ranks.rank)

        def finish() -> None:
            if ranks.rank == 0:
                manifest = _index(prepared, storage, attempt, facts, parts)
                _name(storage, target, attempt, manifest, may_commit)

        ranks.together(f"cannot commit the checkpoint {target}", finish)
    except BaseException:
        if ranks.rank == 0:
            with contextlib.suppress(OSError):
                storage.discard(attempt)
        raise


def remove_abandoned(storage: Storage, directory: str, *, all_attempts: bool = False) -> list[str]:
    """Remove what ended processes left in a directory of checkpoints, and bring back what they had put aside.

    Args:
        storage: Where it is.
        directory: Holds checkpoints and attempts.
        all_attempts: Also those of processes that may live, here or on other machines: for who knows that no other
            process may save here.

    Returns:
        The names that were removed.
    """
    removed: list[str] = []
    for name in storage.names(directory):
        if name.startswith(REPLACED):
            storage.put_back(storage.join(directory, name))
        abandoned = name.startswith(ATTEMPT) and (all_attempts or _owner_is_dead(name))
        if abandoned or name.startswith(TRASH):
            with contextlib.suppress(OSError):
                storage.discard(storage.join(directory, name))
                removed.append(name)
    return removed


def _attempt_path(storage: Storage, target: str) -> str:
    name = target.rsplit(os.sep if storage.renames else "/", 1)[-1]
    attempt = f"{ATTEMPT}{name}.{_host()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    return storage.join(storage.parent(target) if storage.renames else target, attempt)


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _owner_is_dead(attempt: str) -> bool:
    *_, host, pid, _ = attempt.rsplit(".", 3)
    if host != _host() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _start(storage: Storage, target: str, attempt: str, ranks: Ranks) -> None:
    if ranks.rank != 0:
        return
    _refuse_to_replace_other_things(storage, target)
    storage.make_directory(storage.parent(target))
    remove_abandoned(storage, storage.parent(target))
    storage.make_directory(storage.join(attempt, "ranks"))


def _see(storage: Storage, attempt: str) -> None:
    # An object store has no directories before there are files in them.
    if storage.renames and not storage.is_directory(attempt):
        raise FileNotFoundError(f"{attempt}, which rank 0 made, is not here: all ranks must share the file system")


@dataclass(frozen=True)
class _Part:
    """What a rank has written."""

    files: dict[str, FileFacts]
    results: list[WriteResult]
    data_rank: int


def _write_own(prepared: Prepared, storage: Storage, attempt: str, facts: Facts, ranks: Ranks) -> _Part:
    writer = prepared.writer
    writer.reset(attempt)
    results = writer.write_data(prepared.plan, prepared.data).wait()
    files = dict(writer.files)
    for name, content in prepared.files.items():
        with storage.create(storage.join(attempt, name)) as stream:
            stream.write(content)
        files[name] = stream.facts
        crash_point("meta_written" if name == META else "rank_file_written", ranks.rank)
    return _Part(files, results, facts.data_rank)


def _index(prepared: Prepared, storage: Storage, attempt: str, facts: Facts, parts: list[Any]) -> Manifest:
    """Write the index of the tensors, compare it with what was written, and describe everything."""
    writer, metadata = prepared.writer, prepared.metadata
    assert metadata is not None
    writer.finish(metadata, [part.results for part in parts])
    # torch 2.11 fills in a copy; and what counts is what can be read.
    metadata = read_metadata(storage, attempt)
    files = {name: facts for part in parts for name, facts in part.files.items()}
    problems = structural_problems(metadata, files)
    files[METADATA] = writer.files[METADATA]
    problems += [
        f"{name} has {storage.size(file)} bytes on the disk, {expected.bytes} were written"
        for name, expected in files.items()
        if storage.size(file := storage.join(attempt, name)) != expected.bytes
    ]
    if problems:
        raise CheckpointError("; ".join(problems))
    return Manifest(
        time=time.time(),
        world_size=len(parts),
        data_ranks=[part.data_rank for part in parts],
        files=files,
        attempt=attempt.rsplit(".", 1)[-1],
        step=facts.step,
        layout=None if facts.layout is None else dict(facts.layout),
        run=facts.run,
        incarnation=facts.incarnation,
        data="" if storage.renames else attempt.rsplit("/", 1)[-1],
    )


def _name(storage: Storage, target: str, attempt: str, manifest: Manifest, may_commit: Callable[[], None]) -> None:
    if storage.renames:
        storage.put(
            storage.join(attempt, MANIFEST),
            manifest.to_json().encode(),
            before_name=lambda: crash_point("manifest_temporary", 0),
        )
        crash_point("manifest_in_place", 0)
        may_commit()
        storage.publish(attempt, target)
    else:
        may_commit()
        storage.put(storage.join(target, MANIFEST), manifest.to_json().encode())
        for name in storage.names(target):
            if name.startswith(ATTEMPT) and name != manifest.data:
                storage.discard(storage.join(target, name))
    crash_point("renamed", 0)


def _refuse_to_replace_other_things(storage: Storage, target: str) -> None:
    """A directory is replaced if it is empty or a checkpoint (of this package, or written by torch)."""
    if os.path.islink(target) or not storage.is_directory(target):
        return
    content = storage.names(target)
    known = (MANIFEST, METADATA)
    if content and not any(name in known or name.startswith(ATTEMPT) for name in content):
        raise CheckpointError(
            f"{target} is a directory that holds other things than a checkpoint ({', '.join(content[:3])}, ...), which "
            f"saving would delete. Name the checkpoint itself, for example {storage.join(target, 'last.ckpt')}."
        )
