"""One gradient norm over any mix of meshes, and the two ways of clipping by it.

The p-norm of all gradients is the p-th root of a sum of powers. Each rank adds up the powers of its local shards, kept
apart by the process groups over which a parameter is sharded; one all-reduce per such group then completes the sums.
Nothing is reduced over the mesh dimensions on which a parameter is replicated, so it counts once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from lightning_par.parallel import _compat
from lightning_par.parallel.shards import to_local, without_partials

_Ranks = tuple[int, ...]


@torch.no_grad()
def grad_norm(
    parameters: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    *,
    extra_groups: Sequence[ProcessGroup] = (),
    counted_elsewhere: Collection[Tensor] = (),
) -> Tensor:
    """Compute the norm of all gradients, viewed as one vector.

    Collective over every process group on which a parameter is sharded, once each, and over `extra_groups`. A rank
    takes part by the layout of its parameters, whether they have a gradient there or not.

    Args:
        parameters: Parameters on any mix of meshes and placements; plain ones count as replicated on all ranks. A
            parameter given twice counts once, one with ``requires_grad=False`` not at all. A gradient that is `Partial`
            is reduced first and must be `Partial` on all ranks of its mesh.
        norm_type: The order p of the norm, positive; `math.inf` for the largest absolute value.
        extra_groups: Groups whose ranks hold different parameters, such as the stages of a pipeline.
        counted_elsewhere: Parameters among them of which another rank of `extra_groups` counts the same gradient.

    Returns:
        A plain tensor of shape (), float64 if a parameter is, else float32; the same on all ranks.

    Raises:
        ValueError: If `norm_type` is not positive.
    """
    order = _checked_order(norm_type)
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    trainable = _trainable(given)
    home = _home_device(given, extra_groups)
    # Their layout still counts: the other ranks of a group that they are sharded over reduce with this one.
    shards, groups = _bucket_local_shards(trainable, {id(parameter) for parameter in counted_elsewhere})
    powers = {sharding: _local_power(tensors, order, home) for sharding, tensors in shards.items()}
    for ranks, group in groups.by_ranks.items():
        members = [sharding for sharding in powers if ranks in sharding]
        reduced = _reduce_powers(torch.stack([powers[sharding] for sharding in members]), order, group)
        powers.update(zip(members, reduced.unbind(), strict=True))
    total = _sum_powers(list(powers.values()), order, home)
    for group in extra_groups:
        total = _reduce_powers(total, order, group)
    is_double = any(p.dtype in (torch.float64, torch.complex128) for p in trainable)
    norm = total if math.isinf(order) else total.pow(1.0 / order)
    return norm.to(torch.float64 if is_double else torch.float32)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    extra_groups: Sequence[ProcessGroup] = (),
    counted_elsewhere: Collection[Tensor] = (),
) -> Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`; collective as `grad_norm` is.

    Makes no host synchronisation unless `error_if_nonfinite` is set.

    Args:
        parameters: As for `grad_norm`.
        max_norm: The largest norm allowed.
        norm_type: The order p of the norm, positive; `math.inf` for the largest absolute value.
        error_if_nonfinite: Raise if the norm is not finite, instead of scaling by it.
        extra_groups: As for `grad_norm`.
        counted_elsewhere: As for `grad_norm`; they are scaled too.

    Returns:
        The norm before clipping: a plain tensor of shape (), the same on all ranks.

    Raises:
        ValueError: If `norm_type` is not positive.
        RuntimeError: If the norm is NaN or infinite and `error_if_nonfinite` is set; on all ranks alike.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = grad_norm(given, norm_type, extra_groups=extra_groups, counted_elsewhere=counted_elsewhere)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the gradient norm of order {float(norm_type):g} is {norm.item()}, so the gradients cannot be clipped to "
            f"{float(max_norm):g}. Look for the first loss that is not finite, or pass error_if_nonfinite=False"
        )
    factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    shards = [to_local(p.grad) for p in _trainable(given) if p.grad is not None]
    for (device, dtype), tensors in group_by_device_and_dtype(shards).items():
        # A factor rounded to a half precision would move the clipped norm by up to 0.4 %.
        exact = dtype if dtype in (torch.float32, torch.float64) else factor.dtype
        _compat.foreach_mul_(tensors, factor.to(device, exact))
    return norm


@torch.no_grad()
def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Clamp each gradient element in place to ``[-clip_value, clip_value]``.

    Communicates only where a gradient is `Partial`: that one is reduced first, and replaced by what it sums up to.

    Args:
        parameters: As for `grad_norm`.
        clip_value: The largest absolute value allowed.
    """
    shards = []
    for parameter in _trainable([parameters] if isinstance(parameters, Tensor) else parameters):
        if parameter.grad is None:
            continue
        parameter.grad = without_partials(parameter.grad)
        shards.append(to_local(parameter.grad))
    for tensors in group_by_device_and_dtype(shards).values():
        _compat.foreach_clamp_(tensors, float(clip_value))


def group_by_device_and_dtype(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Sort tensors into lists that one foreach kernel can take."""
    grouped: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        grouped[tensor.device, tensor.dtype].append(tensor)
    return grouped


def all_reduce_scalars(values: Tensor, op: dist.ReduceOp.RedOpType, group: ProcessGroup) -> Tensor:
    """All-reduce a few numbers, by way of another device where the group cannot use theirs; returns a new tensor."""
    sent = values.to(_compat.collective_device(group, values.device), copy=True)
    dist.all_reduce(sent, op=op, group=group)
    return sent.to(values.device)


def _checked_order(norm_type: float) -> float:
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"norm_type is {norm_type}, but a norm has a positive order: use 2.0, 1.0 or math.inf")
    return order


def _trainable(parameters: Iterable[Tensor]) -> list[Tensor]:
    return list({id(p): p for p in parameters if p.requires_grad}.values())


def _home_device(parameters: list[Tensor], extra_groups: Sequence[ProcessGroup]) -> torch.device:
    """Where the few numbers of the norm live: with the first parameter."""
    if parameters:
        return to_local(parameters[0]).device
    # A stage without parameters must use the backend that the other stages use.
    accelerator = torch.accelerator.current_accelerator(check_available=True) if extra_groups else None
    return accelerator or torch.device("cpu")


class _ShardingGroups:
    """The process groups over which the tensors it was asked about are sharded.

    A group is known by its ranks: a mesh, its slices and an equal mesh made elsewhere then share one collective.
    """

    def __init__(self) -> None:
        self.by_ranks: dict[_Ranks, ProcessGroup] = {}
        self._seen: dict[tuple[int, tuple[Placement, ...]], tuple[_Ranks, ...]] = {}

    def of(self, tensor: Tensor) -> tuple[_Ranks, ...]:
        """Return the ranks of each group over which `tensor` is cut; none for a plain or a replicated one."""
        if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is None:
            return ()
        layout = id(tensor.device_mesh), tensor.placements
        if layout not in self._seen:
            self._seen[layout] = self._look_up(tensor.device_mesh, tensor.placements)
        return self._seen[layout]

    def _look_up(self, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[_Ranks, ...]:
        found = []
        for dim, placement in enumerate(placements):
            if placement.is_replicate() or placement.is_partial() or mesh.size(dim) == 1:
                continue
            group = mesh.get_group(dim)
            ranks = tuple(sorted(dist.get_process_group_ranks(group)))
            self.by_ranks.setdefault(ranks, group)
            found.append(ranks)
        return tuple(found)


def _bucket_local_shards(
    parameters: list[Tensor], left_out: Collection[int]
) -> tuple[dict[tuple[_Ranks, ...], list[Tensor]], _ShardingGroups]:
    """Sort the local parts of all gradients by the groups over which they are sharded, and collect those groups.

    The order of both is that of the parameters, hence the same on all ranks that share a group.
    """
    shards: dict[tuple[_Ranks, ...], list[Tensor]] = {}
    groups = _ShardingGroups()
    for parameter in parameters:
        # Also without a gradient: the other ranks of the group may have one.
        shards.setdefault(groups.of(parameter), [])
        if parameter.grad is not None and id(parameter) not in left_out:
            grad = without_partials(parameter.grad)
            shards.setdefault(groups.of(grad), []).append(to_local(grad))
    return shards, groups


def _local_power(tensors: list[Tensor], order: float, home: torch.device) -> Tensor:
    """Return sum(abs(x) ** order), or max(abs(x)) for the infinite order, of all elements: float64, shape ()."""
    norms: list[Tensor] = []
    for same_kind in group_by_device_and_dtype(t for t in tensors if t.numel()).values():
        norms.extend(_compat.foreach_norm(same_kind, order))
    # Powers leave the range of float32 early: a norm of 7e12 to the power 3 overflows.
    norms = [norm.to(home, torch.float64) for norm in norms]
    return _sum_powers(norms if math.isinf(order) else [norm.pow(order) for norm in norms], order, home)


def _sum_powers(powers: list[Tensor], order: float, home: torch.device) -> Tensor:
    if not powers:
        return torch.zeros((), dtype=torch.float64, device=home)
    stacked = torch.stack(powers)
    return stacked.amax() if math.isinf(order) else stacked.sum()


def _reduce_powers(powers: Tensor, order: float, group: ProcessGroup) -> Tensor:
    """Complete the sums of powers (or the maxima) over the ranks of `group`."""
    if not math.isinf(order):
        return all_reduce_scalars(powers, dist.ReduceOp.SUM, group)
    # The maximum of a NaN and a number is either of them, depending on backend and rank order.
    reduced, nans = all_reduce_scalars(torch.stack([powers, powers.isnan().to(powers)]), dist.ReduceOp.MAX, group)
    return reduced.masked_fill(nans > 0, math.nan)
