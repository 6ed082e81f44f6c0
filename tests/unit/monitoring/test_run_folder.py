import os
from pathlib import Path

import pytest

from trueline.config.base import ConfigError
from trueline.config.run import RunConfig
from trueline.monitoring.run_folder import RunFolder, default_name


def config(folder: Path, name: str = "first") -> RunConfig:
    return RunConfig(folder=str(folder), name=name, seed=5)


def test_a_run_folder_keeps_its_configuration(tmp_path: Path) -> None:
    made = RunFolder.create(config(tmp_path / "runs"))
    assert made.path == tmp_path / "runs" / "first"
    assert made.logs.is_dir()
    assert RunConfig.load([made.config], []) == config(tmp_path / "runs")


def refused(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        RunFolder.create(config(folder))
    for part in (str(folder / "first"), "--resume", "--name"):
        assert part in str(caught.value)


def test_an_existing_name_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    made = RunFolder.create(config(tmp_path))
    before = made.config.read_text()
    refused(tmp_path)
    assert made.config.read_text() == before


def test_any_folder_of_that_name_is_in_the_way(tmp_path: Path) -> None:
    """Also one without logs: its metrics and checkpoints would be mixed with the new run's."""
    (tmp_path / "first" / "checkpoints").mkdir(parents=True)
    (tmp_path / "first" / "config.yaml").write_text("seed: 1\n")
    refused(tmp_path)
    assert (tmp_path / "first" / "config.yaml").read_text() == "seed: 1\n"


def test_a_named_run_is_found_or_missed(tmp_path: Path) -> None:
    RunFolder.create(config(tmp_path))
    assert RunFolder.find(str(tmp_path), "first", "grpo").path == tmp_path / "first"
    with pytest.raises(ConfigError, match="second is not a run that can be resumed"):
        RunFolder.find(str(tmp_path), "second", "grpo")


def test_without_a_name_the_newest_run_of_the_verb_is_found(tmp_path: Path) -> None:
    for age, name in enumerate(["grpo-c", "grpo-b", "grpo-a", "sft-z", "dr_grpo-z"]):
        file = RunFolder.create(config(tmp_path, name)).config
        os.utime(file, (1000 - age, 1000 - age))
    assert RunFolder.find(str(tmp_path), None, "grpo").path.name == "grpo-c"
    assert RunFolder.find(str(tmp_path), None, "sft").path.name == "sft-z"
    with pytest.raises(ConfigError, match=r"no rloo run to resume.*--name"):
        RunFolder.find(str(tmp_path), None, "rloo")


def test_a_name_of_the_clock_can_be_a_folder() -> None:
    assert RunConfig(name=default_name("grpo")).name.startswith("grpo-")  # type: ignore[union-attr]
