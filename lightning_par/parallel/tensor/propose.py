"""Find a plan for one block: propose divisions of each group of Linears, and take the first that gives its numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_par.errors import ParallelConfigError, Problem, Problems
from lightning_par.parallel.tensor import cache
from lightning_par.parallel.tensor.attributes import attributes_read, patch_sets
from lightning_par.parallel.tensor.draws import draws_in_group, is_separable, trace_in_training
from lightning_par.parallel.tensor.limits import Limits, is_stacked, limits_of, uncalled_reason
from lightning_par.parallel.tensor.plan import AttributePatch, BlockTensorPlan, ModulePlan
from lightning_par.parallel.tensor.propose_sequence import with_sequence
from lightning_par.parallel.tensor.shrink import shrink
from lightning_par.parallel.tensor.trace import (
    LinearGraph,
    LinearGroup,
    RandomDraw,
    common_module,
    is_linear,
    trace_linears,
)
from lightning_par.parallel.tensor.verify import Trial, Verdict, describe, prepare, verify

Wish = Literal["shard", "gather", "replicate"]
# A proposal costs up to a second; attention that needs more of them is gathered.
_MOST_TRIALS = 48
# A block of more parameters is planned with a narrow copy of it.
LARGE = 4_000_000


class _Outcome(NamedTuple):
    """What became of one group: a plan with it, or why there is none that computes with slices."""

    plan: BlockTensorPlan
    verdict: Verdict | None
    problems: tuple[Problem, ...] = ()


def plan_block(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    tp_size: int = 2,
    *,
    mesh: DeviceMesh | None = None,
    styles: Mapping[str, Wish] | None = None,
    sequence_parallel: bool = False,
    variant: str = "",
    use_cache: bool = True,
) -> BlockTensorPlan:
    """Trace a block, propose how to divide it, and verify; the block itself stays as it is.

    A plan is plain data that does not depend on the rank, and holds for every block of the same class and sizes.

    Args:
        block: The block; on the meta device, it is planned with random values.
        args: Positional arguments of one call, as the model makes it.
        kwargs: Keyword arguments of that call. Tensors that require a gradient there have theirs compared.
        tp_size: Number of ranks.
        mesh: The tensor-parallel mesh; needed once a process group is initialised. Nothing is sent over it where torch
            can simulate ranks.
        styles: What some Linears must become, by globs of their names in the block: "shard" (compute with slices),
            "gather" (slices of memory only) or "replicate". The rest is found out.
        sequence_parallel: Whether to find out as well how the block computes with slices of the sequence: the plan has
            either a `sequence` or the reason, `sequence_refused`.
        variant: Tells blocks apart that are alike by class, sizes and attributes, for the plan on disk.
        use_cache: Whether to read and write the plan on disk.

    Raises:
        ParallelConfigError: If a style matches no Linear or cannot be had.
        ValueError: If the mesh is missing.
    """
    kwargs, styles = kwargs or {}, styles or {}
    if mesh is None and dist.is_initialized():
        raise ValueError("a process group is initialised, so a plan is verified on the tensor-parallel mesh: pass mesh")
    names = [name for name, module in block.named_modules() if is_linear(module)]
    _check_styles(styles, names)
    key = cache.key_of(block, args, kwargs, tp_size, styles, sequence_parallel, variant) if use_cache else None
    plan = cache.load(key) if key else None
    if plan is None:
        plan = _find_plan(block, args, kwargs, tp_size, mesh, styles, sequence_parallel)
        if key:
            cache.store(key, plan)
    return plan


def _check_styles(styles: Mapping[str, Wish], names: list[str]) -> None:
    problems = Problems()
    for pattern, wish in styles.items():
        if wish not in ("shard", "gather", "replicate"):
            problems.add(
                f"styles[{pattern!r}] is {wish!r}; it is 'shard', 'gather' or 'replicate'",
                f'styles={{"{pattern}": "shard"}}',
            )
        if not any(fnmatchcase(name, pattern) for name in names):
            problems.add(f"styles[{pattern!r}] matches none of the Linears {', '.join(names)}")
    problems.raise_if_any()


def _find_plan(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tp_size: int,
    mesh: DeviceMesh | None,
    styles: Mapping[str, Wish],
    sequence_parallel: bool,
) -> BlockTensorPlan:
    modules = tuple(
        ModulePlan(
            name,
            "replicate",
            sum(p.numel() for p in own),
            sum(p.numel() for p in own if p.dim() < 2),
            reason=_replicated_reason(block, name, module),
        )
        for name, module in block.named_modules()
        if (own := list(module.parameters(recurse=False)))
    )
    plan = BlockTensorPlan(tp_size, modules)
    problems = Problems()
    device = mesh.device_type if mesh else "cpu"
    small = shrink(block, args, kwargs, tp_size, device) if sum(m.numel for m in modules) > LARGE else None
    try:
        trial = small.trial if small else prepare(block, args, kwargs, device)
        in_training = trace_in_training(trial)
    except Exception as error:  # The block's own code, in a precision it may not know.
        reason = f"it does not run in float64, so nothing can be verified ({describe(error)})"
        if any(wish != "replicate" for wish in styles.values()):
            raise ParallelConfigError(Problem(f"{type(block).__name__}: {reason}")) from error
        return replace(_with_reason(plan, {module.name for module in modules}, reason), verified="nothing is divided")
    graph = small.graph if small else trace_linears(trial.block, trial.args, trial.kwargs)
    whole = small.original if small else graph
    draws = in_training.draws
    for name in graph.uncalled:
        reason = uncalled_reason(name, block)
        plan = _with_reason(plan, (name,), reason)
        if _wish((name,), styles) in ("shard", "gather"):
            problems.add(f"{name} cannot be divided: {reason}", f'tp_plan={{"*{name}": "replicate"}}')
    limits = [limits_of(group, whole, block, tp_size) for group in whole.groups]
    if replace(in_training, draws=()) != replace(graph, draws=()):
        name = type(block).__name__
        other = Problem(f"{name} computes something else in training than in evaluation, where it is verified")
        limits = [its._replace(structure=(*its.structure, other)) for its in limits]
    plan, found = _divide_groups(trial, plan, graph, limits, draws, mesh, styles)
    problems.extend(list(found))
    problems.raise_if_any()
    if sequence_parallel:
        plan = with_sequence(trial, plan, graph, draws, mesh)
    return _at_full_width(plan, block, whole) if small else plan


def _divide_groups(
    trial: Trial,
    plan: BlockTensorPlan,
    graph: LinearGraph,
    limits: Sequence[Limits],
    draws: tuple[RandomDraw, ...],
    mesh: DeviceMesh | None,
    styles: Mapping[str, Wish],
) -> tuple[BlockTensorPlan, Problems]:
    problems = Problems()
    verdict: Verdict | None = None
    for number, group in enumerate(graph.groups):
        its_limits = limits[number]
        if not is_separable(group, draws):
            its_limits = its_limits._replace(reductions=(*its_limits.reductions, _inseparable(group)))
        outcome = _divide(trial, plan, graph, group, number, its_limits, mesh, _wish(group.names, styles))
        plan, verdict = outcome.plan, outcome.verdict or verdict
        problems.extend(outcome.problems)
        if plan[group.names[0]].style in ("column", "fused column") and draws_in_group(group, draws):
            plan = replace(plan, random_groups=(*plan.random_groups, number))
    if verdict is None:
        return replace(plan, verified="nothing is divided"), problems
    largest = f"largest error {verdict.error:.1e} ({verdict.worst})"
    text = f"compared with the undivided block in float64{trial.width}, {largest}"
    return replace(plan, verified=text), problems


def _at_full_width(plan: BlockTensorPlan, block: nn.Module, graph: LinearGraph) -> BlockTensorPlan:
    """Bring the numbers of a plan that was found with a narrow copy to those of the block."""

    def value(patch: AttributePatch) -> int:
        number: int = attrgetter(patch.attribute)(block.get_submodule(patch.module))
        return number // plan.tp_size

    modules = (replace(m, parts=graph.linears[m.name].parts) if m.parts else m for m in plan.modules)
    patches = (replace(patch, value=value(patch)) for patch in plan.patches)
    return replace(plan, modules=tuple(modules), patches=tuple(patches))


def _inseparable(group: LinearGroup) -> Problem:
    what = "random numbers for its features, and for what all ranks have, are drawn one between the other in training"
    return Problem(f"{group.columns[0]}: {what}", f'tp_plan={{"*{group.columns[0]}": "gather"}}')


def _wish(names: tuple[str, ...], styles: Mapping[str, Wish]) -> Wish | None:
    """The wish for a group; where wishes differ, the one that asks for less."""
    wishes = {wish for pattern, wish in styles.items() if any(fnmatchcase(name, pattern) for name in names)}
    order: tuple[Wish, ...] = ("replicate", "gather", "shard")
    return next((wish for wish in order if wish in wishes), None)


def _divide(
    trial: Trial,
    plan: BlockTensorPlan,
    graph: LinearGraph,
    group: LinearGroup,
    number: int,
    limits: Limits,
    mesh: DeviceMesh | None,
    wish: Wish | None,
) -> _Outcome:
    """Add a group to a verified plan, in the best way that verifies."""
    if wish == "replicate":
        return _Outcome(_with_reason(plan, group.names, "as styles say"), None)
    if limits.structure:
        reason = limits.structure[0].what
        return _Outcome(_with_reason(plan, group.names, reason), None, limits.structure if wish else ())
    why = [problem.what for problem in limits.compute]
    if wish is None and not limits.reductions:
        plan = replace(plan, misfits=plan.misfits + limits.sizes)
    if not why and wish != "gather":
        closest = Verdict(math.inf, "")
        for proposal in _proposals(trial, plan, graph, group, number):
            verdict = verify(trial, proposal, mesh)
            if verdict.accepted:
                return _Outcome(proposal, verdict)
            closest = min(closest, verdict, key=lambda tried: tried.error) if closest.worst else verdict
        why = [f"no way to compute with slices gives the same numbers (closest: {closest.describe()})"]
    if wish == "shard":
        first = group.names[0]
        problem = Problem(f"{first}: {why[0]}", f'tp_plan={{"*{first}": "gather"}}')
        return _Outcome(plan, None, limits.compute or (problem,))
    reason = why[0] if why else "as styles say"
    if limits.outputs:
        reason = why[0] if why else limits.outputs[0].what
        return _Outcome(_with_reason(plan, group.names, reason), None, limits.outputs if wish else ())
    proposal = _gathered(plan, graph, group, number, reason)
    verdict = verify(trial, proposal, mesh)
    if verdict.accepted:
        return _Outcome(proposal, verdict)
    reason = f"{reason}; nor does gathering ({verdict.describe()})"
    return _Outcome(_with_reason(plan, group.names, reason), None, (Problem(reason),) if wish else ())


def _proposals(
    trial: Trial, plan: BlockTensorPlan, graph: LinearGraph, group: LinearGroup, number: int
) -> Iterator[BlockTensorPlan]:
    """Ways for each rank to compute with its slices, likely and simple ones first."""
    nodes = [graph.linears[name] for name in group.names]
    sizes = {size for node in nodes for size in (*node.parts, node.out_features) if node.role == "column"}
    sizes |= {size for node in nodes for view in node.heads for size in (view.heads, view.heads * view.size)}
    owners = {name.rpartition(".")[0] for name in group.names}
    read = attributes_read(trial.block, owners | {""}, trial.args, trial.kwargs)
    summed = (group.inner_parameters, ()) if group.inner_parameters else ((),)
    fused = any(len(node.parts) > 1 for node in nodes if node.role == "column")
    owner = common_module(group.names)
    for narrowed in ((), ((owner, number),)) if owner else ((),):
        ways = itertools.product((True, False) if fused else (False,), patch_sets(read, sizes, plan.tp_size), summed)
        for in_parts, patches, partial in itertools.islice(ways, _MOST_TRIALS):
            yield _local(plan, graph, group, number, in_parts, patches, partial, narrowed)


def _local(
    plan: BlockTensorPlan,
    graph: LinearGraph,
    group: LinearGroup,
    number: int,
    in_parts: bool,
    patches: tuple[AttributePatch, ...],
    partial: tuple[str, ...],
    narrowed: tuple[tuple[str, int], ...],
) -> BlockTensorPlan:
    def changed(module: ModulePlan) -> ModulePlan:
        node = graph.linears[module.name]
        if node.role == "row":
            return replace(module, style="row", transposed=node.transposed, group=number, reason="")
        parts = node.parts if in_parts and len(node.parts) > 1 else ()
        style: Literal["column", "fused column"] = "fused column" if parts else "column"
        return replace(module, style=style, parts=parts, transposed=node.transposed, group=number, reason="")

    plan = _changed(plan, group.names, changed)
    plan = _with_reason(
        plan, {name.rpartition(".")[0] for name in partial}, "each rank uses it on its own features only"
    )
    return replace(
        plan,
        patches=plan.patches + patches,
        narrowed=plan.narrowed + narrowed,
        partial_gradients=plan.partial_gradients + partial,
    )


def _gathered(
    plan: BlockTensorPlan, graph: LinearGraph, group: LinearGroup, number: int, reason: str
) -> BlockTensorPlan:
    def changed(module: ModulePlan) -> ModulePlan:
        transposed = graph.linears[module.name].transposed
        return replace(module, style="gather", transposed=transposed, group=number, reason=reason)

    return _changed(plan, group.names, changed)


def _with_reason(plan: BlockTensorPlan, names: tuple[str, ...] | set[str], reason: str) -> BlockTensorPlan:
    return _changed(plan, names, lambda module: replace(module, reason=reason))


def _changed(
    plan: BlockTensorPlan, names: tuple[str, ...] | set[str], change: Callable[[ModulePlan], ModulePlan]
) -> BlockTensorPlan:
    modules = tuple(change(module) if module.name in names else module for module in plan.modules)
    return replace(plan, modules=modules)


def _replicated_reason(block: nn.Module, name: str, module: nn.Module) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return "nn.MultiheadAttention holds its projections itself"
    if is_stacked(module):
        return f"{type(module).__name__} holds stacked matrices, not Linears"
    return f"{type(module).__name__} is no Linear" if not is_linear(module) else ""
