"""Finds the answer that a text states, and compares it with the true one. All rewards for answers read both
in this way."""

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from turnwise.data.expressions import canonical, number_of, same_answer
from turnwise.data.math_text import MAX_LENGTH, plain_math
from turnwise.data.quantities import NOT_UNITS, ROUNDING, UNITS, Quantity, read_quantity

_MARKER = re.compile(
    r"(?P<firm>final answer|####|<answer>)|(?P<loose>\btherefore\b)"
    r"|the (?:correct |right |best |closest |only )?(?:answer|option|choice) is|\banswer(?=\s*[:：=])|答案是?"
    r"|(?<=[#*][ *])answer(?=\*{0,2}:?\s*\n)",
    re.IGNORECASE,
)
_AFTER_MARKER = re.compile(r"\s*(?:is\b)?[\s:：=,*]*")
_STATES = re.compile(rf"(?:{_MARKER.pattern})\s*+(?:is\b)?+[\s:：=,*]*+\S|\\(?:boxed|fbox)", re.IGNORECASE)
_DIGIT = re.compile(r"\d")
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(r"[\s$,;]*(?:\\text\s*\{)?\s*(?:and|or)?\s*\}?[\s$,;]*(?:[A-Za-z]\s*=\s*)?\$?")
_SECOND_ANSWER = re.compile(
    r"[\s$]*(?:\\text\s*\{\s*)?\b(?:or\b\s*\}?([^\n.]*\d[^\n.]*)|and\b\s*\}?\s*(\$?-?\d[^\n.]*))"
)
_FACTOR_BEFORE = re.compile(r"(?:(?<![\w}])-|\d|\d\\(?:cdot|times) ?|\\sqrt\{|(?<![A-Za-z\\])[A-Za-z])$")
_FACTOR_AFTER = re.compile(
    r"[\^_!A-Za-z0-9]|\((?![A-Za-z]{2})|\\?%|\s?\\(?:sqrt|frac|pi|cdot|times|div|pm)\b"
)
_UNIT_AFTER = re.compile(r"\s*(?:\\text\s*\{)?\s*([A-Za-z]+)\s*\}?\s*(?:and\s+|,\s*)?(?:\\boxed\s*\{\s*)?\d")
_EDGE = re.compile(r"[\s$]")
_FIRST_ANSWER = re.compile(r"(\S*\d\S*)\s+or\s+[$\s]*(?:[A-Za-z]\s*=\s*)?$")
_NEARBY = 120
"""Characters beside a box in which a second answer is looked for."""
_MAX_BOXES = 20
"""Boxes before the last one that are read as parts of its answer, at most."""

_SENTENCE_END = re.compile(r"(?<=[^\s.])[.!?]\s+(?=\S)")
_CORRECTION = re.compile(r"\W*(?:or|no|wait|actually|hmm|but|however|sorry)\b", re.IGNORECASE)
_MATHS_WORDS = "sqrt|root|pi|inf|cup|cap|sin|cos|tan|log|ln|exp|degrees|matrix|cases"
_PROSE = re.compile(rf"(?<![A-Za-z\\])(?!(?:{_MATHS_WORDS})(?![A-Za-z]))[A-Za-z]{{2,}}")
_PRODUCT = re.compile(r"(?!in|of|at|to|on|is|as|by|an|it|he|so|we|am|pm)[A-Za-z]{2}|[b-hj-z]")
"""Letters after a number that are its factors rather than a word."""
_ARTICLES = ("a", "A", "I")
_JOINTS = ("and", "or")
_ALTERNATIVES = {"or", "to", "through", "versus", "vs", "plus", "minus", "times"}
_FILLERS = {"and", "also", "then", "another", "about", "an", "a", "the", "additional"}
_BOUNDS = re.compile(
    r"\b(?:than|least|most|over|under|above|below|exceeds?|between|not|isn't|except|without|up "
    r"to|beyond|never|nor|excluding|"
    r"square root of|root of|half of|twice|double|triple|thrice|negative|minus|plus|times|log of|power "
    r"of)(?: \w+)?\W*$",
    re.IGNORECASE,
)
"""Words that make something else of the number after them."""


class _Statement(NamedTuple):
    text: str
    is_boxed: bool


def stated_answer(text: str) -> str | None:
    """The answer that a text states: the content of its last `\\boxed{}`, else the rest of the line after the
    last `Final Answer:`, `the answer is`, `Answer:`, `Therefore`, `####` or their Chinese form. After a box
    only `Final Answer:` and `####` count, with nothing but an answer. None if it states none.

    >>> stated_answer("The answer is 3. No!\\nFinal Answer: 3 + 4 = 7")
    '3 + 4 = 7'
    >>> stated_answer(r"\\boxed{5}. Therefore, we are done.")
    '5'
    """
    statement = _statement(text)
    if statement is None:
        return None
    return statement.text


def states_answer(text: str) -> bool:
    """Whether a text states an answer."""
    if _STATES.search(text) is None:
        return False
    return _statement(text) is not None


def answer_of(text: str) -> Quantity | None:
    """The number in the answer that a text states, or in the last line with a digit if it states none. None
    if this isn't one number."""
    for candidate in _candidates(text):
        number = number_of(candidate)
        if number is not None:
            return number
    return None


def is_correct(completion: str, truth: object) -> bool:
    """Whether the completion's answer equals the true one: by value if both are one number, else as a whole
    expression.

    >>> is_correct("Final Answer: 3 + 4 = 7", "7"), is_correct("It is 1,000 dollars", 1000)
    (True, True)
    >>> is_correct("#### 3", "7")
    False
    """
    text = true_answer(truth)
    return any(same_answer(candidate, text) for candidate in _candidates(completion))


def true_answer(truth: object) -> str:
    """The plain text of a true answer, which may be the end of a whole solution."""
    text = str(truth)
    return plain_math(stated_answer(text) or text)


def equals_number(text: str, truth: object) -> bool:
    """Whether a whole text is the number of a numeric column, written with or without separators and decimal
    places."""
    number = read_quantity(plain_math(text), has_unit=False)
    true_number = read_quantity(str(truth), has_unit=False)
    if number is None or true_number is None:
        return False
    if number.is_percent or number.unit:
        return False
    size = max(Fraction(1), abs(true_number.exact))
    return abs(number.exact - true_number.exact) <= ROUNDING * size


def answer_key(text: str) -> float | str:
    """What equal answers share, for counting them: the number of a text's answer, else its spelling; "" if it
    states none."""
    number = answer_of(text)
    if number is not None:
        return number.value
    answer = stated_answer(text) or ""
    return canonical(plain_math(answer))


def gsm8k_score(text: str, ground_truth: object) -> float:
    """1 if a text's last answer in GSM8K's form, `#### 1,234`, is the true one, else 0.

    >>> gsm8k_score("#### $1,234.", "1234"), gsm8k_score("The answer is 1234", "1234")
    (1.0, 0.0)
    """
    lines = [part.partition("\n")[0].strip() for part in text.split("####")[1:]]
    answers = [line for line in lines if line]
    if not answers:
        return 0.0
    numeric = [answer for answer in answers if _DIGIT.search(answer)]
    answer = (numeric or answers)[-1]
    plain = plain_math(_content_of_box(answer))
    return float(same_answer(plain, true_answer(ground_truth)))


def _content_of_box(text: str) -> str:
    boxes = _boxes(text)
    if not boxes:
        return text
    return _boxed(text, boxes)


def _statement(text: str) -> _Statement | None:
    box = None
    begin = 0
    boxes = _boxes(text)
    if boxes:
        box = _Statement(_boxed(text, boxes), True)
        begin = boxes[-1][1]
    line = _marked(text, begin, is_firm=bool(boxes))
    if line is None:
        return box
    if box is not None and _PROSE.search(line[:MAX_LENGTH]) and number_of(plain_math(line)) is None:
        return box
    return _Statement(line, False)


def _marked(text: str, begin: int, is_firm: bool) -> str | None:
    """The rest of the line after the last marker with something after it; with `is_firm`, after a firm one.
    `Therefore` counts before an earlier marker only with a digit after it."""
    without_digit = None
    end = len(text)
    for match in reversed(list(_MARKER.finditer(text, begin))):
        start = match.end()
        start = _AFTER_MARKER.match(text, start, end).end()  # type: ignore[union-attr]
        # Each marker is judged by what stands before the next one, so that many markers in a line cost no
        # more than one.
        part = _line_part(text, start, end)
        end = match.start()
        if not part.strip() or (is_firm and not match["firm"]):
            continue
        if not match["loose"] or _DIGIT.search(part):
            return _rest_of_line(text, start)
        if without_digit is None:
            without_digit = start
    if without_digit is None:
        return None
    return _rest_of_line(text, without_digit)


def _rest_of_line(text: str, start: int) -> str:
    return _line_part(text, start, len(text)).strip()


def _line_part(text: str, start: int, end: int) -> str:
    """The characters from `start` to the end of their line, to `</answer>`, or to `end`."""
    newline = text.find("\n", start, end)
    if newline >= 0:
        end = newline
    return text[start:end].partition("</answer>")[0]


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """`(start, end, content)` of every closed `\\boxed{}` that stands in no other one and isn't empty, from
    left to right."""
    first = text.find("\\boxed")
    if first < 0:
        first = text.find("\\fbox")
    if first < 0:
        return []
    boxes: list[tuple[int, int, str]] = []
    opened: list[tuple[int, int] | None] = []
    for match in _BRACES.finditer(text, first):
        mark = match[0]
        if mark == "}":
            box = opened.pop() if opened else None
            if box is None:
                continue
            start, content_start = box
            content = text[content_start : match.start()].strip()
            while boxes and boxes[-1][0] > start:
                boxes.pop()
            if content:
                boxes.append((start, match.end(), content))
        elif mark == "{":
            opened.append(None)
        elif mark.endswith("{") and len(mark) > 2:
            opened.append((match.start(), match.end()))
    return boxes


def _boxed(text: str, boxes: list[tuple[int, int, str]]) -> str:
    """The content of the last box, with that of boxes directly before it, and with a second answer beside
    it."""
    start, end, last_content = boxes[-1]
    contents = [last_content]
    for box_start, box_end, content in reversed(boxes[:-1]):
        is_near = start - box_end <= _NEARBY and len(contents) <= _MAX_BOXES
        if not is_near or not _BETWEEN_BOXES.fullmatch(text, box_end, start):
            break
        start = box_start
        if content != last_content:
            contents.insert(0, content)
    around = _around(text, start, end)
    if around is not None:
        return around
    joined = " and ".join(contents)
    second = _SECOND_ANSWER.match(text[end : end + _NEARBY])
    if second:
        joined = f"{joined} or {second[1] or second[2]}"
    first = _FIRST_ANSWER.search(text[max(0, start - _NEARBY) : start])
    if first:
        joined = f"{first[1]} or {joined}"
    return joined


def _around(text: str, start: int, end: int) -> str | None:
    """What stands around a box, with the box in it, if it is part of a larger expression: a factor, a root, a
    sum of units."""
    box = text[start:end]
    prefix = text[max(0, start - _NEARBY) : start]
    suffix = text[end : end + _NEARBY]
    unit = _UNIT_AFTER.match(suffix)
    if unit and unit[1] in UNITS:
        return box + suffix.partition("\n")[0]
    if not _FACTOR_BEFORE.search(prefix) and not _FACTOR_AFTER.match(suffix):
        return None
    word_before = re.split(r"[\s$=:]", prefix)[-1]
    word_after = _EDGE.split(suffix.lstrip(" "), maxsplit=1)[0]
    return word_before + box + word_after


def _candidates(text: str) -> Iterator[str]:
    """The plain texts that may be a completion's answer: what it states as a whole and, in a sentence, its
    last expression."""
    statement = _statement(text)
    if statement is None:
        text = text.partition("\\boxed{")[0]  # an answer in a box that isn't closed was cut off
        yield plain_math(text)
        lines = [line for line in text[-MAX_LENGTH:].splitlines() if _DIGIT.search(line)]
        last = plain_math(lines[-1]) if lines else ""
        if not _PROSE.search(last):
            yield last
        yield from _of_sentence(last, is_last=True)
        return
    plain = plain_math(statement.text)
    yield plain
    if not statement.is_boxed:
        yield from _of_sentence(plain, is_last=False)


def _of_sentence(plain: str, is_last: bool) -> Iterator[str]:
    """The answer in the first (or last) sentence with a number: the whole sentence, or its last
    expression."""
    if len(plain) > MAX_LENGTH or not _PROSE.search(plain):
        return
    sentences = _SENTENCE_END.split(plain)
    with_digit = [number for number, sentence in enumerate(sentences) if _DIGIT.search(sentence)]
    place = 0
    if with_digit:
        place = with_digit[-1 if is_last else 0]
    if any(_CORRECTION.match(sentence) for sentence in sentences[place + 1 :]):
        return
    yield sentences[place]
    expression = _last_expression(sentences[place].split())
    if expression is not None:
        yield expression


def _last_expression(words: list[str]) -> str | None:
    """The last expression of a sentence with the unit after it. None if something beside it changes its
    meaning: a bound (`more than 5`), a second answer (`3 or 5`), a part of a sum (`3 feet 2`)."""
    is_maths = _maths_flags(words)
    ends = [number for number, is_it in enumerate(is_maths) if is_it]
    if not ends:
        return None
    end = ends[-1]
    start = end
    while start > 0 and is_maths[start - 1]:
        start -= 1
    expression = " ".join(words[start : end + 1]).strip(" =:").rstrip(".,;:?")
    words_before = words[:start]
    words_after = words[end + 1 :]
    if _BOUNDS.search(" ".join(words_before[-4:])):
        return None
    if "=" not in expression and _is_joined(words_before, is_maths[:start]):
        return None
    if NOT_UNITS.search(" ".join(words_after[:4])):
        return None
    next_word = words_after[0].rstrip(".,;:!?") if words_after else ""
    if _PRODUCT.fullmatch(next_word) and next_word not in UNITS:
        return None
    for num_words in (3, 2, 1):
        with_unit = " ".join([expression, *words_after[:num_words]]).rstrip(".,;:!?")
        quantity = read_quantity(with_unit)
        if quantity is not None and (quantity.unit or num_words == 1):
            return with_unit
    return expression


def _maths_flags(words: list[str]) -> list[bool]:
    """Whether each word is part of an expression: maths, or `and` and `or` between two such words."""
    is_maths = [_is_maths(word) for word in words]
    flags = list(is_maths)
    for number in range(1, len(words) - 1):
        if words[number] in _JOINTS and is_maths[number - 1] and is_maths[number + 1]:
            flags[number] = True
    return flags


def _is_maths(word: str) -> bool:
    bare = word.strip(".,;:!?\"'")
    if bare in ("", *_ARTICLES):
        return False
    return _PROSE.search(bare) is None


def _is_joined(words: list[str], is_maths: list[bool]) -> bool:
    """Whether the expression after `words` belongs to a number in them, as in `3 feet and 2` or `3 apples or
    5`."""
    if not any(is_maths):
        return False
    last = max(number for number, is_it in enumerate(is_maths) if is_it)
    between = [word.strip(",;").lower() for word in words[last + 1 :]]
    if len(between) <= 6 and _ALTERNATIVES.intersection(between):
        return True
    if len(between) <= 1:
        return True
    without_fillers = [word for word in between if word not in _FILLERS]
    return "and" in between and len(without_fillers) <= 1
