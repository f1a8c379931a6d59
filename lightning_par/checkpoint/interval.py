"""How often to save."""

from __future__ import annotations

import math


def best_interval(cost: float, mtbf: float) -> float:
    """Return the time between saves that loses the least work.

    Daly's higher-order estimate, which is about ``sqrt(2 * cost * mtbf)``, Young's, where saves are short (J. T. Daly,
    "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, equation 37; J. W. Young, "A
    first order approximation to the optimum checkpoint interval", 1974).

    Args:
        cost: Seconds for which a save keeps training waiting.
        mtbf: Mean seconds between failures of the whole job.

    Returns:
        Seconds of training between two saves.

    Raises:
        ValueError: If one of them is not positive.
    """
    if cost <= 0 or mtbf <= 0:
        raise ValueError(f"cost and mtbf are seconds above 0; they are {cost} and {mtbf}")
    if cost >= 2 * mtbf:
        return mtbf
    ratio = math.sqrt(cost / (2 * mtbf))
    return math.sqrt(2 * cost * mtbf) * (1 + ratio / 3 + ratio**2 / 9) - cost
