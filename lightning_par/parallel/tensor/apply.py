"""Divide a block over the ranks of a tensor-parallel mesh, as its plan says.

Parameters become DTensors of their global shapes; what the block's own code computes with stays plain local tensors.
The communication is Megatron's (Shoeybi et al. 2019, section 3): the gradient is summed where a region begins, the
output where it ends.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from lightning_par.parallel.carried import carry_over
from lightning_par.parallel.tensor._compat import map_first_tensor
from lightning_par.parallel.tensor.fused import note_order
from lightning_par.parallel.tensor.plan import BlockTensorPlan, ModulePlan

_Enter = Callable[[Tensor], DTensor]


def shard_block(block: nn.Module, plan: BlockTensorPlan, mesh: DeviceMesh) -> None:
    """Divide the parameters of a block in place and let its forward communicate; before FSDP, which composes with it.

    Every rank must hold the same values; nothing is sent.

    Args:
        block: The block the plan is for, or one of the same class and sizes.
        plan: From `plan_block`.
        mesh: One-dimensional, of `plan.tp_size` ranks.

    Raises:
        ValueError: If the mesh has another size.
    """
    if mesh.ndim != 1 or mesh.size() != plan.tp_size:
        raise ValueError(f"the plan is for {plan.tp_size} ranks in one dimension, the mesh is {tuple(mesh.shape)}")
    restore = carry_over(block)
    entries = {module.group: _entry(mesh) for module in plan.modules}
    for module in plan.modules:
        if module.style != "replicate":
            linear = block.get_submodule(module.name)
            _divide_parameters(linear, module, mesh)
            _communicate(linear, module, mesh, entries[module.group][0])
    restore()

    def forget(*_: Any) -> None:
        for _enter, clear in entries.values():
            clear()

    block.register_forward_hook(forget, always_call=True)
    for patch in plan.patches:
        set_attribute(block.get_submodule(patch.module), patch.attribute, patch.value)
    if plan.partial_gradients:
        _sum_gradients(block, plan.partial_gradients, mesh)


def rank_order(parts: tuple[int, ...], tp_size: int) -> Tensor:
    """Indices that bring the features of fused parts into the order of ranks: for (q, k, v), q0 k0 v0 q1 k1 v1 ..."""
    pieces = [features.chunk(tp_size) for features in torch.arange(sum(parts)).split(list(parts))]
    return torch.cat([piece[rank] for rank in range(tp_size) for piece in pieces])


def feature_dim(plan: ModulePlan, param: Tensor) -> int:
    """The dimension of a Linear's parameter that is its output features."""
    return 1 if plan.transposed and param.dim() == 2 else 0


def _divide_parameters(linear: nn.Module, plan: ModulePlan, mesh: DeviceMesh) -> None:
    for name, param in list(linear.named_parameters(recurse=False)):
        dim = feature_dim(plan, param)
        placement: Placement = Shard(dim)
        if plan.style == "row":
            placement = Shard(1 - dim) if param.dim() == 2 else Replicate()
        value = param.detach()
        if plan.style == "fused column":
            value = value.index_select(dim, rank_order(plan.parts, mesh.size()).to(value.device))
        divided = distribute_tensor(value, mesh, [placement], src_data_rank=None)
        linear.register_parameter(name, nn.Parameter(divided, requires_grad=param.requires_grad))
    if plan.style == "fused column":
        note_order(linear, rank_order(plan.parts, mesh.size()), transposed=plan.transposed)


def _entry(mesh: DeviceMesh) -> tuple[_Enter, Callable[[], None]]:
    """Make the entry of a region, and what forgets its last input.

    Columns that have the same input share one DTensor of it, so that its gradient is summed over the ranks once. It is
    forgotten when the block ends, else it would keep the graph alive.
    """
    last: list[Any] = []

    def enter(source: Tensor) -> DTensor:
        shareable = not source.is_inference()
        key = (source._version, torch.is_grad_enabled()) if shareable else None
        if last and shareable and last[0] is source and last[1] == key:
            return last[2]
        entered = DTensor.from_local(source, mesh, [Replicate()], run_check=False)
        last[:] = [source, key, entered]
        return entered

    return enter, last.clear


def _communicate(linear: nn.Module, plan: ModulePlan, mesh: DeviceMesh, enter: _Enter) -> None:
    """Let a divided Linear take and return plain tensors."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if plan.style != "row":
            return map_first_tensor(enter, args, kwargs)
        return map_first_tensor(
            lambda source: DTensor.from_local(source, mesh, [Shard(-1)], run_check=False), args, kwargs
        )

    def after(module: nn.Module, args: Any, out: DTensor) -> Tensor:
        last = out.dim() - 1
        return out.redistribute(placements=[Shard(last) if "column" in plan.style else Replicate()]).to_local()

    linear.register_forward_pre_hook(before, with_kwargs=True)
    linear.register_forward_hook(after)


def set_attribute(module: nn.Module, attribute: str, value: int) -> None:
    """Change a number that a module holds, or one of an object that it holds ("config.num_heads")."""
    holder, dot, inner = attribute.rpartition(".")
    if not dot:
        setattr(module, attribute, value)
        return
    # Other modules hold the same object.
    own = copy.copy(getattr(module, holder))
    setattr(own, inner, value)
    setattr(module, holder, own)


def _sum_gradients(block: nn.Module, names: tuple[str, ...], mesh: DeviceMesh) -> None:
    """Sum the gradients of replicated parameters over the ranks, where each rank uses them on its own features.

    During the block's forward they are replaced by what sums the gradient: a hook on the parameter would be lost when
    FSDP replaces it.
    """
    outside: list[list[Any]] = []

    def owners(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
        # Looked up at each call: the block may be a copy.
        split = [name.rpartition(".")[::2] for name in names]
        return [(module.get_submodule(owner)._parameters, key) for owner, key in split]

    def before(module: nn.Module, args: Any) -> None:
        outside.append([parameters[key] for parameters, key in owners(module)])
        for parameters, key in owners(module):
            whole = DTensor.from_local(parameters[key], mesh, [Replicate()], run_check=False)
            parameters[key] = whole.to_local(grad_placements=[Partial()])

    def after(module: nn.Module, args: Any, out: Any) -> None:
        if outside:
            for (parameters, key), param in zip(owners(module), outside.pop(), strict=True):
                parameters[key] = param

    block.register_forward_pre_hook(before)
    block.register_forward_hook(after, always_call=True)
