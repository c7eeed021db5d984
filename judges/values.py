"""Read numbers and dates in a short text, with every reading that their spelling allows.

`03/04/1902` is two dates and `8.540` is two numbers; a rule may only decide what holds for all of their readings.
"""

import re
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Final, Literal, NamedTuple

from groundhop.judges.normalise import fold

Relation = Literal["same", "finer", "coarser", "other", "open"]

_MONTH_NAMES: Final = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november", "december",
)  # fmt: skip
_MONTHS: Final = {name[:length]: at for at, name in enumerate(_MONTH_NAMES, start=1) for length in (3, len(name))} | {
    "sept": 9
}
_SCALES: Final = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "bn": 10**9, "trillion": 10**12}
_COUNTING: Final = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)
_WORDS: Final = {word: value for value, word in enumerate(_COUNTING.split())}
_UNIT_WORDS: Final = {
    "usd": "us$ usd", "aud": "a$ au$ aud", "cad": "c$ ca$ cad", "gbp": "£ gbp sterling", "eur": "€ eur euro euros",
    "jpy": "jpy yen", "cny": "cny rmb yuan", "inr": "₹ inr rupee rupees", "chf": "chf", "percent": "% percent",
    "km": "km kilometre kilometres kilometer kilometers", "m": "m metre metres meter meters",
    "cm": "cm centimetre centimetres centimeter centimeters", "mm": "mm millimetre millimetres millimeter millimeters",
    "mile": "mi mile miles", "foot": "ft foot feet", "inch": "inch inches", "kg": "kg kilogram kilograms",
    "g": "g gram grams", "tonne": "tonne tonnes", "second": "second seconds", "minute": "minute minutes",
    "hour": "hour hours", "day": "day days", "week": "week weeks", "month": "month months", "year": "year years",
    "celsius": "°c celsius", "fahrenheit": "°f fahrenheit",
}  # fmt: skip
_UNITS: Final = {word: frozenset({unit}) for unit, words in _UNIT_WORDS.items() for word in words.split()} | {
    "$": frozenset({"usd", "aud", "cad"}),
    "dollar": frozenset({"usd", "aud", "cad"}),
    "dollars": frozenset({"usd", "aud", "cad"}),
    "¥": frozenset({"jpy", "cny"}),
    "pound": frozenset({"gbp", "lb"}),
    "pounds": frozenset({"gbp", "lb"}),
    "lb": frozenset({"lb"}),
    "lbs": frozenset({"lb"}),
}
CURRENCIES: Final = frozenset({"usd", "aud", "cad", "gbp", "eur", "jpy", "cny", "inr", "chf"})


class Day(NamedTuple):
    """A date as far as it is known; years before Christ are negative."""

    year: int | None
    month: int | None = None
    day: int | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """A number or a date at [start, end) of a folded text, with all its readings."""

    start: int
    end: int
    days: frozenset[Day] = frozenset()
    numbers: frozenset[Decimal] = frozenset()
    units: frozenset[str] = frozenset()
    """Possible units; empty where the text names none that is known."""


_NAME = "|".join(sorted(_MONTHS, key=len, reverse=True))
_ORDINAL = r"(?:st|nd|rd|th)?"
_YEAR = r"\d{3,4}"
_ERA = r"(?:\s*(?P<era>bce?|b\.c\.(?:e\.)?))?"
_DATE: Final = tuple(
    re.compile(rf"(?<![\w.,/-]){pattern}(?![\w/-])")
    for pattern in (
        rf"(?P<day>\d{{1,2}}){_ORDINAL}\s+(?:of\s+)?(?P<name>{_NAME})\.?,?\s+(?P<year>{_YEAR}){_ERA}",
        rf"(?P<name>{_NAME})\.?\s+(?:the\s+)?(?P<day>\d{{1,2}}){_ORDINAL},?\s+(?P<year>{_YEAR}){_ERA}",
        rf"(?P<name>{_NAME})\.?,?\s+(?:of\s+)?(?P<year>{_YEAR}){_ERA}",
        r"(?P<year>\d{4})-(?P<month>\d{1,2})-(?P<day>\d{1,2})(?:t[\d:.]+z?)?",
        r"(?P<year>\d{4})/(?P<month>\d{1,2})/(?P<day>\d{1,2})",
        r"(?P<one>\d{1,2})(?P<mark>[/.-])(?P<two>\d{1,2})(?P=mark)(?P<year>\d{4}|\d{2})",
        rf"(?P<year>{_YEAR}|\d{{1,2}})\s*(?P<era>bce?|b\.c\.(?:e\.)?)",
        rf"(?P<day>\d{{1,2}}){_ORDINAL}\s+(?:of\s+)?(?P<name>{_NAME})",
        rf"(?P<name>{_NAME})\.?\s+(?P<day>\d{{1,2}}){_ORDINAL}",
    )
)
_UNIT = "|".join(re.escape(word) for word in sorted(_UNITS, key=len, reverse=True))
_NUMBER: Final = re.compile(
    rf"(?:(?<![^\W\d_])(?P<before>{_UNIT})\s?)?(?<![\w.,])(?P<sign>-(?=\d))?"
    r"(?P<digits>\d+(?:[.,' ]\d{3})+(?![\d])(?:[.,]\d+)?|\d+(?:[.,]\d+)?)"
    rf"(?:{_ORDINAL}(?![^\W_]))?(?:\s*(?P<scale>{'|'.join(_SCALES)})\b)?(?:[\s-]?(?P<after>{_UNIT})(?![^\W_]))?"
)


def values_in(text: str) -> list[Value]:
    """Every date and every number of a text that `fold` has folded, in order, none inside another."""
    found = _dates_in(text)
    taken = [(value.start, value.end) for value in found]
    for match in _NUMBER.finditer(text):
        if not any(match.start("digits") < end and start < match.end("digits") for start, end in taken):
            value = _number(match, text)
            if value is not None:
                found.append(value)
    return sorted(found, key=lambda value: value.start)


def only_value(text: str) -> Value | None:
    """The value of a text that holds exactly one; a whole text such as `seven` counts as its number."""
    folded = fold(text)
    word = folded.strip(" .!")
    if word in _WORDS:
        return Value(0, len(folded), numbers=frozenset({Decimal(_WORDS[word])}))
    values = values_in(folded)
    return values[0] if len(values) == 1 else None


def is_whole(value: Value, text: str) -> bool:
    """Whether a text is nothing but this value, end marks and an article aside."""
    folded = fold(text)
    rest = folded[: value.start] + " " + folded[value.end :]
    return not re.sub(r"\b(?:the|a|an)\b|[\s.,!*\"'()]", "", rest)


def relate_days(given: Day, expected: Day) -> Relation:
    """How one date stands to another, either known only in part."""
    pairs = list(zip(given, expected, strict=True))
    if any(a is not None and b is not None and a != b for a, b in pairs):
        return "other"
    if all(a == b for a, b in pairs):
        return "same"
    if all(b is None or a == b for a, b in pairs):
        return "finer"
    return "coarser" if all(a is None or a == b for a, b in pairs) else "open"


def _dates_in(text: str) -> list[Value]:
    found: list[Value] = []
    for pattern in _DATE:
        for match in pattern.finditer(text):
            days = _days(match.groupdict())
            if days and not any(match.start() < value.end and value.start < match.end() for value in found):
                found.append(Value(match.start(), match.end(), days=days))
    return found


def _days(parts: dict[str, str | None]) -> frozenset[Day]:
    text = parts.get("year")
    years: list[int | None] = [int(text)] if text else [None]
    if text and len(text) == 2 and not parts.get("era"):
        years = [1900 + int(text), 2000 + int(text)]
    if text and parts.get("era"):
        years = [-int(text)]
    if parts.get("one"):
        first, second = int(parts["one"] or 0), int(parts["two"] or 0)
        orders = [(first, second), (second, first)]
    else:
        name, month, day = parts.get("name"), parts.get("month"), parts.get("day")
        orders = [(int(day or 0), _MONTHS[name] if name else int(month or 0))]
    return frozenset(
        Day(year, month or None, day or None) for year in years for day, month in orders if _exists(year, month, day)
    )


def _exists(year: int | None, month: int, day: int) -> bool:
    try:
        date(year if year and year > 0 else 2000, month or 1, day or 1)
    except ValueError:
        return False
    return True


def _number(match: re.Match[str], text: str) -> Value | None:
    digits, scale = match["digits"], match["scale"]
    after = text[match.end() : match.end() + 1]
    if (after.isalnum() and not match["after"]) or after == "_":
        return None  # `1960s`, `747b`: a name with digits, not a number
    factor = _SCALES[scale] if scale else 1
    sign = -1 if match["sign"] else 1
    numbers = frozenset(sign * factor * reading for reading in _readings(digits))
    units = _UNITS.get(match["before"] or match["after"] or "", frozenset())
    plain = not (scale or units or match["sign"]) and digits.isdigit() and len(digits) == 4 and digits[0] != "0"
    days = frozenset({Day(int(digits))}) if plain else frozenset()
    start = match.start() if match["before"] else match.start("sign") if match["sign"] else match.start("digits")
    return Value(start, match.end(), days=days, numbers=numbers, units=units)


def _readings(digits: str) -> set[Decimal]:
    """`1,250` is 1250 as in English; `1.250` may be either; `1.250,5` and `1,250.5` tell their marks apart."""
    digits = re.sub(r"[' ]", "", digits)
    marks = [character for character in digits if character in ".,"]
    if not marks:
        return {Decimal(digits)}
    if len(set(marks)) == 2:
        last = marks[-1]
        other = "," if last == "." else "."
        return {Decimal(digits.replace(other, "").replace(last, "."))}
    whole, _, rest = digits.partition(marks[0])
    if len(marks) > 1:
        return {Decimal(digits.replace(marks[0], ""))}
    decimal = Decimal(f"{whole}.{rest}")
    if len(rest) != 3 or whole.startswith("0") or len(whole) > 3:
        return {decimal}
    grouped = Decimal(whole + rest)
    return {grouped} if marks[0] == "," else {decimal, grouped}
