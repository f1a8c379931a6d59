"""A batch on its way through a pipeline: the step that is run on its micro-batches, and what that returned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_par.parallel import _compat
from lightning_par.parallel.pipeline.microbatches import merge


@dataclass(frozen=True)
class Step:
    """A step of the user.

    Attributes:
        run: Runs it on a micro-batch. On the last stage, where it runs to its end.
        dry: The same, and leaves no trace beside the model: nothing is logged, no metric is changed.
        loss: Finds the loss in what it returned.
        kind: Steps of one kind go through the same code: "train", "validate", ...
    """

    run: Callable[[Any], Any]
    dry: Callable[[Any], Any]
    loss: Callable[[Any], Tensor]
    kind: str


@dataclass
class Results:
    """What the steps on the micro-batches returned, on the rank of the last stage; empty elsewhere.

    Attributes:
        outputs: By micro-batch, without graphs.
        weights: Of their losses.
        sizes: The samples in each.
        loss: Of the batch: the weighted sum, without a graph.
    """

    outputs: dict[int, Any] = field(default_factory=dict)
    weights: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    loss: Tensor | None = None

    def output(self) -> Any:
        """What one step on the batch would have returned; its loss has no graph."""
        output = merge([self.outputs[index] for index in sorted(self.outputs)], self.weights)
        if self.loss is None:
            return output
        # That of a batch may be a sum, and no mean of those of its micro-batches.
        if isinstance(output, Mapping):
            return {**output, "loss": self.loss}
        return self.loss.reshape(output.shape) if isinstance(output, Tensor) else output


@dataclass
class Batch:
    """A batch, cut into micro-batches.

    Attributes:
        step: What is run on each of them.
        parts: The micro-batches.
        sizes: The samples in each.
        scale: Of the loss, for backward.
        train: Whether there is a backward.
        check: Whether to look for NaN where there must be none.
        seed: Of the random numbers of the first micro-batch.
        failure: The first error on this rank.
        made_nan: In how many micro-batches a stage has made NaN of numbers, by its first block.
        results: What the steps have returned until now.
    """

    step: Step
    parts: Sequence[Any]
    sizes: Sequence[int]
    scale: float = 1.0
    train: bool = False
    check: bool = False
    seed: int = 0
    failure: Exception | None = None
    made_nan: Counter[int] = field(default_factory=Counter)
    results: Results = field(default_factory=Results)

    def fail(self, error: Exception) -> None:
        self.failure = self.failure or error

    def key(self, index: int) -> tuple[str, tuple[Any, ...]]:
        """What the shapes of the tensors that cross in a micro-batch depend on."""
        return self.step.kind, _shapes(self.parts[index])

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Keep an error until all stages are told of it."""
        try:
            yield
        except Exception as error:  # the user's own code
            self.fail(error)


def loss_of(result: Any) -> Tensor:
    """Find the loss in what a step returned.

    Raises:
        RuntimeError: If there is none.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise RuntimeError(
            "a training step returns its loss, as a tensor or under 'loss' in a mapping, and for every micro-batch of "
            f"a pipeline; it returned {type(result).__name__}"
        )
    return loss


def _shapes(part: Any) -> tuple[Any, ...]:
    return tuple(_shape(leaf) for leaf in _compat.leaves(part))


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    # An object of the user's own: the tensors in it.
    inside = vars(leaf).values() if hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module) else ()
    return type(leaf), *(_shapes(value) for value in inside)
