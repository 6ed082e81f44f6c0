"""Export a checkpoint as a Hugging Face folder."""

import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig
from trueline.config.run import CheckpointConfig
from trueline.files import UNFINISHED
from trueline.models.loading import DTYPES, load_model, load_tokenizer
from trueline.models.lora import ADAPTER, SETTINGS, load_adapter, merged_model, save_adapter
from trueline.models.weight_names import Named, WeightNames, described_model
from trueline.monitoring.run_folder import RUNS, RunFolder
from trueline.training.checkpoints import MANIFEST, Checkpoints, save_tensors
from trueline.training.engines.engine import AVERAGE
from trueline.training.saving import FIXED, FORMAT, INDEX, MODEL, SavedState, shard_name, write_index

ENDINGS = {"reward": "ForSequenceClassification", "steps": "ForTokenClassification"}  # of architectures, by head
FILE_BYTES = 4 * 2**30  # of weights in a file


def export(source: Path, target: Path, *, merge: bool = False, average: bool = False, dtype: str | None = None) -> Path:
    checkpoint = find_checkpoint(source)
    if target.exists():
        raise ConfigError(f"{target} exists: name a new folder")
    Checkpoints(checkpoint.parent.parent, CheckpointConfig()).read_state(checkpoint)  # checks every file
    averages: dict[str, Tensor] = {}
    if average:
        saved = SavedState(checkpoint)
        keys = {name: parts[AVERAGE] for name, parts in saved.by_name().items() if AVERAGE in parts}
        averages = {name: saved.read(key) for name, key in keys.items()}
    if average and not averages:
        raise ConfigError(f"{checkpoint} has no moving average (training.ema_decay=0): leave out --average")
    adapted = (checkpoint / "model" / ADAPTER).is_file()
    if merge and not adapted:
        raise ConfigError(f"{checkpoint} has no adapter (model.lora.rank=0) to merge: leave out --merge")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{target.parent} is not a folder and cannot be created ({error.strerror})"
        raise ConfigError(f"{target}: cannot be written, because {why}: name another folder") from error
    temporary = target.with_name(target.name + UNFINISHED)
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(checkpoint / "model", temporary)
    if not any(temporary.glob("*.safetensors")):
        write_masters(checkpoint, temporary)
    write = write_merged if merge else write_adapter if adapted else write_weights
    write(temporary, averages, DTYPES[dtype] if dtype else None)
    temporary.rename(target)
    return target


def find_checkpoint(source: Path) -> Path:
    """Return the checkpoint itself, or the newest one of a run, given by its folder or by its name below runs/."""
    if not (named := [place for place in (source, RUNS / source) if place.is_dir()]):
        raise ConfigError(f"{source}: neither it nor {RUNS / source} is a folder: name a run or a checkpoint")
    inside = [one for one in (named[0], named[0].parent) if (one / MANIFEST).is_file()]
    if inside:  # a checkpoint, or the model in one
        return inside[0]
    parent = RunFolder(named[0].parent)
    run = parent.path if named[0] == parent.checkpoints else RunFolder(named[0]).training_folder()
    if (newest := Checkpoints(run, CheckpointConfig()).newest()) is None:
        raise ConfigError(f"{source}: neither a checkpoint nor the folder of a run with checkpoints: name one of these")
    return newest


def write_weights(folder: Path, averages: dict[str, Tensor], dtype: torch.dtype | None) -> None:
    if not averages and dtype is None:
        return  # the copied files are enough
    averages = {name: tensor.clone() for name, tensor in on_disk(folder, iter(averages.items()))}
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        weights |= {name: averages[name].to(tensor.dtype) for name, tensor in weights.items() if name in averages}
        save_tensors(file, {name: tensor.to(dtype or tensor.dtype) for name, tensor in weights.items()}, FORMAT)
    if dtype is not None:
        file = folder / "config.json"
        settings = json.loads(file.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
        file.write_text(json.dumps(settings, indent=2))


def on_disk(folder: Path, weights: Named) -> Named:
    """Convert the trainer's tensors to those of the model's files, for the model that a folder describes."""
    model = described_model(folder)
    return weights if model is None else WeightNames(model).on_disk(weights)


def write_masters(checkpoint: Path, folder: Path) -> None:
    """Write the weights of a training state as a model, one file at a time."""
    saved = SavedState(checkpoint)
    keys = {name: parts["weight"] for name, parts in saved.by_name().items()}
    dtype = DTYPES[json.loads((folder / "config.json").read_text())["dtype"]]
    empty = ((name, torch.empty(saved.shapes[key], dtype=dtype, device="meta")) for name, key in keys.items())
    sizes = {name: tensor.nbytes for name, tensor in on_disk(folder, empty)}
    groups: list[list[str]] = [[]]
    for name, size in sizes.items():
        if groups[-1] and sum(sizes[one] for one in groups[-1]) + size > FILE_BYTES:
            groups.append([])
        groups[-1].append(name)
    weights = on_disk(folder, ((name, saved.read(key).to(dtype)) for name, key in keys.items()))
    fixed = load_file(checkpoint / FIXED) if (checkpoint / FIXED).is_file() else {}
    for number, names in enumerate(groups):
        tensors = {name: tensor.clone() for name, tensor in islice(weights, len(names))}
        save_tensors(folder / Path(shard_name(MODEL, number, len(groups))).name, tensors | fixed, FORMAT)
        names += fixed
        fixed = {}
    if len(groups) > 1:
        owners = {name: number for number, names in enumerate(groups) for name in names}
        write_index(folder / Path(INDEX).name, owners, len(groups))


def open_model(folder: Path, dtype: str | None, *, trust_remote_code: bool) -> tuple[Any, Any]:
    """Load the model that a folder describes, an adapter merged into its base, and its tokenizer."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder: name a run, a checkpoint or a model")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} has no weights: name a model, or write a run's with `trueline export`")
    config = ModelConfig(path=str(folder), trust_remote_code=trust_remote_code)
    wanted, tokenizer = DTYPES[dtype] if dtype else None, load_tokenizer(config)
    if (folder / ADAPTER).is_file():
        return merged_model(folder, wanted).eval(), tokenizer
    described = json.loads((folder / "config.json").read_text())
    kinds = (head for head, ending in ENDINGS.items() if str(described["architectures"][0]).endswith(ending))
    stored = DTYPES[described.get("dtype") or "float32"]
    return load_model(config, wanted or stored, next(kinds, "language")).eval(), tokenizer


def write_adapter(folder: Path, averages: dict[str, Tensor], dtype: torch.dtype | None) -> None:
    tensors, described = load_adapter(folder)
    tensors |= averages
    save_adapter(folder, described, {name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()})


def write_merged(folder: Path, averages: dict[str, Tensor], dtype: torch.dtype | None) -> None:
    write_adapter(folder, averages, None)
    model = merged_model(folder, dtype)
    for name in (ADAPTER, "adapter_config.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / SETTINGS)
    model.save_pretrained(folder)
