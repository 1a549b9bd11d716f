"""Every built-in method on one small mini-batch, worked out by hand.

Response 1: two tokens, A = +1, ratios 1.5 and 0.5. Response 2: one token, A = -2, ratio 0.7. So N = 3, B = 2.
log pi = ln 0.6, ln 0.4, ln 0.35 now; ln 0.4, ln 0.8, ln 0.5 when sampled.
"""

from __future__ import annotations

import math

import pytest
import torch
from by_hand import ADVANTAGES, ENTROPY, MASK, NEW, OLD, OLD_ENTROPY, SELECTED, TOTALS

from tepo_core.objectives.methods import PRESETS, TokenBatch, resolve

S1 = math.sqrt(0.75)  # geometric mean of 1.5 and 0.5: 0.8660254
K3 = 1 / 1.5 - 1 + math.log(1.5)  # k3 of the first token: exp(-x) - 1 + x at x = ln 1.5: 0.0721318; weighted: times 1.5
HAND = {  # J; the loss is -J
    # (ln 0.6 + ln 0.4 - 2 ln 0.35) / 3
    "reinforce": (math.log(0.6) + math.log(0.4) - 2 * math.log(0.35)) / 3,
    # min(1.5, 1.2) = 1.2 and 0.5; A < 0: min(0.7 * -2, 0.8 * -2) = -1.6.  ((1.2 + 0.5) / 2 - 1.6) / 2
    "grpo": -0.375,
    # the same terms, sum / (B * 4): 0.1 / 8
    "dr_grpo": 0.0125,
    # upper bound 1.28: (1.28 + 0.5 - 1.6) / 3
    "dapo": 0.06,
    # s_1 = 0.866 (A > 0, no upper clip), s_2 = 0.7 -> 0.9997: (0.8660254 - 2 * 0.9997) / 2
    "gspo": (S1 - 1.9994) / 2,
    "gspo_token": (S1 - 1.9994) / 2,
    # ln 1.5 = 0.405 -> 0.4, ln 0.5 stays; A < 0: ln 0.7 = -0.357 stays above -0.4.  (exp((0.4 + ln 0.5) / 2) - 1.4) / 2
    "gmpo": (math.exp((0.4 + math.log(0.5)) / 2) - 1.4) / 2,
    # weights min(1.5, 1.28), 0.5, 0.7 on A log pi
    "cispo": (1.28 * math.log(0.6) + 0.5 * math.log(0.4) - 1.4 * math.log(0.35)) / 3,
    # 4 sigmoid(0.5) = 2.4898373, 4 sigmoid(-0.5) = 1.5101627, mean 2; (4 / 1.05) sigmoid(-0.315) = 1.6072183
    "sapo": (2.0 - 2 * (4 / 1.05) / (1 + math.exp(0.315))) / 2,
    # first token dropped, bounds (0, 2) touch nothing: (0 + 0.5 - 1.4) / 3
    "clip_cov": -0.3,
    # no clip: (1.5 + 0.5 - 1.4 - |ln 1.5|) / 3
    "kl_cov": (0.6 - math.log(1.5)) / 3,
    # arithmetic mean of 1.5 and 0.5 is 1; 0.7 -> 0.8: (1 - 1.6) / 2
    "holder": -0.3,
    # s_1 counts for two tokens: (2 * 0.8660254 - 1.6) / 3
    "tepo": (2 * S1 - 1.6) / 3,
    # the first token has A > 0 and its entropy fell (0.5 -> 0.3); the second rose; the third has A < 0
    "tepo_kl": (2 * S1 - 1.6 - 0.1 * 1.5 * K3) / 3,
    # sliding windows of 5 that go on at the start: both of response 1 hold d_1 and d_2, exp(mean) = 0.866; 0.7 -> 0.8
    "mpo": (2 * S1 - 1.6) / 3,
}


def batch(**changes) -> TokenBatch:
    tensors = {
        "logprobs_BT": NEW.clone().requires_grad_(),
        "old_logprobs_BT": OLD,
        "mask_BT": MASK,
        "advantages_BT": ADVANTAGES,
        "entropy_BT": ENTROPY,
        "old_entropy_BT": OLD_ENTROPY,
        "selected_BT": SELECTED,
    }
    return TokenBatch(**{**tensors, **changes})


def gradient(name: str, variants=None, **changes) -> torch.Tensor:
    """dJ/dlogprob on the valid tokens."""
    tokens = batch(**changes)
    resolve(name, variants).loss(tokens, TOTALS).loss.backward()
    return -tokens.logprobs_BT.grad[MASK]


def value(name: str, variants=None, **changes) -> float:
    """J of the small mini-batch."""
    return -resolve(name, variants).loss(batch(**changes), TOTALS).loss.item()


@pytest.mark.parametrize("name", HAND)
def test_value(name):
    assert value(name) == pytest.approx(HAND[name], rel=1e-9)


def test_every_built_in_preset_has_a_hand_computed_value():
    assert set(HAND) == {name for name, preset in PRESETS.items() if preset.status != "own"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # clipped tokens have no gradient; token 2: r A / (T_1 B) = 0.5 / 4
        ("grpo", [0, 0.125, 0]),
        ("dapo", [0, 0.5 / 3, 0]),
        # A / N
        ("reinforce", [1 / 3, 1 / 3, -2 / 3]),
        # s_1 A / (T_1 B) on both tokens of response 1; response 2 is clipped
        ("gspo", [S1 / 4, S1 / 4, 0]),
        ("gspo_token", [S1 / 4, S1 / 4, 0]),
        # s_1 A / N on both tokens
        ("tepo", [S1 / 3, S1 / 3, 0]),
        # r k3 = 1 - r + r x has the slope r x: the penalty adds -beta r x / N on token 1
        ("tepo_kl", [S1 / 3 - 0.1 * 1.5 * math.log(1.5) / 3, S1 / 3, 0]),
        # sg[weight] A / N: every token keeps a gradient
        ("cispo", [1.28 / 3, 0.5 / 3, -1.4 / 3]),
        # token 1 limited: only token 2 moves the mean, exp((0.4 + ln 0.5) / 2) / (T_1 B); response 2: 0.7 A / B
        ("gmpo", [0, math.exp((0.4 + math.log(0.5)) / 2) / 4, -0.7]),
        # d rho / d l_t = r_t^p / (T rho^(p-1)): 1.5 / 2 and 0.5 / 2, over B
        ("holder", [0.375, 0.125, 0]),
        # each of the two windows gives S1 / 2 to both tokens
        ("mpo", [S1 / 3, S1 / 3, 0]),
        # dropped, then r A / N
        ("clip_cov", [0, 0.5 / 3, -1.4 / 3]),
        # r A - sign(d), then r A, over N
        ("kl_cov", [(1.5 - 1) / 3, 0.5 / 3, -1.4 / 3]),
    ],
)
def test_gradient(name, expected):
    assert gradient(name).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_gradient_of_the_soft_gate_is_largest_at_ratio_one():
    """4 sigmoid'(0) = 1, so at r = 1 the gradient is A / (T_i B) whatever tau."""
    assert gradient("sapo", old_logprobs_BT=NEW).tolist() == pytest.approx([0.25, 0.25, -1.0])


def test_dual_clip_floors_negative_advantages():
    """A = -2 at ratio 5: min(5 * -2, 1.2 * -2) = -10, floored at 3 * -2 = -6. J = ((1.2 + 0.5) / 2 - 6) / 2."""
    far = NEW.clone()
    far[1, 0] = OLD[1, 0] + math.log(5)
    assert value("x", {"x": {"preset": "grpo", "dual_clip": 3.0}}, logprobs_BT=far) == pytest.approx((0.85 - 6) / 2)
    assert value("grpo", logprobs_BT=far) == pytest.approx((0.85 - 10) / 2)


def test_entropy_bonus_is_aggregated_like_the_surrogate():
    """DAPO: (0.3 + 0.9 + 0.2) / 3 * 0.5 on top; gradient 0.5 / 3 a token."""
    tokens = batch(entropy_BT=ENTROPY.clone().requires_grad_())
    method = resolve("x", {"x": {"preset": "dapo", "entropy_bonus": 0.5}})
    assert method.needs_entropy_grad
    loss = method.loss(tokens, TOTALS).loss
    loss.backward()
    assert -loss.item() == pytest.approx(0.06 + 0.5 * 1.4 / 3)
    assert (-tokens.entropy_BT.grad[MASK]).tolist() == pytest.approx([0.5 / 3] * 3)


def test_sum_over_responses():
    """seq_mean_token_sum: (1.2 + 0.5 - 1.6) / 2."""
    assert value("x", {"x": {"preset": "grpo", "aggregate": "seq_mean_token_sum"}}) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("estimator", "expected", "slope"),
    [
        # x = ln 1.5 on token 1 with reference old: value and derivative in x
        ("k1", math.log(1.5), 1.0),
        ("k2", math.log(1.5) ** 2 / 2, math.log(1.5)),
        ("k3", K3, 1 - 1 / 1.5),
        ("abs", math.log(1.5), 1.0),
    ],
)
def test_value_and_gradient_estimator_are_chosen_apart(estimator, expected, slope):
    """DAPO plus the KL on the positive tokens: its value is k3 of both, its gradient that of ``estimator`` on token 1."""
    kl = {
        "reference": "old",
        "beta": 1.0,
        "mask": "positive",
        "estimator": "k3",
        "gradient": estimator,
        "sampling": "unweighted",
    }
    both = K3 + (1 / 0.5 - 1 + math.log(0.5))
    assert value("x", {"x": {"preset": "dapo", "kl": kl}}) == pytest.approx(0.06 - both / 3)
    assert gradient("x", {"x": {"preset": "dapo", "kl": kl}})[0].item() == pytest.approx(-slope / 3)
    plain = {**kl, "estimator": estimator, "gradient": None, "mask": "all"}
    out = resolve("x", {"x": {"preset": "dapo", "kl": plain}}).loss(batch(mask_BT=MASK & SELECTED), TOTALS)
    assert out.sums["kl_penalty"][0].item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("estimator", "expected", "slope"),
    [
        # times r = 1.5; the slope is that of r f(x), r (f + f'), but k2 holds r
        ("k1", 1.5 * math.log(1.5), 1.5 * (math.log(1.5) + 1)),
        ("k2", 1.5 * math.log(1.5) ** 2 / 2, 1.5 * math.log(1.5)),
        ("k3", 1.5 * K3, 1.5 * math.log(1.5)),
        ("abs", 1.5 * math.log(1.5), 1.5 * (math.log(1.5) + 1)),
    ],
)
def test_weighted_estimators_by_hand(estimator, expected, slope):
    """DAPO, whose token 1 is clipped, plus the KL to the sampling policy: token 1 has the gradient of the penalty alone."""
    kl = {"reference": "old", "beta": 1.0, "estimator": estimator}
    assert gradient("x", {"x": {"preset": "dapo", "kl": kl}})[0].item() == pytest.approx(-slope / 3)
    out = resolve("x", {"x": {"preset": "dapo", "kl": kl}}).loss(batch(mask_BT=MASK & SELECTED), TOTALS)
    assert out.sums["kl_penalty"][0].item() == pytest.approx(expected)


def test_direction_of_the_penalty_turns_the_log_ratio_round():
    """k3 of KL(old || policy) on token 1: exp(x) - 1 - x at x = ln 1.5."""
    kl = {"reference": "old", "beta": 1.0, "direction": "reference_policy"}
    out = resolve("x", {"x": {"preset": "dapo", "kl": kl}}).loss(batch(mask_BT=MASK & SELECTED), TOTALS)
    assert out.sums["kl_penalty"][0].item() == pytest.approx(0.5 - math.log(1.5))


def test_reference_and_exact_kl():
    kl = {"reference": "ref", "estimator": "k2", "beta": 1.0, "sampling": "unweighted"}
    reference_BT = NEW - 0.3  # x = 0.3 everywhere: 0.045 a token
    assert value("x", {"x": {"preset": "dapo", "kl": kl}}, ref_logprobs_BT=reference_BT) == pytest.approx(0.06 - 0.045)
    exact_BT = torch.tensor([[0.3, 0.6], [0.9, 7.0]], dtype=torch.float64)
    kl |= {"estimator": "exact", "sampling": None}
    assert value("x", {"x": {"preset": "dapo", "kl": kl}}, exact_kl_BT=exact_BT) == pytest.approx(0.06 - 0.6)


@pytest.mark.parametrize(
    ("mask", "test", "charged"),
    [
        ("all", None, [True, True, True]),
        ("positive", None, [True, True, False]),
        ("falling", "exact", [True, False, True]),
        ("tepo", "exact", [True, False, False]),
        # log pi + H: ln 0.6 + 0.3 = -0.21, ln 0.4 + 0.9 = -0.016, ln 0.35 + 0.2 = -0.85: raising any of them raises H
        ("tepo", "first_order", [False, False, False]),
        # selected stands for Cov > 0 over the mini-batch
        ("tepo", "covariance", [True, False, False]),
    ],
)
def test_masks(mask, test, charged):
    kl = {"reference": "old", "beta": 1.0, "mask": mask}
    variant = {"preset": "tepo", "kl": kl, "entropy_test": test}
    out = resolve("x", {"x": variant}).loss(batch(), TOTALS)
    assert out.token.mask_BT[MASK].tolist() == charged
    assert not out.token.mask_BT[~MASK].any()


def test_first_order_test_is_the_sign_of_the_derivative_along_the_own_logit():
    """dH/dz_a = -p_a (log p_a + H), against autograd on random states; the test says 'falls' exactly where it is < 0."""
    logits_NV = torch.randn(200, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(2).requires_grad_()
    logp_NV = logits_NV.log_softmax(-1)
    entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
    entropy_N.sum().backward()
    own_N1 = logits_NV.grad[:, :1]
    closed_N1 = -logp_NV[:, :1].exp() * (logp_NV[:, :1] + entropy_N[:, None])
    assert torch.allclose(own_N1, closed_N1)
    ones = torch.ones_like(own_N1)
    tokens = TokenBatch(logp_NV[:, :1].detach(), logp_NV[:, :1].detach(), ones > 0, ones, entropy_BT=entropy_N[:, None])
    kl = {"reference": "old", "mask": "tepo"}
    out = resolve("x", {"x": {"preset": "tepo", "kl": kl, "entropy_test": "first_order"}}).loss(tokens, TOTALS)
    assert torch.equal(out.token.mask_BT, own_N1 < 0)
    assert 0.1 < out.token.mask_BT.double().mean() < 0.9


def test_credit_is_the_absolute_gradient():
    for name in PRESETS:
        tokens = batch()
        out = resolve(name).loss(tokens, TOTALS)
        out.loss.backward()
        assert torch.equal(out.token.gradient_BT, tokens.logprobs_BT.grad.abs())
        without = resolve(name).loss(batch(logprobs_BT=NEW), TOTALS)
        assert without.token.gradient_BT is None and not without.loss.requires_grad


def test_credit_of_heads_goes_to_the_token_they_predict():
    """K = 2, sliding: the head of token 1 speaks about token 2. Ratios 1, so dJ/d(each log-prob of window 1) = A / 2 / N."""
    variants = {"x": {"preset": "mpo", "block": {"size": 2, "logprobs": "mtp"}}}
    ahead_BTK = torch.zeros(2, 2, 1, dtype=torch.float64, requires_grad=True)
    tokens = batch(old_logprobs_BT=NEW, mtp_logprobs_BTK=ahead_BTK, old_mtp_logprobs_BTK=ahead_BTK.detach())
    out = resolve("x", variants).loss(tokens, TOTALS)
    # first tokens: 1/2, and 1/2 for the window before the response; token 2: 1/2 of its own and 1/2 from the head; |A| = 2
    assert out.token.gradient_BT[MASK].tolist() == pytest.approx([1 / 3, 1 / 3, 2 / 3])


def test_off_policy_weights_multiply_the_surrogate_but_not_the_penalty():
    """DAPO terms 1.28, 0.5, -1.6 times 2, 1, 0.5: (2.56 + 0.5 - 0.8) / 3; the penalty stays."""
    weights_BT = torch.tensor([[2.0, 1.0], [0.5, 9.0]], dtype=torch.float64)
    assert value("dapo", weights_BT=weights_BT) == pytest.approx(2.26 / 3)
    kl = {"reference": "old", "estimator": "k1", "beta": 1.0, "sampling": "unweighted"}
    penalty = (math.log(1.5) + math.log(0.5) + math.log(0.7)) / 3
    assert value("x", {"x": {"preset": "dapo", "kl": kl}}, weights_BT=weights_BT) == pytest.approx(2.26 / 3 - penalty)


def test_huge_log_ratios_stay_finite():
    """A token whose probability fell or rose by e^200 must not make NaN."""
    far = OLD.clone()
    far[0, 0], far[0, 1], far[1, 0] = far[0, 0] + 200, far[0, 1] - 200, far[1, 0] + 200
    for name in PRESETS:
        tokens = batch(logprobs_BT=far.clone().requires_grad_())
        out = resolve(name).loss(tokens, TOTALS)
        out.loss.backward()
        assert out.loss.isfinite() and tokens.logprobs_BT.grad.isfinite().all(), name
