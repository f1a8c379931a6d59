"""Divide embeddings and heads over the vocabulary, so that each rank holds and computes a slice of it.

An embedding looks up the tokens whose rows it has, and the rest is summed over the ranks; a head computes the logits of
its slice (Shoeybi et al. 2019, section 3). During a forward, a module holds its local slices as plain tensors, so
that any code of its own runs that treats rows alike; whether it does is tried before, see `rows`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_par.parallel.carried import carry_over
from lightning_par.parallel.tensor._compat import map_first_tensor
from lightning_par.parallel.tensor.collectives import gather, sum_gradients, sum_values
from lightning_par.parallel.tensor.logits import Division, divide_logits, report_once
from lightning_par.parallel.tensor.rows import holding, local_rows
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
    group = mesh.get_group()
    report = report_once(logging.WARNING if dist.get_rank() == 0 else logging.INFO)
    for name in plan.embeddings:
        _let_embed(module.get_submodule(name), group)
    for name in plan.heads:
        _let_project(module.get_submodule(name), group, report if loss_parallel and name not in plan.gathered else None)


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


def _let_embed(embedding: nn.Module, group: dist.ProcessGroup) -> None:
    """Let an embedding look up the tokens of this rank's rows, and get the others from other ranks."""
    undivided: Any = type(embedding).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        rows = self.weight.shape[0]
        here = rows // group.size()
        masks: list[Tensor] = []

        def local(ids: Tensor) -> Tensor:
            ids, elsewhere = local_rows(ids, rows, here * group.rank(), here)
            masks.append(elsewhere)
            return ids

        args, kwargs = map_first_tensor(local, args, kwargs)
        with _holding_slices(self, group):
            out = undivided(self, *args, **kwargs)
        return sum_values(out.masked_fill(masks[0][..., None], 0), group)

    _replace_forward(embedding, forward)


def _let_project(head: nn.Module, group: dist.ProcessGroup, report: Callable[[str], None] | None) -> None:
    """Let a head compute this rank's slice of the logits, and return it if there is a `report`, else all of them."""
    undivided: Any = type(head).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        classes = self.weight.shape[0]
        args, kwargs = map_first_tensor(lambda x: sum_gradients(x, group), args, kwargs)
        with _holding_slices(self, group):
            out = undivided(self, *args, **kwargs)
        return divide_logits(out, Division(group, classes, report)) if report else gather(out, -1, group)

    _replace_forward(head, forward)


@contextmanager
def _holding_slices(module: Any, group: dist.ProcessGroup) -> Iterator[None]:
    # Looked up at each call: FSDP replaces them, and the module may be a copy.
    parameters = {name: param for name, param in module._parameters.items() if param is not None}
    if any(param.device_mesh.ndim > 1 for param in parameters.values()):
        raise RuntimeError(
            f"{type(module).__name__} is called past the module that gathers its parameters from the data ranks: call "
            "the whole model, or make that method known with register_fsdp_forward_method"
        )
    slices = {name: param.to_local() for name, param in parameters.items()}
    with holding(module, slices, module.weight.shape[0] // group.size() * group.rank()):
        yield


def _replace_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    # In a class of its own and not by hooks: those of the user see what the undivided module takes and returns.
    cls = type(module)
    module.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
