"""A loop, and episodes with an engine that says which completion it is."""

from collections.abc import Iterator

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.index_engine import IndexEngine
from trueline.data.chat import ChatFormat
from trueline.rollout.episode import Episodes
from trueline.rollout.pool import EnginePool
from trueline.rollout.session import EpisodeLimits
from trueline.runtime.event_loop import EventLoop


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop(timeout_seconds=10)
    yield made
    made.stop()


@pytest.fixture
def engine(tokenizer: PreTrainedTokenizerFast) -> IndexEngine:
    return IndexEngine(tokenizer)


@pytest.fixture
def episodes(engine: IndexEngine, tokenizer: PreTrainedTokenizerFast) -> Episodes:
    return Episodes(EnginePool([engine]), ChatFormat(tokenizer, use_template=False), EpisodeLimits(512))
