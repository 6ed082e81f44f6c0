from typing import Any

import pytest

from trueline.config.model import ModelConfig, TrainingConfig
from trueline.runs.learning_rate import rate_warnings, suited_rate


@pytest.mark.parametrize(
    ("parameters", "kind", "adapters", "expected"),
    [
        (7e9, "policy", False, 1e-6),
        (70e9, "policy", False, 5e-7),  # no smaller
        (250e6, "policy", False, 1e-5),
        (10e6, "kto", False, 1e-4),
        (50e3, "preference", False, 1e-3),  # no larger
        (7e9, "sft", False, 1e-5),
        (7e9, "critic", False, 1e-5),
        (7e9, "policy", True, 1e-5),
        (7e9, "distill", True, 1e-4),
    ],
)
def test_smaller_models_adapters_and_imitation_take_larger_steps(
    parameters: float, kind: str, adapters: bool, expected: float
) -> None:
    assert suited_rate(int(parameters), kind, adapters=adapters) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("rate", "parts"),
    [
        (1e-6, ["critic.learning_rate=1e-06", "1e-03", "0.3 M", "next to nothing"]),
        (2e-4, []),
        (5e-3, []),
        (1e-1, ["critic.learning_rate=0.1", "diverge"]),
    ],
)
def test_a_rate_far_from_what_suits_is_named(rate: float, parts: list[str]) -> None:
    found = rate_warnings(300_000, "policy", ModelConfig(), TrainingConfig(learning_rate=rate), "critic")
    assert len(found) == bool(parts)
    assert all(part in found[0] for part in parts)


def test_adapters_are_judged_by_their_own_rate() -> None:
    adapted: dict[str, Any] = {"lora": {"rank": 8}}
    training = TrainingConfig(learning_rate=9e-7)
    assert not rate_warnings(int(7e9), "policy", ModelConfig(), training)
    (found,) = rate_warnings(int(7e9), "policy", ModelConfig.parse(adapted), training)
    assert "adapters" in found and "1e-05" in found
