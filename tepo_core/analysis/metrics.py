"""The numbers that describe a run: names, labels, meaning, which direction is better."""

from __future__ import annotations

from dataclasses import dataclass

from tepo_core.tasks.problem import TOKEN_KINDS


@dataclass(frozen=True)
class Metric:
    """name: column of the run table. better: +1 higher, -1 lower, 0 neither. share: lies in [0, 1]."""

    name: str
    label: str
    meaning: str
    better: int = 0
    share: bool = False
    digits: int = 3


TOKEN_KIND_METRICS = (
    (
        "gradient",
        "gradient on {}",
        "share of |dJ/dlogits| on {} tokens, summed with its sign over responses that share a prefix",
        True,
    ),
    ("tokens", "tokens: {}", "share of tokens that are {}", True),
    ("entropy", "entropy change on {}", "share of the absolute entropy change, update by update, on {} tokens", True),
    ("clip", "clipping on {}", "share of clipped tokens that are {}", True),
    ("mask", "KL on {}", "share of the tokens that pay KL which are {}", True),
)


# The longer meanings of the table below.
_CURVE = "held-out greedy accuracy averaged over the whole training: high for fast and for good"
_TARGET = "rollouts until held-out greedy accuracy first reaches the profile's target"
_AHEAD = "root mean square error of the last two thirds predicted from a fit on the first third"
_COVARIANCE = "correlation of the entropy's change with the covariance prediction"
_GRADIENT = "standard deviation of the change of the mean gradient norm between rollouts"
_SAMPLER = "mean k3 estimate of KL between the sampling policy and the updated one, nats per token"
_FELL = "share of tokens with positive advantage whose entropy fell, after the first update"
_UNCERTAIN = "the same among recorded tokens whose entropy was at least 0.05 nats, where a change is no rounding"
_CORRECTED = "share of the planted wrong facts that the policy answers rightly at the end"
_KEPT = "share of the facts that were right in the warm-up and still are at the end"
# name, label, meaning, better, share, digits
ROWS = [
    (
        "accuracy",
        "accuracy",
        "share of sampled answers that are right, held-out problems (avg@n, which is pass@1)",
        1,
        True,
    ),
    ("greedy", "greedy accuracy", "share of greedy answers that are right on held-out problems", 1, True),
    ("pass_max", "pass@k, largest k", "unbiased pass@k at the largest k of the profile", 1, True),
    ("long_accuracy", "accuracy, longer", "accuracy on chains longer than any that RL saw", 1, True),
    ("truncated", "cut off", "share of evaluation answers that hit the length limit", -1, True),
    ("curve_mean", "mean of the curve", _CURVE, 1, True),
    ("reward_end", "reward at the end", "mean training reward in the last tenth of the rollouts", 1, True),
    ("rollouts_to_target", "rollouts to target", _TARGET, -1, False, 1),
    ("entropy_start", "entropy at start", "exact entropy in nats per token, first tenth of the rollouts", 0, False, 4),
    ("entropy_end", "entropy at end", "exact entropy in nats per token, last tenth of the rollouts", 0, False, 4),
    ("entropy_kept", "entropy kept", "entropy at the end over entropy at the start", 1),
    ("law_a", "law: a", "slope of R = -a exp(H) + b"),
    ("law_b", "law: b", "intercept of R = -a exp(H) + b"),
    ("law_ceiling", "law: ceiling", "b - a, the reward that the law predicts at entropy 0"),
    ("law_r2", "law: R²", "share of the reward's variance that the law explains along a run", 1),
    ("law_error", "law: error ahead", _AHEAD, -1),
    ("covariance_correlation", "covariance: correlation", _COVARIANCE, 1),
    ("reward_volatility", "reward volatility", "standard deviation of the change of reward between rollouts", -1),
    ("reward_drawdown", "largest drawdown", "largest fall of the smoothed reward from its peak", -1, True),
    ("grad_volatility", "gradient-norm volatility", _GRADIENT, -1),
    ("grad_spikes", "gradient spikes", "rollouts whose gradient norm stands far above the twenty before", -1, False, 1),
    ("kl_old", "KL to sampler", _SAMPLER, 0, False, 5),
    ("kl_base", "KL to base", "KL of the final policy to the base policy on its own samples, nats per token", 0, False, 4),
    ("ratio_spread", "ratio spread", "standard deviation of the importance ratio as the method uses it", 0, False, 4),
    ("clip", "clipped", "share of tokens whose ratio is clipped", 0, True, 4),
    ("mask", "paying KL", "share of tokens that pay the method's KL penalty: TEPO's mask, KL-Cov's selection", 0, True, 4),
    ("fell", "A>0 tokens losing entropy", _FELL, 0, True),
    ("fell_uncertain", "of uncertain ones", _UNCERTAIN, 0, True),
    ("length_drift", "length drift", "mean response length in the last tenth over the first tenth"),
    ("zero_variance", "groups without signal", "share of groups in which all rewards are equal", -1, True),
    ("collapse_step", "collapsed at", "rollout at which the collapse rule first holds", 0, False, 0),
    ("facts_corrected", "facts corrected", _CORRECTED, 1, True),
    ("facts_kept", "facts kept", _KEPT, 1, True),
    ("facts_half", "rollouts to half the facts", "rollouts until half of the planted wrong facts are right", -1, False, 1),
]


def _all() -> list[Metric]:
    """Every metric of :data:`ROWS`, and those that exist once a kind of token."""
    metrics = [Metric(*row) for row in ROWS]
    for name, label, meaning, share in TOKEN_KIND_METRICS:
        metrics += [Metric(f"{name}_{k}", label.format(k), meaning.format(k), 0, share) for k in TOKEN_KINDS]
    for name, label, meaning, _ in TOKEN_KIND_METRICS:
        if name != "tokens":
            text = f"{meaning.format('decisive')}, over their share of tokens: 1 where the method cannot tell them apart"
            metrics.append(Metric(f"{name}_focus", f"{label.format('decisive')}, times their share", text, 0, False, 2))
    return metrics


METRICS = {metric.name: metric for metric in _all()}
