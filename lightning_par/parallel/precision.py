"""In which dtype parameters are stored, gathered, reduced and saved, and the loss scaler of fp16.

A `PrecisionPolicy` is derived from the Trainer's or Fabric's own ``precision=`` string; `MixedPrecision` overrides
single dtypes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_par.errors import Problems
from lightning_par.parallel import _compat
from lightning_par.parallel.gradients import all_reduce_scalars, group_by_device_and_dtype
from lightning_par.parallel.shards import to_local

DtypeName = Literal["fp32", "bf16", "fp16", "fp64"]

_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes that override those of ``precision=``; None keeps what the precision says.

    Args:
        param: Of the gathered parameters and the computation.
        reduce: Of the gradients while they are reduced.
        output: To which the outputs of sharded modules are cast.
        buffer: Of floating-point buffers.

    Raises:
        ParallelConfigError: If a dtype has another name than ``fp32``, ``bf16``, ``fp16`` or ``fp64``.
    """

    param: DtypeName | None = None
    reduce: DtypeName | None = None
    output: DtypeName | None = None
    buffer: DtypeName | None = None

    def __post_init__(self) -> None:
        problems = Problems()
        for field, value in asdict(self).items():
            if value is not None and value not in _DTYPES:
                problems.add(
                    f"mixed_precision.{field} is {value!r}, known are {', '.join(_DTYPES)}",
                    f'MixedPrecision({field}="bf16")',
                    f"mixed_precision: {{{field}: bf16}}",
                )
        problems.raise_if_any()


@dataclass(frozen=True)
class PrecisionPolicy:
    """What `resolve_precision` made of a precision string.

    Args:
        storage: Of the parameters between steps (the master weights), of their gradients after the reduction and of the
            optimizer state.
        param: Of the parameters gathered for compute; None as stored.
        reduce: Of the gradient reduction; None in the dtype of the gradient.
        output: To which the outputs of sharded modules are cast; None as computed.
        buffer: Of floating-point buffers; None as built.
        autocast: The dtype under which the step is autocast; None without autocast.
        scaler: Whether the loss is scaled, with `ShardedGradScaler`.
    """

    storage: torch.dtype
    param: torch.dtype | None
    reduce: torch.dtype | None
    output: torch.dtype | None
    buffer: torch.dtype | None
    autocast: torch.dtype | None
    scaler: bool

    def autocast_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Return the context for one step's forward: autocast, or nothing where the policy has none."""
        if self.autocast is None:
            return nullcontext()
        # Without the cache: it would hold casts of gathered parameters after they are resharded.
        return torch.autocast(device_type, dtype=self.autocast, cache_enabled=False)

    @contextmanager
    def default_dtype_context(self) -> Iterator[None]:
        """Let floating tensors that are built inside have the dtype of compute, where that is also the stored one.

        For building modules and for the forward under the ``-true`` precisions; without effect under fp32 storage.
        """
        if self.storage is torch.float32 or self.param not in (None, self.storage):
            yield
            return
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.storage)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def rows(self) -> list[tuple[str, str]]:
        """Return what has which dtype, as pairs of words to print."""
        return [
            ("parameters stored", _NAMES[self.storage]),
            ("parameters gathered", _NAMES[self.param or self.storage]),
            ("autocast", _NAMES[self.autocast] if self.autocast else "off"),
            ("gradients reduced", _NAMES[self.reduce or self.param or self.storage]),
            ("gradients stored", _NAMES[self.storage]),
            ("optimizer state", _NAMES[self.storage]),
            ("buffers", _NAMES[self.buffer] if self.buffer else "as built"),
            ("outputs", _NAMES[self.output] if self.output else "as computed"),
            ("loss scaler", "on" if self.scaler else "off"),
            ("parameters saved", _NAMES[self.storage]),
        ]


def _true_policy(dtype: torch.dtype, buffer: torch.dtype | None) -> PrecisionPolicy:
    return PrecisionPolicy(dtype, dtype, dtype, output=None, buffer=buffer, autocast=None, scaler=False)


def _mixed_policy(dtype: torch.dtype, scaler: bool) -> PrecisionPolicy:
    fp32 = torch.float32
    return PrecisionPolicy(fp32, dtype, fp32, output=None, buffer=None, autocast=dtype, scaler=scaler)


PRECISIONS: Mapping[str, PrecisionPolicy] = {
    "64-true": _true_policy(torch.float64, buffer=torch.float64),
    "32-true": _true_policy(torch.float32, buffer=None),
    "bf16-true": _true_policy(torch.bfloat16, buffer=torch.bfloat16),
    "16-true": _true_policy(torch.float16, buffer=torch.float16),
    "bf16-mixed": _mixed_policy(torch.bfloat16, scaler=False),
    "16-mixed": _mixed_policy(torch.float16, scaler=True),
}
# The short spellings that Lightning accepts, also as integers.
_ALIASES = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}


def resolve_precision(
    precision: str | int, mixed_precision: MixedPrecision | None = None, autocast: bool = True
) -> PrecisionPolicy:
    """Turn Lightning's precision setting into a policy.

    Args:
        precision: One of `PRECISIONS`, or a short spelling of Lightning's: 64, 32, 16 (mixed), ``"bf16"`` (mixed).
        mixed_precision: Single dtypes that override the precision's own.
        autocast: Whether the mixed precisions run the step under autocast. Without it inputs are cast at module
            boundaries and every operation runs in the gathered dtype.

    Raises:
        ParallelConfigError: If the precision is unknown or an override contradicts it.
    """
    problems = Problems()
    name = _ALIASES.get(str(precision), str(precision))
    if name not in PRECISIONS:
        problems.add(f"precision is {precision!r}, known are {', '.join(PRECISIONS)}", 'precision="bf16-mixed"')
        problems.raise_if_any()
    overrides: dict[str, Any] = {} if autocast else {"autocast": None}
    if not isinstance(mixed_precision, MixedPrecision | None):
        problems.add(
            f"mixed_precision is {mixed_precision!r}; it is a lightning_par.MixedPrecision",
            'mixed_precision=MixedPrecision(reduce="bf16")',
            "mixed_precision: {reduce: bf16}",
        )
        problems.raise_if_any()
    if mixed_precision is not None:
        overrides |= {field: _DTYPES[value] for field, value in asdict(mixed_precision).items() if value is not None}
    policy = replace(PRECISIONS[name], **overrides)
    if policy.param is torch.float16 and not policy.scaler and name != "16-true":
        problems.add(
            f"mixed_precision.param is fp16 but precision is {name!r}, which does not scale the loss: small gradients "
            "would become zero",
            'precision="16-mixed"',
        )
    if policy.autocast and policy.param not in (policy.autocast, policy.storage):
        problems.add(
            f"mixed_precision.param is {_NAMES[policy.param or policy.storage]} but autocast of precision {name!r} "
            f"computes in {_NAMES[policy.autocast]}",
            "autocast=False",
        )
    problems.raise_if_any()
    return policy


def dtype_table(policies: Mapping[str, PrecisionPolicy] = PRECISIONS) -> str:
    """Return a Markdown table: a line for each precision, a column for each thing that has a dtype."""
    lines = [[name, *(value for _, value in policy.rows())] for name, policy in policies.items()]
    header = ["precision", *(what for what, _ in PRECISIONS["32-true"].rows())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *lines])


def fsdp_policy(policy: PrecisionPolicy) -> MixedPrecisionPolicy:
    """Translate a policy for `torch.distributed.fsdp.fully_shard`.

    Under autocast the inputs of modules are not cast: autocast casts what it must, and regression targets and rotary
    tables stay in fp32. Nothing is cast to the stored dtype either, so a module computes as it does in one process.
    """
    casts = policy.param not in (None, policy.storage)
    return MixedPrecisionPolicy(
        param_dtype=policy.param if casts else None,
        reduce_dtype=None if policy.reduce is policy.param else policy.reduce,
        output_dtype=policy.output,
        cast_forward_inputs=policy.autocast is None,
    )


@torch.no_grad()
def cast_floating(module: nn.Module, dtype: torch.dtype | None, buffer_dtype: torch.dtype | None = None) -> None:
    """Cast the floating-point parameters and buffers of a module in place; parameters keep their identity.

    Complex ones are left alone, other than `torch.nn.Module.to` does. Call it before any gradient exists.

    Args:
        module: Any module, its parameters plain, on the meta device or DTensors.
        dtype: Of the parameters; None leaves them.
        buffer_dtype: Of the buffers; None leaves them.
    """
    for parameter in module.parameters() if dtype else ():
        if not parameter.is_floating_point() or parameter.dtype is dtype:
            continue
        if isinstance(parameter, DTensor):
            # Assigning to .data would change the outer dtype but not the local tensor's.
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.to(dtype), parameter.requires_grad))
        else:
            parameter.data = parameter.to(dtype)
    cast: dict[Tensor, Tensor] = {}
    for child in module.modules() if buffer_dtype else ():
        for name, buffer in child.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(child, name, cast.setdefault(buffer, buffer.to(buffer_dtype)))


def convert_inputs(data: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in nested containers, such as a batch; all else is kept."""
    return _compat.map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, data)


class ShardedGradScaler(torch.amp.GradScaler):
    """Loss scaler whose verdict is that of all ranks, for any mix of DTensor and plain gradients.

    torch's own scaler judges by the gradients it sees: with shards, one rank skips a step that the others take. Here
    each `unscale_` (and the check for an optimizer that unscales by itself) makes one MAX all-reduce over the default
    process group, so every rank must call it. Arguments, behaviour and state dict are those of `torch.amp.GradScaler`.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        shards = _local_gradients(optimizer)
        if not allow_fp16 and any(shard.dtype is torch.float16 for shard in shards):
            raise ValueError(
                "the gradients are fp16, so unscaling them would lose the small ones: store the parameters in fp32, as "
                'precision="16-mixed" does'
            )
        verdicts = [found_inf]
        with torch.no_grad():
            for (device, _), tensors in group_by_device_and_dtype(shards).items():
                verdict = torch.zeros_like(found_inf, device=device)
                _compat.unscale_and_check_(tensors, verdict, inv_scale.to(device, non_blocking=True))
                verdicts.append(verdict.to(found_inf.device, non_blocking=True))
            worst = torch.stack(verdicts).amax()
        if (world := dist.group.WORLD) is not None:
            worst = all_reduce_scalars(worst, dist.ReduceOp.MAX, world)
        return {worst.device: worst}


def _local_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    shards = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
                shards.append(parameter.grad.values())
            else:
                shards.append(to_local(parameter.grad))
    return shards
