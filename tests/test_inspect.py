"""`lightning-par inspect`: what it says of a checkpoint, of a directory of several, and with which exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from probe import some

from checkpoint_runs import save_run
from lightning_par import checkpoint as ckpt
from lightning_par import cli
from lightning_par.checkpoint.describe import TensorFacts
from lightning_par.checkpoint.tables import fold
from lightning_par.testing import run_ranks
from models import NanoGPT


def inspect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    """The exit status of the command in this process, and what it printed."""
    monkeypatch.setattr(sys, "argv", ["lightning-par", "inspect", *map(str, arguments)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    status = cli.main()
    told = capsys.readouterr()
    return status, told.out or told.err


def set_in_manifest(path: Path, **values: Any) -> None:
    manifest = json.loads((path / "MANIFEST.json").read_text())
    (path / "MANIFEST.json").write_text(json.dumps(manifest | values))


def save_small(path: Path, step: int, **values: Any) -> None:
    ckpt.save_sharded(path, model={"a.weight": torch.ones(4, 3), "b.weight": torch.ones(5)})
    set_in_manifest(path, step=step, **values)


# -- one checkpoint -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", some(["adamw", "two"], "two"))
def test_a_checkpoint_of_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = tmp_path / "run"
    run_ranks(2, save_run, str(path), "fsdp", kind)
    set_in_manifest(path, step=12, layout={"dp_shard_size": 2, "tp_size": 1})
    status, text = inspect(monkeypatch, capsys, path)
    assert status == 0
    lines = [line.split() for line in text.splitlines()]
    assert f"{path}: valid (sizes; --verify checksum reads the files)" in text
    assert "step 12, epoch 3, saved 20" in text
    assert "by 2 ranks (dp_shard 2)" in text
    # Six rows of four numbers of eight bytes, one part a rank.
    assert ["inp.weight", "1", "6", "x", "4", "float64", "2", "2", "192", "B"] in lines
    assert ["scale", "1", "scalar", "float64", "1", "1", "8", "B"] in lines
    status, text = inspect(monkeypatch, capsys, path, "--json", "--verify", "checksum")
    found = json.loads(text)
    assert status == 0
    assert (found["valid"], found["verified"], found["step"], found["epoch"], found["world_size"]) == (
        True,
        "checksum",
        12,
        3,
        2,
    )
    by_name = {one["name"]: one for one in found["model"]}
    assert by_name["inp.weight"] == {
        "name": "inp.weight",
        "shape": [6, 4],
        "dtype": "float64",
        "chunks": 2,
        "files": 2,
        "numel": 24,
        "bytes": 192,
        "tied_to": None,
    }
    assert len(found["optimizers"]) == (2 if kind == "two" else 1)
    states = {one["name"] for one in found["optimizers"][0]}
    assert {"scale.exp_avg", "scale.step"} <= states
    assert found["bytes"] == sum(p.stat().st_size for p in path.rglob("*") if p.is_file() and p.suffix != ".json")
    assert found["files"][".metadata"]["bytes"] == (path / ".metadata").stat().st_size


def test_blocks_that_repeat_share_a_line_and_ties_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = NanoGPT(layers=24)
    ckpt.save_sharded(tmp_path / "run", model=ckpt.model_state(model), about=ckpt.about_model(model))
    status, text = inspect(monkeypatch, capsys, tmp_path / "run")
    assert status == 0
    assert "model.blocks.0-23.mlp.0.weight" in text
    assert "model.head.weight = model.tokens.weight" in text
    assert len(text.splitlines()) < 30
    values = sum(p.numel() for p in model.parameters())
    assert f"model: {len(model.state_dict())} tensors, " in text
    assert f", {values:,} values" in text
    found = json.loads(inspect(monkeypatch, capsys, tmp_path / "run", "--json")[1])
    assert found["parameters"] == values
    assert len(found["model"]) == len(model.state_dict())
    assert [one["tied_to"] for one in found["model"] if one["name"] == "model.head.weight"] == ["model.tokens.weight"]


def facts(name: str, shape: tuple[int, ...] = (2,)) -> TensorFacts:
    return TensorFacts(name, shape, "float32", 1, 1, 2, 8)


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["a", "b.c"], ["a", "b.c"]),
        ([f"l.{i}.w" for i in (0, 1, 2, 5)], ["l.0-2,5.w"]),
        ([f"l.{i}.e.{j}.w" for i in range(3) for j in range(4)], ["l.0-2.e.0-3.w"]),
        ([f"l.{i}.e.{j}.w" for i in range(2) for j in range(1 + i)], ["l.0.e.0.w", "l.1.e.0-1.w"]),
        (["l.0.w", "l.0.b", "l.1.w", "l.1.b"], ["l.0-1.w", "l.0-1.b"]),
    ],
)
def test_names_are_folded(names: list[str], folded: list[str]) -> None:
    found = fold([facts(name) for name in names])
    assert [name for name, _ in found] == folded
    assert sorted(one.name for _, group in found for one in group) == sorted(names)


def test_tensors_of_other_shapes_are_not_folded() -> None:
    assert [name for name, _ in fold([facts("l.0.w"), facts("l.1.w", (3,))])] == ["l.0.w", "l.1.w"]


@pytest.mark.parametrize("broken", ["content", "size", "missing", "index", "manifest", "no manifest"])
def test_what_is_not_valid_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    path = tmp_path / "run"
    save_small(path, 1)
    shard = path / "__0_0.distcp"
    content = shard.read_bytes()
    if broken == "content":
        shard.write_bytes(content[:-40] + b"x" * 40)
        assert inspect(monkeypatch, capsys, path)[0] == 0
    elif broken == "size":
        shard.write_bytes(content[:-1])
    elif broken == "missing":
        shard.unlink()
    elif broken == "index":
        (path / ".metadata").write_bytes(b"no pickle")
    elif broken == "manifest":
        (path / "MANIFEST.json").write_text("{")
    else:
        (path / "MANIFEST.json").unlink()
    reason = {
        "content": "the content of __0_0.distcp was changed",
        "size": f"__0_0.distcp has {len(content) - 1} bytes, not {len(content)}",
        "missing": "__0_0.distcp is missing",
        "index": ".metadata has 9 bytes",
        "manifest": "MANIFEST.json cannot be read",
        "no manifest": "has no MANIFEST.json",
    }[broken]
    status, text = inspect(monkeypatch, capsys, path, "--verify", "checksum")
    assert status == 1
    assert f"{path}: not valid" in text
    assert reason in text
    status, text = inspect(monkeypatch, capsys, path, "--verify", "checksum", "--json")
    found = json.loads(text)
    assert (status, found["valid"]) == (1, False)
    assert any(reason in problem for problem in found["problems"])


class Unknown:
    """Stands for a class whose module is not on the path later."""


def test_classes_that_are_not_found_do_not_hide_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt.save_sharded(tmp_path / "run", model={"w": torch.ones(2)}, meta={"x": Unknown()})
    monkeypatch.delattr(sys.modules[__name__], "Unknown")
    status, text = inspect(monkeypatch, capsys, tmp_path / "run")
    assert status == 0
    assert "classes that are not found here" in text
    assert "model: 1 tensor, 8 B" in text


# -- several --------------------------------------------------------------------------------------------------------


def test_a_directory_of_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Newest first, by step; the newest valid one is marked."""
    for name, step in (("c", 30), ("a", 200), ("b", 100)):
        save_small(tmp_path / name, step)
    (tmp_path / "a" / "__0_0.distcp").write_bytes(b"")
    (tmp_path / ".attempt-x").mkdir()
    (tmp_path / "notes").mkdir()
    status, text = inspect(monkeypatch, capsys, tmp_path)
    assert status == 0
    rows = [line.split() for line in text.splitlines()]
    assert [row[:2] for row in rows if row[0] in "abc"] == [["a", "200"], ["b", "100"], ["c", "30"]]
    assert [row[-2:] for row in rows if row[0] in "ab"] == [["not", "valid"], ["the", "newest"]]
    assert "__0_0.distcp has 0 bytes" in text
    found = json.loads(inspect(monkeypatch, capsys, tmp_path, "--json")[1])["checkpoints"]
    assert [(one["step"], one["valid"], one["newest"]) for one in found] == [
        (200, False, False),
        (100, True, True),
        (30, True, False),
    ]
    assert all(one["bytes"] > 0 for one in found)


def test_exit_statuses_without_a_valid_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect(monkeypatch, capsys, tmp_path)[0] == 2
    status, text = inspect(monkeypatch, capsys, tmp_path / "nowhere", "--json")
    assert status == 2
    assert "there is no checkpoint" in text
    save_small(tmp_path / "a", 1)
    (tmp_path / "a" / "__0_0.distcp").unlink()
    assert inspect(monkeypatch, capsys, tmp_path)[0] == 1
