"""What a stage has of the modules of other stages: their shapes, and NaN for their values.

A step that reads what it should not have read then shows it. Parameters of other stages are freed; in their place each
module has a plain tensor of the same shape without memory of its own, which is no parameter and is in no state dict.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.errors import ParallelConfigError, Problem
from lightning_par.parallel import _compat
from lightning_par.parallel.pipeline._probe_compat import fake_copy, fake_mode
from lightning_par.parallel.pipeline.probe import Outline
from lightning_par.parallel.shards import class_name

_STAND_INS = "_lightning_par_stand_ins"


def not_a_number(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A fresh tensor of NaN, or of zeros where the dtype has no NaN (what those decide, the probe has followed)."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(tuple(shape), float("nan"), dtype=dtype, device=device)
    return torch.zeros(tuple(shape), dtype=dtype, device=device)


class Shadow:
    """A copy of a module without memory, which tells the shapes of what the module would return.

    Args:
        module: Copied; not changed.
        device: Where the module will run.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._mode = fake_mode()
        memo: dict[int, Any] = {}
        for tensor in [*module.parameters(), *module.buffers()]:
            memo[id(tensor)] = fake_copy(self._mode, tensor, device)
        self._module = copy.deepcopy(module, memo)
        self._known: dict[Any, tuple[list[Any], Any]] = {}

    def shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        """Return the leaves of what a call returns, tensors without values among them, and their containers."""
        leaves, spec = _compat.flatten((args, kwargs))
        key = (self._module.training, str(spec), tuple(_signature(leaf) for leaf in leaves))
        if key not in self._known:
            with self._mode, torch.no_grad():
                given = [_without_value(leaf) for leaf in leaves]
                args, kwargs = _compat.unflatten(given, spec)
                self._known[key] = _compat.flatten(self._module(*args, **kwargs))
        return self._known[key]

    def train(self, mode: bool) -> None:
        """Follow the mode of the module; asked at each call, and it walks through all that is inside."""
        if mode != self._module.training:
            self._module.train(mode)


class Absent:
    """Answers the calls of a module that a stage does not run.

    Args:
        name: Of the module.
        module: The module, whole.
        outline: What the call returned in the probe.
        device: Where the module would run.
    """

    def __init__(self, name: str, module: nn.Module, outline: Outline, device: torch.device) -> None:
        self._name = name
        self._class = class_name(module)
        self._module = module
        self._outline = outline
        self._device = device
        self._shadow: Shadow | str = ""
        if any(tensor and like is None for tensor, like in zip(outline.tensors, outline.leaves, strict=True)):
            try:
                self._shadow = Shadow(module, device)
            except Exception as error:  # the module's own code
                self._shadow = f"it cannot be copied ({type(error).__name__}: {error})"

    def result(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dtypes: Mapping[int, torch.dtype],
        *,
        compact: bool = False,
    ) -> Any:
        """Return what a call of the module would, NaN in all tensors that it makes, each with memory of its own.

        Args:
            args: Its positional arguments.
            kwargs: Its named arguments.
            dtypes: By the ordinal of a tensor among those returned, its dtype where it is known better than here.
            compact: Whether the tensors take no memory, and cannot be written to.

        Raises:
            ParallelConfigError: If the shapes cannot be found without running the module.
        """
        outline = self._outline
        given = _compat.leaves((args, kwargs))
        if isinstance(self._shadow, Shadow):
            self._shadow.train(self._module.training)
            try:
                leaves, spec = self._shadow.shapes(args, kwargs)
            except Exception as error:  # the module's own code
                raise self._unknown(f"{type(error).__name__}: {error}") from error
        elif self._shadow:
            raise self._unknown(self._shadow)
        else:
            leaves, spec = [], outline.spec
            for like, constant in zip(outline.leaves, outline.constants, strict=True):
                leaves.append(constant if like is None else given[like])
        passed = {i: like for i, like in enumerate(outline.leaves) if outline.passed[i] and like is not None}
        made: list[Any] = []
        tensors = 0
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                made.append(leaf)
                continue
            dtype = dtypes.get(tensors, leaf.dtype)
            tensors += 1
            if i in passed:
                made.append(given[passed[i]])
            else:
                made.append(not_a_number(() if compact else leaf.shape, dtype, self._device).expand(leaf.shape))
        return _compat.unflatten(made, spec)

    def _unknown(self, reason: str) -> ParallelConfigError:
        return ParallelConfigError(
            Problem(
                f"a stage that does not have {self._name!r} ({self._class}) needs the shapes of what it returns, and "
                f"cannot find them without running it: {reason}",
                "keep data-dependent shapes inside a block; or pp_size=1",
                "pp_size: 1",
            )
        )


def free_parameters(module: nn.Module, names: Collection[str], device: torch.device) -> None:
    """Replace parameters by plain NaN tensors of the same shape that take no memory.

    Args:
        module: The root module.
        names: Parameters by name; a tied one by its first.
        device: Where the stand-ins claim to be.
    """
    freed: dict[nn.Parameter, nn.Parameter] = {}
    for full_name, whole in module.named_parameters():
        if full_name in names:
            nan = torch.full((), float("nan"), dtype=whole.dtype, device=device).expand(whole.shape)
            freed[whole] = nn.Parameter(nan, requires_grad=whole.requires_grad)
    for child in module.modules():
        for name, param in child._parameters.items():
            if param in freed:
                child._parameters[name] = None
                child.__dict__[name] = freed[param].detach()
                child.__dict__.setdefault(_STAND_INS, {})[name] = freed[param]


@contextmanager
def stand_ins(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Let a module have parameters, without values or memory, in the places of those that other stages have.

    What is built from `module.parameters()` then has the structure that it would have in one process.
    """
    absent = [
        (child, name, param) for child in module.modules() for name, param in vars(child).get(_STAND_INS, {}).items()
    ]
    values = [child.__dict__.pop(name) for child, name, _ in absent]
    for child, name, param in absent:
        child._parameters[name] = param
    try:
        yield [param for _, _, param in absent]
    finally:
        for (child, name, _), value in zip(absent, values, strict=True):
            child._parameters[name] = None
            child.__dict__[name] = value


def free_buffers(module: nn.Module, modules: Collection[nn.Module]) -> None:
    """Keep the buffers of modules that other stages run out of the state dict; they stay readable."""
    for child in modules:
        for name, buffer in list(child._buffers.items()):
            if buffer is not None:
                child._buffers[name] = None
                child.__dict__[name] = buffer


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    return leaf if isinstance(leaf, int | float | str | bool | type(None)) else type(leaf)


def _without_value(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device) if isinstance(leaf, Tensor) else leaf
