"""MTP modules: what they predict, their own loss, gradients through MPO, and how they are kept."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tepo_core.config import ConfigError
from tepo_core.model.logprobs import response_states, sequence_logprobs
from tepo_core.model.mtp import (
    add_modules,
    ahead_logprobs,
    ahead_loss,
    backbone_state,
    load_modules,
    logprobs_and_ahead,
    modules_of,
    save_modules,
)
from tepo_core.objectives.methods import MiniBatchTotals, TokenBatch, resolve

PROMPTS, RESPONSES = [[3, 4], [5]], [[6, 7, 8, 9], [10, 11]]


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=16, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).double()


def states(model):
    return response_states(model, PROMPTS, RESPONSES, pad_id=0)


def test_a_fresh_module_is_the_backbone_asked_about_a_later_token(model):
    """Entry n - 1 of token t: the backbone's log-softmax before o_t, at o_t+n; 0 where the response has ended."""
    add_modules(model, 2, seed=0)
    found_BTK = ahead_logprobs(model, states(model), 2, temperature=0.7)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        logp = (model(torch.tensor([prompt + response])).logits[0] / 0.7).log_softmax(-1)
        for t in range(4):
            for n in (1, 2):
                ends = t + n >= len(response)
                expected = 0.0 if ends else logp[len(prompt) - 1 + t, response[t + n]].item()
                assert found_BTK[row, t, n - 1].item() == pytest.approx(expected, abs=1e-9)


def test_modules_do_not_change_the_policy(model):
    before, _, _ = sequence_logprobs(model, PROMPTS, RESPONSES, pad_id=0, temperature=1.0)
    add_modules(model, 3, seed=0)
    after, _, _ = sequence_logprobs(model, PROMPTS, RESPONSES, pad_id=0, temperature=1.0)
    assert torch.equal(before, after)


def test_one_pass_gives_both(model):
    add_modules(model, 2, seed=0)
    logprobs_BT, entropy_BT, mask_BT, ahead_BTK = logprobs_and_ahead(model, PROMPTS, RESPONSES, 2, pad_id=0, temperature=0.7)
    expected = sequence_logprobs(model, PROMPTS, RESPONSES, pad_id=0, temperature=0.7)
    for found, wanted in zip((logprobs_BT, entropy_BT, mask_BT), expected, strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(ahead_BTK, ahead_logprobs(model, states(model), 2, temperature=0.7))


def test_warm_up_teaches_the_modules_and_leaves_the_backbone_alone(model):
    """A response that repeats itself can be foreseen; the cross-entropy is averaged over the 3 + 2 + 1 + 0 existing targets."""
    add_modules(model, 2, seed=0)
    loss, tokens = ahead_loss(model, states(model))
    logprobs_BTK = ahead_logprobs(model, states(model), 2, temperature=1.0)
    assert int(tokens) == 3 + 2 + 1 + 0 and loss.item() == pytest.approx(-logprobs_BTK.sum().item() / 6)
    backbone = copy.deepcopy(backbone_state(model))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(40):
        optimizer.zero_grad(set_to_none=True)
        loss, _ = ahead_loss(model, states(model))
        loss.backward()
        optimizer.step()
    assert ahead_loss(model, states(model))[0] < 0.3
    assert all(torch.equal(value, backbone[name]) for name, value in backbone_state(model).items())


def test_mpo_through_the_modules_moves_backbone_and_modules(model):
    """Gradient of the loss against central differences in one weight of each (log-probs are float32, so steps are large)."""
    add_modules(model, 2, seed=0)
    with torch.no_grad():
        for parameter in model.mtp.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    method = resolve("m", {"m": {"preset": "mpo", "block": {"size": 3, "logprobs": "mtp"}, "clip": None}})
    with torch.no_grad():
        old_BT, _, _ = sequence_logprobs(model, PROMPTS, RESPONSES, pad_id=0, temperature=1.0)
        old_ahead_BTK = ahead_logprobs(model, states(model), 2, temperature=1.0)
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))

    def loss():
        logprobs_BT, entropy_BT, mask_BT = sequence_logprobs(model, PROMPTS, RESPONSES, pad_id=0, temperature=1.0)
        ahead_BTK = ahead_logprobs(model, states(model), method.mtp_modules, temperature=1.0)
        advantages_BT = torch.tensor([[1.0], [-0.5]], dtype=torch.float64).expand_as(mask_BT)
        batch = TokenBatch(
            logprobs_BT, old_BT, mask_BT, advantages_BT, mtp_logprobs_BTK=ahead_BTK, old_mtp_logprobs_BTK=old_ahead_BTK
        )
        method.validate(batch)
        return method.loss(batch, MiniBatchTotals.from_mask(mask_BT)).loss

    loss().backward()
    for parameter in (model.mtp.down[1].weight, model.mtp.up[0].weight, model.model.layers[0].mlp.up_proj.weight):
        index = tuple(int(i) for i in (parameter.grad.abs() == parameter.grad.abs().max()).nonzero()[0])
        values = []
        for step in (1e-3, -1e-3):
            with torch.no_grad():
                parameter[index] += step
                values.append(loss().item())
                parameter[index] -= step
        assert (values[0] - values[1]) / 2e-3 == pytest.approx(parameter.grad[index].item(), rel=2e-3)


def test_kept_beside_the_policy_and_not_in_it(model, tmp_path):
    add_modules(model, 2, seed=0)
    with torch.no_grad():
        model.mtp.down[0].weight.normal_()
    model.save_pretrained(tmp_path, state_dict=backbone_state(model))
    save_modules(model, tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    again = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    load_modules(again, tmp_path)
    assert torch.equal(
        ahead_logprobs(again, states(again), 2, temperature=1.0), ahead_logprobs(model, states(model), 2, temperature=1.0)
    )
    bare = Qwen3ForCausalLM.from_pretrained(tmp_path)
    load_modules(bare, tmp_path / "elsewhere")
    assert modules_of(bare) is None
    save_modules(bare, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_weights_follow_the_seed(model):
    copies = [copy.deepcopy(model) for _ in range(3)]
    for candidate, seed in zip(copies, (0, 0, 1), strict=True):
        torch.rand(1)  # the global state must not matter
        add_modules(candidate, 1, seed=seed)
    first, same, other = (candidate.mtp.up[0].weight for candidate in copies)
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_refusals(model):
    with pytest.raises(ConfigError, match="needs 2 MTP modules .* the policy has 0; set policy.mtp_modules: 2"):
        ahead_logprobs(model, states(model), 2, temperature=1.0)
    with pytest.raises(ConfigError, match="policy.mtp_modules = 0"):
        add_modules(model, 0, seed=0)
    add_modules(model, 1, seed=0)
    with pytest.raises(ConfigError, match="has 1 MTP modules already"):
        add_modules(model, 1, seed=0)


def test_responses_of_one_token_have_nothing_ahead(model):
    add_modules(model, 2, seed=0)
    short = response_states(model, PROMPTS, [[6], [7]], pad_id=0)
    assert torch.equal(ahead_logprobs(model, short, 2, temperature=1.0), torch.zeros(2, 1, 2, dtype=torch.float64))
    loss, tokens = ahead_loss(model, short)
    assert int(tokens) == 0 and loss.item() == 0
