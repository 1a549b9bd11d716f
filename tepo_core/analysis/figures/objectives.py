"""Pictures and tables of the objectives themselves, for notebooks/objectives.ipynb. Nothing here is used in training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

from tepo_core.analysis.figures.canvas import RC, panels
from tepo_core.config import find_root
from tepo_core.objectives.invariance import chunks, minibatch_gradient, random_batch, relative_error
from tepo_core.objectives.methods import PRESETS, Method, MiniBatchTotals, TokenBatch, resolve

SIZES = (16, 8, 2, 1)
TOKENS = 21  # of the response in the gradient pictures; the middle token is the one looked at
GAIN, LOSS = "#0072B2", "#D55E00"


def method_table(names: Sequence[str] | None = None, variants: Mapping[str, Any] | None = None) -> Any:
    """One row a method: ratio, bounds, aggregate, advantage, penalty, source and what is known of it (data frame)."""
    import pandas as pd

    rows = {}
    for method in (resolve(name, variants) for name in names or PRESETS):
        options, kl = method.settings, method.settings.kl
        rows[method.name] = {
            "ratio": getattr(options, "ratio", "token"),
            "clip": _text(getattr(options, "clip", None)),
            "aggregate": options.aggregate,
            "advantage": options.advantage,
            "penalty": "" if kl is None else f"{kl.beta:g} x {kl.estimator} to {kl.reference}, {kl.mask}",
            "source": method.source,
            "status": PRESETS[method.preset].status,
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def _text(clip: tuple[float | None, float | None] | None) -> str:
    return "" if clip is None else " / ".join("none" if bound is None else f"{bound:g}" for bound in clip)


def invariance_errors(name: str, variants: Mapping[str, Any] | None = None, sizes: Sequence[int] = SIZES) -> dict[int, float]:
    """Relative gradient error of micro-batches of each size against the whole mini-batch: 32 responses of up to 300 tokens,
    float32, the inputs that the record of verl was measured on."""
    method = resolve(name, variants)
    batch = random_batch(method, responses=32, longest=300, dtype=torch.float32)
    _, whole = minibatch_gradient(method, batch)
    return {size: relative_error(minibatch_gradient(method, batch, chunks(32, size))[1], whole) for size in sizes}


def invariance_table(names: Sequence[str] | None = None, sizes: Sequence[int] = SIZES) -> Any:
    """Ours beside verl's, one row a method, one column a micro-batch size (data frame).

    verl's figures are read from data/verl_invariance.json, which tests/peers checks against the installed verl."""
    import pandas as pd

    record = json.loads((find_root() / "data/verl_invariance.json").read_text(encoding="utf-8"))
    theirs = record["relative_gradient_error"]
    rows = {}
    for name in names or PRESETS:
        ours = invariance_errors(name, sizes=sizes)
        rows[name] = {("ours", size): ours[size] for size in sizes}
        rows[name] |= {(f"verl {record['verl']}", size): theirs.get(name, {}).get(str(size)) for size in sizes}
    table = pd.DataFrame.from_dict(rows, orient="index")
    table.columns = pd.MultiIndex.from_tuples(table.columns, names=["relative gradient error", "responses a micro-batch"])
    return table.map(lambda error: "" if pd.isna(error) else "0" if error == 0 else f"{error:.1e}")


def gradient_weight(method: Method, log_ratios: Tensor, advantage: float, *, whole: bool) -> Tensor:
    """dJ/dl of one token in a response of 21, divided by A and by what it would be on-policy without a clip: 1 at d = 0.

    log_ratios: d of that token; ``whole`` moves all tokens of the response together, else the others stay at d = 0.
    TEPO's mask is on (the entropy fell), KL-Cov's penalty too, and Clip-Cov drops nothing."""
    count, middle = len(log_ratios), TOKENS // 2
    d_BT = torch.zeros(count, TOKENS, dtype=torch.float64)
    d_BT[:, slice(None) if whole else slice(middle, middle + 1)] = log_ratios.double()[:, None]
    old_BT = torch.full_like(d_BT, -1.0)
    mask_BT = torch.ones_like(d_BT, dtype=torch.bool)
    batch = TokenBatch(
        old_BT + d_BT,
        old_BT,
        mask_BT,
        torch.full_like(d_BT, advantage),
        entropy_BT=old_BT + 1.5,
        old_entropy_BT=old_BT + 2,
        ref_logprobs_BT=old_BT,
        selected_BT=mask_BT & (method.preset != "clip_cov"),
        exact_kl_BT=torch.zeros_like(d_BT),
        mtp_logprobs_BTK=_ahead(old_BT + d_BT, method.mtp_modules),
        old_mtp_logprobs_BTK=_ahead(old_BT, method.mtp_modules),
    )
    alone = MiniBatchTotals(tokens=TOKENS, responses=1, constant=TOKENS)
    _, gradients = minibatch_gradient(method, batch, totals=alone)
    return -gradients["logprobs_BT"][:, middle] * TOKENS / advantage


def _ahead(d_BT: Tensor, modules: int) -> Tensor | None:
    """Log-probs of multi-token heads that agree with the backbone."""
    if modules == 0:
        return None
    return torch.stack([torch.nn.functional.pad(d_BT[:, n:], (0, n)) for n in range(1, modules + 1)], dim=-1)


@matplotlib.rc_context(RC)
def gradient_figure(
    names: Sequence[str] | None = None, variants: Mapping[str, Any] | None = None, reach: float = 0.8
) -> Figure:
    """Gradient weight against log-ratio, one panel a method: blue A = +1, orange A = -1; solid when the whole response has
    moved by d, dashed when only this token has. Show it with :func:`tepo_core.analysis.figures.canvas.show`."""
    names = list(names or PRESETS)
    log_ratios = torch.linspace(-reach, reach, 641, dtype=torch.float64)
    rows = -(-len(names) // 4)
    figure, axes = panels(rows, 4, width=12, height=2.5, sharex=True, sharey=True)
    for axis, name in zip(axes, names, strict=False):
        _panel(axis, resolve(name, variants), log_ratios)
    for axis in axes[len(names) :]:
        axis.set_axis_off()
    figure.supxlabel("log-ratio d of the token")
    figure.supylabel("gradient weight, divided by A")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def _panel(axis: Any, method: Method, log_ratios: Tensor) -> None:
    for advantage, colour in ((1.0, GAIN), (-1.0, LOSS)):
        for whole, style in ((True, "-"), (False, "--")):
            weight = gradient_weight(method, log_ratios, advantage, whole=whole)
            label = f"A {'>' if advantage > 0 else '<'} 0, {'all tokens move' if whole else 'this token alone'}"
            axis.plot(log_ratios, weight, color=colour, linestyle=style, linewidth=1.4, label=label)
    axis.axvline(0, color="#8a8f98", linewidth=0.6)
    axis.set_ylim(-0.6, 2.4)
    axis.set_title(method.name, loc="left", fontsize=9)
