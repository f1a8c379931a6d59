"""The commands `convert` and `inspect`: for checkpoints, without Lightning; their help needs no torch."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_VERIFY = ("none", "size", "checksum")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def run(command: str, arguments: Sequence[str]) -> int:
    """Run one of the commands.

    Returns:
        0; 1 where the checkpoint is not valid; 2 where the command line is wrong, what it asks for is refused, or there
        is no checkpoint.
    """
    options = (_convert_parser() if command == "convert" else _inspect_parser()).parse_args(arguments)
    from lightning_par.checkpoint.errors import CheckpointError
    from lightning_par.checkpoint.export import ExportError
    from lightning_par.checkpoint.reading import NoCheckpointError

    try:
        return _convert(options) if command == "convert" else _inspect(options)
    except (CheckpointError, OSError) as error:
        print(f"lightning-par: {error}", file=sys.stderr)
        return 2 if isinstance(error, ExportError | NoCheckpointError) else 1


def _convert_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-par convert",
        description="Turn a sharded checkpoint into a file or directory of another program, with one tensor in memory "
        "at a time. Checkpoints hold pickles: convert only what you trust.",
    )
    parser.add_argument("checkpoint", help="a checkpoint, or a directory of several: the newest valid one is taken")
    parser.add_argument(
        "--to",
        required=True,
        choices=("lightning", "safetensors", "dcp"),
        help="lightning: one .ckpt with everything, for plain Lightning; safetensors: the weights, for Hugging Face; "
        "dcp: a directory for torch.distributed.checkpoint",
    )
    parser.add_argument("--output", help="what is written (default: a name in `converted` beside the checkpoint)")
    parser.add_argument("--overwrite", action="store_true", help="replace the output of an earlier call")
    parser.add_argument(
        "--verify", choices=_VERIFY, default="checksum", help="how the files are checked first (default: checksum)"
    )
    weights = parser.add_argument_group("with --to safetensors")
    weights.add_argument(
        "--prefix", help="of the tensors to take, dropped from the names (default: that of the Hugging Face model)"
    )
    weights.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of all floating-point tensors")
    weights.add_argument(
        "--max-shard-size", type=_size, default="5GB", help="of one file, such as 5GB or 500MB (default: 5GB)"
    )
    return parser


def _inspect_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-par inspect",
        description="Say what a checkpoint holds and whether it is valid, or which checkpoints a directory has.",
    )
    parser.add_argument("checkpoint", help="a checkpoint, or a directory of several")
    parser.add_argument(
        "--verify",
        choices=_VERIFY,
        default="size",
        help="what is compared with the manifest: sizes (default), or the content of the files",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document, with every tensor")
    return parser


def _size(text: str) -> int:
    match = re.fullmatch(r"([\d.]+) ?([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS or int(float(match[1]) * _UNITS[match[2].upper()]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 5GB, 500MB, 2GiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _convert(options: argparse.Namespace) -> int:
    from lightning_par.checkpoint.export import convert
    from lightning_par.parallel.accounting import human

    done = convert(
        options.checkpoint,
        options.to,
        options.output,
        overwrite=options.overwrite,
        verify=options.verify,
        prefix=options.prefix,
        dtype=_dtype(options.dtype),
        max_shard_size=options.max_shard_size,
    )
    for path, problems in done.passed_over.items():
        print(f"lightning-par: {path} is not valid and was passed over: {'; '.join(problems)}", file=sys.stderr)
    print(f"{done.source}\n-> {done.output} ({done.tensors} tensors, {human(done.bytes)})")
    if done.left_out:
        more = f" and {len(done.left_out) - 5} more" if len(done.left_out) > 5 else ""
        print(f"left out: {', '.join(done.left_out[:5])}{more}")
    for note in done.notes:
        print(note)
    return 0


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    dtype: torch.dtype | None = None if name is None else getattr(torch, name)
    return dtype


def _inspect(options: argparse.Namespace) -> int:
    from lightning_par.checkpoint import tables
    from lightning_par.checkpoint.describe import describe, list_checkpoints
    from lightning_par.checkpoint.manifest import is_sharded_checkpoint, verify
    from lightning_par.checkpoint.reading import NoCheckpointError

    path = options.checkpoint
    if is_sharded_checkpoint(path):
        one = describe(path, options.verify)
        valid = not one.problems
        text, data = (lambda: tables.description_text(one)), (lambda: tables.description_data(one))
    else:
        found = list_checkpoints(path, options.verify)
        if not found:
            raise NoCheckpointError(verify(path, "none")[0])
        valid = any(one.newest for one in found)
        text, data = (lambda: tables.list_text(path, found)), (lambda: tables.list_data(path, found))
    print(json.dumps(data(), indent=1) if options.json else text(), end="\n" if options.json else "")
    return 0 if valid else 1
