"""Plans of runs on devices that are not here."""

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trueline.cli import main
from trueline.config.base import ConfigError
from trueline.config.rl import RLConfig
from trueline.config.supervised import SftConfig
from trueline.plan.describe import describe_on_paper, node_lines
from trueline.plan.hardware import read_devices
from trueline.plan.paper import on_paper, plan_on_paper, plan_rl_on_paper
from trueline.plan.rl import RLPlan, memory_bytes, tenants_of
from trueline.plan.time import phase_seconds, sync_bytes

GIB = 2**30


def planned(shape: str, devices: str, *words: str) -> RLPlan:
    config = RLConfig.load([], [f"model.path={shape}", *words], {"algorithm": {"preset": "grpo"}})
    return plan_rl_on_paper(on_paper(config), read_devices(devices))


def proposed(error: ConfigError) -> list[str]:
    """The keys that a refusal names, as they are written on the command line."""
    return str(error).partition(": set ")[2].split(" and ")


def expected_of(plan: RLPlan, devices: str) -> dict[str, float]:
    return phase_seconds(plan, read_devices(devices))


@pytest.mark.parametrize("verb", ["grpo", "ppo"])
@pytest.mark.parametrize("devices", ["8xH100", "2x8xH100", "8x8xH100"])
@pytest.mark.parametrize("shape", ["qwen2.5-7b", "qwen2.5-32b", "llama-70b"])
def test_a_model_fits_or_is_refused_with_keys_that_make_it_fit(shape: str, devices: str, verb: str) -> None:
    def plan(*words: str) -> RLPlan:
        return planned(shape, devices, f"algorithm.preset={verb}", *words)

    try:
        made = plan()
    except ConfigError as error:
        if "no division of its models fits these GPUs" in str(error):
            assert (shape, devices, verb) == ("llama-70b", "8xH100", "ppo")
            return
        made = plan(*proposed(error))
    assert made.forecast.room.bytes_needed(made.forecast.choice) <= made.machine.gpu_bytes
    assert all(0 <= value < 600 for value in expected_of(made, devices).values())


def test_an_engine_that_no_gpu_holds_is_refused_wherever_it_lives() -> None:
    for placement in ("colocated", "separate"):
        with pytest.raises(ConfigError, match=r"an engine needs about 136\.\d GiB .*rollout\.tensor_parallel=[48]"):
            planned("llama-70b", "8x8xH100", f"placement={placement}")


def test_ranks_engines_and_roles_have_their_nodes() -> None:
    made = planned("qwen2.5-7b", "2x8xH100", "rollout.tensor_parallel=4")
    assert node_lines(made.layout, made.machine) == [
        "node       0: policy 0-7; reference 0-7; engine 0-1",
        "node       1: policy 8-15; reference 8-15; engine 2-3",
    ]


def test_an_engine_lies_inside_one_node() -> None:
    with pytest.raises(
        ConfigError, match=r"tensor_parallel=16: engine 0 would span 0 and 1, and an engine must be on one node"
    ):
        planned("qwen2.5-7b", "2x8xH100", "rollout.tensor_parallel=16")


def test_the_model_of_the_hardware_tells_what_was_measured_on_one_h200() -> None:
    """The step of docs/benchmarks.md that its shares were chosen by."""
    words = ["rollout.max_new_tokens=512", "rollout.max_prompt_tokens=100", "algorithm.kl.coefficient=0"]
    plan = planned("qwen2.5-1.5b", "1xH200", *words)
    found = expected_of(plan, "1xH200")
    assert found == pytest.approx({"rollout": 2.3, "score": 0.0, "train": 2.17, "sync": 0.28}, rel=0.06)
    assert sync_bytes(plan) == pytest.approx(3.1e9, rel=0.01)


def test_more_devices_take_less_time_and_more_models_more() -> None:
    one, many = (expected_of(planned("qwen2.5-7b", text), text) for text in ("8xH100", "8x8xH100"))
    assert many["train"] < one["train"] and many["rollout"] < one["rollout"] and many["score"] < one["score"]
    bare = expected_of(planned("qwen2.5-7b", "8xH100", "algorithm.kl.coefficient=0"), "8xH100")
    assert bare["score"] == 0 < one["score"]
    adapters = planned("qwen2.5-7b", "8xH100", "model.lora.rank=16", "model.lora.sync=adapter")
    assert sync_bytes(adapters) < 0.02 * sync_bytes(planned("qwen2.5-7b", "8xH100"))
    assert expected_of(adapters, "8xH100")["train"] < one["train"]  # neither gradients of weights nor their exchange


def test_models_have_the_tokens_of_their_data_places() -> None:
    """128 answers to prompts of 512 tokens: a rank of a tensor width of 4 has those of its half of eight GPUs."""
    words = ["rollout.max_new_tokens=512", "minibatches=2", "algorithm.preset=ppo", "critic.tensor_parallel=1"]
    made = planned("qwen2.5-7b", "8xH100", "model.tensor_parallel=4", "reference.tensor_parallel=2", *words)
    tokens = {one.name: one.step_tokens for one in tenants_of(made)}
    completions = made.config.prompts_per_step * made.config.algorithm.group_size
    each = {"policy": completions / 2 / 2, "reference": completions / 4, "critic": completions / 2 / 8}
    assert tokens == {name: math.ceil(count) * 1024 for name, count in each.items()}


def test_pieces_of_weights_and_room_for_adapters_are_planned() -> None:
    plain, wide = (planned("qwen2.5-7b", "1xH200", *words) for words in ((), ("sync.bucket_mib=4096",)))
    assert (plain.forecast.room.engine.piece, wide.forecast.room.engine.piece) == (2 * 152064 * 3584, 2**32)
    adapted = planned("qwen2.5-7b", "1xH200", "model.lora.rank=64")
    assert adapted.forecast.room.engine.piece == 256 * 2**20
    assert adapted.forecast.room.engine.fixed - plain.forecast.room.engine.fixed == pytest.approx(sync_bytes(adapted))


def test_sampling_while_training_costs_the_longer_of_the_two() -> None:
    def step(*words: str) -> float:
        config = RLConfig.load([], ["model.path=qwen2.5-7b", "placement=separate", *words])
        said = plan_on_paper(config, read_devices("8xH100")).splitlines()[-1]
        found = re.search(r": (\d+) s a step", said)
        assert found, said
        return float(found[1])

    assert step("rollout.max_staleness=1") < step()


@pytest.mark.parametrize(("devices", "remedy"), [("8xH100", "3 and training.offload=optimizer"), ("8x8xH100", "3")])
def test_offline_tasks_are_planned_too(devices: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f": set training.deepspeed.zero_stage={remedy}$") as caught:
        plan_on_paper(SftConfig.load([], ["model.path=llama-70b"]), read_devices(devices))
    said = plan_on_paper(SftConfig.load([], ["model.path=llama-70b", *proposed(caught.value)]), read_devices(devices))
    assert "ZeRO 3" in said and "rows of 2048 tokens" in said and "expected   train" in said


def test_the_command_line_plans(capsys: pytest.CaptureFixture[str], model_folder: Path) -> None:
    keys = ["training.deepspeed.zero_stage=3", "reference.deepspeed.zero_stage=3", "rollout.tensor_parallel=4"]
    assert main(["plan", "grpo", "--model-shape", "llama-70b", "--devices", "8x8xH100", *keys]) == 0
    said = capsys.readouterr().out
    for part in ("shape:llama-70b: 70553.7 M", "8 x 8 x H100", "engines    16 x vllm", "node       7: policy 56-63"):
        assert part in said
    assert "sync       141.1 GB to each engine by ipc" in said and said.count("\nnode ") == 8
    assert main(["plan", "dpo", "--model", str(model_folder), "--devices", "1xH200"]) == 0
    assert f"shape:{model_folder}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["grpo", "--devices", "8xH100"], "no model: give --model-shape"),
        (["grpo", "--model-shape", "gpt-9", "--devices", "8xH100"], "--model-shape gpt-9 is unknown"),
        (["grpo", "--model-shape", "llama-8b", "--devices", "many"], "write NODESxGPUSxNAME"),
        (["grpo", "--model-shape", "llama-8b", "--devices", "8xH100", "stps=3"], "did you mean 'steps'"),
        (
            ["generate", "--model-shape", "llama-8b", "--devices", "8xH100"],
            "plan generate: plan takes verbs that train one model",
        ),
    ],
)
def test_mistakes_are_answered(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    try:
        status: Any = main(["plan", *words])
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and said in capsys.readouterr().err


def test_a_plan_starts_without_what_samples_and_trains() -> None:
    program = (
        "import sys; from trueline.cli import main;"
        "main(['plan', 'grpo', '--model-shape', 'qwen2.5-7b', '--devices', '8xH100']);"
        "import ray; assert not ray.is_initialized();"
        "assert not {'vllm', 'deepspeed', 'transformers', 'datasets'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_plan_says_what_each_process_takes_in_gibibytes() -> None:
    plan = planned("qwen2.5-7b", "8xH100")
    said = dict(
        re.findall(r"^(\w+) .*, about ([\d.]+) GiB each", describe_on_paper(plan, read_devices("8xH100")), re.MULTILINE)
    )
    expected = {name: f"{size / GIB:.1f}" for name, size in memory_bytes(plan).items()}
    assert said["policy"] == expected["policy"] and said["engines"] == expected["engine"]


def test_a_plan_of_unknown_speed_has_memory_and_no_seconds() -> None:
    config = RLConfig.load([], ["model.path=qwen2.5-1.5b"], {"algorithm": {"preset": "grpo"}})
    text = plan_on_paper(config, read_devices("1x80GiB"))
    assert "of 80.0 GiB on each GPU" in text and "expected   no seconds: add the speed of the GPU to --devices" in text
    assert "expected   no seconds: V100 computes no bfloat16" in plan_on_paper(config, read_devices("8xV100"))
    known = plan_on_paper(config, read_devices("1x80GiB@989TFLOPs"))
    assert re.search(r"expected   rollout .*: [\d.]+ s a step; an estimate", known)


def test_a_refusal_proposes_only_keys_that_are_needed() -> None:
    """On one GPU there is nobody to share with, so no stage of ZeRO is proposed beside adapters or the host."""
    with pytest.raises(ConfigError, match=r": set model\.lora\.rank=16$"):
        planned("qwen2.5-7b", "1xH100")
    sft = SftConfig.load([], ["model.path=qwen2.5-7b"])
    with pytest.raises(ConfigError, match=r": set training\.offload=optimizer$"):
        plan_on_paper(sft, read_devices("1xH100"))
    with pytest.raises(ConfigError, match=r": set model\.lora\.rank=16$"):
        plan_on_paper(sft, read_devices("1xRTX4090"))
    with pytest.raises(ConfigError, match="no keys make it fit: use more or larger GPUs, or a smaller model"):
        planned("qwen2.5-7b", "1xRTX4090", "algorithm.preset=ppo")


def test_models_that_only_score_are_whole_with_fsdp2_until_a_key_divides_them() -> None:
    words = ["model.path=llama-70b", "training.engine=fsdp2", "rollout.tensor_parallel=4"]
    with pytest.raises(
        ConfigError, match=r"1 x reference 132\.7.*: set training\.replicas=1 and reference\.replicas=1$"
    ):
        plan_on_paper(RLConfig.load([], words), read_devices("8x8xH100"))
    said = plan_on_paper(RLConfig.load([], [*words, "reference.replicas=1"]), read_devices("8x8xH100"))
    assert "policy     64 x fsdp2 rank, fully sharded" in said
