"""Models that cannot be what they are named for, and words about models that nobody has meant."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

from tests.support.mistakes.home import GRPO, SFT, Mistake
from tests.support.reward_models import make_reward_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123456789abcdef\nsize 268\n"
QUANTIZED = {"gptq": {"bits": 4}, "awq": {"bits": 4}, "fp8": {"weight_block_size": [128, 128]}}
KINDS = {  # folder -> what its config.json has in place of the model's
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    "embedder": {"model_type": "bert", "architectures": ["BertModel"]},
    "t5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
    "bart": {"model_type": "bart", "architectures": ["BartForConditionalGeneration"], "is_encoder_decoder": True},
    "vit": {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
    "backbone": {"architectures": ["LlamaModel"], "tie_word_embeddings": False},
    "classifier": {"architectures": ["LlamaForSequenceClassification"]},
    "custom": {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}},
    "unknown": {"model_type": "llama9"},
    "shapeless": {"num_attention_heads": None},
    **{name: {"quantization_config": {"quant_method": name} | keys} for name, keys in QUANTIZED.items()},
    "bnb": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
}

ROWS = [*SFT, "--data", "sft.jsonl"]
LORA = [*ROWS, "model.lora.rank=4"]
PPO = ["ppo", *GRPO[1:]]
LINEAR = "set all-linear, or linear layers: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
SCORES = r"=(\S*/)?judge is a reward model .*LlamaForSequenceClassification.*: name the model that it was .* or use"
REFUSED: list[tuple[str, str]] = [  # model, and what sft says of it
    ("judge", f"model.path{SCORES} this one as --reward"),
    ("steps", r"model.path=steps is a process reward model .*LlamaForTokenClassification with 2 labels.*as --reward"),
    ("bert", r"model.path=bert is an encoder, .*BertForMaskedLM\): name a decoder"),
    ("embedder", r"model.path=embedder is an encoder, .*BertModel\): name a decoder"),
    ("t5", r"model.path=t5 is an encoder-decoder, .*T5ForConditionalGeneration\): name a decoder"),
    ("bart", r"model.path=bart is an encoder-decoder, .*name a decoder"),
    ("vit", r"model.path=vit is a vision model \(ViTForImageClassification\): name a decoder"),
    ("backbone", r"model.path=backbone is a model without its language head \(LlamaModel\)"),
    ("custom", r"model.path=custom: .*custom code.*set model.trust_remote_code=true if you trust"),
    ("unknown", r"model.path=unknown: .*`llama9`.*install a newer transformers, or choose another model"),
    ("shapeless", r"model.path=shapeless: .*'num_attention_heads' expected int.*config.json again"),
    ("gptq", r"model.path=gptq: its weights are quantised \(gptq\).*name the original model"),
    ("awq", r"model.path=awq: its weights are quantised \(awq\)"),
    ("fp8", r"model.path=fp8: its weights are quantised \(fp8\)"),
    ("bnb", r"model.path=bnb: its weights are quantised \(bitsandbytes\).*model.lora.quantize=true"),
    ("pickled", r"model.path=pickled: no .safetensors weights, and pytorch_model.bin is not loaded.*save_pretrained"),
    ("pointer", r"pointer/model.safetensors is a git-lfs pointer: fetch the weights with .*`git lfs pull`"),
    ("cut", r"cut/model.safetensors has only \d+ of its \d+ bytes: download"),
    ("garbled", r"garbled/model.safetensors is not a safetensors file, or damaged: download it again"),
    ("sharded", r"model.path=sharded: 1 of 2 weight files are missing, such as model-00002-of-00002.safetensors"),
    ("damaged", r"model.path=damaged: .*not a valid JSON file.*config.json again"),
    ("endless", r"model.path=.*endless: its tokenizer has no end-of-sequence token: set eos_token"),
    ("headless", r"model.path=.*headless: its files lack 1 of the model's tensors, such as lm_head.weight, .*random"),
    ("gguf_folder", r"model.path=gguf_folder: GGUF weights .*name the model that they were converted from"),
    ("tiny.gguf", r"model.path=tiny.gguf: GGUF weights .*name the model that they were converted from"),
    ("adapter", r"model.path=adapter: no config.json.*contains only a LoRA adapter: merge it .*and name that folder"),
    ("model/config.json", r"model.path=model/config.json is a file: name the model folder, such as model"),
    ("~/nothere", r"model.path=~/nothere: no such folder or run"),
]
MISTAKES: list[Mistake] = [
    ([*GRPO, "model.path="], r"model.path is empty: name a model, e.g. --model"),
    ([*GRPO, "--model", "nothere"], r"model.path=nothere: no such folder or run .*owner/name"),
    ([*GRPO, "--model", "runs/none"], r"model.path=runs/none: no such folder or run in /"),
    ([*GRPO, "--model", "runs/begun"], r"model.path=runs/begun is a run of sft without a checkpoint yet: .*--resume"),
    ([*GRPO, "--model", "owner/name"], r"model.path=owner/name: cannot be opened \(.*name a model folder"),
    ([*GRPO, "--model", "bare"], r"model.path=bare: no tokenizer \(.*save one in the folder"),
    ([*GRPO, "--model", "split"], r"model.path=split: no config.json.*name a folder that"),
    ([*GRPO, "--model", "judge", "--reward", "model"], r"model: Llama.*no reward model: train one"),
    (["distill", *SFT[1:], "--data", "sft.jsonl"], r"distill.teacher is empty: name the model to learn from"),
    *(([*ROWS, "--model", model], said) for model, said in REFUSED),
    ([*GRPO, "--model", "judge"], f"model.path{SCORES} this one"),
    (["dpo", *SFT[1:], "--model", "judge", "--data", "pairs.jsonl"], f"model.path{SCORES} this one"),
    (["generate", *GRPO[1:5], "--model", "judge"], f"model.path{SCORES} this one"),
    (["generate", *GRPO[1:5], "runtime=local", "--model", "gptq"], r"model.path=gptq: its weights are quantised"),
    (["eval", *GRPO[5:7], "--eval-data", "prompts.jsonl", "--model", "judge"], f"model.path{SCORES} this one"),
    (["distill", *ROWS[1:], "distill.teacher=judge"], f"distill.teacher{SCORES} this one"),
    (["sdpo", *GRPO[1:], "training.ema_decay=0"], r"distillation.teacher=average: set training.ema_decay"),
    (["sdft", *GRPO[1:]], r"context=demonstration: no row has the column demonstration"),
    (["sdpo", *GRPO[1:], "algorithm.group_size=1"], r"context=feedback shows rewarded replies of a group: set a rewa"),
    (["sdpo", *GRPO[1:], "algorithm.distillation.top_k=1000"], r"top_k=1000 is more than the 259 tokens there are"),
    (["sdpo", *GRPO[1:], "algorithm.distillation.max_prompt_tokens=9999"], r"max_prompt_tokens=9999: with a completi"),
    (
        ["sdpo", *GRPO[1:], "algorithm.distillation.template={prompt}"],
        r"template='{prompt}' lacks {prompt} and {demonst",
    ),
    (["on_policy_distill", *GRPO[1:], "teacher.paths.a=model"], r"row 1 of \S+: teacher=None is none of teacher.paths"),
    (["on_policy_distill", *GRPO[1:], "teacher.path=judge"], f"teacher: model.path{SCORES} this one"),
    (["rm", *SFT[1:], "--model", "steps", "--data", "pairs.jsonl"], r"is a process reward model .*wrong shape"),
    (["prm", *SFT[1:], "--model", "judge", "--data", "rated.jsonl"], r"is a reward model .*wrong shape"),
    ([*PPO, "critic.path=steps"], r"critic: model.path=.*steps is a process reward model .*wrong shape"),
    (["rm", *SFT[1:], "--model", "judge", "--data", "pairs.jsonl", "--dry-run"], r"model +\S*/judge: 0.0 M", 0),
    ([*ROWS, "--model", "model/", "--dry-run"], r"model +\S*/model: 0.3 M parameters", 0),
    ([*ROWS, "--model", "unpadded", "--dry-run"], r"model +\S*/unpadded: 0.3 M parameters", 0),
    ([*ROWS, "model.dtype=bf16", "runtime=ray", "--dry-run"], r"0.3 M parameters, bfloat16", 0),
    ([*ROWS, "model.dtype=fp16"], r"model.dtype: fp16 overflows .*set bfloat16 or float32"),
    ([*ROWS, "model.dtype=int8"], r"model.dtype: input should be 'auto', 'float32' or 'bfloat16' \(got 'int8'\)"),
    ([*GRPO, "rollout.dtype=float16"], r"rollout.dtype: float16 overflows .*set bfloat16 or float32"),
    ([*ROWS, "model.attention=flash"], r"model.attention: input should be 'auto', 'sdpa' or 'eager' \(got 'flash'"),
    ([*ROWS, "max_tokens=999"], r"max_tokens=999 is more than the model's context of 256: lower it"),
    (
        [*ROWS, "runtime=ray", "training.engine=deepspeed", "model.tensor_parallel=3", "training.ranks=3"],
        r"model.tensor_parallel=3 does not divide the model's 4 heads and 2 key-value heads",
    ),
    ([*LORA, "model.lora.targets=[q_proj,v_prj]"], rf"'v_prj'; did you mean 'v_proj'\? {LINEAR}"),
    ([*GRPO, "model.lora.rank=4", "model.lora.targets=q_proj,v_prj"], rf"targets=q_proj,v_prj: .*'v_prj'.*{LINEAR}"),
    ([*LORA, "model.lora.targets=all"], rf"no layer is named 'all'; .*{LINEAR}"),
    ([*LORA, "model.lora.targets="], r"model.lora.targets=: no layer is named ''"),
    ([*LORA, "model.lora.targets=norm"], rf"'norm' matches model.norm \(LlamaRMSNorm\).*linear layer.*{LINEAR}"),
    ([*LORA, "model.lora.targets=q_proj,lm_head"], rf"'lm_head' matches lm_head \(Linear\).*below the head.*{LINEAR}"),
    ([*LORA, "model.lora.targets=embed_tokens"], r"'embed_tokens' matches model.embed_tokens \(Embedding\)"),
    ([*LORA, "model.lora.targets=.*attn"], r"'.\*attn' matches model.layers.0.self_attn \(LlamaAttention\)"),
    ([*LORA, "model.lora.targets=.*(attn"], r"model.lora.targets=.\*\(attn is not a regular expression"),
    ([*LORA, "model.lora.targets=.*attn.[qv]_proj", "--dry-run"], r"0.3 M parameters, float32, LoRA rank 4", 0),
    ([*LORA, "model.lora.targets=[q_proj, v_proj]", "--dry-run"], r"targets: q_proj,v_proj .*LoRA rank 4", 0),
    ([*ROWS, "model.lora.rank=-1"], r"model.lora.rank: .*greater than or equal to 0 \(got -1\)"),
    ([*LORA, "model.lora.alpha=0"], r"model.lora.alpha: .*greater than 0 \(got 0\)"),
    ([*LORA, "model.lora.dropout=1"], r"model.lora.dropout: .*less than 1 \(got 1\)"),
    ([*ROWS, "model.lora.alpha=64", "--dry-run"], r"model.lora.alpha=64.0 has no effect; model.lora.rank=0 trains", 0),
    ([*ROWS, "model.lora.quantize=true"], r"model.lora.quantize=true freezes the weights: set model.lora.rank"),
    ([*ROWS, "training.learning_rate=1", "--dry-run"], r"learning_rate=1 is far from 0.002, .*training may diverge", 0),
    ([*ROWS, "training.learning_rate=0"], r"training.learning_rate: .*greater than 0 \(got 0\)"),
]


def add_files(folder: Path) -> None:
    """Make the folders below: copies of the tiny model in which one thing is another."""
    make_reward_model(folder / "steps", "steps")
    for name, keys in KINDS.items():
        change(copy(folder, name) / "config.json", **keys)
    weights = ("headless", "pickled", "pointer", "cut", "damaged", "gguf_folder", "sharded", "garbled")
    for name in (*weights, "endless", "unpadded"):
        copy(folder, name)
    (folder / "pickled/model.safetensors").rename(folder / "pickled/pytorch_model.bin")
    (folder / "pointer/model.safetensors").write_text(POINTER)
    whole = (folder / "model/model.safetensors").read_bytes()
    (folder / "cut/model.safetensors").write_bytes(whole[: len(whole) // 2])
    (folder / "garbled/model.safetensors").write_bytes(b"<html>404</html>")
    (folder / "damaged/config.json").write_text('{"model_type": "llama",')
    (folder / "gguf_folder/model.safetensors").rename(folder / "gguf_folder/model-Q4_K_M.gguf")
    (folder / "tiny.gguf").write_bytes(b"GGUF" + bytes(64))
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "sharded/model.safetensors").rename(folder / "sharded/model-00001-of-00002.safetensors")
    (folder / "sharded/model.safetensors.index.json").write_text(json.dumps(index))
    for name, token in (("endless", "eos_token"), ("unpadded", "pad_token")):
        change(folder / name / "tokenizer_config.json", **{token: None})
        (folder / name / "special_tokens_map.json").unlink(missing_ok=True)
    change(folder / "headless/config.json", tie_word_embeddings=False)
    (folder / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (folder / "rated.jsonl").write_text('{"prompt": "a", "completions": ["b", "c"], "labels": [true, false]}\n')
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_config.json").write_text('{"base_model_name_or_path": "../model", "r": 8}')
    (folder / "adapter/adapter_model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")


def copy(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(folder / "model", folder / name))


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
