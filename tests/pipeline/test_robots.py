import pytest

from groundhop.pipeline.robots import opt_outs, parse_robots, reserves, robots_of, tdm_reserved

SITE = "https://farm.example"


def allows(text: str | bytes, path: str, agent: str = "groundhop") -> bool:
    return parse_robots(text if isinstance(text, bytes) else text.encode()).allows(agent, SITE + path)


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_a_byte_order_mark_hides_no_rule(ending: str) -> None:
    body = b"\xef\xbb\xbf" + ending.join(["User-agent: *", "Disallow: /barn", ""]).encode()
    assert (allows(body, "/barn/x"), allows(body, "/field")) == (False, True)


@pytest.mark.parametrize(
    ("rules", "path", "allowed"),
    [
        ("Disallow: /barn/\nAllow: /barn/door", "/barn/door.html", True),
        ("Allow: /barn/door\nDisallow: /barn/", "/barn/loft", False),
        ("Disallow: /hay\nAllow: /hay", "/hay", True),
        ("Disallow: /*.pdf$", "/a/b.pdf", False),
        ("Disallow: /*.pdf$", "/a/b.pdf?page=1", True),
        ("Disallow: /$", "/", False),
        ("Disallow: /$", "/x", True),
        ("Disallow:", "/x", True),
        ("Disallow: /a%2Fb", "/a/b", True),
        ("Disallow: /caf\u00e9", "/caf%C3%A9", False),
        ("Disallow: /x # note", "/x", False),
    ],
)
def test_the_longest_rule_wins_and_allow_wins_a_tie(rules: str, path: str, allowed: bool) -> None:
    assert allows(f"User-agent: *\n{rules}\n", path) is allowed


@pytest.mark.parametrize(
    ("text", "agent", "allowed"),
    [
        ("User-agent: other\nUser-agent: groundhop\nDisallow: /", "groundhop", False),
        ("User-agent: groundhop\nUser-agent: *\nDisallow: /", "stranger", False),
        ("User-agent: GroundHop\nDisallow: /", "groundhop", False),
        ("User-agent: groundhop/2.0\nDisallow: /", "groundhop/1.0 (+mail)", False),
        ("User-agent: *\nDisallow: /\n\nUser-agent: groundhop\nDisallow: /y", "groundhop", True),
        (
            "User-agent: groundhop\nDisallow: /y\nUser-agent: a\nDisallow:\nUser-agent: groundhop\nDisallow: /x",
            "groundhop",
            False,
        ),
        ("User-agent: ground\nDisallow: /", "groundhop", True),
        ("User-agent: groundhopper\nDisallow: /", "groundhop", True),
        ("Disallow: /\nUser-agent: *\nDisallow: /y", "groundhop", True),
        ("User-agent: other\nSitemap: http://farm.example/s\nUser-agent: groundhop\nDisallow: /x", "other", False),
        ("User-agent: tinybot\nDisallow: /", "Mozilla/5.0 (compatible; tinybot/1.0)", False),
    ],
)
def test_groups_are_found_by_whole_names_and_merged(text: str, agent: str, allowed: bool) -> None:
    assert allows(text, "/x", agent) is allowed


@pytest.mark.parametrize(
    ("text", "delay"),
    [
        ("User-agent: *\nCrawl-delay: 2.5", 2.5),
        ("User-agent: groundhop\nCrawl-delay: 1\nUser-agent: *\nCrawl-delay: 9", 1.0),
        ("User-agent: *\nCrawl-delay: soon", None),
        ("User-agent: *\nCrawl-delay: -1", None),
        ("User-agent: *\nCrawl-delay: inf", None),
        ("User-agent: *\nDisallow: /", None),
    ],
)
def test_crawl_delay_is_a_number_of_seconds_or_nothing(text: str, delay: float | None) -> None:
    assert parse_robots(text.encode()).delay_s("groundhop") == delay


@pytest.mark.parametrize(
    ("status", "body", "state"),
    [
        (200, b"", "rules"),
        (404, b"User-agent: *\nDisallow: /", "allow_all"),
        (410, b"", "allow_all"),
        (403, b"", "allow_all"),
        (429, b"", "unreachable"),
        (500, b"User-agent: *\nAllow: /", "unreachable"),
        (503, b"<html>later</html>", "unreachable"),
        (None, b"", "unreachable"),
    ],
)
def test_an_error_of_the_server_forbids_and_a_missing_file_allows(status: int | None, body: bytes, state: str) -> None:
    robots = robots_of(status, body)
    assert (robots.state, robots.allows("groundhop", SITE + "/x")) == (state, state != "unreachable")


def test_what_follows_the_size_limit_is_not_read_not_even_half_a_line() -> None:
    padding = b"# " + b"x" * (500 * 1024 - 30) + b"\n"
    assert allows(b"User-agent: *\n" + padding + b"Disallow: /barn-and-more\nDisallow: /", "/barn") is True


@pytest.mark.parametrize(
    ("headers", "metas", "found"),
    [
        ([("X-Robots-Tag", "noindex, NoAI")], [], ("noai",)),
        ([("x-robots-tag", "otherbot: noai")], [], ()),
        ([("x-robots-tag", "groundhop: noai, noimageai")], [], ("noai", "noimageai")),
        ([("TDM-Reservation", "1")], [], ("tdm-reservation",)),
        ([("tdm-reservation", "0")], [], ()),
        ([], [("robots", "noai,noimageai")], ("noai", "noimageai")),
        ([], [("groundhop", "noai")], ("noai",)),
        ([], [("tdm-reservation", "1")], ("tdm-reservation",)),
        ([], [("description", "noai")], ()),
        ([("x-robots-tag", "max-snippet: 5, noai")], [], ("noai",)),
    ],
)
def test_opt_outs_are_read_from_headers_and_metas(headers: list, metas: list, found: tuple[str, ...]) -> None:
    assert opt_outs(headers, metas, "groundhop") == found


def test_a_sites_own_reservation_file_goes_by_path() -> None:
    rules = tdm_reserved(b'[{"location": "/free/*", "tdm-reservation": 0}, {"location": "/", "tdm-reservation": 1}, 5]')
    assert [reserves(rules, SITE + path) for path in ("/free/x", "/other")] == [False, True]


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b"\xff", b"[[]]"])
def test_a_reservation_file_that_cannot_be_read_reserves_nothing(body: bytes) -> None:
    assert tdm_reserved(body) == ()
