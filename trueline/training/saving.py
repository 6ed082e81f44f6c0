"""One rank's share of a checkpoint: copied to buffers, written by a thread, and read into any layout."""

import hashlib
import json
import math
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trueline.config.base import ConfigError
from trueline.models.lora import ADAPTER, SETTINGS, peft_name
from trueline.models.weight_names import WeightNames
from trueline.runtime.cluster import free_memory
from trueline.training.checkpoints import SaveResult
from trueline.training.engines.engine import AVERAGE, TrainEngine
from trueline.training.engines.shards import Region, Shard, empty_tensors, piece, whole_region, whole_shard

MODEL, LORA, TRAINING = "model/model", f"model/{Path(ADAPTER).stem}", "training"  # files, without ranks and suffix
FIXED = "fixed.safetensors"  # non-parameters of a model's files, for checkpoints without a model
INDEX = "model/model.safetensors.index.json"
BUFFER_BYTES, LEAST_BYTES = 256 * 2**20, 16 * 2**20  # of a buffer, with and without enough free memory
HOST_SHARE = 0.5  # of the free memory at the start; with too little, copying waits for writing
FLOATS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
INTEGERS = {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
FORMAT = {"format": "pt"}  # metadata of a model's files
CODES = {**FLOATS, **INTEGERS, torch.bool: "BOOL"}  # of safetensors

Content = tuple[str, Shard]  # file, and what this rank holds of a tensor in it
File = tuple[str, bytes, int]  # in safetensors: name, header, and how many bytes of tensors follow


def contents(
    engine: TrainEngine, names: WeightNames, adapted: bool, model: bool = True, *, planned: bool = False
) -> Iterator[Content]:
    """Yield what this rank holds of a checkpoint; without `model`, leave out the model's weights.

    Files of models have whole tensors, so these are gathered one after the other; `planned` ones have no values yet.
    """
    if adapted:
        masters = empty_tensors(engine.master_shards()) if planned else engine.masters()
        yield from ((LORA, whole_shard(peft_name(name), tensor)) for name, tensor in masters)
    elif model:
        weights = empty_tensors(engine.weight_shards()) if planned else engine.weights()
        yield from ((MODEL, whole_shard(name, tensor)) for name, tensor in names.file_tensors(weights))  # names on disk
    yield from ((TRAINING, shard) for shard in engine.state_shards())


def snapshot_bytes(weights: float, trained: float, world: int, averaged: bool) -> float:
    """Estimate what one rank copies to host memory: its share of the weights and, in float32, of the training state."""
    return (weights + 4 * trained * (3 + averaged)) / world


def shard_name(stem: str, rank: int, world: int) -> str:
    return f"{stem}.safetensors" if world == 1 else f"{stem}-{rank + 1:05d}-of-{world:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank writes of a tensor: nothing, all of it, or some of its elements."""

    stem: str
    key: str
    region: Region
    dtype: torch.dtype
    start: int  # in what this rank holds
    stop: int

    def size(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize

    def written_region(self) -> Region:
        return self.region.part(self.start, self.stop)


def divide(contents: Iterable[Content], rank: int, world: int) -> tuple[list[Part], dict[str, int]]:
    """Return this rank's parts, and which rank writes which weight.

    Every rank writes what it holds of the training state. Weights stay whole: each, large ones first, goes to the rank
    with the fewest elements so far. Rank 0 writes adapters.
    """
    specs = [(stem, shard.name, shard.region, shard.values.dtype, shard.own()) for stem, shard in contents]
    sizes = {key: region.size() for stem, key, region, _, _ in specs if stem == MODEL}
    loads, owners = [0] * world, dict[str, int]()
    for key in sorted(sizes, key=sizes.__getitem__, reverse=True):
        owners[key] = loads.index(min(loads))
        loads[owners[key]] += sizes[key]
    parts = []
    for stem, key, region, dtype, own in specs:
        whole = (0, region.size() if owners.get(key, 0) == rank else 0)
        parts.append(Part(stem, key, region, dtype, *(own if stem == TRAINING else whole)))
    return parts, owners


class HostBuffers:
    """Buffers that circulate between the copying and the writing thread."""

    def __init__(self) -> None:
        self.free: SimpleQueue[Tensor] = SimpleQueue()
        self.filled: SimpleQueue[tuple[Tensor, int] | None] = SimpleQueue()  # None is the end
        self.buffer: Tensor | None = None  # being filled
        self.used = 0

    def allocate(self, size: float, room: float) -> None:
        """Allocate `size` and a little more, as whole tensors divide unevenly, or as much as `room` allows."""
        each = max(math.ceil(min(BUFFER_BYTES, size / 2, max(room / 2, LEAST_BYTES))), 1)
        for _ in range(max(math.ceil(min(size, room) / each), 1) + 1):
            try:  # pinned memory, to which a GPU copies at full speed
                buffer = torch.empty(each, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            except RuntimeError:  # there is none left
                buffer = torch.empty(each, dtype=torch.uint8)
            self.free.put(buffer)

    def put(self, source: Tensor) -> None:
        """Copy bytes; wait while all buffers are full."""
        while len(source):
            if self.buffer is None:
                self.buffer, self.used = self.free.get(), 0
            count = min(len(self.buffer) - self.used, len(source))
            # Synchronous: the memory of a gathered tensor may be reused at once.
            self.buffer[self.used : self.used + count].copy_(source[:count])
            self.used, source = self.used + count, source[count:]
            if self.used == len(self.buffer):
                self._hand_over()

    def end(self) -> None:
        """Signal the end to the writer."""
        self._hand_over()
        self.filled.put(None)

    def _hand_over(self) -> None:
        if self.buffer is not None:
            self.filled.put((self.buffer, self.used))
        self.buffer = None

    def drain(self) -> Iterator[memoryview]:
        """Yield the copied bytes until the end, and take each buffer back afterwards."""
        while (entry := self.filled.get()) is not None:
            try:
                yield entry[0].numpy().data[: entry[1]]
            finally:
                self.free.put(entry[0])


class Contents(Protocol):
    def __call__(self, model: bool, *, planned: bool = False) -> Iterator[Content]: ...


class Saver:
    """One rank's saves; `contents` yields what the rank holds, with or without the model's weights."""

    def __init__(self, rank: int, world: int, contents: Contents) -> None:
        self.rank, self.world, self.contents = rank, world, contents
        self.buffers, self.thread = HostBuffers(), ThreadPoolExecutor(1, "save")
        self.allocated: Future[None] | None = None
        self.writing: Future[SaveResult] | None = None
        self.divisions: dict[tuple[bool, bool], tuple[list[Part], dict[str, int]]] = {}

    def allocate(self, size: float, sharers: int = 1, coming: float = 0.0) -> "Future[None]":
        """Begin to allocate buffers on a machine with this many ranks, each of which will use `coming` more bytes."""
        room = max(HOST_SHARE * (free_memory() / sharers - coming), 0.0)
        self.allocated = self.thread.submit(self.buffers.allocate, size, room)
        return self.allocated

    def save(self, folder: Path, steps: int, describe: Callable[[], None], model: bool = True) -> None:
        """Copy this rank's share and return; the thread writes it, and calls `describe` to write other files."""
        self.result(wait=True)
        kind = steps > 0, model  # the optimizer's first step and the model's weights change the content
        if kind not in self.divisions:
            self.divisions[kind] = divide(self.contents(model, planned=True), self.rank, self.world)
        parts, owners = self.divisions[kind]
        (self.allocated or self.allocate(sum(part.size() for part in parts))).result()
        files = list(self._files(parts, steps))
        self.writing = self.thread.submit(self._write, folder, files, owners, describe)
        try:
            for part, (stem, shard) in zip(parts, self.contents(model), strict=True):
                assert (part.stem, part.key, part.region) == (stem, shard.name, shard.region), f"{part.key} has moved"
                self.buffers.put(shard.values[part.start : part.stop].contiguous().view(torch.uint8))
        finally:
            self.buffers.end()

    def result(self, *, wait: bool) -> SaveResult | None:
        if self.writing is None or not (wait or self.writing.done()):
            return None
        return self.writing.result()

    def _files(self, parts: list[Part], steps: int) -> Iterator[File]:
        for stem in dict.fromkeys(part.stem for part in parts if part.stem != LORA or self.rank == 0):
            held, at = [part for part in parts if part.stem == stem], 0
            entries: dict[str, Any] = {"__metadata__": state_metadata(held, steps) if stem == TRAINING else FORMAT}
            for part in (part for part in held if part.stop > part.start):
                shape, end = [part.stop - part.start] if stem == TRAINING else part.region.shape, at + part.size()
                entries[part.key] = {"dtype": CODES[part.dtype], "shape": shape, "data_offsets": [at, end]}
                at = end
            text = json.dumps(entries).encode()
            text += b" " * (-len(text) % 8)
            name = shard_name(stem, self.rank, 1 if stem == LORA else self.world)
            yield name, struct.pack("<Q", len(text)) + text, at

    def _write(
        self, folder: Path, files: list[File], owners: dict[str, int], describe: Callable[[], None]
    ) -> SaveResult:
        start, digests, problem = time.monotonic(), {}, None
        copied = self.buffers.drain()
        try:
            (folder / MODEL).parent.mkdir(exist_ok=True)
            rest = memoryview(b"")
            for file in files:
                digests[file[0]], rest = write_file(folder, file, rest, copied)
            describe()
            if self.rank == 0 and self.world > 1 and owners:
                write_index(folder / INDEX, owners, self.world)
        except (OSError, ValueError, SafetensorError) as error:  # `describe` may raise ValueError
            problem = f"rank {self.rank}: {error}"
        finally:
            for _ in copied:  # discard what a full disk does not take
                pass
        return SaveResult(digests, time.monotonic() - start, problem)


def state_metadata(parts: list[Part], steps: int) -> dict[str, str]:
    """Return the metadata of a rank's training state: whole shapes of all tensors, and where its elements lie.

    `torch.distributed.checkpoint` gets these places as well, unless tensor parallelism cuts columns out of rows.
    """
    shapes = {part.key: part.region.shape for part in parts}
    regions = {part.key: part.written_region() for part in parts if part.stop > part.start}
    places = {key: astuple(region)[1:] for key, region in regions.items()}
    found = {"steps": str(steps), "shapes": json.dumps(shapes), "places": json.dumps(places)}
    if any(region.width < math.prod(region.shape) for region in regions.values()):
        return found
    flat = {key: {"saved_offsets": [region.first + region.start]} for key, region in regions.items()}
    return found | {"DCP_SHARDING_INFO": json.dumps(flat)}


def write_file(folder: Path, file: File, rest: memoryview, copied: Iterator[memoryview]) -> tuple[str, memoryview]:
    """Write one file to the disk; return its SHA-256, and the rest of the last buffer."""
    name, header, left = file
    digest = hashlib.sha256(header)
    with (folder / name).open("wb") as stream:
        stream.write(header)
        while left:
            rest = rest or next(copied, rest)
            if not rest:
                raise OSError(f"{name}: copying was interrupted")
            part, rest = rest[:left], rest[left:]
            stream.write(part)
            digest.update(part)
            left -= len(part)
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest(), rest


def write_index(file: Path, owners: dict[str, int], world: int) -> None:
    """Write which file has which tensor, for `from_pretrained`."""
    files = {key: Path(shard_name(MODEL, owner, world)).name for key, owner in owners.items()}
    file.write_text(json.dumps({"metadata": {}, "weight_map": files}, indent=2))


def describe_model(folder: Path, model: Any, config: Any, adapter: Any | None, tokenizer: Any) -> None:
    """Write what `from_pretrained` needs besides the weights or the adapter."""
    if adapter is not None:
        adapter.save_pretrained(folder)
        config.save_pretrained(folder / SETTINGS)
    else:
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class SavedState:
    """The training state of a checkpoint, from any number of ranks."""

    def __init__(self, folder: Path) -> None:
        self.files = [safe_open(file, framework="pt") for file in sorted(folder.glob(f"{TRAINING}*.safetensors"))]
        metadata = (self.files[0].metadata() or {}) if self.files else {}
        if "shapes" not in metadata:
            raise ConfigError(f"{folder}: its training state is missing; start a new run with --model {folder}/model")
        self.steps = int(metadata["steps"])
        self.shapes = {key: torch.Size(shape) for key, shape in json.loads(metadata["shapes"]).items()}
        self.pieces: dict[str, list[tuple[Any, Region]]] = {key: [] for key in self.shapes}  # files, and what they have
        for number, file in enumerate(self.files):
            for key, region in self._regions(number, file.metadata()).items():
                self.pieces[key].append((file, region))

    def _regions(self, number: int, metadata: dict[str, str]) -> dict[str, Region]:
        if "places" in metadata:
            return {key: Region(self.shapes[key], *place) for key, place in json.loads(metadata["places"]).items()}
        # Older files have an equal piece of every tensor.
        wholes = {key: whole_region(shape) for key, shape in self.shapes.items()}
        return {key: one.part(*piece(one.size(), number, len(self.files))) for key, one in wholes.items()}

    def by_name(self) -> dict[str, dict[str, str]]:
        names: dict[str, dict[str, str]] = {}
        for key in sorted(self.shapes):
            name, _, part = key.rpartition("/")
            names.setdefault(name, {})[part] = key
        return names

    def read(self, key: str, wanted: slice = slice(None)) -> Tensor:
        """Return a whole tensor, of which only the wanted elements are read; the others are undefined."""
        first, last, _ = wanted.indices(self.shapes[key].numel())
        found: list[tuple[Region, Tensor]] = []
        for file, region in self.pieces[key]:
            inside = region.within(first, last)
            if inside.size():
                start = inside.start - region.start
                found.append((inside, file.get_slice(key)[start : start + inside.size()]))
        whole = torch.empty(self.shapes[key].numel(), dtype=found[0][1].dtype if found else None)
        for region, values in found:
            region.lay(values, whole)
        return whole.view(self.shapes[key])


def load_state(engine: TrainEngine, saved: SavedState) -> None:
    """Load a saved state into an engine; of parts shaped like their weight, read only what the engine needs."""
    named = saved.by_name()

    def read(name: str, part: str) -> Tensor:
        key, like = named[name][part], saved.shapes[named[name]["weight"]]
        return saved.read(key, engine.needed_slice(name, part) if saved.shapes[key] == like else slice(None))

    engine.start_loading(saved.steps)
    for name, parts in named.items():
        engine.load_state(name, {part: read(name, part) for part in parts if part != AVERAGE})
    engine.load_averages((name, read(name, AVERAGE)) for name, parts in named.items() if AVERAGE in parts)
