"""Datasets in files and folders, runs of `generate`, and datasets that were saved to disk."""

import json
import os
import re
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from datasets import Dataset, DatasetDict
from huggingface_hub import constants

from trueline.config.base import ConfigError
from trueline.config.rl import RLConfig
from trueline.config.sampling import EvalConfig, GenerateConfig
from trueline.config.supervised import KTORunConfig, PreferenceRunConfig, ProcessRewardRunConfig, SftConfig
from trueline.data.sources import hub_name, open_source, try_hub
from trueline.monitoring.run_folder import RunFolder
from trueline.plan.inputs import load_prompts, resolve_run_as_model

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": 'größe, "x"\nline', "answer": "3"}]


def write_jsonl(file: Path) -> None:
    file.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n", encoding="utf-8")


def write_json(file: Path) -> None:
    file.write_text("\n" + json.dumps(ROWS, indent=1, ensure_ascii=False), encoding="utf-8")


def write_table(file: Path, separator: str = ",") -> None:
    rows = [("prompt", "answer"), ("1+1=", "2"), ('"größe, ""x""\nline"', "3")]
    file.write_text("".join(f"{one}{separator}{other}\n" for one, other in rows), encoding="utf-8")


def write_parquet(file: Path) -> None:
    parquet.write_table(arrow.Table.from_pylist(ROWS), file)


def write_arrow(file: Path, form: Callable[..., Any]) -> None:
    table = arrow.Table.from_pylist(ROWS)
    with form(str(file), table.schema) as writer:
        writer.write_table(table)


WRITERS = [
    ("rows.tsv", partial(write_table, separator="\t")),
    ("rows.jsonl", write_jsonl),
    ("rows.json", write_json),
    ("lines.json", write_jsonl),
    ("rows.csv", write_table),
    ("rows.parquet", write_parquet),
    ("file.arrow", partial(write_arrow, form=arrow.ipc.new_file)),
    ("stream.arrow", partial(write_arrow, form=arrow.ipc.new_stream)),  # as Hugging Face's datasets keep their tables
]


def refused(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        open_source(str(path), "data.path")
    return str(caught.value)


@pytest.mark.parametrize(("name", "writer"), WRITERS, ids=[name for name, _ in WRITERS])
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str, writer: Callable[[Path], None]) -> None:
    file = tmp_path / name
    writer(file)
    rows = open_source(str(file), "data.path")
    assert [located.row for located in rows] == ROWS
    for number, located in enumerate(rows, 1):
        assert str(file) in located.place
        assert located.place.endswith(f" {number}")


def test_one_object_in_a_json_file_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(ROWS[0], indent=2))
    assert [one.row for one in open_source(str(tmp_path / "one.json"), "data.path")] == ROWS[:1]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("rows.csv", "prompt;answer\na;b\n", "separated by commas, not semicolons"),
        ("rows.csv", "prompt\tanswer\na\tb\n", "separated by commas, not tabs"),
        ("rows.tsv", "prompt,answer\na,b\n", "separated by tabs, not commas"),
        ("rows.csv", 'prompt,answer\n"a" x,b\n', "line 2: .*check its quotation marks"),
        ("rows.csv", 'prompt,answer\n"a,b\nc,d\n', "line 3: .*check its quotation marks"),
        ("rows.jsonl.gz", "", "unknown ending '.gz': unpack it and use one of .jsonl"),
        ("rows.jsonl", '[{"prompt": "a"}]', "found list: rename a file that is one array to .json"),
    ],
)
def test_tables_of_another_make_are_refused_with_the_way_out(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    assert re.search(words, refused(tmp_path / name))


def test_a_field_of_a_table_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "long.csv").write_text("prompt\n" + "x" * 200_000 + "\n")
    (row,) = open_source(str(tmp_path / "long.csv"), "data.path")
    assert len(row.row["prompt"]) == 200_000


def test_messages_survive_parquet(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "hi"}]}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "chat.parquet")
    assert [located.row for located in open_source(str(tmp_path), "data.path")] == rows


def test_a_folder_is_read_file_by_file_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"prompt": "second"}\n')
    (tmp_path / "a.csv").write_text("prompt\nfirst\n")
    (tmp_path / "notes.txt").write_text("not data")
    rows = open_source(str(tmp_path), "data.path")
    assert [located.row["prompt"] for located in rows] == ["first", "second"]
    assert "b.jsonl" in rows[1].place


def test_a_line_number_counts_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert [located.place for located in open_source(str(file), "k")] == [f"{file}, line 1", f"{file}, line 3"]


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("rows.jsonl", '{"a": 1}\n{"a": \n', "line 2"),
        ("rows.jsonl", '{"a": 1}\n[1]\n', "line 2"),
        ("rows.json", '[{"a": 1},\n{"a": }]', "line 2"),
        ("rows.json", '[{"a": 1}, 3]', "row 2"),
        ("rows.csv", "a,b\n1,2\n3\n", "row 2"),
        ("rows.csv", "a,b\n1,2\n3,4,5\n", "row 2"),
    ],
)
def test_a_broken_row_is_named_by_file_and_place(tmp_path: Path, name: str, text: str, place: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    message = refused(file)
    assert str(file) in message
    assert place in message


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_a_file_of_another_kind_is_named(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(b"these are no columns at all, and certainly not a table")
    assert f"data.path={file}" in refused(file)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_bytes_that_are_no_text_are_named(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(b'{"a": "\xff\xfe"}\n')
    assert (f"{file}, line 1: not UTF-8" if name == "rows.jsonl" else f"data.path={file}") in refused(file)


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", ""), ("a.jsonl", "\n\n"), ("a.json", "[]"), ("a.csv", "x\n")])
def test_an_empty_dataset_is_refused(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    message = refused(file)
    assert str(file) in message
    assert "empty" in message


def test_an_empty_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    parquet.write_table(arrow.table({"prompt": arrow.array([], arrow.string())}), file)
    assert "empty" in refused(file)


def test_a_missing_file_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    for path in (str(tmp_path / "none.jsonl"), "./none", "none.csv"):
        message = refused(path)
        assert f"data.path={path}" in message
        assert "no such file" in message


def test_no_path_no_known_ending_and_no_data_files_are_refused(tmp_path: Path) -> None:
    assert "data.path is empty" in refused("")
    (tmp_path / "rows.txt").write_text("x")
    assert "'.txt'" in refused(tmp_path / "rows.txt")
    assert "no data file" in refused(tmp_path)


def test_files_of_a_folder_that_are_held_out_are_not_mixed_in(tmp_path: Path) -> None:
    for name in ("train", "gsm-test-1"):
        write_jsonl(tmp_path / f"{name}.jsonl")
    message = refused(tmp_path)
    assert f"data.path={tmp_path} contains train.jsonl and gsm-test-1.jsonl, which looks held out" in message
    assert f"data.path={tmp_path / 'train.jsonl'} and evaluation.data=" in message
    (tmp_path / "train.jsonl").rename(tmp_path / "second_eval.jsonl")
    assert len(open_source(str(tmp_path), "evaluation.data")) == 2 * len(ROWS)
    (tmp_path / "second_eval.jsonl").rename(tmp_path / "latest.jsonl")  # `test` in a word is no name of a split
    (tmp_path / "gsm-test-1.jsonl").rename(tmp_path / "contest.jsonl")
    assert len(open_source(str(tmp_path), "data.path")) == 2 * len(ROWS)


def test_a_name_of_the_hub_has_an_owner_that_is_no_folder_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    names = {"owner/name": True, "name": False, "runs/name": False, "./owner": False, "a/b/c": False, "~/name": False}
    assert {name: hub_name(name) for name in names} == names


def test_a_hub_that_cannot_be_reached_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and no one listens
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        for proxy in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.delenv(proxy, raising=False)
        try_hub()
        assert constants.HF_HUB_OFFLINE and os.environ["HF_HUB_OFFLINE"] == "1"
        taken.listen()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        try_hub()
        assert not constants.HF_HUB_OFFLINE
        taken.accept()[0].close()


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", '{"x": "1"}\n'), ("a.json", '[{"x": "1"}]'), ("b.json", '{"x": "1"}\n'), ("a.csv", "x\n1\n")],
)
def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert [located.row for located in open_source(str(tmp_path / name), "data.path")] == [{"x": "1"}]


@pytest.mark.parametrize(("name", "text"), [("a.json", '["a", "b"]'), ("a.jsonl", '"a"\n"b"\n')])
def test_texts_are_rows_of_one_column(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    rows = open_source(str(tmp_path / name), "data.path")
    assert [located.row for located in rows] == [{"text": "a"}, {"text": "b"}] and all(row.bare for row in rows)


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", '{"x": 1, "x": 2}'), ("a.json", '[{"y": {"x": 1, "x": 2}}]'), ("a.csv", "x,x\n1,2\n")],
)
def test_a_column_that_is_there_twice_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert "'x' is repeated" in refused(tmp_path / name)


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
        config, lines = resolve_run_as_model(kind.parse({"data": {"path": named}}))
        assert config.data.path == str(sampled / f"{file}.jsonl")
        assert len(lines) == 1 and f"data.path={named}: " in lines[0] and config.data.path in lines[0]
    tested, _ = resolve_run_as_model(EvalConfig.parse({"evaluation": {"sets": {"a.b": named, "other": "x.jsonl"}}}))
    assert tested.evaluation.sets == {"a.b": str(sampled / "samples.jsonl"), "other": "x.jsonl"}
    (prompt,) = load_prompts(RLConfig().data, str(sampled / "samples.jsonl"), "data.path")
    assert prompt.messages == [{"role": "user", "content": "a"}] and prompt.label is None


def test_a_run_that_does_not_fit_is_refused(sampled: Path) -> None:
    with pytest.raises(ConfigError, match="a run of generate, whose completions prm cannot train on"):
        resolve_run_as_model(ProcessRewardRunConfig.parse({"data": {"path": "gen"}}))
    (sampled / "pairs.jsonl").unlink()
    with pytest.raises(
        ConfigError, match=r"without pairs\.jsonl, because it ran without pairs=true: run `trueline gen"
    ):
        resolve_run_as_model(PreferenceRunConfig.parse({"data": {"path": "gen"}}))
    with pytest.raises(ConfigError, match="gen is a run: name one of its files"):  # of a mixture
        open_source(str(sampled), "data.mixture")


def test_a_saved_dataset_gives_its_train_split(tmp_path: Path) -> None:
    def part(text: str) -> Dataset:
        return Dataset.from_list([{"prompt": text}])

    DatasetDict(train=part("a"), test=part("b")).save_to_disk(tmp_path / "both")
    config, lines = resolve_run_as_model(RLConfig.parse({"data": {"path": f"{tmp_path}/both"}}))
    assert [row.row for row in open_source(config.data.path, "data.path")] == [{"prompt": "a"}]
    assert lines == [f"taken      data.path={tmp_path}/both: its split train, without test"]
    tested, _ = resolve_run_as_model(EvalConfig.parse({"evaluation": {"data": f"{tmp_path}/both"}}))
    assert [row.row for row in open_source(tested.evaluation.data, "evaluation.data")] == [{"prompt": "b"}]
    DatasetDict(one=part("a"), two=part("b")).save_to_disk(tmp_path / "no_train")
    with pytest.raises(ConfigError, match="has the splits one, two and no train: choose one of them"):
        resolve_run_as_model(RLConfig.parse({"data": {"path": f"{tmp_path}/no_train"}}))
    DatasetDict(only=part("c")).save_to_disk(tmp_path / "only")
    single, _ = resolve_run_as_model(RLConfig.parse({"data": {"path": f"{tmp_path}/only"}}))
    assert [row.row for row in open_source(single.data.path, "data.path")] == [{"prompt": "c"}]
