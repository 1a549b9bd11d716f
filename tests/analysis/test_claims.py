"""Claims as data: validation of the file, verdicts on runs of known truth."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_factory import Truth, make_runs, make_study

from tepo_core.analysis.claims import Claim, combine, judge, judge_interval, load_claims
from tepo_core.analysis.metrics import METRICS
from tepo_core.analysis.statistics import Interval
from tepo_core.analysis.summaries import run_table
from tepo_core.config import ConfigError
from tepo_core.objectives.methods import PRESETS
from tepo_core.runs.read import load_runs

ROOT = Path(__file__).parents[2]


def claim(**changes) -> Claim:
    values = {
        "id": "x",
        "title": "t",
        "source": "s",
        "where": "w",
        "statement": "c",
        "test": "difference",
        "metric": "curve_mean",
        "methods": ["tepo"],
        "baselines": ["grpo"],
        "direction": "higher",
        "margin": 0.0,
        "profiles": ["quick"],
        "tells": "n",
    }
    return Claim.model_validate({**values, **changes})


@pytest.mark.parametrize(
    ("low", "high", "direction", "verdict"),
    [
        (0.01, 0.2, "higher", "PASS"),
        (-0.2, -0.01, "higher", "FAIL"),
        (-0.1, 0.1, "higher", "INCONCLUSIVE"),
        (0.01, 0.2, "lower", "FAIL"),
        (-0.2, -0.01, "lower", "PASS"),
        (0.0, 0.1, "higher", "INCONCLUSIVE"),
        (None, None, "higher", "INCONCLUSIVE"),
    ],
)
def test_verdict_of_an_interval(low, high, direction: str, verdict: str) -> None:
    assert judge_interval(Interval(0.0, low, high, 3), 0.0, direction) == verdict


def test_verdicts_combine() -> None:
    assert combine(["PASS", "PASS"]) == "PASS"
    assert combine(["PASS", "NOT TESTED"]) == "PASS"
    assert combine(["PASS", "INCONCLUSIVE"]) == "INCONCLUSIVE"
    assert combine(["PASS", "FAIL", "INCONCLUSIVE"]) == "FAIL"
    assert combine(["NOT TESTED"]) == combine([]) == "NOT TESTED"


def test_the_file_of_claims_is_valid_and_names_what_exists() -> None:
    claims = load_claims(ROOT / "claims.yaml")
    assert len(claims) >= 15
    variants = {"tepo_seq_mean", "tepo_kl_all", "mpo_k2", "mpo_k3"}
    for c in claims:
        assert set(c.methods) | set(c.baselines) <= set(PRESETS) | variants | {"base"}, c.id
        assert c.metric is None or c.metric in METRICS
    subjects = {
        "tepo-accuracy",
        "tepo-pass-at-k",
        "tepo-no-collapse",
        "tepo-half-the-time",
        "token-mean",
        "mask-against-none",
        "mask-against-all",
        "mpo-over-grpo",
        "mpo-k5",
        "entropy-law",
        "clip-higher-entropy",
        "cov-entropy",
        "base-at-large-k",
    }
    assert subjects <= {c.id for c in claims}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metric": "beauty"}, "metric = 'beauty' is unknown"),
        ({"direction": "sideways"}, "direction"),
        ({"test": "level"}, "a level test has none"),
        ({"baselines": []}, "need at least one"),
        ({"test": "ratio"}, "metric is not used by a ratio test"),
        ({"surprise": 1}, "unknown parameter"),
    ],
)
def test_a_faulty_claim_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    import json

    path = tmp_path / "claims.yaml"
    values = claim().model_dump() | change
    path.write_text(json.dumps({"format": 1, "claims": [values]}), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_claims(path)


def test_repeated_ids_bad_yaml_and_no_file(tmp_path: Path) -> None:
    import json

    path = tmp_path / "claims.yaml"
    path.write_text(json.dumps({"format": 1, "claims": [claim().model_dump()] * 2}), encoding="utf-8")
    with pytest.raises(ConfigError, match="'x' is used twice"):
        load_claims(path)
    path.write_text("claims: [", encoding="utf-8")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_claims(path)
    with pytest.raises(ConfigError, match="no such file"):
        load_claims(tmp_path / "none.yaml")


# -- verdicts on runs whose truth is known ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory):
    """tepo better and twice as fast, dapo worse, gspo the same as grpo up to noise; entropy kept: tepo 60 %, grpo 13 %."""
    root = tmp_path_factory.mktemp("claims")
    train = {"rollouts": 60, "validate_every": 2, "record_every": 30}
    study = make_study(tasks=["noise"], methods=["grpo", "tepo", "dapo", "gspo"], train=train, seeds=[0, 1, 2, 3])
    noise = {"noise": 0.004}
    make_runs(
        root,
        study,
        {
            "grpo": Truth(tau=20, entropy_start=0.4, entropy_end=0.05, **noise),
            "tepo": Truth(gain=0.6, tau=10, entropy_start=0.4, entropy_end=0.25, **noise),
            "dapo": Truth(gain=0.3, tau=20, **noise),
            "gspo": Truth(tau=20, **noise),
        },
    )
    runs = load_runs(study, root)
    return runs, run_table(runs, study), study


def verdict(known, **changes) -> str:
    runs, table, study = known
    return judge([claim(**changes)], table, runs, study)[0].verdict


def test_a_true_difference_passes_and_its_opposite_fails(known) -> None:
    assert verdict(known) == "PASS"
    assert verdict(known, methods=["dapo"]) == "FAIL"
    assert verdict(known, direction="lower") == "FAIL"
    assert verdict(known, methods=["gspo"]) == "INCONCLUSIVE"
    assert verdict(known, baselines=["grpo", "gspo", "dapo"]) == "PASS"
    assert verdict(known, methods=["tepo", "dapo"]) == "FAIL"


def test_a_margin_that_is_too_wide_is_not_met(known) -> None:
    assert verdict(known, margin=0.5) == "FAIL"


def test_levels(known) -> None:
    # entropy: log of a mixture, 10 rollouts in: tepo ends near 0.25 of 0.4, grpo near 0.05
    level = {"test": "level", "metric": "entropy_kept", "baselines": []}
    assert verdict(known, **level, margin=0.5) == "PASS"
    assert verdict(known, **level, methods=["grpo"], margin=0.5) == "FAIL"
    assert verdict(known, **level, methods=["tepo", "grpo"], margin=0.1) == "PASS"


def test_time_ratio_recovers_the_speed(known) -> None:
    """0.3 + 0.6 (1 - e^(-s/10)) reaches grpo's end, 0.3 + 0.5 (1 - e^(-60/20)) = 0.775, at s = 10 ln(0.6/0.125) = 15.7."""
    runs, table, study = known
    ratio = {"test": "ratio", "metric": None, "direction": "lower"}
    assert verdict(known, **ratio, margin=1.0) == "PASS"
    assert verdict(known, **ratio, margin=0.1) == "FAIL"
    found = judge([claim(**ratio, margin=0.5)], table, runs, study)[0].comparisons[0]
    assert found.effect == pytest.approx(15.7 / 60, abs=0.06)
    assert found.improvement == 1.0 and found.seeds == 4


def test_what_cannot_be_tested_says_why(known) -> None:
    runs, table, study = known
    (other,) = judge([claim(profiles=["paper-7b"])], table, runs, study)
    assert other.verdict == "NOT TESTED" and "profile quick cannot test it; able are: paper-7b" in other.reason
    (absent,) = judge([claim(baselines=["kl_cov"])], table, runs, study)
    assert absent.verdict == "NOT TESTED" and "kl_cov" in absent.reason
    (partly,) = judge([claim(baselines=["kl_cov", "grpo"])], table, runs, study)
    assert partly.verdict == "PASS" and partly.untested == ("kl_cov",)


def test_one_seed_tests_nothing(known) -> None:
    runs, table, study = known
    (found,) = judge([claim()], table[table["seed"] == 0], runs, study)
    assert found.verdict == "NOT TESTED" and "one seed" in found.reason


def test_problems_and_direction_of_the_probability(known) -> None:
    runs, table, study = known
    (higher,) = judge([claim(metric="accuracy")], table, runs, study)
    (lower,) = judge([claim(metric="accuracy", direction="lower")], table, runs, study)
    assert higher.comparisons[0].problems == 4 * 20  # every seed has its own
    assert higher.comparisons[0].improvement == pytest.approx(1 - lower.comparisons[0].improvement)
