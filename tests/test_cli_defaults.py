"""What `lightning-par fit` turns on by itself, and how it is turned off."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import yaml
from test_cli import CONFIG, run

from lightning_par._lightning_cli import CLASSES, Defaults
from lightning_par.callbacks import CommittedCheckpoint, PreemptionGuard, RankZeroLogger
from lightning_par.resilience.errors import PreemptedError

NAMES = [cls.__name__ for cls in CLASSES.values()]


def fitted(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[pl.Callback]:
    """The callbacks of the Trainer with which `fit` begins."""
    found: list[list[Any]] = []

    def fit(self: Any, *_: Any, **__: Any) -> None:
        found.append(list(self.callbacks))

    with patch("lightning.pytorch.Trainer.fit", fit):
        assert run(monkeypatch, "fit", "--config", CONFIG, "--data.path", "README.md", *arguments) == 0
    return found[0]


def ours(found: list[pl.Callback]) -> list[str]:
    return sorted(type(one).__name__ for one in found if type(one).__name__ in NAMES)


def test_each_is_on_for_our_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(CLASSES) == {name for name in vars(Defaults()) if not name.startswith("_")}
    assert ours(fitted(monkeypatch)) == sorted(NAMES)
    assert ours(fitted(monkeypatch, "--trainer.strategy", "par_ddp")) == sorted(NAMES)
    assert not ours(fitted(monkeypatch, "--trainer.strategy", "ddp"))


def test_each_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "off.yaml"
    file.write_text(yaml.safe_dump({"defaults": dict.fromkeys(CLASSES, False) | {"preemption_guard": True}}))
    assert ours(fitted(monkeypatch, "--config", str(file))) == ["PreemptionGuard"]
    left = fitted(monkeypatch, "--defaults.rank_zero_logger", "false")
    assert ours(left) == sorted(set(NAMES) - {"RankZeroLogger"})


def test_none_at_all_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "null.yaml").write_text("defaults: null\n")
    assert run(monkeypatch, "fit", "--config", CONFIG, "--config", str(tmp_path / "null.yaml")) == 2
    assert "defaults is null; each of them is true or false" in capsys.readouterr().err


def test_one_of_the_user_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--trainer.callbacks+=lightning_par.callbacks.RankZeroLogger", "--trainer.callbacks.every_n_steps", "7"]
    found = fitted(monkeypatch, *options)
    assert ours(found) == sorted(NAMES)
    (logger,) = [one for one in found if isinstance(one, RankZeroLogger)]
    assert logger.every_n_steps == 7


def test_files_and_runs_without_checkpoints_have_no_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    full = ["--trainer.strategy.init_args.state_dict_type", "full"]
    assert not [one for one in fitted(monkeypatch, *full) if isinstance(one, CommittedCheckpoint)]
    none = ["--trainer.enable_checkpointing", "false", "--trainer.callbacks", "null"]
    found = fitted(monkeypatch, *none)
    assert [one for one in found if isinstance(one, PreemptionGuard)]
    assert not [one for one in found if isinstance(one, CommittedCheckpoint)]


def test_the_configuration_shows_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "fit", "--config", CONFIG, "--defaults.nan_rewind=false", "--print_config") == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["defaults"] == dict.fromkeys(CLASSES, True) | {"nan_rewind": False}
    assert run(monkeypatch, "fit", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--defaults.preemption_guard" in text
    assert "SIGTERM saves" in text


def test_the_file_of_a_fit_serves_the_other_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Which take nothing from it that is for fit, and do not evaluate new weights where it says resume."""
    assert run(monkeypatch, "fit", "--config", CONFIG, "--resume", "auto", "--print_config") == 0
    file = tmp_path / "config.yaml"
    file.write_text(capsys.readouterr().out)
    checkpoint = tmp_path / "some.ckpt"
    torch.save({}, checkpoint)
    found: list[pl.Callback] = []
    arguments = ["validate", "--config", str(file), "--data.path", "README.md", "--trainer.devices", "1"]

    def validate(self: Any, *_: Any, **__: Any) -> None:
        found.extend(self.callbacks)
        # As Lightning does where a checkpoint has states of callbacks that are not there, and on several ranks.
        warnings.warn("Be aware that when using `ckpt_path`, callbacks used to create the checkpoint ...", stacklevel=1)
        warnings.warn("Using `DistributedSampler` with the dataloaders. During ...", stacklevel=1)

    with patch("lightning.pytorch.Trainer._validate_impl", validate):
        with warnings.catch_warnings(record=True) as told:
            assert run(monkeypatch, *arguments, "--ckpt_path", str(checkpoint)) == 0
        assert not [one for one in told if "Be aware" in str(one.message) or "Using `Dist" in str(one.message)]
        assert found
        assert not ours(found)
        assert run(monkeypatch, *arguments) == 2
    assert "resume: auto is for fit, and validate would use new weights" in capsys.readouterr().err


def test_a_run_that_was_told_to_end_has_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(self: Any, *_: Any, **__: Any) -> None:
        raise PreemptedError("stopped")

    with patch("lightning.pytorch.Trainer.fit", fit):
        assert run(monkeypatch, "fit", "--config", CONFIG, "--data.path", "README.md") == 75
