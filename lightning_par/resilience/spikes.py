"""Which values of a loss or of a gradient norm are too far above those before to be learned from."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from lightning_par.errors import Problems

WINDOW = 128
ACTIVE_AFTER = 64


class SpikeRule:
    """Compares each value with the last ones that were accepted; the same values give the same answers.

    A value is a spike where it is above ``mean + sigmas * max(std, relative_floor * |mean|)`` of the window, or above
    `cap` times the largest of its absolute values. Only accepted values enter the window.

    Args:
        sigmas: How many standard deviations above the mean.
        robust: Take the median and 1.4826 times the median absolute deviation (which is the standard deviation of a
            normal distribution) for mean and standard deviation: for values whose distribution has a long tail.
        relative_floor: The least standard deviation, as a part of the mean.
        cap: How many times the largest of the window.
        window: How many accepted values are looked at.
        active_after: How many there must be before anything is a spike.

    Raises:
        ParallelConfigError: If a number makes no sense.
    """

    def __init__(
        self,
        *,
        sigmas: float = 6.0,
        robust: bool = False,
        relative_floor: float = 0.02,
        cap: float = 10.0,
        window: int = WINDOW,
        active_after: int = ACTIVE_AFTER,
    ) -> None:
        problems = Problems()
        for name, value, least in (("sigmas", sigmas, 0.0), ("relative_floor", relative_floor, 0.0), ("cap", cap, 1.0)):
            if not value > least:
                problems.add(f"SpikeRule: {name} is {value}; it is above {least:g}", f"{name}={least + 1:g}")
        if not 2 <= active_after <= window:
            problems.add(
                f"SpikeRule: active_after is {active_after} and window {window}; at least 2 values tell what is usual, "
                "and no more are kept than the window has",
                f"active_after={max(2, window // 2)}",
            )
        problems.raise_if_any()
        self.sigmas, self.robust, self.relative_floor, self.cap = sigmas, robust, relative_floor, cap
        self.active_after = active_after
        self._values: deque[float] = deque(maxlen=window)

    def limit(self) -> float:
        """The largest value that is no spike; infinite as long as too few were accepted, or none but zeros."""
        values = self._values
        if len(values) < self.active_after:
            return math.inf
        if self.robust:
            middle = statistics.median(values)
            spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
        else:
            middle = math.fsum(values) / len(values)
            spread = math.sqrt(math.fsum((value - middle) ** 2 for value in values) / len(values))
        spread = max(spread, self.relative_floor * abs(middle))
        # Zeros tell nothing of how large other values are.
        usual = middle + self.sigmas * spread if spread else math.inf
        return min(usual, self.cap * max(map(abs, values)) or math.inf)

    def accept(self, value: float) -> None:
        """Let a value tell what is usual; one that is not finite does not."""
        if math.isfinite(value):
            self._values.append(value)

    def restart(self) -> None:
        """Forget what is usual, as a new level has been reached."""
        self._values.clear()

    def state_dict(self) -> dict[str, Any]:
        """The window, as plain numbers."""
        return {"values": list(self._values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the window of `state_dict`."""
        self._values.clear()
        self._values.extend(state["values"])
