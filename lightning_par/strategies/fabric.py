"""The Fabric shell: the same names as in `lightning_par.strategies`, for `lightning.fabric.Fabric`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from weakref import WeakSet

import torch
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities import rank_zero_info
from lightning.fabric.utilities.types import Optimizable
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_par import checkpoint as ckpt
from lightning_par.checkpoint import ResumableSampler
from lightning_par.errors import ParallelConfigError, Problem
from lightning_par.parallel import apply
from lightning_par.parallel._compat import map_tensors
from lightning_par.parallel.gradients import clip_grad_norm_, clip_grad_value_
from lightning_par.parallel.materialize import deferred_init
from lightning_par.parallel.optimizers import step_on_shards
from lightning_par.parallel.remap import remap_optimizer
from lightning_par.strategies import _compat, foreign, replay
from lightning_par.strategies.launcher import prepare_to_start_ranks
from lightning_par.strategies.loaders import spread_evenly
from lightning_par.strategies.precision import FabricDouble, fabric_plugin
from lightning_par.strategies.presets import (
    DataParallelDefaults,
    FSDP2Defaults,
    HSDPDefaults,
    PipelineParallelDefaults,
    TensorParallelDefaults,
    ZeRODefaults,
)
from lightning_par.strategies.sampler_order import sampler_of
from lightning_par.strategies.saving import SaveOptions, refuse_wrong_path, save, step_of
from lightning_par.strategies.shared import MeshShell, make_way

__all__ = [
    "DataParallelStrategy",
    "FSDP2Strategy",
    "HSDPStrategy",
    "MeshStrategy",
    "PipelineParallelStrategy",
    "TensorParallelStrategy",
    "ZeROStrategy",
]

State = dict[str, nn.Module | Optimizer | Any]


class _Launcher(_SubprocessScriptLauncher):
    """Lightning's, with the cores divided among all ranks, and a refusal where there is no script to start."""

    @override
    def _call_children_scripts(self) -> None:
        prepare_to_start_ranks(self.num_processes)
        super()._call_children_scripts()


class MeshStrategy(MeshShell, ParallelStrategy):
    """Runs the modules of a Fabric script under any layout of the axes that work.

    The options are those of `MeshShell`.
    """

    _launcher_class = _Launcher

    @override
    def _init_host(self) -> None:
        self._backward_sync_control = _SyncControl()
        self._counted_samplers: WeakSet[ResumableSampler] = WeakSet()

    # -- what Fabric asks ----------------------------------------------------------------------------------------

    @property
    @override
    def precision(self) -> Precision:
        return super().precision

    @precision.setter
    @override
    def precision(self, precision: Precision | None) -> None:
        if precision is not None:
            foreign.refuse_host(precision)
            device = self.parallel_devices[0].type if self.parallel_devices else self._device_type()
            precision = fabric_plugin(precision, device, self._autocast)
            self._precision_name = str(precision.precision)
        self._precision = precision

    def _device_type(self) -> str:
        return "cuda" if type(self.accelerator).__name__ == "CUDAAccelerator" else "cpu"

    @override
    def setup_environment(self) -> None:
        self._set_world_ranks()
        self._check()
        super().setup_environment()
        self._connect()

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Build modules on the CPU, or with `empty_init` on the meta device; `setup` then gives them their values."""
        stack = ExitStack()
        if empty_init:
            stack.enter_context(deferred_init())
        stack.enter_context(self.precision.module_init_context())
        return stack

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Nothing: sharding moves what is left of each parameter, so that a model larger than the device fits."""

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        dataloader = super().process_dataloader(dataloader)
        # What is shuffled is trained on, and has batches of one size.
        if not getattr(getattr(dataloader, "sampler", None), "shuffle", True):
            spread_evenly(dataloader)
        if isinstance(sampler_of(dataloader), ResumableSampler):
            self._counted_samplers.add(sampler_of(dataloader))
        return replay.count(dataloader, self.mesh.data_size, self.mesh.data_rank)

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        handle = self._parallelize(module, ())
        if handle not in self._handles:
            self._handles.append(handle)
            if handle.tensor_plan is not None:
                rank_zero_info(handle.tensor_plan.report())
        return _GatheredRoot(module, self.precision) if handle.data.sharded else module

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        remap_optimizer(optimizer, self._handles)
        return optimizer

    # -- steps ---------------------------------------------------------------------------------------------------

    @override
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        if self._pipelined() is not None:
            raise ParallelConfigError(
                Problem(
                    "fabric.backward(loss) cannot run the backward of a pipeline: its stages run forward and backward "
                    "of micro-batches in turns",
                    "loss = fabric.strategy.forward_backward(lambda batch: <the loss>, batch), in place of the forward "
                    "and fabric.backward",
                )
            )
        for handle in self._handles:
            handle.begin_backward(tensor)
        super().backward(tensor, module, *args, **kwargs)
        for handle in self._handles:
            handle.finish_backward()

    def forward_backward(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """Run forward and backward of a step on a batch, under every layout; in place of `step` and `backward`.

        Under a pipeline the step is run on micro-batches, on each stage; it must do nothing but compute.

        Args:
            step: Given the batch, returns the loss, or a mapping with it under ``"loss"``. Calls the module once.
            batch: The batch.

        Returns:
            What the step returns for the batch, on all ranks; its loss has no graph.
        """
        handle = self._pipelined()
        with _compat.in_fabric_backward():
            if handle is not None:
                return handle.forward_backward(step, batch)
            result = step(batch)
            loss: Any = result["loss"] if isinstance(result, Mapping) else result
            self.backward(loss, None)
        return map_tensors(Tensor.detach, result)

    def forward_only(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """Run a step on a batch without gradients, under every layout; see `forward_backward`.

        Returns:
            What the step returns for the batch, on all ranks.
        """
        handle = self._pipelined()
        if handle is not None:
            return handle.forward_only(step, batch)
        with torch.no_grad():
            return step(batch)

    def _pipelined(self) -> apply.Parallelized | None:
        return next((handle for handle in self._handles if handle.pipeline is not None), None)

    @override
    def optimizer_step(self, optimizer: Optimizable, **kwargs: Any) -> Any:
        closure = kwargs.pop("closure", None)

        def closure_then_reshard() -> Any:
            result = None if closure is None else closure()
            # Parameters still gathered from a forward without backward would be stale after the step.
            for handle in self._handles:
                handle.data.reshard()
            return self._same_loss(optimizer, result)

        if closure is None:
            closure_then_reshard()
        with step_on_shards(any(handle.holds_shards for handle in self._handles)) as outside:
            with_closure = {} if closure is None else {"closure": outside(closure_then_reshard)}
            return super().optimizer_step(optimizer, **with_closure, **kwargs)

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the true global norm over all meshes; returns the norm before clipping, the same on all ranks."""
        self.precision.unscale_gradients(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        handle = apply.parallelized(_bare(module))
        if handle is None:
            return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        return handle.clip_grad_norm_(max_norm, norm_type, parameters=parameters, error_if_nonfinite=error_if_nonfinite)

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float | int) -> None:
        self.precision.unscale_gradients(optimizer)
        clip_grad_value_([p for group in optimizer.param_groups for p in group["params"]], clip_val)

    @override
    def all_reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return self.reduce(tensor, group, reduce_op)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        module = _bare(module)
        return ckpt.full_model_state(module) if self._state_dict_type == "full" else ckpt.model_state(module)

    @override
    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: State,
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save modules, optimizers, loaders and other objects; see `lightning.fabric.Fabric.save`."""
        path = self.broadcast(path)
        modules, optimizers, rest = _sorted_state(state)
        keep = filter or {}
        meta = {key: _filtered(key, self._plain(key, value), keep) for key, value in rest.items()}
        if self._state_dict_type == "full":
            for name, module in modules.items():
                meta[name] = _filtered(name, ckpt.full_model_state(module), keep)
            for name, optimizer in optimizers.items():
                meta[name] = _filtered(name, ckpt.full_optimizer_state(_container(modules), optimizer), keep)

            def write() -> None:
                if self.is_global_zero:
                    make_way(path)
                    self.checkpoint_io.save_checkpoint(meta, os.fspath(path), storage_options)

            ckpt.together(f"cannot write the checkpoint {path}", write)
            return
        container = _container(modules)

        def content() -> ckpt.Content:
            state = ckpt.model_state(container)
            return ckpt.content_of(
                {name: value for name, value in state.items() if _kept(name, value, modules, keep)},
                [ckpt.optimizer_state(container, optimizer) for optimizer in optimizers.values()],
                meta=meta,
                about=ckpt.about_model(container) | {"fabric": {"modules": [*modules], "optimizers": [*optimizers]}},
            )

        save(
            self._saver,
            self.mesh,
            path,
            content,
            SaveOptions(asynchronous=self._async_save),
            step=step_of(meta),
        )

    def _plain(self, key: str, value: Any) -> Any:
        """What is stored of an object that is no module and no optimizer."""
        self._refuse_counted_sampler(key, value)
        if not callable(getattr(value, "state_dict", None)):
            return value
        if isinstance(value, DataLoader):
            return replay.states_of_ranks(value, self.mesh.group("data"))
        return value.state_dict()

    def _restore(self, key: str, value: Any, saved: Any) -> None:
        self._refuse_counted_sampler(key, value)
        if isinstance(value, DataLoader):
            mesh = self.mesh
            replay.load_states_of_ranks(value, saved, mesh.data_size, mesh.data_rank, self.on_lost_place)
        else:
            value.load_state_dict(saved)

    def _refuse_counted_sampler(self, key: str, value: Any) -> None:
        if isinstance(value, ResumableSampler) and value in self._counted_samplers:
            raise ParallelConfigError(
                Problem(
                    f"{key!r} is the sampler of a loader that Fabric has set up, which counts epochs itself",
                    "put the loader into the state: fabric.save(path, {'loader': loader, ...})",
                )
            )

    @override
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: nn.Module | Optimizer | State | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Restore the objects of `state` in place; returns what else the checkpoint holds (without `state`: all)."""
        path = self.broadcast(path)
        self._saver.join()
        for handle in self._handles:
            handle.data.reshard()
        if isinstance(state, nn.Module):
            return self._load_raw(path, _bare(state), strict, weights_only)
        if isinstance(state, Optimizer):
            raise ValueError("an optimizer is restored together with its module: load(path, {'model': ..., ...})")
        sharded = ckpt.is_sharded_checkpoint(path)
        if not state:
            if sharded:
                return ckpt.read_meta(path, weights_only=bool(weights_only))
            return self._load_file(path, weights_only)
        modules, optimizers, rest = _sorted_state(state)
        if sharded:
            loaded = self._load_sharded(path, _container(modules), [*optimizers.values()], strict, weights_only)
        else:
            loaded = self._load_file(path, weights_only)
            _require(loaded, [*modules, *optimizers], strict)
            for name, module in modules.items():
                if name in loaded:
                    ckpt.load_full_model_state(module, loaded.pop(name), strict=strict)
            for name, optimizer in optimizers.items():
                if name in loaded:
                    ckpt.load_full_optimizer_state(_container(modules), optimizer, loaded.pop(name))
        _require(loaded, rest, strict)
        for key, value in rest.items():
            if key in loaded:
                if callable(getattr(value, "load_state_dict", None)):
                    self._restore(key, value, loaded.pop(key))
                else:
                    state[key] = loaded.pop(key)
        return loaded

    def _load_file(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        refuse_wrong_path(path)
        return dict(self.checkpoint_io.load_checkpoint(os.fspath(path), weights_only=weights_only))

    def _load_sharded(
        self, path: Any, module: nn.Module, optimizers: list[Optimizer], strict: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        loaded = ckpt.load_sharded(
            path,
            module,
            optimizers,
            strict=strict,
            weights_only=bool(weights_only),
            data_rank=self.mesh.data_rank,
            data_size=self.mesh.data_size,
        )
        return dict(loaded)

    def _load_raw(self, path: Any, module: nn.Module, strict: bool, weights_only: bool | None) -> dict[str, Any]:
        """Load a file that is nothing but a state dict, or the model of a sharded checkpoint."""
        if ckpt.is_sharded_checkpoint(path):
            return self._load_sharded(path, module, [], strict, weights_only)
        weights = self._load_file(path, weights_only)
        ckpt.load_full_model_state(module, weights, strict=strict)
        return {}


class _GatheredRoot(nn.Module):
    """Stands before a sharded module, since Fabric sends step methods and marked methods through `forward` of a wrapper
    only, and that is where FSDP2 gathers the parameters that belong to no block.
    """

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.module = module
        self._precision = precision

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.module.forward
        # Fabric puts a method that it sends through `forward` in its place for the call.
        redirected = getattr(forward, "__func__", forward) is not type(self.module).forward
        result = self.module(*args, **kwargs)
        if redirected and isinstance(self._precision, FabricDouble):
            self._precision.keep_next_output = True
        return result


def _bare(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, _GatheredRoot) else module


class _SyncControl(_BackwardSyncControl):
    """`Fabric.no_backward_sync`: any nesting and repetition restores what was before."""

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        handle = apply.parallelized(_bare(module))
        if handle is None:
            raise TypeError(f"{type(module).__name__} was not set up by this strategy: call fabric.setup(module) first")
        return handle.accumulating(enabled)


def _sorted_state(state: Mapping[str, Any]) -> tuple[dict[str, nn.Module], dict[str, Optimizer], dict[str, Any]]:
    modules = {k: _bare(v) for k, v in state.items() if isinstance(v, nn.Module)}
    optimizers = {k: v for k, v in state.items() if isinstance(v, Optimizer)}
    return modules, optimizers, {k: v for k, v in state.items() if k not in modules and k not in optimizers}


def _container(modules: Mapping[str, nn.Module]) -> nn.Module:
    """One module whose names tell several modules apart; a single one keeps its names, as in a Trainer's checkpoint."""
    return next(iter(modules.values())) if len(modules) == 1 else nn.ModuleDict(modules)


def _kept(
    name: str, value: Any, modules: Mapping[str, nn.Module], keep: Mapping[str, Callable[[str, Any], bool]]
) -> bool:
    key, inner = (next(iter(modules)), name) if len(modules) == 1 else name.split(".", 1)
    return key not in keep or keep[key](inner, value)


def _filtered(key: str, value: Any, keep: Mapping[str, Callable[[str, Any], bool]]) -> Any:
    if key in keep and isinstance(value, dict):
        return {k: v for k, v in value.items() if keep[key](k, v)}
    return value


def _require(loaded: Mapping[str, Any], keys: Any, strict: bool) -> None:
    missing = [key for key in keys if key not in loaded]
    if missing and strict:
        raise KeyError(
            f"the checkpoint lacks {missing}; it holds {sorted(loaded)}. Pass strict=False to leave them as they are."
        )


class DataParallelStrategy(DataParallelDefaults, MeshStrategy):
    __doc__ = DataParallelDefaults.__doc__


class ZeROStrategy(ZeRODefaults, MeshStrategy):
    __doc__ = ZeRODefaults.__doc__


class FSDP2Strategy(FSDP2Defaults, MeshStrategy):
    __doc__ = FSDP2Defaults.__doc__


class HSDPStrategy(HSDPDefaults, MeshStrategy):
    __doc__ = HSDPDefaults.__doc__


class PipelineParallelStrategy(PipelineParallelDefaults, MeshStrategy):
    __doc__ = PipelineParallelDefaults.__doc__


class TensorParallelStrategy(TensorParallelDefaults, MeshStrategy):
    __doc__ = TensorParallelDefaults.__doc__
