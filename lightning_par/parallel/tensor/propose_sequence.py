"""Find out how a divided block can compute with a slice of the sequence on each rank.

Norms, dropout and residuals run on the slice. A divided group needs the whole sequence, and there are several places
where it can be put together; modules read lengths from their inputs, so only a comparison tells which are right.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_par.parallel._compat import map_leaves
from lightning_par.parallel.tensor._compat import first_tensor, fresh, map_first_tensor
from lightning_par.parallel.tensor.draws import draws_on_whole
from lightning_par.parallel.tensor.limits import is_stacked
from lightning_par.parallel.tensor.plan import BlockTensorPlan, SequenceEntry, SequencePlan
from lightning_par.parallel.tensor.trace import LinearGraph, LinearGroup, RandomDraw, common_module
from lightning_par.parallel.tensor.verify import InDouble, Trial, Verdict, verify

# Each costs up to a second.
_MOST_TRIALS = 48


class _Call(NamedTuple):
    """How a module was called, undivided.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        hidden: Those that depend on the block's hidden state, by position or keyword.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: dict[int | str, Tensor]


def with_sequence(
    trial: Trial,
    plan: BlockTensorPlan,
    graph: LinearGraph,
    draws: tuple[RandomDraw, ...],
    mesh: DeviceMesh | None = None,
) -> BlockTensorPlan:
    """Add to a verified plan how the block computes with slices of the sequence, or why it cannot.

    Args:
        trial: The block.
        plan: How it is divided.
        graph: Its Linears; the groups of the plan are numbered as there.
        draws: Where it draws random numbers in training.
        mesh: As for `plan_block`.
    """
    name = type(trial.block).__name__
    hidden = first_tensor((trial.args, trial.kwargs))
    if not hidden.is_floating_point() or hidden.dim() < 2:
        what = f"{hidden.dtype} of shape {tuple(hidden.shape)}"
        return replace(
            plan, sequence_refused=f"the first tensor argument of {name} is {what}, which is no hidden state"
        )
    calls = _calls(trial)
    dim = _sequence_dim(trial.block, calls[""])
    length, least = hidden.shape[dim], 2 * plan.tp_size
    if length % plan.tp_size or length < least:
        # With slices of one position, a wrong plan could broadcast them.
        fitting = max(least, -(-length // plan.tp_size) * plan.tp_size)
        why = (
            f"the sequences of its example have {length} positions, which cannot be cut into {plan.tp_size} equal "
            f"slices of 2 or more; pad or crop to a multiple of tp_size={plan.tp_size}, such as {fitting}"
        )
        return replace(plan, sequence_refused=why)
    if any(not draw.linears and length not in draw.shape for draw in draws):
        why = f"{name} draws random numbers that do not belong to positions, such as whether to drop a sample"
        return replace(plan, sequence_refused=f"{why}: each rank would draw others for its slice")
    closest = Verdict(math.inf, "")
    for sequence in itertools.islice(_proposals(trial, plan, graph, draws, calls, dim), _MOST_TRIALS):
        proposal = replace(plan, sequence=sequence)
        verdict = verify(trial, proposal, mesh)
        if verdict.accepted:
            return replace(proposal, verified=f"{plan.verified}; with slices of the sequence {verdict.error:.1e}")
        closest = min(closest, verdict, key=lambda tried: tried.error) if closest.worst else verdict
    return replace(plan, sequence_refused=_reason(name, graph, closest))


def _reason(name: str, graph: LinearGraph, closest: Verdict) -> str:
    found = f" (closest: {closest.describe()})" if closest.worst else ""
    own = next((group for group in graph.groups if group.rows and not common_module(group.names)), None)
    if own is not None:
        here = f"{name} computes from {', '.join(own.columns)} to {', '.join(own.rows)} in its own forward"
        return f"{here}, with the length of its input{found}: move that, such as attention, into a module of its own"
    return f"{name}: no place to put the sequence together gives the same numbers{found}"


def _calls(trial: Trial) -> dict[str, _Call]:
    """The first call of each module."""
    twin = copy.deepcopy(trial.block).requires_grad_(False)
    calls: dict[str, _Call] = {}

    def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Nothing but the hidden state requires a gradient, so what depends on it is what does.
        given: dict[int | str, Any] = dict(enumerate(args)) | kwargs
        hidden = {key: arg for key, arg in given.items() if isinstance(arg, Tensor) and arg.requires_grad}
        if name not in calls:
            calls[name] = _Call(map_leaves(fresh, args), map_leaves(fresh, kwargs), hidden)

    for name, module in twin.named_modules():
        module.register_forward_pre_hook(lambda _, args, kwargs, name=name: note(name, args, kwargs), with_kwargs=True)
    args, kwargs = map_first_tensor(lambda hidden: hidden.clone().requires_grad_(), trial.args, trial.kwargs)
    with torch.enable_grad(), InDouble():
        twin(*map_leaves(fresh, args), **map_leaves(fresh, kwargs))
    return calls


def _sequence_dim(block: nn.Module, call: _Call) -> int:
    """The dimension along which the block mixes positions; along the other one lies the batch."""
    return next((dim for dim in (1, 0) if _mixes(block, call, dim)), 1)


def _mixes(module: nn.Module, call: _Call, dim: int) -> bool:
    """Whether what a module returns for other positions depends on the first or the last one."""
    if not call.hidden or any(tensor.dim() < dim + 2 or tensor.shape[dim] < 3 for tensor in call.hidden.values()):
        return False
    others = {id(tensor): _with_other_ends(tensor, dim) for tensor in call.hidden.values()}
    args = [others.get(id(arg), arg) for arg in call.args]
    kwargs = {name: others.get(id(arg), arg) for name, arg in call.kwargs.items()}
    try:
        with torch.no_grad(), InDouble():
            before = first_tensor(module(*map_leaves(fresh, call.args), **map_leaves(fresh, call.kwargs)))
            after = first_tensor(module(*map_leaves(fresh, args), **map_leaves(fresh, kwargs)))
    except Exception:  # It runs nowhere but in the block, so nothing is known of it.
        return True
    length = next(iter(call.hidden.values())).shape[dim]
    if before.dim() <= dim or before.shape[dim] != length:
        return True
    before, after = (out.movedim(dim, 0)[1 : length - 1] for out in (before, after))
    return not torch.allclose(before, after, rtol=1e-9, atol=1e-12)


def _with_other_ends(tensor: Tensor, dim: int) -> Tensor:
    tensor = tensor.detach().clone()
    change = torch.linspace(-1, 1, tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
    for end in (0, -1):
        tensor.select(dim, end).add_(change)
    return tensor


def _proposals(
    trial: Trial,
    plan: BlockTensorPlan,
    graph: LinearGraph,
    draws: tuple[RandomDraw, ...],
    calls: dict[str, _Call],
    dim: int,
) -> Iterator[SequencePlan]:
    """Ways to put the sequence together, those with the least communication and work first."""
    length = first_tensor((trial.args, trial.kwargs)).shape[dim]

    def parts(module: str) -> tuple[int | str, ...]:
        """Arguments that are slices; the tokens of an expert, say, are none."""
        hidden = calls[module].hidden.items()
        return tuple(key for key, tensor in hidden if tensor.dim() > dim and tensor.shape[dim] == length)

    def entries_at(modules: Iterable[str], group: int = -1) -> list[SequenceEntry]:
        return [SequenceEntry(name, parts(name), group) for name in modules if name in calls and parts(name)]

    @functools.cache
    def needs_whole(module: str) -> bool:
        stacked = any(is_stacked(inner) for inner in trial.block.get_submodule(module).modules())
        # A loss that balances experts is a mean over all positions, computed outside from what the router returns.
        return stacked or _mixes(trial.block.get_submodule(module), calls[module], dim)

    divided = {module.name: module for module in plan.modules if module.style != "replicate"}
    options: list[list[SequenceEntry | None]] = []
    for number, group in enumerate(graph.groups):
        if group.names[0] in divided:
            around = entries_at(_ancestors(common_module(group.names)))
            at_modules = entries_at(_inner_places(group, draws), number)
            at_linears = [None] if all(parts(name) or not calls[name].hidden for name in group.columns) else []
            gathered = divided[group.names[0]].style == "gather"
            options.append([*around, *at_linears] if gathered else [*at_modules, *at_linears, *around])
    whole_inputs = tuple(name for name in divided if not calls[name].hidden)
    seen: set[SequencePlan] = set()
    for chosen in itertools.product(*options):
        entries = list(dict.fromkeys(filter(None, chosen)))
        modules = {entry.module for entry in entries}
        if all(not _inside(module, modules - {module}) for module in modules):
            entries += entries_at(_undivided(trial.block, "", modules, divided, calls, needs_whole))
            sequence = SequencePlan(dim, tuple(entries), whole_inputs, random=bool(draws))
            if sequence not in seen:
                seen.add(sequence)
                yield replace(sequence, partial_gradients=_partial_gradients(trial, plan, sequence))


def _inner_places(group: LinearGroup, draws: tuple[RandomDraw, ...]) -> list[str]:
    """Modules at whose entry the input of a group's columns can be put together, the outermost first."""
    outermost = common_module(group.names)
    between = [name for name in _ancestors(common_module(group.columns)) if outermost and _inside(name, {outermost})]
    return [name for name in reversed(between) if not draws_on_whole(name, group, draws)]


def _undivided(
    block: nn.Module,
    prefix: str,
    entered: Collection[str],
    divided: Collection[str],
    calls: dict[str, _Call],
    needs_whole: Callable[[str], bool],
) -> Iterator[str]:
    """Outermost modules that hold nothing divided and need the whole sequence."""
    for child, module in block.named_children():
        name = f"{prefix}{child}"
        if name in entered:
            continue
        if name in calls and not any(_inside(linear, {name}) for linear in divided):
            if needs_whole(name):
                yield name
        else:
            yield from _undivided(module, f"{name}.", entered, divided, calls, needs_whole)


def _partial_gradients(trial: Trial, plan: BlockTensorPlan, sequence: SequencePlan) -> tuple[str, ...]:
    """Replicated parameters that are used on slices, or on a rank's own features."""
    names = list(plan.partial_gradients)
    for module in plan.modules:
        if module.style == "replicate" and not sequence.is_whole(module.name):
            own = trial.block.get_submodule(module.name).named_parameters(module.name, recurse=False)
            names += [name for name, _ in own if f"gradient of {name}" in trial.expected]
    return tuple(dict.fromkeys(names))


def _ancestors(name: str) -> list[str]:
    """A module and those around it, without the block."""
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _inside(name: str, modules: Collection[str]) -> bool:
    """Whether a module is one of some, or lies in one."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)
