"""MemoryMonitor: its bytes against the formula, its table, what it logs, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import Logger
from probe import crossed
from torch import nn

from lightning_par.callbacks import MemoryMonitor
from lightning_par.callbacks.memory_monitor import KINDS, Report, table
from lightning_par.errors import ParallelConfigError
from lightning_par.parallel.accounting import PHASES, model_state
from lightning_par.parallel.precision import resolve_precision
from lightning_par.testing import run_ranks
from models import NanoGPT, loader
from parity import BATCH, build_strategy, make_trainer

RANKS = 2
WIDTH, LAYERS = 64, 6
STRATEGIES: dict[str, tuple[int, tuple[str, dict[str, Any]]]] = {
    "ddp": (0, ("DataParallelStrategy", {})),
    "fsdp": (3, ("FSDP2Strategy", {})),
}


class Memory(Logger):
    """Keeps on every rank what it is given; Lightning's own loggers drop it on all but rank 0."""

    name = "memory"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(name.startswith("memory/") for name in metrics):
            self.seen.append((step, metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


def batches(rank: int, steps: int) -> Any:
    return loader([[(b * RANKS + rank) * BATCH + j for j in range(BATCH)] for b in range(steps)])


def fit(spec: tuple[str, dict[str, Any]], accumulate: int, every: int, with_logger: bool) -> Any:
    """Train three steps; return sizes, what the callback and the logger saw, and what was printed."""
    torch.manual_seed(0)
    module = NanoGPT(WIDTH, LAYERS)
    numel = sum(p.numel() for p in module.parameters())
    monitor, logger = MemoryMonitor(every), Memory()
    trainer = make_trainer(
        RANKS,
        build_strategy(spec, "trainer"),
        max_steps=3,
        accumulate_grad_batches=accumulate,
        callbacks=[monitor],
        logger=logger if with_logger else False,
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer.fit(module, batches(torch.distributed.get_rank(), 3 * accumulate))
    plan = trainer.strategy.parallelized.plan
    blocks = sum(p.numel() for name in plan.names for p in module.get_submodule(name).parameters())
    return numel, numel - blocks, monitor.report, logger.seen, printed.getvalue()


@pytest.mark.parametrize(("name", "accumulate"), crossed(STRATEGIES, (1, 2), quick=[("ddp", 1), ("fsdp", 2)]))
def test_bytes_agree_with_the_formula_on_all_ranks(name: str, accumulate: int) -> None:
    zero_stage, spec = STRATEGIES[name]
    results = run_ranks(RANKS, fit, spec, accumulate, 2, accumulate == 1)
    numel, beside, report, logged, printed = results[0]
    assert len(report) == RANKS
    for rank in report:
        assert list(rank) == list(PHASES)
        for phase in PHASES:
            expected = model_state(
                numel,
                RANKS,
                resolve_precision("32-true"),
                phase,
                zero_stage=zero_stage,
                gathered=beside,
                # Over a window the largest is shown: the last accumulation step's.
                first=accumulate == 1,
            )
            for kind in KINDS[:4]:
                assert rank[phase][kind] == pytest.approx(getattr(expected, kind), rel=0.05, abs=1000), (phase, kind)
            assert rank[phase]["peak"] >= expected.total * 0.95
        # 16 tokens, of which a block keeps 16 widths and more: see below.
        assert rank["end of forward"]["activations"] > LAYERS * 16 * WIDTH * BATCH * 8 * 4
    for other in results[1:]:
        assert (other[2], other[3]) == (report, logged), "ranks differ"
        assert other[4] == "", "only rank 0 prints"
    # Steps 1 and 3 of three: the first, and each second one after it.
    assert [line for line in printed.splitlines() if line.startswith("memory")] == [
        "memory in step 1",
        "memory in step 3",
    ]
    assert printed.endswith(f"memory in step 3\n{table(report)}\n")
    if accumulate == 1:
        assert len(logged) == 2
        largest = {f"memory/{k}": max(rank[p][k] for rank in report for p in PHASES) for k in KINDS}
        assert logged[-1][1] == largest


def one_batch(checkpointing: Any) -> int:
    module = NanoGPT(WIDTH, LAYERS)
    monitor = MemoryMonitor()
    strategy = build_strategy(("FSDP2Strategy", {"activation_checkpointing": checkpointing}), "trainer")
    trainer = make_trainer(1, strategy, max_steps=1, callbacks=[monitor])
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(module, batches(0, 1))
    assert monitor.report is not None
    return monitor.report[0]["end of forward"]["activations"]


def test_activations_fall_with_checkpointing() -> None:
    everything, selective, inputs = (run_ranks(1, one_batch, mode)[0] for mode in (None, "selective", "full"))
    # A block keeps at least its input, two norms, qkv, attention, and the MLP's hidden layer twice: 16 widths a token.
    tokens = BATCH * 8
    assert everything > LAYERS * 16 * WIDTH * tokens * 4
    assert inputs < everything / 4
    assert inputs < selective < everything


class Plain(pl.LightningModule):
    """One linear layer, whose step may fail, yield no loss, or step twice by hand."""

    def __init__(self, fail: bool = False, manual: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.fail = fail
        self.automatic_optimization = not manual
        self.hooked: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch).square().sum()
        # A tensor that a hook has packed is another one than the operand.
        self.hooked.append(torch._C._autograd._top_saved_tensors_default_hooks(False) is not None)
        if self.fail:
            raise ZeroDivisionError
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch).square().sum())
            optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.SGD(self.parameters(), lr=0.01) for _ in range(2)]
        return optimizers[0] if self.automatic_optimization else optimizers


def run_plain(module: Plain, monitor: MemoryMonitor, **options: Any) -> pl.Trainer:
    trainer = make_trainer(1, "auto", callbacks=[monitor], **options)
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2))
    return trainer


def hooks_are_active() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def test_other_steps_are_left_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    walks = []
    monkeypatch.setattr(
        "lightning_par.callbacks.memory_monitor.live_tensor_bytes", lambda: walks.append(1) or 1000 * len(walks)
    )
    module = Plain()
    run_plain(module, MemoryMonitor(3), max_epochs=1)
    assert module.hooked == [True, False, False, True]
    assert len(walks) == 2 * 4
    out = capsys.readouterr().out
    assert "memory in step 1\n" in out
    assert "memory in step 4\n" in out
    assert "\nrank " not in out, "a single rank needs no lines by rank"


@pytest.mark.slow
def test_manual_optimisation_with_two_steps_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = MemoryMonitor(4)
    module = Plain(manual=True)
    run_plain(module, monitor, max_epochs=1)
    assert module.hooked == [True, False, True, False]
    assert monitor.report is not None
    assert monitor.report[0]["end of forward"]["activations"] > 0


@pytest.mark.usefixtures("nothing_from_before")
@pytest.mark.parametrize("options", [{"fail": True}, {}])
def test_nothing_is_left_behind(options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    module = Plain(**options)
    with pytest.raises(ZeroDivisionError) if module.fail else contextlib.nullcontext():
        # Two batches of a window of four: training ends inside of it.
        run_plain(module, MemoryMonitor(), max_epochs=1, limit_train_batches=2, accumulate_grad_batches=4)
    assert module.hooked[0]
    assert not hooks_are_active()


def test_cuda_takes_the_allocator_s_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU here: the arithmetic over the allocator's figures."""
    monitor = MemoryMonitor()
    module = Plain()
    state = sum(p.nbytes for p in module.parameters())
    held = iter([state + 100, state + 100 + 4000, state + 2 * state + 100])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(held))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 99_999)

    class Strategy:
        root_device = torch.device("cuda", 0)

    class FakeTrainer:
        strategy = Strategy()
        global_step = 0
        optimizers: tuple[Any, ...] = ()

    monitor.on_train_batch_start(FakeTrainer(), module, None, 0)  # type: ignore[arg-type]
    assert not hooks_are_active()
    monitor.on_before_backward(FakeTrainer(), module, torch.tensor(0.0))  # type: ignore[arg-type]
    assert monitor._seen["end of forward"]["activations"] == 4000
    assert monitor._seen["end of forward"]["peak"] == 99_999


def test_table() -> None:
    mib = 2**20
    one = {phase: dict.fromkeys(KINDS, (i + 1) * mib) for i, phase in enumerate(PHASES)}
    two = {phase: dict.fromkeys(KINDS, 2 * mib) for phase in PHASES}
    report: Report = [one, two]
    lines = table(report).splitlines()
    assert lines[0].split("  ")[0] == "largest of the ranks"
    assert lines[1].replace("  ", "").split(")")[:3] == [
        "parameters2.0 MiB (rank 1",
        "2.0 MiB (rank 0",
        "3.0 MiB (rank 0",
    ]
    assert lines[7].split() == ["rank", *KINDS]
    assert lines[8].split() == ["0", *["3.0", "MiB"] * 6]
    assert lines[9].split() == ["1", *["2.0", "MiB"] * 6]
    assert len({len(line) for line in lines[:7]}) == len({len(line) for line in lines[7:]}) == 1
    assert len(table(report * 9).splitlines()) == 7, "more than 16 ranks are not listed one by one"


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_refused_intervals(every: Any) -> None:
    with pytest.raises(ParallelConfigError, match="every_n_steps"):
        MemoryMonitor(every)
