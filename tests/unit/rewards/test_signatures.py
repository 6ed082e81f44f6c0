"""Reward functions written for TRL, OpenRLHF and verl are called as those projects call them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from trueline.data.types import Prompt
from trueline.environments.single_turn import reward_call
from trueline.rewards.scoring import call_function, reward_of, signature_of
from trueline.usercode.loading import Parameters

TEXT = Prompt(
    0, [{"role": "user", "content": "1+1="}], label="2", columns={"prompt": "1+1=", "answer": "2", "level": 3}
)
ASKED = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
TALK = Prompt(0, ASKED, label="2", columns={"prompt": ASKED, "answer": "2"})
VERL = Prompt(
    0,
    [{"role": "user", "content": "1+1="}],
    columns={"data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": 7}},
)


def score(function: Callable[..., Any], prompt: Prompt, reply: str = "so 2", **constants: Any) -> float:
    (value,) = call_function(function, [reward_call(prompt, reply)], constants)
    return reward_of(value)


def signature(function: Callable[..., Any]) -> str:
    found = signature_of(Parameters.of(function))
    return found.project if found else ""


def test_trl_gives_texts_and_columns_in_lists() -> None:
    given: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        given.update(kwargs, prompts=prompts, completions=completions)
        return [0.5]

    assert signature(reward) == "TRL"
    assert score(reward, TEXT, scale=2) == 0.5
    assert (given["prompts"], given["completions"]) == (["1+1="], ["so 2"])
    assert (given["answer"], given["level"], given["scale"]) == (["2"], [3], 2)


def test_trl_gives_messages_where_the_data_has_messages() -> None:
    given: dict[str, Any] = {}

    def reward(completions: Any, prompts: Any, answer: Any) -> list[float]:
        given.update(prompts=prompts, completions=completions)
        return [float(right in one[0]["content"]) for one, right in zip(completions, answer, strict=True)]

    assert score(reward, TALK) == 1.0
    assert given == {"prompts": [ASKED], "completions": [[{"role": "assistant", "content": "so 2"}]]}


@pytest.mark.parametrize(
    "returned",
    [
        torch.tensor([0.25]),
        [0.25],
        {"rewards": torch.tensor([0.25]), "scores": torch.tensor([9.0]), "extra_logs": {}},
        {"scores": [0.25]},
    ],
)
def test_openrlhf_gives_queries_and_takes_tensors_and_dicts(returned: Any) -> None:
    given: dict[str, Any] = {}

    def reward_func(queries: Any, prompts: Any, labels: Any, **kwargs: Any) -> Any:
        given.update(queries=queries, prompts=prompts, labels=labels)
        return returned

    assert signature(reward_func) == "OpenRLHF"
    assert score(reward_func, TEXT) == 0.25
    assert given == {"queries": ["1+1=so 2"], "prompts": ["1+1="], "labels": ["2"]}


@pytest.mark.parametrize("returned", [0.75, {"score": 0.75, "acc": True}, np.float64(0.75)])
@pytest.mark.parametrize(("prompt", "source"), [(VERL, "sums"), (TEXT, "given")])
def test_verl_gives_the_ground_truth_of_its_own_column_or_the_label(prompt: Prompt, source: str, returned: Any) -> None:
    given: dict[str, Any] = {}

    def compute_score(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> Any:
        given.update(data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, info=extra_info)
        return returned

    assert signature(compute_score) == "verl"
    constants = {} if prompt is VERL else {"data_source": "given"}
    assert score(compute_score, prompt, **constants) == 0.75
    info = {"index": 7} if prompt is VERL else None
    assert given == {"data_source": source, "solution_str": "so 2", "ground_truth": "2", "info": info}


def test_a_parameter_of_ours_decides() -> None:
    def reward(reply: str, completions: str = "") -> float:
        return float(len(reply))

    assert signature(reward) == ""
    assert score(reward, TEXT) == 4.0


def test_results_that_are_no_reward_are_named() -> None:
    def trl(completions: Any) -> float:
        return 1.0

    def openrlhf(queries: Any) -> Any:
        return {"extra_logs": {}}

    def verl(solution_str: Any) -> Any:
        return {"acc": True}

    def several(completions: Any) -> list[float]:
        return [1.0, 2.0]

    for function, message in (
        (trl, "a function of lists returns a list of numbers, got 1.0"),
        (openrlhf, "a dict without 'rewards' or 'scores'"),
        (verl, "a dict without 'score'"),
        (several, "it returned 2 rewards for 1 replies"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            score(function, TEXT)


def test_parameters_that_take_no_name_are_filled_by_their_place() -> None:
    def reward(reply: str, label: str, /, level: int) -> float:
        return float(label in reply) * level

    assert score(reward, TEXT) == 3.0


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (None, "got None of type NoneType: a `return` is missing"),
        ("1.0", "got '1.0' of type str: return float"),
        ([1.0], r"got \[1.0\] of type list: return the number itself, or take `replies`"),
        ({"a": 1.0}, "of type dict: return one number, and name several rewards in reward.parts"),
        ((one for one in ()), "of type generator: write `return` in place of `yield`"),
        (np.array([1.0, 2.0]), "of type ndarray"),
        (float("inf"), "got inf of type float"),
    ],
)
def test_what_is_no_number_is_named_with_a_remedy(value: Any, advice: str) -> None:
    with pytest.raises(TypeError, match=f"a reward must be a finite number, .*{advice}"):
        reward_of(value)


@pytest.mark.parametrize(
    "value", [True, 1, 1.0, np.array([1.0]), torch.tensor([1.0]), torch.tensor(1.0), np.float32(1)]
)
def test_what_is_one_number_is_a_reward(value: Any) -> None:
    assert reward_of(value) == 1.0
