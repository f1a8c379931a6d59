"""A checkpoint of any layout loads under any other: parameters and optimizer state are equal bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from pipeline_checkpoint_runs import PP, OffsetBlock, Staged
from probe import long_run

from lightning_par.checkpoint import full_model_state, full_optimizer_state, verify
from lightning_par.parallel.shards import full_tensor
from lightning_par.testing import run_ranks
from parity import build_strategy

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {"dp_shard_size": 1}),
    "ddp": (2, {"dp_replicate_size": 2, "dp_shard_size": 1}),
    "zero1": (2, {"zero_stage": 1}),
    "zero2": (2, {"zero_stage": 2}),
    "fsdp": (2, {}),
    "fsdp3": (3, {}),
    "fsdp4": (4, {}),
    "fsdp8": (8, {}),
    "hsdp": (4, {"dp_replicate_size": 2, "dp_shard_size": 2}),
    "tp": (2, {"dp_shard_size": 1, "tp_size": 2}),
    "tp x ddp": (4, {"dp_replicate_size": 2, "dp_shard_size": 1, "tp_size": 2}),
    "tp x fsdp": (4, {"dp_shard_size": 2, "tp_size": 2}),
    "pp": (2, PP),
    "pp interleaved": (2, PP | {"pp_schedule": "Interleaved1F1B", "pp_stages_per_rank": 2}),
    "pp x ddp": (4, PP | {"dp_replicate_size": 2}),
    "pp x fsdp": (4, PP | {"dp_shard_size": 2}),
    "pp x tp": (4, PP | {"tp_size": 2}),
    "pp x tp x fsdp": (8, PP | {"tp_size": 2, "dp_shard_size": 2}),
}

WAYS = ("single", "zero1", "fsdp3", "hsdp", "tp x fsdp", "pp interleaved", "pp x tp")


def start(layout: str) -> tuple[Any, dict[str, Any]]:
    """A script of Fabric, with values that no checkpoint has."""
    ranks, options = LAYOUTS[layout]
    fabric: Any = Fabric(
        accelerator="cpu",
        devices=ranks,
        strategy=build_strategy(("MeshStrategy", {"blocks": [OffsetBlock]} | options), "fabric"),
    )
    fabric.launch()
    module = Staged(seed=9)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.param_groups(), lr=1e-2))
    return fabric, {"model": model, "optimizer": optimizer}


def begin(path: str) -> None:
    """Two steps of AdamW with other gradients for each parameter, in one process."""
    fabric, state = start("single")
    torch.manual_seed(1)
    for _ in range(2):
        for param in state["model"].parameters():
            param.grad = torch.randn_like(param) if param.requires_grad else None
        state["optimizer"].step()
    fabric.save(f"{path}/single", state)
    torch.save(whole(state), f"{path}/reference.pt")


def whole(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    module, optimizer = state["model"].module, state["optimizer"].optimizer
    module = getattr(module, "module", module)
    return full_model_state(module), full_optimizer_state(module, optimizer)


def load_all(path: str, layout: str, sources: list[str], save: bool) -> list[str]:
    """Load each checkpoint; returns what differs from what one process had, on the first rank."""
    fabric, state = start(layout)
    differences: list[str] = []
    for source in sources:
        for param in state["model"].parameters():
            with torch.no_grad():
                param.zero_()
        fabric.load(f"{path}/{source}", state)
        found = whole(state)
        if fabric.global_rank == 0:
            differences += [f"{source}: {name}" for name in compare(found, torch.load(f"{path}/reference.pt"))]
    if save:
        fabric.save(f"{path}/{layout}", state)
    return differences


def compare(found: Any, expected: Any) -> list[str]:
    (model, optimizer), (model_before, optimizer_before) = found, expected
    different = [
        name for name in model_before.keys() | model.keys() if not same(model.get(name), model_before.get(name))
    ]
    state, state_before = optimizer["state"], optimizer_before["state"]
    if optimizer["param_groups"] != optimizer_before["param_groups"]:
        different.append("param_groups")
    for number in state.keys() | state_before.keys():
        ours, theirs = state.get(number, {}), state_before.get(number, {})
        different += [
            f"{number}.{key}" for key in ours.keys() | theirs.keys() if not same(ours.get(key), theirs.get(key))
        ]
    return different


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(full_tensor(one), other)
    return bool(one == other)


class Store:
    """Checkpoints of one state, each saved when it is first asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._saved = {"single"}
        run_ranks(1, begin, str(path))

    def of(self, layouts: Iterable[str]) -> list[str]:
        layouts = list(layouts)
        for layout in layouts:
            if layout not in self._saved:
                assert run_ranks(LAYOUTS[layout][0], load_all, str(self.path), layout, ["single"], True)[0] == []
                assert not verify(self.path / layout, "checksum")
                self._saved.add(layout)
        return layouts

    def differences(self, layout: str, sources: list[str]) -> list[str]:
        found: list[str] = run_ranks(LAYOUTS[layout][0], load_all, str(self.path), layout, sources, False, timeout=300)[
            0
        ]
        return found


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize(
    ("source", "layout"),
    [
        ("pp x tp", "single"),
        # Those that the long run below leaves out.
        long_run("ddp", "pp x tp"),
        long_run("fsdp4", "fsdp8"),
    ],
)
def test_bit_for_bit_in_another_layout(store: Store, source: str, layout: str) -> None:
    assert store.differences(layout, store.of([source])) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_every_other(store: Store, layout: str) -> None:
    # Each way in which tensors are cut, and each product; ddp saves as one process does, zero2 and fsdp2 as zero1 does.
    # Eight processes take turns on few cores; what is special is how they are cut themselves.
    sources = WAYS if LAYOUTS[layout][0] < 8 else ("single", "fsdp3", "tp x fsdp", "pp x tp")
    assert store.differences(layout, store.of(sources)) == []


def test_a_difference_would_be_seen() -> None:
    one = {"a": torch.ones(2)}
    state = {"state": {0: {"step": torch.ones(())}}, "param_groups": []}
    assert compare((one, state), ({"a": torch.ones(2, dtype=torch.double)}, state)) == ["a"]
    assert compare((one, state), (one, {"state": {0: {"step": torch.zeros(())}}, "param_groups": []})) == ["0.step"]
    assert compare((one, state), ({}, {"state": {}, "param_groups": [1]})) == ["a", "param_groups", "0.step"]
