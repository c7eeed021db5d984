"""Rules for short answers: what is the same, what is different, what a rule cannot tell."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groundhop.judges.exact import compare, compare_any, same_answer
from groundhop.judges.normalise import fold, is_no_answer, normalise


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (unicodedata.normalize("NFD", "Málaga"), "Málaga", True),
        ("ﬁne arts", "Fine Arts", True),
        ("12,480", "12480", True),
        ("€3,100", "¥3,100", False),
        ("GBP 3,100", "£3100", True),
        ("‘Tess’ of the ’Moor", "'Tess' of the 'Moor", True),
        ("7th of June, 1866", "June 7, 1866", True),
        ("1866-06-07", "7 Jun. 1866", True),
        ("07/06/1866", "06/07/1866", None),
        ("07/06/1866", "9 August 1866", False),
        ("27/06/1866", "June 27, 1866", True),
        ("3.125", "4.125", False),
        ("3.125", "3125", None),
        ("3.125", "3.125", True),
        ("An Old Mill", "old mill", True),
        ("GROSSE FUGE", "große Fuge", True),
        ("Yes", "yes!", True),
        (" ", "", False),
        ("n/a", "None", False),
        ("None", "None", False),
        ("N/A", "1866", False),
        ("10²", "102", False),
        ("C++", "C#", False),
        ("St. Ives", "St Ives", True),
        ("U.K.", "UK", True),
        ("Salt & Light", "salt and light", True),
        ("!!!", "!!!", True),
        ("!!!", "???", False),
        ("44 BC", "44 AD", False),
    ],
)
def test_two_short_answers_are_compared_as_a_reader_would(left: str, right: str, same: bool | None) -> None:
    assert (same_answer(left, right), same_answer(right, left)) == (same, same)


@pytest.mark.parametrize("text", ["1866.", "in 1866", "The year was 1866", "**1866**", "It opened on 7 June 1866."])
def test_a_sentence_with_the_expected_year_and_no_other_value_is_right(text: str) -> None:
    assert same_answer(text, "1866", "date") is True
    assert same_answer(text, "1866", "number") is True


@pytest.mark.parametrize("text", ["1866 or 1867", "1866-1870", "the 1860s", "no idea", "in its 3rd year, 1866"])
def test_a_text_without_exactly_one_value_is_not_the_expected_one(text: str) -> None:
    assert same_answer(text, "1866", "date") is False


@pytest.mark.parametrize(
    ("text", "expected", "same"),
    [
        ("about 2 500 people", "2,500", True),
        ("2.5 million", "2,500,000", True),
        ("seven", "7", True),
        ("7", "seven", True),
        ("£2,500", "$2,500", False),
        ("2,500", "$2,500", None),
        ("$2,500", "US$2,500", None),
        ("12km", "12 kilometres", True),
        ("-5", "5", False),
        ("−5", "-5", True),
        ("The 12th", "12", True),
        ("747b", "747", False),
    ],
)
def test_numbers_are_compared_by_value_and_currency(text: str, expected: str, same: bool | None) -> None:
    assert same_answer(text, expected, "number") is same


def test_a_date_that_says_less_than_asked_is_not_the_answer() -> None:
    assert same_answer("June 1866", "7 June 1866", "date") is False
    assert compare("June 1866", "7 June 1866", "date").sure is False


def test_a_sentence_is_not_searched_when_a_name_is_expected() -> None:
    assert same_answer("It was Ada Quill", "Ada Quill", "name") is False


def test_a_difference_in_words_is_not_sure_but_one_in_numbers_is() -> None:
    assert compare("Ada M. Quill", "Ada Quill", "name").sure is False
    assert compare("1867", "1866", "date").sure is True


def test_any_accepted_form_will_do() -> None:
    assert compare_any("The Anchor Inn", ("Blue Anchor", "Anchor Inn"), "name").same is True
    assert compare_any("04/05/1900", ("1 May 1900", "4 May 1900"), "date").same is None
    assert compare_any("x", (), "text").same is False


@pytest.mark.parametrize("text", [None, "", " - ", "N/A.", "n.a.", "Unknown", "I don’t know.", "(none)"])
def test_words_for_no_answer_are_no_answer(text: str | None) -> None:
    assert is_no_answer(text)


@pytest.mark.parametrize("text", ["No", "0", "Nona", "Nil Desperandum", "nonesuch"])
def test_short_answers_are_answers(text: str) -> None:
    assert not is_no_answer(text)


@given(st.text(max_size=30))
def test_folding_twice_changes_nothing(text: str) -> None:
    assert fold(fold(text)) == fold(text)


@given(st.text(max_size=30))
def test_an_answer_matches_itself_unless_it_is_none(text: str) -> None:
    assert same_answer(text, text) is (not is_no_answer(text))


@given(st.text(max_size=20), st.text(max_size=20), st.sampled_from(["date", "number", "name", "text"]))
def test_no_text_breaks_the_rules(left: str, right: str, kind: str) -> None:
    assert same_answer(left, right, kind) in (True, False, None)


@given(st.dates())
def test_every_date_is_read_in_every_spelling(day) -> None:
    spellings = (f"{day.day} {day:%B} {day.year}", f"{day:%b} {day.day}, {day.year}", f"{day:%B} {day.day} {day.year}")
    assert day.year < 100 or all(same_answer(text, spellings[0], "date") for text in spellings)


def test_normalise_keeps_what_tells_answers_apart() -> None:
    assert [normalise(text) for text in ("The A-Team", "A", "8.540", "1,250", "C++")] == [
        "a team",
        "a",
        "8.540",
        "1250",
        "c++",
    ]
