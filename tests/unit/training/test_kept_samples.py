"""Files of kept samples: exact, in a bounded number of bytes, and never with a hole behind the newest checkpoint."""

from pathlib import Path

import numpy as np
import pytest

from trueline.config.base import ConfigError
from trueline.data.types import Kin
from trueline.runtime.actors import Stored
from trueline.training.kept_samples import KeptStep, SampleFiles, Update, open_step
from trueline.training.report import LossSettings
from trueline.training.samples import Fields, SampleBlock, SampleNumbers, StoredSamples

LENGTHS = [3, 2, 4]


def made_step(order: list[int]) -> KeptStep:
    """Three samples; a minibatch that was left out has no entropy, and later old log-probs replace earlier ones."""
    everything, some = (0, 1, 2), (0, 2)
    arrays = {"tokens": np.arange(9, dtype=np.int32), "rollout_logprobs": -np.arange(9, dtype=np.float32) / 7}
    blocks = [
        SampleBlock(("tokens", "rollout_logprobs"), everything, Stored(arrays)),
        SampleBlock(("old_logprobs",), everything, Stored({"old_logprobs": np.zeros(9, np.float32)})),
        SampleBlock(("old_logprobs",), everything, Stored({"old_logprobs": np.full(9, 0.1, np.float32)})),
        SampleBlock(("entropy",), some, Stored({"entropy": np.full(7, 0.2, np.float32)})),
        SampleBlock(("experts",), everything, Stored({"experts": np.ones((9, 2, 2), np.int8)})),
    ]
    rows = [SampleNumbers(LENGTHS[at], 1, 5, at, 2, 0.5, 0.0, True, kin=Kin(at, 1), parts={"a": 1.0}) for at in order]
    samples = StoredSamples(order, rows, Fields(LENGTHS, blocks, {"ref_logprobs": "rollout_logprobs"}))
    for row in rows:
        row.weight = 0.1 + row.episode
    settings = LossSettings(0.7, statistics={"kl_coefficient": 0.01}, logprobs_from_update=True)
    made = Update.of("policy", samples.subset([2, 0]), settings, {"loss": 1 / 3, "skipped": 0.0})
    return KeptStep(4, {"seed": 1}, [made], samples, [{"reply": "a"}, None, {"reply": "b"}])


def test_a_step_is_read_as_it_was_written(tmp_path: Path) -> None:
    kept = made_step([2, 0, 1])  # the order of a streamed step
    (file := tmp_path / "step.npz").write_bytes(kept.pack())
    again = open_step(file)
    assert (again.step, again.config, again.calls) == (4, {"seed": 1}, kept.calls)
    assert again.updates == kept.updates and again.updates[0].metrics["loss"] == 1 / 3
    assert again.updates[0].numbers == [1, 2] and again.updates[0].weights == [1.1, 2.1]
    assert again.updates[0].settings["temperature"] == 0.7 and again.updates[0].settings["logprobs_from_update"]
    assert again.samples.rows == kept.samples.rows and again.samples.numbers == [2, 0, 1]
    for name in ("tokens", "rollout_logprobs", "old_logprobs", "ref_logprobs", "experts"):
        for at in range(3):
            np.testing.assert_array_equal(again.samples.part(name, at), kept.samples.part(name, at), strict=True)
    np.testing.assert_array_equal(again.samples.part("old_logprobs", 0), np.float32(0.1))
    (partly,) = [one for one in again.samples.fields.blocks if "entropy" in one.names]
    assert partly.samples == (0, 2)


def test_the_samples_of_an_update_have_its_weights_and_fields_of_their_own() -> None:
    kept = made_step([0, 1, 2])
    chosen = kept.of_update(Update("policy", [2, 1], [0.25, 0.75], {}, {}))
    assert (chosen.numbers, [row.weight for row in chosen.rows]) == ([2, 1], [0.25, 0.75])
    assert [row.weight for row in kept.samples.rows] == [0.1, 1.1, 2.1]
    chosen.add(SampleBlock(("ref_logprobs",), (1, 2), Stored({"ref_logprobs": np.ones(6)})))
    np.testing.assert_array_equal(kept.samples.part("ref_logprobs", 1), kept.samples.part("rollout_logprobs", 1))


def test_the_oldest_give_way_but_none_behind_the_newest_checkpoint(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path)

    def keep(step: int, saved: int) -> tuple[bool, list[int]]:
        return files.keep(step, b"x" * 10, 30, saved), files.steps()

    assert [keep(step, 0)[1] for step in (1, 2, 3)] == [[1], [1, 2], [1, 2, 3]]
    assert keep(4, 2) == (True, [2, 3, 4])
    assert keep(5, 2) == (True, [3, 4, 5])
    assert keep(6, 2) == (False, [3, 4, 5])  # 3 is needed for 4 and 5
    assert not files.keep(7, b"", 30, 2) and files.steps() == [3, 4, 5]  # there is room, but no step 6
    assert keep(8, 7) == (True, [4, 5, 8])
    assert files.keep(8, b"y" * 10, 30, 7) and files.steps() == [4, 5, 8]  # once more, after a resume
    assert not files.keep(9, b"x" * 31, 30, 8) and files.steps() == [], "a step that is too large alone"


def test_a_resumed_run_forgets_later_steps_and_half_files(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path)
    for step in (1, 2, 3):
        files.keep(step, b"x", 10, 0)
    (files.folder / "step_000004.npz.unfinished").write_bytes(b"half")
    files.forget_after(2)
    assert sorted(file.name for file in files.folder.iterdir()) == ["step_000001.npz", "step_000002.npz"]


def test_what_is_no_kept_step_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "step_000001.npz"
    for content in (b"", b"PK\x03\x04 torn", made_step([0, 1, 2]).pack()[:-40]):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="not the kept samples of a step"):
            open_step(file)
    np.savez(file, about=np.array([{"pickled": 1}], dtype=object))
    with pytest.raises(ConfigError, match="Object arrays cannot be loaded"):
        open_step(file)
