"""The command `lightning-par`: what it answers, in which process, with which exit status."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

import lightning_par
from lightning_par import cli
from lightning_par._lightning_cli import LightningParCLI
from lightning_par.errors import ParallelConfigError, Problem
from lightning_par.resilience.errors import DIVERGED, TrainingDivergedError

ROOT = Path(__file__).parent.parent
CONFIG = "examples/nanogpt/fsdp.yaml"
# To read the default text takes longer than all that is shown.
SHORT_TEXT = ("--data.path", "README.md")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command in this process, from the root of the repository."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["lightning-par", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        return cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--version"], ["fitt"], ["convert", "--help"], []])
def test_help_needs_no_torch(arguments: list[str]) -> None:
    script = (
        "import sys; from contextlib import suppress; from lightning_par.cli import main\n"
        "with suppress(SystemExit): main()\n"
        "sys.exit(any(name.split('.')[0] in ('torch', 'lightning', 'jsonargparse') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", script, *arguments], cwd=ROOT, check=True, timeout=60, capture_output=True)


@pytest.mark.parametrize("module", ["lightning_par", "lightning_par.cli"])
def test_it_runs_as_a_module(module: str) -> None:
    result = subprocess.run([sys.executable, "-m", module, "fot"], cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert result.returncode == 2
    assert "no command 'fot'; did you mean 'fit'?" in result.stderr


def test_help_names_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    assert cli.COMMANDS.keys() == LightningParCLI.subcommands().keys()
    assert all(f"  {command} " in text for command in (*cli.COMMANDS, *cli.CHECKPOINT_COMMANDS))


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"lightning-par {lightning_par.__version__}\n"


@pytest.mark.parametrize(
    ("command", "answer"), [("valdate", "did you mean 'validate'?"), ("qqq", "the commands are fit")]
)
def test_an_unknown_command_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, answer: str
) -> None:
    assert run(monkeypatch, command) == 2
    captured = capsys.readouterr()
    assert repr(command) in captured.err
    assert answer in captured.err
    assert not captured.out


def test_no_command_shows_the_help_as_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch) == 2
    assert "usage: lightning-par" in capsys.readouterr().err


def test_the_configuration_of_the_example_parses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["fit", "--config", CONFIG, "--trainer.max_steps", "20", "--data.batch_size", "4", "--print_config"]
    assert run(monkeypatch, *arguments) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["trainer"]["max_steps"] == 20
    assert config["trainer"]["strategy"]["class_path"] == "lightning_par.strategies.FSDP2Strategy"
    assert config["trainer"]["strategy"]["init_args"]["dp_shard_size"] == -1
    assert config["model"]["init_args"]["block_size"] == config["data"]["init_args"]["block_size"]
    assert config["data"]["init_args"]["batch_size"] == 4


@pytest.mark.parametrize(
    "name", ["DataParallelStrategy", "ZeROStrategy", "FSDP2Strategy", "HSDPStrategy", "MeshStrategy"]
)
def test_each_option_of_a_strategy_has_a_type_and_a_help_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run(monkeypatch, "fit", "--trainer.strategy.help", f"lightning_par.strategies.{name}") == 0
    text = capsys.readouterr().out.split("Help for", 1)[1]
    entries = [" ".join(entry.split()) for entry in text.split("\n  --trainer.strategy.")[1:]]
    options = [entry for entry in entries if not entry.split()[0].endswith(".help")]
    assert len(options) > 10
    # Name, placeholder and perhaps the appending form of a list; then the help text; then the type.
    form = re.compile(r"\w+ \S*[^\s,](?:, --\S+ \S+)? (?!\(type:)\S.*\(type: ")
    assert not [option for option in options if not form.match(option)]


def test_show_describes_and_trains_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with patch("subprocess.Popen", side_effect=AssertionError("show starts no process")):
        assert run(monkeypatch, "show", "--config", CONFIG, *SHORT_TEXT, "--trainer.devices", "4") == 0
    text = capsys.readouterr().out
    for words in (
        "world 4",
        "Block x 4: blocks.0 ... blocks.3",
        "tied embedding",
        "gradients reduced: fp32",
        "4 shards",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("options", "answers"),
    [
        (["--trainer.strategy.init_args.cp_size", "2"], ["context parallelism", "cp_size: 1"]),
        (["--trainer.strategy", "ddp"], ["DDPStrategy", 'strategy="par_fsdp"']),
        (
            [
                "--trainer.strategy.init_args.blocks",
                "Block",
                "--trainer.strategy.init_args.auto_wrap_policy",
                "torch.nn.Linear",
            ],
            ["both blocks and auto_wrap_policy", "auto_wrap_policy: null"],
        ),
    ],
)
def test_a_wrong_layout_is_a_message_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], answers: list[str]
) -> None:
    assert run(monkeypatch, "show", "--config", CONFIG, *SHORT_TEXT, *options) == 2
    error = capsys.readouterr().err
    assert "lightning-par: 1 problem in the parallel configuration" in error
    assert "Traceback" not in error
    assert all(answer in error for answer in answers)


def test_show_asks_for_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    options = ["--trainer.accelerator", "gpu", "--trainer.devices", "8"]
    assert run(monkeypatch, "show", "--config", CONFIG, *SHORT_TEXT, *options) == 0
    assert "world 8" in capsys.readouterr().out


def test_a_missing_checkpoint_is_a_message_before_any_process_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "last.ckpt").mkdir()
    with patch("subprocess.Popen", side_effect=AssertionError("no process is started")):
        assert run(monkeypatch, "validate", "--config", CONFIG, "--ckpt_path", str(tmp_path / "latest.ckpt")) == 2
    error = capsys.readouterr().err
    assert f"ckpt_path {tmp_path / 'latest.ckpt'} does not exist" in error
    assert f"fix: --ckpt_path {tmp_path / 'last.ckpt'}" in error


def test_an_unknown_option_is_a_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "fit", "--config", CONFIG, "--trainer.strategy.init_args.tensor_size", "2") == 2
    assert "tensor_size" in capsys.readouterr().err


def test_what_a_callback_refuses_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = ["--trainer.callbacks", "lightning_par.callbacks.CommittedCheckpoint"]
    wrong = ["--trainer.callbacks.every_n_steps", "0", "--trainer.callbacks.keep_last", "0"]
    assert run(monkeypatch, "fit", "--config", CONFIG, *callback, *wrong) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "every_n_steps is 0; it is at least 1" in error
    assert "keep_last is 0; it is at least 1" in error


def test_resume_auto_needs_to_know_where(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = ["--trainer.callbacks", "null", "--defaults.committed_checkpoint", "false"]
    assert run(monkeypatch, "fit", "--config", CONFIG, *nowhere, "--resume", "auto") == 2
    error = capsys.readouterr().err
    assert "--resume auto: no callback says in which directory the run saves" in error
    assert "CommittedCheckpoint" in error


def test_only_rank_zero_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    error = ParallelConfigError(Problem("tp_size is wrong"))
    with patch("lightning_par._lightning_cli.LightningParCLI", side_effect=error):
        monkeypatch.setattr(rank_zero_only, "rank", 1)
        assert run(monkeypatch, "fit") == 2
        assert "tp_size is wrong" not in capsys.readouterr().err
        monkeypatch.setattr(rank_zero_only, "rank", 0)
        assert run(monkeypatch, "fit") == 2
        assert "tp_size is wrong" in capsys.readouterr().err


def test_a_run_that_has_diverged_has_a_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = TrainingDivergedError("step 7 (epoch 0, batch 7): the loss is not finite")
    with patch("lightning_par._lightning_cli.LightningParCLI", side_effect=error):
        assert run(monkeypatch, "fit", "--config", CONFIG) == DIVERGED == 70
    assert capsys.readouterr().err == f"lightning-par: {error}\n"
