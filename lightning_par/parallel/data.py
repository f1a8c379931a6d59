"""The data-parallel axes: replicate (DDP), ZeRO-1/2/3 (FSDP2) and HSDP, with one switch for gradient synchronisation.

ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054. Every stage is built on torch's `fully_shard`; what differs is when the
gathered parameters are freed and when gradients are reduced (P parameters, N ranks, see `docs/data_parallel.md`):

=====  =============================  =============================================  ==========================
stage  gathered parameters            gradients while accumulating                   reduced
=====  =============================  =============================================  ==========================
1      kept for the whole window      unsharded, in the reduction dtype              once a window
2      kept for the whole window      sharded                                        each accumulation step
3      freed after forward and again  sharded                                        each accumulation step
       after backward
=====  =============================  =============================================  ==========================
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from lightning_par.blocks import BlockPlan
from lightning_par.errors import ParallelConfigError, Problem, Problems
from lightning_par.layout import ParallelMesh
from lightning_par.parallel import _compat_fsdp
from lightning_par.parallel.carried import carry_over, refuse_copies
from lightning_par.parallel.fingerprints import Fingerprint
from lightning_par.parallel.precision import PrecisionPolicy, fsdp_policy
from lightning_par.parallel.replicate import GradientReducer
from lightning_par.parallel.shards import class_name, is_cut_by_fsdp
from lightning_par.parallel.units import Units

log = logging.getLogger(__name__)

# Kernels of these modules want fp32 parameters when their input is fp32, so under autocast they are gathered in fp32.
FP32_UNDER_AUTOCAST = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass
class DataParallel:
    """Handle on the data-parallel side of a parallelised module.

    Attributes:
        module: The root module.
        mesh: The mesh and its views.
        zero_stage: 0 (replicated), 1, 2 or 3.
        sync_every_batch: Whether gradients are reduced in every accumulation step.
        reducer: Averages the gradients of plain parameters; None where there are none.
        units: The FSDP units; None where nothing is sharded.
    """

    module: nn.Module
    mesh: ParallelMesh
    zero_stage: int
    sync_every_batch: bool
    reducer: GradientReducer | None = None
    units: Units | None = None
    _accumulating: bool = False

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded by FSDP2."""
        return self.zero_stage > 0

    @property
    def is_accumulating(self) -> bool:
        """Whether the backward under way is not the last of its accumulation window."""
        return self._accumulating

    @contextmanager
    def accumulating(self, enabled: bool = True) -> Iterator[None]:
        """Backward passes inside are not the last of their accumulation window. May be nested.

        What is saved follows `sync_every_batch` and the stage: the reduction (all of it, or for HSDP with
        `sync_every_batch` only the all-reduce between the replicas), and for ZeRO-1 and 2 the gathering of parameters.
        """
        before = self._accumulating
        self._switch(enabled)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, accumulating: bool) -> None:
        if accumulating == self._accumulating:
            return
        self._accumulating = accumulating
        if self.reducer is not None:
            # Plain parameters beside sharded ones are few: nothing is won by reducing them more than once a window.
            self.reducer.enabled = not (accumulating and (self.sharded or not self.sync_every_batch))
        if isinstance(self.module, FSDPModule):
            if not self.sync_every_batch:
                self.module.set_requires_gradient_sync(not accumulating)
            else:
                self.module.set_requires_all_reduce(not accumulating)
            if self.zero_stage < 3:
                self.module.set_reshard_after_backward(not accumulating)

    @contextmanager
    def pipelined(self) -> Iterator[None]:
        """Forwards and backwards inside are those of the micro-batches of one batch: gradients are reduced after them.

        `finish_backward` must follow.
        """
        enabled = self.reducer.enabled if self.reducer is not None else False
        if self.reducer is not None:
            self.reducer.enabled = False
        if isinstance(self.module, FSDPModule):
            self.module.set_is_last_backward(False)
            self.module.set_requires_gradient_sync(False)
            self.module.set_reshard_after_backward(False)
        try:
            yield
        finally:
            if self.reducer is not None:
                self.reducer.enabled = enabled
            if isinstance(self.module, FSDPModule):
                self.module.set_is_last_backward(True)
                self.module.set_requires_gradient_sync(self.sync_every_batch or not self._accumulating)
                self.module.set_requires_all_reduce(not self._accumulating)
                self.module.set_reshard_after_backward(self.zero_stage == 3 or not self._accumulating)
        if isinstance(self.module, FSDPModule):
            _compat_fsdp.end_of_backward(self.module)

    def begin_backward(self, loss: Tensor) -> None:
        """Call before a backward that may begin inside the root's forward; see `Units.begin_backward`."""
        if self.units is not None:
            self.units.begin_backward(loss)

    def finish_backward(self) -> None:
        """Complete the reduction after a backward, also on a rank whose backward reached no plain parameter."""
        if self.reducer is not None:
            self.reducer.finish()
        if self.units is not None:
            self.units.finish_backward(complete=not self._accumulating)

    def finish_evaluation(self) -> None:
        """Call at the end of an evaluation: frees gathered parameters, and compares what the ranks ran."""
        self.reshard()
        if self.units is not None:
            self.units.finish_evaluation()

    def before_reduce_of_user(self) -> None:
        """Call before the data ranks reduce something that is not this module's; see `Units`."""
        if self.units is not None:
            self.units.before_reduce_of_user()

    def explain_failure(self) -> ParallelConfigError | None:
        """After a collective failed: whether the ranks ran different units; see `UnitOrder.explain_failure`."""
        return self.units.explain_failure() if self.units is not None else None

    def reshard(self) -> None:
        """Free all gathered parameters, so that the module holds its sharded ones (before a step, a save, a load)."""
        if self.units is not None:
            self.units.free()

    def reset(self) -> None:
        """Return to a clean state after an exception inside forward or backward; gradients under way are lost."""
        self._switch(False)
        if self.reducer is not None:
            self.reducer.reset()
        if isinstance(self.module, FSDPModule):
            _compat_fsdp.reset_fsdp_iteration(self.module)
        if self.units is not None:
            self.units.reset()

    def sync_buffers(self) -> None:
        """Give every data rank the buffers of data rank 0 (running statistics of normalisation layers)."""
        group = self.mesh.group("data")
        if group.size() > 1:
            _broadcast((b for b in self.module.buffers() if b.numel()), group)


def replicate(
    module: nn.Module, mesh: ParallelMesh, *, sync_every_batch: bool, reduce_dtype: torch.dtype | None = None
) -> DataParallel:
    """Keep all parameters on every rank and average their gradients over the data ranks.

    Args:
        module: Changed in place: hooks on its trainable parameters.
        mesh: Gives the data ranks.
        sync_every_batch: Reduce in every accumulation step rather than once a window.
        reduce_dtype: Dtype of gradients on the wire; None keeps theirs.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    reducer = GradientReducer(module.parameters(), mesh.group("data"), reduce_dtype=reduce_dtype)
    if not trainable:
        log.info("no parameter of %s requires a gradient: nothing to average", type(module).__name__)
    return DataParallel(module, mesh, 0, sync_every_batch, reducer)


def shard(
    module: nn.Module,
    mesh: ParallelMesh,
    plan: BlockPlan,
    *,
    zero_stage: int,
    policy: PrecisionPolicy,
    sync_every_batch: bool,
    reshard_after_forward: bool | int | None = None,
    cpu_offload: bool = False,
) -> DataParallel:
    """Shard parameters, gradients and optimizer state over the `fsdp` ranks, replicated over `dp_replicate` (HSDP).

    One FSDP unit a block, some for large modules beside them (`units_beside_blocks`) and the root for the rest. 0-dim
    parameters cannot be cut and stay plain; their gradients are averaged like replicated ones.

    Args:
        module: Changed in place.
        mesh: Gives the ranks to shard and replicate over; one rank works too and casts dtypes in the same way.
        plan: What becomes a unit.
        zero_stage: 1, 2 or 3.
        policy: Dtypes of computation and reduction.
        sync_every_batch: Reduce in every accumulation step rather than once a window.
        reshard_after_forward: Overrides the stage's own choice; an int is the number of ranks to re-shard over.
        cpu_offload: Keep the shards, their gradients and the optimizer state in host memory.

    Raises:
        ParallelConfigError: If a unit holds trainable parameters of several dtypes.
    """
    # Weights beside the blocks are often used past their module (`F.linear(x, embedding.weight)`), so they are freed
    # after forward only where the user asks for it.
    reshard_beside_blocks = reshard_after_forward or False
    if reshard_after_forward is None:
        reshard_after_forward = zero_stage == 3
    units = _Units(
        mesh=mesh.mesh("hsdp") if mesh.layout.dp_replicate_size > 1 else mesh.mesh("fsdp"),
        ignored={p for p in module.parameters() if p.ndim == 0},
        policy=fsdp_policy(policy),
        fp32_norms=policy.autocast is not None,
        offload=_offload_policy(mesh, cpu_offload),
    )
    restore = carry_over(module)
    for name in plan.names:
        units.add([module.get_submodule(name)], reshard_after_forward)
    for names in units_beside_blocks(module, plan, freed=bool(reshard_beside_blocks)):
        units.add([module.get_submodule(name) for name in names], reshard_beside_blocks)
    units.add([module], False, is_root=True)
    restore()
    refuse_copies(module)
    stray = [p for p in module.parameters() if p in units.ignored]
    reducer = GradientReducer(stray, mesh.group("data"), overlap=False) if stray else None
    return DataParallel(module, mesh, zero_stage, sync_every_batch, reducer, Units(module, mesh.group("data")))


def units_beside_blocks(module: nn.Module, plan: BlockPlan, *, freed: bool) -> list[tuple[str, ...]]:
    """Choose the units beside the blocks and the root, by the names of their modules.

    A unit of several modules (a tied pair, norm and head) is half-run where code calls only some of them, and FSDP2
    then waits for the others. It pays only where it is freed after forward. What stays gathered is safe in the root,
    but for large single modules, whose gathering overlaps with computation as a unit of their own.

    Args:
        module: The model.
        plan: Its blocks and groups.
        freed: Whether units beside the blocks are freed after forward.
    """
    if freed:
        return [group.names for group in plan.groups]
    untied = (group.names for group in plan.groups if not group.label.startswith("tied"))
    return [
        (max(names, key=lambda n: sum(p.numel() for p in module.get_submodule(n).parameters())),) for names in untied
    ]


@dataclass
class _Units:
    """What all FSDP units of one module have in common."""

    mesh: Any
    ignored: set[nn.Parameter]
    policy: MixedPrecisionPolicy
    fp32_norms: bool
    offload: OffloadPolicy

    def add(self, modules: Sequence[nn.Module], reshard_after_forward: bool | int, *, is_root: bool = False) -> None:
        """Make one unit of modules, and under autocast one of the normalisation layers in them."""
        if self.fp32_norms:
            norms: list[nn.Module] = [
                norm
                for norm in dict.fromkeys(child for module in modules for child in module.modules())
                if isinstance(norm, FP32_UNDER_AUTOCAST)
                and not isinstance(norm, FSDPModule)
                and any(True for _ in norm.parameters())
            ]
            # Tiny, so they stay gathered between forward and backward. Those of one block always run together.
            together = [norms] if len(modules) == 1 and not is_root else [[norm] for norm in norms]
            for unit in filter(None, together):
                self._fully_shard(unit, False, replace(self.policy, param_dtype=None))
        rest = [m for m in modules if not isinstance(m, FSDPModule)]
        if rest:
            self._fully_shard(rest, reshard_after_forward, self.policy)

    def _fully_shard(
        self, modules: list[nn.Module], reshard_after_forward: bool | int, policy: MixedPrecisionPolicy
    ) -> None:
        _check_uniform_dtype(modules)
        _check_classes(modules)
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=self.mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
            offload_policy=self.offload,
            ignored_params=self.ignored,
        )


def _offload_policy(mesh: ParallelMesh, cpu_offload: bool) -> OffloadPolicy:
    if not cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")


def _check_classes(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        try:
            _compat_fsdp.make_fsdp_class(module)
        except TypeError as error:
            name = type(module).__name__
            raise ParallelConfigError(
                Problem(
                    f"FSDP2 cannot put a class of its own in front of `{name}`: {error}",
                    f"let it have subclasses and derive it from nn.Module first, as in `class {name}(nn.Module, ABC)`; "
                    "or keep it whole on every rank with strategy='par_ddp'",
                    "strategy: par_ddp",
                )
            ) from error


def _check_uniform_dtype(modules: Sequence[nn.Module]) -> None:
    dtypes: dict[torch.dtype, str] = {}
    for module in modules:
        for name, param in module.named_parameters():
            if param.requires_grad and param.ndim and not is_cut_by_fsdp(param):
                dtypes.setdefault(param.dtype, f"{type(module).__name__}.{name}")
    if len(dtypes) > 1:
        problems = Problems()
        found = ", ".join(f"{str(d).removeprefix('torch.')} ({n})" for d, n in dtypes.items())
        problems.add(
            f"one FSDP unit holds trainable parameters of several dtypes: {found}; FSDP2 reduces a unit in one dtype",
            "convert them to one dtype, or shard the modules that differ by themselves: blocks=[...] names their class",
        )
        problems.raise_if_any()


def synchronise_initial_values(module: nn.Module, group: dist.ProcessGroup) -> bool:
    """Make parameters and buffers equal on all ranks of `group` before they are sharded, from its first rank.

    Ranks that built the module without a common seed differ; sharding them as they are would mix several models into
    one. Values are compared by a fingerprint first, so that equal ones cost one small collective.

    Returns:
        True if values were broadcast.
    """
    tensors = [t for t in (*module.parameters(), *module.buffers()) if not t.is_meta and t.numel()]
    if group.size() == 1 or not tensors:
        return False
    fingerprint = Fingerprint()
    mine = torch.stack([fingerprint(t).cpu() for t in tensors])
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine.numpy().tobytes(), group=group)
    if all(other == everyone[0] for other in everyone):
        return False
    log.info(
        "%s was built with different weights on the ranks (no common seed): those of rank 0 are used",
        type(module).__name__,
    )
    _broadcast(tensors, group)
    return True


@torch.no_grad()
def _broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    first = dist.get_global_rank(group, 0)
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        whole = local if local.is_contiguous() else local.contiguous()
        dist.broadcast(whole, src=first, group=group)
        if whole is not local:
            local.copy_(whole)


def register_forward_methods(module: nn.Module, units: Units, names: Iterable[str]) -> None:
    """Let methods beside `forward` gather the root's own parameters, as a training step uses them."""
    for name in names:
        method = getattr(module, name, None)
        if callable(method):
            setattr(module, name, units.counted_as_forward(_compat_fsdp.kept_gathered(module, method)))
            register_fsdp_forward_method(module, name)
            # Whoever asks for the signature unwraps once: Lightning passes a step the arguments that it names.
            getattr(module, name).__func__.__wrapped__ = getattr(method, "__wrapped__", method)


def watch_for_bypassed_blocks(module: nn.Module, plan: BlockPlan) -> Callable[[], None]:
    """Report a block that is bypassed: a submodule of it runs while the block's own forward has not gathered it.

    The hooks look at each leaf of each block until the returned function removes them (after the first step).
    """
    handles = []
    for block_name in plan.names:
        block = module.get_submodule(block_name)
        for leaf_name, leaf in block.named_modules():
            if leaf is not block and any(True for _ in leaf.parameters(recurse=False)):
                handles.append(leaf.register_forward_pre_hook(_bypass_check(block_name, block, leaf_name)))

    def remove() -> None:
        while handles:
            handles.pop().remove()

    return remove


def _bypass_check(block_name: str, block: nn.Module, leaf_name: str) -> Callable[[nn.Module, Any], None]:
    def check(leaf: nn.Module, args: Any) -> None:
        if not any(is_cut_by_fsdp(p) for p in leaf.parameters(recurse=False)):
            return
        children = sorted({type(c).__name__ for c in block.children() if any(True for _ in c.parameters())})
        raise ParallelConfigError(
            Problem(
                f"`{block_name}.{leaf_name}` was called while its block `{block_name}` ({class_name(block)}) was not: "
                "FSDP gathers a block when the block's own forward is called",
                f"blocks={children} shards at the level that is called (or call the block itself)",
                f"blocks: [{', '.join(children)}]",
            )
        )

    return check
