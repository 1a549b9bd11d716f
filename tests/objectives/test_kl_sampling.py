"""What each KL estimator estimates when the tokens were sampled by the OLD policy, against the exact KL of small softmaxes.

Expectations over the old policy are taken exactly, by listing the vocabulary; one test draws tokens as a run does.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tepo_core.config import ConfigError
from tepo_core.objectives.invariance import minibatch_gradient, random_batch
from tepo_core.objectives.methods import MiniBatchTotals, TokenBatch, resolve
from tepo_core.objectives.metrics import merge
from tepo_core.objectives.penalties import kl_penalty

VOCABULARY = 8


def states(drift: float, count: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of the policy, old and reference log-probs, [count, V]: softmaxes that are ``drift`` apart."""
    generator = torch.Generator().manual_seed(0)
    old_SV, move_SV, ref_SV = (torch.randn(count, VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(3))
    logits_SV = (old_SV + drift * move_SV).requires_grad_()
    return logits_SV, old_SV.log_softmax(-1), (old_SV + drift * ref_SV).log_softmax(-1)


def exact(first_SV: torch.Tensor, second_SV: torch.Tensor) -> torch.Tensor:
    """KL(first || second) of every state, [S]."""
    return (first_SV.exp() * (first_SV - second_SV)).sum(-1)


def listed(drift: float, **kl) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Expectation over old of the penalty and of its gradient in the logits, and the exact KL with its gradient."""
    logits_SV, old_SV, ref_SV = states(drift)
    new_SV = logits_SV.log_softmax(-1)
    ones_SV = torch.ones_like(old_SV)
    batch = TokenBatch(
        new_SV, old_SV, ones_SV > 0, ones_SV, ref_logprobs_BT=ref_SV, valid_BT=ones_SV, log_ratio_BT=new_SV - old_SV
    )
    value_S = (old_SV.exp() * kl_penalty(batch, **kl)).sum(-1)
    (slope_SV,) = torch.autograd.grad(value_S.sum(), logits_SV)
    again_SV = logits_SV.log_softmax(-1)
    other_SV = old_SV if kl["reference"] == "old" else ref_SV
    pair = (again_SV, other_SV) if kl["direction"] == "policy_reference" else (other_SV, again_SV)
    exact_S = exact(*pair)
    (exact_slope_SV,) = torch.autograd.grad(exact_S.sum(), logits_SV)
    return value_S.detach(), slope_SV, exact_S.detach(), exact_slope_SV


UNBIASED = {  # weighted: (value, gradient) equal those of the exact KL in expectation; policy first, reference first
    "k1": ((True, True), (True, True)),
    "k2": ((False, True), (False, False)),
    "k3": ((True, True), (True, True)),
    "abs": ((False, False), (False, False)),
}


@pytest.mark.parametrize("reference", ["old", "ref"])
@pytest.mark.parametrize("direction", ["policy_reference", "reference_policy"])
@pytest.mark.parametrize("estimator", UNBIASED)
def test_weighted_estimators_against_the_exact_kl(estimator, direction, reference):
    """k1 and k3 have the value and the gradient of the KL; k2 the gradient (policy first); |x| neither."""
    kl = {"estimator": estimator, "gradient": estimator, "direction": direction, "reference": reference}
    value_S, slope_SV, exact_S, exact_slope_SV = listed(1.0, sampling="weighted", **kl)
    right_value, right_slope = UNBIASED[estimator][direction == "reference_policy"]
    assert torch.allclose(value_S, exact_S, rtol=1e-10) == right_value
    assert torch.allclose(slope_SV, exact_slope_SV, rtol=1e-10, atol=1e-14) == right_slope


@pytest.mark.parametrize("reference", ["old", "ref"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_unweighted_estimators_are_not_the_kl_of_the_policy(estimator, reference):
    """Tokens of OLD without a weight: neither value nor gradient is right once the policy has moved."""
    kl = {"estimator": estimator, "gradient": estimator, "direction": "policy_reference", "reference": reference}
    value_S, slope_SV, exact_S, exact_slope_SV = listed(1.0, sampling="unweighted", **kl)
    assert float((value_S - exact_S).norm() / exact_S.norm()) > 0.05
    assert float((slope_SV - exact_slope_SV).norm() / exact_slope_SV.norm()) > 0.2


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_kl_of_old_to_the_policy_needs_no_weight(estimator):
    """KL(old || policy): the tokens come from its first argument, so weighted and unweighted are the same numbers."""
    kl = {"estimator": estimator, "gradient": estimator, "direction": "reference_policy", "reference": "old"}
    weighted, plain = listed(1.0, sampling="weighted", **kl), listed(1.0, sampling="unweighted", **kl)
    assert torch.equal(weighted[0], plain[0]) and torch.equal(weighted[1], plain[1])


@pytest.mark.parametrize("drift", [1.0, 2.0])
def test_unweighted_k3_overstates_the_kl_and_more_so_after_larger_steps(drift):
    """The default until now: several times the KL, and tens of times once single tokens have lost their probability."""
    kl = {"estimator": "k3", "gradient": "k3", "direction": "policy_reference", "reference": "old"}
    plain_S, _, exact_S, _ = listed(drift, sampling="unweighted", **kl)
    assert float(plain_S.mean() / exact_S.mean()) > (1.5 if drift == 1.0 else 5.0)


def test_a_token_whose_probability_fell_hardly_pays_and_does_not_dominate():
    """d = -4.7: the slope of unweighted k3 is 1 - e^4.7 = -109, of the weighted one e^-4.7 * -4.7 = -.043."""
    slopes = {}
    for sampling in ("weighted", "unweighted"):
        d_BT = torch.tensor([[-4.7]], dtype=torch.float64, requires_grad=True)
        ones_BT = torch.ones(1, 1, dtype=torch.float64)
        batch = TokenBatch(d_BT, torch.zeros_like(ones_BT), ones_BT > 0, ones_BT, valid_BT=ones_BT, log_ratio_BT=d_BT)
        value_BT = kl_penalty(
            batch, reference="old", direction="policy_reference", estimator="k3", gradient="k3", sampling=sampling
        )
        slopes[sampling] = torch.autograd.grad(value_BT.sum(), d_BT)[0].item()
    assert slopes["unweighted"] == pytest.approx(1 - torch.tensor(4.7).double().exp().item())
    assert slopes["weighted"] == pytest.approx(-4.7 * torch.tensor(-4.7).double().exp().item())


def drawn(method, tokens: int = 60_000) -> tuple[float, torch.Tensor, float, torch.Tensor]:
    """Penalty and gradient of ``method`` (beta 1, all tokens) on tokens drawn from old in one state, and the exact KL's."""
    logits_SV, old_SV, _ = states(2.0, count=1)
    token_N = torch.multinomial(old_SV[0].exp(), tokens, replacement=True, generator=torch.Generator().manual_seed(1))
    new_SV = logits_SV.log_softmax(-1)
    chosen_BT, old_BT = new_SV[0][token_N][None], old_SV[0][token_N][None]
    batch = TokenBatch(chosen_BT, old_BT, torch.ones_like(old_BT) > 0, torch.zeros_like(old_BT))
    out = method.loss(batch, MiniBatchTotals(tokens, 1))
    (slope_SV,) = torch.autograd.grad(out.loss, logits_SV)
    exact_S = exact(logits_SV.log_softmax(-1), old_SV)
    (exact_slope_SV,) = torch.autograd.grad(exact_S.sum(), logits_SV)
    return out.sums["kl_penalty"][0].item() / tokens, slope_SV, exact_S.item(), exact_slope_SV


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_by_simulation_the_whole_loss_has_value_and_gradient_of_the_kl(estimator):
    """60,000 draws from old through Method.loss with A = 0 and beta 1: both within 3 % of the exact ones."""
    kl = {"reference": "old", "estimator": estimator, "beta": 1.0}
    value, slope_SV, exact_value, exact_slope_SV = drawn(resolve("x", {"x": {"preset": "dapo", "kl": kl}}))
    assert value == pytest.approx(exact_value, rel=0.03)
    assert float((slope_SV - exact_slope_SV).norm() / exact_slope_SV.norm()) < 0.03
    unweighted = resolve("x", {"x": {"preset": "dapo", "kl": {**kl, "sampling": "unweighted"}}})
    value, slope_SV, exact_value, exact_slope_SV = drawn(unweighted)
    assert abs(value - exact_value) > 0.2 * exact_value
    assert float((slope_SV - exact_slope_SV).norm() / exact_slope_SV.norm()) > 0.2


def test_defaults_by_name():
    """Weighted, except where the source says otherwise (KL-Cov's code); no weight is needed over the whole vocabulary."""
    assert resolve("tepo_kl").settings.kl.sampling == "weighted"
    assert resolve("x", {"x": {"preset": "grpo", "kl": {"beta": 0.1}}}).settings.kl.sampling == "weighted"
    assert resolve("kl_cov").settings.kl.sampling == "unweighted"
    exact_kl = resolve("x", {"x": {"preset": "tepo_kl", "kl": {"estimator": "exact"}}})
    assert exact_kl.settings.kl.sampling is None
    half = resolve("x", {"x": {"preset": "tepo_kl", "kl": {"estimator": "exact", "gradient": "k2"}}})
    assert half.settings.kl.sampling == "weighted"


@pytest.mark.parametrize(
    ("kl", "parts"),
    [
        ({"sampling": "ratio"}, ["kl.sampling = 'ratio'", "'weighted'", "'unweighted'"]),
        ({"estimator": "exact", "sampling": "weighted"}, ["sampling = weighted", "exact", "sampling: null"]),
    ],
)
def test_wrong_sampling_is_refused(kl, parts):
    with pytest.raises(ConfigError) as error:
        resolve("x", {"x": {"preset": "tepo_kl", "kl": kl}})
    for part in parts:
        assert part in str(error.value), str(error.value)


# |g_KL| / |g_objective|, by which beta is swept


def penalised(beta: float, **kl) -> object:
    return resolve("x", {"x": {"preset": "dapo", "clip": None, "kl": {"reference": "old", "beta": beta, **kl}}})


def test_gradient_of_the_penalty_against_that_of_the_objective():
    """Both over d log pi: the penalty alone (A = 0) and the objective alone (beta 0), Euclidean norms over the mini-batch."""
    method = penalised(0.3)
    batch = replace(random_batch(method, responses=9, longest=30), weights_BT=None)
    totals = MiniBatchTotals.from_mask(batch.mask_BT)
    idle = replace(batch, advantages_BT=torch.zeros_like(batch.advantages_BT))
    penalty = minibatch_gradient(method, idle, totals=totals)[1]["logprobs_BT"].norm()
    objective = minibatch_gradient(penalised(0.0), batch, totals=totals)[1]["logprobs_BT"].norm()
    outputs = []
    for rows in torch.arange(9).split(2):
        part = batch.rows(rows)
        outputs.append(method.loss(replace(part, logprobs_BT=part.logprobs_BT.clone().requires_grad_()), totals))
    sums, values = merge(outputs)
    assert values["kl_gradient_ratio"] == pytest.approx(float(penalty / objective))
    assert sums["kl_gradient_sq"] == pytest.approx([float(penalty**2), float(objective**2)])


def test_the_ratio_grows_with_beta_and_is_zero_on_the_first_update():
    batch = random_batch(resolve("dapo"), responses=9, longest=30)
    leaf = {"logprobs_BT": batch.logprobs_BT.clone().requires_grad_()}
    totals = MiniBatchTotals.from_mask(batch.mask_BT)

    def ratio(beta: float, **changes) -> float:
        return merge([penalised(beta).loss(replace(batch, **{**leaf, **changes}), totals)])[1]["kl_gradient_ratio"]

    assert ratio(0.2) == pytest.approx(2 * ratio(0.1)) and ratio(0.1) > 0
    assert ratio(0.1, old_logprobs_BT=batch.logprobs_BT) == 0


def test_without_a_sampled_penalty_or_without_a_gradient_there_is_no_ratio():
    """The exact KL reaches the logits past the chosen token's log-prob: its gradient is not counted here."""
    batch = random_batch(resolve("dapo"), responses=5, longest=9)
    totals = MiniBatchTotals.from_mask(batch.mask_BT)
    leaf = replace(batch, logprobs_BT=batch.logprobs_BT.clone().requires_grad_())
    for method, given in ((resolve("dapo"), leaf), (penalised(0.1, estimator="exact"), leaf), (penalised(0.1), batch)):
        sums, values = merge([method.loss(given, totals)])
        assert sums.get("kl_gradient_sq", [0, 0]) == [0, 0] and "kl_gradient_ratio" not in values
