"""Log-probs and entropies: closed forms, finite differences, chunked against plain, padded against one by one."""

import math

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from tepo_core.model.logprobs import (
    LogprobError,
    chosen_logprobs,
    output_matrix,
    plain_logprobs,
    response_states,
    sequence_logprobs,
)
from tepo_core.model.logprobs_chunked import block_shape


def tiny_model(tied=True, seed=0, dtype=torch.float32, **settings):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=25,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        **settings,
    )
    model = Qwen3ForCausalLM(config).to(dtype).eval()
    # The default scale of 0.02 makes every distribution flat; a sharper one tests more.
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(15.0)
        if not tied:
            model.lm_head.weight.mul_(15.0)
    return model


def problem(N=37, V=101, D=16, dtype=torch.float64, seed=0, bias=False):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=g)
    b = torch.randn(V, generator=g, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    return hidden, weight, targets, b


def test_closed_form_of_a_two_token_vocabulary():
    # Logits (ln 3, 0) / T with T = 1: p = 3/4, 1/4. With T = 2: p = sqrt 3 / (1 + sqrt 3).
    hidden = torch.tensor([[math.log(3.0)], [math.log(3.0)]], dtype=torch.float64)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    targets = torch.tensor([0, 1])
    for chunk in (None, 1, 3):
        logprobs, entropy = chosen_logprobs(hidden, weight, targets, chunk=chunk)
        assert logprobs.tolist() == pytest.approx([math.log(0.75), math.log(0.25)], abs=1e-15)
        assert entropy.tolist() == pytest.approx([-0.75 * math.log(0.75) - 0.25 * math.log(0.25)] * 2, abs=1e-15)
        logprobs, entropy = chosen_logprobs(hidden, weight, targets, temperature=2.0, chunk=chunk)
        p = math.sqrt(3) / (1 + math.sqrt(3))
        assert logprobs.tolist() == pytest.approx([math.log(p), math.log(1 - p)], abs=1e-15)
        assert entropy.tolist() == pytest.approx([-p * math.log(p) - (1 - p) * math.log(1 - p)] * 2, abs=1e-15)
    # The bias enters before the temperature: logits (ln 3 + ln 3, 0) = ln 9 at T = 1.
    bias = torch.tensor([math.log(3.0), 0.0], dtype=torch.float64)
    for chunk in (None, 1):
        assert chosen_logprobs(hidden, weight, targets, bias=bias, chunk=chunk)[0][0].item() == pytest.approx(
            math.log(0.9), abs=1e-15
        )


def test_entropy_gradient_is_minus_p_times_logp_plus_entropy():
    logits = torch.tensor([1.0, -0.5, 0.25, 2.0], dtype=torch.float64)
    hidden = torch.ones(1, 1, dtype=torch.float64)
    weight = logits[:, None].clone().requires_grad_()
    for chunk in (None, 2):
        weight.grad = None
        _, entropy = chosen_logprobs(hidden, weight, torch.tensor([1]), chunk=chunk)
        entropy.sum().backward()
        p = logits.softmax(0)
        H = -(p * p.log()).sum()
        torch.testing.assert_close(weight.grad[:, 0], -p * (p.log() + H), rtol=0, atol=1e-15)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [7, 50, 300, 10**6])
def test_chunked_equals_plain_in_values_and_gradients(chunk, temperature, bias):
    hidden, weight, targets, b = problem(bias=bias)
    inputs = [hidden, weight] + ([b] if bias else [])
    g = torch.Generator().manual_seed(1)
    up_logprob, up_entropy = torch.randn(2, len(targets), generator=g, dtype=torch.float64)
    results = {}
    for name, call in {
        "plain": lambda: plain_logprobs(hidden, weight, targets, temperature=temperature, bias=b),
        "chunked": lambda: chosen_logprobs(hidden, weight, targets, temperature=temperature, bias=b, chunk=chunk),
    }.items():
        logprobs, entropy = call()
        both = torch.autograd.grad((logprobs * up_logprob + entropy * up_entropy).sum(), inputs, retain_graph=True)
        only_l = torch.autograd.grad((logprobs * up_logprob).sum(), inputs, retain_graph=True)
        only_h = torch.autograd.grad((entropy * up_entropy).sum(), inputs)
        results[name] = [logprobs.detach(), entropy.detach(), *both, *only_l, *only_h]
    for plain, chunked in zip(results["plain"], results["chunked"], strict=True):
        assert (plain - chunked).abs().max() <= 1e-12 * max(1.0, float(plain.abs().max()))
    logprobs, entropy = chosen_logprobs(hidden, weight, targets, temperature=temperature, bias=b, chunk=chunk, entropy=False)
    assert entropy is None and torch.equal(logprobs, results["chunked"][0])


def test_gradient_by_finite_differences():
    hidden, weight, targets, b = problem(N=5, V=7, D=3, bias=True)
    assert torch.autograd.gradcheck(
        lambda h, w, c: chosen_logprobs(h, w, targets, temperature=1.3, bias=c, chunk=6), (hidden, weight, b)
    )


def test_rows_without_gradient_are_skipped_exactly():
    hidden, weight, targets, _ = problem()
    keep = torch.arange(len(targets)) % 3 == 0
    up = torch.where(keep, 1.7, 0.0).double()
    grads = {}
    for chunk in (None, 40):
        logprobs, entropy = chosen_logprobs(hidden, weight, targets, chunk=chunk)
        grads[chunk] = torch.autograd.grad((logprobs * up + entropy * up).sum(), [hidden, weight])
    for plain, chunked in zip(grads[None], grads[40], strict=True):
        torch.testing.assert_close(plain, chunked, rtol=1e-12, atol=1e-12)
    assert grads[40][0][~keep].abs().max() == 0


def test_only_one_input_needs_a_gradient():
    hidden, weight, targets, _ = problem()
    for wanted, other in ((hidden, weight), (weight, hidden)):
        other.requires_grad_(False)
        gaps = [
            torch.autograd.grad(chosen_logprobs(hidden, weight, targets, chunk=c)[0].sum(), [wanted])[0] for c in (None, 60)
        ]
        torch.testing.assert_close(*gaps, rtol=1e-12, atol=1e-12)
        other.requires_grad_()


def test_large_logits_stay_finite_and_exact():
    # A logit gap of 2000: p = (1, 0); log-prob of the other token is -2000; entropy 0.
    hidden = torch.tensor([[2000.0]], dtype=torch.float32, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], dtype=torch.float32)
    for chunk in (None, 1, 2):
        logprobs, entropy = chosen_logprobs(hidden, weight, torch.tensor([1]), chunk=chunk)
        assert logprobs.item() == -2000.0 and entropy.item() == 0.0
        assert torch.isfinite(torch.autograd.grad(logprobs.sum() + entropy.sum(), hidden)[0]).all()


def test_bfloat16_inputs_are_accumulated_in_float32():
    hidden, weight, targets, _ = problem(N=64, V=500, D=64, dtype=torch.bfloat16)
    exact = plain_logprobs(hidden.double(), weight.double(), targets)
    for chunk in (None, 4096):
        logprobs, entropy = chosen_logprobs(hidden, weight, targets, chunk=chunk)
        assert logprobs.dtype == entropy.dtype == torch.float32
        # bf16 logits of size 30 would be wrong by 0.1; float32 ones by about 1e-5.
        assert (logprobs - exact[0]).abs().max() < 2e-5 and (entropy - exact[1]).abs().max() < 2e-5
        grads = torch.autograd.grad(logprobs.sum(), [hidden, weight])
        wanted = torch.autograd.grad(exact[0].sum(), [hidden, weight], retain_graph=True)
        for got, want in zip(grads, wanted, strict=True):
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


def test_autocast_does_not_touch_the_logits():
    hidden, weight, targets, _ = problem(dtype=torch.float32)
    for chunk in (None, 100):
        plain = chosen_logprobs(hidden, weight, targets, chunk=chunk)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = chosen_logprobs(hidden, weight, targets, chunk=chunk)
        assert torch.equal(plain[0], inside[0]) and torch.equal(plain[1], inside[1])


def test_the_large_case_takes_the_chunked_path_and_keeps_no_logits():
    hidden, weight, targets, _ = problem(N=300, V=60_000, D=4, dtype=torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        logprobs, entropy = chosen_logprobs(hidden, weight, targets)
    assert max(saved) == weight.numel() and "ChunkedLogprobs" in type(logprobs.grad_fn).__name__
    want = plain_logprobs(hidden.detach().double(), weight.detach().double(), targets)
    assert (logprobs - want[0]).abs().max() < 1e-5 and (entropy - want[1]).abs().max() < 1e-5


@pytest.mark.parametrize("budget", [1, 7, 1024, 2**20])
def test_blocks_stay_within_the_budget(budget):
    for tokens, vocabulary in ((1, 5), (4096, 151_936), (10_000, 25)):
        rows, columns = block_shape(tokens, vocabulary, budget)
        assert 1 <= rows <= tokens and 1 <= columns <= vocabulary and rows * columns <= max(budget, 1)


def test_pointwise_parts_compile_to_the_same_numbers():
    # The form used on a GPU: torch.compile of the block functions (here without code generation, through aot_eager).
    from tepo_core.model.logprobs_chunked import _block_gradient, _block_statistics

    g = torch.Generator().manual_seed(3)
    z = torch.randn(6, 9, generator=g)
    state = (torch.full((6,), -torch.inf), torch.zeros(6), torch.zeros(6))
    compiled = torch.compile(_block_statistics, backend="aot_eager", dynamic=True)
    for got, want in zip(compiled(z, *state), _block_statistics(z, *state), strict=True):
        torch.testing.assert_close(got, want)
    arguments = (z, z.logsumexp(1), *torch.randn(3, 6, generator=g))
    compiled = torch.compile(_block_gradient, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(*arguments), _block_gradient(*arguments))


PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11, 12], [13]]
RESPONSES = [[1, 2, 3, 4, 2], [5], [24, 2], [6, 7, 8, 2]]


@pytest.mark.parametrize("tied", [True, False])
def test_padded_rows_equal_rows_one_by_one(tied):
    model = tiny_model(tied, dtype=torch.float64)
    logprobs, entropy, mask = sequence_logprobs(model, PROMPTS, RESPONSES, pad_id=2, temperature=0.8)
    assert logprobs.shape == entropy.shape == mask.shape == (4, 5)
    assert mask.sum(1).tolist() == [5, 1, 2, 4]
    assert logprobs[~mask].abs().max() == 0 and entropy[~mask].abs().max() == 0
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        full = (model(torch.tensor([prompt + response])).logits[0] / 0.8).log_softmax(-1)
        for t, token in enumerate(response):
            before = full[len(prompt) - 1 + t]
            assert logprobs[row, t].item() == pytest.approx(before[token].item(), abs=1e-12)
            assert entropy[row, t].item() == pytest.approx(-(before.exp() * before).sum().item(), abs=1e-12)


@pytest.mark.parametrize("tied", [True, False])
def test_gradient_does_not_depend_on_splits_order_or_width(tied):
    model = tiny_model(tied, dtype=torch.float64)
    weights = [0.3, -1.0, 2.0, 0.5]

    def gradient(groups, chunk=None):
        model.zero_grad()
        for rows in groups:
            logprobs, entropy, _ = sequence_logprobs(
                model, [PROMPTS[i] for i in rows], [RESPONSES[i] for i in rows], pad_id=0, temperature=1.0, chunk=chunk
            )
            (torch.tensor([weights[i] for i in rows])[:, None] * (logprobs + 0.1 * entropy)).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    whole = gradient([[0, 1, 2, 3]])
    assert whole.norm() > 1
    for groups, chunk in (([[3, 1, 0, 2]], None), ([[0], [1], [2], [3]], None), ([[1, 3], [0, 2]], 16)):
        assert (gradient(groups, chunk) - whole).norm() / whole.norm() <= 1e-10


def test_head_with_bias():
    model = tiny_model(tied=False, dtype=torch.float64)
    head = nn.Linear(32, 25, bias=True).double()
    model.set_output_embeddings(head)
    logprobs, _, _ = sequence_logprobs(model, [[3, 4]], [[5]], pad_id=0, temperature=1.0)
    want = model(torch.tensor([[3, 4]])).logits[0, -1].log_softmax(-1)[5]
    assert logprobs[0, 0].item() == pytest.approx(want.item(), abs=1e-12)
    assert output_matrix(model)[1] is head.bias


def test_length_decides_the_mask_not_the_token():
    # The pad id equals EOS (2) here, and a response may contain it anywhere.
    model = tiny_model(dtype=torch.float64)
    for pad in (0, 2, 24):
        got = sequence_logprobs(model, PROMPTS, RESPONSES, pad_id=pad, temperature=1.0)
        torch.testing.assert_close(got[0], sequence_logprobs(model, PROMPTS, RESPONSES, pad_id=7, temperature=1.0)[0])
    logprobs, _, mask = sequence_logprobs(model, [[3], [4]], [[], [2, 2]], pad_id=2, temperature=1.0)
    assert mask.tolist() == [[False, False], [True, True]] and (logprobs[1] < 0).all()


def test_lora_model_uses_its_adapters():
    from peft import LoraConfig, get_peft_model

    model = tiny_model(dtype=torch.float64)
    base = sequence_logprobs(model, PROMPTS, RESPONSES, pad_id=0, temperature=1.0)[0].detach()
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")).double()
    torch.testing.assert_close(sequence_logprobs(lora, PROMPTS, RESPONSES, pad_id=0, temperature=1.0)[0], base)
    torch.manual_seed(0)
    for name, parameter in lora.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    moved = sequence_logprobs(lora, [[3, 4]], [[5]], pad_id=0, temperature=1.0)[0]
    want = lora(torch.tensor([[3, 4]])).logits[0, -1].log_softmax(-1)[5]
    assert moved[0, 0].item() == pytest.approx(want.item(), abs=1e-12)
    assert abs(moved[0, 0].item() - sequence_logprobs_without(lora)) > 1e-3


def sequence_logprobs_without(lora):
    with lora.disable_adapter():
        return sequence_logprobs(lora, [[3, 4]], [[5]], pad_id=0, temperature=1.0)[0][0, 0].item()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"logit_scale": 0.0625}, "logit_scale = 0.0625"),
    ],
)
def test_models_that_change_their_logits_are_refused_by_name(change, words):
    model = tiny_model()
    for name, value in change.items():
        setattr(model.config, name, value)
    with pytest.raises(LogprobError, match=words):
        sequence_logprobs(model, [[3]], [[4]], pad_id=0, temperature=1.0)


def test_models_that_change_their_logits_silently_are_caught_by_the_probe():
    class Scaled(Qwen3ForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 0.9
            return output

    model = tiny_model()
    model.__class__ = Scaled
    with pytest.raises(LogprobError, match="differ from hidden"):
        sequence_logprobs(model, [[3]], [[4]], pad_id=0, temperature=1.0)


def test_bad_arguments_name_what_is_wrong():
    hidden, weight, targets, _ = problem()
    bad_target = targets.clone()
    bad_target[3] = 101
    for arguments, keywords, words in [
        ((hidden, weight[:, :3], targets), {}, "same hidden size"),
        ((hidden, weight, targets[:5]), {}, "one target a hidden state"),
        ((hidden, weight, targets.int()), {}, "int64"),
        ((hidden, weight.float(), targets), {}, "float32"),
        ((hidden, weight, targets), {"temperature": 0.0}, "temperature = 0.0"),
        ((hidden, weight, targets), {"temperature": math.nan}, "temperature = nan"),
        ((hidden, weight, targets), {"chunk": 0}, "chunk = 0"),
        ((hidden, weight, targets), {"bias": weight[:4, 0]}, "bias has shape"),
        ((hidden, weight, bad_target), {}, "outside the vocabulary of 101"),
    ]:
        with pytest.raises(LogprobError, match=words):
            chosen_logprobs(*arguments, **keywords)
    model = tiny_model()
    for prompts, responses, words in [
        ([], [], "at least 1"),
        ([[3]], [[4], [5]], "1 prompts and 2 responses"),
        ([[3], []], [[4], [5]], "prompt 1 is empty"),
        ([[3] * 40], [[4] * 40], "context of 64"),
    ]:
        with pytest.raises(LogprobError, match=words):
            response_states(model, prompts, responses, pad_id=0)
    with pytest.raises(LogprobError, match="outside the vocabulary"):
        sequence_logprobs(model, [[3]], [[25]], pad_id=0, temperature=1.0)
