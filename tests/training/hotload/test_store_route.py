"""Which snapshots bring a reader from what it has to what it wants."""

from collections.abc import Callable

import pytest

from groundhop.errors import ChecksumError, InputError, MissingError
from groundhop.training.hotload.store.snapshots import SnapshotIndex, anchor_of, identity_of, route


def full(version: int, identity: str = "") -> SnapshotIndex:
    return SnapshotIndex(
        identity=identity or identity_of(version),
        version=version,
        kind="full",
        layout="groundhop",
        base=None,
        base_digest="",
        digest=f"state {version}",
    )


def delta(version: int, base: int | None = None, **more: object) -> SnapshotIndex:
    below = version - 1 if base is None else base
    fields = {"base": identity_of(below), "base_digest": f"state {below}", "digest": f"state {version}", **more}
    return SnapshotIndex(identity=identity_of(version), version=version, kind="delta", layout="groundhop", **fields)  # type: ignore[arg-type]


def reader(*indexes: SnapshotIndex) -> Callable[[str], SnapshotIndex]:
    known = {index.identity: index for index in indexes}

    def read(identity: str) -> SnapshotIndex:
        if identity not in known:
            raise MissingError(f"no snapshot {identity}")
        return known[identity]

    return read


def chain(top: int, *anchors: int) -> Callable[[str], SnapshotIndex]:
    """Full 0, deltas 1 to `top`, and anchors beside some of them."""
    beside = [full(version, anchor_of(identity_of(version))) for version in anchors]
    return reader(full(0), *(delta(version) for version in range(1, top + 1)), *beside)


def steps(read: Callable[[str], SnapshotIndex], have: int | None, want: int, limit: int = 128) -> tuple[str, list[int]]:
    way = route(read, None if have is None else identity_of(have), identity_of(want), limit)
    return way.anchor.identity if way.anchor else "", [index.version for index in way.deltas]


def test_a_reader_that_follows_step_by_step_applies_each_delta_once() -> None:
    read = chain(24)
    assert sum(len(steps(read, version, version + 1)[1]) for version in range(24)) == 24


def test_a_reader_that_missed_versions_gets_the_deltas_between_in_order() -> None:
    assert steps(chain(9), 3, 7) == ("", [4, 5, 6, 7])


def test_a_reader_that_has_it_needs_nothing() -> None:
    assert steps(chain(3), 2, 2) == ("", [])


def test_a_reader_with_nothing_starts_at_the_nearest_anchor() -> None:
    read = chain(9, 4, 6)
    assert [steps(read, None, want) for want in (3, 6, 8)] == [
        ("weight_v000000", [1, 2, 3]),
        ("weight_v000006-anchor", []),
        ("weight_v000006-anchor", [7, 8]),
    ]


def test_a_full_snapshot_in_the_chain_ends_it() -> None:
    read = reader(full(0), delta(1), full(2), delta(3))
    assert [steps(read, have, 3) for have in (None, 1, 2)] == [
        ("weight_v000002", [3]),
        ("weight_v000002", [3]),
        ("", [3]),
    ]


def test_going_back_is_loading_the_older_one() -> None:
    assert steps(chain(9, 4), 8, 5) == ("weight_v000004-anchor", [5])


@pytest.mark.parametrize("have", [0, None])
def test_a_chain_of_128_is_taken(have: int | None) -> None:
    anchor, versions = steps(chain(128), have, 128)
    assert (anchor, len(versions)) == ("weight_v000000" if have is None else "", 128)


@pytest.mark.parametrize("have", [0, None])
def test_a_chain_of_129_is_refused(have: int | None) -> None:
    with pytest.raises(InputError, match="too long"):
        steps(chain(129), have, 129)


@pytest.mark.parametrize("have", [0, None])
def test_a_chain_of_129_is_left_for_an_anchor(have: int | None) -> None:
    assert steps(chain(129, 100), have, 129) == ("weight_v000100-anchor", list(range(101, 130)))


def test_a_chain_with_a_gap_is_left_for_an_anchor_above_it() -> None:
    read = reader(*(delta(version) for version in (1, 2, 4, 5, 6)), full(5, anchor_of(identity_of(5))))
    assert [steps(read, have, 6) for have in (1, 4)] == [("weight_v000005-anchor", [6]), ("", [5, 6])]
    with pytest.raises(MissingError):
        steps(read, 2, 4)


def test_an_anchor_counts_without_the_delta_beside_it() -> None:
    read = reader(delta(6), full(5, anchor_of(identity_of(5))))
    assert [steps(read, None, want) for want in (5, 6)] == [
        ("weight_v000005-anchor", []),
        ("weight_v000005-anchor", [6]),
    ]


@pytest.mark.parametrize("have", [0, 1, None])
def test_a_delta_on_another_state_of_the_same_name_is_refused(have: int | None) -> None:
    read = reader(full(0), delta(1), delta(2, base_digest="another"))
    with pytest.raises(ChecksumError, match="weight_v000002 builds on another state"):
        steps(read, have, 2)


def test_an_overwrite_is_reached_from_the_attempt_that_it_repairs() -> None:
    lost = delta(6, 5)
    read = reader(
        full(0), *(delta(version) for version in range(1, 6)), lost, delta(7, 5, operation="overwrite"), delta(8)
    )
    assert [steps(read, have, 8) for have in (5, 6)] == [("", [7, 8]), ("", [7, 8])]


def test_a_differential_is_never_put_on_an_attempt_beside_it() -> None:
    read = reader(full(0), *(delta(version) for version in range(1, 6)), delta(6, 5), delta(7, 5))
    assert steps(read, 6, 7) == ("weight_v000000", [1, 2, 3, 4, 5, 7])


def test_a_circle_ends() -> None:
    with pytest.raises(InputError, match="too long"):
        steps(reader(delta(1, 2), delta(2, 1)), None, 2)
