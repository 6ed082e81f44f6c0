"""What is measured of a large dataset: a sample before the start, the rest in the background, all of it only once."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.tiny import make_tiny_model
from trueline.config.base import ConfigError
from trueline.config.data import PromptDataConfig
from trueline.config.model import ModelConfig
from trueline.data import prompts as prompts_module
from trueline.data import rows as rows_module
from trueline.data.chat import ChatFormat
from trueline.data.prompts import UNREADABLE, LazyPrompts, PromptTooLong, offer_tools
from trueline.models.loading import load_chat
from trueline.plan import survey as survey_module
from trueline.plan.inputs import PromptSet, fitting_prompts, load_prompts, measure
from trueline.plan.survey import known_lengths, measure_block, survey

ROWS = [{"prompt": "x" * (5 + number % 7), "answer": str(number)} for number in range(2500)]
LONG, UNREAD = 1700, 2400
LIMIT = 20
TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}


@pytest.fixture(autouse=True)
def small_thresholds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(rows_module, "LARGE", 1000)
    monkeypatch.setattr(prompts_module, "SAMPLED", 20)
    monkeypatch.setattr(prompts_module, "LONGEST", 5)
    monkeypatch.setattr(prompts_module, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(survey_module, "LAST_IN_LINE", 0)  # the machine may be busy with other tests


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return ModelConfig(path=str(make_tiny_model(tmp_path / "model", tied=True)))


def write_rows(folder: Path, *, long: str = "x" * 8, unread: str | None = None) -> PromptDataConfig:
    """One row that may be too long and one that cannot be read; rows of other columns hide them from the sample."""
    rows = [row | {"other": "y" * 400 * (number < 10)} for number, row in enumerate(ROWS)]
    rows[LONG] = rows[LONG] | {"prompt": long}
    lines = [json.dumps(row) for row in rows]
    lines[UNREAD] = lines[UNREAD] if unread is None else unread
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return PromptDataConfig(path=str(folder / "rows.jsonl"), chat_template="never")


def plan(data: PromptDataConfig, chat: ChatFormat, too_long: str = "error") -> PromptSet:
    return fitting_prompts(measure(load_prompts(data, data.path, "data.path"), chat), LIMIT, too_long)


def test_a_sample_has_the_longest_rows_and_is_all_that_is_measured_before_the_start(
    tmp_path: Path, model: ModelConfig
) -> None:
    data, chat = write_rows(tmp_path), load_chat(model, "never")
    prompts = load_prompts(data, data.path, "data.path")
    assert isinstance(prompts, LazyPrompts) and len(prompts) == len(ROWS)
    numbers = [prompt.id for prompt in prompts.sample]
    assert {0, len(ROWS) - 1} <= set(numbers) and len({*range(10)} & set(numbers)) >= 5 and len(numbers) <= 22
    offered = offer_tools(prompts, [TOOL])
    assert offered[7].tools == [TOOL] and prompts[7].tools == [] and offered[7].label == "7"
    assert plan(data, chat).sampled == len(numbers)
    longer = write_rows(tmp_path, long="x" * 500)
    with pytest.raises(
        ConfigError, match=f"row {LONG + 1} of .* has 500 tokens; 1 to rollout.max_prompt_tokens={LIMIT}"
    ):
        plan(longer, chat)
    found = plan(longer, chat, "drop")
    assert found.dropped == 1 and found.longest == 11
    with pytest.raises(PromptTooLong):
        found.prompts[LONG]
    assert found.prompts[LONG + 1].columns["answer"] == str(LONG + 1)


def test_all_is_measured_in_the_background_and_known_to_the_next_run(tmp_path: Path, model: ModelConfig) -> None:
    data, chat = write_rows(tmp_path, long="x" * 50), load_chat(model, "never")
    first = plan(data, chat).prompts
    assert isinstance(first, LazyPrompts) and first[0]
    with survey(first, data, model, tmp_path / "survey.log") as processes:
        assert [process.wait() for process in processes] == [0], (tmp_path / "survey.log").read_text()
        with pytest.raises(ConfigError, match=f"row {LONG + 1} of .* has 50 tokens"):
            first[0]  # any row: the run ends as soon as it is known
    expected = [50 if number == LONG else len(row["prompt"]) for number, row in enumerate(ROWS)]
    assert list(known_lengths(first, chat)) == expected
    with pytest.raises(ConfigError, match=f"row {LONG + 1} of .* has 50 tokens"):
        plan(data, chat)
    known = plan(data, chat, "drop")
    assert (known.sampled, known.dropped, known.longest, len(known.prompts)) == (None, 1, 11, len(ROWS))
    with survey(known.prompts, data, model, tmp_path / "survey.log") as processes:  # type: ignore[arg-type]
        assert processes == []
    other = load_prompts(data.with_keys({"system_prompt": "s"}), data.path, "data.path")
    assert isinstance(other, LazyPrompts) and known_lengths(other, chat) is None
    assert plan(write_rows(tmp_path), chat).sampled  # another content, so nothing is known


def test_a_row_that_cannot_be_read_is_found_by_a_survey(tmp_path: Path, model: ModelConfig) -> None:
    data, chat = write_rows(tmp_path, unread='{"prompt": 3}'), load_chat(model, "never")
    prompts = plan(data, chat).prompts
    assert isinstance(prompts, LazyPrompts) and prompts[0] and prompts.limit is not None
    lengths = measure_block(prompts, range(2000, len(ROWS)), chat)
    assert lengths[UNREAD - 2000] == UNREADABLE and lengths.count(UNREADABLE) == 1 and lengths[0] == 5 + 2000 % 7
    prompts.limit.lengths = np.array([1] * 2000 + lengths)
    with pytest.raises(ConfigError, match=f"line {UNREAD + 1}: column 'prompt' must be non-empty text"):
        prompts[0]


def test_a_survey_ends_with_its_run(tmp_path: Path, model: ModelConfig) -> None:
    data = write_rows(tmp_path)
    prompts = plan(data, load_chat(model, "never")).prompts
    assert isinstance(prompts, LazyPrompts)
    with survey(prompts, data, model, tmp_path / "survey.log") as processes:
        (process,) = processes
    assert process.returncode is not None
