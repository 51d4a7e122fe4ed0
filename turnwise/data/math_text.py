"""Brings the text of an answer, in LaTeX, Markdown or plain, to one plain spelling: `\\dfrac12` and `½`
become `1/2`."""

import re

MAX_LENGTH = 2000
"""Characters of an answer that is read. A longer one is compared as it is, so that reading stays linear in
the text."""
_MAX_DEPTH = 40

_FRACTIONS = [f" {over}/{under} " for over, under in zip("112131234151357", "233445555668888", strict=True)]
_LETTERS: dict[str, str] = {
    **dict.fromkeys("−–—‑‐﹣－", "-"),
    **dict.fromkeys("×·⋅∙✕", "*"),
    **dict.fromkeys("÷⁄∕", "/"),
    **dict.fromkeys("≤⩽≦", "<="),
    **dict.fromkeys("≥⩾≧", ">="),
    **dict.fromkeys("\u00a0\u2007\u2008\u2009\u200a\u202f\u3000\t", " "),
    **dict.fromkeys("“”„‟", '"'),
    **dict.fromkeys("’‘´`", "'"),
    **dict.fromkeys("°˚º", " degrees "),
    **dict.fromkeys("\u200b\u2060\ufeff∴", ""),
    **{chr(ord("０") + digit): str(digit) for digit in range(10)},
    **dict(zip("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", _FRACTIONS, strict=True)),
    "≠": "!=", "≈": "~=", "π": " pi ", "∞": " inf ", "∪": " cup ", "∩": " cap ",
    "∈": " in ", "∅": " emptyset ", "％": "%", "，": ",", "：": ":", "；": ";",
    "（": "(", "）": ")", "＝": "=", "＋": "+", "。": ".",
    "θ": r" \theta ", "α": r" \alpha ", "β": r" \beta ", "ℝ": " R ",
}  # fmt: skip
_TRANSLATION = str.maketrans(_LETTERS)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")

_CALCULATOR = re.compile(r"<<[^<>\n]*>>")
_EMPHASIS = re.compile(r"(?<![\w*])(\*{1,3})(?=[^\s*])([^*\n]{1,300}?)(?<=[^\s*])\1(?![\w*])")
_UNDERLINED = re.compile(r"(?<!\w)(__?)(?=[^\s_])([^_\n]{1,300}?)(?<=[^\s_])\1(?!\w)")
_STRAY_EMPHASIS = re.compile(r"^\*+\s*|\s*\*+(?=[.,;:!?]?$)")
_MATH_MODE = re.compile(r"\$(?=[^\s$])([^$]*?[^\s$\\])\$(?!\d)")
_DELIMITER = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?")
_SEPARATED = re.compile(r"(?<=\d)(?:\{,\}|,?\\! ?|_(?=\d{3}(?!\d))|'(?=\d{3}(?!\d)))(?=\d|\\!)")

_TIE = re.compile(r"(?<=[^\s~])~(?![=\s])|~(?=[\\A-Za-z{])")
"""LaTeX's blank; elsewhere `~5` means about 5."""
_BLANKS = re.compile(r"\s+")
_NEEDLESS_BLANK = re.compile(r" (?=[_^]\(|[)\]⦄]|,(?!\d))|(?<=[(\[⦃]) ")
_COMMAND = re.compile(r"\\([A-Za-z]+)\s?|\\(.)", re.DOTALL)
_PLAIN_ROOT = re.compile(r"sqrt\s*(?=[\d(A-Za-z{])")
_SIGNED_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")

_WRAPPERS = {
    *(
        "text",
        "textbf",
        "textit",
        "textrm",
        "textsf",
        "texttt",
        "textnormal",
        "mathrm",
        "mathbf",
        "mathit",
        "mathsf",
        "mathbb",
    ),
    *(
        "mathcal",
        "mbox",
        "operatorname",
        "emph",
        "bm",
        "boldsymbol",
        "boxed",
        "fbox",
        "underline",
        "hbox",
        "rm",
        "bf",
    ),
}
_SYMBOLS: dict[str, str] = {
    **dict.fromkeys(("cdot", "times", "ast"), "*"),
    "div": "/",
    **dict.fromkeys(("le", "leq", "leqslant"), "<="),
    **dict.fromkeys(("ge", "geq", "geqslant"), ">="),
    **dict.fromkeys(("ne", "neq"), "!="),
    "lt": "<",
    "gt": ">",
    **dict.fromkeys(("approx", "sim", "simeq"), "~="),
    "infty": " inf ",
    "pi": " pi ",
    "cup": " cup ",
    "cap": " cap ",
    "in": " in ",
    **dict.fromkeys(("circ", "degree"), " degrees "),
    **dict.fromkeys(("emptyset", "varnothing"), " emptyset "),
    **dict.fromkeys(("quad", "qquad", "thinspace", "displaystyle", "limits", "hspace", "space", "cr"), " "),
    "pm": "±",
    "colon": ":",
    "lbrace": "⦃",
    "rbrace": "⦄",
    **dict.fromkeys(("vert", "lvert", "rvert", "mid"), "|"),
    **dict.fromkeys(("dots", "ldots", "cdots"), "…"),
    **dict.fromkeys(("lor", "vee"), " or "),
    **dict.fromkeys(("land", "wedge"), " and "),
}
_MARKS = {"!": "", "{": "⦃", "}": "⦄", "|": "||"}
"""Commands of one mark → what they mean; each other one is a blank."""
_MATRICES = ("matrix", "pmatrix", "bmatrix", "smallmatrix", "array")
_ATOM = re.compile(r"[A-Za-z]|\d+(?:\.\d+)?|[A-Za-z]{2,}")


def plain_math(text: str) -> str:
    """The text in one plain spelling: without markup, with `a/b`, `sqrt(a)`, `a^(b)`, ` pi `, `<=` and `
    degrees `. Sets are in `⦃⦄` and rows of a matrix end with `¦`. A text of more than `MAX_LENGTH` characters
    stays as it is.

    >>> plain_math(r"$\\left(\\dfrac12,\\ 3\\sqrt{x}\\right)$"), plain_math("**12,\\\\!345** cm²")
    ('(1/2, 3sqrt(x))', '12,345 cm^(2)')
    """
    if len(text) > MAX_LENGTH:
        return text.strip()
    plain = _SUPERSCRIPT.sub(lambda match: f"^({match[0].translate(_SUPERSCRIPTS)})", text)
    plain = _TIE.sub(" ", plain).translate(_TRANSLATION)
    plain = _CALCULATOR.sub("", plain)
    plain = _EMPHASIS.sub(r"\2", plain)
    plain = _UNDERLINED.sub(r"\2", plain).strip()
    plain = _STRAY_EMPHASIS.sub("", plain)
    plain = _SEPARATED.sub(lambda match: "," if "," in match[0] else "", plain)
    plain = plain.replace("\\\\", " ¦ ").replace("\\$", "¤").replace("\\%", "%")
    plain = _DELIMITER.sub("", plain.replace("$$", "$"))
    plain = _MATH_MODE.sub(r" \1 ", plain).replace("$", "¤")
    plain = _Reader(plain).read()
    plain = _BLANKS.sub(" ", plain)
    plain = _NEEDLESS_BLANK.sub("", plain).strip()
    if len(plain) > MAX_LENGTH:
        return text.strip()
    return plain


class _Reader:
    """Reads LaTeX's commands and groups off a text, once from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0
        self.depth = 0

    def read(self, closing: str = "") -> str:
        """The plain form of what comes before `closing`, which is read over; of the rest of the text where it
        is missing."""
        parts: list[str] = []
        while self.place < len(self.text):
            if self.text[self.place] == closing:
                self.place += 1
                break
            parts.append(self._next(parts))
        return "".join(parts)

    def _next(self, preceding: list[str]) -> str:
        letter = self.text[self.place]
        if self.depth >= _MAX_DEPTH:
            self.place += 1
            return letter
        self.depth += 1
        token = self._token(letter, preceding)
        self.depth -= 1
        return token

    def _token(self, letter: str, preceding: list[str]) -> str:
        if letter == "\\":
            return self._command(preceding)
        if letter == "{":
            self.place += 1
            return _grouped(self.read("}"))
        if letter in "^_":
            self.place += 1
            content = self._argument(is_plain=True).strip()
            if letter == "^" and content in ("degrees", "°"):
                return " degrees "
            return f"{letter}({content})"
        if letter == "√":
            self.place += 1
            return f"sqrt({self._argument(is_plain=True)})"
        match = _PLAIN_ROOT.match(self.text, self.place)
        if match and not _last_letter(preceding).isalpha():
            self.place = match.end()
            return f"sqrt({self._argument(is_plain=True)})"
        self.place += 1
        return letter

    def _command(self, preceding: list[str]) -> str:
        match = _COMMAND.match(self.text, self.place)
        if match is None:
            self.place += 1
            return ""
        self.place = match.end()
        if match[1] is None:
            return _MARKS.get(match[2], " ")
        return self._named(match[1], preceding)

    def _named(self, name: str, preceding: list[str]) -> str:
        if name in ("frac", "dfrac", "tfrac", "cfrac"):
            return self._fraction(preceding)
        if name in ("sqrt", "surd"):
            return self._root()
        if name in ("binom", "dbinom", "tbinom"):
            return f"binom({self._argument().strip()})({self._argument().strip()})"
        if name in _WRAPPERS:
            return f" {self._argument().strip()} "
        if name == "begin":
            kind = self._argument().strip()
            if kind == "array":
                self._argument()
            if kind in _MATRICES:
                kind = "matrix"
            return f" {kind}⟦"
        if name == "end":
            self._argument()
            return "⟧ "
        return _SYMBOLS.get(name, f" \\{name} ")

    def _fraction(self, preceding: list[str]) -> str:
        over = self._argument().strip()
        under = self._argument().strip()
        if _last_letter(preceding).isalnum():
            return f" {_factor(over, follows=True)}/{_denominator(under)} "
        return f"{_factor(over, follows=False)}/{_denominator(under)} "

    def _root(self) -> str:
        degree = ""
        if self.text.startswith("[", self.place):
            self.place += 1
            degree = self.read("]").strip()
        root = self._argument().strip()
        if degree in ("", "2"):
            return f"sqrt({root})"
        return f"root({degree})({root})"

    def _argument(self, is_plain: bool = False) -> str:
        """What a command applies to: a group or one token. With `is_plain`, also a whole number or what is in
        parentheses."""
        while self.text.startswith(" ", self.place):
            self.place += 1
        if self.place >= len(self.text):
            return ""
        if self.text[self.place] == "{":
            self.place += 1
            return self.read("}")
        if is_plain:
            if self.text[self.place] == "(":
                self.place += 1
                return self.read(")")
            number = _SIGNED_NUMBER.match(self.text, self.place)
            if number:
                self.place = number.end()
                return number[0]
        return self._next([])


def _last_letter(parts: list[str]) -> str:
    """The last letter of the last part; "" if there is none."""
    if not parts:
        return ""
    return parts[-1][-1:]


def _grouped(content: str) -> str:
    content = content.strip()
    if content in ("", ":", "=", "+", "-", ".", "/") or _ATOM.fullmatch(content):
        return content
    return f"({content})"


def _factor(content: str, follows: bool) -> str:
    """A numerator, in parentheses if a sum stands in it."""
    unsigned = content
    if content[:1] in ("-", "+") and not follows:
        unsigned = content[1:]
    if _is_product(unsigned):
        return content
    return f"({content})"


def _denominator(content: str) -> str:
    if _ATOM.fullmatch(content):
        return content
    return f"({content})"


def _is_product(content: str) -> bool:
    depth = 0
    for letter in content:
        if letter in "([⦃":
            depth += 1
        elif letter in ")]⦄":
            depth -= 1
        elif depth == 0 and letter in "+-/=<>,;±":
            return False
    return bool(content)
