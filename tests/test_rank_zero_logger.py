"""Rank-aware logging: the plain object with ranks that are made up, and the callback in a Trainer."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_par.callbacks import RankZeroLogger
from lightning_par.errors import ParallelConfigError
from lightning_par.resilience.errors import ParityError
from lightning_par.resilience.logging import LOGGERS, RankLogging

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
NAMES = ["", "lightning", "lightning.pytorch", "lightning.fabric", "lightning_par", "lightning_par.parallel.data"]


@pytest.fixture(params=["own handlers", "root handler"], autouse=True)
def console(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """What is printed, with loggers as `import lightning` leaves them after root was configured, or before."""
    before = state()
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        own = name != "lightning_par" if request.param == "own handlers" else name == ""
        logger.handlers = [handler] if own else []
        logger.propagate = not (own and name)
        logger.setLevel(logging.NOTSET if name == "lightning_par" else logging.INFO)
    yield stream
    restore(before)


def state() -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {"last": tuple(logging.lastResort.filters) if logging.lastResort else ()}
    for name in LOGGERS:
        logger = logging.getLogger(name)
        handlers = tuple((h, tuple(h.filters), h.level, h.formatter) for h in logger.handlers)
        found[f"logger {name}"] = (handlers, tuple(logger.filters), logger.level, logger.propagate)
    return found


def restore(before: dict[str, tuple[Any, ...]]) -> None:
    for name in LOGGERS:
        logger = logging.getLogger(name)
        handlers, _, level, logger.propagate = before[f"logger {name}"]
        logger.handlers = [h for h, *_ in handlers]
        logger.setLevel(level)


@pytest.fixture
def make() -> Iterator[Callable[..., RankLogging]]:
    """Installs logging of a made-up rank and removes it after the test."""
    made: list[RankLogging] = []

    def build(policy: Any = "rank0", rank: int = 0, local_rank: int = 0, **options: Any) -> RankLogging:
        made.append(RankLogging(policy, rank=rank, local_rank=local_rank, host="node-a", **options))
        made[-1].install()
        return made[-1]

    yield build
    for logging_ in reversed(made):
        logging_.remove()


@pytest.mark.parametrize(
    ("policy", "rank", "local_rank", "lowest"),
    [
        ("rank0", 0, 0, "info"),
        ("rank0", 8, 0, "warning"),
        ("rank0", 3, 3, "error"),
        ("node0", 0, 0, "info"),
        ("node0", 8, 0, "info"),
        ("node0", 3, 3, "error"),
        ("all", 8, 0, "info"),
        ("all", 11, 3, "info"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_who_prints_what(
    make: Any, console: io.StringIO, policy: str, rank: int, local_rank: int, lowest: str, name: str
) -> None:
    make(policy, rank, local_rank)
    for level, number in LEVELS.items():
        logging.getLogger(name).log(number, "a %s", level)
    printed = [line.removeprefix("a ") for line in console.getvalue().splitlines()]
    assert printed == [level for level, number in LEVELS.items() if number >= LEVELS[lowest]]


def test_records_carry_rank_and_step(make: Any, console: io.StringIO) -> None:
    handler = logging.getLogger("").handlers[0]
    handler.setFormatter(logging.Formatter("%(rank)d %(local_rank)d %(host)s %(step)s %(message)s"))
    installed = make("all", 9, 1)
    logging.getLogger("lightning_par.x").info("one")
    installed.step = 7
    logging.getLogger("lightning_par.x").info("two")
    assert console.getvalue().splitlines() == ["9 1 node-a None one", "9 1 node-a 7 two"]


def test_repeated_messages_are_counted(make: Any, console: io.StringIO) -> None:
    now = 0.0
    installed = make(repeat_interval=10.0, clock=lambda: now)
    log = logging.getLogger("lightning_par")
    for i in range(5):
        log.warning("slow %s", "disk")
        log.warning("number %d", i)
    now = 9.0
    log.warning("slow disk")
    log.error("slow disk")
    now = 10.5
    log.warning("slow disk")
    log.warning("slow disk")
    assert console.getvalue().splitlines() == [
        "slow disk",
        *(f"number {i}" for i in range(5)),
        "slow disk",
        "slow disk ... and 5 more",
    ]
    installed.remove()
    assert console.getvalue().splitlines()[-1] == "slow disk ... and 1 more"
    log.warning("slow disk")
    log.warning("slow disk")
    assert console.getvalue().splitlines()[-2:] == ["slow disk"] * 2


def test_repeats_can_be_left_alone_and_what_is_not_printed_is_not_told(make: Any, console: io.StringIO) -> None:
    make(repeat_interval=0.0)
    for _ in range(3):
        logging.getLogger("").info("again")
    assert console.getvalue().splitlines() == ["again"] * 3
    quiet = make(rank=3, local_rank=3)
    for _ in range(3):
        logging.getLogger("").info("unheard")
    quiet.remove()
    assert "unheard" not in console.getvalue()


def test_memory_of_messages_is_bounded(make: Any, console: io.StringIO) -> None:
    installed = make()
    for i in range(3000):
        logging.getLogger("").info("message %d", i)
    assert len(installed._repeats._known) <= 1024
    assert len(console.getvalue().splitlines()) == 3000


def test_file_has_every_record_of_its_rank_and_is_appended_to(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "logs" / "rank-3.jsonl"
    for start in range(2):
        installed = make(rank=3, local_rank=3, directory=tmp_path / "logs")
        installed.step = 10 + start
        for name in NAMES:
            logging.getLogger(name).info("from '%s'", name)
        logging.getLogger("").info("nan", extra={"metrics": {"loss": float("nan"), "lr": 0.5}})
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError:
            logging.getLogger("").exception("failed")
        installed.remove()
        if start == 0:  # a process that was killed in the middle of a line
            path.write_text(path.read_text() + '{"time": 12')
    lines = path.read_text().splitlines()
    entries = [json.loads(line) for line in lines if not line.endswith('{"time": 12')]
    assert len(entries) == len(lines) - 1 == 2 * (len(NAMES) + 2)
    assert [e["message"] for e in entries[: len(NAMES)]] == [f"from '{name}'" for name in NAMES]
    assert {(e["rank"], e["local_rank"], e["host"]) for e in entries} == {(3, 3, "node-a")}
    assert [e["step"] for e in entries] == [10] * (len(NAMES) + 2) + [11] * (len(NAMES) + 2)
    assert entries[len(NAMES)]["metrics"] == {"loss": "nan", "lr": 0.5}
    assert "ZeroDivisionError" in entries[-1]["exception"]


def test_a_file_handler_of_the_user_stays_complete(make: Any, tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "mine.log")
    logging.getLogger("").addHandler(handler)
    make(rank=3, local_rank=3)
    for _ in range(2):
        logging.getLogger("").info("twice")
    handler.close()
    assert (tmp_path / "mine.log").read_text().splitlines() == ["twice"] * 2


@pytest.mark.parametrize("twice", [False, True])
def test_remove_restores_everything(console: io.StringIO, tmp_path: Path, twice: bool) -> None:
    before = state()
    installed = RankLogging("rank0", rank=1, local_rank=1, directory=tmp_path)
    installed.remove()
    for _ in range(1 + twice):
        installed.install()
    assert installed.installed
    assert state() != before
    for _ in range(1 + twice):
        installed.remove()
    assert not installed.installed
    assert state() == before


def test_without_any_handler_infos_are_shown_with_their_rank(capsys: pytest.CaptureFixture[str], make: Any) -> None:
    for name in LOGGERS:
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = True
    before = state()
    installed = make("node0", 8, 0)
    logging.getLogger("lightning_par.x").info("hello")
    logging.getLogger("lightning_par.x").warning("careful")
    logging.getLogger("other").warning("once")
    logging.getLogger("other").warning("once")
    installed.remove()
    assert capsys.readouterr().err.splitlines() == [
        "[rank 8, node-a] hello",
        "[rank 8, node-a] WARNING: careful",
        "once",
        "once ... and 1 more",
    ]
    assert state() == before


@pytest.mark.parametrize("build", [RankZeroLogger, lambda p: RankLogging(p, rank=0, local_rank=0)])
def test_a_bad_policy_is_refused(build: Callable[[Any], Any]) -> None:
    with pytest.raises(ParallelConfigError, match="rank0, node0, all"):
        build("rank1")


def test_all_wrong_arguments_are_named() -> None:
    for every in (-5, 2.5, True, "20"):
        with pytest.raises(ParallelConfigError, match=r"every_n_steps of RankZeroLogger is .*; it is an int >= 0"):
            RankZeroLogger(every_n_steps=every)  # type: ignore[arg-type]
    with pytest.raises(ParallelConfigError) as error:
        RankZeroLogger("rank1", -1, repeat_interval=-1.0)  # type: ignore[arg-type]
    assert len(error.value.problems) == 3


class Module(LightningModule):
    """Its loss is the number of the batch."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.fail_at = fail_at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.fail_at:
            raise RuntimeError("no more")
        self.log("score", 10.0 * batch_idx, on_step=True, on_epoch=True)
        self.log("bar", 0.5, prog_bar=True)
        logging.getLogger("lightning_par.user").info("batch %d", batch_idx)
        return self.layer(batch).sum() * 0 + batch_idx

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", 3.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.125)


def trainer(tmp_path: Path, *callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=list(callbacks),
        num_sanity_val_steps=1,
        **options,
    )


def data(n: int = 6) -> DataLoader[Any]:
    return DataLoader(torch.ones(n, 1), batch_size=1)  # type: ignore[arg-type]


def lines(console: io.StringIO) -> list[str]:
    return [line for line in console.getvalue().splitlines() if "step " in line]


def test_prints_metrics_in_a_trainer(console: io.StringIO, tmp_path: Path) -> None:
    before = state()
    trainer(tmp_path, RankZeroLogger(every_n_steps=2)).fit(Module(), data(), data(1))
    assert lines(console) == [
        "step 2 | epoch 0 | loss 1 | lr 0.125 | score 10 | bar 0.5",
        "step 4 | epoch 0 | loss 3 | lr 0.125 | score 30 | bar 0.5",
        "step 6 | epoch 0 | loss 5 | lr 0.125 | score 50 | bar 0.5",
        "validation | step 6 | epoch 0 | score 50 | bar 0.5 | val_loss 3",
    ]
    assert state() == before


def test_the_loss_under_accumulation_is_that_of_the_step(console: io.StringIO, tmp_path: Path) -> None:
    trainer(tmp_path, RankZeroLogger(every_n_steps=1), accumulate_grad_batches=3).fit(Module(), data())
    assert [line[:26] for line in lines(console)] == ["step 1 | epoch 0 | loss 2 ", "step 2 | epoch 0 | loss 5 "]


def test_a_validation_that_logs_nothing_is_a_line_without_an_end_that_is_missing(
    console: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Module, "log", lambda *_, **__: None)
    trainer(tmp_path, RankZeroLogger(every_n_steps=9)).fit(Module(), data(), data(1))
    assert lines(console) == ["validation | step 6 | epoch 0"]


def test_zero_prints_no_metrics(console: io.StringIO, tmp_path: Path) -> None:
    trainer(tmp_path, RankZeroLogger(every_n_steps=0)).fit(Module(), data(), data(1))
    assert lines(console) == []
    assert "batch 5" in console.getvalue()


def test_every_rank_reads_the_metrics_and_rank_zero_prints_them(
    console: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading may compute a metric over all ranks: one that only rank 0 reads would hang."""
    reads = 0
    original = Trainer.callback_metrics.fget
    assert original is not None

    def count(self: Trainer) -> Any:
        nonlocal reads
        reads += 1
        return original(self)

    class OtherRank(RankZeroLogger):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            nonlocal reads
            before = reads
            with monkeypatch.context() as patch:
                patch.setattr(type(trainer), "global_rank", 3)
                patch.setattr(type(trainer), "callback_metrics", property(count))
                super().on_train_batch_end(trainer, *args)
            assert reads == before + 1

    trainer(tmp_path, OtherRank(every_n_steps=1)).fit(Module(), data(2))
    assert reads == 2
    assert lines(console) == []


def test_an_exception_is_recorded_and_the_loggers_are_put_back(console: io.StringIO, tmp_path: Path) -> None:
    before = state()
    callback = RankZeroLogger(directory=str(tmp_path / "logs"))
    with pytest.raises(RuntimeError, match="no more"):
        trainer(tmp_path, callback).fit(Module(fail_at=3), data())
    assert state() == before
    entries = [json.loads(line) for line in (tmp_path / "logs" / "rank-0.jsonl").read_text().splitlines()]
    failure = next(e for e in entries if e["level"] == "ERROR")
    assert failure["message"] == "rank 0: RuntimeError: no more"
    assert failure["step"] == 3
    assert "training_step" in failure["exception"]
    assert "training_step" not in console.getvalue()


def test_what_all_ranks_have_found_one_says_after_all_that_was_folded(
    console: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("lightning_par.user")
    for rank in (0, 3):
        for error in (ParityError("copies differ"), RuntimeError("no more")):
            callback, one = RankZeroLogger(directory=str(tmp_path)), trainer(tmp_path)
            monkeypatch.setattr(type(one), "global_rank", rank)
            monkeypatch.setattr(type(one), "local_rank", rank)
            callback.setup(one, Module(), "fit")
            log.error("again")
            log.error("again")
            callback.on_exception(one, Module(), error)
    twice = ["again", "again ... and 1 more"]
    assert [line for line in console.getvalue().splitlines() if line.startswith(("again", "rank "))] == [
        *[*twice, "rank 0: ParityError: copies differ"],
        *[*twice, "rank 0: RuntimeError: no more"],
        *twice,
        *[*twice, "rank 3: RuntimeError: no more"],
    ]
    assert "copies differ" in (tmp_path / "rank-3.jsonl").read_text()


def test_stages_one_after_another(console: io.StringIO, tmp_path: Path) -> None:
    before = state()
    callback = RankZeroLogger(every_n_steps=4, directory=str(tmp_path))
    first = trainer(tmp_path, callback)
    first.fit(Module(), data())
    first.validate(Module(), data(1), verbose=False)
    assert state() == before
    assert [line[:6] for line in lines(console)] == ["step 4"]
    first.fit_loop.max_epochs = 2
    first.fit(Module(), data())
    assert [line[:6] for line in lines(console)] == ["step 4", "step 8", "step 1"]
    metrics = [json.loads(line).get("metrics") for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    assert [m["loss"] for m in metrics if m] == [3.0, 1.0, 5.0]
