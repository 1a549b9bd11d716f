"""Live progress that never enters a saved notebook.

Times differ from run to run, and executed notebooks must not. So progress lines go to the file named by the environment variable
``TEPO_PROGRESS`` (the notebook runner follows it and prints to the terminal), or to standard error where it is not set.
"""

from __future__ import annotations

import os
import sys
import time

CHANNEL = "TEPO_PROGRESS"


def duration(seconds: float) -> str:
    """Seconds as ``42 s``, ``3 min 05 s`` or ``2 h 07 min``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Progress:
    """One line every few seconds: label, step, given values, tokens per second, time left.

    ``total`` is the number of steps. The first call of :meth:`update` may come at any step: after a resume the time left is
    estimated from the steps of this process alone. ``every`` is the least number of seconds between two lines; the first and
    the last step are always printed."""

    def __init__(self, total: int, label: str = "", every: float = 3.0) -> None:
        self.total, self.label, self.every = total, label, every
        self._started = self._printed = time.monotonic()
        self._steps = 0
        self._tokens = 0.0
        self._first = True

    def line(self, text: str) -> None:
        """Print one line now. A channel that cannot be written falls back to standard error: progress never stops a run."""
        text = f"{self.label}: {text}" if self.label else text
        channel = os.environ.get(CHANNEL)
        if channel:
            try:
                with open(channel, "a", encoding="utf-8") as file:
                    file.write(text + "\n")
                return
            except OSError:
                pass
        print(text, file=sys.stderr, flush=True)

    def update(self, step: int, *, tokens: float = 0, **values: float) -> None:
        """Report that ``step`` (1-based) of ``total`` is done. ``tokens`` is the number handled since the last call."""
        now = time.monotonic()
        self._steps += 1
        self._tokens += tokens
        if not self._first and step < self.total and now - self._printed < self.every:
            return
        parts = [f"{step}/{self.total}"]
        parts += [
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
        ]
        if self._tokens and now > self._started:
            parts.append(f"{self._tokens / (now - self._started):,.0f} tokens/s")
        left = (now - self._started) / self._steps * (self.total - step)
        parts.append(f"{duration(left)} left" if step < self.total else f"done in {duration(now - self._started)}")
        self.line("  ".join(parts))
        self._printed = now
        self._first = False
