"""`NaNRewind`: steps that would spoil the model are left out, and if they go on, training goes back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.callbacks._common import call_all, control_of, events_of, put_last
from lightning_par.callbacks._device_guard import (
    Unread,
    device_problems,
    mode_problems,
    release,
    undo_step,
    veto_on_device,
)
from lightning_par.callbacks._guarding import (
    At,
    Facts,
    Window,
    ask_before_step,
    asks_before_step,
    describe,
    diverged,
    drop_gradients,
    explain_nothing_returned,
    first_bad,
    fit_problems,
    fits_memory,
    guard_problems,
    log_on_rank_zero,
    may_step,
    not_finite,
    option_problems,
    prepare_to_go_back,
    refuse,
    reshard,
    spike,
    state_tensors,
    strategy_problems,
    unscaled,
)
from lightning_par.callbacks.committed_checkpoint import committed_checkpoint_of
from lightning_par.parallel.random import random_state, set_random_state
from lightning_par.resilience.errors import TrainingDivergedError
from lightning_par.resilience.events import EventLog
from lightning_par.resilience.guard import Action, Reading, StepGuard, Verdict, read
from lightning_par.resilience.snapshots import SnapshotRing
from lightning_par.resilience.spikes import SpikeRule
from lightning_par.strategies import _compat, resumption, rewinding

_MIN_AGE = 20
_EVERY = 100


class NaNRewind(pl.Callback):
    """Leaves out optimizer steps whose loss or gradients are not finite or spike, and goes back if they go on.

    All ranks decide alike, by one small exchange for each optimizer step. A step that is left out is one whose whole
    accumulation window was never there: for parameters, optimizers, schedulers that step with batches, averages of
    weights (`WeightAveraging`), buffers and random state. `global_step` counts it. If steps go on to be wrong, training
    goes back to a snapshot in host memory, then to a checkpoint of `CommittedCheckpoint` where there is one, then ends
    with `TrainingDivergedError` on all ranks. Works under every strategy of lightning_par, on one device, and under
    Lightning's DDP.

    Args:
        snapshot_every_n_steps: Copy the state to host memory after every n accepted steps; None never. ``"auto"``: 100,
            or never, with a warning, where there is not memory enough; a number is then refused.
        keep_snapshots: How many of them.
        min_age: How many accepted steps a snapshot has to be old to be gone back to; 20, or fewer where so old ones are
            not kept, when None.
        max_consecutive_skips: So many steps in a row that are left out, the last one as not finite, make it go back.
        max_rewinds: How often to go back to memory within `rewind_window` steps.
        rewind_window: See `max_rewinds`.
        max_reloads: How often to go back to a checkpoint.
        max_total_skips: End if more steps are left out in all; None for any number.
        spikes: The rule for losses and gradient norms that are finite and far too large; True for the usual one, False
            for none.
        spike_patience: So many spikes in a row are left out.
        on_new_level: What follows on them: ``"accept"`` the new level, or ``"rewind"``.
        data: After a rewind go on with the batches that come next (``"skip_past"``), or give those since the snapshot
            again and leave out the ones that were bad (``"replay"``).
        restore_buffers: Put back the buffers (of BatchNorm) that a window has changed whose step is left out.
        check_params_every: Look at parameters and optimizer state too in one step of so many; None never.
        mode: ``"device"`` lets a fused optimizer find out on the device whether its step is left out, and the host
            count it one step later, without waiting for the device in between. Buffers, random state and spikes are
            not looked after then.

    Attributes:
        guard: Decides; its `counters` tell how the run went. None before a fit.

    Raises:
        ParallelConfigError: When the fit begins, with everything that is wrong.
        TrainingDivergedError: On all ranks in the same step.

    Example (Lightning CLI)::

        trainer:
          callbacks:
            - class_path: lightning_par.callbacks.NaNRewind
              init_args: {snapshot_every_n_steps: 200}
    """

    _trainer: pl.Trainer | None = None
    _unread: Unread | None = None
    _untold: tuple[Verdict, Unread] | None = None
    _ring: SnapshotRing | None = None
    # Goes with the snapshot that is taken before the next batch; and the random state after the last one.
    _coming: dict[str, Any] | None = None
    _random: dict[str, Any] | None = None
    _last_report = ""

    def __init__(
        self,
        snapshot_every_n_steps: int | Literal["auto"] | None = "auto",
        keep_snapshots: int = 2,
        min_age: int | None = None,
        *,
        max_consecutive_skips: int = 3,
        max_rewinds: int = 2,
        rewind_window: int = 1000,
        max_reloads: int = 1,
        max_total_skips: int | None = None,
        spikes: SpikeRule | bool = True,
        spike_patience: int = 3,
        on_new_level: Literal["accept", "rewind"] = "accept",
        data: Literal["skip_past", "replay"] = "skip_past",
        restore_buffers: bool = True,
        check_params_every: int | None = 100,
        mode: Literal["sync", "device"] = "sync",
    ) -> None:
        super().__init__()
        every = _EVERY if snapshot_every_n_steps == "auto" else snapshot_every_n_steps
        oldest = (keep_snapshots - 1) * (every or 0)
        self._mode, self._only_if_they_fit = mode, snapshot_every_n_steps == "auto"
        self._every, self._keep, self._data, self._restore_buffers = every, keep_snapshots, data, restore_buffers
        self._min_age = min(_MIN_AGE, oldest) if min_age is None else min_age
        rule = SpikeRule() if spikes is True else spikes or None
        self._make_guard = partial(
            StepGuard,
            spikes=rule,
            max_consecutive_skips=max_consecutive_skips,
            spike_patience=spike_patience,
            on_new_level=on_new_level,
            max_total_skips=max_total_skips,
            max_rewinds=max_rewinds,
            rewind_window=rewind_window,
            max_reloads=max_reloads,
            check_parameters_every=check_params_every,
        )
        refuse(
            option_problems(every, keep_snapshots, min_age, data),
            mode_problems(mode, spikes is not False, restore_buffers, data),
            guard_problems(self._make_guard),
        )
        self.guard: StepGuard | None = None
        self._loaded: dict[str, Any] = {}
        self._active = False
        self._not_finite: set[int] = set()
        self._events = EventLog(None)
        self._undo: list[Callable[[], None]] = []
        self._window = Window()
        self._verdicts: list[Verdict] = []
        self._last_taken, self._taken_at = True, 0
        # What is to be put back at the end of a batch, and before the next one.
        self._after_batch: list[Callable[[], None]] = []
        self._held: list[Callable[[], None]] = []
        self._let_go: dict[int, Callable[[], None]] = {}
        self._bad: set[tuple[int, int, int]] = set()

    # -- begin and end ---------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._active = stage == "fit" and not _compat.is_tuning(trainer)
        if not self._active:
            return
        # After what averages weights, before what saves.
        put_last(trainer, self, *trainer.checkpoint_callbacks)
        refuse(strategy_problems(trainer, replay=self._data == "replay"))
        if self.guard is not None:
            # Another fit of the same Trainer goes on; that of a new one may be of another module.
            self._loaded = self.guard.state_dict() if trainer.global_step else {}
        self._bad.clear()
        self.guard = self._make_guard(control_of(trainer, self._undo))
        self.load_state_dict(self._loaded)
        self._events = events_of(trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._active:
            return
        of_mode = device_problems(trainer, pl_module) if self._mode == "device" else []
        refuse(fit_problems(trainer, replay=self._data == "replay"), of_mode)
        self._trainer = trainer
        said: list[str] = []
        for optimizer in trainer.optimizers if self._mode == "sync" else []:
            self._undo.append(ask_before_step(optimizer, lambda: may_step(trainer, self._verdicts, said)))
        self._undo.append(rewinding.average_only_accepted(trainer, self._is_accepted, lambda: self._guard.left_out))
        self._window, self._last_taken, self._taken_at = Window(), True, trainer.global_step
        self._not_finite = set() if self._guard.check_parameters_every is None else not_finite(pl_module)
        self._guard.can_reload = committed_checkpoint_of(trainer) is not None
        if self._every is not None:
            modules = {"module": pl_module, **rewinding.averages(trainer)}
            ring = SnapshotRing(modules, trainer.optimizers, keep=self._keep, min_age=self._min_age)
            if fits_memory(trainer, ring, self._guard.control, or_refuse=not self._only_if_they_fit):
                self._ring = ring
                self._plan_snapshot(trainer)
        self._guard.can_rewind = self._ring is not None

    @property
    def _guard(self) -> StepGuard:
        assert self.guard is not None
        return self.guard

    def _is_accepted(self) -> bool:
        """Whether the last step was taken; with several optimizers, whether any was in the last batch with one."""
        return any(verdict.taken for verdict in self._verdicts) if self._verdicts else self._last_taken

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._learn(trainer)
        self._end()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._active:
            explain_nothing_returned(trainer, exception)
        # A checkpoint may be saved now, if the device is still there.
        with contextlib.suppress(RuntimeError):
            self._settle()
        self._end()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end()

    def _end(self) -> None:
        call_all(self._after_batch)
        call_all(self._held)
        call_all(self._undo)
        if self._trainer is not None:
            release(self._trainer.optimizers)
        self._trainer = self._ring = self._unread = self._untold = self._coming = self._random = None
        self._active = False

    @override
    def state_dict(self) -> dict[str, Any]:
        self._settle()
        return {} if self.guard is None else self.guard.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict
        if self.guard is not None and state_dict:
            self.guard.load_state_dict(state_dict)

    # -- a window --------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._active:
            return
        call_all(self._held)
        self._verdicts, self._let_go = [], {}
        if self._coming is not None:
            self._take_snapshot(trainer)
        self._random = None
        # Gradients of a window that an epoch has left behind are gone.
        if not self._window.is_open or (pl_module.automatic_optimization and _compat.zeroes_gradients(trainer)):
            self._window = Window(buffers=self._window.buffers)
            self._window.open(pl_module if self._restore_buffers else None)
        self._window.batches += 1

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._random is not None and self._last_taken:
            self._random = random_state()
        elif self._random is not None:
            # It followed a batch that never was.
            set_random_state(self._random)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if not self._active:
            return
        # Automatic optimisation hands over the loss as it is accumulated.
        times = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        self._window.losses.append(loss.detach() * times)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if not self._active:
            return
        if self._ring is not None:
            self._ring.wait()
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if trainer.world_size == 1 and not gradients and not self._window.losses:
            self._verdicts.append(Verdict())  # training_step has returned None
            return
        if self._mode == "device":
            self._judge_on_device(trainer, pl_module, optimizer)
            return
        guard, scaler = self._guard, rewinding.scaler_of(trainer)
        scale = None if scaler is None else scaler.get_scale()
        checked = state_tensors(pl_module, trainer.optimizers, self._not_finite) if guard.checks_parameters else []
        reading = unscaled(read(self._window.take_losses(), gradients, checked), optimizer, scale)
        number = trainer.optimizers.index(optimizer)
        place = (trainer.current_epoch, rewinding.batches_done(trainer), number)
        verdict = guard.judge(trainer.global_step, reading, optimizer=number, scale=scale, known_bad=place in self._bad)
        self._verdicts.append(verdict)
        if verdict.new_level:
            log_on_rank_zero(trainer, f"step {trainer.global_step}: {spike(verdict)} again, taken as the new level")
        if verdict.taken:
            # It may have been left out before in this batch.
            self._let_go.pop(number, lambda: None)()
            return
        if verdict.rule not in ("overflow", "known"):
            parameter = None if verdict.rule == "spike" else first_bad(pl_module)
            self._report(trainer, At.now(trainer, self._window), verdict, reading, parameter)
            if self._data == "replay" and verdict.rule != "parameters":
                self._bad.add(place)
        if scaler is not None and verdict.rule != "overflow":
            self._after_batch.append(rewinding.keep_scale(scaler))
        if (scaler is not None and not pl_module.automatic_optimization) or not asks_before_step(optimizer):
            # A scaler does not ask an optimizer to step, and the next backward may add to them.
            drop_gradients(optimizer)
        hold = self._held if pl_module.automatic_optimization else self._after_batch
        self._let_go[number] = rewinding.hold_schedulers(trainer, optimizer)
        hold.append(self._let_go[number])

    def _judge_on_device(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer) -> None:
        """Learn of the last step, and leave the verdict on this one to the device."""
        last = self._learn(trainer)
        if last is not None and last.action is not Action.SKIP:
            # This step is one of those that are gone back behind.
            self._verdicts.append(last)
            drop_gradients(optimizer)
            self._held.append(rewinding.hold_schedulers(trainer, optimizer))
        else:
            tensors = state_tensors(module, trainer.optimizers, self._not_finite)
            checked = list(tensors) if self._guard.checks_parameters else []
            at, losses = At.now(trainer, self._window), self._window.losses
            self._unread = veto_on_device(trainer, optimizer, losses, checked, at)
        self._window.losses = []

    def _settle(self) -> None:
        """Read the verdict on the last step, if it was left to the device, and undo what the host did for it."""
        unread, self._unread = self._unread, None
        if unread is None or self._trainer is None:
            return
        verdict = self._guard.judge_shared(*(flag > 0 for flag in unread.flags.tolist()))
        self._last_taken = verdict.taken
        if verdict.taken:
            self._taken_at = unread.at.step + 1
        else:
            undo_step(self._trainer, unread)
            self._untold = verdict, unread

    def _learn(self, trainer: pl.Trainer) -> Verdict | None:
        """Settle, and tell of a step that was left out; None if it was not."""
        self._settle()
        untold, self._untold = self._untold, None
        if untold is None:
            return None
        verdict, unread = untold
        self._report(trainer, unread.at, verdict, unread.reading(), None)
        return verdict

    def _end_batch_on_device(self, trainer: pl.Trainer) -> None:
        """Let optimizers go; before a snapshot is taken, learn whether the step was."""
        release(trainer.optimizers)
        ring = self._ring
        if ring is None or self._guard.counters.accepted + 1 - ring.last.accepted < (self._every or 0):
            self._window = Window()
            return
        verdict = self._learn(trainer)
        self._verdicts.append(verdict or Verdict())
        if verdict is not None:
            for optimizer in trainer.optimizers:
                self._held.append(rewinding.hold_schedulers(trainer, optimizer))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        call_all(self._after_batch)
        if self._unread is not None and self._unread.at.batches == rewinding.batches_done(trainer):
            self._end_batch_on_device(trainer)
        if not self._verdicts:
            return
        self._last_taken = self._is_accepted()
        all_taken = all(verdict.taken for verdict in self._verdicts)
        if not self._last_taken:
            self._window.restore(pl_module)
        else:
            self._taken_at = trainer.global_step
            if not all_taken:
                self._window.restore_buffers(pl_module, only_bad=True)
        self._window = Window(buffers=self._window.buffers)
        actions = {verdict.action for verdict in self._verdicts}
        if Action.RELOAD in actions:
            self._reload(trainer)
        elif Action.REWIND in actions:
            self._rewind(trainer)
        elif self._ring is not None and all_taken and self._snapshot_is_due:
            self._plan_snapshot(trainer)
        self._random = random_state() if self._coming is not None or not self._last_taken else None
        self._verdicts = []  # what steps outside of batches is not theirs

    def _report(self, trainer: pl.Trainer, at: At, verdict: Verdict, reading: Reading, parameter: str | None) -> None:
        """Tell once which ranks saw what; collective, in a step that is left out."""
        samples = rewinding.sample_ids(trainer, at.batches, at.window)
        everyone = self._guard.control.gather(Facts(reading.losses, reading.norm, parameter, samples))
        ranks = [rank for rank, one in enumerate(everyone) if one.is_bad(verdict)]
        batches = {rank: one.samples for rank, one in enumerate(everyone) if one.samples is not None}
        what = {"rule": verdict.rule, "what": verdict.what, "value": verdict.value}
        self._events.write("skip", at.step, **what, ranks=ranks, batches=batches)
        text = self._last_report = describe(at, verdict, everyone, ranks)
        if verdict.action is Action.STOP:
            raise TrainingDivergedError(diverged(text, self._guard.counters, self._ring))
        log_on_rank_zero(trainer, f"{text}\nThe step is left out.")

    # -- going back ------------------------------------------------------------------------------------------------

    @property
    def _snapshot_is_due(self) -> bool:
        assert self._ring is not None
        assert self._every is not None
        return self._guard.counters.accepted - self._ring.last.accepted >= self._every

    def _plan_snapshot(self, trainer: pl.Trainer) -> None:
        """Let a snapshot be taken of here, at the end of a batch, when the hooks of this end have run too."""
        self._coming = {"fit": rewinding.capture(trainer), "guard": self._guard.position()}
        if self._data == "replay":
            self._coming["place"] = resumption.rank_state(trainer)

    def _take_snapshot(self, trainer: pl.Trainer) -> None:
        assert self._ring is not None
        assert self._coming is not None
        reshard(trainer)
        extra, self._coming = self._coming, None
        # Schedulers that monitor something have stepped since.
        extra["fit"]["schedulers"] = rewinding.capture_schedulers(trainer)
        # What is drawn when an epoch begins is drawn once.
        begins = rewinding.batches_done(trainer) == 1
        self._ring.take(self._guard.counters.accepted, extra, None if begins else self._random)

    def _rewind(self, trainer: pl.Trainer) -> None:
        ring, step = self._ring, trainer.global_step
        assert ring is not None
        prepare_to_go_back(trainer, ring)
        snapshot = ring.choose(self._guard.counters.accepted)
        fit = snapshot.extra["fit"]
        replayed = self._data == "replay" and rewinding.replay(trainer, fit["epoch"], snapshot.extra["place"])
        rates = rewinding.hyper_parameters(trainer)
        ring.go_back(snapshot)
        rewinding.restore(trainer, fit, epoch_goes_on=replayed)
        rewinding.keep_rates_of_epochs(trainer, rates, fit["schedulers"])
        self._guard.gone_back(snapshot.extra["guard"], reloaded=False)
        committed = committed_checkpoint_of(trainer)
        if committed is not None:
            committed.take_back(trainer)
        self._went_back(trainer, step, "memory")
        if self._data == "replay" and not replayed:
            text = "of another epoch, or of before the first batch of loaders with a state_dict"
            log_on_rank_zero(trainer, f"The batches since the snapshot are not given again: it is {text}.")

    def _reload(self, trainer: pl.Trainer) -> None:
        committed, step = committed_checkpoint_of(trainer), trainer.global_step
        assert committed is not None
        for optimizer in trainer.optimizers:
            drop_gradients(optimizer)
        rates = rewinding.hyper_parameters(trainer)
        checkpoint = committed.reload(trainer, self._taken_at - self._min_age)
        if checkpoint is None:
            text = f"{self._last_report}\nThere is no checkpoint to go back to."
            raise TrainingDivergedError(diverged(text, self._guard.counters, self._ring))
        rewinding.restore_checkpoint(trainer, checkpoint)
        rewinding.keep_rates_of_epochs(trainer, rates, rewinding.saved_schedulers(trainer, checkpoint))
        saved = checkpoint.get("callbacks", {}).get(self.state_key)
        position = saved if saved else {"accepted": 0, "windows": {}}
        self._guard.gone_back(position, reloaded=True)
        self._went_back(trainer, step, "disk")
        if self._ring is not None:
            self._ring.clear()
            self._plan_snapshot(trainer)

    def _went_back(self, trainer: pl.Trainer, step: int, source: str) -> None:
        self._taken_at = trainer.global_step
        self._events.write("rewind", step, from_step=step, to_step=trainer.global_step, source=source)
        log_on_rank_zero(trainer, f"Training goes back from step {step} to step {trainer.global_step} ({source}).")
