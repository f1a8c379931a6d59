"""Hearing signals without doing anything inside of a handler.

The interpreter writes the number of a signal to a socket as it arrives, whatever the main thread is doing, and a thread
reads it from there. A Python handler would wait until a blocked collective has returned.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

_CLOSE = b"\0"


class SignalListener:
    """Calls a function, on a thread of its own, for each signal of a few kinds, between `start` and `stop`.

    The handlers that were there do not run meanwhile; `stop` puts them back. Forked children, such as workers of a
    loader, do not listen: there SIGTERM ends a child only where the parent sent it, and other signals are ignored, so
    that a signal to the whole process group does not take its workers from a rank that is saving.

    Args:
        numbers: The kinds.
        heard: Given the number of each signal.
    """

    def __init__(self, numbers: Collection[int], heard: Callable[[int], None]) -> None:
        self._numbers = tuple(numbers)
        self._heard = heard
        self._previous: dict[int, Any] = {}
        self._previous_fd = -1
        self._write: socket.socket | None = None
        self._pid = 0

    def start(self) -> None:
        """Begin; in the main thread, a second call does nothing.

        Raises:
            RuntimeError: In another thread, where Python allows no handlers.
        """
        if self._write is not None:
            return
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("signals can be heard in the main thread only")
        read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._pid = os.getpid()
        threading.Thread(target=self._listen, args=(read,), name="signals", daemon=True).start()
        self._previous_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, _nothing) for number in self._numbers}
        # It cannot be unregistered, so it keeps nobody alive.
        os.register_at_fork(after_in_child=partial(_after_fork, weakref.ref(self)))

    def stop(self) -> None:
        """Put back what was there before; a second call does nothing."""
        if self._write is None:
            return
        for number, previous in self._previous.items():
            # None: a handler that was not made in Python, and cannot be put back from there.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        signal.set_wakeup_fd(self._previous_fd)
        write, self._write = self._write, None
        write.send(_CLOSE)
        write.close()

    def _listen(self, read: socket.socket) -> None:
        with read:
            while (received := read.recv(64)) and _CLOSE not in received:
                for number in received:
                    if number in self._numbers:
                        self._heard(number)
                if self._previous_fd != -1:
                    with contextlib.suppress(OSError):
                        os.write(self._previous_fd, received)

    def _leave_to_parent(self) -> None:
        if self._write is None or self._pid != os.getppid():
            return
        # Before anything else: until then a signal to the child would be heard in the parent.
        signal.set_wakeup_fd(-1)
        self._write = None
        for number in self._numbers:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
        if signal.SIGTERM in self._numbers:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_end_for, args=(self._pid,), name="signals", daemon=True).start()


def _after_fork(listener: weakref.ref[SignalListener]) -> None:
    if (found := listener()) is not None:
        found._leave_to_parent()


def _nothing(number: int, frame: Any) -> None:
    """A handler that is there so that the interpreter writes the number."""


def _end_for(parent: int) -> None:
    """Wait for a SIGTERM of the parent, and end."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
