"""JSON lines that a kill has torn, and files that are whole at every moment."""

import os
from pathlib import Path

import pytest

from trueline.files import PRIVATE_FILE, atomic_path, parse_line, read_rows, rows_at, whole_lines, write_atomically


def test_torn_lines_are_no_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert read_rows(file) == []
    file.write_bytes(b'{"step": 1}\n{"ste\n{"step": 2, "text": "a\xe2\x80\xa8b"}\n{"step": 3')
    assert [row["step"] for row in read_rows(file)] == [1, 2]
    assert parse_line(b"[1]") is None
    with file.open("rb") as stream:
        places = [place for place, _ in whole_lines(stream)]
    assert list(rows_at(file, [places[2], places[0]])) == [{"step": 2, "text": "a\u2028b"}, {"step": 1}]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    write_atomically(file, "old")
    with pytest.raises(RuntimeError), atomic_path(file) as aside:
        aside.write_text("half")
        raise RuntimeError
    assert (file.read_text(), os.listdir(tmp_path)) == ("old", ["state.json"])
    write_atomically(file, b"new", mode=PRIVATE_FILE)
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"new", PRIVATE_FILE)
