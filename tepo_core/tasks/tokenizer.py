r"""The built-in tokenizer: characters of arithmetic, with ``\boxed{`` as one token."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = [PAD, EOS, UNKNOWN, *"0123456789", "+", "-", "=", "\\boxed{", "}"]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A fresh tokenizer of 18 tokens. Nothing is added at the start or the end; PAD and EOS are different tokens."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )
