"""Single files of full values: from any layout to plain torch and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from probe import some

from checkpoint_runs import (
    Net,
    assert_same,
    build,
    make_optimizers,
    train,
    trainable,
    view,
)
from lightning_par.checkpoint import (
    CheckpointError,
    full_model_state,
    full_optimizer_state,
    load_full_model_state,
    load_full_optimizer_state,
    optimizer_state,
)
from lightning_par.testing import run_ranks


def full_run(path: str, layout: str, kind: str) -> dict[str, Any]:
    net, optimizers = build(layout, kind)
    train(net, optimizers, 2)
    checkpoint = {
        "state_dict": full_model_state(net),
        "optimizer_states": [full_optimizer_state(net, optimizer) for optimizer in optimizers],
    }
    if dist.get_rank() == 0:
        torch.save(checkpoint, path)
    else:
        assert checkpoint == {"state_dict": {}, "optimizer_states": [{}] * len(optimizers)}
    train(net, optimizers, 1, seed=8)
    return view(net, optimizers)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "factored", "two", "groups"])
def test_a_full_file_continues_in_plain_torch(tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "full.ckpt")
    stepped = run_ranks(2, full_run, path, "fsdp", kind)[0]
    checkpoint = torch.load(path, weights_only=True)
    net, optimizers = build("plain", kind, seed=1)
    net.load_state_dict(checkpoint["state_dict"])
    for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=True):
        optimizer.load_state_dict(state)
    train(net, optimizers, 1, seed=8)
    assert_same(stepped, view(net, optimizers), 1e-12)


def load_full_run(path: str, layout: str, kind: str) -> dict[str, Any]:
    net, optimizers = build(layout, kind, seed=1)
    checkpoint = torch.load(path, weights_only=True, mmap=True)
    load_full_model_state(net, checkpoint["state_dict"])
    for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=True):
        load_full_optimizer_state(net, optimizer, state)
    train(net, optimizers, 1, seed=8)
    return view(net, optimizers)


@pytest.mark.parametrize("kind", some(("adamw", "sgd", "factored", "groups"), "groups"))
def test_a_file_of_plain_torch_continues_on_any_layout(tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "plain.ckpt")
    net, optimizers = build("plain", kind)
    train(net, optimizers, 2)
    torch.save({"state_dict": net.state_dict(), "optimizer_states": [o.state_dict() for o in optimizers]}, path)
    train(net, optimizers, 1, seed=8)
    for layout, ranks in (("fsdp", 2), ("hsdp", 4)):
        assert_same(view(net, optimizers), run_ranks(ranks, load_full_run, path, layout, kind)[1], 1e-12)


def test_full_state_that_does_not_fit_is_refused() -> None:
    net, (optimizer,) = build("plain", "adamw")
    train(net, [optimizer], 1)
    state = optimizer.state_dict()
    with pytest.raises(CheckpointError, match="weights only"):
        load_full_optimizer_state(net, optimizer, {})
    with pytest.raises(CheckpointError, match=r"groups of \[7, 1\] parameters here and \[8\] in the file"):
        load_full_optimizer_state(net, make_optimizers(net, "groups")[0], state)
    reordered = torch.optim.AdamW(trainable(net)[::-1])
    with pytest.raises(CheckpointError, match=r"'exp_avg' has the shape \(3, 6\), its parameter scale has \(\)"):
        load_full_optimizer_state(net, reordered, state)
    assert not reordered.state
    with pytest.raises(CheckpointError, match=r"1 names are not in the checkpoint: scale"):
        load_full_model_state(net, {name: value for name, value in net.state_dict().items() if name != "scale"})
    missing, unexpected = load_full_model_state(net, {"skale": torch.zeros(())}, strict=False)
    assert "scale" in missing
    assert unexpected == ["skale"]


def test_full_state_follows_the_precision_of_its_parameter_as_in_torch() -> None:
    net, (optimizer,) = build("plain", "adamw")
    train(net, [optimizer], 1)
    state = optimizer.state_dict()
    state["state"][1]["step"] = 1.0  # a number, as older versions of torch wrote it
    half = Net().to(torch.bfloat16)
    ours, theirs = make_optimizers(half, "adamw") + make_optimizers(half, "adamw")
    load_full_optimizer_state(half, ours, state)
    theirs.load_state_dict(state)
    assert_same(optimizer_state(half, theirs)["state"]["scale"], optimizer_state(half, ours)["state"]["scale"])
    assert ours.state[half.scale]["exp_avg"].dtype == torch.bfloat16


def test_full_optimizer_state_takes_names_too() -> None:
    net, (optimizer,) = build("plain", "adamw")
    train(net, [optimizer], 1)
    (other,) = make_optimizers(net, "adamw")
    load_full_optimizer_state(net, other, optimizer_state(net, optimizer))
    assert_same(view(net, [optimizer]), view(net, [other]))
    assert other.state[net.scale]["exp_avg"] is not optimizer.state[net.scale]["exp_avg"]
