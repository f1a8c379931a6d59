"""Compare a divided block with the undivided one: every output, and the gradient of every parameter and input.

All in float64 and without dropout, so that what differs at all is wrong. Parameters get noise first: a bias that is
zero, or an output projection that is, would hide that something is summed twice or not at all.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.overrides import TorchFunctionMode

from lightning_par.parallel._compat import leaves, map_leaves, map_tensors
from lightning_par.parallel.shards import full_tensor
from lightning_par.parallel.tensor._compat import (
    CAN_SIMULATE,
    fresh,
    has_no_values,
    on_each_rank,
    rank_values,
    simulated_mesh,
)
from lightning_par.parallel.tensor.apply import feature_dim, rank_order, shard_block
from lightning_par.parallel.tensor.plan import BlockTensorPlan
from lightning_par.parallel.tensor.sequence import gather_slices

TOLERANCE = 1e-9
# A gradient that is truly zero, such as that of a key's bias, is compared with this part of the largest one.
_SMALL = 1e-4


class Verdict(NamedTuple):
    """The outcome of a comparison.

    Attributes:
        error: The largest relative error; infinite where the divided block fails.
        worst: Which output or gradient it belongs to, or the exception.
    """

    error: float
    worst: str

    @property
    def accepted(self) -> bool:
        return self.error <= TOLERANCE

    def describe(self) -> str:
        """Say what differs."""
        return self.worst if math.isinf(self.error) else f"error {self.error:.1e} in the {self.worst}"


@dataclass(frozen=True)
class Trial:
    """A block in float64 and what it computes undivided.

    Attributes:
        block: A copy, in evaluation mode, with noise on its parameters.
        args: Positional arguments.
        kwargs: Keyword arguments.
        inputs: Which of the tensors among them have a gradient, by position.
        expected: Its outputs and gradients by name.
        width: Said of errors, if the block is not as wide as the user's: " on a copy 1/8 as wide".
    """

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: frozenset[int]
    expected: Mapping[str, Tensor]
    width: str = ""


class InDouble(TorchFunctionMode):
    """Turn every cast to a smaller float into one to float64, such as the float32 softmax of attention."""

    _SMALLER = (torch.float32, torch.bfloat16, torch.float16)
    _CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [self._double(arg) for arg in args]
        kwargs = {key: self._double(value) for key, value in (kwargs or {}).items()}
        return (Tensor.double if func in self._CASTS else func)(*args, **kwargs)

    def _double(self, value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value in self._SMALLER else value


def prepare(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device | str = "cpu",
    width: str = "",
) -> Trial:
    """Run a copy of a block undivided.

    Args:
        block: The block; it stays as it is, and may be on the meta device.
        args: Positional arguments of one call.
        kwargs: Keyword arguments of it. Gradients of the first floating tensor and of those that require one are
            compared.
        device: Where to compute.
        width: Of the trial.
    """
    generator = torch.Generator().manual_seed(0)
    twin = copy.deepcopy(block)._apply(with_values).to(device).double().eval()
    for param in twin.parameters():
        param.grad = None
        # A plan is for frozen blocks and for those that are trained: what is frozen now may not be later.
        param.requires_grad_(param.is_floating_point())
        if not param.is_floating_point():
            continue
        size = 1 / math.sqrt(param.shape[-1]) if param.dim() > 1 else 0.1
        noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        param.data.add_(size * noise.to(param.device))
    tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    floating = [i for i, tensor in enumerate(tensors) if tensor.is_floating_point()]
    inputs = [*floating[:1], *(i for i in floating if tensors[i].requires_grad)]
    args, kwargs = map_tensors(lambda tensor: _double(tensor, device), (args, kwargs))
    trial = Trial(twin, args, kwargs, frozenset(inputs), {}, width)
    expected = {name: value for name, [value] in _run(trial, twin).items()}
    twin.zero_grad(set_to_none=True)
    return replace(trial, expected=expected)


def verify(trial: Trial, plan: BlockTensorPlan, mesh: DeviceMesh | None = None, *, simulate: bool = True) -> Verdict:
    """Divide a copy of the trial's block and compare.

    Args:
        trial: From `prepare`.
        plan: What to try.
        mesh: The real tensor-parallel mesh, once a process group is initialised.
        simulate: Compute all ranks in this process, without communication. Else each rank of the mesh must call this.

    Raises:
        ValueError: If the mesh is missing.
    """
    twin = copy.deepcopy(trial.block)
    simulate = simulate and CAN_SIMULATE
    with _ranks(plan.tp_size, mesh, simulate) as used:
        try:
            shard_block(twin, plan, used)
            found = _run(trial, twin, simulate, (plan.sequence.dim, used) if plan.sequence else None)
            _restore_order(found, plan)
            verdict = _compare(trial.expected, found)
        except Exception as error:  # A wrong plan fails in the block's own code, in any way.
            verdict = Verdict(math.inf, describe(error) + trial.width)
    if mesh is not None and not simulate:
        worst = torch.tensor(verdict.error, dtype=torch.float64, device=mesh.device_type)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=mesh.get_group())
        verdict = Verdict(worst.item(), verdict.worst)
    return verdict


def describe(error: Exception) -> str:
    """Return the class of an exception and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def with_values(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return a tensor, or one with values for one that has none.

    Floats are random, integers zero and booleans true. Parameters are zero: `prepare` adds noise of the right size.
    """
    if not has_no_values(tensor):
        return tensor
    if tensor.dtype == torch.bool:
        return torch.ones(tensor.shape, dtype=torch.bool)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(torch.zeros(tensor.shape, dtype=tensor.dtype), tensor.requires_grad)
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    generator = generator or torch.Generator().manual_seed(0)
    values = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    return values.requires_grad_(tensor.requires_grad)


@contextmanager
def _ranks(size: int, mesh: DeviceMesh | None, simulate: bool) -> Iterator[DeviceMesh]:
    if mesh is None and (dist.is_initialized() or not simulate):
        why = "a process group is initialised" if dist.is_initialized() else "this torch cannot simulate ranks"
        raise ValueError(f"{why}, so a plan is verified on the tensor-parallel mesh: pass mesh")
    if simulate:
        with simulated_mesh(size, mesh) as simulated:
            yield simulated
    elif mesh is not None:
        yield mesh


def _double(tensor: Tensor, device: torch.device | str) -> Tensor:
    tensor = tensor.detach().to(device)
    return tensor.double() if tensor.is_floating_point() else tensor


def cotangent(out: Tensor) -> Tensor:
    """Weights of an output's elements, no two of them alike, the same on all ranks."""
    steps = torch.arange(out.numel(), dtype=torch.float64, device=out.device)
    return torch.sin(1 + 7.3 * steps).reshape(out.shape)


def _run(
    trial: Trial, block: nn.Module, simulated: bool = False, slices: tuple[int, DeviceMesh] | None = None
) -> dict[str, list[Tensor]]:
    """Outputs and gradients by name, the value of each rank.

    Args:
        trial: Has the arguments.
        block: The undivided block, or a divided one.
        simulated: Whether all ranks are computed here.
        slices: The dimension that is the sequence, and the mesh, where each rank gets and returns a slice of it.
    """
    sources: list[Tensor] = []

    def source(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return fresh(leaf)
        tensor = leaf
        if slices and not sources:
            tensor = _cut(leaf, *slices)
        elif simulated:
            tensor = on_each_rank(leaf)
        sources.append(tensor.clone().requires_grad_(len(sources) in trial.inputs))
        return sources[-1]

    args, kwargs = map_leaves(source, (trial.args, trial.kwargs))
    with torch.enable_grad(), InDouble():
        out = block(*args, **kwargs)
        outputs = [leaf for leaf in leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if slices:
            outputs[0] = gather_slices(outputs[0], *slices)
        loss = torch.stack([(leaf * cotangent(leaf)).sum() for leaf in outputs]).sum()
        loss.backward()
    found = {f"output {i}": leaf.detach() for i, leaf in enumerate(outputs)}
    gradients = {f"gradient of input {i}": sources[i].grad for i in trial.inputs}
    if slices and sources[0].grad is not None:
        gradients["gradient of input 0"] = gather_slices(sources[0].grad, *slices)
    gradients |= {f"gradient of {name}": param.grad for name, param in block.named_parameters()}
    found |= {name: full_tensor(gradient) for name, gradient in gradients.items() if gradient is not None}
    return {name: [value.detach() for value in rank_values(tensor)] for name, tensor in found.items()}


def _cut(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    return distribute_tensor(tensor, mesh, [Shard(dim)], src_data_rank=None).to_local().detach()


def _restore_order(found: dict[str, list[Tensor]], plan: BlockTensorPlan) -> None:
    """Bring gradients of fused columns from the order of ranks into that of the undivided module."""
    for module in plan.modules:
        if module.style == "fused column":
            back = rank_order(module.parts, plan.tp_size).argsort()
            for name in (f"gradient of {module.name}.weight", f"gradient of {module.name}.bias"):
                if name in found:
                    dim = feature_dim(module, found[name][0])
                    found[name] = [value.index_select(dim, back.to(value.device)) for value in found[name]]


def _compare(expected: Mapping[str, Tensor], found: Mapping[str, list[Tensor]]) -> Verdict:
    if expected.keys() != found.keys():
        return Verdict(math.inf, f"only one of the two has {sorted(expected.keys() ^ found.keys())}")
    largest = max((value.abs().max().item() for name, value in expected.items() if "gradient" in name), default=0.0)
    worst = Verdict(0.0, "")
    for name, value in expected.items():
        floor = _SMALL * largest if "gradient" in name else 0.0
        scale = max(value.abs().max().item(), floor, torch.finfo(torch.float64).tiny)
        for its in found[name]:
            if its.shape != value.shape:
                return Verdict(math.inf, f"{name} is {tuple(its.shape)}, not {tuple(value.shape)}")
            error = (its - value).abs().max().item() / scale
            if not error <= worst.error:
                worst = Verdict(error, name)
    return worst
