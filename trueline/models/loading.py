"""Check Hugging Face models and tokenizers before anything expensive starts, then load them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig
from trueline.data.chat import ChatFormat
from trueline.data.sources import first_line, hub_name, try_hub
from trueline.models import vision
from trueline.models.suitability import GGUF, check_folder, check_kind, read_header, unpackable

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CLASSES = {  # kind of head -> class of transformers
    "language": "AutoModelForCausalLM",
    "reward": "AutoModelForSequenceClassification",
    "value": "AutoModelForSequenceClassification",
    "steps": "AutoModelForTokenClassification",
}
HEADS = ("score", "classifier")  # names of scoring layers
LABELS = {"reward": 1, "value": 1, "steps": 2}
THREADS = "HF_DEACTIVATE_ASYNC_LOAD"  # makes Transformers read weights one after the other
SHAPE = ("num_attention_heads", "hidden_size", "num_hidden_layers", "vocab_size")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names in configurations
DAMAGED = "copy or download it again, or name another model"
WHOLE = ("architectures", "quantization_config", "is_encoder_decoder")  # keys of a model, not of its text part
PAPER = "shape:"  # prefix of model.path: a name of this table, or a model of which only config.json is read
ATTENTION_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
KEYS = (*ATTENTION_KEYS, "intermediate_size", "vocab_size", "tie_word_embeddings", "max_position_embeddings")
# From published files config.json: SmolLM2, Llama 3.1 (8b, 70b, 405b) and 3.2 (1b, 3b), Qwen 2.5 (Instruct) and 3.
SHAPES = {
    "smollm2-135m": (576, 30, 9, 3, 64, 1536, 49152, True, 8192),
    "llama-1b": (2048, 16, 32, 8, 64, 8192, 128256, True, 131072),
    "llama-3b": (3072, 28, 24, 8, 128, 8192, 128256, True, 131072),
    "llama-8b": (4096, 32, 32, 8, 128, 14336, 128256, False, 131072),
    "llama-70b": (8192, 80, 64, 8, 128, 28672, 128256, False, 131072),
    "llama-405b": (16384, 126, 128, 8, 128, 53248, 128256, False, 131072),
    "qwen2.5-0.5b": (896, 24, 14, 2, 64, 4864, 151936, True, 32768),
    "qwen2.5-1.5b": (1536, 28, 12, 2, 128, 8960, 151936, True, 32768),
    "qwen2.5-3b": (2048, 36, 16, 2, 128, 11008, 151936, True, 32768),
    "qwen2.5-7b": (3584, 28, 28, 4, 128, 18944, 152064, False, 32768),
    "qwen2.5-14b": (5120, 48, 40, 8, 128, 13824, 152064, False, 32768),
    "qwen2.5-32b": (5120, 64, 40, 8, 128, 27648, 152064, False, 32768),
    "qwen2.5-72b": (8192, 80, 64, 8, 128, 29568, 152064, False, 32768),
    "qwen3-4b": (2560, 36, 32, 8, 128, 9728, 151936, True, 40960),
    "qwen3-8b": (4096, 36, 32, 8, 128, 12288, 151936, False, 40960),
    "qwen3-32b": (5120, 64, 64, 8, 128, 25600, 151936, False, 40960),
}
KINDS = {"smollm2": "llama", "llama": "llama", "qwen2.5": "qwen2", "qwen3": "qwen3"}  # model_type by family
RESCALED_LOGITS = (  # not supported by the chunked head
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "logits_soft_cap",
    "output_logit_soft_cap",
    "lm_head_multiplier",
)


class ShareOut(Protocol):
    """How ranks divide a model while one of them reads it; all of them make the same calls."""

    reads: bool  # this rank reads the weights, and hands them to the others

    def shard(self, parameter: nn.Parameter) -> None:
        """Keep this rank's part of what the reading rank has, unless that is done already."""

    def hand_out(self, tensor: Tensor) -> None:
        """Copy what the reading rank has to all ranks."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of a model without loading it."""

    parameters: int
    context: int
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    hidden_size: int
    layers: int
    intermediate_size: int  # of the MLP, or of all experts of one token
    experts: int = 0  # in a layer; 0: a dense model
    expert_parameters: int = 0  # of all experts in all layers
    balanced: bool = False  # transformers has its router auxiliary loss
    kind: str = ""  # model_type of its configuration
    unpackable: str = ""  # why its sequences cannot be packed
    family: str = ""  # model_type of the whole, if it has a vision tower
    tower: vision.Tower = vision.Tower()

    def adapter_elements(self) -> int:
        """Count the elements of adapters of rank 1 on all matrices of all layers."""
        ends = 7 * self.hidden_size + 3 * self.intermediate_size + 2 * (self.heads + self.key_heads) * self.head_size
        return self.layers * ends


def check_model(
    config: ModelConfig, head: str = "language", *, quantized: bool = False, key: str = "model.path"
) -> ModelFacts:
    """Refuse a model that does not work with this head; `quantized` ones work if only engines load them."""
    if not config.path:
        raise ConfigError("model.path is empty: name a model, e.g. --model path/to/folder")
    name, named = config.path.removeprefix(PAPER), f"{key}={config.path}"
    folder = Path(name).expanduser()
    if config.path.startswith(PAPER):
        is_real = name not in SHAPES and (hub_name(name) or folder.is_dir())
        settings = load_settings(config.with_keys({"path": name})) if is_real else shape_settings(name)
        return check_settings(config, folder, settings)
    if folder.suffix == ".gguf":
        raise ConfigError(f"{named}: {GGUF}")
    if folder.is_file():
        raise ConfigError(f"{named} is a file: name the model folder, such as {folder.parent}")
    if folder.is_dir():
        check_folder(folder)
    elif not hub_name(config.path):
        raise ConfigError(f"{named}: no such folder or run in {Path.cwd()}; hub models are named owner/name")
    else:
        try_hub()
    settings = load_settings(config)
    check_kind(named, settings, head)
    vision.check_vision(named, config, settings["family"])
    if not quantized and (found := settings.get("quantization_config")):  # no gradients, and no exact copy in engines
        method = dict(found).get("quant_method", "some way")
        raise ConfigError(
            f"{named}: its weights are quantised ({method}), so it can be sampled (rollout.engine=vllm) but not "
            "trained: name the original model; model.lora.quantize=true keeps that in 4 bits"
        )
    if config.lora.rank:
        from trueline.models.lora import check_targets  # noqa: PLC0415  (it imports this module)

        check_targets(config, head)
    return check_settings(config, folder, settings)


def check_settings(config: ModelConfig, folder: Path, settings: dict[str, Any]) -> ModelFacts:
    if rescaled := [name for name in RESCALED_LOGITS if settings.get(name) not in (None, 1, 1.0)]:
        raise ConfigError(
            f"model.path={config.path}: its config.json rescales logits ({rescaled[0]}), which is not supported: "
            "choose another model"
        )
    if missing := [name for name in SHAPE if name not in settings]:
        raise ConfigError(f"model.path={config.path}: its config.json has no {missing[0]}: choose a decoder")
    heads, hidden, layers, vocabulary = (settings[name] for name in SHAPE)
    key_heads, head_size = settings.get("num_key_value_heads") or heads, settings.get("head_dim") or hidden // heads
    size = settings.get("moe_intermediate_size") or settings.get("intermediate_size") or 4 * hidden
    experts = next((settings[name] for name in EXPERTS if settings.get(name)), 0)
    entries = {name: entry for file in folder.glob("*.safetensors") for name, entry in read_header(file).items()}
    sizes = {name: torch.Size(entry["shape"]).numel() for name, entry in entries.items()}
    family, in_layer = settings.get("family", ""), 3 * hidden * size * max(experts, 1)  # gated MLPs
    tower = vision.count_tower(settings.get("tower", vision.Tower()), family, sizes)
    if sizes:
        parameters = sum(sizes.values())
        in_experts = sum(count for name, count in sizes.items() if ".experts." in name)
    else:  # from the shape
        in_experts = layers * in_layer if experts else 0
        layer = 2 * hidden * head_size * (heads + key_heads) + in_layer + 2 * hidden
        tables = 1 if settings.get("tie_word_embeddings") else 2
        parameters = int(layers * layer + tables * vocabulary * hidden) + tower.parameters
    return ModelFacts(
        parameters=parameters,
        context=settings.get("max_position_embeddings") or 2048,
        heads=heads,
        key_heads=key_heads,
        head_size=head_size,
        vocabulary=vocabulary,
        hidden_size=hidden,
        layers=layers,
        intermediate_size=int(size * (settings.get("num_experts_per_tok") or 1)),
        experts=experts,
        expert_parameters=in_experts,
        balanced=experts > 0 and "router_aux_loss_coef" in settings,
        kind=settings.get("model_type") or "",
        unpackable=unpackable(settings),
        family=family,
        tower=tower,
    )


def shape_settings(name: str) -> dict[str, Any]:
    """Return a shape of the table as keys of config.json."""
    if name not in SHAPES:
        raise ConfigError(f"--model-shape {name} is unknown: choose from {', '.join(SHAPES)}, or use --model FOLDER")
    return dict(zip(KEYS, SHAPES[name], strict=True)) | {"model_type": KINDS[name.partition("-")[0]]}


def load_settings(config: ModelConfig) -> dict[str, Any]:
    from huggingface_hub.errors import StrictDataclassError  # noqa: PLC0415
    from transformers import AutoConfig  # noqa: PLC0415

    try:
        loaded = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, StrictDataclassError) as error:
        names_value = isinstance(error, StrictDataclassError)  # in its second line
        problem = " ".join(str(error).split()) if names_value else first_line(error)
        raise ConfigError(f"model.path={config.path}: cannot be opened ({problem}); {remedy(error, config)}") from error
    text = loaded.get_text_config()
    # Some architectures have other names (n_head, n_embd); the object maps them to the common ones.
    settings, whole = dict(text.to_dict()), loaded.to_dict()
    common = {common: settings[own] for common, own in text.attribute_map.items() if own in settings}
    own = {key: whole[key] for key in WHOLE if key in whole}
    seen = {"family": vision.family_of(loaded), "tower": vision.tower_of(loaded)}
    return settings | common | own | seen | {"num_labels": loaded.num_labels}


def remedy(error: Exception, config: ModelConfig) -> str:
    """Suggest how to fix a configuration that Transformers cannot read."""
    if "trust_remote_code" in str(error) and not config.trust_remote_code:
        return "set model.trust_remote_code=true if you trust its authors: their Python code would run here"
    if "does not recognize this architecture" in str(error):
        return "install a newer transformers, or choose another model"
    if Path(config.path).expanduser().is_dir():
        return "save or download its config.json again"
    return "name a model folder, or a hub model that can be reached"


def load_tokenizer(config: ModelConfig) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={config.path}: cannot load its tokenizer ({first_line(error)})") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.path={config.path}: its tokenizer has no end-of-sequence token: set eos_token in "
            "tokenizer_config.json"
        )
    return tokenizer


def load_chat(config: ModelConfig, template: str, arguments: dict[str, Any] | None = None) -> ChatFormat:
    """Load a tokenizer's chat format; `template` is data.chat_template, `arguments` data.chat_template_kwargs."""
    tokenizer, processor = load_tokenizer(config), vision.load_vision(config)
    if processor is not None and processor.processor.chat_template:  # which shows pictures; a tokenizer's may not
        tokenizer.chat_template = processor.processor.chat_template
    if template not in ("auto", "never"):
        try:
            tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"data.chat_template={template}: cannot be read ({error}); name a Jinja file") from None
    if arguments and (template == "never" or not tokenizer.chat_template):
        raise ConfigError(
            f"data.chat_template_kwargs={arguments}: there is no chat template to read them: remove them, or set "
            "data.chat_template=FILE"
        )
    chat = ChatFormat(tokenizer, template != "never", generation_ends(config), arguments)
    chat.vision = processor
    return chat


def generation_ends(config: ModelConfig) -> list[int]:
    """Return the tokens of the generation config that end a completion."""
    from transformers import GenerationConfig  # noqa: PLC0415

    try:
        ends = GenerationConfig.from_pretrained(config.path).eos_token_id
    except OSError:
        return []
    return ends if isinstance(ends, list) else [ends] * (ends is not None)


def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    head: str = "language",
    *,
    packed: bool = False,
    share_out: ShareOut | None = None,
) -> Any:
    """Load the model without dropout, so that scoring and training agree; `share_out` gets weights as they are read."""
    from transformers import AutoConfig  # noqa: PLC0415

    from trueline.models import attention, lora  # noqa: PLC0415  (transformers and peft take seconds to import)

    settings = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    turn_off_dropout(settings)
    if head != "language":
        settings.num_labels = LABELS[head]
        settings.pad_token_id = padding_token(load_tokenizer(config))
    kind, plain = auto_class(settings, head), None if config.attention == "auto" else config.attention
    try:
        with nullcontext() if share_out is None else one_by_one(share_out):
            model, found = kind.from_pretrained(
                config.path,
                config=settings,
                output_loading_info=True,
                dtype=dtype,
                attn_implementation=vision.with_tower(attention.NAME, settings) if packed else plain,
                trust_remote_code=config.trust_remote_code,
                use_safetensors=True,
                quantization_config=lora.quantization(dtype) if config.lora.quantize else None,
            )
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"model.path={config.path}: its weights cannot be read ({error}): {DAMAGED}") from error
    except (ValueError, KeyError) as error:
        remedy = "; set training.packing=false" if attention.NAME in str(error) else ""
        raise ConfigError(f"model.path={config.path}: cannot be loaded as {kind.__name__}: {error}{remedy}") from error
    lost = [name for name in found["missing_keys"] if head == "language" or name.partition(".")[0] not in HEADS]
    if lost:  # they would be random, which only a new scoring head may be
        raise ConfigError(
            f"model.path={config.path}: its files lack {len(lost)} of the model's tensors, such as {min(lost)}, which "
            "would be random: name a folder with all weights"
        )
    if head == "value" and not str(settings.architectures).endswith("ForSequenceClassification']"):
        torch.nn.init.zeros_(scoring_head(model)[1].weight)  # a new critic predicts zero, not noise
    vision.freeze(model, config.train_vision)
    if config.lora.quantize:
        lora.keep_gradients(model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def fits_whole(model: Any, device: torch.device, parts: int) -> bool:
    """Tell whether the whole model fits on the device, before ranks take parts of its layers."""
    if device.type == "cpu" or parts == 1:
        return True
    return sum(tensor.nbytes for tensor in model.parameters()) < torch.cuda.mem_get_info(device)[0] / 2  # type: ignore[no-any-return]


def auto_class(settings: Any, head: str) -> Any:
    """Return the class of Transformers that loads a model with this head."""
    import transformers  # noqa: PLC0415

    reads_pictures = settings.model_type in vision.VISION_FAMILIES
    kind = getattr(transformers, vision.CLASS if reads_pictures and head == "language" else CLASSES[head])
    if reads_pictures and head != "language":
        vision.register_scorer(kind, settings)
    return kind


def turn_off_dropout(settings: Any) -> None:
    for name, value in settings.to_dict().items():
        if isinstance(value, float) and ("dropout" in name or "jitter" in name or name.endswith("pdrop")):
            setattr(settings, name, 0.0)
    if settings.model_type in vision.VISION_FAMILIES:
        for part in (settings.text_config, settings.vision_config):
            turn_off_dropout(part)


@contextmanager
def one_by_one(share_out: ShareOut) -> Iterator[None]:
    """Let `from_pretrained` read, on one rank, and convert one weight at a time, and share it out at once.

    Transformers 5 has no hook for this. Tied weights, which it still compares, and scoring heads, which may be zeroed,
    stay whole for the caller to share out; so do buffers.
    """
    from transformers import core_model_loading  # noqa: PLC0415

    loader: Any = core_model_loading
    place, read = loader.set_param_for_module, loader._materialize_copy

    def read_or_make_room(stored: Any, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        if share_out.reads or dtype is None or isinstance(stored, Tensor):
            return read(stored, device, dtype)
        return torch.empty(stored.get_shape(), dtype=dtype, device=device)

    def place_and_share(model: Any, name: str, *rest: Any, **named: Any) -> None:
        place(model, name, *rest, **named)
        tied = model.all_tied_weights_keys
        layer, _, leaf = name.rpartition(".")
        module = model.get_submodule(layer)
        parameter, buffer = module._parameters.get(leaf), module._buffers.get(leaf)
        if buffer is not None:
            share_out.hand_out(buffer)
        elif parameter is None or parameter.is_meta:
            return
        elif layer in HEADS or name in tied or name in tied.values():
            share_out.hand_out(parameter.data)
        else:
            share_out.shard(parameter)

    threads = os.environ.pop(THREADS, None)
    loader.set_param_for_module, loader._materialize_copy = place_and_share, read_or_make_room
    os.environ[THREADS] = "1"
    try:
        yield
    finally:
        loader.set_param_for_module, loader._materialize_copy = place, read
        del os.environ[THREADS]
        os.environ.update({} if threads is None else {THREADS: threads})


def shape_of(parameter: Any) -> tuple[int, ...]:
    """Return the shape of a whole parameter, of which this rank may have only a part (ZeRO 3)."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def scoring_head(model: Any) -> tuple[str, Any]:
    """Return the name of the scoring layer, and the layer."""
    layers = dict(model.named_children())
    for name in HEADS:
        if name in layers:
            return name, layers[name]
    raise ConfigError(f"{type(model).__name__} has no layer named score or classifier: choose another model")


def padding_token(tokenizer: Any) -> int:
    """Choose a token other than the end token: transformers reads a score at the last token that is not padding."""
    end = tokenizer.eos_token_id
    known = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, 0, 1]
    return next(int(token) for token in known if token is not None and token != end)
