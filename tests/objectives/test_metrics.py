"""Metrics: hand-computed sums, additivity over micro-batches, and the off-policy correction."""

from __future__ import annotations

import json
import math

import pytest
import torch
from by_hand import ADVANTAGES, ENTROPY, MASK, NEW, OLD, OLD_ENTROPY, SELECTED, TOTALS

from tepo_core.analysis.summaries import _spread
from tepo_core.objectives.correction import off_policy_correction
from tepo_core.objectives.invariance import chunks, random_batch
from tepo_core.objectives.methods import PRESETS, MiniBatchTotals, TokenBatch, resolve
from tepo_core.objectives.metrics import merge
from tepo_core.runs.metrics import Metrics, metric_line

D = [math.log(1.5), math.log(0.5), math.log(0.7)]


def small(**changes) -> TokenBatch:
    return TokenBatch(
        logprobs_BT=NEW,
        old_logprobs_BT=OLD,
        mask_BT=MASK,
        advantages_BT=ADVANTAGES,
        entropy_BT=ENTROPY,
        old_entropy_BT=OLD_ENTROPY,
        selected_BT=SELECTED,
        **changes,
    )


def test_sums_by_hand():
    """The mini-batch of test_objectives_values under tepo_kl: N = 3, A = 1 1 -2, H fell on tokens 1 and 3."""
    sums, values = merge([resolve("tepo_kl").loss(small(), TOTALS)])
    s1 = math.sqrt(0.75)
    expected = {
        "log_ratio": sum(D),
        "abs_log_ratio": sum(map(abs, D)),
        "log_ratio_sq": sum(d * d for d in D),
        "kl_old": sum(math.exp(d) - 1 - d for d in D),
        "ratio": 2 * s1 + 0.7,
        "ratio_dev_sq": 2 * (s1 - 1) ** 2 + 0.09,
        "clip_low": 1,  # 0.7 < 0.8 with A < 0
        "clip_high": 0,
        "clip": 1,
        "advantage": 0,
        "covariance": math.log(0.6) + math.log(0.4) - 2 * math.log(0.35),  # the mean of A is 0
        "logprob": math.log(0.6) + math.log(0.4) + math.log(0.35),
        "mask": 1,
        "kl_penalty": 1.5 * (1 / 1.5 - 1 + D[0]),  # k3 times the ratio: the token was sampled by old
        "entropy": 1.4,
        "entropy_change": -0.2 + 0.2 - 0.4,
        "positive": 2,
    }
    for name, value in expected.items():
        assert sums[name] == [pytest.approx(value, abs=1e-12), 3], name
    assert sums["mask_kl"] == [pytest.approx(1.5 * (1 / 1.5 - 1 + D[0])), 1]
    assert sums["positive_entropy_fell"] == [1, 2]
    assert sums["kl_gradient_sq"] == [0, 0]  # nothing here requires gradient
    assert set(sums) == {*expected, "mask_kl", "positive_entropy_fell", "kl_gradient_sq"}
    assert values == {
        "loss": pytest.approx(-(2 * s1 - 1.6 - 0.1 * expected["kl_penalty"]) / 3),
        "ratio_max": pytest.approx(s1),
        "ratio_min": pytest.approx(0.7),
    }


@pytest.mark.parametrize("spread", [1e-6, 1e-5, 1e-4, 1e-2])
@pytest.mark.parametrize("name", ["grpo", "gspo_token"])
def test_a_small_spread_of_the_ratio_is_told_in_float32(name, spread):
    generator, shape = torch.Generator().manual_seed(0), (64, 100)
    old_BT = -torch.rand(shape, generator=generator)
    new_BT = old_BT + spread * torch.randn(shape, generator=generator)
    batch = TokenBatch(new_BT, old_BT, torch.ones(shape, dtype=torch.bool), torch.ones(shape))
    event = {"kind": "update", "step": 1, "update": 1}
    event |= json.loads(metric_line("update", 1, *merge([resolve(name).loss(batch, MiniBatchTotals(6400, 64))])))
    ratio_BT = resolve(name).loss(batch, MiniBatchTotals(6400, 64)).token.ratio_BT
    assert _spread(Metrics("", {"update": [event]}).update) == pytest.approx(
        float(ratio_BT.double().std(correction=0)), rel=0.02
    )


def test_covariance_is_centred():
    """A = 1 2 on log pi = ln 0.6, ln 0.4: sum (l - mean)(A - mean) = (ln 0.4 - ln 0.6) / 2."""
    mask_BT = torch.tensor([[True, True], [False, False]])
    batch = TokenBatch(NEW, OLD, mask_BT, torch.tensor([[1.0, 2.0], [0.0, 0.0]], dtype=torch.float64))
    sums, _ = merge([resolve("grpo").loss(batch, MiniBatchTotals(2, 1))])
    assert sums["covariance"] == [pytest.approx((math.log(0.4) - math.log(0.6)) / 2), 2]


@pytest.mark.parametrize("name", ["tepo_kl", "clip_cov", "mpo", "gmpo"])
def test_metrics_add_over_micro_batches(name):
    method = resolve(name)
    batch = random_batch(method, responses=9, longest=30)
    totals = MiniBatchTotals.from_mask(batch.mask_BT)
    whole = merge([method.loss(batch, totals)])
    split = merge([method.loss(batch.rows(rows), totals) for rows in chunks(9, 2)])
    for one, two in zip(whole, split, strict=True):
        assert one.keys() == two.keys()
        for key in one:
            assert two[key] == pytest.approx(one[key], rel=1e-12, abs=1e-12), key


@pytest.mark.parametrize(
    ("name", "low", "high", "all_of_them"),
    [
        ("grpo", 1, 1, 2),
        ("gspo", 1, 0, 1),
        ("gmpo", 0, 1, 1),
        ("cispo", 0, 1, 1),
        ("clip_cov", 0, 0, 1),
        ("kl_cov", 0, 0, 0),
        ("sapo", 0, 0, 0),
    ],
)
def test_clip_counts(name, low, high, all_of_them):
    out = resolve(name).loss(small(), TOTALS)
    assert [out.sums[key][0].item() for key in ("clip_low", "clip_high", "clip")] == [low, high, all_of_them]
    assert out.token.clipped_BT.sum() == all_of_them and not out.token.clipped_BT[~MASK].any()


def test_per_token_results_are_detached_and_have_the_shape_of_the_batch():
    for name in PRESETS:
        batch = random_batch(resolve(name), responses=3, longest=5)
        token = resolve(name).loss(batch, MiniBatchTotals.from_mask(batch.mask_BT, constant=5.0)).token
        for value in (token.ratio_BT, token.clipped_BT, token.mask_BT):
            assert value.shape == batch.mask_BT.shape and not value.requires_grad


def test_without_entropies_their_metrics_are_absent_not_zero():
    batch = TokenBatch(NEW, OLD, MASK, ADVANTAGES)
    sums, _ = merge([resolve("grpo").loss(batch, TOTALS)])
    assert "entropy" not in sums and "positive_entropy_fell" not in sums and "kl_penalty" not in sums


TRAINER = torch.tensor([[0.6, 0.3], [0.5, 1.0]], dtype=torch.float64).log()
SAMPLER = torch.tensor([[0.2, 0.4], [0.5, 0.1]], dtype=torch.float64).log()  # weights 3, 0.75 | 1


def test_token_weights_are_truncated_and_logged_before():
    out = off_policy_correction(TRAINER, SAMPLER, MASK, kind="token", cap=2.0)
    assert out.weights_BT[MASK].tolist() == pytest.approx([2.0, 0.75, 1.0])
    assert out.sums["correction"][0].item() == pytest.approx(4.75)
    assert out.sums["correction_sq"][0].item() == pytest.approx(9 + 0.5625 + 1)
    assert [x.item() for x in out.sums["correction_capped"]] == [1, 3]
    assert out.extremes["correction_max"].item() == pytest.approx(3.0)
    assert out.sums["mismatch"][0].item() == pytest.approx(math.log(3) - math.log(0.75))
    assert out.sums["mismatch_kl"][0].item() == pytest.approx((3 - 1 - math.log(3)) + (0.75 - 1 - math.log(0.75)))


def test_sequence_weights_use_the_mean_a_token():
    """exp(mean(ln 3, ln 0.75)) = 1.5, not the product 2.25; a thousand tokens of +0.01 give 1.01, not e^10."""
    out = off_policy_correction(TRAINER, SAMPLER, MASK, kind="sequence", cap=2.0)
    assert out.weights_BT[MASK].tolist() == pytest.approx([1.5, 1.5, 1.0])
    long_BT = torch.full((1, 1000), -1.0, dtype=torch.float64)
    out = off_policy_correction(long_BT + 0.01, long_BT, long_BT < 0, kind="sequence", cap=2.0)
    assert out.weights_BT[0, 0].item() == pytest.approx(math.exp(0.01))


def test_no_correction_still_measures_the_mismatch():
    out = off_policy_correction(TRAINER, SAMPLER, MASK, kind="none", cap=2.0)
    assert out.weights_BT is None and out.extremes["mismatch_max"].item() == pytest.approx(math.log(3))


@pytest.mark.parametrize(("kind", "cap", "message"), [("all", 2.0, "allowed: none, token"), ("token", 0.5, "cap = 0.5")])
def test_wrong_correction(kind, cap, message):
    with pytest.raises(ValueError, match=message):
        off_policy_correction(TRAINER, SAMPLER, MASK, kind=kind, cap=cap)


def test_the_spread_of_older_records_is_read_from_the_second_moment():
    event = {"kind": "update", "step": 1, "update": 1, "sums": {"ratio": [10.0, 10.0], "ratio_sq": [10.4, 10.0]}, "values": {}}
    assert _spread(Metrics("", {"update": [event]}).update) == pytest.approx(0.2)
