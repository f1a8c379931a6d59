"""Lightning callbacks, thin shells over what knows no Lightning."""

from lightning_par.callbacks.committed_checkpoint import CommittedCheckpoint
from lightning_par.callbacks.memory_monitor import MemoryMonitor
from lightning_par.callbacks.nan_rewind import NaNRewind
from lightning_par.callbacks.parity_monitor import ParityMonitor
from lightning_par.callbacks.preemption_guard import PreemptionGuard
from lightning_par.callbacks.rank_zero_logger import RankZeroLogger
from lightning_par.callbacks.stall_watchdog import StallWatchdog
from lightning_par.callbacks.straggler_monitor import StragglerMonitor
from lightning_par.callbacks.throughput_monitor import ThroughputMonitor

__all__ = [
    "CommittedCheckpoint",
    "MemoryMonitor",
    "NaNRewind",
    "ParityMonitor",
    "PreemptionGuard",
    "RankZeroLogger",
    "StallWatchdog",
    "StragglerMonitor",
    "ThroughputMonitor",
]
