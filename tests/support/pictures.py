"""Small models that read pictures, and pictures, made here: neither torchvision nor a download is needed."""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
)

from tests.support.tiny import small_config
from trueline.demo.material import make_tokenizer

TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
MARKS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILES]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:"
    "{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"
    "{{ eos_token if message.role == 'assistant' else '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER |= {"image_size": 32, "patch_size": 8}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
SIZES += ("num_attention_heads", "num_key_value_heads", "initializer_range")
SPAN = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_TOKENS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
QWEN_TOKENS |= {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
QWEN_MARKS = [*MARKS, *QWEN_TOKENS.values()]
QWEN_TOWERS = {  # what is special in each
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {"window_size": 32, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    "qwen3_vl_moe": {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    "qwen3_5": {"num_position_embeddings": 64},
}
QWEN_TEXTS = {
    "qwen3_vl_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention"]},
}


def make_tiny_idefics(folder: Path, **text: Any) -> Path:
    """A random Idefics3, the family of SmolVLM: a picture of more than 32 x 32 pixels is cut into tiles."""
    tokenizer = picture_tokenizer()
    sizes = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    pixels = Idefics3ImageProcessorPil(**sizes)
    processor = Idefics3Processor(pixels, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    processor.save_pretrained(folder)
    config = Idefics3Config(
        vision_config=TOWER | {"initializer_range": 0.2},
        text_config=small_config(tokenizer, max_position_embeddings=512, **text),
        image_token_id=processor.image_token_id,
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
    )
    return save_model(Idefics3ForConditionalGeneration, config, folder)


def make_tiny_llava(folder: Path) -> Path:
    tokenizer = picture_tokenizer()
    pixels = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    shape = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaProcessor(pixels, tokenizer, chat_template=TEMPLATE, **shape).save_pretrained(folder)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**TOWER),
        text_config=small_config(tokenizer, max_position_embeddings=512),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    return save_model(LlavaForConditionalGeneration, config, folder)


def make_tiny_gemma(folder: Path) -> Path:
    """A random Gemma 3: a picture has 16 tokens, which see each other, in layers with and without a window."""
    marks = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<soft>"}
    tokenizer = picture_tokenizer(TEMPLATE.replace("<image>", "<boi>"))
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS, *marks.values()]})
    tokenizer._set_model_specific_special_tokens(marks)
    pixels = Gemma3ImageProcessorPil(size={"height": 64, "width": 64})
    Gemma3Processor(pixels, tokenizer, tokenizer.chat_template, image_seq_length=16).save_pretrained(folder)
    small = small_config(tokenizer, max_position_embeddings=512)
    text = {name: getattr(small, name) for name in (*SIZES, "bos_token_id", "eos_token_id", "pad_token_id")}
    text |= {"head_dim": 16, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    config = Gemma3Config(
        text_config=text | {"query_pre_attn_scalar": 16},
        vision_config=TOWER | {"vision_use_head": False, "image_size": 64},
        mm_tokens_per_image=16,
        image_token_index=tokenizer.convert_tokens_to_ids("<soft>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<boi>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<eoi>"),
        tie_word_embeddings=False,
    )
    return save_model(seeing_gemma, config, folder)


def seeing_gemma(config: Gemma3Config) -> Gemma3ForConditionalGeneration:
    """A new one is blind, as its projector is zero, and sees little of its patches."""
    model = Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.2)
    torch.nn.init.normal_(model.model.vision_tower.get_input_embeddings().weight, std=0.3)
    return model


def make_tiny_qwen(folder: Path, kind: str = "qwen2_5_vl") -> Path:
    """A random Qwen with positions in three dimensions: a picture of 40 x 24 pixels has 3 x 2 tokens."""
    tokenizer = picture_tokenizer(TEMPLATE.replace("<image>", SPAN))
    tokenizer.add_special_tokens({"additional_special_tokens": QWEN_MARKS})
    pixels = Qwen2VLImageProcessorPil(size={"shortest_edge": 256, "longest_edge": 4096}, patch_size=8)
    pixels.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    small, sections = small_config(tokenizer, max_position_embeddings=512), {"mrope_section": [2, 3, 3]}
    text = {name: getattr(small, name) for name in (*SIZES, "bos_token_id", "eos_token_id", "pad_token_id")}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **sections}, "head_dim": 16}
    text |= QWEN_TEXTS.get(kind, {})
    tower = {"depth": 2, "num_heads": 2, "patch_size": 8, "initializer_range": 0.2, **QWEN_TOWERS[kind]}
    if kind != "qwen2_vl":
        tower |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32}
    named = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in QWEN_TOKENS.items()}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=tower, tie_word_embeddings=False, **named)
    return save_model(AutoModelForImageTextToText.from_config, config, folder)


QWENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
MAKERS: dict[str, Callable[[Path], Path]] = {"idefics3": make_tiny_idefics, "llava": make_tiny_llava}
MAKERS |= {"gemma3": make_tiny_gemma, **{kind: partial(make_tiny_qwen, kind=kind) for kind in QWENS}}


def save_model(kind: Any, config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    kind(config).save_pretrained(folder)
    return folder


def picture_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = template
    return tokenizer


def make_picture(seed: int, width: int = 40, height: int = 24) -> Image.Image:
    """Coarse noise, which no two seeds share."""
    cells = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize((width, height))


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()
