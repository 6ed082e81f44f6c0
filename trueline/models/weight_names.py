"""Weights under the names, and in the pieces, that checkpoints and engines know; Transformers may hold them fused."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueline.config.base import ConfigError
from trueline.models.loading import shape_of

Named = Iterator[tuple[str, Tensor]]
Group = tuple[str, ...]  # the model's own names of tensors that become others only together


class WeightNames:
    """Transformers' own conversion on saving, a few tensors at a time: a model is never whole in one place.

    It is made of a model as it was loaded, before adapters or ranks change what its layers hold.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        # What files hold beside parameters, such as the bias of DeepSeek's routers: no training changes it.
        self.buffers = {name: tensor.clone() for name, tensor in saved_buffers(model).items()}
        shapes = {name: shape_of(tensor) for name, tensor in (*model.named_parameters(), *self.buffers.items())}
        self.shapes = shapes
        self.groups: dict[str, Group] = {}  # of the names that are not the same on disk
        self.owners: dict[str, Group] = {}  # of a name on disk: where it comes from
        self.places: tuple[Group, dict[str, Tensor]] = ((), {})  # of the group that was asked for last
        for group in self._groups():
            self.groups |= dict.fromkeys(group, group)
            self.owners |= dict.fromkeys(self._reverted({name: self._empty(name) for name in group}), group)
        fixed = ((name, self._empty(name)) for name in self.buffers)
        self.fixed = {name for name, _ in self.on_disk(fixed)}  # names on disk of what is no parameter

    def _empty(self, name: str) -> Tensor:
        return torch.empty(self.shapes[name], device="meta")

    def _reverted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415

        return revert_weight_conversion(self.model, tensors)

    def _groups(self) -> Iterable[Group]:
        """Return which names belong together: those that alone would become the same tensor on disk."""
        empty = {name: self._empty(name) for name in self.shapes}
        whole = self._reverted(dict(empty))
        members: dict[str, list[str]] = {}  # by a tensor on disk
        for name in [name for name, tensor in empty.items() if whole.get(name) is not tensor]:
            found = next(iter(self._reverted({name: empty[name]})))
            members.setdefault(found, []).append(name)
        groups = [tuple(names) for names in members.values()]
        kept = [name for name in empty if name not in {one for group in groups for one in group}]
        told = set(kept).union(*(self._reverted({name: empty[name] for name in group}) for group in groups))
        if told != set(whole):
            raise ConfigError(
                f"{type(self.model).__name__}: its weights cannot be saved a few at a time, for "
                f"{min(told ^ set(whole))} is made of more than what belongs to it by name: choose another model"
            )
        return groups

    def on_disk(self, weights: Named) -> Named:
        """Turn a model's own tensors into those on disk, in the same order; only parts of a group wait for the rest."""
        waiting: dict[Group, dict[str, Tensor]] = {}
        for name, tensor in weights:
            group = self.groups.get(name)
            if group is None:
                yield name, tensor
                continue
            parts = waiting.setdefault(group, {})
            parts[name] = tensor if len(group) == 1 else tensor.clone()
            if len(parts) == len(group):
                yield from self._reverted(waiting.pop(group)).items()
        assert not waiting, f"{next(iter(waiting))} came only in part: {list(waiting)}"

    def saved(self, weights: Named) -> Named:
        """Turn a model's parameters into all that its files hold."""
        yield from self.on_disk(weights)
        yield from self.on_disk(iter(self.buffers.items()))

    def restore_buffers(self) -> None:
        """Give the model its buffers again in the precision of its files, which an engine in bfloat16 takes away."""
        held = dict(self.model.named_buffers())
        for name, tensor in self.buffers.items():
            held[name].data = tensor.to(held[name].device)

    def load(self, name: str, tensor: Tensor) -> None:
        """Put a tensor that has its name on disk where the model, which must be whole, holds its numbers."""
        group = self.owners.get(name)
        if group is None:
            self._own(name).copy_(tensor)
            return
        if self.places[0] != group:
            self.places = group, self._reverted(self._numbered(group))
        places, start = self.places[1][name], 0
        for own in map(self._own, group):
            here = (places >= start) & (places < start + own.numel())
            own.view(-1)[places[here] - start] = tensor[here].to(own.dtype)
            start += own.numel()

    def _own(self, name: str) -> Tensor:
        layer, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(layer)
        return (module._parameters.get(leaf) if leaf in module._parameters else module._buffers[leaf]).data

    def _numbered(self, group: Group) -> dict[str, Tensor]:
        """Return the places of all numbers of a group in place of the numbers: conversions only move them."""
        parts, start = {}, 0
        for name in group:
            own = self._own(name)
            parts[name] = torch.arange(start, start + own.numel(), device=own.device).view(own.shape)
            start += own.numel()
        return parts


def saved_buffers(model: Any) -> dict[str, Tensor]:
    """Return what a model's files hold beside its parameters."""
    saved = model.state_dict().keys()
    return {name: tensor for name, tensor in model.named_buffers() if name in saved and tensor.is_floating_point()}


def described_model(folder: Path) -> Any | None:
    """Return the model that a folder's config.json names, without weights, or None where it is no class of
    Transformers' own: such a model is saved as it is.
    """
    import transformers  # noqa: PLC0415

    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    if architecture not in dir(transformers):
        return None
    with torch.device("meta"):
        return getattr(transformers, architecture)(transformers.AutoConfig.from_pretrained(folder))
