"""Models that read pictures: which families train here, their processor, and the pixels of a forward pass."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig
from trueline.data.pictures import Picture, Pictures, PictureTokens, blank_picture
from trueline.data.sources import first_line
from trueline.data.types import to_device

CLASS = "AutoModelForImageTextToText"
# Of a processor's output, not for the tower.
TEXT_FIELDS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "num_crops"}
PARTS = ("tower", "projector")
VIDEOS = "video_processor"  # a part of some processors
TOKEN_KEYS = ("image_token_id", "image_token_index")  # of configurations
GRIDS = "image_grid_thw"  # patches of each picture in time, height and width, where positions have three dimensions
MROPE = "positions in three dimensions (M-RoPE) that were not tried here"
BOTH_WAYS = "attention in both directions among the tokens of a picture"
OBSTACLES = {  # family -> what it has that training here does not
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), MROPE),
    **dict.fromkeys(("gemma3n", "gemma4", "paligemma"), BOTH_WAYS),
}


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of a family are laid out; names are prefixes of their parameters."""

    tower: str  # reads pixels
    projector: tuple[str, ...]  # makes embeddings of what the tower finds; may be a part of it
    axis: int  # of pixel arrays, along which pictures lie
    spatial: bool = False  # positions have three dimensions (M-RoPE)
    two_way: bool = False  # the tokens of a picture see each other

    def part(self, name: str) -> str:
        """Return of what a parameter is: the projector, the tower, or the language model (empty).

        In files, names may lack the first word.
        """
        whole = name if name.startswith("model.") else f"model.{name}"
        return "projector" if whole.startswith(self.projector) else "tower" if whole.startswith(self.tower) else ""


@dataclass(frozen=True, slots=True)
class Tower:
    """What is known of a vision tower without loading it; all of it is zero in models of text."""

    hidden_size: int = 0
    intermediate_size: int = 0
    layers: int = 0
    patches: int = 0  # that become one token
    parameters: int = 0
    projector: int = 0  # parameters

    def frozen(self, trained: str) -> int:
        """Count the parameters that are not trained; `trained` is model.train_vision."""
        return {"none": self.parameters + self.projector, "projector": self.parameters, "all": 0}[trained]

    def activations(self, tokens: float, kept: str) -> float:
        """Count the numbers of a pass whose tokens are all of pictures: of the current layer, and what is kept."""
        one = 12 * self.hidden_size + 4 * self.intermediate_size  # as in a layer of a language model
        each = {"nothing": 0, "inputs": 2 * self.hidden_size, "layers": one}[kept]
        return tokens * self.patches * (self.layers * each + 2 * one)


def tower_of(settings: Any) -> Tower:
    """Return what a configuration says of its tower."""
    if family_of(settings) not in VISION_FAMILIES:
        return Tower()
    vision, whole = settings.vision_config.to_dict(), settings.to_dict()
    hidden = vision.get("embed_dim") or vision["hidden_size"]  # Qwen2-VL has the language model's in the second
    inner = vision.get("intermediate_size") or int(hidden * vision.get("mlp_ratio", 4))
    layers = vision.get("depth") or vision["num_hidden_layers"]
    patches = (vision.get("spatial_merge_size") or whole.get("scale_factor") or 1) ** 2
    if "mm_tokens_per_image" in whole:
        patches = (vision["image_size"] // vision["patch_size"]) ** 2 // whole["mm_tokens_per_image"]
    return Tower(hidden, inner, layers, patches, layers * hidden * (4 * hidden + 3 * inner))


def count_tower(tower: Tower, family: str, sizes: dict[str, int]) -> Tower:
    """Count parameters exactly, by the sizes of all tensors in a model's files."""
    if family not in VISION_FAMILIES or not sizes:
        return tower
    parts = [VISION_FAMILIES[family].part(name) for name in sizes]
    counts = {part: sum(size for one, size in zip(parts, sizes.values(), strict=True) if one == part) for part in PARTS}
    return replace(tower, parameters=counts["tower"], projector=counts["projector"])


MERGERS = ("model.visual.merger.", "model.visual.deepstack_merger_list.")
VISION_FAMILIES = {  # by model_type in config.json
    **dict.fromkeys(("idefics3", "smolvlm"), Family("model.vision_model.", ("model.connector.",), axis=1)),
    "llava": Family("model.vision_tower.", ("model.multi_modal_projector.",), axis=0),
    "gemma3": Family("model.vision_tower.", ("model.multi_modal_projector.",), axis=0, two_way=True),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"),
        Family("model.visual.", MERGERS, axis=0, spatial=True),
    ),
}


def family_of(settings: Any) -> str:
    """Return the model_type of a configuration with a vision tower; empty for models of text."""
    return str(settings.model_type) if "vision_config" in settings.to_dict() else ""


def blindness(family: str) -> str:
    """Say why a model cannot be trained on pictures; empty if it can."""
    if not family:
        return "reads only text"
    known = OBSTACLES.get(family, "a layout of pixels that is not known here")
    return "" if family in VISION_FAMILIES else f"is of the family {family}, which has {known}"


def check_vision(named: str, config: ModelConfig, family: str) -> None:
    """Refuse what cannot be trained of a model with a vision tower, or asks for one that is not there."""
    if config.train_vision != "none" and family not in VISION_FAMILIES:
        raise ConfigError(
            f"model.train_vision={config.train_vision}: {named} {blindness(family)}: leave it out",
            key="model.train_vision",
        )
    if family not in VISION_FAMILIES:
        return
    refused = {
        f"model.tensor_parallel={config.tensor_parallel}": config.tensor_parallel > 1,
        f"model.context_parallel={config.context_parallel}": config.context_parallel > 1,
        "model.lora.quantize=true": config.lora.quantize,
        f"model.train_vision=projector with model.lora.rank={config.lora.rank} (adapters are on none or all of it)": (
            config.lora.rank > 0 and config.train_vision == "projector"
        ),
    }
    for key in (key for key, holds in refused.items() if holds):
        raise ConfigError(f"{key} does not work with a vision-language model ({named}): leave it out", key=key)


def with_tower(attention: str, settings: Any) -> str | dict[str, str]:
    """Return an implementation of attention for the language model; a tower, which reads no text, has its own."""
    pictured = settings.model_type in VISION_FAMILIES
    return {"text_config": attention, "vision_config": "sdpa"} if pictured else attention


def freeze(model: Any, trained: str) -> None:
    """Freeze the vision tower, and the projector too if `trained` is none."""
    if (family := VISION_FAMILIES.get(model.config.model_type)) is None:
        return
    frozen = {"none": PARTS, "projector": PARTS[:1], "all": ()}[trained]
    for name, parameter in model.named_parameters():
        if family.part(name) in frozen:
            parameter.requires_grad_(False)


def frozen_layers(model: Any) -> list[str]:
    """Return patterns of all layers of tower and projector, if these are frozen."""
    family = VISION_FAMILIES.get(model.config.model_type)
    if family is None or all(one.requires_grad for name, one in model.named_parameters() if family.part(name)):
        return []
    return [re.escape(prefix) + ".*" for prefix in (family.tower, *family.projector)]


def register_scorer(kind: Any, settings: Any) -> None:
    """Let a class of Transformers load scoring models of a vision-language family, for most of which it has none.

    They are made as its own are, so a name in config.json tells their head, and files have the names of the family.
    """
    from transformers import conversion_mapping, modeling_layers  # noqa: PLC0415
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING  # noqa: PLC0415

    speaking: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(settings)]
    ending = kind.__name__.removeprefix("AutoModel")
    name = speaking.__name__.replace("ForConditionalGeneration", ending)
    parents = vars(modeling_layers)[f"Generic{ending}"], speaking.__bases__[0]
    kind.register(type(settings), type(name, parents, {"__module__": speaking.__module__}), exist_ok=True)
    if (renamed := conversion_mapping.get_checkpoint_conversion_mapping(speaking.__name__)) is not None:
        conversion_mapping.register_checkpoint_conversion_mapping(name, renamed, overwrite=True)


class Vision(PictureTokens):
    """A model's processor: the tokens of texts with pictures, and the arrays that its forward pass takes."""

    def __init__(self, processor: Any, family: Family, token: int) -> None:
        self.processor, self.family, self.token = processor, family, token  # of each part of a picture
        self.placeholder = str(processor.image_token)

    def tokens(self, text: str, pictures: Sequence[Picture]) -> list[int]:
        return [int(token) for token in self._process(text, pictures)["input_ids"][0]]

    def _process(self, text: str, pictures: Sequence[Picture]) -> Any:
        images = [picture.decode() for picture in pictures]
        try:
            return self.processor(text=[text], images=[images], add_special_tokens=False, return_tensors="np")
        except ValueError as error:  # such as of a picture that is only a line
            raise ConfigError(f"the model's processor refuses its pictures ({error}): replace or delete them") from None

    def arrays(self, sequences: Sequence[Pictures]) -> dict[str, np.ndarray]:
        """Return the arrays of all pictures of a pass, in its order; the same pictures are processed once."""
        distinct = {pictures: self._arrays(pictures) for pictures in sequences if pictures}
        parts = [distinct[pictures] for pictures in sequences if pictures]
        return {name: join([part[name] for part in parts], self.family.axis) for name in parts[0]}

    def _arrays(self, pictures: Pictures) -> dict[str, np.ndarray]:
        found = self._process(self.placeholder * len(pictures), pictures)
        return {name: array for name, array in found.items() if name not in TEXT_FIELDS}

    def pixels(self, sequences: Sequence[Pictures], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Return the arguments of a model's forward pass."""
        tensors = {name: torch.from_numpy(array) for name, array in self.arrays(sequences).items()}
        return {
            name: to_device(one.to(dtype) if one.is_floating_point() else one, device) for name, one in tensors.items()
        }

    def places(
        self, backbone: Any, tokens: Tensor, lengths: list[int], pictures: Sequence[Pictures], grids: Tensor
    ) -> Tensor:
        """Return positions [N, 3] as the model gives each sequence by itself; grids are [pictures, 3]."""
        found, shown = [], grids.cpu().split([len(one) for one in pictures])
        for sequence, own in zip(tokens.cpu().split(lengths), shown, strict=True):
            kinds = (sequence == self.token).int()
            found.append(backbone.get_rope_index(sequence[None], kinds[None], image_grid_thw=own)[0][:, 0])
        return to_device(torch.cat(found, 1).T, tokens.device)

    def inputs(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        """Return what the model reads: an image token that ends a sequence was sampled, and shows no picture."""
        last = to_device(torch.tensor(lengths).cumsum(0) - 1, tokens.device)
        ends, another = tokens[last], (self.token + 1) % len(self.processor.tokenizer)
        return tokens.index_copy(0, last, ends.where(ends != self.token, another))

    def add_blank(
        self, tokens: Tensor, mask: Tensor, lengths: list[int]
    ) -> tuple[Tensor, Tensor, list[int], list[Pictures]]:
        """Add a sequence with a black picture, of which nothing is learned, to a pass without pictures.

        Ranks gather the tower's weights and reduce its gradients together, also if only some have pictures.
        """
        picture, added = self._blank
        return (
            torch.cat([tokens, to_device(torch.tensor(added), tokens.device)]),
            torch.cat([mask, torch.zeros(len(added), dtype=torch.bool)]),
            [*lengths, len(added)],
            [*(() for _ in lengths), (picture,)],
        )

    @cached_property
    def _blank(self) -> tuple[Picture, list[int]]:
        picture = blank_picture()
        return picture, self.tokens(self.placeholder, [picture])


def picture_tokens(settings: Any) -> list[int]:
    """Return the tokens that stand for parts of pictures, by a model's configuration."""
    return [value for name, value in settings.to_dict().items() if name in TOKEN_KEYS and isinstance(value, int)]


def join(arrays: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Concatenate arrays; along other axes they are filled with zeros up to the largest, as processors do."""
    largest = [max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True)]
    largest[axis] = 0
    widths = [[(0, max(most - size, 0)) for size, most in zip(one.shape, largest, strict=True)] for one in arrays]
    return np.concatenate([np.pad(one, width) for one, width in zip(arrays, widths, strict=True)], axis)


def load_vision(config: ModelConfig) -> Vision | None:
    """Load the processor of a model that reads pictures; None for other models."""
    from transformers import AutoConfig, ProcessorMixin  # noqa: PLC0415

    settings = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    kind = family_of(settings)
    if kind not in VISION_FAMILIES:
        return None
    try:
        processor = load_processor(config, kind)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"model.path={config.path}: cannot load its processor ({first_line(error)})") from error
    if not isinstance(processor, ProcessorMixin):
        raise ConfigError(f"model.path={config.path}: no processor (processor_config.json): save it in the folder")
    return Vision(processor, VISION_FAMILIES[kind], picture_tokens(settings)[0])


def load_processor(config: ModelConfig, kind: str) -> Any:
    """Load a processor, without its part for videos if that would need torchvision, which is not installed.

    Transformers makes no processor with a part left out: a class that knows no such part does. Its settings are kept
    for the files of checkpoints.
    """
    import transformers  # noqa: PLC0415
    from transformers import AutoProcessor  # noqa: PLC0415  (it completes the table)
    from transformers.models.auto.auto_mappings import PROCESSOR_MAPPING_NAMES  # noqa: PLC0415
    from transformers.utils.import_utils import is_torchvision_available  # noqa: PLC0415

    whole: Any = getattr(transformers, PROCESSOR_MAPPING_NAMES[kind])
    parts = whole.get_attributes()
    if VIDEOS not in parts or is_torchvision_available():
        return AutoProcessor.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    fewer = [part for part in parts if part != VIDEOS]
    processor: Any = type(whole.__name__, (whole,), {"get_attributes": classmethod(lambda _: fewer)})
    processor = processor.from_pretrained(config.path)
    setattr(processor, VIDEOS, video_settings(config.path))
    return processor


def video_settings(path: str) -> Any:
    """Return a model's settings for videos, from the first file that has them, as Transformers finds them."""
    from transformers.utils.hub import cached_file  # noqa: PLC0415

    for name in ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json"):
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        settings = json.loads(Path(file).read_text(encoding="utf-8")) if file else {}
        if found := settings.get(VIDEOS) if name == "processor_config.json" else settings:
            return found
    return {}
