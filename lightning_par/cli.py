"""The command `lightning-par`; help, version and the answer to a mistyped command need neither torch nor Lightning."""

from __future__ import annotations

import difflib
import os
import sys

from lightning_par import __version__
from lightning_par.errors import ParallelConfigError

COMMANDS = {
    "fit": "train, with validation and checkpoints",
    "validate": "evaluate on the validation data",
    "test": "evaluate on the test data",
    "predict": "predict, without returning anything: use a prediction writer callback",
    "show": "say what the strategy would do to the model; trains nothing",
}

_HELP = f"""\
usage: lightning-par COMMAND --config FILE [--OPTION VALUE ...]

Train an ordinary LightningModule under any parallel layout, described in a Lightning CLI file.

commands:
{chr(10).join(f"  {name:10}{what}" for name, what in COMMANDS.items())}

  lightning-par fit --config examples/nanogpt/fsdp.yaml
  lightning-par fit --config run.yaml --trainer.strategy par_fsdp --trainer.devices 8
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
        The exit status: 0, or 2 where the command line or the parallel configuration is wrong. Any other error is
        raised.
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
    if first not in COMMANDS and not first.startswith("-"):
        near = difflib.get_close_matches(first, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        print(f"lightning-par: no command {first!r}; {hint}the commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    # A console script starts with its own folder on the path, where the user's modules are not.
    sys.path.insert(0, os.getcwd())
    return _run()


def _run() -> int:
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    from lightning_par._lightning_cli import LightningParCLI

    try:
        LightningParCLI()
    except ParallelConfigError as error:
        rank_zero_only(print)(f"lightning-par: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
