"""The numbers that describe a run: names, labels, meaning, which direction is better."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("decisive", "digit", "copied", "format")


@dataclass(frozen=True)
class Metric:
    """name: column of the run table. better: +1 higher, -1 lower, 0 neither. share: lies in [0, 1]."""

    name: str
    label: str
    meaning: str
    better: int = 0
    share: bool = False
    digits: int = 3


METRICS = {
    m.name: m
    for m in [
        Metric("accuracy", "accuracy", "share of sampled answers that are right on held-out problems (avg@n, which is pass@1)", 1, True),
        Metric("greedy", "greedy accuracy", "share of greedy answers that are right on held-out problems", 1, True),
        Metric("pass_max", "pass@k, largest k", "unbiased pass@k at the largest k of the profile", 1, True),
        Metric("long_accuracy", "accuracy, longer", "accuracy on chains longer than any that RL saw", 1, True),
        Metric("truncated", "cut off", "share of evaluation answers that hit the length limit", -1, True),
        Metric("curve_mean", "mean of the curve", "held-out greedy accuracy averaged over the whole training: high for fast and for good", 1, True),
        Metric("reward_end", "reward at the end", "mean training reward in the last tenth of the rollouts", 1, True),
        Metric("steps_to_target", "rollouts to target", "rollouts until held-out greedy accuracy first reaches the profile's target", -1, digits=1),
        Metric("entropy_start", "entropy at the start", "exact entropy in nats per token, first tenth of the rollouts", digits=4),
        Metric("entropy_end", "entropy at the end", "exact entropy in nats per token, last tenth of the rollouts", digits=4),
        Metric("entropy_kept", "entropy kept", "entropy at the end over entropy at the start", 1),
        Metric("law_a", "law: a", "slope of R = -a exp(H) + b"),
        Metric("law_b", "law: b", "intercept of R = -a exp(H) + b"),
        Metric("law_ceiling", "law: ceiling", "b - a, the reward that the law predicts at entropy 0"),
        Metric("law_r2", "law: R²", "share of the reward's variance that the law explains along a run", 1),
        Metric("law_error", "law: error ahead", "root mean square error of the last two thirds predicted from a fit on the first third", -1),
        Metric("covariance_correlation", "covariance: correlation", "correlation of the entropy's change with the covariance prediction", 1),
        Metric("reward_volatility", "reward volatility", "standard deviation of the change of reward between rollouts", -1),
        Metric("reward_drawdown", "largest drawdown", "largest fall of the smoothed reward from its peak", -1, True),
        Metric("grad_volatility", "gradient-norm volatility", "standard deviation of the change of the mean gradient norm between rollouts", -1),
        Metric("grad_spikes", "gradient spikes", "rollouts whose gradient norm stands far above the twenty before", -1, digits=1),
        Metric("kl_old", "KL to sampler", "mean k3 estimate of KL between the sampling policy and the updated one, nats per token", digits=5),
        Metric("ratio_spread", "ratio spread", "standard deviation of the importance ratio as the method uses it", digits=4),
        Metric("clip", "clipped", "share of tokens whose ratio is clipped", 0, True, 4),
        Metric("mask", "in the mask", "share of tokens on which TEPO charges KL", 0, True, 4),
        Metric("fell", "A>0 tokens losing entropy", "share of tokens with positive advantage whose entropy fell, after the first update", 0, True),
        Metric("length_drift", "length drift", "mean response length in the last tenth over the first tenth"),
        Metric("zero_variance", "groups without signal", "share of groups in which all rewards are equal", -1, True),
        Metric("collapse_step", "collapsed at", "rollout at which the collapse rule first holds", digits=0),
        Metric("facts_corrected", "facts corrected", "share of the planted wrong facts that the greedy policy answers rightly at the end", 1, True),
        Metric("facts_half", "rollouts to half the facts", "rollouts until half of the planted wrong facts are right", -1, digits=1),
        *[Metric(f"gradient_{k}", f"gradient on {k}", f"share of the gradient weight |dJ/dlogp| on {k} tokens", 0, True) for k in KINDS],
        *[Metric(f"tokens_{k}", f"tokens: {k}", f"share of tokens that are {k}", 0, True) for k in KINDS],
        *[Metric(f"entropy_{k}", f"entropy change on {k}", f"share of the summed entropy change on {k} tokens") for k in KINDS],
        *[Metric(f"clip_{k}", f"clipping on {k}", f"share of clipped tokens that are {k}", 0, True) for k in KINDS],
        *[Metric(f"mask_{k}", f"mask on {k}", f"share of masked tokens that are {k}", 0, True) for k in KINDS],
    ]
}  # fmt: skip
