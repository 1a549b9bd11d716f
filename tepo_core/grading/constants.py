r"""Answers that are plain numbers, compared exactly without a computer algebra system.

``constant_verdict`` decides the common case (integers, fractions, decimals, roots, multiples of pi) in microseconds and
gives no verdict on anything else: the slow path of :mod:`tepo_core.grading.compare` decides then. Its verdicts are the slow
path's: exact values are equal when they are equal, a decimal is compared after rounding both sides to six places.
All work is bounded: short texts, few digits, small exponents.
"""

from __future__ import annotations

import re
from decimal import Context, Decimal
from fractions import Fraction
from math import isqrt

MAX_LENGTH, MAX_DIGITS, MAX_EXPONENT, MAX_DEPTH = 160, 60, 64, 12
_CONTEXT = Context(prec=60)
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
_INTEGER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)")
_DECIMAL = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?\.\d+")
_TOKEN = re.compile(
    r"\s+|\\[,!;: ]|\\(?:left|right|displaystyle)(?![A-Za-z])|"
    r"(?P<frac>\\[dtc]?frac(?![A-Za-z]))|(?P<sqrt>\\sqrt(?![A-Za-z]))|(?P<pi>\\pi(?![A-Za-z]))|"
    r"(?P<times>\\cdot(?![A-Za-z])|\\times(?![A-Za-z])|\*(?!\*))|(?P<number>\d+)|(?P<sign>[-+/^(){}\[\]])"
)
Value = Fraction | Decimal


class _Unknown(Exception):
    """Outside the grammar: no verdict."""


def constant_verdict(gold: str, answer: str) -> bool | None:
    """Whether two cleaned answers are the same number; ``None`` unless both are numbers of the grammar and it is certain."""
    left, right = constant(gold), constant(answer)
    if left is None or right is None:
        return None
    (x, x_decimal), (y, y_decimal) = left, right
    if x_decimal or y_decimal:
        return _same_to_six_places(x, y)
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x == y
    gap = abs(_CONTEXT.subtract(_as_decimal(x), _as_decimal(y)))
    scale = max(Decimal(1), abs(_as_decimal(x)))
    if gap < scale * Decimal("1e-45"):
        return True
    return False if gap > scale * Decimal("1e-9") else None


def constant(text: str) -> tuple[Value, bool] | None:
    """Value of a constant, and whether it is written as a decimal; ``None`` outside the grammar."""
    if len(text) > MAX_LENGTH:
        return None
    text = text.strip()
    if _INTEGER.fullmatch(text):
        digits = text.replace(",", "")
        return (Fraction(int(digits)), False) if len(digits) <= MAX_DIGITS else None
    if _DECIMAL.fullmatch(text):
        digits = text.replace(",", "")
        return (Fraction(digits), True) if len(digits) <= 15 else None  # a float has no more digits to compare
    try:
        return _Parser(text).value(), False
    except (_Unknown, ArithmeticError):
        return None


def _same_to_six_places(x: Value, y: Value) -> bool | None:
    rounded = []
    for value in (x, y):
        scaled = _CONTEXT.multiply(_as_decimal(value), Decimal(1_000_000))
        if abs(scaled) > Decimal("1e13"):
            return None  # beyond the digits of a float
        whole = scaled.to_integral_value()
        if abs(abs(scaled - whole) - Decimal("0.5")) < Decimal("1e-3"):
            return None  # too near a tie to be sure which way a float rounds
        rounded.append(whole)
    return rounded[0] == rounded[1]


def _as_decimal(value: Value) -> Decimal:
    if isinstance(value, Decimal):
        return value
    return _CONTEXT.divide(Decimal(value.numerator), Decimal(value.denominator))


class _Parser:
    """Recursive descent over a small grammar whose reading nobody disputes; everything else is unknown."""

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise _Unknown
            if match.lastgroup:
                kind = match[0] if match.lastgroup == "sign" else match.lastgroup
                self.tokens.append((kind, match[0]))
            position = match.end()
        self.at, self.depth = 0, 0

    def value(self) -> Value:
        result = self.sum()
        if self.at != len(self.tokens):
            raise _Unknown
        return result

    def peek(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def take(self, kind: str) -> str:
        if self.peek() != kind:
            raise _Unknown
        self.at += 1
        return self.tokens[self.at - 1][1]

    def sum(self) -> Value:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _Unknown
        sign = -1 if self.peek() == "-" else 1
        if self.peek() in ("-", "+"):
            self.at += 1
        total = _times(Fraction(sign), self.product())
        while self.peek() in ("+", "-"):
            sign = 1 if self.tokens[self.at][0] == "+" else -1
            self.at += 1
            total = _plus(total, _times(Fraction(sign), self.product()))
        self.depth -= 1
        return total

    def product(self) -> Value:
        kind, divided = self.peek(), False
        result = self.power()
        while True:
            following = self.peek()
            if following == "times" and not divided:
                self.at += 1
                result = _times(result, self.power())
            elif following == "/" and not divided:
                self.at += 1
                divided = True  # a/bc and a/b/c are read in more than one way
                result = _over(result, self.power())
            elif following in ("sqrt", "pi") and kind in ("number", "frac", "sqrt", "pi") and not divided:
                result = _times(result, self.power())
            else:
                return result
            kind = following

    def power(self) -> Value:
        base = self.atom()
        if self.peek() != "^":
            return base
        self.at += 1
        if self.peek() == "{":
            self.at += 1
            exponent = self.sum()
            self.take("}")
        else:
            exponent = Fraction(int(self.digit()))
        whole = isinstance(exponent, Fraction) and exponent.denominator == 1 and abs(exponent) <= MAX_EXPONENT
        if not whole or not isinstance(base, Fraction) or (base == 0 and exponent <= 0):
            raise _Unknown
        return base ** int(exponent)

    def atom(self) -> Value:
        kind = self.peek()
        if kind == "number":
            digits = self.take("number")
            if len(digits) > MAX_DIGITS:
                raise _Unknown
            return Fraction(int(digits))
        if kind == "pi":
            self.at += 1
            return _PI
        if kind in ("(", "{"):
            self.at += 1
            inner = self.sum()
            self.take(")" if kind == "(" else "}")
            return inner
        if kind == "frac":
            self.at += 1
            return _over(self.argument(), self.argument())
        if kind == "sqrt":
            self.at += 1
            return _root(self.argument())
        raise _Unknown

    def argument(self) -> Value:
        if self.peek() == "{":
            self.at += 1
            inner = self.sum()
            self.take("}")
            return inner
        return Fraction(int(self.digit()))

    def digit(self) -> str:
        r"""The next digit alone, as in ``\frac12``; a number of several digits is split."""
        digits = self.take("number")
        if len(digits) > 1:
            if len(digits) > 2 or self.tokens[self.at - 2][0] != "frac":
                raise _Unknown
            self.at -= 1
            self.tokens[self.at] = ("number", digits[1:])
        return digits[0]


def _times(x: Value, y: Value) -> Value:
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x * y
    return _bounded(_CONTEXT.multiply(_as_decimal(x), _as_decimal(y)))


def _plus(x: Value, y: Value) -> Value:
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x + y
    return _bounded(_CONTEXT.add(_as_decimal(x), _as_decimal(y)))


def _over(x: Value, y: Value) -> Value:
    if y == 0:
        raise _Unknown
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x / y
    return _bounded(_CONTEXT.divide(_as_decimal(x), _bounded(_as_decimal(y))))


def _root(x: Value) -> Value:
    if x < 0:
        raise _Unknown
    if isinstance(x, Fraction):
        top, bottom = isqrt(x.numerator), isqrt(x.denominator)
        if top * top == x.numerator and bottom * bottom == x.denominator:
            return Fraction(top, bottom)
    return _bounded(_CONTEXT.sqrt(_as_decimal(x)))


def _bounded(x: Decimal) -> Decimal:
    """Only sizes that leave 60 digits enough to spare after cancellation."""
    if x != 0 and not Decimal("1e-10") < abs(x) < Decimal("1e10"):
        raise _Unknown
    return x
