"""The transformers engine: token ids in and out, log-probs of the trainer, rows that do not depend on their batch."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from tiny import tiny_study

from tepo_core.model.policy import build_tiny
from tepo_core.rollout.rescore import rescore
from tepo_core.rollout.transformers_engine import TransformersEngine, choose
from tepo_core.rollout.types import Rollouts, SamplingParams
from tepo_core.tasks.tokenizer import build_tokenizer

PROMPTS = ["6+3+2-8-3=", "1-8+3+9=", "9+9-1+2-7+4="]


@pytest.fixture(scope="module")
def policy():
    policy = build_tiny(tiny_study().policy, build_tokenizer(), seed=5)
    with torch.no_grad():  # sharper than a fresh model, so that entropies differ between tokens
        policy.model.model.embed_tokens.weight.mul_(4)
    return policy


def engine_of(policy, batch_size=1024):
    return TransformersEngine(policy.model, pad_id=policy.pad_id, eos_ids=policy.eos_ids, batch_size=batch_size)


def sample(policy, n=6, batch_size=1024, prompts=PROMPTS, seeds=(1, 2, 3), **changes) -> Rollouts:
    params = SamplingParams(**{"temperature": 0.9, "top_p": 1.0, "max_new_tokens": 20, **changes})
    return engine_of(policy, batch_size).generate([policy.encode(p) for p in prompts], n, params, list(seeds))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_ratio_is_one_before_any_update(policy, temperature):
    rollouts = sample(policy, temperature=temperature)
    logprobs, entropies = rescore(policy.model, rollouts, pad_id=policy.pad_id, temperature=temperature, micro_batch_tokens=200)
    for row in range(len(rollouts)):
        np.testing.assert_allclose(rollouts.logprobs[row], logprobs[row], atol=1e-4, rtol=0)
        np.testing.assert_allclose(rollouts.entropies[row], entropies[row], atol=1e-4, rtol=0)


def test_rows_do_not_depend_on_the_batch(policy):
    together = sample(policy)
    one_by_one = sample(policy, batch_size=6)
    assert together.response_ids == one_by_one.response_ids
    alone = sample(policy, prompts=PROMPTS[1:2], seeds=[2])
    assert together.response_ids[6:12] == alone.response_ids
    assert together.prompt_index == [0] * 6 + [1] * 6 + [2] * 6 and together.sample_index == list(range(6)) * 3


def test_seed_decides(policy):
    assert sample(policy).response_ids == sample(policy).response_ids
    assert sample(policy).response_ids != sample(policy, seeds=(4, 5, 6)).response_ids


def test_lengths_and_ends(policy):
    rollouts = sample(policy, n=40)
    assert {True, False} == set(rollouts.finished), "the case needs responses that end and responses that are cut"
    eos = policy.tokenizer.eos_token_id
    for ids, finished, logprobs in zip(rollouts.response_ids, rollouts.finished, rollouts.logprobs, strict=True):
        assert len(ids) == len(logprobs) <= 20
        assert (ids[-1] == eos) == finished and eos not in ids[:-1]
        assert finished or len(ids) == 20


def test_greedy_equals_generate(policy):
    """Peer: transformers' own greedy search, one prompt at a time without padding."""
    rollouts = sample(policy, n=1, greedy=True)
    for prompt, ids in zip(PROMPTS, rollouts.response_ids, strict=True):
        encoded = torch.tensor([policy.encode(prompt)])
        expected = policy.model.generate(encoded, do_sample=False, max_new_tokens=20, pad_token_id=policy.pad_id)
        assert ids == expected[0, encoded.shape[1] :].tolist()


def test_draws_follow_the_distribution():
    logits_V = torch.tensor([1.0, -0.5, 0.3, 2.0, -3.0])
    draws = 20000
    uniform_B = torch.from_numpy(np.random.default_rng(0).random(draws))
    tokens, logprobs, entropies = choose(logits_V.expand(draws, -1), SamplingParams(1.5, 1.0, 1), uniform_B)
    probs = np.exp(logits_V.double().numpy() / 1.5)
    probs /= probs.sum()
    assert chisquare(np.bincount(tokens, minlength=5), probs * draws).pvalue > 0.001
    assert float(logprobs[0]) == pytest.approx(np.log(probs[tokens[0]]), abs=1e-6)
    assert float(entropies[0]) == pytest.approx(-(probs * np.log(probs)).sum(), abs=1e-6)


def test_top_p_keeps_the_nucleus_but_reports_the_full_distribution():
    # probabilities 0.5, 0.3, 0.15, 0.05: top_p = 0.6 keeps the first two (mass before the second is 0.5 < 0.6)
    logits_V = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    draws = 4000
    uniform_B = torch.from_numpy(np.random.default_rng(1).random(draws))
    tokens, logprobs, _ = choose(logits_V.expand(draws, -1), SamplingParams(1.0, 0.6, 1), uniform_B)
    counts = np.bincount(tokens, minlength=4)
    assert counts[2] == counts[3] == 0
    assert chisquare(counts[:2], np.array([0.625, 0.375]) * draws).pvalue > 0.001
    assert float(logprobs[0].exp()) == pytest.approx([0.5, 0.3][int(tokens[0])], abs=1e-6)


def test_seeds_must_match_prompts(policy):
    with pytest.raises(ValueError, match="2 seeds for 3 prompts"):
        sample(policy, seeds=(1, 2))
