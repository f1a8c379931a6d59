"""What a strategy gets wrong without a word unless it acts: one test for each such trap of Lightning."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import pl_worker_init_function
from probe import crossed
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics import SumMetric

from lightning_par import ParallelLayout, strategies
from lightning_par.parallel.gradients import grad_norm
from lightning_par.parallel.shards import full_tensor
from lightning_par.strategies import fabric as fabric_strategies
from lightning_par.testing import RanksFailed, run_ranks
from parity import make_trainer

FSDP, DDP = "par_fsdp", "par_ddp"


class Numbers(Dataset[Tensor]):
    """Sample `i` is the number `i`."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index))


class Probe(pl.LightningModule):
    """A stack of equal blocks and a 0-dim parameter; remembers the samples of each stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.seen: list[int] = []
        self.inference: list[bool] = []

    def forward(self, numbers: Tensor) -> Tensor:
        self.seen += numbers.int().tolist()
        self.inference.append(torch.is_inference_mode_enabled())
        h = numbers[:, None].expand(-1, 4)
        for block in self.blocks:
            h = block(h)
        return h.sum(1) * self.scale

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> list[int]:
        self(batch)
        return batch.int().tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def numbers(samples: int, batch_size: int = 1, **options: Any) -> DataLoader[Tensor]:
    return DataLoader(Numbers(samples), batch_size=batch_size, **options)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(p).detach().clone() for name, p in module.named_parameters()}


def fit(module: pl.LightningModule, strategy: Any = FSDP, data: Any = None, **options: Any) -> pl.Trainer:
    trainer = make_trainer(dist.get_world_size(), strategy, **({"max_epochs": 1} | options))
    trainer.fit(module, numbers(4) if data is None else data)
    return trainer


# -- 1, 2, 3: samplers ----------------------------------------------------------------------------------------------


def seen_by_one_rank(nodes: int) -> tuple[list[int], dict[str, float]]:
    rank, ranks_per_node = dist.get_rank(), dist.get_world_size() // nodes
    os.environ.update(LOCAL_RANK=str(rank % ranks_per_node), GROUP_RANK=str(rank // ranks_per_node))
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks_per_node), GROUP_WORLD_SIZE=str(nodes))
    module = Probe()
    module.on_train_batch_end = lambda *_: module.log("rank", float(rank), sync_dist=True)  # type: ignore[method-assign]
    trainer = make_trainer(ranks_per_node, FSDP, num_nodes=nodes, use_distributed_sampler=True, max_epochs=1)
    trainer.fit(module, numbers(12))
    return module.seen, {k: float(v) for k, v in trainer.callback_metrics.items()}


def test_1_samples_are_spread_and_logged_values_reduced() -> None:
    (first, metrics), (second, others) = run_ranks(2, seen_by_one_rank, 1)
    assert sorted(first + second) == list(range(12))
    assert metrics == others == {"rank": 0.5}


def test_2_samples_are_spread_over_nodes() -> None:
    results = run_ranks(4, seen_by_one_rank, 2)
    assert sorted(sample for samples, _ in results for sample in samples) == list(range(12))


def on_a_mesh_with_tensor_parallelism() -> dict[str, Any]:
    """The mesh of an axis that has no implementation yet: what the shells make of it is right already."""
    strategy = strategies.MeshStrategy()
    strategy.parallel_devices = [torch.device("cpu")] * 4
    strategy._mesh = ParallelLayout(dp_shard_size=2, tp_size=2).build_mesh("cpu")
    rank = dist.get_rank()
    module = Probe()
    module.metric = SumMetric()
    strategy._lightning_module = module
    strategy._connect_metrics()
    module.metric.update(float(strategy.mesh.data_rank))
    return {
        "sampler": strategy.distributed_sampler_kwargs,
        "sum": float(strategy.reduce(torch.tensor(1.0), reduce_op="sum")),
        "mean": float(strategy.reduce(torch.tensor(strategy.mesh.data_rank), reduce_op="mean")),
        "gathered": strategy.all_gather(torch.tensor(rank)).tolist(),
        "all": strategy.reduce_boolean_decision(True),
        "not all": strategy.reduce_boolean_decision(rank != 3),
        "any": strategy.reduce_boolean_decision(rank == 3, all=False),
        "metric": float(module.metric.compute()),
    }


def test_2_and_9_ranks_of_a_model_group_count_once() -> None:
    for rank, found in enumerate(run_ranks(4, on_a_mesh_with_tensor_parallelism)):
        assert found == {
            "sampler": {"num_replicas": 2, "rank": rank // 2},
            "sum": 2.0,
            "mean": 0.5,
            "gathered": [rank % 2, rank % 2 + 2],
            "all": True,
            "not all": False,
            "any": True,
            "metric": 1.0,
        }


def order_of_samples() -> list[int]:
    module = Probe()
    fit(module, data=numbers(12), use_distributed_sampler=True)
    return module.seen


def test_3_one_data_rank_keeps_the_order_of_the_loader() -> None:
    assert run_ranks(1, order_of_samples) == [list(range(12))]


# -- 4: workers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [strategies, fabric_strategies], ids=["trainer", "fabric"])
def test_4_workers_are_seeded_by_data_rank(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    strategy = host.MeshStrategy()
    strategy._mesh = SimpleNamespace(data_rank=3, data_size=4)
    # The Trainer asks the strategy first; Fabric has put its own function there already.
    before = None if host is strategies else partial(pl_worker_init_function, rank=7)
    loader = strategy.process_dataloader(numbers(4, num_workers=1, worker_init_fn=before))
    assert loader.worker_init_fn.func is pl_worker_init_function
    assert loader.worker_init_fn.keywords == {"rank": 3}
    own: Callable[[int], None] = print
    assert strategy.process_dataloader(numbers(4, worker_init_fn=own)).worker_init_fn is own


# -- 5: inference mode ----------------------------------------------------------------------------------------------


def evaluate_as_on_nccl() -> list[bool]:
    module = Probe()
    trainer = make_trainer(2, FSDP, max_epochs=1)
    # Lightning leaves inference mode out on gloo, which would hide the trap here.
    with mock.patch("lightning.pytorch.loops.utilities.dist.get_backend", return_value="nccl"):
        trainer.validate(module, numbers(2), verbose=False)
        trainer.predict(module, numbers(2))
    trainer.fit(module, numbers(2))
    return module.inference


def test_5_evaluation_does_not_gather_into_inference_tensors() -> None:
    assert run_ranks(2, evaluate_as_on_nccl) == [[False] * 6] * 2


# -- 6: clipping ----------------------------------------------------------------------------------------------------


class ClippedNorms(pl.Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []
        self.largest: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        parameters = list(pl_module.parameters())
        self.norms.append(float(grad_norm(parameters)))
        self.largest.append(max(float(full_tensor(p.grad).abs().max()) for p in parameters))


def clipped(algorithm: str) -> tuple[list[float], list[float]]:
    recorder = ClippedNorms()
    fit(Probe(), gradient_clip_val=0.01, gradient_clip_algorithm=algorithm, callbacks=[recorder])
    return recorder.norms, recorder.largest


def test_6_clipping_spans_shards_and_plain_parameters() -> None:
    for norms, _ in run_ranks(2, clipped, "norm"):
        assert norms == pytest.approx([0.01] * 4, rel=1e-4)
    for _, largest in run_ranks(2, clipped, "value"):
        assert largest == pytest.approx([0.01] * 4)


def clip_over_meshes(precision: str) -> list[float]:
    """Lightning asks the precision plugin to clip; torch's own function refuses gradients of several kinds."""
    plugin = make_trainer(2, FSDP, precision=precision).strategy.precision_plugin
    meshes = [dist.init_device_mesh("cpu", shape, mesh_dim_names=names) for shape, names in MESHES]
    parameters = [nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)] * mesh.ndim)) for mesh in meshes]
    parameters.append(nn.Parameter(torch.ones(8)))
    for p in parameters:
        p.grad = torch.full_like(p, 3.0)
    plugin.clip_gradients(torch.optim.SGD(parameters), 6.0)
    return [float(full_tensor(p.grad)[0]) for p in parameters]


MESHES = [((2,), ("one",)), ((2, 1), ("two", "three"))]


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "bf16-mixed"])
def test_6_clipping_spans_meshes(precision: str) -> None:
    """16 gradients of 3 have the norm 12."""
    for gradients in run_ranks(2, clip_over_meshes, precision):
        assert gradients == pytest.approx([1.5] * 3, rel=1e-5)


# -- 7: accumulation ------------------------------------------------------------------------------------------------


def count_reductions(sync: bool) -> int:
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    with mock.patch.object(dist, name, wraps=getattr(dist, name)) as reduction:
        fit(Probe(), strategies.FSDP2Strategy(sync_every_batch=sync), numbers(6), accumulate_grad_batches=3)
    return reduction.call_count


def test_7_accumulation_reduces_once_a_window() -> None:
    every, once = (run_ranks(2, count_reductions, sync)[0] for sync in (True, False))
    assert every == 3 * once > 0


# -- 8: logged means ------------------------------------------------------------------------------------------------


class Logging(Probe):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rank = float(dist.get_rank())
        log = partial(self.log, on_step=False, on_epoch=True, sync_dist=True)
        log("mean", rank, batch_size=1 + dist.get_rank())
        for name in ("min", "max", "sum"):
            log(name, rank + 1, reduce_fx=name)
        return super().training_step(batch, batch_idx)


def logged() -> dict[str, float]:
    return {name: float(v) for name, v in fit(Logging(), data=numbers(1)).callback_metrics.items()}


def test_8_logged_values_are_weighted_by_batch_size() -> None:
    for found in run_ranks(2, logged):
        assert found == pytest.approx({"mean": 2 / 3, "min": 1.0, "max": 2.0, "sum": 3.0})


# -- 11: ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [strategies, fabric_strategies], ids=["trainer", "fabric"])
def test_11_the_cluster_environment_learns_its_rank(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("NODE_RANK", "2")
    monkeypatch.setattr("lightning.pytorch.utilities.rank_zero.rank_zero_only.rank", 0)
    strategy = host.MeshStrategy()
    strategy.parallel_devices = [torch.device("cpu")] * 4
    strategy.cluster_environment = LightningEnvironment()
    if host is strategies:
        strategy.num_nodes = 3
        strategy.set_world_ranks()
    else:
        strategy._num_nodes = 3
        strategy._set_world_ranks()
    assert (strategy.global_rank, strategy.world_size, strategy.is_global_zero) == (9, 12, False)
    assert pl.utilities.rank_zero.rank_zero_only.rank == 9


# -- 12: optimizers from before sharding ----------------------------------------------------------------------------


class WithOptimizer(Probe):
    """Hands out an optimizer that was built with the module, as `LightningCLI` does."""

    def __init__(self, strange: bool) -> None:
        super().__init__()
        self._optimizer = super().configure_optimizers()
        if strange:
            self._optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer


def trained(early: bool, strategy: str) -> dict[str, Tensor]:
    module = WithOptimizer(strange=False) if early else Probe()
    fit(module, strategy)
    return weights(module)


def trained_with_fabric(early: bool, strategy: str) -> dict[str, Tensor]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    module = Probe()
    if early:
        model, optimizer = fabric.setup(module, module.configure_optimizers())
    else:
        model = fabric.setup_module(module)
        optimizer = fabric.setup_optimizers(module.configure_optimizers())
    for batch in numbers(4):
        fabric.backward(model.training_step(batch, 0))
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


@pytest.mark.parametrize(
    ("train", "strategy"),
    crossed((trained, trained_with_fabric), (FSDP, DDP), quick=[(trained, FSDP), (trained_with_fabric, DDP)]),
)
def test_12_an_optimizer_from_before_sharding_trains(train: Callable[..., Any], strategy: str) -> None:
    early, late = run_ranks(2, train, True, strategy)[0], run_ranks(2, train, False, strategy)[0]
    initial = dict(Probe().named_parameters())
    assert not any(torch.equal(early[name], initial[name]) for name in initial)
    assert all(torch.equal(early[name], late[name]) for name in initial)


def train_a_strange_parameter() -> None:
    fit(WithOptimizer(strange=True))


def test_12_a_strange_parameter_is_refused() -> None:
    with pytest.raises(RanksFailed, match=r"SGD holds 2 parameters of shapes .* that are not those of"):
        run_ranks(2, train_a_strange_parameter)


# -- 13: compiled modules -------------------------------------------------------------------------------------------


def test_13_a_module_compiled_as_a_whole_is_refused() -> None:
    trainer = make_trainer(1, FSDP)
    with pytest.raises(RuntimeError, match=r"Using a compiled model is incompatible with .*`FSDP2Strategy`"):
        trainer.fit(torch.compile(Probe(), backend="eager"), numbers(2))


def compiled_blocks() -> bool:
    module = Probe()
    fit(module, strategies.FSDP2Strategy(compile="eager"))
    return all(block._compiled_call_impl is not None for block in module.blocks)


def test_13_blocks_are_compiled() -> None:
    assert run_ranks(2, compiled_blocks) == [True, True]


# -- 14: launchers --------------------------------------------------------------------------------------------------


def test_14_several_devices_in_a_notebook_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    monkeypatch.setattr("lightning.fabric.connector._IS_INTERACTIVE", True)
    with pytest.raises(MisconfigurationException, match=r"'par_fsdp'\)` is not compatible with an interactive"):
        make_trainer(2, FSDP)
    with pytest.raises(RuntimeError, match=r"'par_fsdp'.*is not compatible with an interactive environment"):
        Fabric(accelerator="cpu", devices=2, strategy=FSDP)
    assert make_trainer(1, FSDP).strategy.launcher is None


@pytest.mark.parametrize("name", ["par_fsdp_spawn", "par_ddp_fork"])
def test_14_there_are_no_strategies_that_spawn(name: str) -> None:
    with pytest.raises(ValueError, match=f"invalid strategy name.*{name}"):
        make_trainer(2, name)


# -- 15: predictions ------------------------------------------------------------------------------------------------


def predict(strategy: str, samples: list[int]) -> list[list[int]]:
    """Predictions of this rank, for each loader."""
    trainer = make_trainer(2, strategy, use_distributed_sampler=True)
    loaders = [numbers(n) for n in samples]
    predictions = trainer.predict(Probe(), loaders)
    assert predictions is not None
    per_loader = predictions if len(loaders) > 1 else [predictions]
    return [[sample for batch in batches for sample in batch] for batches in per_loader]


@pytest.mark.parametrize(
    ("samples", "strategy"),
    crossed(
        ([5], [4], [5, 3], [2, 7, 3]), (FSDP, DDP), quick=[([4], DDP), ([5, 3], DDP), ([5], FSDP), ([2, 7, 3], FSDP)]
    ),
    ids=str,
)
def test_15_predictions_are_complete_and_come_once(strategy: str, samples: list[int]) -> None:
    ranks = run_ranks(2, predict, strategy, samples, timeout=20)
    for i, count in enumerate(samples):
        assert sorted(ranks[0][i] + ranks[1][i]) == list(range(count))


# -- 16: Fabric's accumulation --------------------------------------------------------------------------------------


def gradients_in_every_nesting(name: str, options: dict[str, Any], every_batch: bool) -> None:
    """`every_batch`: shards are reduced within the contexts too; the 0-dim parameter never is."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=getattr(fabric_strategies, name)(**options))
    fabric.launch()
    module, alone = Probe(), Probe()
    model = fabric.setup(module)
    rank, no_sync = dist.get_rank(), fabric.no_backward_sync

    def backward(step: int) -> None:
        fabric.backward(model.training_step(torch.tensor([float(2 * step + rank)]), 0))
        for r in range(2):
            (alone.training_step(torch.tensor([float(2 * step + r)]), 0) / 2).backward()

    def reduced(part: str = "") -> bool:
        pairs = zip(getattr(module, part, module).parameters(), getattr(alone, part, alone).parameters(), strict=True)
        return all(torch.allclose(full_tensor(p.grad), q.grad, atol=1e-6) for p, q in pairs)

    with no_sync(model, enabled=False):
        backward(1)
    assert reduced()
    backward(2)
    assert reduced(), "no_backward_sync(enabled=False) has left its mark"
    with no_sync(model):
        with no_sync(model, enabled=False):
            pass
        with no_sync(model):
            pass
        backward(3)
        assert reduced("blocks") == every_batch
    with pytest.raises(KeyError), no_sync(model):
        raise KeyError
    backward(4)
    assert reduced()
    with no_sync(model), no_sync(model, enabled=False):
        backward(5)
        assert reduced()


@pytest.mark.parametrize(
    ("name", "options", "every_batch"),
    [
        ("DataParallelStrategy", {}, False),
        ("FSDP2Strategy", {}, True),
        ("FSDP2Strategy", {"sync_every_batch": False}, False),
        ("ZeROStrategy", {"stage": 1}, False),
    ],
    ids=str,
)
def test_16_no_backward_sync_nests(name: str, options: dict[str, Any], every_batch: bool) -> None:
    run_ranks(2, gradients_in_every_nesting, name, options, every_batch)
