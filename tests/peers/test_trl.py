"""Parity with TRL 1.16.0 on random inputs, expected discrepancies, and a real training run through the adapter."""

from __future__ import annotations

import copy
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("trl", reason="run by tests/peers/run.sh trl, in an environment of its own")
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from tepo_core.config import ConfigError
from tepo_core.integrations.trl import StudyGRPOTrainer
from tepo_core.objectives.invariance import chunks, minibatch_gradient, random_batch, relative_error
from tepo_core.objectives.methods import MiniBatchTotals, TokenBatch, resolve

pytestmark = pytest.mark.peers
RTOL = 1e-5
SETTINGS = {  # our preset -> TRL's loss_type and settings
    "grpo": ("grpo", {}),
    "dr_grpo": ("dr_grpo", {}),
    "dapo": ("dapo", {"epsilon_high": 0.28}),
    "gspo": ("grpo", {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}),
    "tepo": ("dapo", {"importance_sampling_level": "sequence"}),
    "sapo": ("sapo", {}),
    # epsilon_high of TRL's cispo is the ceiling itself, not its distance from 1
    "cispo": ("cispo", {"epsilon_high": 1.28}),
}


def plain_batch(name: str, **changes) -> TokenBatch:
    full = random_batch(resolve(name), **{"responses": 24, "longest": 100, "dtype": torch.float32, **changes})
    return TokenBatch(
        full.logprobs_BT, full.old_logprobs_BT, full.mask_BT, full.advantages_BT, ref_logprobs_BT=full.ref_logprobs_BT
    )


class FakeTrainer(SimpleNamespace):
    """What ``GRPOTrainer._compute_loss`` reads of its trainer, with our log-probs in place of a model's."""

    def _get_per_token_logps_and_entropies(self, model, ids, attention, keep, **options):
        return model, torch.zeros_like(model), None


def trl_gradient(
    name: str, batch: TokenBatch, parts=None, beta: float = 0.0, bias_correction: bool = False
) -> tuple[float, torch.Tensor]:
    """Loss and gradient of TRL's own ``_compute_loss``, backward per micro-batch."""
    loss_type, settings = SETTINGS[name]
    parts = parts or [torch.arange(len(batch.mask_BT))]
    args = SimpleNamespace(
        delta=None,
        use_bias_correction_kl=bias_correction,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        steps_per_generation=len(parts),
    )
    attributes = {
        "loss_type": loss_type,
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": beta,
        "args": args,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "_entropy_bonus_enabled": False,
        "current_gradient_accumulation_steps": len(parts),
        "max_completion_length": batch.mask_BT.shape[1],
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        "_metrics": {"train": defaultdict(list)},
        **settings,
    }
    leaf_BT, total = batch.logprobs_BT.detach().clone().requires_grad_(), 0.0
    for rows in parts:
        mask_BT = batch.mask_BT[rows].long()
        inputs = {
            "prompt_ids": mask_BT[:, :1],
            "prompt_mask": mask_BT[:, :1],
            "completion_ids": mask_BT,
            "completion_mask": mask_BT,
            "advantages": batch.advantages_BT[rows, 0],
            "old_per_token_logps": batch.old_logprobs_BT[rows],
            "ref_per_token_logps": batch.ref_logprobs_BT[rows],
            "num_items_in_batch": batch.mask_BT.sum(),
        }
        loss = GRPOTrainer._compute_loss(FakeTrainer(**attributes), leaf_BT[rows], inputs)
        loss.backward()
        total += loss.item()
    return total, leaf_BT.grad


@pytest.mark.parametrize("parts", [None, 6])
@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradient(name, parts):
    batch = plain_batch(name)
    split = chunks(24, parts) if parts else None
    totals = MiniBatchTotals.from_mask(batch.mask_BT, constant=100.0)
    loss, gradients = minibatch_gradient(resolve(name), batch, split, totals)
    trl_loss, trl_grad = trl_gradient(name, batch, split)
    assert float(loss) == pytest.approx(trl_loss, rel=RTOL, abs=1e-7)
    assert relative_error({"g": gradients["logprobs_BT"]}, {"g": trl_grad}) <= RTOL


@pytest.mark.parametrize("sampling", ["weighted", "unweighted"])
def test_reference_penalty(sampling):
    """kl.sampling: weighted is TRL's use_bias_correction_kl (its default), r k3 with r differentiated; unweighted is without."""
    batch = plain_batch("grpo")
    method = resolve("x", {"x": {"preset": "grpo", "kl": {"estimator": "k3", "beta": 0.04, "sampling": sampling}}})
    loss, gradients = minibatch_gradient(method, batch)
    trl_loss, trl_grad = trl_gradient("grpo", batch, beta=0.04, bias_correction=sampling == "weighted")
    assert float(loss) == pytest.approx(trl_loss, rel=RTOL)
    assert relative_error({"g": gradients["logprobs_BT"]}, {"g": trl_grad}) <= RTOL


def test_defaults_of_the_penalty_agree():
    """Both weigh by default: whoever changes the default is noticed here."""
    assert GRPOConfig.__dataclass_fields__["use_bias_correction_kl"].default is True
    assert resolve("x", {"x": {"preset": "grpo", "kl": {"beta": 0.04}}}).settings.kl.sampling == "weighted"


def test_expected_sequence_ratios_multiply_trls_penalty():
    """With a ratio of the sequence TRL multiplies k3 by s_i, which is no weight of the token's distribution; ours stays r_it."""
    batch = plain_batch("gspo")
    method = resolve("x", {"x": {"preset": "gspo", "kl": {"estimator": "k3", "beta": 1.0}}})
    _, gradients = minibatch_gradient(method, batch)
    _, trl_grad = trl_gradient("gspo", batch, beta=1.0, bias_correction=True)
    assert relative_error({"g": gradients["logprobs_BT"]}, {"g": trl_grad}) > 1e-2


@pytest.mark.parametrize("parts", [None, 6])
def test_trls_luspo_is_tepo_times_the_mean_length(parts):
    """TRL has no 'tepo', but its luspo (arXiv 2602.05261) is J_v1 times N / B with a narrow clip; equal row counts a micro-batch."""
    clip = {"epsilon_low": 2e-3, "epsilon_high": 2.5e-3}
    SETTINGS["luspo"] = ("luspo", {"importance_sampling_level": "sequence", **clip})
    batch = plain_batch("tepo")
    split = chunks(24, parts) if parts else None
    method = resolve("x", {"x": {"preset": "tepo", "clip": [2e-3, 2.5e-3]}})
    scale = float(batch.mask_BT.sum()) / 24
    try:
        loss, gradients = minibatch_gradient(method, batch)
        trl_loss, trl_grad = trl_gradient("luspo", batch, split)
    finally:
        del SETTINGS["luspo"]
    assert float(loss) * scale == pytest.approx(trl_loss, rel=RTOL)
    assert relative_error({"g": gradients["logprobs_BT"] * scale}, {"g": trl_grad}) <= RTOL


def test_expected_uneven_micro_batches_change_trls_sequence_mean():
    """TRL averages micro-batch means; equal only when all have the same number of rows, which its data loader ensures."""
    batch = plain_batch("grpo")
    _, whole = trl_gradient("grpo", batch)
    _, split = trl_gradient("grpo", batch, [torch.arange(20), torch.arange(20, 24)])
    assert relative_error({"g": split}, {"g": whole}) > 0.1
    _, ours = minibatch_gradient(resolve("grpo"), batch, [torch.arange(20), torch.arange(20, 24)])
    assert relative_error({"g": ours["logprobs_BT"]}, {"g": whole}) <= RTOL


# The adapter, in a real training run of a tiny model on the CPU


@pytest.fixture(scope="module")
def tiny():
    words = ["<pad>", "<eos>", *[str(i) for i in range(10)], "+", "="]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="="))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=32, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config), fast


def share_of_ones(completions, **_):
    return [text.count("1") / max(1, len(text)) for text in completions]


def build(tiny, tmp_path, method, variants=None, **settings):

    model, tokenizer = tiny
    args = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=8, gradient_accumulation_steps=2, steps_per_generation=4,
        num_iterations=2, num_generations=8, max_completion_length=8, max_steps=12, learning_rate=5e-3,
        lr_scheduler_type="constant",
        report_to=[], logging_steps=1, save_strategy="no", use_cpu=True, seed=0, **settings,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": f"{i % 10}+{i // 10}="} for i in range(64)])
    return StudyGRPOTrainer(
        model=copy.deepcopy(model), reward_funcs=share_of_ones, args=args, train_dataset=data, processing_class=tokenizer,
        method=method, variants=variants,
    )  # fmt: skip


def test_training_through_the_adapter_learns_and_logs_the_mask(tiny, tmp_path):
    trainer = build(tiny, tmp_path, "tepo_strong", {"tepo_strong": {"preset": "tepo_kl", "kl": {"beta": 1.0}}})
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "objective/loss" in entry]
    assert len(logs) == 12
    # every generation serves 4 updates; on the first of each the policy is the one that sampled, so nothing is charged
    assert [i for i, entry in enumerate(logs) if entry["objective/mask"] == 0] == [0, 4, 8]
    assert all(abs(entry["objective/abs_log_ratio"]) < 1e-5 for entry in logs[::4])
    assert logs[8]["reward"] > logs[0]["reward"]


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("kl_cov", {}, "method kl_cov: needs whole mini-batches"),
        ("dr_grpo", {}, "scale_rewards = 'group'.*advantage centred; allowed: 'none'"),
        ("grpo", {"beta": 0.1}, "needs none; set beta = 0"),
        ("grpo", {"top_entropy_quantile": 0.2}, "top_entropy_quantile = 0.2 is not used here"),
        ("tepoo", {}, "preset 'tepoo' is unknown"),
    ],
)
def test_settings_that_contradict_the_method(tiny, tmp_path, method, settings, message):
    with pytest.raises(ConfigError, match=message):
        build(tiny, tmp_path, method, **settings)
