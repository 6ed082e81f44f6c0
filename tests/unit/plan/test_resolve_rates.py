import json
from pathlib import Path
from typing import Any

import pytest

from trueline.cli import main
from trueline.config.base import Tree, read_tree
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.models.loading import check_model
from trueline.plan.resolve import rate_findings, rate_keys, rate_line, suited_rate

KINDS = ("policy", "preference", "kto", "sft", "distill", "rm", "prm", "critic")
PLAIN, ADAPTED = ModelConfig(), ModelConfig.parse({"lora": {"rank": 8}})


@pytest.mark.parametrize(
    ("parameters", "reinforced", "imitating", "reinforced_adapters", "imitating_adapters"),
    [
        (1e6, 2e-4, 2e-3, 2e-3, 2e-3),  # no rate is larger
        (10e6, 5e-5, 5e-4, 5e-4, 2e-3),
        (135e6, 1e-5, 1e-4, 1e-4, 1e-3),
        (0.6e9, 2e-6, 2e-5, 2e-5, 2e-4),
        (1.7e9, 2e-6, 2e-5, 2e-5, 2e-4),
        (8e9, 1e-6, 1e-5, 1e-5, 1e-4),
        (70e9, 5e-7, 5e-6, 5e-6, 5e-5),
    ],
)
def test_smaller_models_adapters_and_imitation_take_larger_steps(
    parameters: float, reinforced: float, imitating: float, reinforced_adapters: float, imitating_adapters: float
) -> None:
    rates = {kind: [suited_rate(int(parameters), kind, adapters=some) for some in (False, True)] for kind in KINDS}
    assert [rates[kind] for kind in KINDS[:3]] == [[reinforced, reinforced_adapters]] * 3
    assert [rates[kind] for kind in KINDS[3:]] == [[imitating, imitating_adapters]] * 5


@pytest.mark.parametrize("size", [1, 10**5, *(int(10 ** (power / 4)) for power in range(24, 48))])
def test_no_size_takes_a_larger_step_than_a_smaller_one(size: int) -> None:
    assert 1e-7 <= suited_rate(2 * size, "policy", adapters=False) <= suited_rate(size, "policy", adapters=False)


PUBLISHED = {  # task -> rates of recipes for all weights, and for adapters, of models of these sizes
    "policy": ([5e-7, 1e-6, 5e-6], [1e-5, 5e-5, 1e-4], [0.5e9, 1.5e9, 7e9, 14e9]),
    "preference": ([5e-7, 1e-6, 5e-6], [5e-6, 5e-5, 1e-4], [0.5e9, 1.5e9, 7e9, 70e9]),
    "sft": ([5e-6, 1e-5, 2e-5, 5e-5], [1e-4, 2e-4, 5e-4], [0.5e9, 1.5e9, 7e9, 70e9]),
    "rm": ([5e-6, 1e-5, 2e-5], [1e-4, 2e-4], [0.5e9, 1.5e9, 7e9, 70e9]),
    "critic": ([5e-6, 1e-5], [], [0.5e9, 1.5e9, 7e9, 70e9]),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_recipes_are_not_warned_of(kind: str) -> None:
    whole, adapted, sizes = PUBLISHED[kind]
    asked = [(PLAIN, rate) for rate in whole] + [(ADAPTED, rate) for rate in adapted]
    for model, rate in asked:
        for size in sizes:
            assert not rate_findings(int(size), kind, model, TrainingConfig(learning_rate=rate)), (rate, size)


@pytest.mark.parametrize(
    ("rate", "parts"),
    [
        (1e-6, ["critic.learning_rate=1e-06", "0.0005", "0.3M parameters", "next to nothing"]),
        (2e-4, []),
        (5e-3, []),
        (1e-1, ["critic.learning_rate=0.1", "diverge", "leave the key out"]),
    ],
)
def test_a_rate_far_from_what_suits_is_named(rate: float, parts: list[str]) -> None:
    found = rate_findings(300_000, "policy", PLAIN, TrainingConfig(learning_rate=rate), "critic")
    assert len(found) == bool(parts)
    assert all(part in found[0].text() for part in parts)


def test_adapters_are_judged_by_their_own_rate() -> None:
    training = TrainingConfig(learning_rate=2e-7)
    assert not rate_findings(int(7e9), "policy", PLAIN, training)
    (found,) = rate_findings(int(7e9), "policy", ADAPTED, training)
    assert "adapters" in found.what and "1e-05" in found.what


@pytest.mark.parametrize(("set_to", "kept"), [({}, 2e-4), ({"learning_rate": 3e-5}, 3e-5)])
def test_a_rate_that_is_set_stays_and_no_default_is_warned_of(set_to: Tree, kept: float) -> None:
    size, training = int(0.6e9), TrainingConfig.parse(set_to)
    found = training.with_keys(rate_keys(size, "sft", ADAPTED, training))
    assert found.learning_rate == kept and not rate_findings(size, "sft", ADAPTED, found)


def test_the_plan_names_the_rate_and_its_reason() -> None:
    reason = "default for sft with adapters on 0.6B parameters"
    left, given = (rate_line(int(0.6e9), "sft", ADAPTED, TrainingConfig(learning_rate=rate)) for rate in (2e-4, 1e-4))
    assert left == f"rate       training.learning_rate=0.0002: {reason}"
    assert given == f"rate       training.learning_rate=0.0001, as set; 0.0002 is the {reason}"
    critic = rate_line(int(7e9), "critic", PLAIN, TrainingConfig(learning_rate=1e-5), "critic")
    assert critic == "rate       critic.learning_rate=1e-05: default for a critic on 7B parameters"


def reported(folder: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "learning_rate" in row]


@pytest.mark.parametrize(("verb", "sections"), [("sft", ["training"]), ("ppo", ["training", "critic"])])
def test_the_default_reaches_the_optimizers_and_stays_when_a_run_is_resumed(
    verb: str, sections: list[str], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n')
    size = check_model(ModelConfig(path=str(model_folder))).parameters
    kinds = {"training": "policy" if verb == "ppo" else verb, "critic": "critic"}
    expected = {section: suited_rate(size, kinds[section], adapters=False) for section in sections}
    small = ["prompts_per_step=2", "algorithm.group_size=2", "rollout.max_new_tokens=4", "--reward", "math"]
    words = ["--model", str(model_folder), "--data", "data.jsonl", "runtime=local", "monitoring.tensorboard=false"]
    words += small if verb == "ppo" else ["samples_per_step=2"]
    assert main([verb, *words, "--name", "run", "steps=1"]) == 0
    monkeypatch.setattr("trueline.plan.resolve.BASE_RATE", 1.0)  # as another version may have it
    assert main([verb, "--resume", "--name", "run", "steps=2"]) == 0
    names = {"training": "learning_rate", "critic": "critic/learning_rate"}
    rows = [{section: row[names[section]] for section in sections} for row in reported(Path("runs/run"))]
    assert rows == [pytest.approx(expected)] * 2
    kept = read_tree(Path("runs/run/config.yaml"))
    assert {section: kept[section]["learning_rate"] for section in sections} == expected
