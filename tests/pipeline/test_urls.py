import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groundhop.pipeline.urls import host_of, registered_domain, resolve, url_key

WORDS = [
    "http://",
    "HTTPS://",
    "//",
    "..",
    "/./",
    "%2e",
    "%2F",
    "%zz",
    "utm_source=x",
    "xn--",
    "example.org",
    ":80",
    ":443",
]
PIECES = st.sampled_from([*WORDS, "u:p@", "#!", "[::1]", *"aZ/\\?#&=%2Ee5.:;@[]!~ \t\n+_-é漢İß。K|<>\"'"])


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES | st.characters(), max_size=14).map("".join))
def test_the_key_of_a_key_is_itself(url: str) -> None:
    assert url_key(url_key(url)) == url_key(url)


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES | st.characters(), max_size=14).map("".join))
def test_what_a_link_resolves_to_is_an_address_with_a_host_or_nothing(reference: str) -> None:
    found = resolve("http://a.example/x/y?z", reference)
    assert found is None or (found.startswith(("http://", "https://")) and found.isascii())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://farm.example/barn", "https://farm.example/barn"),
        ("HTTP://Farm.EXAMPLE:80/barn", "http://farm.example/barn"),
        ("https://farm.example:443/barn", "http://farm.example/barn"),
        ("http://farm.example", "http://farm.example/?"),
        ("http://farm.example/barn/", "http://farm.example/barn"),
        ("http://farm.example/x/../barn/./hay", "http://farm.example/barn/hay"),
        ("http://farm.example/%2e%2E/barn", "http://farm.example/barn"),
        ("http://farm.example/%7ejoe%2d", "http://farm.example/~joe-"),
        ("http://farm.example/a%c3%a9", "http://farm.example/aé"),
        ("http://farm.example/barn?b=2&a=1", "http://farm.example/barn?a=1&b=2"),
        ("http://farm.example/barn?gclid=7&cow=2&utm_campaign=x", "http://farm.example/barn?cow=2"),
        ("http://farm.example/barn#roof", "http://farm.example/barn"),
        ("http://BÜCHER.example/", "http://xn--bcher-kva.example/"),
        ("http://farm.example./barn", "http://farm.example/barn"),
        ("  http://farm.example/ba\nrn ", "http://farm.example/barn"),
        ("farm.example/barn", "http://farm.example/barn"),
        ("http://joe:secret@farm.example/barn", "http://farm.example/barn"),
    ],
)
def test_spellings_of_one_page_share_a_key(one: str, other: str) -> None:
    assert url_key(one) == url_key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://farm.example/Barn", "http://farm.example/barn"),
        ("http://farm.example/soap?wsdl", "http://farm.example/soap"),
        ("http://farm.example/soap?wsdl", "http://farm.example/soap?wsdl="),
        ("http://farm.example/i.php?/topic/5/", "http://farm.example/i.php?/topic/6/"),
        ("http://farm.example/a%2Fb", "http://farm.example/a/b"),
        ("http://farm.example/a//b", "http://farm.example/a/b"),
        ("http://farm.example/p;v=1", "http://farm.example/p;v=2"),
        ("http://farm.example/p?gallery=7", "http://farm.example/p"),
        ("http://farm.example/p?source=nyt", "http://farm.example/p"),
        ("http://farm.example/p?a=1&a=2", "http://farm.example/p?a=2&a=1"),
        ("http://farm.example/#!/hay", "http://farm.example/#!/straw"),
        ("http://farm.example:8080/", "http://farm.example/"),
        ("http://www.farm.example/", "http://farm.example/"),
    ],
)
def test_different_pages_keep_different_keys(one: str, other: str) -> None:
    assert url_key(one) != url_key(other)


def test_a_password_never_enters_the_key() -> None:
    assert "secret" not in url_key("https://joe:secret@farm.example:99/barn?x=1") + url_key(
        "ftp://joe:secret@farm.example/"
    )


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://Farm.Example:99/x", "farm.example"),
        ("http://[::1]:80/", "[::1]"),
        ("mailto:joe@farm.example", ""),
        ("", ""),
    ],
)
def test_host_has_no_port_and_mail_addresses_have_no_host(url: str, host: str) -> None:
    assert host_of(url) == host


@pytest.mark.parametrize(
    ("reference", "target"),
    [
        ("hay.html", "http://farm.example/barn/hay.html"),
        ("?loft=1", "http://farm.example/barn/door.html?loft=1"),
        (" /a b\t ", "http://farm.example/a%20b"),
        ("\\\\other.example\\x", "http://other.example/x"),
        ("//other.example/x#y", "http://other.example/x"),
        ("HTTPS://joe:pw@B\u00dcCHER.example:8080/X", "https://xn--bcher-kva.example:8080/X"),
        ("http:hay.html", "http://farm.example/barn/hay.html"),
        ("/caf\u00e9?q=\u00fc", "http://farm.example/caf%C3%A9?q=%C3%BC"),
        ("java\nscript:alert(1)", None),
        ("JavaScript:void(0)", None),
        ("mailto:joe@farm.example", None),
        ("data:text/html,x", None),
        ("tel:+1", None),
        ("http://", None),
        ("http://[bad/", None),
    ],
)
def test_links_resolve_as_in_a_browser(reference: str, target: str | None) -> None:
    assert resolve("http://farm.example/barn/door.html", reference) == target


@pytest.mark.parametrize(
    ("host", "domain"),
    [
        ("news.shop.co.uk", "shop.co.uk"),
        ("ann.github.io", "ann.github.io"),
        ("deep.ann.github.io", "ann.github.io"),
        ("Www.Farm.COM.", "farm.com"),
        ("github.io", None),
        ("co.uk", None),
        ("intranet", None),
        ("10.0.0.7", None),
        ("[2001:db8::1]", None),
        ("", None),
    ],
)
def test_registered_domain_follows_the_private_suffixes_too(host: str, domain: str | None) -> None:
    assert registered_domain(host) == domain
