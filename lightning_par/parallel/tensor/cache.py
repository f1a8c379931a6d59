"""Verified plans on disk, so that a block is compared once and not at every start."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.parallel.tensor._compat import leaves
from lightning_par.parallel.tensor.plan import AttributePatch, BlockTensorPlan, ModulePlan

log = logging.getLogger(__name__)

_FORMAT = 1
_PLAIN = (bool, int, float, str, type(None))


def cache_folder() -> Path:
    """Where plans are kept: `$LIGHTNING_PAR_CACHE`, or `~/.cache/lightning_par`."""
    return Path(os.environ.get("LIGHTNING_PAR_CACHE") or Path.home() / ".cache" / "lightning_par") / "tensor_plans"


def key_of(
    block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], tp_size: int, styles: Mapping[str, str]
) -> str:
    """A key that changes with whatever a plan may depend on.

    It covers the classes of the block with their source, shapes of parameters, numbers that modules and their
    configuration hold, shapes of the arguments, the request, and the versions of torch and of this package's planner.
    """
    facts = [
        _FORMAT,
        _own_source(),
        torch.__version__,
        tp_size,
        sorted(styles.items()),
        [(name, _class(module), _numbers(module)) for name, module in block.named_modules()],
        [(name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters(remove_duplicate=False)],
        [_argument(leaf) for leaf in leaves((args, dict(kwargs)))],
        sorted(kwargs),
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def load(key: str) -> BlockTensorPlan | None:
    """Return the plan of a key, or None if there is none that can be read."""
    try:
        data = json.loads((cache_folder() / f"{key}.json").read_text())
        modules = tuple(ModulePlan(**{**entry, "parts": tuple(entry["parts"])}) for entry in data["modules"])
        patches = tuple(AttributePatch(**entry) for entry in data["patches"])
        partial = tuple(data["partial_gradients"])
        return BlockTensorPlan(data["tp_size"], modules, patches, partial, data["verified"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


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


def _own_source() -> str:
    """The planner's own files: a plan that an older one has verified is not trusted."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _class(module: nn.Module) -> str:
    cls = type(module)
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):  # built in a session
        source = ""
    return f"{cls.__module__}.{cls.__qualname__} {hashlib.sha256(source.encode()).hexdigest()}"


def _numbers(module: nn.Module) -> list[tuple[str, str]]:
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if isinstance(value, _PLAIN):
            found[name] = value
        elif not name.startswith("_") and hasattr(value, "__dict__") and not isinstance(value, Tensor | nn.Module):
            found |= {f"{name}.{key}": inner for key, inner in vars(value).items() if isinstance(inner, _PLAIN)}
    # Whether it trains now, and which layer it is, changes no plan.
    return sorted((name, repr(value)) for name, value in found.items() if name not in ("training", "layer_idx"))


def _argument(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype} {leaf.requires_grad}"
    return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__qualname__
