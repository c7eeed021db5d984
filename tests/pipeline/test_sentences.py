import pytest

from groundhop.pipeline.sentences import Span, is_prose, sentence_at, sentences, words_of


def cut(text: str) -> list[str]:
    return [text[start:end] for start, end in sentences(text)]


def test_abbreviations_do_not_end_sentences() -> None:
    assert cut("Dr. Smith left the U.S. in 1945. He didn't return.") == [
        "Dr. Smith left the U.S. in 1945.",
        "He didn't return.",
    ]


def test_hard_wrapped_lines_are_one_sentence_and_list_items_are_several() -> None:
    text = "The pier was bought\n   by the board in 1902.\n- First item here.\n- Second item."
    assert cut(text) == ["The pier was bought\n   by the board in 1902.", "First item here.", "Second item."]


def test_offsets_hold_for_contractions_and_text_outside_ascii() -> None:
    text = "Café “Łódź” wasn't open. 東京 isn't near.\n\nThe end comes."
    assert cut(text)[0] == "Café “Łódź” wasn't open."
    assert cut(text)[-1] == "The end comes."


def test_an_anchor_over_two_sentences_lies_in_none() -> None:
    text = "One ends here. Two starts here."
    spans = sentences(text)
    assert sentence_at(spans, 4, 8) == Span(0, 14)
    assert sentence_at(spans, 10, 18) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The board bought the old pier in 1902.", True),
        ("Bought pier.", False),
        ("the board bought the old pier in 1902.", False),
        ("The board bought the old pier in", False),
        ("| PA | 731 | Working group charter | with some words here |.", False),
        ("Guido Van Rossum, Petr Viktorin, Victor Stinner, Steve Dower.", False),
        ("Call foo(x=1, y=2)[0] + {a: b} -> c; // see d e f g.", False),
    ],
)
def test_only_written_sentences_are_prose(text: str, expected: bool) -> None:
    assert is_prose(text) is expected


def test_words_are_folded_and_digits_are_none() -> None:
    assert words_of("The Board’s 1,250 piers") == ["the", "board's", "piers"]
