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
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_par.blocks import BlockPlan, find_blocks
from lightning_par.errors import Problem, Problems
from lightning_par.layout import ParallelLayout, ParallelMesh
from lightning_par.parallel import _compat, _compat_fsdp, capabilities, data, gradients, optimizers, tensor
from lightning_par.parallel.carried import hook_problems
from lightning_par.parallel.materialize import capture_init
from lightning_par.parallel.memory import (
    ActivationCheckpointing,
    apply_activation_checkpointing,
    apply_compile,
    checkpointing_problems,
)
from lightning_par.parallel.precision import PrecisionPolicy, cast_floating, resolve_precision
from lightning_par.parallel.shards import class_name, parameter_names
from lightning_par.parallel.tensor import ModelTensorPlan, TensorPlanOption

log = logging.getLogger(__name__)

# A model up to this size may have no blocks: gathering all of it at once costs less than this many parameters.
ROOT_ONLY_LIMIT = 10_000_000

_HANDLE = "_lightning_par_handle"

Blocks = str | type[nn.Module] | Sequence[str | type[nn.Module]]
Checkpointing = bool | str | int | ActivationCheckpointing | Callable[[str, nn.Module], bool] | None


@dataclass(frozen=True)
class ParallelOptions:
    """How to apply a layout; the strategies take the same options under the same names.

    Args:
        zero_stage: 1 (optimizer state), 2 (and gradients), 3 (and parameters) sharded over the `fsdp` ranks.
        blocks: The repeated blocks: "auto", or classes, class names or globs of names.
        reshard_after_forward: Overrides the stage's choice; an int re-shards over that many ranks.
        activation_checkpointing: None, "full", "selective", every n-th block (int), `ActivationCheckpointing`, or a
            function of name and block.
        compile: Compile each block; a string names the backend.
        cpu_offload: Keep shards, gradients and optimizer state in host memory.
        sync_every_batch: Reduce gradients in each accumulation step; "auto": for ZeRO-2, ZeRO-3 and HSDP.
        tp_plan: How Linears are divided over the tp ranks: "auto", or styles by globs of names, or a function of the
            model that returns such (see `tensor.STYLES`). What no glob names is found out.
        sequence_parallel: Cut the sequence over the tp ranks inside the blocks.
        loss_parallel: "auto" leaves logits divided over the vocabulary where the loss can be computed so; False gathers
            them.
        verify: "auto" trusts a tensor-parallel plan that was verified before with the same code; "always" does it anew.
    """

    zero_stage: int = 3
    blocks: Blocks = "auto"
    reshard_after_forward: bool | int | None = None
    activation_checkpointing: Checkpointing = None
    compile: bool | str = False
    cpu_offload: bool = False
    sync_every_batch: bool | Literal["auto"] = "auto"
    tp_plan: TensorPlanOption = "auto"
    sequence_parallel: bool = False
    loss_parallel: Literal["auto", False] = "auto"
    verify: Literal["auto", "always"] = "auto"

    def features(self, layout: ParallelLayout, policy: PrecisionPolicy) -> set[str]:
        """Name what is used, in the words of `capabilities.FEATURES`."""
        sizes = {"tp": layout.tp_size, "cp": layout.cp_size, "pp": layout.pp_size, "ep": layout.ep_size}
        used = {axis for axis, size in sizes.items() if size != 1}
        used.add("ddp" if layout.dp_shard_size == 1 else f"zero{self.zero_stage}")
        if layout.dp_shard_size != 1 and layout.dp_replicate_size != 1:
            used.add("hsdp")
        if policy.scaler:
            used.add("16-mixed")
        if self.activation_checkpointing not in (None, False):
            used.add("activation checkpointing")
        if self.compile:
            used.add("compile")
        if self.cpu_offload:
            used.add("cpu offload")
        if self.sequence_parallel:
            used.add("sequence parallel")
        return used

    def problems(self, layout: ParallelLayout, policy: PrecisionPolicy) -> list[Problem]:
        """List what is wrong with these options under a layout (as requested: a -1 may still be in it)."""
        problems = Problems()
        if self.zero_stage not in (1, 2, 3) or isinstance(self.zero_stage, bool):
            problems.add(f"zero_stage is {self.zero_stage!r}; the stages are 1, 2 and 3", "zero_stage=3")
            # The rest is checked as the fix would have it.
            return [*problems, *replace(self, zero_stage=3).problems(layout, policy)]
        if self.sync_every_batch not in (True, False, "auto"):
            problems.add(
                f"sync_every_batch is {self.sync_every_batch!r}; it is True, False or 'auto'", "sync_every_batch='auto'"
            )
        if self.loss_parallel not in ("auto", False):
            problems.add(f"loss_parallel is {self.loss_parallel!r}; it is 'auto' or False", "loss_parallel='auto'")
        if self.verify not in ("auto", "always"):
            problems.add(f"verify is {self.verify!r}; it is 'auto' or 'always'", "verify='auto'")
        if layout.tp_size == 1 and self.sequence_parallel:
            problems.add("sequence_parallel cuts the sequence over tp ranks, and tp_size is 1", "tp_size=2")
        if layout.tp_size == 1 and self.tp_plan != "auto":
            problems.add("tp_plan says how to divide over tp ranks, and tp_size is 1", "tp_size=2")
        reshard = self.reshard_after_forward
        if self.zero_stage < 3 and reshard:
            problems.add(
                f"reshard_after_forward={reshard!r} frees the gathered parameters that ZeRO-{self.zero_stage} keeps",
                "zero_stage=3",
            )
        if layout.dp_shard_size == 1 and reshard is not None:
            problems.add("reshard_after_forward has no meaning where nothing is sharded", "reshard_after_forward=None")
        if not isinstance(reshard, bool | None) and reshard < 2:
            problems.add(
                f"reshard_after_forward={reshard} is no number of ranks to re-shard over", "reshard_after_forward=True"
            )
        problems.extend(checkpointing_problems(self.activation_checkpointing))
        problems.extend(capabilities.problems_of(self.features(layout, policy)))
        return list(problems)


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
    plan = plan_blocks(module, options, layout)
    initial = capture_init(module)
    data.synchronise_initial_values(module, dist.group.WORLD)  # type: ignore[arg-type]
    initial.synchronise(dist.group.WORLD)  # type: ignore[arg-type]
    # A plain fp32 policy leaves a model that was built in another dtype alone, as Lightning does.
    cast_floating(module, None if policy.storage is torch.float32 else policy.storage, policy.buffer)
    names_before = WeakTensorKeyDictionary(parameter_names(module))

    if layout.tp_size > 1:
        tensor_plan = tensor_plan or _plan_tensors(module, plan, layout, options, mesh, example_inputs)
        tensor.shard_model(
            module,
            tensor_plan,
            mesh.mesh("tp"),
            loss_parallel=options.loss_parallel == "auto",
            materialize=lambda names: initial.materialize(module, "cpu", only=names),
        )
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


def plan_blocks(module: nn.Module, options: ParallelOptions, layout: ParallelLayout) -> BlockPlan:
    """Find the blocks; a model without any is refused where an option asks for them or it is large and sharded.

    Args:
        module: The model.
        options: Name the blocks, or use them.
        layout: Says whether parameters will be sharded, and which axes work on blocks.

    Raises:
        ParallelConfigError: Naming the classes that were seen.
    """
    numel = sum(p.numel() for p in module.parameters())
    needed = layout.dp_shard_size != 1
    using = {
        "activation_checkpointing": options.activation_checkpointing not in (None, False),
        "compile": bool(options.compile),
    }
    wanted = [f"{name}={getattr(options, name)!r}" for name, used in using.items() if used]
    wanted_for = " and ".join(wanted + [f"tp_size={layout.tp_size}"] * (layout.tp_size != 1))
    required = options.blocks != "auto" or bool(wanted_for) or (needed and numel > ROOT_ONLY_LIMIT)
    plan = find_blocks(module, options.blocks, require=required, wanted_for=wanted_for)
    if needed and not plan.names:
        log.info(
            "%s has no repeated blocks: its %s parameters are sharded as one unit and gathered all at once",
            type(module).__name__,
            f"{numel:,}",
        )
    return plan


def _plan_tensors(
    module: nn.Module,
    blocks: BlockPlan,
    layout: ParallelLayout,
    options: ParallelOptions,
    mesh: ParallelMesh,
    example_inputs: Any,
) -> ModelTensorPlan:
    """Look at the model on every rank, as it may communicate; plan on one, and tell the others."""
    seen = tensor.observe(module, blocks.names, tensor.examples_of(module, blocks.names, example_inputs))
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box[0] = tensor.plan_model(
                module,
                blocks.names,
                layout.tp_size,
                seen=seen,
                tp_plan=options.tp_plan,
                sequence_parallel=options.sequence_parallel,
                mesh=mesh.mesh("tp"),
                use_cache=options.verify == "auto",
            )
        except Exception as error:  # raised on all ranks, else the others would wait
            box[0] = error
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], Exception):
        raise box[0]
    plan: ModelTensorPlan = box[0]
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
