"""Refuse models that do not fit their role, by their files and config.json."""

import json
import struct
from pathlib import Path
from typing import Any

from trueline.config.base import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
SCORERS = {  # ending of an architecture -> what such a model is, the heads that can start from it, their labels
    "ForSequenceClassification": ("a reward model or classifier", ("reward", "value"), 1),
    "ForTokenClassification": ("a process reward model or token classifier", ("steps",), 2),
}
LANGUAGE_HEADS = ("ForCausalLM", "LMHeadModel", "WithLMHead")
SINKS = ("gpt_oss",)  # model types whose attention has sinks
ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
POINTER = b"version https://git-lfs"
INDEX, MANIFEST = "model.safetensors.index.json", "manifest.json"
GGUF = "GGUF weights are for llama.cpp: name the model that they were converted from"


def check_folder(folder: Path) -> None:
    named, checkpoint = f"model.path={folder}", folder.parent / MANIFEST
    if not (folder / "config.json").is_file():
        remedy = "name a folder that `save_pretrained` wrote, or a run with a checkpoint"
        if (folder / "adapter_config.json").is_file():
            remedy = (
                "it contains only a LoRA adapter: merge it with `trueline export RUN FOLDER --merge` or peft's "
                "merge_and_unload, and name that folder"
            )
        raise ConfigError(f"{named}: no config.json, so this is not a Hugging Face model: {remedy}")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"{named}: no tokenizer ({', '.join(TOKENIZER_FILES)}): save one in the folder")
    try:
        listed = json.loads((folder / INDEX).read_text())["weight_map"].values() if (folder / INDEX).is_file() else []
    except (ValueError, KeyError, AttributeError):
        raise ConfigError(f"{named}: {INDEX} is damaged: download it again") from None
    if checkpoint.is_file():
        saved = json.loads(checkpoint.read_text())
        listed = [*listed, *(name.removeprefix("model/") for name in saved if name.startswith("model/"))]
    files = {name for name in listed if name.endswith(".safetensors")}
    if missing := sorted(name for name in files if not (folder / name).is_file()):
        raise ConfigError(
            f"{named}: {len(missing)} of {len(files)} weight files are missing, such as {missing[0]}: copy or download "
            "them again, or name another model"
        )
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(f"{named}: {unsafe_weights(folder)}")


def unsafe_weights(folder: Path) -> str:
    """Describe what a folder has instead of safetensors, and the remedy."""
    if (folder.parent / MANIFEST).is_file():
        return (
            "this checkpoint has only the training state (checkpoint.model=last): run `trueline export "
            f"{folder.parent} FOLDER` and name that folder"
        )
    if list(folder.glob("*.gguf")):
        return GGUF
    if pickled := [file.name for ending in ("bin", "pt", "pth") for file in folder.glob(f"*.{ending}")]:
        return (
            f"no .safetensors weights, and {pickled[0]} is not loaded, because unpickling runs code: convert it with "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW) and name the new folder"
        )
    return "no .safetensors weights: download them, or name another folder"


def read_header(file: Path) -> dict[str, Any]:
    """Return a safetensors file's description of its tensors; refuse a damaged file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if (start + stream.read(len(POINTER) - 8)).startswith(POINTER):
            raise ConfigError(f"{file} is a git-lfs pointer: fetch the weights with `git lfs pull`")
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        stream.seek(8)
        try:
            header = json.loads(stream.read(length)) if length <= size - 8 else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise ConfigError(f"{file} is not a safetensors file, or damaged: download it again")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    whole = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if size < whole:
        raise ConfigError(f"{file} has only {size} of its {whole} bytes: download or save it again")
    return tensors


def is_damaged(file: Path) -> bool:
    try:
        read_header(file)
    except ConfigError:
        return True
    return False


def check_kind(named: str, settings: dict[str, Any], head: str) -> None:
    """Refuse a model that is not a language model; a scoring model may train scores."""
    architecture = (settings.get("architectures") or [""])[0]
    if (scorer := next((row for ending, row in SCORERS.items() if architecture.endswith(ending)), None)) is None:
        if what := other_kind(settings, architecture, head):
            model = architecture or settings.get("model_type")
            raise ConfigError(f"{named} is {what} ({model}): name a decoder, such as Qwen3, Llama or SmolLM2")
        return
    what, heads, labels = scorer
    found = settings.get("num_labels", labels)
    is_one = f"{named} is {what} ({architecture} with {found} label{'s' * (found > 1)} in config.json)"
    if head == "language":
        raise ConfigError(
            f"{is_one}, which generates no text: name the model that it was trained from, or use this one as --reward"
        )
    if head not in heads or found != labels:
        raise ConfigError(f"{is_one}, whose head has the wrong shape: name a language model")


def other_kind(settings: dict[str, Any], architecture: str, head: str) -> str:
    """Describe a model that is not a decoder with a language head; empty if it may be one."""
    from transformers.models.auto import modeling_auto  # noqa: PLC0415

    kind, has_language_head = settings.get("model_type", ""), architecture.endswith(LANGUAGE_HEADS)
    known = kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if settings.get("is_encoder_decoder"):
        return "an encoder-decoder, which does not continue a text"
    if kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not has_language_head:
        return "an encoder, which does not continue a text"
    if not known and kind in modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return "a vision model"
    bare = architecture.endswith("Model") and not has_language_head and not settings.get("tie_word_embeddings")
    return "a model without its language head" if bare and head == "language" else ""


def unpackable(settings: dict[str, Any]) -> str:
    """Describe what packed attention does not support in a model, by its config.json; empty if nothing."""
    if settings.get("model_type") in SINKS:
        return "attention sinks"
    other = [kind for kind in settings.get("layer_types") or () if kind not in ATTENTION_LAYERS]
    return f"layers other than attention ({other[0]})" if other else ""
