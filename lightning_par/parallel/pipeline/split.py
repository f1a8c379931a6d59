"""Cut a chain of blocks into stages of equal work, and among those into ones of equal memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_par.errors import Problem, Problems
from lightning_par.parallel.pipeline.probe import Chain

Split = Literal["auto"] | Sequence[int] | Sequence[str]

# Work within this of the best is as good: then memory decides.
_AS_GOOD = 1.02


@dataclass(frozen=True)
class Stage:
    """A part of the chain.

    Attributes:
        index: Its place among all stages.
        count: How many stages there are.
        begin: Its first block.
        end: One past its last block.
        share: Its share of the forward FLOPs of all stages.
    """

    index: int
    count: int
    begin: int
    end: int
    share: float = 0.0

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def runs(self, place: int, blocks: int) -> bool:
        """Whether what happens at a place of the chain (see `probe`) happens on this stage."""
        first = 0 if self.is_first else self.begin + 1
        last = blocks if self.is_last else self.end
        return first <= place <= last


def split_chain(
    chain: Chain, count: int, split: Split = "auto", memory: Callable[[int, int, int], float] | None = None
) -> list[Stage]:
    """Cut a chain into stages.

    Args:
        chain: The chain.
        count: Number of stages.
        split: "auto"; or the number of blocks of each stage; or the name of the first block of each stage but the
            first.
        memory: Bytes of a stage, given its index and its first and past-last block; what "auto" balances among splits
            of nearly equal work.

    Raises:
        ParallelConfigError: If there are fewer blocks than stages, if the split does not fit them, or if the chain
            cannot be cut at a place.
    """
    problems = Problems()
    blocks = len(chain.blocks)
    if blocks < count:
        problems.add(
            f"the model has {blocks} blocks, fewer than the {count} stages of the pipeline (pp_size times the stages "
            "of each rank)",
            f"pp_size={blocks}, with pp_stages_per_rank=1 and a schedule that does not interleave",
            f"pp_size: {blocks}",
        )
        problems.raise_if_any()
    if isinstance(split, str):
        cuts = _balanced(chain, count, memory)
        if cuts is None:
            refused = next(cut for cut in chain.cuts[1:] if cut.refused)
            places = sum(1 for cut in chain.cuts[1:] if not cut.refused)
            problems.add(
                f"the chain can be cut at {places} of {blocks - 1} places, and {count} stages need {count - 1}: "
                f"{refused.refused}",
                refused.fix,
            )
    else:
        cuts, found = _given(chain, count, split)
        problems.extend(found)
    problems.raise_if_any()
    assert cuts is not None
    edges = [0, *cuts, blocks]
    total = _work(chain, 0, blocks) or 1.0
    return [
        Stage(i, count, begin, end, _work(chain, begin, end) / total)
        for i, (begin, end) in enumerate(zip(edges, edges[1:], strict=False))
    ]


def _work(chain: Chain, begin: int, end: int) -> float:
    """Forward FLOPs of a stage. Where nothing is counted, blocks are equal."""
    flops = chain.block_flops if any(chain.block_flops) else (1.0,) * len(chain.blocks)
    work = sum(flops[begin:end])
    if begin == 0:
        work += chain.prefix_flops
    if end == len(flops):
        work += chain.suffix_flops
    return work


def _balanced(chain: Chain, count: int, memory: Callable[[int, int, int], float] | None) -> list[int] | None:
    """Find the cuts with the least work on the busiest stage, and then the least memory on the fullest one."""
    work = _best(chain, count, lambda index, begin, end: _work(chain, begin, end))
    if work is None or memory is None:
        return work and work[1]
    limit = work[0] * _AS_GOOD

    def within(index: int, begin: int, end: int) -> float:
        return memory(index, begin, end) if _work(chain, begin, end) <= limit else float("inf")

    least = _best(chain, count, within)
    assert least is not None
    return least[1]


def _best(chain: Chain, count: int, cost: Callable[[int, int, int], float]) -> tuple[float, list[int]] | None:
    """Minimise the largest cost of a stage (linear partition by dynamic programming); None where cuts are lacking."""
    blocks = len(chain.blocks)
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # end of the stages so far: their largest cost and cuts
    for index in range(count):
        left = count - index - 1
        reached: dict[int, tuple[float, list[int]]] = {}
        for begin, (largest, cuts) in best.items():
            for end in range(begin + 1, blocks - left + 1):
                if (end == blocks) != (left == 0) or (end < blocks and chain.cuts[end].refused):
                    continue
                found = max(largest, cost(index, begin, end))
                if end not in reached or found < reached[end][0]:
                    reached[end] = (found, [*cuts, end])
        best = reached
    if blocks not in best:
        return None
    largest, cuts = best[blocks]
    return largest, cuts[:-1]


def _given(chain: Chain, count: int, split: Sequence[int] | Sequence[str]) -> tuple[list[int] | None, list[Problem]]:
    problems = Problems()
    blocks = len(chain.blocks)
    cuts: list[int] = []
    if all(isinstance(entry, int) and not isinstance(entry, bool) for entry in split):
        counts = [int(entry) for entry in split]
        if len(counts) != count or sum(counts) != blocks or min(counts, default=0) < 1:
            even = [len(range(i, blocks, count)) for i in range(count)]
            problems.add(
                f"pp_split={counts} is no division of {blocks} blocks into {count} stages of at least one each",
                f"pp_split={even}",
            )
            return None, list(problems)
        for number in counts[:-1]:
            cuts.append((cuts[-1] if cuts else 0) + number)
    else:
        names = [str(entry) for entry in split]
        unknown = [name for name in names if name not in chain.blocks[1:]]
        if (
            unknown
            or len(names) != count - 1
            or sorted(names, key=_order(chain)) != names
            or len(set(names)) < len(names)
        ):
            example = [chain.blocks[(i + 1) * blocks // count] for i in range(count - 1)]
            problems.add(
                f"pp_split={names} does not name the first block of each of the stages 1 to {count - 1} in order"
                + (f"; no block begins a later stage under the name {unknown[0]!r}" if unknown else ""),
                f"pp_split={example}",
            )
            return None, list(problems)
        cuts = [chain.blocks.index(name) for name in names]
    for cut in cuts:
        if chain.cuts[cut].refused:
            problems.add(
                f"pp_split cuts before {chain.blocks[cut]!r}, and there {chain.cuts[cut].refused}", chain.cuts[cut].fix
            )
    return cuts, list(problems)


def _order(chain: Chain) -> Callable[[str], int]:
    places = {name: place for place, name in enumerate(chain.blocks)}
    return lambda name: places.get(name, -1)
