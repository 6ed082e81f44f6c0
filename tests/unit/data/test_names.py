"""Datasets that a library makes by name: rows of Reasoning Gym. Those of verifiers are tested with its environments."""

import builtins
import random
from typing import Any

import pytest

from trueline.config.base import ConfigError
from trueline.config.data import PromptDataConfig
from trueline.data.named import names, reasoning, verifiers_program, verifiers_rows
from trueline.data.prompts import read_prompts
from trueline.data.rows import Located
from trueline.data.sources import open_source
from trueline.rewards.functions import reasoning_gym

TASK = "reasoning_gym:chain_sum?size=4"


def rows(path: str) -> list[dict[str, Any]]:
    return [located.row for located in open_source(path, "data.path")]


def test_the_reward_scores_the_rows_of_its_library() -> None:
    for row in rows(TASK):
        assert reasoning_gym(f"<answer>{row['answer']}</answer>", **row) == 1.0
        assert reasoning_gym("<answer>none</answer>", **row) < 1.0
    assert len(rows("reasoning_gym:chain_sum")) == reasoning.SIZE


def test_the_seed_makes_the_rows() -> None:
    assert rows(f"{TASK}&seed=7") == rows(f"{TASK}&seed=7") != rows(f"{TASK}&seed=8")
    assert rows(TASK) == rows(f"{TASK}&seed={reasoning.SEED}")


def test_tasks_that_draw_from_the_process_have_their_seed_too() -> None:
    first = rows("reasoning_gym:list_functions?size=3")
    random.seed(12)
    state = random.getstate()
    assert rows("reasoning_gym:list_functions?size=3") == first
    assert random.getstate() == state


def test_rows_of_a_large_dataset_are_made_as_they_are_drawn() -> None:
    made = open_source("reasoning_gym:chain_sum?size=1000000", "data.path")
    alone = open_source("reasoning_gym:chain_sum?size=30", "data.path")
    assert len(made) == 1_000_000 and made[29].row == alone[29].row
    assert made[29].place == "data.path=reasoning_gym:chain_sum?size=1000000, row 30"


def test_rows_are_prompts() -> None:
    prompt = read_prompts(open_source(TASK, "data.path"), PromptDataConfig(path=TASK), TASK)[1]
    row = rows(TASK)[1]
    assert prompt.messages == [{"role": "user", "content": row["question"]}]
    assert (prompt.label, prompt.columns["metadata"]) == (row["answer"], row["metadata"])


def test_options_are_those_of_the_task() -> None:
    (row,) = rows("reasoning_gym:chain_sum?size=1&min_terms=2&max_terms=2&min_digits=1&max_digits=1")
    assert row["metadata"]["num_terms"] == 2


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("chain_sums", r"Reasoning Gym has no task 'chain_sums'; near it are chain_sum, "),
        ("chain_sum?terms=2", r"chain_sum has no option 'terms'; it has min_terms, max_terms"),
        ("chain_sum?size=many", r"size=many: give a whole number"),
        ("chain_sum?size=0", r"size=0: give a whole number"),
        ("chain_sum?min_terms=0", r"chain_sum refuses these options: min_terms must be positive"),
        ("chain_sum?min_terms=x", r"chain_sum refuses these options: "),
        ("arc_agi?size=1", r"the grader of arc_agi takes no rows of JSON"),
    ],
)
def test_what_makes_no_rows_is_refused_with_the_remedy(named: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        open_source(f"reasoning_gym:{named}", "evaluation.data")
    assert str(refused.value).startswith(f"evaluation.data=reasoning_gym:{named}")


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("reasoning_gym"):
            raise ImportError(name)
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"chain_sum needs Reasoning Gym: pip install 'trueline\[reasoning\]'"):
        reasoning.make_tasks("chain_sum", {}, "data.path=reasoning_gym:chain_sum")


def test_values_are_json_or_text() -> None:
    assert [names.as_value(text) for text in ("3", "true", "[1]", "a b", "")] == [3, True, [1], "a b", ""]
    assert not names.is_name("owner/name") and names.is_name("verifiers:name")


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("", r"it names no interpreter: add \?python=/path/to/venv/bin/python"),
        ("?python=/no/python", r"there is no interpreter /no/python"),
        ("?python=python3&split=all", r"split=all: verifiers has the splits train and eval"),
    ],
)
def test_rows_of_verifiers_need_its_interpreter(query: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        open_source(f"verifiers:game{query}", "data.path")


def test_the_program_imports_nothing_of_ours() -> None:
    command = verifiers_rows.program("python", "rows", "game", {"rows": 2})
    assert command == ["python", verifiers_program.__file__, "rows", "game", '{"rows": 2}']
    with open(verifiers_program.__file__) as source:
        assert "trueline" not in [
            line.split()[1].split(".")[0] for line in source if line.startswith(("import ", "from "))
        ]


def test_a_name_of_no_library_is_no_such_file() -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        open_source("gym:chain_sum", "data.path")
    assert isinstance(open_source(TASK, "data.path")[0], Located)
