"""What the page computes of values alone, run by node: curves, orders, searches, links; and the library beside it."""

import hashlib
import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from trueline.report.page import HERE, SCRIPTS, STYLES

NODE = shutil.which("node")
VENDOR = HERE / "vendor"
needs_node = pytest.mark.skipif(NODE is None, reason="there is no node on this machine")


def results(*expressions: str, before: str = "") -> list[Any]:
    """Return the values of expressions, each computed with the page's own functions."""
    assert NODE is not None
    told = f"process.stdout.write(JSON.stringify([{','.join(expressions)}]));"
    script = "\n".join([(HERE / "values.js").read_text(), before, told])
    done = subprocess.run([NODE, "-"], input=script, capture_output=True, text=True, check=True, timeout=120)
    found: list[Any] = json.loads(done.stdout)
    return found


@needs_node
def test_curves() -> None:
    smooth, sparse, plain, log = results(
        "points([1, 2, 3, 4], [2, 4, 9, 5], 2)",
        "points([1, 2, 3, 4], [2, null, 6, null], 4)",  # half of the steps have a value: means of two of them
        "points([1, null, 3], [2, 4, null], 1)",
        "points([1, 2, 3, 4], [5, -4, -4, 8], 2, true)",
    )
    assert [(one["x"], one["y"], one["raw"], one["place"]) for one in smooth] == [
        (1, 2, 2, 0),
        (2, 3, 4, 1),
        (3, 6.5, 9, 2),
        (4, 7, 5, 3),
    ]
    assert [(one["x"], one["y"]) for one in sparse] == [(1, 2), (3, 4)]
    assert [(one["x"], one["y"]) for one in plain] == [(1, 2)]
    assert [(one["x"], one["y"]) for one in log] == [(1, 5), (2, 0.5), (4, 2)]  # the mean of -4 and -4 has no place


@needs_node
def test_places_and_units() -> None:
    listed = "[{x: 1}, {x: 4}, {x: 9}]"
    near, far, last, marked, *units = results(
        f"nearest({listed}, 3).x",
        f"nearest({listed}, 2).x",
        f"nearest({listed}, 99).x",
        "stretches([0, 1, 2, 4, 5].map((place) => ({place})), [0, 2, 2, null, 1, 1])",
        *(f"unitOf({axis!r}, {most})" for axis, most in (("step", 9e9), ("axis/seconds", 90), ("axis/seconds", 900))),
        "unitOf('axis/seconds', 9000)",
    )
    assert [near, far, last] == [4, 1, 9]
    assert marked == [{"level": 2, "from": 1, "end": 3}, {"level": 1, "from": 3, "end": 5}]
    assert units == [["", 1], [" s", 1], [" min", 60], [" h", 3600]]


@needs_node
def test_metrics_are_found_by_words_and_pinned_ones_come_first() -> None:
    names, charts = '["loss", "reward/mean", "reward/part/a", "policy/kl"]', '{"reward/mean": "Reward", "gone": "Gone"}'
    asked = ["", "reward", "PART reward", "*", "nothing"]
    assert results(*(f'chosenMetrics({names}, {charts}, "{text}", ["policy/kl", "away"])' for text in asked)) == [
        ["policy/kl", "reward/mean"],
        ["policy/kl", "reward/mean", "reward/part/a"],
        ["policy/kl", "reward/part/a"],
        ["policy/kl", "loss", "reward/mean", "reward/part/a"],
        ["policy/kl"],
    ]


@needs_node
def test_the_table() -> None:
    run = "{summary: {reward: [0.5, 9, 0.1, 1, 0.8, 4]}}"
    last, low, high, best, cost, unknown, absent, down, up = results(
        f'summaryOf({run}, "reward", "last")',
        f'summaryOf({run}, "reward", "lowest")',
        f'summaryOf({run}, "reward", "highest")',
        f'summaryOf({run}, "reward", "best", "higher")',
        f'summaryOf({run}, "reward", "best", "lower")',
        f'summaryOf({run}, "reward", "best", "")',
        f'summaryOf({run}, "loss", "last")',
        "sorted([1, undefined, 3, null, 2], (one) => one, true)",
        "sorted([3, undefined, 1, 2], (one) => one, false)",
    )
    assert (last, low, high) == ({"value": 0.5, "step": 9}, {"value": 0.1, "step": 1}, {"value": 0.8, "step": 4})
    assert (best, cost, unknown, absent) == (high, low, None, None)
    assert down == [3, 2, 1, None, None] and up == [1, 2, 3, None]


TRANSCRIPTS = """
const call = {role: "assistant", content: null, tool_calls: [{function: {name: "draw", arguments: '{"card": "red"}'}}]};
const answer = {role: "tool", content: "x"};
const run = {name: "a", lengths: [5, 50, 500], transcripts: [
  {step: 1, purpose: "train", outcome: "finished", reward: 0, prompt: "p", reply: "Say a.b (c) -1"},
  {step: 5, purpose: "train", outcome: "truncated", reward: 0.5, prompt: "p", reply: "", turns: [call, answer]},
  {step: 9, purpose: "evaluate", outcome: "reward_error", reward: null, prompt: "q", images: ["i"],
   conversations: [{turns: [call]}, {}]},
]};
const NONE = Object.fromEntries(
  ["run", "purpose", "outcome", "turns", "low", "high", "shortest", "longest", "from", "to"].map((id) => [id, ""]));
const found = (asked) => [0, 1, 2].filter((place) => matches(run, place, {...NONE, ...asked}));
"""
FILTERS: dict[str, list[int]] = {
    "{}": [0, 1, 2],
    "{run: 'b'}": [],
    "{purpose: 'train'}": [0, 1],
    "{outcome: UNFINISHED}": [1, 2],
    "{outcome: 'truncated'}": [1],
    "{low: '0.5'}": [1],
    "{low: '0', high: '0.2'}": [0],
    "{shortest: '50'}": [1, 2],
    "{shortest: '6', longest: '50'}": [1],
    "{from: '2', to: '9'}": [1, 2],
    "{turns: 'tools'}": [1, 2],
    "{turns: 'plain'}": [0],
    "{turns: 'several'}": [1],
    "{turns: 'conversations'}": [2],
    "{turns: 'pictures'}": [2],
    "{same: {prompt: 'p'}}": [0, 1],
    "{pattern: patternOf('A.B (C) -1')}": [0],
    "{pattern: patternOf('axb')}": [],  # a dot is a dot
    "{pattern: patternOf('\"card\"')}": [1, 2],
    "{pattern: patternOf('tool_calls')}": [],  # names of fields are no texts
}


@needs_node
def test_filters_of_transcripts() -> None:
    found = results(*(f"found({asked})" for asked in FILTERS), before=TRANSCRIPTS)
    assert dict(zip(FILTERS, found, strict=True)) == FILTERS


@needs_node
def test_hits_are_set_apart() -> None:
    assert results('pieces("aXbx", patternOf("x"))', 'pieces("ab", null)', 'pieces("", patternOf("x"))') == [
        [["a", False], ["X", True], ["b", False], ["x", True]],
        [["ab", False]],
        [["", False]],
    ]
    assert results('pieces("\u0130i", patternOf("i"))') == [[["\u0130", False], ["i", True]]]


@needs_node
def test_a_link_brings_back_what_it_was_made_of() -> None:
    odd = json.dumps({"pin": ["a/b&c=d#e", "<script>"], "hide": [], "text": ["\u00e9 +%"], "__proto__x": []})
    keys = '["pin", "hide", "text", "at", "constructor"]'
    back, section, nothing, foreign = results(
        f"listsOf(linkOf({odd}), {keys})",
        f'listsOf("curves", {keys})',
        f'listsOf("", {keys})',
        f'listsOf("other=1", {keys})',
    )
    empty = {"pin": [], "hide": [], "text": [], "at": [], "constructor": []}
    assert back == empty | {"pin": ["a/b&c=d#e", "<script>"], "text": ["\u00e9 +%"]}
    assert section == empty | {"at": ["curves"]} and nothing == foreign == empty


def test_the_library_is_the_one_that_its_page_names() -> None:
    told = dict(
        re.findall(r"^\| `([^`]+)` \| `[^`]+` \| `([0-9a-f]{64})` \|$", (VENDOR / "README.md").read_text(), re.M)
    )
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in VENDOR.iterdir()}
    assert told == {name: digest for name, digest in files.items() if name != "README.md"}
    (version,) = re.findall(r"^uPlot ([\d.]+) ", (VENDOR / "README.md").read_text(), re.M)
    assert f"(v{version})" in (VENDOR / "uPlot.iife.min.js").read_text()[:80]
    assert {name for name in (*SCRIPTS, *STYLES) if "vendor" in name} == {
        f"vendor/{name}" for name in told if "LICENSE" not in name
    }
