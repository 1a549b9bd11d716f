"""TEPO: the likelihood ratio of the sequence (a geometric mean), summed token by token; and with the masked KL."""

from __future__ import annotations

from tepo_core.objectives.clipped import Clipped, clip_term, clipped
from tepo_core.objectives.registry import register

S_CLIP = clip_term("s_i")


register(
    "tepo",
    Clipped,
    title="TEPO",
    source="arXiv 2510.09369",
    status="reconstructed",
    equation=rf"\frac{{1}}{{N}}\sum_{{i,t}} {S_CLIP}",
    ratio="sequence",
    aggregate="token_mean",
    clip=(0.2, 0.2),
)(clipped)
register(
    "tepo_kl",
    Clipped,
    title="TEPO with the masked KL",
    source="arXiv 2604.12736",
    status="reconstructed",
    equation=rf"\frac{{1}}{{N}}\sum_{{i,t}} {S_CLIP} - \frac{{\beta}}{{N}}\sum_{{i,t}} M_{{it}}\,\mathrm{{KL}}_{{it}}, \quad "
    r"M_{it} = \mathrm{sg}\big[\mathbf{1}(A_i>0)\,\mathbf{1}(\Delta H_{it}<0)\big]",
    ratio="sequence",
    aggregate="token_mean",
    clip=(0.2, 0.2),
    entropy_test="exact",
    kl={"reference": "old", "estimator": "k3", "beta": 0.1, "mask": "tepo"},
)(clipped)
