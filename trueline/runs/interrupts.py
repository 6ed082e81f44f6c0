"""Ctrl-C ends a run after the current update, with a checkpoint; a second one ends it at once.

So do SIGTERM, which schedulers send, and SIGHUP, which a dropped connection leaves behind.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class Interrupts:
    """Inside this context a first signal only requests the end and calls `break_off`."""

    def __init__(
        self,
        note: Callable[[str], None],
        saves: bool = True,
        break_off: Callable[[], None] = lambda: None,
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.note, self.saves, self.break_off, self.asked = note, saves, break_off, asked
        self.signalled = False
        self.previous: dict[int, Any] = {}

    def has_request(self) -> bool:
        """Whether a signal has come, or the code that follows the run has asked for its end."""
        return self.signalled or self.asked()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self.previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signalled:
            raise KeyboardInterrupt
        self.signalled = True
        self.break_off()
        how = "with" if self.saves else "without"
        text = f"stopping after the current update, {how} a checkpoint; interrupt again to stop at once"
        # In a thread: the signal may have come in the middle of a line, which would be written twice.
        threading.Thread(target=self.note, args=[text]).start()
