"""Pictures of dataset rows: read, checked and made small enough once; they stay encoded until a model needs pixels."""

import base64
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from PIL import Image, ImageOps, UnidentifiedImageError

from trueline.config.base import ConfigError
from trueline.data.messages import Message
from trueline.data.rows import Located
from trueline.monitoring.run_folder import PICTURES

COLUMNS = ("images", "image")  # beside the prompt or the messages
PAYLOADS = ("image", "path", "url")  # keys of a part, the first that it has
MOST_PIXELS = 100_000_000  # of a file; larger ones are not even decoded
TOKEN_BYTES = 4
MOST_WRITTEN = 64  # pictures whose text or thumbnail is kept
THUMBNAIL = 256  # pixels of its longer side
TWO_IN_ONE = "MPO"  # photos of some phones: a JPEG file with a second one behind it
TRAINED_BY = "sft, dpo with its family, kto, rm, prm, and verbs that sample"
PLACEHOLDER: dict[str, Any] = {"type": "image"}  # in place of a picture, as chat templates read it


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as a file's content; equal content is the same picture."""

    data: bytes
    width: int
    height: int

    def kind(self) -> str:
        """Return the format of the file, such as png."""
        return str(Image.open(io.BytesIO(self.data)).format).lower()

    def decode(self) -> Image.Image:
        return decode(self.data)


Pictures = tuple[Picture, ...]


@dataclass(frozen=True, slots=True)
class Shown:
    """The pictures of a sequence as engines take them: they write the tokens of pictures themselves."""

    pictures: Pictures
    brief: list[int]  # the tokens up to the end of its last prompt with pictures, with one placeholder for each
    length: int  # of these as the model sees them

    def shorten(self, tokens: list[int]) -> list[int]:
        """Return a sequence that begins with these tokens, with one placeholder for each picture."""
        return [*self.brief, *tokens[self.length :]]

    def behind(self, before: "Shown | None", tokens: list[int]) -> "Shown":
        """Return the pictures of a sequence to whose `tokens`, which show those of `before`, a prompt adds these."""
        known = before or Shown((), [], 0)
        brief = [*known.shorten(tokens), *self.brief]
        return Shown(known.pictures + self.pictures, brief, len(tokens) + self.length)

    def tokens(self) -> int:
        """Return how many tokens take as much memory as the pictures."""
        return sum(len(picture.data) for picture in self.pictures) // TOKEN_BYTES


class PictureTokens(Protocol):
    """How a model's processor writes pictures as tokens."""

    placeholder: str  # that a chat template writes for a picture
    token: int  # that stands for a part of a picture

    def tokens(self, text: str, pictures: Sequence[Picture]) -> list[int]:
        """Return the tokens of a text, with as many for each placeholder as its picture has."""


def count_tokens(vision: PictureTokens, picture: Picture) -> int:
    """Return how many tokens stand in the place of a picture."""
    return len(vision.tokens(vision.placeholder, [picture]))


def count_placeholders(vision: PictureTokens | None, text: str, messages: Sequence[Message]) -> int:
    """Return how many pictures a text shows; refuse one that does not show those of its messages, each once."""
    if vision is None:
        return 0
    found, wanted = text.count(vision.placeholder), sum(1 for _ in image_parts(messages))
    if found != wanted:
        raise ConfigError(
            f"as the model sees it, its text has {vision.placeholder} {found} times, but {wanted} image parts: write "
            'pictures as parts of type "image" and not into texts, and use a chat template that shows them'
        )
    return found


class Setting(NamedTuple):
    """Where a value stands, and what it may be."""

    where: str
    folder: Path  # that relative paths begin from
    max_pixels: int


@lru_cache(MOST_WRITTEN)
def data_url(picture: Picture) -> str:
    """Return a picture as text; the completions of a group ask for the same ones."""
    return f"data:image/{picture.kind()};base64,{base64.b64encode(picture.data).decode()}"


@lru_cache(MOST_WRITTEN)
def thumbnail(picture: Picture) -> Picture:
    """Return a small copy for people."""
    image = picture.decode()
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    return Picture(encode(image, "JPEG"), *image.size)


def picture_file(picture: Picture) -> str:
    """Return where a picture is kept, from the folder of the run; the same content has the same name."""
    return f"{PICTURES}/{sha256(picture.data).hexdigest()}.{picture.kind()}"


def pictures_of(urls: Any) -> Pictures:
    """Return the pictures of a reward's call, which may come from the network."""
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        raise ConfigError(f"images is a list of data URLs, got {urls!r:.80}")
    setting = Setting("a picture of the call", Path(), MOST_PIXELS)
    return tuple(read_data_url(url, setting) for url in urls)


def blank_picture() -> Picture:
    """Return a small black picture."""
    image = Image.new("RGB", (32, 32))
    return Picture(encode(image), *image.size)


def decode(data: bytes) -> Image.Image:
    """Return the pixels of a file in RGB, turned as its camera was held."""
    return upright(Image.open(io.BytesIO(data))).convert("RGB")


def upright(image: Image.Image) -> Image.Image:
    return ImageOps.exif_transpose(image)


def column_of(located: Located) -> str:
    """Return the column with a row's pictures; empty if there is none."""
    return next((column for column in COLUMNS if located.row.get(column) not in (None, "", [])), "")


def has_pictures(located: Located, messages: Sequence[Message]) -> bool:
    return bool(column_of(located)) or any(True for _ in image_parts(messages))


def refuse_pictures(located: Located, messages: Sequence[Message]) -> None:
    if has_pictures(located, messages):
        where = f"in column {column!r}" if (column := column_of(located)) else "in its messages"
        raise ConfigError(
            f"{located.place} has images {where}, which only {TRAINED_BY} train: remove them, or rename the column"
        )


def image_parts(messages: Sequence[Message]) -> Iterator[tuple[Message, dict[str, Any]]]:
    """Yield the parts of messages that are pictures, each with its message."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("type") == "image":
                yield message, part


def take_pictures(located: Located, messages: list[Message], max_pixels: int) -> tuple[list[Message], Pictures]:
    """Return messages with placeholders, and their pictures in the same order; most rows have none."""
    if not has_pictures(located, messages):
        return messages, ()
    column = column_of(located)
    values = located.row[column] if column else []
    beside = list(values) if isinstance(values, list | tuple) else [values]
    if beside and not any(True for _ in image_parts(messages)):
        messages = put_first(located, messages, len(beside))
    parts = list(image_parts(messages))
    for message, _ in parts:
        if message["role"] == "assistant":
            raise ConfigError(
                f"{located.place}: an assistant message has a picture, which no model here learns to make: remove it, "
                "or move it into a user message"
            )
    found = payloads_of(messages)
    open_places = sum(value is None for value in found)
    if open_places != len(beside):
        has = f"column {column!r} has {len(beside)}" if column else f"there is no column {' or '.join(COLUMNS)}"
        raise ConfigError(
            f"{located.place}: {open_places} image parts of its messages need a picture each, but {has}: give each one"
        )
    rest = iter(beside)
    given = [next(rest) if value is None else value for value in found]
    pictures = tuple(
        read_picture(value, Setting(f"{located.place}: picture {number}", located.folder, max_pixels))
        for number, value in enumerate(given, 1)
    )
    return bare(messages), pictures


def put_first(located: Located, messages: list[Message], count: int) -> list[Message]:
    """Put so many placeholders before the text of the first user message."""
    at = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
    if at is None:
        raise ConfigError(f"{located.place}: it has pictures, but no user message to show them in: add one")
    text = {"type": "text", "text": messages[at]["content"]}
    first = {**messages[at], "content": [*(dict(PLACEHOLDER) for _ in range(count)), text]}
    return [*messages[:at], first, *messages[at + 1 :]]


def payloads_of(messages: Sequence[Message]) -> list[Any]:
    """Return what the image parts of messages give as a picture; None for those that give nothing."""
    return [payload_of(part) for _, part in image_parts(messages)]


def payload_of(part: dict[str, Any]) -> Any:
    return next((part[key] for key in PAYLOADS if part.get(key) is not None), None)


def bare(messages: Sequence[Message]) -> list[Message]:
    """Return messages with placeholders in place of pictures."""
    return [without_payload(message) if isinstance(message.get("content"), list) else message for message in messages]


def without_payload(message: Message) -> Message:
    parts = [dict(PLACEHOLDER) if part.get("type") == "image" else part for part in message["content"]]
    return {**message, "content": parts}


@lru_cache(MOST_WRITTEN)
def read_data_url(url: str, setting: Setting) -> Picture:
    """Read a picture from text; the episodes of a group may show the same ones."""
    head, _, text = url.partition(",")
    if not re.fullmatch(r"data:[^,]*;base64", head, re.IGNORECASE):
        remedy = "and nothing is fetched from elsewhere: give its content, as data:image/png;base64,..."
        raise ConfigError(f"{setting.where}: {url!r:.80} is no data URL, {remedy}")
    try:
        content = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ConfigError(f"{setting.where}: its data URL is damaged ({error}): encode it in base64 again") from None
    return make_picture(content, f"its data URL of {len(content)} bytes", setting)


def read_picture(value: Any, setting: Setting) -> Picture:
    """Read what a row gives as a picture: a path, a file:// or data URL, bytes, both as in `datasets`, or PIL's."""
    if isinstance(value, dict) and not isinstance(value.get("bytes") or value.get("path"), bytes | str):
        raise ConfigError(f"{setting.where} has neither bytes nor a path ({value!r:.80}): give one of them")
    if isinstance(value, dict):
        value = value.get("bytes") or value["path"]
    if isinstance(value, str) and value[:5].lower() == "data:":
        return read_data_url(value, setting)
    if isinstance(value, str):
        file = file_of(value, setting)
        try:
            return make_picture(file.read_bytes(), str(file), setting)
        except OSError as error:
            remedy = f"relative paths begin in {setting.folder.resolve()}; correct it, or delete the row"
            raise ConfigError(f"{setting.where}: {file} cannot be read ({error.strerror}): {remedy}") from None
    if isinstance(value, bytes | bytearray):
        return make_picture(bytes(value), f"its content of {len(value)} bytes", setting)
    if isinstance(value, Image.Image):
        return make_picture(encode(value), "its content", setting)
    raise ConfigError(
        f"{setting.where} is of type {type(value).__name__} ({value!r:.80}): give a path, bytes, a PIL image, or a "
        "column of type datasets.Image"
    )


def file_of(text: str, setting: Setting) -> Path:
    scheme = re.match(r"([a-z][a-z0-9+.-]*)://", text, re.IGNORECASE)
    if scheme and scheme[1].lower() != "file":
        raise ConfigError(
            f"{setting.where}: {text!r:.80} is not on this machine, and nothing is fetched from elsewhere: download "
            "it, and give its path"
        )
    return setting.folder / (unquote(urlsplit(text).path) if scheme else Path(text).expanduser())


def make_picture(data: bytes, name: str, setting: Setting) -> Picture:
    """Check a picture by decoding it; one with too many pixels becomes a smaller PNG."""
    try:
        image = open_picture(data, name, setting)
    except ConfigError:
        raise
    except UnidentifiedImageError:
        raise ConfigError(f"{setting.where}: {name} is no image that Pillow knows: replace or delete it") from None
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{setting.where}: {name} is damaged ({error}): replace or delete it") from None
    width, height = image.size
    if width * height <= setting.max_pixels:
        return Picture(data, width, height)
    scale = (setting.max_pixels / (width * height)) ** 0.5
    size = max(int(width * scale), 1), max(int(height * scale), 1)
    return Picture(encode(image.convert("RGB").resize(size, Image.Resampling.BICUBIC)), *size)


def open_picture(data: bytes, name: str, setting: Setting) -> Image.Image:
    """Return an image whose pixels can be read, or say what it has too much of."""
    try:
        file = Image.open(io.BytesIO(data))
        pixels = file.width * file.height
    except Image.DecompressionBombError:
        pixels = 2 * MOST_PIXELS
    if pixels > MOST_PIXELS:
        raise ConfigError(
            f"{setting.where}: {name} has more than {MOST_PIXELS // 10**6} million pixels, which is not decoded: make "
            "it smaller"
        )
    if file.format != TWO_IN_ONE and has_second_frame(file):
        raise ConfigError(f"{setting.where}: {name} is animated ({file.format}): give one of its frames as a picture")
    image = upright(Image.open(io.BytesIO(data)))
    image.load()
    return image


def has_second_frame(image: Image.Image) -> bool:
    try:
        image.seek(1)
    except EOFError:
        return False
    return True


def encode(image: Image.Image, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    image.convert("RGB").save(stream, kind)
    return stream.getvalue()
