"""The arithmetic tasks: solutions, planted facts, disjoint splits, kinds of tokens."""

import json
import math

import pytest

from tepo_core.config import parse_study
from tepo_core.tasks import arithmetic
from tepo_core.tasks.data import load_facts, load_split
from tepo_core.tasks.prepare import prepare
from tepo_core.tasks.problem import DataError, read_problems
from tepo_core.tasks.tokenizer import build_tokenizer

SMALL = {"train_size": 60, "validation_size": 20, "test_size": 30, "long_size": 10, "warmup_size": 200}


def small_study(**changes):
    values = {"profile": "test", "tasks": ["facts"], "methods": ["grpo"], "seeds": [0], "data": SMALL, **changes}
    return parse_study(values)


def test_solution_by_hand():
    # 6+3 = 9, 9+2 = 11 -> 1, 1-8 = -7 -> 3, 3-3 = 0 (all mod 10)
    digits, signs = [6, 3, 2, 8, 3], ["+", "+", "-", "-"]
    assert arithmetic.prompt_of(digits, signs) == "6+3+2-8-3="
    results = arithmetic.true_results("facts", digits, signs)
    assert results == [9, 1, 3, 0]
    assert arithmetic.trace(digits, signs, results) == "6+3=9+2=1-8=3-3=0\\boxed{0}"
    assert arithmetic.true_results("noise", digits, signs) == [9, 11, 3, 0]


@pytest.mark.parametrize(("task", "count", "low", "high"), [("facts", 54, 0.005, 0.3), ("facts_hard", 63, 0.002, 0.2)])
def test_planted_facts_are_equally_hard_for_every_seed(task, count, low, high):
    plans = [arithmetic.plant_facts(task, seed) for seed in range(20)]
    levels = [sorted(f.p_right for f in plan.values() if f.bad) for plan in plans]
    # mid-quantiles of log-uniform [low, high]: equal steps of the logarithm, half a step from either end
    step = math.log(high / low) / count
    assert levels[0] == pytest.approx([low * math.exp(step * (i + 0.5)) for i in range(count)])
    assert all(level == levels[0] for level in levels)
    assert len({tuple(f.key for f in plan.values() if f.bad) for plan in plans}) == 20  # which ones is the seed's affair
    facts = [f for plan in plans for f in plan.values()]
    assert len(facts) == 20 * 180 and all(f.wrong != f.truth for f in facts)
    assert all(f.p_right == 1 for f in facts if not f.bad)
    times_bad = [sum(plan[key].bad for plan in plans) for key in plans[0]]
    # each fact is bad in 20 x count/180 seeds on average; binomial, within 4.5 standard deviations
    share = count / 180
    assert max(abs(n - 20 * share) for n in times_bad) < 4.5 * (20 * share * (1 - share)) ** 0.5


def test_warmup_shows_right_digit_with_planted_probability():
    facts = arithmetic.plant_facts("facts", 3)
    shown, right = {}, {}
    for _, response in arithmetic.warmup_traces("facts", 3, 20000, facts):
        tokens = arithmetic.TOKEN.findall(response)
        for token, (_, key) in zip(tokens, arithmetic.token_kinds(tokens, facts), strict=True):
            if key and facts[key].bad:
                shown[key] = shown.get(key, 0) + 1
                right[key] = right.get(key, 0) + (int(token) == facts[key].truth)
    expected = sum(facts[k].p_right * n for k, n in shown.items())
    # Poisson-like sum over bad facts: within 5 standard deviations
    assert abs(sum(right.values()) - expected) < 5 * expected**0.5


def test_splits_are_disjoint_also_between_seeds(tmp_path):
    prepared = prepare(small_study(seeds=[0, 1]), tmp_path)
    prompts = {"train": set(), "validation": set(), "test": set()}
    for name in prepared.manifests:
        for split in ("train", "warmup"):
            prompts["train"] |= {p.prompt for p in load_split(tmp_path / "data/prepared" / name, split)}
        for split, group in (("validation", "validation"), ("test", "test"), ("long", "test")):
            prompts[group] |= {p.prompt for p in load_split(tmp_path / "data/prepared" / name, split)}
    assert not prompts["train"] & prompts["validation"]
    assert not prompts["train"] & prompts["test"]
    assert not prompts["validation"] & prompts["test"]


@pytest.mark.parametrize("task", ["facts", "facts_hard", "noise"])
def test_every_task_prepares_problems_whose_answer_is_the_sum(tmp_path, task):
    prepare(small_study(tasks=[task]), tmp_path)
    folder = tmp_path / "data/prepared" / f"{task}-s0"
    for split, size in (("train", 60), ("test", 30), ("long", 10)):
        problems = load_split(folder, split)
        assert len(problems) == size == len({p.prompt for p in problems})
        for problem in problems:
            value = eval(problem.prompt.rstrip("="))  # the prompt is plain arithmetic
            assert problem.answer == str(value if task == "noise" else value % 10)
    facts = load_facts(folder)
    steps = [s for p in load_split(folder, "train") for s in p.meta["steps"]]
    assert all(s["bad"] == facts[s["step"].split("=")[0]].bad for s in steps) if facts else not any(s["bad"] for s in steps)


def test_prepare_is_deterministic(tmp_path):
    first = prepare(small_study(), tmp_path / "a").manifests
    assert first == prepare(small_study(), tmp_path / "b").manifests
    other = prepare(small_study(seeds=[7]), tmp_path / "c").manifests
    assert first["facts-s0"]["sha256"]["train.jsonl"] != other["facts-s7"]["sha256"]["train.jsonl"]


def test_token_kinds_by_hand():
    facts = {
        "6+3": arithmetic.Fact("6+3", 9, True, 0.1, 4),
        "9+2": arithmetic.Fact("9+2", 1, False, 1.0, 5),
        "4+2": arithmetic.Fact("4+2", 6, True, 0.1, 5),
    }
    tokens = arithmetic.TOKEN.findall("6+3=9+2=1\\boxed{1}") + ["<eos>"]
    kinds = [kind[0] for kind, _ in arithmetic.token_kinds(tokens, facts)]
    # 6 + 3 copied, = format, 9 decisive (6+3 is bad), + 2 copied, = format, 1 digit (9+2 is good), box, copied 1, }, eos
    assert "".join(kinds) == "ccc" + "f" + "d" + "cc" + "f" + "d" + "f" + "c" + "ff"
    named = arithmetic.token_kinds(tokens, facts)
    assert named[4] == ("decisive", "6+3") and named[8] == ("digit", "9+2")
    # a wrong 4 leads to the fact 4+2, which is bad, whatever the true chain is
    wrong = arithmetic.token_kinds(arithmetic.TOKEN.findall("6+3=4+2=6"), facts)
    assert wrong[8] == ("decisive", "4+2")
    # an answer without steps is computed, not copied
    assert arithmetic.token_kinds(["\\boxed{", "1", "}"], facts) == [("format", None), ("digit", None), ("format", None)]
    # negative running values of the noise task
    noise = arithmetic.token_kinds(list("3-8=-5+2=-3"), {})
    assert [k for k, _ in noise] == ["copied"] * 3 + ["format"] + ["decisive"] * 2 + ["copied"] * 2 + ["format"] + [
        "decisive"
    ] * 2


def test_tokenizer_round_trip():
    tokenizer = build_tokenizer()
    text = "6+3=9-8=1\\boxed{1}"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == 12 and tokenizer.decode(ids) == text
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer("x")["input_ids"] == [tokenizer.unk_token_id]


def test_damaged_changed_or_missing_data_is_refused(tmp_path):
    prepare(small_study(), tmp_path)
    folder = tmp_path / "data/prepared/facts-s0"
    path = folder / "test.jsonl"
    original = path.read_text()
    path.write_text(original[:-20])
    with pytest.raises(DataError, match=r"test.jsonl, line 30: .*damaged"):
        read_problems(path)
    lines = original.splitlines()
    changed = json.loads(lines[0]) | {"answer": "5" if json.loads(lines[0])["answer"] != "5" else "6"}
    path.write_text("\n".join([json.dumps(changed), *lines[1:]]) + "\n")
    with pytest.raises(DataError, match="changed since 'prepare'"):
        load_split(folder, "test")
    path.unlink()
    with pytest.raises(DataError, match="no such data file"):
        load_split(folder, "test")
    with pytest.raises(DataError, match="no split 'tset'; allowed: long, test, train, validation, warmup"):
        load_split(folder, "tset")
    path.write_text("")
    with pytest.raises(DataError, match="empty"):
        read_problems(path)
