"""The PPO-clip family: one surrogate, and the ratio as a choice. What GRPO, DAPO, GSPO, HölderPO, TEPO and MPO share."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tepo_core.objectives.options import Clipped
from tepo_core.objectives.ratios import sequence_ratio, sequence_token_ratio, token_ratio
from tepo_core.objectives.surrogates import Surrogate, ppo_clip
from tepo_core.objectives.types import TokenBatch

Ratio = Callable[[TokenBatch, Clipped], Tensor]
RATIOS: dict[str, Ratio] = {
    "token": lambda batch, options: token_ratio(batch.log_ratio_BT),
    "sequence": lambda batch, options: sequence_ratio(batch.log_ratio_BT, batch.valid_BT),
    "sequence_token": lambda batch, options: sequence_token_ratio(batch.log_ratio_BT, batch.valid_BT),
}
"""``ratio`` of the options -> [B, T] or [B, 1]. A ratio that one method brings is added by :func:`ratio` where the method stands."""


def ratio(name: str) -> Callable[[Ratio], Ratio]:
    """Decorator: make ``function(batch, options) -> [B, T] or [B, 1]`` the ratio that ``ratio: name`` names."""

    def add(function: Ratio) -> Ratio:
        RATIOS[name] = function
        return function

    return add


def clip_term(ratio: str, advantage: str = "A_i") -> str:
    """LaTeX of the clipped term."""
    bounds = r"1-\varepsilon_-,\,1+\varepsilon_+"
    return rf"\min\big({ratio} {advantage},\ \mathrm{{clip}}({ratio},{bounds})\,{advantage}\big)"


def clipped(batch: TokenBatch, options: Clipped) -> Surrogate:
    """min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A); its presets differ in rho, bounds and aggregation."""
    ratio_BT = RATIOS[options.ratio](batch, options)
    return ppo_clip(ratio_BT, batch.advantages_BT, options.clip, options.dual_clip)
