"""MPO's end rules: how much each token's log-probability weighs at ratio 1, in closed form, for every rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from all_methods import VARIANTS

from tepo_core.config import ConfigError
from tepo_core.objectives.invariance import minibatch_gradient, random_batch, relative_error
from tepo_core.objectives.methods import MiniBatchTotals, TokenBatch, resolve

HARMONIC = 1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5  # 2.28
INNER = [1.0] * 10
ENDS = {  # weights of the tokens of a response of 18 at ratio 1, K = 5, uniform, sliding
    "renormalise": [
        0.2,
        0.4,
        0.6,
        0.8,
        *INNER,
        1 / 5 * 4 + 1 / 4,
        3 / 5 + 1 / 4 + 1 / 3,
        2 / 5 + 1 / 4 + 1 / 3 + 1 / 2,
        HARMONIC,
    ],
    "truncate": [0.2, 0.4, 0.6, 0.8, *[1.0] * 14],
    "wrap": [1.0] * 18,
    "fold": [1.0] * 18,
}


def mpo(**block) -> object:
    return resolve("m", {"m": {"preset": "mpo", "block": block}})


def weights(method, length: int, padding: int = 3) -> list[float]:
    """dJ/dlog pi times N of each token of one response with A = 1 and ratio 1; what heads say counts for its token."""
    width = length + padding
    mask_BT = (torch.arange(width) < length)[None]
    old_BT = -torch.rand(1, width, dtype=torch.float64)
    heads = {}
    if method.needs_mtp:
        old_BTK = -torch.rand(1, width, method.mtp_modules, dtype=torch.float64)
        heads = {"mtp_logprobs_BTK": old_BTK.clone().requires_grad_(), "old_mtp_logprobs_BTK": old_BTK}
    ones_BT = torch.ones_like(old_BT)
    batch = TokenBatch(old_BT.clone().requires_grad_(), old_BT, mask_BT, ones_BT, **heads)
    out = method.loss(batch, MiniBatchTotals(length, 1))
    return (out.token.gradient_BT[mask_BT] * length).tolist()


@pytest.mark.parametrize("ends", ENDS)
def test_weight_of_every_token_at_ratio_one(ends):
    """K = 5, T = 18. renormalise: the first token weighs 1/5 and the last 1 + 1/2 + ... + 1/5."""
    assert weights(mpo(size=5, ends=ends), 18) == pytest.approx(ENDS[ends])


def test_the_rule_is_named_first_and_last():
    found = weights(mpo(size=5, ends="renormalise"), 18)
    assert (found[0], found[-1]) == (pytest.approx(0.20), pytest.approx(2.2833, abs=1e-4))


@pytest.mark.parametrize(
    ("ends", "three", "one"),
    [
        # T = 3 < K = 5: windows hold 3, 2 and 1 tokens
        ("renormalise", [1 / 3, 1 / 3 + 1 / 2, 1 / 3 + 1 / 2 + 1], [1.0]),
        ("truncate", [0.2, 0.4, 0.6], [0.2]),
        ("wrap", [1.0] * 3, [1.0]),
        ("fold", [1.0] * 3, [1.0]),
    ],
)
def test_responses_shorter_than_a_block(ends, three, one):
    assert weights(mpo(size=5, ends=ends), 3) == pytest.approx(three)
    assert weights(mpo(size=5, ends=ends), 1) == pytest.approx(one)


@pytest.mark.parametrize("length", [1, 3, 5, 7, 18])
@pytest.mark.parametrize(
    "block",
    [
        {},
        {"weights": "geometric", "decay": 0.5},
        {"kind": "disjoint"},
        {"kind": "disjoint", "weights": "geometric", "decay": 0.5},
        {"ends": "fold", "weights": "geometric", "decay": 0.5},
        {"logprobs": "mtp"},
        {"logprobs": "mtp", "weights": "geometric", "decay": 0.5},
        {"logprobs": "mtp", "kind": "disjoint"},
    ],
)
def test_by_default_every_token_weighs_one_at_ratio_one(block, length):
    """For backbone and heads, sliding and disjoint, any beta, and responses shorter than a block: MPO is the token mean there."""
    assert weights(mpo(size=5, **block), length) == pytest.approx([1.0] * length)


@pytest.mark.parametrize("kind", ["sliding", "disjoint"])
def test_at_ratio_one_the_default_has_the_gradient_of_dapo(kind):
    method, dapo = mpo(size=4, kind=kind), resolve("dapo")
    batch = random_batch(method, responses=9, longest=23)
    batch = replace(batch, logprobs_BT=batch.old_logprobs_BT, weights_BT=None)
    assert relative_error(minibatch_gradient(method, batch)[1], minibatch_gradient(dapo, batch)[1]) < 1e-12


def log_ratios(block: dict, d: list[float]) -> list[float]:
    """log R of one response whose d are given, left-padded by two columns."""
    d_BT = torch.tensor([[9.0, 9.0, *d]], dtype=torch.float64)
    mask_BT = (torch.arange(d_BT.shape[1]) >= 2)[None]
    method = resolve("m", {"m": {"preset": "mpo", "clip": None, "block": block}})
    out = method.loss(TokenBatch(d_BT, torch.zeros_like(d_BT), mask_BT, torch.ones_like(d_BT)), MiniBatchTotals(len(d), 1))
    return out.token.ratio_BT[mask_BT].log().tolist()


D = [0.3, -0.1, 0.2, 0.4, 0.5]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"size": 2, "ends": "renormalise"}, [0.1, 0.05, 0.3, 0.45, 0.5]),
        ({"size": 2, "ends": "truncate"}, [0.1, 0.05, 0.3, 0.45, 0.25]),
        ({"size": 2, "ends": "wrap"}, [0.1, 0.05, 0.3, 0.45, 0.4]),  # the last window: 0.5 and the first token's 0.3
        ({"size": 2, "ends": "fold"}, [0.25, 0.05, 0.3, 0.45, 0.25]),  # the first token keeps the half of no window
        ({"size": 3, "ends": "wrap", "weights": "geometric", "decay": 0.5},
         [(4 * 0.3 - 0.2 + 0.2) / 7, (-0.4 + 0.4 + 0.4) / 7, (0.8 + 0.8 + 0.5) / 7, (1.6 + 1.0 + 0.3) / 7, (2 + 0.6 - 0.1) / 7]),
        # blocks 0.3 -0.1 0.2 | 0.4 0.5: a block of two is a mean of two
        ({"size": 3, "kind": "disjoint"}, [0.4 / 3] * 3 + [0.45] * 2),
        ({"size": 3, "kind": "disjoint", "ends": "truncate"}, [0.4 / 3] * 3 + [0.3] * 2),
        # geometric: inside its block each token comes first, the others follow round the block
        ({"size": 3, "kind": "disjoint", "weights": "geometric", "decay": 0.5},
         [(1.2 - 0.2 + 0.2) / 7, (-0.4 + 0.4 + 0.3) / 7, (0.8 + 0.6 - 0.1) / 7, (0.8 + 0.5) / 3, (1 + 0.4) / 3]),
        ({"size": 2, "form": "product", "ends": "wrap"}, [0.2, 0.1, 0.6, 0.9, 0.8]),
        ({"size": 2, "form": "product", "ends": "fold"}, [0.5, 0.1, 0.6, 0.9, 0.5]),
        ({"size": 9, "ends": "wrap"}, [0.26] * 5),  # a window longer than the response is the response, once
    ],
)  # fmt: skip
def test_ratios_by_hand(block, expected):
    assert log_ratios(block, D) == pytest.approx(expected)


def test_windows_that_wrap_over_the_whole_response_are_the_sequence_ratio():
    """K >= T_i, sliding or disjoint: MPO runs from DAPO to TEPO under the default rule."""
    for kind in ("sliding", "disjoint"):
        method = mpo(size=30, kind=kind)
        batch = random_batch(method, responses=8, longest=20)
        assert relative_error(minibatch_gradient(method, batch)[1], minibatch_gradient(resolve("tepo"), batch)[1]) < 1e-12


def test_every_rule_is_among_the_methods_of_the_invariance_tests():
    rules = {resolve(name, VARIANTS).settings.block.ends for name in VARIANTS if name.startswith("mpo")}
    assert rules == set(ENDS)


@pytest.mark.parametrize(
    ("block", "parts"),
    [
        ({"ends": "mirror"}, ["block.ends = 'mirror'", "'wrap'", "'renormalise'"]),
        ({"ends": "wrap", "logprobs": "mtp"}, ["ends = wrap with logprobs = mtp", "no head", "fold"]),
        ({"ends": "fold", "kind": "disjoint"}, ["ends = fold with kind = disjoint", "renormalise, truncate, wrap"]),
        ({"ends": "renormalise", "form": "product"}, ["ends = renormalise with form = product", "truncate"]),
    ],
)
def test_rules_that_make_no_sense_are_refused(block, parts):
    with pytest.raises(ConfigError) as error:
        mpo(**block)
    for part in ("m: block", *parts):
        assert part in str(error.value), str(error.value)


def test_the_resolved_rule_stands_in_the_options():
    """A run records the rule it used, whichever way it was chosen."""
    assert mpo().options["block"]["ends"] == "wrap"
    assert mpo(logprobs="mtp").options["block"]["ends"] == "fold"
    assert mpo(logprobs="mtp", kind="disjoint").options["block"]["ends"] == "renormalise"
    assert mpo(logprobs="mtp", kind="disjoint", form="product").options["block"]["ends"] == "truncate"
    assert mpo(form="product", size=2).options["block"]["ends"] == "wrap"
