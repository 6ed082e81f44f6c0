"""Routing replay: each token of a mixture goes to the experts that the engine chose (arXiv:2510.11370).

Engine and trainer round differently, so near a tie their routers choose different experts, and log-probs jump. Replay
takes the engine's experts with the trainer's own router weights, so gradients flow as usual. `experts` has a row for
each token and a column for each decoder layer.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trueline.config.base import ConfigError
from trueline.data.types import UNKNOWN_EXPERT

KEY = "training.replay_routing"
LAYER = re.compile(r"\blayers\.(\d+)\.")
NEAR = 1e-3  # tolerance of expert weights, which are between 0 and 1
Routed = tuple[Tensor, Tensor, Tensor]  # logits [n, E], and weights and numbers of the chosen experts [n, k]
Weigh = Callable[[Any, Tensor, Tensor], Tensor]  # router, logits [n, E], experts [n, k] -> their weights [n, k]


def shares(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """Return the chosen experts' probabilities, normalized to a sum of 1."""
    chosen = logits.float().softmax(-1).gather(-1, experts)
    return chosen / chosen.sum(-1, keepdim=True)


def probabilities(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """Return the chosen experts' probabilities, normalized if the model does so."""
    return shares(router, logits, experts) if router.norm_topk_prob else logits.float().softmax(-1).gather(-1, experts)


def sigmoids(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """Return DeepSeek V3's weights; its load-balancing bias affects only the choice."""
    chosen = logits.sigmoid().gather(-1, experts)
    if router.norm_topk_prob:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    return chosen * router.routed_scaling_factor


@dataclass(frozen=True, slots=True)
class Router:
    layer: int  # of the decoder
    module: nn.Module
    weigh: Weigh


def routers_of(model: Any) -> list[Router]:
    """Find the routers, in the order of layers, or refuse a model without known ones."""
    kind = str(model.config.get_text_config().model_type)
    check_kind(kind)
    name, weigh = ROUTERS[kind]
    named = [(LAYER.search(path), module) for path, module in model.named_modules() if type(module).__name__ == name]
    if not (found := [Router(int(match[1]), module, weigh) for match, module in named if match]):
        raise ConfigError(f"{KEY}: {type(model).__name__} has no {name} in this transformers: set it to false")
    return found


def check_kind(kind: str) -> None:
    if kind not in ROUTERS:
        raise ConfigError(f"{KEY} does not support {kind}: set it to false, or train one of {', '.join(ROUTERS)}")


class Recorder:
    """Records the experts that an engine's model chooses in each pass."""

    def __init__(self, model: Any) -> None:
        self.layers = int(model.config.get_text_config().num_hidden_layers)
        self.chosen: dict[int, Tensor] = {}
        for router in routers_of(model):
            router.module.register_forward_hook(partial(self._note, router.layer))

    def _note(self, layer: int, module: nn.Module, given: Any, found: Routed) -> None:
        self.chosen[layer] = found[2]

    def of_pass(self, rows: int) -> Tensor:
        """Return the choices of the last pass over this many sequences: [rows, n, layers, k]."""
        one = next(iter(self.chosen.values()))
        nothing = torch.full_like(one, UNKNOWN_EXPERT)
        stacked = torch.stack([self.chosen.get(layer, nothing) for layer in range(self.layers)], dim=1)
        return stacked.view(rows, -1, *stacked.shape[1:]).cpu()


class Replay:
    """The engine's choices for the current pass; they stay, because gradient checkpointing runs routers again."""

    def __init__(self, model: Any, *, follows: bool) -> None:
        self.follows = follows  # False: only compare
        self.routers = routers_of(model)
        self.experts: Tensor | None = None  # [n, layers, k] of this rank's tokens, as routers see them
        self.agreed: dict[int, Tensor] = {}  # [n] by layer
        self.proven: set[int] = set()
        for router in self.routers:
            router.module.register_forward_hook(partial(self._route, router))

    def begin(self, experts: Tensor | None) -> None:
        """Set the choices of the next pass; None lets routers choose."""
        self.experts, self.agreed = experts, {}

    def count_agreement(self) -> Iterator[Tensor]:
        """Yield for each token how many of its routers' choices match the engine's, and how many could."""
        assert self.experts is not None
        yield torch.stack([self.agreed[router.layer] for router in self.routers]).sum(0)
        slots = self.experts.shape[-1] * len(self.routers)
        yield slots * (self.experts[:, self.routers[0].layer, 0] != UNKNOWN_EXPERT)

    def _route(self, router: Router, module: nn.Module, given: Any, found: Routed) -> Routed | None:
        if self.experts is None:
            return None
        logits, weights, own = found
        count, layers, slots = self.experts.shape
        if (count, slots) != own.shape or router.layer >= layers:
            raise ValueError(
                f"the engine reported {slots} experts of {count} tokens in {layers} layers, but the router of layer "
                f"{router.layer} chooses {own.shape[1]} of {own.shape[0]} tokens: engine and trainer have different "
                "models"
            )
        reported = self.experts[:, router.layer].long()
        self.agreed[router.layer] = (own[:, :, None] == reported[:, None, :]).any(-1).sum(-1)
        if not self.follows:
            return None
        self._prove(router, found)
        experts = torch.where(reported == UNKNOWN_EXPERT, own, reported)
        return logits, router.weigh(module, logits, experts).to(weights.dtype), experts

    @torch.no_grad()
    def _prove(self, router: Router, found: Routed) -> None:
        """Check once that the router's own experts get the weights that transformers computes."""
        if router.layer in self.proven:
            return
        logits, weights, own = found
        gap = (router.weigh(router.module, logits, own).float() - weights.float()).abs().max()
        near = max(NEAR, torch.finfo(weights.dtype).eps)  # bfloat16 rounds by half of it
        if gap > near * max(float(weights.float().abs().max()), 1.0):
            raise ConfigError(
                f"{KEY}: this version of transformers computes other expert weights in {type(router.module).__name__} "
                f"(by up to {float(gap):.2g}): set it to false"
            )
        self.proven.add(router.layer)


ROUTERS: dict[str, tuple[str, Weigh]] = {  # by model_type: the class of transformers, and how it weighs experts
    "mixtral": ("MixtralTopKRouter", shares),
    "qwen2_moe": ("Qwen2MoeTopKRouter", probabilities),
    "qwen3_moe": ("Qwen3MoeTopKRouter", probabilities),
    "olmoe": ("OlmoeTopKRouter", probabilities),
    "gpt_oss": ("GptOssTopKRouter", lambda router, logits, experts: logits.gather(-1, experts).softmax(-1)),
    "deepseek_v3": ("DeepseekV3TopkRouter", sigmoids),
    "glm4_moe": ("Glm4MoeTopkRouter", sigmoids),
}
