"""Low-rank adapters: add, merge, switch off and export them."""

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trueline.config.base import ConfigError
from trueline.config.model import LoraConfig, ModelConfig
from trueline.models.loading import HEADS, auto_class, scoring_head, shape_of
from trueline.models.vision import frozen_layers

A, B, BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer."
PEFT_PREFIX, ADAPTER = "base_model.model.", "adapter_model.safetensors"
SETTINGS = "settings"  # folder with the model's config.json; elsewhere peft would take it for a whole model's
EXPERT_LAYERS = ("gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj")  # names of unfused experts
FRACTION_BITS = {"float32": 23, "bfloat16": 7}
DEVIATION = 0.02  # of weights, if they are unknown
TASKS = {"language": "CAUSAL_LM", "reward": "SEQ_CLS", "steps": "TOKEN_CLS"}


def add_lora(model: Any, config: LoraConfig, head: str, path: str) -> Any:
    """Add adapters, freeze all weights but these and a new scoring head, and return peft's configuration."""
    import peft  # noqa: PLC0415  (it imports every quantisation library that is installed)

    targets, without = config.peft_targets(), [*(HEADS if head != "language" else ()), *frozen_layers(model)]
    if targets == "all-linear" and has_fused_experts(model):  # peft 0.21 would take some layers for parts of them
        targets = [name for name in linear_layers(model) if name.rpartition(".")[2] not in EXPERT_LAYERS]
    described = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=targets,
        task_type=TASKS[head],
        base_model_name_or_path=path,
        exclude_modules="|".join(without) or None,
    )
    try:
        peft.inject_adapter_in_model(described, model)
    except ValueError as error:
        raise ConfigError(f"model.lora.targets={config.targets}: {error}") from None
    if head != "language":
        name, layer = scoring_head(model)
        layer.requires_grad_(True)
        described.modules_to_save = [name]  # set afterwards: peft would wrap the layer and change its name
    return described


def has_fused_experts(model: Any) -> bool:
    return any(".experts." in name and len(shape_of(tensor)) == 3 for name, tensor in model.named_parameters())


def check_targets(config: ModelConfig, head: str) -> None:
    """Refuse targets that are not linear layers of the model."""
    import transformers  # noqa: PLC0415

    targets = config.lora.peft_targets()
    if targets == "all-linear":
        return
    trusted = config.trust_remote_code
    settings = transformers.AutoConfig.from_pretrained(config.path, trust_remote_code=trusted)
    with torch.device("meta"):
        model = auto_class(settings, head).from_config(settings, trust_remote_code=trusted)
    layers, linear = dict(list(model.named_modules())[1:]), linear_layers(model)
    known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    for target in [targets] if isinstance(targets, str) else targets:
        found = matching(target, targets, layers)
        expert = [name for name in found if has_fused_experts(model) and name.rpartition(".")[2] in EXPERT_LAYERS]
        wrong = [name for name in found if name not in linear]
        if not found:
            near = difflib.get_close_matches(target, [*known.split(", "), "all-linear"], n=1)
            problem = f"no layer is named {target!r}; " + (f"did you mean {near[0]!r}? " if near else "")
        elif expert:
            problem = f"{target!r} matches {expert[0]}, an expert layer; fused experts have no adapters; "
        elif wrong:
            kind = type(layers[wrong[0]]).__name__
            problem = f"{target!r} matches {wrong[0]} ({kind}), not a linear layer below the head; "
        else:
            continue
        remedy = f"set all-linear, or linear layers: {known}"
        raise ConfigError(f"model.lora.targets={config.lora.targets}: {problem}{remedy}")


def matching(target: str, targets: str | list[str], names: Iterable[str]) -> list[str]:
    """Return the layers that peft matches: by a pattern of the whole name, or by its last parts."""
    if isinstance(targets, str):
        try:
            return [name for name in names if re.fullmatch(target, name)]
        except re.error as error:
            raise ConfigError(f"model.lora.targets={target} is not a regular expression ({error}): fix it") from None
    return [name for name in names if name == target or name.endswith(f".{target}")]


def linear_layers(model: Any) -> list[str]:
    """Return the names of the layers that can have adapters: all linear ones except the head."""
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415

    head = model.get_output_embeddings()
    linear = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D)]
    return [name for name, layer in linear if layer is not head and name not in HEADS]


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Switch adapters off, so that the model is the one that training started from."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merge_adapters(weights: Iterator[tuple[str, Tensor]], scale: float) -> Iterator[tuple[str, Tensor]]:
    """Merge adapters into plain tensors, W + scale * B A in float32; a layer's frozen tensors come before A and B."""
    waiting: list[tuple[str, Tensor]] = []
    low: Tensor | None = None
    for name, tensor in weights:
        if name.endswith(A):
            low = tensor.clone()
        elif name.endswith(B):
            assert low is not None
            for plain, kept in waiting:
                product = scale * (tensor.float() @ low.float()) if plain.endswith(".weight") else 0
                yield plain, kept.float() + product
            waiting = []
        elif BASE in name:
            waiting.append((name.replace(BASE, "."), tensor.clone()))
        else:
            yield name, tensor


def first_change(lora: LoraConfig, learning_rate: float, width: int) -> float:
    """Return the deviation of a layer's product after AdamW's first step, which moves B from zero by the rate."""
    # Peft draws A uniformly within 1 / sqrt(width).
    return lora.scale() * learning_rate * math.sqrt(lora.rank / (3 * width))


def arriving_share(change: float, dtype: str, deviation: float = DEVIATION) -> float:
    """Return one minus the relative error of a change that is added to weights and rounded; both are normal."""
    error = 0.0
    for power in range(-60, 8):
        low, high = (math.erf(2.0**edge / deviation / math.sqrt(2)) for edge in (power, power + 1))
        error += (high - low) * rounding_error(2.0 ** (power - FRACTION_BITS[dtype]) / change)
    return 1 - math.sqrt(error)


def rounding_error(step: float) -> float:
    """Return the mean squared error of rounding a standard normal number to multiples of `step`."""
    if step < 0.5:
        return step**2 / 12
    edges = [(2 * k + 1, (k + 0.5) * step) for k in range(math.ceil(8 / step) + 1)]
    square = step**2 * sum(odd * math.erfc(edge / math.sqrt(2)) for odd, edge in edges)
    product = 2 * step * sum(math.exp(-(edge**2) / 2) / math.sqrt(2 * math.pi) for _, edge in edges)
    return square - 2 * product + 1


def is_adapter(name: str) -> bool:
    return name.endswith((A, B))


def base_weights(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the frozen tensors under their plain names."""
    return ((name.replace(BASE, "."), tensor) for name, tensor in weights if not is_adapter(name))


def scale_adapters(weights: Iterator[tuple[str, Tensor]], scale: float) -> Iterator[tuple[str, Tensor]]:
    """Yield only adapters, under peft's names, scaled so that their product needs no factor."""
    for name, tensor in weights:
        if is_adapter(name):
            yield peft_name(name), tensor.float() * scale if name.endswith(B) else tensor


def dequantize(weights: Iterator[tuple[str, Tensor]], model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, with 4-bit ones dequantized."""
    from bitsandbytes.functional import dequantize_4bit  # noqa: PLC0415  (an optional package)
    from bitsandbytes.nn.modules import Params4bit  # noqa: PLC0415

    parameters = dict(model.named_parameters())
    for name, tensor in weights:
        parameter = parameters[name]
        packed = isinstance(parameter, Params4bit)
        yield name, dequantize_4bit(parameter.data, parameter.quant_state) if packed else tensor


def peft_name(name: str) -> str:
    """Return a tensor's name in a folder of peft."""
    return PEFT_PREFIX + name.replace(".default.", ".")


def save_adapter(folder: Path, described: Any, trained: dict[str, Tensor]) -> None:
    """Write a folder that peft and transformers open."""
    tensors = {peft_name(name): tensor.contiguous() for name, tensor in trained.items()}
    save_file(tensors, folder / ADAPTER, metadata={"format": "pt"})
    described.save_pretrained(folder)


def load_adapter(folder: Path) -> tuple[dict[str, Tensor], Any]:
    """Read what `save_adapter` wrote, under the names of a model with adapters."""
    import peft  # noqa: PLC0415

    named = load_file(folder / ADAPTER).items()
    tensors = {re.sub(r"\.(lora_[AB])\.", r".\1.default.", name.removeprefix(PEFT_PREFIX)): one for name, one in named}
    return tensors, peft.LoraConfig.from_pretrained(str(folder))


def merged_model(folder: Path, dtype: torch.dtype | None) -> Any:
    """Return the base model of an adapter folder, at full precision, with the adapter merged."""
    import peft  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    described = peft.LoraConfig.from_pretrained(str(folder))
    head = next(head for head, task in TASKS.items() if task == described.task_type)
    settings = transformers.AutoConfig.from_pretrained(folder / SETTINGS)
    base = auto_class(settings, head).from_pretrained(
        described.base_model_name_or_path, config=settings, dtype=dtype or "auto", use_safetensors=True
    )
    return peft.PeftModel.from_pretrained(base, folder).merge_and_unload()


def keep_gradients(model: Any) -> None:
    """Stop bitsandbytes from repacking 4-bit weights for inference on CPUs, which would block gradients."""
    from bitsandbytes.nn.modules import Linear4bit  # noqa: PLC0415

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def quantization(dtype: torch.dtype) -> Any:
    """Return settings for `from_pretrained`: frozen weights in 4 bits, computation in `dtype`."""
    from transformers import BitsAndBytesConfig  # noqa: PLC0415

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=torch.uint8,
    )
