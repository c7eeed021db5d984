import pytest

from groundhop.pipeline.encoding import decode

FRENCH = "<p>L’été dernier — le café « Zoé » fermait à minuit.</p>"
JAPANESE = "<p>江戸の町並みを描いた古い地図と、その歴史。</p>"


@pytest.mark.parametrize("label", ["iso-8859-1", "latin1", "ISO_8859-1", "us-ascii", "windows-1252"])
def test_latin_1_labels_mean_windows_1252(label: str) -> None:
    assert decode(FRENCH.encode("cp1252"), f"text/html; charset={label}").text == FRENCH


@pytest.mark.parametrize("label", ["iso-8859-1", "shift_jis", "koi8-r"])
def test_valid_utf_8_beats_a_wrong_label(label: str) -> None:
    assert decode(FRENCH.encode(), f"text/html; charset={label}").text == FRENCH


@pytest.mark.parametrize(
    "label", ["utf8mb4", "none", "utf-8,gbk", "", "'", "x-user-defined", "undefined", "idna", "base64", "\x00"]
)
def test_labels_that_mean_nothing_do_not_matter(label: str) -> None:
    assert decode(FRENCH.encode(), f"text/html; charset={label}").text == FRENCH


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"\xef\xbb\xbf" + FRENCH.encode(), FRENCH),
        (b"\xff\xfe" + FRENCH.encode("utf-16-le"), FRENCH),
        (b"\xfe\xff" + FRENCH.encode("utf-16-be"), FRENCH),
    ],
)
def test_a_byte_order_mark_decides_and_is_no_text(body: bytes, text: str) -> None:
    assert decode(body, "text/html; charset=windows-1252").text == text


@pytest.mark.parametrize(
    "declaration",
    [
        '<meta charset="Shift_JIS">',
        '<meta http-equiv=content-type content="text/html; charset=sjis">',
        '<?xml version="1.0" encoding="shift_jis"?>',
    ],
)
def test_a_declaration_inside_the_page_counts(declaration: str) -> None:
    page = declaration + JAPANESE + "①"
    assert decode(page.encode("cp932")).text == page


def test_the_header_counts_before_the_declaration_inside() -> None:
    page = '<meta charset="koi8-r"><p>Привет</p>'
    assert decode(page.encode("cp1251"), "text/html; charset=windows-1251").text == page


def test_a_utf_16_declaration_that_can_be_read_as_ascii_is_wrong() -> None:
    page = '<meta charset="utf-16"><p>plain</p>'
    assert decode(page.encode()).text == page


RUSSIAN = (
    "<p>Москва является столицей России, её население превышает двенадцать миллионов человек. Город стоит на реке.</p>"
)
CHINESE = "<p>这座古老的城市有很多历史悠久的桥梁和图书馆。</p>"


@pytest.mark.parametrize(("name", "text"), [("cp932", JAPANESE), ("gb18030", CHINESE), ("cp1251", RUSSIAN)])
def test_an_encoding_without_any_label_is_detected(name: str, text: str) -> None:
    assert decode(text.encode(name)).text == text


def test_one_bad_byte_does_not_turn_utf_8_into_something_else() -> None:
    body = (FRENCH * 20).encode() + b"\xe9"
    assert decode(body, "text/html; charset=utf-8").text == FRENCH * 20 + "\ufffd"


@pytest.mark.parametrize("body", [b"", b"\xff", b"\x81\x8d", bytes(range(256)), b"\xff\xfe\x00"])
def test_no_bytes_raise(body: bytes) -> None:
    assert isinstance(decode(body, "text/html; charset=utf-8").text, str)
