"""Resume within an epoch: the run that was stopped is the run that was not, sample by sample and bit by bit."""

from __future__ import annotations

import functools
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.utilities import CombinedLoader
from probe import crossed, long_run
from resumed_runs import (
    ALL_POINTS,
    Case,
    Counting,
    Lazy,
    Net,
    Noisy,
    Quiet,
    Shuffled,
    SizedCounting,
    Streamed,
    Unfair,
    fabric_resumes,
    fabric_run,
    fit,
    global_batches,
    map_style,
    resume_everywhere,
    resumed,
    saved,
)
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from lightning_par.checkpoint import ResumableSampler
from lightning_par.strategies import fabric as fabric_strategies
from lightning_par.testing import RanksFailed, run_ranks
from models import NanoGPT, Tokens
from parity import Recorder, build_strategy, gathered, make_trainer

quiet = functools.partial(map_style, dataset=Quiet)
PERSISTENT: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
short = functools.partial(map_style, 12)


def generated() -> Any:
    return short(generator=torch.Generator().manual_seed(8))


def replacing() -> Any:
    sampler = RandomSampler(range(10), replacement=True, num_samples=80, generator=torch.Generator().manual_seed(8))
    return DataLoader(Noisy(10), batch_size=4, sampler=sampler)


def weighted() -> Any:
    return DataLoader(Noisy(10), batch_size=2, sampler=WeightedRandomSampler(range(1, 11), 10))


def lazy() -> Any:
    return DataLoader(Noisy(10), batch_size=2, sampler=Lazy())


def batched() -> Any:
    return DataLoader(Noisy(24), batch_sampler=Shuffled())


def listed() -> Any:
    return DataLoader(Noisy(24), batch_sampler=[[1, 2], [3, 4], [5, 6], [7]])


def single() -> Any:
    return DataLoader(Noisy(8), batch_size=None, shuffle=True, collate_fn=torch.atleast_2d)


def two() -> Any:
    return {"a": map_style(8), "b": map_style(14)}


def combined(mode: Any) -> Any:
    return CombinedLoader(two(), mode)


CASES = {
    "within validations": Case(short, {"val_check_interval": 2}),
    "max_steps": Case(short, {"max_steps": 11, "max_epochs": -1, "val_check_interval": 2}),
    "no validation": Case(short, {"limit_val_batches": 0}),
    "validation counted over epochs": Case(short, {"val_check_interval": 4, "check_val_every_n_epoch": None}),
    "each second epoch": Case(short, {"check_val_every_n_epoch": 2, "max_epochs": 3}),
    # Samples that draw nothing let the begin of a batch be a point as well.
    "when batches begin": Case(functools.partial(quiet, 12), {"val_check_interval": 2}, points=ALL_POINTS),
    # Seven batches in windows of three; steps end with the third, the sixth and the last one.
    "accumulation": Case(functools.partial(map_style, 14), {"accumulate_grad_batches": 3}, points=("on_step",)),
    "limit": Case(map_style, {"limit_train_batches": 4}),
    "short batches": Case(functools.partial(map_style, 11)),
    "in order": Case(functools.partial(short, shuffle=False)),
    "own generator": Case(generated),
    "with replacement": Case(replacing, every=3),
    "weighted": Case(weighted),
    "drawn lazily": Case(lazy),
    "batch sampler": Case(batched),
    "list of batches": Case(listed),
    "without batches": Case(single, every=3),
    "two loaders": Case(two, {"val_check_interval": 3}),
    "the shortest ends": Case(functools.partial(combined, "min_size")),
    "reloading": Case(short, {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 5, "limit_train_batches": 2}),
    "plateau": Case(short, {"max_epochs": 3}, plateau=True),
    "plateau by step": Case(short, {"val_check_interval": 3}, schedule="plateau"),
    "one cycle": Case(short, schedule="one cycle"),
    "windows by schedule": Case(
        functools.partial(map_style, 16),
        points=("on_step",),
        callbacks=lambda: [GradientAccumulationScheduler({0: 2, 1: 3})],
    ),
    "averaged weights": Case(
        functools.partial(map_style, 8),
        {"max_epochs": 4},
        points=("on_step",),
        callbacks=lambda: [StochasticWeightAveraging(1e-1, swa_epoch_start=1, annealing_epochs=2)],
    ),
    "ends of epochs": Case(
        generated, {"max_steps": 17, "max_epochs": -1}, points=("on_train_epoch_end",), plateau=True
    ),
    "last batches of a limit": Case(
        short, {"limit_train_batches": 3, "limit_val_batches": 0}, points=("on_train_batch_end",), every=3
    ),
    "stateful": Case(Counting, {"val_check_interval": 2}, dropout=0.2),
    "stateful with a length": Case(SizedCounting),
    "one worker": Case(functools.partial(quiet, 12, num_workers=1), every=4),
    "two workers": Case(functools.partial(quiet, 12, num_workers=2), every=5),
    "workers that persist": Case(functools.partial(quiet, 12, **PERSISTENT), every=3),
    "workers that persist with an own generator": Case(
        lambda: quiet(12, **PERSISTENT, generator=torch.Generator().manual_seed(8)), every=3
    ),
    "workers of the validation": Case(short, {"max_epochs": 3}, every=4, validation=PERSISTENT),
    "workers of the validation, started before": Case(
        short, {"num_sanity_val_steps": 1, "val_check_interval": 3}, every=4, validation=PERSISTENT
    ),
}


def sparse(name: str, every: int, **changed: Any) -> Case:
    """A case that is resumed from fewer points."""
    return replace(CASES[name], every=max(every, CASES[name].every), **changed)


@pytest.mark.parametrize("name", [*map(long_run, CASES)])
def test_one_process_goes_on_from_every_point(tmp_path: Path, name: str) -> None:
    assert resume_everywhere(CASES[name], str(tmp_path)) == []


QUICK = {
    "within validations": 5,
    "max_steps": 8,
    "own generator": 6,
    "accumulation": 4,
    "averaged weights": 6,
    "plateau": 11,
    "plateau by step": 5,
    "one cycle": 4,
    "windows by schedule": 3,
    "ends of epochs": 1,
    "last batches of a limit": 3,
}


@pytest.mark.parametrize(("name", "every"), QUICK.items())
def test_one_process_goes_on(tmp_path: Path, name: str, every: int) -> None:
    assert resume_everywhere(sparse(name, every), str(tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "strategy"),
    crossed(
        [
            "within validations",
            "max_steps",
            "accumulation",
            "short batches",
            "in order",
            "weighted",
            "two loaders",
            "plateau",
            "stateful",
            "stateful with a length",
            "two workers",
            "workers that persist",
        ],
        ["DataParallelStrategy", "FSDP2Strategy"],
        quick=[],
    ),
)
def test_two_ranks_go_on_from_every_point(tmp_path: Path, name: str, strategy: str) -> None:
    case = sparse(name, 2, strategy=strategy)
    assert run_ranks(2, resume_everywhere, case, str(tmp_path), timeout=100) == [[], []]


@pytest.mark.parametrize(("name", "every"), [("within validations", 4), ("stateful", 7)])
def test_two_ranks_go_on(tmp_path: Path, name: str, every: int) -> None:
    case = sparse(name, every, strategy="FSDP2Strategy")
    assert run_ranks(2, resume_everywhere, case, str(tmp_path)) == [[], []]


@pytest.mark.parametrize("use_distributed_sampler", [long_run(False)])
def test_ranks_with_samplers_of_their_own(tmp_path: Path, use_distributed_sampler: bool) -> None:
    case = Case(short, {"use_distributed_sampler": use_distributed_sampler}, every=2)
    assert run_ranks(2, resume_everywhere, case, str(tmp_path), timeout=100) == [[], []]


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_file_holds_the_place_too(tmp_path: Path, ranks: int) -> None:
    """Of each data rank, and its random state."""
    case = sparse("within validations" if ranks == 1 else "stateful", 5, state_dict_type="full")
    assert run_ranks(ranks, resume_everywhere, case, str(tmp_path), timeout=100) == [[]] * ranks


def test_a_resumed_run_resumes(tmp_path: Path) -> None:
    case = Case(short, {"val_check_interval": 2, "max_steps": 11, "max_epochs": -1}, every=3)
    trace, end, saver = fit(case, str(tmp_path / "first"))
    _, length = saver.saved[0]
    second, _, again = fit(case, str(tmp_path / "second"), resume=saver.saved[0][0])
    assert second == trace[length:]
    assert len(again.saved) >= 2
    for path, more in again.saved[:-1]:
        third, other_end, _ = fit(case, resume=path)
        assert third == trace[length + more :]
        assert other_end == end


# -- within an accumulation window ------------------------------------------------------------------------------------


def test_gradients_that_were_in_no_step_are_computed_again(tmp_path: Path) -> None:
    """The fifth of seven batches, in windows of three: the second window begins again."""
    options = {"accumulate_grad_batches": 3, "max_epochs": 1}
    case = Case(functools.partial(quiet, 14), options, points=("on_train_batch_end",), dropout=0.0)
    trace, end, saver = fit(case, str(tmp_path))
    batches = [event for event in trace if event[0] == "batch"]
    again, other_end, _ = fit(case, resume=saver.saved[4][0])
    assert [event for event in again if event[0] == "batch"] == batches[3:]
    assert other_end == end


# -- another number of data ranks -------------------------------------------------------------------------------------


def divided(ranks: int, samples: int = 24, dataset: Any = Quiet, **options: Any) -> Case:
    """Batches of four samples on all ranks together."""
    loaders = functools.partial(map_style, samples, 4 // ranks, dataset, **options)
    return Case(loaders, {"max_epochs": 1}, points=("on_train_batch_end",))


@pytest.mark.parametrize(("there", "here"), [(2, 1), (1, 2), long_run(2, 4), long_run(4, 2), long_run(1, 4)])
@pytest.mark.parametrize("batches", [2, long_run(1), long_run(5), long_run(6)])
def test_other_ranks_take_what_is_left_in_the_same_order(tmp_path: Path, there: int, here: int, batches: int) -> None:
    out = run_ranks(there, saved, divided(there), str(tmp_path))
    order = global_batches([trace for trace, _ in out])
    path = out[0][1][batches - 1][0]
    traces = run_ranks(here, resumed, divided(here), path)
    assert global_batches(traces) == order[batches:]
    counted = [event[2] for event in traces[0] if event[0] == "batch"]
    assert counted == list(range(batches, 6))
    assert [event for event in traces[0] if event[0] == "epoch ends"] == [["epoch ends", 0]]


def weights_after(case: Case, folder: str, path: str | None) -> Any:
    trace, _, saver = fit(case, folder, resume=path)
    return torch.cat([p.detach().flatten() for p in saver.module.parameters()]), saver.saved, len(trace)


def test_one_rank_that_accumulates_takes_the_steps_of_two(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": 1}
    there = Case(functools.partial(quiet, 24, 2), options, points=("on_train_batch_end",), dropout=0.0)
    here = replace(there, options={**options, "accumulate_grad_batches": 2}, points=())
    (end, paths, _), _ = run_ranks(2, weights_after, there, str(tmp_path), None)
    ((same, _, _),) = run_ranks(1, weights_after, here, "", paths[2][0])
    torch.testing.assert_close(same, end, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_ranks_change_twice_in_an_epoch(tmp_path: Path) -> None:
    out = run_ranks(2, saved, divided(2), str(tmp_path / "two"))
    order = global_batches([trace for trace, _ in out])
    one = run_ranks(1, saved_from, divided(1), str(tmp_path / "one"), out[0][1][1][0])
    traces = run_ranks(2, resumed, divided(2), one[0][1][1][0])
    assert global_batches(traces) == order[4:]


def saved_from(case: Case, folder: str, path: str) -> Any:
    trace, _, saver = fit(case, folder, resume=path)
    return trace, saver.saved


@pytest.mark.parametrize("here", [1, long_run(4)])
def test_batches_that_do_not_divide_what_was_used(tmp_path: Path, here: int) -> None:
    """Three samples a batch on two ranks, then other batches; each sample once, and the epoch ends with its last."""
    there = Case(functools.partial(quiet, 24, 3), {"max_epochs": 1}, points=("on_train_batch_end",))
    out = run_ranks(2, saved, there, str(tmp_path))
    order = [index for batch in global_batches([trace for trace, _ in out]) for index in batch]
    after = Case(functools.partial(quiet, 24, 4), {"max_epochs": 2})
    traces = run_ranks(here, resumed, after, out[0][1][0][0])
    batches = global_batches(traces)
    seen = [index for batch in batches for index in batch]
    assert sorted(seen[: len(order) - 6]) == sorted(order[6:])
    assert len(seen) - (24 - 6) < here
    # The next epoch is a whole one.
    assert sorted({index for batch in global_batches(traces, epoch=1) for index in batch}) == list(range(24))


def resumed_with_a_seed(case: Case, path: str) -> Any:
    """Lightning gives the sampler the seed of the process."""
    with mock.patch.dict(os.environ, {"PL_GLOBAL_SEED": "99"}):
        return resumed(case, path)


def test_the_seed_of_the_order_is_that_of_the_run(tmp_path: Path) -> None:
    case = replace(divided(2), options={"max_epochs": 2})
    (trace, checkpoints), _ = run_ranks(2, saved, case, str(tmp_path))
    path, length = checkpoints[2]
    again, _ = run_ranks(2, resumed_with_a_seed, case, path)
    batches = [[event for event in one if event[0] == "batch"] for one in (again, trace[length:])]
    assert batches[0] == batches[1] != []


def run_changed(case: Case, path: str, **changed: Any) -> Any:
    return resumed(case, path, **changed)


def test_places_that_cannot_be_dealt_out_are_refused_or_begin_again(tmp_path: Path) -> None:
    case = Case(SizedCounting, {"max_epochs": 1}, points=("on_train_batch_end",))
    out = run_ranks(2, saved, case, str(tmp_path))
    path = out[0][1][2][0]
    with pytest.raises(RanksFailed, match=r"(?s)SizedCounting saved the state of each of 2 data ranks.*on_lost_place"):
        run_ranks(1, resumed, case, path)
    (trace,) = run_ranks(1, run_changed, case, path, on_lost_place="restart_epoch")
    assert [event[3] for event in trace if event[0] == "batch"] == [[[i]] for i in range(6)]
    assert [event[2] for event in trace if event[0] == "batch"] == list(range(6))


@pytest.mark.parametrize("case", ["dataset", long_run("batch sampler")])
def test_other_data_is_refused(tmp_path: Path, case: str) -> None:
    there = Case(quiet if case == "dataset" else batched, {"max_epochs": 1}, points=("on_train_batch_end",))
    path = fit(there, str(tmp_path))[2].saved[2][0]
    if case == "dataset":
        with pytest.raises(RanksFailed, match="22 samples and has 21 now"):
            run_ranks(1, resumed, Case(functools.partial(quiet, 21)), path)
    else:
        with pytest.raises(RanksFailed, match="Shuffled deals out the samples in a way of its own"):
            run_ranks(2, resumed, Case(batched, {"use_distributed_sampler": False}), path)


def of_torchdata() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    data = Quiet(14)
    return StatefulDataLoader(data, batch_size=2, sampler=StatefulDistributedSampler(data), num_workers=1)


@pytest.mark.slow
def test_loaders_of_torchdata(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    case = Case(
        of_torchdata, {"use_distributed_sampler": False}, every=3, points=("on_train_batch_end", "on_validation_end")
    )
    assert run_ranks(2, resume_everywhere, case, str(tmp_path), timeout=100) == [[], []]


def unfair() -> Any:
    return DataLoader(Quiet(8), batch_size=2, sampler=Unfair())


def test_a_sampler_that_cannot_be_replayed_is_noticed(tmp_path: Path) -> None:
    case = Case(unfair, {"max_epochs": 1}, points=("on_train_batch_end",))
    path = fit(case, str(tmp_path))[2].saved[1][0]
    with pytest.raises(RuntimeError, match="gives other batches than before the checkpoint.*Unfair depends on more"):
        fit(case, resume=path)
    trace = fit(case, resume=path, on_lost_place="restart_epoch")[0]
    assert [event[2] for event in trace if event[0] == "batch"] == [0, 1, 2, 3]


class Stateful(DataLoader[Any]):
    """Says that it saves its state, and means its own sampler's."""

    def state_dict(self) -> dict[str, int]:
        return {"seen": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def stateful_over_lazy() -> Any:
    return Stateful(Quiet(10), batch_size=1, sampler=Lazy())


def warned(case: Case, path: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed(case, path)
    return [str(warning.message) for warning in caught]


@pytest.mark.slow
def test_a_state_without_the_order_is_told(tmp_path: Path) -> None:
    case = Case(stateful_over_lazy, {"max_epochs": 1}, points=("on_train_batch_end",))
    path = run_ranks(2, saved, case, str(tmp_path))[0][1][1][0]
    messages = run_ranks(2, warned, case, path)[0]
    assert any("loader 0 (Stateful) does not hold the order of its samples" in message for message in messages)


# -- ranks that share their samples -----------------------------------------------------------------------------------


def share_samples(folder: str, spec: tuple[str, dict[str, Any]], resume: bool) -> tuple[list[float], Any]:
    """Two epochs of four steps, saved after the second step of the second one; or what comes after that."""
    torch.manual_seed(17 if resume else 3)
    module = NanoGPT(dropout=0.0 if "Pipe" in spec[0] else 0.1)
    torch.manual_seed(19 if resume else 5)
    saver = pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=6, save_top_k=-1)
    recorder = Recorder(losses_only=True)
    options: dict[str, Any] = {"enable_checkpointing": True, "use_distributed_sampler": True, "max_epochs": 2}
    trainer = make_trainer(
        dist.get_world_size(),
        build_strategy(spec, "trainer"),
        callbacks=[saver, recorder],
        precision="64-true",
        **options,
    )
    data = DataLoader(Tokens(8), batch_size=2, shuffle=True)
    trainer.fit(module, data, ckpt_path=f"{folder}/step=6.ckpt" if resume else None)
    return recorder.record.losses, gathered({name: p.detach() for name, p in module.named_parameters()})


@pytest.mark.parametrize(
    "spec",
    [
        ("TensorParallelStrategy", {"tp_size": 2}),
        long_run(("PipelineParallelStrategy", {"pp_size": 2})),
    ],
    ids=["tp", "pp"],
)
def test_ranks_of_a_model_group_go_on_together(tmp_path: Path, spec: tuple[str, dict[str, Any]]) -> None:
    whole = run_ranks(2, share_samples, str(tmp_path), spec, False)
    rest = run_ranks(2, share_samples, str(tmp_path), spec, True)
    for (losses, weights), (more, other_weights) in zip(whole, rest, strict=True):
        assert more == losses[6:]
        assert all(torch.equal(value, other_weights[name]) for name, value in weights.items())


# -- what has no place ------------------------------------------------------------------------------------------------


def streamed() -> Any:
    return DataLoader(Streamed(), batch_size=1)


def test_a_stream_without_a_state_begins_again_and_says_so(tmp_path: Path) -> None:
    case = Case(streamed, {"max_epochs": 1}, points=("on_train_batch_end",))
    path = fit(case, str(tmp_path))[2].saved[3][0]
    with pytest.warns(UserWarning, match=r"Resumed at batch 4 .*DataLoader.*its first 4 batches are used twice"):
        trace = fit(case, resume=path)[0]
    assert [event[3] for event in trace if event[0] == "batch"][0] == [[0]]


def plain_resume(case: Case, path: str) -> list[Any]:
    module = Net(case)
    options: dict[str, Any] = {"enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        precision="64-true",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        **options,
    )
    trainer.fit(module, case.loaders(), DataLoader(Quiet(6), batch_size=2), ckpt_path=path)
    return module.trace


@pytest.mark.parametrize("loaders", [quiet, SizedCounting])
def test_plain_lightning_loads_the_one_file(tmp_path: Path, loaders: Any) -> None:
    case = Case(loaders, {"max_epochs": 1}, points=("on_train_batch_end",), state_dict_type="full")
    trace, _, saver = fit(case, str(tmp_path))
    rest = [event[2] for event in plain_resume(case, saver.saved[2][0]) if event[0] == "batch"]
    assert rest == [event[2] for event in trace if event[0] == "batch"][3:]


def test_a_file_of_plain_lightning_has_no_place(tmp_path: Path) -> None:
    class EndsEarly(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "plain.ckpt")

    case = Case(quiet, {"max_epochs": 1})
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, precision="64-true", max_epochs=1, logger=False, callbacks=[EndsEarly()],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Net(case), quiet(), DataLoader(Quiet(6), batch_size=2))
    with pytest.warns(UserWarning, match="Resumed at batch 2 of an epoch"):
        trace = fit(case, resume=str(tmp_path / "plain.ckpt"))[0]
    assert [event[2] for event in trace if event[0] == "batch"] == list(range(2, 11))


def test_lightning_is_not_asked_for_advice_it_does_not_have(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    case = Case(short, points=("on_train_batch_end",))
    fit(case, resume=fit(case, str(tmp_path))[2].saved[1][0])
    assert not [w for w in recwarn if "dataloader is not resumable" in str(w.message)]


# -- Fabric -----------------------------------------------------------------------------------------------------------


def resumable() -> Any:
    sampler = ResumableSampler(22, num_replicas=dist.get_world_size(), rank=dist.get_rank(), shuffle=True, seed=3)
    return DataLoader(Noisy(22), batch_size=2, sampler=sampler)


@pytest.mark.parametrize(
    ("ranks", "make"),
    [(2, map_style), (1, resumable), long_run(1, map_style), long_run(2, resumable)],
)
def test_a_loop_of_fabric_goes_on(tmp_path: Path, ranks: int, make: Any) -> None:
    last = 11 if ranks == 1 else 6
    stops = [1, last, last + 1, 2 * last - 1]
    strategy = fabric_strategies.FSDP2Strategy
    assert run_ranks(ranks, fabric_resumes, strategy, make, str(tmp_path), stops, timeout=100) == [[]] * ranks


@pytest.mark.slow
def test_a_loop_of_fabric_reads_ahead(tmp_path: Path) -> None:
    make = functools.partial(map_style, dataset=Quiet, num_workers=2)
    strategy = fabric_strategies.DataParallelStrategy
    assert run_ranks(2, fabric_resumes, strategy, make, str(tmp_path), [1, 4, 6, 9], timeout=100) == [[], []]


def fabric_loop(ranks: int, folder: str, make: Any, **options: Any) -> Any:
    strategy = fabric_strategies.DataParallelStrategy()
    return fabric_run(strategy, make(batch_size=4 // ranks), folder, epochs=1, **options)[0]


def test_a_loop_of_fabric_goes_on_with_other_ranks(tmp_path: Path) -> None:
    make = functools.partial(map_style, 24, dataset=Quiet)
    whole = run_ranks(2, fabric_loop, 2, str(tmp_path), make)
    run_ranks(2, fabric_loop, 2, str(tmp_path), make, stop=2)
    (rest,) = run_ranks(1, fabric_loop, 1, str(tmp_path), make, resume=True)
    order = [[i for pair in zip(a[1], b[1], strict=True) for i in pair] for a, b in zip(*whole, strict=True)]
    assert [event[1] for event in rest] == order[2:]


def sampler_in_state(folder: str) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, strategy=fabric_strategies.DataParallelStrategy())
    fabric.launch()
    loader = fabric.setup_dataloaders(resumable())
    fabric.save(f"{folder}/state.ckpt", {"sampler": loader.sampler})


def test_the_sampler_of_a_loader_of_fabric_is_refused_in_the_state(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="put the loader into the state"):
        run_ranks(1, sampler_in_state, str(tmp_path))
