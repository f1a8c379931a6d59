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
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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

from lightning_par.checkpoint.state import (
    CheckpointError,
    checkpoint_error,
    compare_names,
    empty_state,
    group_problems,
    load_into_module,
    model_state,
    name_problems,
    named_parameters_of,
    optimizer_names,
    refuse_dtensors,
    restore_optimizer,
    state_problems,
    tensor_problem,
)
from lightning_par.errors import Problem
from lightning_par.parallel.random import random_state as current_random_state
from lightning_par.parallel.random import set_random_state

_log = logging.getLogger(__name__)

_META = "meta.pt"
_FORMAT = "lightning_par-1"

_T = TypeVar("_T")
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
        optimizers: What `optimizer_state` gave, for each optimizer.
        random_state: Store the state of each rank's random generators too.
        meta: Anything that `torch.save` takes, without DTensors. Rank 0's is stored.
        beside: More tensors, of any layout, which only `load_beside` reads.
        process_group: The ranks that save together; the default group when None. Without an initialised process group
            this process saves alone.

    Raises:
        CheckpointError: If any rank could not write, naming the ranks and causes; or if `path` is a directory of other
            things, which is left as it is.
    """
    ranks = _Ranks.of(process_group)
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

    def write_own_files() -> None:
        if random_state:
            torch.save(current_random_state(), temporary / _random_file(ranks.rank))
        if ranks.rank == 0:
            torch.save(record, temporary / _META)

    try:
        ranks.together(f"cannot start the checkpoint {target}", prepare)
        ranks.together(f"cannot see the directory of the checkpoint {target}", lambda: _check_shared(temporary))
        _write_tensors(tensors, temporary, ranks)
        ranks.together(f"cannot write the checkpoint {target}", write_own_files)
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
    ranks = _Ranks.of(process_group)
    source = _local_path(path)

    def prepare() -> tuple[dict[str, Any], _LoadPlan]:
        record = _read_record(source, weights_only)
        stored = FileSystemReader(source).read_metadata().state_dict_metadata
        plan = _LoadPlan({name: item for name, item in stored.items() if isinstance(item, TensorStorageMetadata)})
        plan.add_model(module, record["model_values"])
        if optimizers:
            plan.add_optimizers(module, optimizers, record["optimizers"])
        plan.raise_if_unfit(f"the checkpoint {source} does not fit", strict)
        return record, plan

    record, plan = ranks.together(f"cannot load the checkpoint {source}", prepare)
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
    stored = FileSystemReader(source).read_metadata().state_dict_metadata
    problems = name_problems("tensors beside the model", [n for n in targets if f"beside.{n}" not in stored], [])
    for name, target in targets.items():
        item = stored.get(f"beside.{name}")
        problem = tensor_problem(name, target, item.size) if isinstance(item, TensorStorageMetadata) else None
        problems += [problem] if problem else []
    if problems:
        raise checkpoint_error(f"the checkpoint {source} does not fit", problems)
    _read_tensors({f"beside.{name}": target for name, target in targets.items()}, source, _Ranks.of(process_group))


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


@dataclass(frozen=True)
class _Ranks:
    """The processes that save or load together; `alone` without a process group."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    alone: bool

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> _Ranks:
        if not dist.is_initialized():
            return cls(None, 0, 1, alone=True)
        return cls(group, dist.get_rank(group), dist.get_world_size(group), alone=False)

    def together(self, failure: str, action: Callable[[], _T]) -> _T:
        """Run `action` on every rank and wait for all; if it raises on one, raise on all."""
        error: Exception | None = None
        try:
            result = action()
        except Exception as e:
            error = e
        report = f"{type(error).__name__}: {error}" if error else None
        reports = [report] * self.size
        if not self.alone:
            dist.all_gather_object(reports, report, group=self.group)
        if isinstance(error, CheckpointError) and set(reports) == {report}:
            raise error
        failed = [Problem(f"rank {rank}: {text}") for rank, text in enumerate(reports) if text]
        if failed:
            raise checkpoint_error(failure, failed) from error
        return result


class _LoadPlan:
    """What a load will write and where, and everything that does not fit.

    Attributes:
        targets: Tensors to read, by their name in the checkpoint.
        model: Values for the module, by name.
        optimizers: Arguments of `restore_optimizer`.
        missing, unexpected: Names that only one side has.
        differences: The same as problems, which ``strict=False`` accepts.
        misfits: Problems that nothing accepts.
    """

    def __init__(self, stored: Mapping[str, TensorStorageMetadata]) -> None:
        self._stored = stored
        self.targets: dict[str, Tensor] = {}
        self.model: dict[str, Any] = {}
        self.optimizers: list[tuple[Optimizer, list[list[str]], dict[str, dict[str, Any]], Any]] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.differences: list[Problem] = []
        self.misfits: list[Problem] = []

    def add_model(self, module: nn.Module, values: Mapping[str, Any]) -> None:
        """Plan to read what the module and the checkpoint both have."""
        template = model_state(module)
        saved = {name.removeprefix("model."): name for name in self._stored if name.startswith("model.")}
        self._differ(
            "model",
            [name for name in template if name not in saved and name not in values],
            [name for name in (*saved, *values) if name not in template],
        )
        self.model = {name: value for name, value in values.items() if name in template}
        for name, target in template.items():
            if name not in saved:
                continue
            size = self._stored[saved[name]].size
            problem = tensor_problem(name, target, size)
            if problem:
                self.misfits.append(problem)
            else:
                self.targets[saved[name]] = self.model[name] = target

    def add_optimizers(
        self, module: nn.Module, optimizers: Sequence[Optimizer], records: Sequence[Mapping[str, Any]]
    ) -> None:
        """Plan to read the state of each optimizer into new tensors."""
        if len(optimizers) != len(records):
            self.differences.append(
                Problem(f"{len(optimizers)} optimizers are to be loaded, the checkpoint holds {len(records)}")
            )
            self.missing += [f"optimizer.{i}" for i in range(len(records), len(optimizers))]
            self.unexpected += [f"optimizer.{i}" for i in range(len(optimizers), len(records))]
        for i, (optimizer, record) in enumerate(zip(optimizers, records, strict=False)):
            self._add_optimizer(f"optimizer.{i}", optimizer, optimizer_names(module, optimizer), record)

    def raise_if_unfit(self, title: str, strict: bool) -> None:
        """Raise with everything that cannot be loaded, or, when strict, that would be left out."""
        if self.misfits:
            raise checkpoint_error(title, self.misfits + self.differences)
        if strict and self.differences:
            raise checkpoint_error(f"{title} (strict=False loads what both sides have)", self.differences)

    def _add_optimizer(
        self, label: str, optimizer: Optimizer, names: list[list[str]], record: Mapping[str, Any]
    ) -> None:
        groups, values, tensors = record["param_groups"], record["values"], record["tensors"]
        missing, unexpected = compare_names(names, groups, tensors)
        prefix = f"{label}.state."
        listed = {f"{prefix}{name}.{key}" for name, keys in tensors.items() for key in keys}
        # Rank 0 wrote the lists; a tensor that is on none of them came from a rank with other state.
        unlisted = [k.removeprefix(prefix) for k in self._stored if k.startswith(prefix) and k not in listed]
        self._differ(label, missing, unexpected + unlisted)
        problems = group_problems(label, optimizer, names, groups)
        if problems:
            self.differences += problems
            self.unexpected.append(f"{label}.param_groups")
        state: dict[str, dict[str, Any]] = {}
        for name, param, group in named_parameters_of(optimizer, names):
            if name in tensors:
                state[name] = dict(values[name])
                self.misfits += state_problems(
                    name, param, {key: self._stored[f"{prefix}{name}.{key}"].size for key in tensors[name]}
                )
            for key in tensors.get(name, ()):
                stored_name = f"{prefix}{name}.{key}"
                stored = self._stored[stored_name]
                dtype = _dtype_here(key, stored, self._stored.get(f"model.{name}"), param)
                state[name][key] = self.targets[stored_name] = empty_state(key, stored.size, dtype, param, group)
        self.optimizers.append((optimizer, names, state, None if problems else groups))

    def _differ(self, label: str, missing: Sequence[str], unexpected: Sequence[str]) -> None:
        self.missing += [f"{label}.{name}" for name in missing]
        self.unexpected += [f"{label}.{name}" for name in unexpected]
        self.differences += name_problems(label, missing, unexpected)


def _dtype_here(
    key: str, stored: TensorStorageMetadata, stored_param: TensorStorageMetadata | None, param: Tensor
) -> torch.dtype:
    # State in the parameter's precision follows it to another one; state that was kept in its own stays there.
    dtype: torch.dtype = stored.properties.dtype
    follows = stored_param is not None and stored_param.properties.dtype == dtype and key != "step"
    return param.dtype if follows and (stored.size or not param.ndim) else dtype


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


def _write_tensors(tensors: dict[str, Any], directory: Path, ranks: _Ranks) -> None:
    # Of values that several ranks hold, the lowest one's are stored: buffers that drifted apart stay consistent.
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    writer = FileSystemWriter(directory)
    with _translated(f"cannot write the tensors of the checkpoint {directory}", ranks):
        save(tensors, storage_writer=writer, planner=planner, process_group=ranks.group, no_dist=ranks.alone)


def _read_tensors(targets: dict[str, Any], directory: Path, ranks: _Ranks) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    reader = FileSystemReader(directory)
    with _translated(f"cannot read the tensors of the checkpoint {directory}", ranks):
        load(targets, storage_reader=reader, planner=planner, process_group=ranks.group, no_dist=ranks.alone)


@contextlib.contextmanager
def _translated(failure: str, ranks: _Ranks) -> Iterator[None]:
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


def _restore_random_state(directory: Path, saved_size: int, ranks: _Ranks) -> None:
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
