"""What the watchdogs of all ranks tell each other through a store. Nothing here waits for another rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from lightning_par.resilience import _compat


class Board:
    """Records of all ranks, questions to all of them, and their answers.

    Args:
        store: A `torch.distributed.Store` through a connection that nobody else uses: a thread that waits for a key
            keeps all others from it.
        rank: This rank.
        ranks: How many there are.
    """

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self._store = store
        self._known: set[int] = set()
        self._folders: dict[int, str] = {}

    @classmethod
    def of_default_group(cls, name: str) -> Board | None:
        """A board of the ranks of the default process group; None without one, or with one rank.

        Args:
            name: The same on all ranks, and another one for each board.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return None
        store = _compat.own_connection()
        if store is None:
            return None
        own = dist.PrefixStore(f"lightning_par/watchdog/{name}", store)  # type: ignore[attr-defined]
        return cls(own, dist.get_rank(), dist.get_world_size())

    def publish(self, record: Mapping[str, Any]) -> None:
        """Replace the record of this rank."""
        self._store.set(f"record/{self.rank}", json.dumps(record))

    def records(self) -> dict[int, dict[str, Any]]:
        """The records of the ranks that have published one."""
        for rank in set(range(self.ranks)) - self._known:
            if self._store.check([f"record/{rank}"]):
                self._known.add(rank)
        return self._read("record", sorted(self._known))

    def ask(self, folder: str) -> int:
        """Ask all ranks where they are.

        Args:
            folder: Where they write what does not fit into an answer.

        Returns:
            The number of the question.
        """
        number = self._store.add("questions", 1)
        self._store.set(f"folder/{number}", folder)
        return number

    def question(self) -> tuple[int, str] | None:
        """The newest question and its folder."""
        number = self._store.add("questions", 0)
        if number and number not in self._folders:
            if not self._store.check([f"folder/{number}"]):
                return None
            self._folders[number] = self._store.get(f"folder/{number}").decode()
        return (number, self._folders[number]) if number else None

    def answer(self, question: int, answer: Mapping[str, Any]) -> None:
        """Answer for this rank."""
        self._store.set(f"answer/{question}/{self.rank}", json.dumps(answer))

    def answers(self, question: int) -> dict[int, dict[str, Any]]:
        """The answers to a question that are there."""
        there = [rank for rank in range(self.ranks) if self._store.check([f"answer/{question}/{rank}"])]
        return self._read(f"answer/{question}", there)

    def abort(self) -> None:
        """Tell all ranks to end their processes."""
        self._store.add("abort", 1)

    @property
    def is_aborted(self) -> bool:
        """Whether a rank has told all to end."""
        return self._store.add("abort", 0) > 0

    def _read(self, what: str, ranks: list[int]) -> dict[int, dict[str, Any]]:
        if not ranks:
            return {}
        texts = self._store.multi_get([f"{what}/{rank}" for rank in ranks])
        return {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True)}
