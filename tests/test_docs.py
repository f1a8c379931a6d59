"""Tables in the docs are the ones that the code makes."""

from __future__ import annotations

import ast
import builtins
import itertools
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.strategies import DDPStrategy

from lightning_par import strategies
from lightning_par.errors import ParallelConfigError
from lightning_par.layout import ParallelLayout
from lightning_par.parallel import capabilities
from lightning_par.parallel.apply import check
from lightning_par.parallel.options import ParallelOptions
from lightning_par.parallel.precision import dtype_table, resolve_precision
from lightning_par.resilience.events import read_events
from lightning_par.strategies import fabric as fabric_strategies
from lightning_par.testing import run_ranks

DOCS = Path(__file__).parent.parent / "docs"


def test_the_capability_table_is_in_the_docs() -> None:
    assert capabilities.markdown_table() in (DOCS / "capabilities.md").read_text()


def test_the_dtype_table_is_in_the_docs() -> None:
    assert dtype_table() in (DOCS / "precision.md").read_text()


def test_every_pair_has_a_standing() -> None:
    for first, second in itertools.product(capabilities.FEATURES, repeat=2):
        standing = capabilities.capability(first, second)
        assert standing == capabilities.capability(second, first)
        assert (standing.status == "works") == (not standing.reason)
        assert standing.status == "works" or standing.python


def test_pairs_name_features() -> None:
    assert all(pair <= set(capabilities.FEATURES) for pair in capabilities.PAIRS)


@pytest.mark.parametrize(
    ("layout", "options", "precision", "words"),
    [
        (ParallelLayout(cp_size=2), ParallelOptions(), "32-true", ["context parallelism", "cp_size=1", "cp_size: 1"]),
        (ParallelLayout(cp_size=-1, dp_shard_size=2), ParallelOptions(), "32-true", ["context parallelism"]),
        (ParallelLayout(), ParallelOptions(tp_plan={"*": "shard"}), "32-true", ["tp_size is 1", "tp_size=2"]),
        (
            ParallelLayout(tp_size=2),
            ParallelOptions(sequence_parallel=True, compile=True),
            "32-true",
            ["the compiler cannot follow slices", "compile: false"],
        ),
        (ParallelLayout(), ParallelOptions(sequence_parallel=True), "32-true", ["tp_size is 1", "tp_size=2"]),
        (ParallelLayout(tp_size=2), ParallelOptions(loss_parallel=True), "32-true", ["loss_parallel is True"]),  # type: ignore[arg-type]
        (ParallelLayout(tp_size=2), ParallelOptions(verify="never"), "32-true", ["verify is 'never'"]),  # type: ignore[arg-type]
        (ParallelLayout(ep_size=2, cp_size=2), ParallelOptions(), "32-true", ["expert", "context", "cp_size=1"]),
        (ParallelLayout(pp_size=2), ParallelOptions(), "16-mixed", ["fp16 scaler", "precision: bf16-mixed"]),
        (ParallelLayout(pp_size=2), ParallelOptions(pp_schedule="1f1b"), "32-true", ['pp_schedule="1F1B"']),
        (ParallelLayout(pp_size=2), ParallelOptions(pp_microbatches=1), "32-true", ["at least 2", "pp_microbatches=2"]),
        (ParallelLayout(pp_size=2), ParallelOptions(pp_microbatches=0), "32-true", ["pp_microbatches is 0"]),
        (ParallelLayout(), ParallelOptions(pp_microbatches=4), "32-true", ["pp_size is 1"]),
        (ParallelLayout(pp_size=2), ParallelOptions(pp_loss_weight="mean"), "32-true", ["pp_loss_weight is 'mean'"]),  # type: ignore[arg-type]
        (
            ParallelLayout(pp_size=2),
            ParallelOptions(pp_schedule="ZBVZeroBubble", compile=True, reshard_after_forward=True),
            "32-true",
            ["compiled blocks cannot", "must stay gathered", "compile: false", "reshard_after_forward: false"],
        ),
        (ParallelLayout(), ParallelOptions(cpu_offload=True), "16-mixed", ["fp16", "precision: bf16-mixed"]),
        (
            ParallelLayout(dp_replicate_size=-1, dp_shard_size=1),
            ParallelOptions(cpu_offload=True, reshard_after_forward=True),
            "32-true",
            ["cpu_offload: false", "reshard_after_forward=None"],
        ),
        (ParallelLayout(), ParallelOptions(zero_stage=4), "32-true", ["zero_stage is 4"]),
        (ParallelLayout(), ParallelOptions(zero_stage=2, reshard_after_forward=True), "32-true", ["keeps"]),
        (ParallelLayout(), ParallelOptions(activation_checkpointing="ful"), "32-true", ["'ful'", "selective"]),
        (ParallelLayout(), ParallelOptions(sync_every_batch="never"), "32-true", ["'never'"]),  # type: ignore[arg-type]
    ],
)
def test_what_is_refused_says_how_to_go_on(
    layout: ParallelLayout, options: ParallelOptions, precision: str, words: list[str]
) -> None:
    with pytest.raises(ParallelConfigError) as error:
        check(layout, options, resolve_precision(precision), 4)
    for word in words:
        assert word in str(error.value)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ParallelConfigError) as error:
        check(
            ParallelLayout(cp_size=3, dp_shard_size=2),
            ParallelOptions(zero_stage=7, activation_checkpointing="some", sync_every_batch=3),  # type: ignore[arg-type]
            resolve_precision("32-true"),
            4,
        )
    assert len(error.value.problems) >= 5
    for word in ("zero_stage is 7", "'some'", "sync_every_batch is 3", "context parallelism"):
        assert word in str(error.value)


def test_each_line_about_existing_modules_names_tests_that_exist() -> None:
    lines = [line for line in (DOCS / "drop_in.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(lines) > 20
    for line in lines:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", line)
        assert named, line
        for file, test in named:
            assert f"def {test}(" in (Path(__file__).parent / file).read_text(), (file, test)


def test_strategies_are_none_of_lightnings() -> None:
    assert not issubclass(strategies.MeshStrategy, DDPStrategy)
    assert issubclass(strategies.DataParallelStrategy, strategies.MeshStrategy)


def run_loop(code: str, run_dir: str) -> Any:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=fabric_strategies.DataParallelStrategy())
    fabric.launch()
    bare = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    model, optimizer = fabric.setup(bare, torch.optim.SGD(bare.parameters(), 0.1))
    names = {"fabric": fabric, "model": model, "optimizer": optimizer, "run_dir": run_dir, "nullcontext": nullcontext}
    wait = dist.Work.wait
    exec(code, names | {"loader": [torch.ones(3, 4) for _ in range(10)]}, names)
    assert dist.Work.wait is wait
    return names["report"]


def test_the_loop_of_the_page_about_monitoring_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "monitoring.md").read_text(), re.S)
    (loop,) = (block for block in blocks if "StepTimer" in block)
    report, other = run_ranks(2, run_loop, loop, str(tmp_path))
    assert report == other
    assert report.per_second * report.step_seconds == pytest.approx(2 * 3)
    # The first Linear needs no gradient of its input.
    assert report.tflops * 1e12 / (report.per_second / 2) == pytest.approx(2 * (4 * 4 * 2 + 4 * 1 * 3))
    assert [event["kind"] for event in read_events(tmp_path)] == ["step"]


# What a reader has of his own, beside what an example makes and imports.
OF_THE_READER = {"model", "module", "data", "datamodule"}
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]


def free_names(code: str) -> set[str]:
    """The names that a piece of code uses and does not bind."""
    nodes = list(ast.walk(ast.parse(code)))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {name.asname or name.name.partition(".")[0] for name in node.names}
    return {node.id for node in nodes if isinstance(node, ast.Name)} - bound - set(dir(builtins))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_with_a_trainer_import_what_they_use(page: Path) -> None:
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        if "Trainer(" in code:
            assert free_names(code) <= OF_THE_READER, code
            # Which makes the names of the strategies known, too.
            assert "import lightning_par" in code or "from lightning_par" in code
