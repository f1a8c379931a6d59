"""The Trainer shell: `MeshStrategy` for `lightning.pytorch.Trainer`, thin over `lightning_par.parallel`."""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_par import checkpoint as ckpt
from lightning_par.parallel import tensor
from lightning_par.parallel.apply import Parallelized, parallelized
from lightning_par.parallel.batch_norm import synchronise_over
from lightning_par.parallel.materialize import deferred_init
from lightning_par.parallel.optimizers import step_on_shards
from lightning_par.parallel.remap import remap_optimizer
from lightning_par.parallel.report import sizes
from lightning_par.resilience.failures import record_failure
from lightning_par.strategies import (
    _compat,
    _compat_logging,
    _compat_signals,
    averaging,
    foreign,
    hooks,
    loaders,
    resumption,
)
from lightning_par.strategies.examples import step_example
from lightning_par.strategies.explicit import explicit_stages
from lightning_par.strategies.launcher import RankLauncher, begin_run
from lightning_par.strategies.precision import trainer_plugin
from lightning_par.strategies.shared import meet
from lightning_par.strategies.trainer_checkpoints import SavesCheckpoints

if TYPE_CHECKING:
    from lightning_par.strategies.pipelined import PipelinedSteps

log = logging.getLogger(__name__)

FORWARD_METHODS = ("training_step", "validation_step", "test_step", "predict_step")
# How long a rank that failed waits for the others before it gives up saving a checkpoint together.
EXCEPTION_AGREEMENT = timedelta(seconds=10)


class MeshStrategy(SavesCheckpoints):
    """Trains an unmodified LightningModule under any layout of the axes that work.

    The options are those of `MeshShell`.
    """

    _launcher_class = RankLauncher

    @override
    def _init_host(self) -> None:
        self._run = ""
        self._undo: list[Callable[[], None]] = []
        self._met_after_exception = False
        self._turns: loaders.Turns | None = None
        self._alone = False
        self._compared_batches: set[str | None] = set()
        self._looked_at = False
        self._average = None
        self._resume_directory = None
        self._steps: PipelinedSteps | None = None
        self.resumption = resumption.Resumption(1, 0)

    # -- what Lightning asks ------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether data is spread: without this Lightning would neither shard the samples nor reduce what is logged."""
        return self._mesh.data_size > 1 if self._mesh is not None else self.world_size > 1

    @property
    def parallelized(self) -> Parallelized:
        """What was done to the module.

        Raises:
            RuntimeError: Before `setup`.
        """
        if not self._handles:
            raise RuntimeError("the module is not parallelised before Trainer.fit, validate, test or predict")
        return self._handles[0]

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            foreign.refuse_host(plugin)
            plugin = trainer_plugin(plugin, self._device_type(), self._autocast)
            self._precision_name = str(plugin.precision)
        self._precision_plugin = plugin

    def _device_type(self) -> str:
        if self.parallel_devices:
            return self.parallel_devices[0].type
        return "cuda" if type(self.accelerator).__name__ == "CUDAAccelerator" else "cpu"

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and the rank-zero helpers who this process is."""
        self._set_world_ranks()

    # -- set-up --------------------------------------------------------------------------------------------------

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        trainer: Any = model.trainer
        callbacks = [("callback", callback) for callback in trainer.callbacks]
        foreign.refuse([*callbacks, ("datamodule", trainer.datamodule)])

    @override
    def setup_environment(self) -> None:
        self.set_world_ranks()
        begin_run(self.global_rank, self.local_rank)
        self._check()
        assert self.lightning_module is not None
        layout = self._requested_layout()
        divided = (layout.pp_size, layout.dp_shard_size, layout.tp_size) != (1, 1, 1)
        averaging.refuse(self.lightning_module, divided=divided)
        super().setup_environment()
        self._connect()
        self.lightning_module._device_mesh = self.mesh.root
        self._met_after_exception = False
        self._run = self.broadcast(uuid.uuid4().hex)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build modules on the CPU, or with `empty_init` on the meta device; `setup` then gives them their values.

        Sharding moves what is left of each parameter to the device, so a model larger than the device fits.
        """
        with deferred_init() if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        _compat.evaluation_without_inference_mode(trainer)
        module: nn.Module = self.lightning_module
        if parallelized(module) is None:
            module = self.precision_plugin.convert_module(module)
            if self._layer_sync is not None:
                module = self._layer_sync.apply(module)
                synchronise_over(module, self.mesh.group("data"))
        layout = self.mesh.layout
        fitting = trainer.state.fn == TrainerFn.FITTING
        if layout.pp_size > 1 and fitting:
            hooks.refuse_manual_optimization(self.lightning_module)
        if layout.pp_size > 1 and (explicit := explicit_stages(self.lightning_module)) is not None:
            names, undo = explicit
            self._options = replace(self._options, blocks=names)
            self._undo.append(undo)
        wanted = layout.tp_size > 1 or layout.pp_size > 1
        example = step_example(trainer, self.lightning_module) if wanted else None
        self._handles = [self._parallelize(module, FORWARD_METHODS, example)]
        if self.parallelized.tensor_plan is not None:
            rank_zero_info(self.parallelized.tensor_plan.report())
        self.model = self.lightning_module
        # Sharding moves parameters without `module.to`, which is where Lightning notes `self.device`.
        _compat.set_device(self.lightning_module, self.root_device)
        self._connect_metrics()
        self.precision_plugin.clip_norm = self._clip_norm  # type: ignore[attr-defined]
        if self.parallelized.pipeline is not None:
            # torch's pipelines take long to import, and few runs need them.
            from lightning_par.strategies.pipelined import PipelinedSteps

            self._steps = PipelinedSteps(self.parallelized.pipeline, self.lightning_module, self._step_context)
            self._undo.append(self._steps.undo)
        self._average = averaging.follow(trainer, self.parallelized)
        self.resumption = resumption.Resumption(self.mesh.data_size, self.mesh.data_rank)
        if self.mesh.data_size == 1:
            self._undo.append(_compat.no_advice_to_synchronise())
        else:
            self._undo.append(_compat_logging.before_reducing_logged(trainer, self._compare_logged))
            self._undo.append(_compat_logging.name_metric_that_fails())
        if self.parallelized.holds_shards:
            self._undo.append(_compat.log_whole_values())
            if any(isinstance(callback, pl.callbacks.ModelSummary) for callback in trainer.callbacks):  # type: ignore[attr-defined]
                # The summary counts whole parameters.
                rank_zero_info(f"{type(self).__name__}: {sizes(self.lightning_module)}")
        self.barrier("parallelised")
        if fitting:
            self.setup_optimizers(trainer)
            self._looked_at = hooks.look_at_parameters_between_steps(trainer)
            self._undo.append(hooks.decide_alike(self.lightning_module, self.all_gather))
            self._undo.append(_compat_signals.end_together(trainer, self.control))
        self.setup_precision_plugin()
        if fitting and self._resume_directory is not None:
            go_on = partial(self._go_on, *self._resume_directory)
            self._undo.append(_compat.resume_instead(trainer, go_on))

    @override
    def model_to_device(self) -> None:
        """Nothing: `setup` moves what sharding leaves of each parameter."""

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        # A former fit may have left optimizers whose parameters are gone.
        self._reset_optimizers_and_schedulers()
        with self.parallelized.whole_parameters():
            super().setup_optimizers(trainer)
        if self.parallelized.pipeline is not None:
            hooks.refuse_lbfgs(self.optimizers)
        for optimizer in self.optimizers:
            remap_optimizer(optimizer, [self.parallelized])

    def _clip_norm(self, parameters: list[nn.Parameter], max_norm: float) -> None:
        self.parallelized.clip_grad_norm_(max_norm, parameters=parameters)

    def _connect_metrics(self) -> None:
        """Merge the states of each torchmetrics object over the data ranks, not over the whole world."""
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            if isinstance(module, Metric) and module.process_group is None:
                module.process_group = self.mesh.group("data")

    # -- steps ---------------------------------------------------------------------------------------------------

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self.parallelized.accumulating():
            yield

    def _step_context(self, name: str) -> AbstractContextManager[Any]:
        plugin = self.precision_plugin
        contexts = {
            "training_step": plugin.train_step_context,
            "validation_step": plugin.val_step_context,
            "test_step": plugin.test_step_context,
            "predict_step": plugin.predict_step_context,
        }
        return contexts[name]()

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self._steps is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        # The pipeline has run it; what is left is what others see of it.
        assert self.lightning_module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self._steps.restore_gradients()
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        if self._looked_at:
            self.parallelized.data.reshard()
        return closure_loss

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        self.parallelized.begin_backward(closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        self.parallelized.finish_backward()
        if self._looked_at:
            self.parallelized.data.reshard()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        def closure_then_reshard() -> Any:
            result = closure()
            # A step changes the shards: parameters still gathered from a forward without backward would be stale.
            self.parallelized.data.reshard()
            return self._same_loss(optimizer, result)

        with step_on_shards(self.parallelized.holds_shards) as outside:
            return super().optimizer_step(optimizer, outside(closure_then_reshard), model, **kwargs)

    # -- data ----------------------------------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        dataloader = super().process_dataloader(dataloader)
        stage = _compat.stage_of_dataloader()
        module = self.lightning_module
        if stage is None or module is None:
            return dataloader
        flag = "allow_zero_length_dataloader_with_multiple_devices"
        if stage == RunningStage.TRAINING:
            dataloader = resumption.watch(dataloader, module.trainer)
        elif stage == RunningStage.VALIDATING:
            dataloader = resumption.watch_validation(dataloader, module.trainer)
        allow_empty = any(getattr(source, flag, False) for source in (module, module.trainer.datamodule))  # type: ignore[attr-defined]
        return loaders.prepare(
            dataloader,
            stage,
            self.mesh.group("data"),
            sharded=self.parallelized.data.sharded,
            allow_empty=allow_empty,
        )

    @override
    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        resumption.begin(self.lightning_module.trainer)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._compare_batch(args[0])
        if self._steps is None:
            return self._gathered(super().training_step(*args, **kwargs))
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        begins_window = _compat.zeroes_gradients(trainer)
        if begins_window:
            self._steps.forget_gradients()
        result = self._steps.train(1.0 / trainer.accumulate_grad_batches, *args, **kwargs)
        self.parallelized.finish_backward()
        if begins_window:
            self._steps.stash_gradients()
        return result

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._take_turn(self._evaluating("validation_step", super().validation_step), *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._take_turn(self._evaluating("test_step", super().test_step), *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._take_turn(self._evaluating("predict_step", super().predict_step), *args, **kwargs)

    def _evaluating(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        if self._steps is None:
            return step
        return partial(self._steps.evaluate, name, name != "predict_step" or self._broadcast_predictions)

    def _gathered(self, result: Any) -> Any:
        """What a step returns, the logits in it gathered."""
        return result if self.parallelized.tensor_plan is None else tensor.gather_logits(result)

    def _take_turn(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch, and join the other data ranks in those that this rank does not have."""
        turns, units = self._turns, self.parallelized.data.units
        if turns is None:
            return self._gathered(step(*args, **kwargs))
        if turns.everywhere:
            self._compare_batch(args[0])
        if units is not None:
            units.remember_gathers()
        self._alone = turns.begin()
        try:
            result = self._gathered(step(*args, **kwargs))
        finally:
            self._alone = False
        for _ in range(turns.idle()):
            if units is not None:
                units.join_step()
        return result

    def _compare_batch(self, batch: Any) -> None:
        """Compare the first batch of each stage over the data ranks."""
        assert self.lightning_module is not None
        stage = self.lightning_module.trainer.state.stage
        if stage is not None and stage.dataloader_prefix not in self._compared_batches:
            self._compared_batches.add(stage.dataloader_prefix)
            loaders.refuse_different(batch, stage, self.mesh.group("model"))
            loaders.warn_if_same(batch, stage, self.mesh.group("data"))

    def _compare_logged(self, names: list[str]) -> None:
        """Raise on all ranks where some log what others do not: in the reductions they would wait for each other."""
        assert self.lightning_module is not None
        evaluating = not self.lightning_module.trainer.training
        if not evaluating or (self._turns is not None and self._turns.every_loader_everywhere):
            loaders.refuse_different_names(names)

    @property
    def evaluates_together(self) -> bool:
        """Whether all ranks are known to run the evaluation step that this one runs, or has just run."""
        return self._turns is not None and self._turns.together

    def _begin_evaluation(self) -> None:
        """Give all data ranks the same buffers, and agree on who evaluates how many batches."""
        assert self.lightning_module is not None
        data = self.parallelized.data
        data.sync_buffers()
        batches = _compat.batches_to_evaluate(_compat.evaluation_loop(self.lightning_module.trainer))
        self._turns = loaders.Turns(batches, self.mesh.group("data"), sharded=data.sharded)

    @override
    def on_validation_start(self) -> None:
        self._begin_evaluation()

    @override
    def on_test_start(self) -> None:
        self._begin_evaluation()

    @override
    def on_predict_start(self) -> None:
        self._begin_evaluation()

    @override
    def on_validation_end(self) -> None:
        self.parallelized.data.finish_evaluation()

    @override
    def on_test_end(self) -> None:
        self.parallelized.data.finish_evaluation()

    @override
    def on_predict_end(self) -> None:
        self.parallelized.data.finish_evaluation()

    # -- the end -------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Write down the error; add to that of a collective what the ranks did differently before it."""
        record_failure(exception, self.global_rank)
        collective_failed = isinstance(exception, RuntimeError) and not isinstance(exception, torch.OutOfMemoryError)
        for handle in self._handles if collective_failed and dist.is_initialized() else ():
            found = handle.data.explain_failure()
            if found is not None:
                exception.add_note(str(found))
        super().on_exception(exception)

    @override
    def _before_collective(self) -> None:
        """Raise where other ranks will not come: in a batch that they do not have, after an exception on this one."""
        if self._alone:
            raise loaders.alone()
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        if trainer is None or not _compat.is_interrupted(trainer) or not dist.is_initialized():
            return
        if self._met_after_exception:
            return
        exception = sys.exception()
        if exception is not None:
            record_failure(exception, self.global_rank)
        if not meet(f"lightning_par/interrupted/{self._run}", EXCEPTION_AGREEMENT):
            note = (
                f"rank {dist.get_rank()} saves no checkpoint on this exception: not all ranks failed within "
                f"{EXCEPTION_AGREEMENT.total_seconds():.0f} s, and a checkpoint needs all of them"
            )
            if exception is None:
                raise RuntimeError(note)
            exception.add_note(note)
            raise exception
        self._met_after_exception = True
        for handle in self._handles:
            handle.data.reset()

    @override
    def teardown(self) -> None:
        """Leave the sharded module where it is and usable; the process group ends with the process."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        interrupted = trainer is not None and _compat.is_interrupted(trainer)
        self._saver.close(ckpt.GRACE if interrupted else None)
        self._close_control()
        self._resume_directory = None
        while self._undo:
            self._undo.pop()()
        self._steps = None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
