"""Mistakes that people make on the command line: each gives one sentence that names the remedy."""

import re
from pathlib import Path

import pytest

from tests.support.disk import files_up_to
from tests.support.mistakes import TABLES, fill_home
from tests.support.mistakes.home import GRPO, Mistake
from trueline.cli import main

Screen = pytest.CaptureFixture[str]
ROWS = [(f"{table}{number}", row) for table, rows in TABLES.items() for number, row in enumerate(rows)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    fill_home(folder)
    return folder


def run_words(words: list[str], screen: Screen) -> tuple[int, str]:
    """Return the exit status and the whole output."""
    try:
        status = main(words)
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    out, err = screen.readouterr()
    return status, out + err


@pytest.mark.parametrize(("name", "mistake"), ROWS, ids=[name for name, _ in ROWS])
def test_every_mistake_gives_one_sentence(
    name: str, mistake: Mistake, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Screen
) -> None:
    monkeypatch.chdir(home)
    words, message, *other = mistake
    named = [f"name={name}"] if words[: len(GRPO)] == GRPO and "--resume" not in words else []
    found, said = run_words([*words[:1], *named, *words[1:]], capsys)
    assert found == (other[0] if other else 2), said
    assert not re.search(r'File ".*/trueline/\w+/', said), said
    assert re.search(message, " ".join(said.split())), said


def test_there_are_mistakes_of_every_kind() -> None:
    assert len({tuple(row[0]) for _, row in ROWS}) == len(ROWS)


def test_a_full_disk_gives_one_sentence(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Screen) -> None:
    monkeypatch.chdir(home)
    with files_up_to(50_000):
        status, said = run_words([*GRPO, "name=full"], capsys)
    assert status == 1
    assert re.search(r"step_000001 could not be saved \(.*\).* Make room on the disk", said), said
    assert "Traceback" not in said
