import gzip
import random
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest

from groundhop.errors import InputError, MissingError
from groundhop.pipeline.commoncrawl.draw import draw_band
from groundhop.pipeline.commoncrawl.rank_file import RankFile, RankRow, parse_row

HOST_HEADER = b"#harmonicc_pos\t#harmonicc_val\t#pr_pos\t#pr_val\t#host_rev\n"
DOMAIN_HEADER = HOST_HEADER.rstrip(b"\n") + b"\t#n_hosts\n"


def line(position: int, host: str, pagerank: int | None = None) -> bytes:
    return b"%d\t3.4626736E7\t%d\t3.794876113587071E-4\t%s\n" % (position, pagerank or position, host.encode())


def rank_file(path: Path, lines: Iterable[bytes], header: bytes = HOST_HEADER) -> Path:
    path.write_bytes(gzip.compress(header + b"".join(lines), compresslevel=1))
    return path


def hosts(count: int) -> list[bytes]:
    return [line(n, f"org.h{n}") for n in range(1, count + 1)]


def test_a_row_is_read_with_its_host_in_reading_order(tmp_path: Path) -> None:
    path = rank_file(tmp_path / "r.gz", [line(1, "org.wikipedia.en", 7)])
    assert list(RankFile(path)) == [RankRow("en.wikipedia.org", 1, 34626736.0, 7, 3.794876113587071e-4, None)]


def test_a_domain_file_tells_how_many_hosts_a_domain_has(tmp_path: Path) -> None:
    path = rank_file(tmp_path / "r.gz", [line(1, "org.wikipedia").rstrip(b"\n") + b"\t321\n"], DOMAIN_HEADER)
    assert [row.n_hosts for row in RankFile(path)] == [321]


@pytest.mark.parametrize("cut", [1, 60, 61, 200])
def test_members_may_end_anywhere_even_within_a_row(tmp_path: Path, cut: int) -> None:
    raw = HOST_HEADER + b"".join(hosts(9))
    path = tmp_path / "r.gz"
    path.write_bytes(gzip.compress(raw[:cut]) + gzip.compress(b"") + gzip.compress(raw[cut:]) + bytes(512))
    assert [row.harmonic_position for row in RankFile(path)] == list(range(1, 10))


def test_pieces_of_any_size_give_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = HOST_HEADER + b"".join(hosts(9))
    path = tmp_path / "r.gz"
    path.write_bytes(gzip.compress(raw[:77]) + gzip.compress(raw[77:]))
    for size in (1, 2, 3, 17):
        monkeypatch.setattr("groundhop.pipeline.commoncrawl.rank_file._PIECE", size)
        assert [row.harmonic_position for row in RankFile(path)] == list(range(1, 10))


def test_an_unpacked_file_and_one_without_its_last_line_feed_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r.txt"
    path.write_bytes((HOST_HEADER + b"".join(hosts(3))).rstrip(b"\n"))
    assert len(list(RankFile(path))) == 3


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"1\t2\t3\t4\torg.a\n",
        b"#harmonicc_pos\t#pr_pos\t#host_rev\n",
        HOST_HEADER.replace(b"\t", b" "),
        b"<html>\n",
    ],
)
def test_a_file_with_another_header_is_refused(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(InputError, match="need the header"):
        list(RankFile(rank_file(tmp_path / "r.gz", hosts(2), header)))


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"none\.gz"):
        list(RankFile(tmp_path / "none.gz"))


@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_a_file_cut_off_is_refused_because_its_percentiles_would_be_others(tmp_path: Path, keep: float) -> None:
    path = rank_file(tmp_path / "r.gz", hosts(5000))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(InputError, match="ends inside a gzip member"):
        list(RankFile(path))


def test_rubbish_behind_a_member_is_refused(tmp_path: Path) -> None:
    path = rank_file(tmp_path / "r.gz", hosts(5))
    path.write_bytes(path.read_bytes() + b"<Error>SlowDown</Error>")
    with pytest.raises(InputError, match="where a gzip member should begin"):
        list(RankFile(path))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"1\t2.0\t3\t4.0", "columns"),
        (b"1\t2.0\t3\t4.0\torg.a\t9", "columns"),
        (b"x\t2.0\t3\t4.0\torg.a", "number"),
        (b"1\t\t3\t4.0\torg.a", "number"),
        (b"1\tnan\t3\t4.0\torg.a", "number"),
        (b"1\t2.0\t3\t1e999\torg.a", "number"),
        (b"0\t2.0\t3\t4.0\torg.a", "position"),
        (b"1\t2.0\t-3\t4.0\torg.a", "position"),
        (b"1\t2.0\t3\t4.0\t", "host"),
        (b"1\t2.0\t3\t4.0\torg..a", "host"),
        (b"1\t2.0\t3\t4.0\torg.a/b", "host"),
        (b"1\t2.0\t3\t4.0\torg.\xff", "host"),
        (b"1\t2.0\t3\t4.0\t" + b"a." * 127 + b"a", "host"),
    ],
)
def test_a_bad_row_has_a_reason(row: bytes, reason: str) -> None:
    assert parse_row(row, 5) == reason


def test_bad_rows_are_counted_and_cost_nothing_but_themselves(tmp_path: Path) -> None:
    lines = [
        line(1, "org.a"),
        b"rubbish\n",
        b"\n",
        b"x" * 3_000_000 + b"\n",
        b"2\tq\t2\t1.0\torg.b\n",
        line(3, "org.c"),
    ]
    found = RankFile(rank_file(tmp_path / "r.gz", lines))
    assert [row.host for row in found] == ["a.org", "c.org"]
    assert (found.rows, found.bad) == (2, {"columns": 1, "too_long": 1, "number": 1})


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = rank_file(tmp_path / "r.gz", [line(1, "org.a"), b"x" * 8_000_000])
    tracemalloc.start()
    found = RankFile(path)
    rows = len(list(found))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (rows, found.bad) == (1, {"too_long": 1}) and peak < 3_000_000


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    import hashlib

    path = rank_file(tmp_path / "r.gz", hosts(9000))
    found = RankFile(path)
    list(found)
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_draw_lies_in_the_band_and_has_the_positions_of_the_file(tmp_path: Path) -> None:
    path = rank_file(tmp_path / "r.gz", hosts(5000))
    drawn = draw_band(path, (0.2, 0.3), 50, seed=3)
    places = [row.harmonic_position for row in drawn.hosts]
    assert len(set(places)) == 50 and places == sorted(places) and places[0] >= 1000 and places[-1] <= 1500
    assert all(row.percentile == row.harmonic_position / 5000 for row in drawn.hosts)
    assert (drawn.rows, drawn.passes) == (5000, 1)


def test_the_same_seed_draws_the_same_hosts_and_another_one_others(tmp_path: Path) -> None:
    path = rank_file(tmp_path / "r.gz", hosts(5000))
    one, again, other = (draw_band(path, (0.1, 0.9), 40, seed=seed).hosts for seed in (1, 1, 2))
    assert one == again and one != other


@pytest.mark.parametrize("band", [(0.0, 0.01), (0.001, 0.02), (0.05, 0.95), (0.5, 1.0), (0.99, 1.0), (0.5, 0.501)])
@pytest.mark.parametrize("by", ["harmonic", "pagerank"])
def test_one_pass_draws_what_knowing_the_whole_file_would_draw(
    tmp_path: Path, band: tuple[float, float], by: str
) -> None:
    count, rng = 4000, random.Random(5)
    other = list(range(1, count + 1))
    rng.shuffle(other)
    path = rank_file(tmp_path / "r.gz", [line(n, f"org.h{n}", other[n - 1]) for n in range(1, count + 1)])
    got = draw_band(path, band, 30, seed=9, by=by)  # type: ignore[arg-type]
    # Oracle: sort the whole band by the keyed hash of the name.
    import hashlib

    key = (9).to_bytes(16, "big", signed=True)
    places = {f"h{n}.org": n if by == "harmonic" else other[n - 1] for n in range(1, count + 1)}
    inside = [host for host, place in places.items() if band[0] * count <= place <= band[1] * count]
    inside.sort(key=lambda host: hashlib.blake2b(host.encode(), digest_size=8, key=key).digest())
    assert {row.host for row in got.hosts} == set(inside[:30]) and got.passes == 1


def test_a_band_too_narrow_for_one_pass_takes_two_and_draws_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rank_file(tmp_path / "r.gz", hosts(5000))
    one = draw_band(path, (0.4, 0.5), 10)
    monkeypatch.setattr("groundhop.pipeline.commoncrawl.draw.MAX_KEPT", 10)
    two = draw_band(path, (0.4, 0.5), 10)
    assert (one.passes, two.passes) == (1, 2) and one.hosts == two.hosts


def test_a_band_with_fewer_hosts_is_drawn_whole(tmp_path: Path) -> None:
    path = rank_file(tmp_path / "r.gz", hosts(100))
    assert [row.harmonic_position for row in draw_band(path, (0.1, 0.2), 50).hosts] == list(range(10, 21))


def test_a_draw_is_even(tmp_path: Path) -> None:
    path = rank_file(tmp_path / "r.gz", hosts(2000))
    lower = [
        sum(row.harmonic_position <= 1000 for row in draw_band(path, (0.25, 0.75), 100, seed=seed).hosts)
        for seed in range(20)
    ]
    # Of 2000 draws half fall into the lower half; a deviation of 90 is more than four standard errors.
    assert abs(sum(lower) - 1000) < 90


def test_hosts_that_are_popular_by_pagerank_alone_are_left_out(tmp_path: Path) -> None:
    lines = [line(n, f"org.h{n}", 1 if n % 2 else n) for n in range(1, 1001)]
    drawn = draw_band(rank_file(tmp_path / "r.gz", lines), (0.4, 0.6), 50, max_gap=0.3)
    assert len(drawn.hosts) == 50 and all(row.harmonic_position % 2 == 0 for row in drawn.hosts)


def test_a_filter_that_leaves_little_is_served_by_a_second_pass(tmp_path: Path) -> None:
    path = rank_file(tmp_path / "r.gz", hosts(6000))
    wanted = {f"h{n}.org" for n in range(3000, 3020)}
    drawn = draw_band(path, (0.1, 0.9), 15, wanted=wanted.__contains__)
    assert drawn.passes == 2 and len(drawn.hosts) == 15 and {row.host for row in drawn.hosts} <= wanted


def test_a_file_without_a_single_good_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no row"):
        draw_band(rank_file(tmp_path / "r.gz", [b"a\tb\n"]), (0.1, 0.9), 5)


def test_a_draw_holds_some_hundred_rows_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groundhop.pipeline.commoncrawl.rank_file._PIECE", 1 << 12)
    path = rank_file(tmp_path / "r.gz", hosts(12_000))
    tracemalloc.start()
    draw_band(path, (0.1, 0.5), 5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The rows themselves would take more than 3 MB.
    assert peak < 600_000
