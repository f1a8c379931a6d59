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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_par.blocks import BlockPlan, find_blocks
from lightning_par.errors import Problems
from lightning_par.layout import ParallelLayout, ParallelMesh
from lightning_par.parallel import _compat, _compat_fsdp, data, gradients, tensor
from lightning_par.parallel._compat import map_tensors
from lightning_par.parallel.carried import hook_problems, sparse_problems
from lightning_par.parallel.materialize import InitPlan, capture_init
from lightning_par.parallel.memory import (
    apply_activation_checkpointing,
    apply_compile,
)
from lightning_par.parallel.options import ParallelOptions
from lightning_par.parallel.precision import PrecisionPolicy, cast_floating, resolve_precision
from lightning_par.parallel.shards import class_name, parameter_names

if TYPE_CHECKING:
    from lightning_par.parallel.pipeline.build import PipelinePlan
    from lightning_par.parallel.pipeline.runtime import Pipeline
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
        pipeline: Runs the stages of this rank; None where all blocks are on each rank.
        pipeline_plan: How the module is divided over them.
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
    pipeline: Pipeline | None = None
    pipeline_plan: PipelinePlan | None = None
    _names_before: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    # Not weak: torch cannot convert a sharded parameter to another dtype that has weak references.
    _known: set[nn.Parameter] = field(default_factory=set)
    _stop_watching: Callable[[], None] = lambda: None

    @property
    def holds_shards(self) -> bool:
        """Whether some parameters are shards: of FSDP, or divided over tp."""
        return self.data.sharded or self.tensor_plan is not None

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Let the module list the parameters of all stages, so that optimizers have the groups of one process.

        `remap_optimizer` then takes out of them what this rank has not.
        """
        if self.pipeline is None:
            yield
            return
        from lightning_par.parallel.pipeline.absent import stand_ins

        with stand_ins(self.module) as absent:
            names = parameter_names(self.module)
            self._names_before.update({param: names[param] for param in absent})
            yield

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
        if self.pipeline is not None and not self.data.is_accumulating:
            self.pipeline.shared.sum_gradients(self.module)
        self._stop_watching()

    def forward_backward(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """Run forward and backward of a step on a batch, under every layout; `finish_backward` is called.

        Under a pipeline the step is run on micro-batches, on each stage; it must do nothing but compute, and call the
        module once.

        Args:
            step: Given the batch, returns the loss, or a mapping with it under ``"loss"``.
            batch: The batch, the same on all stages.

        Returns:
            What the step returns for the batch, on all stages, without graphs.
        """
        if self.pipeline is None:
            result = step(batch)
            loss: Tensor = result["loss"] if isinstance(result, Mapping) else result
            self.begin_backward(loss)
            loss.backward()
            self.finish_backward()
            return map_tensors(Tensor.detach, result)
        results = self.pipeline.train(self.pipeline.plain_step(step, "forward_backward"), batch)
        self.finish_backward()
        return self.pipeline.from_last(results.output)

    def forward_only(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """Run a step on a batch without gradients, under every layout; see `forward_backward`."""
        if self.pipeline is None:
            with torch.no_grad():
                return step(batch)
        results = self.pipeline.evaluate(self.pipeline.plain_step(step, "forward_only"), batch)
        return self.pipeline.from_last(results.output)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        parameters: Iterable[nn.Parameter] | None = None,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clip by the true global norm over all meshes and stages.

        Returns:
            The norm before clipping, equal on all ranks.
        """
        pipeline = self.pipeline
        return gradients.clip_grad_norm_(
            self.module.parameters() if parameters is None else parameters,
            max_norm,
            norm_type,
            error_if_nonfinite,
            extra_groups=[] if pipeline is None else [pipeline.group],
            counted_elsewhere=[] if pipeline is None else pipeline.shared.counted_elsewhere(self.module),
        )

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
    pipeline_plan: PipelinePlan | None = None,
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
        pipeline_plan: The same for its stages.

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
    if layout.data_size > 1:
        problems.extend(sparse_problems(module))
    problems.raise_if_any()
    plan = plan_blocks(module, options, sharded=not replicated, tp_size=layout.tp_size, pp_size=layout.pp_size)
    initial = capture_init(module)
    data.synchronise_initial_values(module, dist.group.WORLD)  # type: ignore[arg-type]
    initial.synchronise(dist.group.WORLD)  # type: ignore[arg-type]
    # A plain fp32 policy leaves a model that was built in another dtype alone, as Lightning does.
    cast_floating(module, None if policy.storage is torch.float32 else policy.storage, policy.buffer)
    names_before = WeakTensorKeyDictionary(parameter_names(module))

    if layout.tp_size > 1 and tensor_plan is None:
        tensor_plan = _plan_tensors(module, plan, options, mesh, example_inputs)
    pipeline = None
    if layout.pp_size > 1:
        pipeline_plan = pipeline_plan or _plan_pipeline(module, plan, options, mesh, device, example_inputs)
        pipeline, plan = _divide_pipeline(module, pipeline_plan, options, mesh, device)
        if tensor_plan is not None:
            tensor_plan = tensor_plan.restricted(pipeline.replay.owned)
    if tensor_plan is not None:
        _divide_tensors(module, tensor_plan, options, mesh, initial)
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
        stages = [] if pipeline is None else pipeline.block_names()
        tensor.slice_chains(module, tensor_plan, mesh.mesh("tp"), stages)
    if handle.units is not None:
        methods = forward_methods if pipeline is None else [pipeline.bind_to_root()]
        data.register_forward_methods(module, handle.units, methods)
        _compat_fsdp.finalize_fsdp(module)
        _compat.read_whole_scalars()
    stop_watching = data.watch_for_bypassed_blocks(module, plan) if handle.sharded else lambda: None
    if pipeline is not None:
        pipeline.start(handle)
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
        pipeline,
        pipeline_plan,
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


def plan_blocks(
    module: nn.Module, options: ParallelOptions, *, sharded: bool, tp_size: int = 1, pp_size: int = 1
) -> BlockPlan:
    """Find the blocks; a model without any is refused where an option asks for them or it is large and sharded.

    Args:
        module: The model.
        options: Name the blocks, or use them.
        sharded: Whether parameters will be sharded over data ranks.
        tp_size: Number of ranks that blocks will be divided over.
        pp_size: Number of ranks that they will be spread over.

    Raises:
        ParallelConfigError: Naming the classes that were seen.
    """
    numel = sum(p.numel() for p in module.parameters())
    using = {
        "activation_checkpointing": options.activation_checkpointing not in (None, False),
        "compile": bool(options.compile),
    }
    sizes = {"tp_size": tp_size, "pp_size": pp_size}
    wanted = [f"{name}={getattr(options, name)!r}" for name, used in using.items() if used]
    wanted_for = " and ".join([*wanted, *(f"{axis}={size}" for axis, size in sizes.items() if size > 1)])
    required = options.blocks != "auto" or bool(wanted_for) or (sharded and numel > ROOT_ONLY_LIMIT)
    plan = find_blocks(module, options.blocks, require=required, wanted_for=wanted_for)
    if sharded and not plan.names:
        log.info(
            "%s has no repeated blocks: its %s parameters are sharded as one unit and gathered all at once",
            type(module).__name__,
            f"{numel:,}",
        )
    return plan


def _plan_pipeline(
    module: nn.Module,
    blocks: BlockPlan,
    options: ParallelOptions,
    mesh: ParallelMesh,
    device: torch.device,
    example_inputs: Any,
) -> PipelinePlan:
    # torch's pipelines take long to import, and few runs need them.
    from lightning_par.parallel.pipeline.build import agree_on_plan, plan_pipeline

    group = mesh.group("pp")
    examples = tensor.examples_of(module, blocks.names, example_inputs)
    plan = plan_pipeline(module, blocks.names, examples, options, group.size(), device)
    agree_on_plan(plan, group)
    return plan


def _divide_pipeline(
    module: nn.Module, plan: PipelinePlan, options: ParallelOptions, mesh: ParallelMesh, device: torch.device
) -> tuple[Pipeline, BlockPlan]:
    """Leave on this rank what its stages need."""
    from lightning_par.parallel.pipeline.build import divide_pipeline

    group = mesh.group("pp")
    pipeline = divide_pipeline(module, plan, mesh, options, device)
    own = plan.blocks_of(group.rank())
    return pipeline, find_blocks(module, own, require=True, wanted_for=f"pp_size={group.size()}")


def _plan_tensors(
    module: nn.Module, blocks: BlockPlan, options: ParallelOptions, mesh: ParallelMesh, example_inputs: Any
) -> ModelTensorPlan:
    return tensor.plan_together(
        module,
        blocks.names,
        tensor.examples_of(module, blocks.names, example_inputs),
        mesh.mesh("tp"),
        tp_plan=options.tp_plan,
        sequence_parallel=options.sequence_parallel,
        use_cache=options.verify == "auto",
    )


def _divide_tensors(
    module: nn.Module, plan: ModelTensorPlan, options: ParallelOptions, mesh: ParallelMesh, initial: InitPlan
) -> None:
    """Divide the blocks, embedding and head that are here over the tp ranks."""
    tensor.shard_model(
        module,
        plan,
        mesh.mesh("tp"),
        loss_parallel=options.loss_parallel == "auto",
        materialize=lambda names: initial.materialize(module, "cpu", only=names),
    )


def _apply_data(
    module: nn.Module,
    mesh: ParallelMesh,
    plan: BlockPlan,
    policy: PrecisionPolicy,
    options: ParallelOptions,
    replicated: bool,
) -> data.DataParallel:
    sync: Any = options.sync_every_batch
    pipelined = mesh.layout.pp_size > 1
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
        # Between the micro-batches of a pipeline all would be gathered again and again.
        reshard_after_forward=False
        if options.reshard_after_forward is None and pipelined
        else options.reshard_after_forward,
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


def _default_device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _current_device(device_type: str) -> torch.device:
    return (
        torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
    )
