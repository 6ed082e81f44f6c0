"""A decoder for training: tokens of a batch in, numbers for each token out."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from trueline.algorithms.losses import routing
from trueline.config.base import ConfigError
from trueline.data.types import to_device
from trueline.models.attention import Arrangement, Current, Packed, Padded, Ringed
from trueline.models.head import ChunkedHead, HeadWork, Teacher, chunked_divergence
from trueline.models.loading import scoring_head
from trueline.models.probe import plain_logprobs
from trueline.models.ring_attention import RingGroup
from trueline.models.routing import Replay

Outputs = dict[str, Tensor]  # fields of ModelOutput


class Scorer(nn.Module):
    """Backbone and head in one module, so that ZeRO's hooks see every part.

    This is the only place that shifts positions: log-prob and value t are of token t given those before it.
    """

    plain = False
    top_k = 0  # experts per token, if a loss needs the routers' outputs
    replay: Replay | None = None  # of the engine's experts

    def __init__(
        self,
        model: Any,
        chunk: int,
        *,
        packed: bool = True,
        ring: RingGroup | None = None,
        distillation_target: Teacher | None = None,
        values: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.chunk, self.packed, self.ring = model, chunk, packed, ring
        self.values = values  # a critic: values of the state before each token
        self.teacher = (distillation_target,)  # in a tuple, so that it is no submodule, and neither trained nor sharded
        self.has_language_head = model.get_output_embeddings() is not None
        if self.has_language_head:
            head = model.get_output_embeddings()
            head.forward = MethodType(apply_head, head)

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor,
        lengths: list[int],
        temperature: float,
        entropy: bool = True,
        experts: Tensor | None = None,
    ) -> Outputs:
        """Run over tokens on the model's device; `mask` is on the host."""
        arrangement = self.arrange(lengths, tokens.device)
        if self.replay is not None:
            self.replay.begin(None if experts is None else arrangement.expert_rows(experts))
        if self.plain:
            return {"logprobs": plain_logprobs(self.model, tokens)}
        states = self.run(self.model, arrangement, tokens, **({"output_router_logits": True} if self.top_k else {}))
        hidden, routed = arrangement.hidden_rows(states.last_hidden_state), self.router_outputs(states, arrangement)
        if not self.has_language_head:
            scores = arrangement.whole(scoring_head(self.model)[1](hidden).float())
            return routed | ({"values": shift(scores[:, 0], lengths)} if self.values else {"scores": scores})
        # On the host, which need not wait for the device.
        wanted = to_device(arrangement.local(predicting(mask, lengths)).nonzero()[:, 0], tokens.device)
        targets = arrangement.local(tokens.roll(-1))[wanted]
        work = HeadWork(temperature, self.chunk, entropy)
        found = self.outputs(
            hidden.index_select(0, wanted), targets, work, self.teacher_states(arrangement, tokens, wanted)
        )
        return routed | {name: place(values, wanted, len(hidden), arrangement) for name, values in found.items()}

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Use transformers' own forward pass, for one sequence at a time."""
        head = self.model.get_output_embeddings()
        ours, self.plain = head.forward, True
        del head.forward
        try:
            yield
        finally:
            head.forward, self.plain = ours, False

    def arrange(self, lengths: list[int], device: torch.device) -> Arrangement:
        if not self.packed:
            return Padded(lengths)
        return Packed(lengths) if self.ring is None else Ringed(lengths, self.ring, device)

    def run(self, model: Any, arrangement: Arrangement, tokens: Tensor, **options: bool) -> Any:
        """Run the backbone, and check that every layer kept the sequences separate."""
        states = model.base_model(**arrangement.inputs(tokens), use_cache=False, **options)
        layers = int(model.config.get_text_config().num_hidden_layers)
        if self.packed and Current.layout.calls != layers:
            raise ConfigError(
                f"{type(model).__name__}: only {Current.layout.calls} of {layers} layers use transformers' attention "
                "interface, so packed sequences could see each other: set training.packing=false"
            )
        return states

    def router_outputs(self, states: Any, arrangement: Arrangement) -> Outputs:
        rows = states.last_hidden_state.shape[:2]  # routers see all tokens as one list
        found: Outputs = {}
        if self.top_k:
            logits = [arrangement.hidden_rows(layer.view(*rows, -1)) for layer in states.router_logits]
            found = routing(logits, self.top_k)
        if self.replay is not None and self.replay.experts is not None:
            agreed, reported = (
                arrangement.hidden_rows(one.float().view(*rows)) for one in self.replay.count_agreement()
            )
            found |= {"agreed": agreed, "reported": reported}
        return {name: arrangement.whole(values) for name, values in found.items()}

    def teacher_states(self, arrangement: Arrangement, tokens: Tensor, wanted: Tensor) -> Tensor | None:
        """Return the teacher's hidden states at the wanted positions, or None without a teacher."""
        teacher = self.teacher[0]
        if teacher is None:
            return None
        with torch.no_grad():
            return arrangement.hidden_rows(self.run(teacher.model, arrangement, tokens).last_hidden_state)[wanted]

    def outputs(self, hidden: Tensor, targets: Tensor, work: HeadWork, taught: Tensor | None) -> Outputs:
        head = self.model.get_output_embeddings()
        teacher = self.teacher[0]
        if teacher is None or taught is None:
            logprobs, entropy, variance = head(hidden, targets, work)
            return {"logprobs": logprobs} | ({"entropy": entropy, "variance": variance} if work.entropy else {})
        return {"divergence": head(hidden, (teacher, taught), work)}


def apply_head(
    head: nn.Linear, hidden: Tensor, distillation_target: Tensor | tuple[Teacher, Tensor], work: HeadWork
) -> Any:
    """Replace the head's own forward, so that logits never exist as a whole."""
    if isinstance(distillation_target, Tensor):
        return ChunkedHead.apply(hidden, head.weight, head.bias, distillation_target, work)  # type: ignore[no-untyped-call]
    teacher, taught = distillation_target
    return chunked_divergence(hidden, head, (taught, teacher.model.get_output_embeddings()), teacher.config, work.chunk)


def predicting(mask: Tensor, lengths: list[int]) -> Tensor:
    """Return the positions, [N] bool, whose next token in the same sequence is masked."""
    ends = torch.tensor(lengths).cumsum(0) - 1
    following = mask.roll(-1)
    following[ends] = False
    return following


def shift(values: Tensor, lengths: list[int]) -> Tensor:
    """Give each token the value at the one before it, [N]; the first of a sequence gets 0."""
    firsts = to_device(torch.tensor([0, *lengths[:-1]]).cumsum(0), values.device)
    return values.roll(1).index_fill(0, firsts, 0.0)


def place(values: Tensor, wanted: Tensor, count: int, arrangement: Arrangement) -> Tensor:
    """Move values from the predicting positions, of `count` local ones, to the tokens they belong to, [N]."""
    local = torch.zeros(count, dtype=values.dtype, device=values.device).index_copy(0, wanted, values)
    return arrangement.whole(local).roll(1)


def hf_name(name: str) -> str:
    """Return the Hugging Face name of one of a Scorer's parameters."""
    return name.removeprefix("model.")
