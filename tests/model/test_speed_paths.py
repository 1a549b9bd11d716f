"""The faster forms of norm, rows and decoding against the plain ones: same values, same gradients."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tepo_core.model.logprobs import sequence_logprobs
from tepo_core.model.norms import RMSNormFunction, use_lean_norms
from tepo_core.model.packing import arrange, can_pack, first_fit
from tepo_core.rollout import decoding
from tepo_core.rollout.transformers_engine import TransformersEngine, _next_rows
from tepo_core.rollout.types import SamplingParams

SHAPE = {"vocab_size": 23, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
REST = {"head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64, "tie_word_embeddings": True}
PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11], [3], [5, 6]]
RESPONSES = [[12, 13], [14], [3, 4, 5, 6, 7, 8], [9, 10], [11, 12, 13]]


@pytest.fixture
def model():
    torch.manual_seed(0)
    built = Qwen3ForCausalLM(Qwen3Config(**SHAPE, **REST)).eval()
    with torch.no_grad():  # as initialised, every norm weight is 1 and could be left out unnoticed
        for name, parameter in built.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return built


# -- norms ------------------------------------------------------------------------------------------------------------------


def test_norm_value_by_hand():
    """x = (3, 4): mean square 12.5, so y = w x / sqrt(12.5)."""
    x, weight = torch.tensor([[3.0, 4.0]], dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64)
    y = RMSNormFunction.apply(x, weight, 0.0)
    torch.testing.assert_close(y, torch.tensor([[3.0, 8.0]], dtype=torch.float64) / 12.5**0.5)


def test_norm_gradient_is_the_derivative():
    torch.manual_seed(1)
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: RMSNormFunction.apply(a, b, 1e-6), (x, weight))


@pytest.mark.parametrize("frozen", [False, True])
def test_lean_norm_agrees_with_the_module_also_through_a_transposed_view(frozen):
    torch.manual_seed(2)
    module = Qwen3RMSNorm(6)
    with torch.no_grad():
        module.weight.uniform_(0.5, 2.0)
    module.weight.requires_grad_(not frozen)
    grad = torch.randn(4, 2, 3, 6).transpose(1, 2)
    results = []
    for _ in range(2):
        x = torch.linspace(-2, 3, 4 * 3 * 2 * 6).view(4, 3, 2, 6).requires_grad_()
        y = module(x)
        y.backward(grad)
        results.append((y.detach(), x.grad, None if frozen else module.weight.grad.clone()))
        module.zero_grad()
        assert use_lean_norms(module) == 1
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_norms_of_another_formula_are_left_alone():
    assert use_lean_norms(GemmaRMSNorm(4)) == 0  # (1 + w) x / rms


def test_norms_of_a_copy_are_its_own():
    model = torch.nn.Sequential(Qwen3RMSNorm(4))
    use_lean_norms(model)
    copy = pickle.loads(pickle.dumps(deepcopy(model)))
    with torch.no_grad():
        copy[0].weight.fill_(3.0)
    x = torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(copy(x), 3 * model(x))
    assert copy[0].weight is not model[0].weight


def test_bfloat16_takes_the_modules_own_way():
    module = Qwen3RMSNorm(8).to(torch.bfloat16)
    x = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    plain = module(x)
    use_lean_norms(module)
    assert torch.equal(module(x), plain) and "RMSNormFunction" not in type(module(x).grad_fn).__name__


# -- packing ----------------------------------------------------------------------------------------------------------------


def test_first_fit_by_hand():
    """Longest first into the fullest row with room: 7 alone fills a row; 5 + 2; 4 + 3; 1."""
    bins = first_fit([4, 7, 2, 5, 3, 1], 7)
    assert [sorted(b) for b in bins] == [[1], [2, 3], [0, 4], [5]]


def test_arranged_rows_by_hand():
    layout = arrange([[1, 2, 3, 4], [5, 6], [7]], 0, pack=True)
    assert layout.input_RS.tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]
    assert layout.position_RS.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert layout.start_B.tolist() == [0, 4, 6]
    plain = arrange([[1, 2, 3, 4], [5, 6], [7]], 0, pack=False)
    assert plain.input_RS.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0], [7, 0, 0, 0]]
    assert plain.position_RS.tolist() == [[0, 1, 2, 3]] and plain.start_B.tolist() == [0, 4, 8]


def test_equal_sequences_are_one_and_keep_their_places():
    layout = arrange([[5, 6], [1, 2, 3], [5, 6], [1, 2, 3]], 0, share=True)
    assert layout.input_RS.tolist() == [[5, 6, 0], [1, 2, 3]] and layout.start_B.tolist() == [0, 3, 0, 3]


def test_gradients_of_equal_sequences_add_up(model):
    """Three copies with weights 1, 2 and 4 are one copy with weight 7, beside another response."""

    def gradients(prompts, responses, weights):
        model.zero_grad()
        logprobs, entropy, _ = sequence_logprobs(model, prompts, responses, pad_id=0, temperature=1.0)
        ((logprobs + entropy).sum(1) * torch.tensor(weights)).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    a, b = ([3, 4], [5, 6, 7]), ([3, 4], [8, 9])
    copies = gradients([x[0] for x in (a, b, a, a)], [x[1] for x in (a, b, a, a)], [1.0, 3.0, 2.0, 4.0])
    torch.testing.assert_close(copies, gradients([a[0], b[0]], [a[1], b[1]], [7.0, 3.0]), rtol=1e-4, atol=1e-5)


def test_packed_log_probs_and_gradients_are_the_padded_ones(model, monkeypatch):
    def run():
        model.zero_grad()
        logprobs, entropy, mask = sequence_logprobs(model, PROMPTS, RESPONSES, pad_id=0, temperature=0.8)
        (logprobs - 0.3 * entropy).sum().backward()
        return logprobs.detach(), entropy.detach(), mask, [p.grad.clone() for p in model.parameters()]

    seen = []
    hook = model.model.embed_tokens.register_forward_hook(lambda _, inputs, __: seen.append(tuple(inputs[0].shape)))
    run()  # probes
    seen.clear()
    packed = run()
    monkeypatch.setattr("tepo_core.model.logprobs.can_pack", lambda _: False)
    padded = run()
    hook.remove()
    assert seen == [(3, 9), (5, 9)]
    torch.testing.assert_close(packed, padded, rtol=1e-4, atol=1e-6)


def test_a_model_that_mixes_packed_sequences_is_not_packed(model):
    assert can_pack(model.model)

    class Leaks(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def get_input_embeddings(self):
            return self.inner.get_input_embeddings()

        def forward(self, input_ids, position_ids, use_cache):  # position ids ignored, as old architectures do
            return self.inner(input_ids=input_ids, use_cache=use_cache)

    assert not can_pack(Leaks(model.model))


# -- decoding ---------------------------------------------------------------------------------------------------------------


def sampled(model, prompts):
    engine = TransformersEngine(model, pad_id=0, eos_ids=[2])
    return engine.generate(prompts, 3, SamplingParams(1.0, 1.0, 40), list(range(len(prompts))))


def relatives(family, model):
    torch.manual_seed(3)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE, **REST)).eval()
    if family == "sliding":
        return MistralForCausalLM(MistralConfig(**SHAPE, **REST, sliding_window=6)).eval()
    if family == "other":  # an architecture that is not on the list keeps its own attention and mask
        return Olmo2ForCausalLM(Olmo2Config(**SHAPE, **{k: v for k, v in REST.items() if k != "head_dim"})).eval()
    return model


@pytest.mark.parametrize("prompts", [PROMPTS, [[3, 4], [5, 6], [7, 8]]], ids=["padded", "equal"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "sliding", "other"])
def test_decoding_equals_transformers_own_attention_and_cache(family, prompts, model, monkeypatch):
    model, calls = relatives(family, model), []
    own = decoding.attention_forward
    monkeypatch.setattr(decoding, "attention_forward", lambda *a, **k: calls.append(a[1].shape[2]) or own(*a, **k))
    fast = sampled(model, prompts)
    assert (calls.count(1) > 20) == (family != "other") and model.config._attn_implementation == "sdpa"
    monkeypatch.setattr("tepo_core.rollout.transformers_engine.roomy", lambda cache: cache)
    model.config._attn_implementation = "eager"
    plain = sampled(model, prompts)
    assert fast.response_ids == plain.response_ids
    assert {len(ids) for ids in fast.response_ids} != {40}  # rows end at different steps, so rows were dropped
    for name in ("logprobs", "entropies"):
        for a, b in zip(getattr(fast, name), getattr(plain, name), strict=True):
            torch.testing.assert_close(torch.from_numpy(a), torch.from_numpy(b), rtol=1e-4, atol=1e-5)


def test_what_fails_while_sampling_leaves_the_model_as_it_was(model):
    model.train()
    with pytest.raises(IndexError):
        TransformersEngine(model, pad_id=0, eos_ids=[2]).generate([[3, 99]], 2, SamplingParams(1.0, 1.0, 4), [0])
    assert model.training and model.config._attn_implementation == "sdpa"


def test_a_cache_that_cannot_be_handed_on_is_refused():
    class Recurrent(decoding.DynamicLayer):
        pass

    cache = DynamicCache()
    cache.layers = [Recurrent()]
    with pytest.raises(ValueError, match=r"Recurrent.*rollout.engine: vllm"):
        decoding.roomy(cache)


def test_responses_share_a_row_until_they_part():
    """Rows 0, 0, 1 with tokens 7, 9, 5: row 0 branches. Then nothing branches and one row of three is not needed: they stay."""
    parents, tokens, rows = _next_rows(torch.tensor([0, 0, 1]), torch.tensor([9, 7, 5]), 2, 10)
    assert (parents.tolist(), tokens.tolist(), rows.tolist()) == ([0, 0, 1], [7, 9, 5], [1, 0, 2])
    parents, tokens, rows = _next_rows(torch.tensor([0, 3, 3, 2]), torch.tensor([4, 6, 6, 8]), 4, 10)
    assert parents is None and (tokens.tolist(), rows.tolist()) == ([4, 0, 8, 6], [0, 3, 3, 2])
    parents, tokens, rows = _next_rows(torch.tensor([3, 3, 2]), torch.tensor([6, 6, 8]), 4, 10)  # half is not needed
    assert (parents.tolist(), tokens.tolist(), rows.tolist()) == ([2, 3], [8, 6], [1, 1, 0])


def test_greedy_copies_cost_one_row(model):
    engine, widths = TransformersEngine(model, pad_id=0, eos_ids=[2]), []
    hook = model.model.embed_tokens.register_forward_hook(lambda _, inputs, __: widths.append(inputs[0].shape[0]))
    result = engine.generate([[3, 4]], 6, SamplingParams(1.0, 1.0, 8, greedy=True), [0])
    hook.remove()
    assert set(widths) == {1} and len({tuple(ids) for ids in result.response_ids}) == 1


def test_roomy_cache_grows_and_drops_rows(monkeypatch):
    monkeypatch.setattr(decoding, "BLOCK", 2)
    torch.manual_seed(4)
    reference, ours = DynamicCache(), DynamicCache()
    start = torch.randn(2, 3, 2, 4, 5)
    for cache in (reference, ours):
        cache.update(*start, 0)
    ours = decoding.roomy(ours)
    for step in range(7):
        new = torch.randn(2, reference.layers[0].keys.shape[0], 2, 1, 5)
        for a, b in zip(reference.update(*new, 0), ours.update(*new, 0), strict=True):
            assert torch.equal(a, b)
        if step == 3:
            for cache in (reference, ours):
                cache.batch_select_indices(torch.tensor([0, 2]))
    assert ours.get_seq_length() == reference.get_seq_length() == 11


def test_attention_of_one_token_by_hand():
    """Scores 0 and ln 3: weights 1/4 and 3/4, a masked third key counts for nothing. Two heads share the key head."""
    query = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2).expand(1, 2, 1, 2)
    key = torch.tensor([[0.0, 0.0], [torch.log(torch.tensor(3.0)), 0.0], [99.0, 0.0]]).view(1, 1, 3, 2)
    value = torch.tensor([[4.0, 0.0], [0.0, 8.0], [77.0, 77.0]]).view(1, 1, 3, 2)
    mask = torch.tensor([True, True, False]).view(1, 1, 1, 3)
    out, _ = decoding.attention_forward(torch.nn.Module(), query, key, value, mask, scaling=1.0)
    torch.testing.assert_close(out, torch.tensor([1.0, 6.0]).expand(1, 1, 2, 2))
