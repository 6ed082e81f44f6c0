"""Add, merge, switch off and export low-rank adapters beside frozen weights."""

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
from trueline.models.loading import CLASSES, HEADS, scoring_head, shape_of

A, B, BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer."
PEFT_PREFIX, ADAPTER = "base_model.model.", "adapter_model.safetensors"
SETTINGS = "settings"  # folder with the adapted model's config.json, which peft would take for a whole model's
EXPERT_LAYERS = ("gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj")  # as experts were called before fusing
FRACTION_BITS = {"float32": 23, "bfloat16": 7}
DEVIATION = 0.02  # of weights that are not at hand
TASKS = {"language": "CAUSAL_LM", "reward": "SEQ_CLS", "steps": "TOKEN_CLS"}


def add_lora(model: Any, config: LoraConfig, head: str, path: str) -> Any:
    """Freeze all weights but the added ones and a new scoring head; return peft's description of them."""
    import peft  # noqa: PLC0415  (it imports every quantisation library that is installed)

    described = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=adapted_layers(config.peft_targets(), model),
        task_type=TASKS[head],
        base_model_name_or_path=path,
        exclude_modules=None if head == "language" else ["score", "classifier"],
    )
    try:
        peft.inject_adapter_in_model(described, model)
    except ValueError as error:
        raise ConfigError(f"model.lora.targets={config.targets}: {error}") from None
    if head != "language":
        name, layer = scoring_head(model)
        layer.requires_grad_(True)
        described.modules_to_save = [name]  # said afterwards: peft would wrap the layer, and its name would change
    return described


def adapted_layers(targets: str | list[str], model: Any) -> str | list[str]:
    """Return what peft is told to adapt: of a mixture with fused experts, linear layers by name, and none that peft
    0.21 would take for parts of the experts.
    """
    if targets != "all-linear" or not has_fused_experts(model):
        return targets
    return [name for name in linear_layers(model) if name.rpartition(".")[2] not in EXPERT_LAYERS]


def has_fused_experts(model: Any) -> bool:
    return any(".experts." in name and len(shape_of(tensor)) == 3 for name, tensor in model.named_parameters())


def check_targets(config: ModelConfig, head: str) -> None:
    """Refuse a target that is no linear layer of the model, though others may be."""
    targets = config.lora.peft_targets()
    if targets == "all-linear":
        return
    model = empty_model(config, head)
    layers, linear = dict(list(model.named_modules())[1:]), linear_layers(model)
    known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    for target in [targets] if isinstance(targets, str) else targets:
        found = matching(target, targets, layers)
        expert = [name for name in found if has_fused_experts(model) and name.rpartition(".")[2] in EXPERT_LAYERS]
        wrong = [name for name in found if name not in linear]
        if not found:
            near = difflib.get_close_matches(target, [*known.split(", "), "all-linear"], n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            problem = f"no layer of the model has the name {target!r}; {hint}"
        elif expert:
            problem = (
                f"{target!r} takes {expert[0]}, a name that peft takes for the experts, which are fused and have no "
                "adapters here; "
            )
        elif wrong:
            kind = type(layers[wrong[0]]).__name__
            problem = (
                f"{target!r} takes {wrong[0]} ({kind}), and adapters go beside linear layers below the head only; "
            )
        else:
            continue
        raise ConfigError(
            f"model.lora.targets={config.lora.targets}: {problem}its linear layers are {known} (all-linear)"
        )


def matching(target: str, targets: str | list[str], names: Iterable[str]) -> list[str]:
    """Return the layers that peft takes for a target: by a pattern of the whole name, or by its last words."""
    if isinstance(targets, str):
        try:
            return [name for name in names if re.fullmatch(target, name)]
        except re.error as error:
            raise ConfigError(f"model.lora.targets={target}: not a regular expression ({error})") from None
    return [name for name in names if name == target or name.endswith(f".{target}")]


def linear_layers(model: Any) -> list[str]:
    """Return the names of the layers that adapters can stand beside: all linear ones but the head."""
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415

    head, kinds = model.get_output_embeddings(), (nn.Linear, Conv1D)
    named = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, kinds) and layer is not head]
    return [name for name, _ in named if name not in HEADS]


def empty_model(config: ModelConfig, head: str) -> Any:
    """Make the model without its weights."""
    import transformers  # noqa: PLC0415

    trusted = config.trust_remote_code
    settings = transformers.AutoConfig.from_pretrained(config.path, trust_remote_code=trusted)
    with torch.device("meta"):
        return getattr(transformers, CLASSES[head]).from_config(settings, trust_remote_code=trusted)


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Switch adapters off: inside, the model is the one that training started from."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged(weights: Iterator[tuple[str, Tensor]], scale: float) -> Iterator[tuple[str, Tensor]]:
    """Turn tensors with adapters among them into those of a plain model: W + scale * B A, under the plain names.

    A layer's frozen tensors come first, then A, then B. Sums are float32, and the receiver rounds them.
    """
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
    """Return the deviation of what AdamW's first step makes of a layer's product: B moves by the rate, from zero, and
    peft draws A evenly within 1 / sqrt(width).
    """
    return lora.scale() * learning_rate * math.sqrt(lora.rank / (3 * width))


def arriving_share(change: float, dtype: str, deviation: float = DEVIATION) -> float:
    """Return one minus the relative error of a change that is added to weights and rounded with them to `dtype`.

    Change and weights are normal. Between two powers of two weights lie `step` changes apart, and a change of less than
    half of that is lost.
    """
    error = 0.0
    for power in range(-60, 8):
        low, high = (math.erf(2.0**edge / deviation / math.sqrt(2)) for edge in (power, power + 1))
        error += (high - low) * rounding_error(2.0 ** (power - FRACTION_BITS[dtype]) / change)
    return 1 - math.sqrt(error)


def rounding_error(step: float) -> float:
    """Return the mean square error of a standard normal number that is rounded to multiples of `step`."""
    if step < 0.5:
        return step**2 / 12
    edges = [(2 * k + 1, (k + 0.5) * step) for k in range(math.ceil(8 / step) + 1)]
    square = step**2 * sum(odd * math.erfc(edge / math.sqrt(2)) for odd, edge in edges)
    product = 2 * step * sum(math.exp(-(edge**2) / 2) / math.sqrt(2 * math.pi) for _, edge in edges)
    return square - 2 * product + 1


def frozen(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield what adapters stand beside, under the plain names."""
    return ((name.replace(BASE, "."), tensor) for name, tensor in weights if not name.endswith((A, B)))


def scaled(weights: Iterator[tuple[str, Tensor]], scale: float) -> Iterator[tuple[str, Tensor]]:
    """Yield adapters alone, under peft's names, so that their product needs no scaling any more."""
    for name, tensor in weights:
        if name.endswith((A, B)):
            yield peft_name(name), tensor.float() * scale if name.endswith(B) else tensor


def dequantized(weights: Iterator[tuple[str, Tensor]], model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, those in 4 bits as plain numbers."""
    from bitsandbytes.functional import dequantize_4bit  # noqa: PLC0415  (an optional package)
    from bitsandbytes.nn.modules import Params4bit  # noqa: PLC0415

    parameters = dict(model.named_parameters())
    for name, tensor in weights:
        parameter = parameters[name]
        if isinstance(parameter, Params4bit):
            yield name, dequantize_4bit(parameter.data, parameter.quant_state)
        else:
            yield name, tensor


def peft_name(name: str) -> str:
    """Return what a trained tensor is called in a folder that peft opens."""
    return PEFT_PREFIX + name.replace(".default.", ".")


def save_adapter(folder: Path, described: Any, trained: dict[str, Tensor]) -> None:
    """Write a folder that peft, and transformers with peft installed, opens."""
    tensors = {peft_name(name): tensor.contiguous() for name, tensor in trained.items()}
    save_file(tensors, folder / ADAPTER, metadata={"format": "pt"})
    described.save_pretrained(folder)


def load_adapter(folder: Path) -> tuple[dict[str, Tensor], Any]:
    """Read what `save_adapter` wrote, under the names of a model with adapters."""
    import peft  # noqa: PLC0415

    tensors = load_file(folder / ADAPTER)
    names = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}
    for part in ("lora_A", "lora_B"):
        names = {name.replace(f".{part}.", f".{part}.default."): tensor for name, tensor in names.items()}
    return names, peft.LoraConfig.from_pretrained(str(folder))


def merged_model(folder: Path, dtype: torch.dtype | None) -> Any:
    """Return the base model that an adapter folder names, at full precision, with the adapter's product added."""
    import peft  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    described = peft.LoraConfig.from_pretrained(str(folder))
    head = next(head for head, task in TASKS.items() if task == described.task_type)
    base = getattr(transformers, CLASSES[head]).from_pretrained(
        described.base_model_name_or_path,
        config=transformers.AutoConfig.from_pretrained(folder / SETTINGS),
        dtype=dtype or "auto",
        use_safetensors=True,
    )
    return peft.PeftModel.from_pretrained(base, folder).merge_and_unload()


def keep_gradients(model: Any) -> None:
    """Stop bitsandbytes from repacking 4-bit weights for bfloat16 inference on CPUs: no gradient gets through those."""
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
