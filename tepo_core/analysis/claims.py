"""Claims of the sources as data, and their verdicts.

PASS: the whole interval lies on the claimed side of the margin. FAIL: it lies wholly on the other side. INCONCLUSIVE: neither.
NOT TESTED: the profile cannot test it, or the runs it needs do not exist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import pandas as pd
from pydantic import ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from tepo_core.analysis.metrics import METRICS
from tepo_core.analysis.statistics import Interval, paired_improvement, time_ratio
from tepo_core.analysis.summaries import compare, level, primary_splits
from tepo_core.analysis.times import times_to
from tepo_core.config import ConfigError, Strict, Study, explain
from tepo_core.runs.folder import BASE
from tepo_core.runs.read import RunSet

PASS, FAIL, INCONCLUSIVE, NOT_TESTED = "PASS", "FAIL", "INCONCLUSIVE", "NOT TESTED"
VERDICTS = (PASS, FAIL, INCONCLUSIVE, NOT_TESTED)


class Claim(Strict):
    """One claim; the fields are explained at the head of claims.yaml."""

    id: str
    title: str
    source: str
    where: str
    statement: str
    test: Literal["difference", "ratio", "level"]
    metric: str | None = None
    methods: list[str]
    baselines: list[str] = []
    direction: Literal["higher", "lower"]
    margin: float
    profiles: list[str]
    tells: str

    @model_validator(mode="after")
    def _complete(self) -> Claim:
        if self.test == "ratio" and self.metric is not None:
            raise ValueError("metric is not used by a ratio test; leave it out")
        if self.test != "ratio" and self.metric not in METRICS:
            raise ValueError(f"metric = {self.metric!r} is unknown; allowed: {', '.join(METRICS)}")
        if (self.test == "level") == bool(self.baselines):
            raise ValueError("baselines: a level test has none, the other tests need at least one")
        if self.test == "ratio" and self.margin <= 0:
            raise ValueError(f"margin = {self.margin}: a ratio is compared with a positive number")
        return self


class Claims(Strict):
    """The whole of claims.yaml."""

    format: Literal[1]
    claims: list[Claim]

    @model_validator(mode="after")
    def _unique(self) -> Claims:
        ids = [claim.id for claim in self.claims]
        repeated = sorted({i for i in ids if ids.count(i) > 1})
        if repeated:
            raise ValueError(f"id {repeated[0]!r} is used twice")
        return self


def load_claims(path: Path) -> list[Claim]:
    """Read and validate claims.yaml. Raises :class:`ConfigError` naming the faulty field."""
    try:
        values = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; it lists the claims that the study tests") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    try:
        return Claims.model_validate(values).claims
    except ValidationError as error:
        raise ConfigError(explain(error, path.name)) from None


@dataclass(frozen=True)
class Comparison:
    """One comparison behind a verdict. effect is a difference, a ratio or a level, as the claim's test says."""

    task: str
    method: str
    baseline: str | None
    verdict: str
    effect: float | None
    low: float | None
    high: float | None
    seeds: int
    problems: int | None
    improvement: float | None
    seeds_needed: int | None
    reason: str


@dataclass(frozen=True)
class Verdict:
    """A claim with its verdict and the comparisons it rests on; ``reason`` in words."""

    claim: Claim
    verdict: str
    comparisons: tuple[Comparison, ...] = ()
    reason: str = ""
    untested: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict:
        """Plain mapping, for JSON."""
        return {
            **self.claim.model_dump(),
            "verdict": self.verdict,
            "reason": self.reason,
            "untested": list(self.untested),
            "comparisons": [asdict(c) for c in self.comparisons],
        }


def judge_interval(interval: Interval, margin: float, direction: str) -> str:
    """PASS, FAIL or INCONCLUSIVE; an interval that touches the margin decides nothing."""
    if not interval.known:
        return INCONCLUSIVE
    above, below = interval.low > margin, interval.high < margin
    if direction == "lower":
        above, below = below, above
    return PASS if above else FAIL if below else INCONCLUSIVE


def combine(verdicts: Sequence[str]) -> str:
    """All pass: PASS. One fails: FAIL. None tested: NOT TESTED. Otherwise INCONCLUSIVE; untested comparisons do not count."""
    tested = [v for v in verdicts if v != NOT_TESTED]
    if not tested:
        return NOT_TESTED
    if FAIL in tested:
        return FAIL
    return PASS if all(v == PASS for v in tested) else INCONCLUSIVE


def judge(claims: Sequence[Claim], table: pd.DataFrame, runs: RunSet, study: Study) -> list[Verdict]:
    """The verdict of every claim, in order. ``table``: :func:`tepo_core.analysis.summaries.run_table`."""
    return [_judge(claim, table, runs, study) for claim in claims]


def _judge(claim: Claim, table: pd.DataFrame, runs: RunSet, study: Study) -> Verdict:
    if study.profile not in claim.profiles:
        able = ", ".join(claim.profiles)
        return Verdict(claim, NOT_TESTED, reason=f"profile {study.profile} cannot test it; able are: {able}")
    present = [BASE, *runs.methods]
    methods = [m for m in claim.methods if m in present]
    baselines = [b for b in claim.baselines if b in present]
    missing = tuple(name for name in [*claim.methods, *claim.baselines] if name not in present)
    if not methods or (claim.baselines and not baselines):
        return Verdict(claim, NOT_TESTED, reason=f"this study has no {', '.join(missing)}", untested=missing)
    comparisons = []
    for task in runs.tasks:
        for method in methods:
            for baseline in baselines or [None]:
                if baseline != method:
                    comparisons.append(
                        _compare(claim, table, runs=runs, study=study, task=task, method=method, baseline=baseline)
                    )
    verdict = combine([c.verdict for c in comparisons])
    return Verdict(claim, verdict, tuple(comparisons), _reason(verdict, comparisons), missing)


def _compare(
    claim: Claim, table: pd.DataFrame, runs: RunSet, study: Study, task: str, method: str, baseline: str | None
) -> Comparison:
    confidence = study.analyse.confidence
    improvement = needed = None
    if claim.test == "level":
        interval = level(table, runs, task, method, claim.metric, confidence)
        seeds = interval.n
    elif claim.test == "difference":
        found = compare(table, runs, task=task, first=method, second=baseline, metric=claim.metric, confidence=confidence)
        interval, seeds, needed = found.interval, len(found.seeds), found.needed
        improvement = found.improvement
        if improvement is not None and claim.direction == "lower":
            improvement = 1 - improvement
    else:
        a, b, chosen, limit = times_to(runs, task, method, baseline, None)
        ratio = time_ratio(a, b, limit, confidence)
        interval, seeds = ratio.interval, len(chosen)
        improvement = paired_improvement([y.step - x.step for x, y in zip(a, b, strict=True)])
    verdict, reason = judge_interval(interval, claim.margin, claim.direction), interval.reason
    if not seeds:
        verdict, reason = NOT_TESTED, "not measured for both on the same seed" if baseline else "not measured"
    elif seeds < 2:
        verdict, reason = NOT_TESTED, "one seed gives no interval"
    return Comparison(
        task=task,
        method=method,
        baseline=baseline,
        verdict=verdict,
        effect=interval.estimate,
        low=interval.low,
        high=interval.high,
        seeds=seeds,
        problems=_problems(runs, task, method),
        improvement=improvement,
        seeds_needed=needed,
        reason=reason,
    )


def _problems(runs: RunSet, task: str, method: str) -> int | None:
    """Distinct held-out problems behind a method's numbers, over all seeds."""
    evaluated = runs.evaluated(task, method).values()
    ids = {(split, i) for e in evaluated for split in primary_splits(e) for i in e.counts(split)[0]}
    return len(ids) or None


def _reason(verdict: str, comparisons: Sequence[Comparison]) -> str:
    """Which comparisons decided."""
    groups = {
        v: [f"{c.method} against {c.baseline}" if c.baseline else c.method for c in comparisons if c.verdict == v]
        for v in VERDICTS
    }
    if verdict == NOT_TESTED:
        return "; ".join(dict.fromkeys(c.reason for c in comparisons))
    words = {PASS: "holds for", FAIL: "contradicted by", INCONCLUSIVE: "undecided for", NOT_TESTED: "not tested for"}
    return "; ".join(f"{words[v]} {', '.join(dict.fromkeys(names))}" for v, names in groups.items() if names)


def claims_table(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """One row a comparison (or a claim without any), for CSV."""
    rows = []
    for v in verdicts:
        for c in v.comparisons or [None]:
            row = {
                "claim": v.claim.id,
                "claim_verdict": v.verdict,
                "test": v.claim.test,
                "metric": v.claim.metric,
                "margin": v.claim.margin,
            }
            rows.append(row | (asdict(c) if c else {"verdict": v.verdict, "reason": v.reason}))
    return pd.DataFrame(rows)
