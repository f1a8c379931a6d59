"""Stand between a module and its callers, outside of every hook that it has.

Hooks of FSDP2, checkpointing and compilation belong to the work of a module; whether it works at all is decided before.
A forward hook is too late for that, so the module gets a class of its own with another `__call__`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import nn

_HANDLER = "_lightning_par_calls"


class Handler(Protocol):
    """Decides what a call of a module does."""

    def call(self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call; `inner` is the module's own."""


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _intercepting(cls: type[nn.Module]) -> type[nn.Module]:
    """Make the class that stands in for `cls`: one base alone, or Python would not let an instance change to it."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_HANDLER].call(self, partial(cls.__call__, self), args, kwargs)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**names, "__call__": call, _HANDLER: None})


def intercept(module: nn.Module, handler: Handler) -> None:
    """Let a handler answer each call of a module; `release` undoes it. One handler a module at a time."""
    module.__dict__[_HANDLER] = handler
    if not is_intercepted(module):
        cls = type(module)
        if cls not in _classes:
            _classes[cls] = _intercepting(cls)
        module.__class__ = _classes[cls]


def release(module: nn.Module) -> None:
    """Give a module its own class back."""
    if is_intercepted(module):
        module.__class__ = type(module).__mro__[1]
        del module.__dict__[_HANDLER]


def is_intercepted(module: nn.Module) -> bool:
    """Whether a handler answers the calls of a module."""
    return _HANDLER in vars(type(module))
