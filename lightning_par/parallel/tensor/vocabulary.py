"""Divide embeddings and heads over the vocabulary, so that each rank holds and computes a slice of it.

An embedding looks up the tokens whose rows it has, and the rest is summed over the ranks; a head computes the logits of
its slice (Shoeybi et al. 2019, section 3). During a forward, a module holds its local slices as plain tensors, so
that any code of its own runs that treats rows alike; whether it does is tried before, see `rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_par.parallel.carried import carry_over
from lightning_par.parallel.tensor._compat import map_first_tensor
from lightning_par.parallel.tensor.collectives import gather, sum_gradients, sum_values
from lightning_par.parallel.tensor.logits import Division, divide_logits, report_once
from lightning_par.parallel.tensor.rows import Restore, hold_slices, local_rows
from lightning_par.parallel.tensor.vocabulary_plan import VocabularyPlan


def divide_vocabulary(module: nn.Module, plan: VocabularyPlan, mesh: DeviceMesh, *, loss_parallel: bool) -> None:
    """Divide the embeddings and heads of a plan in place, before FSDP, which composes with it.

    Every rank must hold the same values; nothing is sent. Parameters become DTensors of their global shapes; tied ones
    stay one.

    Args:
        module: The model the plan is for.
        plan: From `plan_vocabulary`.
        mesh: One-dimensional, of `plan.tp_size` ranks.
        loss_parallel: Whether heads return `DividedLogits`; else they gather their logits.

    Raises:
        ValueError: If the mesh has another size.
    """
    if mesh.ndim != 1 or mesh.size() != plan.tp_size:
        raise ValueError(f"the plan is for {plan.tp_size} ranks in one dimension, the mesh is {tuple(mesh.shape)}")
    restore = carry_over(module)
    modules = [module.get_submodule(name) for name in (*plan.embeddings, *plan.heads)]
    _divide_parameters(module, {param for one in modules for param in one.parameters(recurse=False)}, mesh)
    restore()
    group, report = mesh.get_group(), report_once()
    for name in plan.embeddings:
        _divide_embedding(module.get_submodule(name), group)
    for name in plan.heads:
        _divide_head(module.get_submodule(name), group, report if loss_parallel and name not in plan.gathered else None)


def _divide_parameters(module: nn.Module, params: set[nn.Parameter], mesh: DeviceMesh) -> None:
    divided = {
        param: nn.Parameter(
            distribute_tensor(param.detach(), mesh, [Shard(0)], src_data_rank=None), requires_grad=param.requires_grad
        )
        for param in params
    }
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None and param in divided:
                owner.register_parameter(name, divided[param])


def _divide_embedding(embedding: nn.Module, group: dist.ProcessGroup) -> None:
    elsewhere: list[tuple[Tensor, Restore]] = []

    def before(module: Any, args: Any, kwargs: Any) -> Any:
        rows, here = module.weight.shape[0], module.weight.shape[0] // group.size()

        def local(ids: Tensor) -> Tensor:
            ids, mask = local_rows(ids, rows, here * group.rank(), here)
            elsewhere.append((mask, _hold_slices(module, group)))
            return ids

        return map_first_tensor(local, args, kwargs)

    def after(module: nn.Module, args: Any, out: Tensor | None) -> Tensor | None:
        if not elsewhere:  # `before` has failed
            return out
        mask, restore = elsewhere.pop()
        restore()
        return None if out is None else sum_values(out.masked_fill(mask[..., None], 0), group)

    _surround(embedding, before, after)


def _divide_head(head: nn.Module, group: dist.ProcessGroup, report: Callable[[str], None] | None) -> None:
    """Let a head return its slice of the logits with `report`, else all of them."""
    whole: list[tuple[Division | None, Restore]] = []

    def before(module: Any, args: Any, kwargs: Any) -> Any:
        division = Division(group, module.weight.shape[0], report) if report else None
        whole.append((division, _hold_slices(module, group)))
        return map_first_tensor(lambda x: sum_gradients(x, group), args, kwargs)

    def after(module: nn.Module, args: Any, out: Tensor | None) -> Tensor | None:
        if not whole:
            return out
        division, restore = whole.pop()
        restore()
        if out is None:
            return None
        return divide_logits(out, division) if division else gather(out, -1, group)

    _surround(head, before, after)


def _hold_slices(module: Any, group: dist.ProcessGroup) -> Restore:
    # Looked up at each call: FSDP replaces them, and the module may be a copy.
    parameters = {name: param for name, param in module._parameters.items() if param is not None}
    slices = {name: param.to_local() for name, param in parameters.items()}
    return hold_slices(module, slices, module.weight.shape[0] // group.size() * group.rank())


def _surround(module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    # The user's own hooks, outside, see what the undivided module takes and returns.
    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, prepend=True, always_call=True)
