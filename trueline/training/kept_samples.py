"""The samples that a step trained on, as a file: exact, compressed, and read without unpickling anything."""

import io
import json
import zipfile
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trueline.config.base import ConfigError, Tree
from trueline.data.types import PICTURES, Kin
from trueline.files import UNFINISHED, write_atomically
from trueline.runtime.actors import Stored
from trueline.training.report import LossSettings, Metrics
from trueline.training.samples import Fields, SampleBlock, SampleNumbers, StoredSamples

FOLDER, ENDING, ABOUT = "samples", ".npz", "about"
QUICK = 1  # level of compression: higher ones take several times as long and save a few percent
BROKEN = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error)
TOO_LARGE = "the samples of one checkpoint interval exceed it, so some of its steps cannot be replayed: raise it"


@dataclass(frozen=True, slots=True)
class Update:
    """An optimizer step of one model: what it was made of, and its metrics."""

    loss: str
    numbers: list[int]  # of the samples, in their order
    weights: list[float]
    settings: Tree
    metrics: Metrics

    @classmethod
    def of(cls, loss: str, samples: StoredSamples, settings: LossSettings, metrics: Metrics) -> "Update":
        about = {
            "temperature": settings.temperature,
            "statistics": settings.statistics,
            "logprobs_from_update": settings.logprobs_from_update,
            "draws": settings.draws,
            "kept": asdict(settings.kept) if settings.kept else None,
        }
        return cls(loss, list(samples.numbers), [row.weight for row in samples.rows], about, dict(metrics))


@dataclass(frozen=True, slots=True)
class KeptStep:
    step: int
    config: Tree  # of the run at this step
    updates: list[Update]
    samples: StoredSamples  # with every field, as the updates left them
    calls: list[Any]  # of rewards, by episode; None where it cannot be made again

    def of_update(self, update: Update) -> StoredSamples:
        """Return the samples of an update, with its weights."""
        place = {number: at for at, number in enumerate(self.samples.numbers)}
        chosen = self.samples.subset(place[number] for number in update.numbers)
        known = self.samples.fields
        chosen.fields = Fields(known.lengths, list(known.blocks), dict(known.same))  # an update adds some
        chosen.rows = [replace(row, weight=weight) for row, weight in zip(chosen.rows, update.weights, strict=True)]
        return chosen

    def pack(self) -> bytes:
        fields = self.samples.fields
        known: dict[str, set[int]] = {}
        for block in fields.blocks:
            for name in block.names:
                known.setdefault(name, set()).update(block.samples)
        names = [name for name in sorted(known) if name not in (PICTURES, *fields.same)]
        owners = {name: [number for number in sorted(self.samples.numbers) if number in known[name]] for name in names}
        arrays = {name: [fields.part(name, number) for number in owners[name]] for name in names}
        about = {
            "step": self.step,
            "config": self.config,
            "updates": [asdict(one) for one in self.updates],
            "numbers": self.samples.numbers,
            "lengths": fields.lengths,
            "rows": [asdict(row) | {"kin": list(row.kin)} for row in self.samples.rows],
            "owners": owners,
            "same": fields.same,
            "calls": self.calls,
        }
        return compress({ABOUT: as_bytes(about)} | {name: np.concatenate(parts) for name, parts in arrays.items()})


def as_bytes(about: Tree) -> np.ndarray:
    return np.frombuffer(json.dumps(about, default=str).encode(), np.uint8)


def compress(arrays: dict[str, np.ndarray]) -> bytes:
    """Return what `numpy.load` reads."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=QUICK) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, array, allow_pickle=False)
    return content.getvalue()


def read_arrays(file: Path) -> tuple[Tree, dict[str, np.ndarray]]:
    try:
        with np.load(file, allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
        return json.loads(arrays.pop(ABOUT).tobytes()), arrays
    except BROKEN as error:
        raise ConfigError(f"{file}: not the kept samples of a step ({error}); replay another step") from None


def open_step(file: Path) -> KeptStep:
    about, arrays = read_arrays(file)
    try:
        return step_of_arrays(about, arrays)
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{file}: not the kept samples of a step ({error}); replay another step") from None


def step_of_arrays(about: Tree, arrays: dict[str, np.ndarray]) -> KeptStep:
    blocks = [
        SampleBlock((name,), tuple(about["owners"][name]), Stored({name: array})) for name, array in arrays.items()
    ]
    rows = [SampleNumbers(**row | {"kin": Kin(*row["kin"])}) for row in about["rows"]]
    samples = StoredSamples(about["numbers"], rows, Fields(about["lengths"], blocks, about["same"]))
    updates = [Update(**one) for one in about["updates"]]
    return KeptStep(about["step"], about["config"], updates, samples, about["calls"])


class SampleFiles:
    """The kept samples of a run: the last steps that fit into a number of bytes."""

    def __init__(self, run: Path) -> None:
        self.folder = run / FOLDER
        self.gap = -1  # the newest checkpoint at the time that a step did not fit; others wait for the next one

    def file(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}{ENDING}"

    def steps(self) -> list[int]:
        return sorted(int(file.stem.removeprefix("step_")) for file in self.folder.glob(f"step_*{ENDING}"))

    def forget_after(self, step: int) -> None:
        """Remove what a resumed run trains on again."""
        for left in self.folder.glob(f"*{UNFINISHED}"):
            left.unlink()
        for later in self.steps():
            if later > step:
                self.file(later).unlink()

    def keep(self, step: int, content: bytes, most: int, saved: int) -> bool:
        """Write a step's samples and remove the oldest, but none behind the checkpoint of step `saved`.

        Without these no later step could be replayed, so the new one is left out instead; then return False.
        """
        if self.gap == saved:
            return False
        sizes = {one: self.file(one).stat().st_size for one in self.steps() if one != step}
        while sum(sizes.values()) + len(content) > most and min(sizes, default=step) <= saved:
            self.file(oldest := min(sizes)).unlink()
            del sizes[oldest]
        if sum(sizes.values()) + len(content) > most:
            self.gap = saved
            return False
        self.folder.mkdir(exist_ok=True)
        write_atomically(self.file(step), content)
        return True
