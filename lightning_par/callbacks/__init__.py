"""Lightning callbacks, thin shells over what knows no Lightning."""

from lightning_par.callbacks.committed_checkpoint import CommittedCheckpoint
from lightning_par.callbacks.memory_monitor import MemoryMonitor
from lightning_par.callbacks.rank_zero_logger import RankZeroLogger

__all__ = ["CommittedCheckpoint", "MemoryMonitor", "RankZeroLogger"]
