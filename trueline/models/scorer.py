"""A decoder for training: tokens of a batch in, numbers for each token out; and a check that they are right."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trueline.algorithms.losses import routing
from trueline.config.base import ConfigError
from trueline.data.pictures import Picture
from trueline.data.types import NO_TARGET, TARGETS, Batch, Repeat, to_device
from trueline.models.attention import Arrangement, Current, PackedLayout, Padded, Ringed, Shared
from trueline.models.head import ChunkedHead, HeadWork, Teacher, chunked_divergence, chunked_likeliest
from trueline.models.loading import scoring_head
from trueline.models.ring_attention import RingGroup
from trueline.models.routing import Replay
from trueline.models.truncation import Truncation
from trueline.models.vision import GRIDS, Vision, picture_tokens

HEAD_OUTPUTS = ("logprobs", "entropy", "variance", "squares", *TARGETS)
LENGTHS = (7, 5)  # of the sequences that the check compares
LEAST = 1e-3  # a mean gap up to this is rounding in any model
NOISE = 5.0  # times the effect of rounding the embeddings once: every layer rounds, and real faults do far more
REMEDY = "set training.packing=false and model.context_parallel=1, or choose another model"
Outputs = dict[str, Tensor]  # fields of ModelOutput


class Scorer(nn.Module):
    """Backbone and head in one module, so that ZeRO's hooks see every part.

    This is the only place that shifts positions: log-prob and value t are of token t given those before it.
    """

    plain = False
    compiled = False  # the head's slices
    top_k = 0  # experts per token, if a loss needs the routers' outputs
    likeliest = 0  # tokens to return for each position, with their log-probs
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
        vision: Vision | None = None,
    ) -> None:
        super().__init__()
        self.model, self.chunk, self.packed, self.ring = model, chunk, packed, ring
        self.values = values  # a critic: values of the state before each token
        self.vision = vision  # of a model that reads pictures
        self.teacher = (distillation_target,)  # in a tuple, so that it is no submodule, and neither trained nor sharded
        head = model.get_output_embeddings()
        self.has_language_head = head is not None
        if head is not None:
            head.forward = MethodType(apply_head, head)

    def forward(  # noqa: PLR0913  (the fields of a Batch)
        self,
        tokens: Tensor,
        masked: bytes,
        lengths: list[int],
        temperature: float,
        entropy: bool = True,
        experts: Tensor | None = None,
        repeats: list[Repeat] | None = None,
        pictures: list[tuple[Picture, ...]] | None = None,
        target_ids: Tensor | None = None,
        squares: bool = False,
        kept: Truncation | None = None,
    ) -> Outputs:
        """Run over tokens on the model's device; those that repeat others are not computed."""
        count, seen, pictures, inputs = len(tokens), {}, pictures or [], tokens
        mask = torch.frombuffer(bytearray(memoryview(masked)), dtype=torch.bool)
        if self.vision is not None and not self.plain:
            inputs = self.vision.inputs(tokens, lengths)
            if not pictures:
                tokens, mask, lengths, pictures = self.vision.add_blank(tokens, mask, lengths)
                inputs = torch.cat([inputs, tokens[count:]])
        arrangement = self.arrange(lengths, tokens.device, repeats or [])
        if self.vision is not None and not self.plain:
            seen = self.look(self.vision, arrangement, inputs, pictures)
        if self.replay is not None:
            self.replay.begin(None if experts is None else arrangement.expert_rows(experts))
        if self.plain:
            return {"logprobs": plain_logprobs(self.model, tokens)}
        options = {"output_router_logits": True} if self.top_k else {}
        states = self.run(self.model, arrangement, inputs, **seen, **options)
        hidden = arrangement.hidden_rows(states.last_hidden_state)
        routed = {name: first_rows(values, count) for name, values in self.router_outputs(states, arrangement).items()}
        if not self.has_language_head:
            scores = arrangement.spread(scoring_head(self.model)[1](hidden).float())
            values = shift(scores[:, 0], lengths)
            name, outputs = ("values", values) if self.values else ("scores", scores)
            return routed | {name: first_rows(outputs, count)}
        # On the host, which need not wait for the device.
        predicts = arrangement.local(predicting(mask, lengths))
        wanted = to_device(predicts.nonzero()[:, 0], tokens.device)
        head = self.model.get_output_embeddings()
        work = HeadWork(temperature, self.chunk, entropy, self.compiled, squares, kept)
        rows, teacher = arrangement.rows(wanted), self.teacher[0]
        chosen = hidden.index_select(0, rows)
        if teacher is None:
            targets = self.targets(arrangement, tokens, target_ids, wanted)
            found = dict(zip(HEAD_OUTPUTS, head(chosen, targets, work), strict=False))
        else:
            with torch.no_grad():
                taught = arrangement.hidden_rows(self.run(teacher.model, arrangement, tokens).last_hidden_state)[rows]
            found = {"divergence": head(chosen, (teacher, taught), work)}
        for name, values in found.items():
            if values is not None:  # moved from the predicting positions to the tokens that they belong to
                local = blank(name, values, len(predicts)).index_copy(0, wanted, values)
                routed[name] = first_rows(arrangement.whole(local).roll(1, 0), count)
        return routed

    def look(
        self, vision: Vision, arrangement: Arrangement, tokens: Tensor, pictures: list[tuple[Picture, ...]]
    ) -> dict[str, Tensor]:
        """Return what the model takes besides tokens if there are pictures."""
        given = vision.pixels(pictures, self.model.dtype, tokens.device)
        if vision.family.spatial:
            places = vision.places(self.model.base_model, tokens, arrangement.lengths, pictures, given[GRIDS])
            given["position_ids"] = arrangement.spatial(places)
        if vision.family.two_way:
            arrangement.pictured = tokens == vision.token
        return given

    def targets(self, arrangement: Arrangement, tokens: Tensor, target_ids: Tensor | None, wanted: Tensor) -> Any:
        """Return the tokens that follow these positions and, if others are asked about too, which ones."""
        following = arrangement.local(tokens.roll(-1))[wanted]
        if target_ids is not None:
            return following, arrangement.local(target_ids.roll(-1, 0))[wanted]
        return (following, self.likeliest) if self.likeliest else following

    @contextmanager
    def telling(self, likeliest: int) -> Iterator[None]:
        """Return so many of the likeliest tokens for each position, too."""
        self.likeliest = likeliest
        try:
            yield
        finally:
            self.likeliest = 0

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

    def arrange(self, lengths: list[int], device: torch.device, repeats: list[Repeat]) -> Arrangement:
        if not self.packed:
            return Padded(lengths)
        if repeats:
            return Shared(lengths, repeats, device)
        return Arrangement(lengths) if self.ring is None else Ringed(lengths, self.ring, device)

    def run(self, model: Any, arrangement: Arrangement, tokens: Tensor, **options: Any) -> Any:
        """Run the backbone, and check that every layer kept the sequences separate."""
        states = model.base_model(**(arrangement.inputs(tokens) | options), use_cache=False)
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
            for name, counts in zip(("agreed", "reported"), self.replay.count_agreement(), strict=True):
                found[name] = arrangement.hidden_rows(counts.float().view(*rows))
        return {name: arrangement.spread(values) for name, values in found.items()}


def apply_head(head: nn.Linear, hidden: Tensor, target: Tensor | tuple[Any, Any], work: HeadWork) -> Any:
    """Replace the head's own forward, so that logits never exist as a whole."""
    if isinstance(target, Tensor):
        return ChunkedHead.apply(hidden, head.weight, head.bias, target, work)  # type: ignore[no-untyped-call]
    first, more = target
    if isinstance(first, Tensor):
        return *apply_head(head, hidden, first, work), *chunked_likeliest(hidden, head, more, work)
    teacher, taught = target
    return chunked_divergence(hidden, head, (taught, teacher.model.get_output_embeddings()), teacher.config, work.chunk)


def blank(name: str, values: Tensor, count: int) -> Tensor:
    """Return what an output says of so many tokens that nothing predicts."""
    return values.new_full((count, *values.shape[1:]), NO_TARGET if name == TARGETS[0] else 0)


def predicting(mask: Tensor, lengths: list[int]) -> Tensor:
    """Return the positions, [N] bool, whose next token in the same sequence is masked."""
    following = mask.roll(-1)
    following[torch.tensor(lengths).cumsum(0) - 1] = False
    return following


def shift(values: Tensor, lengths: list[int]) -> Tensor:
    """Give each token the value at the one before it, [N]; the first of a sequence gets 0."""
    firsts = to_device(torch.tensor([0, *lengths[:-1]]).cumsum(0), values.device)
    return values.roll(1).index_fill(0, firsts, 0.0)


def hf_name(name: str) -> str:
    """Return the Hugging Face name of one of a Scorer's parameters."""
    return name.removeprefix("model.")


class ProbeFailure(ConfigError):
    """Training would compute something else than plain transformers does."""


class Probe:
    """Compare the model as loaded with the model as trained: packed, parallel, sharded."""

    def __init__(self, model: Any, device: torch.device, packed: bool, has_language_head: bool) -> None:
        random = torch.Generator().manual_seed(0)
        highest = model.get_input_embeddings().num_embeddings
        self.name, self.packed = type(model).__name__, packed
        tokens = torch.randint(0, highest, (sum(LENGTHS),), generator=random)
        for token in picture_tokens(model.config):  # each would need its part of a picture
            tokens[tokens == token] = (token + 1) % highest
        self.tokens = tokens.to(device)
        self.expected: Tensor | None = None
        if has_language_head:
            self.expect(partial(plain_logprobs, model))

    @torch.no_grad()
    def expect(self, plain: Callable[[Tensor], Tensor]) -> None:
        """Remember the log-probs of transformers' own forward pass over each sequence."""
        self.expected = torch.cat([self._call(plain, part) for part in self.tokens.split(LENGTHS)]).float()

    @torch.no_grad()
    def compare(self, forward: Callable[[Tensor, list[int]], Tensor], embeddings: nn.Module) -> None:
        """Refuse a model that differs; `forward` takes tokens and sequence lengths, on every rank."""
        together = self._call(forward, self.tokens, list(LENGTHS)).float()
        alone = torch.cat([self._call(forward, part, [len(part)]) for part in self.tokens.split(LENGTHS)]).float()
        with rounding(embeddings):
            rounded = forward(self.tokens, list(LENGTHS)).float()
        limit = max(LEAST, NOISE * mean_gap(together, rounded))
        gap = mean_gap(together, alone)
        if not gap < limit:
            raise ProbeFailure(
                f"{self.name}: packed sequences influence each other (mean gap {gap:.2g}, limit {limit:.2g}): {REMEDY}"
            )
        if self.expected is None:
            return
        gap = mean_gap(together, self.expected)
        if not gap < limit:
            raise ProbeFailure(
                f"{self.name}: log-probs in training differ from plain transformers' by {gap:.2g} (limit {limit:.2g}), "
                "because its head is more than one linear layer: choose another model"
            )

    def _call(self, call: Callable[..., Tensor], *args: Any) -> Tensor:
        """Make the call; explain errors of architectures that do not support packed sequences."""
        try:
            return call(*args)
        except (KeyError, AttributeError, TypeError, NotImplementedError) as error:
            if not self.packed:
                raise
            raise ConfigError(f"{self.name} does not support packed sequences ({error!r}): {REMEDY}") from error


def first_rows(values: Tensor, count: int) -> Tensor:
    """Return as many rows; all of them without a view, of which FSDP2 warns."""
    return values if len(values) == count else values[:count]


def rounding(embeddings: nn.Module) -> RemovableHandle:
    """Change every embedded number by its last bit, up or down, to measure what rounding does."""
    random = torch.Generator().manual_seed(1)

    def move(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        signs = torch.randint(0, 2, output.shape, generator=random) * 2 - 1
        return output * (1 + torch.finfo(output.dtype).eps * signs).to(output)

    return embeddings.register_forward_hook(move)


@torch.no_grad()
def sharing_gap(batch: Batch, forward: Callable[[Batch], Tensor], embeddings: nn.Module) -> tuple[float, float]:
    """Return the mean gap of outputs with and without shared prefixes, and a limit by what rounding does to them."""
    shared = forward(batch).float()
    with rounding(embeddings):
        rounded = forward(batch).float()
    plain = forward(replace(batch, repeats=[])).float()
    if not batch.mask.any():  # a pass of fillers
        return 0.0, LEAST
    gap, moved = (mean_gap(shared[batch.mask], other[batch.mask]) for other in (plain, rounded))
    return gap, max(LEAST, NOISE * moved)


def mean_gap(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().mean().item()


def plain_logprobs(model: Any, tokens: Tensor) -> Tensor:
    """Return log-probs [T] of transformers' own forward pass; zero at the first token."""
    Current.layout = PackedLayout([len(tokens)])
    scores = model(input_ids=tokens[None], use_cache=False).logits[0].float().log_softmax(-1)
    found = scores[:-1].gather(-1, tokens[1:, None])[:, 0]
    return torch.cat([torch.zeros_like(found[:1]), found])
