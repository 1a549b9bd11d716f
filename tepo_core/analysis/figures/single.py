"""Pictures of one run, for the notebook of its stage: what its folder says, drawn; nothing is decided here.

A notebook shows them with :func:`tepo_core.analysis.figures.canvas.show`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from tepo_core.analysis.figures.canvas import RC, panels
from tepo_core.runs.metrics import Metrics


@matplotlib.rc_context(RC)
def warmup_figure(metrics: Metrics) -> Figure:
    """Loss against steps."""
    frame = metrics.frame("warmup").reindex(columns=["step", "loss"])
    figure, (axis,) = panels(1, 1, width=6)
    axis.plot(frame["step"], frame["loss"], color="#0072B2")
    axis.set(xlabel="step", ylabel="loss (nats per token)", yscale="log" if len(frame) else "linear")
    return figure


@matplotlib.rc_context(RC)
def training_figure(metrics: Metrics) -> Figure:
    """Training accuracy and entropy of the sampling policy against rollouts; greedy validation accuracy as points."""
    rollouts, checks = metrics.frame("rollout"), metrics.frame("validation")
    figure, (left, right) = panels(1, 2, width=9, height=3.2)
    left.plot(rollouts["step"], rollouts["correct"], color="#0072B2", label="sampled, training prompts")
    if len(checks):
        left.plot(checks["step"], checks["greedy"], "o", color="#D55E00", label="greedy, held-out prompts")
    left.set(xlabel="rollout step", ylabel="accuracy", ylim=(0, 1))
    left.legend()
    right.plot(rollouts["step"], rollouts["entropy"], color="#009E73")
    top = rollouts["entropy"].max()
    right.set(xlabel="rollout step", ylabel="entropy (nats per token)", ylim=(0, 1.05 * top if top > 0 else None))
    for axis in (left, right):
        axis.xaxis.get_major_locator().set_params(integer=True)  # there is no half rollout
    return figure


@matplotlib.rc_context(RC)
def pass_at_k_figure(summary: Mapping[str, Any]) -> Figure:
    """pass@k against k, one line a split; ``summary`` as in ``summary.json``."""
    splits = summary["splits"]
    figure, (axis,) = panels(1, 1, width=6, height=3.2)
    for (split, s), marker in zip(splits.items(), "osd^v*" * 4, strict=False):
        axis.plot([int(k) for k in s["pass@k"]], list(s["pass@k"].values()), marker=marker, label=split)
    axis.set(xscale="log", xlabel="k", ylabel="pass@k (unbiased)", ylim=(0, 1.02))
    axis.set_xticks(sorted({int(k) for s in splits.values() for k in s["pass@k"]}), minor=False, labels=None)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.minorticks_off()
    axis.legend()
    return figure
