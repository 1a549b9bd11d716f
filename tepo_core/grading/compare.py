r"""Whether an answer equals the gold: own rules for what is plain, math-verify for the rest.

``quick_verdict`` runs anywhere in bounded time. ``slow_verdict`` parses and simplifies with latex2sympy and sympy, may hang or
crash, and therefore runs only in a worker process that can be killed (:mod:`tepo_core.grading.pool`).

The gold always comes first: math-verify's ``verify(gold, target)`` is not symmetric.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Any

from tepo_core.grading.constants import constant, constant_verdict
from tepo_core.grading.exact import canonical_integer
from tepo_core.grading.extract import Answer
from tepo_core.grading.forms import MAX_FORM, ORDINAL, reduce_pair, ungroup, unwrap

MAX_CHARACTERS = 10_000  # a longer answer is not parsed
MAX_QUICK = 1_000  # a longer one is only compared as an integer and as text by the fast paths

_INVISIBLE = re.compile(  # control, bidirectional and zero-width characters
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]"
)
_SYMBOLS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ",
    "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ", "°": r"^\circ ", "²": "^{2}",
    "³": "^{3}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
    "€": "", "£": "", "\u00a0": " ", "≈": r"\approx ", "≡": r"\equiv ", "∨": r"\lor ", "’": "'", "。": ".",
}  # fmt: skip
_OUTER = re.compile(r"^(?:\$\$(.*)\$\$|\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\])$", re.DOTALL)
_LETTERS = re.compile(r"\\(?:mathrm|text|operatorname|rm|mathit)\s*\{\s*(e|i)\s*\}")
_SCIENTIFIC = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))[eE]([+-]?\d{1,4})")
_FUNCTION = re.compile(r"(?<![A-Za-z\\])(?:np\.|math\.)?(arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|exp|log|ln|sqrt)\(")
_STARS = re.compile(r"\*\*\s*(?:\(([^()]*)\)|([+-]?[\w.]+))")
_TOWER = re.compile(r"\^\s*(\d+|[A-Za-z]|\{[^{}]*\})\s*\^\s*(\d+|[A-Za-z]|\{(?:[^{}]|\{[^{}]*\})*\})(?![\d]*\s*\^)")
_EQUATION = re.compile(r"Eq\((.+),([^,]+)\)", re.DOTALL)
_DECIMAL_COMMA = re.compile(r"([+-]?(?:\d+|\d{1,3}(?:\.\d{3})+)),(\d+)")
_INDIAN = re.compile(r"[+-]?[1-9]\d?(?:,\d{2})+,\d{3}")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(?:,\d{3})+")
_PLAIN = re.compile(r"[+-]?(?:\d+(?:[.]\d+)?|\.\d+)")
_LIST = re.compile(r"\s*[+-]?(?:\d+(?:\.\d+)?|\.\d+)(?:\s*,\s*[+-]?(?:\d+(?:\.\d+)?|\.\d+))+\s*")
# x^2 is handed over as {x}^2: the same expression, but one that ANTLR predicts without its slow full-context mode.
# Not d, e, f, g and h (derivatives, exponentials, inverse functions), and not where a subscript follows.
_POWER = re.compile(
    r"((?<![A-Za-z\\_'])(?<!d )[abci-zA-Z]|\\(?:pi|theta|alpha|beta|omega|lambda))\s*\^(?=\s*(?:\d|\{[^{}]*\}|[a-z])(?!\s*_))"
)
_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|big|Big|bigl|bigr)(?![A-Za-z])|\\[,!;:]|\\[dtc]frac(?![A-Za-z])")
_CHOICE = re.compile(r"(?:\\text\s*\{|\\mathrm\s*\{)?\s*\(?([A-J])\)?\.?\s*\}?")
_TUPLE = re.compile(r"([(\[])([^()\[\]]*)([)\]])")
_SET = re.compile(r"\\\{((?:[^{}\\]|\\(?:frac|sqrt|pi)|\{[^{}]*\})*)\\\}")
_CLOCK, _RATIO = re.compile(r"\d{1,2}:0\d"), re.compile(r"\d{1,2}:\d{1,2}")  # 12:00 is a time, not twelve over nothing
_PERCENT = re.compile(
    r"(.+?)(?:\s|\\[ ,;:])*(?:\\(?:text|mathrm)\s*\{\s*)?(?:\\?%|\bper ?cent(?:age)?(?: points?)?\b|\bpct\b|(?<=\d)pct\b)\s*\}?\s*"
)


def clean(text: str) -> str:
    """Harmless differences of writing removed: invisible characters, full-width letters, digits of other scripts, unicode
    symbols, outer dollars, currency signs, a full stop at the end, dollar signs, ``np.`` and ``**`` of Python."""
    return _clean_short(text) if len(text) <= 1000 else _clean(text)


def _clean(text: str) -> str:
    if not text.isascii():
        text = "".join(_plain_character(c) for c in text)
    text = re.sub(r"\s+", " ", _INVISIBLE.sub("", text)).strip().rstrip(".;:, ")
    if len(text) > MAX_CHARACTERS:
        return text  # never parsed: compared as an integer and as text
    while outer := _OUTER.match(text):
        inner = next(group for group in outer.groups() if group is not None)
        if "$" in inner.replace("\\$", "") or not inner.strip():
            break
        text = inner.strip().rstrip(".;:, ")
    text = re.sub(r"\\\$|(?<!\\)\$", "", text)
    text = re.sub(r"(?<=\d),\\!(?=\d)", ",", text)
    text = re.sub(r"(?<!\\)%", r"\\%", text)
    text = _LETTERS.sub(r"\1", text)
    if match := ORDINAL.fullmatch(text):
        return match[1]
    if match := _SCIENTIFIC.fullmatch(text):
        return rf"{match[1]}\times 10^{{{int(match[2])}}}"
    if match := _EQUATION.fullmatch(text):
        text = f"{match[1]}={match[2]}"
    text = _STARS.sub(lambda m: "^{" + (m[1] or m[2]) + "}", text)
    for _ in range(8):  # a^b^c is a^(b^c); latex2sympy would read (a^b)^c
        text, changed = _TOWER.subn(r"^{\1^\2}", text)
        if not changed:
            break
    text = _FUNCTION.sub(r"\\\1(", text)
    text = re.sub(r"(?<=\d)\.(?![\d.])", "", text).strip()
    return ungroup(unwrap(text)) if 1 < len(text) <= MAX_FORM and not text.isdecimal() else text


_clean_short = lru_cache(maxsize=4096)(_clean)


def _plain_character(c: str) -> str:
    if c in _SYMBOLS:
        return _SYMBOLS[c]
    if "\uff01" <= c <= "\uff5e":  # full-width forms of ASCII
        return chr(ord(c) - 0xFEE0)
    digit = unicodedata.decimal(c, None)
    return c if digit is None else str(digit)


def quick_verdict(gold: Answer, answer: Answer) -> bool | None:
    """Verdict on integers, equal texts, numeric constants and multiple choice; ``None`` when the slow path must decide."""
    return quick_reason(gold, answer)[0]


def quick_reason(gold: Answer, answer: Answer) -> tuple[bool | None, str]:
    """:func:`quick_verdict` with the rule that decided, for people; empty without a verdict."""
    g, a = clean(gold.text), clean(answer.text)
    if a and layout_free(g) == layout_free(a):
        return True, "equal texts"
    g_whole, a_whole = integer(g), integer(a)
    if g_whole is not None and a_whole is not None:
        return g_whole == a_whole, "integers compared by value"
    if max(len(g), len(a)) > MAX_QUICK:
        return None, ""
    if gold.bare and answer.bare and _LIST.fullmatch(gold.text) and _LIST.fullmatch(answer.text):
        # Typed lists outside mathematics keep their order; in a box or in mathematics a list is a set of solutions.
        left, right = gold.text.split(","), answer.text.split(",")
        if len(left) > 2 or len(right) > 2 or ", " in gold.text:  # "3,5" may also be a number with a decimal comma
            same = len(left) == len(right) and all(constant_verdict(*pair) for pair in zip(left, right, strict=True))
            return same, "lists typed outside mathematics, compared in order"
    if _CLOCK.fullmatch(g) and (_CLOCK.fullmatch(a) or _RATIO.fullmatch(a)):
        return g.lstrip("0") == a.lstrip("0"), "times of day"
    choice = _CHOICE.fullmatch(g)
    if choice and (other := _CHOICE.fullmatch(a)):
        return choice[1] == other[1], "letters of a choice"
    return _reduced_reason(*reduce_pair(g, a))


def _reduced_reason(g: str, a: str, verdict: bool | None, rules: tuple[str, ...]) -> tuple[bool | None, str]:
    """Verdict on two reduced answers, and why."""
    if verdict is not None:
        return verdict, rules[-1]
    if rules and a and (layout_free(g) == layout_free(a) or (integer(g) is not None and integer(g) == integer(a))):
        return True, "equal after " + "; ".join(rules)
    g, a = decimal_comma(g, a), decimal_comma(a, g)
    if _PERCENT.fullmatch(g) or _PERCENT.fullmatch(a):
        return _percentage(g, a), "percentages"
    for verdict, why in (
        (constant_verdict(g, a), "numbers compared by value"),
        (_bracketed(layout_free(g), layout_free(a)), "elements compared by value"),
    ):
        if verdict is not None:
            return verdict, why
    return None, ""


def layout_free(text: str) -> str:
    """The text without spaces (except between digits) and without commands that change its looks alone."""
    text = _LAYOUT.sub(lambda m: "\\frac" if m[0].endswith("frac") else "", text)
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def integer(text: str) -> str | None:
    """Canonical integer of a cleaned answer, thousands separators removed; ``None`` for anything else."""
    return canonical_integer(text.replace(",", "") if "," in text and _THOUSANDS.fullmatch(text) else text)


def _bracketed(gold: str, answer: str) -> bool | None:
    """Tuples and intervals (ordered) and sets in braces (unordered) of numeric constants, element by element."""
    for pattern in (_TUPLE, _SET):
        left, right = pattern.fullmatch(gold), pattern.fullmatch(answer)
        if left and right and (pattern is _SET or (left[1], left[3]) == (right[1], right[3])):
            break
    else:
        return None
    ours, theirs = (match[2 if pattern is _TUPLE else 1].split(",") for match in (left, right))
    if pattern is _TUPLE:
        if len(ours) < 2 or len(ours) != len(theirs):
            return None
        verdicts = [constant_verdict(*pair) for pair in zip(ours, theirs, strict=True)]
        return None if None in verdicts else all(verdicts)
    if max(len(ours), len(theirs)) > 12:
        return None
    table = [[constant_verdict(x, y) for y in theirs] for x in ours]
    if any(None in row for row in table):
        return None
    return all(any(row) for row in table) and all(any(column) for column in zip(*table, strict=True))


def _percentage(gold: str, answer: str) -> bool | None:
    """28 % is answered by 28 % and by 28 (the sign may stand in the question), and by its value 0.28; so, the other way round,
    0.28 is answered by 28 %, and 28 too. A gold below 2 is a value: 1 is answered by 100 % and not by 1 %."""
    ours, theirs = _PERCENT.fullmatch(gold), _PERCENT.fullmatch(answer)
    expected, found = (constant(match[1] if match else text) for match, text in ((ours, gold), (theirs, answer)))
    if expected is None or found is None:
        return None
    g, a = expected[0], found[0]
    if ours and theirs:
        return g == a
    if ours:
        return g == a or g / 100 == a
    return g == a / 100 or (g == a and abs(g) >= 2)


def decimal_comma(text: str, other: str) -> str:
    """``1000,99`` and ``1.000,99`` against a single number have a decimal comma, and ``12,34,567`` against an integer groups
    digits as in India; against anything else they are lists."""
    if not _PLAIN.fullmatch(other):
        return text
    if _INDIAN.fullmatch(text) and integer(other) is not None:
        return text.replace(",", "")
    match = _DECIMAL_COMMA.fullmatch(text)
    if match and not _THOUSANDS.fullmatch(text):
        return f"{match[1].replace('.', '')}.{match[2]}"
    return text


class Unreadable(Exception):
    """The gold cannot be read as mathematics, so nothing can be judged against it."""


def slow_verdict(gold: Answer, answer: Answer) -> bool:
    """Verdict of math-verify on the cleaned and reduced texts. Raises :class:`Unreadable` when the gold cannot be parsed and the
    texts differ, and lets ``RecursionError`` and ``MemoryError`` through: these are no verdicts."""
    return slow_reason(gold, answer)[0]


def slow_reason(gold: Answer, answer: Answer) -> tuple[bool, str]:
    """:func:`slow_verdict` with the rule that decided, for people."""
    g, a = clean(gold.text), clean(answer.text)
    if max(len(g), len(a)) > MAX_CHARACTERS:
        raise Unreadable(f"an answer of {max(len(g), len(a))} characters is not parsed (limit {MAX_CHARACTERS})")
    g, a, verdict, rules = reduce_pair(g, a)
    if verdict is not None:
        return verdict, rules[-1]
    g, a = decimal_comma(g, a), decimal_comma(a, g)
    if percent := _PERCENT.fullmatch(g):  # latex2sympy reads no sign of percent behind a space
        g, a = percent[1], theirs[1] if (theirs := _PERCENT.fullmatch(a)) else a
    expected, found = parse(g), parse(a)
    if expected is None or found is None:
        if expected is None and _as_text(g) != _as_text(a):
            raise Unreadable(f"the gold {g[:80]!r} cannot be read as mathematics")
        return _as_text(g) == _as_text(a), f"the {'gold' if expected is None else 'answer'} is no mathematics: texts compared"
    from math_verify import verify

    if (shortcut := _shortcut(expected, found)) is not None:
        return shortcut, "difference of the expressions " + ("expands to 0" if shortcut else "is not 0 at a point")
    same = verify(expected, found, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp=True)
    return bool(same), "math-verify"


def _shortcut(expected: Any, found: Any) -> bool | None:
    """False when two plain expressions clearly differ at one point, True when their difference expands to zero; otherwise
    ``None``: math-verify decides. Both are cheaper than asking sympy to simplify the difference."""
    from sympy import Expr, Float, Symbol, UnevaluatedExpr, zoo

    for expression in (expected, found):
        if not isinstance(expression, Expr) or isinstance(expression, Symbol) or expression.has(UnevaluatedExpr, zoo):
            return None
    symbols = sorted(expected.free_symbols | found.free_symbols, key=str)
    point = {symbol: Float(0.7 + (0.6180339887 * (i + 1)) % 1) for i, symbol in enumerate(symbols)}
    try:
        x, y = (complex(expression.evalf(10, subs=point)) for expression in (expected, found))
        if abs(x - y) > 1e-3 * max(1.0, abs(x), abs(y)):  # false for nan and infinities
            return False
    except (TypeError, ValueError, AttributeError, NotImplementedError, ArithmeticError):
        return None  # also beyond the range of a float
    return True if (expected - found).expand() == 0 else None


def _as_text(text: str) -> str:
    return re.sub(r"\\text(?:bf|it|rm)?|\\mathrm|[\s{}]", "", text).casefold()


@lru_cache(maxsize=256)
def parse(text: str) -> Any:
    """Sympy expression of a cleaned answer; ``None`` when latex2sympy cannot read it."""
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, normalize_latex
    from math_verify.parser import parse_latex_cached

    config = NormalizationConfig(basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none")
    try:
        return parse_latex_cached(_POWER.sub(r"{\1}^", normalize_latex(text, config)))
    except (RecursionError, MemoryError):
        raise
    except Exception:  # latex2sympy raises bare Exception on a syntax error
        return None
