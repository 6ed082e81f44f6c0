"""Every architecture goes through the real loop with vLLM, or is refused by name; docs/models.md tells which.

vLLM lives in the process of the test, so that its start takes seconds.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.architectures import ARCHITECTURES, make_model
from tests.support.model_table import check_cell
from trueline.cli import main
from trueline.rollout.engine import EngineSpec
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.runtime.event_loop import EventLoop
from trueline.runtime.transport import Bucket, TensorSpec, bucket_print

TOKENS = list(range(5, 37))
EXACT = 1e-4  # nats, the largest difference of float32 log-probs that is rounding
REWARD = 'def letters(reply: str) -> float:\n    return sum("a" <= one <= "z" for one in reply) / 8\n'
QUIET = ("runtime=local", "steps=1", "monitoring.tensorboard=false", "monitoring.doctor=false")
SMALL = ("rollout.max_new_tokens=8", "prompts_per_step=2")
LORA = ("model.lora.rank=4", "model.lora.sync=merged", "checkpoint.every=0")
CHEAP = ("mixtral", "qwen3_moe")
KINDS = [pytest.param(kind, marks=() if kind in CHEAP else pytest.mark.slow) for kind in ARCHITECTURES]
Screen = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def vllm_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from tests.support.vllm_here import release

    row = replace(ROLLOUT_ENGINES["vllm"], path="tests.support.vllm_here:EngineHere", local=True)
    monkeypatch.setitem(ROLLOUT_ENGINES, "vllm", row)
    yield
    release()


class Family:
    """Runs of one architecture in a folder, and what becomes of them as cells of the table."""

    def __init__(self, kind: str, folder: Path, screen: Screen) -> None:
        self.kind, self.folder, self.screen = kind, folder, screen
        self.model = make_model(folder / "model", kind)
        (folder / "reward.py").write_text(REWARD)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{at}:"}) + "\n" for at in range(8)))
        rows = [{"prompt": f"{at}:", "completion": " abc" * (1 + at % 3)} for at in range(8)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, verb: str, name: str, *words: str) -> str:
        """Train one step; return why it is refused, or nothing."""
        data = "prompts.jsonl" if verb == "grpo" else "rows.jsonl"
        own = ARCHITECTURES[self.kind].words
        sampled = ["--reward", f"{self.folder}/reward.py:letters", "rollout.engine=vllm", *SMALL]
        sampled += [word.replace("training.", "reference.") for word in own if LORA[0] not in words]
        named = ["--model", str(self.model), "--data", f"{self.folder}/{data}", *(sampled if verb == "grpo" else ())]
        known = [f"folder={self.folder}", f"name={name}", *QUIET, *own]
        status = main([verb, *named, *known, "training.learning_rate=1e-2", *words])
        said = "".join(self.screen.readouterr())
        assert status in (0, 2), said
        return refusal(said, self.folder) if status else ""

    def step(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name / "metrics.jsonl").read_text().splitlines()[-1])

    def saved(self, name: str) -> Path:
        return self.folder / name / "checkpoints" / "step_000001" / "model"

    def tell(self, column: str, value: str) -> None:
        for family in ARCHITECTURES[self.kind].families:
            check_cell(family, column, value)


def refusal(said: str, folder: Path) -> str:
    """Return what the command line says in place of a traceback, without this test's folder."""
    assert "Traceback" not in said, said
    found = re.search(r"error: (?:model\.path=\S+: )?(.*)", said)
    assert found, said
    return f"refused: {found[1].replace(str(folder / 'model'), 'MODEL')}"


def verdict(gap: float) -> str:
    assert gap < EXACT, f"log-probs differ by {gap}"
    return "exact"


@torch.no_grad()
def by_transformers(folder: Path) -> torch.Tensor:
    model, ids = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), torch.tensor(TOKENS)
    scores = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return scores.gather(-1, ids[1:, None])[:, 0]


def by_vllm(folder: Path) -> torch.Tensor:
    from tests.support.vllm_here import EngineHere

    spec = EngineSpec(
        model=str(folder),
        dtype="float32",
        context=64,
        tensor_parallel=1,
        max_sequences=4,
        seed=0,
        gpu_memory_utilization=0.3,
        cuda_graphs=False,
        sleeps=False,
        trust_remote_code=False,
    )
    loop = EventLoop(60.0)
    try:
        return torch.tensor(loop.run(EngineHere(spec).score(TOKENS), "scoring"))
    finally:
        loop.stop()


@pytest.mark.models
@pytest.mark.parametrize("kind", KINDS)
def test_an_architecture_trains_or_is_refused(kind: str, tmp_path: Path, capsys: Screen) -> None:
    family = Family(kind, tmp_path, capsys)
    refused = family.run("grpo", "rl")
    if refused:
        for column in ("loads", "sync attested", "GRPO step", "saved opens in both"):
            family.tell(column, refused)
    else:
        step = family.step("rl")
        family.tell("loads", verdict(step["sync/canary_floor"]))
        family.tell("sync attested", verdict(step["sync/canary_gap"]))
        family.tell("GRPO step", verdict(step["mismatch/logprob_gap_max"]))
        after = changed(family, "rl")
        family.tell("saved opens in both", verdict((after - by_vllm(family.saved("rl"))).abs().max().item()))
    why = family.run("sft", "sft")
    family.tell("SFT step", why or "exact")
    if not why:
        changed(family, "sft")
    why = family.run("sft" if refused else "grpo", "lora", *LORA)
    step = {} if why else family.step("lora")
    gaps = [step[name] for name in ("sync/canary_gap", "mismatch/logprob_gap_max") if name in step]
    assert why or refused or len(gaps) == 2
    family.tell("LoRA", why or verdict(max(gaps, default=0.0)))


def changed(family: Family, name: str) -> torch.Tensor:
    """What plain Transformers says of the saved model: something else than before the step."""
    before, after = by_transformers(family.model), by_transformers(family.saved(name))
    assert after.isfinite().all()
    assert (before - after).abs().max() > EXACT, "one step changed nothing"
    return after


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_the_hf_engine_puts_experts_back_together(kind: str, tmp_path: Path, capsys: Screen) -> None:
    family = Family(kind, tmp_path, capsys)
    assert not family.run("grpo", "rl", "rollout.engine=hf", "checkpoint.every=0")
    step = family.step("rl")
    assert max(step["sync/canary_gap"], step["mismatch/logprob_gap_max"]) < EXACT


@pytest.mark.parametrize(("kind", "said"), [("gpt_oss", "attention sinks"), ("lfm2", r"other than attention \(conv\)")])
def test_packing_is_refused_before_the_start(kind: str, said: str, tmp_path: Path, capsys: Screen) -> None:
    family = Family(kind, tmp_path, capsys)
    why = family.run("sft", "sft", "training.packing=true")
    assert re.search(rf"training\.packing=true joins .* has .*{said}.* set training\.packing=false", why)
    assert not (tmp_path / "sft").exists()
    if kind == "gpt_oss":
        assert "reference.packing=true joins" in family.run("grpo", "rl", "reference.packing=true")


class Fused(torch.nn.Module):
    """What vLLM reloads, in small: a weight that is fused from two tensors."""

    def __init__(self, by_layers_only: bool = False) -> None:
        super().__init__()
        self.linear, self.by_layers_only = torch.nn.Linear(4, 6, bias=False), by_layers_only
        self.linear.weight.weight_loader = load_half  # type: ignore[assignment]

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        weight: Any = self.linear.weight
        for name, tensor in weights:
            if weight.is_meta or not self.by_layers_only:
                weight.weight_loader(weight, tensor, "ab".index(name))


def load_half(param: Any, half: torch.Tensor, place: int) -> None:
    param.data[3 * place : 3 * place + 3].copy_(half)


@pytest.mark.parametrize("by_layers_only", [False, True])
def test_weights_are_loaded_in_place_only_where_that_gives_the_same_bits(by_layers_only: bool) -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from trueline.rollout.vllm_receiver import WeightReceiver

    model, sent = Fused(by_layers_only), {name: torch.randn(3, 4) for name in "ab"}
    record_metadata_for_reloading(model)
    address, buckets = model.linear.weight.data_ptr(), [[TensorSpec(name, (3, 4), "float32")] for name in sent]

    def take(bucket: Bucket) -> torch.Tensor:
        return sent[bucket[0].name].flatten().view(torch.uint8)

    receiver: Any = WeightReceiver()
    receiver.device, receiver.vllm_config = torch.device("cpu"), SimpleNamespace(lora_config=None)
    receiver.model_runner = SimpleNamespace(get_model=lambda: model)
    receiver.model_config = SimpleNamespace(hf_config=SimpleNamespace(tie_word_embeddings=False))
    receiver.channel = SimpleNamespace(receive=take)
    for _ in range(2):
        prints = receiver.receive_weights([[(one.name, list(one.shape), one.dtype) for one in two] for two in buckets])
        assert receiver.in_place is not by_layers_only
        assert torch.equal(model.linear.weight, torch.cat([*sent.values()]))
        assert model.linear.weight.data_ptr() == address  # CUDA graphs read there
        assert prints == [int(bucket_print(bucket, take(bucket))) for bucket in buckets]
        sent |= {name: torch.randn(3, 4) for name in sent}


def test_what_vllm_packs_or_derives_is_loaded_by_layers() -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from trueline.rollout.vllm_receiver import keeps_layout

    model, devices = Fused(), [torch.device("cuda"), torch.device("cpu")]
    assert [keeps_layout(model, device) for device in devices] == [True, True]
    model.linear.quant_method = UnquantizedLinearMethod()  # type: ignore[assignment]
    assert [keeps_layout(model, device) for device in devices] == [True, False]
    model.norm = torch.nn.LayerNorm(4)
    model.norm.process_weights_after_loading = model.norm.forward  # type: ignore[assignment]
    assert [keeps_layout(model, device) for device in devices] == [False, False]
    del model.norm
    model.linear.quant_method = object()  # type: ignore[assignment]
    assert not keeps_layout(model, devices[0])
