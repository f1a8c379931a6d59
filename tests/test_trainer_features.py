"""What a Trainer can do, on several ranks: limits, intervals, clipping, several runs, files, bars and profilers."""

from __future__ import annotations

import functools
import io
import logging
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary, RichProgressBar, Timer, TQDMProgressBar
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from probe import FAMILY, TWO, Probe, numbers, part, same, some, strategies, trainer, weights
from torch import Tensor, nn

from lightning_par.strategies import FSDP2Strategy
from lightning_par.testing import RanksFailed, run_ranks

# -- the same training as in one process ----------------------------------------------------------------------------

# As in one process. Each of two ranks has half of the batches, so numbers of batches are half as large there.
TRAININGS: dict[str, dict[str, Any]] = {
    "limits": {"limit_train_batches": 4, "limit_val_batches": 2, "max_epochs": 2},
    "limits as fractions": {"limit_train_batches": 0.5, "limit_val_batches": 0.5},
    "interval": {"val_check_interval": 4, "num_sanity_val_steps": 2},
    "interval as fraction": {"val_check_interval": 0.5},
    "interval over epochs": {"val_check_interval": 12, "check_val_every_n_epoch": None, "max_epochs": 3},
    "every second epoch": {"check_val_every_n_epoch": 2, "max_epochs": 4},
    "clip the norm": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "norm", "max_epochs": 2},
    "clip values": {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value", "max_epochs": 2},
    "detect anomaly": {"detect_anomaly": True},
    "no inference mode": {"inference_mode": False},
    "steps": {"max_steps": 3, "max_epochs": -1},
    "fast_dev_run": {"fast_dev_run": 4},
}
COUNTS = ("limit_train_batches", "limit_val_batches", "val_check_interval", "num_sanity_val_steps", "fast_dev_run")


def train(names: list[str], strategy: str) -> dict[str, dict[str, Any]]:
    ranks, found = dist.get_world_size(), {}
    for name in names:
        options = TRAININGS[name]
        counts = {k: v // ranks for k, v in options.items() if k in COUNTS and type(v) is int}
        module = Probe()
        run = trainer(strategy, accumulate_grad_batches=2 // ranks, **(options | counts))
        run.fit(module, part(8), part(4))
        found[name] = {
            "weights": weights(module),
            "steps": run.global_step,
            "epochs": run.current_epoch,
            "seen": dict(module.seen),
            "val_loss": float(run.callback_metrics.get("val_loss", 0.0)),
        }
    return found


@functools.cache
def in_one_process() -> dict[str, dict[str, Any]]:
    return run_ranks(1, train, list(TRAININGS), "auto")[0]


@pytest.mark.parametrize("strategy", some(FAMILY, "par_ddp"))
def test_limits_intervals_and_clipping_are_those_of_one_process(strategy: str) -> None:
    first, second = run_ranks(2, train, list(TRAININGS), strategy)
    for name, alone in in_one_process().items():
        for mine in (first[name], second[name]):
            assert same(mine["weights"], alone["weights"]), name
            assert (mine["steps"], mine["epochs"]) == (alone["steps"], alone["epochs"]), name
            assert mine["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-12), name
        for stage, seen in alone["seen"].items():
            assert sorted(first[name]["seen"][stage] + second[name]["seen"][stage]) == sorted(seen), (name, stage)


def overfit(strategy: str) -> dict[str, list[int]]:
    module = Probe()
    run = trainer(strategy, overfit_batches=2, max_epochs=2, use_distributed_sampler=True)
    run.fit(module, numbers(8, shuffle=True), numbers(8))
    return dict(module.seen)


@pytest.mark.parametrize("strategy", TWO)
def test_overfit_batches_are_the_same_in_each_epoch_and_spread(strategy: str) -> None:
    first, second = run_ranks(2, overfit, strategy)
    assert first == {"train": [0, 2, 0, 2], "val": [0, 2, 0, 2]}
    assert second == {"train": [1, 3, 1, 3], "val": [1, 3, 1, 3]}


class Clipping(Probe):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")


def clip_by_hand(strategy: str) -> dict[str, Tensor]:
    module = Clipping()
    trainer(strategy, accumulate_grad_batches=2 // dist.get_world_size()).fit(module, part(8))
    return weights(module)


@pytest.mark.parametrize("strategy", TWO)
def test_a_module_that_clips_itself(strategy: str) -> None:
    [expected] = run_ranks(1, clip_by_hand, "auto")
    assert all(same(mine, expected) for mine in run_ranks(2, clip_by_hand, strategy))


# -- several runs ---------------------------------------------------------------------------------------------------


def several_runs(strategy: str, folder: str) -> list[Any]:
    """Fit, fit on with the same Trainer, evaluate, fit with another one; then evaluate a checkpoint alone."""
    ranks, module, found = dist.get_world_size(), Probe(), []
    options: dict[str, Any] = {"accumulate_grad_batches": 2 // ranks}
    first = trainer(strategy, **options)
    first.fit(module, part(8), part(8))
    first.fit_loop.max_epochs = 2
    first.fit(module, part(8), part(8))
    found += [first.global_step, weights(module)]
    found += [first.validate(module, part(8), verbose=False), first.test(module, part(8), verbose=False)]
    second = trainer(strategy, **options)
    second.fit(module, part(8))
    found += [second.global_step, weights(module)]
    predictions = second.predict(module, part(4))
    found.append(sorted(sum(predictions, [])) if predictions else None)  # type: ignore[arg-type]
    second.save_checkpoint(f"{folder}/all.ckpt")
    found.append(second.test(module, part(8), verbose=False))
    alone = trainer(strategy)
    found.append(alone.test(Probe(), part(8), ckpt_path=f"{folder}/all.ckpt", verbose=False))
    found.append(trainer(strategy).validate(Probe(), part(8), ckpt_path=f"{folder}/all.ckpt", verbose=False))
    return found


def close(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return same({k: torch.as_tensor(v) for k, v in one.items()}, {k: torch.as_tensor(v) for k, v in other.items()})
    return all(map(close, one, other)) if isinstance(one, list) else one == other


@strategies("par_ddp")
def test_several_runs_of_one_module(strategy: str, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    [expected] = run_ranks(1, several_runs, "auto", str(tmp_path / "one"))
    ranks = run_ranks(2, several_runs, strategy, str(tmp_path / "two"))
    predicted = [mine.pop(6) for mine in ranks]
    assert expected.pop(6) == sorted(predicted[0] + predicted[1]) == [0, 1, 2, 3]
    for mine in ranks:
        assert [close(a, b) for a, b in zip(mine, expected, strict=True)] == [True] * len(expected)
    # The checkpoint alone gives what the module gave that wrote it.
    assert close(ranks[0][6], ranks[0][7])


# -- files with weights only, and what does not fit -----------------------------------------------------------------


class Larger(Probe):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 4)


class Tolerant(Larger):
    strict_loading = False


def weights_only(strategy: str, kind: str, path: str) -> tuple[bool, bool, list[str]]:
    from lightning_par.strategies import DataParallelStrategy

    def build() -> Any:
        return (FSDP2Strategy if strategy == "par_fsdp" else DataParallelStrategy)(state_dict_type=kind)

    module = Probe()
    run = trainer(build())
    run.fit(module, part(4), part(4))
    run.save_checkpoint(path, weights_only=True)
    again, tolerant = Probe(), Tolerant()
    nn.init.zeros_(again.last.weight)
    trainer(build()).validate(again, part(4), ckpt_path=path, verbose=False)
    trainer(build()).validate(tolerant, part(4), ckpt_path=path, verbose=False)
    found, errors = weights(tolerant), []
    for refused in (
        lambda: trainer(build()).validate(Larger(), part(4), ckpt_path=path, verbose=False),
        lambda: trainer(build()).fit(Probe(), part(4), ckpt_path=path),
    ):
        try:
            refused()
        except Exception as error:
            errors.append(str(error))
    return (
        same(weights(again), weights(module)),
        all(torch.equal(found[k], v) for k, v in weights(module).items()),
        errors,
    )


@pytest.mark.parametrize("strategy", some(TWO, "par_fsdp"))
@pytest.mark.parametrize(
    ("kind", "missing", "optimizers"),
    [
        ("sharded", "extra.weight", "1 optimizers are to be loaded, the checkpoint holds 0"),
        ("full", "extra.weight", "scheduler state but checkpoint contains only the model"),
    ],
)
def test_weights_only_and_strict_loading(
    strategy: str, kind: str, missing: str, optimizers: str, tmp_path: Path
) -> None:
    for restored, tolerated, errors in run_ranks(2, weights_only, strategy, kind, str(tmp_path / "w.ckpt")):
        assert (restored, tolerated) == (True, True)
        assert len(errors) == 2
        assert missing in errors[0]
        assert optimizers in errors[1]


# -- time, bars, summaries, profilers -------------------------------------------------------------------------------


def run_out_of_time(strategy: str) -> tuple[int, int]:
    rank = dist.get_rank()
    ended = trainer(strategy, max_time={"minutes": 1}, max_epochs=3)
    # The clock of rank 0 counts: rank 1 would go on.
    with mock.patch.object(Timer, "time_elapsed", return_value=61.0 if rank == 0 else 0.0):
        ended.fit(Probe(), part(8))
    going = trainer(strategy, max_time="00:00:10:00")
    going.fit(Probe(), part(8))
    return ended.global_step, going.global_step


@pytest.mark.parametrize("strategy", TWO)
def test_time_is_up_for_all_ranks_at_once(strategy: str) -> None:
    first, second = run_ranks(2, run_out_of_time, strategy)
    assert first == second
    assert first[0] <= 1
    assert first[1] == 4


def shown(callbacks: list[pl.Callback]) -> str:
    output, handler = io.StringIO(), None
    logger = logging.getLogger("lightning.pytorch")
    handler = logging.StreamHandler(output)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with redirect_stdout(output), redirect_stderr(output):
            bars = any(isinstance(c, TQDMProgressBar | RichProgressBar) for c in callbacks)
            summary = any(isinstance(c, ModelSummary) for c in callbacks)
            trainer("par_fsdp", callbacks=callbacks, enable_progress_bar=bars, enable_model_summary=summary).fit(
                Probe(), part(8), part(4)
            )
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.WARNING)
    return output.getvalue()


def show_bars() -> list[str]:
    return [shown([TQDMProgressBar()]), shown([RichProgressBar()])]


def test_progress_bars_are_those_of_rank_0() -> None:
    (tqdm, rich), others = run_ranks(2, show_bars)
    assert "Epoch 0: 100%" in tqdm
    assert "Validation DataLoader 0: 100%" in tqdm
    assert "4/4" in rich
    assert not any("4/4" in text for text in others)


class WithExample(Probe):
    example_input_array = torch.ones(2)


def summarise_an_example() -> str:
    run = trainer("par_fsdp", callbacks=[ModelSummary()], enable_model_summary=True)
    run.fit(WithExample(), part(4))
    return str(pl.utilities.model_summary.summarize(run.lightning_module))


def test_a_summary_runs_the_example() -> None:
    for text in run_ranks(2, summarise_an_example):
        assert "[2, 1]" in text
        assert "[2, 4]" in text


def show_summaries() -> list[str]:
    return [shown([ModelSummary(max_depth=2)]), shown([RichModelSummary(max_depth=1)])]


def test_summaries_have_global_and_local_sizes() -> None:
    for text in run_ranks(2, show_summaries)[0]:
        line = next(line for line in text.splitlines() if "Total params" in line)
        assert "73" in line
        # Rank 0 holds the larger half of each odd size.
        assert "FSDP2Strategy: 73 parameters (584 B), of which this rank holds 39" in text


def profile(kind: str, folder: str) -> int:
    profiler = {
        "simple": lambda: SimpleProfiler(folder, "p"),
        "advanced": lambda: AdvancedProfiler(folder, "p"),
        "pytorch": lambda: PyTorchProfiler(folder, "p"),
    }[kind]()
    run = trainer("par_fsdp", profiler=profiler)
    run.fit(Probe(), part(8), part(4))
    return run.global_step


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("simple", "[Strategy]FSDP2Strategy.training_step"),
        pytest.param("advanced", "training_step", marks=pytest.mark.slow),
        pytest.param("pytorch", "FSDP2Strategy.validation_step", marks=pytest.mark.slow),
    ],
)
def test_profilers(kind: str, text: str, tmp_path: Path) -> None:
    assert run_ranks(2, profile, kind, str(tmp_path)) == [4, 4]
    for rank in range(2):
        assert text in (tmp_path / f"fit-p-{rank}.txt").read_text()


def barebones(strategy: str) -> int:
    run = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, barebones=True, max_epochs=1)
    run.fit(Probe(), numbers(8))
    return run.global_step


@pytest.mark.parametrize("strategy", TWO)
def test_barebones(strategy: str) -> None:
    assert run_ranks(2, barebones, strategy) == [4, 4]


class Broken(Probe):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (super().training_step(batch, batch_idx) * 0).sqrt()


def find_the_anomaly() -> None:
    trainer("par_fsdp", detect_anomaly=True).fit(Broken(), part(4))


def test_an_anomaly_is_named() -> None:
    with pytest.raises(RanksFailed, match="'MulBackward0' returned nan values"):
        run_ranks(2, find_the_anomaly)


# -- the separate package pytorch_lightning -------------------------------------------------------------------------


def use_separate_package(what: str) -> None:
    import pytorch_lightning as separate
    from lightning_fabric import Fabric

    from lightning_par import strategies
    from lightning_par.strategies import fabric

    class Module(separate.LightningModule):
        training_step = Probe.training_step

    class Data(separate.LightningDataModule):
        pass

    strategies.register()
    if what == "module":
        trainer("par_fsdp").fit(Module(), part(4))
    elif what == "callback":
        trainer("par_fsdp", callbacks=[separate.callbacks.EarlyStopping("loss")]).fit(Probe(), part(4))
    elif what == "datamodule":
        trainer("par_fsdp").fit(Probe(), datamodule=Data())
    elif what.startswith("Trainer"):
        strategy = "par_fsdp" if what == "Trainer by name" else FSDP2Strategy()
        separate.Trainer(accelerator="cpu", devices=2, strategy=strategy)
    else:
        Fabric(accelerator="cpu", devices=2, strategy="par_ddp" if what == "Fabric by name" else fabric.FSDP2Strategy())


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("module", "the module Module is one of the separate package `pytorch_lightning`"),
        ("callback", "the callback EarlyStopping is one of the separate package `pytorch_lightning`"),
        ("datamodule", "the datamodule Data is one of the separate package `pytorch_lightning`"),
        ("Trainer by name", "the Trainer is one of the separate package `pytorch_lightning`"),
        ("Trainer", "the Trainer is one of the separate package `pytorch_lightning`"),
        ("Fabric by name", "Fabric is one of the separate package `lightning_fabric`"),
        ("Fabric", "Fabric is one of the separate package `lightning_fabric`"),
    ],
)
def test_the_separate_packages_are_refused_with_the_import_to_change(what: str, message: str) -> None:
    pytest.importorskip("pytorch_lightning")
    instead = "lightning.fabric" if "Fabric" in what else "lightning.pytorch"
    with pytest.raises(RanksFailed, match=f"ParallelConfigError(?s:.)*{message}(?s:.)*fix: import {instead}"):
        run_ranks(2, use_separate_package, what)


class Nested(Probe):
    """Has a module of the separate package inside, as a part."""

    def __init__(self) -> None:
        super().__init__()
        import pytorch_lightning as separate

        class Part(separate.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 1)

            def forward(self, x: Tensor) -> Tensor:
                return self.linear(x)

        self.last = Part()


def nest_separate_package(strategy: str) -> dict[str, Tensor]:
    module = Nested()
    trainer(strategy, accumulate_grad_batches=2 // dist.get_world_size()).fit(module, part(4))
    return weights(module)


def test_a_module_of_the_separate_package_works_inside_another() -> None:
    pytest.importorskip("pytorch_lightning")
    [expected] = run_ranks(1, nest_separate_package, "auto")
    assert all(same(mine, expected) for mine in run_ranks(2, nest_separate_package, "par_fsdp"))
