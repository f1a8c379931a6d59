"""Tensor parallelism in a Trainer: examples from its data, what ranks share, what users' code sees."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from probe import long_run
from tensor_models import Nano
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_par.parallel.tensor import DividedLogits
from lightning_par.strategies import TensorParallelStrategy
from lightning_par.strategies.examples import first_samples
from lightning_par.testing import RanksFailed, run_ranks
from models import Tokens
from parity import build_strategy, make_trainer


def tp_trainer(**options: Any) -> pl.Trainer:
    size = dist.get_world_size()
    return make_trainer(size, TensorParallelStrategy(tp_size=size), precision="64-true", **options)


def tokens(samples: int = 8, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(Tokens(samples), batch_size=batch_size, **options)


# Examples


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        raise AssertionError("a stream is read once")


def test_first_samples() -> None:
    loader = tokens(shuffle=True)
    ids, targets = first_samples(loader)
    assert torch.equal(ids, Tokens(8).data[:2, :-1])
    assert ids.shape == targets.shape
    pair = namedtuple("pair", "a b")
    as_pair = DataLoader(Tokens(3), batch_size=2, collate_fn=lambda items: pair(*zip(*items, strict=True)))
    assert type(first_samples(as_pair)) is pair
    assert first_samples(DataLoader(Tokens(3), batch_size=None))[0].ndim == 1
    assert len(first_samples(DataLoader(Tokens(1), batch_size=4))[0]) == 2
    assert first_samples({"a": loader, "b": loader}).keys() == {"a", "b"}
    assert len(first_samples([loader, loader])) == 2
    assert torch.equal(first_samples(CombinedLoader([loader, loader], "sequential"))[0], ids)
    for unknown in (DataLoader(Stream()), iter([1]), []):
        with pytest.raises(TypeError):
            first_samples(unknown)


class Watchful(Nano):
    """Keeps count of everything that a run before the run could change."""

    def __init__(self) -> None:
        super().__init__()
        self.loaders_made, self.losses, self.sums = 0, [], torchmetrics.MeanMetric()

    def train_dataloader(self) -> Any:
        self.loaders_made += 1
        return tokens()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        self.sums.update(loss.detach())
        self.log("mean", self.sums, on_step=False, on_epoch=True)
        if self.logger is not None:
            self.logger.experiment.append(loss.item())
        return loss


class Kept(DummyLogger):
    """A logger whose experiment is a list."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    @property
    def experiment(self) -> list[float]:
        return self.values


def counts() -> tuple[int, int, int, str]:
    logger = Kept()
    module, trainer = Watchful(), tp_trainer(max_epochs=2, logger=logger)
    trainer.fit(module)
    assert logger.values == module.losses
    strategy: Any = trainer.strategy
    return (
        module.loaders_made,
        len(module.losses),
        int(module.sums.update_count),
        strategy.parallelized.tensor_plan.source,
    )


def test_the_example_run_leaves_no_trace() -> None:
    # Two epochs of two batches; Lightning resets a metric that is logged after each epoch.
    assert run_ranks(2, counts) == [(1, 4, 0, "training_step on the first 2 samples")] * 2


class Streamed(Nano):
    def train_dataloader(self) -> Any:
        return DataLoader(Samples(), batch_size=2)


class Samples(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([Tokens(4)[i] for i in range(4)])


def seen_with(module: str) -> str:
    trainer = tp_trainer(max_epochs=1)
    trainer.fit({"Streamed": Streamed}[module]())
    return trainer.strategy.parallelized.tensor_plan.source


def test_a_stream_is_not_touched() -> None:
    assert run_ranks(2, seen_with, "Streamed") == ["a made-up input of each block"] * 2


# What the ranks share


class Shuffled(Nano):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch[0].clone())
        self.seen.append(torch.rand(2))
        return super().training_step(batch, batch_idx)


def unseeded() -> list[Tensor]:
    torch.manual_seed(100 + dist.get_rank())
    module = Shuffled()
    tp_trainer(max_epochs=2).fit(module, tokens(shuffle=True))
    return module.seen


def test_ranks_that_see_the_same_samples_draw_alike_without_a_seed() -> None:
    first, second = run_ranks(2, unseeded)
    assert len(first) == 8
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[4])


def different_data() -> None:
    data = Tokens(8)
    data.data = data.data.roll(dist.get_rank(), 0)
    tp_trainer(max_epochs=1).fit(Nano(), DataLoader(data, batch_size=4))


def test_different_data_in_a_model_group_is_refused() -> None:
    with pytest.raises(RanksFailed, match="ranks 0, 1 compute one step together and have different first train"):
        run_ranks(2, different_data)


def replicated_after_five_steps(layout: dict[str, Any]) -> dict[str, bytes]:
    torch.manual_seed(3)
    module = Nano(dropout=0.1)
    size = dist.get_world_size()
    strategy = build_strategy(("MeshStrategy", {"tp_size": 2, **layout}), "trainer")
    trainer = make_trainer(size, strategy, max_steps=5, precision="32-true", gradient_clip_val=0.05)
    trainer.fit(module, tokens(40, 2 * 2 // size, shuffle=True))
    found = {}
    for name, param in module.named_parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        mesh = param.device_mesh.mesh_dim_names if isinstance(param, DTensor) else ()
        if "tp" not in mesh or param.placements[-1].is_replicate():
            found[name] = local.detach().numpy().tobytes()
    return found


@pytest.mark.parametrize("layout", [long_run({}), long_run({"dp_shard_size": 1}), {"sequence_parallel": True}])
def test_replicated_parameters_stay_bitwise_equal(layout: dict[str, Any]) -> None:
    first, second = run_ranks(2, replicated_after_five_steps, layout)
    assert {"model.norm.weight", "model.positions.weight", "model.blocks.0.attention_norm.bias"} <= first.keys()
    assert first == second


# What users' code sees


class Looking(Nano):
    """Reads logits in evaluation, and returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch[0])
        accuracy = (logits.argmax(-1) == batch[1]).double().mean()
        self.log("accuracy", accuracy)
        self.log("val_loss", nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()))
        return {"logits": logits}

    def on_validation_batch_end(self, outputs: Any, *args: Any) -> None:
        self.kinds.append(type(outputs["logits"]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0])


def evaluated(parallel: bool) -> Any:
    torch.manual_seed(3)
    module = Looking()
    trainer = tp_trainer() if parallel else make_trainer(1, "auto", precision="64-true")
    metrics = trainer.validate(module, tokens(), verbose=False)[0]
    predictions = torch.cat(trainer.predict(module, tokens()))
    assert not isinstance(predictions, DividedLogits)
    return metrics, predictions.clone(), module.kinds


def test_evaluation_gives_the_numbers_and_tensors_of_one_process() -> None:
    [(metrics, predictions, _)] = run_ranks(1, evaluated, False)
    for its_metrics, its_predictions, kinds in run_ranks(2, evaluated, True):
        assert its_metrics == pytest.approx(metrics, rel=1e-9)
        torch.testing.assert_close(its_predictions, predictions, rtol=0, atol=1e-9)
        assert set(kinds) == {Tensor}


def report_of_ranks() -> list[str]:
    lines: list[str] = []
    import logging

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(Keep())
    logger.setLevel(logging.INFO)
    tp_trainer(max_steps=1).fit(Nano(), tokens())
    logger.handlers.pop()
    return [line for line in lines if "tensor parallel over" in line]


def test_the_plan_is_reported_once() -> None:
    first, second = run_ranks(2, report_of_ranks)
    assert len(first) == 1
    assert "fused column [32, 32, 32]: qkv" in first[0]
    assert not second
