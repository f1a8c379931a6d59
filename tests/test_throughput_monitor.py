"""ThroughputMonitor: its numbers under the layouts, what it writes and shows, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import io
import signal
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from probe import long_run, some
from torch.optim import optimizer
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_par.callbacks import (
    CommittedCheckpoint,
    StragglerMonitor,
    ThroughputMonitor,
    throughput_monitor,
    timed_steps,
)
from lightning_par.errors import ParallelConfigError
from lightning_par.resilience import gathering
from lightning_par.resilience.errors import PreemptedError
from lightning_par.resilience.events import read_events
from lightning_par.resilience.phases import PHASES
from lightning_par.resilience.step_timer import StepTimer, WallClock
from lightning_par.resilience.throughput import Throughput, ThroughputReport
from lightning_par.testing import run_ranks
from models import LENGTH, NanoGPT, loader
from parity import BATCH, LAYOUTS, build_strategy, make_trainer

STEPS = 5
MORE: dict[str, tuple[int, tuple[str, dict[str, Any]]]] = {
    "tp": (2, ("TensorParallelStrategy", {"tp_size": 2})),
    "pp": (2, ("PipelineParallelStrategy", {})),
    "checkpointed": (2, ("FSDP2Strategy", {"activation_checkpointing": "full"})),
    "tp2xfsdp2": (4, ("TensorParallelStrategy", {"tp_size": 2})),
    "pp2xddp2": (4, ("PipelineParallelStrategy", {"pp_size": 2, "dp_replicate_size": 2})),
}
ALL = LAYOUTS | MORE


def batches(data_rank: int, data_size: int, count: int = STEPS) -> Any:
    return loader([[(b * data_size + data_rank) * BATCH + j for j in range(BATCH)] for b in range(count)])


def fit(spec: Any, directory: str, accumulate: int = 1) -> Any:
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    strategy = build_strategy(spec, "trainer") if spec else "ddp"
    monitor = ThroughputMonitor(every_n_steps=4, units="tokens", peak_tflops=1)
    trainer = make_trainer(
        ranks, strategy, max_steps=4, accumulate_grad_batches=accumulate, callbacks=[monitor],
        default_root_dir=directory, precision="32-true",
    )  # fmt: skip
    layout = getattr(strategy, "_layout", None)
    resolved = None if layout is None else layout.resolve(ranks)
    rank, size = (dist.get_rank(), ranks) if resolved is None else (
        resolved.data_rank(dist.get_rank()), resolved.data_size)  # fmt: skip
    wait = dist.Work.wait
    trainer.fit(NanoGPT(32, 4), batches(rank, size, 4 * accumulate))
    left = [name for name in ("save_checkpoint", "commit_checkpoint") if name in vars(trainer.strategy)]
    left += [name for name in ("_on_before_fetch",) if name in vars(trainer.fit_loop.epoch_loop)]
    left += list(optimizer._global_optimizer_post_hooks)
    return monitor.last, left, dist.Work.wait is wait


def reference(directory: str) -> Any:
    monitor = ThroughputMonitor(every_n_steps=4, units="tokens", peak_tflops=1)
    trainer = make_trainer(1, "auto", max_steps=4, callbacks=[monitor], default_root_dir=directory)
    trainer.fit(NanoGPT(32, 4), batches(0, 1))
    return monitor.last


@pytest.mark.parametrize("layout", some(ALL, "fsdp", "pp"))
def test_tokens_and_flops_of_a_model_group_count_once(layout: str, tmp_path: Path) -> None:
    ranks, spec = ALL[layout]
    results = run_ranks(ranks, fit, spec, str(tmp_path), 2 if layout == "fsdp" else 1)
    alone = run_ranks(1, reference, str(tmp_path / "alone"))[0]
    report = results[0][0]
    assert all(result == (report, [], True) for result in results)
    # Steps 3 and 4: the first two are left out.
    assert report.steps == 2
    data_size = ranks if spec[0] not in ("TensorParallelStrategy", "PipelineParallelStrategy") else ranks // 2
    tokens = BATCH * LENGTH * data_size * (2 if layout == "fsdp" else 1)
    assert report.per_second * report.step_seconds == pytest.approx(tokens)
    flops = report.tflops * 1e12 * ranks / report.per_second
    expected = alone.tflops * 1e12 / alone.per_second
    # Attention and logits of this model cannot be divided, so under tp each rank computes all of them.
    assert flops == pytest.approx(expected, rel=1e-6 if "tp" not in layout else 0.1)
    assert report.hardware_tflops >= report.tflops
    if layout == "checkpointed":
        assert report.hardware_tflops > 1.2 * report.tflops
    assert report.mfu == pytest.approx(report.tflops)
    assert report.split["communication"] > 0
    assert sum(report.split.values()) <= report.step_seconds + 1e-9
    kinds = [event["kind"] for event in read_events(tmp_path)]
    assert kinds == ["start", "step", "end"]


def count_gathers(directory: str) -> Any:
    calls = []
    gather = dist.all_gather

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return gather(*args, **kwargs)

    callbacks = [ThroughputMonitor(every_n_steps=4), StragglerMonitor(every_n_steps=4)]
    strategy = build_strategy(("DataParallelStrategy", {}), "trainer")
    trainer = make_trainer(2, strategy, max_steps=12, callbacks=callbacks, default_root_dir=directory)
    with mock.patch.object(gathering.dist, "all_gather", counted):
        trainer.fit(NanoGPT(), batches(dist.get_rank(), 2, 12))
        for_both = len(calls)
        callbacks.clear()
        trainer = make_trainer(2, build_strategy(("DataParallelStrategy", {}), "trainer"), max_steps=12)
        trainer.fit(NanoGPT(), batches(dist.get_rank(), 2, 12))
    return for_both - (len(calls) - for_both)


def test_a_report_costs_one_collective(tmp_path: Path) -> None:
    # Three reports of each of two callbacks.
    assert run_ranks(2, count_gathers, str(tmp_path)) == [6, 6]


class Multiplying(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        torch.ones(50, 50) @ torch.ones(50, 50)
        return result


class WithMultiplying(NanoGPT):
    def configure_optimizers(self) -> Any:
        return Multiplying(self.parameters(), 0.1)


def test_products_of_the_optimizer_are_no_flops_of_the_model(tmp_path: Path) -> None:
    found, plain = (one_process(tmp_path, module=module)[0].last for module in (WithMultiplying(), NanoGPT()))
    assert found.tflops / found.per_second == pytest.approx(plain.tflops / plain.per_second)


def test_it_works_under_lightnings_own_strategies(tmp_path: Path) -> None:
    report, left, put_back = run_ranks(2, fit, None, str(tmp_path))[0]
    assert report.per_second * report.step_seconds == pytest.approx(2 * BATCH * LENGTH)
    assert (left, put_back) == ([], True)


class Memory(Logger):
    name = "memory"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen.append((step, metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


def one_process(directory: Path, loggers: Any = False, bar: Any = None, module: Any = None, **options: Any) -> Any:
    monitor = ThroughputMonitor(every_n_steps=2)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        logger=loggers,
        callbacks=[monitor] + ([bar] if bar else []),
        default_root_dir=directory,
        enable_progress_bar=bar is not None,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **options,
    )
    trainer.fit(module or NanoGPT(), batches(0, 1))
    return monitor, trainer


def test_loggers_and_progress_bars_get_the_numbers(tmp_path: Path) -> None:
    memory, csv = Memory(), CSVLogger(tmp_path)
    loggers = [memory, csv, TensorBoardLogger(tmp_path)]
    with contextlib.redirect_stdout(io.StringIO()) as bar:
        monitor, trainer = one_process(tmp_path, loggers, TQDMProgressBar(refresh_rate=1))
    logged = [metrics for _, metrics in memory.seen if "throughput/samples_per_second" in metrics]
    assert logged[-1] == monitor.last.metrics()
    assert "throughput/samples_per_second" in (Path(csv.log_dir) / "metrics.csv").read_text().splitlines()[0]
    assert trainer.progress_bar_metrics["samples/s"] == monitor.last.per_second
    assert "samples/s=" in bar.getvalue()
    assert "throughput/mfu" not in logged[-1], "no peak is known of a CPU"


def test_rich_shows_them_too(tmp_path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        _, trainer = one_process(tmp_path, bar=RichProgressBar())
    assert "samples/s" in trainer.progress_bar_metrics


class Failing(NanoGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise SystemExit(75)
        return super().training_step(batch, batch_idx)


def test_a_start_that_fails_is_noted_with_its_status_and_leaves_nothing(tmp_path: Path) -> None:
    wait = dist.Work.wait
    with pytest.raises(SystemExit):
        # In the step whose FLOPs are counted.
        one_process(tmp_path, module=Failing())
    events = read_events(tmp_path)
    assert [event["kind"] for event in events] == ["start", "end"]
    assert (events[-1]["how"], events[-1]["status"], events[-1]["step"]) == ("SystemExit: 75", 75, 1)
    assert dist.Work.wait is wait
    assert not optimizer._global_optimizer_post_hooks
    assert torch._C._len_torch_dispatch_stack() == 0


class FailingOnOne(NanoGPT):
    together: BaseException | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            if self.together is not None:
                raise self.together
            if self.trainer.global_rank == 1:
                raise ValueError("no image")
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
        return super().training_step(batch, batch_idx)


def fail_on_one(directory: str, together: BaseException | None = None) -> None:
    strategy = build_strategy(("DataParallelStrategy", {}), "trainer")
    trainer = make_trainer(2, strategy, max_steps=2, callbacks=[ThroughputMonitor()], default_root_dir=directory)
    module = FailingOnOne()
    module.together = together
    with contextlib.suppress(ValueError, RuntimeError, PreemptedError):
        trainer.fit(module, batches(dist.get_rank(), 2))


def test_the_rank_that_failed_says_so_and_the_one_that_lost_it_that_it_follows(tmp_path: Path) -> None:
    run_ranks(2, fail_on_one, str(tmp_path))
    told = {event["kind"]: event for event in read_events(tmp_path)}
    assert (told["error"]["rank"], told["error"]["how"]) == (1, "ValueError: no image")
    assert told["end"]["follows"]


def test_what_all_ranks_have_ended_together_is_told_once(tmp_path: Path) -> None:
    run_ranks(2, fail_on_one, str(tmp_path), PreemptedError("told to end"))
    assert [event["kind"] for event in read_events(tmp_path)] == ["start", "end"]


class Interrupted(NanoGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise KeyboardInterrupt


def test_the_status_of_an_interrupted_start_is_that_of_the_process(tmp_path: Path) -> None:
    with restored_signals(), pytest.raises(SystemExit) as ended:
        one_process(tmp_path, module=Interrupted())
    assert [event["status"] for event in read_events(tmp_path) if event["kind"] == "end"] == [ended.value.code]


@contextlib.contextmanager
def restored_signals() -> Iterator[None]:
    """Lightning ignores SIGINT from an interrupt on."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Opaque:
    """A batch in which nobody finds a tensor."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples


class OpaqueGPT(NanoGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(default_collate(batch.samples), batch_idx)


def test_batches_without_tensors_are_said_not_to_be_counted(tmp_path: Path) -> None:
    data = DataLoader(batches(0, 1).dataset, BATCH, collate_fn=Opaque)
    for count, expected in (None, 0), (lambda batch: len(batch.samples), BATCH):
        monitor = ThroughputMonitor(2, count=count)
        trainer = make_trainer(1, "auto", max_steps=4, callbacks=[monitor], default_root_dir=tmp_path)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(OpaqueGPT(), data)
        told = [one for one in caught if "finds no tensor in a batch, which is a Opaque" in str(one.message)]
        assert len(told) == (count is None)
        assert monitor.last.per_second * monitor.last.step_seconds == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore")
def test_a_run_in_a_url_goes_on_without_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="no events are written for lightning-par report, as default_root_dir"):
        one_process("memory://run")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_two_of_a_kind_are_refused(tmp_path: Path) -> None:
    for kind in ThroughputMonitor, StragglerMonitor:
        trainer = make_trainer(1, "auto", max_steps=1, callbacks=[kind(), kind()], default_root_dir=tmp_path)
        with pytest.raises(ParallelConfigError, match=f"more than one callback is {kind.__name__}"):
            trainer.fit(NanoGPT(), batches(0, 1))


def test_what_holds_the_step_up_is_told_when_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(throughput_monitor, "rank_zero_info", told.append)
    found = [ThroughputReport(1, 1.0, dict.fromkeys(PHASES, 0.0) | {phase: 1.0}, "samples", 1.0, [1.0], [1.0], None,
                              None, None, [1], None) for phase in ("forward_backward", "data")]  # fmt: skip
    reports = [found[i] for i in (0, 1, 0, 1, 1, 0, 1, 1, 1, 1)]
    monkeypatch.setattr(Throughput, "report", lambda self, loss: reports.pop(0) if reports else None)
    monitor = ThroughputMonitor(1, flops=False)
    trainer = make_trainer(1, "auto", max_steps=10, callbacks=[monitor], default_root_dir=tmp_path)
    trainer.fit(NanoGPT(), batches(0, 1, 10))
    assert [line.partition(" is ")[0] for line in told] == [
        "step 1: computation", "step 9: data loading", "ThroughputMonitor: 1 samples/s, 1000 ms a step; data loading",
    ]  # fmt: skip


def save(directory: str) -> None:
    callbacks = [ThroughputMonitor(every_n_steps=1), CommittedCheckpoint(every_n_steps=2, asynchronous=False)]
    strategy = build_strategy(("DataParallelStrategy", {}), "trainer")
    trainer = make_trainer(
        1, strategy, max_steps=STEPS, callbacks=callbacks, default_root_dir=directory, enable_checkpointing=True
    )
    trainer.fit(NanoGPT(), batches(0, 1))


def test_saves_are_a_phase_and_an_event(tmp_path: Path) -> None:
    run_ranks(1, save, str(tmp_path))
    events = read_events(tmp_path)
    saves = [event for event in events if event["kind"] == "checkpoint"]
    assert [Path(event["path"]).name for event in saves] == ["step-00000002", "step-00000004", "step-00000005"]
    assert all(event["blocked"] > 0 for event in saves)
    # A save follows the report of its step, so it is in the next one.
    shares = {event["step"]: event["split"]["checkpoint"] for event in events if event["kind"] == "step"}
    assert shares[5] > 0
    assert shares[4] == 0


class FakeTime:
    """A clock that goes on only where it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def add(self, seconds: float) -> None:
        self.now += seconds


class SlowBatches(Dataset[Any]):
    def __init__(self, clock: FakeTime, count: int) -> None:
        self.clock, self.data = clock, batches(0, 1, count).dataset

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.clock.add(1.5)
        return self.data[index]


class Timed(NanoGPT):
    """Every part of a step takes as long as it is told to."""

    def __init__(self, clock: FakeTime) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.add(4.0)
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.clock.add(2.0)

    def on_train_batch_end(self, *args: Any) -> None:
        self.clock.add(0.5)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.add(1000.0)

    def on_validation_end(self) -> None:
        self.clock.add(1000.0)

    def configure_optimizers(self) -> Any:
        adam = super().configure_optimizers()
        step = adam.step

        def slow(closure: Any = None) -> Any:
            result = step(closure)
            self.clock.add(1.0)
            return result

        adam.step = slow
        return adam


@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_part_of_a_step_is_in_its_phase(accumulate: int, tmp_path: Path) -> None:
    clock = FakeTime()
    with mock.patch.object(timed_steps, "StepTimer", partial(StepTimer, WallClock(clock))):
        monitor = ThroughputMonitor(every_n_steps=3)
        trainer = make_trainer(
            1, "auto", max_steps=6, accumulate_grad_batches=accumulate, callbacks=[monitor],
            val_check_interval=2, default_root_dir=tmp_path,
        )  # fmt: skip
        slow = DataLoader(SlowBatches(clock, 6 * accumulate), batch_size=BATCH)
        trainer.fit(Timed(clock), slow, batches(0, 1, 2))
    expected = {"data": 3.0, "forward_backward": 6.0, "other": 0.5, "communication": 0.0, "checkpoint": 0.0}
    expected = {phase: accumulate * seconds for phase, seconds in expected.items()}
    # What a subclass does after torch's step is no part of it, as far as torch tells.
    split = dict(monitor.last.split)
    assert split.pop("optimizer") + split["other"] == pytest.approx(expected.pop("other") + 1.0)
    split.pop("other")
    assert split == pytest.approx(expected)
    assert monitor.last.verdict.startswith("data loading is ")


@pytest.mark.slow
def test_weights_and_biases_gets_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    monitor, _ = one_process(tmp_path, logger)
    name = "throughput/samples_per_second"
    assert logger.experiment.summary[name] == pytest.approx(monitor.last.metrics()[name])


@pytest.mark.parametrize("mode", [long_run("manual"), long_run("compiled")])
def test_other_ways_to_step(mode: str, tmp_path: Path) -> None:
    class Manual(NanoGPT):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = mode != "manual"

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if mode == "manual":
                for _ in range(2):
                    self.manual_backward(self.loss(batch))
                    self.optimizers().step()
            return self.loss(batch)

    module = Manual()
    if mode == "compiled":
        module.model = torch.compile(module.model, backend="eager")
    monitor, _ = one_process(tmp_path, module=module)
    assert monitor.last.tflops > 0
    assert monitor.last.split["optimizer"] > 0


def test_a_short_run_reports_in_the_end(tmp_path: Path) -> None:
    monitor = ThroughputMonitor(every_n_steps=100)
    trainer = make_trainer(1, "auto", max_steps=STEPS, callbacks=[monitor], default_root_dir=tmp_path)
    trainer.fit(NanoGPT(), batches(0, 1))
    (step,) = (event for event in read_events(tmp_path) if event["kind"] == "step")
    assert (step["step"], step["steps"]) == (STEPS, STEPS - 2)
    assert step["loss"] > 0


def test_all_wrong_arguments_are_named() -> None:
    with pytest.raises(ParallelConfigError) as error:
        ThroughputMonitor("10", units="words", peak_tflops="312", count=3)  # type: ignore[arg-type]
    assert len(error.value.problems) == 4
    with pytest.raises(ParallelConfigError, match="every_n_steps of ThroughputMonitor is 0"):
        ThroughputMonitor(0)
