"""Private Lightning APIs about what `self.log` reduces over the ranks; `tests/test_compat.py` tells what breaks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lightning.pytorch.trainer.connectors.logger_connector import result


def before_reducing_logged(trainer: Any, check: Callable[[list[str]], None]) -> Callable[[], None]:
    """Call `check` with the names of what ranks reduce together, before they do so at the end of an epoch.

    The first reduction comes of whoever reads a metric after `epoch_end_reached`; what was logged in the hooks of that
    end is reduced in `on_epoch_end` (`_LoggerConnector`, `_ResultCollection`, 2.0).

    Returns:
        A function that undoes it.
    """
    connector = trainer._logger_connector
    names = ("epoch_end_reached", "on_epoch_end")

    def before(original: Callable[[], Any]) -> Any:
        check(_names_to_reduce(trainer._results))
        return original()

    def undo() -> None:
        for name in names:
            connector.__dict__.pop(name, None)

    for name in names:
        setattr(connector, name, functools.partial(before, getattr(connector, name)))
    return undo


def name_metric_that_fails() -> Callable[[], None]:
    """Say in the error of a reduction within a step which metric it was for (`_ResultMetric.update`, lightning 2.0).

    Returns:
        A function that undoes it.
    """
    update = result._ResultMetric.update

    def update_and_name(self: Any, value: Any, batch_size: int) -> None:
        try:
            update(self, value, batch_size)
        except RuntimeError as e:
            e.add_note(
                f"This rank was reducing what {self.meta.fx} logs as {self.meta.name!r}, with sync_dist=True: every "
                "rank has to log it in the same batch, and as often."
            )
            raise

    def undo() -> None:
        result._ResultMetric.update = update  # type: ignore[method-assign]

    result._ResultMetric.update = update_and_name  # type: ignore[method-assign]
    return undo


def _names_to_reduce(results: Any) -> list[str]:
    found = set()
    for _, item in () if results is None else results.valid_items():
        sync = item.meta.sync
        together = sync.should and not sync.rank_zero_only if item.is_tensor else item.value.sync_on_compute
        if item.meta.on_epoch and together:
            found.add(item.meta.name)
    return sorted(found)
