"""Which rank a report names, and what it says of the others."""

from __future__ import annotations

import sysconfig
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_par.resilience._compat import around_waits
from lightning_par.resilience.stall_report import RankView, call_of, guilty, judge, numbers, report, stack_of


def group(called: int, over: int, call: str = "all_reduce [3] Float", ranks: tuple[int, ...] = (0, 1, 2)) -> Any:
    calls = {str(i): "all_reduce [3] Float" for i in range(1, called)} | {str(called): call}
    return {"name": "0", "about": "default_pg", "ranks": list(ranks), "called": called, "over": over, "calls": calls}


def views(*ranks: dict[str, Any]) -> dict[int, RankView]:
    return {i: RankView(i, host=f"node-{i}", **({"step": 4, "phase": "backward"} | r)) for i, r in enumerate(ranks)}


WAITS: dict[str, Any] = {"groups": [group(4, 3)]}
BROADCAST: dict[str, Any] = {"groups": [group(4, 3, "broadcast [3] Float")]}
SLEEPS: dict[str, Any] = {"phase": "data", "groups": [group(3, 3)]}


@pytest.mark.parametrize(
    ("ranks", "kinds", "first", "words"),
    [
        (
            [WAITS, WAITS, SLEEPS],
            "waiting waiting late",
            [2],
            "ranks 0-1 wait for it in all_reduce [3] Float, number 4",
        ),
        ([WAITS, WAITS, SLEEPS | {"step": 3}], "waiting waiting late", [2], "behind, and in no collective"),
        ([WAITS, {"phase": "data"}, WAITS], "waiting late waiting", [1], "ranks 0, 2 wait for it in all_reduce"),
        ([WAITS, {"silent": 9.0}, WAITS], "waiting missing waiting", [1], "no sign of life for 9 s"),
        ([WAITS, {"silent": None}, WAITS], "waiting missing waiting", [1], "never heard of"),
        ([WAITS, {"ended": "ValueError: x"}, WAITS], "waiting ended waiting", [1], "has ended: ValueError: x"),
        (
            [WAITS, BROADCAST, WAITS],
            "waiting mismatch waiting",
            [1],
            "it calls broadcast [3] Float as number 4 in group",
        ),
        ([WAITS, BROADCAST], "mismatch mismatch", [0, 1], "rank 0: all_reduce [3] Float"),
        ([WAITS, WAITS, WAITS], "waiting waiting waiting", [], "as all its ranks do"),
        ([{}, {"step": 3}, {}], "still behind still", [1], "ranks 0, 2 came as far as step 4"),
        ([{}, {}, {"phase": "data"}], "still still elsewhere", [2], "as ranks 0-1, which are in backward"),
        ([{"phase": "data"}], "still", [], "makes no progress"),
        ([{"call": "recv"}, {}], "waiting late", [1], "in no call of torch.distributed, in which rank 0 waits"),
    ],
)
def test_the_rank_that_holds_up_the_others_is_named(
    ranks: list[dict[str, Any]], kinds: str, first: list[int], words: str
) -> None:
    seen = views(*ranks)
    verdicts = judge(seen)
    assert [v.kind for v in verdicts.values()] == kinds.split()
    assert guilty(verdicts) == first
    text = report(seen, verdicts, "run/stalls/1")
    assert words in text
    assert "run/stalls/1" in text
    for rank in first:
        assert f"rank {rank} on node-{rank}" in text.splitlines()[1]


def test_a_rank_that_waits_for_one_that_waits_elsewhere_is_not_to_blame() -> None:
    """Rank 2 sleeps; rank 1 waits for it in their group; rank 0 waits for rank 1 in theirs."""
    of_01 = [
        group(5, 4, ranks=(0, 1)) | {"name": "a"},
        group(4, 4, ranks=(0, 1)) | {"name": "a"},
    ]
    of_12 = [group(7, 6, ranks=(1, 2)) | {"name": "b"}, group(6, 6, ranks=(1, 2)) | {"name": "b"}]
    seen = views({"groups": [of_01[0]]}, {"groups": [of_01[1], of_12[0]]}, {"groups": [of_12[1]]})
    verdicts = judge(seen)
    assert guilty(verdicts) == [2]
    assert "waits for rank 1 " in verdicts[0].text
    assert "waits for rank 2 " in verdicts[1].text


def test_ranks_that_wait_for_each_other_are_told_so() -> None:
    ahead, behind = group(5, 4, ranks=(0, 1)), group(4, 4, ranks=(0, 1))
    seen = views(
        {"groups": [ahead | {"name": "a"}, behind | {"name": "b"}]},
        {"groups": [behind | {"name": "a"}, ahead | {"name": "b"}]},
    )
    verdicts = judge(seen)
    assert not guilty(verdicts)
    assert "different orders" in report(seen, verdicts)


def test_many_ranks_that_wait_alike_take_one_line() -> None:
    seen = views(*[WAITS | {"stack": ["train.py:3 in step: wait()"]}] * 500, SLEEPS)
    text = report(seen, judge(seen))
    assert "ranks 0-499, step 4, backward: waits" in text
    assert len(text.splitlines()) == 5


def test_numbers_of_ranks_are_short() -> None:
    assert [numbers(r) for r in ([3], [2, 0, 1, 5], [4, 5])] == ["rank 3", "ranks 0-2, 5", "ranks 4-5"]


def test_a_stack_shows_where_a_thread_is() -> None:
    come, go = threading.Event(), threading.Event()

    def in_users_code() -> None:
        come.set()
        go.wait()  # here

    thread = threading.Thread(target=in_users_code)
    thread.start()
    come.wait()
    stack = stack_of(thread.ident or 0)
    go.set()
    thread.join()
    assert any("in in_users_code: go.wait()  # here" in line for line in stack[:2])
    assert not any("in _bootstrap" in line for line in stack)
    assert stack_of(thread.ident or 0) == []


def test_the_package_that_waits_is_told_too() -> None:
    client = str(Path(sysconfig.get_paths()["purelib"], "client", "read.py"))
    known: dict[str, Any] = {}
    exec(compile("def read(come, go):\n    come.set()\n    go.wait()\n", client, "exec"), known)
    come, go = threading.Event(), threading.Event()
    thread = threading.Thread(target=known["read"], args=(come, go))
    thread.start()
    come.wait()
    # Until the thread is inside of `wait`.
    while len(stack := stack_of(thread.ident or 0)) < 2:
        pass
    go.set()
    thread.join()
    assert f"{client}:3 in read" in stack[1]
    assert "threading.py" in stack[0]


class Work(float):
    """As torch's own: a wait is no frame of Python."""

    wait = time.sleep


def test_a_wait_that_is_timed_is_in_the_call_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(Path(sysconfig.get_paths()["purelib"], "torch", "distributed", "p2p.py"))
    known: dict[str, Any] = {"__name__": "torch.distributed.p2p"}
    exec(compile("def recv(work):\n    work.wait()\n", file, "exec"), known)
    script = str(Path(sysconfig.get_paths()["scripts"], "command"))
    exec(compile("def main(work):\n    recv(work)\n", script, "exec"), known)
    monkeypatch.setattr(dist, "Work", Work)
    come = threading.Event()
    undo = around_waits(come.set, lambda _: None)
    thread = threading.Thread(target=known["main"], args=(Work(0.2),), daemon=True)
    thread.start()
    come.wait()
    # Until the thread is inside of `wait`.
    while (call := call_of(thread.ident or 0)) is None:
        assert thread.is_alive()
    assert call == "recv of torch.distributed.p2p"
    assert [line.split(": ")[0] for line in stack_of(thread.ident or 0)] == [f"{file}:2 in recv"]
    thread.join()
    undo()
