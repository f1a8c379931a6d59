"""What a Fabric script can do, on several ranks: set-up, its own loop, collectives, files, callbacks, loggers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from probe import FAMILY, TWO, Probe, crossed, every_layout, launched, numbers, own, part, same, some, weights
from torch import Tensor, nn

from lightning_par.parallel.shards import full_tensor
from lightning_par.strategies import fabric as strategies
from lightning_par.testing import RanksFailed, run_ranks


class Plain(nn.Module):
    """No LightningModule: a step of its own beside `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Probe()

    def forward(self, batch: Tensor) -> Tensor:
        return self.inner(batch)

    def compute_loss(self, batch: Tensor) -> Tensor:
        return (self.inner(batch) - batch).square().mean()


# -- loops ----------------------------------------------------------------------------------------------------------

LOOPS: dict[str, dict[str, Any]] = {
    "together": {},
    "in parts": {"parts": True},
    "clip the norm": {"clip": {"max_norm": 0.01}},
    "clip by another norm": {"clip": {"max_norm": 0.01, "norm_type": float("inf")}},
    "clip values": {"clip": {"clip_val": 0.002}},
    "accumulate": {"accumulate": 2},
    "meta": {"empty_init": True},
    "own method": {"method": "compute_loss"},
}


def loop(names: list[str], strategy: str) -> dict[str, tuple[dict[str, Tensor], list[float]]]:
    return {name: run_loop(strategy, **LOOPS[name]) for name in names}


def run_loop(
    strategy: str,
    parts: bool = False,
    clip: dict[str, float] | None = None,
    accumulate: int = 1,
    empty_init: bool = False,
    method: str | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """Train; the weights, and the norms that clipping found."""
    fabric = launched(strategy)
    # One process takes the batches of both ranks, so it accumulates twice as many.
    accumulate, norms = accumulate * 2 // fabric.world_size, []
    with fabric.init_module(empty_init=empty_init and fabric.world_size > 1):
        module = Plain()
    if parts:
        model = fabric.setup_module(module)
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    if method is not None:
        model.mark_forward_method(method)
    for i, batch in enumerate(fabric.setup_dataloaders(part(8), use_distributed_sampler=False)):
        last = (i + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not last):
            loss = (model(batch) - batch).square().mean() if method is None else getattr(model, method)(batch)
            fabric.backward(loss / accumulate)
        if last:
            if clip is not None:
                norm = fabric.clip_gradients(model, optimizer, **clip)
                norms += [] if norm is None else [float(norm)]
            optimizer.step()
            optimizer.zero_grad()
    return weights(module), norms


@functools.cache
def in_one_process() -> dict[str, tuple[dict[str, Tensor], list[float]]]:
    return run_ranks(1, loop, list(LOOPS), "auto")[0]


@pytest.mark.parametrize("strategy", some(FAMILY, "par_fsdp"))
def test_loops_are_those_of_one_process(strategy: str) -> None:
    for found in run_ranks(2, loop, list(LOOPS), strategy):
        for name, (expected, norms) in in_one_process().items():
            assert same(found[name][0], expected), name
            assert found[name][1] == pytest.approx(norms, rel=1e-9), name


def clip_what_is_not_finite(strategy: str, strict: bool) -> bool:
    fabric = launched(strategy)
    module = Plain()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    bad = float("nan") if dist.get_rank() == 1 else 1.0
    fabric.backward(model(torch.tensor([bad])).sum())
    norm = fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=strict)
    return bool(norm is not None and norm.isfinite())


@pytest.mark.parametrize("strategy", TWO)
def test_all_ranks_see_a_gradient_that_is_not_finite(strategy: str) -> None:
    assert run_ranks(2, clip_what_is_not_finite, strategy, False) == [False, False]
    with pytest.raises(RanksFailed, match=r"failed on ranks [01], [01] of 2(?s:.)*order 2 is nan"):
        run_ranks(2, clip_what_is_not_finite, strategy, True)


# -- data -----------------------------------------------------------------------------------------------------------


def spread(strategy: str) -> dict[str, list[list[int]]]:
    fabric = launched(strategy)
    loaders = {
        "sequence": fabric.setup_dataloaders(numbers(7, 2)),
        "shuffled": fabric.setup_dataloaders(numbers(8, 2, shuffle=True)),
        "own": fabric.setup_dataloaders(own([1, 2], [3, 4]), use_distributed_sampler=False),
        "not moved": fabric.setup_dataloaders(numbers(4), move_to_device=False),
    }
    first, second = fabric.setup_dataloaders(numbers(2), numbers(4))
    loaders |= {"a": first, "b": second}
    return {name: [batch.tolist() for batch in loader] for name, loader in loaders.items()}


@pytest.mark.parametrize("strategy", TWO)
def test_loaders_are_spread(strategy: str) -> None:
    first, second = run_ranks(2, spread, strategy)
    # Seven samples, each once, in as many batches on each rank.
    assert (first["sequence"], second["sequence"]) == ([[0, 2], [4, 6]], [[1, 3], [5]])
    for name, samples in (("shuffled", 8), ("not moved", 4), ("a", 2), ("b", 4)):
        assert sorted(sum(first[name] + second[name], [])) == list(range(samples)), name
    assert (first["own"], second["own"]) == ([[1], [2]], [[3], [4]])


# -- collectives ----------------------------------------------------------------------------------------------------


def communicate(strategy: str, folder: str) -> dict[str, Any]:
    fabric = launched(strategy)
    rank = fabric.global_rank
    file = Path(folder, "made")
    with fabric.rank_zero_first():
        first_is_there = file.exists()
        file.touch()
    weight = fabric.setup(Probe()).first.weight
    nested = fabric.all_gather({"a": torch.tensor([rank]), "b": [torch.tensor(2.0 * rank), 5]})
    return {
        "gathered": [nested["a"].tolist(), nested["b"][0].tolist(), nested["b"][1].tolist()],
        "mean": fabric.all_reduce(torch.tensor(float(rank))).item(),
        "mean of integers": fabric.all_reduce(torch.tensor(rank)).item(),
        "sum": fabric.all_reduce({"x": torch.tensor(rank + 1)}, reduce_op="sum")["x"].item(),
        "max": fabric.all_reduce(torch.tensor(rank), reduce_op="max").item(),
        "object": fabric.broadcast({"from": rank}),
        "from 1": fabric.broadcast(rank, src=1),
        "first": first_is_there,
        "norm": weight.norm().item(),
        "norm of the whole": full_tensor(weight).norm().item(),
        "is zero": fabric.is_global_zero,
    }


@every_layout
def test_collectives(strategy: str, tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, communicate, strategy, str(tmp_path))):
        assert found.pop("norm") == pytest.approx(found.pop("norm of the whole"), rel=1e-12)
        assert found == {
            "gathered": [[[0], [1]], [0.0, 2.0], [5, 5]],
            "mean": 0.5,
            "mean of integers": 0.5,
            "sum": 3,
            "max": 1,
            "object": {"from": 0},
            "from 1": 1,
            "first": rank == 1,
            "is zero": rank == 0,
        }


# -- files ----------------------------------------------------------------------------------------------------------


class Counter:
    """State of the user's."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def store(name: str, kind: str, folder: str) -> dict[str, Any]:
    """Train a step, save, and load in several ways."""
    fabric = launched(getattr(strategies, name)(state_dict_type=kind))

    def fresh(seed: int) -> tuple[Any, Any]:
        module = Plain()
        torch.manual_seed(seed)
        nn.init.normal_(module.inner.last.weight)
        return fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.1))

    model, optimizer = fresh(1)
    fabric.backward(model(torch.tensor([1.0, 2.0])).sum())
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "counter": Counter(7), "step": 3, "more": {"a": 1, "b": 2}}
    fabric.save(f"{folder}/all", state)
    keep = {"model": lambda name, value: "last" not in name, "more": lambda name, value: name == "a"}
    fabric.save(f"{folder}/some", {"model": model, "more": state["more"], "step": 4}, filter=keep)
    found: dict[str, Any] = {}

    other, other_optimizer = fresh(2)
    target = {"model": other, "optimizer": other_optimizer, "counter": Counter(0), "step": 0}
    found["rest"] = fabric.load(f"{folder}/all", target)
    found["restored"] = same(weights(other.module), weights(model.module))
    found["objects"] = (target["counter"].value, target["step"])
    moments = [full_tensor(s["exp_avg"]) for s in other_optimizer.state.values()]
    expected = [full_tensor(s["exp_avg"]) for s in optimizer.state.values()]
    found["moments"] = all(torch.equal(a, b) for a, b in zip(moments, expected, strict=True))

    third, _ = fresh(3)
    before = weights(third.module)
    found["filtered"] = fabric.load(f"{folder}/some", {"model": third}, strict=False)
    after, saved = weights(third.module), weights(model.module)
    found["only"] = {n for n in after if not torch.equal(after[n], saved[n])}
    found["kept"] = torch.equal(after["inner.last.weight"], before["inner.last.weight"])
    for strict, key in ((True, "strict"), (False, "not strict")):
        try:
            fabric.load(f"{folder}/all", {"model": third, "absent": 5}, strict=strict)
            found[key] = "loaded"
        except KeyError as error:
            found[key] = str(error)
    found["everything"] = sorted(set(fabric.load(f"{folder}/all")) & {"counter", "step", "more"})
    return found


@pytest.mark.parametrize(
    ("kind", "strategy"), crossed(("sharded", "full"), FAMILY, quick=[("sharded", "par_fsdp"), ("full", "par_ddp")])
)
def test_save_and_load_with_filters_and_own_state(strategy: str, kind: str, tmp_path: Path) -> None:
    name = {"par_ddp": "DataParallelStrategy", "par_fsdp": "FSDP2Strategy", "par_hsdp": "HSDPStrategy"}
    for found in run_ranks(2, store, name.get(strategy, "ZeROStrategy"), kind, str(tmp_path)):
        assert found.pop("rest") == {"more": {"a": 1, "b": 2}}
        assert found.pop("filtered") == {"more": {"a": 1}, "step": 4}
        assert "absent" in found.pop("strict")
        assert found == {
            "restored": True,
            "objects": (7, 3),
            "moments": True,
            "only": {"inner.last.weight", "inner.last.bias"},
            "kept": True,
            "not strict": "loaded",
            "everything": ["counter", "more", "step"],
        }


# -- contexts, callbacks, loggers -----------------------------------------------------------------------------------


class Remembers:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_batch(self, **facts: Any) -> None:
        self.calls.append(facts)


def contexts(strategy: str, folder: str) -> dict[str, Any]:
    remembers = Remembers()
    fabric = launched(strategy, callbacks=[remembers], loggers=[CSVLogger(folder, "run", "0")])
    with fabric.sharded_model(), fabric.init_module():
        module = Probe()
    with fabric.init_tensor():
        made = torch.zeros(2)
    model = fabric.setup(module)
    with fabric.autocast():
        loss = model.training_step(torch.tensor([1.0, 2.0]), 0)
    fabric.backward(loss)
    fabric.call("on_batch", loss=float(loss), step=1)
    fabric.call("on_nothing")
    grad = module.first.weight.grad
    assert grad is not None
    fabric.log_dict({"loss": loss.detach(), "norm": grad.norm()}, step=1)
    fabric.log("value", 3.0, step=2)
    fabric.logger.finalize("success")
    return {
        "calls": len(remembers.calls),
        "dtypes": {p.dtype for p in module.parameters()} | {made.dtype, loss.dtype},
        "norm": full_tensor(grad).norm().item(),
    }


@every_layout
def test_contexts_callbacks_and_loggers(strategy: str, tmp_path: Path) -> None:
    found, _ = both = run_ranks(2, contexts, strategy, str(tmp_path))
    assert [(mine["calls"], mine["dtypes"]) for mine in both] == [(1, {torch.float64})] * 2
    header, *rows = (tmp_path / "run" / "0" / "metrics.csv").read_text().splitlines()
    first = dict(zip(header.split(","), rows[0].split(","), strict=True))
    assert float(first["norm"]) == pytest.approx(found["norm"], rel=1e-6)
    assert len(rows) == 2


def run_in_launch(strategy: str) -> list[int]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    return fabric.launch(lambda fabric, value: fabric.all_gather(torch.tensor(value)).tolist(), dist.get_rank() + 5)


@pytest.mark.parametrize("strategy", TWO)
def test_a_function_is_launched(strategy: str) -> None:
    assert run_ranks(2, run_in_launch, strategy) == [[5, 6]] * 2


def misuse(how: str) -> None:
    fabric = launched("par_fsdp")
    if how == "sync":
        with fabric.no_backward_sync(nn.Linear(1, 1), enabled=True):
            pass
    elif how == "plain backward":
        fabric.setup(Plain())(torch.tensor([1.0])).sum().backward()
    elif how == "optimizer alone":
        fabric.load("nowhere", torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    elif how == "optimizer of another module":
        fabric.setup(Plain())
        fabric.setup_optimizers(torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("sync", "You need to set up the model first"),
        ("plain backward", r"requires you to call `fabric.backward\(loss\)`"),
        ("optimizer alone", "an optimizer is restored together with its module"),
        ("optimizer of another module", "SGD holds 2 parameters of shapes .* that are not those of (FSDP)?Plain"),
    ],
)
def test_misuse_is_named(how: str, message: str) -> None:
    with pytest.raises(RanksFailed, match=message):
        run_ranks(2, misuse, how)
