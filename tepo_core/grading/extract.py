r"""Finding the answer in a gold entry and in a response. Every scan is linear in the text, so it cannot hang.

Two rules. *Strict*, for evaluation: the last ``\boxed{}`` after the reasoning, nothing else; when it never closes there is no
answer, whatever stands in an earlier one. *Lenient*, for looking at answers by hand: of boxes (neighbours joined) and tags, calls
and JSON fields of an answer the one that comes last; else what follows the last ``####`` or "answer" or precedes a closing "is the
answer"; else the text itself where it is not prose; else the last piece of mathematics or number. ``Answer.rule`` says which.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tepo_core.grading.boxes import boxes, last_boxed
from tepo_core.grading.markers import closing_sentence, last_hashes, last_tagged, without_markup

_END_OF_REASONING = re.compile(r"</(?:think|thinking|thought|reasoning)>|<\|end_of_thought\|>|\[/THINK\]|◁/think▷")
ANCHOR = re.compile(
    r"(?i)(?:answers?|答案|respuesta|réponse|antwort|resposta|risposta|ответ)"
    r"(?:\s+(?:is|are|was|would be|will be|should be|must be|equals|comes out to)\b|是|为)?\s*(?:[:=：|→-]+(?=\s|[^\d\s])|[:=：|→])?\s*"
    r"(?:is\b\s*)?"
)
ANCHORS_TRIED = 4  # the last ones; "I hope this answer is correct" follows the answer itself
_NO_VALUE = re.compile(
    r"(?i)[\s.!?)]*(?:$|(?:is\s+)?(?:also\s+|indeed\s+|therefore\s+)?(?:correct|right|wrong|incorrect|valid|verified|confirmed|"
    r"reasonable|consistent|plausible|complete|clear|makes? sense|checks? out|seems?|matches|holds|above|in the (?:box|form)|using)\b)"
)
_LEAD = re.compile(
    r"(?i)(?:(?:exactly|simply|just|therefore|thus|hence|then|now|clearly|indeed|equal to|given by|approximately|about|roughly|"
    r"option|choice|alternative|the number|the value)\b[\s,:]*)+"
)
_CUT = re.compile(
    r"(?i)[\s,;(]+(?:because|since|as|which|where|when|so|therefore|thus|hence|after|by|from|using|given|obtained|"
    r"for (?:all|any|every|each|some))\b|\s+\((?=[A-Za-z]{3})"
)
_UNBRACED = re.compile(
    r"\\+boxed\s*([-+]?(?:\d[\d,]*(?:\.\d+)?(?:/\d+)?|\\[dt]?frac\s*(?:\{[^{}]*\}|\d)\s*(?:\{[^{}]*\}|\d)|"
    r"\\sqrt\s*(?:\{[^{}]*\}|\d)|\\[A-Za-z]+))"
)
_SENTENCE_END = re.compile(r"\.(?=\s+[A-Z]|\s*$)|\n")
_NUMBER = re.compile(
    r"(?<![\w.,\\])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?:(?:\\[ ,;:]|\{,\}|~|['’\u00a0\u2009\u202f])\d{3})+(?!\d)|"
    r"[1-9]\d{0,2}(?: \d{3})+(?![\d.,]*\d)|\d{1,3}(?:\.\d{3}){2,}(?!\d)|\d+)"
    r"(?:[.,]\d+)?(?:/\d+)?(?:\s*(?:\\?%|per ?cent\b|pct\b)|(?:st|nd|rd|th)\b)?|"
    r"(?<![\w.,\\])[-+]?\.\d+"
)
_BRACKETED = re.compile(r"\[([^\[\]\n]{1,40})\](?=\s*(?:[.,;!?]|$))")
_WITH_UNIT = re.compile(r"([-+]?[\d.,/ ]*\d)\s*(?:[A-Za-z°^/]+\d?\s*){0,3}")
_LETTER = re.compile(r"^[\s*]*\(?([A-J])\)?[\s.*]*$")
_JOIN = re.compile(r"(?:\s|,|;|\\quad|\\qquad|\\text\s*\{|\}|and|or|for|parts?|\([a-z]\)|\$)*", re.IGNORECASE)
_SEPARATOR = re.compile(r"\b(?:and|or)\b|[,;]")
_CONCLUDES = re.compile(
    r"(?i)\b(?:answer|so|then|thus|therefore|hence|finally|final|is|not|no|but|wait|actually|rather|instead|correction|=)\b|="
)
_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mbox|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"(?<![A-Za-z_])[A-Za-z]{2,}(?![A-Za-z])")
_DIFFERENTIAL = re.compile(r"d(?!o)[A-Za-z]")
_NOT_PROSE = frozenset(
    ("and", "or", "percent", "pct", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "log", "ln", "exp")
    + ("sqrt", "pi", "lim", "mod", "gcd", "lcm", "max", "min", "inf", "infinity", "eq", "np", "cm", "mm", "km", "kg", "ft")
    + ("unit", "units")
)
_PROSE = frozenset(("the", "is", "are", "so", "therefore", "thus", "hence", "we", "answer"))
_CLOSER = {"$$": "$$", "\\[": "\\]", "\\(": "\\)", "$": "$"}
_OPENER = re.compile(r"\\\\|\\\$|\$\$|\\\[|\\\(|\$")


class Answer(NamedTuple):
    """An answer found: its text, whether it is the entry itself, marked neither as mathematics nor by a box, and the rule."""

    text: str
    bare: bool
    rule: str = ""


def after_reasoning(text: str) -> str:
    """What follows the last ``</think>`` (or another mark of that kind); the whole text without one. A box inside the
    reasoning is a draft."""
    ends = [match.end() for match in _END_OF_REASONING.finditer(text)]
    return text[ends[-1] :] if ends else text


def strict_answer(response: str) -> Answer | None:
    r"""The last ``\boxed{}`` after the reasoning; ``None`` without one or when it is empty or never closes."""
    content = last_boxed(after_reasoning(response))
    return Answer(content, False, "last box") if content else None


def gold_answer(gold: str) -> Answer:
    """The answer of a gold entry, which may be bare (as in every benchmark of the table) or a whole solution."""
    found = joined_boxes(gold)
    if found:
        return Answer(found, False, _box_rule(gold, found))
    if ANCHOR.search(gold):
        return lenient_answer(gold) or Answer(gold.strip(), True, "the whole text")
    return Answer(gold.strip(), "$" not in gold and "\\(" not in gold and "\\[" not in gold, "the whole text")


def lenient_answer(response: str) -> Answer | None:
    """The answer of a response under the lenient rule; ``None`` when there is nothing to grade."""
    text = after_reasoning(response).strip()
    mark = last_tagged(text)
    last_box = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if mark is not None and (last_box < mark.end):
        inside = _read(mark.text.strip())
        return inside if inside is None else inside._replace(rule=f"{mark.rule}, {inside.rule}")
    return _read(text)


def _read(text: str) -> Answer | None:
    """The lenient rule where no tag decides."""
    found = joined_boxes(text)
    if found is not None:
        return Answer(found, False, _box_rule(text, found)) if found else None
    if "\\boxed" in text or not text:
        unbraced = list(_UNBRACED.finditer(text))
        if unbraced and text.rfind("\\boxed") < unbraced[-1].end():
            return Answer(unbraced[-1][1], False, "box without braces")
        return None  # an unfinished box is an unfinished answer
    marked = last_hashes(text)
    if marked is not None and not ANCHOR.search(text, marked.end):
        return Answer(marked.text, "$" not in marked.text, marked.rule)
    text = without_markup(text).strip()
    if not text:
        return None
    if (closing := closing_sentence(text)) is not None:
        before, denied = closing
        sentence = re.split(r"[.!?]\s+(?=[A-Z])|\n", before)[-1]
        candidate = None if denied else _rightmost(sentence) or (sentence.strip() if not is_prose(sentence) else None)
        return Answer(candidate, False, "before 'is the answer'") if candidate else None
    for anchor in list(ANCHOR.finditer(text))[: -ANCHORS_TRIED - 1 : -1]:
        region = text[anchor.end() :].strip()
        if _NO_VALUE.match(_first_sentence(region)):
            continue
        return _after_anchor(region) or _unmarked(text)
    return _unmarked(text)


def _after_anchor(region: str) -> Answer | None:
    """The answer in what follows the word "answer": in the first sentence, else anywhere behind it."""
    rule = "after the last 'answer'"
    for part in (_first_sentence(region), region):
        if any(opener not in ("\\\\", "\\$") for opener in _OPENER.findall(_outside(part))):
            continue  # the sentence ends inside a piece of mathematics
        part = _trimmed(part)
        if letter := _LETTER.match(part):
            return Answer(letter[1], False, rule)
        if part and not is_prose(part):
            return Answer(part, "$" not in part and "\\(" not in part, rule)
        if candidate := _rightmost(part):
            return Answer(candidate, False, rule + ", the last mathematics or number")
    return None


def _unmarked(text: str) -> Answer | None:
    """The answer of a text without any mark of one."""
    if not is_prose(text):
        return Answer(text, "$" not in text and "\\(" not in text and "\\[" not in text, "the whole text")
    if candidate := _rightmost(text):
        return Answer(candidate, False, "the last mathematics or number")
    return Answer(text, True, "the whole text") if len(text.split()) <= 4 else None


def _trimmed(part: str) -> str:
    """The part without quotation marks and leading adverbs, and without a reason given behind the answer."""
    part = re.sub(r"(?<=\$)!+$", "", part.strip(" \t\n\"“”'*_`|"))
    if (lead := _LEAD.match(part)) and lead.end() < len(part):
        part = part[lead.end() :]
    spans = environments(part)
    for match in _CUT.finditer(part):
        if any(start <= match.start() < end for start, _, _, end in spans):
            continue
        head = part[: match.start()].strip(" \"“”'*_`|")
        if (any(c.isdigit() for c in head) or spans) and not _words(head) and head:
            return head
        break
    return part


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


def _box_rule(text: str, found: str) -> str:
    return "last box" if found == last_boxed(text) else "last boxes, joined"


def is_prose(text: str) -> bool:
    """Whether the text holds words of a sentence besides mathematics, units and names of functions."""
    if len(text) > 2000:
        return True
    words = _words(text)
    return len(words) >= 2 or any(word in _PROSE for word in words) or bool(words and environments(text))


def _words(text: str) -> list[str]:
    """Words of a sentence in the text, in lower case."""
    words = [word for word in _WORD.findall(_COMMAND.sub(" ", text)) if not (word.isupper() and len(word) <= 4)]
    return [word.lower() for word in words if word.lower() not in _NOT_PROSE and not _DIFFERENTIAL.fullmatch(word)]


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
            if "\n" in between and not between.strip():
                break  # formulas on lines of their own are steps, not a list
            first -= 1
        best_end, best = spans[-1][3], ", ".join(text[s[1] : s[2]].strip() for s in spans[first:])
    for match in _NUMBER.finditer(text):
        if match.start() >= best_end:
            best_end, best = match.end(), match[0].strip()
    for match in _BRACKETED.finditer(text):
        inside = match[1].strip()
        if match.end() >= best_end and (_NUMBER.fullmatch(inside) or _WITH_UNIT.fullmatch(inside)):
            best_end, best = match.end(), inside
    return best or None
