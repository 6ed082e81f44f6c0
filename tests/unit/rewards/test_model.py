"""A reward model as a reward, against plain transformers on tokens that are written out here."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.reward_models import CONTEXT, local_group, make_reward_model, plain_logits
from tests.support.tiny import make_tiny_model
from tests.support.tool_calls import TOOL_TALK, TOOL_TEMPLATE, TOOLS
from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.config.reward import RewardPartConfig
from trueline.data.types import Sample
from trueline.models.loading import load_chat, load_tokenizer
from trueline.rewards.base import RewardFailure
from trueline.rewards.model import ModelReward, check_reward_model, reward_model_head
from trueline.training.group import ModelGroup
from trueline.training.worker import Worker, WorkerSpec

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def outcome_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("outcome"), "reward")


@pytest.fixture(scope="module")
def process_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("process"), "steps")


@pytest.fixture(scope="module")
def outcome(outcome_model: Path) -> ModelGroup:
    return local_group(outcome_model, "reward")


@pytest.fixture(scope="module")
def process(process_model: Path) -> ModelGroup:
    return local_group(process_model, "steps")


def call(reply: str, prompt: str = "2+3=") -> dict[str, Any]:
    return {"reply": reply, "prompt": prompt, "messages": [{"role": "user", "content": prompt}], "label": None}


def model_reward(folder: Path, group: ModelGroup, *, batch: int = 64, **settings: Any) -> ModelReward:
    chat = load_chat(ModelConfig(path=str(folder)), "auto")
    part = RewardPartConfig(function=str(folder), **settings)
    return ModelReward(group.score, chat, part, max_tokens=CONTEXT, batch=batch)


def scored(reward: ModelReward, calls: list[dict[str, Any]]) -> list[Any]:
    """Rewards of calls that are made at once; a failure takes its place in the list."""

    async def all_at_once() -> list[Any]:
        return list(await asyncio.gather(*(reward.score(one) for one in calls), return_exceptions=True))

    return asyncio.run(all_at_once())


def ids(folder: Path, text: str) -> list[int]:
    return list(load_tokenizer(ModelConfig(path=str(folder)))(text, add_special_tokens=False)["input_ids"])


def test_score_is_that_of_transformers(outcome_model: Path, outcome: ModelGroup) -> None:
    """An empty reply is the end token alone."""
    for reply, text in (("5", "2+3=5</s>"), ("", "2+3=</s>"), (" \n", "2+3=</s>")):
        expected = plain_logits(outcome_model, "reward", ids(outcome_model, text))
        [reward] = scored(model_reward(outcome_model, outcome), [call(reply)])
        assert reward == pytest.approx(float(expected), abs=TOLERANCE)


def test_chat_template_is_the_reward_models_own(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "model", "reward", TEMPLATE)
    tokens = ids(folder, "<user>2+3=</s><assistant>5</s>")
    assert len(tokens) == len("<user>2+3=<assistant>5") + 2  # each end is one token
    [reward] = scored(model_reward(folder, local_group(folder, "reward")), [call("5")])
    assert reward == pytest.approx(float(plain_logits(folder, "reward", tokens)), abs=TOLERANCE)


def test_tools_and_calls_are_shown_as_they_were_trained(tmp_path: Path) -> None:
    shown = '<tools>add;</s>\n<user>1+1=</s>\n<assistant><call>add{"a": 1, "b": 1}</s>\n<tool>2</s>\n<assistant>'
    for head, ending in (("reward", "5</s>"), ("steps", "5\n")):
        folder = make_reward_model(tmp_path / head, head, TOOL_TEMPLATE)
        seen: list[Sample] = []

        def score(samples: list[Sample], seen: list[Sample] = seen) -> list[Tensor]:
            seen += samples
            return [torch.zeros(sample.length(), 2) for sample in samples]

        reward = model_reward(folder, local_group(folder, head))
        reward.score_samples, reward.max_tokens = score, 999
        asked = {"messages": TOOL_TALK[:3], "tools": TOOLS}
        scored(reward, [call("5") | asked, call("") | asked])
        said = [reward.chat.tokenizer.decode(sample.tokens) for sample in seen]
        assert said == [shown + ending, shown + ending.removeprefix("5")]


def test_batches_change_nothing(outcome_model: Path, outcome: ModelGroup) -> None:
    calls = [call("5" * length, prompt="what? " * (length % 3)) for length in range(1, 8)]
    alone = [scored(model_reward(outcome_model, outcome), [one])[0] for one in calls]
    together = scored(model_reward(outcome_model, outcome, batch=3), calls)
    assert together == pytest.approx(alone, abs=TOLERANCE)
    assert len({round(reward, 3) for reward in together}) == len(calls)  # the model tells them apart


def test_waiting_calls_are_gathered(outcome_model: Path, outcome: ModelGroup) -> None:
    sizes: list[int] = []

    def score(samples: list[Sample]) -> list[Tensor]:
        sizes.append(len(samples))
        return outcome.score(samples)

    reward = model_reward(outcome_model, outcome, batch=4)
    reward.score_samples = score
    scored(reward, [call(str(number)) for number in range(10)])
    assert sizes == [4, 4, 2]


def test_too_long_is_a_failure_of_that_reply_alone(outcome_model: Path, outcome: ModelGroup) -> None:
    fits = CONTEXT - len("2+3=") - 1
    longest, longer, other = scored(
        model_reward(outcome_model, outcome), [call("5" * fits), call("5" * (fits + 1)), call("5")]
    )
    assert isinstance(longest, float) and isinstance(other, float)
    assert isinstance(longer, RewardFailure)
    assert f"{CONTEXT + 1} of its tokens" in str(longer) and f"its limit of {CONTEXT}" in str(longer)


def test_a_dead_model_fails_every_call(outcome_model: Path, outcome: ModelGroup) -> None:
    def score(samples: list[Sample]) -> list[Tensor]:
        raise RuntimeError("its process died")

    reward = model_reward(outcome_model, outcome)
    reward.score_samples = score
    assert [str(failed) for failed in scored(reward, [call("1"), call("2")])] == ["its process died"] * 2


def test_a_score_that_is_no_number_is_a_failure(outcome_model: Path, outcome: ModelGroup) -> None:
    reward = model_reward(outcome_model, outcome)
    reward.score_samples = lambda samples: [torch.full((sample.length(), 1), math.nan) for sample in samples]
    [failed] = scored(reward, [call("1")])
    assert isinstance(failed, RewardFailure) and "nan" in str(failed)


def test_normalised_by_what_is_stored(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "model", "reward")
    group = local_group(folder, "reward")
    [raw] = scored(model_reward(folder, group), [call("5")])
    with pytest.raises(ConfigError, match=r"reward_mean=None.*evaluation\.share"):
        model_reward(folder, group, normalize=True)
    store(folder, reward_mean=0.5, reward_std=4.0)
    [normalised] = scored(model_reward(folder, group, normalize=True), [call("5")])
    assert normalised == pytest.approx((raw - 0.5) / 4, abs=TOLERANCE)
    reward = model_reward(folder, group, normalize=True)
    reward.deviation = 1e-300
    reward.score_samples = lambda samples: [torch.full((sample.length(), 1), 1e30) for sample in samples]
    [failed] = scored(reward, [call("5")])
    assert isinstance(failed, RewardFailure) and "inf" in str(failed)
    for deviation in (math.nan, 0.0):
        store(folder, reward_std=deviation)
        with pytest.raises(ConfigError, match=f"reward_std={deviation}"):
            model_reward(folder, group, normalize=True)


def store(folder: Path, **facts: float) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def step_probabilities(folder: Path, prompt: str, steps: list[str]) -> list[float]:
    """That a step is good: softmax over (bad, good) at the line break that ends it."""
    tokens = ids(folder, prompt)
    ends = []
    for step in steps:
        tokens += ids(folder, step + "\n")
        ends.append(len(tokens) - 1)
    logits = plain_logits(folder, "steps", tokens)
    return [float(torch.sigmoid(logits[end, 1] - logits[end, 0])) for end in ends]


def test_process_reward_is_that_of_transformers(process_model: Path, process: ModelGroup) -> None:
    good = step_probabilities(process_model, "2+3+4=", ["2+3 is 5", "5+4 is 8", "so 8"])
    expected = {"min": min(good), "mean": sum(good) / 3, "product": good[0] * good[1] * good[2], "last": good[2]}
    assert len({round(value, 3) for value in expected.values()}) >= 3
    for steps, value in expected.items():
        reward = model_reward(process_model, process, steps=steps)
        [found] = scored(reward, [call("2+3 is 5\n\n5+4 is 8\nso 8", prompt="2+3+4=")])
        assert found == pytest.approx(value, abs=TOLERANCE)


def test_process_reward_of_other_separators_and_of_nothing(process_model: Path, process: ModelGroup) -> None:
    typed = model_reward(process_model, process, step_separator="\\n", steps="last")  # as on a command line
    [found] = scored(typed, [call("a\nb\n")])
    assert found == pytest.approx(step_probabilities(process_model, "2+3=", ["a", "b"])[1], abs=TOLERANCE)
    [nothing] = scored(typed, [call("")])
    assert nothing == pytest.approx(step_probabilities(process_model, "2+3=", [""])[0], abs=TOLERANCE)
    with pytest.raises(ConfigError, match="step_separator is empty"):
        check_reward_model(RewardPartConfig(function=str(process_model), step_separator=""))


def test_head_is_told_from_the_folder(outcome_model: Path, process_model: Path, model_folder: Path) -> None:
    assert reward_model_head(str(outcome_model)) == "reward"
    assert reward_model_head(str(process_model)) == "steps"
    with pytest.raises(
        ConfigError, match=r"LlamaForCausalLM in its config.json is no reward model: train one with rm or prm"
    ):
        reward_model_head(str(model_folder))
    with pytest.raises(ConfigError, match="no model folder"):
        reward_model_head("math")


def test_wrong_folders_are_refused_with_the_remedy(tmp_path: Path, outcome_model: Path) -> None:
    settings = json.loads((outcome_model / "config.json").read_text())
    settings["id2label"] = {str(label): str(label) for label in range(5)}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="with 5 labels; a reward model has 1"):
        reward_model_head(str(tmp_path))
    checkpoint = tmp_path / "step_000001"
    (checkpoint / "model").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"did you mean .*step_000001/model\?"):
        reward_model_head(str(checkpoint))
    (checkpoint / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"trueline export RUN FOLDER --merge"):
        reward_model_head(str(checkpoint))


@pytest.mark.parametrize("head", ["reward", "steps"])
def test_what_training_saves_is_a_reward_model(tmp_path: Path, head: str) -> None:
    """`rm` and `prm` start from a language model and save through the same worker."""
    base = make_tiny_model(tmp_path / "base", tied=False)
    config = ModelConfig(path=str(base), dtype="float32")
    worker = Worker(WorkerSpec(config, TrainingConfig(engine="torch", learning_rate=1e-6), 0, 1, 1, 0, head=head))
    worker.start(("", 0))
    (tmp_path / "checkpoint").mkdir()
    worker.save(str(tmp_path / "checkpoint"))
    saved = worker.save_result(True)
    assert saved is not None and saved.problem is None
    assert reward_model_head(str(tmp_path / "checkpoint" / "model")) == head
