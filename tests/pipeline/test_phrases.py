from groundhop.pipeline.phrases import Phrase, link_phrase, short_title
from groundhop.records import Hop


def phrase(marked: str, title: str = "Pier of Ostwall", most: int = 30) -> Phrase | None:
    """The linking sentence is written with its anchor between brackets."""
    start = marked.index("[")
    anchor, _, after = marked[start + 1 :].partition("]")
    text = "Lead. " + marked[:start] + anchor + after
    hop = Hop(
        seed="s", target="t", anchor=anchor, anchor_start=6 + start, anchor_end=6 + start + len(anchor),
        sentence_start=6, sentence_end=len(text), seed_percentile=0.5, target_percentile=0.5,
    )  # fmt: skip
    return link_phrase(text, hop, title, most)


def test_the_anchor_becomes_a_blank_and_the_rest_is_quoted() -> None:
    got = phrase("In 1945 the harbour board met the mill guild at [the great conference], near Ostwall.")
    assert got is not None
    assert got.text == "In 1945 the harbour board met the mill guild at ____, near Ostwall."
    assert got.pieces == ("In 1945 the harbour board met the mill guild at", ", near Ostwall.")
    assert got.queries == ("In 1945 the harbour board met the mill guild at near Ostwall",)


def test_possessives_stay_and_half_words_go() -> None:
    first = phrase("The board then praised [Anna Berg]'s careful survey of the harbour walls.")
    second = phrase("The board then praised [pier]builders for their careful survey of harbour walls.")
    assert first is not None and first.text.startswith("The board then praised ____'s careful")
    assert second is not None and second.text.startswith("The board then praised ____ for their")


def test_what_the_blank_leaves_over_is_not_searched_for() -> None:
    for after in (
        "'s first term as harbour master",
        "’s first term as harbour master",
        ", first master of the harbour",
    ):
        got = phrase(f"The guild records of the mill describe [Anna Berg]{after} in Ostwall.")
        assert got is not None and "describe first" in got.queries[0]


def test_quotation_marks_cannot_end_the_quotation() -> None:
    got = phrase('The board called “the mill” a "harbour of sorrow" before [the fire] destroyed its walls.')
    assert got is not None and '"' not in got.text and "“" not in got.text


def test_a_target_named_twice_gives_no_phrase() -> None:
    assert phrase("The great fire was worse than [the great fire] of harbour board and guild.") is None
    assert phrase("The Pier of Ostwall was older than [this one] of harbour board and guild.") is None


def test_too_few_words_describe_nothing() -> None:
    assert phrase("They also went to see [the pier] later on with the board.") is None


def test_long_sentences_are_cut_to_a_clause_around_the_blank() -> None:
    words = " ".join(f"lantern{'abcdefghij'[n % 10]}" for n in range(40))
    got = phrase(f"Early on, {words}, the board met at [the conference] with guilds, {words}.", most=30)
    assert got is not None
    assert got.text.startswith("… ") and got.text.endswith(" …")
    assert len(got.text.split()) <= 33 and "____" in got.text


def test_queries_are_the_first_words_then_all_words() -> None:
    got = phrase(
        "One two harbour board mill guild six seven eight nine ten eleven twelve lantern [pier] granite ledger sailor market."
    )
    assert got is not None
    assert [len(query.split()) for query in got.queries] == [16, 18]
    assert got.queries[1].startswith(got.queries[0])


def test_a_sites_name_is_no_part_of_a_title() -> None:
    assert short_title("Pier of Ostwall - Harbour Office") == "Pier of Ostwall"
    assert short_title("Pier") == "Pier"
