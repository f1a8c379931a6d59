"""The command `lightning-par`; help, version and the answer to a mistyped command need neither torch nor Lightning."""

from __future__ import annotations

import difflib
import os
import sys

from lightning_par import __version__, _checkpoint_cli, _report_cli
from lightning_par.errors import ParallelConfigError

# EX_SOFTWARE of sysexits.h: what starts the job again and again can tell this end from others.
NO_PROGRESS = 70
COMMANDS = {
    "fit": "train, with validation and checkpoints",
    "validate": "evaluate on the validation data",
    "test": "evaluate on the test data",
    "predict": "predict, without returning anything: use a prediction writer callback",
    "show": "say what the strategy would do to the model; trains nothing",
}
CHECKPOINT_COMMANDS = {
    "convert": "turn a checkpoint into a file for plain Lightning, Hugging Face or torch",
    "inspect": "say what a checkpoint holds and whether it is valid",
}
RUN_COMMANDS = {
    "report": "say what happened in a run, on a page or in the terminal",
}

_HELP = f"""\
usage: lightning-par COMMAND --config FILE [--OPTION VALUE ...]
       lightning-par convert CHECKPOINT --to lightning|safetensors|dcp
       lightning-par inspect CHECKPOINT
       lightning-par report RUN_DIR --html FILE

Train an ordinary LightningModule under any parallel layout, described in a Lightning CLI file.

commands:
{chr(10).join(f"  {name:10}{what}" for name, what in (COMMANDS | CHECKPOINT_COMMANDS | RUN_COMMANDS).items())}

  lightning-par fit --config examples/nanogpt/fsdp.yaml
  lightning-par fit --config run.yaml --trainer.strategy par_fsdp --trainer.devices 8
  lightning-par fit --config run.yaml --resume auto  go on after a crash, or start
  lightning-par fit --config run.yaml --defaults.preemption_guard false
                                                     without one of the callbacks that fit adds
  lightning-par COMMAND --help                      all options of a command
  lightning-par fit --trainer.strategy.help lightning_par.strategies.FSDP2Strategy
  lightning-par COMMAND --config FILE --print_config    the whole configuration, defaults included

options:
  -h, --help  show this text
  --version   show the version
"""


def main() -> int:
    """Run `lightning-par` on `sys.argv`.

    Returns:
        The exit status: 0; 2 where the command line or the parallel configuration is wrong; 70 where the run has
        diverged, or was started again and again without a new checkpoint; of `convert` and `inspect` 1 where a
        checkpoint is not valid. Any other error is raised, as is the `SystemExit` with status 75 of a run that was
        told to end.
    """
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    if first == "--version":
        print(f"lightning-par {__version__}")
        return 0
    if not first:
        print(_HELP, end="", file=sys.stderr)
        return 2
    commands = [*COMMANDS, *CHECKPOINT_COMMANDS, *RUN_COMMANDS]
    if first not in commands and not first.startswith("-"):
        near = difflib.get_close_matches(first, commands, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        print(f"lightning-par: no command {first!r}; {hint}the commands are {', '.join(commands)}", file=sys.stderr)
        return 2
    # A console script starts with its own folder on the path, where the user's modules are not.
    sys.path.insert(0, os.getcwd())
    if first in CHECKPOINT_COMMANDS:
        return _checkpoint_cli.run(first, sys.argv[2:])
    if first in RUN_COMMANDS:
        return _report_cli.run(sys.argv[2:])
    return _run()


def _run() -> int:
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    from lightning_par._lightning_cli import LightningParCLI
    from lightning_par.checkpoint import NoProgressError
    from lightning_par.resilience.errors import DIVERGED, TrainingDivergedError

    try:
        LightningParCLI()
    except ParallelConfigError as error:
        rank_zero_only(print)(f"lightning-par: {error}", file=sys.stderr)
        return 2
    except NoProgressError as error:
        rank_zero_only(print)(f"lightning-par: {error}", file=sys.stderr)
        return NO_PROGRESS
    except TrainingDivergedError as error:
        rank_zero_only(print)(f"lightning-par: {error}", file=sys.stderr)
        return DIVERGED
    return 0


if __name__ == "__main__":
    sys.exit(main())
