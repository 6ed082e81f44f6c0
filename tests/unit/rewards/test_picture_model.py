"""A reward model that reads pictures, given the calls of a run or of the network, against its bare backbone.

Covers `trueline.rewards.model`.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoModel

from tests.support.pictures import make_picture, make_tiny_idefics, png
from tests.support.reward_models import local_group, make_reward_model
from trueline.config.model import ModelConfig
from trueline.config.reward import RewardPartConfig
from trueline.data.pictures import Picture, data_url
from trueline.models.loading import LABELS, auto_class, load_chat
from trueline.models.vision import load_processor
from trueline.rewards.base import RewardFailure
from trueline.rewards.model import ModelReward
from trueline.rewards.server import score_one

ASKED = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]


def make_judge(folder: Path, head: str) -> Path:
    make_tiny_idefics(folder)
    settings = AutoConfig.from_pretrained(folder)
    settings.num_labels = LABELS[head]
    torch.manual_seed(0)
    auto_class(settings, head).from_pretrained(folder, config=settings).save_pretrained(folder)
    return folder


def reward_of(folder: Path, head: str, template: str = "auto") -> ModelReward:
    chat = load_chat(ModelConfig(path=str(folder)), template)
    part = RewardPartConfig(function=str(folder), steps="mean")
    return ModelReward(local_group(folder, head).score, chat, part, max_tokens=400, batch=8)


def call(reply: str, *seeds: int, messages: Any = ASKED, **other: Any) -> dict[str, Any]:
    urls = [data_url(Picture(png(make_picture(seed)), 40, 24)) for seed in seeds]
    return {"reply": reply, "messages": messages, "images": urls, **other}


def answers(reward: ModelReward, *calls: dict[str, Any]) -> list[Any]:
    """What a server of this reward answers to calls that come together."""

    async def ask() -> list[Any]:
        return list(await asyncio.gather(*(score_one(reward, one) for one in calls)))

    return asyncio.run(ask())


def bare_scores(folder: Path, text: str, image: Image.Image) -> Tensor:
    """The scores of all tokens, [T, K]."""
    processor = load_processor(ModelConfig(path=str(folder)), "idefics3")
    asked = processor.apply_chat_template(ASKED, add_generation_prompt=True)
    settings = AutoConfig.from_pretrained(folder)
    head = "reward" if settings.num_labels == 1 else "steps"
    score = auto_class(settings, head).from_pretrained(folder).score
    with torch.no_grad():
        batch = processor(text=[asked + text], images=[[image]], return_tensors="pt")
        return score(AutoModel.from_pretrained(folder)(**batch).last_hidden_state[0])


def test_replies_are_scored_with_their_pictures(tmp_path: Path) -> None:
    """An empty one, too; the same words about another picture have another score."""
    folder = make_judge(tmp_path, "reward")
    found = answers(reward_of(folder, "reward"), call("a cat", 1), call("a cat", 2), call("", 1))
    shown = [("a cat</s>", 1), ("a cat</s>", 2), ("</s>", 1)]
    expected = [bare_scores(folder, text, make_picture(seed))[-1, 0].item() for text, seed in shown]
    assert found == pytest.approx(expected, abs=1e-5) and abs(found[0] - found[1]) > 1e-4


def test_steps_are_scored_with_their_pictures(tmp_path: Path) -> None:
    folder = make_judge(tmp_path, "steps")
    reward = reward_of(folder, "steps")
    (found,) = answers(reward, call("one\ntwo", 1))
    last = len(reward.chat.text_tokens("two\n")) + 1
    good = bare_scores(folder, "one\ntwo\n", make_picture(1)).softmax(-1)[[-last, -1], 1]
    assert found == pytest.approx(good.mean().item(), abs=1e-5)
    (refused,) = answers(reward, call("one\n<image>", 1))
    assert "image parts" in refused["error"]


def test_calls_without_the_right_pictures_fail_by_themselves(tmp_path: Path) -> None:
    folder = make_judge(tmp_path, "reward")
    bad = [
        (call("a"), "show 1 pictures, but it reads 0"),
        (call("a", 1, 2), "show 1 pictures, but it reads 2"),
        (call("a", images=7), "images is a list of data URLs, got 7"),
        (call("a", images=["data:image/png;base64,AAAAA"]), "its data URL is damaged"),
        (call("a", images=["data:image/png;base64,AAAA"]), "no image that Pillow knows"),
        (call("<image>", 1), "image parts"),
    ]
    good, *found = answers(reward_of(folder, "reward"), call("a", 1), *(one for one, _ in bad))
    assert isinstance(good, float)
    for answer, (_, said) in zip(found, bad, strict=True):
        assert said in answer["error"]


def test_a_model_of_text_refuses_pictures(tmp_path: Path) -> None:
    reward = reward_of(make_reward_model(tmp_path, "reward"), "reward")
    with pytest.raises(RewardFailure, match="but it reads no pictures"):
        asyncio.run(reward.score(call("a", 1)))
