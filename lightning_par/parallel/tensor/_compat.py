"""Private or unstable torch API that tensor parallelism uses, in one place; tests/test_tensor_plan.py watches it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

try:
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode, rank_map
    from torch.testing._internal.distributed.fake_pg import FakeStore

    CAN_SIMULATE = True
except ImportError:  # torch < 2.10
    CAN_SIMULATE = False

__all__ = [
    "CAN_SIMULATE",
    "DispatchMode",
    "map_first_tensor",
    "on_each_rank",
    "rank_values",
    "simulated_mesh",
]


def map_first_tensor(function: Callable[[Tensor], Any], *data: Any) -> Any:
    """Replace the first tensor in nested containers, such as (args, kwargs) (`torch.utils._pytree`, torch >= 2.2)."""
    flat, spec = tree_flatten(data)
    first = next(i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor))
    flat[first] = function(flat[first])
    return tree_unflatten(flat, spec)


@contextmanager
def simulated_mesh(size: int, mesh: DeviceMesh | None = None) -> Iterator[DeviceMesh]:
    """Run what follows on all ranks of a mesh at once, in this process (`LocalTensorMode`, torch >= 2.10).

    Nothing is sent, also over a real mesh. Values that differ between ranks are in `rank_values`.

    Args:
        size: Number of ranks.
        mesh: The real mesh, needed once a process group is initialised; else one is made for the time being.
    """
    if mesh is not None:
        with _without_logs(), LocalTensorMode(frozenset(mesh.mesh.flatten().tolist())):
            yield mesh
        return
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        with _without_logs(), LocalTensorMode(size):
            yield init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


@contextmanager
def _without_logs() -> Iterator[None]:
    # DTensor logs a stack for each shape that does not fit; a wrong plan is expected to have those.
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def on_each_rank(tensor: Tensor) -> Tensor:
    """Give each simulated rank its own copy of a value.

    An ordinary tensor would be shared, and what the ranks add to it in place would be added several times.
    """
    return rank_map(lambda rank: tensor.clone())


def rank_values(tensor: Tensor) -> list[Tensor]:
    """Return the value that each simulated rank has, or the one value of an ordinary tensor."""
    if CAN_SIMULATE and isinstance(tensor, LocalTensor):
        return list(tensor._local_tensors.values())
    return [tensor]
