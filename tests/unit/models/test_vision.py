"""Vision-language models: what is refused of them by name, what is frozen, and pictures that must not be mixed up."""

import json
from functools import partial
from pathlib import Path
from shutil import copy

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.support.pictures import (
    SPAN,
    make_picture,
    make_tiny_gemma,
    make_tiny_idefics,
    make_tiny_llava,
    make_tiny_qwen,
    png,
)
from tests.support.tiny import make_tiny_model
from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig, RanksConfig
from trueline.config.supervised import SftConfig
from trueline.data.pictures import Picture
from trueline.data.types import Repeat, Sample
from trueline.models import vision
from trueline.models.attention import Arrangement, Padded, Shared
from trueline.models.loading import check_model, load_model, load_tokenizer
from trueline.models.ring_attention import Mesh
from trueline.models.scorer import Probe
from trueline.offline.build import ReferenceCache
from trueline.plan.offline import plan_supervised
from trueline.training.group import ModelGroup

MAKERS = {"idefics3": make_tiny_idefics, "llava": make_tiny_llava, "gemma3": make_tiny_gemma}
MAKERS |= {kind: partial(make_tiny_qwen, kind=kind) for kind in ("qwen2_5_vl", "qwen3_vl")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_idefics(tmp_path_factory.mktemp("model"))


def picture(seed: int, width: int = 40) -> Picture:
    return Picture(png(make_picture(seed, width)), width, 24)


def samples(*seeds: int) -> list[Sample]:
    """Sequences of the same tokens that stand for these pictures."""
    tokens, mask = torch.arange(3, 103), torch.arange(100) >= 90
    return [Sample(tokens, mask, pictures=(picture(seed),)) for seed in seeds]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("", "reads only text"),
        ("glm4v", r"family glm4v, which has positions in three dimensions \(M-RoPE\) that were not tried here"),
        ("paligemma", "family paligemma, which has attention in both directions among the tokens of a picture"),
        ("kosmos-2", "family kosmos-2, which has a layout of pixels that is not known here"),
    ],
)
def test_other_families_are_refused_by_name(family: str, reason: str) -> None:
    why = vision.blindness(family)
    with pytest.raises(ConfigError, match=rf"^model.train_vision=all: it (is of the )?{reason}: leave it out"):
        vision.check_vision("it", ModelConfig(train_vision="all"), family)
    vision.check_vision("it", ModelConfig(), family)
    assert why and not any(map(vision.blindness, vision.VISION_FAMILIES))


def test_facts_tell_the_family(model: Path, tmp_path: Path) -> None:
    assert check_model(ModelConfig(path=str(model))).family == "idefics3"
    text = str(make_tiny_model(tmp_path, tied=True))
    assert check_model(ModelConfig(path=text)).family == ""
    assert vision.load_vision(ModelConfig(path=text)) is None


def test_a_model_without_its_processor_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_idefics(tmp_path)
    (folder / "processor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"^model\.path=.*processor"):
        vision.load_vision(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("family", MAKERS)
def test_what_is_frozen(family: str, tmp_path: Path) -> None:
    folder, layout = MAKERS[family](tmp_path), vision.VISION_FAMILIES[family]
    for trained, frozen in {"none": {"tower", "projector"}, "projector": {"tower"}, "all": set()}.items():
        model = load_model(ModelConfig(path=str(folder), train_vision=trained), torch.float32, packed=True)
        parts: dict[bool, set[str]] = {True: set(), False: set()}
        for name, parameter in model.named_parameters():
            parts[parameter.requires_grad].add(layout.part(name))
        assert parts == {False: frozen, True: {"", "tower", "projector"} - frozen}


def test_processors_work_without_their_part_for_videos(tmp_path: Path) -> None:
    """Its settings still come with what is saved."""
    loaded = vision.load_vision(ModelConfig(path=str(make_tiny_qwen(tmp_path / "old"))))  # has preprocessor_config.json
    assert loaded is not None
    loaded.processor.save_pretrained(tmp_path / "new")
    copy(tmp_path / "old" / "config.json", tmp_path / "new")
    saved = json.loads((tmp_path / "new" / "processor_config.json").read_text())
    assert saved["video_processor"]["patch_size"] == 8 and saved["processor_class"] == "Qwen2_5_VLProcessor"
    again = vision.load_vision(ModelConfig(path=str(tmp_path / "new")))
    assert again is not None and vision.video_settings(str(tmp_path / "new")) == saved["video_processor"]
    shown = [(picture(1), picture(2))]
    for name, array in loaded.arrays(shown).items():
        assert np.array_equal(array, again.arrays(shown)[name])


@pytest.mark.parametrize("family", MAKERS)
def test_the_tower_is_known_without_loading_it(family: str, tmp_path: Path) -> None:
    """A pass has no more patches than so many for each of its tokens, so that tokens limit them too."""
    folder = MAKERS[family](tmp_path)
    facts, layout = check_model(ModelConfig(path=str(folder))), vision.VISION_FAMILIES[family]
    model = AutoModelForImageTextToText.from_pretrained(folder)
    counts = dict.fromkeys(("", *vision.PARTS), 0)
    for name, parameter in model.named_parameters():
        counts[layout.part(name)] += parameter.numel()
    tower = facts.tower
    assert (tower.parameters, tower.projector) == (counts["tower"], counts["projector"])
    assert facts.parameters == sum(counts.values()) and (tower.layers, tower.hidden_size) == (2, 32)
    assert [tower.frozen(what) for what in ("none", "projector", "all")] == [
        counts["tower"] + counts["projector"],
        counts["tower"],
        0,
    ]
    ours = vision.load_vision(ModelConfig(path=str(folder)))
    assert ours is not None
    pixels = ours.arrays([(picture(1), picture(2, 60))])["pixel_values"]
    patches = len(pixels) if vision.GRIDS in ours.arrays([(picture(1),)]) else pixels.size // (3 * 8 * 8)
    shown = ours.tokens(ours.placeholder * 2, [picture(1), picture(2, 60)]).count(ours.token)
    assert patches == tower.patches * shown


def test_a_picture_that_the_processor_refuses_is_named(tmp_path: Path) -> None:
    make_picture(1, 300, 1).save(tmp_path / "line.png")
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "what?", "completion": "a", "image": "line.png"}) + "\n")
    keys = {"model": {"path": str(make_tiny_qwen(tmp_path / "model"))}, "data": {"path": str(data)}, "runtime": "local"}
    with pytest.raises(ConfigError, match=r"rows\.jsonl.*1.*processor refuses its pictures .*aspect ratio"):
        plan_supervised(SftConfig.parse(keys), here=False)


def test_positions_in_three_dimensions_begin_anew_in_every_sequence(tmp_path: Path) -> None:
    folder = make_tiny_qwen(tmp_path)
    ours = vision.load_vision(ModelConfig(path=str(folder)))
    assert ours is not None
    backbone = AutoModelForImageTextToText.from_pretrained(folder).base_model
    shown = [(picture(1),), (), (picture(2), picture(3, 60))]
    tokens = [torch.tensor(ours.tokens(text, some)) for text, some in ((f"a{SPAN}b", shown[0]), (2 * SPAN, shown[2]))]
    tokens.insert(1, tokens[0][-1:].repeat(5))  # words
    lengths = [len(one) for one in tokens]
    grids = torch.from_numpy(ours.arrays(shown)[vision.GRIDS])
    found = ours.places(backbone, torch.cat(tokens), lengths, shown, grids)
    first, second, third = found.split(lengths)
    assert first[2:6].tolist() == [[2, 2, 2], [2, 2, 3], [2, 3, 2], [2, 3, 3]] and first[6].tolist() == [4, 4, 4]
    assert second.tolist() == [[at] * 3 for at in range(len(second))]
    assert third[0].tolist() == [0, 0, 0] and third.shape == (lengths[2], 3)
    padded = Padded(lengths).spatial(found)
    assert padded.shape == (3, 3, max(lengths)) and torch.equal(padded[:, 0, : lengths[0]].T, first)
    assert torch.equal(Arrangement(lengths).spatial(found)[:, 0].T, found)
    repeat = [Repeat(2, 0, 1)]  # of which no position is computed again
    assert torch.equal(
        Shared(lengths, repeat, found.device).spatial(found)[:, 0].T, torch.cat([first, second, third[1:]])
    )


def test_dropout_is_off_in_all_parts(tmp_path: Path) -> None:
    file = make_tiny_idefics(tmp_path) / "config.json"
    settings = json.loads(file.read_text())
    settings["vision_config"]["attention_dropout"] = settings["text_config"]["attention_dropout"] = 0.5
    file.write_text(json.dumps(settings))
    model = load_model(ModelConfig(path=str(tmp_path)), torch.float32)
    assert model.config.vision_config.attention_dropout == model.config.text_config.attention_dropout == 0.0


def test_pixels_are_those_of_the_processor_for_the_whole_pass(model: Path) -> None:
    """Tiles of different sizes are filled up as in a batch of the processor."""
    ours = vision.load_vision(ModelConfig(path=str(model)))
    assert ours is not None
    shown = [(picture(1, 60), picture(2, 20)), (), (picture(3, 33),)]
    found = ours.arrays(shown)
    for name, array in found.items():
        rows = [ours.arrays([one])[name] for one in shown if one]
        assert array.shape[1] == sum(row.shape[1] for row in rows)
        start = 0
        for row in rows:
            part = array[:, start : start + row.shape[1]]
            inside = tuple(slice(0, size) for size in row.shape)
            assert np.array_equal(part[inside], row) and np.count_nonzero(part) == np.count_nonzero(row)
            start += row.shape[1]
    again = ours.arrays([shown[2], shown[0]])
    assert not np.array_equal(again["pixel_values"], found["pixel_values"])


def test_arrays_are_filled_up_with_zeros() -> None:
    joined = vision.join([np.ones((1, 2, 3)), np.ones((1, 1, 2))], axis=1)
    assert joined.tolist() == [[[1, 1, 1], [1, 1, 1], [1, 1, 0]]]


def test_the_probe_has_no_tokens_of_pictures(model: Path) -> None:
    loaded = AutoModelForImageTextToText.from_pretrained(model)
    usual = Probe(loaded, torch.device("cpu"), False, False).tokens
    loaded.config.image_token_id = int(usual[3])
    found = Probe(loaded, torch.device("cpu"), False, False).tokens
    assert loaded.config.image_token_id in usual and loaded.config.image_token_id not in found
    assert vision.picture_tokens(AutoConfig.from_pretrained(model)) == [
        load_tokenizer(ModelConfig(path=str(model))).convert_tokens_to_ids("<image>")
    ]


def test_sequences_with_pictures_share_no_prefixes() -> None:
    group = ModelGroup("model", [], RanksConfig(share_prefixes=True), 1.0, Mesh(1))
    group.proven = True
    shown = samples(1, 2)
    assert group.plan([Sample(one.tokens, one.mask) for one in shown]).saved > 0
    assert group.plan(shown).saved == 0


def test_reference_log_probs_are_of_the_same_pictures(tmp_path: Path) -> None:
    cache = ReferenceCache(tmp_path / "reference.safetensors", "model")
    cache.write(samples(1, 2), torch.zeros(200))
    assert cache.read(samples(1, 2)) is not None
    assert cache.read(samples(2, 1)) is None and cache.read(samples(1, 3)) is None


def test_data_with_another_picture_under_the_same_name_is_other_data(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "what?", "completion": "a", "image": "a.png"}) + "\n")
    keys = {"model": {"path": str(model)}, "data": {"path": str(data)}, "runtime": "local"}
    digests = []
    for seed in (1, 1, 2):
        make_picture(seed).save(tmp_path / "a.png")
        (digest,) = plan_supervised(SftConfig.parse(keys), here=False).material.train.digests
        digests.append(digest)
    assert digests[0] == digests[1] != digests[2]
