"""Tokens that cannot be drawn (a logit of -inf): 0 log 0 = 0 in every path, with the gradients of a vocabulary without them; and
dropout, which would make two passes of one policy differ."""

import math

import pytest
import torch
from tiny import tiny_study
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tepo_core.config import ConfigError
from tepo_core.model import logprobs as module
from tepo_core.model.logprobs import chosen_logprobs, plain_logprobs, response_states, sequence_logprobs
from tepo_core.model.logprobs_chunked import _block_gradient, _block_statistics
from tepo_core.model.policy import _refuse_dropout, build_tiny, load_policy, save_policy
from tepo_core.objectives.methods import resolve
from tepo_core.rollout.rescore import rescore
from tepo_core.rollout.transformers_engine import TransformersEngine, choose
from tepo_core.rollout.types import SamplingParams
from tepo_core.tasks.tokenizer import build_tokenizer
from tepo_core.training.update import Learner

N, V, D = 11, 23, 6
DEAD = [0, 1, 2, 3, 9, 22]  # the first block of every small chunk, one inside, the last


def problem(dead):
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, D, generator=g, dtype=torch.float64).requires_grad_() for n in (N, V))
    bias = torch.randn(V, generator=g, dtype=torch.float64)
    bias[dead] = -torch.inf
    alive = [v for v in range(V) if v not in dead]
    targets = torch.tensor([alive[i % len(alive)] for i in range(N)])
    return hidden, weight, bias.requires_grad_(), targets, alive


def through(chunk, hidden, weight, bias, targets):
    if chunk == "plain":
        return plain_logprobs(hidden, weight, targets, bias=bias)
    return chosen_logprobs(hidden, weight, targets, bias=bias, chunk=chunk)


@pytest.mark.parametrize("chunk", ["plain", 1, 4, 30, 10**6])
def test_logits_of_minus_infinity_are_as_if_they_were_not_there(chunk):
    hidden, weight, bias, targets, alive = problem(DEAD)
    logprobs, entropy = through(chunk, hidden, weight, bias, targets)
    (logprobs.square().sum() + (entropy * torch.arange(N)).sum()).backward()
    short = [x.detach().clone().requires_grad_() for x in (hidden, weight[alive], bias[alive])]
    place = torch.tensor([alive.index(t) for t in targets.tolist()])
    want, want_entropy = plain_logprobs(short[0], short[1], place, bias=short[2])
    (want.square().sum() + (want_entropy * torch.arange(N)).sum()).backward()
    torch.testing.assert_close(logprobs, want)
    torch.testing.assert_close(entropy, want_entropy)
    torch.testing.assert_close(hidden.grad, short[0].grad)
    torch.testing.assert_close(weight.grad[alive], short[1].grad)
    torch.testing.assert_close(bias.grad[alive], short[2].grad)
    assert not weight.grad[DEAD].any() and not bias.grad[DEAD].any()


@pytest.mark.parametrize("chunk", ["plain", 4])
@pytest.mark.parametrize("value", [-1e4, -1e30, 1e30])
def test_logits_beyond_all_bounds_stay_finite(chunk, value):
    """A token of probability 0 or 1 by underflow, without any infinity."""
    hidden, weight, bias, targets, _ = problem([])
    with torch.no_grad():
        bias[5] = value
    logprobs, entropy = through(chunk, hidden, weight, bias, targets)
    (logprobs.sum() + entropy.sum()).backward()
    assert all(x.isfinite().all() for x in (logprobs, entropy, hidden.grad, weight.grad, bias.grad))
    assert (entropy >= 0).all() and (value < 0 or float(entropy.detach().max()) == 0)


def test_certainty_has_no_entropy_and_no_gradient():
    bias = torch.full((V,), -torch.inf, dtype=torch.float64)
    bias[7] = 0.0
    for chunk in ("plain", 4):
        hidden, weight, _, _, _ = problem([])
        b, targets = bias.clone().requires_grad_(), torch.full((N,), 7)
        logprobs, entropy = through(chunk, hidden, weight, b, targets)
        (logprobs.sum() + entropy.sum()).backward()
        assert not logprobs.any() and not entropy.any()
        assert not any(x.grad.any() for x in (hidden, weight, b))


def test_compiled_blocks_agree():
    z = torch.randn(6, 9, generator=torch.Generator().manual_seed(3))
    z[:, 4], z[0, :] = -torch.inf, -torch.inf
    state = (torch.full((6,), -torch.inf), torch.zeros(6), torch.zeros(6))
    compiled = torch.compile(_block_statistics, backend="aot_eager", dynamic=True)
    for got, want in zip(compiled(z, *state), _block_statistics(z, *state), strict=True):
        torch.testing.assert_close(got, want)
        assert not got.isnan().any()
    arguments = (z, torch.zeros(6), *torch.randn(3, 6, generator=torch.Generator().manual_seed(4)))
    compiled = torch.compile(_block_gradient, backend="aot_eager", dynamic=True)
    assert compiled(*arguments).isfinite().all()
    torch.testing.assert_close(compiled(*arguments), _block_gradient(*arguments))


@pytest.mark.parametrize("top_p", [1.0, 0.7])
@pytest.mark.parametrize("greedy", [False, True])
def test_sampling_beside_tokens_that_cannot_be_drawn(top_p, greedy):
    logits_V = torch.tensor([-torch.inf, 0.0, -torch.inf, math.log(3.0), -torch.inf])
    uniform_B = torch.tensor([0.0, 0.2, 0.7, 1 - 2**-53], dtype=torch.float64)
    tokens, logprobs, entropies = choose(logits_V.expand(4, -1), SamplingParams(1.0, top_p, 1, greedy=greedy), uniform_B)
    assert set(tokens.tolist()) <= {1, 3} and logprobs.isfinite().all()
    assert entropies.tolist() == pytest.approx([2 * math.log(2) - 0.75 * math.log(3)] * 4, abs=1e-6)


def masked_policy():
    """A policy whose head has a bias of -inf for half of the vocabulary."""
    policy = build_tiny(tiny_study().policy, build_tokenizer(), seed=5)
    vocabulary = policy.model.config.vocab_size
    head = nn.Linear(policy.model.config.hidden_size, vocabulary, bias=True)
    with torch.no_grad():
        head.bias.zero_()[: vocabulary // 2] = -torch.inf
    policy.model.set_output_embeddings(head)
    return policy


def test_engine_and_rescoring_agree_on_a_policy_that_cannot_say_everything():
    """The path of vLLM's entropies too: they come from rescoring."""
    policy = masked_policy()
    engine = TransformersEngine(policy.model, pad_id=policy.pad_id, eos_ids=policy.eos_ids)
    rollouts = engine.generate([policy.encode("6+3+2-8-3=")], 4, SamplingParams(0.9, 1.0, 12), [1])
    scored = rescore(policy.model, rollouts, pad_id=policy.pad_id, temperature=0.9, micro_batch_tokens=200)
    for sampled, ours in zip((rollouts.logprobs, rollouts.entropies), scored, strict=True):
        for a, b in zip(sampled, ours, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-5, rtol=0)
    assert max(float(e.max()) for e in rollouts.entropies) < math.log(policy.model.config.vocab_size)


def test_exact_kl_counts_what_can_be_drawn():
    policy = masked_policy()
    method = resolve("exact", {"exact": {"preset": "grpo", "kl": {"reference": "old", "estimator": "exact", "beta": 0.1}}})
    learner = Learner(policy, method, None, temperature=1.0, grad_clip=1.0, micro_batch_tokens=64, constant=1.0)
    learner.old_model = masked_policy().model
    with torch.no_grad():
        learner.old_model.model.norm.weight.mul_(1.5)
    prompts, responses = [policy.encode("1+2=")], [[12, 13]]

    def kl():
        return learner._exact_kl(prompts, responses, response_states(policy.model, prompts, responses, pad_id=0))

    kl_BT = kl()
    kl_BT.sum().backward()
    assert (kl_BT > 0).all() and kl_BT.isfinite().all()
    assert all(p.grad.isfinite().all() for p in policy.model.parameters() if p.grad is not None)
    learner.old_model = policy.model
    assert float(kl().abs().max()) == 0
    with torch.no_grad():
        policy.model.get_output_embeddings().bias.zero_()  # now it can say what the other cannot
    learner.old_model = masked_policy().model
    assert float(kl()[0, 0]) == math.inf


def test_probe_of_the_head_takes_equal_infinities_for_equal():
    model = masked_policy().model
    module._CHECKED.discard(model)
    logprobs_BT, entropy_BT, _ = sequence_logprobs(model, [[3, 4]], [[12]], pad_id=0, temperature=1.0)
    assert logprobs_BT.isfinite().all() and entropy_BT.isfinite().all()


def dropping(kind, folder):
    """A saved policy that drops at random in training mode: between the layers, inside attention, or by a module of its own."""
    policy = build_tiny(tiny_study().policy, build_tokenizer(), seed=1)
    if kind == "gpt2":
        sizes = {"vocab_size": 18, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
        policy.model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.1, embd_pdrop=0.0, attn_pdrop=0.0))
    if kind == "attention":
        policy.model.config.attention_dropout = 0.2
    save_policy(policy, folder)
    return policy


@pytest.mark.parametrize(("kind", "words"), [("gpt2", "resid_pdrop = 0.1"), ("attention", "attention_dropout = 0.2")])
def test_checkpointing_with_dropout_is_refused_by_name(tmp_path, kind, words):
    dropping(kind, tmp_path)
    cfg = tiny_study().policy
    assert load_policy(tmp_path, cfg).model is not None
    with pytest.raises(ConfigError, match=f"(?s){words}.*allowed: 0.*gradient_checkpointing: false"):
        load_policy(tmp_path, cfg.model_copy(update={"gradient_checkpointing": True}))


def test_a_dropout_that_no_setting_names_is_refused_too():
    model = build_tiny(tiny_study().policy, build_tokenizer(), seed=1).model
    model.model.layers[0].mlp.act_fn = nn.Sequential(model.model.layers[0].mlp.act_fn, nn.Dropout(0.3))
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.act_fn\.1 = 0\.3"):
        _refuse_dropout(model, "here")


def test_checkpointing_without_dropout_changes_no_log_prob(tmp_path):
    dropping("none", tmp_path)
    cfg, given = tiny_study().policy, ([[3, 4, 5]], [[6, 7, 8]])
    plain = load_policy(tmp_path, cfg).model.eval()
    checkpointed = load_policy(tmp_path, cfg.model_copy(update={"gradient_checkpointing": True})).model.train()
    assert checkpointed.is_gradient_checkpointing
    both = [sequence_logprobs(m, *given, pad_id=0, temperature=1.0)[0] for m in (plain, checkpointed)]
    assert torch.equal(*both)
