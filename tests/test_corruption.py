"""Damaged checkpoints: all ranks load the same whole one, or nobody starts; nothing is changed on the disk.

The names of the cases are rows of the fault matrix.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_runs import digest
from fault_saves import NEW, OLD, fill, load
from probe import some
from torch.distributed.checkpoint import FileSystemReader

from checkpoint_runs import build, view
from lightning_par.checkpoint import CheckpointMismatch, load_sharded
from lightning_par.checkpoint.candidates import load_newest
from lightning_par.testing import run_ranks

STEPS = (3, 6)
Damage = Callable[[Path], None]


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """A directory with two checkpoints of two ranks, and what they hold."""
    root = tmp_path_factory.mktemp("template") / "root"
    first, second = run_ranks(2, fill, str(root), STEPS)
    assert first == second
    return root, first


@pytest.fixture
def root(template: tuple[Path, dict[int, str]], tmp_path: Path) -> Path:
    shutil.copytree(template[0], tmp_path / "root", symlinks=True)
    return tmp_path / "root"


@pytest.fixture
def saved(template: tuple[Path, dict[int, str]]) -> dict[int, str]:
    return template[1]


def halve(name: str) -> Damage:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size // 2)


def shorten(name: str) -> Damage:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size - 1)


def lengthen(name: str) -> Damage:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size + 1)


def empty(name: str) -> Damage:
    return lambda path: os.truncate(path / name, 0)


def remove(name: str) -> Damage:
    return lambda path: (path / name).unlink()


def zeros(name: str) -> Damage:
    """As long as before, but nothing is in it: a file system that lost the data after a crash."""
    return lambda path: (path / name).write_bytes(bytes((path / name).stat().st_size))


def flip(name: str) -> Damage:
    """One bit, in the middle of the file."""

    def damage(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 0x10
        (path / name).write_bytes(data)

    return damage


def manifest(**changes: Any) -> Damage:
    def damage(path: Path) -> None:
        content = json.loads((path / "MANIFEST.json").read_text())
        (path / "MANIFEST.json").write_text(json.dumps(content | changes))

    return damage


def text(name: str, content: str) -> Damage:
    return lambda path: (path / name).write_text(content) and None


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


SHARDS = ["__0_0.distcp", "__1_0.distcp"]
OWN = ["ranks/rank-00000.pt", "ranks/rank-00001.pt"]
# (row, damage of the newest, what is compared with the manifest)
DAMAGES: list[tuple[str, Damage, str]] = [
    *((f"D1-half-{name}", halve(name), "size") for name in [*SHARDS, "meta.pt"]),
    *((f"D1-one-byte-less-{name}", shorten(name), "size") for name in SHARDS),
    *((f"D1-one-byte-more-{name}", lengthen(name), "size") for name in SHARDS),
    *((f"D2-bit-{name}", flip(name), "checksum") for name in [*SHARDS, *OWN, "meta.pt", ".metadata"]),
    *((f"D2-zeros-{name}", zeros(name), "checksum") for name in SHARDS),
    *((f"D3-missing-{name}", remove(name), "size") for name in [*SHARDS, "meta.pt"]),
    *((f"D3-empty-{name}", empty(name), "size") for name in SHARDS),
    ("D4-missing", remove(".metadata"), "size"),
    ("D4-half", halve(".metadata"), "size"),
    ("D4-zeros", zeros(".metadata"), "size"),
    ("D4-garbage", zeros("meta.pt"), "size"),
    ("D5-missing", remove("MANIFEST.json"), "size"),
    ("D5-half", halve("MANIFEST.json"), "size"),
    ("D5-empty", empty("MANIFEST.json"), "size"),
    ("D5-garbage", zeros("MANIFEST.json"), "size"),
    ("D5-list", text("MANIFEST.json", "[]"), "size"),
    ("D5-no-files", manifest(files={}), "size"),
    ("D5-other-format", manifest(format="lightning_par-9"), "size"),
    *((f"D7-missing-{name}", remove(name), "size") for name in OWN),
    *((f"D7-half-{name}", halve(name), "size") for name in OWN),
    *((f"D7-zeros-{name}", zeros(name), "size") for name in OWN),
]
QUICK = {"D1-half-__1_0.distcp", "D2-bit-__0_0.distcp", "D3-missing-__1_0.distcp", "D4-zeros", "D5-missing"}
QUICK |= {"D5-other-format", "D7-missing-ranks/rank-00001.pt"}


def cases(rows: list[Any], quick: set[str]) -> Any:
    """Rows as parameters, named by their first part; those that are not quick run with `-m slow` only."""
    assert quick <= {row[0] for row in rows}
    marks = {True: (), False: (pytest.mark.slow,)}
    return [pytest.param(*row[1:], id=row[0], marks=marks[row[0] in quick]) for row in rows]


@pytest.mark.parametrize(("damage", "verify"), cases(DAMAGES, QUICK))
def test_a_damaged_checkpoint_is_passed_over_by_all_ranks(
    root: Path, saved: dict[int, str], damage: Damage, verify: str
) -> None:
    damage(root / NEW)
    before = files(root)
    assert run_ranks(2, load, str(root), verify) == [(3, saved[3])] * 2
    assert files(root) == before


@pytest.mark.parametrize("name", some(SHARDS, SHARDS[1]))
def test_D2_sizes_do_not_show_a_flipped_bit(root: Path, saved: dict[int, str], name: str) -> None:
    """That is what checksums are for; here it is seen that the damage matters."""
    flip_value(root / NEW, name)
    for step, content in run_ranks(2, load, str(root), "size"):
        assert step == 6
        assert content != saved[6]
    assert run_ranks(2, load, str(root), "checksum") == [(3, saved[3])] * 2


def flip_value(path: Path, name: str) -> None:
    """Flip one bit of a value in a shard."""
    places = FileSystemReader(path).read_metadata().storage_data.values()
    place = next(place for place in places if place.relative_path == name)
    data = bytearray((path / name).read_bytes())
    value = torch.load(io.BytesIO(data[place.offset : place.offset + place.length])).numpy().tobytes()
    data[data.index(value, place.offset) + len(value) // 2] ^= 0x10
    (path / name).write_bytes(data)


BESIDE: list[tuple[str, Damage]] = [
    ("D6-latest-missing", remove("LATEST")),
    ("D6-latest-older", text("LATEST", f"{OLD}\n")),
    ("D6-latest-dangling", text("LATEST", "step-00000099\n")),
    ("D6-latest-garbage", zeros("LATEST")),
    ("D6-dangling-link", lambda root: (root / "last.ckpt").symlink_to("step-00000099")),
    ("D6-link-to-older", lambda root: (root / "last.ckpt").symlink_to(OLD)),
    ("D12-mtime-reversed", lambda root: [os.utime(root / name, (t, t)) for name, t in ((NEW, 1), (OLD, 2**31))]),
    ("D12-copied-name", lambda root: (root / NEW).rename(root / "a-name-of-the-user")),
    ("stale-attempt", lambda root: shutil.copytree(root / NEW, root / f".attempt-{NEW}.00000000.1.aa")),
    ("stale-newer-attempt", lambda root: newer(root, ".attempt-step-00000009.00000000.1.aa")),
    ("stale-trash", lambda root: newer(root, ".trash-00000000")),
    ("foreign-file", text("step-00000009", "not a directory")),
    ("foreign-directory", lambda root: (root / "logs" / "version_0").mkdir(parents=True)),
]


def newer(root: Path, name: str) -> None:
    """A whole checkpoint of a later step, under another name."""
    shutil.copytree(root / OLD, root / name)
    manifest(step=9)(root / name)


@pytest.mark.parametrize("change", cases(BESIDE, {"D6-latest-dangling", "D12-mtime-reversed", "stale-newer-attempt"}))
def test_what_lies_beside_checkpoints_does_not_matter(root: Path, saved: dict[int, str], change: Damage) -> None:
    change(root)
    before = files(root)
    assert run_ranks(2, load, str(root)) == [(6, saved[6])] * 2
    assert files(root) == before


@pytest.mark.parametrize("fault", ["blind", "unreadable"], ids=["D8-one-rank-is-blind", "D9-one-rank-cannot-read"])
def test_ranks_that_see_different_things_take_the_same(root: Path, saved: dict[int, str], fault: str) -> None:
    assert run_ranks(2, load, str(root), "size", fault) == [(3, saved[3])] * 2


@pytest.mark.parametrize(
    ("first", "second"),
    cases(
        [
            ("D10-shards", halve(SHARDS[0]), halve(SHARDS[1])),
            ("D10-manifests", remove("MANIFEST.json"), empty("MANIFEST.json")),
            ("D10-rank-files", remove(OWN[1]), zeros(OWN[0])),
            ("D10-versions", manifest(format="lightning_par-9"), manifest(format="other")),
        ],
        {"D10-shards"},
    ),
)
def test_where_all_are_damaged_nobody_starts_afresh(root: Path, first: Damage, second: Damage) -> None:
    first(root / OLD)
    second(root / NEW)
    before = files(root)
    one, other = run_ranks(2, load, str(root))
    assert one == other
    assert one.startswith("NoValidCheckpointError: ")
    assert OLD in one
    assert NEW in one
    assert files(root) == before


def test_D10_without_any_checkpoint_there_is_nothing_to_load(tmp_path: Path) -> None:
    assert run_ranks(2, load, str(tmp_path / "never-made")) == [("nothing", "")] * 2


def fit(root: str, **changes: Any) -> str:
    """What is said when the newest does not fit: the names; and whether anything was changed before."""
    net, _ = build("shard", "adamw", seed=dist.get_rank())
    for name, value in changes.items():
        value = value if value is None else torch.nn.Parameter(torch.zeros(value, dtype=torch.float64))
        setattr(net, name, value)
    before = digest(view(net, []))
    try:
        load_newest(root, lambda path: load_sharded(path, net, random_state=False))
    except CheckpointMismatch as error:
        assert digest(view(net, [])) == before
        return str(error)
    return "fits"


@pytest.mark.parametrize(
    ("changes", "named"),
    cases(
        [
            ("D11-missing-in-the-checkpoint", {"added": (2,)}, "added"),
            ("D11-only-in-the-checkpoint", {"unused": None}, "unused"),
            ("D11-other-shape", {"unused": (3,)}, "unused"),
        ],
        {"D11-other-shape"},
    ),
)
def test_a_model_that_does_not_fit_is_no_damage(root: Path, changes: dict[str, Any], named: str) -> None:
    """An older checkpoint fits no better, so it is not taken."""
    for message in run_ranks(2, fit, str(root), **changes):
        assert named in message
        assert NEW in message


def test_D13_a_directory_of_lightning_is_explained(root: Path) -> None:
    """Without a manifest it is what a save that was killed would leave, so nothing of it is loaded."""
    for name in (OLD, NEW):
        remove("MANIFEST.json")(root / name)
    for message in run_ranks(2, load, str(root)):
        assert "consolidate_checkpoint" in message


def test_D5_a_newer_format_is_named(root: Path) -> None:
    for name in (OLD, NEW):
        manifest(format="lightning_par-9")(root / name)
    for message in run_ranks(2, load, str(root)):
        assert "'lightning_par-9'" in message
