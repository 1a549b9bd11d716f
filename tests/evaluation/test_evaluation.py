"""Evaluation with a scripted engine (every number known by hand) and with the real sampler on a tiny model."""

import json

import numpy as np
import pyarrow as pa
import pytest
from scripted import CONFIG, PROBLEMS, TABLE, TOKENIZER, Script, box

from tepo_core.config import ConfigError, Evaluate, parse_study
from tepo_core.evaluation.samples import (
    Settings,
    average_of_cells,
    describe,
    evaluate_policy,
    headline,
    read_samples,
    regrade,
    settings_for,
    summarise,
    write_evaluation,
)
from tepo_core.grading.exact import ExactGrader
from tepo_core.grading.types import Grade, Outcome
from tepo_core.tasks.problem import DataError, Problem


def run(problems=PROBLEMS, config=CONFIG, **options):
    engine = Script(TABLE)
    return engine, evaluate_policy(engine, TOKENIZER, {"test": problems}, ExactGrader(), config, ("run", 0), **options)


def test_samples_and_summary_by_hand():
    engine, samples = run()
    assert samples.column("sample").to_pylist() == [-1, 0, 1, 2, 3] * 2
    assert samples.column("outcome").to_pylist() == [
        "correct", "correct", "correct", "wrong", "truncated", "wrong", "wrong", "wrong", "no_answer", "correct",
    ]  # fmt: skip
    assert samples.column("token_ids")[0].as_py() == TOKENIZER("\\boxed{2}")["input_ids"] + [TOKENIZER.eos_token_id]
    assert samples.column("logprob_sum")[0].as_py() == pytest.approx(-0.5 * 4)
    test = summarise(samples, [1, 2, 4])["splits"]["test"]
    assert (test["problems"], test["samples"], test["avg"], test["greedy"]) == (2, 4, 3 / 8, 1 / 2)
    assert test["pass@k"] == {"1": 3 / 8, "2": pytest.approx((5 / 6 + 1 / 2) / 2), "4": 1.0}
    # a: two votes for 2, one for 3, the truncated sample is silent -> right. b: 5 twice beats 4 once.
    assert test["maj@k"]["4"] == 0.5
    # a, pairs: both 2 (1), 2+3 tied (2 pairs, 1/2), 2+silent (2 pairs, 1), 3+silent (0) = 4/6
    # b, pairs: 4+5 tied (2 pairs, 1/2), 4+silent (1), the other three wrong = 2/6
    assert test["maj@k"]["2"] == pytest.approx(0.5)
    assert test["format_rate"] == 7 / 8 and test["truncation_rate"] == 1 / 8
    lengths = [4, 4, 4, 3, 4, 4, 2, 4]
    assert test["mean_length"] == pytest.approx(np.mean(lengths))
    weights = np.array([1, 2, 3, 4] * 2) * 0.25
    assert test["entropy"] == pytest.approx(np.dot(weights, lengths) / sum(lengths))
    assert test["per_problem"] == {"id": ["a", "b"], "correct": [2, 1], "greedy": [1, 0]}
    assert test["outcomes"] == {"correct": 3, "wrong": 3, "no_answer": 1, "truncated": 1, "timeout": 0, "error": 0}


def test_seed_of_a_problem_depends_on_its_id_not_its_neighbours():
    engine, _ = run()
    other, _ = run(problems=PROBLEMS[::-1])
    sampled = [call for call in engine.calls if call[1] == 4]
    assert sampled[0][3] == other.calls[-1][3][::-1] and len(set(sampled[0][3])) == 2


def test_batches_change_nothing_and_report_progress():
    seen = []
    _, together = run()
    engine, apart = run(rows_at_once=4, progress=lambda done, total, split: seen.append((done, total, split)))
    assert together.equals(apart)
    assert seen == [(2, 10, "test"), (6, 10, "test"), (10, 10, "test")]


def test_prompts_beyond_the_context_are_counted_and_never_cut():
    table = {**TABLE, "1+1+1+1+1+1=": TABLE["1+1="]}
    problems = [*PROBLEMS, Problem("long", "1+1+1+1+1+1=", "6", "test")]
    engine = Script(table)
    samples = evaluate_policy(engine, TOKENIZER, {"test": problems}, ExactGrader(), CONFIG, ("x",), context=12)
    test = summarise(samples, [1])["splits"]["test"]
    assert test["prompts_too_long"] == 1 and test["outcomes"]["error"] == 4 and test["problems"] == 3
    assert test["avg"] == 3 / 12  # the problem that could not be asked stays in the denominator
    assert {params.max_new_tokens for _, _, params, _ in engine.calls} == {8}  # 12 - 4 tokens of the prompt


def test_regrading_needs_no_engine():
    class Generous:
        def grade(self, *, golds, responses, truncated):
            return [Grade(Outcome.TRUNCATED if t else Outcome.CORRECT, g) for g, t in zip(golds, truncated, strict=True)]

        def close(self): ...

    _, samples = run()
    again = regrade(samples, Generous())
    assert summarise(again, [1])["splits"]["test"]["avg"] == 7 / 8
    assert regrade(again, ExactGrader()).equals(samples)
    assert regrade(samples, {"other": Generous()}).equals(samples)


def test_files_round_trip_byte_for_byte(tmp_path):
    _, samples = run()
    summary = summarise(samples, [1, 4], describe({"test": settings_for(CONFIG, "test")}))
    for name in ("one", "two"):
        write_evaluation(tmp_path / name, samples, summary, {"format": 1})
    assert read_samples(tmp_path / "one").equals(samples)
    for file in ("samples.parquet", "summary.json", "done.json", "config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    done = json.loads((tmp_path / "one" / "done.json").read_text())
    assert done["ok"] is True and sorted(done["files"]) == ["config.json", "samples.parquet", "summary.json"]


def test_damaged_files_are_named(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_samples(tmp_path)
    (tmp_path / "samples.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="not a parquet file"):
        read_samples(tmp_path)
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"split": ["test"]}), tmp_path / "samples.parquet")
    with pytest.raises(DataError, match="'problem_id' is missing"):
        read_samples(tmp_path)


def test_paper_protocol_samples_aime_and_amc_and_takes_the_rest_greedy():
    table = {"1+1=": [(box(2), True)] * 33}
    splits = {name: [Problem("a", "1+1=", "2", name)] for name in ("aime24", "math500")}
    engine = Script(table)
    samples = evaluate_policy(engine, TOKENIZER, splits, ExactGrader(), CONFIG.model_copy(update={"protocol": "paper"}), ("x",))
    summary = summarise(samples, {"aime24": [1, 32], "math500": []})
    assert headline(summary) == {
        "aime24": {"metric": "avg@32", "value": 1.0},
        "math500": {"metric": "greedy", "value": 1.0},
    }
    assert summary["splits"]["math500"]["pass@k"] == {} and summary["splits"]["aime24"]["greedy"] is None
    assert [(n, p.temperature, p.greedy) for _, n, p, _ in engine.calls] == [(32, 0.6, False), (1, 1.0, True)]


@pytest.mark.parametrize(
    "values, message",
    [
        ({"samples": 0, "greedy": False}, "nothing to sample"),
        ({"samples": 4, "temperature": 0.0}, "set greedy = true"),
        ({"samples": 4, "k": (8,)}, "larger than n = 4"),
        ({"samples": 4, "k": ()}, "k is empty"),
        ({"samples": 4, "k": (2, 1)}, "sorted"),
    ],
)
def test_bad_settings_say_what_to_do(values, message):
    base = {"samples": 4, "k": (1,), "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 8, "greedy": True}
    with pytest.raises(ValueError, match=message):
        Settings(**{**base, **values})


def test_bad_problem_sets_are_refused_before_sampling():
    engine = Script(TABLE)
    for problems, message in [
        ([], "has no problems"),
        ([PROBLEMS[0], PROBLEMS[0]], "'a' occurs twice"),
        ([Problem("a", "1+1=", " ", "test")], "answer is empty"),
    ]:
        with pytest.raises(DataError, match=message):
            evaluate_policy(engine, TOKENIZER, {"test": problems}, ExactGrader(), CONFIG, ("x",))
    assert not engine.calls


def test_cut_sample_files_and_impossible_k_are_refused():
    _, samples = run()
    with pytest.raises(DataError, match="between 3 and 4 samples"):
        summarise(samples.slice(0, len(samples) - 1), [1])
    with pytest.raises(ValueError, match="k = 8 is larger than n = 4"):
        summarise(samples, [8])
    with pytest.raises(DataError, match="no samples"):
        summarise(samples.slice(0, 0), [1])


def test_average_is_recomputed_from_cells():
    # GRPO on Qwen2.5-7B, arXiv 2505.22617: the paper prints 38.6
    assert average_of_cells([21.2, 9.6, 58.7, 78.8, 27.9, 40.7, 36.7]) == pytest.approx(39.0857, abs=1e-4)
    with pytest.raises(ValueError, match="no cells"):
        average_of_cells([])


def test_real_sampler_on_a_tiny_model():
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tepo_core.rollout.transformers_engine import TransformersEngine

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(TOKENIZER), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            head_dim=8, intermediate_size=32, max_position_embeddings=64,
        )
    )  # fmt: skip
    engine = TransformersEngine(model, pad_id=TOKENIZER.pad_token_id, eos_ids=[TOKENIZER.eos_token_id])
    config = Evaluate(splits=["test"], samples=8, k=[1, 8], max_new_tokens=6)
    runs = [
        evaluate_policy(engine, TOKENIZER, {"test": PROBLEMS}, ExactGrader(), config, ("seed", 1), rows_at_once=rows)
        for rows in (4096, 8)
    ]
    assert runs[0].drop(["logprob_sum", "entropy_mean"]).equals(runs[1].drop(["logprob_sum", "entropy_mean"]))
    summary = summarise(runs[0], [1, 8])["splits"]["test"]
    assert summary["entropy"] == pytest.approx(np.log(len(TOKENIZER)), rel=0.05)  # untrained: nearly uniform
    assert 0 < summary["mean_length"] <= 6


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0}, "evaluate.temperature = 0: at temperature 0 all samples .* 'greedy: true'"),
        ({"samples": 0}, "evaluate.samples = 0"),
        ({"k": []}, "evaluate.k"),
        ({"k": [8, 1]}, "must be sorted"),
        ({"k": [32]}, "larger than samples = 16"),
    ],
)
def test_bad_parameters_are_named(values, message):
    study = {"profile": "x", "tasks": ["facts"], "methods": ["grpo"], "seeds": [0], "evaluate": values}
    with pytest.raises(ConfigError, match=message):
        parse_study(study)
