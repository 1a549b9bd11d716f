"""What a notebook shows of a finished training run: small tables, read back from the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from tepo_core.runs.metrics import Metrics, read_metrics


@dataclass(frozen=True)
class TrainResult:
    """A finished training run."""

    folder: Path

    @cached_property
    def metrics(self) -> Metrics:
        """The run's metrics, read once."""
        return read_metrics(self.folder)

    def table(self) -> pd.DataFrame:
        """Accuracy, entropy and length about every tenth of the run; the share that was not graded where there is any."""
        frame = self.metrics.frame("rollout").set_index("step")
        lost = ["ungraded"] if frame.get("ungraded", pd.Series([0.0])).any() else []
        shown = frame[["correct", *lost, "format", "entropy", "length", "zero_variance"]]
        step = max(1, len(shown) // 10)
        return pd.concat([shown.iloc[:-1:step], shown.iloc[-1:]])

    def updates(self) -> pd.DataFrame:
        """Means over the updates of about every tenth of the run: what the objective did."""
        frame = self.metrics.frame("update").groupby("step").mean()
        names = [
            n for n in ("loss", "grad_norm", "clip", "mask", "kl_old", "abs_log_ratio", "positive_entropy_fell") if n in frame
        ]
        return frame[names].iloc[:: max(1, len(frame) // 10)]
