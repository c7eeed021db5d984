"""Questions that a user brings."""

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from groundhop.errors import InputError, MissingError, ProviderError
from groundhop.pipeline.browsecomp import encrypt, hashed_key
from groundhop.pipeline.question_files import read_questions

ROW = {"id": "a", "question": "When?", "answer": "1902"}


def jsonl_file(folder: Path, *rows: object) -> str:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def test_rows_of_id_question_answer_and_aliases_are_read(tmp_path: Path) -> None:
    found = read_questions(
        jsonl_file(
            tmp_path, {**ROW, "aliases": ["in 1902"], "kind": "date", "topic": "x"}, {**ROW, "id": 7, "answer": 3.5}
        )
    )
    first, second = found.questions
    assert (first.aliases, first.kind, second.id, second.answer) == (("in 1902",), "date", "7", "3.5")
    assert (found.name, found.bad, found.secret) == ("mine", (), False)
    assert found.digest == hashlib.sha256((tmp_path / "mine.jsonl").read_bytes()).hexdigest()


def test_bad_rows_are_reported_by_number_and_the_others_kept(tmp_path: Path) -> None:
    found = read_questions(
        jsonl_file(
            tmp_path,
            ROW,
            "{torn",
            ROW,
            {**ROW, "id": "b", "answer": " "},
            {"id": "c", "question": "?"},
            "",
            {**ROW, "id": "d"},
        )
    )
    assert [q.id for q in found.questions] == ["a", "d"]
    assert [(row, reason) for row, reason, _ in found.bad] == [
        ("row 2", "unreadable"),
        ("row 3", "duplicate_id"),
        ("row 4", "unreadable"),
        ("row 5", "unreadable"),
    ]


@pytest.mark.parametrize("rows", [(), ("not json",)])
def test_a_file_without_questions_is_refused(tmp_path: Path, rows: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=r"mine\.jsonl holds no question"):
        read_questions(jsonl_file(tmp_path, *rows))


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="no file"):
        read_questions(str(tmp_path / "none.jsonl"))


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    folder = tmp_path / "www"
    folder.mkdir()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()


def test_an_encrypted_set_is_read_from_an_address_and_is_secret(served: tuple[str, Path]) -> None:
    url, folder = served
    key = hashed_key("c")
    (folder / "bc.csv").write_text(
        f"problem,answer,canary\n{encrypt('Which ship?', key)},{encrypt('Argo', key)},c\n,,c\n"
    )
    found = read_questions(f"{url}/bc.csv?v=1")
    assert ([(q.id, q.answer) for q in found.questions], found.bad, found.secret) == (
        [("bc-0001", "Argo")],
        (("row 2", "empty", ""),),
        True,
    )


def test_an_address_without_the_file_is_a_providers_error(served: tuple[str, Path]) -> None:
    with pytest.raises(ProviderError, match="404"):
        read_questions(f"{served[0]}/none.csv")
