"""Reads one number, with its sign, separators, percent sign, currency and unit, off the plain text of an
answer."""

import re
from fractions import Fraction
from typing import NamedTuple

TOLERANCE = 1e-4
"""Decimal numbers that differ by less than this, or than this share of a number below 1, are the same
answer."""
ROUNDING = Fraction(1, 10**12)
"""What a float's arithmetic may add to a number that is exact."""
_MAX_DIGITS = 300
"""No float has more digits before its point."""
_MAX_EXPONENT = 300
_MAX_POWER = 20
_MAX_BITS = 100
"""No larger number is raised to a power, so that towers of powers end."""

_DECIMAL = (
    r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d{1,3}(?: \d{3})+(?:\.\d+)?|\d{1,2}(?:,\d{2})+,\d{3}(?:\.\d+)?"
    r"|\d{1,3}(?:\.\d{3}){2,}|\d+(?:\.\d*)?|\.\d+)"
)
_CURRENCY = r"(?:US|C|A)?[¤$€£¥₹]|USD|EUR|GBP|INR|Rs\.?"
_NUMBER = re.compile(
    rf"(?P<sign>[-+])?\s*(?P<currency>{_CURRENCY})?\s*(?P<sign2>[-+])?\s*(?:(?P<whole>\d{{1,9}}) +(?=\d+ "
    rf"?/))?"
    rf"(?P<number>{_DECIMAL})"
    r"(?:[eE](?P<exponent>[-+]?\d{1,4})|\s*[*x]\s*10\s*\^\s*\(?\s*(?P<power>[-+]?\d{1,4})\s*\)?)?"
    r"(?:\s*/\s*(?P<under>-?\d+(?:\.\d+)?))?"
    r"(?P<currency2>\s*[¤€£]|/-)?"
)
_BRACKETED_DENOMINATOR = re.compile(r"/\s*\(\s*([-+]?\d+(?:\.\d+)?)\s*\)")
_POWER_OF_TEN = re.compile(r"^([-+]?)10\s*\^\s*(?=\(?\s*-?\d)")
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = re.compile(rf"\s*\b({'|'.join(_SCALES)})\b", re.IGNORECASE)
_PERCENT = re.compile(r"\s*(?:%|percent(?:age points?)?\b|per cent\b|pct\b)", re.IGNORECASE)
UNITS: dict[str, str] = {
    word: unit
    for unit, words in {
        "m": "m meter meters metre metres",
        "cm": "cm centimeter centimeters centimetre centimetres",
        "mm": "mm millimeter millimeters millimetre millimetres",
        "km": "km kilometer kilometers kilometre kilometres",
        "in": "inch inches",
        "ft": "ft foot feet",
        "yd": "yd yard yards",
        "mile": "mi mile miles",
        "g": "g gram grams",
        "kg": "kg kilogram kilograms",
        "mg": "mg milligram milligrams",
        "lb": "lb lbs pound pounds",
        "oz": "oz ounce ounces",
        "ton": "ton tons tonne tonnes",
        "s": "s sec secs second seconds",
        "min": "min mins minute minutes",
        "h": "h hr hrs hour hours",
        "day": "day days",
        "week": "week weeks",
        "month": "month months",
        "year": "year years yr yrs",
        "l": "l L liter liters litre litres",
        "ml": "ml mL milliliter milliliters millilitre millilitres",
        "degrees": "degree degrees deg",
        "radians": "radian radians rad",
        "dollars": "dollar dollars USD",
        "cents": "cent cents",
        "euros": "euro euros EUR",
        "pence": "pence",
        "mile/h": "mph",
        "km/h": "km/h kph",
        "m/s": "m/s",
    }.items()
    for word in words.split()
}
"""Words for the units that exclude each other. Other words (apples) say nothing: they may be left out, or
differ."""
_LENGTHS = ("m", "cm", "mm", "km", "ft", "yd", "mile")
_TIMES = ("s", "min", "h")
_RATE = re.compile(r"([A-Za-z]+)(?:/| per | an? )([A-Za-z]+)")
_AREA = re.compile(r"(square|sq\.?|cubic|cu\.?) ([A-Za-z]+)|([A-Za-z]+) (squared|cubed)", re.IGNORECASE)
_CURRENCIES = {"¤": "dollars", "$": "dollars", "€": "euros", "£": "lb", "USD": "dollars", "EUR": "euros"}
"""The pound has the unit of the word `pounds`, of money as of weight."""

NOT_UNITS = re.compile(
    r"\b(?:or|and|plus|minus|times "
    r"(?:the|as)|mod|modulo|choose|factorial|squared|cubed|pi|sqrt|root|inf|infinity|sin|cos|tan"
    r"|log|ln|exp|cup|cap|hal(?:f|ves)|thirds?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|hundredths?"
    r"|dozens?|scores?|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|sixty"
    r"|more than|less than|out of|of the|at least|at most|not|isn't|matrix|cases|remainder"
    r"|base|but|if|when|unless|except|either|neither|nor|wrong|incorrect)\b",
    re.IGNORECASE,
)
"""Words that make more of a number than its unit does."""
_WORD = r"[A-Za-z][A-Za-z'/-]+(?:\^\([23]\))?"
_UNIT_WORDS = re.compile(rf"(?:{_WORD}|[mgshlL]\b(?:\^\([23]\))?)(?:[\s,.]+(?:{_WORD}|a\b)){{0,12}}")
_ASIDE = re.compile(
    r"(?P<unit>[A-Za-z][A-Za-z' -]{1,40}?) "
    r"(?:in|for|after|per|within|during|over|every|each|from|on|at) (?:each of |all |the |these )*\d[\w "
    r",.]{0,60}"
)
"""A unit and what it holds for: `apples in 3 days`, `dollars for each of the 3 friends`."""


class Quantity(NamedTuple):
    """A number that a text states. For 50% the value is 50."""

    value: float
    is_percent: bool = False
    exact: Fraction = Fraction(0)
    """The number without rounding."""
    unit: str = ""
    """The unit or currency, if it is one of those that exclude each other."""
    is_fraction: bool = False
    """Whether it is written as a fraction."""

    @property
    def _kind(self) -> str:
        """What is counted: a percentage or a known unit; "" if nothing is said."""
        return "%" if self.is_percent else self.unit

    def equals(self, quantity: "Quantity") -> bool:
        """Whether both are the same answer: whole numbers and fractions exactly, decimal numbers within
        `TOLERANCE`. If only one of the two is a percentage, 50% counts as 50 and as 0.5. Two different known
        units, or one and a percentage, are two answers."""
        if self._kind and quantity._kind and self._kind != quantity._kind:
            return False
        if self._is_near(quantity.exact, quantity.is_fraction):
            return True
        if self.is_percent == quantity.is_percent:
            return False
        factor = Fraction(1, 100) if quantity.is_percent else Fraction(100)
        return self._is_near(quantity.exact * factor, quantity.is_fraction)

    def _is_near(self, value: Fraction, is_fraction: bool) -> bool:
        size = abs(value)
        difference = abs(self.exact - value)
        if difference <= ROUNDING * max(Fraction(1), size):
            return True
        has_whole = self.exact.denominator == 1 or value.denominator == 1
        if has_whole or self.is_fraction or is_fraction:
            return False
        return difference < Fraction(TOLERANCE) * min(Fraction(1), size)


def read_quantity(text: str, has_unit: bool = True) -> Quantity | None:
    """The number that the plain text (`math_text.plain_math`) is. None if it is anything else: a root, a
    list, a mixed unit, an inequality. Without `has_unit`, no word may stand beside the number.

    >>> read_quantity("-¤1,234.50").value, read_quantity("3 1/2").value, read_quantity("50%").is_percent
    (-1234.5, 3.5, True)
    >>> read_quantity("2sqrt(3)"), read_quantity("3 feet 2 inches"), read_quantity("1, 2")
    (None, None, None)
    """
    text = _unquoted(text.strip().rstrip(".;,").strip())
    inside = _without_parentheses(text)
    is_bracketed = inside != text
    inside = _BRACKETED_DENOMINATOR.sub(r"/\1", inside)
    inside = _POWER_OF_TEN.sub(r"\g<1>1*10^", inside)
    match = _NUMBER.match(inside)
    if match is None or (is_bracketed and "," in inside):
        return None
    exact = _value(match)
    if exact is None:
        return None
    suffix = inside[match.end() :]
    scale = _SCALE.match(suffix)
    if scale:
        exact *= _SCALES[scale[1].lower()]
        suffix = suffix[scale.end() :]
    percent = _PERCENT.match(suffix)
    if percent:
        suffix = suffix[percent.end() :]
    unit = _unit_of(suffix, has_unit)
    if unit is None:
        return None
    currency = (match["currency"] or match["currency2"] or "").strip()
    currency_unit = _CURRENCIES.get(currency[-1:], _CURRENCIES.get(currency, ""))
    return Quantity(
        value=float(exact),
        is_percent=percent is not None,
        exact=exact,
        unit=currency_unit or unit,
        is_fraction=match["under"] is not None,
    )


def _unquoted(text: str) -> str:
    """The text without quotation marks around it. A mark at its end alone is a prime: minutes, feet, or a
    derivative."""
    while len(text) > 1 and text[0] == text[-1] and text[0] in "\"'`":
        text = text[1:-1].strip().rstrip(".;,")
    return text


def _without_parentheses(text: str) -> str:
    while text.startswith("(") and text.endswith(")") and text.count("(") == text.count(")") == 1:
        text = text[1:-1].strip()
    return text


def _value(match: re.Match[str]) -> Fraction | None:
    """The number of a match; None if it is too large, divided by 0, or has two signs."""
    digits = match["number"].replace(",", "").replace(" ", "")
    if digits.count(".") > 1:
        digits = digits.replace(".", "")
    exponent = int(match["exponent"] or match["power"] or 0)
    if len(digits) > _MAX_DIGITS or abs(exponent) > _MAX_EXPONENT:
        return None
    if len(digits) + exponent > _MAX_EXPONENT:
        return None
    if match["sign"] and match["sign2"]:
        return None
    value = Fraction(digits.rstrip(".") or "0") * Fraction(10) ** exponent
    under = match["under"]
    if under is not None:
        if len(under) > _MAX_DIGITS or not Fraction(under):
            return None
        value /= Fraction(under)
    if match["whole"]:
        if under is None or not 0 <= value < 1:
            return None
        value += int(match["whole"])
    is_negative = "-" in (match["sign"], match["sign2"])
    return -value if is_negative else value


def _unit_of(suffix: str, has_unit: bool) -> str | None:
    """The known unit that follows a number, or "" if there is none. None if what follows isn't a unit."""
    words = suffix.strip().rstrip(".")
    if not words:
        return ""
    if not has_unit or suffix[:1] in "([":
        return None
    area = _area_of(words)
    if area:
        return area
    aside = _ASIDE.fullmatch(words)
    if aside:
        words = aside["unit"]
    if words.startswith("/") and _is_word(words[1:]):
        return ""  # `$15/hour`
    if NOT_UNITS.search(words) or not _UNIT_WORDS.fullmatch(words):
        return None
    rate = _rate_of(words)
    if rate:
        return rate
    first, _, power = words.split()[0].rstrip(",.").partition("^")
    unit = UNITS.get(first, "")
    is_apart = suffix[:1].isspace()
    if not unit and not (is_apart and _is_word(first)):
        return None  # `3ab` is a product
    if len(first) == 1 and not is_apart:
        return None  # `3m` is a product, `3 m` a length
    if unit and power:
        return f"{unit}^{power}"
    return unit


def _area_of(words: str) -> str:
    """The unit of an area or a volume, such as `cm^(2)`; "" for other words."""
    match = _AREA.fullmatch(words)
    if match is None:
        return ""
    length = UNITS.get(match[2] or match[3], "")
    if not length:
        return ""
    is_square = (match[1] or match[4])[:2].lower() == "sq"
    return f"{length}^({2 if is_square else 3})"


def _rate_of(words: str) -> str:
    """The unit of a speed, such as `mile/h`; "" for other words. Other things per time (dollars per hour) are
    counted alone."""
    rate = _RATE.match(words)
    if rate is None:
        return ""
    length = UNITS.get(rate[1], "")
    time = UNITS.get(rate[2], "")
    if length not in _LENGTHS or time not in _TIMES:
        return ""
    return f"{length}/{time}"


def _is_word(letters: str) -> bool:
    return len(letters) > 2 and any(vowel in letters.lower() for vowel in "aeiou")


def value_of_calculation(text: str) -> Fraction | None:
    """The value of a sum, product, quotient or power of plain numbers, in parentheses or not; None for
    anything else.

    >>> value_of_calculation("2*(3 + 4)/7"), value_of_calculation("3^(2)"), value_of_calculation("2x")
    (Fraction(2, 1), Fraction(9, 1), None)
    """
    without_marks = re.sub(r"[¤$€£]|(?<=\d),(?=\d{3})", "", text)
    tokens = re.findall(r"\d+(?:\.\d+)?|\.\d+|\S", without_marks)
    if len(tokens) > 100 or any(len(token) > 30 for token in tokens):
        return None
    try:
        value, place = _sum(tokens, 0)
    except (ValueError, IndexError, ZeroDivisionError):
        return None
    if place < len(tokens):
        return None
    return value


def _sum(tokens: list[str], place: int) -> tuple[Fraction, int]:
    total, place = _product(tokens, place)
    while place < len(tokens) and tokens[place] in "+-":
        is_sum = tokens[place] == "+"
        value, place = _product(tokens, place + 1)
        total = total + value if is_sum else total - value
    return total, place


def _product(tokens: list[str], place: int) -> tuple[Fraction, int]:
    total, place = _operand(tokens, place)
    while place < len(tokens) and tokens[place] in "*/x":
        is_quotient = tokens[place] == "/"
        value, place = _operand(tokens, place + 1)
        total = total / value if is_quotient else total * value
    return total, place


def _operand(tokens: list[str], place: int) -> tuple[Fraction, int]:
    if tokens[place] == "-":
        value, place = _operand(tokens, place + 1)
        return -value, place
    value, place = _base(tokens, place)
    if tokens[place : place + 1] != ["^"]:
        return value, place
    exponent, place = _base(tokens, place + 1)
    num_bits = value.numerator.bit_length() + value.denominator.bit_length()
    if exponent not in range(_MAX_POWER + 1) or num_bits > _MAX_BITS:
        raise ValueError("a power of a large number, or another than a small whole one")
    return value ** int(exponent), place


def _base(tokens: list[str], place: int) -> tuple[Fraction, int]:
    """A number, or a sum in parentheses."""
    if tokens[place] != "(":
        return Fraction(tokens[place]), place + 1
    value, place = _sum(tokens, place + 1)
    if tokens[place] != ")":
        raise ValueError("an open parenthesis")
    return value, place + 1
