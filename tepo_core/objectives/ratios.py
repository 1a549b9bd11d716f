"""Importance ratios: how d_it = log pi_theta - log pi_old becomes one positive number a token.

Every function takes d with zeros at padding, ``valid_BT`` with 1 on tokens and 0 at padding, and returns [B, T] or [B, 1]
(one value for the whole response).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import hardtanh

LOG_LIMIT = 20.0  # exp(20) = 5e8: any ratio beyond is clipped by every method; without the limit inf * 0 makes NaN gradients


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """exp(d), finite for every finite d: |d| is limited to 20."""
    return hardtanh(log_ratio, -LOG_LIMIT, LOG_LIMIT).exp()  # clamp, with a backward pass of one kernel instead of five


def response_mean(values_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Mean over the tokens of each response, [B, 1]; 0 for a row without tokens. ``values_BT`` is zero at padding."""
    return values_BT.sum(dim=-1, keepdim=True) / valid_BT.sum(dim=-1, keepdim=True).clamp(min=1)


def token_ratio(log_ratio_BT: Tensor) -> Tensor:
    """r_it = exp(d_it), [B, T] (PPO, GRPO)."""
    return exp_ratio(log_ratio_BT)


def sequence_ratio(log_ratio_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """s_i = exp(mean_t d_it), [B, 1]: the geometric mean of the token ratios (GSPO, arXiv 2507.18071 sec. 4.1; TEPO)."""
    return exp_ratio(response_mean(log_ratio_BT, valid_BT))


def sequence_token_ratio(log_ratio_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """sg[s_i] * pi_theta / sg[pi_theta], [B, T]: the value of s_i with the gradient of the token itself (GSPO-token,
    arXiv 2507.18071 sec. 4.3)."""
    sequence_B1 = sequence_ratio(log_ratio_BT, valid_BT).detach()
    return sequence_B1 * (log_ratio_BT - log_ratio_BT.detach()).exp()
