"""Private or unstable torch API that tensor parallelism uses, in one place; tests/test_tensor_plan.py watches it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_par.parallel._compat import leaves, silenced

try:
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode, rank_map
    from torch.testing._internal.distributed.fake_pg import FakeStore

    CAN_SIMULATE = True
except ImportError:  # torch 2.11
    CAN_SIMULATE = False

T = TypeVar("T", bound=Tensor)

# DTensor logs a stack for each shape that does not fit; a wrong plan is expected to have those.
_FAKE_TENSORS = "torch._subclasses.fake_tensor"

__all__ = [
    "CAN_SIMULATE",
    "DispatchMode",
    "TorchFunctionMode",
    "fake_tensors",
    "first_tensor",
    "fresh",
    "function_name",
    "has_no_values",
    "like_tensor",
    "map_first_tensor",
    "on_each_rank",
    "rank_values",
    "simulated_mesh",
    "without_subclasses",
]


def function_name(function: Any) -> str:
    """The name of what `__torch_function__` is called with, such as "Tensor.argmax" (`resolve_name`, torch >= 1.7)."""
    name = str(resolve_name(function) or getattr(function, "__name__", function))
    return name.replace("torch.Tensor.", "Tensor.").replace("torch.nn.functional.", "F.")


def without_subclasses() -> AbstractContextManager[None]:
    """Let torch treat tensor subclasses as tensors (`torch._C.DisableTorchFunctionSubclass`, torch >= 2.0)."""
    return torch._C.DisableTorchFunctionSubclass()


def like_tensor(cls: type[T], part: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> T:
    """Make a tensor that has the dtype and device of another, a shape of its own and no memory.

    Uses `Tensor._make_wrapper_subclass` (torch >= 1.11), as DTensor does.
    """
    made: T = Tensor._make_wrapper_subclass(
        cls, shape, strides=strides, dtype=part.dtype, device=part.device, layout=part.layout
    )
    return made


def first_tensor(data: Any) -> Tensor:
    """Return the first tensor in nested containers (`torch.utils._pytree`, torch >= 2.2)."""
    return next(leaf for leaf in leaves(data) if isinstance(leaf, Tensor))


def map_first_tensor(function: Callable[[Tensor], Any], *data: Any) -> Any:
    """Replace the first tensor in nested containers, such as (args, kwargs) (`torch.utils._pytree`, torch >= 2.2)."""
    flat, spec = tree_flatten(data)
    first = next(i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor))
    flat[first] = function(flat[first])
    return tree_unflatten(flat, spec)


@contextmanager
def simulated_mesh(size: int, mesh: DeviceMesh | None = None) -> Iterator[DeviceMesh]:
    """Run what follows on all ranks of a mesh at once, in this process (`LocalTensorMode`; that of torch 2.11 crashes).

    Nothing is sent, also over a real mesh. Values that differ between ranks are in `rank_values`.

    Args:
        size: Number of ranks.
        mesh: The real mesh, needed once a process group is initialised; else one is made for the time being.
    """
    if mesh is not None:
        with silenced(_FAKE_TENSORS), LocalTensorMode(frozenset(mesh.mesh.flatten().tolist())):
            yield mesh
        return
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        with silenced(_FAKE_TENSORS), LocalTensorMode(size):
            yield init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


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


def fresh(leaf: Any) -> Any:
    """Copy an argument that a call may change, such as a cache of keys and values; others are returned as they are."""
    changeable = hasattr(leaf, "__dict__") and not callable(leaf) and not isinstance(leaf, Tensor | torch.nn.Module)
    if not changeable:
        return leaf
    with _CopyWithoutGraph():
        return copy.deepcopy(leaf)


class _CopyWithoutGraph(TorchFunctionMode):
    """Copies a tensor that has a graph without it, where torch refuses to (`Tensor.__deepcopy__`)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Run what follows with shapes alone: nothing is computed, parameters are left as they are (torch >= 2.0)."""
    with silenced(_FAKE_TENSORS), FakeTensorMode(allow_non_fake_inputs=True):
        yield


def has_no_values(tensor: Tensor) -> bool:
    """Whether a tensor is on the meta device, or was made in `fake_tensors`."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)
