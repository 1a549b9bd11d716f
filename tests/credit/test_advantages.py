"""Advantages by hand, groups without variance, bad input, and against simulation."""

from __future__ import annotations

import pytest
import torch

from tepo_core.credit.group import ADVANTAGES, compute_advantages


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # rewards 1 0 0 1: mean 1/2, variance with G - 1 = 3: 4 * 0.25 / 3 = 1/3
        ("group", [3**0.5 / 2, -(3**0.5) / 2, -(3**0.5) / 2, 3**0.5 / 2]),
        ("centred", [0.5, -0.5, -0.5, 0.5]),
        # 1 - mean(0, 0, 1) = 2/3; 0 - mean(1, 0, 1) = -2/3
        ("loo", [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
    ],
)
def test_by_hand(kind, expected):
    rewards_PG = torch.tensor([[1, 0, 0, 1], [1, 1, 1, 1]])
    advantages_PG = compute_advantages(rewards_PG, kind)
    assert advantages_PG.dtype == torch.float32
    assert advantages_PG[0].tolist() == pytest.approx(expected)
    assert advantages_PG[1].tolist() == [0.0] * 4


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 1e-30, 7e10])
def test_groups_without_variance_give_exactly_zero(kind, value):
    """The mean of seven equal floats need not be that float, so the test is on the rewards, not on the difference."""
    for dtype in (torch.float32, torch.float64):
        assert (compute_advantages(torch.full((2, 7), value, dtype=dtype), kind) == 0).all()


def test_tiny_but_real_differences_are_not_flattened():
    advantages_PG = compute_advantages(torch.tensor([[1.0, 1.0, 1.0 + 1e-6]], dtype=torch.float64))
    assert advantages_PG[0, 2].item() == pytest.approx(2 / 3**0.5, rel=1e-6)


def test_group_advantages_ignore_scale_and_offset_and_sum_to_zero():
    rewards_PG = torch.randn(5, 8, dtype=torch.float64)
    base_PG = compute_advantages(rewards_PG)
    assert torch.allclose(compute_advantages(3 * rewards_PG + 2), base_PG)
    assert base_PG.sum(1).abs().max() < 1e-12
    assert torch.allclose(base_PG.std(1), torch.ones(5, dtype=torch.float64))


def test_leave_one_out_baseline_is_unbiased():
    """E[A_i | r_i] = r_i - E[r] for the leave-one-out baseline; the group mean shrinks it by (G - 1) / G."""
    rewards_PG = (torch.rand(200_000, 2, generator=torch.Generator().manual_seed(0)) < 0.3).double()
    right_PG = rewards_PG == 1
    assert compute_advantages(rewards_PG, "loo")[right_PG].mean().item() == pytest.approx(0.7, abs=0.01)
    assert compute_advantages(rewards_PG, "centred")[right_PG].mean().item() == pytest.approx(0.35, abs=0.01)


@pytest.mark.parametrize(
    ("rewards", "kind", "message"),
    [
        ([[1.0], [0.0]], "group", "group of one response"),
        ([1.0, 0.0], "group", r"shape is \[2\]"),
        ([[1.0, 0.0]], "gae", "advantage = 'gae'; allowed: group, centred, loo"),
        ([[1.0, 0.0], [0.0, float("nan")]], "loo", "reward of prompt 1, response 1 is nan"),
    ],
)
def test_bad_input(rewards, kind, message):
    with pytest.raises(ValueError, match=message):
        compute_advantages(torch.tensor(rewards), kind)


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_a_response_that_was_not_graded_is_left_out(kind):
    """Seven right and one time-out carry no signal; four right, three wrong and one time-out are a group of seven."""
    nan = float("nan")
    rewards_PG = torch.tensor([[1.0] * 7 + [nan], [1, 1, 1, 1, 0, 0, 0, nan], [nan] * 7 + [1.0], [nan] * 8])
    advantages_PG = compute_advantages(rewards_PG, kind, graded_PG=~rewards_PG.isnan())
    assert advantages_PG[[0, 2, 3]].abs().max() == 0
    seven = compute_advantages(rewards_PG[1:2, :7], kind)[0]
    assert advantages_PG[1].tolist() == pytest.approx([*seven.tolist(), 0.0], rel=1e-6)
    # mean 4/7; variance (4 (3/7)^2 + 3 (4/7)^2) / 6 = 2/7; leave-one-out of the first: 1 - 3/6
    right = {"group": (3 / 7) / (2 / 7) ** 0.5, "centred": 3 / 7, "loo": 1 / 2}[kind]
    assert advantages_PG[1, 0].item() == pytest.approx(right)
    assert advantages_PG[1].sum().item() == pytest.approx(0, abs=1e-6)


def test_whatever_stands_in_the_place_of_a_missing_reward_changes_nothing():
    """Two graded of four: the place of the others and the number in it do not matter."""
    rewards_PG = torch.tensor([[1.0, 0.0, 5.0, -9.0]])
    graded_PG = torch.tensor([[True, True, False, False]])
    wanted = [2**-0.5, -(2**-0.5), 0.0, 0.0]
    assert compute_advantages(rewards_PG, graded_PG=graded_PG)[0].tolist() == pytest.approx(wanted)
    turned = compute_advantages(rewards_PG.flip(1), graded_PG=graded_PG.flip(1)).flip(1)
    assert turned[0].tolist() == pytest.approx(wanted)


def test_a_graded_reward_must_be_finite_and_the_mask_must_fit():
    with pytest.raises(ValueError, match="reward of prompt 0, response 1 is nan"):
        compute_advantages(torch.tensor([[1.0, float("nan")]]), graded_PG=torch.tensor([[True, True]]))
    with pytest.raises(ValueError, match=r"graded_PG must be booleans of the shape of rewards_PG, \[1, 2\]"):
        compute_advantages(torch.tensor([[1.0, 0.0]]), graded_PG=torch.tensor([[1, 1, 0]]))
