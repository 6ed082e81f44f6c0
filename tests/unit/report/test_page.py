"""The page of runs: all that their folders hold, in a size that does not grow, and no text that breaks out of it."""

import json
import os
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_folders import CROWDED, PLAN, TURNS, made_folder, make_failure, make_run
from trueline.cli import main
from trueline.config.base import ConfigError
from trueline.config.run import MonitoringConfig
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.trackers import Tracker
from trueline.report.digest import MOST_TRANSCRIPTS, as_json, describe, shorten, thin_rows
from trueline.report.page import page, write_report
from trueline.report.runs import MOST_RUNS, ReportedRun, find_run, find_runs, pick_evenly

MOST_BYTES = 5_000_000
HOSTILE = "</script><script>document.documentElement.dataset.broken=1</script><!--\"'\0\ud83d&lt;\u2028"


def written(out: Path, *runs: Path) -> bytes:
    return write_report(find_runs([str(run) for run in runs]), out).read_bytes()


def content_of(text: bytes) -> Any:
    (found,) = re.findall(rb'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def only_run(out: Path, run: Path) -> Any:
    (found,) = content_of(written(out, run))["runs"]
    return found


def test_three_long_runs_fit_in_five_megabytes(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, 1000, seed=seed).path for seed, name in enumerate(("one", "two", "three"))]
    text = written(tmp_path / "page.html", *runs)
    assert len(text) < MOST_BYTES
    for run in content_of(text)["runs"]:
        assert len(run["series"]["step"]) == len(run["series"]["reward/mean"]) == 1001  # no step is left out
        steps = [one["step"] for one in run["transcripts"]]
        assert 200 < len(steps) <= MOST_TRANSCRIPTS and run["transcript_count"] > 4000
        assert steps == sorted(steps) and steps[0] == 0 and steps[-1] == 1000
        assert Counter(one["purpose"] for one in run["transcripts"]) == {"train": 237, "evaluate": 63}
        assert sum(map(sum, run["histograms"].values())) == run["transcript_count"]
        assert len(run["timeline"]["steps"]) > 20 and set(run["memory"]["gib"]) > {"run", "policy-0"}
        assert len(run["tokens"]) > 20 and all(run["transcripts"][int(at)]["step"] % 4 == 0 for at in run["tokens"])


def test_long_texts_and_many_runs_fit_too(tmp_path: Path) -> None:
    runs = [tmp_path / f"run{number}" for number in range(4)]
    for run in runs:
        tracker = Tracker(made_folder(run, "grpo", 60), MonitoringConfig(tensorboard=False))
        for step in range(60):
            tracker.log(step, {f"metric/{number}": step / 7 + number for number in range(200)})
            tracker.show(
                step, [{"prompt": "\u4e2d" * 9000, "reply": "<" * 9000, "turns": [{"content": "y" * 3000}] * 60}]
            )
    text = written(tmp_path / "page.html", *runs)
    assert len(text) < MOST_BYTES
    assert all(run["transcripts"] and run["series"]["metric/0"] for run in content_of(text)["runs"])


def show_pictures(run: Path, contents: list[bytes]) -> list[str]:
    """Write a run with a transcript for each picture, and return their names."""
    tracker = Tracker(made_folder(run, "grpo", 9), MonitoringConfig(tensorboard=False))
    names = [f"pictures/{number:064x}.jpeg" for number in range(len(contents))]
    for step, (name, content) in enumerate(zip(names, contents, strict=True)):
        tracker.show(step, [{"purpose": "train", "group": 0, "reply": "r", "images": [name]}] * 2, {name: content})
    tracker.close()
    return names


def test_pictures_are_on_the_page_once_and_as_many_as_fit(tmp_path: Path) -> None:
    names = show_pictures(tmp_path / "few", [b"one", b"two"])
    shown = only_run(tmp_path / "page.html", tmp_path / "few")["pictures"]
    assert shown == dict(zip(names, ["data:image/jpeg;base64,b25l", "data:image/jpeg;base64,dHdv"], strict=True))
    show_pictures(tmp_path / "many", [os.urandom(28_000) for _ in range(100)])
    text = written(tmp_path / "page.html", tmp_path / "few", tmp_path / "many")
    few, many = (run["pictures"] for run in content_of(text)["runs"])
    assert few == shown and len(many) == 25  # a million characters for each run
    places = [int(name[9:-5], 16) for name in many]
    assert places[0] == 0 and places[-1] == 99 and max(late - early for early, late in pairwise(places)) < 6


def test_a_transcript_names_no_other_file(tmp_path: Path) -> None:
    (name,) = show_pictures(tmp_path / "run", [b"seen"])
    for file in (tmp_path / "a.png", tmp_path / "run" / "b.png", tmp_path / "run" / "pictures" / "c.svg"):
        file.write_bytes(b"not to be seen")
    odd = [f"{tmp_path}/a.png", "../a.png", "pictures/../b.png", "b.png", "pictures/c.svg", "pictures/d.png", {"a": []}]
    tracker = Tracker(RunFolder(tmp_path / "run"), MonitoringConfig(tensorboard=False), resume_step=9)
    tracker.show(10, [{"purpose": "train", "images": odd}, {"purpose": "train", "images": 3}])
    assert list(only_run(tmp_path / "page.html", tmp_path / "run")["pictures"]) == [name]


def test_groups_are_shown_whole(tmp_path: Path) -> None:
    tracker = Tracker(folder := made_folder(tmp_path / "run", "grpo", 99), MonitoringConfig(tensorboard=False))
    for step in range(99):
        for group in (7, 2):
            rows = [{"group": group, "reply": f"{step} {group} {number}"} for number in range(8)]
            tracker.show(step, [{"purpose": "train", "prompt": "?", **row} for row in rows])
        tracker.show(step, [{"purpose": "evaluate", "group": 0, "reply": "r"}])
    shown = only_run(tmp_path / "page.html", folder.path)["transcripts"]
    groups = Counter((one["step"], one["group"]) for one in shown if one["purpose"] == "train")
    assert set(groups.values()) == {8} and len(groups) == 25  # 201 of 300 are left by 99 evaluations
    assert len(shown) == 99 + 25 * 8 <= MOST_TRANSCRIPTS
    steps = sorted(step for step, _ in groups)
    assert steps[0] == 0 and steps[-1] == 98 and max(b - a for a, b in pairwise(steps)) < 6


def test_a_group_larger_than_the_page_is_shown_in_part(tmp_path: Path) -> None:
    tracker = Tracker(folder := made_folder(tmp_path / "run", "grpo", 1), MonitoringConfig(tensorboard=False))
    said = [{"number": 1, "prompt": ["p" * 2500] * 20, "turns": ["t" * 2500] * 20}] * 10
    tracker.show(1, [{"purpose": "train", "group": 0, "reply": "r", "conversations": said} for _ in range(16)])
    text = written(tmp_path / "page.html", folder.path)
    assert len(text) < MOST_BYTES
    shown = content_of(text)["runs"][0]["transcripts"]
    assert 0 < len(shown) < 16 and len(shown[0]["conversations"]) == 10


def test_header_health_ledger_and_failures(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "first", 40, judged=True)
    make_failure(folder)
    run = only_run(tmp_path / "page.html", folder.path)
    assert (run["name"], run["verb"]) == ("first", "grpo")
    assert run["plan"] == PLAN.replace("me:secret@", "")
    assert run["findings"] == [{"step": 0, **CROWDED.row()}]
    assert (
        run["facts"]["steps"] == "40 of 40"
        and run["facts"]["reward"] == f"{ReportedRun('', folder).read().rows[-1]['reward/mean']:.4g}"
    )
    assert run["health"] == {"level": 2, "rules": ["kl_grows"], "counts": [38, 1, 2]}
    assert run["series"]["health/level"][-3:] == [0, 2, 2]
    assert run["ledger"] == {"step": 40, "fates": {"trained": [164, "160 161 162 163"], "too_old": [41, "200"]}}
    (failed,) = run["failures"]
    assert failed["command"] == f"python -m trueline.rewards.replay {folder.path}/failures/reward-0.json"
    assert failed["error"].endswith("KeyError: 'label'")
    assert {"train sums", "train words", "evaluate sums"} <= set(run["histograms"])
    assert any(one.get("turns") == TURNS for one in run["transcripts"])


def test_tokens_stand_beside_their_transcripts_as_far_as_they_can_be_read(tmp_path: Path) -> None:
    folder = made_folder(tmp_path / "run", "grpo", 1)
    tracker = Tracker(folder, MonitoringConfig(tensorboard=False))
    whole = {"text": ["a", HOSTILE], "sampled": [2], "logprob": "AAAA", "advantage": 0.5, "left_out": 3}
    odd: list[Any] = [None, 3, {"text": 4}, {"text": [5], "sampled": "x", "logprob": [1], "entropy": float("nan")}]
    tracker.show(1, [{"reply": "none"}, {"tokens": odd}, {"tokens": [whole]}, {"tokens": "text"}])
    run = only_run(tmp_path / "page.html", folder.path)
    shown = whole | {"text": ["a", HOSTILE.replace("\ud83d", "\ufffd")]}
    assert run["tokens"] == {"1": [{"text": ["5"], "sampled": [], "left_out": 0}], "2": [shown]}
    assert not any("tokens" in one for one in run["transcripts"])


def test_tokens_get_the_room_that_is_left(tmp_path: Path) -> None:
    tracker = Tracker(folder := made_folder(tmp_path / "run", "grpo", 9), MonitoringConfig(tensorboard=False))
    tokens = [{"text": ["word"] * 512, "sampled": [512], "entropy": "A" * 1366}] * 40  # an episode of many turns
    for step in range(60):
        tracker.show(step, [{"reply": "r" * 2000, "tokens": tokens}])
    text = written(tmp_path / "page.html", folder.path)
    assert len(text) < MOST_BYTES
    assert 5 < len(content_of(text)["runs"][0]["tokens"]) < 60 == len(content_of(text)["runs"][0]["transcripts"])


def test_steps_time_and_tokens_add_up(tmp_path: Path) -> None:
    folder = made_folder(tmp_path / "run", "sft", 2)
    rows = [
        {"step": 1, "time/step": 2.0, "speed/tokens": 10},
        {"step": 2, "time/step": 3.0, "speed/tokens_per_second": 5},
    ]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    series = only_run(tmp_path / "page.html", folder.path)["series"]
    assert (series["step"], series["axis/seconds"], series["axis/tokens"]) == ([1, 2], [2, 5], [10, 25])


def test_the_table_knows_every_step_and_which_side_is_better(tmp_path: Path) -> None:
    folder = made_folder(tmp_path / "run", "grpo", 9999)
    rows = [{"step": step, "reward/mean": 0.5, "mine": 1.0} for step in range(1, 10_000)]
    rows[4321] |= {"reward/mean": 9.0, "loss": -1.0}
    rows[6543] |= {"reward/mean": -9.0, "reward/part/a": float("inf")}
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = content_of(written(tmp_path / "page.html", folder.path))
    (run,) = content["runs"]
    assert run["summary"] == {
        "reward/mean": [0.5, 9999, -9, 6544, 9, 4322],
        "mine": [1, 9999, 1, 1, 1, 1],
        "loss": [-1, 4322, -1, 4322, -1, 4322],
    }
    assert (run["rows"], len(run["series"]["step"])) == (9999, 4000)
    assert content["better"] == {"reward/mean": "higher", "mine": "", "loss": "lower"}


def test_transcripts_have_an_address_that_stays_and_a_length(tmp_path: Path) -> None:
    tracker = Tracker(folder := made_folder(tmp_path / "run", "grpo", 9), MonitoringConfig(tensorboard=False))
    tracker.show(
        1, [{"reply": "r" * 5000, "tokens": [{"text": ["r"]}]}, {"reply": "last", "turns": TURNS}, {"turns": [3]}]
    )
    early = only_run(tmp_path / "page.html", folder.path)
    said = sum(len(str(turn["content"])) for turn in TURNS if turn["role"] == "assistant")
    assert early["lengths"] == [5000, said, 0]
    tracker.show(2, [{"reply": str(number)} for number in range(2000)])
    tracker.close()
    late = only_run(tmp_path / "page.html", folder.path)
    lines = folder.transcripts.read_bytes()
    assert len(late["starts"]) == len(late["transcripts"]) and late["starts"][0] == early["starts"][0] == 0
    read = [json.loads(lines[start:].split(b"\n", 1)[0]) for start in late["starts"]]
    assert [one["reply"][:9] for one in read[1:]] == [one["reply"] for one in late["transcripts"][1:]]


def test_configuration_is_flat_and_without_passwords(tmp_path: Path) -> None:
    folder = made_folder(tmp_path / "run", "grpo", 3)
    folder.config.write_text(
        "# trueline grpo\nreward:\n  function: https://me:secret@host/score\n  options: {}\n  lr: [1, null]\n"
    )
    text = written(tmp_path / "page.html", folder.path)
    config = {"reward.function": "https://host/score", "reward.options": "{}", "reward.lr": "[1, null]"}
    assert content_of(text)["runs"][0]["config"] == config and b"secret" not in text


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    folder = made_folder(tmp_path / "run", "grpo", 1)
    tracker = Tracker(folder, MonitoringConfig(tensorboard=False))
    tracker.log(0, {HOSTILE: 1.0, "loss": float("nan"), "reward/mean": float("inf")})
    tracker.show(
        0, [{"purpose": HOSTILE, "prompt": HOSTILE, "reply": HOSTILE, "reward": float("nan"), "turns": [HOSTILE, 3]}]
    )
    text = written(tmp_path / "page.html", folder.path)
    assert text.count(b"</script>") == 2 and b"<!--" not in text and b"\0" not in text
    run = content_of(text)["runs"][0]
    shown = HOSTILE.replace("\ud83d", "\ufffd")
    assert run["transcripts"][0]["reply"] == shown and run["transcripts"][0]["reward"] == "nan"
    assert set(run["series"]) == {"step", shown, "axis/seconds", "axis/tokens"}
    assert b"<title>&lt;/script&gt;" in page(b"{}", title=HOSTILE)


def test_runs_that_lack_files_or_rows(tmp_path: Path) -> None:
    empty, bare, broken = (tmp_path / name for name in ("empty", "bare", "broken"))
    made_folder(empty, "grpo", 5)
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    broken.mkdir()
    (broken / "config.yaml").write_text("a: [")
    (broken / "transcripts.jsonl").write_bytes(b'\xff\n[1]\n{"no": "step"}\n{"step": 1}\n')
    (broken / "ledger.jsonl").touch()
    (broken / "failures").mkdir()
    (broken / "failures" / "reward-0.json").write_text("{")
    first, second, third = content_of(written(tmp_path / "page.html", empty, bare, broken))["runs"]
    assert first["facts"] == {"steps": "none yet of 5"} and first["series"] == {} and first["health"] is None
    assert second["series"]["loss"] == [2.5] and second["verb"] == "" and second["config"] == {}
    assert third["config"]["config.yaml"].startswith("cannot be read") and third["transcripts"] == [{"step": 1}]
    assert third["ledger"] is None and third["failures"][0]["error"] == "the file cannot be read"


def test_offline_run_has_no_rewards(tmp_path: Path) -> None:
    folder = made_folder(tmp_path / "run", "dpo", 2)
    tracker = Tracker(folder, MonitoringConfig(tensorboard=False))
    tracker.log(1, {"loss": 0.7, "preference/accuracy": 0.5, "time/train": 1.0, "time/step": 1.5})
    run = only_run(tmp_path / "page.html", folder.path)
    assert run["facts"] == {"steps": "1 of 2", "time": "1.5 s", "loss": "0.7"}
    assert run["histograms"] == {} and run["transcripts"] == [] and run["failures"] == []


def test_unknown_run_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made_folder(Path("runs/first"), "grpo", 3)
    assert find_run("first").path == Path("runs/first") and find_run("runs/first").path == Path("runs/first")
    with pytest.raises(ConfigError, match=r"^frist: neither it nor runs/frist .* did you mean 'first'\?$"):
        find_run("frist")
    assert main(["report", "frist"]) == 2


def test_runs_of_one_name_are_told_apart_and_none_is_shown_twice(tmp_path: Path) -> None:
    for place in ("a", "b"):
        made_folder(tmp_path / place / "run", "grpo", 3)
    one, other = tmp_path / "a" / "run", tmp_path / "b" / "run"
    assert list(find_runs([str(one), str(other), f"{one}/."])) == [str(one), str(other)]
    assert list(find_runs([str(one)])) == ["run"]


def test_runs_that_are_not_named_are_found_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in ("report", "explain", "watch"):
        assert main([verb]) == 2
        assert re.search(rf"{tmp_path / 'runs'} holds no run.*: name one", capsys.readouterr().err)
    for number in range(MOST_RUNS + 1):
        folder = made_folder(Path(f"runs/run{number}"), "sft", 3)
        for file in (folder.path, *folder.path.iterdir()):
            os.utime(file, (1e9 + number, 1e9 + number))
    last = f"run        runs/run{MOST_RUNS}, the latest\n"
    assert main(["report"]) == 0 and capsys.readouterr().err.startswith(last)
    assert Path(f"report-run{MOST_RUNS}.html").is_file()
    assert main(["explain"]) == 0 and capsys.readouterr().err == last
    assert list(find_runs([])) == [f"run{MOST_RUNS}"]

    made_folder(Path("runs/sampled"), "generate", 3)  # which a page does not show
    assert list(find_runs([])) == [f"run{MOST_RUNS}"]
    assert main(["explain"]) == 0 and "runs/sampled, the latest" in capsys.readouterr().err
    newest = [f"run{number}" for number in range(MOST_RUNS, 0, -1)]
    assert list(find_runs(["runs"])) == newest
    assert main(["report", "runs", "--out", "all.html"]) == 0
    lines = capsys.readouterr().err.splitlines()
    held = f"runs       runs has {MOST_RUNS + 1} that log steps"
    assert lines[0] == f"{held}, of which the {MOST_RUNS} latest are shown"
    assert lines[1] == f"shown      {', '.join(newest)}"
    assert [run["name"] for run in content_of(Path("all.html").read_bytes())["runs"]] == newest


def test_of_a_folder_of_runs_those_that_log_steps_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, verb in (("trained", "grpo"), ("tested", "eval"), ("rounds", "raft")):
        made_folder(Path("runs") / name, verb, 3)
    assert list(find_runs(["runs"])) == ["trained"]
    with pytest.raises(ConfigError, match=r"^runs/tested is a run of eval, which logs no steps: look at .*evaluation"):
        find_runs(["tested"])


def test_report_is_written_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = made_folder(Path("runs/first"), "grpo", 3).last_change()
    for _ in range(2):  # the second takes the place of the first
        assert main(["report", "first"]) == 0
    file = Path("report-first.html")
    assert file.stat().st_mode & 0o777 == 0o600 and list(Path().glob("report-*")) == [file]
    assert find_run("first").last_change() == before  # `--resume` goes on with the run that was touched last
    assert main(["report", "first", "--out", "nowhere/page.html"]) == 2
    assert main(["report", "first", "--out", "runs"]) == 2


def test_page_needs_nothing_from_elsewhere() -> None:
    text = page(as_json(describe([])), title="none").decode()
    addresses = set(re.findall(r"https?://[\w./]+", text))
    assert addresses == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xhtml",  # names, not places
        "https://github.com/leeoniya/uPlot",  # in the comment with which the library begins
    }
    assert "default-src 'none'" in text and "connect-src 'none'" in text and "unsafe" not in text


def test_rows_are_left_out_evenly_but_for_evaluations_and_warnings() -> None:
    rows: list[dict[str, Any]] = [{"step": step} for step in range(1000)]
    rows[333]["evaluation/reward"] = 0.5
    rows[777]["health/level"] = 2
    kept = [row["step"] for row in thin_rows(rows, 100)]
    assert len(kept) == 100 and {0, 333, 777, 999} <= set(kept) and kept == sorted(kept)
    assert pick_evenly(list(range(10)), 1) == [0] and pick_evenly([1, 2], 5) == [1, 2]


def test_long_texts_keep_both_ends() -> None:
    text = shorten("a" * 1400 + "b" * 5000 + "c" * 600)
    assert text == "a" * 1400 + "\n[5000 characters left out]\n" + "c" * 600
    assert shorten([1] * 50)[-1] == "[10 left out]"
