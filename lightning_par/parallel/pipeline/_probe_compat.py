"""Private or unstable torch API that the probe of a pipeline uses; tests/test_pipeline_probe.py watches it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils.flop_counter import flop_registry

from lightning_par.parallel._compat import silenced

__all__ = ["DispatchMode", "fake_copy", "fake_mode", "fake_parameters", "flops_of", "is_view", "schema_name", "written"]

_FAKE_TENSORS = "torch._subclasses.fake_tensor"


def fake_mode() -> FakeTensorMode:
    """A mode in which nothing is computed; real tensors that meet it are taken for their shapes (torch >= 2.0)."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_copy(mode: FakeTensorMode, tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor without memory, of the shape, dtype and kind of another, that claims to be on a device."""
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


@contextmanager
def fake_parameters(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Run what follows with shapes alone, the parameters and buffers of a module replaced by ones without memory."""
    mode = fake_mode()
    fakes: dict[int, Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    tables: list[dict[str, Any]] = [
        table for child in module.modules() for table in (child._parameters, child._buffers)
    ]
    for table in tables:
        for name, tensor in table.items():
            if tensor is not None:
                replaced.append((table, name, tensor))
                if id(tensor) not in fakes:
                    fakes[id(tensor)] = fake_copy(mode, tensor, device)
    for table, name, tensor in replaced:
        table[name] = fakes[id(tensor)]
    try:
        with silenced(_FAKE_TENSORS), mode:
            yield
    finally:
        for table, name, tensor in replaced:
            table[name] = tensor


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor was made under a fake mode."""
    return isinstance(tensor, FakeTensor)


def schema_name(func: Any) -> str:
    """The name of an operator without namespace and overload, such as "add_"."""
    return str(func._schema.name).partition("::")[2]


def is_view(func: Any) -> bool:
    """Whether an operator returns views of its argument (`alias_info` of its schema)."""
    aliases = [argument.alias_info for argument in func._schema.arguments]
    return any(alias is not None and not alias.is_write for alias in aliases) or schema_name(func) == "_unsafe_view"


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operator writes to (`alias_info` of its schema)."""
    found: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [t for t in (given if isinstance(given, list | tuple) else [given]) if isinstance(t, Tensor)]
    return found


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """FLOPs of an operator, 0 where torch has no formula (`torch.utils.flop_counter.flop_registry`, torch >= 2.1)."""
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return 0.0
    try:
        return float(formula(*args, **kwargs, out_val=result))
    except (TypeError, ValueError, AssertionError):
        return 0.0
