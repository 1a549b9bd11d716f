"""Gradients: autograd against central differences, and the closed forms that follow from the equations of TEPO and MPO."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tepo_core.objectives.invariance import minibatch_gradient, random_batch, relative_error
from tepo_core.objectives.methods import MiniBatchTotals, TokenBatch, resolve
from tepo_core.objectives.methods.holder import power_mean_ratio
from tepo_core.objectives.methods.mpo import block_ratio
from tepo_core.objectives.ratios import sequence_ratio, token_ratio

SMALL = {"responses": 5, "longest": 6}
DIFFERENTIABLE = {
    **{name: {"preset": name} for name in ("reinforce", "grpo", "dr_grpo", "dapo", "gspo", "gmpo", "sapo", "tepo", "tepo_kl")},
    "clip_cov": {"preset": "clip_cov", "share": 0.2, "band": [0.01, 5.0]},
    "kl_cov": {"preset": "kl_cov", "share": 0.3},
    **{f"holder({p})": {"preset": "holder", "p": p} for p in (-2.0, 0.0, 1e-4, 1.0, 3.0)},
    **{
        f"mpo({kind},{weights},{form},{heads})": {
            "preset": "mpo",
            "block": {"size": 3, "kind": kind, "weights": weights, "form": form, "logprobs": heads}
            | ({"decay": 0.5} if weights == "geometric" else {}),
        }
        for kind in ("sliding", "disjoint")
        for weights, form in (("uniform", "normalised"), ("geometric", "normalised"), ("uniform", "product"))
        for heads in ("backbone", "mtp")
    },
    **{
        f"mpo_{ends}": {"preset": "mpo", "block": {"size": 4, "ends": ends}}
        for ends in ("wrap", "fold", "truncate", "renormalise")
    },
    "all_options": {
        "preset": "grpo",
        "clip": [0.1, None],
        "dual_clip": 1.1,
        "entropy_bonus": 0.2,
        "kl": {"reference": "ref", "estimator": "k3", "beta": 0.3, "direction": "reference_policy", "mask": "falling"},
        "entropy_test": "exact",
    },
    "exact_kl": {"preset": "dapo", "kl": {"estimator": "exact", "beta": 0.3}},
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_central_differences(name):
    """Every entry of every gradient, step 1e-6 in float64. (Methods that stop a gradient by design have closed forms below.)"""
    method = resolve(name, DIFFERENTIABLE)
    batch = random_batch(method, **SMALL)
    totals = MiniBatchTotals.from_mask(batch.mask_BT, constant=6.0)
    _, gradients = minibatch_gradient(method, batch, totals=totals)
    numeric = {}
    for field, gradient in gradients.items():
        base = getattr(batch, field)
        numeric[field] = torch.zeros_like(gradient)
        for index in _entries(batch, base):
            step = torch.zeros_like(base)
            step[index] = 1e-6
            up = method.loss(replace(batch, **{field: base + step}), totals).loss
            down = method.loss(replace(batch, **{field: base - step}), totals).loss
            numeric[field][index] = (up - down) / 2e-6
    assert relative_error(gradients, numeric) < 1e-7


def _entries(batch: TokenBatch, values: torch.Tensor) -> list[tuple[int, ...]]:
    """Indices of the entries that lie on tokens."""
    mask = batch.mask_BT if values.ndim == 2 else batch.mask_BT[..., None].expand_as(values)
    return [tuple(index) for index in mask.nonzero().tolist()]


def test_gspo_token_has_the_gradient_of_gspo_for_one_advantage_a_response():
    """sg[s] pi / sg[pi] against differentiating through s: equal value and gradient, clipped or not."""
    gspo, token = resolve("gspo"), resolve("gspo_token")
    batch = random_batch(gspo, responses=12, longest=20)
    loss, expected = minibatch_gradient(gspo, batch)
    found_loss, found = minibatch_gradient(token, batch)
    assert float(found_loss) == pytest.approx(float(loss), rel=1e-12)
    weights_one = replace(batch, weights_BT=None)
    assert relative_error(minibatch_gradient(token, weights_one)[1], minibatch_gradient(gspo, weights_one)[1]) < 1e-12
    assert float(expected["logprobs_BT"].abs().sum()) > 0 and float(found["logprobs_BT"].abs().sum()) > 0


def test_gspo_token_gives_each_token_its_own_advantage():
    """Unclipped: dJ/dl_it = s_i A_it / (T_i B), which the plain sequence ratio cannot do."""
    method = resolve("x", {"x": {"preset": "gspo_token", "clip": None}})
    batch = replace(random_batch(method, **SMALL), weights_BT=None)
    batch = replace(batch, advantages_BT=torch.randn(5, 6, dtype=torch.float64))
    _, gradients = minibatch_gradient(method, batch)
    clean = batch.prepared()
    lengths_B1 = batch.mask_BT.sum(-1, keepdim=True)
    expected_BT = sequence_ratio(clean.log_ratio_BT, clean.valid_BT) * clean.advantages_BT / (lengths_B1 * 5)
    assert torch.allclose(-gradients["logprobs_BT"], expected_BT, rtol=1e-12, atol=0)


# TEPO


@pytest.mark.parametrize("clip", [[0.2, 0.2], [0.2, 0.28], [3e-4, 4e-4]])
def test_tepo_is_gspo_with_response_i_scaled_by_its_length(clip):
    """Gradient of J_v1 = GSPO's, response i scaled by B T_i / N, for every candidate of the clip range."""
    tepo, gspo = resolve("t", {"t": {"preset": "tepo", "clip": clip}}), resolve("g", {"g": {"preset": "gspo", "clip": clip}})
    batch = random_batch(tepo, responses=12, longest=20)
    lengths_B1 = batch.mask_BT.sum(-1, keepdim=True).double()
    scale_B1 = 12 * lengths_B1 / lengths_B1.sum()
    expected = {"logprobs_BT": minibatch_gradient(gspo, batch)[1]["logprobs_BT"] * scale_B1}
    found = {"logprobs_BT": minibatch_gradient(tepo, batch)[1]["logprobs_BT"]}
    assert relative_error(found, expected) < 1e-12


LUSPO_CLIP = [2e-3, 2.5e-3]  # of arXiv 2602.05261


@pytest.mark.parametrize("clip", [LUSPO_CLIP, [0.2, 0.2], None])
def test_luspo_is_tepo_times_the_mean_length(clip):
    """LUSPO (1/B) sum_i T_i min(s_i A, clip(s_i) A) = TEPO's J_v1 times N / B: one direction, a scale a mini-batch.

    Written once from its own equation, and once as our `tepo` with another aggregate."""
    tepo = resolve("t", {"t": {"preset": "tepo", "clip": clip}})
    summed = resolve("s", {"s": {"preset": "tepo", "clip": clip, "aggregate": "seq_mean_token_sum"}})
    batch = replace(random_batch(tepo, responses=12, longest=20), weights_BT=None)
    lengths_B = batch.mask_BT.sum(-1).double()
    scale = float(lengths_B.sum()) / 12
    leaf_BT = batch.logprobs_BT.clone().requires_grad_()
    clean = replace(batch, logprobs_BT=leaf_BT)
    d_BT = (clean.logprobs_BT - clean.old_logprobs_BT).masked_fill(~batch.mask_BT, 0.0)
    s_B, advantages_B = (d_BT.sum(-1) / lengths_B).exp(), batch.advantages_BT[:, 0]
    low, high = clip or (1.0, 1e9)
    luspo = (lengths_B * torch.minimum(s_B * advantages_B, s_B.clamp(1 - low, 1 + high) * advantages_B)).sum() / 12
    (slope_BT,) = torch.autograd.grad(-luspo, leaf_BT)
    for method, factor in ((tepo, scale), (summed, 1.0)):
        loss, gradients = minibatch_gradient(method, batch)
        assert float(loss) * factor == pytest.approx(-luspo.item(), rel=1e-12)
        assert relative_error({"g": gradients["logprobs_BT"] * factor}, {"g": slope_BT}) < 1e-12


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs"])
def test_first_update_after_a_rollout_version_2_is_version_1(estimator):
    """theta = old, up to the rounding noise between sampling and training: no entropy has fallen, nothing is charged."""
    kl = {"estimator": estimator, "beta": 1.0}
    v1, v2 = resolve("tepo"), resolve("x", {"x": {"preset": "tepo_kl", "kl": kl}})
    batch = random_batch(v1, **SMALL)
    noise_BT = 1e-7 * torch.randn(5, 6, dtype=torch.float64)
    batch = replace(batch, old_logprobs_BT=batch.logprobs_BT + noise_BT, old_entropy_BT=batch.entropy_BT + noise_BT)
    out = v2.loss(batch, MiniBatchTotals.from_mask(batch.mask_BT))
    assert out.sums["mask"][0].item() == 0
    assert relative_error(minibatch_gradient(v2, batch)[1], minibatch_gradient(v1, batch)[1]) == 0


def test_from_the_second_update_on_the_mask_acts():
    v1, v2 = resolve("tepo"), resolve("tepo_kl")
    batch = random_batch(v1, **SMALL)
    out = v2.loss(batch, MiniBatchTotals.from_mask(batch.mask_BT))
    positive_BT = (batch.advantages_BT > 0) & batch.mask_BT
    fell_BT = batch.entropy_BT < batch.old_entropy_BT
    assert torch.equal(out.token.mask_BT, positive_BT & fell_BT) and out.token.mask_BT.any()
    difference_BT = (minibatch_gradient(v2, batch)[1]["logprobs_BT"] - minibatch_gradient(v1, batch)[1]["logprobs_BT"]) != 0
    assert torch.equal(difference_BT, out.token.mask_BT)


def test_raising_a_rewarded_token_does_not_always_lower_entropy():
    """One policy-gradient step on logits, A > 0: dz = onehot - p. Entropy falls only where the token's surprisal is below a
    weighted level, p_a (log p_a + H) > sum_i p_i^2 (log p_i + H); in random 8-way states that is nowhere near always."""
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(4000, 8, generator=generator, dtype=torch.float64)
    logp_NV = logits_NV.log_softmax(-1)
    p_NV = logp_NV.exp()
    sampled_N1 = torch.multinomial(p_NV, 1, generator=generator)
    entropy_N1 = -(p_NV * logp_NV).sum(-1, keepdim=True)
    after_NV = (logits_NV + 1e-4 * (torch.zeros_like(p_NV).scatter(1, sampled_N1, 1.0) - p_NV)).log_softmax(-1)
    fell_N1 = -(after_NV.exp() * after_NV).sum(-1, keepdim=True) < entropy_N1
    pull_NV = p_NV * (logp_NV + entropy_N1)
    predicted_N1 = pull_NV.gather(1, sampled_N1) > (p_NV * pull_NV).sum(-1, keepdim=True)
    assert (fell_N1 == predicted_N1).double().mean() > 0.999
    assert 0.3 < fell_N1.double().mean() < 0.7


# MPO


def _log_ratios(rows: int = 4, columns: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    valid_BT = (torch.arange(columns) < torch.tensor([9, 6, 1, 4])[:, None]).double()
    return torch.randn(rows, columns, dtype=torch.float64) * valid_BT, valid_BT


def test_block_of_one_is_the_token_ratio():
    d_BT, valid_BT = _log_ratios()
    for disjoint, ends in ((False, "wrap"), (False, "fold"), (False, "truncate"), (True, "wrap"), (True, "renormalise")):
        assert torch.allclose(
            block_ratio(d_BT, valid_BT, [1.0], disjoint=disjoint, ends=ends)[valid_BT > 0], token_ratio(d_BT)[valid_BT > 0]
        )


def test_one_disjoint_block_over_the_response_is_the_sequence_ratio():
    """K >= T_i: MPO runs from GRPO (K = 1) to GSPO / TEPO."""
    d_BT, valid_BT = _log_ratios()
    for size, ends in ((9, "wrap"), (30, "wrap"), (30, "renormalise")):
        block_BT = block_ratio(d_BT, valid_BT, [1.0] * size, disjoint=True, ends=ends)
        assert torch.allclose(block_BT[valid_BT > 0], sequence_ratio(d_BT, valid_BT).expand(4, 9)[valid_BT > 0])
    mpo = resolve("m", {"m": {"preset": "mpo", "block": {"size": 30, "kind": "disjoint"}}})
    batch = random_batch(mpo, responses=8, longest=20)
    assert relative_error(minibatch_gradient(mpo, batch)[1], minibatch_gradient(resolve("tepo"), batch)[1]) < 1e-12


def test_block_ratio_by_hand():
    """d = .3 -.1 .2 .4 .5, K = 2, ends renormalise: the last window or block has one token and its weight is renormalised."""
    d_BT = torch.tensor([[0.3, -0.1, 0.2, 0.4, 0.5]], dtype=torch.float64)
    valid_BT = torch.ones(1, 5, dtype=torch.float64)

    def log_ratio(weights, ends="renormalise", **options):
        return block_ratio(d_BT, valid_BT, weights, ends=ends, **options).log()[0].tolist()

    assert log_ratio([1, 1], disjoint=False) == pytest.approx([0.1, 0.05, 0.3, 0.45, 0.5])
    assert log_ratio([1, 1], disjoint=True) == pytest.approx([0.1, 0.1, 0.3, 0.3, 0.5])
    assert log_ratio([1, 1], "truncate", disjoint=False, normalised=False) == pytest.approx([0.2, 0.1, 0.6, 0.9, 0.5])
    # geometric, decay 1/2: (d_t + d_t+1 / 2) / 1.5
    assert log_ratio([1, 0.5], disjoint=False) == pytest.approx([0.25 / 1.5, 0, 0.4 / 1.5, 0.65 / 1.5, 0.5])
    # multi-token heads say 0.7 about every next token; the token's own log-ratio stays the backbone's
    ahead_BTK = torch.full((1, 5, 1), 0.7, dtype=torch.float64)
    heads = log_ratio([1, 1], disjoint=False, ahead_log_ratio_BTK=ahead_BTK)
    assert heads == pytest.approx([0.5, 0.3, 0.45, 0.55, 0.5])
    assert log_ratio([1, 1], disjoint=True, ahead_log_ratio_BTK=ahead_BTK) == pytest.approx([0.5, 0.5, 0.45, 0.45, 0.5])


def test_renormalised_windows_at_ratio_one_have_the_token_gradient_except_at_the_ends():
    """Each inner token is covered by K windows with weight 1/K; the first K - 1 by fewer, the last K - 1 by cut windows."""
    mpo, dapo = resolve("m", {"m": {"preset": "mpo", "block": {"size": 3, "ends": "renormalise"}}}), resolve("dapo")
    batch = random_batch(mpo, responses=3, longest=12)
    batch = replace(batch, mask_BT=torch.ones(3, 12, dtype=torch.bool), logprobs_BT=batch.old_logprobs_BT, weights_BT=None)
    ratio_BT = minibatch_gradient(mpo, batch)[1]["logprobs_BT"] / minibatch_gradient(dapo, batch)[1]["logprobs_BT"]
    # windows (1/3 1/3 1/3) ... then (1/2 1/2), then (1)
    expected = [1 / 3, 2 / 3, *[1.0] * 8, 2 / 3 + 1 / 2, 1 / 3 + 1 / 2 + 1]
    assert ratio_BT[0].tolist() == pytest.approx(expected)


# power mean


def test_power_mean_limits():
    d_BT, valid_BT = _log_ratios()
    r_BT = token_ratio(d_BT)
    for p in (-2.0, 1.0, 3.0):
        plain_B = torch.stack([(r[m] ** p).mean() ** (1 / p) for r, m in zip(r_BT, valid_BT > 0, strict=True)])
        assert torch.allclose(power_mean_ratio(d_BT, valid_BT, p)[:, 0], plain_B)
    geometric_B1 = sequence_ratio(d_BT, valid_BT)
    assert torch.equal(power_mean_ratio(d_BT, valid_BT, 0.0), geometric_B1)
    assert torch.allclose(power_mean_ratio(d_BT.float(), valid_BT.float(), 1e-6), geometric_B1.float(), rtol=2e-6)
