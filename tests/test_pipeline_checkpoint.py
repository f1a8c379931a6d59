"""Checkpoints of pipelines fit every layout, and one process: each rank has a part of the state under its own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pipeline_checkpoint_runs as runs
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from pipeline_checkpoint_runs import LAYOUTS, Staged, assert_same, batches, fit, merged, ranks_of, strategy_of
from probe import launched, long_run
from torch import Tensor

from lightning_par.checkpoint import CheckpointError, full_model_state, full_optimizer_state, optimizer_state
from lightning_par.errors import ParallelConfigError
from lightning_par.testing import run_ranks
from parity import make_trainer

CHANGES: list[tuple[str, str, str, str, bool]] = [
    ("pp", "one process", "full", "decay", False),
    ("pp x fsdp", "zbv", "sharded", "embedding", True),
    ("zbv", "pp x fsdp", "sharded", "embedding", False),
    ("pp x ddp", "pp", "sharded", "decay", True),
    ("one process", "interleaved", "full", "embedding", True),
    ("pp", "one process", "full", "embedding", True),
    ("pp x tp", "one process", "full", "decay", False),
    ("fsdp", "pp", "full", "decay", False),
    ("tp", "pp x tp", "sharded", "embedding", False),
    ("pp x tp", "pp x ddp", "full", "decay", False),
    ("pp x tp", "fsdp", "sharded", "decay", True),
    ("gpipe", "tp", "sharded", "decay", False),
    ("interleaved", "pp x tp", "sharded", "embedding", True),
    ("pp", "pp", "sharded", "decay", False),
]


@pytest.mark.parametrize(
    ("there", "here", "kind", "groups", "average"),
    [change if change in CHANGES[1:2] else long_run(*change) for change in CHANGES],
)
def test_training_goes_on_in_another_layout_in_the_middle_of_an_epoch(
    tmp_path: Path, there: str, here: str, kind: str, groups: str, average: bool
) -> None:
    saved = run_ranks(ranks_of(there), fit, str(tmp_path), there, kind, groups, average)
    path = str(tmp_path / "step=3.ckpt")
    loaded = run_ranks(ranks_of(here), fit, str(tmp_path / "on"), here, kind, groups, average, path)
    begin, end = ([merged([run[i] for run in runs]) for runs in (saved, loaded)] for i in (0, 1))
    assert_same(begin[0], begin[1])
    assert_same(end[0], end[1], 1e-9)
    # The metric has seen the 32 tokens of half an epoch on the last stage, and on the others nothing.
    seen = [int(run[0]["accuracy.tp"] + run[0]["accuracy.fn"]) for run in loaded]
    assert seen == [32] * ranks_of(here)
    for run in loaded:
        assert run[2] == pytest.approx(saved[0][2], rel=1e-9)


def load_what_does_not_fit(folder: str, kind: str) -> list[str]:
    """Load into a module that differs in names of both stages, and into one with other groups; what is raised."""

    def trainer() -> Any:
        return make_trainer(2, strategy_of("pp", state_dict_type=kind), max_steps=1, precision="64-true")

    path = f"{folder}/c.ckpt"
    first = trainer()
    first.fit(Staged(), batches())
    first.save_checkpoint(path)
    other = Staged()
    for block in (other.model.blocks[0], other.model.blocks[3]):
        block.extra = torch.nn.Linear(2, 2)
        block.norm2.register_parameter("bias", None)
    found = []
    for run in (
        lambda: trainer().test(other, batches(), ckpt_path=path),
        lambda: trainer().fit(Staged(groups="embedding"), batches(), ckpt_path=path),
    ):
        with pytest.raises(CheckpointError) as caught:
            run()
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_names_of_all_stages_are_compared_and_each_rank_says_the_same(tmp_path: Path, kind: str) -> None:
    one, two = run_ranks(2, load_what_does_not_fit, str(tmp_path), kind)
    assert one == two
    names, groups = one
    assert "4 names are not in the checkpoint: model.blocks.0.extra.weight" in names
    assert "2 names of the checkpoint are unknown here: model.blocks.0.norm2.bias" in names
    assert "model.blocks.3.extra.bias" in names
    assert "blocks.1" not in names
    assert ("3 parameter groups here and 2 in" if kind == "sharded" else "and [16, 35] in the file") in groups


def rates(module: Staged) -> torch.optim.Optimizer:
    """In each group the blocks come in an order that is neither that of the module nor the reverse."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    named.sort(key=lambda pair: ("blocks.1" not in pair[0], pair[0].endswith("bias")))
    return torch.optim.AdamW([{"params": [p for _, p in named]}, {"params": [], "lr": 0.5}], lr=1e-2, eps=1e-4)


def step_once(optimizer: torch.optim.Optimizer) -> None:
    """Give it state that tells the parameters apart."""
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            p.grad = torch.full_like(p, 1.0 + i)
    optimizer.step()
    optimizer.zero_grad()


def with_fabric(
    layout: str, kind: str, when: str, path: str, load: bool
) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """Build an optimizer before or after `setup`; load or save; what was there, and what two steps make of it."""
    fabric = launched(strategy_of(layout, "fabric", state_dict_type=kind))
    module = Staged(17 if load else 3).double()
    if when == "before":
        optimizer = rates(module)
        step_once(optimizer)
        model, optimizer = fabric.setup(module, optimizer)
    else:
        model = fabric.setup(module)
        optimizer = fabric.setup_optimizers(rates(module))
    inner = optimizer.optimizer
    if load:
        fabric.load(path, {"model": model, "optimizer": optimizer})
    else:
        fabric.save(path, {"model": model, "optimizer": optimizer})
    begin = runs.view(module, [inner])
    for batch in batches():
        fabric.strategy.forward_backward(module.loss, batch)
        optimizer.step()
        optimizer.zero_grad()
    stateful = [len(inner.state), sum(len(group["params"]) for group in inner.param_groups)]
    return begin, runs.view(module, [inner]), stateful


@pytest.mark.parametrize(
    ("there", "here", "kind"),
    [
        ("pp", "single", "full"),
        long_run("single", "pp", "sharded"),
        long_run("single", "pp x fsdp", "full"),
        long_run("pp x fsdp", "pp x tp", "full"),
        long_run("zbv", "pp x ddp", "sharded"),
    ],
)
def test_an_optimizer_of_before_the_setup_keeps_its_state_and_the_order_of_its_groups(
    tmp_path: Path, there: str, here: str, kind: str
) -> None:
    path = str(tmp_path / "c.ckpt")
    saved = run_ranks(ranks_of(there), with_fabric, there, kind, "before", path, False)
    loaded = run_ranks(ranks_of(here), with_fabric, here, kind, "before", path, True)
    begin, end = ([merged([run[i] for run in runs]) for runs in (saved, loaded)] for i in (0, 1))
    assert any(name.endswith("exp_avg") for name in begin[0])
    assert_same(begin[0], begin[1])
    assert_same(end[0], end[1], 1e-9)
    for _, _, (states, params) in saved + loaded:  # no state of parameters that another stage has
        assert states == params
    everything = sum(1 for p in Staged().parameters() if p.requires_grad)
    for run in saved if there != "single" else loaded:
        assert run[2][1] < everything


def who_is_asked(layout: str) -> list[float]:
    """Each rank gives all blocks its own value beside the tensors; the ones that are saved."""
    fabric = launched(strategy_of(layout, "fabric", state_dict_type="full"))
    module = Staged()
    fabric.setup(module)
    for block in module.model.blocks:
        block.factor = float(fabric.global_rank)
    state = full_model_state(module)
    return [state[f"model.blocks.{i}._extra_state"]["factor"] for i in range(4)] if state else []


@pytest.mark.parametrize(("layout", "ranks"), [("pp", [0.0, 0.0, 1.0, 1.0]), long_run("zbv", [0.0, 1.0, 1.0, 0.0])])
def test_what_a_module_keeps_beside_tensors_comes_from_the_stage_that_runs_it(layout: str, ranks: list[float]) -> None:
    assert run_ranks(2, who_is_asked, layout) == [ranks, []]


def in_unknown_order(kind: str) -> list[str]:
    fabric = launched(strategy_of("pp", "fabric", state_dict_type=kind))
    module = Staged()
    fabric.setup(module)
    optimizer = fabric.setup_optimizers(rates(module)).optimizer
    found = optimizer_state(module, optimizer)["param_groups"][0]["params"]
    with pytest.raises(CheckpointError, match="in which order one process would have those of all stages"):
        full_optimizer_state(module, optimizer)
    uneven = torch.optim.SGD([{"params": [p]} for p in module.parameters()])
    with pytest.raises(CheckpointError, match="parameter groups on the stages of the pipeline"):
        optimizer_state(module, uneven)
    return sorted(found)


def test_an_order_that_stages_cannot_tell_is_refused_where_it_counts() -> None:
    want = sorted(name for name, p in Staged().named_parameters() if p.requires_grad)
    assert run_ranks(2, in_unknown_order, "full") == [want, want]


class Adapted(Staged):
    """Trains the last block only, and has no group for what there is none of."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.model.blocks[3].requires_grad_(True)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [[p for p in trained if p.ndim > 1], [p for p in trained if p.ndim == 1]]
        return torch.optim.Adam([{"params": group} for group in groups if group], lr=1e-2)


def adapt(layout: str) -> tuple[list[int], dict[str, Any]]:
    module = Adapted()
    trainer = make_trainer(ranks_of(layout), strategy_of(layout), max_epochs=1, precision="64-true")
    trainer.fit(module, batches())
    sizes = [len(group["params"]) for group in trainer.optimizers[0].param_groups]
    return sizes, runs.view(module, trainer.optimizers)


def test_a_stage_without_trained_parameters_has_an_optimizer_with_the_groups_of_one_process() -> None:
    (sizes, one), *_ = run_ranks(1, adapt, "one process")
    pipelined = run_ranks(2, adapt, "pp")
    assert [sizes for sizes, _ in pipelined] == [[0, 0], sizes]
    assert_same(one, merged([state for _, state in pipelined]), 1e-9)


def keep_the_best(folder: str, layout: str, kind: str) -> tuple[list[float], list[str], dict[str, Tensor]]:
    module = Staged()
    saver = ModelCheckpoint(folder, monitor="loss", save_top_k=1, save_last=True, filename="{epoch}")
    options = {} if LAYOUTS[layout][1] is None else {"state_dict_type": kind}
    trainer = make_trainer(
        ranks_of(layout),
        strategy_of(layout, **options),
        max_epochs=2,
        precision="64-true",
        callbacks=[saver],
        enable_checkpointing=True,
    )
    trainer.fit(module, batches(), batches())
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    scores = []
    for path in ("best", f"{folder}/last.ckpt", f"{folder}/weights.ckpt"):
        with torch.no_grad():
            for p in module.parameters():
                p.zero_()
        scores.append(float(trainer.test(module, batches(), ckpt_path=path, verbose=False)[0]["test_loss"]))
    return scores, sorted(path.name for path in Path(folder).iterdir()), full_model_state(module)


@pytest.mark.parametrize(
    ("layout", "kind"), [("pp", "sharded"), long_run("pp x fsdp", "full"), long_run("zbv", "full")]
)
def test_the_best_the_last_and_the_weights_alone(tmp_path: Path, layout: str, kind: str) -> None:
    want, files, state = run_ranks(1, keep_the_best, str(tmp_path / "one"), "one process", kind)[0]
    for rank, (scores, found, whole) in enumerate(
        run_ranks(ranks_of(layout), keep_the_best, str(tmp_path), layout, kind)
    ):
        assert scores == pytest.approx(want, rel=1e-9)
        assert [name for name in found if name != "one"] == files
        if rank == 0:
            assert list(whole) == list(state)
            assert whole["model.head.weight"] is whole["model.tokens.weight"]
            assert_same(state, whole, 1e-9)
        else:
            assert whole == {}


def average_too_early() -> None:
    trainer = make_trainer(2, strategy_of("pp"), max_epochs=2, callbacks=[StochasticWeightAveraging(0.1)])
    with pytest.raises(ParallelConfigError, match="copies the module before it is divided"):
        trainer.fit(Staged(), batches())


def test_an_average_of_whole_modules_is_refused() -> None:
    run_ranks(2, average_too_early)
