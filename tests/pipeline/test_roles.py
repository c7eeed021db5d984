import pytest

from groundhop.pipeline.roles import role_by_content, role_by_url
from groundhop.records import Link, Page


def page(text: str, anchors: int = 0) -> Page:
    links = (Link(url="https://a.example/x", key="a.example/x", anchor="", main=True, start=0, end=anchors),)
    return Page(
        url="https://a.example/p", key="a.example/p", host="a.example", title="", text=text, links=links, digest=""
    )


@pytest.mark.parametrize(
    ("url", "role"),
    [
        ("https://a.example", "home"),
        ("https://a.example/", "home"),
        ("https://a.example/index.html", "home"),
        ("https://a.example/en/", "home"),
        ("https://a.example/fr/index.html", "home"),
        ("https://a.example/wiki/Main_Page", "home"),
        ("https://a.example/?p=12", "content"),
        ("https://a.example/about", "about"),
        ("https://a.example/about.html", "about"),
        ("https://a.example/en/Contact-us/", "contact"),
        ("https://a.example/privacy.php", "legal"),
        ("https://a.example/tag/piers", "list"),
        ("https://a.example/authors/jane-doe/", "list"),
        ("https://a.example/category/harbours/page/2", "list"),
        ("https://a.example/blog/page/3/", "list"),
        ("https://a.example/sitemap", "list"),
        ("https://a.example/2015/03/25/about-the-harbour/", "content"),
        ("https://a.example/milestones/1945-1952/index.html", "content"),
        ("https://a.example/harbour", "content"),
    ],
)
def test_the_shape_of_an_address_names_boilerplate(url: str, role: str) -> None:
    assert role_by_url(url) == role


def distinct_words(count: int) -> str:
    return " ".join(chr(97 + number // 26) + chr(97 + number % 26) + "x" for number in range(count))


def test_few_words_are_thin() -> None:
    assert role_by_content(page("Too few words."), 60, 0.5) == "thin"


def test_a_page_of_anchors_is_a_list() -> None:
    text = distinct_words(100)
    assert role_by_content(page(text, anchors=int(0.6 * len(text))), 60, 0.5) == "list"
    assert role_by_content(page(text, anchors=int(0.4 * len(text))), 60, 0.5) == "content"


def test_text_that_repeats_itself_is_spam() -> None:
    assert role_by_content(page("Buy cheap tickets now here today. " * 30), 60, 0.5) == "spam"
