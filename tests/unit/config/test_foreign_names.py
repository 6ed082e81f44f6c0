import re
from pathlib import Path

import pytest

from trueline.config.base import Config, ConfigError
from trueline.config.foreign_names import FOREIGN_NAMES, RENAMED, ROWS
from trueline.config.rl import RLConfig
from trueline.config.sampling import ServingConfig
from trueline.config.supervised import SftConfig
from trueline.verbs import VERBS

KINDS: list[type[Config]] = [*dict.fromkeys(command.kind for command in VERBS.values()), ServingConfig]
KEYS = {kind: {key.path for key in kind().leaves()} for kind in KINDS}

# What people type who come from TRL, OpenRLHF and verl: a verb, their name, and what the answer must name.
BROUGHT = """
grpo num_generations algorithm.group_size
grpo n_samples_per_prompt algorithm.group_size
grpo actor_rollout_ref.rollout.n algorithm.group_size
generate num_generations samples
eval num_generations evaluation.samples
grpo lr training.learning_rate
grpo learning_rate training.learning_rate
grpo actor_learning_rate training.learning_rate
grpo actor_rollout_ref.actor.optim.lr training.learning_rate
sft lr training.learning_rate
sft optim training.optimizer
sft aux_loss_coef training.router_aux_loss_coef
grpo router_aux_loss_coef training.router_aux_loss_coef
grpo use_rollout_routing_replay training.replay_routing
ppo critic.optim.optimizer critic.optimizer
ppo critic_learning_rate critic.learning_rate
ppo critic.optim.lr critic.learning_rate
ppo critic.model.path critic.path
grpo max_completion_length rollout.max_new_tokens
grpo generate_max_len rollout.max_new_tokens
grpo data.max_response_length rollout.max_new_tokens
grpo max_new_tokens rollout.max_new_tokens
grpo max_prompt_length rollout.max_prompt_tokens
grpo prompt_max_len rollout.max_prompt_tokens
grpo data.max_prompt_length rollout.max_prompt_tokens
grpo max_length rollout.max_prompt_tokens rollout.max_new_tokens
grpo max_len rollout.max_prompt_tokens rollout.max_new_tokens
sft max_length max_tokens
dpo max_len max_tokens
raft max_length training.max_tokens
grpo per_device_train_batch_size training.micro_batch_tokens prompts_per_step algorithm.group_size
grpo gradient_accumulation_steps training.micro_batch_tokens prompts_per_step algorithm.group_size
sft gradient_accumulation_steps training.micro_batch_tokens samples_per_step
raft gradient_accumulation_steps training.micro_batch_tokens training.samples_per_step
grpo rollout_batch_size prompts_per_step
grpo data.train_batch_size prompts_per_step
grpo train_batch_size prompts_per_step algorithm.group_size minibatches
sft train_batch_size samples_per_step
grpo actor_rollout_ref.actor.ppo_mini_batch_size prompts_per_step algorithm.group_size minibatches
grpo micro_train_batch_size training.micro_batch_samples
ppo critic.ppo_micro_batch_size_per_gpu critic.micro_batch_samples
ppo reward_model.micro_batch_size_per_gpu reward_model.micro_batch_samples
generate reward_model.micro_batch_size_per_gpu reward_model.micro_batch_samples
grpo beta algorithm.kl.coefficient
dpo beta preference.beta
kto beta kto.beta
iterative_dpo beta preference.beta
grpo init_kl_coef algorithm.kl.coefficient
grpo kl_coef algorithm.kl.coefficient
grpo algorithm.kl_ctrl.kl_coef algorithm.kl.coefficient
grpo save_steps checkpoint.every
grpo eval_steps evaluation.every
grpo logging_steps
grpo max_steps steps
raft max_steps training.steps
grpo num_train_epochs steps prompts_per_step
grpo num_episodes steps prompts_per_step
grpo trainer.total_epochs steps prompts_per_step
sft num_train_epochs epochs
raft num_train_epochs training.epochs
grpo temperature rollout.temperature
grpo actor_rollout_ref.rollout.temperature rollout.temperature
grpo top_p algorithm.old_logprobs evaluation.top_p
grpo generation_kwargs.min_p algorithm.old_logprobs evaluation.min_p
grpo sampling.top_k algorithm.old_logprobs evaluation.top_k
grpo actor_rollout_ref.rollout.val_kwargs.top_p evaluation.top_p
generate top_p rollout.top_p
generate repetition_penalty rollout.repetition_penalty
eval top_k rollout.top_k evaluation.top_k
raft top_p rollout.top_p evaluation.top_p
distill top_k distill.top_k
grpo stop_sequences rollout.stop evaluation.stop
generate stop rollout.stop
grpo epsilon algorithm.clip_low algorithm.clip_high
sft epsilon training.epsilon
grpo epsilon_high algorithm.clip_high
grpo eps_clip algorithm.clip_low algorithm.clip_high
grpo clip_ratio algorithm.clip_low algorithm.clip_high
ppo lambd algorithm.gae_lambda
ppo gamma algorithm.gamma
simpo gamma preference.gamma
grpo warmup_ratio training.warmup_steps
grpo lr_scheduler_type training.schedule
grpo weight_decay training.weight_decay
grpo max_grad_norm training.max_grad_norm
grpo bf16 model.dtype
grpo fp16 model.dtype
grpo gradient_checkpointing model.gradient_checkpointing
grpo lora_rank model.lora.rank
grpo lora_alpha model.lora.alpha
grpo zero_stage training.deepspeed.zero_stage
grpo actor_rollout_ref.actor.strategy training.engine
ppo critic.strategy critic.engine
grpo actor_rollout_ref.actor.fsdp_config.reshard_after_forward training.fsdp2.reshard
grpo actor_rollout_ref.actor.fsdp_config.fsdp_size training.replicas training.ranks
grpo actor_rollout_ref.actor.fsdp_config.offload_policy training.offload
sft parallelism.data_parallel_replicate_degree training.replicas training.ranks
sft parallelism.tensor_parallel_degree model.tensor_parallel
sft parallelism.context_parallel_degree model.context_parallel
sft torch_compile training.compile
grpo vllm_num_engines rollout.engines
grpo vllm_tensor_parallel_size rollout.tensor_parallel
grpo vllm_gpu_memory_utilization rollout.gpu_memory_utilization
grpo pretrain model.path
grpo actor_rollout_ref.model.path model.path
grpo reward_pretrain reward.function
grpo reward_model.model.path reward.function
grpo save_path folder
grpo output_dir folder
grpo packing training.packing
grpo report_to monitoring.wandb monitoring.tensorboard
grpo use_wandb monitoring.wandb
grpo resume_from_checkpoint
"""


def answer_to(kind: type[Config], name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        kind.load([], [f"{name}=1"])
    said = str(caught.value)
    assert said.startswith(f"unknown key {name!r}; ")
    return said.removeprefix(f"unknown key {name!r}; ")


def named_in(answer: str) -> list[str]:
    return re.findall(r"[`']([a-z0-9_.]+)", answer)


def test_names_of_other_trainers_are_known() -> None:
    for line in BROUGHT.strip().splitlines():
        verb, name, *keys = line.split()
        answer = answer_to(VERBS[verb].kind, name)
        assert "lists every key" not in answer, line
        assert named_in(answer) == keys, line


def test_what_a_kind_of_run_does_not_have_is_not_proposed() -> None:
    for kind in KINDS:
        for name in FOREIGN_NAMES:
            answer = answer_to(kind, name)
            assert "lists every key" in answer or set(named_in(answer)) <= KEYS[kind], (kind, name, answer)
    assert "lists every key" in answer_to(VERBS["sft"].kind, "beta")  # and not training.betas
    assert "lists every key" in answer_to(VERBS["sft"].kind, "num_generations")


def test_every_answer_is_given_for_some_kind_of_run() -> None:
    for names, answers in ROWS.items():
        given = [named_in(answer_to(kind, names.split()[0])) for kind in KINDS]
        for answer in answers:
            assert any(set(answer.keys) <= KEYS[kind] for kind in KINDS), f"{answer} names no key"
            assert list(answer.keys) in given, f"{names}: {answer} is never given"


def test_names_stand_once_and_are_no_keys() -> None:
    names = [name for row in ROWS for name in row.split()]
    assert len(names) == len(set(names))
    assert not set(names) & set().union(*KEYS.values())


def test_an_old_name_says_the_new_one() -> None:
    """In every kind of run that has it, under the name that the key has there."""
    known = {key.path for verb in VERBS.values() for key in verb.kind().leaves()}
    for old, new in RENAMED.items():
        assert old not in known and new in known
    with pytest.raises(ConfigError, match=r"unknown key 'algorithm\.old': it was renamed to 'algorithm.old_logprobs'"):
        RLConfig.load([], ["algorithm.old=rollout"])
    with pytest.raises(ConfigError, match=r"'model\.ring': it was renamed to 'model.context_parallel'"):
        SftConfig.load([], ["model.ring=2"])
    with pytest.raises(ConfigError, match=r"'training\.zero_stage': it was renamed to 'training.deepspeed.zero_stage'"):
        SftConfig.load([], ["training.zero_stage=3"])
    with pytest.raises(ConfigError) as refused:
        SftConfig.load([], ["groups_per_step=2"])
    assert "renamed" not in str(refused.value)


def test_the_page_for_those_who_come_from_elsewhere_names_keys_that_exist() -> None:
    known = set().union(*KEYS.values())
    page = (Path(__file__).resolve().parents[3] / "docs" / "coming_from.md").read_text()
    cells = [line.split("|")[2] for line in page.splitlines() if line.startswith("| `")]
    named = {
        word.partition("=")[0] for cell in cells for word in re.findall(r"`([a-z_]+\.[a-z0-9_.]+(?:=\w+)?)`", cell)
    }
    assert len(named) > 60
    assert named <= known, named - known
