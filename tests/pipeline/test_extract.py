import pytest

from groundhop.pipeline.extract import Extracted, extract

FILLER = (
    "The mill stood by the river for two hundred years and ground the corn of three villages until the flood came. "
)


def page(body: str, head: str = "<title>Mill</title>") -> Extracted:
    found = extract(f"<!DOCTYPE html><html><head>{head}</head><body>{body}</body></html>", "http://farm.example/mill")
    assert found is not None
    return found


def test_main_text_links_know_where_they_stand() -> None:
    got = page(
        f"<main><h1>Mill</h1><p>{FILLER}It belonged to <a href='/ann'>Ann <b>Miller</b></a>, then to <a href='/bob'> Bob </a>.</p><p>{FILLER}</p></main>"
    )
    assert [(got.text[link.start : link.end], link.url) for link in got.links if link.main] == [
        ("Ann Miller", "http://farm.example/ann"),
        ("Bob", "http://farm.example/bob"),
    ]


def test_the_same_words_elsewhere_do_not_move_a_link() -> None:
    got = page(
        f"<main><p>Ann came first. {FILLER}</p><p>Later <a href='/ann'>Ann</a> came again, and Ann stayed.</p></main>"
    )
    (link,) = [link for link in got.links if link.main]
    assert got.text[: link.start].endswith("Later ")


def test_no_mark_is_left_in_the_text() -> None:
    got = page(f"<main><p>{FILLER}<a href='/a'>one</a><a href='/b'>two</a> {FILLER}</p></main>")
    assert got.text.isascii() and "onetwo The mill" in got.text


def test_links_outside_the_main_text_are_kept_apart() -> None:
    got = page(
        f"<nav><a href='/home'>Home</a> <a href='/home'>Home</a></nav><main><p>{FILLER}<a href='/ann'>Ann</a></p></main><footer><a href='/about'>About</a></footer>"
    )
    assert [(link.anchor, link.main, link.start) for link in got.links if not link.main] == [
        ("Home", False, None),
        ("About", False, None),
    ]


def test_a_page_that_holds_the_marking_characters_itself_is_read() -> None:
    got = page(f"<main><p>{FILLER}Rare \U00020000 and \U0002a6df words by <a href='/ann'>Ann</a>.</p></main>")
    assert "\U00020000 and \U0002a6df" in got.text and [got.text[k.start : k.end] for k in got.links if k.main] == [
        "Ann"
    ]


def test_lists_inside_table_cells_survive() -> None:
    got = page(
        f"<main><h1>Hours</h1><p>{FILLER}</p><table><tr><td>Sat</td><td><ul><li>7:30 - 9:45</li></ul></td></tr><tr><td>Sun</td><td><ul><li>Shut</li></ul></td></tr></table></main>"
    )
    assert "Sat | 7:30 - 9:45\nSun | Shut" in got.text


def test_a_layout_table_is_no_row_of_cells() -> None:
    got = page(
        f"<table><tr><td><p>{FILLER * 3}<p>The wheel turns at rate <i>r</i>, and the stone at 3<i>r</i>/4.</td></tr></table>"
    )
    assert "at rate r, and the stone at 3r/4." in got.text


def test_blocks_stand_on_lines_of_their_own() -> None:
    got = page(
        f"<main><h1>Mill</h1><h2>Wheel</h2><p>{FILLER}</p><ul><li>oak</li><li>elm</li></ul><p>End of it.</p></main>"
    )
    assert got.text.split("\n") == ["Mill", "Wheel", FILLER.strip(), "oak", "elm", "End of it."]


def test_white_space_is_folded_and_invisible_characters_go() -> None:
    got = page(f"<main><p>{FILLER}</p><p>A\u00a0 wide\n gap, a sof\u00adt hyphen and a zero\u200b width.</p></main>")
    assert "A wide gap, a soft hyphen and a zero width." in got.text


def test_the_date_in_a_time_element_stays() -> None:
    assert (
        "Built <3 on May 4, 1801"
        in page(
            f"<main><article><p>Built &lt;3 on <time datetime=1801>May 4, 1801</time></p><p>{FILLER}</p></article></main>"
        ).text
    )


@pytest.mark.parametrize("body", ["<p>h\u00e9llo</p>", "h\u00e9llo", "<div><span>h\u00e9llo</span></div>"])
def test_short_pages_keep_their_text(body: str) -> None:
    assert page(body).text == "h\u00e9llo"


def test_scripts_and_comments_are_no_text() -> None:
    got = page(f"<main><p>{FILLER}</p><script>var secret = 1;</script><!-- secret --><style>.secret{{}}</style></main>")
    assert "secret" not in got.text


def test_titles_are_folded() -> None:
    assert page("<p>x</p>", "<title> The\n  Mill </title>").title == "The Mill"


def test_the_same_page_gives_the_same_record_twice() -> None:
    html = f"<main><p>{FILLER}<a href='/ann'>Ann</a></p></main>"
    assert page(html) == page(html)


def test_no_html_is_nothing() -> None:
    assert extract("", "http://farm.example/") is None


def test_an_anchor_around_blocks_keeps_its_words() -> None:
    got = page(
        f"<main><p>{FILLER}</p><a href='/ann'><h3>Ann</h3><p>The miller's daughter</p></a><p>{FILLER}</p></main>"
    )
    (link,) = [link for link in got.links if link.main]
    assert (link.anchor, got.text[link.start : link.end]) == ("Ann The miller's daughter", "Ann\nThe miller's daughter")
