"""Every rank copies and writes its share; what was saved is read back in pieces, by any rank."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.disk import files_up_to
from tests.support.tiny import make_samples
from tests.support.whole import averages, whole_state
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.config.run import CheckpointConfig
from trueline.models.ring_attention import Mesh
from trueline.runtime.actors import LocalActor
from trueline.training import checkpoints as checkpoint_files
from trueline.training import saving
from trueline.training.checkpoints import Checkpoints, SaveResult, digest, save_tensors
from trueline.training.engines.shards import piece, whole_shard
from trueline.training.export import export
from trueline.training.group import ModelGroup, prepare_saving, write_models
from trueline.training.report import LossSettings
from trueline.training.saving import MODEL, TRAINING, Content, SavedState, Saver, shard_name
from trueline.training.worker import Worker, WorkerSpec

TENSORS = {
    MODEL: {"big": torch.arange(60.0).view(6, 10).bfloat16(), "odd": torch.arange(7.0), "one": torch.tensor(3.0)},
    TRAINING: {
        "big/weight": torch.randn(6, 10),
        "big/any": torch.arange(11, dtype=torch.uint8),  # misaligns what follows it
        "odd/weight": torch.randn(7),
        "odd/across": torch.randn(4, 3).T,
        "one/weight": torch.tensor(2.5),
    },
}


def contents(rank: int, world: int, model: bool = True, *, planned: bool = False) -> Iterator[Content]:
    """As of ranks that all hold the same."""
    for stem, named in TENSORS.items():
        yield from ((stem, whole_shard(key, tensor, rank, world)) for key, tensor in named.items())


def make_saver(rank: int, world: int) -> Saver:
    return Saver(rank, world, partial(contents, rank, world))


def nothing() -> None:
    pass


def written(saver: Saver, folder: Path, describe: Callable[[], None] = nothing) -> SaveResult:
    folder.mkdir(exist_ok=True)
    saver.save(folder, 5, describe)
    saved = saver.result(wait=True)
    assert saved is not None
    return saved


def write_all(folder: Path, world: int) -> dict[str, str]:
    found = [written(make_saver(rank, world), folder) for rank in range(world)]
    assert not [one.problem for one in found if one.problem]
    return {name: value for one in found for name, value in one.digests.items()}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_what_some_ranks_write_is_the_whole(tmp_path: Path, world: int) -> None:
    digests = write_all(tmp_path, world)
    assert digests == {name: digest(tmp_path / name) for name in digests}
    assert len(digests) == 2 * world == len(list(tmp_path.rglob("*.safetensors")))
    found = tensors_of(tmp_path / "model")
    assert found.keys() == TENSORS[MODEL].keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in TENSORS[MODEL].items())
    saved = SavedState(tmp_path)
    assert saved.steps == 5
    assert {name: set(parts) for name, parts in saved.by_name().items()} == {
        "big": {"weight", "any"},
        "odd": {"weight", "across"},
        "one": {"weight"},
    }
    for key, tensor in TENSORS[TRAINING].items():
        assert torch.equal(saved.read(key), tensor)
        assert saved.read(key).dtype == tensor.dtype


def test_a_state_of_equal_pieces_is_read_as_well(tmp_path: Path) -> None:
    """As checkpoints were written before files said where their elements lie."""
    named = TENSORS[TRAINING]
    shapes = json.dumps({key: list(tensor.shape) for key, tensor in named.items()})
    for rank in range(3):
        flats = {key: tensor.flatten()[slice(*piece(tensor.numel(), rank, 3))] for key, tensor in named.items()}
        held = {key: flat.contiguous() for key, flat in flats.items() if len(flat)}
        save_tensors(tmp_path / shard_name(TRAINING, rank, 3), held, {"steps": "5", "shapes": shapes})
    saved = SavedState(tmp_path)
    assert all(torch.equal(saved.read(key), tensor) for key, tensor in named.items())
    middle = saved.read("big/weight", slice(15, 45)).flatten()[15:45]
    assert torch.equal(middle, named["big/weight"].flatten()[15:45])


def test_the_index_names_the_file_of_every_weight(tmp_path: Path) -> None:
    write_all(tmp_path, 3)
    places = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    assert {key: set(load_file(tmp_path / "model" / name)) for key, name in places.items()} == {
        key: {key} for key in TENSORS[MODEL]
    }
    write_all(tmp_path / "alone", 1)
    assert sorted(path.name for path in (tmp_path / "alone" / "model").iterdir()) == ["model.safetensors"]


def test_only_what_is_wanted_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all(tmp_path, 3)
    saved, whole = SavedState(tmp_path), TENSORS[TRAINING]["big/weight"].flatten()
    monkeypatch.setattr(torch, "empty", lambda size, dtype: torch.full((size,), torch.nan, dtype=dtype))
    for first, last in ((0, 60), (0, 0), (3, 9), (15, 45), (19, 21), (59, 60)):
        found = saved.read("big/weight", slice(first, last))
        assert found.shape == (6, 10)
        assert torch.equal(found.flatten()[first:last], whole[first:last])
        assert found.isnan().sum() == 60 - (last - first)


@pytest.mark.parametrize("room", [0, 30, 10_000])
def test_few_small_buffers_write_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Copying waits for the writer where there is no room for all, and goes on with buffers that come back."""
    expected = write_all(tmp_path, 2)
    monkeypatch.setattr(saving, "BUFFER_BYTES", 13)
    monkeypatch.setattr(saving, "HOST_SHARE", 0.0)
    for rank in range(2):
        saver = make_saver(rank, 2)
        saver.buffers.allocate(10_000, room)
        saver.allocated = saver.thread.submit(nothing)
        buffers = saver.buffers.free.qsize()
        assert buffers == {0: 2, 30: 4, 10_000: 771}[room]
        for _ in range(2):
            found = written(saver, tmp_path / "again").digests
            assert found == {name: expected[name] for name in found}
            assert saver.buffers.free.qsize() == buffers


def test_a_full_disk_is_told_and_the_next_save_has_all_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "BUFFER_BYTES", 13)
    saver = make_saver(0, 1)
    saver.allocated = saver.thread.submit(saver.buffers.allocate, 26, 26)
    with files_up_to(300):
        saved = written(saver, tmp_path / "full")
    assert saved.problem is not None and saved.problem.startswith("rank 0: [Errno 27] File too large")
    assert written(saver, tmp_path / "empty").problem is None
    assert saver.buffers.free.qsize() == 3


@pytest.mark.parametrize("kind", [ConfigError, ValueError])
def test_a_file_of_another_kind_that_cannot_be_made_is_told_and_not_raised(
    tmp_path: Path, kind: type[Exception]
) -> None:
    def describe() -> None:
        raise kind("its tokenizer cannot be loaded")

    saver = make_saver(0, 1)
    assert written(saver, tmp_path, describe).problem == "rank 0: its tokenizer cannot be loaded"
    assert written(saver, tmp_path).problem is None


def test_copying_that_breaks_off_leaves_no_writer_waiting(tmp_path: Path) -> None:
    broken = [False]

    def breaking(model: bool, *, planned: bool = False) -> Iterator[Content]:
        for number, entry in enumerate(contents(0, 1)):
            if broken[0] and number == 4:
                raise ValueError("broken")
            yield entry

    saver = Saver(0, 1, breaking)
    assert written(saver, tmp_path).problem is None
    broken[0] = True
    with pytest.raises(ValueError, match="broken"):
        written(saver, tmp_path)
    saved = saver.result(wait=True)
    assert saved is not None and saved.problem == "rank 0: training.safetensors: copying was interrupted"
    broken[0] = False
    assert written(saver, tmp_path).problem is None


def test_a_state_without_shapes_is_refused(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"{tmp_path}: its training state is missing"):
            SavedState(tmp_path)
        save_tensors(tmp_path / "training.safetensors", {"a/weight": torch.ones(2)}, {"steps": "1"})


WORLD = 4
TRAIN = TrainingConfig(engine="torch", learning_rate=1e-2, ema_decay=0.5)


def make_group(model: Path, world: int = WORLD) -> ModelGroup:
    """Ranks in this process that all learn the same, as those of a tensor-parallel group do."""
    config = ModelConfig(path=str(model), dtype="float32")
    workers = [Worker(WorkerSpec(config, TRAIN, rank, world, 4, 0)) for rank in range(world)]
    actors = [LocalActor(f"model-{rank}", worker) for rank, worker in enumerate(workers)]
    group = ModelGroup("model", actors, TRAIN, 60, Mesh(world, 1, world))
    group.start()
    return group


def learn(group: ModelGroup) -> dict[str, float]:
    samples = make_samples(4, seed=1)
    set_weights(samples, "token_mean", 0)
    return group.update(samples, "sft", LossSettings())


def state_of(group: ModelGroup) -> dict[str, Tensor]:
    return whole_state(group.actors[0].target.engine)  # type: ignore[attr-defined]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(other[key], tensor) for key, tensor in one.items())


def test_training_goes_on_while_it_is_written(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written until two more steps are made; what is saved is the step it was asked for."""
    gate, write = threading.Event(), saving.write_file

    def held(*args: Any) -> Any:
        assert gate.wait(60)
        return write(*args)

    monkeypatch.setattr(saving, "write_file", held)
    checkpoints, group = Checkpoints(tmp_path, CheckpointConfig()), make_group(model_folder, 2)
    prepare_saving([group])
    learn(group)
    expected = state_of(group)
    checkpoints.save(1, {"step": 1}, lambda folder: write_models({"": group}, folder), {"loss": 1.0})
    for _ in range(2):
        learn(group)
        checkpoints.settle()
        assert checkpoints.newest() is None and checkpoints.pending is not None
    checkpoints.add_metrics(1, {"evaluation/loss": 0.5})
    gate.set()
    checkpoints.settle(wait=True)
    saved = checkpoints.newest()
    assert saved is not None and checkpoints.read_state(saved) == {"step": 1}
    assert checkpoints.newest_metrics() == {"loss": 1.0, "evaluation/loss": 0.5}
    again = make_group(model_folder, 3)
    again.call(Worker.load, str(saved))
    assert same(state_of(again), expected)
    assert not same(state_of(group), expected)


def test_every_file_is_compared_by_the_rank_that_wrote_it_before_it_is_loaded(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, models = Checkpoints(tmp_path, CheckpointConfig()), {"": make_group(model_folder, 2)}
    models["critic"] = make_group(model_folder, 2)
    for step in (1, 2):
        checkpoints.save(step, {"step": step}, partial(write_models, models))
    checkpoints.settle(wait=True)
    saved = checkpoints.folder / "step_000002"
    files = sorted(path for path in saved.rglob("*.safetensors"))
    assert len(files) == 12  # of both models: weights, training state and random numbers of two ranks
    compared: list[Path] = []
    monkeypatch.setattr(checkpoint_files, "digest", lambda file: compared.append(file) or digest(file))
    for place, group in models.items():
        for rank, actor in enumerate(group.actors):
            compared.clear()
            actor.submit(Worker.load, str(saved / place)).result(60)
            own = f"-0000{rank + 1}-of-00002"
            mine = {f"{one}.safetensors" for one in (f"model/model{own}", f"training{own}", f"random-{rank}")}
            assert {file.relative_to(saved / place).as_posix() for file in compared} == mine
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert checkpoints.read_state(saved, tensors=False) == {"step": 2}
        name = file.relative_to(saved).as_posix()
        place = "critic" if name.startswith("critic") else ""
        refusal = f"{saved}: {name} is missing or has changed; remove the folder to resume from step_000001"
        with pytest.raises(ConfigError, match=re.escape(refusal)):
            models[place].call(Worker.load, str(saved / place))
        file.write_bytes(content)


def test_each_of_four_ranks_writes_a_quarter(model_folder: Path, tmp_path: Path) -> None:
    group = make_group(model_folder)
    learn(group)
    look = write_models({"": group}, tmp_path)
    saved = look(True)
    assert saved is not None and saved.problem is None
    sizes = [
        sum((tmp_path / name).stat().st_size for name in saved.digests if f"-{rank + 1:05d}-of-00004" in name)
        for rank in range(WORLD)
    ]
    assert len(saved.digests) == 2 * WORLD
    assert max(sizes) < 1.05 * sum(sizes) / WORLD, sizes
    opened = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    weights = {key.removesuffix("/weight"): one for key, one in state_of(group).items() if key.endswith("/weight")}
    assert same(opened, weights)


def test_a_model_in_several_files_is_exported(model_folder: Path, tmp_path: Path) -> None:
    checkpoints, group = Checkpoints(tmp_path, CheckpointConfig()), make_group(model_folder, 3)
    learn(group)
    checkpoints.save(1, {"step": 1}, lambda folder: write_models({"": group}, folder))
    checkpoints.settle(wait=True)
    means = averages(group.actors[0].target.engine)  # type: ignore[attr-defined]
    made = export(tmp_path, tmp_path / "out", average=True, dtype="bfloat16")
    found = dict(AutoModelForCausalLM.from_pretrained(made, dtype="auto").named_parameters())
    assert same(found, {key: tensor.bfloat16() for key, tensor in means.items()})
