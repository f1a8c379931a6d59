"""Lightning callbacks, thin shells over what knows no Lightning."""

from lightning_par.callbacks.rank_zero_logger import RankZeroLogger

__all__ = ["RankZeroLogger"]
