"""Tensor parallelism by DeepSpeed's AutoTP: which layers are split, and how tensors are split and gathered."""

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer
from deepspeed.utils import groups
from torch import Tensor, nn

from trueline.config.base import ConfigError
from trueline.models.scorer import hf_name

# Transformers' names for ways to split a layer, as AutoTP's settings. The head and the embeddings stay whole.
STYLES: dict[str, dict[str, Any]] = {
    "colwise": {"partition_type": "column"},
    "rowwise": {"partition_type": "row"},
    "replicated_with_grad_allreduce": {"partition_type": "skip", "grad_allreduce": True},
}
EMBEDDINGS = "embedding_rowwise"


def tensor_parallel(model: Any, size: int) -> dict[str, Any] | None:
    """Return AutoTP's rules for a model, from the plan in its Hugging Face configuration."""
    # DeepSpeed's groups last as long as the process, for every later engine.
    if groups.mpu is not None and groups.get_tensor_model_parallel_world_size() != size:
        raise RuntimeError(f"this process has used another size: model.tensor_parallel={size} needs a new process")
    if size == 1:
        return None
    settings = model.config.get_text_config()
    plan = {layer: style for layer, style in (settings.base_model_tp_plan or {}).items() if style != EMBEDDINGS}
    if not plan:
        raise ConfigError(f"model.tensor_parallel={size}: {settings.model_type} has no tensor-parallel plan; set 1")
    for layer, style in plan.items():
        if style not in STYLES:
            raise ConfigError(
                f"model.tensor_parallel={size}: {settings.model_type} needs {style} of {layer}, which is not supported "
                "(like all fused projections and experts); set it to 1"
            )
    sizes = settings.to_dict()
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (sizes.get(key) or 0) % size:
            raise ConfigError(f"model.tensor_parallel={size} does not divide the model's {key}={sizes[key]}")
    patterns = {layer: rf".*\.{re.escape(layer)}\.weight$".replace(r"\*", r"\d+") for layer in plan}
    specs = [{"patterns": [patterns[layer]], **STYLES[style]} for layer, style in plan.items()]
    check_neighbours(model, specs)
    return {"autotp_size": size, "partition_config": {"use_default_specs": False, "layer_specs": specs}}


def check_neighbours(model: nn.Module, specs: list[dict[str, Any]]) -> None:
    """Refuse a model whose plan does not name all parameters that work on split activations.

    Their gradients would be partial, and differ between ranks.
    """
    rules = [re.compile(spec["patterns"][0]) for spec in specs]
    names = [f".{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    blocks = {name.rsplit(".", 2)[0] + "." for name in names if any(rule.match(name) for rule in rules)}
    for name, _ in model.named_parameters():
        weight = f".{name.rpartition('.')[0]}.weight"
        inside = any(weight.startswith(block) for block in blocks)
        if inside and not any(rule.match(weight) for rule in rules):
            raise ConfigError(f"model.tensor_parallel: the model's plan does not include {name}; set 1")


class Cuts:
    """Which parameters are split over the tensor-parallel group, and along which dimension.

    `whole` and `norm` are collective: every rank of the group calls them for the same tensors in the same order.
    """

    def __init__(self, module: nn.Module, size: int) -> None:
        self.size = size
        self.dims = dict(cut_dimensions(module)) if size > 1 else {}
        self.group = groups.get_tensor_model_parallel_group() if size > 1 else None
        self.rank = groups.get_tensor_model_parallel_rank() if size > 1 else 0

    def whole(self, name: str, part: Tensor) -> Tensor:
        dim = self.dims.get(name)
        if dim is None:
            return part
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def part(self, name: str, whole: Tensor) -> Tensor:
        dim = self.dims.get(name)
        return whole if dim is None else whole.chunk(self.size, dim)[self.rank].contiguous()

    def norm(self, gradients: dict[str, Tensor]) -> Tensor:
        """Return the norm of all gradients; those of whole parameters, which every rank has, count once."""
        cut = nn.utils.get_total_norm([gradient for name, gradient in gradients.items() if name in self.dims]) ** 2
        whole = nn.utils.get_total_norm([gradient for name, gradient in gradients.items() if name not in self.dims])
        if self.dims:
            dist.all_reduce(cut, group=self.group)
        return (cut + whole**2).sqrt()


def cut_dimensions(module: nn.Module) -> Iterator[tuple[str, int]]:
    for name, layer in module.named_modules():
        if isinstance(layer, LinearAllreduce):
            yield hf_name(f"{name}.weight"), 1  # its bias is added after the sum, so every rank has it whole
        elif isinstance(layer, LinearLayer):
            yield from ((hf_name(f"{name}.{part}"), 0) for part, _ in layer.named_parameters())
