"""Pictures of rows: every form in which data has them, and one sentence for each that cannot be read."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from PIL import Image

from tests.support.pictures import make_picture, make_tiny_idefics, png
from trueline.config.base import ConfigError
from trueline.config.data import DataConfig, PromptDataConfig
from trueline.config.model import ModelConfig
from trueline.config.supervised import SftConfig
from trueline.data import pictures
from trueline.data.encoding import encode_conversations, encode_pairs, mismatched_rows
from trueline.data.formats import Conversation, Rated, read_conversations, read_pairs
from trueline.data.messages import content_of
from trueline.data.pictures import Picture, take_pictures, thumbnail
from trueline.data.prompts import read_prompts
from trueline.data.rows import Located
from trueline.data.sources import open_source
from trueline.models.loading import load_chat
from trueline.plan.tasks import check_pictures

IMAGE = {"type": "image"}
ASKED = {"type": "text", "text": "what?"}
ANSWER = {"role": "assistant", "content": "a cat"}


def talk(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}, ANSWER]


def read(row: dict[str, Any], folder: Path = Path(), **keys: Any) -> Conversation:
    (record,), _ = read_conversations([Located(row, "data.jsonl, line 1", folder=folder)], DataConfig(**keys))
    assert isinstance(record, Conversation)
    return record


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_picture(1).save(tmp_path / "cat.png")
    make_picture(2).save(tmp_path / "dog with space.jpg")
    return tmp_path


FORMS: dict[str, Callable[[Path], Any]] = {
    "relative path": lambda folder: "cat.png",
    "absolute path": lambda folder: str(folder / "cat.png"),
    "file URL": lambda folder: f"file://{folder}/cat.png",
    "bytes": lambda folder: (folder / "cat.png").read_bytes(),
    "bytes of datasets.Image": lambda folder: {"bytes": (folder / "cat.png").read_bytes(), "path": None},
    "path of datasets.Image": lambda folder: {"bytes": None, "path": "cat.png"},
    "PIL": lambda folder: Image.open(folder / "cat.png"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_picture_is_read_in_every_form(form: str, folder: Path) -> None:
    for parts in ([{**IMAGE, "image": FORMS[form](folder)}, ASKED], [IMAGE, ASKED]):
        row = {"messages": talk(*parts), "image": None if "image" in parts[0] else FORMS[form](folder)}
        record = read(row, folder)
        assert record.messages[0]["content"] == [IMAGE, ASKED]
        assert content_of(record.messages[0]) == "what?"
        (picture,) = record.pictures
        assert (picture.width, picture.height) == (40, 24)
        assert picture.decode().tobytes() == make_picture(1).tobytes()
        assert picture == read(row, folder).pictures[0]


def test_pictures_of_a_column_come_before_the_text_of_the_first_question(folder: Path) -> None:
    row = {"prompt": "which?", "completion": "both", "images": ["cat.png", "dog%20with%20space.jpg"]}
    row["images"][1] = f"file://{folder}/{row['images'][1]}"
    record = read(row, folder, system_prompt="Look.")
    assert [message["role"] for message in record.messages] == ["system", "user", "assistant"]
    assert record.messages[1]["content"] == [IMAGE, IMAGE, {"type": "text", "text": "which?"}]
    assert [picture.data for picture in record.pictures] == [
        (folder / name).read_bytes() for name in ("cat.png", "dog with space.jpg")
    ]


def test_files_are_read_with_paths_relative_to_them_and_structures_of_images(folder: Path) -> None:
    row = {"messages": talk({**IMAGE, "image": "cat.png"}, ASKED)}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    content = (folder / "cat.png").read_bytes()
    stored = {"prompt": talk(IMAGE, ASKED)[:1], "completion": "a cat", "images": [{"bytes": content, "path": None}]}
    parquet.write_table(arrow.Table.from_pylist([stored]), folder / "rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        (record,), _ = read_conversations(list(open_source(str(folder / name), "data.path")), DataConfig())
        assert isinstance(record, Conversation)
        assert record.messages == talk(IMAGE, ASKED)
        assert record.pictures[0].data == content


def test_a_large_picture_is_made_smaller_once_in_proportion(folder: Path) -> None:
    row = {"messages": talk(IMAGE, ASKED), "image": png(make_picture(3, 200, 50))}
    (small,) = read(row, max_pixels=100 * 25).pictures
    assert (small.width, small.height) == small.decode().size == (100, 25)
    assert take_pictures(Located({"image": small.data}, "x"), talk(IMAGE), 100 * 25)[1] == (small,)


def test_a_thumbnail_is_small_in_proportion_and_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    make_picture(1, 1000, 400).save(stream := io.BytesIO(), "TIFF", exif=exif)
    small = thumbnail(Picture(stream.getvalue(), 400, 1000))
    assert (small.width, small.height) == small.decode().size == (102, 256) and small.kind() == "jpeg"
    few = thumbnail(Picture(png(make_picture(2, 40, 24)), 40, 24))
    assert few.decode().size == (40, 24)  # never enlarged


def test_a_photo_is_turned_as_its_camera_was_held(folder: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    make_picture(1, 40, 24).save(folder / "turned.jpg", exif=exif)
    (picture,) = read({"messages": talk(IMAGE, ASKED), "image": "turned.jpg"}, folder).pictures
    assert (picture.width, picture.height) == picture.decode().size == (24, 40)


def animated() -> bytes:
    import io

    stream = io.BytesIO()
    make_picture(1).save(stream, "GIF", save_all=True, append_images=[make_picture(2)])
    return stream.getvalue()


BAD: dict[str, tuple[Any, str]] = {
    "missing": ("bird.png", r"bird\.png cannot be read \(No such file or directory\): relative paths begin in /"),
    "truncated": (png(make_picture(1, 400, 400))[:2000], r"its content of 2000 bytes is damaged \(.*\): replace"),
    "no image": (b"%PDF-1.4 and more", "its content of 17 bytes is no image that Pillow knows: replace or delete it"),
    "animated": (animated(), r"its content of \d+ bytes is animated \(GIF\): give one of its frames"),
    "network": (
        "https://example.org/cat.png",
        r"'https://example\.org/cat\.png' is not on this machine.*: download it",
    ),
    "data URL": ("data:image/png;base64,AAAA", r"its data URL of 3 bytes is no image that Pillow knows: replace"),
    "no base64": ("data:image/png;base64,%%%%", r"its data URL is damaged \(.*\): encode it in base64 again"),
    "no data": (
        "data:image/png,AAAA",
        r"'data:image/png,AAAA' is no data URL, .*: give its content, as data:image/png",
    ),
    "number": (3.5, r"is of type float \(3\.5\): give a path, bytes, a PIL image"),
    "empty structure": ({"bytes": None, "path": None}, r"has neither bytes nor a path \(.*\): give one of them"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_is_one_sentence_with_row_value_and_remedy(name: str, folder: Path) -> None:
    value, sentence = BAD[name]
    with pytest.raises(ConfigError, match=rf"^data\.jsonl, line 1: picture 2:? .*{sentence}"):
        read({"messages": talk(IMAGE, IMAGE, ASKED), "images": ["cat.png", value]}, folder)


def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = png(Image.new("1", (20_000, 10_000)))
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    for limit in (10**7, 10**9):  # Pillow itself refuses it, or leaves it to us
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(ConfigError, match=r"picture 1: its content .* more than 100 million pixels.*make it small"):
            read({"messages": talk(IMAGE, ASKED), "image": content})


ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "too few": (
        {"messages": talk(IMAGE, IMAGE), "images": ["cat.png"]},
        "2 image parts .* column 'images' has 1: give",
    ),
    "too many": ({"messages": talk(IMAGE), "images": ["cat.png"] * 2}, "1 image parts .* column 'images' has 2: give"),
    "no column": ({"messages": talk(IMAGE)}, "1 image parts .* there is no column images or image: give"),
    "answered with a picture": (
        {
            "messages": [
                {"role": "user", "content": "draw"},
                {"role": "assistant", "content": [{**IMAGE, "image": "cat.png"}]},
            ]
        },
        "an assistant message has a picture, which no model here learns to make: remove it",
    ),
    "plain text": ({"text": "words", "image": "cat.png"}, "has images in column 'image', which only sft"),
    "another kind of part": (
        {"messages": talk(IMAGE, {"type": "audio"}), "image": "cat.png"},
        "part 2 of its content has type 'audio', not text: remove it",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_row_is_one_sentence(name: str, folder: Path) -> None:
    row, sentence = ROWS[name]
    with pytest.raises(ConfigError, match=rf"^data\.jsonl, line 1.*{sentence}"):
        read(row, folder)


def test_completions_of_pairs_have_no_pictures(folder: Path) -> None:
    more = [ANSWER, {"role": "user", "content": [{**IMAGE, "image": "cat.png"}]}, ANSWER]
    row = {"prompt": "what?", "chosen": more, "rejected": "b"}
    with pytest.raises(ConfigError, match="line 1: a completion has a picture: move it into the prompt"):
        read_pairs([Located(row, "data.jsonl, line 1", folder=folder)], DataConfig())


@pytest.mark.parametrize(
    "row", [{"prompt": "what?", "image": "cat.png"}, {"prompt": talk({**IMAGE, "image": "cat.png"})[:1]}]
)
def test_prompts_have_their_pictures_apart_from_their_columns(row: dict[str, Any], folder: Path) -> None:
    (prompt,) = read_prompts([Located(row, "p.jsonl, line 7", folder=folder)], PromptDataConfig(), "p.jsonl")
    assert len(prompt.pictures) == 1 and "cat.png" not in str(prompt.columns)


def test_rows_with_an_empty_column_are_text(folder: Path) -> None:
    for empty in (None, [], ""):
        record = read({"prompt": "what?", "completion": "a", "images": empty})
        assert record.messages[0]["content"] == "what?" and record.pictures == ()


def test_prompts_with_other_pictures_are_other_prompts() -> None:
    shown = [Picture(bytes([number]), 1, 1) for number in range(2)]
    rows = [Rated([ANSWER], [ANSWER], True, f"row {number}", pictures=(shown[number],)) for number in range(2)]
    assert mismatched_rows(rows, 2) == [1, 0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_idefics(tmp_path_factory.mktemp("model"))


def encode(model: Path, row: dict[str, Any], policy: Any = "error", limit: int = 400) -> Any:
    chat = load_chat(ModelConfig(path=str(model)), "auto")
    return encode_conversations([read(row)], chat, limit, "all", policy).samples


def test_tokens_are_those_of_the_processor_and_none_of_a_picture_is_learned(model: Path) -> None:
    from transformers import AutoProcessor

    images = [make_picture(1, 60, 60), make_picture(2, 30, 20)]
    more = [
        {"role": "user", "content": [{"type": "text", "text": "and "}, IMAGE]},
        {"role": "assistant", "content": "dog"},
    ]
    (sample,) = encode(model, {"messages": [*talk(IMAGE, ASKED), *more], "images": [png(image) for image in images]})
    processor = AutoProcessor.from_pretrained(model)
    text = "user:<image>what?\nassistant:a cat</s>user:and <image>\nassistant:dog</s>"
    expected = processor(text=[text], images=[images], add_special_tokens=False)["input_ids"][0]
    assert sample.tokens.tolist() == expected
    learned = processor.tokenizer.decode(sample.tokens[sample.mask])
    assert learned == "a cat</s>dog</s>"
    assert len(sample.pictures) == 2


def test_a_text_must_not_write_a_picture(model: Path) -> None:
    for row in (
        {"messages": talk({"type": "text", "text": "<image>?"}, IMAGE), "image": png(make_picture(1))},
        {"prompt": "<image>?", "completion": "a"},
        {"prompt": "?", "completion": "<image>"},
    ):
        with pytest.raises(
            ConfigError, match=r'has <image> \d times, but \d image parts: write pictures as parts of type "image"'
        ):
            encode(model, row)


def test_a_row_with_pictures_is_never_truncated(model: Path) -> None:
    row = {"messages": talk(IMAGE, ASKED), "image": png(make_picture(1))}
    for policy in ("error", "truncate"):
        with pytest.raises(
            ConfigError, match=r"line 1 has \d+ tokens, more than max_tokens=20: .* set data.too_long to drop"
        ):
            encode(model, row, policy, 20)
    with pytest.raises(ConfigError, match="dropped all 1 rows"):
        encode(model, row, "drop", 20)


def test_pairs_share_the_pictures_of_their_prompt(model: Path) -> None:
    row = {"prompt": "what?", "chosen": "a", "rejected": "b", "image": png(make_picture(1))}
    records, _ = read_pairs([Located(row, "x")], DataConfig())
    chosen, rejected = encode_pairs(records, load_chat(ModelConfig(path=str(model)), "auto"), 400, "error").samples
    assert chosen.pictures == rejected.pictures == records[0].pictures != ()


def test_a_model_of_text_is_not_given_pictures(tmp_path: Path) -> None:
    from tests.support.tiny import make_tiny_model

    config = SftConfig.parse({"model": {"path": str(make_tiny_model(tmp_path, tied=True))}})
    chat = load_chat(config.model, "auto")
    records = [read({"messages": talk(IMAGE, ASKED), "image": png(make_picture(1))})]
    with pytest.raises(
        ConfigError, match=r"^data\.jsonl, line 1 has pictures, but model\.path=.* reads only text: remove"
    ):
        check_pictures(records, chat, config)
    check_pictures([read({"prompt": "a", "completion": "b"})], chat, config)


def test_the_module_needs_no_torch() -> None:
    assert "torch" not in dir(pictures)
