"""Verified plans on disk, so that a block is compared once and not at every start."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.errors import Problem
from lightning_par.parallel.tensor.plan import AttributePatch, BlockTensorPlan, ModulePlan, SequenceEntry, SequencePlan

log = logging.getLogger(__name__)

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, Enum)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_DEEPEST = 6


def cache_folder() -> Path:
    """Where plans are kept: `$LIGHTNING_PAR_CACHE`, or `~/.cache/lightning_par`."""
    return Path(os.environ.get("LIGHTNING_PAR_CACHE") or Path.home() / ".cache" / "lightning_par") / "tensor_plans"


def key_of(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tp_size: int,
    styles: Mapping[str, str],
    sequence_parallel: bool = False,
    variant: str = "",
) -> str | None:
    """A key that changes with whatever a plan may depend on, or None where that cannot be told.

    It covers the source files of the block's classes and the versions of their packages, shapes of parameters, what
    modules and their configuration hold, shapes of the arguments, the request, torch, and the planner's own files.
    """
    try:
        facts = [
            _own_source(),
            torch.__version__,
            tp_size,
            sorted(styles.items()),
            sequence_parallel,
            variant,
            [(name, _source(type(module)), _attributes(module)) for name, module in block.named_modules()],
            [(name, _fact(p)) for name, p in block.named_parameters(remove_duplicate=False)],
            [(name, _fact(buffer)) for name, buffer in block.named_buffers(remove_duplicate=False)],
            _fact((args, dict(kwargs))),
        ]
    except _UnknownError:
        return None
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def load(key: str) -> BlockTensorPlan | None:
    """Return the plan of a key, or None if there is none that can be read."""
    try:
        data = _with_tuples(json.loads((cache_folder() / f"{key}.json").read_text()))
        data["modules"] = tuple(ModulePlan(**entry) for entry in data["modules"])
        data["patches"] = tuple(AttributePatch(**entry) for entry in data["patches"])
        if sequence := data["sequence"]:
            sequence["entries"] = tuple(SequenceEntry(**entry) for entry in sequence["entries"])
            data["sequence"] = SequencePlan(**sequence)
        data["misfits"] = tuple(Problem(**entry) for entry in data["misfits"])
        return BlockTensorPlan(**data)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _with_tuples(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_with_tuples(value) for value in data)
    return {name: _with_tuples(value) for name, value in data.items()} if isinstance(data, dict) else data


def store(key: str, plan: BlockTensorPlan) -> None:
    """Write a plan, whole or not at all, also while others write; a folder that cannot be written is no error."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as file:
            json.dump(asdict(plan), file)
        os.replace(file.name, folder / f"{key}.json")
    except OSError as error:
        log.info("the tensor-parallel plan is not kept: %s", error)


class _UnknownError(Exception):
    """Two things that behave differently could look the same."""


@functools.cache
def _own_source() -> str:
    """The planner's own files: a plan that an older one has verified is not trusted."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@functools.cache
def _file_hash(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _source(cls: type) -> tuple[str, ...]:
    """The class, and the files and packages that it and its bases come from; those of torch go by its version."""
    facts = [f"{cls.__module__}.{cls.__qualname__}"]
    for base in cls.__mro__:
        package = base.__module__.partition(".")[0]
        if package in ("torch", "builtins", "abc", "typing"):
            continue
        try:
            facts.append(_file_hash(inspect.getfile(base)))
        except (OSError, TypeError) as error:  # written in a session
            raise _UnknownError from error
        with suppress(metadata.PackageNotFoundError):
            facts.append(metadata.version(package))
    return tuple(facts)


def _attributes(module: nn.Module) -> list[tuple[str, str]]:
    held = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    # Layers of one model share a plan.
    held.pop("layer_idx", None)
    held["hooks"] = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return sorted((name, _fact(value)) for name, value in held.items())


def _fact(value: Any, depth: int = 0) -> str:
    """Describe a value; the same text means the same behaviour."""
    if depth > _DEEPEST:
        raise _UnknownError
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype} {value.requires_grad}"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, nn.Module):
        return type(value).__qualname__
    if isinstance(value, Mapping):
        return repr([(repr(key), _fact(inner, depth + 1)) for key, inner in value.items()])
    if isinstance(value, list | tuple):
        return repr([_fact(inner, depth + 1) for inner in value])
    if isinstance(value, set | frozenset):
        return repr(sorted(_fact(inner, depth + 1) for inner in value))
    if isinstance(value, functools.partial):
        return _fact((value.func, value.args, value.keywords), depth + 1)
    if callable(value) and hasattr(value, "__qualname__"):
        if "<" in value.__qualname__ or value.__module__ == "__main__":
            raise _UnknownError
        return f"{value.__module__}.{value.__qualname__}"
    if not hasattr(value, "__dict__"):
        raise _UnknownError
    return f"{_source(type(value))} {_fact(vars(value), depth + 1)}"
