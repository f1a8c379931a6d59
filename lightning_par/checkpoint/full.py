"""Full values in one file: for plain Lightning, for one process, for other tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.checkpoint.errors import CheckpointError, CheckpointMismatch, checkpoint_error
from lightning_par.checkpoint.stages import collect, in_order, on_all_stages, union
from lightning_par.checkpoint.state import (
    load_into_module,
    load_optimizer_state,
    model_state,
    name_problems,
    named_parameters_of,
    optimizer_names,
    optimizer_state,
    plain_name,
    stage_state,
    tensor_problem,
    tied_names,
    whole_groups,
)
from lightning_par.errors import Problem
from lightning_par.parallel.shards import copy_full_into, full_tensor
from lightning_par.parallel.stages import stages_of

RANKS = "lightning_par_ranks"
"""The key of what each data rank keeps for itself, in their order, in checkpoints that are one file."""

_NO_ORDER = (
    "a full file numbers the parameters in the order of the groups, and in which order one process would have those of "
    "all stages of the pipeline cannot be told: list them in the order of module.parameters(), or save with "
    "state_dict_type='sharded', which names them"
)


@torch.no_grad()
def full_model_state(module: nn.Module) -> dict[str, Any]:
    """Gather the module's state on the CPU of rank 0; collective.

    One parameter is gathered at a time, so a rank needs memory for the largest one besides its shards.

    Returns:
        Copies of the full tensors by name on rank 0, tied parameters sharing one; an empty dict on other ranks.
    """
    state = model_state(module)
    stages = stages_of(module)
    first = tied_names(module)
    twins = {name: first[name] for name in state if first.get(name, name) != name}
    full = collect(stages, [name for name in state if name not in twins], lambda name: _full(state[name]))
    everywhere = on_all_stages(stages, lambda: (list(state), twins))
    if not _is_first_rank():
        return {}
    all_twins = {name: twin for _, some in everywhere for name, twin in some.items()}
    names = union(names for names, _ in everywhere)
    if stages is not None:
        names = in_order(names, [plain_name(name) for name in stages.state])
    return {name: full[all_twins.get(name, name)] for name in names}


@torch.no_grad()
def full_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Gather the optimizer's state on the CPU of rank 0, in the format of torch's own ``state_dict``; collective.

    Returns:
        ``{"state": {id: {key: value}}, "param_groups": [...]}`` on rank 0, with ids that count the parameters in the
        order of the groups, which any torch optimizer loads; an empty dict on other ranks.

    Raises:
        CheckpointError: As `optimizer_state`.
    """
    state = optimizer_state(module, optimizer)
    names, is_ordered = whole_groups(module, optimizer)
    if not is_ordered:
        raise CheckpointError(f"{type(optimizer).__name__}: {_NO_ORDER}")
    ids = {name: i for i, name in enumerate(name for group in names for name in group)}
    keys = [(name, key) for name, values in state["state"].items() for key in values]
    values = collect(stages_of(module), keys, lambda key: _full(state["state"][key[0]][key[1]]))
    if not _is_first_rank():
        return {}
    gathered: dict[int, dict[str, Any]] = {}
    for (name, key), value in sorted(values.items(), key=lambda item: ids[item[0][0]]):
        gathered.setdefault(ids[name], {})[key] = value
    groups = [group | {"params": [ids[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": gathered, "param_groups": groups}


@torch.no_grad()
def load_full_model_state(
    module: nn.Module, state: Mapping[str, Any], strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load full tensors into a module of any layout; no communication but between the stages of a pipeline.

    One tensor at a time goes to the device. Names may have the prefixes of compiled or checkpointed modules, and the
    module's own hooks may rename those that it does not know.

    Args:
        module: Materialised; its parameters and buffers are written in place.
        state: The same on every rank; may be memory-mapped (``torch.load(..., mmap=True)``).
        strict: Raise when names are missing or left over.

    Returns:
        The names that the module has and `state` lacks, and those of `state` that nothing took.

    Raises:
        CheckpointError: Lists all tensors whose shapes differ (nothing is changed then), or all names that do.
    """
    stages = stages_of(module)
    template = stage_state(module)
    incoming = {plain_name(name): value for name, value in state.items()}
    both = [name for name, value in incoming.items() if isinstance(value, Tensor) and name in template]
    tensors = [name for name in both if not name.endswith("_extra_state")]
    misfits = [tensor_problem(name, template[name], incoming[name].shape) for name in tensors]
    problems = union(on_all_stages(stages, lambda: [problem for problem in misfits if problem]))
    if problems:
        raise checkpoint_error("the model state does not fit", problems, CheckpointMismatch)

    def load() -> tuple[list[str], list[str]]:
        for name in tensors:
            copy_full_into(template[name], incoming[name])
            incoming[name] = template[name]
        return load_into_module(module, incoming)

    results = on_all_stages(stages, load)
    missing = union(missing for missing, _ in results)
    # What one stage takes, the others do not know.
    unexpected = [name for name in results[0][1] if all(name in unknown for _, unknown in results)]
    if strict and (missing or unexpected):
        raise checkpoint_error(
            "the model state does not fit", name_problems("model", missing, unexpected), CheckpointMismatch
        )
    return missing, unexpected


def load_full_optimizer_state(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load full optimizer state into an optimizer of any layout; no communication but between stages of a pipeline.

    Args:
        module: The module whose parameters the optimizer has.
        optimizer: Loses the state that it has.
        state: The same on every rank, in torch's format with numbers for parameters (they count the parameters in the
            order of the groups, as they do in torch) or in that of `optimizer_state`. Floating-point state takes the
            dtype of its parameter, as in torch.

    Raises:
        CheckpointError: If the parameters or the groups differ; the optimizer is unchanged then.
    """
    if "state" not in state or "param_groups" not in state:
        raise CheckpointError(
            "this is not the state of an optimizer: it lacks 'state' or 'param_groups'. A file with weights only "
            "cannot resume an optimizer."
        )
    if any(isinstance(i, int) for group in state["param_groups"] for i in group["params"]):
        whole, is_ordered = whole_groups(module, optimizer)
        if not is_ordered:
            raise CheckpointError(f"{type(optimizer).__name__}: {_NO_ORDER}")
        state = _named(type(optimizer).__name__, state, whole)
    names = optimizer_names(module, optimizer)
    dtypes = {name: param.dtype for name, param, _ in named_parameters_of(optimizer, names)}
    cast = {
        name: {key: _cast(key, value, dtypes.get(name)) for key, value in values.items()}
        for name, values in state["state"].items()
    }
    load_optimizer_state(module, optimizer, {"state": cast, "param_groups": state["param_groups"]})


def _named(label: str, state: Mapping[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """Replace the numbers of torch's format by the names of the parameters at the same places."""
    saved = [list(group["params"]) for group in state["param_groups"]]
    if [len(ids) for ids in saved] != [len(group) for group in names]:
        sizes_here, sizes_saved = ([len(group) for group in groups] for groups in (names, saved))
        problem = Problem(f"{label} has groups of {sizes_here} parameters here and {sizes_saved} in the file")
        raise checkpoint_error("the optimizer state does not fit", [problem], CheckpointMismatch)
    name_of = {i: name for ids, group in zip(saved, names, strict=True) for i, name in zip(ids, group, strict=True)}
    unknown = sorted(state["state"].keys() - name_of.keys(), key=str)
    if unknown:
        problem = Problem(f"{label} has state for parameters that are in no group of the file: {unknown}")
        raise checkpoint_error("the optimizer state does not fit", [problem], CheckpointMismatch)
    groups = [dict(group) | {"params": members} for group, members in zip(state["param_groups"], names, strict=True)]
    return {"state": {name_of[i]: values for i, values in state["state"].items()}, "param_groups": groups}


def _cast(key: str, value: Any, dtype: torch.dtype | None) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point() and dtype is not None and dtype.is_floating_point
    return value.to(dtype) if floating and key != "step" else value


def _full(value: Any) -> Any:
    return full_tensor(value.detach()) if isinstance(value, Tensor) else value


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
