"""The methods: every preset of the study, a surrogate and its defaults. To add one, see docs/adding_a_method.md.

A surrogate gets a prepared batch (zeros at padding, ``log_ratio_BT`` and ``valid_BT`` filled in) and the method's options,
and returns the terms of J, the objective to maximise. Penalty, aggregation, denominators and metrics are common to all.
"""

from __future__ import annotations

from torch import Tensor

from tepo_core.objectives.method import Method, Preset
from tepo_core.objectives.options import ClipCov, Clipped, Common, KLCov, SoftGate, Weighted
from tepo_core.objectives.ratios import block_ratio, power_mean_ratio, sequence_ratio, sequence_token_ratio, token_ratio
from tepo_core.objectives.registry import PRESETS, register, resolve
from tepo_core.objectives.surrogates import (
    Surrogate,
    geometric_clip,
    ppo_clip,
    soft_gate,
    weighted_log_likelihood,
)
from tepo_core.objectives.types import BatchError, LossOutput, MiniBatchTotals, TokenBatch, TokenOutput

__all__ = [
    "PRESETS",
    "BatchError",
    "LossOutput",
    "Method",
    "MiniBatchTotals",
    "Preset",
    "TokenBatch",
    "TokenOutput",
    "register",
    "resolve",
]

SEQUENCE_MEAN, TOKEN_MEAN, SUM_NORM = "seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"


def _clip(ratio: str, advantage: str = "A_i") -> str:
    """LaTeX of the clipped term."""
    bounds = r"1-\varepsilon_-,\,1+\varepsilon_+"
    return rf"\min\big({ratio} {advantage},\ \mathrm{{clip}}({ratio},{bounds})\,{advantage}\big)"


R_CLIP, S_CLIP, RHO_CLIP, BLOCK_CLIP = _clip("r_{it}"), _clip("s_i"), _clip(r"\rho_i"), _clip("R_{it}")


def importance_ratio(batch: TokenBatch, options: Clipped) -> Tensor:
    """The ratio that the options name, [B, T] or [B, 1]."""
    d_BT, valid_BT = batch.log_ratio_BT, batch.valid_BT
    match options.ratio:
        case "token":
            return token_ratio(d_BT)
        case "sequence":
            return sequence_ratio(d_BT, valid_BT)
        case "sequence_token":
            return sequence_token_ratio(d_BT, valid_BT)
        case "power_mean":
            return power_mean_ratio(d_BT, valid_BT, options.p)
        case "block":
            block = options.block
            ahead_BTK = batch.mtp_logprobs_BTK - batch.old_mtp_logprobs_BTK if block.logprobs == "mtp" else None
            return block_ratio(
                d_BT,
                valid_BT,
                block.beta(),
                disjoint=block.kind == "disjoint",
                normalised=block.form == "normalised",
                ahead_log_ratio_BTK=ahead_BTK,
            )


@register(
    "reinforce",
    title="REINFORCE",
    source="Williams 1992",
    status="known",
    equation=r"\frac{1}{N}\sum_{i,t} A_i \log\pi_\theta(o_{it})",
    aggregate=TOKEN_MEAN,
)
def reinforce(batch: TokenBatch, options: Common) -> Surrogate:
    """A log pi: no ratio, no clip. The token ratio is only reported."""
    return Surrogate(batch.advantages_BT * batch.logprobs_BT, token_ratio(batch.log_ratio_BT.detach()))


@register(
    "grpo",
    Clipped,
    title="GRPO",
    source="arXiv 2402.03300",
    status="known",
    equation=rf"\frac{{1}}{{B}}\sum_i \frac{{1}}{{T_i}}\sum_t {R_CLIP}",
    aggregate=SEQUENCE_MEAN,
    clip=(0.2, 0.2),
)
def clipped(batch: TokenBatch, options: Clipped) -> Surrogate:
    """min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A); the presets below differ in rho, bounds and aggregation."""
    ratio_BT = importance_ratio(batch, options)
    return ppo_clip(ratio_BT, batch.advantages_BT, options.clip, options.dual_clip)


register(
    "dr_grpo",
    Clipped,
    title="Dr. GRPO",
    source="arXiv 2503.20783",
    status="known",
    equation=rf"\frac{{1}}{{B\,L}}\sum_{{i,t}} {R_CLIP}, \quad A_i = R_i - \bar R",
    aggregate=SUM_NORM,
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
    aggregate=TOKEN_MEAN,
    clip=(0.2, 0.28),
)(clipped)
register(
    "gspo",
    Clipped,
    title="GSPO",
    source="arXiv 2507.18071",
    status="known",
    equation=rf"\frac{{1}}{{B}}\sum_i {S_CLIP}, \quad s_i = \exp\Big(\frac{{1}}{{T_i}}\sum_t d_{{it}}\Big)",
    ratio="sequence",
    aggregate=SEQUENCE_MEAN,
    clip=(3e-4, 4e-4),
)(clipped)
register(
    "gspo_token",
    Clipped,
    title="GSPO-token",
    source="arXiv 2507.18071",
    status="known",
    equation=rf"\frac{{1}}{{B}}\sum_i \frac{{1}}{{T_i}}\sum_t {_clip('s_{it}', 'A_{it}')}, \quad "
    r"s_{it} = \mathrm{sg}[s_i]\,\frac{\pi_\theta(o_{it})}{\mathrm{sg}[\pi_\theta(o_{it})]}",
    ratio="sequence_token",
    aggregate=SEQUENCE_MEAN,
    clip=(3e-4, 4e-4),
)(clipped)


@register(
    "gmpo",
    Weighted,
    title="GMPO",
    source="arXiv 2507.20673",
    status="known",
    equation=r"\frac{1}{B}\sum_i A_i \exp\Big(\frac{1}{T_i}\sum_t \tilde d_{it}\Big), \quad "
    r"\tilde d_{it} = \begin{cases} \min(d_{it}, \varepsilon_+) & A_i > 0 \\"
    r" \max(d_{it}, -\varepsilon_-) & A_i < 0 \end{cases}",
    aggregate=SEQUENCE_MEAN,
    clip=(0.4, 0.4),
)
def gmpo(batch: TokenBatch, options: Weighted) -> Surrogate:
    """A_i (prod_t r'_it)^(1/T_i), log r' limited to [-eps_low, eps_high] by the sign of A. Bounds are log-ratios."""
    return geometric_clip(batch.log_ratio_BT, batch.advantages_BT, batch.valid_BT, options.clip)


@register(
    "cispo",
    Weighted,
    title="CISPO",
    source="arXiv 2506.13585",
    status="reconstructed",
    equation=r"\frac{1}{N}\sum_{i,t} \mathrm{sg}\big[\min(r_{it}, 1+\varepsilon_+)\big]\, A_i \log\pi_\theta(o_{it})",
    aggregate=TOKEN_MEAN,
    clip=(None, 0.28),
)
def cispo(batch: TokenBatch, options: Weighted) -> Surrogate:
    """sg[clip(r)] A log pi."""
    ratio_BT = token_ratio(batch.log_ratio_BT)
    return weighted_log_likelihood(ratio_BT, batch.logprobs_BT, batch.advantages_BT, options.clip)


@register(
    "sapo",
    SoftGate,
    title="SAPO",
    source="arXiv 2511.20347",
    status="known",
    equation=r"\frac{1}{B}\sum_i \frac{1}{T_i}\sum_t \frac{4}{\tau_i}\,\sigma\big(\tau_i (r_{it}-1)\big) A_i, \quad "
    r"\tau_i = \begin{cases} \tau_+ & A_i > 0 \\ \tau_- & A_i \le 0 \end{cases}",
    aggregate=SEQUENCE_MEAN,
)
def sapo(batch: TokenBatch, options: SoftGate) -> Surrogate:
    """(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A."""
    ratio_BT = token_ratio(batch.log_ratio_BT)
    return soft_gate(ratio_BT, batch.advantages_BT, options.tau_positive, options.tau_negative)


@register(
    "clip_cov",
    ClipCov,
    title="Clip-Cov",
    source="arXiv 2505.22617",
    status="known",
    equation=rf"\frac{{1}}{{N}}\sum_{{(i,t)\notin I}} {R_CLIP}, \quad "
    r"I \sim \lfloor qN\rfloor \text{ of } \{(i,t): \omega_- < \mathrm{Cov}_{it} < \omega_+\}",
    aggregate=TOKEN_MEAN,
    clip=(None, 1.0),
)
def clip_cov(batch: TokenBatch, options: ClipCov) -> Surrogate:
    """PPO clip, and no gradient at all for the tokens that ``Method.select`` dropped; they still count in N."""
    ratio_BT = token_ratio(batch.log_ratio_BT)
    full = ppo_clip(ratio_BT, batch.advantages_BT, options.clip)
    dropped_BT = batch.selected_BT.to(ratio_BT.dtype)
    return full._replace(terms_BT=full.terms_BT * (1 - dropped_BT), dropped_BT=dropped_BT)


@register(
    "kl_cov",
    KLCov,
    title="KL-Cov",
    source="arXiv 2505.22617",
    status="known",
    equation=r"\frac{1}{N}\sum_{i,t} r_{it} A_i - \frac{\beta}{N}\sum_{(i,t)\in I} |d_{it}|, \quad "
    r"I = \text{top } \lfloor kN\rfloor \text{ by } \mathrm{Cov}_{it}",
    aggregate=TOKEN_MEAN,
    kl={"reference": "old", "estimator": "abs", "beta": 1.0, "mask": "selected"},
)
def kl_cov(batch: TokenBatch, options: KLCov) -> Surrogate:
    """r A without a clip; the KL to the sampling policy is charged on the tokens that ``Method.select`` chose."""
    ratio_BT = token_ratio(batch.log_ratio_BT)
    return Surrogate(ratio_BT * batch.advantages_BT, ratio_BT)


register(
    "holder",
    Clipped,
    title="HölderPO",
    source="arXiv 2605.12058",
    status="known",
    equation=rf"\frac{{1}}{{B}}\sum_i {RHO_CLIP}, \quad "
    r"\rho_i = \Big(\frac{1}{T_i}\sum_t r_{it}^{\,p}\Big)^{1/p}",
    ratio="power_mean",
    p=1.0,
    aggregate=SEQUENCE_MEAN,
    clip=(0.2, 0.2),
)(clipped)
register(
    "tepo",
    Clipped,
    title="TEPO",
    source="arXiv 2510.09369",
    status="reconstructed",
    equation=rf"\frac{{1}}{{N}}\sum_{{i,t}} {S_CLIP}",
    ratio="sequence",
    aggregate=TOKEN_MEAN,
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
    aggregate=TOKEN_MEAN,
    clip=(0.2, 0.2),
    entropy_test="exact",
    kl={"reference": "old", "estimator": "k3", "beta": 0.1, "mask": "tepo"},
)(clipped)
register(
    "mpo",
    Clipped,
    title="MPO",
    source="arXiv 2602.14386",
    status="reconstructed",
    equation=rf"\frac{{1}}{{N}}\sum_{{i,t}} {BLOCK_CLIP}, \quad "
    r"R_{it} = \exp\Big(\sum_{n=0}^{K-1} \beta_n d_{i,t+n}\Big), \quad \sum_n \beta_n = 1",
    ratio="block",
    block={"size": 5},
    aggregate=TOKEN_MEAN,
    clip=(0.2, 0.2),
)(clipped)
