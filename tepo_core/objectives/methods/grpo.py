"""GRPO and what keeps its token ratio: Dr. GRPO, DAPO."""

from __future__ import annotations

from tepo_core.objectives.clipped import Clipped, clip_term, clipped
from tepo_core.objectives.registry import register

R_CLIP = clip_term("r_{it}")


register(
    "grpo",
    Clipped,
    title="GRPO",
    source="arXiv 2402.03300",
    status="known",
    equation=rf"\frac{{1}}{{B}}\sum_i \frac{{1}}{{T_i}}\sum_t {R_CLIP}",
    aggregate="seq_mean_token_mean",
    clip=(0.2, 0.2),
)(clipped)
register(
    "dr_grpo",
    Clipped,
    title="Dr. GRPO",
    source="arXiv 2503.20783",
    status="known",
    equation=rf"\frac{{1}}{{B\,L}}\sum_{{i,t}} {R_CLIP}, \quad A_i = R_i - \bar R",
    aggregate="seq_mean_token_sum_norm",
    clip=(0.2, 0.2),
    advantage="centred",
)(clipped)
register(
    "dapo",
    Clipped,
    title="DAPO",
    source="arXiv 2503.14476",
    status="known",
    equation=rf"\frac{{1}}{{N}}\sum_{{i,t}} {R_CLIP}, \quad \varepsilon_+ > \varepsilon_-",
    aggregate="token_mean",
    clip=(0.2, 0.28),
)(clipped)
