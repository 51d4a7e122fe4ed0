"""Brings sums and products to one order, so that `2 + 5sqrt(3)` and `5sqrt(3) + 2` are spelt alike. Nothing
is calculated."""

import re
from collections.abc import Sequence
from fractions import Fraction

_TOKEN = re.compile(r"\d+(?:\.\d+)?|[A-Za-z]+|[-+*/^()]")
_RELATIONS = re.compile(r"(<=|>=|!=|~=|<|>|=)")
_FUNCTIONS = (
    "sqrt",
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "log",
    "ln",
    "exp",
    "arcsin",
    "arccos",
    "arctan",
)
_NAMES = ("pi", "alpha", "beta", "gamma", "delta", "theta", "lambda", "mu", "phi", "omega")
_UNBRACKETED = re.compile(rf"({'|'.join(_FUNCTIONS[1:])})([A-Za-z]|{'|'.join(_NAMES)})")
"""A function and the letter that it applies to, without the blank between them."""
_APPLIED_LETTERS = "fghFGHP"
"""Letters that are functions where a parenthesis follows: `f(x)` is no product."""
_MAX_DEPTH = 20


def in_order(text: str) -> str:
    """A canonical text (`expressions.canonical`) with the terms of its sums and the factors of its products
    in one order, on each side of its relations. What isn't made of such terms stays as it is.

    >>> in_order("2+5sqrt(3)") == in_order("5sqrt(3)+2"), in_order("new")
    (True, 'new')
    >>> in_order("3/2sqrt(2)") == in_order("3sqrt(2)/2")
    True
    """
    parts = _RELATIONS.split(text)
    parts[::2] = [_ordered_side(side) for side in parts[::2]]
    if parts[1::2] == ["="]:
        parts[::2] = sorted(parts[::2])
    return "".join(parts)


def _ordered_side(side: str) -> str:
    if not re.search(r"[-+*/^\d(]", side):
        return side  # words aren't factors that may change places
    tokens = _TOKEN.findall(side)
    if "".join(tokens) != side:
        return side
    try:
        return _Terms(tokens).whole()
    except (ValueError, IndexError):
        return side


class _Terms:
    """Reads a sum off its tokens, once from left to right. Raises ValueError or IndexError for anything
    else."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = [*tokens, ""]
        self.place = 0
        self.depth = 0

    def whole(self) -> str:
        terms = self._sum("")
        return _joined(terms)

    def _sum(self, closing: str) -> list[str]:
        """The terms up to `closing`, each with its sign, in order."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ValueError("too deep")
        terms = []
        while True:
            sign = self._sign()
            terms.append(self._product(sign))
            token = self.tokens[self.place]
            if token == closing:
                self.place += 1
                break
            if token not in ("+", "-"):
                raise ValueError(f"{token!r} ends a term")
        self.depth -= 1
        return sorted(terms)

    def _sign(self) -> str:
        token = self.tokens[self.place]
        if token not in ("+", "-"):
            return "+"
        self.place += 1
        return token

    def _product(self, sign: str) -> str:
        above: list[str] = []
        below: list[str] = []
        is_above = True
        while True:
            factor_sign, over, under = self._factor()
            if factor_sign == "-":
                sign = "-" if sign == "+" else "+"
            above += over if is_above else under
            below += under if is_above else over
            token = self.tokens[self.place]
            is_above = token != "/"
            if token in ("*", "/"):
                self.place += 1
            elif not (token.isalpha() or token == "("):
                break
        dividend = _product_of(above) or "1"
        divisor = _product_of(below)
        if divisor:
            return f"{sign}{dividend}/{divisor}"
        return f"{sign}{dividend}"

    def _factor(self) -> tuple[str, list[str], list[str]]:
        """The sign of a factor, and its factors above and below the line: a sum of one term in parentheses is
        a product."""
        token = self.tokens[self.place]
        self.place += 1
        if token == "(":
            terms = self._sum(")")
            if len(terms) > 1 or self.tokens[self.place] == "^":
                return "+", [self._power(f"({_joined(terms)})")], []
            sign = terms[0][0]
            product = terms[0][1:]
            if "(" in product:
                return sign, [product], []
            over, _, under = product.partition("/")
            return sign, over.split("*"), under.split("*") if under else []
        if token[:1].isdigit():
            if self.tokens[self.place] == "^":
                return "+", [self._power(token)], []
            value = Fraction(token)
            return "+", [str(value.numerator)], [str(value.denominator)]
        if not token.isalpha():
            raise ValueError(f"{token!r} isn't a factor")
        return "+", [self._power(self._named(token))], []

    def _named(self, name: str) -> str:
        follows = self.tokens[self.place]
        if name in _FUNCTIONS or (name in _APPLIED_LETTERS and follows == "("):
            return f"{name}({self._function_argument(follows)})"
        unbracketed = _UNBRACKETED.fullmatch(name)
        if unbracketed and follows in ("", "+", "-", ")"):
            return f"{unbracketed[1]}({unbracketed[2]})"
        if len(name) > 2 and name not in _NAMES:
            raise ValueError(f"{name} is a word")
        return name

    def _function_argument(self, follows: str) -> str:
        self.place += 1
        if follows == "(":
            return _joined(self._sum(")"))
        is_whole = self.tokens[self.place] in ("", "+", "-", ")")
        if not is_whole or not follows.isalnum() or follows in _FUNCTIONS:
            raise ValueError("what the function applies to isn't clear")
        return _joined([f"+{follows}"])

    def _power(self, base: str) -> str:
        if self.tokens[self.place] != "^":
            return base
        if self.tokens[self.place + 1] != "(":
            raise ValueError("an exponent is in parentheses")
        self.place += 2
        return f"{base}^({_joined(self._sum(')'))})"


def _product_of(factors: Sequence[str]) -> str:
    return "*".join(sorted(factor for factor in factors if factor != "1"))


def _joined(terms: Sequence[str]) -> str:
    return "".join(terms).removeprefix("+")
