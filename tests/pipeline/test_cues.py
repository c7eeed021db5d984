from groundhop.pipeline.cues import SentenceCache, Vocabulary, cue_groups, holders, word_sets
from groundhop.pipeline.sentences import sentences
from groundhop.records import Page


def page(text: str, key: str = "a.example/p", host: str = "a.example") -> Page:
    return Page(url=f"https://{key}", key=key, host=host, title="", text=text, digest="")


def vocabulary(**counts: int) -> Vocabulary:
    """20 pages; each word on so many of them."""
    made = Vocabulary()
    for number in range(20):
        made.add(page(" ".join(word for word, count in counts.items() if number < count)))
    return made


WORDS = vocabulary(harbour=8, council=7, lantern=2, granite=1, everyone=19)


def test_the_rarest_group_comes_first_and_the_commonest_last() -> None:
    groups = cue_groups(["The", "Harbour", "council", "and", "a", "lantern", "of", "granite"], [], [], WORDS, 2)
    assert groups[0] == ("lantern", "granite")
    assert groups[-1] == ("Harbour", "council")


def test_barred_short_common_and_stop_words_are_no_cues() -> None:
    groups = cue_groups(
        ["Everyone", "after", "the", "harbour", "and", "council", "saw", "granite"], ["granite"], [], WORDS, 3
    )
    assert groups == [("harbour", "council")]


def test_groups_that_stand_together_elsewhere_on_the_page_are_refused() -> None:
    others = [frozenset({"harbour", "council", "x"}), frozenset({"lantern"})]
    groups = cue_groups(["harbour", "council", "lantern"], [], others, WORDS, 2)
    assert ("harbour", "council") not in groups and len(groups) == 2


def test_hyphenated_words_are_not_split_into_cues() -> None:
    assert cue_groups(["multi-lantern", "harbour", "council"], [], [], WORDS, 2) == [("harbour", "council")]


def test_cues_are_found_whatever_their_case() -> None:
    text = "The Harbour met. The council of the harbour met. A council met."
    spans = sentences(text)
    assert holders(("Council", "Harbour"), word_sets(text, spans)) == [1]


def test_lines_that_a_host_repeats_are_boilerplate_whatever_their_dates() -> None:
    made = Vocabulary()
    pages = [
        page(
            f"Own words {'abcdefghijklmno'[n] * 5} here.\nIssued on Monday, May {n}, 2001 by the office.",
            f"a.example/{n}",
        )
        for n in range(15)
    ]
    for one in pages:
        made.add(one)
    assert made.is_boilerplate(pages[3], pages[3].text.index("Monday"))
    assert not made.is_boilerplate(pages[3], pages[3].text.index("words"))


def test_a_page_is_cut_once_while_it_is_remembered() -> None:
    cache = SentenceCache(most=1)
    first = cache.of(page("One sentence here.", "a.example/1"))
    assert cache.of(page("One sentence here.", "a.example/1")) is first
    cache.of(page("Another sentence here.", "a.example/2"))
    assert cache.of(page("One sentence here.", "a.example/1")) is not first
