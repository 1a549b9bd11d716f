"""The notebook that shows one update: it runs on its own, its asserts can fail, and its pictures show what was computed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tepo_core.analysis.figures.step import moved_figure, token_losses_figure
from tepo_core.analysis.step import Shown, shown, telling_rows, token_shares
from tepo_core.grading.exact import ExactGrader
from tepo_core.model.policy import Policy
from tepo_core.objectives.aggregate import AGGREGATES, aggregate
from tepo_core.objectives.methods import MiniBatchTotals, TokenBatch, resolve
from tepo_core.rollout.types import Rollouts
from tepo_core.tasks.problem import TOKEN_KINDS, Problem
from tepo_core.tasks.tokenizer import build_tokenizer
from tepo_core.training.experience import Experience

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "one_step.ipynb"
METHODS = ("grpo", "tepo_kl", "mpo")


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Names after all cells, run in an empty folder that is not the project's: no stage before it, no file beside it."""
    folder = tmp_path_factory.mktemp("elsewhere")
    cells = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for number, cell in enumerate(cells):
            exec(compile(cell, f"one_step.ipynb, code cell {number}", "exec"), names)
    assert list(folder.iterdir()) == []
    return names


def test_it_runs_alone_and_draws_two_pictures(executed):
    losses, moved = executed["losses"], executed["moved"]
    responses = len(executed["views"])
    assert len(losses.axes) == 3 * responses and len(moved.axes) == 4 * responses
    assert [tick.get_text() for tick in moved.axes[-responses].get_xticklabels()][-1] == "∎"
    assert any(any(view.decisive) for view in executed["views"])


def test_the_gradients_are_the_learners_where_bounds_and_mask_act(executed):
    seen = executed["seen"]
    assert bool(seen["grpo"].clipped_BT.any()) and bool(seen["tepo_kl"].mask_BT.any())
    assert set(executed["differences"]) == {"ratio 1", "after the update"}
    assert all(error < 1e-4 for column in executed["differences"].values() for error in column.values())


@pytest.mark.parametrize(("name", "wrong"), [("grpo", "mpo"), ("mpo", "grpo"), ("tepo_kl", "grpo")])
def test_the_comparison_with_the_learner_can_fail(executed, name, wrong):
    """With another method's surrogate the gradients are far apart."""
    right = dict(executed["SURROGATES"])
    try:
        executed["SURROGATES"][name] = right[wrong]
        assert executed["difference"](name) > 1e-2
    finally:
        executed["SURROGATES"].update(right)
    assert executed["difference"](name) < 1e-4


# -- the pieces, by hand --------------------------------------------------------------------------------------------------


def experience_of(texts: list[str], gold: str) -> tuple[Experience, Policy]:
    tokenizer = build_tokenizer()
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    grades = ExactGrader().grade(golds=[gold] * len(texts), responses=texts, truncated=[False] * len(texts))
    rewards_PG = np.array([[grade.reward for grade in grades]])
    zeros = [np.zeros(len(row)) for row in ids]
    kinds = [np.array([TOKEN_KINDS.index("decisive" if t == 0 else "copied") for t in range(len(row))]) for row in ids]
    problem = Problem("p", "1+1=", gold, "train")
    rollouts = Rollouts([[0]] * len(ids), ids, zeros, zeros, [True] * len(ids), [0] * len(ids), list(range(len(ids))))
    return Experience([problem], rollouts, grades, rewards_PG, rewards_PG - rewards_PG.mean(), zeros, zeros, kinds), Policy(
        None, tokenizer
    )


def test_the_pair_that_agrees_longest_is_shown_and_the_shortest():
    texts = ["3=3\\boxed{2}", "1+1=3\\boxed{3}", "\\boxed{4}", "1+1=2\\boxed{2}", "9\\boxed{9}"]
    experience, policy = experience_of(texts, "2")
    assert telling_rows(experience) == [3, 1, 2]
    view = shown(experience, 3, policy)
    assert view.texts == ["1", "+", "1", "=", "2", "\\boxed{", "2", "}", "<eos>"]
    assert (view.row, view.correct, view.advantage) == (3, True, pytest.approx(0.6))
    assert view.decisive == [True] + [False] * 8
    experience.kinds = None
    assert shown(experience, 1, policy).decisive == [False] * 9


def test_a_shortest_response_that_is_shown_already_is_not_shown_twice():
    experience, _ = experience_of(["\\boxed{2}", "1+1=3\\boxed{3}"], "2")
    assert telling_rows(experience) == [0, 1]


@pytest.mark.parametrize("gold", ["2", "7"])
def test_a_group_without_contrast_is_refused(gold):
    experience, _ = experience_of(["\\boxed{2}", "1+1=2\\boxed{2}"], gold)
    with pytest.raises(ValueError, match=f"{2 if gold == '2' else 0} of 2 responses are right"):
        telling_rows(experience)


@pytest.mark.parametrize("kind", AGGREGATES)
def test_shares_add_up_to_the_aggregate(kind):
    terms_BT = torch.tensor([[1.0, -2.0, 4.0], [3.0, 5.0, 99.0]], dtype=torch.float64)
    mask_BT = torch.tensor([[True, True, True], [True, True, False]])
    totals = MiniBatchTotals.from_mask(mask_BT, constant=10.0)
    shares_BT = token_shares(terms_BT, mask_BT, totals, kind)
    assert float(shares_BT.sum()) == pytest.approx(float(aggregate(terms_BT, mask_BT.double(), totals, kind)))
    assert float(shares_BT[1, 2]) == 0.0
    by_hand = {
        "token_mean": 5 / 5, "seq_mean_token_mean": 5 / 2 / 2, "seq_mean_token_sum": 5 / 2, "seq_mean_token_sum_norm": 5 / 20,
    }  # fmt: skip
    assert float(shares_BT[1, 1]) == pytest.approx(by_hand[kind])


def small_batch() -> tuple[TokenBatch, MiniBatchTotals, list[Shown]]:
    """A right response of 6 tokens whose third token has moved far up, a wrong one of 3 that stands still."""
    mask_BT = torch.arange(6) < torch.tensor([[6], [3]])
    old_BT = torch.full((2, 6), -1.0)
    now_BT = old_BT.clone()
    now_BT[0, 2] += 0.9
    batch = TokenBatch(
        now_BT.requires_grad_(), old_BT, mask_BT, torch.tensor([[1.0], [-1.0]]) * mask_BT,
        entropy_BT=torch.where(now_BT > old_BT, 0.1, 0.5).detach(), old_entropy_BT=torch.full((2, 6), 0.5),
    )  # fmt: skip
    views = [Shown(0, list("1=2+3") + ["<eos>"], [False, False, True, False, False, False], 1.0, True)]
    views.append(Shown(1, ["\\boxed{", "2", "<eos>"], [False] * 3, -1.0, False))
    return batch, MiniBatchTotals.from_mask(mask_BT), views


def test_the_picture_of_the_losses_holds_the_numbers():
    batch, _, views = small_batch()
    shares = {name: torch.arange(12.0).reshape(2, 6) - 2 for name in METHODS}
    weights = {name: 2 * share for name, share in shares.items()}
    figure = token_losses_figure(views, shares, weights)
    axis = figure.axes[1]  # of grpo, the second response
    assert [bar.get_height() for bar in axis.patches if bar.get_width() == 0.72] == [4, 5, 6]
    assert axis.lines[0].get_ydata().tolist() == [8, 10, 12]
    assert [label.get_text() for label in figure.axes[-1].get_xticklabels()] == ["box", "2", "∎"]
    assert figure.axes[0].get_title(loc="center") == "right\nA = +1.00"


def test_the_picture_of_the_move_shows_what_each_method_makes_of_it():
    batch, totals, views = small_batch()
    seen = {name: resolve(name).loss(batch, totals).token for name in METHODS}
    figure = moved_figure(views, batch.old_logprobs_BT, batch.logprobs_BT.detach(), seen)
    grpo, tepo_kl, mpo = ([line.get_xdata().tolist() for line in figure.axes[i].lines[1:]] for i in (2, 4, 6))
    assert grpo == [[0, 1, 3, 4, 5], [2], []]  # flows, clipped, charged: the token that moved is clipped
    assert tepo_kl == [[0, 1, 2, 3, 4, 5], [], [2]]  # e^(0.9 / 6) is inside the band; the entropy fell at one token
    assert mpo == [[0, 1, 2, 3, 4, 5], [], []]  # e^(0.9 / 5) is inside; a window that runs over the end goes on at the start
    assert figure.axes[4].lines[1].get_ydata() == pytest.approx([np.exp(0.15)] * 6)
    assert figure.axes[6].lines[1].get_ydata() == pytest.approx([np.exp(0.18)] * 3 + [1.0] + [np.exp(0.18)] * 2)
