"""Cells of docs/models.md are compared with what tests find, and written by `make models`."""

from pathlib import Path

import pytest

from tests.support import model_table
from tests.support.model_table import FOLDER, check_cell, merge


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's own page, with other families' cells as they are."""
    copy = tmp_path / "models.md"
    copy.write_text(model_table.PAGE.read_text())
    monkeypatch.setattr(model_table, "PAGE", copy)
    monkeypatch.delenv(FOLDER, raising=False)
    return copy


def test_a_cell_is_written_and_then_holds(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, found = page.read_text(), "refused: a | b\n  c"
    with pytest.raises(AssertionError, match=r"docs/models.md is stale: run `make models` \(LFM2, loads: "):
        check_cell("LFM2", "loads", found)
    monkeypatch.setenv(FOLDER, str(tmp_path / "cells"))
    check_cell("LFM2", "loads", found)
    check_cell("Gemma 2", "thinking", "none")
    check_cell("Qwen2-VL", "vLLM", "none")
    monkeypatch.delenv(FOLDER)
    assert page.read_text() == before
    merge(tmp_path / "cells")
    check_cell("LFM2", "loads", found)
    check_cell("Gemma 2", "thinking", "none")
    check_cell("Qwen2-VL", "vLLM", "none")
    changed = [(one, other) for one, other in zip(before.split("\n"), page.read_text().split("\n"), strict=True)]
    assert [one.split(" | ")[0] for one, other in changed if one != other] == ["| LFM2", "| Qwen2-VL", "| Gemma 2"]


def test_rows_and_columns_are_known(page: Path) -> None:
    with pytest.raises(AssertionError, match="Llama 9: no row"):
        check_cell("Llama 9", "loads", "exact")
    with pytest.raises(AssertionError, match="speed: no column"):
        check_cell("LFM2", "speed", "exact")
    for family, column in (("LFM2", "packed"), ("Qwen2-VL", "loads")):
        with pytest.raises(AssertionError, match=f"{column}: no column"):
            check_cell(family, column, "exact")
