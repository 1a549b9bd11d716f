"""One update: which tokens are chosen, how often the model runs, and what is learned from nothing."""

import pytest
import torch
from tiny import tiny_study

from tepo_core.training import update
from tepo_core.training.trainer import Trainer

VARIANTS = {
    "clip_cov_more": {"preset": "clip_cov", "share": 0.05, "band": [0.01, 5.0]},
    "kl_cov_more": {"preset": "kl_cov", "share": 0.05},
    "tepo_cov": {"preset": "tepo_kl", "entropy_test": "covariance"},
}


def chosen_tokens(run, experience, rows):
    """Tokens that an update selects, as (row, position); and how many forward passes it made."""
    found, calls, learner = set(), [], run.learner
    original = update.response_states

    def counted(*args, **kwargs):
        calls.append(torch.is_grad_enabled())
        return original(*args, **kwargs)

    update.response_states = counted
    try:
        groups = learner._groups(experience, rows)
        for group, batch in zip(groups, learner._micro_batches(experience, groups, (0, 1, 1)), strict=True):
            found |= {(group[b], t) for b, t in batch.selected_BT.nonzero().tolist()}
    finally:
        update.response_states = original
    return found, calls, len(groups)


@pytest.mark.parametrize("method", list(VARIANTS))
def test_choice_over_the_mini_batch_does_not_depend_on_micro_batches(base, method):
    found = {}
    for budget in (10**6, 300, 20):
        with Trainer(tiny_study(train={"micro_batch_tokens": budget}, variants=VARIANTS), "facts", method, 0, base) as run:
            run.policy.model.double()
            experience = run.sampler.collect(1).kept
            rows = list(range(len(experience.rollouts)))
            found[budget], calls, groups = chosen_tokens(run, experience, rows)
            assert calls == ([True] if groups == 1 else [False] * groups + [True] * groups), "no pass beyond those needed"
            assert (groups == 1) == (budget == 10**6)
    assert found[10**6] == found[300] == found[20] != set()
