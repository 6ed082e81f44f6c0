"""Environments, tools and agents show pictures in later turns: engine and trainer see the same, in the same order."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.learning.test_picture_rl import metrics
from tests.support.pictures import make_picture, make_tiny_gemma, make_tiny_idefics, make_tiny_qwen
from tests.support.tiny import make_tiny_model
from trueline.cli import main
from trueline.data.messages import Tool
from trueline.data.pictures import Picture
from trueline.environments.tools.calls import Parsed, ToolCall
from trueline.environments.tools.formats import Parser
from trueline.training.worker import Worker

CODE = """
import base64, io
import openai
from PIL import Image


def square(number):
    return Image.new("RGB", (24 + 8 * number, 24), (40 * number, 90, 200))


def seen(turns):
    contents = [one["content"] for one in turns if isinstance(one["content"], list)]
    return [part["image"] for content in contents for part in content if "image" in part]


def pixels(url):
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


class Screen:
    def reset(self, label, images=()):
        assert all(pixels(image).size[1] == 24 for image in images)
        self.turn, self.number = 0, int(label)

    def step(self, reply):
        self.turn += 1
        if self.turn == 3:
            return len(reply) / 100 + square(self.number).getpixel((0, 0))[0] / 10_000
        shown = square(self.number + self.turn)
        if self.turn == 2:
            return shown
        return {"messages": [{"role": "user", "content": ["now", {"type": "image", "image": shown}]}], "reward": 0.0}


class Broken(Screen):
    def step(self, reply):
        return {"messages": [{"role": "user", "content": [{"type": "image", "image": b"no picture"}]}]}


def look(number: int = 1):
    \"\"\"Look at a square.

    Args:
        number: which
    \"\"\"
    return ["here", square(number)]


def spoil():
    \"\"\"Show what is no picture.\"\"\"
    return [{"type": "image", "image": "nowhere.png"}]


def colour(reply, turns):
    (url,) = seen(turns)[:1]
    return len(reply) / 100 + pixels(url).getpixel((0, 0))[0] / 10_000


def ask(client, images, label):
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": images[0]}}]}]
    for number in range(2):
        said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
        part = {"type": "image_url", "image_url": {"url": url_of(square(int(label) + number)), "detail": "low"}}
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [part]}]
    said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    return len(said) / 100


def url_of(image):
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def swap(client, label):
    for number in (3, 5):  # the texts are the same, the first picture is not
        shown = [{"type": "image_url", "image_url": {"url": url_of(square(number))}}]
        messages = [{"role": "user", "content": shown}] + (messages[1:] if number == 5 else [])
        said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and"}]
    return len(said) / 100


def refused(client, images, messages):
    bad = {
        "http://example.org/cat.png": "'http://example.org/cat.png' is no data URL, and nothing is fetched",
        "/etc/hostname": "'/etc/hostname' is no data URL",
        "data:image/png;base64,%%%": "its data URL is damaged",
        "data:image/png;base64,AAAA": "is no image that Pillow knows",
    }
    contents = [[{"type": "image_url", "image_url": {"url": url}}] for url in bad]
    contents.append([{"type": "image"}, {"type": "image"}])
    for content, said in zip(contents, [*bad.values(), "1 image parts have no picture: give them one"]):
        try:
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": content}])
        except openai.BadRequestError as error:
            assert said in error.message and error.param == "messages" and error.status_code == 400, error
        else:
            raise AssertionError(content)
    return len(client.chat.completions.create(model="policy", messages=messages).choices[0].message.content) / 100


async def one_by_one(policy, messages):
    first = {"role": "user", "content": messages[0]["content"][:1]}
    said = {"role": "assistant", "content": await policy([first])}
    return len(await policy([first, said, {"role": "user", "content": ["and", {"type": "image"}]}])) / 100


async def play(policy, messages, label):
    first = await policy(messages)
    shown = {"role": "user", "content": [{"type": "image", "image": square(int(label))}]}
    return len(await policy([*messages, {"role": "assistant", "content": first}, shown])) / 100
"""
KEYS = ["runtime=local", "rollout.engine=hf", "rollout.max_new_tokens=16", "environment.max_turn_tokens=4", "seed=1"]
KEYS += ["monitoring.tensorboard=false", "environment.processes=1"]
KEYS += ["steps=2", "prompts_per_step=2", "algorithm.group_size=2", "training.learning_rate=1e-3"]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("turns")
    make_tiny_idefics(folder / "model")
    (folder / "code.py").write_text(CODE)
    rows = []
    for number in range(4):
        make_picture(number, 40 + number).save(folder / f"{number}.png")
        asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
        rows.append({"prompt": asked, "image": f"{number}.png", "label": str(number)})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}]
    (folder / "both.jsonl").write_text((json.dumps({"prompt": both, "images": ["1.png", "3.png"]}) + "\n") * 4)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"prompt": "?", "label": "1"}) + "\n" for _ in range(4)))
    return folder


def start(home: Path, name: str, *words: str, model: str = "model", data: str = "rows", verb: str = "grpo") -> int:
    named = ["--model", f"{home}/{model}", "--data", f"{home}/{data}.jsonl", "--name", name]
    return main([verb, *named, f"folder={home}", *KEYS, *words])


def check(home: Path, name: str) -> None:
    """The log-probs are those of the engine, and the reward has looked at the picture."""
    for one in metrics(home, name)[-2:]:
        assert one["mismatch/logprob_gap_max"] < 1e-4 and one["reward/failed"] == 0


class Watched:
    """The pictures of all sequences that are trained on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[Picture, ...]] = []
        compute = Worker._loss

        def watched(worker: Worker, packed: Any, micro_batch: list[int], *others: Any) -> Any:
            self.found += [packed.pictures_of(at) for at in micro_batch]
            return compute(worker, packed, micro_batch, *others)

        monkeypatch.setattr(Worker, "_loss", watched)

    def widths(self) -> set[tuple[int, ...]]:
        return {tuple(one.width for one in pictures) for pictures in self.found}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@pytest.mark.parametrize(
    "kind", ["model", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen2_5_vl", "qwen3_vl", "gemma"))]
)
def test_an_environment_shows_pictures_in_later_turns(kind: str, home: Path, trained: Watched) -> None:
    """Where a model samples an image token, which cannot be continued, a sequence with the same pictures begins."""
    if kind != "model":
        make_tiny_qwen(home / kind, kind) if "qwen" in kind else make_tiny_gemma(home / kind)
    assert start(home, f"screen-{kind}", "--environment", f"{home}/code.py:Screen", model=kind) == 0
    check(home, f"screen-{kind}")
    whole = {(40 + number, 32 + 8 * number, 40 + 8 * number) for number in range(4)}
    assert whole <= trained.widths() <= {one[:count] for one in whole for count in (1, 2, 3)}


def test_a_tool_shows_pictures_that_the_reward_sees(
    home: Path, trained: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random model calls nothing, so every reply is read as a call; the turns end by their limit."""

    def call(parser: Parser, text: str, tools: Sequence[Tool]) -> Parsed:
        return Parsed(text, [ToolCall("look", {"number": 3})], text=text)

    monkeypatch.setattr(Parser, "__call__", call)
    words = ["--tools", f"{home}/code.py:look", "--reward", f"{home}/code.py:colour", "data.system_prompt=look"]
    assert start(home, "tool", *words, "environment.max_turns=2", "data.max_pixels=600") == 0
    check(home, "tool")
    assert {len(pictures) for pictures in trained.found} == {2}
    assert all(picture.width * picture.height <= 600 for pictures in trained.found for picture in pictures)
    transcript = json.loads((home / "tool" / "transcripts.jsonl").read_text().splitlines()[0])
    assert transcript["turns"][1]["content"] == [{"type": "text", "text": "here"}, {"type": "image"}]
    assert transcript["reward"] == pytest.approx(len(transcript["reply"]) / 100 + 0.012)


def test_agents_send_pictures_as_data_urls(home: Path, trained: Watched) -> None:
    """One conversation is one sequence, although the agent sends all of its pictures each time."""
    assert start(home, "agent", "--agent", f"{home}/code.py:ask") == 0
    check(home, "agent")
    assert metrics(home, "agent")[-1]["episode/sequences"] == 1
    assert trained.widths() == {(40 + number, 24 + 8 * number, 32 + 8 * number) for number in range(4)}


def test_a_conversation_with_another_picture_is_another_one(home: Path, trained: Watched) -> None:
    assert start(home, "swap", "--agent", f"{home}/code.py:swap", data="texts") == 0
    check(home, "swap")
    assert metrics(home, "swap")[-1]["episode/sequences"] == 2 and trained.widths() == {(48,), (64,)}


def test_a_function_shows_images_of_pil(home: Path, trained: Watched) -> None:
    assert start(home, "play", "--environment", f"{home}/code.py:play") == 0
    check(home, "play")
    assert trained.widths() == {(40 + number, 24 + 8 * number) for number in range(4)}


def test_parts_without_a_picture_show_those_of_the_row_in_order(home: Path, trained: Watched) -> None:
    assert start(home, "order", "--environment", f"{home}/code.py:one_by_one", data="both") == 0
    check(home, "order")
    assert trained.widths() == {(41, 43)}


def test_bad_requests_are_refused_and_harm_nothing(home: Path) -> None:
    assert start(home, "refused", "--agent", f"{home}/code.py:refused") == 0
    check(home, "refused")


def test_sampled_episodes_are_trained_on_with_the_pictures_of_their_turns(home: Path) -> None:
    keys = ["rollout.max_new_tokens=16", "environment.max_turn_tokens=4", "runtime=local", f"folder={home}"]
    words = ["--model", f"{home}/model", "--data", f"{home}/rows.jsonl", "--environment", f"{home}/code.py:Screen"]
    chosen = ["samples=2", "keep=best", "keep_truncated=true", "rollout.engine=hf", "--name", "sampled"]
    assert main(["generate", *words, *keys, *chosen]) == 0
    row = json.loads((home / "sampled" / "kept.jsonl").read_text().splitlines()[0])
    assert len(row["images"]) == 1 and str(row["completion"]).count("data:image/png") == 2
    learned = ["--data", f"{home}/sampled/kept.jsonl", "steps=1", "samples_per_step=2", "checkpoint.save=false"]
    assert main(["sft", "--model", f"{home}/model", *learned, "--name", "sft", *keys[2:]]) == 0


@pytest.mark.parametrize(
    ("words", "model", "said"),
    [
        (["Broken"], "model", r"code.py:Broken: what `step` returned: part 1: its content of 10 bytes is no image"),
        (
            ["Screen", "environment.max_images=1"],
            "model",
            r"code.py:Screen: it shows 2 pictures .*max_images=1.*: raise",
        ),
        (["Screen"], "text", r"code.py:Screen: it shows a picture, but \S+/text reads only text: leave it out, or use"),
        (["swap"], "text", r"Error code: 400 - it shows a picture, but \S+/text reads only text: leave it out, or use"),
    ],
)
def test_what_cannot_be_shown_is_named_with_its_remedy(
    words: list[str], model: str, said: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if model == "text":
        make_tiny_model(home / model, tied=False)
    environment = f"{home}/code.py:{words[0]}"
    assert (
        start(home, f"bad-{words[0]}-{model}", "--environment", environment, *words[1:], model=model, data="texts") != 0
    )
    found = capsys.readouterr()
    assert re.search(said, re.sub(r"\s+", " ", found.out + found.err))
