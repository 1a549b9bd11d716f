"""Log-probs and exact entropies of the chosen tokens, from hidden states and the output matrix.

One path serves the sampling policy, the reference and the training policy, so that the importance ratio of an unchanged
policy is 1. Everything is the *tempered* distribution softmax(z / temperature): the one that was sampled from.
Entropies are exact over the whole vocabulary, in nats.

Suffixes: B responses, T padded response length, N response tokens, S padded sequence length, V vocabulary,
D hidden size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tepo_core.model.logprobs_chunked import BLOCK_LOGITS, LOG_ZERO, ChunkedLogprobs, matmul
from tepo_core.model.packing import arrange, can_pack

# Below this many logits the plain form is faster: nothing is computed twice and its memory is small.
PLAIN_LOGITS = {"cpu": 2**24, "cuda": 2**26}
# Settings by which some architectures change the logits after the output matrix, with their neutral values.
_LOGIT_SETTINGS = {
    "final_logit_softcapping": (None, 0, 0.0),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "lm_head_multiplier": (None, 1, 1.0),
    "output_multiplier_scale": (None, 1, 1.0),
}
_CHECKED: weakref.WeakSet = weakref.WeakSet()


class LogprobError(ValueError):
    """The model or the arguments cannot be used for log-probs by this module; the message says why."""


def head_logits(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """All logits in float32 (float64 for float64 inputs): the precision of the head wherever a distribution is read.

    Sampling in half precision with a head rounded to it would draw from another distribution than the one that is trained."""
    wide = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
    with torch.autocast(hidden_ND.device.type, enabled=False):
        logits_NV = hidden_ND.to(wide) @ weight_VD.to(wide).T
        return logits_NV if bias is None else logits_NV + bias.to(wide)


def plain_logprobs(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = True,
    bias: torch.Tensor | None = None,
    collision: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """The textbook form: all logits, ``log_softmax``, gather. The reference for :func:`chosen_logprobs`."""
    with torch.autocast(hidden_ND.device.type, enabled=False):
        logits_NV = head_logits(hidden_ND, weight_VD, bias)
        logp_NV = (logits_NV if temperature == 1.0 else logits_NV / temperature).log_softmax(-1)
        logprobs_N = logp_NV.gather(1, targets_N[:, None])[:, 0]
        entropy_N = exact_entropy(logp_NV) if entropy else None
    if collision:
        return logprobs_N, entropy_N, (2 * logp_NV.detach()).exp().sum(-1)
    return logprobs_N, entropy_N


class ExactEntropy(torch.autograd.Function):
    """``apply(logp_NV)``: -sum_v p_v log p_v. Nothing is kept but the log-probs; differentiable once."""

    @staticmethod
    def forward(ctx, logp_NV):
        ctx.save_for_backward(logp_NV)
        return -logp_NV.exp().mul_(logp_NV.clamp(min=LOG_ZERO)).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_N):
        (logp_NV,) = ctx.saved_tensors
        return logp_NV.exp().mul_(logp_NV.clamp(min=LOG_ZERO).add_(1.0)).mul_(-grad_N[..., None])


def exact_entropy(logp_NV: torch.Tensor) -> torch.Tensor:
    """Entropy of each row in nats, with 0 log 0 = 0: a token that cannot be drawn (a logit of -inf) has no say in value or
    gradient."""
    return ExactEntropy.apply(logp_NV)


def exact_kl(first_NV: torch.Tensor, second_NV: torch.Tensor) -> torch.Tensor:
    """KL(first || second) over the vocabulary in nats, from log-probs. A token without probability under the first adds nothing;
    one that only the second cannot draw makes it infinite."""
    gap_NV = torch.where(first_NV == -torch.inf, 0.0, first_NV - second_NV)
    return (first_NV.exp() * gap_NV).sum(-1)


def chosen_logprobs(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = True,
    bias: torch.Tensor | None = None,
    chunk: int | None = None,
    collision: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Log-prob of each target and exact entropy of softmax((hidden @ weight.T + bias) / temperature).

    Args:
        hidden_ND: last hidden states, float64, float32, bfloat16 or float16.
        weight_VD: output matrix, of the same dtype.
        targets_N: chosen token ids, int64, each in [0, V).
        temperature: > 0; divides the logits.
        entropy: False skips the entropy; the second output is then None.
        bias: V values added to the logits before the temperature, or None.
        chunk: largest number of logits held at once; the chunked path is then used whatever the size. None: the plain
            form where all logits fit easily, else blocks of 2^21 logits (CPU) or 2^26 (GPU).
        collision: True adds a third output, sum_v p_v^2, without gradient.

    Returns:
        (logprobs_N, entropy_N), in nats, float32 (float64 for float64 inputs); both differentiable in hidden, weight
        and bias. Backward recomputes each block, so extra memory does not grow with N x V.

    Raises:
        LogprobError: shapes, dtypes, temperature or (on the CPU) a target that do not fit.
    """
    _check_arguments(hidden_ND, weight_VD, targets_N, temperature, bias, chunk)
    device = hidden_ND.device.type
    few_logits = hidden_ND.shape[0] * weight_VD.shape[0] <= PLAIN_LOGITS.get(device, PLAIN_LOGITS["cpu"])
    if targets_N.numel() == 0 or (chunk is None and few_logits):
        return plain_logprobs(
            hidden_ND, weight_VD, targets_N, temperature=temperature, entropy=entropy, bias=bias, collision=collision
        )
    budget = chunk or BLOCK_LOGITS.get(device, BLOCK_LOGITS["cpu"])
    logprobs_N, entropy_N, collision_N = ChunkedLogprobs.apply(
        hidden_ND, weight_VD, bias, targets_N, float(temperature), budget, entropy, collision
    )
    found = (logprobs_N, entropy_N if entropy else None)
    return (*found, collision_N) if collision else found


def _check_arguments(hidden_ND, weight_VD, targets_N, temperature, bias, chunk) -> None:
    if hidden_ND.ndim != 2 or weight_VD.ndim != 2 or hidden_ND.shape[1] != weight_VD.shape[1]:
        raise LogprobError(
            f"hidden has shape {tuple(hidden_ND.shape)} and weight {tuple(weight_VD.shape)}; "
            "needed are (tokens, hidden) and (vocabulary, hidden) with the same hidden size"
        )
    if targets_N.shape != hidden_ND.shape[:1] or targets_N.dtype != torch.int64:
        raise LogprobError(
            f"targets has shape {tuple(targets_N.shape)} and dtype {targets_N.dtype}; "
            f"needed is int64 of shape ({hidden_ND.shape[0]},), one target a hidden state"
        )
    if hidden_ND.dtype != weight_VD.dtype:
        raise LogprobError(f"hidden is {hidden_ND.dtype} and weight {weight_VD.dtype}; cast one to the other's dtype")
    if not temperature > 0:
        raise LogprobError(f"temperature = {temperature} must be above 0; greedy decoding has no log-probs to train on")
    if bias is not None and bias.shape != weight_VD.shape[:1]:
        raise LogprobError(f"bias has shape {tuple(bias.shape)}; needed is ({weight_VD.shape[0]},)")
    if chunk is not None and chunk < 1:
        raise LogprobError(f"chunk = {chunk} must be at least 1 (number of logits held at once) or None for automatic")
    # Reading a value of a GPU tensor would stop the host; there the gather itself asserts.
    if not targets_N.is_cuda and targets_N.numel():
        low, high = targets_N.aminmax()
        if low < 0 or high >= weight_VD.shape[0]:
            raise LogprobError(
                f"targets lie in [{int(low)}, {int(high)}], outside the vocabulary of {weight_VD.shape[0]}: "
                "the tokenizer and the model do not belong together"
            )


@dataclass(frozen=True)
class ResponseStates:
    """Hidden states that predict the response tokens, in row order without padding.

    hidden_ND: state before each response token; targets_N: the token; mask_BT: True on real response tokens;
    index_N: place of each token in the flattened (B, T) grid."""

    hidden_ND: torch.Tensor
    targets_N: torch.Tensor
    mask_BT: torch.Tensor
    index_N: torch.Tensor

    def grid(self, values_N: torch.Tensor) -> torch.Tensor:
        """Spread per-token values to (B, T); padding holds 0. Differentiable."""
        flat = values_N.new_zeros(self.mask_BT.numel())
        return flat.index_copy(0, self.index_N, values_N).view(self.mask_BT.shape)


def causal_model(model: nn.Module) -> nn.Module:
    """The Hugging Face causal LM inside an adapter wrapper (peft), or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def output_matrix(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(weight_VD, bias_V or None) of the output layer. The weight is the embedding itself when the two are tied.

    Raises LogprobError for a model whose logits are not ``hidden @ weight.T + bias``."""
    causal = causal_model(model)
    for name, neutral in _LOGIT_SETTINGS.items():
        value = getattr(causal.config, name, None)
        if value not in neutral:
            raise LogprobError(
                f"{type(causal).__name__}: config.{name} = {value} changes the logits after the output matrix, which "
                f"is not supported; choose a model where it is unset, or set config.{name} to {neutral[-1]}"
            )
    head = causal.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise LogprobError(
            f"{type(causal).__name__}: the output layer is {type(head).__name__}, not a plain Linear; "
            "with LoRA leave lm_head and embed_tokens out of the target modules"
        )
    return head.weight, head.bias


def _check_head(model: nn.Module) -> None:
    """Once per model: its own logits on a short probe equal hidden @ weight.T + bias. Catches unknown logit changes."""
    causal = causal_model(model)
    if causal in _CHECKED:
        return
    weight_VD, bias = output_matrix(model)
    was_training = causal.training
    causal.eval()
    try:
        with torch.no_grad():
            ids = torch.arange(4, device=weight_VD.device)[None] % weight_VD.shape[0]
            hidden = causal.base_model(input_ids=ids, use_cache=False).last_hidden_state
            own = causal(input_ids=ids, use_cache=False).logits.double()
            ours = nn.functional.linear(hidden, weight_VD, bias).double()
    finally:
        causal.train(was_training)
    gap = float((own - ours).masked_fill(own == ours, 0.0).abs().max())  # a logit of -inf is equal too
    size = float(own.masked_fill(own.isinf(), 0.0).abs().max())
    tolerance = 1e-4 if weight_VD.dtype in (torch.float32, torch.float64) else 2e-2
    if not gap <= tolerance * max(1.0, size):
        raise LogprobError(
            f"{type(causal).__name__}: its logits differ from hidden @ weight.T + bias by {gap:.3g} on a probe; "
            "the architecture changes the logits in a way that is not supported"
        )
    _CHECKED.add(causal)


def response_states(
    model: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    *,
    pad_id: int,
    pack: bool = True,
) -> ResponseStates:
    """Run the base model on prompt + response sequences and pick the states that predict response tokens.

    Position ids are explicit (0, 1, 2, ...). No attention mask is passed: with padding on the right a causal model
    cannot see it from a real token, and the fast causal kernel applies. Rows are cut to the longest one.
    Padding is known by length, never by token value, so a pad id equal to EOS is harmless.
    Equal sequences are computed once (not in half precision, where the gradients of the copies would be added in it). With
    ``pack``, short ones share a row where the model keeps them apart and it saves work (:mod:`tepo_core.model.packing`).

    Raises LogprobError: no rows, lists of different lengths, an empty prompt, or a sequence beyond the model's context.
    """
    B = len(prompt_ids)
    if not prompt_ids or len(response_ids) != len(prompt_ids):
        raise LogprobError(f"{B} prompts and {len(response_ids)} responses; needed are as many, at least 1")
    prompt_lengths = [len(p) for p in prompt_ids]
    lengths = [len(r) for r in response_ids]
    if min(prompt_lengths) == 0:
        row = prompt_lengths.index(0)
        raise LogprobError(f"prompt {row} is empty: nothing predicts its first response token; add a BOS token")
    # The last response token predicts nothing that is used, so it is not fed.
    S = max(p + max(r - 1, 0) for p, r in zip(prompt_lengths, lengths, strict=True))
    T = max(max(lengths), 1)
    context = getattr(causal_model(model).config, "max_position_embeddings", None)
    if context is not None and context < S:
        raise LogprobError(
            f"a sequence of {S + 1} tokens is longer than the model's context of {context}; "
            "lower train.max_new_tokens or drop long prompts"
        )
    rows = [[*p, *r[:-1]] for p, r in zip(prompt_ids, response_ids, strict=True)]
    first, base_model = next(model.parameters()), causal_model(model).base_model
    device, exact = first.device, first.dtype in (torch.float32, torch.float64)
    layout = arrange(rows, pad_id, pack=pack and can_pack(base_model), share=exact)
    targets_N = torch.tensor([t for r in response_ids for t in r], dtype=torch.int64)
    length_B, prompt_B = torch.tensor(lengths), torch.tensor(prompt_lengths)
    mask_BT = torch.arange(T)[None, :] < length_B[:, None]
    index_N = mask_BT.flatten().nonzero()[:, 0]
    row_N, offset_N = index_N // T, index_N % T
    source_N = layout.start_B[row_N] + prompt_B[row_N] - 1 + offset_N
    input_RS, position_RS, targets_N, mask_BT, index_N, source_N = (
        x.to(device, non_blocking=True) for x in (layout.input_RS, layout.position_RS, targets_N, mask_BT, index_N, source_N)
    )
    hidden_RSD = base_model(input_ids=input_RS, position_ids=position_RS, use_cache=False).last_hidden_state
    hidden_ND = hidden_RSD.flatten(0, 1).index_select(0, source_N)
    return ResponseStates(hidden_ND, targets_N, mask_BT, index_N)


def response_logits(model: nn.Module, states: ResponseStates) -> torch.Tensor:
    """Logits [N, V] of every response token, for what needs the whole distribution. Raises as :func:`output_matrix` does."""
    weight_VD, bias = output_matrix(model)
    return head_logits(states.hidden_ND.to(weight_VD.dtype), weight_VD, bias)


def sampling_head(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Hidden states [B, D] to float32 logits [B, V] for a half-precision model without gradient, as :func:`head_logits` has them.

    None where the model's own forward serves: in full precision, and where its head is no plain matrix (such a model can be
    sampled from, not trained). On a CPU the matrix is converted once, here; on a GPU the product accumulates in float32."""
    if next(model.parameters()).dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        weight_VD, bias = output_matrix(model)
    except LogprobError:
        return None
    weight_VD = weight_VD if weight_VD.is_cuda else weight_VD.float()

    def logits(hidden_BD: torch.Tensor) -> torch.Tensor:
        logits_BV = matmul(hidden_BD.to(weight_VD.dtype), weight_VD.T)
        return logits_BV if bias is None else logits_BV + bias.float()

    return logits


def sequence_logprobs(
    model: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    *,
    pad_id: int,
    temperature: float,
    entropy: bool = True,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Log-prob and exact entropy of every response token under ``model`` (tempered), as a right-padded grid.

    Only response positions go through the output matrix. Up to rounding the result of a row does not depend on the other
    rows or on padding. Dropout, if the model has any and is in training mode, applies as in any forward pass; equal rows
    share it.

    Returns (logprobs_BT, entropy_BT or None, mask_BT): B rows in the given order, T the longest response, 0 on padding.
    Raises LogprobError as :func:`response_states`, :func:`output_matrix` and :func:`chosen_logprobs` do.
    """
    states = response_states(model, prompt_ids, response_ids, pad_id=pad_id)
    logprobs_BT, entropy_BT = state_logprobs(model, states, temperature=temperature, entropy=entropy, chunk=chunk)
    return logprobs_BT, entropy_BT, states.mask_BT


def state_logprobs(
    model: nn.Module,
    states: ResponseStates,
    *,
    temperature: float,
    entropy: bool = True,
    chunk: int | None = None,
    collision: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """:func:`sequence_logprobs` from states that are there already: (logprobs_BT, entropy_BT or None), and with ``collision``
    sum_v p_v^2 as a third."""
    _check_head(model)
    weight_VD, bias = output_matrix(model)
    found = chosen_logprobs(
        states.hidden_ND.to(weight_VD.dtype),
        weight_VD,
        states.targets_N,
        temperature=temperature,
        entropy=entropy,
        bias=bias,
        chunk=chunk,
        collision=collision,
    )
    return tuple(None if values_N is None else states.grid(values_N) for values_N in found)
