"""A checkpoint that is a directory: every rank writes its own shards, and any layout reads them back.

Files in the directory:

- ``.metadata`` and ``*.distcp``: every tensor, written by ``torch.distributed.checkpoint`` under ``model.<name>`` and
  ``optimizer.<index>.state.<name>.<key>``. Values that are the same on several ranks are stored once.
  Those that were given as `beside` are under ``beside.<name>``.
- ``meta.pt``: everything else of the optimizers, and the caller's own mapping; written by rank 0 with `torch.save`.
- ``ranks/rank-<rank>.pt``: what each rank keeps for itself, with the state of its default random generators.
- ``MANIFEST.json``: sizes and checksums of all of them; a directory without it was never committed.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from lightning_par.checkpoint.candidates import agree_on_manifest
from lightning_par.checkpoint.commit import Facts, commit
from lightning_par.checkpoint.crash_points import crash_point
from lightning_par.checkpoint.errors import CheckpointMismatch, checkpoint_error
from lightning_par.checkpoint.load_plan import LoadPlan, Names
from lightning_par.checkpoint.manifest import (
    META,
    Manifest,
    Verify,
    data_directory,
    rank_file,
    read_manifest,
    read_metadata,
)
from lightning_par.checkpoint.prepare import Content, prepare
from lightning_par.checkpoint.ranks import Ranks
from lightning_par.checkpoint.stages import on_all_stages, union
from lightning_par.checkpoint.state import load_into_module, name_problems, restore_optimizer, tensor_problem
from lightning_par.checkpoint.storage import Storage, StrPath, storage_of
from lightning_par.checkpoint.writer import ShardReader
from lightning_par.errors import Problem
from lightning_par.parallel.random import random_state as current_random_state
from lightning_par.parallel.random import set_random_state
from lightning_par.parallel.stages import stages_of

_log = logging.getLogger(__name__)


class LoadedMeta(dict[str, Any]):
    """The mapping that was given to `save_sharded`, and what a load with ``strict=False`` left out.

    Attributes:
        missing: Names that the module or the optimizers have and the checkpoint lacks.
        unexpected: Names that only the checkpoint has.
        own: What the rank that had the samples of this one has stored for itself; None where as many ranks as there
            are now did not exist.
        first: What the first of them has stored.
        manifest: Of the checkpoint.
    """

    def __init__(
        self,
        meta: Mapping[str, Any],
        missing: Sequence[str],
        unexpected: Sequence[str],
        own: Mapping[str, Any] | None,
        first: Mapping[str, Any],
        manifest: Manifest,
    ) -> None:
        super().__init__(meta)
        self.missing = list(missing)
        self.unexpected = list(unexpected)
        self.own = own
        self.first = first
        self.manifest = manifest


def save_sharded(
    path: StrPath,
    *,
    model: Mapping[str, Any],
    optimizers: Sequence[Mapping[str, Any]] = (),
    random_state: bool = True,
    meta: Mapping[str, Any] | None = None,
    beside: Mapping[str, Tensor] | None = None,
    about: Mapping[str, Any] | None = None,
    data_rank: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint directory; collective over `process_group`.

    The directory gets its name when it is complete and on the disk, by a rename; a file or directory that had the name
    stays in place until then. A failure on one rank raises on all of them.

    Args:
        path: The directory, on a file system that all ranks share, or a URL for fsspec.
        model: What `model_state` gave. Tensors that are not DTensors must be equal on all ranks; those of the lowest
            rank are stored.
        optimizers: What `optimizer_state` gave, for each optimizer. Of a pipeline's ranks each gives its own part.
        random_state: Store the state of each rank's random generators too.
        meta: Anything that `torch.save` takes, without DTensors. Rank 0's is stored.
        beside: More tensors, of any layout, which only `load_beside` reads.
        about: What `about_model` gave, so that `convert` knows tied parameters and configurations.
        data_rank: Which samples this rank has; the rank itself when None. Ranks of equal `data_rank` have equal random
            state.
        process_group: The ranks that save together; the default group when None. Without an initialised process group
            this process saves alone.

    Raises:
        CheckpointError: If any rank could not write, naming the ranks and causes; or if `path` is a directory of other
            things, which is left as it is.
    """
    ranks = Ranks.of(process_group)
    storage, target = storage_of(path)
    content = ranks.together(
        f"cannot write the checkpoint {target}",
        lambda: content_of(model, optimizers, random_state=random_state, meta=meta, beside=beside, about=about),
    )
    prepared = prepare(content, storage, ranks)
    commit(prepared, storage, target, Facts(ranks.rank if data_rank is None else data_rank), ranks)


def content_of(
    model: Mapping[str, Any],
    optimizers: Sequence[Mapping[str, Any]] = (),
    *,
    random_state: bool = True,
    meta: Mapping[str, Any] | None = None,
    beside: Mapping[str, Tensor] | None = None,
    about: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Any] | None = None,
) -> Content:
    """Bring what is to be saved into the form of a checkpoint.

    Args:
        model, optimizers, random_state, meta, beside, about: See `save_sharded`.
        rank_state: What this rank keeps for itself, besides its random state: plain types and tensors.
    """
    tensors, record = _split(model, optimizers)
    tensors |= {f"beside.{name}": value for name, value in (beside or {}).items()}
    own = dict(rank_state or {}) | ({"random": current_random_state()} if random_state else {})
    stage = [list(model), *(state.get("stage") for state in optimizers)]
    return Content(tensors, record | {"meta": dict(meta or {}), "about": dict(about or {})}, stage, own)


def load_sharded(
    path: StrPath,
    module: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    *,
    strict: bool = True,
    random_state: bool = True,
    weights_only: bool = False,
    verify: Verify = "size",
    data_rank: int | None = None,
    data_size: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> LoadedMeta:
    """Load a directory that `save_sharded` wrote, at any number of ranks and in any layout.

    Each rank reads only its own parts. Optimizer state takes the layout in which training goes on (see
    `load_optimizer_state`); where it had the dtype of its parameter, it takes the dtype that the parameter has now.

    Args:
        path: The directory.
        module: Materialised; its parameters and buffers are written in place.
        optimizers: In the order in which they were saved; none of them is restored when empty.
        strict: Raise where names differ. Otherwise load what both sides have, and say in the result what was left out.
        random_state: Restore the random generators, if the number of ranks with other samples is the one that was
            saved: each takes the state of the rank that had its samples.
        weights_only: Refuse classes in ``meta.pt`` other than plain types. The tensors' metadata is a pickle in any
            case, so load only what you trust.
        verify: What is compared with the manifest first, see `lightning_par.checkpoint.verify`.
        data_rank, data_size: Which samples this rank has, among how many; rank and number of ranks when None.
        process_group: The ranks that load together; the default group when None.

    Returns:
        The saved ``meta``.

    Raises:
        CheckpointError: If the directory is not a whole checkpoint, on all ranks, with the reason.
        CheckpointMismatch: Lists every name, shape, group and optimizer that does not fit; nothing has been changed
            then.
    """
    ranks = Ranks.of(process_group)
    storage, source = storage_of(path)
    failure = f"cannot load the checkpoint {source}"
    names = Names.of(module, optimizers, ranks, failure)
    manifest = agree_on_manifest(source, verify, ranks, suggest=True)
    data = data_directory(storage, source, manifest)

    def prepare_load() -> tuple[dict[str, Any], LoadPlan]:
        record = _read_record(storage, data, weights_only)
        stored = read_metadata(storage, data).state_dict_metadata
        plan = LoadPlan({name: item for name, item in stored.items() if isinstance(item, TensorStorageMetadata)})
        plan.add_model(module, names, record["model_values"])
        if optimizers:
            plan.add_optimizers(optimizers, names, record["optimizers"])
        return record, plan

    record, plan = ranks.together(failure, prepare_load)
    crash_point("in_load", ranks.rank)
    plan.misfits = union(on_all_stages(stages_of(module), lambda: plan.misfits))
    ranks.together(failure, lambda: plan.raise_if_unfit(f"the checkpoint {source} does not fit", strict))
    states = _RankStates(storage, data, manifest, ranks.size if data_size is None else data_size)
    own, first = ranks.together(failure, lambda: states.read(ranks.rank if data_rank is None else data_rank))
    _read_tensors(plan.targets, storage, data, ranks)
    _, unexpected = load_into_module(module, plan.model)
    if strict and unexpected:
        raise checkpoint_error(
            f"the checkpoint {source} was not loaded as a whole",
            name_problems("model", [], unexpected),
            CheckpointMismatch,
        )
    for arguments in plan.optimizers:
        restore_optimizer(module, *arguments)
    if random_state:
        _restore_random_state(source, own, states)
    return LoadedMeta(record["meta"], plan.missing, plan.unexpected + unexpected, own, first, manifest)


def load_beside(
    path: StrPath, targets: Mapping[str, Tensor], *, process_group: dist.ProcessGroup | None = None
) -> None:
    """Read tensors that `save_sharded` was given as `beside`, in place and in any layout; collective.

    Raises:
        CheckpointError: If the checkpoint lacks one of them, or if a shape differs.
    """
    storage, source = storage_of(path)
    ranks = Ranks.of(process_group)
    manifest = ranks.together(f"cannot load the checkpoint {source}", lambda: read_manifest(source))
    data = data_directory(storage, source, manifest)

    def check() -> None:
        stored = read_metadata(storage, data).state_dict_metadata
        problems = name_problems("tensors beside the model", [n for n in targets if f"beside.{n}" not in stored], [])
        for name, target in targets.items():
            item = stored.get(f"beside.{name}")
            problem = tensor_problem(name, target, item.size) if isinstance(item, TensorStorageMetadata) else None
            problems += [problem] if problem else []
        if problems:
            raise checkpoint_error(f"the checkpoint {source} does not fit", problems, CheckpointMismatch)

    ranks.together(f"cannot load the checkpoint {source}", check)
    _read_tensors({f"beside.{name}": target for name, target in targets.items()}, storage, data, ranks)


def read_meta(path: StrPath, *, weights_only: bool = False) -> dict[str, Any]:
    """Return the ``meta`` that was given to `save_sharded`; see `load_sharded` for `weights_only`."""
    storage, source = storage_of(path)
    record = _read_record(storage, data_directory(storage, source, read_manifest(source)), weights_only)
    meta: dict[str, Any] = record["meta"]
    return meta


def remove_checkpoint(path: StrPath) -> None:
    """Remove a checkpoint, file or directory; of a link only the link. Nothing there is no error."""
    storage, source = storage_of(path)
    storage.discard(source)


def _split(
    model: Mapping[str, Any], optimizers: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Separate the tensors, under their names in the checkpoint, from the plain values and the lists of names."""
    tensors: dict[str, Tensor] = {}
    model_values: dict[str, Any] = {}
    for name, value in model.items():
        # Extra state may have another size at each save, which a tensor read in place cannot have.
        if isinstance(value, Tensor) and not name.endswith("_extra_state"):
            tensors[f"model.{name}"] = value
        else:
            model_values[name] = value
    records: list[dict[str, Any]] = []
    for i, optimizer in enumerate(optimizers):
        record: dict[str, Any] = {"param_groups": optimizer["param_groups"], "values": {}, "tensors": {}}
        record["is_ordered"] = optimizer.get("is_ordered", True)
        for name, state in optimizer["state"].items():
            arrays = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            record["tensors"][name] = list(arrays)
            record["values"][name] = {key: value for key, value in state.items() if key not in arrays}
            tensors |= {f"optimizer.{i}.state.{name}.{key}": value for key, value in arrays.items()}
        records.append(record)
    return tensors, {"model_values": model_values, "optimizers": records}


def _read_tensors(targets: dict[str, Any], storage: Storage, directory: str, ranks: Ranks) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    reader = ShardReader(storage, directory)
    with _translated(f"cannot read the tensors of the checkpoint {directory}", ranks):
        load(targets, storage_reader=reader, planner=planner, process_group=ranks.group, no_dist=ranks.alone)


@contextlib.contextmanager
def _translated(failure: str, ranks: Ranks) -> Iterator[None]:
    """Turn DCP's error, which is no `Exception`, into ours, and silence its warning that one process is alone."""
    with warnings.catch_warnings():
        if ranks.alone:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as e:
            causes = [Problem(f"rank {r}: {type(c[0]).__name__}: {c[0]}") for r, c in sorted(e.failures.items())]
            raise checkpoint_error(failure, causes) from e


def _read_record(storage: Storage, directory: str, weights_only: bool) -> dict[str, Any]:
    with storage.open(storage.join(directory, META)) as stream:
        record: dict[str, Any] = torch.load(io.BytesIO(stream.read()), map_location="cpu", weights_only=weights_only)
    return record


class _RankStates:
    """What the ranks have stored for themselves, by the samples that they had."""

    def __init__(self, storage: Storage, directory: str, manifest: Manifest, data_size: int) -> None:
        self._storage = storage
        self._directory = directory
        self._manifest = manifest
        self.saved_size = manifest.data_size
        self.size = data_size

    def read(self, data_rank: int) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Return the state of the rank that had the samples of `data_rank`, if as many had others, and that of the
        first one.
        """
        first = self._read(0)
        if self.saved_size != self.size:
            return None, first
        return (first if data_rank == 0 else self._read(data_rank)), first

    def _read(self, data_rank: int) -> dict[str, Any]:
        name = rank_file(self._manifest.data_ranks.index(data_rank))
        with self._storage.open(self._storage.join(self._directory, name)) as stream:
            state: dict[str, Any] = torch.load(io.BytesIO(stream.read()), map_location="cpu", weights_only=True)
        return state


def _restore_random_state(source: str, own: Mapping[str, Any] | None, states: _RankStates) -> None:
    if own is None:
        _log.info("Random state not restored: saved on %d data ranks, loaded on %d.", states.saved_size, states.size)
    elif "random" not in own:
        _log.info("Random state not restored: %s holds none.", source)
    else:
        set_random_state(own["random"])
