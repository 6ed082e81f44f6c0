"""The page in a real browser: drawn without a word of complaint, whatever the runs hold and is asked of it."""

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import pytest
import yaml

from tests.support.pictures import make_picture, png
from tests.support.run_folders import TURNS, made_folder, make_failure, make_run
from tests.unit.report.test_page import HOSTILE
from trueline.config.run import MonitoringConfig
from trueline.data.pictures import Picture, picture_file, thumbnail
from trueline.monitoring.trackers import Tracker
from trueline.monitoring.transcripts import pack_numbers
from trueline.report.page import source, write_report
from trueline.report.runs import find_runs

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ASKS = """
function choose(id, value, kind) { byId(id).value = value; byId(id).dispatchEvent(new Event(kind, { bubbles: true })); }
function press(...keys) {
  for (const key of keys) document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
}
function colours(canvas) {  // of its pixels, and how many have each
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height), found = {};
  for (let n = 0; n < data.length; n += 4) {
    const name = data[n + 3] === 255 ? `${data[n]},${data[n + 1]},${data[n + 2]}` : "";
    found[name] = (found[name] || 0) + 1;
  }
  return found;
}
function note(value) { document.documentElement.dataset.noted = JSON.stringify(value); }
"""

LISTS = ("pin", "log", "hide", "zoom", "sort", "open", "pair", "same", "theme", "at", "smooth", "kind")
OPEN = """
for (const box of document.querySelectorAll("#transcripts details")) box.open = true;
for (const box of document.querySelectorAll("#transcripts details")) box.dispatchEvent(new Event("toggle"));
"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")


def drawn(file: Path, asked: str = "", link: str = "") -> str:
    """Return the page as a browser has made it, which must have had nothing to complain of."""
    assert BROWSER is not None
    if asked:
        file.write_bytes(with_script(file.read_bytes(), (f"{ASKS}{{{asked}}}").encode()))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    profile = f"--user-data-dir={file.parent / 'profile'}"
    command = [BROWSER, *options, profile, "--window-size=1400,900", "--dump-dom", file.resolve().as_uri() + link]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120, check=True)
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert "data-broken" not in done.stdout.partition("<head>")[0]
    (milliseconds,) = re.findall(r'<html[^>]* data-drawn="(\d+)"', done.stdout)
    sys.stdout.write(f"drawn after {milliseconds} ms\n")
    return done.stdout


def noted(text: str) -> Any:
    (found,) = re.findall(r'<html[^>]* data-noted="([^"]*)"', text)
    return json.loads(html.unescape(found))


def with_script(text: bytes, script: bytes) -> bytes:
    """Add a script that does what a person would do; the page's policy must be told of it."""
    assert text.count(b"script-src ") == 1
    allowed = text.replace(b"script-src ", f"script-src {source(script)} ".encode())
    return allowed + b"<script>" + script + b"</script>\n"


def section(text: str, name: str) -> str:
    (found,) = re.findall(rf'<section id="{name}".*?</section>', text, re.DOTALL)
    return found


def test_long_runs_side_by_side(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, 1000, seed=seed, judged=seed == 1) for seed, name in enumerate(("a", "b", "c"))]
    make_failure(runs[0])
    page = write_report(find_runs([str(run.path) for run in runs]), tmp_path / "page.html")
    seen = 'note([...document.querySelectorAll("#curves canvas, #memory canvas, #rewards canvas")].map(colours));'
    text = drawn(page, seen)
    curves = section(text, "curves")
    assert curves.count("<figure") == 11 and curves.count("smoothed by 10") == 11
    painted = noted(text)
    assert len(painted) == 11 + 3 + 4
    runs_colours, watch, bad = ("59,130,246", "232,89,12", "47,158,68"), "180,83,9", "200,30,30"
    assert all(found.get(name, 0) > 10 for found in painted for name in runs_colours)
    assert [bad in found for found in painted] == [True] * 11 + [False] * 7
    assert sum(watch in found for found in painted[:11]) >= 10  # an evaluation may have no step of them
    assert section(text, "times").count("<figure") == 3 and section(text, "rewards").count("<figure") == 4
    assert section(text, "transcripts").count("<details") == 40
    timeline = section(text, "timeline")
    assert timeline.count("<figure") == 3 and "steps 996 to 1000" in timeline
    assert len(re.findall(r'<text [^>]*class="busy">\d+%</text>', timeline)) == 3 * 7  # processes of each run
    assert timeline.count('class="idle"') == 3 * 7 and timeline.count('class="tone') > 3 * 5 * 12
    assert section(text, "memory").count("<figure") == 3
    assert "trueline.rewards.replay" in section(text, "failures") and "too_old" in section(text, "ledger")
    assert "The runs do not differ" not in section(text, "configuration")


def test_hostile_text(tmp_path: Path) -> None:
    tracker = Tracker(folder := made_folder(tmp_path / "run", "grpo", 1), MonitoringConfig(tensorboard=False))
    tracker.log(0, {HOSTILE: 1.0, "reward/mean": 0.5, "constructor": 2.0, "__proto__": 3.0, "__proto__/toString": 4.0})
    other = Tracker(made_folder(tmp_path / "<b>other", "grpo", 1), MonitoringConfig(tensorboard=False))
    other.log(0, {"reward/mean": 0.25})
    folder.config.write_text(yaml.safe_dump({HOSTILE.replace("\ud83d", ""): HOSTILE.replace("\ud83d", "")}))
    odd = {
        "turns": [HOSTILE, None, {"role": HOSTILE, "tool_calls": [None, {"function": None}]}],
        "label": {"a": [HOSTILE]},
    }
    tracker.show(0, [{"purpose": HOSTILE, "outcome": HOSTILE, "prompt": HOSTILE, "reply": None, **odd}])
    page = write_report(find_runs([str(folder.path), str(tmp_path / "<b>other")]), tmp_path / "page.html")
    everything = 'choose("metric", "*", "input"); press("j", "c", "s"); ' + OPEN
    link = "#" + "&".join(f"{key}={quote(HOSTILE.encode(errors='replace'))}" for key in LISTS)
    text = drawn(page, everything + "note(location.hash);", link)
    assert section(text, "curves").count("<figure") == 5 and section(text, "numbers").count("<td") == 2 * 5
    assert all("&lt;/script&gt;" in section(text, name) for name in ("transcripts", "curves", "configuration"))
    assert "<script>" in unquote(noted(text))  # the link keeps it, as text


def test_runs_with_little_in_them(tmp_path: Path) -> None:
    made_folder(tmp_path / "empty", "grpo", 5)
    tracker = Tracker(offline := made_folder(tmp_path / "offline", "sft", 5), MonitoringConfig(tensorboard=False))
    alone = drawn(write_report(find_runs([str(tmp_path / "empty")]), tmp_path / "page.html"))
    assert "No step has been logged yet" in alone
    tracker.log(1, {"loss": 2.0, "time/train": 0.5, "time/step": 0.6})
    text = drawn(write_report(find_runs([str(tmp_path / "empty"), str(offline.path)]), tmp_path / "page.html"))
    assert section(text, "curves").count("<figure") == 1 and section(text, "times").count("<figure") == 1
    assert all(f'<section id="{name}" hidden' in text for name in ("rewards", "transcripts", "failures", "ledger"))


def test_another_window_of_the_timeline(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 100)
    rows = [json.loads(line) for line in run.events.read_text().splitlines()]
    page = write_report(find_runs([str(run.path)]), tmp_path / "page.html")
    longest = max(rows, key=lambda row: row["seconds"])["step"]
    plain = page.read_bytes()
    for window, count, said in (
        ("first", 20, "steps 0 to 19"),
        ("middle", 5, "steps 47 to 51"),
        ("worst", 5, f"step {longest},"),
        ("last", 1, "step 100,"),
    ):
        page.write_bytes(plain)
        text = drawn(page, f'choose("count", "{count}", "change"); choose("window", "{window}", "change");')
        assert said in section(text, "timeline")


def test_what_a_span_tells(tmp_path: Path) -> None:
    run = made_folder(tmp_path / "run", "grpo", 1)
    spans = [["run", "rollout", 0.0, 3.0], ["engine-0", "generate", 0.5, 2.0], ["engine-0", "receive", 1.5, 2.5]]
    run.events.write_text(json.dumps({"step": 1, "start": 5.0, "seconds": 4.0, "spans": spans}) + "\n")
    over = 'document.querySelectorAll("#timeline rect:not(.idle)")[1].dispatchEvent(new Event("pointerenter"));'
    timeline = section(drawn(write_report(find_runs([str(run.path)]), tmp_path / "page.html"), over), "timeline")
    assert re.findall(r'class="busy">(\d+%)<', timeline) == ["75%", "50%"]  # what overlaps counts once
    assert "<div>engine-0: generate</div><div>1.5 s in step 1</div>" in timeline


TOKENS = {
    "text": ["Yes", ",", " 42", "\n", "tool", " no", ""],
    "sampled": [4, 1, 2],
    "advantage": pack_numbers(np.array([2.0, 1.0, 0.0, -2.0, 0.0, -1.0, -0.1])),
    "entropy": pack_numbers(np.array([0.0, 0.5, 1.0, 0.25, 0.0, 0.15, 0.0])),
    "logprob": -0.25,
    "left_out": 9,
}


@pytest.fixture
def told(tmp_path: Path) -> Path:
    tracker = Tracker(folder := made_folder(tmp_path / "run", "grpo", 2), MonitoringConfig(tensorboard=False))
    rows = [{"purpose": "train", "prompt": "What?", "reply": "Yes, 42", "tokens": [TOKENS]}]
    tracker.show(1, [*rows, {"purpose": "evaluate", "prompt": "And?", "reply": "nothing", "reward": 1.0}])
    return write_report(find_runs([str(folder.path)]), tmp_path / "page.html")


def test_tokens_are_plain_text_until_a_colour_is_chosen(told: Path) -> None:
    text = section(drawn(told, OPEN), "transcripts")
    assert "Yes, 42</pre>" in text and 'class="token' not in text


def test_tokens_are_coloured_by_what_is_chosen(told: Path) -> None:
    text = section(drawn(told, OPEN + 'choose("colouring", "advantage", "input");'), "transcripts")
    shades = re.findall(r'class="token shade(\d+)" title="([^"]*)">([^<]*)<', text)
    assert [int(shade) for shade, *_ in shades] == [10, 8, 5, 0, 3, 5]
    assert shades[0][1:] == ("log-prob -0.25\nadvantage 2\nentropy 0", "Yes")
    assert re.findall(r'class="inserted"[^>]*>([^<]*)<', text) == ["tool", " [9 tokens left out]"]
    assert "Numbers of its tokens are not here." in text and "nothing</pre>" in text  # of the evaluation
    assert "style=" not in text


def test_another_colour_and_one_that_was_not_recorded(told: Path) -> None:
    plain = told.read_bytes()
    text = section(drawn(told, OPEN + 'choose("colouring", "entropy", "input");'), "transcripts")
    assert [int(shade) for shade in re.findall(r'class="token shade(\d+)"', text)] == [5, 8, 10, 6, 6, 5]
    told.write_bytes(plain)
    text = section(drawn(told, OPEN + 'choose("colouring", "log_ratio", "input");'), "transcripts")
    assert "Its mismatch (log-ratio) was not recorded." in text and 'class="token' not in text


def test_what_is_typed_finds_transcripts(told: Path) -> None:
    text = section(drawn(told, 'choose("text", "NOTHING", "input");'), "transcripts")
    assert text.count("<details") == 1 and "And?" in text and "1 of the 2 here" in text


@pytest.fixture
def grouped(tmp_path: Path) -> Path:
    """Return the page of a run with two groups of three in step 2, and an episode of two conversations in step 1."""
    tracker = Tracker(folder := made_folder(tmp_path / "run", "grpo", 2), MonitoringConfig(tensorboard=False))
    said = [
        {"number": 1, "prompt": [{"role": "system", "content": "be the planner"}], "turns": [reply("a plan")]},
        {"number": 2, "prompt": [{"role": "system", "content": "be the critic"}], "turns": [reply("a doubt")]},
    ]
    several = {"group": 5, "reply": "a doubt", "conversations": said, "turns": [reply("a doubt"), heard("thanks")]}
    tracker.show(1, [{"purpose": "train", "prompt": "How?", **several}])
    for group in (0, 1):
        rows = [{"reply": f"answer {group}{number}", "reward": number / 4} for number in range(3)]
        tracker.show(2, [{"purpose": "train", "group": group, "prompt": f"question {group}", **row} for row in rows])
    return write_report(find_runs([str(folder.path)]), tmp_path / "page.html")


def reply(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def heard(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_replies_and_rewards_are_seen_by_group_without_opening_any(grouped: Path) -> None:
    text = section(drawn(grouped), "transcripts")
    groups = text.split('class="group"')[1:]
    assert len(groups) == 3 and [one.count("<details") for one in groups] == [3, 3, 1]
    assert [one.count("question") for one in groups] == [1, 1, 0]  # once for all its completions
    lines = re.findall(r'class="reward">([^<]*)<.*?class="start">([^<]*)<', groups[1])
    assert lines == [("0", "answer 10"), ("0.25", "answer 11"), ("0.5", "answer 12")]


def test_every_conversation_of_an_episode_is_shown(grouped: Path) -> None:
    text = section(drawn(grouped, OPEN), "transcripts")
    boxes = text.split('class="conversation"')[1:]
    assert ["conversation 1 of 2" in boxes[0], "conversation 2 of 2" in boxes[1], len(boxes)] == [True, True, 2]
    assert "be the planner" in boxes[0] and "a plan" in boxes[0] and "a doubt" not in boxes[0]
    assert "be the critic" in boxes[1] and "a doubt" in boxes[1]
    assert text.count("thanks</pre>") == 1  # what the last reply was answered


def test_pictures_are_drawn_and_absent_ones_are_counted(tmp_path: Path) -> None:
    tracker = Tracker(folder := made_folder(tmp_path / "run", "grpo", 2), MonitoringConfig(tensorboard=False))
    small = [thumbnail(Picture(png(make_picture(seed)), 40, 24)) for seed in (1, 2)]
    names = [*map(picture_file, small), "pictures/0.png"]
    files = {name: one.data for name, one in zip(names, small, strict=False)}
    tracker.show(1, [{"group": 0, "prompt": "Which?", "reply": "this", "images": names}] * 2, files)
    page = write_report(find_runs([str(folder.path)]), tmp_path / "page.html")
    size = "for (const one of document.images) one.title = `${one.complete} ${one.naturalWidth} ${one.naturalHeight}`;"
    text = section(drawn(page, OPEN + size), "transcripts")
    (group,) = text.split('class="group"')[1:]
    before, first, second = group.split("<details")
    for part in (before, first, second):  # once for the group, and in the prompt of each
        assert re.findall(r'alt="([^"]*)" title="([^"]*)"', part) == [
            ("picture 1 of the prompt", "true 40 24"),
            ("picture 2 of the prompt", "true 40 24"),
        ]
        assert "[picture 3 is not on this page]" in part
    assert "the latest first; 1 of 3 pictures left out<" in text and "images" not in first


def test_conversations_are_searched_too(grouped: Path) -> None:
    text = section(drawn(grouped, 'choose("text", "PLANNER", "input");'), "transcripts")
    assert text.count("<details") == 1 and "1 of the 7 here" in text


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    """Return the page of two runs that have a prompt in common."""
    for name, rewards in (("low", [0.1, 0.2]), ("high", [0.8, 0.4])):
        folder = made_folder(tmp_path / name, "grpo", 2, rate=rewards[0])
        tracker = Tracker(folder, MonitoringConfig(tensorboard=False))
        for step, reward in enumerate(rewards, 1):
            tracker.log(step, {"reward/mean": reward, "loss": -reward, "time/step": 60.0})
            rows = [{"reply": f"{name} {step} {number}", "reward": reward} for number in range(2)]
            tracker.show(step, [{"purpose": "train", "group": 0, "prompt": f"question {step}", **row} for row in rows])
        tracker.show(3, [{"prompt": "tools?", "reply": "42", "turns": TURNS}])
    return write_report(find_runs([str(tmp_path / name) for name in ("low", "high")]), tmp_path / "page.html")


RUN = 'document.querySelector(`#key [data-run="${name}"]`)'


def test_a_click_hides_a_run_and_a_double_click_shows_it_alone(compared: Path) -> None:
    asked = f"""
    const said = [], look = () => said.push([document.querySelector("#curves .uplot")?.ariaLabel, location.hash]);
    const at = (name) => {RUN};
    look(); at("low").click(); look(); at("high").click(); look(); at("low").click(); at("high").click();
    at("high").dispatchEvent(new Event("dblclick")); look(); at("high").dispatchEvent(new Event("dblclick")); look();
    note(said);
    """
    low, high = "low 0.2 at the end", "high 0.4 at the end"
    assert noted(drawn(compared, asked)) == [
        [f"reward/mean: {low}, {high}", ""],
        [f"reward/mean: {high}", "#hide=low"],
        [None, "#hide=low&hide=high"],
        [f"reward/mean: {high}", "#hide=low"],
        [f"reward/mean: {low}, {high}", ""],
    ]


def test_the_table_sorts_and_names_the_best(compared: Path) -> None:
    asked = 'choose("kind", "best", "input"); document.querySelector("#numbers th button").click();'
    rows = section(drawn(compared, asked), "numbers").split("<tr>")[2:]
    cells = [re.findall(r"<td([^>]*)>([^<]*)<small>([^<]*)<", row) for row in rows]
    assert [re.findall(r"</svg>(\w+)<", row) for row in rows] == [["high"], ["low"]]
    assert [[(text, step, "first" in more) for more, text, step in row] for row in cells] == [
        [("0.8", " step 1", True), ("-0.8", " step 1", True)],
        [("0.2", " step 2", False), ("-0.2", " step 2", False)],
    ]
    assert "last -0.4 at step 2" in rows[0]


def test_a_link_brings_a_view_back(compared: Path) -> None:
    view = "align=axis%2Fseconds&metric=loss&pin=reward%2Fmean&log=reward%2Fmean&zoom=60&zoom=90"
    link = f"#{view}&theme=dark&text=high&at=numbers"
    text = drawn(compared, "note([location.hash, getComputedStyle(document.body).backgroundColor]);", link)
    kept, page = noted(text)
    assert sorted(kept[1:].split("&")) == sorted(link[1:].split("&")) and page == "rgb(15, 18, 22)"
    curves = section(text, "curves")
    assert re.findall(r'<figure aria-label="([^"]*)"', curves) == ["Reward", "Loss"]
    assert "log axis without values up to 0" in curves and "whole range" in curves
    assert section(text, "transcripts").count("<mark>high</mark>") == 4


def test_two_completions_of_one_prompt_stand_side_by_side(compared: Path) -> None:
    asked = """
    const said = [], look = () => said.push(document.querySelector("#transcripts h2 small").textContent.split(" ")[0]);
    look(); byId("text").value = "question 2"; choose("text", "question 2", "input"); look();
    press("j", "c", "j", "j", "c"); press("s"); look(); byId("anyPrompt").click(); choose("text", "", "input"); look();
    note([said, [...document.querySelectorAll("#pair article pre")].map((one) => one.textContent), location.hash]);
    """
    plain = compared.read_bytes()
    counts, texts, link = noted(drawn(compared, asked))
    assert counts == ["10", "4", "4", "10"]
    assert texts == ["question 2", "low 2 0", "question 2", "high 2 0"]
    compared.write_bytes(plain)
    again = section(drawn(compared, "", link), "transcripts")
    assert again.count("<article") == 2 and "low 2 0</pre>" in again and "high 2 0</pre>" in again


def test_tool_calls_are_folded_until_asked_for(compared: Path) -> None:
    plain = compared.read_bytes()
    text = section(drawn(compared, 'press("j", "c");'), "transcripts")
    folded = re.findall(r'<details class="turn (\w+)"( open="")?>', text)
    assert folded == [("call", ""), ("tool", "")] and "12+30" in text
    for asked, opened in (
        ('press("j", "c", "t");', ["call", "tool"]),
        ('choose("text", "12+30", "input"); press("j", "c");', ["call"]),
    ):
        compared.write_bytes(plain)
        text = section(drawn(compared, asked), "transcripts")
        assert re.findall(r'<details class="turn (\w+)" open="">', text) == opened
