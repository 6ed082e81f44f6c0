"""Which part of each parameter a rank has, and which layers a model's own plan splits (tensor parallelism)."""

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trueline.config.base import ConfigError
from trueline.training.engines.shards import Region, cut_region, whole_region

EMBEDDINGS = "embedding_rowwise"  # they stay whole, like the head
PARTIAL = "replicated_with_grad_allreduce"  # whole parameters that work on split activations
STYLES = ("colwise", "rowwise", PARTIAL)  # Transformers' names for ways to split a layer


def layer_styles(model: Any, size: int) -> dict[str, str]:
    """Return how each layer of the plan in a model's Hugging Face configuration is split; refuse what is not there."""
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
    # Parameters that work on split activations but are not in the plan would have partial gradients.
    rules = [re.compile(weight_pattern(layer)) for layer in plan]
    names = [f".{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    blocks = {name.rsplit(".", 2)[0] + "." for name in names if any(rule.match(name) for rule in rules)}
    for name, _ in model.named_parameters():
        weight = f".{name.rpartition('.')[0]}.weight"
        inside = any(weight.startswith(block) for block in blocks)
        if inside and not any(rule.match(weight) for rule in rules):
            raise ConfigError(f"model.tensor_parallel: the model's plan does not include {name}; set 1")
    return plan


def weight_pattern(layer: str) -> str:
    """Return a regular expression for the names of a layer's weights, of which each begins with a dot."""
    return rf".*\.{re.escape(layer)}\.weight$".replace(r"\*", r"\d+")


class Cuts:
    """Which parameters are split over a group of ranks, and along which dimension.

    The ranks of the group see the same tokens (`alike`: tensor parallelism), or each sees its own (experts).
    `whole` is collective: every rank of the group calls it for the same tensors in the same order.
    """

    def __init__(
        self, size: int = 1, dims: dict[str, int] | None = None, group: Any = None, rank: int = 0, *, alike: bool = True
    ) -> None:
        self.size, self.dims, self.group, self.rank, self.alike = size, dims or {}, group, rank, alike

    def data_place(self, name: str) -> tuple[int, int]:
        """Return this rank's place among the data ranks that have the same part of a tensor, and their number."""
        width = self.size if self.alike or name in self.dims else 1
        return dist.get_rank() // width, dist.get_world_size() // width

    def whole(self, name: str, part: Tensor) -> Tensor:
        if (dim := self.dims.get(name)) is None:
            return part
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def region(self, name: str, part: tuple[int, ...]) -> Region:
        """Return where this rank's part lies in the whole, by its shape."""
        if (dim := self.dims.get(name)) is None:
            return whole_region(part)
        return cut_region((*part[:dim], part[dim] * self.size, *part[dim + 1 :]), dim, self.rank, self.size)

    def part(self, name: str, whole: Tensor) -> Tensor:
        dim = self.dims.get(name)
        return whole if dim is None else whole.chunk(self.size, dim)[self.rank].contiguous()
