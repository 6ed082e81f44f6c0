"""Folders of a known make as data: runs of `generate`, and datasets that were saved to disk."""

import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from trueline.config.base import ConfigError
from trueline.config.rl import RLConfig
from trueline.config.sampling import EvalConfig, GenerateConfig
from trueline.config.supervised import KTORunConfig, PreferenceRunConfig, ProcessRewardRunConfig, SftConfig
from trueline.data.sources import open_source
from trueline.monitoring.run_folder import RunFolder
from trueline.runs.preflight import chained, load_prompts

FILES = ("samples.jsonl", "kept.jsonl", "pairs.jsonl")


@pytest.fixture
def sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run = RunFolder(tmp_path / "runs" / "gen").open(GenerateConfig(), "generate", resume=False)
    for name in FILES:
        row = {"number": 0, "prompt": [{"role": "user", "content": "a"}], "label": None}
        (run.path / name).write_text(json.dumps(row) + "\n")
    return run.path


@pytest.mark.parametrize("named", ["runs/gen", "gen"])
def test_each_task_reads_the_file_of_a_run_that_fits_it(sampled: Path, named: str) -> None:
    kinds = {SftConfig: "kept", PreferenceRunConfig: "pairs", KTORunConfig: "pairs", RLConfig: "samples"}
    for kind, file in kinds.items():
        config, lines = chained(kind.parse({"data": {"path": named}}))
        assert config.data.path == str(sampled / f"{file}.jsonl")
        assert len(lines) == 1 and f"data.path={named}: " in lines[0] and config.data.path in lines[0]
    tested, _ = chained(EvalConfig.parse({"evaluation": {"sets": {"a.b": named, "other": "x.jsonl"}}}))
    assert tested.evaluation.sets == {"a.b": str(sampled / "samples.jsonl"), "other": "x.jsonl"}
    (prompt,) = load_prompts(RLConfig().data, str(sampled / "samples.jsonl"), "data.path")
    assert prompt.messages == [{"role": "user", "content": "a"}] and prompt.label is None


def test_a_run_that_does_not_fit_is_refused(sampled: Path) -> None:
    with pytest.raises(ConfigError, match="a run of generate, whose answers prm cannot learn from"):
        chained(ProcessRewardRunConfig.parse({"data": {"path": "gen"}}))
    (sampled / "pairs.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"without pairs\.jsonl, for it was made without pairs=true: `trueline gen"):
        chained(PreferenceRunConfig.parse({"data": {"path": "gen"}}))
    with pytest.raises(ConfigError, match="gen is a run: name one of its files"):  # of a mixture
        open_source(str(sampled), "data.mixture")


def test_a_saved_dataset_gives_its_train_split(tmp_path: Path) -> None:
    def part(text: str) -> Dataset:
        return Dataset.from_list([{"prompt": text}])

    DatasetDict(train=part("a"), test=part("b")).save_to_disk(tmp_path / "both")
    config, lines = chained(RLConfig.parse({"data": {"path": f"{tmp_path}/both"}}))
    assert [row.row for row in open_source(config.data.path, "data.path")] == [{"prompt": "a"}]
    assert lines == [f"taken      data.path={tmp_path}/both: its split train, without test"]
    tested, _ = chained(EvalConfig.parse({"evaluation": {"data": f"{tmp_path}/both"}}))
    assert [row.row for row in open_source(tested.evaluation.data, "evaluation.data")] == [{"prompt": "b"}]
    DatasetDict(one=part("a"), two=part("b")).save_to_disk(tmp_path / "no_train")
    with pytest.raises(ConfigError, match="has the splits one, two and no train: name one of them"):
        chained(RLConfig.parse({"data": {"path": f"{tmp_path}/no_train"}}))
    DatasetDict(only=part("c")).save_to_disk(tmp_path / "only")
    single, _ = chained(RLConfig.parse({"data": {"path": f"{tmp_path}/only"}}))
    assert [row.row for row in open_source(single.data.path, "data.path")] == [{"prompt": "c"}]
