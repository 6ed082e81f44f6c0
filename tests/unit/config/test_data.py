"""The key that names a chat template, wherever it stands."""

from pathlib import Path

import pytest

from trueline.config.base import Config, ConfigError
from trueline.config.rl import RLConfig
from trueline.config.sampling import ServingConfig
from trueline.config.supervised import SftConfig

KEYS = [
    (RLConfig, "data.chat_template"),
    (RLConfig, "reward.chat_template"),
    (SftConfig, "data.chat_template"),
    (ServingConfig, "chat_template"),
]


def value_of(config: Config, path: str) -> str:
    return next(key.default for key in config.leaves() if key.path == path)


@pytest.mark.parametrize(("kind", "key"), KEYS)
def test_a_template_file_is_named_by_its_whole_path(
    kind: type[Config], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a run which goes on finds it from any folder."""
    (tmp_path / "chat.jinja").write_text("")
    monkeypatch.chdir(tmp_path)
    assert value_of(kind.load([], [f"{key}=chat.jinja"]), key) == str(tmp_path / "chat.jinja")
    for word in ("auto", "never"):
        assert value_of(kind.load([], [f"{key}={word}"]), key) == word


@pytest.mark.parametrize(("kind", "key"), KEYS)
def test_a_template_file_that_is_not_there_is_refused(kind: type[Config], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: no file none\.jinja .*set auto or never"):
        kind.load([], [f"{key}=none.jinja"])
