import pytest

from groundhop.pipeline.facts import Fact, Form, facts_in, same_form
from groundhop.pipeline.sentences import Span

FORMS: tuple[Form, ...] = ("date", "year", "number", "percent", "name")


def facts(sentence: str, *forms: Form) -> list[Fact]:
    return facts_in(f"Before. {sentence}", Span(8, 8 + len(sentence)), forms or FORMS[:4])


def answers(sentence: str, *forms: Form) -> list[tuple[str, str]]:
    return [(fact.form, fact.answer) for fact in facts(sentence, *forms)]


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("The board of the town bought the pier in 1902.", [("year", "1902")]),
        ("The board bought the pier, after long talks, on March 4, 1902.", [("date", "March 4, 1902")]),
        ("The board bought the pier, after long talks, on 4 March 1902.", [("date", "4 March 1902")]),
        ("The proposal was accepted by the board on 2019-03-04 without changes.", [("date", "2019-03-04")]),
        ("The board sent 1,250 delegates to the harbour congress.", [("number", "1,250")]),
        ("The board sent 52 delegates to the congress of 1902.", [("number", "52"), ("year", "1902")]),
        ("The board spent more than 3 million hours on the harbour.", []),
        ("The board spent some 30 million hours on the harbour.", [("number", "30 million")]),
        ("About 45 percent of the voters favoured the new pier.", [("percent", "45%")]),
        ("About 12.5% of the voters favoured the new pier.", [("percent", "12.5%")]),
    ],
)
def test_one_clear_fact_is_found(sentence: str, expected: list[tuple[str, str]]) -> None:
    assert answers(sentence) == expected


@pytest.mark.parametrize(
    "sentence",
    [
        "The board bought the pier in 1902 and sold it in 1911.",
        "The board bought the pier between 1902 and the war.",
        "The board met on March 4, 1902 and again on May 5, 1903.",
        "The board ran the pier in the season of 1902-03 alone.",
        "The board ran the pier during the 1920s at a loss.",
        "The board sent 5 delegates to the harbour congress.",
        "The board sent 52 delegates and then 60 delegates more.",
        "The board wrote that article 512 contains the rules.",
        "The board wrote that PEP 8016 contains all the rules.",
        "The board asked for $1902 and got it at once.",
        "The board used model 1902 for all of its lamps.",
        "The board bought a pier that was 12.1902 miles long.",
        "The board met on February 45, 1902 in the old hall.",
        "The board entered on January 23 and resigned on April 28, 1902 in protest.",
        "Archived from the original of the board on May 27, 2013.",
    ],
)
def test_two_values_ranges_names_and_guessable_numbers_are_none(sentence: str) -> None:
    assert answers(sentence) == []


def test_offsets_point_at_the_answer() -> None:
    sentence = "The board sent 1,250 delegates to the harbour congress."
    (fact,) = facts(sentence)
    assert f"Before. {sentence}"[fact.start : fact.end] == "1,250"
    assert (fact.noun, fact.kind, fact.aliases) == ("delegates", "number", ("1250",))


def test_dates_carry_their_other_spellings() -> None:
    (fact,) = facts("The board bought the pier, after long talks, on March 4th, 1902.")
    assert fact.aliases == ("March 4, 1902", "4 March 1902", "1902-03-04")


def test_scaled_numbers_carry_their_full_value() -> None:
    (fact,) = facts("The board spent some 30 million hours on the harbour.")
    assert fact.aliases == ("30000000", "30,000,000")


def test_forms_that_nobody_asked_for_are_left_out() -> None:
    sentence = "The board sent 52 delegates to Anna Berg of the congress of 1902."
    assert answers(sentence, "name") == [("name", "Anna Berg")]
    assert answers(sentence, "number") == [("number", "52")]


def test_a_name_beside_another_is_ambiguous() -> None:
    assert answers("The board sent its letter to Anna Berg and to Karl Lindqvist.", "name") == []


def test_fragments_hold_no_facts() -> None:
    assert answers("Bought in 1902") == answers("| Pier | 1902 | bought by the board of the town. |") == []


@pytest.mark.parametrize(
    ("form", "noun", "expected"),
    [("year", "", 2), ("date", "", 1), ("number", "delegates", 1), ("number", "boats", 0), ("percent", "", 1)],
)
def test_rival_facts_are_counted_in_any_text(form: Form, noun: str, expected: int) -> None:
    text = "1902: 52 delegates, 40% on May 3, 1911"
    assert same_form(text, Span(0, len(text)), form, noun) == expected
