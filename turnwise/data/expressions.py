"""Compares answers that were brought to a plain spelling: as numbers where both are one number, else as whole
expressions."""

import re
from fractions import Fraction

from turnwise.data.math_text import MAX_LENGTH
from turnwise.data.quantities import UNITS, Quantity, read_quantity, value_of_calculation
from turnwise.data.terms import in_order

_PAIRS = {"(": ")", "[": "]", "⦃": "⦄", "{": "}", "⟦": "⟧"}
_OPENING = set(_PAIRS)
_CLOSING = set(_PAIRS.values())
_LEFT_SIDE = re.compile(
    r"\s*(\\?(?:[A-Za-z]|alpha|beta|gamma|theta|lambda|mu|phi))\s*(?:=|\bin\b)(?![^=]*=)\s*(.+)", re.DOTALL
)
_OPTION = re.compile(
    r"(?:(?:option|choice|answer)\s*:?\s*)?(?:\(([A-Ja-j])\)|([A-Ja-j]))(?:[.:)]?|(?<=\))\s+(.*)|[.:)]\s+(.*))",
    re.I,
)
_OTHER_OPTION = re.compile(r"\b(?:and|or|not)\b|\([A-Ja-j]\)")
_RELATION = re.compile(r"(<=|>=|<|>)")
_MIRRORED = {">": "<", ">=": "<="}
_JOINT = re.compile(r"\s*(?:[,;]\s*)?\b(?:and|or)\b\s*|\s*[,;]\s*")
_OR = re.compile(r"\bor\b")
_TRAILING_UNIT = re.compile(r"(.*[\d)A-Za-z])\s+([A-Za-z]{2,}(?:/[A-Za-z]+)?)(?:\^\(([23])\))?", re.DOTALL)
_MATHS_WORDS = ("sqrt", "root", "pi", "sin", "cos", "tan", "log", "ln", "exp", "inf")
_APPLIED = re.compile(r"\b(sin|cos|tan|ln|log(?:_\(\w+\))?)\(([A-Za-z]|\d+)\)")
_DAYTIME = re.compile(r"\b([ap])\.\s?m\b\.?", re.IGNORECASE)
_GENERIC_UNIT = re.compile(r"\s+(?:square |cubic |sq\.? )?units?(?:\^\([23]\))?$", re.IGNORECASE)
_BRACKETED_MATRIX = re.compile(r"[\[(](matrix⟦[^⟦⟧]*⟧)[\])]")
_MAX_ELEMENTS = 100
_MAX_NESTING = 8
_CALCULATION_ERROR = Fraction(1, 100)
"""Models round the result of a calculation: 10/3 = 3.33."""


def same_answer(answer: str, truth: str, depth: int = 0) -> bool:
    """Whether two plain texts (`math_text.plain_math`) are one answer. Numbers are compared by value, lists
    element by element, anything else as a whole expression. A left side of one letter counts if both have
    one; that of the truth may be left out.

    >>> same_answer("5", "x = 5"), same_answer("x = 5", "y = 5")
    (True, False)
    >>> same_answer("(1/2, 3)", "(0.5,3)"), same_answer("2", "2pi")
    (True, False)
    """
    if max(len(answer), len(truth)) > MAX_LENGTH:
        return answer.casefold() == truth.casefold()
    if depth > _MAX_NESTING:
        return canonical(answer) == canonical(truth) != ""
    true_number = number_of(truth)
    number = number_of(answer)
    if true_number is not None and number is not None:
        return number.equals(true_number)
    true_side = _LEFT_SIDE.fullmatch(truth)
    side = _LEFT_SIDE.fullmatch(answer)
    if true_side and side:
        return true_side[1] == side[1] and same_answer(side[2], true_side[2], depth + 1)
    if true_side and "=" not in answer:
        return same_answer(answer, true_side[2], depth + 1)
    if true_number is not None or number is not None:
        return False
    true_option = option_of(truth)
    if true_option is not None:
        return option_of(answer, may_have_text=True) == true_option
    return _same_list(answer, truth, depth) or _same_expression(answer, truth)


def number_of(plain: str) -> Quantity | None:
    """The number that a plain text is, also as the result of a calculation (`3 + 4 = 7`) whose sides are
    equal."""
    if len(plain) > MAX_LENGTH:
        return None
    plain = plain.strip().removeprefix("=")
    if "=" not in plain:
        return read_quantity(plain)
    *sides, last = plain.split("=")
    result = read_quantity(last)
    if result is None:
        return None
    for side in sides:
        value = value_of_calculation(side)
        if value is None:
            return None
        error = abs(value - result.exact)
        if error > _CALCULATION_ERROR * abs(result.exact):
            return None
    return result


def option_of(plain: str, may_have_text: bool = False) -> str | None:
    """The letter of a multiple choice, `A` to `J`, that a plain text is; with `may_have_text`, also `(A) 5`
    and `A. five`."""
    unquoted = plain.strip().rstrip(".").strip("\"'`")
    match = _OPTION.fullmatch(unquoted)
    if match is None:
        return None
    text = match[3] or match[4]
    if text and (not may_have_text or _OTHER_OPTION.search(text)):
        return None
    letter = match[1] or match[2]
    return letter.upper()


def canonical(plain: str) -> str:
    """A spelling that equal expressions share: without blanks (but between digits), product signs and outer
    parentheses, and with terms and factors in one order."""
    text = plain.strip().strip("\"'`").rstrip(".,;:").strip()
    text = text.replace("\\", "").replace("¤", "")
    text = re.sub(r"\*\*\s*(\d+|[A-Za-z])", r"^(\1)", text)
    text = _DAYTIME.sub(r"\1m", text)
    text = re.sub(r"[A-Za-z]{2,}", lambda match: UNITS.get(match[0], match[0].casefold()), text)
    text = text.replace("infinity", "inf").replace("degrees", "").replace("==", "=")
    text = re.sub(r"(?<!\d) +| +(?!\d)", "", text)
    text = re.sub(r"(?<!\d)\*|\*(?!\d)", "", text)
    text = re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)
    text = re.sub(r"(\d)\.0+(?!\d)|(\.\d*?[1-9])0+(?!\d)", lambda match: match[1] or match[2], text)
    text = re.sub(r"(^|[(\[,=<>⦃])\+", r"\1", text)
    text = _BRACKETED_MATRIX.sub(r"\1", text)
    text = _APPLIED.sub(r"\1\2", text)
    text = _without_outer_parentheses(text)
    return in_order(_ascending(text))


def _same_expression(answer: str, truth: str) -> bool:
    answer, unit = _without_unit(answer)
    truth, true_unit = _without_unit(truth)
    if unit and true_unit and unit != true_unit:
        return False
    return canonical(answer) == canonical(truth) != ""


def _without_unit(plain: str) -> tuple[str, str]:
    """An expression without the known unit that follows it, and this unit. The word `units` says nothing."""
    plain = _GENERIC_UNIT.sub("", plain.strip().rstrip("."))
    match = _TRAILING_UNIT.fullmatch(plain.strip().rstrip("."))
    if match is None or match[2] not in UNITS:
        return plain, ""
    expression = match[1]
    words = re.findall(r"[A-Za-z]{2,}", expression)
    if any(word not in _MATHS_WORDS for word in words):
        return plain, ""
    if not re.search(r"\d|\bpi\b", expression):
        return plain, ""
    power = match[3] or ""
    return expression, UNITS[match[2]] + power


def _same_list(answer: str, truth: str, depth: int) -> bool:
    bracket, elements = _elements(answer)
    true_bracket, true_elements = _elements(truth)
    has_both_signs = "±" in answer + truth
    if has_both_signs:
        elements = _with_both_signs(elements)
        true_elements = _with_both_signs(true_elements)
    is_set = "⦃⦄" in (bracket, true_bracket)
    if is_set and not bracket:
        bracket = true_bracket  # `1, 2` lists the elements of a set as well as `{1, 2}`
    elif is_set and not true_bracket:
        true_bracket = bracket
    if len(elements) != len(true_elements) or len(elements) < 2 or bracket != true_bracket:
        return False
    has_alternatives = has_both_signs or _OR.search(answer + truth) is not None
    if is_set or has_alternatives or _has_one_unknown(true_elements):
        return _same_in_any_order(elements, true_elements, depth)
    if _are_solutions(elements) and _are_solutions(true_elements):
        return _same_in_any_order(elements, true_elements, depth)
    pairs = zip(elements, true_elements, strict=True)
    return all(same_answer(element, true_element, depth + 1) for element, true_element in pairs)


def _same_in_any_order(elements: list[str], true_elements: list[str], depth: int) -> bool:
    unmatched = list(elements)
    for true_element in true_elements:
        for element in unmatched:
            if same_answer(element, true_element, depth + 1):
                unmatched.remove(element)
                break
        else:
            return False
    return True


def _with_both_signs(elements: list[str]) -> list[str]:
    """The elements with `a±b` as the two elements `a+b` and `a-b`."""
    signed: list[str] = []
    for element in elements:
        if element.count("±") == 1:
            signed += [element.replace("±", sign) for sign in "+-"]
        else:
            signed.append(element)
    return signed


def _has_one_unknown(elements: list[str]) -> bool:
    """Whether the elements are the values of one letter, `x=3, x=-2`."""
    sides = [_LEFT_SIDE.fullmatch(element) for element in elements]
    return all(sides) and len({side[1] for side in sides if side}) == 1


def _are_solutions(elements: list[str]) -> bool:
    are_equations = all(_LEFT_SIDE.fullmatch(element) for element in elements)
    return are_equations or _are_tuples(elements)


def _are_tuples(elements: list[str]) -> bool:
    """Whether all are in brackets, as the solutions of several unknowns are."""
    return all(element.strip()[:1] in _OPENING and _elements(element)[0] for element in elements)


def _elements(plain: str) -> tuple[str, list[str]]:
    """The brackets around a list ("" for none), and its elements, which commas, semicolons, `and` or `or`
    separate."""
    text = plain.strip().rstrip(".").strip()
    brackets = ""
    if text[:1] in _OPENING and _closing_place(text) == len(text) - 1:
        brackets = text[0] + text[-1]
        text = text[1:-1]
    elements = [element for element in _split_at_joints(text) if element.strip()]
    if len(elements) > _MAX_ELEMENTS:
        return brackets, [plain]
    return brackets, elements


def _split_at_joints(text: str) -> list[str]:
    elements = []
    depth = 0
    start = 0
    place = 0
    while place < len(text):
        letter = text[place]
        if letter in _OPENING:
            depth += 1
        elif letter in _CLOSING:
            depth -= 1
        joint = None
        if depth == 0 and letter in " ,;ao":
            joint = _JOINT.match(text, place)
        if joint:
            elements.append(text[start:place])
            start = joint.end()
            place = start
        else:
            place += 1
    elements.append(text[start:])
    return elements


def _closing_place(text: str) -> int:
    """Where the bracket that opens the text is closed, by any bracket, since those of an interval may differ;
    -1 if nowhere."""
    depth = 0
    for place, letter in enumerate(text):
        if letter in _OPENING:
            depth += 1
        elif letter in _CLOSING:
            depth -= 1
            if depth == 0:
                return place
    return -1


def _without_outer_parentheses(text: str) -> str:
    while text.startswith("(") and text.endswith(")"):
        if "," in text or _closing_place(text) != len(text) - 1:
            break
        text = text[1:-1]
    return text


def _ascending(text: str) -> str:
    """An inequality with its signs turned to `<`: `x>=5` becomes `5<=x`."""
    parts = _RELATION.split(text)
    signs = parts[1::2]
    if not signs or any(sign not in _MIRRORED for sign in signs):
        return text
    return "".join(_MIRRORED.get(part, part) for part in reversed(parts))
