"""GSPO: one ratio a response, the geometric mean of its token ratios; GSPO-token."""

from __future__ import annotations

from tepo_core.objectives.clipped import Clipped, clip_term, clipped
from tepo_core.objectives.registry import register

register(
    "gspo",
    Clipped,
    title="GSPO",
    source="arXiv 2507.18071",
    status="known",
    equation=rf"\frac{{1}}{{B}}\sum_i {clip_term('s_i')}, \quad s_i = \exp\Big(\frac{{1}}{{T_i}}\sum_t d_{{it}}\Big)",
    ratio="sequence",
    aggregate="seq_mean_token_mean",
    clip=(3e-4, 4e-4),
)(clipped)
register(
    "gspo_token",
    Clipped,
    title="GSPO-token",
    source="arXiv 2507.18071",
    status="known",
    equation=rf"\frac{{1}}{{B}}\sum_i \frac{{1}}{{T_i}}\sum_t {clip_term('s_{it}', 'A_{it}')}, \quad "
    r"s_{it} = \mathrm{sg}[s_i]\,\frac{\pi_\theta(o_{it})}{\mathrm{sg}[\pi_\theta(o_{it})]}",
    ratio="sequence_token",
    aggregate="seq_mean_token_mean",
    clip=(3e-4, 4e-4),
)(clipped)
