"""What user code returns as content: text, or parts with pictures, in which these become data URLs for the line."""

import sys
from pathlib import Path
from typing import Any

from trueline.data.messages import Message
from trueline.usercode.failures import WrongResult

Part = dict[str, Any]


def is_picture(part: Any) -> bool:
    """Tell whether a part is a picture, or an image of PIL, which only code that has imported PIL returns."""
    image: Any = sys.modules.get("PIL.Image")
    is_part = isinstance(part, dict) and part.get("type") == "image" and "image" in part
    return is_part or (image is not None and isinstance(part, image.Image))


def shows_pictures(content: Any) -> bool:
    return any(map(is_picture, content if isinstance(content, list | tuple) else [content]))


def write_message(message: Message, where: str) -> Message:
    content = message.get("content")
    has_parts = isinstance(content, list) or shows_pictures(content)
    return {**message, "content": write_parts(content, where)} if has_parts else message


def write_parts(content: Any, where: str) -> list[Part]:
    """Return content as parts of text and of data URLs."""
    parts = content if isinstance(content, list | tuple) else [content]
    return [write_part(part, f"{where}: part {number}") for number, part in enumerate(parts, 1)]


def write_part(part: Any, where: str) -> Part:
    fields = part if isinstance(part, dict) else {"type": "text", "text": part}
    if not is_picture(part):
        if fields.get("type") == "image" or isinstance(fields.get("text"), str):  # the former shows one of the prompt
            return fields
        raise WrongResult(f"{where} is {part!r:.80}: return texts and images")
    from trueline.config.base import ConfigError  # noqa: PLC0415  (only code that shows pictures waits for these)
    from trueline.data.pictures import Setting, data_url, read_picture  # noqa: PLC0415

    try:
        picture = read_picture(fields.get("image", part), Setting(where, Path(), sys.maxsize))
    except ConfigError as error:
        raise WrongResult(str(error)) from None
    return {"type": "image", "image": data_url(picture)}
