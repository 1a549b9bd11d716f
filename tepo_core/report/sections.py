"""Sections of the report that are neither figures nor the large tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from tepo_core.analysis.answer import between, number
from tepo_core.analysis.book import Book
from tepo_core.analysis.metrics import METRICS
from tepo_core.config import ARITHMETIC_TASKS, Study
from tepo_core.report.published import our_cells, published_table, read_published
from tepo_core.report.tables import Table, frame_table, interval_cell, text_cell
from tepo_core.tasks.data import data_folder

TASK_WORDS = {
    "facts": "chained arithmetic mod 10 with planted wrong facts that RL must correct from the final answer alone",
    "facts_hard": "the harder twin of facts: more planted wrong facts, right digits rarer, limited by exploration",
    "noise": "chains of sums that the base policy can do but often slips on; RL sharpens, it teaches nothing new",
}


def lead(study: Study, facts: dict[str, Any]) -> str:
    """What this study is and what it rests on, in a sentence or two."""
    tasks = "; ".join(f"{t}: {TASK_WORDS[t]}" if t in TASK_WORDS else t for t in facts["tasks"])
    seeds = len(study.seeds)
    methods = f"{len(study.methods)} method{'s' if len(study.methods) > 1 else ''}"
    words = f"Profile {study.profile}: {methods}, {seeds} seed{'s' if seeds > 1 else ''}, task {tasks}."
    if seeds < 2:
        return f"{words} With one seed there is no interval over seeds, and nothing can be concluded about methods."
    confidence = f"{100 * study.analyse.confidence:g} %"
    return words + (
        f" Brackets after levels and gains: {confidence} hierarchical bootstrap over seeds and problems, "
        "too narrow where few seeds "
        f"differ much. Brackets after differences between methods: {confidence} t interval over seeds, "
        "paired; it decides verdicts."
    )


def claim_views(claims: list[dict]) -> list[dict]:
    """Claims for the page: effect texts, verdict as a CSS class."""
    views = []
    for claim in claims:
        digits = 2 if claim["test"] == "ratio" else 3
        sign = claim["test"] == "difference"
        comparisons = []
        for c in claim["comparisons"]:
            against = f"{c['method']} against {c['baseline']}" if c["baseline"] else c["method"]
            comparisons.append(
                {
                    "what": against,
                    "task": c["task"],
                    "verdict": c["verdict"],
                    "css": css(c["verdict"]),
                    "seeds": c["seeds"],
                    "effect": number(c["effect"], digits, sign=sign) + between(c["low"], c["high"], digits, sign=sign),
                    "improvement": number(c["improvement"], 2),
                    "needed": c["seeds_needed"] or "–",
                    "problems": c["problems"] or "–",
                    "reason": c["reason"],
                }
            )
        unit = {
            "ratio": "rollouts to the baseline's final accuracy, method over baseline",
            "level": "value",
            "difference": "difference",
        }
        metric = METRICS[claim["metric"]].label if claim["metric"] else "time ratio"
        views.append(
            {
                **claim,
                "css": css(claim["verdict"]),
                "views": comparisons,
                "metric_label": metric,
                "unit": unit[claim["test"]],
                "margin_text": number(claim["margin"], 3),
            }
        )
    return views


def css(verdict: str) -> str:
    """Verdict as a class name."""
    return verdict.lower().replace(" ", "-")


def count_verdicts(claims: list[dict]) -> list[tuple[str, str, int]]:
    """(verdict, class, number) in a fixed order."""
    return [(v, css(v), sum(c["verdict"] == v for c in claims)) for v in ("PASS", "FAIL", "INCONCLUSIVE", "NOT TESTED")]


def sensitivity(book: Book, study: Study) -> list[Table]:
    """What each unstated choice of the papers changes: every variant against the preset it varies, paired by seed."""
    out = []
    for preset in dict.fromkeys(book.presets[m] for m in book.methods if m in study.variants):
        variants = [m for m in book.methods if m in study.variants and book.presets[m] == preset and m != preset]
        if preset not in book.methods or not variants:
            continue
        note = (
            f"Each row changes the named options of {preset} and nothing else; "
            f"differences are variant minus {preset}, paired by seed."
        )
        columns = [
            ("task", ""),
            ("variant", ""),
            ("changed", ""),
            *((METRICS[m].label, METRICS[m].meaning) for m in SENSITIVITY),
        ]
        table = Table(f"sensitivity-{preset}", f"Choices in {preset}", note, columns)
        for task in book.tasks:
            for variant in variants:
                changed = {k: v for k, v in study.variants[variant].items() if k != "preset"}
                cells = [text_cell(task), text_cell(variant), text_cell(json.dumps(changed).replace('"', ""))]
                for metric in SENSITIVITY:
                    found = book.pair(task, variant, preset, metric)
                    both = {} if found is None else {"x": found["estimate"], "x_low": found["low"], "x_high": found["high"]}
                    cells.append(interval_cell(both, "x", sign=True, better=METRICS[metric].better))
                table.rows.append(cells)
        out.append(table)
    return out


OUTCOMES = ("accuracy", "curve_mean", "pass_max", "entropy_kept")
SENSITIVITY = (*OUTCOMES, "clip", "mask")


def chance_note(book: Book, study: Study) -> str:
    """How many of the intervals of outcomes exclude 0, and how many would if no choice mattered; empty without variants."""
    pairs = [
        book.pair(task, method, book.presets[method], metric)
        for task in book.tasks
        for method in book.methods
        if method in study.variants and book.presets[method] in book.methods and book.presets[method] != method
        for metric in OUTCOMES
    ]
    known = [p for p in pairs if p is not None and not pd.isna(p["low"])]
    if not known:
        return ""
    apart = sum(p["low"] > 0 or p["high"] < 0 for p in known)
    expected = (1 - study.analyse.confidence) * len(known)
    return (
        f"Of the {len(known)} intervals of accuracy, mean of the curve, pass@k and entropy kept, {apart} exclude 0; "
        f"about {expected:.0f} would if no choice mattered."
    )


def paper_table(root: Path, book: Book) -> Table | None:
    """Published cells beside ours, where the study has the same problem set; never mixed. ``None`` without a table of
    published numbers."""
    path = root / "data" / "published.yaml"
    if not path.is_file():
        return None
    frame = published_table(read_published(path), our_cells(root / "runs" / "evaluate"))
    words = ["method", "whose", "model", "source", "confidence"]
    frame[words] = frame[words].fillna("")
    note = (
        "In per cent, as published; ours appear only where the same problem set was evaluated, on a row "
        "of their own. The mean "
        "is recomputed from the cells and is not always the average that a paper prints."
    )
    return frame_table("paper", "Papers' numbers", note, frame, digits=2)


def data_tables(root: Path, study: Study) -> list[Table]:
    """Problem sets with counts, and what they share with training, counted from the prepared files."""
    counts, overlaps = [], []
    for task in study.tasks:
        for seed in study.seeds:
            folder = data_folder(root, task, seed)
            if not (folder / "manifest.json").is_file():
                continue
            manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            counts.append({"data set": folder.name, **manifest.get("counts", {}), **manifest.get("notes", {})})
            overlaps += contamination(folder, task, seed)
    out = []
    if counts:
        out.append(frame_table("data", "Problem sets", "Problems per split, as prepared.", pd.DataFrame(counts)))
    if overlaps:
        note = (
            "Prompts of each held-out split that also occur in training data, counted from the files. "
            "Zero is what the split by checksum promises."
        )
        out.append(frame_table("contamination", "Contamination", note, pd.DataFrame(overlaps)))
    return out


def contamination(folder: Path, task: str, seed: int) -> list[dict]:
    """Overlap of held-out splits with RL and warm-up prompts; for benchmark sets the table that ``prepare`` wrote."""
    written = folder / "contamination.json"
    if written.is_file():
        rows = json.loads(written.read_text(encoding="utf-8"))
        return [{"data set": folder.name, **row} for row in rows] if isinstance(rows, list) else []
    if task not in ARITHMETIC_TASKS:
        return []
    prompts = {s: read_prompts(folder / f"{s}.jsonl") for s in ("train", "warmup", "validation", "test", "long")}
    rows = []
    for split in ("validation", "test", "long"):
        if prompts[split]:
            rows.append(
                {
                    "data set": folder.name,
                    "split": split,
                    "problems": len(prompts[split]),
                    "also in RL training": len(prompts[split] & prompts["train"]),
                    "also in warm-up": len(prompts[split] & prompts["warmup"]),
                }
            )
    return rows


def read_prompts(path: Path) -> set[str]:
    """Prompts of a prepared file; empty where there is none."""
    if not path.is_file():
        return set()
    with path.open(encoding="utf-8") as lines:
        return {json.loads(line)["prompt"] for line in lines}


def setting_rows(study: Study) -> list[tuple[str, list[tuple[str, str]]]]:
    """Every parameter, grouped as in params.yaml."""
    values = study.model_dump(mode="json")
    values["policy"] |= {f"tiny.{k}": v for k, v in values["policy"].pop("tiny").items()}
    top = [(k, show(v)) for k, v in values.items() if not isinstance(v, dict)]
    groups = [
        (k, [(name, show(v)) for name, v in group.items()]) for k, group in values.items() if isinstance(group, dict) and group
    ]
    return [("study", top), *groups]


def show(value: Any) -> str:
    """A parameter as it would be written in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value) if isinstance(value, (list, dict)) else str(value)


def provenance_rows(provenance: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Provenance as groups of rows; what is unknown says so."""

    def shown(value: Any) -> str:
        if value is None:
            return "unknown"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, list):
            return ", ".join(map(str, value)) or "none"
        return str(value)

    groups = []
    for name, value in provenance.items():
        if isinstance(value, dict):
            rows = [(k, f"{v:.1f} s" if name == "wall_times" else shown(v)) for k, v in value.items()]
            groups.append((name.replace("_", " "), rows or [("recorded", "nothing")]))
        else:
            groups.append((name.replace("_", " "), [("hash", shown(value))]))
    return groups


def checklist(study: Study, facts: dict[str, Any], claims: list[dict], book: Book) -> list[tuple[str, str, str]]:
    """(state, item, detail): what a careful reader would ask, answered from the data. state: yes, no or part."""
    used = book.tables["runs"]
    trained = used[used["reward_end"].notna()]
    declared = len(study.tasks) * len(study.methods) * len(study.seeds)
    ours = trained[trained["method"].isin(study.methods)]
    missing = sum(f["kind"] in ("missing", "broken") for f in facts["findings"])
    versions = {k: v for k, v in facts["versions"].items() if len(v) > 1}
    seeds = len(study.seeds)
    items = [
        (
            "yes" if len(ours) == declared else "no",
            "All declared runs are in",
            f"{len(ours)} of {declared}; {missing} missing or broken parts",
        ),
        (
            "yes" if seeds >= 5 else "part" if seeds >= 2 else "no",
            "Several seeds",
            f"{seeds}; each draws its own base policy, problems and RL randomness",
        ),
        (
            "yes" if seeds >= 2 else "no",
            "Intervals on every comparison",
            "t intervals over seeds, paired" if seeds >= 2 else "one seed: none",
        ),
        ("yes", "Every seed is shown", "as points in the figures and rows in the table of runs"),
        (
            "yes" if not versions else "part",
            "One set of package versions",
            ", ".join(f"{k}: {' and '.join(v)}" for k, v in versions.items()) or "yes",
        ),
        ("yes", "Same learning rate, batch and data for all methods", overrides(study)),
        (
            "no",
            "Hyperparameters tuned per method",
            "one setting for all; a method that needs another learning rate is at a disadvantage",
        ),
        (
            "no",
            "Corrected for the number of claims",
            f"{sum(c['verdict'] != 'NOT TESTED' for c in claims)} claims tested at {100 * study.analyse.confidence:g} % each",
        ),
        ("yes" if facts["evidence"] else "no", "A profile meant as evidence", f"profile {study.profile}"),
    ]
    return items


def overrides(study: Study) -> str:
    """Which variants change training parameters."""
    found = [f"{name}: {', '.join(v['train'])}" for name, v in study.variants.items() if v.get("train")]
    return "apart from " + "; ".join(found) if found else "no variant changes them"
