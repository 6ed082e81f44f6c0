"""What a policy sampled, as text: reasoning that special tokens set apart is set apart by thinking tags."""

from collections.abc import Callable

from trueline.data.template import END_OF_THOUGHT, THOUGHT

HARMONY_START, HARMONY_MESSAGE, HARMONY_END = "<|start|>assistant", "<|message|>", "<|end|>"
PAIRS = {  # special tokens that stand around reasoning, by the first
    "<|channel>thought\n": "<channel|>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
}


def tagged(thought: str, said: str) -> str:
    return f"{THOUGHT}\n{thought.strip()}\n{END_OF_THOUGHT}\n\n{said}" if thought.strip() else said


def read_harmony(raw: str) -> str:
    """Read the channels of gpt-oss: analysis is reasoning, calls stay as they are, all else is said."""
    thoughts: list[str] = []
    said: list[str] = []
    for piece in raw.split(HARMONY_START):
        header, marked, body = piece.partition(HARMONY_MESSAGE)
        body = body.removesuffix(HARMONY_END)
        if not marked or "to=" in header:
            said.append(piece)
        else:
            (thoughts if "analysis" in header else said).append(body)
    return tagged("\n".join(thoughts), "".join(said))


def read_pairs(raw: str) -> str:
    for begin, end in PAIRS.items():
        before, begun, rest = raw.partition(begin)
        if begun:
            thought, _, said = rest.partition(end)
            return tagged(thought, before + said)
    return raw


def reader_of(template: str) -> Callable[[str], str] | None:
    """Return how replies of a template's model are read, or None where they hold no such tokens."""
    if "<|channel|>" in template and HARMONY_MESSAGE in template:
        return read_harmony
    return read_pairs if any(begin.strip() in template for begin in PAIRS) else None
