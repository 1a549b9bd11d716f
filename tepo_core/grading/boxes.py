"""Finding ``\\boxed{...}`` in a text."""

from __future__ import annotations

import re

# One pass over the text: an opened box (also with its backslash doubled by careless escaping), an escaped character (so that
# \{ and \} are not groups), or a brace.
_TOKENS = re.compile(
    r"(?P<box>\\+(?:boxed|fbox)\s*\{)|(?P<bare>\\+boxed\s*(?=[-+\\\d]))|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL
)


def boxes(text: str) -> list[tuple[int, int, int, int]]:
    r"""The complete ``\boxed{...}`` and ``\fbox{...}`` of ``text`` that lie in no other complete box, from left to right.

    Each is (start of the command, start of the content, end of the content, end of the box). A box whose whole content is
    a box is unwrapped. Complete means that the braces balance. None at all when the last box opened never closes, or is written
    without braces (``\boxed 5``): the answer was not given in the form asked for, and an earlier box is not the answer. Linear in
    the length of the text.
    """
    first = min((i for i in (text.find("\\boxed"), text.find("\\fbox")) if i >= 0), default=-1)
    if first < 0:
        return []
    stack: list[tuple[int, int]] = []  # open groups: start of the command and of the content; (-1, -1) for a plain brace
    closed: dict[int, tuple[int, int]] = {}  # complete boxes: start of the command -> start and end of the content
    outer: list[int] = []
    opened = -1  # the box opened last
    for token in _TOKENS.finditer(text, first):
        if token["box"]:
            stack.append((token.start(), token.end()))
            opened = token.start()
        elif token["bare"]:
            opened = token.start()
        elif token["open"]:
            stack.append((-1, -1))
        elif token["close"] and stack:
            command, content = stack.pop()
            if command >= 0:
                while outer and outer[-1] > command:
                    outer.pop()
                outer.append(command)
                closed[command] = (content, token.start())
    if opened not in closed:
        return []
    return [(command, *_unwrap(text, closed, *closed[command]), closed[command][1] + 1) for command in outer]


def _unwrap(text: str, closed: dict[int, tuple[int, int]], begin: int, end: int) -> tuple[int, int]:
    while True:
        while begin < end and text[begin].isspace():
            begin += 1
        while begin < end and text[end - 1].isspace():
            end -= 1
        inner = closed.get(begin)
        if inner is None or inner[1] + 1 != end:
            return begin, end
        begin, end = inner


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{...}`` (or ``\fbox{...}``) of ``text``; ``None`` without one or when it never closes.

    A box that contains another one is the later of the two. See :func:`boxes`.
    """
    found = boxes(text)
    return text[found[-1][1] : found[-1][2]] if found else None
