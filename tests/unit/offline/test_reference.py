import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.support.disk import files_up_to
from tests.support.tiny import make_samples
from trueline.config.model import ModelConfig, RanksConfig
from trueline.data.types import Sample
from trueline.monitoring.progress import Progress
from trueline.offline.build import ReferenceCache, fill_reference
from trueline.runtime.actors import LocalActor
from trueline.training.group import ModelGroup
from trueline.training.worker import Worker, WorkerSpec


@pytest.fixture
def group(model_folder: Path) -> ModelGroup:
    ranks = RanksConfig(engine="torch", micro_batch_tokens=64)
    worker = Worker(WorkerSpec(ModelConfig(path=str(model_folder), dtype="float32"), ranks, 0, 1, 0, 0))
    worker.start(("", 0))
    return ModelGroup("model", [LocalActor("model-0", worker)], ranks, 60)


def fill(group: ModelGroup, samples: list[Sample], file: Path, model: str = "start") -> str:
    """What was said on the way."""
    screen = io.StringIO()
    fill_reference(group, samples, ReferenceCache(file, model), Progress("run", 1, Console(file=screen, width=200)))
    return screen.getvalue()


def test_every_sample_gets_the_starting_models_log_probs(group: ModelGroup, tmp_path: Path) -> None:
    samples = make_samples(5)
    expected = group.score(samples)
    assert "scoring 5 sequences once" in fill(group, samples, tmp_path / "reference.safetensors")
    assert all(torch.equal(sample.ref_logprobs, one) for sample, one in zip(samples, expected, strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["reference.safetensors"]


def test_a_resumed_run_reads_them_instead_of_asking_a_changed_model(group: ModelGroup, tmp_path: Path) -> None:
    first, second = make_samples(5), make_samples(5)
    fill(group, first, tmp_path / "reference.safetensors")
    (worker,) = [actor.target for actor in group.actors]  # type: ignore[attr-defined]
    worker.model.lm_head.weight.data.mul_(0.5)
    assert fill(group, second, tmp_path / "reference.safetensors") == ""
    assert all(torch.equal(one.ref_logprobs, two.ref_logprobs) for one, two in zip(first, second, strict=True))


def test_other_samples_are_scored_anew(group: ModelGroup, tmp_path: Path) -> None:
    fill(group, make_samples(5), tmp_path / "reference.safetensors")
    samples = make_samples(5, seed=1)
    assert "scoring 5 sequences once" in fill(group, samples, tmp_path / "reference.safetensors")
    assert torch.equal(samples[0].ref_logprobs, group.score(samples)[0])


def test_another_model_is_asked_anew(group: ModelGroup, tmp_path: Path) -> None:
    fill(group, make_samples(5), tmp_path / "reference.safetensors")
    assert "scoring 5 sequences once" in fill(group, make_samples(5), tmp_path / "reference.safetensors", "other")


def test_tokens_and_masks_tell_samples_apart() -> None:
    cache = ReferenceCache(Path("reference.safetensors"), "start")
    plain, other_mask = make_samples(2), make_samples(2)
    other_mask[1].mask = ~other_mask[1].mask
    assert cache.key(plain) == cache.key(make_samples(2))
    assert len({cache.key(plain), cache.key(other_mask), cache.key(make_samples(2, seed=3))}) == 3


def test_a_full_disk_costs_the_file_and_not_the_run(group: ModelGroup, tmp_path: Path) -> None:
    samples = make_samples(5)
    with files_up_to(100):
        said = fill(group, samples, tmp_path / "reference.safetensors")
    assert "reference.safetensors cannot be written" in said and "--resume will score them again" in said
    assert torch.equal(samples[0].ref_logprobs, group.score(samples)[0])
    assert not list(tmp_path.iterdir())
