"""Turns a checkpoint into the formats of other programs, with one tensor in memory at a time."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, get_args

import torch

from lightning_par.checkpoint.dcp_directory import write_dcp
from lightning_par.checkpoint.errors import CheckpointError, checkpoint_error
from lightning_par.checkpoint.full import RANKS
from lightning_par.checkpoint.manifest import Verify
from lightning_par.checkpoint.reading import StoredCheckpoint, StoredTensor, newest_valid, open_checkpoint
from lightning_par.checkpoint.safetensors_file import check_dtypes, write_safetensors
from lightning_par.checkpoint.storage import LocalStorage, StrPath
from lightning_par.checkpoint.torch_file import write_torch_file
from lightning_par.errors import Problem

Target = Literal["lightning", "safetensors", "dcp"]

_SUFFIXES = {"lightning": ".ckpt", "safetensors": "-safetensors", "dcp": "-dcp"}
# What `convert` writes into a directory; others are never deleted.
_OWN_FILES = {
    "safetensors": ("model*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json"),
    "dcp": (".metadata", "__*.distcp"),
}
# Where Lightning's WeightAveraging keeps the weights with which training goes on.
_CURRENT = "current_model_state"


class ExportError(CheckpointError):
    """What was asked for cannot be done; the checkpoint itself may be valid."""


@dataclass(frozen=True)
class Converted:
    """What `convert` has done.

    Attributes:
        source: The checkpoint that was read.
        output: The file or directory that was written.
        tensors: The number of tensors in it.
        bytes: Their size.
        passed_over: Newer checkpoints that are not valid, and why.
        left_out: Names of the model's state that the format or the choice of a part leaves out.
        notes: What the user should know.
    """

    source: str
    output: str
    tensors: int
    bytes: int
    passed_over: Mapping[str, list[str]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Plan:
    """What will be written: `write` gets the name of a file or directory that does not exist yet."""

    tensors: list[StoredTensor]
    write: Callable[[Path], None]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def convert(
    path: StrPath,
    to: Target,
    output: StrPath | None = None,
    *,
    overwrite: bool = False,
    verify: Verify = "checksum",
    prefix: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5_000_000_000,
) -> Converted:
    """Convert a checkpoint directory; no process group, no accelerator, no model needed.

    The output gets its name by a rename when it is complete and on the disk.

    Args:
        path: A checkpoint, or a directory of several, of which the newest valid one is taken. A checkpoint has pickles
            in it, so convert only what you trust.
        to: ``"lightning"``: one file with everything, which plain Lightning (a file of Fabric: plain Fabric) goes on
            from. ``"safetensors"``: a directory with the weights, as Hugging Face has it. ``"dcp"``: a directory for
            ``torch.distributed.checkpoint``, with ``model`` and ``optimizer`` as its ``get_state_dict`` names them.
        output: What is written; by default a name in the directory ``converted`` beside the checkpoint.
        overwrite: Replace an output of an earlier call.
        verify: How the files are compared with the manifest first.
        prefix: With ``"safetensors"``, take the tensors whose names begin with it, and drop it. By default that of the
            Hugging Face model in the module, or none.
        dtype: With ``"safetensors"``, of all floating-point tensors.
        max_shard_size: With ``"safetensors"``, bytes of tensors in one file; a larger tensor has a file for itself.

    Raises:
        ExportError: If what is asked for cannot be done, or the output exists.
        CheckpointError: If the checkpoint is not valid.
    """
    if to not in get_args(Target):
        raise _refusal(Problem(f"to is {to!r}; it is one of {', '.join(get_args(Target))}", "to='lightning'"))
    if to != "safetensors" and (dtype is not None or prefix is not None):
        raise _refusal(
            Problem(
                "dtype and prefix are for weights alone; training goes on from all of a checkpoint as it is",
                "to='safetensors'",
                "--to safetensors",
            )
        )
    if output is not None:
        # Before the files are read, which takes long.
        _check_output(Path(output).absolute(), to, os.fspath(path), overwrite)
    source, passed_over = newest_valid(path, verify)
    target = Path(output).absolute() if output is not None else _beside(source, _SUFFIXES[to])
    _check_output(target, to, source, overwrite)
    stored = open_checkpoint(source)
    if to == "lightning":
        plan = _lightning(stored)
    elif to == "dcp":
        plan = _dcp(stored)
    else:
        plan = _safetensors(stored, prefix, dtype, max_shard_size)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _appearing(target, overwrite) as temporary:
        plan.write(temporary)
    return Converted(
        stored.path,
        str(target),
        len(plan.tensors),
        sum(tensor.nbytes for tensor in plan.tensors),
        passed_over,
        plan.left_out,
        plan.notes,
    )


# -- one file of plain Lightning --------------------------------------------------------------------------------------


def _lightning(stored: StoredCheckpoint) -> _Plan:
    tensors = _model_tensors(stored)
    model: dict[str, Any] = {**tensors, **stored.record["model_values"]}
    optimizers = [_numbered(stored, i) for i in range(len(stored.record["optimizers"]))]
    content: dict[str, Any] = dict(stored.meta)
    names = stored.about.get("fabric")
    if names is not None:
        one = len(names["modules"]) == 1
        for name in names["modules"]:
            content[name] = model if one else _under(model, f"{name}.")
        content |= dict(zip(names["optimizers"], optimizers, strict=True))
    else:
        content["state_dict"] = model
        # A checkpoint of the weights alone says so by not having these.
        if optimizers or "lr_schedulers" in content:
            content["optimizer_states"] = optimizers
    if "loaders" in stored.rank_state(0):
        data_ranks = stored.manifest.data_ranks
        content[RANKS] = [stored.rank_state(data_ranks.index(i)) for i in range(max(data_ranks) + 1)]
    beside = stored.under("beside.")
    if beside:
        content[_CURRENT] = {**beside, **content.get(_CURRENT, {})}

    def write(path: Path) -> None:
        with _created(path) as stream:
            write_torch_file(stream, content)

    used = {id(one): one for one in (*tensors.values(), *stored.under("optimizer.").values(), *beside.values())}
    return _Plan(list(used.values()), write)


def _numbered(stored: StoredCheckpoint, i: int) -> dict[str, Any]:
    """The state of an optimizer in torch's own format, where parameters are numbers in the order of the groups."""
    record = stored.record["optimizers"][i]
    if not record.get("is_ordered", True):
        raise _refusal(
            Problem(
                f"optimizer {i} was saved by the stages of a pipeline, and in which order one process would have the "
                "parameters of its groups cannot be told: a file of plain Lightning numbers them",
                "to='dcp', which names them; or give the optimizer its parameters in the order of the module",
                "--to dcp",
            )
        )
    ids = {name: i for i, name in enumerate(name for group in record["param_groups"] for name in group["params"])}
    state = {ids[name]: values for name, values in sorted(_state(stored, i).items(), key=lambda item: ids[item[0]])}
    groups = [group | {"params": [ids[name] for name in group["params"]]} for group in record["param_groups"]]
    return {"state": state, "param_groups": groups}


def _state(stored: StoredCheckpoint, i: int) -> dict[str, dict[str, Any]]:
    """The state of an optimizer by the name of the parameter."""
    record = stored.record["optimizers"][i]
    tensors = stored.under(f"optimizer.{i}.state.")
    names = dict.fromkeys((*record["tensors"], *record["values"]))
    return {
        name: {key: tensors[f"{name}.{key}"] for key in record["tensors"].get(name, ())}
        | record["values"].get(name, {})
        for name in names
    }


# -- weights as Hugging Face has them ---------------------------------------------------------------------------------


def _safetensors(stored: StoredCheckpoint, prefix: str | None, dtype: torch.dtype | None, max_shard_size: int) -> _Plan:
    pretrained = stored.about.get("pretrained", {})
    if prefix is None:
        prefix = _only_prefix(pretrained)
    tensors = _model_tensors(stored)
    chosen = {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
    if not chosen:
        raise _refusal(
            Problem(f"no tensor has a name that begins with {prefix!r}; the first is {next(iter(tensors), None)}")
        )
    configs = pretrained.get(prefix)
    if configs is not None and configs["problem"]:
        fix = "mend that before the save (adapters: merge_and_unload), or to='lightning'"
        raise _refusal(Problem(configs["problem"], fix, "--to lightning"))
    # A tied parameter is written under its first name.
    first: dict[int, str] = {}
    weights = {name: one for name, one in chosen.items() if first.setdefault(id(one), name) == name}
    if dtype is not None:
        weights = {name: one.to(dtype) if one.dtype.is_floating_point else one for name, one in weights.items()}
    check_dtypes(weights)
    left_out = [name for name in (*tensors, *stored.record["model_values"]) if not name.startswith(prefix)]
    left_out += [name for name in stored.record["model_values"] if name.startswith(prefix)]
    documents = _documents(configs, weights)
    shards = _shards(weights, max_shard_size)
    return _Plan(
        list(weights.values()),
        lambda path: _write_shards(path, shards, documents),
        tuple(left_out),
        () if documents else ("no config.json: no Hugging Face model was saved under this prefix",),
    )


def _only_prefix(pretrained: Mapping[str, Any]) -> str:
    if len(pretrained) > 1:
        first = next(iter(pretrained))
        raise _refusal(
            Problem(
                f"{len(pretrained)} Hugging Face models are in the module: "
                + ", ".join(f"{prefix} ({one['config']['architectures'][0]})" for prefix, one in pretrained.items()),
                f"prefix={first!r}",
                f"--prefix {first}",
            )
        )
    return next(iter(pretrained), "")


def _documents(configs: Mapping[str, Any] | None, weights: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """The other files of the directory, as JSON."""
    if configs is None:
        return {}
    config = dict(configs["config"])
    # from_pretrained takes the dtype from here; it is that of the weights, not that in which the model was made.
    floating = [one.dtype for one in weights.values() if one.dtype.is_floating_point]
    if floating:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(floating[0]).removeprefix("torch.")
    documents = {"config.json": config}
    if configs["generation_config"] is not None:
        documents["generation_config.json"] = configs["generation_config"]
    return documents


def _shards(weights: Mapping[str, StoredTensor], most: int) -> dict[str, dict[str, StoredTensor]]:
    """The tensors of each file, in order."""
    parts: list[dict[str, StoredTensor]] = [{}]
    size = 0
    for name, one in weights.items():
        if parts[-1] and size + one.nbytes > most:
            parts.append({})
            size = 0
        parts[-1][name] = one
        size += one.nbytes
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def _write_shards(path: Path, shards: Mapping[str, Mapping[str, StoredTensor]], documents: Mapping[str, Any]) -> None:
    path.mkdir()
    for file, part in shards.items():
        with _created(path / file) as stream:
            write_safetensors(stream, part)
    if len(shards) > 1:
        total = sum(one.nbytes for part in shards.values() for one in part.values())
        where = {name: file for file, part in shards.items() for name in part}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        documents = {"model.safetensors.index.json": index, **documents}
    for file, document in documents.items():
        with _created(path / file) as stream:
            stream.write(json.dumps(document, indent=2).encode() + b"\n")


# -- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def _dcp(stored: StoredCheckpoint) -> _Plan:
    state: dict[str, Any] = {"model": {**_model_tensors(stored), **stored.record["model_values"]}}
    groups = [group for record in stored.record["optimizers"] for group in record["param_groups"]]
    names = [name for group in groups for name in group["params"]]
    if len(set(names)) != len(names):
        problem = "a parameter is in several optimizers, whose states torch's get_state_dict puts under one name"
        raise _refusal(Problem(problem, "to='lightning'", "--to lightning"))
    if groups:
        # Those of all optimizers together, as torch's get_state_dict has them.
        states = [_state(stored, i) for i in range(len(stored.record["optimizers"]))]
        merged = {name: values for one in states for name, values in one.items()}
        state["optimizer"] = {"state": merged, "param_groups": groups}

    def write(path: Path) -> None:
        path.mkdir()
        write_dcp(path, state)

    return _Plan([*stored.under("model.").values(), *stored.under("optimizer.").values()], write)


# -- common -----------------------------------------------------------------------------------------------------------


def _model_tensors(stored: StoredCheckpoint) -> dict[str, StoredTensor]:
    """The model's tensors by name; tied ones are the same object."""
    tensors = stored.under("model.")
    tied = stored.about.get("tied", {})
    return {name: tensors.get(tied.get(name, name), one) for name, one in tensors.items()}


def _under(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _refusal(problem: Problem) -> CheckpointError:
    return checkpoint_error("this cannot be converted", [problem], ExportError)


def _beside(source: str, suffix: str) -> Path:
    if "://" in source:
        raise _refusal(
            Problem(f"{source} is a URL; the output is written to a local disk", "output='PATH'", "--output PATH")
        )
    # Not in the directory of the checkpoints itself, where it would pass for one of them.
    directory, name = os.path.split(source)
    return Path(directory, "converted", name.removesuffix(".ckpt") + suffix)


def _check_output(target: Path, to: str, source: str, overwrite: bool) -> None:
    """Refuse to write over anything but an earlier output of the same kind."""
    real = os.path.realpath(source)
    if "://" not in source and Path(os.path.realpath(target)).is_relative_to(real):
        raise _refusal(
            Problem(f"the output {target} is in the checkpoint itself", "output='another path'", "--output PATH")
        )
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise _refusal(
            Problem(f"the output {target} exists", "overwrite=True or another output", "--overwrite or --output PATH")
        )
    if to == "lightning":
        foreign = ["a directory"] if target.is_dir() else []
    elif not target.is_dir():
        foreign = ["a file"]
    else:
        foreign = [p.name for p in target.iterdir() if not any(p.match(pattern) for pattern in _OWN_FILES[to])]
    if foreign:
        what = f"the output {target} is not of an earlier call and is not replaced: {', '.join(sorted(foreign)[:3])}"
        raise _refusal(Problem(what, "another output", "--output PATH"))


@contextlib.contextmanager
def _appearing(target: Path, overwrite: bool) -> Iterator[Path]:
    """Give what is written under the name in the context to `target`, if nothing fails."""
    directory = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield directory / target.name
        if os.path.lexists(target) and not overwrite:
            raise _refusal(Problem(f"the output {target} has appeared meanwhile", "another output", "--output PATH"))
        LocalStorage().publish(str(directory / target.name), str(target))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _created(path: Path) -> Iterator[IO[bytes]]:
    """A new file, which is on the disk when the context ends."""
    with open(path, "xb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
