r"""Marks around an answer other than ``\boxed{}``: tags, calls of a tool, fields of JSON, ``####``, Markdown, closing sentences.

Each function finds the last mark of its kind in time linear in the text. :mod:`tepo_core.grading.extract` decides which counts.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple


class Marked(NamedTuple):
    """What a mark encloses, where the mark begins and ends, and its name."""

    text: str
    start: int
    end: int
    rule: str


_TAG_NAMES = "answer|final[_ -]?answer|finalanswer|final|result"
_OPENER = re.compile(rf"(?i)<({_TAG_NAMES})>|\[(answer|final[_ ]answer)\](?!\()|<\|begin_of_(box|answer|solution)\|>")
_MENTION = re.compile(r"(?i)\s*(?:and\s*)?(?:tags?|elements?|blocks?|brackets?|fields?|format)\b")
_CALL = re.compile(r"(?i)(?<![\w.])(?:final_?answer|submit(?:_answer|_final_answer)?|finish)(?=[(\[])")
_KEYWORD = re.compile(r"\s*(?:answer|value|result|final_answer)\s*=\s*(?!=)")
_FIELD = re.compile(r'(?i)"(?:final[_ ]?)?answer"\s*:\s*')
_HASHES = re.compile(r"(?m)^[ \t]*####[ \t]*((?:\\?\$|\\[(\[a-zA-Z]|[-+$([{.£€\d])[^\n]*?)[ \t]*$")
_ITEM_HEADING = re.compile(r"\d+[.)]\s+\D|\d+\s*[.:)]\s*[A-Za-z]")
_HEADING = re.compile(r"(?m)^[ \t]{0,3}#{1,6}[ \t]+|[ \t]+#{1,6}[ \t]*$|^[ \t]*(?:-{3,}|={3,}|\*{3,})[ \t]*$")
_BOLD = (
    re.compile(r"(?<![\w)\]}*])\*{2,3}(?=[^\s*])([^*\n]*)(?<=\S)\*{2,3}(?![\w(*])"),
    re.compile(r"(?<![\w)\]}*])\*{2,3}(?=[^\s*])([^*\n]*[:.])\*{2,3}"),
    re.compile(r"(?<![\w)\]}_\\])__(?=[^\s_])([^_\n]*)(?<=\S)__(?![\w(_])"),
)
_HTML = re.compile(r"(?i)</?(?:b|i|u|em|strong|br|p|span|center|mark|code|h[1-6])\s*/?>")
_CODE = re.compile(r"(?<![\w`])`([^`\n]+)`(?![\w`])")
_CLOSING = re.compile(
    r"(?i)(?:^|\s|(?<=[$)\]}\d]))(?P<verb>is|are|was)\s+(?P<adverbs>(?:(?:indeed|thus|therefore|hence|clearly|then|also|not|n't|never)"
    r"\s+)*)(?:our|the|my)\s+(?:(?:final|correct|desired|required|right|wanted)\s+)*(?:answers?|solutions?)"
    r"(?:\s+(?:to|of|for)\s[^.\n]{0,200})?\s*[.!]*\s*$"
)


def last_tagged(text: str) -> Marked | None:
    """The last ``<answer>…</answer>``, ``[ANSWER]…[/ANSWER]``, ``<|begin_of_box|>…``, call such as ``final_answer(…)`` or
    ``Finish[…]``, or JSON field ``"answer"``; ``None`` without one.

    A tag that is not closed runs to the end of the text: generation often stops at the closing tag and drops it."""
    found = [mark for mark in (_last_tag(text), _last_call(text), _last_field(text)) if mark is not None]
    return max(found, key=lambda mark: mark.start, default=None)


def _last_tag(text: str) -> Marked | None:
    opener = None
    for match in _OPENER.finditer(text):
        if not _MENTION.match(text, match.end()):
            opener = match
    if opener is None:
        return None
    name = opener[1] or opener[2] or opener[3]
    closer = f"</{name}>" if opener[1] else f"[/{name}]" if opener[2] else f"<|end_of_{name}|>"
    end = re.compile(re.escape(closer), re.IGNORECASE).search(text, opener.end())
    inside = text[opener.end() : end.start() if end else len(text)]
    return Marked(inside, opener.start(), end.end() if end else len(text), f"tag {opener[0].lower()}")


def _last_call(text: str) -> Marked | None:
    last = _last_match(_CALL, text)
    if last is None:
        return None
    bracket, depth, quoted = text[last.end()], 0, ""
    for position in range(last.end(), min(len(text), last.end() + 2_000)):
        c = text[position]
        if quoted:
            quoted = "" if c == quoted and text[position - 1] != "\\" else quoted
        elif c in "\"'" and text[position - 1] in "([{=, ":
            quoted = c
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
            if depth == 0:
                inside = text[last.end() + 1 : position]
                inside = inside[match.end() :] if (match := _KEYWORD.match(inside)) else inside
                return Marked(_unquoted(inside), last.start(), position + 1, f"call {last[0]}{bracket}")
    return None


def _last_field(text: str) -> Marked | None:
    last = _last_match(_FIELD, text)
    if last is None:
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(text, last.end())
    except (json.JSONDecodeError, RecursionError, ValueError):
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int, float, list)):
        return Marked("", last.start(), end, 'field "answer"')  # null is no answer
    written = text[last.end() : end]  # a number keeps its own digits
    inside = value if isinstance(value, str) else written.strip("[]") if isinstance(value, list) else written
    return Marked(inside, last.start(), end, 'field "answer"')


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for match in pattern.finditer(text):
        found = match
    return found


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def last_hashes(text: str) -> Marked | None:
    """What follows the last ``####`` of a line of its own, as in GSM8K; not headings of sections."""
    last = None
    for match in _HASHES.finditer(text):
        if not _ITEM_HEADING.match(match[1]):
            last = match
    return None if last is None else Marked(last[1].strip(), last.start(), last.end(), "after ####")


def without_markup(text: str) -> str:
    """The text without Markdown's headings, rules, bold and code marks and HTML's tags of style; ``2**3`` keeps its stars."""
    if "#" in text or "---" in text or "===" in text or "***" in text:
        text = _HEADING.sub("", text)
    if "**" in text or "__" in text:
        text = re.sub(r"\*\*!+(?=\s|$)", "**", text)  # an exclamation behind bold is no factorial
        for pattern in _BOLD:
            text = pattern.sub(r"\1", text)
    if "`" in text:
        text = _CODE.sub(r"\1", text)
    return _HTML.sub(" ", text) if "<" in text else text


def closing_sentence(text: str) -> tuple[str, bool] | None:
    """What stands before "is the answer" at the end of the text, and whether it is denied; ``None`` for another end."""
    tail = text[-600:]
    match = _CLOSING.search(tail)
    if match is None:
        return None
    before = tail[: match.start()]
    return before, bool(re.search(r"(?i)\b(?:not|never)\b|n't\b", match["adverbs"]))
