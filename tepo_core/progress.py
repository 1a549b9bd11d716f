"""Live progress that never enters a saved notebook.

Times differ from run to run, and executed notebooks must not. So progress lines go to the file named by the environment
variable ``TEPO_PROGRESS`` (the notebook runner follows it and prints to the terminal), or to standard error without it.
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
        self._first: tuple[int, float] | None = None  # step and time of the first update
        self._tokens = 0.0

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

    def update(self, step: int, *, tokens: float = 0, **values: float | str) -> None:
        """Report that ``step`` (1-based) of ``total`` is done. ``tokens`` is the number handled since the last call."""
        now = time.monotonic()
        self._tokens += tokens
        first = self._first is None
        if first:
            self._first = (step, now)
        elif step < self.total and now - self._printed < self.every:
            return
        self._printed = now
        parts = [f"{step}/{self.total}"]
        parts += [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()]
        if self._tokens and now > self._started:
            parts.append(f"{self._tokens / (now - self._started):,.0f} tokens/s")
        if step >= self.total:
            parts.append(f"done in {duration(now - self._started)}")
        elif (left := self._left(step, now)) is not None:
            parts.append(f"{duration(left)} left")
        self.line("  ".join(parts))

    def _left(self, step: int, now: float) -> float | None:
        """Seconds to go at the speed since the first update; unknown while one update is all there is, unless it was step 1."""
        first_step, first_time = self._first or (step, now)
        if step > first_step:
            return (now - first_time) / (step - first_step) * (self.total - step)
        return (now - self._started) * (self.total - 1) if step == 1 else None
