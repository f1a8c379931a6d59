"""What a checkpoint holds: model and optimizer state keyed by parameter name, and the random state of a process.

Names are those of the module before it was parallelised, so that a state does not depend on the layout it comes from.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_par.checkpoint.errors import CheckpointError, CheckpointMismatch, checkpoint_error
from lightning_par.checkpoint.stages import Groups, from_last_stage, merge_groups, on_all_stages, union
from lightning_par.errors import Problem
from lightning_par.parallel.shards import copy_full_into, full_tensor, parameter_names
from lightning_par.parallel.stages import noted_groups, stages_of
from lightning_par.parallel.tensor.fused import FeatureOrder, feature_orders, reorder_state

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_NAMES_SHOWN = 20
# Added to a group by the learning-rate schedulers; says nothing about which optimizer wrote the group.
_SCHEDULER_KEYS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})
# How the step is computed on this machine, not what it computes: these are never taken from a checkpoint.
_IMPLEMENTATION_KEYS = frozenset({"foreach", "fused", "capturable", "differentiable", "params", "param_names"})
# State of torch's optimizers that has one number for each of the parameter's; others use the same names for it.
_ELEMENTWISE_KEYS = frozenset(
    [
        "acc_delta",
        "exp_avg",
        "exp_avg_sq",
        "exp_inf",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "sum",
        "variance",
    ]
)


def plain_name(name: str) -> str:
    """Drop the prefixes that `torch.compile` and activation checkpointing put into a parameter's name."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def tied_names(module: nn.Module) -> dict[str, str]:
    """Map every parameter name to the first name of the same parameter; itself where it is not tied."""
    first = parameter_names(module)
    names = module.named_parameters(remove_duplicate=False)
    return {plain_name(name): plain_name(first[param]) for name, param in names}


def model_state(module: nn.Module) -> dict[str, Any]:
    """Return the module's state with the names of the unparallelised module; sharded tensors stay DTensors.

    Tensors share their storage with the module, as in ``module.state_dict()``. Hooks on ``state_dict`` are honoured;
    extra state may make some of the values other things than tensors. FSDP modules whose parameters are gathered at the
    moment are sharded again first.

    Under a pipeline this is what the rank's stages have, and a collective over the pipeline's ranks: buffers and
    metrics that several stages have come from the last one, as copies.
    """
    state = stage_state(module)
    stages = stages_of(module)
    return state if stages is None else from_last_stage(stages, state, tied_names(module))


def stage_state(module: nn.Module) -> dict[str, Any]:
    """As `model_state`, but no collective: what this rank has, even where another stage has a later value."""
    _reshard(module)
    stages = stages_of(module)
    state = module.state_dict()
    if stages is not None:
        # Modules of other stages have no parameters and buffers here, but what else they keep.
        state = {name: value for name, value in state.items() if stages.holds(name)}
    return {plain_name(name): value for name, value in state.items()}


def load_into_module(module: nn.Module, state: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Hand values in the module's own layout to ``module.load_state_dict`` and return (missing, unexpected) names.

    A name that the module's ``state_dict`` leaves out on purpose does not count as missing.
    """
    wrapped = {plain_name(name): name for name in module.state_dict()}
    result = module.load_state_dict({wrapped.get(name, name): value for name, value in state.items()}, strict=False)
    missing = [plain_name(name) for name in result.missing_keys if name in wrapped.values()]
    return missing, [plain_name(name) for name in result.unexpected_keys]


def optimizer_names(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the parameter names of each group of `optimizer`; a tied parameter has its first name.

    Raises:
        CheckpointError: If the optimizer holds parameters that the module does not own.
    """
    _reshard(module)
    names = {param: plain_name(name) for param, name in parameter_names(module).items()}
    foreign = [param for group in optimizer.param_groups for param in group["params"] if param not in names]
    if foreign:
        shapes = ", ".join(str(tuple(param.shape)) for param in foreign[:_NAMES_SHOWN])
        raise CheckpointMismatch(
            f"{type(optimizer).__name__} holds {len(foreign)} parameters that the module does not own "
            f"(shapes {shapes}). Parallelising a module replaces its parameters: build the optimizer after that."
        )
    return [[names[param] for param in group["params"]] for group in optimizer.param_groups]


def whole_groups(module: nn.Module, optimizer: Optimizer) -> tuple[Groups, bool]:
    """As `optimizer_names`, with the parameters of all stages of a pipeline, over whose ranks it is a collective.

    Returns:
        The names, and whether their order is that of an optimizer of the undivided module.
    """
    stages = stages_of(module)
    groups = on_all_stages(stages, lambda: optimizer_names(module, optimizer))
    order = [] if stages is None else [plain_name(name) for name in stages.parameters]
    noted = [[plain_name(name) for name in group] for group in noted_groups(optimizer)]
    return merge_groups(type(optimizer).__name__, groups, order, noted)


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state keyed by parameter name.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [{"lr": ..., "params": [name, ...]}, ...]}``. Parameters
        without state have no entry. Tensors are shared with the optimizer and keep their layout. Under a pipeline the
        state is that of the rank's own stages and the groups are those of all stages, over whose ranks this is a
        collective; ``"stage"`` is then the rank in it, and ``"is_ordered"`` tells whether the parameters in the groups
        are in the order of an optimizer of the undivided module.

    Raises:
        CheckpointError: If a parameter of the optimizer is not the module's, or if some state cannot be saved as one
            value for all ranks.
    """
    whole, is_ordered = whole_groups(module, optimizer)
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")} | {"params": names}
        for names, group in zip(whole, optimizer.param_groups, strict=True)
    ]
    state: dict[str, dict[str, Any]] = {}
    orders = _orders(module)
    for name, param, _ in named_parameters_of(optimizer, optimizer_names(module, optimizer)):
        if param in optimizer.state:
            state[name] = dict(optimizer.state[param])
            _check_savable(name, param, state[name])
            if name in orders:
                state[name] = reorder_state(name, state[name], param, orders[name], to_ranks=False)
    unowned = [key for key in optimizer.state if not isinstance(key, Tensor)]
    if unowned:
        raise CheckpointError(f"{type(optimizer).__name__} keeps state under {unowned}, which are not parameters.")
    stages = stages_of(module)
    of_stage = {} if stages is None else {"stage": stages.group.rank(), "is_ordered": is_ordered}
    return {"state": state, "param_groups": groups} | of_stage


@torch.no_grad()
def load_optimizer_state(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `optimizer_state` returned, from any layout, replacing all state that the optimizer has.

    Values may be full tensors, which are cut without communication, or DTensors. A tensor of the parameter's shape
    takes the parameter's layout; another one of at least one dimension is replicated beside a distributed parameter;
    scalars stay plain. Dtypes are kept. The switches that choose an implementation (``foreach``, ``fused``,
    ``capturable``) stay as they are here. Under a pipeline each stage takes its own, and this is a collective.

    Raises:
        CheckpointError: Lists names of the state that the optimizer lacks and the reverse, and groups that differ. The
            optimizer is unchanged then.
    """
    whole, _ = whole_groups(module, optimizer)
    names = optimizer_names(module, optimizer)
    label = type(optimizer).__name__

    def misfits() -> list[Problem]:
        problems: list[Problem] = []
        for name, param, _ in named_parameters_of(optimizer, names):
            values = state["state"].get(name, {})
            problems += state_problems(name, param, {k: v.shape for k, v in values.items() if isinstance(v, Tensor)})
        return problems

    missing, unexpected = compare_names(whole, state["param_groups"], state["state"])
    problems = name_problems(label, missing, unexpected)
    problems += group_problems(label, optimizer, whole, state["param_groups"])
    problems += union(on_all_stages(stages_of(module), misfits))
    if problems:
        raise checkpoint_error("the optimizer state does not fit", problems, CheckpointMismatch)
    placed: dict[str, dict[str, Any]] = {}
    for name, param, group in named_parameters_of(optimizer, names):
        values = state["state"].get(name)
        if values is not None:
            placed[name] = {key: _placed(key, value, param, group) for key, value in values.items()}
    restore_optimizer(module, optimizer, names, placed, state["param_groups"])


def restore_optimizer(
    module: nn.Module,
    optimizer: Optimizer,
    names: Sequence[Sequence[str]],
    state: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]] | None,
) -> None:
    """Put values that already have their final layout into the optimizer.

    Args:
        module: Owns the parameters.
        optimizer: Loses all the state that it has.
        names: What `optimizer_names` gave.
        state: Values by parameter name, their features in the order of the undivided module.
        groups: The hyper-parameters of each group, or None to leave them.
    """
    optimizer.state.clear()
    orders = _orders(module)
    for name, param, _ in named_parameters_of(optimizer, names):
        if name in state:
            optimizer.state[param] = dict(state[name])
            if name in orders:
                optimizer.state[param] = reorder_state(name, state[name], param, orders[name], to_ranks=True)
    for group, saved in zip(optimizer.param_groups, groups or optimizer.param_groups, strict=True):
        for key, value in saved.items():
            if key in _IMPLEMENTATION_KEYS:
                continue
            if isinstance(group.get(key), Tensor):
                group[key].copy_(torch.as_tensor(value))
            else:
                group[key] = value.clone() if isinstance(value, Tensor) else value
    # Optimizers bring state of older versions up to date here, as they do in their own load_state_dict.
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def named_parameters_of(
    optimizer: Optimizer, names: Sequence[Sequence[str]]
) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Yield (name, parameter, its group) for the names that `optimizer_names` gave."""
    for group_names, group in zip(names, optimizer.param_groups, strict=True):
        for name, param in zip(group_names, group["params"], strict=True):
            yield name, param, group


def empty_state(key: str, shape: torch.Size, dtype: torch.dtype, param: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Allocate an optimizer state tensor in the layout in which training of `param` goes on."""
    if key == "step":
        on_device = group.get("capturable") or group.get("fused")
        return torch.empty(shape, dtype=dtype, device=param.device if on_device else "cpu")
    if shape == param.shape:
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    if len(shape) == 0:
        return torch.empty(shape, dtype=dtype, device=param.device)
    # On a DTensor this makes a replicated DTensor, which mixes with sharded ones in the optimizer's arithmetic.
    return param.new_zeros(shape, dtype=dtype, requires_grad=False)


def compare_names(
    names: Sequence[Sequence[str]], groups: Sequence[Mapping[str, Any]], held: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return the parameters of an optimizer that a saved one lacks, and those that only the saved one has.

    Args:
        names: What `optimizer_names` gave.
        groups: The saved groups.
        held: The names for which there is saved state.
    """
    here = {name for group in names for name in group}
    grouped = {name for group in groups for name in group["params"]}
    return [name for group in names for name in group if name not in grouped], sorted((grouped | set(held)) - here)


def group_problems(
    label: str, optimizer: Optimizer, names: Sequence[Sequence[str]], groups: Sequence[Mapping[str, Any]]
) -> list[Problem]:
    """Compare the saved groups with those of `optimizer`: their number, their members, the kind of optimizer."""
    if len(groups) != len(names):
        return [Problem(f"{label} has {len(names)} parameter groups here and {len(groups)} in the checkpoint")]
    problems = []
    here = {name: i for i, group in enumerate(names) for name in group}
    saved = {name: i for i, group in enumerate(groups) for name in group["params"]}
    moved = [f"{name} (group {i} here, {saved[name]} saved)" for name, i in here.items() if saved.get(name, i) != i]
    if moved:
        problems.append(Problem(f"{label} has {len(moved)} parameters in other groups: {_listed(moved)}"))
    for i, (group, saved_group) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        lacking = optimizer.defaults.keys() - saved_group.keys() - _IMPLEMENTATION_KEYS
        surplus = saved_group.keys() - group.keys() - _IMPLEMENTATION_KEYS - _SCHEDULER_KEYS
        # Only one of the two is a newer or an older version of the same optimizer.
        if lacking and surplus:
            problems.append(
                Problem(
                    f"{label} is not the optimizer that was saved: group {i} holds {', '.join(sorted(surplus))} and "
                    f"{type(optimizer).__name__} needs {', '.join(sorted(lacking))}"
                )
            )
    return problems


def state_problems(name: str, param: Tensor, shapes: Mapping[str, torch.Size]) -> list[Problem]:
    """Find state of a parameter that must have the parameter's shape and has another."""
    return [
        Problem(f"state {key!r} has the shape {tuple(shape)}, its parameter {name} has {tuple(param.shape)}")
        for key, shape in shapes.items()
        if key in _ELEMENTWISE_KEYS and shape != param.shape
    ]


def name_problems(label: str, missing: Sequence[str], unexpected: Sequence[str]) -> list[Problem]:
    """Say which names are not in the checkpoint and which are only there, with the nearest name on the other side."""
    problems = []
    fix = "build it as it was when the checkpoint was saved"
    if label == "model":
        fix += ", or load with strict=False (LightningModule.strict_loading = False)"
    if missing:
        listed = _listed(missing, unexpected)
        problems.append(Problem(f"{label}: {len(missing)} names are not in the checkpoint: {listed}", fix))
    if unexpected:
        listed = _listed(unexpected, missing)
        problems.append(Problem(f"{label}: {len(unexpected)} names of the checkpoint are unknown here: {listed}", fix))
    return problems


def tensor_problem(name: str, target: Any, shape: Sequence[int]) -> Problem | None:
    """Say why a saved tensor of this global shape cannot be written into `target`, if it cannot."""
    if not isinstance(target, Tensor):
        return Problem(f"{name} is a tensor in the checkpoint and a {type(target).__name__} here")
    if target.is_meta:
        return Problem(f"{name} is on the meta device here", "materialize the module before loading")
    if target.shape != tuple(shape):
        return Problem(f"{name} has the shape {tuple(shape)} in the checkpoint and {tuple(target.shape)} here")
    return None


def refuse_dtensors(value: Any, where: str) -> None:
    """Raise `CheckpointError` if a value that is stored once for all ranks holds a DTensor."""
    if isinstance(value, DTensor):
        raise CheckpointError(
            f"{where} is a DTensor, of which each rank holds a part only, inside a value that is stored once for all "
            "ranks. Store its full value: `lightning_par.parallel.shards.full_tensor(value)` on every rank."
        )
    if isinstance(value, Mapping):
        for key, item in value.items():
            refuse_dtensors(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple | set):
        for i, item in enumerate(value):
            refuse_dtensors(item, f"{where}[{i}]")


def _reshard(module: nn.Module) -> None:
    # The optimizer holds the sharded parameters; a gathered FSDP module has registered other ones in their place.
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()


def _placed(key: str, value: Any, param: Tensor, group: Mapping[str, Any]) -> Any:
    if not isinstance(value, Tensor):
        return value
    target = empty_state(key, value.shape, value.dtype, param, group)
    same_mesh = isinstance(value, DTensor) and isinstance(target, DTensor) and value.device_mesh == target.device_mesh
    if same_mesh:
        target.copy_(value)
    else:
        copy_full_into(target, full_tensor(value))
    return target


def _orders(module: nn.Module) -> dict[str, FeatureOrder]:
    return {plain_name(name): order for name, order in feature_orders(module).items()}


def _check_savable(name: str, param: Tensor, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        if not isinstance(value, Tensor):
            refuse_dtensors(value, f"optimizer state {key!r} of {name}")
        elif isinstance(param, DTensor) and not isinstance(value, DTensor) and value.ndim:
            sharded = any(not placement.is_replicate() for placement in param.placements)
            if sharded and value.shape == param.to_local().shape:
                raise CheckpointError(
                    f"optimizer state {key!r} of {name} is a plain tensor with the shape {tuple(value.shape)} of this "
                    f"rank's shard; the parameter is a DTensor of shape {tuple(param.shape)}. Every rank has another "
                    "value, so it cannot be saved as one: the optimizer must keep it as a DTensor."
                )


def _listed(names: Collection[str], others: Collection[str] = ()) -> str:
    shown = []
    for name in list(names)[:_NAMES_SHOWN]:
        near = difflib.get_close_matches(name, others, n=1, cutoff=0.7)
        shown.append(f"{name} (near: {near[0]})" if near else name)
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
