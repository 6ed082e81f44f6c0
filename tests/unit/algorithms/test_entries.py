import importlib
import json
import math
import re
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from trueline.algorithms.advantages import ADVANTAGES, assign_advantages, needs
from trueline.algorithms.entries import NEEDS, Entry, entry, lookup
from trueline.algorithms.importance_sampling import IMPORTANCE_WEIGHTS
from trueline.algorithms.loss_aggregation import AGGREGATIONS
from trueline.algorithms.policy_losses import KL_ESTIMATORS, POLICY_LOSSES, policy_loss
from trueline.config.algorithm import PRESETS, AlgorithmConfig, ImportanceSamplingConfig, KLConfig
from trueline.config.base import Config, ConfigError
from trueline.data.types import Batch, ModelOutput, Sample

TABLE = {"one": 1, "two": 2}


def test_a_name_is_looked_up_in_the_table() -> None:
    assert lookup(TABLE, "two", "some.key") == 2


def test_an_unknown_name_is_refused_with_key_and_names() -> None:
    with pytest.raises(ConfigError) as caught:
        lookup(TABLE, "three", "some.key")
    for part in ("some.key=three", "one", "two", "package.module:function"):
        assert part in str(caught.value)


def test_a_path_is_imported() -> None:
    assert lookup({}, "math:sqrt", "some.key") == Entry(math.sqrt, "your own", key="some.key=math:sqrt")


OWN = {
    "no_such_module_here:f": r"cannot be imported \(No module named .*\): add its folder to PYTHONPATH",
    "math:no_such_function": r"math has no function 'no_such_function'; it has acos,",
    "{}/broken.py:f": r" raised NameError: name 'nothing' is not defined \(broken.py, line 2\)",
    "{}/gone.py:f": r"no file .*/gone.py",
    "{}/gone.pickle": r"no file .*/gone.pickle",
}


@pytest.mark.parametrize("path", OWN)
def test_a_path_that_cannot_be_imported_is_refused_by_key(tmp_path: Path, path: str) -> None:
    (tmp_path / "broken.py").write_text("import math\nnothing\n")
    with pytest.raises(ConfigError, match=f"some.key={path.format(tmp_path)}:?.*{OWN[path]}"):
        lookup(TABLE, path.format(tmp_path), "some.key")


def test_a_file_is_loaded_beside_modules_of_its_name_and_finds_its_neighbours(tmp_path: Path) -> None:
    """It is called as a module that this process works with; so is a neighbour that it does not import."""
    (tmp_path / "json.py").write_text("import neighbour\n\n\ndef f():\n    return neighbour.ANSWER\n")
    (tmp_path / "neighbour.py").write_text("ANSWER = 7\n")
    (tmp_path / "colorsys.py").write_text("WRONG = True\n")
    found: Entry[[], int] = lookup({}, f"{tmp_path}/json.py:f", "some.key")
    assert found() == 7
    assert json.loads("[1]") == [1] and "json" in sys.modules and sys.modules["json"] is json
    assert "WRONG" not in vars(importlib.import_module("colorsys"))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_name_of_a_preset_is_in_its_table(preset: str) -> None:
    config = AlgorithmConfig(preset=preset)
    assert callable(lookup(ADVANTAGES, config.advantage, "algorithm.advantage"))
    assert callable(lookup(POLICY_LOSSES, config.loss, "algorithm.loss"))
    assert config.loss_aggregation in AGGREGATIONS
    assert config.kl.estimator in KL_ESTIMATORS
    assert config.importance_sampling.mode in IMPORTANCE_WEIGHTS


@pytest.mark.parametrize(
    ("section", "key", "table"),
    [
        (KLConfig, "estimator", KL_ESTIMATORS),
        (ImportanceSamplingConfig, "mode", IMPORTANCE_WEIGHTS),
        (AlgorithmConfig, "loss_aggregation", AGGREGATIONS),
    ],
)
def test_the_values_that_a_key_allows_are_the_entries_of_its_table(
    section: type[Config], key: str, table: dict[str, object]
) -> None:
    assert set(get_args(section.model_fields[key].annotation)) == set(table)


TABLES = {"advantage": ADVANTAGES, "loss": POLICY_LOSSES, "loss_aggregation": AGGREGATIONS}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_entry_says_what_it_does(table: dict[str, Entry]) -> None:
    keys = AlgorithmConfig.model_fields
    for name, found in table.items():
        assert found.words not in ("", "your own")
        assert "{" not in found.words.format(AlgorithmConfig())
        assert found.function.__name__ == name
        assert set(found.reads) <= set(keys)


def test_a_need_that_no_run_knows_is_refused_with_those_it_knows() -> None:
    with pytest.raises(ConfigError) as caught:
        entry("nothing", needs=("groups", "critics"))(math.sqrt)
    for part in ("math:sqrt", "'critics'", *NEEDS):
        assert part in str(caught.value)


@pytest.mark.parametrize(("key", "table"), [("advantage", ADVANTAGES), ("loss", POLICY_LOSSES)])
def test_the_meaning_of_a_key_names_every_entry_of_its_table(key: str, table: dict[str, object]) -> None:
    meaning = AlgorithmConfig.model_fields[key].description
    assert meaning is not None
    assert set(table) <= set(re.findall(r"\w+", meaning))


# The user's own functions, as docs/algorithms.md shows them

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, block in enumerate(BLOCKS):
        (tmp_path / f"own_{number}.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    sample = Sample(torch.arange(3), torch.tensor([False, True, True]), reward=2.0)
    assign_advantages([sample], AlgorithmConfig(advantage="own_0:above_median", group_size=4))
    assert sample.advantages.tolist() == [0.0, 0.0, 0.0]
    sample.values = torch.tensor([9.0, 0.5, 1.5])
    valued = AlgorithmConfig(advantage="own_1:one_step")
    assign_advantages([sample], valued)
    assert (sample.advantages.tolist(), sample.returns.tolist()) == ([0.0, 1.5, 0.5], [0.0, 2.0, 2.0])
    assert needs(valued) == ("critic",)
    batch = Batch(sample.tokens, sample.mask, [3], torch.ones(1), torch.zeros(1))
    batch.old_logprobs = batch.rollout_logprobs = torch.full((3,), -1.0)
    batch.advantages = torch.tensor([0.0, 2.0, -1.0])
    output = ModelOutput()
    output.logprobs, output.entropy = torch.full((3,), -1.0), torch.zeros(3)
    loss = policy_loss(output, batch, AlgorithmConfig(preset="dr_grpo", loss="own_2:squared"))
    assert loss.values.tolist() == [0.0, -2.0, 1.0]


def test_the_page_names_every_entry_of_every_table() -> None:
    for table in (ADVANTAGES, POLICY_LOSSES, AGGREGATIONS, KL_ESTIMATORS, IMPORTANCE_WEIGHTS, PRESETS):
        for name in table:
            assert f"`{name}`" in PAGE, name
    for need in NEEDS:
        assert f"\n| `{need}` |" in PAGE, need
