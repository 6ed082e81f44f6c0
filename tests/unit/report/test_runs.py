"""Files that grow are read on from where they were read to, and whole again where they were cut or replaced."""

from pathlib import Path

import pytest

from trueline.files import Row
from trueline.report.runs import GrowingRows


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 2}\n')
    return path


def add(file: Path, text: str) -> None:
    with file.open("a") as lines:
        lines.write(text)


def growing(file: Path) -> GrowingRows[Row]:
    return GrowingRows(file, lambda row, start, size: row)


def losses(rows: GrowingRows[Row]) -> list[int]:
    return [row["loss"] for row in rows.read()]


def test_only_what_was_added_is_read(file: Path) -> None:
    rows = growing(file)
    assert losses(rows) == [1, 2] and losses(rows) == [1, 2]
    with file.open("r+") as lines:
        lines.write('{"step": 1, "loss": 7}')  # which is not looked at again
    add(file, '{"step": 3, "loss": 3}\n')
    assert losses(rows) == [1, 2, 3]


def test_half_a_line_comes_when_it_is_whole(file: Path) -> None:
    rows = growing(file)
    add(file, '{"step": 3, "lo')
    assert losses(rows) == [1, 2]
    add(file, 'ss": 3}')
    assert losses(rows) == [1, 2, 3] and losses(rows) == [1, 2, 3]  # also without the end of the line
    add(file, '\n{"step": 4, "loss": 4}\n')
    assert losses(rows) == [1, 2, 3, 4]


def test_a_file_that_shrank_or_was_replaced_is_read_whole(file: Path) -> None:
    rows = growing(file)
    losses(rows)
    file.write_text('{"step": 1, "loss": 5}\n')
    assert losses(rows) == [5]
    aside = file.with_suffix(".aside")
    aside.write_text('{"step": 1, "loss": 6}\n{"step": 2, "loss": 6}\n{"step": 3, "loss": 6}\n')
    aside.rename(file)
    assert losses(rows) == [6, 6, 6]
    file.unlink()
    assert losses(rows) == []
