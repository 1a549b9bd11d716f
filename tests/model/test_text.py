"""No convenience setting of a tokenizer changes what is sampled from or graded. Each tokenizer here is made for one of them."""

import pytest
from scripted import PROBLEMS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tepo_core.config import Evaluate
from tepo_core.evaluation.samples import evaluate_policy
from tepo_core.grading.exact import ExactGrader
from tepo_core.grading.graders import make_grader
from tepo_core.grading.types import Outcome
from tepo_core.model.policy import Policy
from tepo_core.rollout.types import Rollouts
from tepo_core.tasks.tokenizer import build_tokenizer

SPECIAL = ["<unk>", "<s>", "</s>"]


def characters(special=(), **settings):
    """Every printable character is a token; ``special`` are tokens that decoding drops by default."""
    names = SPECIAL + [chr(i) for i in range(32, 127)] + ["\n"]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in [*SPECIAL, *special]])
    return wrapped(core, **settings)


def sentences(**settings):
    """Words behind a mark for the space before them, as in SentencePiece: decoding strips the first space."""
    names = [*SPECIAL, "▁", "▁ret", "▁1", "ret", "urn", "▁x", "x", "1", "\n"]
    core = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return wrapped(core, **settings)


def wrapped(core, template=None, **settings):
    if template:
        core.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>", **settings
    )


def stored(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def said(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]


class Says:
    """An engine that answers every prompt with the same ids and remembers the prompts."""

    def __init__(self, ids):
        self.ids, self.prompts = ids, []

    def generate(self, prompts, n, params, seeds):
        self.prompts += prompts
        rows = len(prompts)
        return Rollouts(
            list(prompts), [self.ids] * rows, [[0.0]] * rows, [[0.0]] * rows, [True] * rows, list(range(rows)), [0] * rows
        )


def evaluated(tokenizer, ids):
    engine = Says(ids)
    config = Evaluate(splits=["test"], samples=1, k=[1], max_new_tokens=200, greedy=False)
    samples = evaluate_policy(engine, tokenizer, {"test": PROBLEMS[:1]}, ExactGrader(), config, ("x",))
    return samples.to_pylist()[0], engine.prompts[0]


@pytest.mark.parametrize("marker", ["</think>", "<|im_start|>", "<s>"])
def test_special_tokens_stay_in_the_text(tmp_path, marker):
    tokenizer = stored(characters(special=["</think>", "<|im_start|>"]), tmp_path)
    ids = said(tokenizer, f"a{marker} b")
    assert len(ids) == 5 and Policy(None, tokenizer).decode(ids) == f"a{marker} b"


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("\\boxed{2}</think>so it is 2", "no_answer"),
        ("\\boxed{3}</think>\\boxed{2}", "correct"),
        ("\\boxed{2}</think>\\boxed{3}", "wrong"),
        ("\\boxed{2}", "correct"),
    ],
)
def test_a_box_inside_the_reasoning_does_not_count_though_its_end_is_a_special_token(text, outcome):
    tokenizer = characters(special=["</think>"])
    row, _ = evaluated(tokenizer, said(tokenizer, text))
    assert (row["outcome"], row["text"]) == (outcome, text)
    assert ExactGrader().grade(golds=["2"], responses=[text], truncated=[False])[0].outcome == outcome


def test_only_what_ends_a_response_is_taken_off_its_end():
    tokenizer = characters(special=["<|im_end|>"])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = said(tokenizer, "7")[:-1]
    assert Policy(None, tokenizer, "chat").decode([*ids, turn]) == "7"
    assert Policy(None, tokenizer, "plain").decode([*ids, turn, 2]) == "7<|im_end|>"
    assert Policy(None, tokenizer, "plain").decode([2, *ids, 2, 2]) == "</s>7"
    assert Policy(None, tokenizer, "plain").decode([]) == Policy(None, tokenizer, "plain").decode([2]) == ""


@pytest.mark.parametrize("text", ["f('a , b') == 'a , b'", "x = 'is n't' .strip()", "print( ' ?' )", "we 've  two  spaces !"])
def test_spaces_are_not_tidied(tmp_path, text):
    tokenizer = stored(characters(clean_up_tokenization_spaces=True), tmp_path)
    ids = said(tokenizer, text)
    assert tokenizer.decode(ids, skip_special_tokens=True) != text, "the setting is on"
    policy = Policy(None, tokenizer)
    assert policy.decode(ids) == text and "".join(policy.token_texts(ids[:-1])) == text
    assert evaluated(tokenizer, ids)[0]["text"] == text


def test_a_program_keeps_its_spaces_and_its_first_indentation():
    gold = '{"entry_point": "f", "prompt": "def f():\\n", "tests": "assert f() == 1"}'
    tokenizer = sentences()
    names = tokenizer.get_vocab()
    ids = [names[name] for name in ("▁", "▁ret", "urn", "▁1", "</s>")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == " return 1", "a space is stripped"
    policy = Policy(None, tokenizer)
    assert policy.decode(ids) == "  return 1" and policy.decode(ids[1:]) == " return 1"
    [grade] = make_grader("code", workers=1).grade(golds=[gold], responses=[policy.decode(ids[1:])], truncated=[False])
    assert grade.outcome is Outcome.CORRECT


@pytest.mark.parametrize(
    ("template", "begin"),
    [(None, []), ("$A </s>", []), ("<s> $A", [1]), ("<s> $A </s>", [1]), ("<s> <s> $A </s> </s>", [1, 1])],
)
def test_a_prompt_has_what_belongs_before_it_and_nothing_behind(tmp_path, template, begin):
    tokenizer = stored(characters(template=template), tmp_path)
    plain = said(tokenizer, "1+1=")[:-1]
    assert Policy(None, tokenizer).encode("1+1=") == begin + plain
    assert Policy(None, tokenizer).encode("1" * 30) == begin + plain[:1] * 30
    assert evaluated(tokenizer, said(tokenizer, "\\boxed{2}"))[1] == begin + plain


def test_a_text_that_begins_with_bos_gets_no_second():
    tokenizer = characters(template="<s> $A </s>")
    assert Policy(None, tokenizer).encode("<s>7")[:2] == [1, Policy(None, tokenizer).encode("7")[1]]


def test_truncation_and_padding_of_the_file_do_not_reach_a_prompt(tmp_path):
    tokenizer = characters(template="<s> $A </s>")
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding(length=20, pad_id=0, pad_token="<unk>")
    assert len(Policy(None, stored(tokenizer, tmp_path)).encode("1+1=")) == 5
    assert len(Policy(None, stored(tokenizer, tmp_path)).encode("1" * 30)) == 31


def test_a_chat_prompt_is_the_template_and_nothing_more():
    tokenizer = characters(template="<s> $A </s>", clean_up_tokenization_spaces=True)
    tokenizer.chat_template = (
        "<s>{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    ids = Policy(None, tokenizer, "chat").encode("7 .")
    assert ids == [1, *said(tokenizer, "7 .=")[:-1]]


def test_the_built_in_tokenizer_is_as_before():
    policy = Policy(None, build_tokenizer())
    assert policy.decode(policy.encode("1+2=3\\boxed{3}") + policy.eos_ids) == "1+2=3\\boxed{3}"
