"""Named points of a save at which a test can end, stop or fail a process; without the variable they do nothing.

The environment variable `LIGHTNING_PAR_CRASH` is ``name@rank@nth:action``: the `nth` time (from 1) that `rank` comes to
the point, it does what `action` says: ``kill`` (SIGKILL to itself), ``exit`` (status 1, without any clean-up), ``stop``
(SIGSTOP to itself), ``raise`` (an `OSError`, as a disk gives it).
"""

from __future__ import annotations

import errno
import os
import signal

VARIABLE = "LIGHTNING_PAR_CRASH"

# In the order of a save. Those of `EVERY_RANK` are reached by all ranks, the others by rank 0.
NAMES = (
    "before_attempt",
    "attempt_made",
    "in_shard",
    "shard_written",
    "metadata_written",
    "rank_file_written",
    "meta_written",
    "outcome_gathered",
    "manifest_temporary",
    "manifest_in_place",
    "renamed",
    "latest_temporary",
    "latest_written",
    "trash_renamed",
    "committed",
    "in_load",
)
EVERY_RANK = frozenset(
    {
        "before_attempt",
        "attempt_made",
        "in_shard",
        "shard_written",
        "rank_file_written",
        "outcome_gathered",
        "committed",
        "in_load",
    }
)

_reached: dict[str, int] = {}


def crash_point(name: str, rank: int) -> None:
    """Do what the environment asks for at this point.

    Args:
        name: One of `NAMES`.
        rank: The rank among those that save together.

    Raises:
        OSError: If the action is ``raise``.
    """
    asked = os.environ.get(VARIABLE)
    if not asked:
        return
    place, action = asked.rsplit(":", 1)
    wanted, wanted_rank, nth = place.split("@")
    if name != wanted or rank != int(wanted_rank):
        return
    _reached[asked] = _reached.get(asked, 0) + 1
    if _reached[asked] != int(nth):
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "exit":
        os._exit(1)
    elif action == "raise":
        raise OSError(errno.EIO, f"asked for by {VARIABLE}", name)
    else:
        raise ValueError(f"{VARIABLE}={asked}: no action {action!r}")
