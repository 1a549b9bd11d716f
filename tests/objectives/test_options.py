"""Names, options and tensors that are wrong raise before any work, naming what is wrong and what is allowed."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from tepo_core.config import ConfigError
from tepo_core.objectives.invariance import random_batch
from tepo_core.objectives.methods import PRESETS, BatchError, MiniBatchTotals, TokenBatch, register, resolve


def refused(variant: dict, *parts: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve("x", {"x": variant})
    for part in ("variants.x", *parts):
        assert part in str(error.value), str(error.value)


def test_every_preset_resolves_to_json_options_that_resolve_again():
    for name, preset in PRESETS.items():
        method = resolve(name)
        assert (method.name, method.preset) == (name, name) and preset.source and preset.status
        options = json.loads(json.dumps(method.options))
        again = resolve("again", {"again": {"preset": name, **options}})
        assert again.options == method.options


def test_overrides_merge_into_nested_options_and_train_is_not_one():
    variant = {"preset": "tepo_kl", "clip": [0.2, 0.28], "kl": {"estimator": "k2", "beta": 1}, "train": {"lr": 1.0}}
    method = resolve("tepo_x", {"tepo_x": variant})
    assert method.preset == "tepo_kl" and method.settings.clip == (0.2, 0.28)
    assert method.settings.kl.mask == "tepo" and method.settings.kl.reference == "old"
    assert (method.settings.kl.estimator, method.settings.kl.gradient, method.settings.kl.beta) == ("k2", "k2", 1.0)
    assert resolve("tepo_x", {"tepo_x": {**variant, "kl": None, "entropy_test": None}}).settings.kl is None


def test_the_example_of_the_documentation():
    kl = {"estimator": "k3", "reference": "old", "beta": 0.1}
    resolve("x", {"x": {"preset": "tepo_kl", "clip": [0.2, 0.28], "kl": kl, "entropy_test": "exact"}})


def test_what_a_method_needs():
    assert resolve("kl_cov").needs_population and resolve("clip_cov").needs_population
    assert resolve("x", {"x": {"preset": "tepo_kl", "entropy_test": "covariance"}}).needs_population
    assert not resolve("tepo_kl").needs_population and resolve("tepo_kl").needs_entropy
    assert not resolve("tepo_kl").needs_reference
    assert resolve("x", {"x": {"preset": "grpo", "kl": {"beta": 0.1}}}).needs_reference
    heads = resolve("x", {"x": {"preset": "mpo", "block": {"size": 4, "logprobs": "mtp"}}})
    assert heads.needs_mtp and heads.mtp_modules == 3 and not resolve("mpo").needs_mtp
    assert resolve("x", {"x": {"preset": "grpo", "entropy_bonus": 0.1}}).needs_entropy_grad
    assert resolve("dr_grpo").advantage == "centred"


@pytest.mark.parametrize(
    ("variant", "parts"),
    [
        ({"preset": "tepoo"}, ["'tepoo'", "tepo_kl", "gmpo"]),
        ({"preset": "grpo", "clipp": [0.2, 0.2]}, ["grpo has no option 'clipp'", "clip", "aggregate"]),
        ({"preset": "gmpo", "block": {"size": 2}}, ["gmpo does not use option 'block'", "clip"]),
        ({"preset": "reinforce", "clip": [0.2, 0.2]}, ["reinforce does not use option 'clip'"]),
        ({"preset": "sapo", "dual_clip": 3.0}, ["sapo does not use option 'dual_clip'", "tau_negative"]),
        ({"preset": "grpo", "share": 0.1}, ["grpo does not use option 'share'"]),
        ({"preset": "grpo", "clip": [-0.1, 0.2]}, ["clip", "low = -0.1", "0 <= low < 1"]),
        ({"preset": "grpo", "clip": [1.0, 0.2]}, ["clip", "low = 1.0", "null for no bound"]),
        ({"preset": "grpo", "clip": [0.2, -1]}, ["clip", "high = -1"]),
        ({"preset": "grpo", "clip": [0.2, float("nan")]}, ["clip", "high = nan"]),
        ({"preset": "grpo", "clip": 0.2}, ["clip = 0.2", "[low, high]"]),
        ({"preset": "grpo", "clip": ["0.2", 0.2]}, ["clip", "low = '0.2'"]),
        ({"preset": "grpo", "dual_clip": 1.0}, ["dual_clip = 1.0", "greater than 1"]),
        ({"preset": "grpo", "aggregate": "mean"}, ["aggregate = 'mean'", "token_mean", "seq_mean_token_mean"]),
        ({"preset": "grpo", "advantage": "gae"}, ["advantage = 'gae'", "loo"]),
        ({"preset": "grpo", "ratio": "sentence"}, ["ratio = 'sentence'", "power_mean"]),
        ({"preset": "grpo", "ratio": "block"}, ["block is missing"]),
        ({"preset": "grpo", "p": 1.0}, ["p is used only with ratio: power_mean", "ratio is token"]),
        ({"preset": "mpo", "ratio": "token"}, ["block is used only with ratio: block", "block: null"]),
        ({"preset": "holder", "p": float("nan")}, ["p = nan", "finite"]),
        ({"preset": "holder", "p": None}, ["p is missing"]),
        ({"preset": "mpo", "block": {"size": 0}}, ["block.size = 0", "greater than or equal to 1"]),
        ({"preset": "mpo", "block": {"length": 2}}, ["block has no option 'length'", "size", "kind"]),
        ({"preset": "mpo", "block": {"weights": "geometric"}}, ["block", "decay = None with weights = geometric"]),
        ({"preset": "mpo", "block": {"decay": 0.5}}, ["block", "decay = 0.5 with weights = uniform"]),
        ({"preset": "mpo", "block": {"form": "product", "weights": "geometric", "decay": 0.5}}, ["plain product"]),
        ({"preset": "mpo", "block": {"size": 1, "logprobs": "mtp"}}, ["block of one token needs no heads"]),
        ({"preset": "grpo", "kl": {"estimator": "k4"}}, ["kl.estimator = 'k4'", "k3"]),
        ({"preset": "grpo", "kl": {"gradient": "k5"}}, ["kl.gradient = 'k5'"]),
        ({"preset": "grpo", "kl": {"beta": -1}}, ["kl.beta = -1"]),
        ({"preset": "grpo", "kl": {"reference": "base"}}, ["kl.reference = 'base'", "'ref'"]),
        ({"preset": "grpo", "kl": {"mask": "tepo"}}, ["entropy_test is missing", "covariance"]),
        ({"preset": "grpo", "kl": {"mask": "selected"}}, ["only kl_cov selects tokens"]),
        ({"preset": "tepo", "entropy_test": "exact"}, ["entropy_test = exact", "kl is null"]),
        ({"preset": "tepo_kl", "kl": {"mask": "all"}}, ["entropy_test = exact", "kl.mask is all"]),
        ({"preset": "tepo_kl", "entropy_test": "first_order", "entropy_margin": 0.1}, ["entropy_margin"]),
        ({"preset": "clip_cov", "share": 1.5}, ["share = 1.5"]),
        ({"preset": "clip_cov", "band": [5.0, 1.0]}, ["band = [5.0, 1.0]", "low < high"]),
        ({"preset": "grpo", "entropy_bonus": float("inf")}, ["entropy_bonus = inf"]),
        ({"preset": "sapo", "tau_positive": 0}, ["tau_positive = 0"]),
    ],
)
def test_wrong_options(variant, parts):
    refused(variant, *parts)


def test_unknown_name_without_variants():
    with pytest.raises(ConfigError, match="method ppo: preset 'ppo' is unknown; allowed: reinforce, grpo"):
        resolve("ppo")


def test_a_name_cannot_be_registered_twice_nor_with_wrong_defaults():
    with pytest.raises(ConfigError, match="'grpo' is registered already"):
        register("grpo", source="none")(lambda batch, options: None)
    with pytest.raises(ConfigError, match="objective new: aggregate = 'sum'"):
        register("new", source="none", aggregate="sum")(lambda batch, options: None)
    assert "new" not in PRESETS


def small(method) -> TokenBatch:
    return random_batch(method, responses=4, longest=6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("field", ["logprobs_BT", "old_logprobs_BT", "advantages_BT", "entropy_BT"])
def test_bad_numbers_name_the_response(field, value):
    method = resolve("grpo")
    batch = small(method)
    tensor = getattr(batch, field).clone()
    tensor[2, 0] = value
    with pytest.raises(BatchError, match=rf"{field} of response 2, column 0 is {value}; 1 of 4 responses"):
        method.validate(replace(batch, **{field: tensor}))


def test_bad_numbers_at_padding_do_not_matter():
    method = resolve("tepo_kl")
    batch = small(method)
    spoilt = replace(batch, logprobs_BT=batch.logprobs_BT.masked_fill(~batch.mask_BT, float("nan")))
    method.validate(spoilt)
    totals = MiniBatchTotals.from_mask(batch.mask_BT)
    assert torch.equal(method.loss(spoilt, totals).loss, method.loss(batch, totals).loss)


def test_bad_numbers_on_tokens_are_never_hidden():
    """Without ``validate`` a NaN reaches the loss, where the caller sees it; it is not replaced by a harmless number."""
    for name in PRESETS:
        batch = small(resolve(name))
        spoilt = batch.logprobs_BT.clone()
        spoilt[1, 0] = float("nan")
        out = resolve(name).loss(replace(batch, logprobs_BT=spoilt), MiniBatchTotals.from_mask(batch.mask_BT, constant=6.0))
        assert out.loss.isnan(), name


def test_shapes_and_empty_masks():
    method = resolve("grpo")
    batch = small(method)
    with pytest.raises(BatchError, match=r"advantages_BT has shape \[4\], mask_BT \[4, 6\]"):
        method.validate(replace(batch, advantages_BT=batch.advantages_BT[:, 0]))
    with pytest.raises(BatchError, match=r"old_logprobs_BT has shape \[4, 5\]"):
        method.validate(replace(batch, old_logprobs_BT=batch.old_logprobs_BT[:, 1:]))
    with pytest.raises(BatchError, match="mask_BT must be bool"):
        method.validate(replace(batch, mask_BT=batch.mask_BT.float()))
    empty = replace(batch, mask_BT=torch.zeros_like(batch.mask_BT))
    with pytest.raises(BatchError, match="no token in the whole mini-batch"):
        method.validate(empty)
    with pytest.raises(BatchError, match="no token in the whole mini-batch"):
        MiniBatchTotals.from_mask(empty.mask_BT)
    with pytest.raises(BatchError, match=r"lengths add up to 3 tokens.*'logprobs_BT': 4"):
        TokenBatch.from_packed([1, 2], logprobs_BT=torch.zeros(4))


@pytest.mark.parametrize(
    ("variant", "field", "reason"),
    [
        ({"preset": "grpo", "kl": {"beta": 0.1}}, "ref_logprobs_BT", "kl.reference = ref"),
        ({"preset": "grpo", "kl": {"estimator": "exact"}}, "exact_kl_BT", "exact"),
        ({"preset": "kl_cov"}, "selected_BT", "Method.select"),
        ({"preset": "tepo_kl"}, "old_entropy_BT", "entropy_test = exact"),
        ({"preset": "tepo_kl"}, "entropy_BT", "entropy of the current policy"),
        ({"preset": "grpo", "entropy_bonus": 0.1}, "entropy_BT", "entropy of the current policy"),
        ({"preset": "mpo", "block": {"logprobs": "mtp"}}, "mtp_logprobs_BTK", "MTP modules"),
    ],
)
def test_missing_tensors(variant, field, reason):
    method = resolve("x", {"x": variant})
    method.validate(small(method))
    with pytest.raises(BatchError, match=f"method x needs {field}, which is missing: .*{re.escape(reason)}"):
        method.validate(replace(small(method), **{field: None}))


def test_too_few_heads():
    method = resolve("x", {"x": {"preset": "mpo", "block": {"logprobs": "mtp", "size": 4}}})
    batch = small(method)
    with pytest.raises(BatchError, match="needs 3 MTP heads .* has 2"):
        method.validate(replace(batch, mtp_logprobs_BTK=batch.mtp_logprobs_BTK[..., :2]))


@pytest.mark.parametrize("name", ["gspo", "tepo", "tepo_kl", "holder", "gmpo"])
def test_one_ratio_a_response_needs_one_advantage_a_response(name):
    method = resolve(name)
    batch = small(method)
    advantages_BT = batch.advantages_BT.clone()
    row = int(batch.mask_BT.sum(-1).argmax())
    advantages_BT[row, 0] += 1
    varying = replace(batch, advantages_BT=advantages_BT)
    with pytest.raises(BatchError, match=f"varies inside response {row}.*use preset gspo_token"):
        method.validate(varying)
    for other in ("grpo", "gspo_token", "mpo"):
        resolve(other).validate(varying)


def test_blocks_need_contiguous_responses():
    method = resolve("mpo")
    batch = small(method)
    mask_BT = torch.ones(4, 6, dtype=torch.bool)
    mask_BT[1, 2] = False
    with pytest.raises(BatchError, match="response 1 has holes"):
        method.validate(replace(batch, mask_BT=mask_BT))


def test_constant_aggregation_needs_its_constant():
    method = resolve("dr_grpo")
    batch = small(method)
    with pytest.raises(BatchError, match="needs MiniBatchTotals.constant > 0"):
        method.loss(batch, MiniBatchTotals.from_mask(batch.mask_BT))


@pytest.mark.parametrize(
    ("name", "variant", "missing"),
    [
        ("tepo_kl", None, "entropy_BT"),
        ("tepo_kl", None, "old_entropy_BT"),
        ("kl_cov", None, "selected_BT"),
        ("clip_cov", None, "selected_BT"),
        ("x", {"preset": "tepo_kl", "kl": {"reference": "ref"}}, "ref_logprobs_BT"),
        ("x", {"preset": "tepo_kl", "kl": {"estimator": "exact", "gradient": "exact"}}, "exact_kl_BT"),
        ("x", {"preset": "mpo", "block": {"logprobs": "mtp"}}, "mtp_logprobs_BTK"),
        ("x", {"preset": "grpo", "entropy_bonus": 0.1}, "entropy_BT"),
    ],
)
def test_a_missing_tensor_is_named_by_the_loss_itself(name, variant, missing):
    """Who calls the loss without ``validate`` must not meet a TypeError on None."""
    method = resolve(name, {"x": variant} if variant else None)
    batch = random_batch(method, responses=4, longest=9)
    totals = MiniBatchTotals.from_mask(batch.mask_BT, constant=9.0)
    method.loss(batch, totals)
    with pytest.raises(BatchError, match=f"method {name} needs {missing}, which is missing"):
        method.loss(replace(batch, **{missing: None}), totals)
