"""See how a model calls its own modules, with one run of example inputs; from that a plan is made and proven."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_par.errors import ParallelConfigError, Problem
from lightning_par.parallel._compat import map_leaves, map_tensors
from lightning_par.parallel.random import random_state_kept

# Positions and samples of an input that is made up.
_POSITIONS, _SAMPLES = 8, 2


class Call(NamedTuple):
    """The arguments of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Example:
    """One way to run a model.

    Attributes:
        source: Where its inputs come from, in words.
        run: Runs the model; what it returns is not used.
    """

    source: str
    run: Callable[[], Any]


class _SeenAll(BaseException):
    """Ends a run when nothing more is to be seen; no user code catches it by mistake."""


def capture_calls(module: nn.Module, names: Collection[str], example: Example) -> dict[str, Call]:
    """Run a model and note with which arguments some of its modules are called first; the run ends with the last.

    The model is in evaluation mode meanwhile, and random generators go on as if nothing had happened.

    Args:
        module: The model.
        names: Names of modules in it.
        example: How to run it.

    Returns:
        Calls by name; a module that was not called has none.

    Raises:
        Exception: What the run raised before each of the modules was called.
    """
    calls: dict[str, Call] = {}

    def watch(name: str) -> Callable[..., None]:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(name, Call(*map_leaves(_noted, (args, kwargs))))
            if len(calls) == len(names):
                raise _SeenAll

        return before

    with ExitStack() as stack:
        for name in names:
            submodule = module.get_submodule(name)
            hook = submodule.register_forward_pre_hook(watch(name), with_kwargs=True, prepend=True)
            stack.callback(hook.remove)
        stack.enter_context(in_evaluation(module))
        stack.enter_context(random_state_kept())
        with suppress(_SeenAll):
            example.run()
    return calls


def examples_of(module: nn.Module, blocks: Collection[str], given: Any = None) -> Iterator[Example]:
    """Ways to run a model, those that say most about its use first.

    Args:
        module: The model.
        blocks: Names of its blocks.
        given: Inputs of its forward: a tuple of positional ones, a mapping of those with names, or one tensor.
    """
    if given is not None:
        yield Example("example_inputs", lambda: _call(module, given))
        return
    inputs = getattr(module, "example_input_array", None)
    if inputs is not None:
        yield Example("example_input_array", lambda: _call(module, inputs))
    for name, child in module.named_modules():
        dummy = _dummy_inputs(child)
        if dummy is not None and all(block.startswith(f"{name}." if name else "") for block in blocks):
            # Named, because a loop variable would have changed by then.
            yield Example(f"dummy_inputs of {type(child).__name__}", _runner(child, dummy))
            break


def guessed_call(block: nn.Module) -> Call:
    """Make up the call of a block that takes one tensor of shape (batch, length, width).

    Raises:
        ParallelConfigError: If the block's width cannot be seen, or if it does not take such a tensor.
    """
    widths = [p.shape[-1] for p in block.parameters() if p.dim() == 1] or [0]
    generator = torch.Generator().manual_seed(0)
    call = Call((torch.randn(_SAMPLES, _POSITIONS, widths[0], generator=generator),), {})
    try:
        with torch.no_grad(), in_evaluation(block):
            block(*map_tensors(lambda t: t.to(next(block.parameters())), call.args))
    except Exception as error:  # the block's own code
        name = type(block).__name__
        problem = Problem(
            f"a tensor-parallel plan is proven on one call of {name}, and its arguments are not known: it does not "
            f"take one tensor of shape {tuple(call.args[0].shape)} ({type(error).__name__}: {error})",
            "example_inputs=<the arguments of the model's forward>, or set example_input_array on the LightningModule",
        )
        raise ParallelConfigError(problem) from error
    return call


def with_values(call: Call) -> Call:
    """Give the tensors of a call that are on the meta device values: a plan holds for any.

    Floating ones are random, integers zero and booleans true.
    """
    generator = torch.Generator().manual_seed(0)

    def filled(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if tensor.dtype == torch.bool:
            return torch.ones(tensor.shape, dtype=torch.bool)
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        values = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        return values.requires_grad_(tensor.requires_grad)

    return Call(*map_tensors(filled, (call.args, call.kwargs)))


@contextmanager
def in_evaluation(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and each of its modules back into its own."""
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        yield
    finally:
        for child in training:
            child.training = True


def _noted(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        # Not the tensor itself, which would keep the graph of the run alive.
        return leaf.detach().requires_grad_(leaf.requires_grad)
    return fresh(leaf)


def fresh(leaf: Any) -> Any:
    """Copy an argument that a call may change, such as a cache of keys and values; others are returned as they are."""
    changeable = hasattr(leaf, "__dict__") and not callable(leaf) and not isinstance(leaf, Tensor | nn.Module)
    return copy.deepcopy(leaf) if changeable else leaf


def _call(module: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)


def _runner(module: nn.Module, inputs: Mapping[str, Any]) -> Callable[[], Any]:
    return lambda: module(**inputs)


def _dummy_inputs(module: nn.Module) -> Mapping[str, Any] | None:
    """What Hugging Face models say they can be called with."""
    if not any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
        return None
    inputs = module.dummy_inputs
    return inputs if isinstance(inputs, Mapping) else None
