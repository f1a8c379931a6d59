"""Parameters and their shards: names, local parts, full values. The one place that knows how a DTensor is cut."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lightning_par.parallel._compat import silenced


def class_name(module: nn.Module) -> str:
    """The name of a module's class before FSDP2 put its own in front."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule)).__name__


def parameter_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """Map each parameter to its first fully qualified name; a tied parameter appears once."""
    return {param: name for name, param in module.named_parameters()}


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor (sharing storage with it), or a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def without_partials(tensor: Tensor) -> Tensor:
    """Reduce what a DTensor still has to sum up; any other tensor is returned as it is."""
    if not isinstance(tensor, DTensor) or not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=placements)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a DTensor into a plain tensor; collective over its mesh. A plain tensor is returned as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    # A dimension cut over fsdp and tp is gathered over one after the other, as it has to be.
    with silenced("torch.distributed.tensor._redistribute"):
        return tensor.full_tensor()


def local_shard(full: Tensor, like: DTensor) -> Tensor:
    """Cut out the part of `full` that this rank holds under the mesh and the placements of `like`.

    Makes no communication, so every rank must hold the same `full`.

    Args:
        full: Plain tensor with the global shape of `like`.
        like: The DTensor whose layout is wanted.

    Raises:
        ValueError: If the shapes differ.
    """
    if full.shape != like.shape:
        raise ValueError(f"a tensor of shape {tuple(full.shape)} cannot fill a parameter of shape {tuple(like.shape)}")
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


def sharded_like(full: Tensor, like: DTensor) -> DTensor:
    """Make a DTensor of a full value, cut as `like` is; no communication, see `local_shard`."""
    return with_local(local_shard(full, like), like)


@overload
def with_local(local: Tensor, like: DTensor) -> DTensor: ...
@overload
def with_local(local: Tensor, like: Tensor) -> Tensor: ...
def with_local(local: Tensor, like: Tensor) -> Tensor:
    """Make a tensor laid out as `like` is, of which this rank's part is `local`; shares storage with it."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def is_cut_by_fsdp(param: Tensor) -> bool:
    """Whether a parameter is an FSDP shard and not gathered; one that is divided over tp stays a DTensor when it is."""
    return isinstance(param, DTensor) and param.device_mesh.mesh_dim_names != ("tp",)


@torch.no_grad()
def copy_full_into(target: Tensor, full: Tensor) -> None:
    """Write a full value into a parameter or buffer, whatever its layout; no communication."""
    if isinstance(target, DTensor):
        target.to_local().copy_(local_shard(full.to(target.device), target))
    else:
        target.copy_(full)
