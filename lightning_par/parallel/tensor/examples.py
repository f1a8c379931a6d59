"""See how a model calls its own modules, with one run of example inputs; from that a plan is made and proven."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_par.errors import ParallelConfigError, Problem
from lightning_par.parallel._compat import map_leaves, map_tensors
from lightning_par.parallel.random import random_state_kept
from lightning_par.parallel.tensor._compat import fake_tensors, fresh
from lightning_par.parallel.tensor.verify import describe, with_values
from lightning_par.parallel.tensor.vocabulary_plan import Watched, watching

log = logging.getLogger(__name__)

# Positions and samples of an input that is made up.
_POSITIONS, _SAMPLES = 32, 2
# A model of more parameters takes long to run on a CPU.
_LARGE = 200_000_000


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


@dataclass(frozen=True)
class Seen:
    """What a run has shown.

    Attributes:
        source: Where its inputs came from.
        calls: How each kind of block was called, by the name of the first one.
        watched: How the vocabulary's modules were used.
    """

    source: str
    calls: Mapping[str, Call]
    watched: Watched


def observe(module: nn.Module, blocks: Sequence[str], examples: Iterable[Example]) -> Seen | None:
    """Run a model once and note how its blocks and the modules of its vocabulary are used.

    The model is in evaluation mode meanwhile, buffers and random generators are afterwards as if nothing had happened.
    A large model runs without computing anything, where it can. Every rank must call this: the model may communicate.

    Args:
        module: The model.
        blocks: Names of its blocks.
        examples: Ways to run it; the first that works is taken.

    Returns:
        None where none works.
    """
    names = list(first_of_each_kind(module, blocks).values())
    large = sum(p.numel() for p in module.parameters()) > _LARGE and not any(p.is_meta for p in module.parameters())
    for example in examples:
        for mode in (fake_tensors, nullcontext) if large else (nullcontext,):
            seen = _observe(module, blocks, names, example, mode())
            if isinstance(seen, Seen):
                return seen
            log.info("%s shows no call of the blocks: %s", example.source, seen)
    return None


def _observe(
    module: nn.Module, blocks: Sequence[str], names: Sequence[str], example: Example, mode: AbstractContextManager[Any]
) -> Seen | str:
    """Run one example; what it showed, or why it showed nothing."""
    calls: dict[str, Call] = {}

    def watch(name: str) -> Callable[..., None]:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(name, Call(*map_leaves(_noted, (args, kwargs))))

        return before

    why = "it calls none"
    with ExitStack() as stack:
        for name in names:
            submodule = module.get_submodule(name)
            hook = submodule.register_forward_pre_hook(watch(name), with_kwargs=True, prepend=True)
            stack.callback(hook.remove)
        stack.enter_context(in_evaluation(module))
        stack.enter_context(random_state_kept())
        stack.enter_context(_buffers_kept(module))
        watched = stack.enter_context(watching(module, blocks))
        try:
            with mode:
                example.run()
        except Exception as error:  # the user's own code; what it has shown until then is true
            why = describe(error)
    return Seen(example.source, calls, watched) if len(calls) == len(names) else why


def first_of_each_kind(module: nn.Module, blocks: Sequence[str]) -> dict[tuple[Any, ...], str]:
    """The first block of each kind; blocks of one kind share a plan."""
    kinds: dict[tuple[Any, ...], str] = {}
    for name in blocks:
        kinds.setdefault(kind_of(module.get_submodule(name)), name)
    return kinds


def kind_of(block: nn.Module) -> tuple[Any, ...]:
    """What two blocks that share a plan have in common: class, parameters and the numbers that modules hold."""
    parameters = tuple((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters(remove_duplicate=False))
    numbers = tuple(
        (name, key, value)
        for name, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        # An index of the layer is not what it computes.
        if isinstance(value, int | float | str) and key not in ("training", "layer_idx", "layer_index", "layer_id")
    )
    return type(block), parameters, numbers


def examples_of(module: nn.Module, blocks: Collection[str], given: Any = None) -> Iterator[Example]:
    """Ways to run a model, those that say most about its use first.

    Args:
        module: The model.
        blocks: Names of its blocks.
        given: An `Example`, or inputs of the model's forward: a tuple of positional ones, a mapping of those with
            names, or one tensor.
    """
    if isinstance(given, Example):
        yield given
    elif given is not None:
        yield Example("example_inputs", partial(_call, module, given))
        return
    inputs = getattr(module, "example_input_array", None)
    if inputs is not None:
        yield Example("example_input_array", partial(_call, module, inputs))
    for name, child in module.named_modules():
        dummy = _dummy_inputs(child)
        if dummy is not None and all(block.startswith(f"{name}." if name else "") for block in blocks):
            # Slices of the sequence need more positions than the few that these have.
            for inputs in (map_tensors(_with_more_positions, dummy), dummy):
                yield Example(f"dummy_inputs of {type(child).__name__}", partial(_call, child, inputs))
            return


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


def call_with_values(call: Call) -> Call:
    """Give the tensors of a call that have no values some: a plan holds for any."""
    generator = torch.Generator().manual_seed(0)
    return Call(*map_tensors(lambda tensor: with_values(tensor, generator), (call.args, call.kwargs)))


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


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers() if not buffer.is_meta]
    try:
        yield
    finally:
        for buffer, value in before:
            if not torch.equal(buffer, value):
                buffer.copy_(value)


def _noted(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        # Not the tensor itself, which would keep the graph of the run alive.
        return leaf.detach().requires_grad_(leaf.requires_grad)
    return fresh(leaf)


def _call(module: nn.Module, inputs: Any) -> Any:
    like = next(module.parameters())

    def fitting(tensor: Tensor) -> Tensor:
        return tensor.to(like.device, like.dtype if tensor.is_floating_point() else None)

    inputs = map_tensors(fitting, inputs)
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)


def _with_more_positions(ids: Tensor) -> Tensor:
    return ids.repeat(1, _POSITIONS)[:, :_POSITIONS] if ids.dim() == 2 else ids


def _dummy_inputs(module: nn.Module) -> Mapping[str, Any] | None:
    """What Hugging Face models say they can be called with."""
    if not any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
        return None
    inputs = module.dummy_inputs
    return inputs if isinstance(inputs, Mapping) else None
