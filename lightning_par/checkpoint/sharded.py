"""A checkpoint that is a directory: every rank writes its own shards, and any layout reads them back.

Files in the directory:

- ``.metadata`` and ``*.distcp``: every tensor, written by ``torch.distributed.checkpoint`` under ``model.<name>`` and
  ``optimizer.<index>.state.<name>.<key>``. Values that are the same on several ranks are stored once.
  Those that were given as `beside` are under ``beside.<name>``.
- ``meta.pt``: everything else of the optimizers, and the caller's own mapping; written by rank 0 with `torch.save`.
- ``random_<rank>.pt``: the default random generators of each rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from lightning_par.checkpoint.errors import CheckpointError, checkpoint_error
from lightning_par.checkpoint.load_plan import LoadPlan, Names
from lightning_par.checkpoint.ranks import Ranks
from lightning_par.checkpoint.stages import on_all_stages, union
from lightning_par.checkpoint.state import (
    load_into_module,
    name_problems,
    refuse_dtensors,
    restore_optimizer,
    tensor_problem,
)
from lightning_par.errors import Problem
from lightning_par.parallel.random import random_state as current_random_state
from lightning_par.parallel.random import set_random_state
from lightning_par.parallel.stages import stages_of

_log = logging.getLogger(__name__)

_META = "meta.pt"
_FORMAT = "lightning_par-1"

StrPath = str | os.PathLike[str]


class LoadedMeta(dict[str, Any]):
    """The mapping that was given to `save_sharded`, and what a load with ``strict=False`` left out.

    Attributes:
        missing: Names that the module or the optimizers have and the checkpoint lacks.
        unexpected: Names that only the checkpoint has.
    """

    def __init__(self, meta: Mapping[str, Any], missing: Sequence[str], unexpected: Sequence[str]) -> None:
        super().__init__(meta)
        self.missing = list(missing)
        self.unexpected = list(unexpected)


def save_sharded(
    path: StrPath,
    *,
    model: Mapping[str, Any],
    optimizers: Sequence[Mapping[str, Any]] = (),
    random_state: bool = True,
    meta: Mapping[str, Any] | None = None,
    beside: Mapping[str, Tensor] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint directory; collective over `process_group`.

    The directory gets its name when it is complete, by a rename; a file or directory that had the name stays in place
    until then. A failure on one rank raises on all of them.

    Args:
        path: The directory, on a file system that all ranks share.
        model: What `model_state` gave. Tensors that are not DTensors must be equal on all ranks; those of the lowest
            rank are stored.
        optimizers: What `optimizer_state` gave, for each optimizer. Of a pipeline's ranks each gives its own part.
        random_state: Store the state of each rank's random generators too.
        meta: Anything that `torch.save` takes, without DTensors. Rank 0's is stored.
        beside: More tensors, of any layout, which only `load_beside` reads.
        process_group: The ranks that save together; the default group when None. Without an initialised process group
            this process saves alone.

    Raises:
        CheckpointError: If any rank could not write, naming the ranks and causes; or if `path` is a directory of other
            things, which is left as it is.
    """
    ranks = Ranks.of(process_group)
    target = _local_path(path)
    temporary = target.with_name(f".{target.name}.tmp")
    tensors, record = _split(model, optimizers)
    tensors |= {f"beside.{name}": value for name, value in (beside or {}).items()}
    record |= {"format": _FORMAT, "world_size": ranks.size, "meta": dict(meta or {})}

    def prepare() -> None:
        refuse_dtensors(record, "the content of meta.pt")
        if ranks.rank == 0:
            _refuse_to_replace_other_things(target)
            _remove(temporary)
            temporary.mkdir(parents=True)

    def write_own_files(record: Mapping[str, Any]) -> None:
        if random_state:
            torch.save(current_random_state(), temporary / _random_file(ranks.rank))
        if ranks.rank == 0:
            torch.save(record, temporary / _META)

    try:
        ranks.together(f"cannot start the checkpoint {target}", prepare)
        ranks.together(f"cannot see the directory of the checkpoint {target}", lambda: _check_shared(temporary))
        _write_tensors(tensors, temporary, ranks)
        whole = _with_other_stages(record, [list(model), *(state.get("stage") for state in optimizers)], ranks)
        ranks.together(f"cannot write the checkpoint {target}", lambda: write_own_files(whole))
        ranks.together(
            f"cannot name the checkpoint {target}", lambda: _commit(temporary, target) if ranks.rank == 0 else None
        )
    except BaseException:
        if ranks.rank == 0:
            with contextlib.suppress(OSError):
                _remove(temporary)
        raise


def load_sharded(
    path: StrPath,
    module: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    *,
    strict: bool = True,
    random_state: bool = True,
    weights_only: bool = False,
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
        random_state: Restore the random generators, if the number of ranks is the one that was saved.
        weights_only: Refuse classes in ``meta.pt`` other than plain types. The tensors' metadata is a pickle in any
            case, so load only what you trust.
        process_group: The ranks that load together; the default group when None.

    Returns:
        The saved ``meta``.

    Raises:
        CheckpointError: Lists every name, shape, group and optimizer that does not fit; nothing has been changed then.
    """
    ranks = Ranks.of(process_group)
    source = _local_path(path)
    failure = f"cannot load the checkpoint {source}"
    names = Names.of(module, optimizers, ranks, failure)

    def prepare() -> tuple[dict[str, Any], LoadPlan]:
        record = _read_record(source, weights_only)
        stored = FileSystemReader(source).read_metadata().state_dict_metadata
        plan = LoadPlan({name: item for name, item in stored.items() if isinstance(item, TensorStorageMetadata)})
        plan.add_model(module, names, record["model_values"])
        if optimizers:
            plan.add_optimizers(optimizers, names, record["optimizers"])
        return record, plan

    record, plan = ranks.together(failure, prepare)
    plan.misfits = union(on_all_stages(stages_of(module), lambda: plan.misfits))
    ranks.together(failure, lambda: plan.raise_if_unfit(f"the checkpoint {source} does not fit", strict))
    _read_tensors(plan.targets, source, ranks)
    _, unexpected = load_into_module(module, plan.model)
    if strict and unexpected:
        raise checkpoint_error(
            f"the checkpoint {source} was not loaded as a whole", name_problems("model", [], unexpected)
        )
    for arguments in plan.optimizers:
        restore_optimizer(module, *arguments)
    if random_state:
        _restore_random_state(source, record["world_size"], ranks)
    return LoadedMeta(record["meta"], plan.missing, plan.unexpected + unexpected)


def load_beside(
    path: StrPath, targets: Mapping[str, Tensor], *, process_group: dist.ProcessGroup | None = None
) -> None:
    """Read tensors that `save_sharded` was given as `beside`, in place and in any layout; collective.

    Raises:
        CheckpointError: If the checkpoint lacks one of them, or if a shape differs.
    """
    source = _local_path(path)
    ranks = Ranks.of(process_group)

    def check() -> None:
        stored = FileSystemReader(source).read_metadata().state_dict_metadata
        problems = name_problems("tensors beside the model", [n for n in targets if f"beside.{n}" not in stored], [])
        for name, target in targets.items():
            item = stored.get(f"beside.{name}")
            problem = tensor_problem(name, target, item.size) if isinstance(item, TensorStorageMetadata) else None
            problems += [problem] if problem else []
        if problems:
            raise checkpoint_error(f"the checkpoint {source} does not fit", problems)

    ranks.together(f"cannot load the checkpoint {source}", check)
    _read_tensors({f"beside.{name}": target for name, target in targets.items()}, source, ranks)


def read_meta(path: StrPath, *, weights_only: bool = False) -> dict[str, Any]:
    """Return the ``meta`` that was given to `save_sharded`; see `load_sharded` for `weights_only`."""
    meta: dict[str, Any] = _read_record(_local_path(path), weights_only)["meta"]
    return meta


def remove_checkpoint(path: StrPath) -> None:
    """Remove a checkpoint, file or directory; of a link only the link. Nothing there is no error."""
    _remove(_local_path(path))


def is_sharded_checkpoint(path: StrPath) -> bool:
    """Tell whether `path` is a directory that `save_sharded` completed; does not read its content."""
    return os.path.isfile(os.path.join(path, _META)) and os.path.isfile(os.path.join(path, ".metadata"))


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
        for name, state in optimizer["state"].items():
            arrays = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            record["tensors"][name] = list(arrays)
            record["values"][name] = {key: value for key, value in state.items() if key not in arrays}
            tensors |= {f"optimizer.{i}.state.{name}.{key}": value for key, value in arrays.items()}
        records.append(record)
    return tensors, {"model_values": model_values, "optimizers": records}


def _with_other_stages(record: Mapping[str, Any], part: Any, ranks: Ranks) -> Mapping[str, Any]:
    """On rank 0, the record with what only other stages of a pipeline have.

    Args:
        record: Of this rank.
        part: What tells the stages apart, alike on all ranks of one.
        ranks: All of them.
    """
    digest = hashlib.sha256(repr(part).encode()).hexdigest()
    digests = [digest] * ranks.size
    if not ranks.alone:
        dist.all_gather_object(digests, digest, group=ranks.group)
    if len(set(digests)) == 1:
        return record
    # Of many ranks of a stage one is enough.
    mine = record if digests.index(digest) == ranks.rank else None
    told: list[Any] = [None] * ranks.size
    dist.gather_object(mine, told if ranks.rank == 0 else None, group=ranks.group, group_dst=0)
    records = [one for one in told if one is not None]
    if ranks.rank != 0:
        return record
    model_values = {name: value for one in records for name, value in one["model_values"].items()}
    optimizers = [
        optimizer
        | {
            key: {n: v for one in records for n, v in one["optimizers"][i][key].items()}
            for key in ("tensors", "values")
        }
        for i, optimizer in enumerate(record["optimizers"])
    ]
    return {**record, "model_values": model_values, "optimizers": optimizers}


def _write_tensors(tensors: dict[str, Any], directory: Path, ranks: Ranks) -> None:
    # Of values that several ranks hold, the lowest one's are stored: buffers that drifted apart stay consistent.
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    writer = FileSystemWriter(directory)
    with _translated(f"cannot write the tensors of the checkpoint {directory}", ranks):
        save(tensors, storage_writer=writer, planner=planner, process_group=ranks.group, no_dist=ranks.alone)


def _read_tensors(targets: dict[str, Any], directory: Path, ranks: Ranks) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    reader = FileSystemReader(directory)
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


def _read_record(directory: Path, weights_only: bool) -> dict[str, Any]:
    if not is_sharded_checkpoint(directory):
        raise CheckpointError(f"{directory} is not a checkpoint directory: {_META} or .metadata is not in it")
    record: dict[str, Any] = torch.load(directory / _META, map_location="cpu", weights_only=weights_only)
    found = record.get("format")
    if found != _FORMAT:
        raise CheckpointError(f"{directory} was not written by save_sharded: its format is {found!r}, not {_FORMAT!r}")
    return record


def _restore_random_state(directory: Path, saved_size: int, ranks: Ranks) -> None:
    file = directory / _random_file(ranks.rank)
    if saved_size != ranks.size:
        _log.info("Random state not restored: saved on %d ranks, loaded on %d.", saved_size, ranks.size)
    elif not file.is_file():
        _log.info("Random state not restored: %s holds none.", directory)
    else:
        set_random_state(torch.load(file, weights_only=True))


def _random_file(rank: int) -> str:
    return f"random_{rank:05d}.pt"


def _local_path(path: StrPath) -> Path:
    if "://" in os.fspath(path):
        raise CheckpointError(f"{path} is a URL; checkpoint directories are written to a mounted file system")
    return Path(path).absolute()


def _check_shared(directory: Path) -> None:
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}, which rank 0 made, is not here: all ranks must share the file system")


def _commit(temporary: Path, target: Path) -> None:
    previous = target.with_name(f".{target.name}.previous")
    _remove(previous)
    if os.path.lexists(target):
        os.rename(target, previous)
    try:
        os.rename(temporary, target)
    except OSError:
        if os.path.lexists(previous):
            os.rename(previous, target)
        raise
    _remove(previous)


def _refuse_to_replace_other_things(target: Path) -> None:
    """A directory is replaced if it is empty or a checkpoint (of this package, or written by torch)."""
    if target.is_symlink() or not target.is_dir() or (target / ".metadata").is_file():
        return
    content = sorted(os.listdir(target))
    if content:
        raise CheckpointError(
            f"{target} is a directory that holds other things than a checkpoint ({', '.join(content[:3])}, ...), which "
            "saving would delete. Name the checkpoint itself, for example "
            f"{target / 'last.ckpt'}."
        )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
