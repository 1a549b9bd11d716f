"""Models that cannot be used are refused before any work, with file, reason and remedy; paths mean the same from everywhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import save_file
from tiny import VALUES, tiny_study
from transformers import Qwen3Config

from tepo_core.config import ConfigError
from tepo_core.files import local_path, source_path
from tepo_core.model.inspect import check_chat, check_safetensors, context_of
from tepo_core.model.policy import build_tiny, load_policy, save_policy
from tepo_core.pipeline.parameters import check
from tepo_core.tasks.prepare import prepare
from tepo_core.tasks.tokenizer import build_tokenizer
from tepo_core.training.warmup import initial_policy

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 269060552\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of one's own beside params.yaml, with a chat template."""
    study = tiny_study()
    policy = build_tiny(study.policy, build_tokenizer(), 0)
    policy.tokenizer.chat_template = TEMPLATE
    save_policy(policy, tmp_path / "models" / "mine")
    return tmp_path / "models" / "mine"


def faults(folder: Path, **policy) -> str:
    """What the check of params.yaml says of a model; '' when it has nothing against it."""
    study = tiny_study(policy={"source": "models/mine", **policy})
    try:
        check(study, "params.yaml", folder.parents[1])
    except ConfigError as error:
        return "\n".join(line for line in str(error).splitlines() if "parameters missing" not in line)
    return ""


def both(folder: Path, *words: str, **policy) -> None:
    """The check names it, and loading says the same."""
    text = faults(folder, **policy)
    with pytest.raises(ConfigError) as caught:
        load_policy(folder, tiny_study(policy=policy).policy)
    for said in (text, str(caught.value)):
        for word in words:
            assert word in said, f"{word!r} not in {said!r}"


def test_a_good_folder_is_taken(folder: Path) -> None:
    assert faults(folder) == faults(folder, prompt_format="chat") == ""


def edit(path: Path, **values) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({k: v for k, v in {**content, **values}.items() if v is not ...}), encoding="utf-8")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_lfs_pointers(folder: Path, name: str) -> None:
    (folder / name).write_text(POINTER)
    both(folder, f"mine/{name}", "git-lfs pointer", "git lfs pull")


@pytest.mark.parametrize("keep", [0.9, 0.001, 0.0])
def test_cut_weights(folder: Path, keep: float) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, int(path.stat().st_size * keep))
    both(folder, "mine/model.safetensors", "cut", "bytes", "fetch the file again")


def test_weights_with_bytes_behind_them_and_other_headers(folder: Path, tmp_path: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0" * 10)
    both(folder, "mine/model.safetensors", "its header describes")
    path.write_bytes((8).to_bytes(8, "little") + b"no json!")
    both(folder, "mine/model.safetensors", "no safetensors header")
    whole = tmp_path / "empty.safetensors"
    save_file({}, whole)
    check_safetensors(whole)


def test_a_shard_that_the_index_names_and_nobody_fetched(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    both(folder, "model-00002-of-00002.safetensors", "missing", "index.json names it")


def test_chat_without_a_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    both(folder, "policy.prompt_format = 'chat'", "no chat template", "prompt_format: plain", prompt_format="chat")
    assert faults(folder) == ""


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('system first') }}", "system first"),
        ("{% for m in messages %}{{ m.content.strip('x', 1, 2) }}{% endfor %}", "TypeError"),
        ("{% for", "TemplateSyntaxError"),
        ("hello", "drops the prompt"),
        ("{{ messages[0].content }}{% if messages|length > 1 %}{{ raise_exception('no answers') }}{% endif %}", "no answers"),
    ],
)
def test_a_template_that_fails(folder: Path, template: str, words: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    both(folder, "policy.prompt_format = 'chat'", words, "chat_template.jinja", prompt_format="chat")


def test_the_tiny_model_has_no_chat_template() -> None:
    study = tiny_study(policy={"prompt_format": "chat"})
    with pytest.raises(ConfigError, match="policy.prompt_format = 'chat': .*'tiny' has no chat template; set it to 'plain'"):
        check(study)


def test_a_model_without_a_longest_sequence(folder: Path) -> None:
    class Text:
        model_type, max_position_embeddings = "bloom", None

    class Outer:
        def get_text_config(self):
            return Text()

    for model_config in (Text(), Outer(), object()):
        with pytest.raises(ConfigError, match="max_position_embeddings.*config.json of a local copy"):
            context_of(model_config, "mine")
    assert context_of(Qwen3Config(max_position_embeddings=77), "mine") == 77
    edit(folder / "config.json", max_position_embeddings=None)
    both(folder, "policy.source", "max_position_embeddings", "mine")


def test_a_tokenizer_without_an_end(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token=None)
    both(folder, "no EOS token", "tokenizer_config.json")


def test_a_model_that_a_message_does_not_need(folder: Path) -> None:
    check_chat(load_policy(folder, tiny_study().policy).tokenizer, "mine")


# -- paths ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cwd", [".", "notebooks"])
@pytest.mark.parametrize("written", ["models/mine", "./models/mine", "../{root}/models/mine", "{absolute}", "~/models/mine"])
def test_a_model_is_found_from_everywhere(folder: Path, monkeypatch: pytest.MonkeyPatch, cwd: str, written: str) -> None:
    root = folder.parents[1]
    (root / "notebooks").mkdir()
    monkeypatch.chdir(root / cwd)
    monkeypatch.setenv("HOME", str(root))
    source = written.format(root=root.name, absolute=folder)
    assert faults(folder, source=source) == ""
    study = tiny_study(policy={"source": source})
    assert initial_policy(study, 0, root).parameters > 0
    assert study.policy.source == source, "what is recorded is what params.yaml says"


def test_names_of_the_hub_and_of_nobody() -> None:
    root = Path("/somewhere")
    assert source_path("tiny", root) is source_path("Qwen/Qwen2.5-7B", root) is source_path("smollm2-135m-gguf", root) is None
    assert source_path("models/a.gguf", root) == root / "models/a.gguf"
    assert source_path("/x/a.gguf", root) == Path("/x/a.gguf")
    assert local_path("~nobody-of-that-name/x", root) == root / "~nobody-of-that-name/x"


@pytest.mark.parametrize("written", ["{absolute}/small.gguf", "small.gguf", "~/small.gguf"])
def test_a_gguf_file_by_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    where = written.format(absolute=tmp_path)
    assert "small.gguf': no such file" in faults(tmp_path / "models" / "mine", source=where)
    (tmp_path / "small.gguf").write_bytes(b"GGUF" + b"\0" * 20)
    assert faults(tmp_path / "models" / "mine", source=where) == ""
    (tmp_path / "small.gguf").write_text(POINTER)
    assert "git-lfs pointer" in faults(tmp_path / "models" / "mine", source=where)
    (tmp_path / "small.gguf").write_bytes(b"PK\3\4")
    assert "not a GGUF file" in faults(tmp_path / "models" / "mine", source=where)


@pytest.mark.parametrize("written", ["sets", "./sets", "~/sets", "{absolute}"])
def test_problem_sets_are_found_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "sets").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "notebooks")
    asked = []
    monkeypatch.setattr("tepo_core.tasks.prepare.load_benchmark", lambda name, folder: asked.append(folder) or [])
    data = {"benchmarks_dir": written.format(absolute=tmp_path / "sets"), "eval_sets": ["amc23"], "warmup_size": 10}
    study = tiny_study(data={**VALUES["data"], **data})
    with pytest.raises(ConfigError) as caught:
        check(study, "params.yaml", tmp_path)
    assert "benchmarks_dir" not in str(caught.value).replace("data.benchmarks_dir,", "")
    prepare(study, tmp_path)
    assert asked == [tmp_path / "sets"]
