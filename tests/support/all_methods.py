"""Every preset and the variants that cover every option, for tests that hold for all methods."""

from __future__ import annotations

from tepo_core.objectives.methods import PRESETS

KL_REF = {"reference": "ref", "estimator": "k3", "beta": 0.1}
VARIANTS = {
    "grpo_ref": {"preset": "grpo", "kl": KL_REF, "entropy_bonus": 0.1, "dual_clip": 1.5},
    "grpo_exact": {"preset": "grpo", "kl": {**KL_REF, "estimator": "exact", "gradient": "k2"}},
    "grpo_unweighted": {"preset": "grpo", "kl": {**KL_REF, "sampling": "unweighted"}},
    "grpo_reverse": {"preset": "grpo", "kl": {**KL_REF, "estimator": "k1", "direction": "reference_policy"}},
    "tepo_k1": {"preset": "tepo_kl", "kl": {"estimator": "k1"}},
    "tepo_k2": {"preset": "tepo_kl", "kl": {"estimator": "k2"}},
    "kl_cov_weighted": {"preset": "kl_cov", "share": 0.2, "kl": {"sampling": "weighted"}},
    "holder_minus": {"preset": "holder", "p": -2.0},
    "clip_cov_more": {"preset": "clip_cov", "share": 0.05, "band": [0.1, 5.0]},
    "kl_cov_more": {"preset": "kl_cov", "share": 0.2},
    "tepo_cov": {"preset": "tepo_kl", "entropy_test": "covariance"},
    "tepo_first": {"preset": "tepo_kl", "entropy_test": "first_order"},
    "mpo_disjoint": {"preset": "mpo", "block": {"kind": "disjoint", "weights": "geometric", "decay": 0.5}},
    "mpo_product": {"preset": "mpo", "block": {"form": "product", "size": 2}},
    "mpo_renormalise": {"preset": "mpo", "block": {"ends": "renormalise"}},
    "mpo_truncate": {"preset": "mpo", "block": {"ends": "truncate"}},
    "mpo_fold": {"preset": "mpo", "block": {"ends": "fold", "weights": "geometric", "decay": 0.5}},
    "mpo_disjoint_cut": {"preset": "mpo", "block": {"kind": "disjoint", "ends": "truncate"}},
    "mpo_heads": {"preset": "mpo", "block": {"logprobs": "mtp", "size": 3}},
    "mpo_heads_disjoint": {"preset": "mpo", "block": {"logprobs": "mtp", "size": 3, "kind": "disjoint"}},
}
NAMES = [*PRESETS, *VARIANTS]
