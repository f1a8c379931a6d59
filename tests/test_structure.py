"""Modules and steps of any structure train as in one process, in each layout of the family, or are refused by name."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from probe import crossed, ddp_and_fsdp, layouts, listed, long_run
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from unusual import WIDTH, Experts, Skipping

from lightning_par import ParallelLayout, ParallelOptions, parallelize
from lightning_par.errors import ParallelConfigError
from lightning_par.parallel.shards import full_tensor
from lightning_par.testing import RanksFailed, run_ranks
from models import GPT, LENGTH, VOCABULARY, Block, loader
from parity import LAYOUTS, Record, Recorder, Run, assert_same_training, build_strategy, compare, make_trainer


def trained(model: str, layout: str, **options: Any) -> None:
    ranks, spec = LAYOUTS[layout]
    assert_same_training(Run(model=f"unusual:{model}", **options), ranks, spec)


QUICK = (
    *("Nested", "ThreeNames", "Parametrized", "Hooked", "LateHook", "Marked", "Unfreezing", "LayerDrop", "Listed"),
)
LONG = ("Shared", "Compiled", "InConfigureModel", "LoRA")


def structures() -> list[Any]:
    """Each under FSDP and under DDP; the others, which divide what FSDP divides at other times, take turns."""
    turns = itertools.cycle(["zero1", "zero2", "hsdp2x2"])
    cases = [(layout, model) for model in (*QUICK, *LONG) for layout in ("fsdp", "ddp", next(turns))]
    return listed(cases, *(("fsdp", model) for model in QUICK))


@pytest.mark.parametrize(("layout", "model"), structures())
def test_structure(layout: str, model: str) -> None:
    trained(model, layout, steps=2)


@layouts("fsdp")
def test_structure_while_accumulating(layout: str) -> None:
    trained("Shared", layout, steps=2, accumulate=2)


def fit_twice(layout: str, model: str) -> None:
    ranks, spec = LAYOUTS[layout]
    run, rank = Run(model=f"unusual:{model}", steps=1), dist.get_rank()
    module = run.build()
    for _ in range(2):
        trainer = make_trainer(ranks, build_strategy(spec, "trainer"), max_steps=1, precision="64-true")
        trainer.fit(module, loader(run.batches(rank, ranks)))


@layouts("ddp")
def test_a_module_that_is_built_anew_for_the_second_fit_is_refused(layout: str) -> None:
    run_ranks(LAYOUTS[layout][0], fit_twice, layout, "InConfigureModel")
    with pytest.raises(RanksFailed, match=r"\d+ parameters of Rebuilt are new since it was parallelised.*model\."):
        run_ranks(LAYOUTS[layout][0], fit_twice, layout, "Rebuilt")


# -- parameters that some batches do not use -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "host"), crossed(LAYOUTS, ("trainer", "fabric"), quick=[("ddp", "trainer"), ("fsdp", "fabric")])
)
def test_parameters_unused_on_some_ranks(layout: str, host: str) -> None:
    trained("Branching", layout, host=host, accumulate=2 if host == "trainer" else 1)


class Windowed(nn.Module):
    """Which block is left out, and which branch is taken, is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 2) for _ in range(3))
        self.experts = nn.ModuleList(Experts() for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, without: int, branch: int) -> Tensor:
        h = self.embedding(x)
        for i, block in enumerate(self.blocks):
            if i != without:
                h = block(h)
        for expert in self.experts:
            h = expert(h, branch)
        return h.pow(2).mean() * (self.scale if branch else 1)


def tokens(seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: full_tensor(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}


def windows(layout: ParallelLayout, options: dict[str, Any]) -> None:
    """A block runs in one accumulation step and not in the next, a branch on one rank and not on the other."""
    torch.manual_seed(0)
    alone = Windowed().double()
    model = copy.deepcopy(alone)
    par = parallelize(model, layout, "64-true", ParallelOptions(**options))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for window in range(3):
        for step in range(2):
            # The second window leaves out one block in both steps.
            without = (1 - step) * 3 + step if window != 1 else 2

            def branch(rank: int, step: int = step, window: int = window) -> int:
                return (rank * step + window) % 2

            with par.accumulating(step == 0):
                model(tokens(10 * step + rank), without, branch(rank)).backward()
                par.finish_backward()
            for r in range(ranks):
                (alone(tokens(10 * step + r), without, branch(r)) / ranks).backward()
        got, want = gradients(model), gradients(alone)
        assert got.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        model.zero_grad()
        alone.zero_grad()


@pytest.mark.parametrize(
    "options", [{}, {"zero_stage": 1}, long_run({"zero_stage": 2}), long_run({"sync_every_batch": False})], ids=str
)
def test_what_is_used_may_change_within_a_window(options: dict[str, Any]) -> None:
    run_ranks(2, windows, ParallelLayout(), options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"sync_every_batch": False}], ids=str)
def test_what_is_used_may_change_within_a_window_of_hsdp(options: dict[str, Any]) -> None:
    run_ranks(4, windows, ParallelLayout(dp_replicate_size=2), options)


# -- blocks that only some ranks run ---------------------------------------------------------------------------------


def leave_out(block: int, rank: int, *, blocks: tuple[int, ...], ranks: tuple[int, ...]) -> bool:
    return block in blocks and rank in ranks


def swap(block: int, rank: int) -> bool:
    return block == rank


def skip_blocks(layout: str, skip: Callable[[int, int], bool], from_step: int) -> None:
    run, rank = Run(steps=6), dist.get_rank()
    torch.manual_seed(3)
    ranks, spec = LAYOUTS[layout]
    trainer = make_trainer(ranks, build_strategy(spec, "trainer"), max_steps=6, precision="64-true")
    trainer.fit(Skipping(from_step, skip), loader(run.batches(rank, ranks)))


SKIPS = {
    "one": (partial(leave_out, blocks=(1,), ranks=(1,)), r"rank 0 gathers `model\.blocks\.1`; data rank 1 gathers"),
    "last": (
        partial(leave_out, blocks=(2,), ranks=(0,)),
        r"rank 0 reduces something else.*; data rank 1 gathers `model\.",
    ),
    "swap": (swap, r"rank 0 gathers `model\.blocks\.1`; data rank 1 gathers `model\.blocks\.0`"),
}


@pytest.mark.parametrize(
    ("layout", "skip"),
    crossed(("zero1", "fsdp"), SKIPS, quick=[("zero1", "one"), *(("fsdp", skip) for skip in SKIPS)]),
)
def test_a_block_that_only_some_ranks_run_is_refused_in_the_first_step(layout: str, skip: str) -> None:
    function, message = SKIPS[skip]
    with pytest.raises(RanksFailed, match=f"run the blocks of Skipping differently: data {message}"):
        run_ranks(2, skip_blocks, layout, function, 0)


def test_other_blocks_of_the_same_size_on_each_rank_are_noticed_before_the_optimizer_steps() -> None:
    """Nothing hangs here: the collectives fit, and each rank computes with parameters of two blocks mixed."""
    function, message = SKIPS["swap"]
    with pytest.raises(RanksFailed, match=f"run the blocks of Skipping differently: data {message}"):
        run_ranks(2, skip_blocks, "fsdp", function, 4)


@pytest.mark.parametrize("skip", ["one", pytest.param("last", marks=pytest.mark.slow)])
def test_a_mix_up_of_collectives_later_ends_in_an_error_that_names_the_blocks(skip: str) -> None:
    function, message = SKIPS[skip]
    with pytest.raises(RanksFailed, match=f"run the blocks of Skipping differently: data {message}"):
        run_ranks(2, skip_blocks, "fsdp", function, 4, timeout=5)


def test_replicated_blocks_may_be_left_out_by_some_ranks() -> None:
    run_ranks(2, skip_blocks, "ddp", SKIPS["one"][0], 0)


# -- what is attached to parameters ----------------------------------------------------------------------------------


def hook_after_accumulation(layout: ParallelLayout) -> None:
    model = GPT()
    model.norm.weight.register_post_accumulate_grad_hook(lambda p: None)
    parallelize(model, layout)


@pytest.mark.parametrize("shard", [1, -1])
def test_hooks_on_accumulated_gradients_are_refused(shard: int) -> None:
    layout = ParallelLayout(dp_replicate_size=-1 if shard == 1 else 1, dp_shard_size=shard)
    with pytest.raises(RanksFailed, match=r"`?norm\.weight has a hook of register_post_accumulate_grad_hook"):
        run_ranks(2, hook_after_accumulation, layout)


def sparse_gradients(layout: ParallelLayout) -> None:
    model = GPT()
    model.add_module("lookup", nn.Embedding(4, 2, sparse=True))
    parallelize(model, layout)


@pytest.mark.parametrize("shard", [1, long_run(-1)])
def test_embeddings_with_sparse_gradients_are_refused(shard: int) -> None:
    layout = ParallelLayout(dp_replicate_size=-1 if shard == 1 else 1, dp_shard_size=shard)
    with pytest.raises(RanksFailed, match="Embedding 'lookup' makes sparse gradients"):
        run_ranks(2, sparse_gradients, layout)


def hook_that_is_removed() -> list[float]:
    """The handle of a hook removes it after sharding too."""
    torch.manual_seed(0)
    model = GPT().double()
    weight = model.blocks[0].qkv.weight
    handle = weight.register_hook(lambda grad: grad * 0)
    par = parallelize(model, ParallelLayout(), "64-true")
    norms = []
    for _ in range(2):
        model(tokens(0)).pow(2).mean().backward()
        par.finish_backward()
        norms.append(float(full_tensor(model.blocks[0].qkv.weight.grad).norm()))
        handle.remove()
        model.zero_grad()
    return norms


def test_a_gradient_hook_can_be_removed() -> None:
    hooked, plain = run_ranks(2, hook_that_is_removed)[0]
    assert hooked == 0
    assert plain > 0


def copy_sharded() -> str:
    model = GPT()
    parallelize(model, ParallelLayout())
    with pytest.raises(ParallelConfigError) as raised:
        copy.deepcopy(model)
    with pytest.raises(ParallelConfigError):
        copy.deepcopy(model.blocks[0])
    return str(raised.value)


def test_copying_a_sharded_module_says_what_to_do_instead() -> None:
    message = run_ranks(2, copy_sharded)[0]
    assert "GPT is sharded" in message
    assert "in __init__ or configure_model" in message


# -- parameters used past their modules ------------------------------------------------------------------------------


@ddp_and_fsdp
def test_a_penalty_on_whole_parameters(layout: str) -> None:
    """In ddp they always are; in ZeRO-1 and 2 from the forward on; in FSDP inside of their blocks, or gathered."""
    model = {"ddp": "Penalty", "zero1": "LatePenalty", "zero2": "LatePenalty"}.get(layout, "WholePenalty")
    trained(model, layout, steps=2)


@pytest.mark.parametrize("layout", [long_run("zero1"), long_run("zero2"), "fsdp"])
def test_a_penalty_on_shards_is_refused(layout: str) -> None:
    with pytest.raises(RanksFailed, match=r"the loss is a DTensor: the step of Penalty ") as raised:
        trained("Penalty", layout, steps=2)
    assert "full_tensor(penalty)" in str(raised.value)


# -- frozen parameters -----------------------------------------------------------------------------------------------


def lora_state(layout: str) -> tuple[set[str], set[str], set[str]]:
    ranks, spec = LAYOUTS[layout]
    run, rank = Run(model="unusual:LoRA", steps=1), dist.get_rank()
    module = run.build()
    trainer = make_trainer(ranks, build_strategy(spec, "trainer"), max_steps=1, precision="64-true")
    trainer.fit(module, loader(run.batches(rank, ranks)))
    names = {p: n for n, p in module.named_parameters()}
    state = {names[p] for p in trainer.optimizers[0].state}
    return state, {n for n, p in module.named_parameters() if p.requires_grad}, set(names.values())


@ddp_and_fsdp
def test_only_adapters_have_optimizer_state(layout: str) -> None:
    state, trainable, everything = run_ranks(LAYOUTS[layout][0], lora_state, layout)[0]
    assert state == trainable == {n for n in everything if n.endswith((".a.weight", ".b.weight"))} != set()


def unfrozen_gradients(precision: str, frozen: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = GPT()
    model.blocks[0].requires_grad_(not frozen)
    par = parallelize(model, ParallelLayout(), precision)
    model.blocks[0].requires_grad_(True)
    with par.policy.autocast_context("cpu"):
        loss = model(tokens(dist.get_rank())).float().pow(2).mean()
    loss.backward()
    par.finish_backward()
    return gradients(model.blocks[0])


@pytest.mark.parametrize("precision", ["bf16-mixed", long_run("bf16-true")])
def test_a_block_that_is_frozen_at_first_reduces_in_the_same_dtype_as_the_others(precision: str) -> None:
    thawed, never_frozen = (run_ranks(2, unfrozen_gradients, precision, frozen)[0] for frozen in (True, False))
    for name, gradient in never_frozen.items():
        assert thawed[name].dtype == gradient.dtype
        assert torch.equal(thawed[name], gradient), name


# -- the meta device -------------------------------------------------------------------------------------------------


def fit_from_init_module(run: Run, ranks: int, spec: tuple[str, dict[str, Any]] | None) -> Record:
    """`train`, but the module is built by `init_module`, which samples the weights in fp64."""
    rank = None if spec is None else dist.get_rank()
    recorder = Recorder()
    trainer = make_trainer(
        1 if spec is None else ranks,
        "auto" if spec is None else build_strategy(spec, "trainer"),
        max_steps=run.steps,
        accumulate_grad_batches=ranks if spec is None else 1,
        precision="64-true",
        callbacks=[recorder],
    )
    with trainer.init_module(empty_init=spec is not None):
        module = run.build()
    assert next(module.parameters()).is_meta == (spec is not None)
    trainer.fit(module, loader(run.batches(rank, ranks)))
    sharded = isinstance(module, FSDPModule)
    assert all(isinstance(p, DTensor) == sharded for p in module.parameters())
    return recorder.record


@ddp_and_fsdp
def test_built_on_the_meta_device(layout: str) -> None:
    ranks, spec = LAYOUTS[layout]
    run = Run(steps=2)
    alone = run_ranks(1, fit_from_init_module, run, ranks, None)[0]
    compare(run_ranks(ranks, fit_from_init_module, run, ranks, spec), alone, 1e-9, 1e-9)
