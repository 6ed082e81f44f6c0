"""Vision-language models with random weights, of several families and sizes, with the files of published ones."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from trueline.demo.material import make_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ 'IMAGE' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
QWEN_MARKS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
QWEN_MARKS |= {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
GEMMA_MARKS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
PLACEHOLDERS = {"llava": "<image>", "gemma3": GEMMA_MARKS["boi_token"]}  # that chat templates write; else Qwen's
QWEN_SPAN = QWEN_MARKS["vision_start"] + QWEN_MARKS["image"] + QWEN_MARKS["vision_end"]
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
TEXTS = {  # the language model
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    "small": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8},
    "3B": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
}
WIDTHS = {"tiny": 64, "small": 320, "3B": 1280}  # of a tower
DEPTHS = {"tiny": 2, "small": 4, "3B": 32}
SECTIONS = {"tiny": [4, 6, 6], "small": [8, 12, 12], "3B": [16, 24, 24]}  # of positions in three dimensions
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "llava")


def make_picture_model(folder: Path, family: str, shape: str, seed: int = 0) -> None:
    """Write a model, its tokenizer and its processor's settings."""
    tokenizer = make_picture_tokenizer(family)
    tokenizer.save_pretrained(folder)
    for name, settings in processor_files(family).items():
        (folder / f"{name}.json").write_text(json.dumps(settings))
    config = {"qwen2_5_vl": qwen, "qwen3_vl": qwen, "gemma3": gemma, "llava": llava}[family](family, shape, tokenizer)
    torch.manual_seed(seed)
    gpu = torch.cuda.is_available()
    with torch.device("cuda" if gpu else "cpu"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16 if gpu else torch.float32)
    for name, parameter in model.named_parameters():
        if "mm_input_projection" in name:  # a new Gemma is blind: its projector is zero
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder, max_shard_size="100GB")
    del model
    rename_tower(folder / "model.safetensors")
    if gpu:
        torch.cuda.empty_cache()


def rename_tower(file: Path) -> None:
    """Give the weights of a tower their published names, which Transformers knows only of models that it has loaded."""
    weights = load_file(file)
    here, published = "vision_tower.", "vision_tower.vision_model."
    named = {name.replace(here, published) if published not in name else name: one for name, one in weights.items()}
    save_file(named, file, metadata={"format": "pt"})


def make_picture_tokenizer(family: str) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    marks = {"llava": ["<image>"], "gemma3": list(GEMMA_MARKS.values())}.get(family, list(QWEN_MARKS.values()))
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", PLACEHOLDERS.get(family, QWEN_SPAN))
    if family == "gemma3":
        tokenizer.add_tokens(["\n" * count for count in range(1, 5)])  # which vLLM looks up
        tokenizer._set_model_specific_special_tokens(GEMMA_MARKS)
    return tokenizer


def processor_files(family: str) -> dict[str, dict[str, Any]]:
    """Return the settings of processors as published checkpoints have them, by file."""
    if family == "llava":
        size = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
        kinds = {"image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor"}
        shape = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        return {"preprocessor_config": size | kinds, "processor_config": shape | {"processor_class": "LlavaProcessor"}}
    if family == "gemma3":
        kinds = {"image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor"}
        size = {"size": {"height": 896, "width": 896}, "resample": 2, **HALF}
        whole = {"processor_class": "Gemma3Processor", "image_seq_length": 256}
        return {"preprocessor_config": size | kinds, "processor_config": whole}
    kind, patch = ("Qwen2_5_VL", 14) if family == "qwen2_5_vl" else ("Qwen3VL", 16)
    common = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2, "processor_class": f"{kind}Processor"}
    pixels = {"size": {"shortest_edge": 4 * patch**2, "longest_edge": 16384 * patch**2}, **HALF}
    videos = {"qwen2_5_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}[family]
    return {
        "preprocessor_config": common | pixels | {"image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config": common | pixels | {"video_processor_type": videos},
    }


def text_settings(shape: str, tokenizer: PreTrainedTokenizerFast, **more: Any) -> dict[str, Any]:
    ends = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    sizes = {"num_key_value_heads": 2, "max_position_embeddings": 4096}
    return TEXTS[shape] | sizes | {"vocab_size": 512 if shape == "tiny" else 151936} | ends | more


def qwen(family: str, shape: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": SECTIONS[shape]}
    rotary |= {"mrope_interleaved": True} if family == "qwen3_vl" else {}
    text = text_settings(shape, tokenizer, rope_parameters=rotary)
    text |= {"head_dim": text["hidden_size"] // text["num_attention_heads"], "tie_word_embeddings": True}
    depth, width = DEPTHS[shape], WIDTHS[shape]
    tower = {"depth": depth, "num_heads": width // 80 if width % 80 == 0 else 2, "hidden_size": width}
    tower |= {"intermediate_size": 2 * width, "out_hidden_size": text["hidden_size"]}
    own = {
        "qwen2_5_vl": {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [depth // 2 - 1, depth - 1]},
        "qwen3_vl": {"patch_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 2304},
    }
    named = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in QWEN_MARKS.items()}
    return AutoConfig.for_model(
        family, text_config=text, vision_config=tower | own[family], tie_word_embeddings=True, **named
    )


def gemma(family: str, shape: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    head = TEXTS[shape]["hidden_size"] // TEXTS[shape]["num_attention_heads"]
    layers = ["sliding_attention", "full_attention"] * (TEXTS[shape]["num_hidden_layers"] // 2)
    more = {"head_dim": head, "query_pre_attn_scalar": head, "sliding_window": 64, "layer_types": layers}
    tower = {"hidden_size": WIDTHS[shape], "intermediate_size": 2 * WIDTHS[shape], "vision_use_head": False}
    tower |= {"num_hidden_layers": DEPTHS[shape], "num_attention_heads": 4, "image_size": 896, "patch_size": 14}
    named = {"boi_token_index": "boi_token", "eoi_token_index": "eoi_token", "image_token_index": "image_token"}
    tokens = {name: tokenizer.convert_tokens_to_ids(GEMMA_MARKS[mark]) for name, mark in named.items()}
    text = text_settings(shape, tokenizer, **more)
    return AutoConfig.for_model(family, text_config=text, vision_config=tower, mm_tokens_per_image=256, **tokens)


def llava(family: str, shape: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    tower = {"model_type": "clip_vision_model", "hidden_size": WIDTHS[shape], "intermediate_size": 2 * WIDTHS[shape]}
    tower |= {"num_hidden_layers": DEPTHS[shape], "num_attention_heads": 4, "image_size": 336, "patch_size": 14}
    text = text_settings(shape, tokenizer, model_type="llama")
    index = {"image_token_index": tokenizer.convert_tokens_to_ids("<image>")}
    return AutoConfig.for_model(family, text_config=text, vision_config=tower, vision_feature_layer=-2, **index)
