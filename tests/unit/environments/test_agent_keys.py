"""The key of an agent's episode ends with the episode, however that ends; and what its engines can hold replies to."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from tests.unit.data.test_chat import CHATML
from tests.unit.rollout.test_session import ASKED, Table
from trueline.config.environment import EnvironmentConfig
from trueline.data.types import Outcome, Prompt
from trueline.environments.opening import OpenEnvironment, structures_of
from trueline.environments.tools.calls import SPELLINGS
from trueline.rewards.combined import CombinedReward
from trueline.rollout.engine import SamplingParams
from trueline.rollout.pool import RolloutKey

AGENT = """
def main(prompt, client, base_url, api_key, fails):
    open(fails, "a").write(f"{base_url} {api_key}\\n")
    client.chat.completions.create(model="policy", messages=[{"role": "user", "content": prompt}])
    if fails.endswith("1"):
        raise KeyError("gone")
    return 1.0
"""


def test_a_key_ends_with_its_episode_and_others_go_on(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    config = EnvironmentConfig(agent=f"{tmp_path}/agent.py:main", processes=1, timeout_seconds=600)
    table = Table(tokenizer, CHATML, "2", "3", "4")
    params = SamplingParams(1.0, 50, tuple(table.chat.stop_ids))

    async def play() -> list[Outcome]:
        made = OpenEnvironment(config, CombinedReward({}, 0.0), table.chat, tmp_path)
        await made.start()
        assert made.endpoint is not None and made.endpoint.structures is None
        outcomes = []
        try:
            for at in range(2):
                prompt = Prompt(at, ASKED, columns={"fails": str(tmp_path / f"key{at}")})
                run = table.episodes.run(made(), prompt, RolloutKey(at, 0, None), params)
                outcomes.append((await run).outcome)
                assert made.endpoint.seats == {}
                url, key = (tmp_path / f"key{at}").read_text().split()
                async with httpx.AsyncClient(trust_env=False) as client:
                    answer = await client.get(f"{url}/models", headers={"Authorization": f"Bearer {key}"})
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        finally:
            await made.stop()
        return outcomes

    assert asyncio.run(play()) == [Outcome.FINISHED, Outcome.ENVIRONMENT_ERROR]


@pytest.mark.parametrize(
    ("template", "form", "spelled"),
    [
        (CHATML, "auto", "json"),
        (f"{CHATML}<tool_call>", "auto", "hermes"),
        (CHATML, "llama", "llama"),
        (CHATML, "hermes", "hermes"),
        (CHATML, "mistral", None),
    ],
)
def test_forced_calls_are_spelled_as_the_model_spells_them(
    template: str, form: str, spelled: str | None, tokenizer: PreTrainedTokenizerFast
) -> None:
    structures = structures_of(EnvironmentConfig(tool_format=form), Table(tokenizer, template).chat)
    assert structures.spelling is (SPELLINGS[spelled] if spelled else None)
    good: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert structures.problem(structures.of(good, [])) == ""
    for bad in ({"type": "nonsense"}, {"type": "array", "uniqueItems": True}):
        assert structures.problem(structures.of(bad, [])) != ""
