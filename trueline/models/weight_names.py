"""Weights under their names in checkpoints and engines; Transformers may hold them fused."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueline.config.base import ConfigError
from trueline.models.loading import CLASSES, auto_class, shape_of
from trueline.models.vision import VISION_FAMILIES

Named = Iterator[tuple[str, Tensor]]
Group = tuple[str, ...]  # a model's own names of tensors that are converted together


class WeightNames:
    """Transformers' conversion on saving, a few tensors at a time; made before adapters or sharding change layers."""

    def __init__(self, model: Any) -> None:
        self.model = model
        # Files may contain buffers, such as the bias of DeepSeek's routers; training does not change them.
        saved, buffers = model.state_dict().keys(), model.named_buffers()
        self.buffers = {name: one.clone() for name, one in buffers if name in saved and one.is_floating_point()}
        self.shapes = {name: shape_of(tensor) for name, tensor in (*model.named_parameters(), *self.buffers.items())}
        self.groups: dict[str, Group] = {}  # of names that differ on disk
        self.owners: dict[str, Group] = {}  # of names on disk
        self.places: tuple[Group, dict[str, Tensor]] = ((), {})  # of the group that was loaded last
        self.resized: set[str] = set()  # names whose group has another number of elements on disk
        for group in self._groups():
            empty = {name: self._empty(name) for name in group}
            found = self._to_disk(dict(empty))
            self.groups |= dict.fromkeys(group, group)
            self.owners |= dict.fromkeys(found, group)
            if sum(one.numel() for one in found.values()) != sum(one.numel() for one in empty.values()):
                self.resized.update(group)
        fixed = ((name, self._empty(name)) for name in self.buffers)
        self.fixed = {name for name, _ in self.on_disk(fixed)}  # names of buffers on disk

    def _empty(self, name: str) -> Tensor:
        return torch.empty(self.shapes[name], device="meta")

    def _to_disk(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415

        return revert_weight_conversion(self.model, tensors)

    def _groups(self) -> Iterable[Group]:
        """Return which names belong together: those that become the same tensor on disk."""
        empty = {name: self._empty(name) for name in self.shapes}
        whole = self._to_disk(dict(empty))
        members: dict[str, list[str]] = {}  # by a tensor on disk
        for name in [name for name, tensor in empty.items() if whole.get(name) is not tensor]:
            found = next(iter(self._to_disk({name: empty[name]})))
            members.setdefault(found, []).append(name)
        groups = [tuple(names) for names in members.values()]
        kept = [name for name in empty if name not in {one for group in groups for one in group}]
        known = set(kept).union(*(self._to_disk({name: empty[name] for name in group}) for group in groups))
        if known != set(whole):
            raise ConfigError(
                f"{type(self.model).__name__}: its weights cannot be saved a few at a time, because "
                f"{min(known ^ set(whole))} depends on other tensors: choose another model"
            )
        return groups

    def on_disk(self, weights: Named) -> Named:
        """Convert a model's tensors to those on disk, in order; only parts of a group wait for the rest."""
        waiting: dict[Group, dict[str, Tensor]] = {}
        for name, tensor in weights:
            if (group := self.groups.get(name)) is None:
                yield name, tensor
                continue
            parts = waiting.setdefault(group, {})
            parts[name] = tensor if len(group) == 1 else tensor.clone()
            if len(parts) == len(group):
                yield from self._to_disk(waiting.pop(group)).items()
        assert not waiting, f"{next(iter(waiting))} is incomplete: {list(waiting)}"

    def file_tensors(self, weights: Named) -> Named:
        """Convert a model's parameters to all tensors of its files, buffers included."""
        yield from self.on_disk(weights)
        yield from self.on_disk(iter(self.buffers.items()))

    def restore_buffers(self) -> None:
        """Restore the model's buffers in the precision of its files, which a bfloat16 engine loses."""
        held = dict(self.model.named_buffers())
        for name, tensor in self.buffers.items():
            held[name].data = tensor.to(held[name].device)

    def load(self, name: str, tensor: Tensor) -> None:
        """Load a tensor by its name on disk into the model, which must not be sharded."""
        if (group := self.owners.get(name)) is None:
            self._own(name).copy_(tensor)
            return
        if self.places[0] != group:
            self.places = group, self._to_disk(self._number_places(group))
        places, start = self.places[1][name], 0
        for own in map(self._own, group):
            here = (places >= start) & (places < start + own.numel())
            own.view(-1)[places[here] - start] = tensor[here].to(own.dtype)
            start += own.numel()

    def _own(self, name: str) -> Tensor:
        layer, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(layer)
        return (module._parameters.get(leaf) if leaf in module._parameters else module._buffers[leaf]).data

    def _number_places(self, group: Group) -> dict[str, Tensor]:
        """Return the index of every number of a group in its place: conversions only move numbers."""
        parts, start = {}, 0
        for name in group:
            own = self._own(name)
            parts[name] = torch.arange(start, start + own.numel(), device=own.device).view(own.shape)
            start += own.numel()
        return parts


def described_model(folder: Path) -> Any | None:
    """Return the model of a folder's config.json without weights; None if it is not a class of Transformers."""
    import transformers  # noqa: PLC0415

    described = json.loads((folder / "config.json").read_text())
    architecture, is_known = described["architectures"][0], described["architectures"][0] in dir(transformers)
    if not is_known and described["model_type"] not in VISION_FAMILIES:
        return None
    settings = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        if is_known:
            return getattr(transformers, architecture)(settings)
        head = next(head for head, name in CLASSES.items() if architecture.endswith(name.removeprefix("AutoModel")))
        return auto_class(settings, head).from_config(settings)
