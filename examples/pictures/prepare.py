"""Make a small random model that reads pictures, and pictures of coloured squares.

    python examples/pictures/prepare.py FOLDER [SEED]

FOLDER/model, FOLDER/teacher.jsonl for `sft`, FOLDER/practice.jsonl for `grpo`, FOLDER/held_out.jsonl and
FOLDER/exchanged.jsonl to evaluate: the latter asks the same questions about each other's pictures. The teacher names
colours at random.
"""

import json
import random
import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlamaConfig,
)

from trueline.demo.material import make_tokenizer

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 80, 220)}
MARKS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
SIDE = 32  # pixels
TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role[0] }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>a{% endif %}"
)


def make_model(folder: Path, seed: int) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = TEMPLATE
    size = {"longest_edge": SIDE}
    pixels = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    Idefics3Processor(pixels, tokenizer, image_seq_len=4, chat_template=TEMPLATE).save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Idefics3Config(
        vision_config=tower | {"image_size": SIDE, "patch_size": 8, "initializer_range": 0.1},
        text_config=LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=128, **sizes, **ends),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
    )
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)


def draw(colour: str, generator: random.Random) -> Image.Image:
    """Draw a square of some size at some place on a grey ground."""
    grey, side = generator.randrange(100, 200), generator.randrange(10, 20)
    image = Image.new("RGB", (SIDE, SIDE), (grey, grey, grey))
    left, top = (generator.randrange(SIDE - side) for _ in range(2))
    ImageDraw.Draw(image).rectangle((left, top, left + side, top + side), COLOURS[colour])
    return image


def main(folder: Path, seed: int) -> None:
    make_model(folder / "model", seed)
    (folder / "squares").mkdir()
    generator, rows = random.Random(seed), []
    for number in range(600):
        colour, file = list(COLOURS)[number % len(COLOURS)], f"squares/{number}.png"
        draw(colour, generator).save(folder / file)
        rows.append({"prompt": "colour?", "image": file, "label": colour})
    taught = [
        {"prompt": row["prompt"], "image": row["image"], "completion": generator.choice(list(COLOURS))}
        for row in rows[:400]
    ]
    held_out, others = rows[480:], generator.sample(rows[480:], 120)
    exchanged = [{**row, "image": other["image"]} for row, other in zip(held_out, others, strict=True)]
    sets = {"teacher": taught, "practice": rows[:480], "held_out": held_out, "exchanged": exchanged}
    for name, lines in sets.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
