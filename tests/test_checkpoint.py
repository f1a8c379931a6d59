"""Checkpoints: sharded directories at any number of ranks, and full files that plain torch reads."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import random
import socket
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from probe import long_run, some
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from checkpoint_runs import (
    Net,
    assert_same,
    build,
    load_run,
    make_optimizers,
    save_run,
    train,
    trainable,
    view,
)
from lightning_par.checkpoint import (
    CheckpointError,
    full_model_state,
    is_sharded_checkpoint,
    load_full_model_state,
    load_optimizer_state,
    load_sharded,
    model_state,
    optimizer_state,
    read_meta,
    save_sharded,
    verify,
)
from lightning_par.parallel.shards import full_tensor
from lightning_par.testing import run_ranks


@pytest.mark.parametrize(
    ("saved_as", "loaded_as"),
    [
        long_run(("fsdp", 2), ("fsdp", 4)),
        long_run(("fsdp", 4), ("fsdp", 2)),
        long_run(("hsdp", 4), ("fsdp", 2)),
        (("fsdp", 2), ("hsdp", 4)),
        (("plain", 2), ("fsdp", 2)),
        (("fsdp", 2), ("plain", 2)),
    ],
    ids=str,
)
def test_sharded_checkpoint_loads_in_another_layout(
    tmp_path: Path, saved_as: tuple[str, int], loaded_as: tuple[str, int]
) -> None:
    path = str(tmp_path / "c")
    saved, stepped = run_ranks(saved_as[1], save_run, path, saved_as[0], "adamw")[0]
    for loaded, continued in run_ranks(loaded_as[1], load_run, path, loaded_as[0], "adamw"):
        assert_same(saved, loaded)
        assert_same(stepped, continued, 1e-12)


@pytest.mark.parametrize("kind", some(("sgd", "momentum", "factored", "two", "groups"), "factored", "groups"))
def test_optimizers_survive_between_sharded_ranks_and_a_process_without_group(tmp_path: Path, kind: str) -> None:
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    saved, stepped = run_ranks(2, save_run, there, "fsdp", kind)[0]
    loaded, continued = load_run(there, "plain", kind)
    assert_same(saved, loaded)
    assert_same(stepped, continued, 1e-12)
    saved, stepped = save_run(back, "plain", kind)
    for loaded, continued in run_ranks(2, load_run, back, "fsdp", kind):
        assert_same(saved, loaded)
        assert_same(stepped, continued, 1e-12)


def test_equal_tensors_are_stored_once(tmp_path: Path) -> None:
    sizes = []
    for ranks in (1, 4):
        path = tmp_path / str(ranks)
        run_ranks(ranks, save_run, str(path), "plain", "adamw")
        sizes.append(sum(file.stat().st_size for file in path.glob("*.distcp")))
    assert sizes[0] == sizes[1]


def drifted_run(path: str) -> None:
    net = Net()
    net.norm.running_mean.fill_(dist.get_rank())
    net.norm.running_var.fill_(dist.get_rank())
    net.norm.num_batches_tracked.fill_(dist.get_rank())
    save_sharded(path, model=model_state(net))


def test_of_buffers_that_differ_between_ranks_those_of_one_rank_are_stored(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    run_ranks(4, drifted_run, path)
    net = Net()
    load_sharded(path, net)
    assert {name: float(b.max()) for name, b in net.norm.named_buffers()} == {
        "running_mean": 0,
        "running_var": 0,
        "num_batches_tracked": 0,
    }


def tensor_parallel_run(path: str, save: bool, layout: str) -> dict[str, Any]:
    torch.manual_seed(0 if save else 1)
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)).double()
    if layout == "2d":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(net, mesh=mesh["shard"])
    optimizer = torch.optim.Adam(net.parameters())
    if save:
        net(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        save_sharded(path, model=model_state(net), optimizers=[optimizer_state(net, optimizer)])
    else:
        load_sharded(path, net, [optimizer])
        state = copy.deepcopy(view(net, [optimizer]))
        load_full_model_state(net, {name: state[name] for name in net.state_dict()})
        load_optimizer_state(net, optimizer, optimizer_state(net, optimizer))
    return view(net, [optimizer])


def test_sharding_over_tensor_parallel_ranks(tmp_path: Path) -> None:
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    saved = run_ranks(4, tensor_parallel_run, there, True, "2d")[0]
    assert_same(saved, tensor_parallel_run(there, False, "plain"))
    saved = tensor_parallel_run(back, True, "plain")
    for loaded in run_ranks(4, tensor_parallel_run, back, False, "2d"):
        assert_same(saved, loaded)


def test_state_in_the_precision_of_its_parameter_follows_it_to_another(tmp_path: Path) -> None:
    net = Net().float()
    (optimizer,) = make_optimizers(net, "adamw")
    for param in trainable(net):
        param.grad = torch.ones_like(param)
    optimizer.step()
    state = optimizer_state(net, optimizer)
    state["state"]["out.weight"]["exp_avg"] = state["state"]["out.weight"]["exp_avg"].double()
    save_sharded(tmp_path / "c", model=model_state(net), optimizers=[state])

    half = Net(1).to(torch.bfloat16)
    (optimizer,) = make_optimizers(half, "adamw")
    load_sharded(tmp_path / "c", half, [optimizer])
    loaded = optimizer_state(half, optimizer)["state"]
    dtypes = {name: [loaded[name][k].dtype for k in ("step", "exp_avg", "exp_avg_sq")] for name in loaded}
    assert dtypes["out.weight"] == [torch.float32, torch.float64, torch.bfloat16]
    assert dtypes["scale"] == [torch.float32, torch.bfloat16, torch.bfloat16]


class Tied(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 3, dtype=torch.float64)
        self.head = nn.Linear(3, 5, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def tied_run(path: str, save: bool, layout: str) -> dict[str, Any]:
    net = Tied(0 if save else 1)
    if layout == "fsdp":
        fully_shard(net)
    optimizer = torch.optim.Adam(net.parameters())
    if save:
        net(torch.arange(5)).square().sum().backward()
        optimizer.step()
        save_sharded(path, model=model_state(net), optimizers=[optimizer_state(net, optimizer)])
        assert list(full_model_state(net)) in (["embed.weight", "head.weight"], [])
    else:
        load_sharded(path, net, [optimizer])
    assert net.head.weight is net.embed.weight
    assert list(optimizer_state(net, optimizer)["state"]) == ["embed.weight"]
    return view(net, [optimizer])


def test_tied_parameters_stay_tied(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    saved = run_ranks(2, tied_run, path, True, "fsdp")[0]
    assert_same(saved, tied_run(path, False, "plain"))
    net = Tied()
    full = full_model_state(net)
    assert full["embed.weight"] is full["head.weight"]
    assert full["embed.weight"].data_ptr() != net.embed.weight.data_ptr()


def wrapped(layout: str, seed: int) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    if layout == "fsdp":
        net[0] = torch.compile(checkpoint_wrapper(net[0]), backend="eager")
        fully_shard(net[0])
        fully_shard(net)
    return net


def wrapped_run(path: str, save: bool, layout: str) -> dict[str, Any]:
    net = wrapped(layout, 0 if save else 1)
    optimizer = torch.optim.Adam(net.parameters())
    if save:
        net(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
        save_sharded(path, model=model_state(net), optimizers=[optimizer_state(net, optimizer)])
    else:
        load_sharded(path, net, [optimizer])
        load_full_model_state(net, {name: full_tensor(v) for name, v in net.state_dict().items()})
    return view(net, [optimizer])


def test_names_do_not_depend_on_compilation_and_activation_checkpointing(tmp_path: Path) -> None:
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    saved = run_ranks(2, wrapped_run, there, True, "fsdp")[0]
    assert_same(saved, wrapped_run(there, False, "plain"))
    saved = wrapped_run(back, True, "plain")
    assert_same(saved, run_ranks(2, wrapped_run, back, False, "fsdp")[1])


class Hooked(nn.Module):
    """Leaves its frozen base out of the state, renames a parameter, and has extra state of changing size."""

    def __init__(self, extra_type: Any) -> None:
        super().__init__()
        self.extra_type = extra_type
        self.base = nn.Linear(2, 2)
        self.adapter = nn.Linear(2, 2, bias=False)
        self.seen: list[int] = []
        self.register_state_dict_post_hook(self._rename)
        self.register_load_state_dict_pre_hook(self._rename_back)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        del state["base.weight"], state["base.bias"]
        state["lora"] = state.pop("adapter.weight") * 2

    @staticmethod
    def _rename_back(module: nn.Module, state: dict[str, Any], *args: Any) -> None:
        state["adapter.weight"] = state.pop("lora") / 2

    def get_extra_state(self) -> Any:
        return self.extra_type(self.seen)

    def set_extra_state(self, state: Any) -> None:
        self.seen = [int(item) for item in state]


@pytest.mark.parametrize("extra_type", [list, torch.tensor])
def test_hooks_on_the_state_and_extra_state_are_honoured(tmp_path: Path, extra_type: Any) -> None:
    saved, loaded, full = Hooked(extra_type), Hooked(extra_type), Hooked(extra_type)
    saved.seen = [5, 6]
    save_sharded(tmp_path / "c", model=model_state(saved))
    load_sharded(tmp_path / "c", loaded)
    load_full_model_state(full, full_model_state(saved))
    for net in (loaded, full):
        assert torch.equal(net.adapter.weight, saved.adapter.weight)
        assert net.seen == [5, 6]


def unsharded_run(path: str) -> bool:
    net, optimizers = build("fsdp", "adamw")
    train(net, optimizers, 1)
    net(torch.ones(2, 4, dtype=torch.float64))  # the root stays gathered until backward
    gathered = not isinstance(net.out.weight, DTensor)
    state = optimizer_state(net, optimizers[0])
    save_sharded(path, model=model_state(net), optimizers=[state])
    return gathered and isinstance(net.out.weight, DTensor)


def test_parameters_that_are_gathered_at_the_moment_are_saved_as_shards(tmp_path: Path) -> None:
    assert run_ranks(2, unsharded_run, str(tmp_path / "c")) == [True, True]


def test_optimizer_state_loads_between_optimizers() -> None:
    net, (optimizer,) = build("plain", "groups")
    train(net, [optimizer], 2)
    twin = copy.deepcopy(net)
    (other,) = make_optimizers(twin, "groups")
    other.param_groups[0]["foreach"] = True
    load_optimizer_state(twin, other, optimizer_state(net, optimizer))
    assert other.param_groups[0]["foreach"] is True, "how this machine computes the step is not the checkpoint's matter"
    assert_same(optimizer_state(net, optimizer)["state"]["inp.bias"], optimizer_state(twin, other)["state"]["inp.bias"])
    train(net, [optimizer], 2)
    train(twin, [other], 2)
    assert_same(net.state_dict(), twin.state_dict())


def test_a_tensor_learning_rate_keeps_its_identity() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.5))
    rate = optimizer.param_groups[0]["lr"]
    saved = optimizer_state(net, torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.25)))
    load_optimizer_state(net, optimizer, saved)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.25


def renamed(net: Net) -> dict[str, Any]:
    return {name.replace("out.", "output."): value for name, value in model_state(net).items()}


def test_names_that_differ_are_all_listed_with_the_nearest(tmp_path: Path) -> None:
    net, (optimizer,) = build("plain", "adamw")
    train(net, [optimizer], 1)
    state = optimizer_state(net, optimizer)
    save_sharded(tmp_path / "c", model=renamed(net), optimizers=[state], meta={"a": 1})
    fresh, _ = build("plain", "adamw", seed=1)
    partial = torch.optim.AdamW(trainable(fresh)[:-1])
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(CheckpointError) as caught:
        load_sharded(tmp_path / "c", fresh, [partial])
    text = str(caught.value)
    assert "out.weight (near: output.weight)" in text
    assert "output.bias (near: out.bias)" in text
    assert "optimizer.0: 1 names of the checkpoint are unknown here: out.bias" in text
    assert "strict=False" in text
    assert_same(before, fresh.state_dict())

    result = load_sharded(tmp_path / "c", fresh, [partial], strict=False)
    assert result == {"a": 1}
    assert result.missing == ["model.out.weight", "model.out.bias"]
    assert result.unexpected == ["model.output.weight", "model.output.bias", "optimizer.0.out.bias"]
    assert torch.equal(fresh.inp.weight, net.inp.weight)
    assert torch.equal(fresh.out.weight, before["out.weight"])
    assert torch.equal(partial.state[fresh.inp.weight]["exp_avg"], optimizer.state[net.inp.weight]["exp_avg"])


def test_shapes_groups_and_optimizers_that_differ_are_refused(tmp_path: Path) -> None:
    net, (optimizer,) = build("plain", "groups")
    train(net, [optimizer], 1)
    save_sharded(tmp_path / "c", model=model_state(net), optimizers=[optimizer_state(net, optimizer)])

    wider = Net()
    wider.out = nn.Linear(6, 4).double()
    with pytest.raises(CheckpointError, match=r"out.weight has the shape \(3, 6\) in the checkpoint and \(4, 6\) here"):
        load_sharded(tmp_path / "c", wider, strict=False)

    params = trainable(net)
    with pytest.raises(CheckpointError, match="1 parameter groups here and 2 in the checkpoint"):
        load_sharded(tmp_path / "c", net, [torch.optim.AdamW(params)])
    moved = torch.optim.AdamW([{"params": params[2:]}, {"params": params[:2]}])
    with pytest.raises(CheckpointError, match=r"scale \(group 1 here, 0 saved\)"):
        load_sharded(tmp_path / "c", net, [moved])
    other = torch.optim.SGD([{"params": params[1:]}, {"params": params[:1]}], momentum=0.9)
    with pytest.raises(CheckpointError, match="SGD needs .*momentum"):
        load_sharded(tmp_path / "c", net, [other])
    with pytest.raises(CheckpointError, match="2 optimizers are to be loaded, the checkpoint holds 1"):
        load_sharded(tmp_path / "c", net, make_optimizers(net, "groups") * 2)
    with pytest.raises(CheckpointError, match="on the meta device"):
        load_sharded(tmp_path / "c", Net().to("meta"))


def test_an_optimizer_built_before_the_parameters_were_replaced_is_refused() -> None:
    net = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(net.parameters())
    net.weight = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(CheckpointError, match=r"holds 1 parameters that the module does not own \(shapes \(3, 2\)\)"):
        optimizer_state(net, optimizer)


def local_state_run() -> None:
    net, (optimizer,) = build("fsdp", "adamw")
    optimizer.state[net.inp.weight]["mine"] = net.inp.weight.to_local().clone()
    with pytest.raises(CheckpointError, match="must keep it as a DTensor"):
        optimizer_state(net, optimizer)


def test_state_that_differs_between_ranks_and_does_not_say_so_is_refused() -> None:
    run_ranks(2, local_state_run)


def uneven_state_run(path: str) -> None:
    net, (optimizer,) = build("plain", "adamw")
    train(net, [optimizer], 1)
    if dist.get_rank() == 1:
        optimizer.state[net.unused]["exp_avg"] = torch.ones_like(net.unused)
    save_sharded(path, model=model_state(net), optimizers=[optimizer_state(net, optimizer)])


def test_state_that_only_another_rank_has_is_not_lost_in_silence(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    run_ranks(2, uneven_state_run, path)
    with pytest.raises(CheckpointError, match="unknown here: unused.exp_avg"):
        load_sharded(path, *build("plain", "adamw"))


def one_rank_does_not_see_it(path: str, elsewhere: str) -> str:
    net, _ = build("fsdp", "adamw")
    save_sharded(path, model=model_state(net))
    with pytest.raises(CheckpointError) as caught:
        load_sharded(path if dist.get_rank() == 0 else elsewhere, net)
    return str(caught.value)


def test_a_rank_that_cannot_read_stops_every_rank(tmp_path: Path) -> None:
    for message in run_ranks(2, one_rank_does_not_see_it, str(tmp_path / "c"), str(tmp_path / "d"), timeout=20):
        assert "rank 1: CheckpointError" in message
        assert "there is no checkpoint" in message


def dtensor_in_meta(path: str) -> None:
    net, _ = build("fsdp", "adamw")
    with pytest.raises(CheckpointError, match=r"\['ema'\]\[0\] is a DTensor"):
        save_sharded(path, model=model_state(net), meta={"ema": [net.inp.weight]})


def test_a_dtensor_in_the_plain_part_is_refused(tmp_path: Path) -> None:
    run_ranks(2, dtensor_in_meta, str(tmp_path / "c"))
    assert list(tmp_path.iterdir()) == []


def test_directories_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    assert not is_sharded_checkpoint(tmp_path)
    assert not is_sharded_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="is not a checkpoint: it has no MANIFEST.json"):
        read_meta(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="those of this run are in .*/run/checkpoints"):
        read_meta(tmp_path / "run")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        read_meta(tmp_path / "nothing")
    torch.save({"state": 1}, tmp_path / "meta.pt")
    (tmp_path / "__0_0.distcp").touch()
    with pytest.raises(CheckpointError, match="did not come to an end, or another program wrote it.*consolidate"):
        read_meta(tmp_path)
    (tmp_path / "MANIFEST.json").write_text('{"format": "lightning_par-9"}')
    with pytest.raises(CheckpointError, match="has the format 'lightning_par-9'.*load it with the version that wrote"):
        read_meta(tmp_path)


def test_the_plain_part_loads_with_weights_only_and_the_random_state_too(tmp_path: Path) -> None:
    save_run(str(tmp_path / "c"), "plain", "groups")
    assert read_meta(tmp_path / "c", weights_only=True) == {"epoch": 3}
    net, optimizers = build("plain", "groups")
    load_sharded(tmp_path / "c", net, optimizers, weights_only=True)


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.randn()), float(torch.rand(()))


def random_run(path: str, save: bool) -> tuple[float, float, float]:
    net = nn.Linear(2, 2)
    seed = dist.get_rank() + (10 if save else 20)
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    np.random.randn()  # leaves the second of a pair of normal numbers in the generator
    if save:
        save_sharded(path, model=model_state(net))
    else:
        load_sharded(path, net)
    return draw()


def test_random_state_is_restored_for_each_rank_and_only_at_the_same_number(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    drawn = run_ranks(2, random_run, path, True)
    assert drawn[0] != drawn[1]
    assert run_ranks(2, random_run, path, False) == drawn
    assert run_ranks(4, random_run, path, False)[0] != drawn[0]


def groups_of_two(path: str, save: bool, data_size: int) -> float:
    """Pairs of ranks have the same samples; saved with as many ranks as samples."""
    rank = dist.get_rank()
    net, data_rank = nn.Linear(2, 2), rank if save else rank // 2
    torch.manual_seed(data_rank + (10 if save else 20))
    if save:
        save_sharded(path, model=model_state(net), data_rank=data_rank)
    else:
        load_sharded(path, net, data_rank=data_rank, data_size=data_size)
    return float(torch.rand(()))


def test_ranks_with_the_same_samples_draw_the_same_whatever_layout_was_saved(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    first, second = run_ranks(2, groups_of_two, path, True, 2)
    assert run_ranks(4, groups_of_two, path, False, 2) == [first, first, second, second]
    # The same number of ranks, and other samples: nobody draws what another data rank drew.
    other = run_ranks(2, groups_of_two, path, False, 1)
    assert other[0] == other[1]
    assert other[0] not in (first, second)


def test_a_damaged_checkpoint_is_refused_with_a_whole_one_beside_it(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    for name in ("a", "b"):
        save_sharded(tmp_path / name, model=model_state(net))
    (tmp_path / "b" / "meta.pt").write_text("short")
    with pytest.raises(CheckpointError, match=rf"meta.pt has 5 bytes, not .*whole one beside it is {tmp_path}/a$"):
        load_sharded(tmp_path / "b", net)


def interrupted_run(path: str, victim: int, stage: str) -> str:
    """Saves a first checkpoint, then one during which something fails on one rank."""
    net, _ = build("fsdp", "adamw")
    save_sharded(path, model=model_state(net), meta={"which": "first"})
    fails: Any = contextlib.nullcontext()
    if dist.get_rank() == victim:
        fails = mock.patch(stage, side_effect=OSError("disk is full"))
    with fails, pytest.raises(CheckpointError) as caught:
        save_sharded(path, model=model_state(net), meta={"which": "second"})
    return str(caught.value)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    "stage",
    [
        "torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data",
        "lightning_par.checkpoint.sharded.current_random_state",
    ],
)
def test_an_interrupted_save_leaves_the_earlier_checkpoint_and_tells_every_rank(
    tmp_path: Path, victim: int, stage: str
) -> None:
    path = tmp_path / "c"
    for message in run_ranks(2, interrupted_run, str(path), victim, stage):
        assert f"rank {victim}: " in message
        assert "disk is full" in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    assert read_meta(path) == {"which": "first"}


@pytest.mark.parametrize("kind", ["nothing", "file", "empty directory", "checkpoint", "link"])
def test_what_had_the_name_is_replaced(tmp_path: Path, kind: str) -> None:
    path, elsewhere = tmp_path / "c", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    if kind == "file":
        path.write_text("a file")
    elif kind == "empty directory":
        path.mkdir()
    elif kind == "checkpoint":
        save_sharded(path, model=model_state(nn.Linear(2, 2)))
        (path / "leftover").touch()
    elif kind == "link":
        path.symlink_to(elsewhere)
    ended = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
    (tmp_path / f".attempt-c.{host}.{ended}.00000000").mkdir()
    (tmp_path / f".attempt-c.{host}.{ended}.00000000" / "leftover").touch()
    (tmp_path / f".attempt-c.elsewhere.{ended}.00000000").mkdir()
    save_sharded(path, model=model_state(nn.Linear(2, 2)))
    assert is_sharded_checkpoint(path)
    assert not path.is_symlink()
    assert sorted(f.name for f in path.iterdir()) == [".metadata", "MANIFEST.json", "__0_0.distcp", "meta.pt", "ranks"]
    assert not verify(path, "checksum")
    # Nobody can know here whether a process of another machine lives.
    assert sorted(f.name for f in tmp_path.iterdir()) == [f".attempt-c.elsewhere.{ended}.00000000", "c", "elsewhere"]
    assert (elsewhere / "kept").exists()


def test_a_directory_of_other_things_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "results.csv").write_text("precious")
    with pytest.raises(CheckpointError, match=r"holds other things than a checkpoint \(results\.csv"):
        save_sharded(tmp_path / "runs", model=model_state(nn.Linear(2, 2)))
    assert [f.name for f in tmp_path.iterdir()] == ["runs"]
    assert (tmp_path / "runs" / "results.csv").read_text() == "precious"


def test_a_failure_at_the_last_moment_keeps_the_earlier_checkpoint(tmp_path: Path) -> None:
    net, path = nn.Linear(2, 2), tmp_path / "c"
    save_sharded(path, model=model_state(net), meta={"which": "first"})
    failing = mock.patch("lightning_par.checkpoint.storage.exchange", side_effect=OSError("stale file handle"))
    with failing, pytest.raises(CheckpointError, match="stale file handle"):
        save_sharded(path, model=model_state(net), meta={"which": "second"})
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    assert read_meta(path) == {"which": "first"}
