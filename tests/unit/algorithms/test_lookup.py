import math
from typing import get_args

import pytest

from trueline.algorithms.advantages import ADVANTAGES
from trueline.algorithms.correction import CORRECTIONS
from trueline.algorithms.kl import KL_ESTIMATORS
from trueline.algorithms.lookup import lookup
from trueline.algorithms.policy_losses import POLICY_LOSSES
from trueline.algorithms.weighting import WEIGHTINGS
from trueline.config.algorithm import NEED_GROUPS, PRESETS, AlgorithmConfig, CorrectionConfig, KLConfig
from trueline.config.base import Config, ConfigError

TABLE = {"one": 1, "two": 2}


def test_a_name_is_looked_up_in_the_table() -> None:
    assert lookup(TABLE, "two", "some.key") == 2


def test_an_unknown_name_is_refused_with_key_and_names() -> None:
    with pytest.raises(ConfigError) as caught:
        lookup(TABLE, "three", "some.key")
    for part in ("some.key=three", "one", "two", "package.module:function"):
        assert part in str(caught.value)


def test_a_path_is_imported() -> None:
    assert lookup({}, "math:sqrt", "some.key") is math.sqrt


@pytest.mark.parametrize("path", ["no_such_module_here:f", "math:no_such_function"])
def test_a_path_that_cannot_be_imported_is_refused_by_key(path: str) -> None:
    with pytest.raises(ConfigError, match=f"some.key={path}: cannot be imported"):
        lookup(TABLE, path, "some.key")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_name_of_a_preset_is_in_its_table(preset: str) -> None:
    config = AlgorithmConfig(preset=preset)
    assert callable(lookup(ADVANTAGES, config.advantage, "algorithm.advantage"))
    assert callable(lookup(POLICY_LOSSES, config.loss, "algorithm.loss"))
    assert config.weighting in WEIGHTINGS
    assert config.kl.estimator in KL_ESTIMATORS
    assert config.correction.kind in CORRECTIONS


@pytest.mark.parametrize(
    ("section", "key", "table"),
    [
        (KLConfig, "estimator", KL_ESTIMATORS),
        (CorrectionConfig, "kind", CORRECTIONS),
        (AlgorithmConfig, "weighting", WEIGHTINGS),
    ],
)
def test_the_values_that_a_key_allows_are_the_entries_of_its_table(
    section: type[Config], key: str, table: dict[str, object]
) -> None:
    assert set(get_args(section.model_fields[key].annotation)) == set(table)


def test_estimators_that_need_groups_exist() -> None:
    assert set(ADVANTAGES) >= NEED_GROUPS
