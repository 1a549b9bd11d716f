"""Fenced blocks of code in a response, as models write them rather than as CommonMark wants them. Linear in the text.

A backtick fence closes at the first run of backticks that is outside the program's strings and comments, for nothing else in
Python is written so: behind code, before text, at any indentation. A fence inside a docstring is part of the program.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_OPENING = re.compile(
    r"^(?P<indent>[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*)(?P<mark>`{3,}|~{3,})(?P<info>[^`\n]*)(?:\n|\Z)", re.MULTILINE
)
SKIPPED = (
    r"""\#[^\n]*|(?P<quote>\"{3}|'{3})|"(?:\\.|[^"\\\n]|\\$)*"?|'(?:\\.|[^'\\\n]|\\$)*'?"""  # comments and strings of Python
)
_TOKEN = re.compile(SKIPPED + r"|(?P<mark>`{3,}|^[ \t]*~{3,}(?=[ \t]*$))", re.MULTILINE)
_NAMES = "(?:python|py|python3|py3|pycon|text|txt|plaintext|bash|sh|shell|console|output|json|markdown|md)"
_LANGUAGE = re.compile(rf"{_NAMES}(?![^\s{{:])|[ \t]+{_NAMES}[ \t]*$", re.IGNORECASE | re.MULTILINE)


class Block(NamedTuple):
    """Code between fences, without the indentation of the fence; ``closed``: whether it has an end."""

    code: str
    closed: bool


def fenced_blocks(text: str) -> list[Block]:
    """The fenced blocks of a text with ``\\n`` line ends, in order. Indented fences and those behind a bullet count."""
    found, position = [], 0
    endless: set[str] = set()
    while opening := _OPENING.search(text, position):
        mark = _closing(text, opening.end(), opening["mark"], endless)
        closed = mark is not None and not _opens_another(text, mark)
        end = len(text) if mark is None else mark.start()
        found.append(Block(_dedented(text[opening.end() : end], opening["indent"]), closed))
        position = len(text) if mark is None else mark.end() if closed else _line_start(text, end)
    return found


def is_unfenced(text: str) -> bool:
    """Whether every fence of the text is inside a string or comment of Python."""
    tilde = any(opening["mark"][0] == "~" for opening in _OPENING.finditer(text))
    return not tilde and _closing(text, 0, "```", set()) is None


def skip_string(text: str, quote: str, start: int, endless: set[str]) -> int:
    """Where the string in triple quotes ends whose content starts at ``start``; -1 if it never does. Then no later one of this text
    does, and ``endless`` remembers it."""
    if quote in endless:
        return -1
    end = text.find(quote, start)
    while end > start and _backslashes(text, start, end) % 2:  # an escaped quote
        end = text.find(quote, end + 1)
    if end < 0:
        endless.add(quote)
    return -1 if end < 0 else end + len(quote)


def _backslashes(text: str, start: int, end: int) -> int:
    """How many stand directly before ``end``."""
    first = end
    while first > start and text[first - 1] == "\\":
        first -= 1
    return end - first


def _closing(text: str, start: int, opened: str, endless: set[str]) -> re.Match[str] | None:
    """The fence that ends a block of code whose content starts at ``start``; None where there is none."""
    position = start
    while token := _TOKEN.search(text, position):
        position = token.end()
        if quote := token["quote"]:
            end = skip_string(text, quote, position, endless)
            if end >= 0 and _in_pairs(text, position, end, opened):
                position = end
        elif (mark := (token["mark"] or "").strip()) and mark[0] == opened[0] and len(mark) >= len(opened):
            return token
    return None


def _in_pairs(text: str, start: int, end: int, opened: str) -> bool:
    """Whether the fences between two triple quotes open and close in turn, as in a docstring with an example. Else the first quote
    belongs to a string that never ends, and the second to another block."""
    infos = [m["info"] for m in _OPENING.finditer(text, start, end) if m["mark"].startswith(opened)]
    return len(infos) % 2 == 0 and not any(info.strip() for info in infos[1::2])


def _opens_another(text: str, mark: re.Match[str]) -> bool:
    """Whether a fence inside an open block names a language: the block was given up, and this is the next one."""
    alone = not text[_line_start(text, mark.start()) : mark.start()].strip(" \t")
    return alone and _LANGUAGE.match(text, mark.end()) is not None


def _line_start(text: str, position: int) -> int:
    return text.rfind("\n", 0, position) + 1


def _dedented(code: str, indent: str) -> str:
    """The code without the columns that its fence is indented by; as it stands where it does not follow its fence."""
    columns = len(indent.expandtabs(4))
    first = next((line for line in code.split("\n") if line.strip()), "")
    if not columns or first[:1] not in (" ", "\t"):
        return code
    lines = []
    for line in code.split("\n"):
        rest = line.lstrip(" \t")
        width = len(line[: len(line) - len(rest)].expandtabs(4))
        lines.append(" " * max(0, width - columns) + rest)
    return "\n".join(lines)
