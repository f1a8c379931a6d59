"""The pool of ranks: results, failures that tell their cause, hangs that end, and workers that are used again."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_par import testing
from lightning_par.testing import MAX_RANKS, RanksFailed, RanksTimedOut, run_ranks


def _pid() -> int:
    return os.getpid()


def _sum_of_ranks() -> Tensor:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total


@pytest.mark.parametrize("n", [1, 2, 4])
def test_each_rank_returns_its_result(n: int) -> None:
    assert run_ranks(n, _arguments, 3, key=torch.ones(2)) == [(rank, n, 3, 2.0) for rank in range(n)]
    assert run_ranks(n, _sum_of_ranks) == [torch.tensor(n * (n - 1) / 2)] * n


def _arguments(number: int, key: Tensor) -> tuple[int, int, int, float]:
    return dist.get_rank(), dist.get_world_size(), number, key.sum().item()


@pytest.mark.parametrize("n", [0, MAX_RANKS + 1])
def test_number_of_ranks_is_checked(n: int) -> None:
    with pytest.raises(ValueError, match=f"1 to {MAX_RANKS} ranks, got {n}"):
        run_ranks(n, _pid)


def test_workers_look_like_torchrun_to_lightning() -> None:
    for rank, (detected, ranks, threads) in enumerate(run_ranks(2, _environment)):
        assert detected
        assert ranks == (2, rank, rank, 0, rank)
        assert threads == 1


def _environment() -> tuple[bool, tuple[int, ...], int]:
    found = TorchElasticEnvironment()
    ranks = found.world_size(), found.global_rank(), found.local_rank(), found.node_rank(), rank_zero_only.rank
    return found.detect(), ranks, torch.get_num_threads()


def test_function_makes_the_group_itself() -> None:
    assert run_ranks(2, _init_and_sum, init_group=False) == [torch.tensor(1.0)] * 2


def _init_and_sum() -> Tensor:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    return _sum_of_ranks()


def test_group_that_could_not_be_made_leaves_nothing() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 0 raised.*in _init_on_rank_zero.*wait timeout"):
        run_ranks(2, _init_on_rank_zero, init_group=False)
    assert run_ranks(2, _sum_of_ranks) == [torch.tensor(1.0)] * 2


def _init_on_rank_zero() -> None:
    if dist.get_node_local_rank() == 0:
        dist.init_process_group("gloo", timeout=timedelta(seconds=0.5))


def test_environment_and_directory_are_the_callers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGHTNING_PAR_TEST", "here")
    monkeypatch.chdir(tmp_path)
    assert run_ranks(1, _variable_and_directory) == [("here", tmp_path)]
    monkeypatch.delenv("LIGHTNING_PAR_TEST")
    assert run_ranks(1, _variable_and_directory) == [(None, tmp_path)]


def _variable_and_directory() -> tuple[str | None, Path]:
    return os.environ.get("LIGHTNING_PAR_TEST"), Path.cwd()


LOGGERS = ["lightning_par", "lightning_par.parallel", "lightning_par.parallel.apply", "lightning.pytorch"]


def test_settings_do_not_reach_the_next_call() -> None:
    first = run_ranks(2, _settings)
    run_ranks(2, _change_settings)
    assert run_ranks(2, _settings) == first


def _settings() -> tuple[Any, ...]:
    levels = [logging.getLogger(name).level for name in LOGGERS]
    seed = os.environ.get("PL_GLOBAL_SEED")
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.rand(()).item(), seed, levels


def _change_settings() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(5)
    os.environ["PL_GLOBAL_SEED"] = "5"
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)


def test_dtensor_does_not_return_the_mesh_of_an_earlier_call() -> None:
    run_ranks(2, _check_mesh, 0)
    run_ranks(2, _check_mesh, 1)


def _check_mesh(groups_made_before: int) -> None:
    for _ in range(groups_made_before):
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    assert (tensor * tensor).device_mesh is mesh
    assert tensor.square().sum().device_mesh is mesh


def test_first_failure_comes_first() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, _raise_on, 1)
    message = str(caught.value)
    assert "test_testing._raise_on failed on ranks 1, 0 of 2" in message
    assert message.index("rank 1 raised") < message.index("ValueError: on purpose") < message.index("rank 0 raised")
    assert "in _sum_of_ranks" in message[message.index("rank 0 raised") :]
    assert "_rank_worker.py" not in message
    assert not isinstance(caught.value, RanksTimedOut)


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("on purpose")
    _sum_of_ranks()


def test_result_that_cannot_be_sent_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)ranks 0 of 1.*pickle"):
        run_ranks(1, _unpicklable)


def _unpicklable() -> Callable[[], int]:
    return lambda: 0


def test_hang_is_cut_with_its_stack() -> None:
    start = time.monotonic()
    with pytest.raises(RanksTimedOut) as caught:
        run_ranks(2, _wait_forever_on, 1, timeout=1.0)
    assert time.monotonic() - start < 10
    message = str(caught.value)
    assert "did not finish within 1 s on ranks 1 of 2" in message
    assert re.search(r"(?s)rank 1 was still busy after 1 s\n.* in _wait_forever_on", message)
    assert run_ranks(2, _sum_of_ranks) == [torch.tensor(1.0)] * 2


def _wait_forever_on(rank: int) -> None:
    if dist.get_rank() == rank:
        threading.Event().wait()


def test_rank_that_waits_in_a_collective_tells_where() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)ranks 0 of 2.*in _sum_of_ranks.*[Tt]imed out"):
        run_ranks(2, _sum_on_rank_zero, timeout=2.0)


def _sum_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        _sum_of_ranks()


def test_busy_ranks_are_stopped_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "GRACE", 0.3)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, _raise_or_wait)
    assert time.monotonic() - start < 10
    assert re.search(r"(?s)rank 0 raised.*on purpose.*rank 1 was still busy.*in _wait_", str(caught.value))


def _raise_or_wait() -> None:
    _wait_forever_on(1)
    raise ValueError("on purpose")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("kill", "rank 0 died: it was killed by SIGKILL"),
        ("exit", "rank 0 died: it exited with code 3"),
        ("crash", r"(?s)rank 0 died: it was killed by SIGSEGV\n.*in _die"),
    ],
    ids=["kill", "exit", "crash"],
)
def test_dead_worker_is_reported_and_replaced(how: str, told: str) -> None:
    before = run_ranks(2, _pid)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, _die, how)
    first, second = str(caught.value).split("rank 1 raised")
    assert re.search(told, first)
    assert "in _sum_of_ranks" in second
    after = run_ranks(2, _pid)
    assert len(set(before) & set(after)) == 1


def _die(how: str) -> None:
    if dist.get_rank() == 0:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "exit":
            os._exit(3)
        else:
            faulthandler._sigsegv()
    _sum_of_ranks()


def test_worker_that_cannot_be_cleaned_up_is_replaced() -> None:
    before = run_ranks(2, _pid)
    with pytest.raises(RanksFailed, match=r"(?s)ranks 1 of 2.*closed file"):
        run_ranks(2, _close_stdout_on, 1)
    after = run_ranks(2, _pid)
    assert before[0] in after
    assert before[1] not in after


def _close_stdout_on(rank: int) -> None:
    if dist.get_rank() == rank:
        sys.stdout.close()


def test_workers_are_used_again() -> None:
    before = run_ranks(2, _pid)
    assert len(set(before)) == 2
    assert run_ranks(2, _pid) == before
    with pytest.raises(RanksFailed):
        run_ranks(2, _raise_on, 0)
    assert run_ranks(4, _pid)[:2] == before


def leave_threads(count: int) -> int:
    for _ in range(count):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def test_a_worker_that_gathers_threads_is_replaced() -> None:
    (few,), (many,), (after,) = (run_ranks(1, leave_threads, count) for count in (1, testing._MOST_THREADS, 0))
    assert few == many != after


def test_stopped_pool_leaves_no_process() -> None:
    pids = run_ranks(2, _pid)
    testing.stop_pool()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not set(run_ranks(2, _pid)) & set(pids)


def test_function_must_be_importable() -> None:
    def inner() -> None: ...

    for fn, told in [(lambda: 0, "<lambda> is a lambda"), (inner, "inner is a lambda or defined inside")]:
        with pytest.raises(TypeError, match=told):
            run_ranks(1, fn)
    with pytest.raises(TypeError, match="cannot send _arguments"):
        run_ranks(1, _arguments, lambda: 0)


def test_function_of_the_main_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pid, "__module__", "__main__")
    with pytest.raises(TypeError, match="_pid is defined in the script that runs: move it"):
        run_ranks(1, _pid)


def _fit_then_nothing() -> None:
    module = BoringModel()
    pl.Trainer(accelerator="cpu", devices=1, max_steps=1, logger=False, enable_checkpointing=False).fit(module)


def test_stacks_are_still_shown_after_a_trainer_has_reset_the_signal_handlers() -> None:
    run_ranks(1, _fit_then_nothing)
    with pytest.raises(RanksTimedOut, match="in _wait_forever_on"):
        run_ranks(1, _wait_forever_on, 0, timeout=1.0)


def test_children_survive_the_process_groups_that_tests_left() -> None:
    """`conftest.py` sees to it; the collector of a forked worker killed it where it came to one of them."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    cycle: list[Any] = [dist.new_group() for _ in range(10)]
    cycle.append(cycle)
    dist.destroy_process_group()
    del cycle
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends it in C too
        signal.alarm(30)
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
