"""Chunked log-prob and entropy of the chosen tokens: the (tokens x vocabulary) matrix is never held as a whole.

Memory: the plain form keeps several float32 matrices of N x V. Here one block of tokens x vocabulary exists at a time;
the forward pass keeps three numbers a token (log-sum-exp, log-prob, entropy) and the backward pass computes each block
again. The vocabulary is the outer loop, so each row of the output matrix and of its gradient is visited once per block
of tokens while it is in the cache, and its gradient needs no second buffer of V x D.

Formulas, with z = hidden @ weight.T / temperature (+ bias / temperature), p = softmax(z), l = log p[target],
H = -sum_v p_v log p_v:

    dl/dz_v = 1[v = target] - p_v
    dH/dz_v = -p_v (log p_v + H)
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

BLOCK_LOGITS = {"cpu": 2**21, "cuda": 2**26}
LOG_ZERO = -1e4  # of no probability: exp of anything below -746 is 0 in float64, below -104 in float32
_COMPILED: dict[str, object] = {}


def block_shape(tokens: int, vocabulary: int, budget: int) -> tuple[int, int]:
    """Tokens and vocabulary entries of one block, of at most ``budget`` logits. Blocks are at least twice as wide as tall."""
    rows = 1
    while rows * 2 <= tokens and (rows * 2) ** 2 * 2 <= budget:
        rows *= 2
    return rows, max(1, min(vocabulary, budget // rows))


def _block_statistics(
    logits_nv: torch.Tensor, maximum_n: torch.Tensor, total_n: torch.Tensor, weighted_n: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merge a block into the running maximum m, sum s = sum exp(z - m) and u = sum exp(z - m) (z - m), where 0 * -inf = 0.

    A block may hold nothing but -inf (the padding of a vocabulary): until the first finite logit m = -inf and s = u = 0."""
    merged_n = torch.maximum(maximum_n, logits_nv.amax(-1))
    origin_n = torch.where(merged_n == -torch.inf, 0.0, merged_n)
    centred_nv = logits_nv - origin_n[:, None]
    exp_nv = centred_nv.exp()
    # Without a sum so far the shift is -inf and must not meet a zero.
    shift_n = torch.where(total_n > 0, maximum_n - origin_n, 0.0)
    scale_n = shift_n.exp()
    return (
        merged_n,
        total_n * scale_n + exp_nv.sum(-1),
        (weighted_n + total_n * shift_n) * scale_n + (exp_nv * centred_nv.clamp(min=LOG_ZERO)).sum(-1),
    )


def _block_squares(
    logits_nv: torch.Tensor, old_n: torch.Tensor, merged_n: torch.Tensor, squares_n: torch.Tensor
) -> torch.Tensor:
    """Merge a block into sum exp(2 (z - m)) when the maximum has moved from ``old_n`` (-inf before the first) to ``merged_n``."""
    return squares_n * (2 * (old_n - merged_n)).exp() + (2 * (logits_nv - merged_n[:, None])).exp().sum(-1)


def _block_gradient(
    logits_nv: torch.Tensor,
    lse_n: torch.Tensor,
    entropy_n: torch.Tensor | None,
    grad_logprob_n: torch.Tensor,
    grad_entropy_n: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient of a block of logits without the one-hot part, which is added by index."""
    logp_nv = logits_nv - lse_n[:, None]
    if grad_entropy_n is None:
        return logp_nv.exp() * -grad_logprob_n[:, None]
    slope_nv = grad_logprob_n[:, None] + grad_entropy_n[:, None] * (logp_nv.clamp(min=LOG_ZERO) + entropy_n[:, None])
    return -logp_nv.exp() * slope_nv


def _pointwise(function, device: torch.device):
    """The function itself on the CPU, compiled on a GPU, where fusing saves four passes over each block."""
    if device.type != "cuda":
        return function
    if function.__name__ not in _COMPILED:
        _COMPILED[function.__name__] = torch.compile(function, dynamic=True)
    return _COMPILED[function.__name__]


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Product accumulated and returned in float32 (float64 for float64 inputs)."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b in place, accumulated in total's dtype (float32 or float64), never rounded to the inputs' dtype."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


class ChunkedLogprobs(torch.autograd.Function):
    """``apply(hidden_ND, weight_VD, bias_V | None, targets_N, temperature, budget, entropy, collision)``: logprobs_N,
    entropy_N, collision_N (sum of p^2).

    Differentiable once, in hidden, weight and bias, for the first two. What is not asked for comes back empty.
    """

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, bias_V, targets_N, temperature, budget, entropy, collision=False):
        N, V = hidden_ND.shape[0], weight_VD.shape[0]
        wide = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        rows, columns = block_shape(N, V, budget)
        statistics = _pointwise(_block_statistics, hidden_ND.device)
        maximum_N = hidden_ND.new_full((N,), -torch.inf, dtype=wide)
        total_N, weighted_N, chosen_N = (hidden_ND.new_zeros(N, dtype=wide) for _ in range(3))
        squares_N = torch.zeros_like(total_N) if collision else total_N.new_empty(0)
        squares = _pointwise(_block_squares, hidden_ND.device)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for v in range(0, V, columns):
                weight_vD = weight_VD[v : v + columns]
                for n in range(0, N, rows):
                    block = slice(n, min(n + rows, N))
                    logits_nv = _logits(hidden_ND[block], weight_vD, bias_V, v, temperature)
                    before_n = maximum_N[block].clone()
                    maximum_N[block], total_N[block], weighted_N[block] = statistics(
                        logits_nv, maximum_N[block], total_N[block], weighted_N[block]
                    )
                    if collision:
                        squares_N[block] = squares(logits_nv, before_n, maximum_N[block], squares_N[block])
                    index_n, inside_n = _inside(targets_N[block], v, weight_vD.shape[0])
                    chosen_N[block] += torch.where(inside_n, logits_nv.gather(1, index_n)[:, 0], 0.0)
        log_total_N = total_N.log()
        lse_N = maximum_N + log_total_N
        # H = lse - E[z] = log s - E[z - m]: both terms are small, so nothing cancels.
        entropy_N = log_total_N - weighted_N / total_N
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, lse_N, entropy_N)
        ctx.temperature, ctx.rows, ctx.columns = temperature, rows, columns
        ctx.set_materialize_grads(False)
        collision_N = squares_N / total_N.square() if collision else squares_N
        ctx.mark_non_differentiable(collision_N)
        return chosen_N - lse_N, entropy_N if entropy else entropy_N.new_empty(0), collision_N

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprob_N, grad_entropy_N, _collision):
        hidden_ND, weight_VD, bias_V, targets_N, lse_N, entropy_N = ctx.saved_tensors
        if grad_entropy_N is not None and grad_entropy_N.numel() == 0:
            grad_entropy_N = None
        if grad_logprob_N is None and grad_entropy_N is None:
            return (None,) * 8
        if grad_logprob_N is None:
            grad_logprob_N = torch.zeros_like(lse_N)
        rows_N = _rows_with_gradient(grad_logprob_N, grad_entropy_N)
        full_shape = hidden_ND.shape
        if rows_N is not None:
            hidden_ND, targets_N, lse_N, entropy_N, grad_logprob_N = (
                x[rows_N] for x in (hidden_ND, targets_N, lse_N, entropy_N, grad_logprob_N)
            )
            grad_entropy_N = None if grad_entropy_N is None else grad_entropy_N[rows_N]
        with torch.autocast(hidden_ND.device.type, enabled=False):
            grads = _backward_blocks(
                ctx,
                hidden_ND,
                weight_VD,
                bias_V,
                targets_N,
                lse_N=lse_N,
                entropy_N=entropy_N,
                grad_logprob_N=grad_logprob_N,
                grad_entropy_N=grad_entropy_N,
            )
        grad_hidden_ND, grad_weight_VD, grad_bias_V = grads
        if rows_N is not None and grad_hidden_ND is not None:
            scattered_ND = grad_hidden_ND.new_zeros(full_shape)
            scattered_ND[rows_N] = grad_hidden_ND
            grad_hidden_ND = scattered_ND
        return grad_hidden_ND, grad_weight_VD, grad_bias_V, None, None, None, None, None


def _logits(hidden_nD, weight_vD, bias_V, v, temperature):
    logits_nv = matmul(hidden_nD, weight_vD.T)
    if bias_V is not None:
        logits_nv += bias_V[v : v + weight_vD.shape[0]]
    return logits_nv if temperature == 1.0 else logits_nv.mul_(1.0 / temperature)


def _inside(targets_n, v, width):
    """Column of each target inside the block (any column when it lies elsewhere) and whether it lies inside."""
    local_n = targets_n - v
    inside_n = (local_n >= 0) & (local_n < width)
    return local_n.clamp(0, width - 1)[:, None], inside_n


def _rows_with_gradient(grad_logprob_N, grad_entropy_N):
    """Rows that contribute (responses with zero advantage do not), or None for all.

    CPU only: counting them on a GPU would make the host wait."""
    if grad_logprob_N.is_cuda:
        return None
    active_N = grad_logprob_N != 0
    if grad_entropy_N is not None:
        active_N |= grad_entropy_N != 0
    return None if bool(active_N.all()) else active_N.nonzero()[:, 0]


def _backward_blocks(ctx, hidden_ND, weight_VD, bias_V, targets_N, *, lse_N, entropy_N, grad_logprob_N, grad_entropy_N):
    N, V, wide = hidden_ND.shape[0], weight_VD.shape[0], lse_N.dtype
    gradient = _pointwise(_block_gradient, hidden_ND.device)
    # The temperature divides every gradient of the logits: fold it into the incoming gradients, once.
    grad_logprob_N = grad_logprob_N.to(wide) / ctx.temperature
    grad_entropy_N = None if grad_entropy_N is None else grad_entropy_N.to(wide) / ctx.temperature
    need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
    grad_hidden_ND = torch.zeros_like(hidden_ND, dtype=wide) if need_hidden else None
    grad_weight_VD = torch.empty_like(weight_VD) if need_weight else None
    grad_bias_V = torch.empty_like(bias_V) if need_bias and bias_V is not None else None
    for v in range(0, V, ctx.columns):
        weight_vD = weight_VD[v : v + ctx.columns]
        width = weight_vD.shape[0]
        total_vD = weight_vD.new_zeros(weight_vD.shape, dtype=wide) if need_weight else None
        total_v = weight_vD.new_zeros(width, dtype=wide) if grad_bias_V is not None else None
        for n in range(0, N, ctx.rows):
            block = slice(n, min(n + ctx.rows, N))
            logits_nv = _logits(hidden_ND[block], weight_vD, bias_V, v, ctx.temperature)
            grad_nv = gradient(
                logits_nv,
                lse_N[block],
                entropy_N[block],
                grad_logprob_N[block],
                None if grad_entropy_N is None else grad_entropy_N[block],
            )
            index_n, inside_n = _inside(targets_N[block], v, width)
            grad_nv.scatter_add_(1, index_n, (grad_logprob_N[block] * inside_n)[:, None])
            if total_v is not None:
                total_v += grad_nv.sum(0)
            # On a GPU the products run in the inputs' dtype with float32 accumulation; on the CPU in float32.
            narrow_nv = grad_nv.to(weight_vD.dtype) if grad_nv.is_cuda else grad_nv
            if need_hidden:
                _add_product(grad_hidden_ND[block], narrow_nv, weight_vD)
            if need_weight:
                _add_product(total_vD, narrow_nv.T, hidden_ND[block])
        if need_weight:
            grad_weight_VD[v : v + width] = total_vD
        if total_v is not None:
            grad_bias_V[v : v + width] = total_v
    return None if grad_hidden_ND is None else grad_hidden_ND.to(hidden_ND.dtype), grad_weight_VD, grad_bias_V
