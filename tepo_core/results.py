"""What a notebook shows of a finished run: a small table and a figure, read back from the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tepo_core.run_record import metrics_frame


@dataclass(frozen=True)
class TrainResult:
    """A finished training run."""

    folder: Path

    def table(self) -> pd.DataFrame:
        """Accuracy, entropy and length about every tenth of the run."""
        frame = metrics_frame(self.folder, "rollout").set_index("step")
        shown = frame[["correct", "format", "entropy", "length", "zero_variance"]]
        step = max(1, len(shown) // 10)
        return pd.concat([shown.iloc[:-1:step], shown.iloc[-1:]])

    def updates(self) -> pd.DataFrame:
        """Means over the updates of about every tenth of the run: what the objective did."""
        frame = metrics_frame(self.folder, "update").groupby("step").mean()
        names = [
            n for n in ("loss", "grad_norm", "clip", "mask", "kl_old", "abs_log_ratio", "positive_entropy_fell") if n in frame
        ]
        return frame[names].iloc[:: max(1, len(frame) // 10)]

    def figure(self) -> Any:
        """Training accuracy and entropy of the sampling policy against rollouts; greedy validation accuracy as points."""
        import matplotlib.pyplot as plt

        rollouts, checks = metrics_frame(self.folder, "rollout"), metrics_frame(self.folder, "validation")
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
        left.plot(rollouts["step"], rollouts["correct"], color="#0072B2", label="sampled, training prompts")
        if len(checks):
            left.plot(checks["step"], checks["greedy"], "o", color="#D55E00", label="greedy, held-out prompts")
        left.set(xlabel="rollout step", ylabel="accuracy", ylim=(0, 1))
        left.legend(frameon=False)
        right.plot(rollouts["step"], rollouts["entropy"], color="#009E73")
        right.set(xlabel="rollout step", ylabel="entropy (nats per token)", ylim=(0, None))
        return figure
