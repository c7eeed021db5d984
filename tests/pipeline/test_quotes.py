import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groundhop.pipeline.quotes import ground

PAGE = (
    "The Mill Guild \u2014 begun in 1871 \u2014 wasn\u2019t open to women until\u00a01912. It cost \u20ac3,750 a\u00a0year.\n"
    "Nearby, the \u201cThree Herons\u201d caf\u00e9 was \ufb01nished in 19\u00ad21; its roof weighed 12.5 tons and held 10\u00b2 tiles."
)


@pytest.mark.parametrize(
    "quote",
    [
        "wasn't open to women until 1912. It cost \u20ac3,750",
        "The Mill Guild - begun in 1871 - wasn't open",
        'a year. Nearby, the "Three Herons"',
        "caf\u00e9 was finished in 1921",
        unicodedata.normalize("NFD", "Three Herons\u201d caf\u00e9 was"),
        "its   roof\nweighed 12.5 tons",
    ],
)
def test_typography_is_folded(quote: str) -> None:
    assert ground(PAGE, quote) is not None


@pytest.mark.parametrize(
    "quote",
    [
        "wasn't open to women until 1913",
        "until 1912. It cost $3,750 a year",
        "until 1912. It cost \u20ac3.750 a year",
        "was open to women until 1912",
        "The mill guild - begun in 1871",
        "its roof weighed 12 tons",
        "its roof weighed 12",
        "It cost \u20ac3,75",
        "Mill Guild - begun in 187",
        "ill Guild - begun in 1871",
        "and held 102 tiles",
        "a year",
        "the",
        " \n ",
        "",
        "- - - - - -",
    ],
)
def test_content_is_not(quote: str) -> None:
    assert ground(PAGE, quote) is None


def test_the_place_is_the_pages_own_span() -> None:
    place = ground(PAGE, 'the "Three Herons" cafe\u0301 was finished in 1921')
    assert place is not None
    assert PAGE[place.start : place.end] == "the \u201cThree Herons\u201d caf\u00e9 was \ufb01nished in 19\u00ad21"


def test_a_later_whole_match_is_found_behind_a_partial_one() -> None:
    text = "They paid for lot 1234 and paid for lot 123 later."
    place = ground(text, "paid for lot 123")
    assert place is not None and text[place.start :].startswith("paid for lot 123 later")


@given(st.text(alphabet=st.sampled_from("aé\u0301 ’'\n\u00ad—12,.$ﬁ"), max_size=60), st.data())
def test_any_long_enough_piece_of_a_page_at_word_ends_is_grounded(text: str, data: st.DataObject) -> None:
    page = f"begins here now {text} ends here then"
    place = ground(page, page)
    assert place is not None and page[place.start : place.end] == page
