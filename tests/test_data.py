"""Data on several ranks: batches of any kind, samplers, iterable datasets, and loaders that end at different times."""

from __future__ import annotations

import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from probe import (
    FAMILY,
    TWO,
    Numbers,
    Probe,
    SizedStream,
    Stream,
    crossed,
    long_run,
    numbers,
    own,
    same,
    some,
    strategies,
    trainer,
    weights,
)
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, WeightedRandomSampler

from lightning_par.testing import RanksFailed, run_ranks

Pair = namedtuple("Pair", "x y")


@contextmanager
def warned() -> Iterator[Callable[[str], int]]:
    """Yield a function that counts the warnings with a text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda text: sum(text in str(w.message) for w in caught)


# -- batches --------------------------------------------------------------------------------------------------------


@dataclass
class Record:
    x: Tensor
    y: Tensor


class Opaque:
    """No container that torch or Lightning knows; says itself how to move."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.inner = {"x": x, "y": y}
        self.moved = False

    def to(self, device: torch.device) -> Opaque:
        self.moved = True
        return self


KINDS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "dict": (lambda x, y: {"x": x, "y": y, "name": "a string"}, lambda b: (b["x"], b["y"])),
    "tuple": (lambda x, y: (x, y, 3), lambda b: b[:2]),
    "namedtuple": (Pair, lambda b: (b.x, b.y)),
    "dataclass": (Record, lambda b: (b.x, b.y)),
    "nested": (lambda x, y: {"in": [x, (None,)], "out": Pair(x, {"y": y})}, lambda b: (b["in"][0], b["out"].y["y"])),
    "own class": (Opaque, lambda b: (b.inner["x"], b.inner["y"]) if b.moved else None),  # type: ignore[arg-type, return-value]
    "list of samples": (
        lambda x, y: list(zip(x, y, strict=True)),
        lambda b: tuple(map(torch.stack, zip(*b, strict=True))),
    ),  # type: ignore[arg-type, return-value]
}


class Reads(Probe):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.read = KINDS[kind][1]

    def loss(self, batch: Any, stage: str) -> Tensor:
        x, y = self.read(batch)
        return (self(x) - y.to(self.dtype)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch, "val"), sync_dist=True, batch_size=2)

    def predict_step(self, batch: Any, batch_idx: int) -> float:  # type: ignore[override]
        return float(self.loss(batch, "predict"))


def trained_on(kinds: list[str], strategy: str) -> dict[str, dict[str, Tensor]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for kind in kinds:
        data = [KINDS[kind][0](torch.tensor([i, i + 3]), torch.tensor([1, i])) for i in range(4)]
        module = Reads(kind)
        own_part = data[rank::ranks]
        run = trainer(strategy, accumulate_grad_batches=2 // ranks)
        run.fit(module, DataLoader(own_part, batch_size=None), DataLoader(own_part, batch_size=None))  # type: ignore[arg-type]
        found[kind] = weights(module) | {"val_loss": run.callback_metrics["val_loss"]}
        assert len(run.predict(module, DataLoader(own_part, batch_size=None)) or []) == 4 // ranks  # type: ignore[arg-type]
    return found


@strategies("par_ddp")
def test_batches_of_any_kind(strategy: str) -> None:
    [alone] = run_ranks(1, trained_on, list(KINDS), "auto")
    for found in run_ranks(2, trained_on, list(KINDS), strategy):
        assert [kind for kind in KINDS if not same(found[kind], alone[kind])] == []


# -- samplers -------------------------------------------------------------------------------------------------------


class Halves(torch.utils.data.BatchSampler):
    """A batch sampler of the user's: pairs a sample with the one that is half the dataset away."""

    def __init__(self, sampler: Any, batch_size: int = 2, drop_last: bool = False) -> None:
        super().__init__(sampler, batch_size, drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        half = len(indices) // 2
        yield from ([indices[i], indices[i + half]] for i in range(half))


def seen_with(strategy: str) -> dict[str, list[int]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loaders: dict[str, tuple[bool, Any]] = {
        "none": (True, numbers(12)),
        "shuffle": (True, numbers(12, shuffle=True)),
        "own": (True, DataLoader(Numbers(12), sampler=list(range(11, -1, -1)))),  # type: ignore[arg-type]
        "weighted": (True, DataLoader(Numbers(12), sampler=WeightedRandomSampler([0.0] * 6 + [1.0] * 6, 12))),
        "batches": (True, DataLoader(Numbers(12), batch_sampler=Halves(range(12)))),
        "distributed": (True, DataLoader(Numbers(12), sampler=DistributedSampler(Numbers(12), ranks, rank))),
        "off": (False, own([1, 3, 5], [0, 2, 4])),
    }
    found = {}
    for name, (use, loader) in loaders.items():
        module = Probe()
        trainer(strategy, use_distributed_sampler=use, max_epochs=2).fit(module, loader)
        found[name] = module.seen["train"]
    return found


@pytest.mark.parametrize("strategy", some(TWO, "par_ddp"))
def test_samplers_are_spread_and_keep_what_they_say(strategy: str) -> None:
    first, second = run_ranks(2, seen_with, strategy)
    for name in ("none", "shuffle", "own", "distributed"):
        for epoch in (slice(6), slice(6, 12)):
            assert sorted(first[name][epoch] + second[name][epoch]) == list(range(12)), name
        if name in ("none", "shuffle"):
            assert first[name][:6] != first[name][6:], "each epoch has another order"
    assert min(first["weighted"] + second["weighted"]) >= 6
    batches = [first["batches"][i : i + 2] for i in range(0, 12, 2)]
    assert len(batches) == 6
    assert (first["off"], second["off"]) == ([1, 3, 5] * 2, [0, 2, 4] * 2)


class Random(Dataset[Tensor]):
    """Samples that the worker draws itself."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(10**6, ())


def drawn(strategy: str) -> list[int]:
    pl.seed_everything(5, workers=True)
    module = Probe()
    trainer(strategy, use_distributed_sampler=True).fit(module, DataLoader(Random(), num_workers=1))
    return module.seen["train"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", TWO)
def test_workers_draw_other_numbers_on_each_data_rank(strategy: str) -> None:
    first, second = run_ranks(2, drawn, strategy)
    assert len({*first, *second}) == 4
    assert [first, second] == run_ranks(2, drawn, strategy)


# -- loaders that end at different times: training ------------------------------------------------------------------


def fit_unevenly(strategy: str, kind: str, lengths: list[int], **options: Any) -> tuple[list[int], int, int, bool]:
    loaders: dict[str, Callable[[], Any]] = {
        "own sampler": lambda: own(*[list(range(100 * i, 100 * i + n)) for i, n in enumerate(lengths)]),
        "stream": lambda: DataLoader(Stream(*lengths), batch_size=1),
        "sized stream": lambda: DataLoader(SizedStream(*lengths), batch_size=1),
        "generator": lambda: (x[None] for x in Stream(*lengths)),
    }
    module = Probe()
    run = trainer(strategy, **({"max_epochs": 2, "accumulate_grad_batches": 2} | options))
    with warned() as count:
        loader = loaders[kind]()
        run.fit(module, loader)
    words = count("Every epoch ends on all of them") + count("The epoch ends on all ranks")
    return module.seen["train"], run.global_step, words, type(loader).__iter__ is DataLoader.__iter__


@pytest.mark.parametrize(
    ("kind", "strategy"),
    crossed(
        ("own sampler", "stream", "sized stream"),
        TWO,
        quick=[("own sampler", "par_ddp"), ("stream", "par_fsdp"), ("sized stream", "par_ddp")],
    ),
)
def test_training_ends_an_epoch_with_the_shortest_rank_and_says_so(strategy: str, kind: str) -> None:
    first, second = run_ranks(2, fit_unevenly, strategy, kind, [4, 3], timeout=20)
    assert first[0] == [0, 1, 2] * 2
    assert second[0] == [100, 101, 102] * 2
    # A window of two and a short last one in each epoch, on both ranks.
    assert first[1] == second[1] == 4
    assert first[2] >= 1
    assert first[3], "the user's own loader is as it was"


def test_a_generator_ends_with_the_shortest_rank() -> None:
    first, second = run_ranks(2, fit_unevenly, "par_fsdp", "generator", [4, 2], max_epochs=1, timeout=20)
    assert (first[0], second[0]) == ([0, 1], [100, 101])


@pytest.mark.parametrize("kind", [long_run("own sampler"), "stream"])
def test_equal_loaders_and_limits_need_no_word(kind: str) -> None:
    for _, steps, words, _ in run_ranks(2, fit_unevenly, "par_fsdp", kind, [4, 4], timeout=20):
        assert (steps, words) == (4, 0)
    for seen, *_ in run_ranks(2, fit_unevenly, "par_fsdp", "stream", [4, 3], limit_train_batches=2, timeout=20):
        assert len(seen) == 4


@pytest.mark.parametrize("kind", ["own sampler", "stream"])
def test_a_rank_without_a_batch_is_an_error_on_all_ranks(kind: str) -> None:
    with pytest.raises(RanksFailed, match=r"failed on ranks [01], [01] of 2") as caught:
        run_ranks(2, fit_unevenly, "par_fsdp", kind, [3, 0], timeout=20)
    text = r"have \[3, 0\] batches" if kind == "own sampler" else r"data ranks \[1\] of 2 have no batch after 0"
    assert caught.match(rf"(?s)train_dataloader: .*{text}.*{text}")


# -- loaders that end at different times: evaluation ----------------------------------------------------------------


def evaluated(strategy: str, samples: list[int], batch_size: int, **options: Any) -> tuple[dict[str, Any], Any, int]:
    module = Probe()
    with warned() as count:
        run = trainer(strategy, use_distributed_sampler=True)
        run.test(module, [numbers(n, batch_size, **options) for n in samples], verbose=False)
    return dict(module.seen), {k: float(v) for k, v in run.callback_metrics.items()}, count("used twice")


@pytest.mark.parametrize("strategy", some(TWO, "par_ddp"))
@pytest.mark.parametrize(("samples", "batch_size"), [([5], 2), ([7], 3), ([9], 4), ([3, 6], 2)], ids=str)
def test_every_sample_is_evaluated_once(strategy: str, samples: list[int], batch_size: int) -> None:
    (first, metrics, words), (second, others, _) = run_ranks(2, evaluated, strategy, samples, batch_size)
    [(alone, expected, _)] = run_ranks(1, evaluated, "auto", samples, batch_size)
    assert sorted(first["test"] + second["test"]) == sorted(alone["test"])
    assert metrics == others == pytest.approx(expected, rel=1e-12)
    assert words == 0


def test_samples_that_must_be_repeated_are_announced() -> None:
    (first, _, words), (second, _, _) = run_ranks(2, evaluated, "par_fsdp", [5], 1)
    assert sorted(first["test"] + second["test"]) == [0, 0, 1, 2, 3, 4]
    assert words == 1
    assert run_ranks(2, evaluated, "par_fsdp", [5], 2, drop_last=True)[0][2] == 0


def evaluate_own(strategy: str, counts: list[list[int]], how: str, stream: bool = False, **options: Any) -> Any:
    """Evaluate loaders in which rank `r` has `counts[i][r]` batches of its own samples; what is seen, and the mean."""
    loaders: list[Any] = [
        DataLoader(Stream(*c)) if stream else own(*[list(range(10 * r, 10 * r + n)) for r, n in enumerate(c)])
        for c in counts
    ]
    module = Probe()
    run = trainer(strategy, limit_train_batches=2, **options)
    if how == "fit":
        run.fit(module, numbers(2), loaders)
        return sorted(module.seen["val"]), {k: float(v) for k, v in run.callback_metrics.items()}
    if how == "predict":
        predictions: Any = run.predict(module, loaders)
        return sorted(module.seen["predict"]), sum(predictions if len(loaders) == 1 else sum(predictions, []), [])
    getattr(run, how)(module, loaders, verbose=False)
    return sorted(module.seen["val" if how == "validate" else how]), None


@pytest.mark.parametrize(
    ("counts", "strategy"),
    crossed(
        ([[3, 2]], [[1, 4], [3, 3], [3, 1]]),
        FAMILY,
        quick=[([[3, 2]], "par_fsdp"), ([[1, 4], [3, 3], [3, 1]], "par_ddp")],
    ),
    ids=str,
)
def test_a_rank_with_more_batches_evaluates_them_all(strategy: str, counts: list[list[int]]) -> None:
    for how in ("fit", "validate", "test", "predict"):
        for rank, (seen, rest) in enumerate(run_ranks(2, evaluate_own, strategy, counts, how, timeout=20)):
            expected = sorted(10 * rank + i for c in counts for i in range(c[rank]))
            assert seen == expected, how
            if how == "predict":
                assert sorted(rest) == expected


@pytest.mark.slow
def test_three_ranks_with_different_numbers_of_batches() -> None:
    counts = [[3, 1, 2], [1, 2, 2]]
    for how in ("fit", "test", "predict"):
        for rank, (seen, _) in enumerate(run_ranks(3, evaluate_own, "par_fsdp", counts, how)):
            assert seen == sorted([10 * rank + i for c in counts for i in range(c[rank])])


class Short(Probe):
    """Its steps name only the arguments that they use."""

    def training_step(self, batch: Tensor) -> Tensor:  # type: ignore[override]
        return self.loss(batch, "train")

    def validation_step(self, batch: Tensor) -> None:  # type: ignore[override]
        self.loss(batch, "val")

    def predict_step(self, batch: Tensor) -> list[int]:  # type: ignore[override]
        return batch.tolist()


class Decorated(Short):
    @torch.enable_grad()
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # type: ignore[override]
        assert batch_idx == len(self.seen["train"])
        return self.loss(batch, "train")


def run_short_steps(strategy: str) -> list[Any]:
    found: list[Any] = []
    for module in (Short(), Decorated()):
        run = trainer(strategy)
        run.fit(module, numbers(2), numbers(2))
        found += [module.seen["train"], module.seen["val"], run.predict(module, numbers(2))]
    return found


@pytest.mark.parametrize("strategy", some(TWO, "par_ddp"))
def test_steps_get_the_arguments_that_they_name(strategy: str) -> None:
    assert run_ranks(2, run_short_steps, strategy) == [[[0, 1], [0, 1], [[0], [1]]] * 2] * 2


class Fetches(Probe):
    """Takes its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch, "train")


def fetch(strategy: str) -> list[int]:
    module = Fetches()
    trainer(strategy).fit(module, DataLoader(Stream(4, 3)))
    return module.seen["train"]


def test_a_step_that_takes_its_batches_itself() -> None:
    assert run_ranks(2, fetch, "par_fsdp", timeout=20) == [[0, 1, 2], [100, 101, 102]]


def test_validation_in_a_fit_has_the_mean_over_all_samples() -> None:
    (_, metrics), (_, others) = run_ranks(2, evaluate_own, "par_fsdp", [[3, 2]], "fit")
    _, replicated = run_ranks(2, evaluate_own, "par_ddp", [[3, 2]], "fit")[0]
    assert metrics == others == pytest.approx(replicated, rel=1e-12)


def test_streams_of_different_length_are_evaluated_under_ddp_and_refused_under_fsdp() -> None:
    assert [len(seen) for seen, _ in run_ranks(2, evaluate_own, "par_ddp", [[3, 2]], "validate", True)] == [3, 2]
    assert [len(seen) for seen, _ in run_ranks(2, evaluate_own, "par_fsdp", [[2, 2]], "test", True)] == [2, 2]
    with pytest.raises(RanksFailed, match=r"failed on ranks [01], [01] of 2") as caught:
        run_ranks(2, evaluate_own, "par_fsdp", [[3, 2]], "validate", True, timeout=20)
    assert caught.match(r"(?s)val_dataloader: data ranks \[1\] of 2 have no batch after 2.*limit_val_batches=2")
    limited = run_ranks(2, evaluate_own, "par_fsdp", [[3, 2]], "validate", True, limit_val_batches=2)
    assert [len(seen) for seen, _ in limited] == [2, 2]


def test_ranks_with_nothing_to_evaluate_are_refused() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)failed on ranks [01], [01] of 2.*have \[2, 0\] batches"):
        run_ranks(2, evaluate_own, "par_fsdp", [[2, 0]], "predict", timeout=20)


class Communicating(Probe):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch, "val"), on_step=True, sync_dist=True)


def evaluate_and_communicate(lengths: list[int]) -> None:
    loader = own(*[list(range(n)) for n in lengths])
    trainer("par_fsdp").validate(Communicating(), loader, verbose=False)


def test_communication_in_a_batch_that_others_lack_is_an_error() -> None:
    run_ranks(2, evaluate_and_communicate, [3, 3])
    with pytest.raises(RanksFailed, match="an evaluation step communicates in a batch that other data ranks do not"):
        run_ranks(2, evaluate_and_communicate, [3, 2], timeout=4)


# -- the same data everywhere ---------------------------------------------------------------------------------------


def see_the_same(shared: bool) -> int:
    with warned() as count:
        trainer("par_ddp").fit(Probe(), DataLoader(Stream(2, shared=shared)), DataLoader(Stream(2, shared=shared)))
        trainer("par_ddp").predict(Probe(), numbers(2))
    return count("All 2 data ranks have the same first")


def test_a_dataset_that_nobody_has_sharded_is_announced() -> None:
    # Rank 0 warns: of training, validation and prediction, or of prediction only.
    assert run_ranks(2, see_the_same, True) == [3, 0]
    assert run_ranks(2, see_the_same, False) == [1, 0]


# -- several loaders ------------------------------------------------------------------------------------------------


class Combined(Probe):
    def loss(self, batch: Any, stage: str) -> Tensor:
        parts = [part for part in (batch.values() if isinstance(batch, dict) else [batch]) if part is not None]
        return torch.stack([super(Combined, self).loss(part, stage) for part in parts]).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch, "val"), sync_dist=True, batch_size=2)


class Several(pl.LightningDataModule):
    """Loaders of different length for training, in one mode, and two for validation."""

    def __init__(self, mode: str, stream: bool) -> None:
        super().__init__()
        self.mode: Any = mode
        self.stream = stream
        self.prepared = 0

    def prepare_data(self) -> None:
        self.prepared += 1

    def setup(self, stage: str) -> None:
        self.data = Numbers(8)

    def train_dataloader(self) -> Any:
        second = DataLoader(Stream(2, 3)) if self.stream else numbers(4)
        return CombinedLoader({"a": DataLoader(self.data, batch_size=1), "b": second}, self.mode)

    def val_dataloader(self) -> Any:
        return [numbers(4, 2), numbers(6, 2)]

    def teardown(self, stage: str) -> None:
        del self.data


def train_on_several(strategy: str, mode: str, stream: bool) -> Any:
    data, module = Several(mode, stream), Combined()
    run = trainer(strategy, use_distributed_sampler=True, reload_dataloaders_every_n_epochs=1, max_epochs=2)
    run.fit(module, datamodule=data)
    assert data.prepared == int(dist.get_rank() == 0)
    return len(module.seen["train"]), run.global_step, {k: float(v) for k, v in run.callback_metrics.items()}


MODES = {"min_size": 4, "max_size_cycle": 8, "max_size": 8}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", some(TWO, "par_ddp"))
def test_combined_loaders_and_a_datamodule(strategy: str, mode: str) -> None:
    (seen, steps, metrics), *others = run_ranks(2, train_on_several, strategy, mode, False)
    assert steps == MODES[mode]
    assert seen == {"min_size": 8, "max_size_cycle": 16, "max_size": 12}[mode]
    assert metrics.keys() == {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"}
    assert others[0][1:] == (steps, metrics)


@pytest.mark.parametrize("mode", [long_run("min_size"), "max_size_cycle"])
def test_a_stream_among_combined_loaders_ends_everywhere(mode: str) -> None:
    (_, steps, _), (_, other, _) = run_ranks(2, train_on_several, "par_fsdp", mode, True, timeout=20)
    assert steps == other == {"min_size": 4, "max_size_cycle": 8}[mode]
