"""Every private or unstable torch API that the package uses, in one place; that of FSDP2 is in `_compat_fsdp.py`.

Each function says what it needs and since which version it is known; `tests/test_compat.py` tells what breaks when
torch changes one of them.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _random, _redistribute
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

F = TypeVar("F", bound=Callable[..., Any])


def run_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once, when the backward that is running now has ended (`Engine.queue_callback`, torch >= 1.0)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def read_whole_scalars() -> None:
    """Let `item()`, `float()` and `bool()` of a DTensor give its value, where torch gives this rank's part of it.

    So `grad.norm().item()` and `if grad.isnan().any():` in a hook mean what they say. It is a collective, like every
    other operation that needs all parts (`OpDispatcher._custom_op_handlers`, torch >= 2.2; wrong until at least 2.13).
    Left in place, as the parameters stay sharded after training.
    """

    def item(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        return op(*(arg.full_tensor() if isinstance(arg, DTensor) else arg for arg in args))

    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(torch.ops.aten._local_scalar_dense.default, item)  # type: ignore[arg-type]


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread (`torch._C._current_graph_task_id`, torch >= 2.1)."""
    return torch._C._current_graph_task_id() != -1


def not_compiled(function: F) -> F:
    """Keep `torch.compile` out of a function, no method (`torch._disable_dynamo`, torch >= 2.1)."""
    return torch._disable_dynamo(function)  # type: ignore[attr-defined, return-value]


def default_store() -> Any:
    """The key-value store of the default process group (`_get_default_store`, torch >= 1.8)."""
    return distributed_c10d._get_default_store()


def foreach_norm(tensors: list[Tensor], order: float) -> list[Tensor]:
    """Return the p-norm of each tensor, at least in float32 (`torch._foreach_norm`, its `dtype` since torch 2.4).

    The tensors share device and dtype and none is empty: the infinite norm of nothing is an error there.
    """
    dtype = torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else None
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def foreach_mul_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one device and dtype in place by a 0-dim tensor (`torch._foreach_mul_`, torch >= 2.1)."""
    torch._foreach_mul_(tensors, factor)


def foreach_clamp_(tensors: list[Tensor], limit: float) -> None:
    """Clamp tensors of one device and dtype in place to [-limit, limit] (`torch._foreach_clamp_*_`, torch >= 2.0)."""
    torch._foreach_clamp_min_(tensors, -limit)
    torch._foreach_clamp_max_(tensors, limit)


def unscale_and_check_(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply by `inv_scale` in place, and set `found_inf` to 1 if an element is not finite.

    The gradients share device and dtype (`torch._amp_foreach_non_finite_check_and_unscale_`; on CPU since torch 2.3).
    """
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)


def collective_device(group: ProcessGroup, preferred: torch.device) -> torch.device:
    """Return `preferred` if `group` can communicate there, else its accelerator (`ProcessGroup._device_types`, 2.0)."""
    kinds = [device.type for device in group._device_types]
    if not kinds or preferred.type in kinds:
        return preferred
    kind = next((kind for kind in kinds if kind != "cpu"), "cpu")
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def map_tensors(function: Callable[[Tensor], Any], data: Any) -> Any:
    """Apply `function` to each tensor in nested containers, and keep all else (`torch.utils._pytree`, torch >= 2.2)."""
    return tree_map_only(Tensor, function, data)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Make the 1-D mesh over all ranks of `mesh`, once for each name (`DeviceMesh._flatten`, torch >= 2.4)."""
    return mesh._flatten(name)


def unflatten_mesh(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Cut a 1-D mesh into several dimensions, outermost first (`DeviceMesh._unflatten`, torch >= 2.10)."""
    return mesh._unflatten(0, sizes, names)


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Join meshes of one root into one; makes no groups (`DeviceMesh._concatenate`, torch >= 2.10)."""
    return DeviceMesh._concatenate(meshes)


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply `function` to all non-containers in nested containers (`torch.utils._pytree`, torch >= 2.2)."""
    return tree_map(function, data)


def leaves(data: Any) -> list[Any]:
    """List everything in nested containers that is no container (`torch.utils._pytree`, torch >= 2.2)."""
    return tree_leaves(data)


def tensors_in(data: Any) -> list[Tensor]:
    """List the tensors in nested containers."""
    return [leaf for leaf in leaves(data) if isinstance(leaf, Tensor)]


def has_saved_tensor_hooks() -> bool:
    """Whether a checkpoint or the like sees what is saved for backward (`_top_saved_tensors_default_hooks`, 2.4)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def flatten(data: Any) -> tuple[list[Any], Any]:
    """List what `leaves` does, and what `unflatten` needs to put it back (`torch.utils._pytree`, torch >= 2.2)."""
    return tree_flatten(data)


def unflatten(leaves: Iterable[Any], spec: Any) -> Any:
    """Undo `flatten`."""
    return tree_unflatten(leaves, spec)


def storage_note(tensor: Tensor) -> Any:
    """Return what `set_storage_note` attached to the storage of a tensor, or None.

    Relies on torch keeping the Python object of a storage, with its attributes, while the storage lives (torch >= 2.1).
    """
    return getattr(tensor.untyped_storage(), "_lightning_par_note", None)


def set_storage_note(tensor: Tensor, note: Any) -> None:
    """Attach an object to the storage of a tensor; every view of it, and nothing else, sees it. It dies with it."""
    tensor.untyped_storage()._lightning_par_note = note  # type: ignore[attr-defined]


def shares_storage(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors are views of one storage, also on meta (`UntypedStorage._cdata`, torch >= 2.0)."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Tell whether `register_hook` or `register_post_accumulate_grad_hook` was called on a tensor (torch >= 2.1)."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def gradient_hooks(tensor: Tensor) -> Any:
    """Return the hooks that `register_hook` added to a leaf, or None (`Tensor._backward_hooks`, torch >= 1.0)."""
    return tensor._backward_hooks


def set_gradient_hooks(tensor: Tensor, hooks: Any) -> None:
    """Let a leaf run the hooks of another one; the handles that the user has go on removing them."""
    tensor._backward_hooks = hooks


def has_accumulation_hooks(tensor: Tensor) -> bool:
    """Tell whether `register_post_accumulate_grad_hook` was called on a tensor (torch >= 2.1)."""
    return bool(tensor._post_accumulate_grad_hooks)


def factory_functions() -> set[Any]:
    """Return the functions that `torch.device(...)` as a context redirects (`torch.utils._device`, torch >= 2.0)."""
    return _device_constructors()


@contextmanager
def around_inner_meta_context(around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter `around()` for calls under a ``with torch.device("meta")`` begun in this context (`DeviceContext`, 2.0)."""
    outer = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    original = DeviceContext.__torch_function__

    def call(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.device.type != "meta" or any(self is mode for mode in outer):
            return original(self, func, types, args, kwargs)
        with around():
            return original(self, func, types, args, kwargs)

    DeviceContext.__torch_function__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeviceContext.__torch_function__ = original  # type: ignore[method-assign]


def no_function_modes() -> AbstractContextManager[None]:
    """Switch `__torch_function__` off, with all its modes (`torch._C.DisableTorchFunction`, torch >= 2.0)."""
    return torch._C.DisableTorchFunction()


@contextmanager
def no_torch_modes() -> Iterator[None]:
    """Switch all function and dispatch modes off (`torch.utils._python_dispatch`, torch >= 2.0)."""
    with no_function_modes(), _disable_current_modes():
        yield


@contextmanager
def replaced_trunc_normal(function: Callable[..., Tensor]) -> Iterator[None]:
    """Let `nn.init.trunc_normal_` call `function(original, tensor, ...)` (`_no_grad_trunc_normal_`, torch >= 1.9)."""
    original = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = lambda *args, **kwargs: function(original, *args, **kwargs)
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


def has_inner_forward_hooks(module: nn.Module) -> bool:
    """Whether a submodule of `module` has a forward hook or pre-hook (`Module._forward_hooks`, torch >= 1.0)."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in module.modules() if m is not module)


def tensor_version(tensor: Tensor) -> int:
    """Return how often a tensor was written in place, 0 for inference tensors (`Tensor._version`, torch >= 0.4)."""
    return 0 if tensor.is_inference() else tensor._version


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold the memory of a wrapper subclass such as DTensor, or the tensor itself.

    Uses `torch.utils._python_dispatch.is_traceable_wrapper_subclass`, torch >= 2.1.
    """
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):  # since torch 2.13 the mesh of a DTensor is listed too
            yield from plain_tensors(inner)


_mesh_caches: WeakSet[Any] = WeakSet()


def forget_meshes() -> None:
    """Empty the caches of DTensor, for a process that makes a new process group.

    Equal meshes count as one in them, though their groups differ: a mesh whose groups are destroyed would come back in
    results. They are functools caches, some in closures where only the garbage collector finds them, a cache in C++
    (`_clear_DTensor_sharding_propagator_cache`, torch >= 2.10), one of planners that hold meshes
    (`clear_redistribute_planner_cache`, torch >= 2.10) and the random state (`_random._rng_tracker`, >= 2.0).
    The number that names the next group (`_world.group_count`, torch >= 2.0) differs on ranks where making one failed.
    """
    caches = (x for x in gc.get_objects() if type(x) is functools._lru_cache_wrapper)
    _mesh_caches.update(cache for cache in caches if str(cache.__module__).startswith("torch.distributed.tensor"))
    for cache in _mesh_caches:
        cache.cache_clear()
    if hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):
        torch._C._clear_DTensor_sharding_propagator_cache()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):
        _redistribute.clear_redistribute_planner_cache()
    _random._rng_tracker = None
    distributed_c10d._world.group_count = 0


@contextmanager
def silenced(logger_name: str) -> Iterator[None]:
    """Keep a logger of torch quiet about what is done on purpose here."""
    logger = logging.getLogger(logger_name)
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled
