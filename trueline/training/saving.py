"""One rank's share of a checkpoint: copied to buffers, written by a thread of its own, and read into any layout."""

import hashlib
import json
import math
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trueline.config.base import ConfigError
from trueline.models.lora import ADAPTER, SETTINGS, peft_name
from trueline.models.weight_names import WeightNames
from trueline.runtime.cluster import free_memory
from trueline.training.checkpoints import Saved
from trueline.training.engines import TrainEngine

MODEL, LORA, TRAINING = "model/model", f"model/{Path(ADAPTER).stem}", "training"  # files, without ranks and suffix
AVERAGE = "average"  # the part of a tensor that engines keep apart from the others
FIXED = "fixed.safetensors"  # what a model's files hold beside its parameters, for checkpoints without a model
INDEX = "model/model.safetensors.index.json"
BUFFER_BYTES, LEAST_BYTES = 256 * 2**20, 16 * 2**20  # of a buffer, where memory is free and where it is not
HOST_SHARE = 0.5  # of the memory that is free at the start; where it is less than a share, copying waits for writing

Content = tuple[str, str, Tensor]  # file, name in it, whole tensor
Shard = tuple[str, bytes, int]  # a safetensors file: name, head, and how many bytes of tensors follow


def contents(engine: TrainEngine, names: WeightNames, adapted: bool, model: bool = True) -> Iterator[Content]:
    """Yield all that a checkpoint holds, gathered on every rank, or leave out the weights of a model.

    A model has the names on disk, and training state the trainer's own.
    """
    if adapted:
        yield from ((LORA, peft_name(name), tensor) for name, tensor in engine.masters())
    elif model:
        yield from ((MODEL, name, tensor) for name, tensor in names.saved(engine.weights()))
    for name, state in engine.state():
        yield from ((TRAINING, f"{name}/{part}", tensor) for part, tensor in state.items())
    yield from ((TRAINING, f"{name}/{AVERAGE}", tensor) for name, tensor in engine.averages())


def snapshot_bytes(weights: float, trained: float, world: int, averaged: bool) -> float:
    """Estimate what one rank copies to host memory: a share of all weights' bytes, and of what is trained, in float32,
    master weights, two moments and the average.
    """
    return (weights + 4 * trained * (3 + averaged)) / world


def shard_name(stem: str, rank: int, world: int) -> str:
    return f"{stem}.safetensors" if world == 1 else f"{stem}-{rank + 1:05d}-of-{world:05d}.safetensors"


def piece(elements: int, rank: int, world: int) -> tuple[int, int]:
    """Return where a rank's piece of a flat tensor begins and ends."""
    return elements * rank // world, elements * (rank + 1) // world


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank writes of a tensor: nothing, all of it, or a piece of its elements."""

    stem: str
    key: str
    shape: torch.Size  # of the whole
    dtype: torch.dtype
    start: int
    stop: int

    def size(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize

    def entry(self, at: int) -> dict[str, Any]:
        """Return this part's line in the head of a safetensors file."""
        code = str(self.dtype).removeprefix("torch.").upper()
        for word, short in (("FLOAT", "F"), ("UINT", "U"), ("INT", "I")):
            code = code.replace(word, short)
        shape = [self.stop - self.start] if self.stem == TRAINING else list(self.shape)
        return {"dtype": code, "shape": shape, "data_offsets": [at, at + self.size()]}


def divide(contents: Iterable[Content], rank: int, world: int) -> tuple[list[Part], dict[str, int]]:
    """Return this rank's parts, and which rank writes which weight.

    Training state is cut evenly, tensor by tensor; weights are whole, and go by their size; adapters are rank 0's.
    """
    specs = [(stem, key, tensor.shape, tensor.dtype) for stem, key, tensor in contents]
    owners = owners_of({key: shape.numel() for stem, key, shape, _ in specs if stem == MODEL}, world)
    parts = []
    for stem, key, shape, dtype in specs:
        whole = (0, shape.numel() if owners.get(key, 0) == rank else 0)
        parts.append(Part(stem, key, shape, dtype, *(piece(shape.numel(), rank, world) if stem == TRAINING else whole)))
    return parts, owners


def owners_of(sizes: dict[str, int], world: int) -> dict[str, int]:
    """Give every tensor, large ones first, to the rank that has least so far."""
    loads, owners = [0] * world, {}
    for key in sorted(sizes, key=sizes.__getitem__, reverse=True):
        owners[key] = loads.index(min(loads))
        loads[owners[key]] += sizes[key]
    return owners


def make_shard(name: str, parts: list[Part], metadata: dict[str, str]) -> Shard:
    entries: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for part in parts:
        entries[part.key] = part.entry(at)
        at += part.size()
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return name, struct.pack("<Q", len(text)) + text, at


class Ring:
    """Host buffers that go from whoever copies to whoever writes, and back."""

    def __init__(self) -> None:
        self.free: SimpleQueue[Tensor] = SimpleQueue()
        self.filled: SimpleQueue[tuple[Tensor, int] | None] = SimpleQueue()  # None ends what was copied
        self.buffer: Tensor | None = None  # that is copied to
        self.used = 0

    def allocate(self, size: float, room: float) -> None:
        """Make room for all of `size` and a little more, as whole tensors divide unevenly, or as far as room goes."""
        each = max(math.ceil(min(BUFFER_BYTES, size / 2, max(room / 2, LEAST_BYTES))), 1)
        for _ in range(max(math.ceil(min(size, room) / each), 1) + 1):
            self.free.put(host_buffer(each))

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Tell the writer of the end, whatever ends the copying inside."""
        try:
            yield
        finally:
            self._hand_over()
            self.filled.put(None)

    def put(self, source: Tensor) -> None:
        """Copy bytes; wait where all buffers are full and not yet written."""
        while len(source):
            if self.buffer is None:
                self.buffer, self.used = self.free.get(), 0
            count = min(len(self.buffer) - self.used, len(source))
            # It returns when all is copied: a gathered tensor's memory may be taken for the next at once.
            self.buffer[self.used : self.used + count].copy_(source[:count])
            self.used, source = self.used + count, source[count:]
            if self.used == len(self.buffer):
                self._hand_over()

    def _hand_over(self) -> None:
        if self.buffer is not None:
            self.filled.put((self.buffer, self.used))
        self.buffer = None

    def written(self) -> Iterator[memoryview]:
        """Yield what is copied, and take each buffer back behind it, until the end is told."""
        while (entry := self.filled.get()) is not None:
            try:
                yield entry[0].numpy().data[: entry[1]]
            finally:
                self.free.put(entry[0])


def host_buffer(size: int) -> Tensor:
    """Return memory that a GPU copies to at full speed, where there is one and the system grants it."""
    if torch.cuda.is_available():
        with suppress(RuntimeError):
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return torch.empty(size, dtype=torch.uint8)


class Saver:
    """Write one rank's share of checkpoints, one at a time."""

    def __init__(
        self,
        rank: int,
        world: int,
        contents: Callable[[], Iterator[Content]],
        without_model: Callable[[], Iterator[Content]] = lambda: iter(()),
    ) -> None:
        self.rank, self.world, self.contents, self.without_model = rank, world, contents, without_model
        self.ring, self.thread = Ring(), ThreadPoolExecutor(1, "save")
        self.allocated: Future[None] | None = None
        self.writing: Future[Saved] | None = None
        self.divisions: dict[tuple[bool, bool], tuple[list[Part], dict[str, int]]] = {}

    def allocate(self, size: float, sharers: int = 1, coming: float = 0.0) -> "Future[None]":
        """Begin to allocate the buffers, on a machine that as many ranks share and will each take more of."""
        room = max(HOST_SHARE * (free_memory() / sharers - coming), 0.0)
        self.allocated = self.thread.submit(self.ring.allocate, size, room)
        return self.allocated

    def save(self, folder: Path, steps: int, describe: Callable[[], None], model: bool = True) -> None:
        """Copy this rank's share and return; the thread writes it, and calls `describe` for files of other kinds.

        What there is to write changes with the optimizer's first step and with `model`, which says whether to write the
        weights of a model; it is looked up before it is copied.
        """
        self.saved(wait=True)
        contents = self.contents if model else self.without_model
        if (steps > 0, model) not in self.divisions:
            self.divisions[steps > 0, model] = divide(contents(), self.rank, self.world)
        parts, owners = self.divisions[steps > 0, model]
        (self.allocated or self.allocate(sum(part.size() for part in parts))).result()
        self.writing = self.thread.submit(self._write, folder, self._shards(parts, steps), owners, describe)
        with self.ring.filling():
            for part, (stem, key, tensor) in zip(parts, contents(), strict=True):
                assert (part.stem, part.key, part.shape) == (stem, key, tensor.shape), f"{key} is not where it was"
                mine = tensor.detach().contiguous().view(-1)[part.start : part.stop]
                self.ring.put(mine.view(torch.uint8))

    def saved(self, *, wait: bool) -> Saved | None:
        """Return what became of the last save, or None while it is under way."""
        if self.writing is None or not (wait or self.writing.done()):
            return None
        return self.writing.result()

    def _shards(self, parts: list[Part], steps: int) -> list[Shard]:
        shapes = json.dumps({part.key: list(part.shape) for part in parts if part.stem == TRAINING})
        about = {TRAINING: {"steps": str(steps), "shapes": shapes}}
        shards = []
        for stem in dict.fromkeys(part.stem for part in parts):
            mine = [part for part in parts if part.stem == stem and part.stop > part.start]
            name = shard_name(stem, self.rank, 1 if stem == LORA else self.world)
            if stem != LORA or self.rank == 0:
                shards.append(make_shard(name, mine, about.get(stem, {"format": "pt"})))
        return shards

    def _write(self, folder: Path, shards: list[Shard], owners: dict[str, int], describe: Callable[[], None]) -> Saved:
        start, digests, problem = time.monotonic(), {}, None
        copied = self.ring.written()
        try:
            (folder / MODEL).parent.mkdir(exist_ok=True)
            rest = memoryview(b"")
            for shard in shards:
                digests[shard[0]], rest = write_shard(folder, shard, rest, copied)
            describe()
            if self.rank == 0 and self.world > 1 and owners:
                write_index(folder / INDEX, owners, self.world)
        except (OSError, ValueError, SafetensorError) as error:  # a ValueError is of files of other kinds
            problem = f"rank {self.rank}: {error}"
        finally:
            for _ in copied:  # what a full disk does not take
                pass
        return Saved(digests, time.monotonic() - start, problem)


def write_shard(folder: Path, shard: Shard, rest: memoryview, copied: Iterator[memoryview]) -> tuple[str, memoryview]:
    """Write one file to the disk; return its SHA-256, and what is left of the buffer that it ended in."""
    name, head, left = shard
    digest = hashlib.sha256(head)
    with (folder / name).open("wb") as file:
        file.write(head)
        while left:
            rest = rest or next(copied, rest)
            if not rest:
                raise OSError(f"{name}: copying was broken off")
            part, rest = rest[:left], rest[left:]
            file.write(part)
            digest.update(part)
            left -= len(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest(), rest


def write_index(file: Path, owners: dict[str, int], world: int) -> None:
    """Write which file of the model's folder has which tensor, as `from_pretrained` wants it."""
    files = {key: Path(shard_name(MODEL, owner, world)).name for key, owner in owners.items()}
    file.write_text(json.dumps({"metadata": {}, "weight_map": files}, indent=2))


def describe_model(folder: Path, model: Any, config: Any, adapter: Any | None, tokenizer: Any) -> None:
    """Write what `from_pretrained` wants beside weights or adapter."""
    if adapter is not None:
        adapter.save_pretrained(folder)
        config.save_pretrained(folder / SETTINGS)
    else:
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class SavedState:
    """The training state of a checkpoint, whichever ranks wrote it."""

    def __init__(self, folder: Path) -> None:
        self.files = [safe_open(file, framework="pt") for file in sorted(folder.glob(f"{TRAINING}*.safetensors"))]
        about = (self.files[0].metadata() or {}) if self.files else {}
        if "shapes" not in about:
            raise ConfigError(
                f"{folder}: its training state is missing, or of a Trueline that did not yet share it out over files; "
                f"start a new run with --model {folder}/model"
            )
        self.steps = int(about["steps"])
        self.shapes = {key: torch.Size(shape) for key, shape in json.loads(about["shapes"]).items()}

    def by_name(self) -> dict[str, dict[str, str]]:
        """Return the keys of all parts by the tensors that they belong to."""
        names: dict[str, dict[str, str]] = {}
        for key in sorted(self.shapes):
            name, _, part = key.rpartition("/")
            names.setdefault(name, {})[part] = key
        return names

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self.shapes[parts["weight"]]) for name, parts in self.by_name().items()}

    def read(self, key: str, wanted: slice = slice(None)) -> Tensor:
        """Return a whole tensor, of which only the wanted elements are read; what the others hold is undefined."""
        elements = self.shapes[key].numel()
        first, last, _ = wanted.indices(elements)
        found: list[tuple[int, Tensor]] = []
        for rank, file in enumerate(self.files):
            start, stop = piece(elements, rank, len(self.files))
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                found.append((begin, file.get_slice(key)[begin - start : end - start]))
        whole = torch.empty(elements, dtype=found[0][1].dtype if found else None)
        for begin, values in found:
            whole[begin : begin + len(values)] = values
        return whole.view(self.shapes[key])


def load_state(engine: TrainEngine, saved: SavedState) -> None:
    """Let an engine take up what was saved; of parts that are shaped like their weight, read only what it wants."""
    named = saved.by_name()

    def read(name: str, part: str) -> Tensor:
        key, like = named[name][part], saved.shapes[named[name]["weight"]]
        return saved.read(key, engine.wanted(name, part) if saved.shapes[key] == like else slice(None))

    engine.start_loading(saved.steps)
    for name, parts in named.items():
        engine.load_state(name, {part: read(name, part) for part in parts if part != AVERAGE})
    engine.load_averages((name, read(name, AVERAGE)) for name, parts in named.items() if AVERAGE in parts)
