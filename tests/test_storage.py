"""Where checkpoints are kept: local directories by a rename, URLs by a manifest that is written last."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch import nn

from checkpoint_runs import build
from lightning_par.checkpoint import (
    CheckpointError,
    CheckpointSaver,
    Facts,
    Retention,
    RunDirectory,
    candidates,
    content_of,
    is_sharded_checkpoint,
    load_newest,
    load_sharded,
    model_state,
    newest_checkpoint,
    read_manifest,
    read_meta,
    remove_checkpoint,
    save_sharded,
    verify,
)
from lightning_par.checkpoint import storage as storage_module
from lightning_par.checkpoint.ranks import Ranks
from lightning_par.checkpoint.storage import LocalStorage, exchange, storage_of
from lightning_par.parallel.shards import full_tensor
from lightning_par.testing import run_ranks


class WithoutRename(LocalFileSystem):  # type: ignore[misc]
    """Files on the disk, none of which can get another name."""

    protocol = ("norename",)

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("this file system cannot rename")

    mv_file = cp_file = rename = move = copy = mv

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("norename://"))


@pytest.fixture(params=["memory", "norename"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "memory":
        yield f"memory://{tmp_path.name}"
        fsspec.filesystem("memory").store.clear()
    else:
        fsspec.register_implementation("norename", WithoutRename, clobber=True)
        yield f"norename://{tmp_path}"


def save(path: str, which: int) -> nn.Linear:
    net = nn.Linear(3, 2)
    nn.init.constant_(net.weight, which)
    save_sharded(path, model=model_state(net), meta={"which": which})
    return net


def test_a_checkpoint_on_a_url(url: str) -> None:
    saved = save(f"{url}/a", 1)
    assert not verify(f"{url}/a", "checksum")
    assert is_sharded_checkpoint(f"{url}/a")
    assert newest_checkpoint(url) == f"{url}/a"
    net = nn.Linear(3, 2)
    assert load_sharded(f"{url}/a", net) == {"which": 1}
    assert torch.equal(net.weight, saved.weight)
    remove_checkpoint(f"{url}/a")
    assert not candidates(url)


def test_a_save_over_a_checkpoint_on_a_url_is_seen_with_its_manifest(url: str) -> None:
    save(f"{url}/a", 1)
    first = read_manifest(f"{url}/a")
    # Everything is there but the manifest.
    failing = mock.patch("lightning_par.checkpoint.storage.ObjectStorage.put", side_effect=OSError("gone"))
    with failing, pytest.raises(CheckpointError, match="gone"):
        save(f"{url}/a", 2)
    assert read_meta(f"{url}/a") == {"which": 1}
    assert not verify(f"{url}/a", "checksum")
    storage, path = storage_of(f"{url}/a")
    assert storage.names(path) == sorted([first.data, "MANIFEST.json"])
    save(f"{url}/a", 3)
    assert read_meta(f"{url}/a") == {"which": 3}
    assert storage.names(path) == sorted([read_manifest(f"{url}/a").data, "MANIFEST.json"])


def test_what_was_never_committed_on_a_url_is_no_candidate(url: str) -> None:
    save(f"{url}/a", 1)
    failing = mock.patch("lightning_par.checkpoint.storage.ObjectStorage.put", side_effect=KeyboardInterrupt)
    discarding = mock.patch("lightning_par.checkpoint.storage.ObjectStorage.discard")
    with failing, discarding, pytest.raises(KeyboardInterrupt):
        save(f"{url}/b", 2)
    storage, path = storage_of(f"{url}/b")
    assert storage.names(path)
    assert newest_checkpoint(url) == f"{url}/a"


def save_and_load_on_two(url: str) -> list[str]:
    fsspec.register_implementation("norename", WithoutRename, clobber=True)
    directory = RunDirectory(url, Retention(keep_last=2))
    directory.begin(Ranks.of(None), 3)
    saver, net = CheckpointSaver(), build("fsdp", "adamw")[0]
    for step in (1, 2, 3):
        for param in net.parameters():
            nn.init.constant_(param, step)
        path = directory.path_of(step)
        content = lambda step=step: content_of(model_state(net), meta={"step": step})
        facts = Facts(dist.get_rank(), step, incarnation=directory.start)
        committed = lambda path=path: directory.committed(path)
        saver.save(path, content, facts, may_commit=directory.refuse_if_superseded, committed=committed)
    saver.close()
    other = build("fsdp", "adamw")[0]
    newest = load_newest(url, lambda path: load_sharded(path, other), verify="checksum")
    assert newest == {"step": 3}
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(full_tensor(one), full_tensor(two)) for one, two in pairs)
    return [one.path for one in candidates(url)]


def test_ranks_share_a_url(tmp_path: Path) -> None:
    url = f"norename://{tmp_path}"
    assert run_ranks(2, save_and_load_on_two, url) == [[f"{url}/step-00000003", f"{url}/step-00000002"]] * 2
    assert (tmp_path / "LATEST").read_text() == "step-00000003\n"


def test_home_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert storage_of("~/a")[1] == str(tmp_path / "a")


def test_a_file_url_is_a_local_path(tmp_path: Path) -> None:
    save(f"file://{tmp_path}/a", 1)
    assert isinstance(storage_of(f"file://{tmp_path}/a")[0], LocalStorage)
    assert read_meta(tmp_path / "a") == {"which": 1}


@pytest.mark.parametrize("offered", [True, False])
def test_names_are_exchanged_with_and_without_help_of_the_system(tmp_path: Path, offered: bool) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    (one / "x").touch()
    other.write_text("a file")
    library = mock.Mock(renameat2=mock.Mock(return_value=-1))
    context: Any = mock.patch("ctypes.CDLL", return_value=library) if not offered else contextlib.nullcontext()
    with context:
        exchange(str(one), str(other))
    assert one.read_text() == "a file"
    assert os.listdir(other) == ["x"]
    assert sorted(os.listdir(tmp_path)) == ["one", "other"]


@pytest.mark.parametrize("renamed", [False, True])
def test_what_was_put_aside_comes_back_where_the_system_exchanges_no_names(tmp_path: Path, renamed: bool) -> None:
    save(str(tmp_path / "a"), 1)
    library = mock.Mock(renameat2=mock.Mock(return_value=-1))
    rename, calls = os.rename, 0

    def end_after_some(source: Any, target: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 1 + renamed:
            raise KeyboardInterrupt
        rename(source, target)

    ended: Any = pytest.raises(KeyboardInterrupt)
    left = mock.patch("lightning_par.checkpoint.storage.LocalStorage.discard")
    with mock.patch("ctypes.CDLL", return_value=library), mock.patch("os.rename", end_after_some), left, ended:
        save(str(tmp_path / "a"), 2)
    if renamed:
        assert read_meta(tmp_path / "a") == {"which": 2}
    else:
        with pytest.raises(CheckpointError, match=r"a save that was to replace it was ended .*: it is \.replaced-a-"):
            read_meta(tmp_path / "a")
    RunDirectory(tmp_path, Retention()).begin(Ranks.of(None), 3)
    assert read_meta(tmp_path / "a") == {"which": 2 if renamed else 1}
    assert sorted(os.listdir(tmp_path)) == [".starts", "a"]


def test_a_small_file_has_its_old_content_until_the_new_one_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "LATEST"
    file.write_text("old")

    def fail() -> None:
        assert file.read_text() == "old"
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        LocalStorage().put(str(file), b"new", before_name=fail)
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["LATEST"]
    LocalStorage().put(str(file), b"new")
    assert file.read_text() == "new"


def test_everything_is_on_the_disk_before_the_name(tmp_path: Path) -> None:
    synced: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(number: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    def note_rename(source: Any, target: Any) -> None:
        synced.append(f"rename {target}")
        rename(source, target)

    with mock.patch("os.fsync", note_fsync), mock.patch.object(storage_module.os, "rename", note_rename):
        save(str(tmp_path / "a"), 1)
    at = synced.index(f"rename {tmp_path / 'a'}")
    before = {os.path.basename(name) for name in synced[:at]}
    assert {"__0_0.distcp", ".metadata", "meta.pt", "rank-00000.pt"} <= before
    assert any(name.startswith(".MANIFEST.json") for name in before)
    assert any(name.startswith(".attempt-a") for name in before)
    assert str(tmp_path) in synced[at + 1 :]
