from collections import Counter

from groundhop.pipeline.band import NodeRow
from groundhop.pipeline.hops import find_hops, hop_id
from groundhop.records import Link, Page


def row(key: str, role: str = "content", in_band: bool = True) -> NodeRow:
    return NodeRow(
        key=key, host="h", in_degree=1, out_degree=1, pagerank=0.1, harmonic=0.1, percentile=0.5,
        harmonic_percentile=0.5, disagreement=0.0, role=role, in_band=in_band,
    )  # fmt: skip


def page(key: str, marked: str) -> Page:
    """Text with links written as `[anchor](key)`; `[anchor](!key)` lies outside the main text."""
    text, links = "", []
    for piece in marked.split("["):
        anchor, bracket, rest = piece.partition("](")
        if not bracket:
            text += piece
            continue
        target, _, after = rest.partition(")")
        main = not target.startswith("!")
        target = target.lstrip("!")
        start = len(text)
        text += anchor + after
        links.append(
            Link(url=f"https://{target}", key=target, anchor=anchor, main=main,
                 start=start if main else None, end=start + len(anchor) if main else None)
        )  # fmt: skip
    return Page(url=f"https://{key}", key=key, host="h", title=key, text=text, links=tuple(links), digest="")


def hops(marked: str, *rows: NodeRow) -> tuple[list[str], Counter[str]]:
    found, dropped = find_hops([page("s", marked)], {one.key: one for one in (row("s"), *rows)})
    return [hop.target for hop in found], dropped


SENTENCE = "The board bought [the old pier](t) from a timber merchant in the spring."


def test_a_link_in_a_real_sentence_is_a_hop_with_exact_offsets() -> None:
    seed = page("s", f"First words stand here alone. {SENTENCE} More follows.")
    (hop,), dropped = find_hops([seed], {"s": row("s"), "t": row("t")})
    assert seed.text[hop.anchor_start : hop.anchor_end] == "the old pier"
    assert seed.text[hop.sentence_start : hop.sentence_end] == SENTENCE.replace("[", "").replace("](t)", "")
    assert not dropped


def test_only_pages_in_the_band_are_seeds() -> None:
    found, _ = find_hops([page("s", SENTENCE)], {"s": row("s", in_band=False), "t": row("t")})
    assert found == []


def test_links_outside_the_main_text_make_no_hop() -> None:
    assert hops(SENTENCE.replace("(t)", "(!t)"), row("t"))[0] == []


def test_a_link_that_is_most_of_its_sentence_describes_nothing() -> None:
    found, dropped = hops("See [the long history of the old town pier](t) now.", row("t"))
    assert (found, dropped) == ([], Counter({"not_prose": 1}))


def test_boilerplate_unknown_and_repeated_targets_are_counted() -> None:
    text = " ".join(
        [
            SENTENCE,
            SENTENCE,
            SENTENCE.replace("(t)", "(x)"),
            SENTENCE.replace("(t)", "(s)"),
            SENTENCE.replace("(t)", "(b)"),
        ]
    )
    found, dropped = hops(text, row("t"), row("b", role="about"))
    assert found == ["t"]
    assert dropped == Counter({"repeated_link": 1, "outside_corpus": 1, "self_link": 1, "target_about": 1})


def test_a_hops_name_does_not_change_with_its_ranks() -> None:
    (first,), _ = find_hops([page("s", SENTENCE)], {"s": row("s"), "t": row("t")})
    other = NodeRow(**{name: getattr(row("s"), name) for name in NodeRow.__struct_fields__} | {"percentile": 0.6})
    (second,), _ = find_hops([page("s", SENTENCE)], {"s": other, "t": row("t")})
    assert first != second and hop_id(first) == hop_id(second)
