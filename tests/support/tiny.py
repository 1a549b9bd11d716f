"""A study small enough for tests: real data, a real warm-up, a policy of about ten thousand parameters."""

from pathlib import Path

from tepo_core.config import Study, parse_study

TINY = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_size": 16, "mlp_size": 64, "context": 96}
VALUES = {
    "profile": "test",
    "tasks": ["facts"],
    "methods": ["grpo"],
    "seeds": [0],
    "data": {"train_size": 64, "validation_size": 16, "test_size": 12, "long_size": 8, "warmup_size": 1500},
    "policy": {"tiny": TINY},
    "warmup": {"steps": 150, "batch_size": 32, "lr": 1e-2},
    "train": {
        "rollouts": 4, "prompts_per_rollout": 8, "group_size": 4, "minibatches": 2, "epochs": 2, "micro_batch_tokens": 4096,
        "lr": 1e-3, "lr_warmup_rollouts": 1, "max_new_tokens": 32, "validate_every": 2, "record_every": 2,
        "record_responses": 6, "checkpoint_every": 1,
    },
    "evaluate": {"samples": 4, "k": [1, 2, 4], "max_new_tokens": 32},
    "compute": {"device": "cpu", "threads": 1},
}  # fmt: skip


def tiny_study(**changes) -> Study:
    """The tiny study; a mapping given for a group is merged into it."""
    values = dict(VALUES)
    for name, value in changes.items():
        values[name] = {**values[name], **value} if isinstance(value, dict) and name in values else value
    return parse_study(values)


def run_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a run folder."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
