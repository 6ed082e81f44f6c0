"""What every test relies on: no network, no thread pools that fight for two cores, and one small model on disk."""

import os

# Before transformers and tokenizers are imported: both read these once.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TRANSFORMERS_VERBOSITY="error",
    TOKENIZERS_PARALLELISM="false",
)

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.support.tiny import small_config
from trueline.demo.material import make_tokenizer
from trueline.monitoring.metrics import is_known
from trueline.monitoring.trackers import Tracker

LONGEST = ("test_rlhf_example.py", "test_demo.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest files first, so that none is left over; skip what needs a GPU where there is none."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def documented_metrics() -> Iterator[None]:
    """Refuse a metric of a step that metrics.csv does not have."""
    log = Tracker.log

    def checked(self: Tracker, step: int, metrics: dict[str, float]) -> None:
        unknown = [name for name in metrics if "time/step" in metrics and not is_known(name)]
        assert not unknown, f"metrics.csv does not have {unknown}"
        log(self, step, metrics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tracker, "log", checked)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A random Llama of two layers with the demo's byte tokenizer. Read it, do not write to it."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    LlamaForCausalLM(small_config(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
