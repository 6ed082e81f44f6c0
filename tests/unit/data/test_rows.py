"""Rows of large datasets, decoded as they are drawn: the same rows and places as if all were read at once."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from tests.unit.data.test_sources import WRITERS
from trueline.config.base import ConfigError
from trueline.data import rows as rows_module
from trueline.data.rows import Joined, Lines, Located, TableRows, content_digest, sizes_of
from trueline.data.sources import open_source

LINES = [
    b'{"prompt": "a"}\n{"prompt": "b"}\n',
    b'{"prompt": "a"}\n{"prompt": "b"}',  # no line break at the end
    b'\xef\xbb\xbf{"prompt": "a"}\n\n   \n{"prompt": "b"}\n\n',  # a byte order mark, and blank lines
    b'{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n',
    b'{"prompt": "a"}\r{"prompt": "b"}\r',
    b'{"prompt": "a"}\n\r\n\r{"prompt":\r\n',  # the last is broken
    '{"prompt": "größe \u2028 日本"}\n\u3000\n  {"prompt": "\U0001f600"}\n\u00a0{"prompt": 1}\n'.encode(),
    b'"a"\n"b"\n',
    b'\n\n{"prompt": "a"}\n[1]\n{"prompt": "a", "prompt": "b"}\n{"prompt": "c"}\n',
]


@pytest.fixture(autouse=True)
def everything_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "LARGE", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def outcome(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("content", LINES)
@pytest.mark.parametrize("block", [1, 2**24])
def test_lines_are_those_of_a_text_file(
    tmp_path: Path, content: bytes, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "BLOCK_BYTES", block)
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with file.open(encoding="utf-8-sig") as lines:
        numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    parse = rows_module.parse_row
    expected = [outcome(lambda: parse(line, f"{file}, line {at}", file.parent)) for at, line in numbered]  # noqa: B023
    found = Lines(file)
    assert [outcome(lambda: found[at]) for at in range(len(found))] == expected  # noqa: B023
    if not any(isinstance(one, str) for one in expected):
        assert list(found) == expected


@pytest.mark.parametrize(("name", "writer"), WRITERS, ids=[name for name, _ in WRITERS])
def test_a_row_that_is_drawn_is_the_row_that_would_be_read(
    tmp_path: Path, name: str, writer: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer(tmp_path / name)
    lazy = open_source(str(tmp_path / name), "data.path")
    monkeypatch.setattr(rows_module, "LARGE", 100)
    read = open_source(str(tmp_path / name), "data.path")
    assert isinstance(read, list) and len(lazy) == 2
    assert [lazy[at] for at in (0, 1)] == list(lazy) == lazy[:] == read
    assert lazy[-1] == read[1] and lazy[1:] == read[1:]
    with pytest.raises(IndexError):
        lazy[2]


def test_a_folder_is_drawn_from_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "first"}\n\n{"prompt": "second"}\n')
    (tmp_path / "b.csv").write_text("prompt\nthird\n")
    parquet.write_table(arrow.table({"prompt": ["fourth", "fifth"]}), tmp_path / "c.parquet")
    rows = open_source(str(tmp_path), "data.path")
    assert isinstance(rows, Joined)
    assert [rows[at].row["prompt"] for at in (4, 2, 0, 1, 3)] == ["fifth", "third", "first", "second", "fourth"]
    assert [rows[at].place.rpartition("/")[2] for at in (1, 2, 4)] == [
        "a.jsonl, line 3",
        "b.csv, row 1",
        "c.parquet, row 2",
    ]
    assert list(rows) == rows[:]


def test_a_bad_row_is_named_when_it_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [b'{"prompt": "a"}'] * 50
    lines[20], lines[30] = b'{"prompt": ', b'{"prompt": "\xff"}'
    file.write_bytes(b"\n".join(lines))
    rows = open_source(str(file), "data.path")
    assert rows[19].row == {"prompt": "a"}
    for number, words in ((20, "line 21: not JSON"), (30, "line 31: not UTF-8 text")):
        with pytest.raises(ConfigError, match=words):
            rows[number]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.arrow"])
def test_a_file_that_changes_under_a_run_is_not_drawn_from(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    dict(WRITERS)["rows.jsonl" if name.endswith("jsonl") else "file.arrow"](file)
    rows = open_source(str(file), "data.path")
    assert len(rows) == 2 and rows[0]
    os.utime(file, (1, 1))
    with pytest.raises(ConfigError, match=f"{name} was changed while rows were drawn from it: bring it back"):
        rows[0]


def test_a_parquet_file_is_copied_once_for_each_content(tmp_path: Path) -> None:
    file, copies = tmp_path / "rows.parquet", tmp_path / "cache" / "trueline" / "tables"
    parquet.write_table(arrow.table({"prompt": [f"{at}" for at in range(5000)]}), file)
    rows = open_source(str(file), "data.path")
    assert isinstance(rows, TableRows) and rows[4321].row == {"prompt": "4321"}
    (copy,) = copies.iterdir()
    written = copy.stat().st_mtime_ns
    assert open_source(str(file), "data.path")[7].row == {"prompt": "7"}
    assert copy.stat().st_mtime_ns == written
    before = content_digest(rows)
    parquet.write_table(arrow.table({"prompt": ["other"] * 5000}), file)
    changed = open_source(str(file), "data.path")
    assert changed[7].row == {"prompt": "other"} and content_digest(changed) != before
    assert len([*copies.iterdir()]) == 2


def test_a_copy_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    parquet.write_table(arrow.table({"prompt": ["a"]}), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"cannot be written to .*set XDG_CACHE_HOME to a folder with room"):
        open_source(str(tmp_path / "rows.parquet"), "data.path")


def test_long_rows_are_found_without_decoding_them(tmp_path: Path) -> None:
    talks = [[{"role": "user", "content": "x" * size}] for size in (3, 900, 20, 0)]
    rows: list[dict[str, Any]] = [{"messages": talk, "answer": at} for at, talk in enumerate(talks)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = arrow.Table.from_pylist([*rows, {"messages": None, "answer": 4}])
    assert list(sizes_of(TableRows(table, "table"), "messages") - len("user")) == [3, 900, 20, 0, -4]
    assert list(sizes_of(TableRows(table.slice(1, 2), "table"), "messages") - len("user")) == [900, 20]
    assert (
        list(sizes_of(TableRows(table, "table"), "answer"))
        == [0] * 5
        == list(sizes_of(TableRows(table, "table"), "no such column"))
    )
    lines, listed = Lines(tmp_path / "a.jsonl"), [Located(row, "") for row in rows]
    for some in (lines, listed, Joined([lines, listed])):
        assert np.argmax(sizes_of(some, "messages")) == 1
