"""Optimizers that were built from other parameters than those that a rank trains in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_par.errors import Problems
from lightning_par.parallel import optimizers, tensor
from lightning_par.parallel.shards import class_name
from lightning_par.parallel.stages import note_groups

if TYPE_CHECKING:
    from lightning_par.parallel.apply import Parallelized


def remap_optimizer(optimizer: torch.optim.Optimizer, handles: Sequence[Parallelized]) -> None:
    """Point an optimizer that was built before sharding to the parameters of the sharded modules, by name.

    State that it has already goes with them.

    Raises:
        ParallelConfigError: If it holds a parameter of none of the modules, or cannot step over shards.
    """
    for handle in handles:
        handle.data.reshard()
    now = [dict(handle.module.named_parameters()) for handle in handles]
    current = {param for names in now for param in names.values()}
    orders = {
        names[name]: (name, order)
        for handle, names in zip(handles, now, strict=True)
        for name, order in tensor.feature_orders(handle.module).items()
    }
    strange, valueless = [], 0
    _note_groups(optimizer, handles)
    for group in optimizer.param_groups:
        # Parameters of other stages of a pipeline are stepped there.
        elsewhere = {p for p in group["params"] if p not in current and _is_elsewhere(p, handles, now)}
        group["params"] = [p for p in group["params"] if p not in elsewhere]
        for param in elsewhere:
            optimizer.state.pop(param, None)
        for i, param in enumerate(group["params"]):
            found = (
                names[handle._names_before[param]]
                for handle, names in zip(handles, now, strict=True)
                if handle._names_before.get(param) in names
            )
            replacement = param if param in current else next(found, None)
            if replacement is None:
                strange.append(tuple(param.shape))
            elif optimizers.has_state_on_meta(optimizer, param):
                valueless += 1
            else:
                if replacement is not param and replacement in orders and param in optimizer.state:
                    name, order = orders[replacement]
                    state = tensor.reorder_state(name, optimizer.state[param], param, order, to_ranks=True)
                    optimizer.state[param] = state
                optimizers.move_state(optimizer, param, replacement)
                group["params"][i] = replacement
    problems = Problems()
    if strange:
        modules = ", ".join(class_name(handle.module) for handle in handles)
        problems.add(
            f"{type(optimizer).__name__} holds {len(strange)} parameters of shapes {strange[:5]} that are not those of "
            f"{modules}, so they would not be trained together",
            "build the optimizer from the parameters of the module that is trained",
        )
    if valueless:
        problems.add(
            f"{type(optimizer).__name__} was built when its parameters were on the meta device, and its state for "
            f"{valueless} of them has no value",
            "build the optimizer in configure_optimizers",
        )
    problems.extend(optimizers.step_problems(optimizer, sharded=any(handle.holds_shards for handle in handles)))
    problems.raise_if_any()


def _note_groups(optimizer: torch.optim.Optimizer, handles: Sequence[Parallelized]) -> None:
    """Keep the order of the parameters in the groups, which a pipeline's stages cannot tell from what is left."""
    known = {param: name for handle in handles for param, name in handle._names_before.items()}
    params = [group["params"] for group in optimizer.param_groups]
    if any(handle.pipeline is not None for handle in handles) and all(p in known for group in params for p in group):
        note_groups(optimizer, [[known[param] for param in group] for group in params])


def _is_elsewhere(param: Tensor, handles: Sequence[Parallelized], now: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a parameter was one of a module of which another stage has it now."""
    return any(
        handle.pipeline is not None and param in handle._names_before and handle._names_before[param] not in names
        for handle, names in zip(handles, now, strict=True)
    )
