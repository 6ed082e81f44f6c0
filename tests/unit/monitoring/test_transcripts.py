"""Rows of JSON lines that are read one by one, and the numbers of their tokens as arrays."""

import json
from pathlib import Path

import numpy as np

from trueline.monitoring.transcripts import LazyRows, pack_numbers, with_arrays


def test_rows_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"id": number, "text": "é" * number}) + "\n" for number in (2, 0, 1)) + '{"id": 3'
    )
    rows = LazyRows(file)
    assert len(rows) == 3 and [row["id"] for row in rows] == [2, 0, 1]  # a line under way is no row yet
    assert rows[-1] == {"id": 1, "text": "é"} and [row["id"] for row in rows[1:]] == [0, 1]
    ordered = LazyRows(file, key=lambda row: int(row["id"]))
    assert [row["id"] for row in ordered] == [0, 1, 2] and ordered[2]["text"] == "éé"
    file.write_text("")
    assert len(rows) == 3  # none of them is kept: only places are


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert list(LazyRows(tmp_path / "none.jsonl")) == [] and not LazyRows(tmp_path / "none.jsonl")


def test_numbers_of_tokens_become_arrays() -> None:
    values = np.array([-0.5, 0.0, -2.0, -1.0])
    sequence = {"text": ["a", "b", "c", "d"], "sampled": [1, 2, 1], "logprob": pack_numbers(values), "advantage": 0.25}
    (found,) = with_arrays({"step": 1, "tokens": [sequence]})["tokens"]
    assert found["logprob"].dtype == np.float32 and found["logprob"].tolist() == values.tolist()
    assert found["advantage"].tolist() == [0.25] * 4 and found["sampled"].tolist() == [True, False, False, True]
    assert "entropy" not in found and found["text"] == ["a", "b", "c", "d"]
    assert with_arrays({"step": 1}) == {"step": 1}
