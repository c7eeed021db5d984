import pytest

from groundhop.pipeline.links import anchors, canonical_of, parse_html, title_of

PAGE = "http://farm.example/barn/door.html"


def found(html: str, url: str = PAGE) -> list[tuple[str, bool]]:
    root = parse_html(html)
    return [(a.url, a.nofollow) for a in anchors(root, url)] if root is not None else []


def urls(html: str, url: str = PAGE) -> list[str]:
    return [u for u, _ in found(html, url)]


@pytest.mark.parametrize(
    ("base", "target"),
    [
        ('<base href="/field/gate/">', "http://farm.example/field/gate/hay.html"),
        ('<base href="loft/">', "http://farm.example/barn/loft/hay.html"),
        ('<base href="http://mill.example/"><base href="http://inn.example/">', "http://mill.example/hay.html"),
        ('<base target="_top"><base href="http://mill.example/a/b">', "http://mill.example/a/hay.html"),
        ('<base href="javascript:1">', "http://farm.example/barn/hay.html"),
        ("", "http://farm.example/barn/hay.html"),
    ],
)
def test_the_first_base_with_an_address_resolves_links(base: str, target: str) -> None:
    assert urls(f'<head>{base}</head><body><a href="hay.html">hay</a></body>') == [target]


def test_a_query_link_resolves_against_a_base_that_is_a_file() -> None:
    assert urls('<head><base href="self.html"></head><a href="?q=1">x</a>') == [
        "http://farm.example/barn/self.html?q=1"
    ]


@pytest.mark.parametrize(
    ("rel", "nofollow"),
    [("nofollow", True), ("external NOFOLLOW", True), ("nofollowers", False), ("", False), ("no follow", False)],
)
def test_nofollow_is_a_whole_token(rel: str, nofollow: bool) -> None:
    assert found(f'<a rel="{rel}" href="/x">x</a>') == [("http://farm.example/x", nofollow)]


@pytest.mark.parametrize(
    "href",
    [
        "javascript:alert(1)",
        " JavaScript:x",
        "java\tscript:x",
        "mailto:a@b.example",
        "data:text/html,x",
        "tel:1",
        "ftp://f.example/",
        "#roof",
        "",
        "   ",
        "http://",
        "http://[x",
        "about:blank",
    ],
)
def test_links_that_lead_to_no_other_page_are_left_out(href: str) -> None:
    assert urls(f'<a href="{href}">x</a><a href="/ok">ok</a>') == ["http://farm.example/ok"]


@pytest.mark.parametrize(
    "html",
    [
        "<!-- <a href='/no'>no</a> -->",
        "<script>var a = \"<a href='/no'>\";</script>",
        "<template><a href='/no'>no</a></template>",
        "<a name='no'>no</a>",
        "<style>a[href='/no']{}</style>",
    ],
)
def test_what_is_not_shown_is_no_link(html: str) -> None:
    assert urls(html + '<p><a href="/ok">ok</a>') == ["http://farm.example/ok"]


@pytest.mark.parametrize(
    ("tag", "target"),
    [
        ("<a href=unquoted.html>x", "http://farm.example/barn/unquoted.html"),
        ("<A HREF='/UP'>x</A>", "http://farm.example/UP"),
        ('<a href="\n /broken\n/line ">x</a>', "http://farm.example/broken/line"),
        ('<a href="/a?x=1&amp;y=2">x</a>', "http://farm.example/a?x=1&y=2"),
        ('<a href="/a?x=1&y=2">x</a>', "http://farm.example/a?x=1&y=2"),
        ('<a href="/a"><img src="i.png" alt="hay"></a>', "http://farm.example/a"),
        ('<map><area href="/area" alt="y"></map>', "http://farm.example/area"),
        ('<a href="/a%2Fb;v=1?q=a+b">x</a>', "http://farm.example/a%2Fb;v=1?q=a+b"),
        ('<a href="/a//b?wsdl#part">x</a>', "http://farm.example/a//b?wsdl"),
    ],
)
def test_awkward_anchors_are_read(tag: str, target: str) -> None:
    assert urls(f"<body>{tag}</body>") == [target]


def test_a_fragment_link_leads_away_when_a_base_says_so() -> None:
    assert urls('<base href="/other.html"><a href="#top">x</a>') == ["http://farm.example/other.html"]


@pytest.mark.parametrize(
    ("html", "navigation"),
    [
        ("<nav><a href='/x'>x</a></nav>", True),
        ("<header><a href='/x'>x</a></header>", True),
        ("<article><header><a href='/x'>x</a></header></article>", False),
        ("<footer><p><a href='/x'>x</a></p></footer>", True),
        ("<div role=navigation><a href='/x'>x</a></div>", True),
        ("<div class='box navbar-left'><a href='/x'>x</a></div>", True),
        ("<div class='navy'><p><a href='/x'>x</a></p></div>", False),
        ("<main><p><a href='/x'>x</a></p></main>", False),
    ],
)
def test_page_furniture_is_told_from_content(html: str, navigation: bool) -> None:
    (anchor,) = anchors(parse_html(html), PAGE)
    assert anchor.navigation is navigation


def test_anchor_text_is_folded() -> None:
    (anchor,) = anchors(parse_html("<a href='/x'>  a <b>big\n</b>\u00a0 barn </a>"), PAGE)
    assert anchor.text == "a big barn"


@pytest.mark.parametrize(
    ("html", "title"),
    [
        ("<title>Barn -\n  Farm</title><h1>Barn</h1>", "Barn"),
        ("<title>Barn - Farm</title><h1>Farm news</h1>", "Barn - Farm"),
        ("<title>Farm</title><h1>Farm</h1><h1>Hay</h1>", "Farm"),
        ("<h1> Hay </h1>", "Hay"),
        ("<title> </title><h2>Loft</h2>", "Loft"),
        ("<p>x</p>", ""),
    ],
)
def test_title_is_the_heading_that_the_title_repeats(html: str, title: str) -> None:
    assert title_of(parse_html(html)) == title


def test_canonical_is_resolved() -> None:
    assert canonical_of(parse_html("<link rel='x Canonical' href='/a'><p>x"), PAGE) == "http://farm.example/a"


@pytest.mark.parametrize("html", ["", "   ", "<!-- only -->", "\x00"])
def test_nothing_to_parse_has_no_links(html: str) -> None:
    assert found(html) == []
