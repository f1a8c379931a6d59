"""Divide a block over the ranks of a tensor-parallel mesh, as its plan says.

Parameters become DTensors of their global shapes; what the block's own code computes with stays plain local tensors.
The communication is Megatron's (Shoeybi et al. 2019, section 3): the gradient is summed where a region begins, the
output where it ends. With slices of the sequence (Korthikanti et al. 2022, arXiv:2205.05198) an all-gather and a
reduce-scatter take the place of either sum.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from lightning_par.errors import ParallelConfigError, Problem
from lightning_par.parallel._compat import not_compiled
from lightning_par.parallel.carried import carry_over
from lightning_par.parallel.tensor._compat import map_first_tensor
from lightning_par.parallel.tensor.collectives import first_order, refuse_second_order
from lightning_par.parallel.tensor.fused import note_order
from lightning_par.parallel.tensor.plan import BlockTensorPlan, ModulePlan, SequenceEntry
from lightning_par.parallel.tensor.sequence import cut_slice, gather_for_group, gather_slices, whole_dtensor
from lightning_par.parallel.tensor.streams import separate_streams

_Enter = Callable[[Tensor], DTensor]
_Entries = dict[tuple[int, bool], tuple[_Enter, Callable[[], None]]]


def shard_block(block: nn.Module, plan: BlockTensorPlan, mesh: DeviceMesh) -> None:
    """Divide the parameters of a block in place and let its forward communicate; before FSDP, which composes with it.

    Every rank must hold the same values; nothing is sent.

    Args:
        block: The block the plan is for, or one of the same class and sizes.
        plan: From `plan_block`. With a `sequence` the block then takes and returns slices: see `slice_sequence`.
        mesh: One-dimensional, of `plan.tp_size` ranks.

    Raises:
        ValueError: If the mesh has another size.
        ParallelConfigError: In a forward, if a module is called with other arguments than in the plan's example.
    """
    if mesh.ndim != 1 or mesh.size() != plan.tp_size:
        raise ValueError(f"the plan is for {plan.tp_size} ranks in one dimension, the mesh is {tuple(mesh.shape)}")
    restore = carry_over(block)
    _divide(block, plan, mesh)
    restore()
    for patch in plan.patches:
        set_attribute(block.get_submodule(patch.module), patch.attribute, patch.value)
    if plan.sequence:
        for entry in plan.sequence.entries:
            _run_on_whole(block.get_submodule(entry.module), entry, plan.sequence.dim, mesh)
    for name, group in plan.narrowed:
        columns = [module.name for module in plan.modules if module.group == group and module.style != "row"]
        _show_narrow(block.get_submodule(name), [block.get_submodule(column) for column in columns], plan.tp_size)
    partial_gradients = plan.sequence.partial_gradients if plan.sequence else plan.partial_gradients
    if partial_gradients:
        _sum_gradients(block, partial_gradients, mesh)
    separate_streams(block, plan, mesh)


def rank_order(parts: tuple[int, ...], tp_size: int) -> Tensor:
    """Indices that bring the features of fused parts into the order of ranks: for (q, k, v), q0 k0 v0 q1 k1 v1 ..."""
    pieces = [features.chunk(tp_size) for features in torch.arange(sum(parts)).split(list(parts))]
    return torch.cat([piece[rank] for rank in range(tp_size) for piece in pieces])


def feature_dim(plan: ModulePlan, param: Tensor) -> int:
    """The dimension of a Linear's parameter that is its output features."""
    return 1 if plan.transposed and param.dim() == 2 else 0


def _divide_parameters(linear: nn.Module, plan: ModulePlan, mesh: DeviceMesh) -> None:
    order = rank_order(plan.parts, mesh.size()) if plan.style == "fused column" else None
    for name, param in list(linear.named_parameters(recurse=False)):
        dim = feature_dim(plan, param)
        placement: Placement = Shard(dim)
        if plan.style == "row":
            placement = Shard(1 - dim) if param.dim() == 2 else Replicate()
        value = param.detach()
        if order is not None:
            value = value.index_select(dim, order.to(value.device))
        divided = distribute_tensor(value, mesh, [placement], src_data_rank=None)
        linear.register_parameter(name, nn.Parameter(divided, requires_grad=param.requires_grad))
    if order is not None:
        note_order(linear, order, transposed=plan.transposed)


def _divide(block: nn.Module, plan: BlockTensorPlan, mesh: DeviceMesh) -> None:
    entries: _Entries = {}

    def forget(*_: Any) -> None:
        for _enter, clear in entries.values():
            clear()

    for module in plan.modules:
        if module.style != "replicate":
            linear = block.get_submodule(module.name)
            _divide_parameters(linear, module, mesh)
            key = (module.group, plan.sequence is not None and module.name in plan.sequence.whole_inputs)
            if key not in entries:
                entries[key] = _entry(_entering(module, plan, mesh))
            _communicate(linear, module, plan, mesh, entries[key][0])
            if module.style == "row":
                # A recomputation ends without the hooks of the block.
                linear.register_forward_pre_hook(forget)
    block.register_forward_hook(forget, always_call=True)


def _entering(module: ModulePlan, plan: BlockTensorPlan, mesh: DeviceMesh) -> _Enter:
    """How each rank gets the whole input of a column or a gathered Linear, and what becomes of its gradient."""
    sequence = plan.sequence
    if sequence is None or sequence.is_whole(module.name) or module.name in sequence.whole_inputs:
        return lambda source: DTensor.from_local(source, mesh, [Replicate()], run_check=False)
    dim = sequence.dim
    if sequence.entry_of(module.group) is None:
        return lambda source: whole_dtensor(source, dim, mesh)
    # What gathered the input before this sums the gradient.
    return lambda source: DTensor.from_local(source, mesh, [Replicate()], run_check=False, grad_placements=[Partial()])


def _entry(make: _Enter) -> tuple[_Enter, Callable[[], None]]:
    """Make the entry of a region, and what forgets its last input.

    Columns that have the same input share one DTensor of it, so that it is gathered, and its gradient summed over the
    ranks, once. It is forgotten when the region ends, else it would keep the graph alive.
    """
    last: list[Any] = []

    def enter(source: Tensor) -> DTensor:
        shareable = not source.is_inference()
        key = (source._version, torch.is_grad_enabled()) if shareable else None
        if last and shareable and last[0] is source and last[1] == key:
            return last[2]
        entered = make(first_order(source) if source.requires_grad else source)
        last[:] = [source, key, entered]
        return entered

    return enter, last.clear


def _communicate(linear: nn.Module, module: ModulePlan, plan: BlockTensorPlan, mesh: DeviceMesh, enter: _Enter) -> None:
    """Let a divided Linear take and return plain tensors."""
    result: Placement = Replicate()
    if plan.sequence and not plan.sequence.is_whole(module.name):
        result = Shard(plan.sequence.dim)

    def before(linear: nn.Module, args: Any, kwargs: Any) -> Any:
        if module.style != "row":
            return map_first_tensor(enter, args, kwargs)
        return map_first_tensor(
            lambda source: DTensor.from_local(source, mesh, [Shard(-1)], run_check=False), args, kwargs
        )

    def after(linear: nn.Module, args: Any, out: DTensor) -> Tensor:
        last = out.dim() - 1
        return out.redistribute(placements=[Shard(last) if "column" in module.style else result]).to_local()

    # The compiler fails on DTensors that it meets in hooks with several shapes.
    linear.register_forward_pre_hook(not_compiled(before), with_kwargs=True)
    linear.register_forward_hook(not_compiled(after))


def _run_on_whole(module: nn.Module, entry: SequenceEntry, dim: int, mesh: DeviceMesh) -> None:
    """Put the slices together that a module is called with; cut its output, where no divided group has done that."""
    gather = gather_slices if entry.group == -1 else gather_for_group

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        given: dict[int | str, Tensor] = dict(enumerate(args)) | kwargs
        # What is passed twice, as query and as key, is gathered once.
        if missing := [str(key) for key in entry.inputs if not isinstance(given.get(key), Tensor)]:
            what = (
                f"{entry.module} is called without its argument {', '.join(missing)}, which is a slice of the sequence"
            )
            raise ParallelConfigError(Problem(what, "plan with an example that is called as in training"))
        parts = {id(given[key]): given[key] for key in entry.inputs}
        whole = {identity: gather(part, dim, mesh) for identity, part in parts.items()}
        args = tuple(whole.get(id(arg), arg) for arg in args)
        return args, {name: whole.get(id(arg), arg) for name, arg in kwargs.items()}

    def after(module: nn.Module, args: Any, out: Any) -> Any:
        return map_first_tensor(lambda tensor: cut_slice(tensor, dim, mesh), out)[0]

    module.register_forward_pre_hook(before, with_kwargs=True)
    if entry.group == -1:
        module.register_forward_hook(after)


def _show_narrow(module: nn.Module, columns: list[nn.Module], tp_size: int) -> None:
    """Let a module read a rank's width off its input, as `B, T, C = x.shape` does; its columns get the whole input."""
    shown: list[Tensor] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        def narrow(source: Tensor) -> Tensor:
            shown[:] = [source, source.narrow(-1, 0, source.shape[-1] // tp_size)]
            return shown[1]

        return map_first_tensor(narrow, args, kwargs)

    def whole(column: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_first_tensor(lambda source: shown[0] if shown and source is shown[1] else source, args, kwargs)

    module.register_forward_pre_hook(not_compiled(before), with_kwargs=True)
    for column in columns:
        column.register_forward_pre_hook(not_compiled(whole), with_kwargs=True, prepend=True)
    module.register_forward_hook(lambda *_: shown.clear(), always_call=True)


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


class _SumGradients(torch.autograd.Function):
    """Returns tensors as they are; their gradients are summed over the ranks, all at once.

    A rank that has no gradient of one, such as that of an expert without tokens, takes part with zeros.
    """

    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mesh = mesh
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_order()
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        part = DTensor.from_local(flat, ctx.mesh, [Partial()], run_check=False)
        total = part.redistribute(placements=[Replicate()]).to_local()
        sizes = [gradient.numel() for gradient in gradients]
        return None, *(x.view_as(like) for x, like in zip(total.split(sizes), gradients, strict=True))


def _sum_gradients(block: nn.Module, names: tuple[str, ...], mesh: DeviceMesh) -> None:
    """Sum the gradients of replicated parameters over the ranks, where each has only a part of them.

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
        by_type: dict[torch.dtype, list[tuple[dict[str, Any], str]]] = {}
        for parameters, key in owners(module):
            if parameters[key].requires_grad:
                by_type.setdefault(parameters[key].dtype, []).append((parameters, key))
        for places in by_type.values():
            summed = _SumGradients.apply(mesh, *(parameters[key] for parameters, key in places))
            for (parameters, key), tensor in zip(places, summed, strict=True):
                parameters[key] = tensor

    def after(module: nn.Module, args: Any, out: Any) -> None:
        if outside:
            for (parameters, key), param in zip(owners(module), outside.pop(), strict=True):
                parameters[key] = param

    block.register_forward_pre_hook(before)
    block.register_forward_hook(after, always_call=True)
