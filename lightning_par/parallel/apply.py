"""The order in which the axes are applied to a module, and the handle on the result. Public: `parallelize`.

Pipeline split -> tensor, sequence, expert, context -> activation checkpointing -> compile -> data sharding ->
materialise. Inner axes must have made their DTensors before FSDP shards over the outer one; checkpointing wraps the
block that compile compiles; FSDP's hooks stay outside both. The order is that of torchtitan v0.2
(`models/llama3/infra/parallelize.py`); the axes without an implementation yet have their place here.

Example (a raw torch loop under `torchrun`)::

    torch.distributed.init_process_group()
    par = parallelize(model, ParallelLayout(dp_shard_size=-1), "bf16-mixed")
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in loader:
        with par.policy.autocast_context("cuda"):
            loss = model(batch)
        loss.backward()
        par.finish_backward()
        par.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_par.blocks import BlockPlan, find_blocks
from lightning_par.errors import Problems
from lightning_par.layout import ParallelLayout, ParallelMesh
from lightning_par.parallel import _compat, _compat_fsdp, data, gradients, optimizers, tensor
from lightning_par.parallel.carried import hook_problems
from lightning_par.parallel.materialize import InitPlan, capture_init
from lightning_par.parallel.memory import (
    apply_activation_checkpointing,
    apply_compile,
)
from lightning_par.parallel.options import ParallelOptions
from lightning_par.parallel.precision import PrecisionPolicy, cast_floating, resolve_precision
from lightning_par.parallel.shards import class_name, parameter_names

if TYPE_CHECKING:
    from lightning_par.parallel.tensor import ModelTensorPlan

log = logging.getLogger(__name__)

# A model up to this size may have no blocks: gathering all of it at once costs less than this many parameters.
ROOT_ONLY_LIMIT = 10_000_000

_HANDLE = "_lightning_par_handle"


@dataclass
class Parallelized:
    """What `parallelize` did to a module, and the switches a training loop needs.

    Attributes:
        module: The module, changed in place; names of parameters and classes of modules are as before.
        layout: The layout, every size filled in.
        mesh: Its mesh and views.
        plan: The blocks that were found.
        policy: Dtypes.
        data: The data-parallel side.
        checkpointed: Names of the blocks under activation checkpointing.
        tensor_plan: What is divided over the tp ranks; None where they are one.
    """

    module: nn.Module
    layout: ParallelLayout
    mesh: ParallelMesh
    plan: BlockPlan
    policy: PrecisionPolicy
    options: ParallelOptions
    data: data.DataParallel
    checkpointed: list[str] = field(default_factory=list)
    tensor_plan: ModelTensorPlan | None = None
    _names_before: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    # Not weak: torch cannot convert a sharded parameter to another dtype that has weak references.
    _known: set[nn.Parameter] = field(default_factory=set)
    _stop_watching: Callable[[], None] = lambda: None

    @property
    def holds_shards(self) -> bool:
        """Whether some parameters are shards: of FSDP, or divided over tp."""
        return self.data.sharded or self.tensor_plan is not None

    def accumulating(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Context for every backward of an accumulation window but the last; see `DataParallel.accumulating`."""
        return self.data.accumulating(enabled)

    def begin_backward(self, loss: Tensor) -> None:
        """Call before a backward inside the module's own forward or step; needed nowhere else."""
        self.data.begin_backward(loss)

    def finish_backward(self) -> None:
        """Call after each backward, inside its `accumulating` context: completes reductions on ranks whose loss reached
        no parameter.
        """
        self.data.finish_backward()
        self._stop_watching()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, parameters: Iterable[nn.Parameter] | None = None
    ) -> Tensor:
        """Clip by the true global norm over all meshes; returns the norm before clipping, equal on all ranks."""
        return gradients.clip_grad_norm_(parameters or self.module.parameters(), max_norm, norm_type)

    def __repr__(self) -> str:
        tensors = f"\n{self.tensor_plan.report()}" if self.tensor_plan is not None else ""
        return f"{class_name(self.module)} parallelised as {self.layout}{tensors}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallelized:
        # A copy of the module (an averaged model) is no parallelised module of its own.
        return self


def parallelize(
    module: nn.Module,
    layout: ParallelLayout,
    policy: PrecisionPolicy | str = "32-true",
    options: ParallelOptions | None = None,
    *,
    mesh: ParallelMesh | None = None,
    device: torch.device | None = None,
    forward_methods: Iterable[str] = (),
    example_inputs: Any = None,
    tensor_plan: ModelTensorPlan | None = None,
) -> Parallelized:
    """Apply a layout to a module, in place, in the order of this file. Needs an initialised default process group.

    Args:
        module: The whole model, on the CPU, on the device, or on the meta device (built under `deferred_init`).
        layout: Sizes; one may be -1.
        policy: Dtypes, or a Lightning precision string.
        options: How to apply the layout.
        mesh: The layout's mesh, where the caller has built it already.
        device: Where parameters go; by default the mesh's device type (its current device).
        forward_methods: Methods of `module` beside `forward` that run it, such as `training_step`.
        example_inputs: For tensor parallelism: arguments of the module's forward (a tuple, a mapping or one tensor), or
            a `tensor.examples.Example`. Without them the module's `example_input_array`, the `dummy_inputs` of
            Hugging Face models or a made-up input of a block is used.
        tensor_plan: One that was made before for a module of the same structure.

    Returns:
        The handle with the switches of a training loop.

    Raises:
        ParallelConfigError: Everything that cannot work, before anything is changed.
    """
    options = options or ParallelOptions()
    if isinstance(policy, str):
        policy = resolve_precision(policy)
    replicated = layout.dp_shard_size == 1
    check(layout, options, policy, dist.get_world_size())
    layout = layout.resolve(dist.get_world_size())
    existing = parallelized(module)
    if existing is not None:
        return _adopt(existing, layout, policy, options)
    mesh = mesh or layout.build_mesh(device.type if device else _default_device_type())
    device = device or _current_device(mesh.device_type)

    problems = Problems()
    problems.extend(hook_problems(module))
    problems.raise_if_any()
    plan = plan_blocks(module, options, sharded=not replicated, tp_size=layout.tp_size)
    initial = capture_init(module)
    data.synchronise_initial_values(module, dist.group.WORLD)  # type: ignore[arg-type]
    initial.synchronise(dist.group.WORLD)  # type: ignore[arg-type]
    # A plain fp32 policy leaves a model that was built in another dtype alone, as Lightning does.
    cast_floating(module, None if policy.storage is torch.float32 else policy.storage, policy.buffer)
    names_before = WeakTensorKeyDictionary(parameter_names(module))

    if layout.tp_size > 1:
        tensor_plan = _divide_tensors(module, plan, options, mesh, initial, example_inputs, tensor_plan)
    blocks = [(name, module.get_submodule(name)) for name in plan.names]
    checkpointed = apply_activation_checkpointing(blocks, options.activation_checkpointing)
    if options.compile:
        apply_compile(blocks, options.compile if isinstance(options.compile, str) else None)
    if replicated:
        # Materialising makes new parameters; the reducer must see those.
        initial.materialize(module, device)
        module.to(device)
        handle = _apply_data(module, mesh, plan, policy, options, replicated)
    else:
        handle = _apply_data(module, mesh, plan, policy, options, replicated)
        initial.materialize(module, torch.device("cpu") if options.cpu_offload else device)
        _buffers_to(module, device)
    if tensor_plan is not None:
        tensor.slice_chains(module, tensor_plan, mesh.mesh("tp"))
    if handle.units is not None:
        data.register_forward_methods(module, handle.units, forward_methods)
        _compat_fsdp.finalize_fsdp(module)
        _compat.read_whole_scalars()
    stop_watching = data.watch_for_bypassed_blocks(module, plan) if handle.sharded else lambda: None
    result = Parallelized(
        module,
        layout,
        mesh,
        plan,
        policy,
        options,
        handle,
        checkpointed,
        tensor_plan,
        names_before,
        set(module.parameters()),
        stop_watching,
    )
    module.__dict__[_HANDLE] = result
    return result


def _adopt(
    existing: Parallelized, layout: ParallelLayout, policy: PrecisionPolicy, options: ParallelOptions
) -> Parallelized:
    """Go on with a module that an earlier run of the same process has parallelised in the same way."""
    problems = Problems()
    for name, was, wanted in (
        ("layout", existing.layout, layout),
        ("precision", existing.policy, policy),
        ("options", existing.options, options),
    ):
        if was != wanted:
            problems.add(
                f"{class_name(existing.module)} is parallelised already, with another {name}: {was}, not {wanted}",
                "build the module anew, and load its checkpoint",
            )
    existing.data.reshard()
    rebuilt = [name for name, param in existing.module.named_parameters() if param not in existing._known]
    if rebuilt:
        problems.add(
            f"{len(rebuilt)} parameters of {class_name(existing.module)} are new since it was parallelised, and would "
            f"not be trained with the other ranks: {', '.join(rebuilt[:3])}{', ...' if len(rebuilt) > 3 else ''}",
            "build them once: `if self.model is None:` in configure_model, which Lightning calls for each fit and test",
        )
    problems.raise_if_any()
    # An earlier run may have ended in the middle of a step. Not done on the exception itself: it waits for collectives.
    existing.data.reset()
    return existing


def check(layout: ParallelLayout, options: ParallelOptions, policy: PrecisionPolicy, world_size: int | None) -> None:
    """Raise one `ParallelConfigError` with everything that is wrong; needs no process group and no model."""
    problems = Problems()
    problems.extend(layout.problems(world_size))
    problems.extend(options.problems(layout, policy))
    problems.raise_if_any()


def plan_blocks(module: nn.Module, options: ParallelOptions, *, sharded: bool, tp_size: int = 1) -> BlockPlan:
    """Find the blocks; a model without any is refused where an option asks for them or it is large and sharded.

    Args:
        module: The model.
        options: Name the blocks, or use them.
        sharded: Whether parameters will be sharded over data ranks.
        tp_size: Number of ranks that blocks will be divided over.

    Raises:
        ParallelConfigError: Naming the classes that were seen.
    """
    numel = sum(p.numel() for p in module.parameters())
    using = {
        "activation_checkpointing": options.activation_checkpointing not in (None, False),
        "compile": bool(options.compile),
    }
    wanted = [f"{name}={getattr(options, name)!r}" for name, used in using.items() if used]
    wanted_for = " and ".join(wanted + [f"tp_size={tp_size}"] * (tp_size > 1))
    required = options.blocks != "auto" or bool(wanted_for) or (sharded and numel > ROOT_ONLY_LIMIT)
    plan = find_blocks(module, options.blocks, require=required, wanted_for=wanted_for)
    if sharded and not plan.names:
        log.info(
            "%s has no repeated blocks: its %s parameters are sharded as one unit and gathered all at once",
            type(module).__name__,
            f"{numel:,}",
        )
    return plan


def _divide_tensors(
    module: nn.Module,
    blocks: BlockPlan,
    options: ParallelOptions,
    mesh: ParallelMesh,
    initial: InitPlan,
    example_inputs: Any,
    known: ModelTensorPlan | None,
) -> ModelTensorPlan:
    """Divide blocks, embedding and head over the tp ranks, as a known plan says or one that is made."""
    plan = known or tensor.plan_together(
        module,
        blocks.names,
        tensor.examples_of(module, blocks.names, example_inputs),
        mesh.mesh("tp"),
        tp_plan=options.tp_plan,
        sequence_parallel=options.sequence_parallel,
        use_cache=options.verify == "auto",
    )
    tensor.shard_model(
        module,
        plan,
        mesh.mesh("tp"),
        loss_parallel=options.loss_parallel == "auto",
        materialize=lambda names: initial.materialize(module, "cpu", only=names),
    )
    return plan


def _apply_data(
    module: nn.Module,
    mesh: ParallelMesh,
    plan: BlockPlan,
    policy: PrecisionPolicy,
    options: ParallelOptions,
    replicated: bool,
) -> data.DataParallel:
    sync: Any = options.sync_every_batch
    if replicated:
        return data.replicate(
            module, mesh, sync_every_batch=False if sync == "auto" else sync, reduce_dtype=policy.reduce
        )
    if sync == "auto":
        sync = options.zero_stage > 1
    return data.shard(
        module,
        mesh,
        plan,
        zero_stage=options.zero_stage,
        policy=policy,
        sync_every_batch=sync,
        reshard_after_forward=options.reshard_after_forward,
        cpu_offload=options.cpu_offload,
    )


def _buffers_to(module: nn.Module, device: torch.device) -> None:
    """Move what FSDP leaves where it was: buffers and 0-dim parameters."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.to(device)
        for param in child.parameters(recurse=False):
            if param.ndim == 0:
                param.data = param.data.to(device)


def parallelized(module: nn.Module) -> Parallelized | None:
    """Return the handle of a module that `parallelize` has changed, or None."""
    handle = module.__dict__.get(_HANDLE)
    return handle if isinstance(handle, Parallelized) and handle.module is module else None


def remap_optimizer(optimizer: torch.optim.Optimizer, handles: Sequence[Parallelized]) -> None:
    """Point an optimizer that was built before sharding to the parameters of the sharded modules, by name.

    State that it has already goes with them.

    Raises:
        ParallelConfigError: If it holds a parameter of none of the modules, or cannot step over shards.
    """
    for handle in handles:
        handle.data.reshard()
    now = [dict(handle.module.named_parameters()) for handle in handles]
    current = {param for names in now for param in names.values()}
    orders = {
        names[name]: (name, order)
        for handle, names in zip(handles, now, strict=True)
        for name, order in tensor.feature_orders(handle.module).items()
    }
    strange, valueless = [], 0
    for group in optimizer.param_groups:
        for i, param in enumerate(group["params"]):
            found = (
                names[handle._names_before[param]]
                for handle, names in zip(handles, now, strict=True)
                if handle._names_before.get(param) in names
            )
            replacement = param if param in current else next(found, None)
            if replacement is None:
                strange.append(tuple(param.shape))
            elif optimizers.has_state_on_meta(optimizer, param):
                valueless += 1
            else:
                if replacement is not param and replacement in orders and param in optimizer.state:
                    name, order = orders[replacement]
                    state = tensor.reorder_state(name, optimizer.state[param], param, order, to_ranks=True)
                    optimizer.state[param] = state
                optimizers.move_state(optimizer, param, replacement)
                group["params"][i] = replacement
    problems = Problems()
    if strange:
        modules = ", ".join(class_name(handle.module) for handle in handles)
        problems.add(
            f"{type(optimizer).__name__} holds {len(strange)} parameters of shapes {strange[:5]} that are not those of "
            f"{modules}, so they would not be trained together",
            "build the optimizer from the parameters of the module that is trained",
        )
    if valueless:
        problems.add(
            f"{type(optimizer).__name__} was built when its parameters were on the meta device, and its state for "
            f"{valueless} of them has no value",
            "build the optimizer in configure_optimizers",
        )
    problems.extend(optimizers.step_problems(optimizer, sharded=any(handle.holds_shards for handle in handles)))
    problems.raise_if_any()


def _default_device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _current_device(device_type: str) -> torch.device:
    return (
        torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
    )
