"""The part of a response that is graded, and the number in it.

Small models rarely keep to a format, so the default is forgiving: the last number of the response, or of its last
`\\boxed{}` where there is one.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import Literal

Extract = Literal["last_number", "tagged", "all"]

_DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2013\u2212\ufe63\uff0d", "-"))
_LATEX_SPACES = re.compile(r"\{,\}|\\[,!;:]")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_OPERAND = re.compile(r"(?:[0-9)\]][ \t]*|\})\Z")
_NUMBER = re.compile(
    r"""(?<![A-Za-z0-9_])(?<![0-9]\.)  # not inside a word, another number or a version
    (?P<sign>[-+]?)(?:\\?[$€£¥])?(?P<inner_sign>[-+]?)
    (?P<value>
      (?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?  # 1,234.50
      |(?<!\.)\.[0-9]+
    )
    (?P<rest>/[0-9]+(?![0-9./])|[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z]))?  # a fraction or an exponent
    """,
    re.VERBOSE,
)


def extract(text: str, mode: Extract) -> str:
    """The part of a response that its grader sees; "" where there is none.

    last_number: the last number, without currency, "+" or thousands separators ("$1,234." is "1234"); "3/4" and
    "\\frac{3}{4}" are one number. tagged: inside the last <answer>...</answer>. all: everything.
    """
    match mode:
        case "last_number":
            return last_number(text)
        case "tagged":
            found = _ANSWER.findall(text)
            return found[-1].strip() if found else ""
        case "all":
            return text.strip()


def last_number(text: str) -> str:
    """The last number of the last `\\boxed{}` that holds one, else of the whole text; "" where there is none."""
    text = _plain(text)
    return _last_number(last_boxed(text)) or _last_number(text)


def _plain(text: str) -> str:
    """ASCII minus signs, and LaTeX's spacing and integer fractions written out."""
    text = _LATEX_SPACES.sub(lambda m: "," if m[0] == "{,}" else "", text.translate(_DASHES))
    return _LATEX_FRACTION.sub(r"\1/\2", text)


def _last_number(text: str) -> str:
    found = list(_NUMBER.finditer(text))
    return _written(text, found[-1]) if found else ""


def _written(text: str, match: re.Match[str]) -> str:
    signs = match["sign"] + match["inner_sign"]
    # "5 -3": a dash behind an operand is a subtraction, not the number's sign.
    subtraction = match["sign"] and _OPERAND.search(text[max(0, match.start() - 8) : match.start()])
    negative = signs.count("-") == 1 and not subtraction
    return ("-" if negative else "") + match["value"].replace(",", "") + (match["rest"] or "")


def numbers(text: str) -> list[Fraction]:
    """The values of all numbers in a text, in their order."""
    text = _plain(text)
    values = (as_number(_written(text, match)) for match in _NUMBER.finditer(text))
    return [value for value in values if value is not None]


def last_boxed(text: str) -> str:
    """The content of the last complete `\\boxed{...}`, braces balanced; "" where there is none."""
    for start in reversed([m.end() for m in re.finditer(r"\\f?boxed\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end]
    return ""


def as_number(text: str) -> Fraction | None:
    """The exact value of a text that is one number and nothing else; None for any other text.

    A trailing full stop, surrounding space, "$...$" and one `\\boxed{}` are allowed.
    """
    text = _plain(text)
    bare = (last_boxed(text) or text).strip().strip("$").rstrip(".").strip()
    if _NUMBER.fullmatch(bare) is None:
        return None
    try:
        return Fraction(_last_number(bare))
    except (ValueError, ZeroDivisionError):  # more digits than Python converts, or n/0
        return None


def normalise_text(text: str) -> str:
    """Two texts are the same question or answer where this is equal: Unicode forms, case and spacing do not count."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
