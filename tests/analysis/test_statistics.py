"""Statistics against hand-computed values, closed forms and simulation."""

from __future__ import annotations

import numpy as np
import pytest

from tepo_core.analysis.statistics import (
    SeedProblemBootstrap,
    TimeToTarget,
    bootstrap_interval,
    iqm,
    kaplan_meier,
    paired_improvement,
    paired_interval,
    probability_of_improvement,
    restricted_mean_time,
    rollouts_to_target,
    seed_interval,
    seeds_needed,
    shared_problem_variance,
    time_ratio,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# -- means and intervals ---------------------------------------------------------------------------------------------------


def test_iqm_cuts_a_quarter_from_each_end() -> None:
    assert iqm(np.array([0.0, 2.0, 4.0, 100.0])) == 3.0  # (2 + 4) / 2
    assert iqm(np.array([1.0, 2.0, 9.0])) == 4.0  # three values: nothing to cut
    assert iqm(np.arange(8.0)) == 3.5  # 2, 3, 4, 5


def test_seed_interval_by_hand() -> None:
    # mean 2, sd 1, standard error 1/sqrt(3) = 0.57735; t(0.975, 2) = 4.302653
    found = seed_interval([1.0, 2.0, 3.0], 0.95)
    assert (found.estimate, found.n) == (2.0, 3)
    assert found.high - 2.0 == pytest.approx(4.302653 * 0.57735027, rel=1e-6)
    assert 2.0 - found.low == pytest.approx(found.high - 2.0)


def test_interval_is_cut_at_what_a_share_can_be() -> None:
    found = seed_interval([0.9, 1.0, 0.95], 0.95, bounds=(0.0, 1.0))
    assert found.high == 1.0 and 0.8 < found.low < 0.9


@pytest.mark.parametrize(
    ("values", "reason"),
    [([0.5], "one seed"), ([0.5, 0.5, 0.5], "no variation between seeds"), ([], "no value"), ([float("nan"), 0.4], "one seed")],
)
def test_no_interval_where_none_can_be_given(values: list[float], reason: str) -> None:
    found = seed_interval(values, 0.95)
    assert not found.known and found.low is None and found.reason == reason


def test_variance_over_problems_widens_the_interval() -> None:
    # variances add: se^2 = 1/3 + 2/3 = 1
    found = seed_interval([1.0, 2.0, 3.0], 0.95, problem_variance=2 / 3)
    assert found.high - found.estimate == pytest.approx(4.302653, rel=1e-6)


def test_paired_interval_ignores_what_seeds_share() -> None:
    base = np.array([0.1, 0.5, 0.9])  # seeds differ widely, the gain does not
    found = paired_interval(base + [0.04, 0.05, 0.06], base, 0.95)
    # sd 0.01, se 0.0057735, t 4.302653
    assert found.estimate == pytest.approx(0.05)
    assert found.low == pytest.approx(0.05 - 0.024841, abs=1e-6)
    with pytest.raises(ValueError, match="2 and 3"):
        paired_interval([1, 2], [1, 2, 3], 0.95)


def test_t_interval_covers_and_the_bootstrap_over_three_seeds_does_not() -> None:
    """Why verdicts rest on the t interval: seeds that draw their own problems, three of them, truth 0.5."""
    generator, truth, hits, boot_hits, runs = rng(1), 0.5, 0, 0, 400
    for _ in range(runs):
        levels = np.clip(truth + 0.15 * generator.normal(size=3), 0, 1)  # seeds differ, as base policies do
        groups = [(generator.random(256) < level).astype(float) for level in levels]  # and each has its own problems
        found = seed_interval([g.mean() for g in groups], 0.95)
        hits += found.known and found.low <= truth <= found.high
        boot = SeedProblemBootstrap([256] * 3, reps=200, rng=generator).interval(groups, 0.95)
        boot_hits += boot.low <= truth <= boot.high
    assert 0.92 <= hits / runs <= 0.98
    assert boot_hits / runs < 0.85


def test_t_interval_with_problem_variance_covers_new_problems() -> None:
    """Seeds share their problems: without the variance over problems the interval would be far too narrow."""
    generator, runs, plain, full = rng(2), 400, 0, 0
    for _ in range(runs):
        problems = 0.1 * generator.normal(size=40)  # the method's effect differs from problem to problem, truth 0
        table = problems[None] + 0.05 * generator.normal(size=(4, 40))
        means = table.mean(axis=1)
        narrow, wide = seed_interval(means, 0.95), seed_interval(means, 0.95, problem_variance=shared_problem_variance(table))
        plain += narrow.low <= 0 <= narrow.high
        full += wide.low <= 0 <= wide.high
    assert plain / runs < 0.85
    assert full / runs > 0.93


def test_shared_problem_variance_takes_out_the_noise_of_seeds() -> None:
    generator = rng(3)
    pure_noise = generator.normal(size=(5, 4000))
    assert shared_problem_variance(pure_noise) < 2e-5  # 1/5/4000 = 5e-5 would remain if it were not taken out
    effect = 2.0 * generator.normal(size=4000)
    assert shared_problem_variance(effect[None] + pure_noise) == pytest.approx(4 / 4000, rel=0.1)
    assert shared_problem_variance(np.ones((3, 1))) == 0.0


# -- bootstrap -------------------------------------------------------------------------------------------------------------


def test_hierarchical_bootstrap_has_the_variance_of_theory() -> None:
    # redrawn mean of seed means: variance = pop. variance of seed means / S + mean pop. variance inside / (S P)
    generator = rng(4)
    groups = [generator.random(50) + shift for shift in (0.0, 0.3, 0.1, 0.2)]
    draws = SeedProblemBootstrap([50] * 4, reps=20000, rng=generator).means(groups)
    expected = np.var([g.mean() for g in groups]) / 4 + np.mean([g.var() for g in groups]) / (4 * 50)
    assert draws.mean() == pytest.approx(np.mean([g.mean() for g in groups]), abs=4e-3)
    assert draws.var() == pytest.approx(expected, rel=0.05)


def test_shared_problems_are_redrawn_once_for_all_seeds() -> None:
    # equal seeds: only problems vary, so the variance is var / P, not var / (S P)
    values = rng(5).random(60)
    draws = SeedProblemBootstrap([60] * 3, reps=20000, rng=rng(6), shared=True).means([values] * 3)
    assert draws.var() == pytest.approx(values.var() / 60, rel=0.05)
    apart = SeedProblemBootstrap([60] * 3, reps=20000, rng=rng(6)).means([values] * 3)
    assert apart.var() == pytest.approx(values.var() / 180, rel=0.05)


def test_methods_measured_with_one_bootstrap_are_paired() -> None:
    sampler = SeedProblemBootstrap([30, 20], reps=500, rng=rng(7))
    groups = [rng(8).random(30), rng(9).random(20)]
    assert np.allclose(sampler.means([g + 0.1 for g in groups]) - sampler.means(groups), 0.1, atol=1e-6)


def test_bootstrap_refuses_what_does_not_fit() -> None:
    sampler = SeedProblemBootstrap([3, 3], reps=100, rng=rng())
    with pytest.raises(ValueError, match=r"expected \[3, 3\]"):
        sampler.means([np.ones(3), np.ones(2)])
    with pytest.raises(ValueError, match="at least one problem"):
        SeedProblemBootstrap([3, 0], reps=100, rng=rng())
    with pytest.raises(ValueError, match="equally many"):
        SeedProblemBootstrap([3, 4], reps=100, rng=rng(), shared=True)
    assert not sampler.interval([np.ones(3), np.ones(3)], 0.95).known
    assert SeedProblemBootstrap([3], reps=100, rng=rng()).interval([np.arange(3.0)], 0.95).reason == "one seed"


def test_stratified_bootstrap_redraws_inside_each_stratum() -> None:
    # one stratum at 0 +- 1, one at 100 +- 1: mixing them would give an interval tens wide
    strata = [[-1.0, 0.0, 1.0, 0.5], [99.0, 100.0, 101.0, 100.5]]
    found = bootstrap_interval(strata, lambda x: x.mean(axis=1), reps=2000, confidence=0.95, rng=rng(10))
    assert found.estimate == pytest.approx(50.125)
    assert 49 < found.low < 50.125 < found.high < 51.2
    again = bootstrap_interval(strata, lambda x: x.mean(axis=1), reps=2000, confidence=0.95, rng=rng(10))
    assert again == found
    assert bootstrap_interval([[1.0], [2.0, 3.0]], iqm, reps=100, confidence=0.95, rng=rng()).reason == "one seed"


# -- improvement, power ----------------------------------------------------------------------------------------------------


def test_probability_of_improvement_by_hand() -> None:
    # pairs: 1>0 1, 1<2 0, 2>0 1, 2=2 one half: 2.5 / 4
    assert probability_of_improvement([[1, 2]], [[0, 2]]) == 0.625
    assert probability_of_improvement([[1, 2], [1]], [[0, 2], [0]]) == pytest.approx((0.625 + 1) / 2)
    assert probability_of_improvement([[]], [[1]]) is None
    assert paired_improvement([0.1, 0.0, -0.2, 0.3]) == 0.625


def test_seeds_needed_by_hand() -> None:
    # d = sd: n = 10, since (t(.975, 9) + t(.8, 9))^2 = (2.262 + 0.883)^2 = 9.89 <= 10 and (2.306 + 0.889)^2 = 10.2 > 9
    assert seeds_needed([0.0, np.sqrt(2.0)], confidence=0.95) is not None
    spread = np.array([1 - 1.0, 1.0, 1 + 1.0])  # mean 1, sd 1
    assert seeds_needed(spread, confidence=0.95) == 10
    assert seeds_needed([1.0], confidence=0.95) is None
    assert seeds_needed([-1.0, 1.0], confidence=0.95) is None  # a difference of 0 is never found
    assert seeds_needed([1.0, 1.0], confidence=0.95) == 2
    assert seeds_needed([-10.0, 10.001], confidence=0.95) is None


def test_seeds_needed_has_the_power_it_promises() -> None:
    generator = rng(11)
    samples = generator.normal(loc=1.0, scale=1.0, size=(4000, 10))  # n = 10 for d = sd
    t = samples.mean(axis=1) / (samples.std(axis=1, ddof=1) / np.sqrt(10))
    assert 0.76 < (np.abs(t) > 2.262157).mean() < 0.84


# -- times to a target -----------------------------------------------------------------------------------------------------


def test_rollouts_to_target_between_measurements() -> None:
    assert rollouts_to_target([0, 10, 20], [0.2, 0.4, 0.8], 0.6) == TimeToTarget(15.0, True)
    assert rollouts_to_target([0, 10, 20], [0.2, 0.4, 0.5], 0.6) == TimeToTarget(20.0, False)
    assert rollouts_to_target([0, 10], [0.7, 0.9], 0.6) == TimeToTarget(0.0, True)
    assert rollouts_to_target([0, 10, 20], [0.25, float("nan"), 0.75], 0.5) == TimeToTarget(10.0, True)
    assert rollouts_to_target([0], [float("nan")], 0.5) is None


def test_kaplan_meier_by_hand() -> None:
    # 4 runs: event at 2 (4 at risk): 3/4; censored at 3; two events at 5 (2 at risk): 0
    times = [TimeToTarget(2, True), TimeToTarget(3, False), TimeToTarget(5, True), TimeToTarget(5, True)]
    at, survival = kaplan_meier(times)
    assert at.tolist() == [0, 2, 5] and survival.tolist() == [1.0, 0.75, 0.0]
    # area under it to 10: 2 * 1 + 3 * 0.75
    assert restricted_mean_time(times, 10) == pytest.approx(4.25)


def test_restricted_mean_is_the_mean_of_the_smaller_of_time_and_horizon() -> None:
    times = [TimeToTarget(4, True), TimeToTarget(8, True), TimeToTarget(10, False)]
    assert restricted_mean_time(times, 10) == pytest.approx((4 + 8 + 10) / 3)


def test_time_ratio_by_hand() -> None:
    a = [TimeToTarget(10, True), TimeToTarget(40, True)]
    b = [TimeToTarget(20, True), TimeToTarget(20, True)]
    found = time_ratio(a, b, 100, 0.95)
    # ratios 1/2 and 2: geometric mean 1; log sd = ln 2 * sqrt 2, se = ln 2, t(.975, 1) = 12.7062
    assert found.interval.estimate == pytest.approx(1.0)
    assert np.log(found.interval.high) == pytest.approx(12.7062 * np.log(2), rel=1e-4)


def test_time_ratio_with_censored_runs() -> None:
    never, soon = TimeToTarget(100, False), TimeToTarget(25, True)
    found = time_ratio([soon, soon, never], [never, TimeToTarget(50, True), never], 100, 0.95)
    # ratios 25/100 and 25/50; the third pair says nothing
    assert found.interval.estimate == pytest.approx(np.sqrt(0.25 * 0.5))
    assert (found.pairs, found.censored_first, found.censored_second) == (2, 1, 2)
    nothing = time_ratio([never], [never], 100, 0.95)
    assert nothing.interval.estimate is None and "no run" in nothing.interval.reason
    early = time_ratio(
        [TimeToTarget(30, False)], [soon], 100, 0.95
    )  # stopped at 30: it never got there, so it counts to the end
    assert early.interval.estimate == pytest.approx(4.0)
