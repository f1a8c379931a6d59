"""Ranks of the pool that save and load in a directory of checkpoints, with disks that fail them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from fault_runs import digest

from checkpoint_runs import build, train, view
from lightning_par.checkpoint import load_sharded, model_state, optimizer_state
from lightning_par.checkpoint.candidates import load_newest
from lightning_par.checkpoint.commit import Facts
from lightning_par.checkpoint.ranks import Ranks
from lightning_par.checkpoint.run_directory import Retention, RunDirectory
from lightning_par.checkpoint.saver import CheckpointSaver
from lightning_par.checkpoint.sharded import content_of
from lightning_par.checkpoint.storage import LocalStorage

OLD, NEW = "step-00000003", "step-00000006"


def fill(root: str, steps: tuple[int, ...], layout: str = "shard") -> dict[int, str]:
    """Train, save at some steps, and tell what was saved at each."""
    net, optimizers = build(layout, "adamw")
    saver, directory = CheckpointSaver(), RunDirectory(root, Retention(keep_last=10))
    directory.begin(Ranks.of(None), 3)
    saved = {}
    for step in range(1, max(steps) + 1):
        train(net, optimizers, 1, seed=step)
        if step in steps:
            save(saver, directory, step, net, optimizers)
            saved[step] = digest(view(net, optimizers))
    directory.end("finished", max(steps)) if dist.get_rank() == 0 else None
    return saved


def save(saver: CheckpointSaver, directory: RunDirectory, step: int, net: Any, optimizers: Any, **how: Any) -> bool:
    path = directory.path_of(step)

    def content() -> Any:
        states = [optimizer_state(net, optimizer) for optimizer in optimizers]
        return content_of(model_state(net), states, meta={"step": step})

    facts = Facts(dist.get_rank(), step, run="tests", incarnation=directory.start)
    return saver.save(
        path,
        content,
        facts,
        may_commit=directory.refuse_if_superseded,
        committed=lambda: directory.committed(path),
        **how,
    )


def load(root: str, verify: str = "size", fault: str = "", kind: str = "adamw") -> tuple[int, str] | str:
    """The step that is loaded and what the training is then; or the error, which must be the same on all ranks."""
    net, optimizers = build("shard", kind, seed=dist.get_rank())
    faults = {"": nothing, "blind": newest_hidden, "unreadable": newest_unreadable}
    with faults[fault](dist.get_rank()):
        try:
            meta = load_newest(
                root, lambda path: load_sharded(path, net, optimizers, random_state=False), verify=verify
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ("nothing", "") if meta is None else (meta["step"], digest(view(net, optimizers)))


@contextmanager
def nothing(rank: int) -> Iterator[None]:
    yield


@contextmanager
def newest_hidden(rank: int) -> Iterator[None]:
    """The file system shows the newest checkpoint to rank 0 only."""
    visible = LocalStorage.exists
    hidden = lambda self, path: visible(self, path) and not (rank == 1 and NEW in path)
    with mock.patch.object(LocalStorage, "exists", hidden):
        yield


@contextmanager
def newest_unreadable(rank: int) -> Iterator[None]:
    """Rank 1 cannot read a shard of the newest, when others are in the middle of it."""
    readable = LocalStorage.open

    def read(self: Any, path: str) -> Any:
        if rank == 1 and NEW in path and path.endswith(".distcp"):
            raise OSError(5, "Input/output error", path)
        return readable(self, path)

    with mock.patch.object(LocalStorage, "open", read):
        yield
