"""Slices of the sequence between the divided parts of blocks (Korthikanti et al. 2022, arXiv:2205.05198).

The collectives are redistributions of DTensors: what they do to a gradient follows from what each rank has of it. It is
*partial* where each rank computes with its own features, and the ranks' gradients add up; it is *whole* where all ranks
compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lightning_par.errors import ParallelConfigError, Problem
from lightning_par.parallel._compat import in_backward, leaves, map_tensors
from lightning_par.parallel.shards import class_name
from lightning_par.parallel.tensor._compat import first_tensor, function_name, map_first_tensor, without_subclasses


def whole_dtensor(part: Tensor, dim: int, mesh: DeviceMesh) -> DTensor:
    """Put the slices of all ranks together (all-gather); a partial gradient is summed and cut (reduce-scatter)."""
    return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False).redistribute(placements=[Replicate()])


def gather_for_group(part: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Put the slices together for a divided group (all-gather); its partial gradient is reduce-scattered."""
    return whole_dtensor(part, dim, mesh).to_local(grad_placements=[Partial()])


def gather_slices(part: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Put the slices together for what all ranks compute alike (all-gather); its whole gradient is cut."""
    return whole_dtensor(part, dim, mesh).to_local()


def cut_slice(whole: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Return this rank's slice of what all ranks have; the gradients of the slices are put together (all-gather)."""
    shared = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    return shared.redistribute(placements=[Shard(dim)]).to_local()


def slice_sequence(blocks: Sequence[nn.Module], mesh: DeviceMesh, dim: int) -> None:
    """Let a chain of blocks, divided with sequence parallelism, pass each other slices of the hidden state.

    The hidden state, the first tensor argument of a block and the first tensor it returns, is cut before the first
    block and put together after the last; what is computed outside sees the whole. Each block checks the length of what
    it gets and returns: a whole tensor that is added between blocks would be broadcast over slices of one position.

    Args:
        blocks: In the order of the forward; each was given to `shard_block`. Hooks are added to them.
        mesh: The one-dimensional tensor-parallel mesh.
        dim: Which dimension of the hidden state is the sequence: `SequencePlan.dim`.

    Raises:
        ParallelConfigError: In a forward, if the ranks do not divide the length, or if it differs from block to block.
    """
    # The length of a slice, from the first block to the last.
    entered: list[int] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        def cut(hidden: Tensor) -> Tensor:
            entered[:] = [_slice_length(hidden, dim, mesh.size())]
            return cut_slice(hidden, dim, mesh)

        return map_first_tensor(cut, args, kwargs)

    def guard(module: nn.Module, args: Any, out: Any) -> Any:
        # Simulated ranks have a tensor of their own kind.
        return map_first_tensor(lambda x: x.as_subclass(HiddenSlice) if type(x) is Tensor else x, out)[0]

    def check(what: str, hidden: Tensor) -> None:
        # A block may be recomputed after the chain has ended, or when another batch has entered.
        if not in_backward() and (not entered or hidden.shape[dim] != entered[0]):
            raise ParallelConfigError(_wrong_length(what, hidden.shape[dim], entered))

    def check_input(module: nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs = map_tensors(_plain, (args, kwargs))
        check(f"a {class_name(module)} is called with", first_tensor((args, kwargs)))
        return args, kwargs

    def check_output(module: nn.Module, args: Any, out: Any) -> None:
        check(f"a {class_name(module)} returns", first_tensor(out))

    def leave(module: nn.Module, args: Any, out: Any) -> Any:
        entered.clear()
        return map_first_tensor(lambda hidden: gather_slices(hidden, dim, mesh), out)[0]

    blocks[0].register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    for block in blocks[1:]:
        # Before the hooks of FSDP, which look at the arguments.
        block.register_forward_pre_hook(check_input, with_kwargs=True, prepend=True)
    for block in blocks:
        block.register_forward_hook(check_output)
    for block in blocks[:-1]:
        block.register_forward_hook(guard)
    blocks[-1].register_forward_hook(leave)


class HiddenSlice(Tensor):
    """A rank's slice of the hidden state on its way from block to block, which no other code may take for the whole."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _HARMLESS:
            with without_subclasses():
                return func(*args, **(kwargs or {}))
        if func in _BY_POSITION and all(type(x) is cls or not isinstance(x, Tensor) for x in leaves((args, kwargs))):
            args, kwargs = map_tensors(_plain, (args, kwargs or {}))
            return func(*args, **kwargs).as_subclass(cls)
        raise ParallelConfigError(
            Problem(
                f"the hidden state is read between blocks, with {function_name(func)}, where it is a slice of the "
                "sequence",
                "move that into a block or behind the last one, or sequence_parallel=False",
                "sequence_parallel: false",
            )
        )


# What is the same for a slice and for the whole, and what treats each position alike and has no parameters.
_HARMLESS = {
    *(getattr(Tensor, name).__get__ for name in ("dtype", "device", "requires_grad", "layout", "is_leaf", "is_meta")),
    Tensor.is_floating_point,
    Tensor.get_device,
    Tensor.__hash__,
}
_BY_POSITION = {
    *(getattr(Tensor, name) for name in ("add", "sub", "mul", "div", "neg", "to", "float", "contiguous")),
    *(getattr(Tensor, f"__{name}__") for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg")),
    torch.add,
    torch.sub,
    torch.mul,
    torch.div,
}


def _plain(tensor: Tensor) -> Tensor:
    if type(tensor) is not HiddenSlice:
        return tensor
    with without_subclasses():
        return tensor.as_subclass(Tensor)


def _slice_length(hidden: Tensor, dim: int, tp_size: int) -> int:
    length = hidden.shape[dim]
    if length % tp_size or not length:
        above = length + tp_size - length % tp_size
        lengths = [str(fits) for fits in (above - tp_size, above) if fits]
        raise ParallelConfigError(
            Problem(
                f"a sequence of {length} positions cannot be cut into {tp_size} equal slices",
                f"pad or crop to a multiple of tp_size={tp_size}, such as {' or '.join(lengths)}",
            )
        )
    return length // tp_size


def _wrong_length(what: str, length: int, entered: list[int]) -> Problem:
    if not entered:
        return Problem(
            f"{what} a hidden state of {length} positions, but no sequence has entered the first block",
            "call the blocks in order, or sequence_parallel=False",
        )
    return Problem(
        f"{what} a hidden state of {length} positions, where slices of {entered[0]} have entered the first block",
        "add no tensor of the whole sequence between the blocks, or sequence_parallel=False",
    )
