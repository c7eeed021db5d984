"""Compare two short answers by rules alone: yes, no, or `a rule cannot tell`.

The rules, in order:

1. No answer (empty, `None`, `N/A`, `I don't know`) matches nothing, not even another one.
2. Texts that are equal after `normalise` match.
3. Where a date or a number is expected, the answer matches when the given text holds exactly one date or number
   and it is the expected one: `1945.`, `in 1945` and `The year was 1945` all answer 1945; `1945 or 1946` does not.
   A date that says more than was asked (`12 March 1945` for `1945`) matches, one that says less does not.
   For other kinds the same comparison is made when both texts are nothing but such a value.
4. Spellings with two readings (`03/04/1902`, `8.540`) are decided only where all readings agree.
   Another currency is another answer; a currency that only the expected answer names leaves it open.
5. Everything else is different, but not surely: words can say one thing in two ways.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from groundhop.judges.normalise import fold, is_no_answer, normalise
from groundhop.judges.values import CURRENCIES, Value, is_whole, only_value, relate_days
from groundhop.records import AnswerKind


@dataclass(frozen=True, slots=True)
class Match:
    """What the rules say about two answers."""

    same: bool | None
    """None when their readings disagree: only someone who reads can tell."""
    sure: bool
    """Whether a reader would surely agree; a mere difference in words is not sure."""
    rule: str


def same_answer(given: str | None, expected: str, kind: AnswerKind = "text") -> bool | None:
    """Whether two answers mean the same by the rules of this module; None where a rule cannot tell."""
    return compare(given, expected, kind).same


def compare(given: str | None, expected: str, kind: AnswerKind = "text") -> Match:
    """As `same_answer`, with the rule that decided and whether that is sure."""
    if given is None or is_no_answer(given) or not expected.strip():
        return Match(False, True, "no answer")
    if _same_text(given, expected):
        return Match(True, True, "same text")
    typed = kind in ("date", "number")
    target, value = only_value(expected), only_value(given)
    if target is not None and (typed or is_whole(target, expected)):
        if value is not None and (typed or is_whole(value, given)):
            return _compare_values(value, target, typed=typed)
        if typed:
            return Match(False, False, f"not exactly one {kind}")
    return Match(False, False, "different text")


def compare_any(given: str | None, accepted: Iterable[str], kind: AnswerKind = "text") -> Match:
    """The best match among accepted forms: a yes, else an open case, else the least sure no."""
    matches = [compare(given, form, kind) for form in accepted]
    for wanted in (True, None):
        for match in matches:
            if match.same is wanted:
                return match
    return min(matches, key=lambda match: match.sure) if matches else Match(False, True, "no accepted answer")


def _same_text(given: str, expected: str) -> bool:
    left, right = normalise(given), normalise(expected)
    if not right:  # an answer made of marks only, such as the band `!!!`
        return fold(given) == fold(expected)
    return left == right


def _compare_values(given: Value, expected: Value, *, typed: bool) -> Match:
    if expected.days and given.days:
        return _compare_days(given, expected)
    if not expected.numbers or not given.numbers:
        return Match(False, False, "a date against a number")
    if not expected.numbers & given.numbers:
        return Match(False, True, "different number")
    if given.units and expected.units:
        if not given.units & expected.units:
            money = bool((given.units | expected.units) & CURRENCIES)
            return Match(False, money, "different currency" if money else "different unit")
        if given.units != expected.units:
            return Match(None, False, "unit can be read in two ways")
    elif expected.units & CURRENCIES or (given.units and not typed):
        return Match(None, False, "only one names a unit")
    if len(given.numbers | expected.numbers) > 1:
        return Match(None, False, "number can be read in two ways")
    return Match(True, True, "same number")


def _compare_days(given: Value, expected: Value) -> Match:
    relations = {relate_days(left, right) for left in given.days for right in expected.days}
    if relations == {"other"}:
        return Match(False, True, "different date")
    if relations <= {"same", "finer"}:
        return Match(True, True, "same date")
    if relations <= {"coarser", "other"}:
        return Match(False, False, "a date that says less")
    return Match(None, False, "date can be read in two ways")
