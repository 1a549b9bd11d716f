r"""Finding the answer in a gold entry and in a response. Every scan is linear in the text, so it cannot hang.

Two rules. *Strict*, for evaluation: the last complete ``\boxed{}`` after the reasoning, nothing else. *Lenient*, for looking at
answers by hand: neighbouring boxes joined, else what follows the last "answer", else the last piece of mathematics, else
the text itself where it is not prose.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tepo_core.grading.boxes import boxes, last_boxed

ANCHOR = re.compile(r"(?i)answer(?:\s+(?:is|are)\b)?\s*[:=]?\s*")
_SENTENCE_END = re.compile(r"\.(?=\s+[A-Z]|\s*$)|\n")
_NUMBER = re.compile(
    r"(?<![\w.,\\])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:[.,]\d+)?(?:/\d+)?(?:\s*(?:\\?%|percent\b|pct\b))?|"
    r"(?<![\w.,\\])[-+]?\.\d+"
)
_BRACKETED = re.compile(r"\[([^\[\]\n]{1,40})\](?=\s*(?:[.,;!?]|$))")
_LETTER = re.compile(r"^[\s*]*\(?([A-J])\)?[\s.*]*$")
_JOIN = re.compile(r"(?:\s|,|;|\\quad|\\qquad|\\text\s*\{|\}|and|or|for|parts?|\([a-z]\)|\$)*", re.IGNORECASE)
_SEPARATOR = re.compile(r"\b(?:and|or)\b|[,;]")
_CONCLUDES = re.compile(r"(?i)\b(?:answer|so|then|thus|therefore|hence|finally|final|is|not|but|wait|actually|=)\b|=")
_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mbox|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"(?<![A-Za-z_])[A-Za-z]{2,}(?![A-Za-z])")
_NOT_PROSE = frozenset(
    ("and", "or", "percent", "pct", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "log", "ln", "exp")
    + ("sqrt", "pi", "lim", "mod", "gcd", "lcm", "max", "min", "inf", "infinity", "eq", "np", "cm", "mm", "km", "kg", "ft")
    + ("unit", "units")
)
_PROSE = frozenset(("the", "is", "are", "so", "therefore", "thus", "hence", "we", "answer"))
_CLOSER = {"$$": "$$", "\\[": "\\]", "\\(": "\\)", "$": "$"}
_OPENER = re.compile(r"\\\\|\\\$|\$\$|\\\[|\\\(|\$")


class Answer(NamedTuple):
    """An answer found: its text, and whether it is the entry itself, marked neither as mathematics nor by a box."""

    text: str
    bare: bool


def after_reasoning(text: str) -> str:
    """What follows the last ``</think>``; the whole text without one. A box inside the reasoning is a draft."""
    return text.rsplit("</think>", 1)[-1]


def strict_answer(response: str) -> Answer | None:
    r"""The last complete ``\boxed{}`` after the reasoning; ``None`` without one or when it is empty."""
    content = last_boxed(after_reasoning(response))
    return Answer(content, False) if content else None


def gold_answer(gold: str) -> Answer:
    """The answer of a gold entry, which may be bare (as in every benchmark of the table) or a whole solution."""
    found = joined_boxes(gold)
    if found:
        return Answer(found, False)
    if ANCHOR.search(gold):
        return lenient_answer(gold) or Answer(gold.strip(), True)
    return Answer(gold.strip(), "$" not in gold and "\\(" not in gold and "\\[" not in gold)


def lenient_answer(response: str) -> Answer | None:
    """The answer of a response under the lenient rule; ``None`` when there is nothing to grade."""
    text = after_reasoning(response).strip()
    found = joined_boxes(text)
    if found is not None:
        return Answer(found, False) if found else None
    if "\\boxed" in text or not text:
        return None  # an unfinished box is an unfinished answer
    anchors = list(ANCHOR.finditer(text))
    if anchors:
        region = text[anchors[-1].end() :].strip()
        for part in (_first_sentence(region), region):
            if any(opener not in ("\\\\", "\\$") for opener in _OPENER.findall(_outside(part))):
                continue  # the sentence ends inside a piece of mathematics
            if letter := _LETTER.match(part):
                return Answer(letter[1], False)
            if part and not is_prose(part):
                return Answer(part, "$" not in part and "\\(" not in part)
            if candidate := _rightmost(part):
                return Answer(candidate, False)
    if not is_prose(text):
        return Answer(text, "$" not in text and "\\(" not in text and "\\[" not in text)
    if candidate := _rightmost(text):
        return Answer(candidate, False)
    return Answer(text, True) if len(text.split()) <= 4 else None


def joined_boxes(text: str) -> str | None:
    r"""The last complete box, with those before it that belong to the same answer, joined by commas.

    Boxes belong together when fewer than 10 characters stand between them, or fewer than 70 with an "and", "or", comma or
    semicolon, unless words of a conclusion stand there: ``\boxed{6} pens and \boxed{8} books`` is the answer 6, 8, and
    ``\boxed{6}, so the answer is \boxed{8}`` is 8. ``None`` without a complete box."""
    found = boxes(text)
    if not found:
        return None
    parts = [text[found[-1][1] : found[-1][2]]]
    for earlier, later in zip(found[-2::-1], found[:0:-1], strict=True):
        between = text[earlier[3] : later[0]]
        if len(between) >= 10 and not (len(between) < 70 and _SEPARATOR.search(between)) or _CONCLUDES.search(between):
            break
        content = text[earlier[1] : earlier[2]]
        if content != parts[-1]:
            parts.append(content)
    return ", ".join(part for part in reversed(parts) if part)


def is_prose(text: str) -> bool:
    """Whether the text holds words of a sentence besides mathematics, units and names of functions."""
    if len(text) > 2000:
        return True
    words = [word for word in _WORD.findall(_COMMAND.sub(" ", text)) if not (word.isupper() and len(word) <= 4)]
    words = [word.lower() for word in words if word.lower() not in _NOT_PROSE]
    return len(words) >= 2 or any(word in _PROSE for word in words) or bool(words and environments(text))


def environments(text: str) -> list[tuple[int, int, int, int]]:
    r"""Spans of mathematics between ``$``, ``$$``, ``\(`` or ``\[`` and their closers: start, content, end of content, end."""
    spans, position, hopeless = [], 0, set()
    while match := _OPENER.search(text, position):
        opener = match[0]
        position = match.end()
        closer = _CLOSER.get(opener)
        if closer is None or opener in hopeless:
            continue
        end = _find_closer(text, closer, match.end())
        if end < 0:
            hopeless.add(opener)
            continue
        spans.append((match.start(), match.end(), end, end + len(closer)))
        position = end + len(closer)
    return spans


def _find_closer(text: str, closer: str, start: int) -> int:
    """Position of the closer; a dollar sign behind a backslash is a dollar sign."""
    end = text.find(closer, start)
    while closer == "$" and end > 0 and text[end - 1] == "\\":
        end = text.find(closer, end + 1)
    return end


def _first_sentence(text: str) -> str:
    match = _SENTENCE_END.search(text)
    return (text[: match.start()] if match else text).strip()


def _outside(text: str) -> str:
    """The text without its complete pieces of mathematics."""
    kept, position = [], 0
    for start, _, _, end in environments(text):
        kept.append(text[position:start])
        position = end
    return " ".join([*kept, text[position:]])


def _rightmost(text: str) -> str | None:
    """The last piece of mathematics, bracketed number, or number; neighbouring pieces of mathematics are joined."""
    spans = environments(text)
    best_end, best = -1, None
    if spans:
        first = len(spans) - 1
        while first and len(between := text[spans[first - 1][3] : spans[first][0]]) < 40 and _JOIN.fullmatch(between):
            first -= 1
        best_end, best = spans[-1][3], ", ".join(text[s[1] : s[2]].strip() for s in spans[first:])
    for match in _NUMBER.finditer(text):
        if match.start() >= best_end:
            best_end, best = match.end(), match[0].strip()
    for match in _BRACKETED.finditer(text):
        inside = match[1].strip()
        if match.end() >= best_end and _NUMBER.fullmatch(inside):
            best_end, best = match.end(), inside
    return best or None
