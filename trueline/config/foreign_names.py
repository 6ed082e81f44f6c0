"""What the names of other trainers (TRL, OpenRLHF, verl) are called here."""

WHOLE_DISTRIBUTION = (
    "training samples from the whole distribution, whose log-probs are `algorithm.old_logprobs`; set `evaluation.{}` "
    "for evaluation"
)
EITHER = "set `rollout.{0}` for prompts that are sampled to learn, `evaluation.{0}` for held-out ones"
BOTH_CLIPS = "set `algorithm.clip_low` and `algorithm.clip_high`, the two sides of the clip"

# Names, each the ending of a dotted key, and what to say of them: a key, or a sentence with its keys in backticks. The
# first one whose keys the configuration at hand has is said; where there is none, nothing is.
ROWS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # Steps and batches
    ("max_steps total_training_steps", ("steps", "training.steps")),
    (
        "num_train_epochs num_episodes total_epochs",
        (
            "set `steps`: each step takes the next `prompts_per_step` prompts, pass after pass over the data",
            "epochs",
            "training.epochs",
        ),
    ),
    ("num_iterations ppo_epochs num_ppo_epochs max_epochs", ("epochs", "training.epochs")),
    ("rollout_batch_size", ("prompts_per_step", "prompts_per_round")),
    ("data.train_batch_size", ("prompts_per_step", "prompts_per_round", "samples_per_step")),
    (
        "train_batch_size batch_size global_batch_size ppo_mini_batch_size mini_batch_size num_mini_batches",
        (
            "the `prompts_per_step` x `algorithm.group_size` answers of a step are cut into `minibatches`, one "
            "optimizer step each",
            "samples_per_step",
            "training.samples_per_step",
        ),
    ),
    (
        "per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size",
        (
            "micro-batches follow `training.micro_batch_tokens`; a step trains on `prompts_per_step` x "
            "`algorithm.group_size` answers over all ranks",
            "micro-batches follow `training.micro_batch_tokens`; a step trains on `samples_per_step` over all ranks",
            "micro-batches follow `training.micro_batch_tokens`; a step trains on `training.samples_per_step` over all "
            "ranks",
        ),
    ),
    (
        "micro_train_batch_size micro_rollout_batch_size micro_batch_size micro_batch_size_per_gpu "
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu log_prob_micro_batch_size_per_gpu "
        "forward_micro_batch_size_per_gpu",
        ("training.micro_batch_samples",),
    ),
    ("ref.log_prob_micro_batch_size_per_gpu", ("reference.micro_batch_samples",)),
    (
        "ppo_max_token_len_per_gpu log_prob_max_token_len_per_gpu forward_max_token_len_per_gpu "
        "train_max_tokens_per_gpu rollout_max_tokens_per_gpu use_dynamic_bsz use_dynamic_batch",
        ("training.micro_batch_tokens",),
    ),
    # Lengths and sampling
    (
        "max_completion_length generate_max_len max_response_length response_length",
        ("rollout.max_new_tokens", "max_tokens"),
    ),
    ("max_prompt_length prompt_max_len prompt_length", ("rollout.max_prompt_tokens", "max_tokens")),
    (
        "max_length max_len max_seq_length max_seq_len max_model_len vllm_max_model_length",
        (
            "max_tokens",
            "training.max_tokens",
            "prompts and answers have a limit each: set `rollout.max_prompt_tokens` and `rollout.max_new_tokens`",
        ),
    ),
    ("num_generations n_samples_per_prompt rollout.n", ("algorithm.group_size", "samples", "evaluation.samples")),
    ("num_generations_eval eval_n_samples_per_prompt val_kwargs.n", ("evaluation.samples",)),
    ("eval_temperature val_kwargs.temperature", ("evaluation.temperature",)),
    *(
        (name, (*others, WHOLE_DISTRIBUTION.format(name), EITHER.format(name), f"rollout.{name}"))
        for name, *others in (("top_p",), ("top_k", "distill.top_k"), ("min_p",), ("repetition_penalty",))
    ),
    ("stop stop_strings stop_sequences", (EITHER.format("stop"), "rollout.stop")),
    *((f"val_kwargs.{name}", (f"evaluation.{name}",)) for name in ("top_p", "top_k")),
    ("use_vllm rollout.name", ("rollout.engine",)),
    ("vllm_num_engines", ("rollout.engines",)),
    ("vllm_tensor_parallel_size tensor_model_parallel_size tensor_parallel_size", ("rollout.tensor_parallel",)),
    ("vllm_gpu_memory_utilization gpu_memory_utilization", ("rollout.gpu_memory_utilization",)),
    ("max_num_seqs", ("rollout.max_sequences",)),
    ("enforce_eager", ("enforce_eager=true is `rollout.cuda_graphs=false` here",)),
    ("async_train async_queue_size", ("rollout.max_staleness",)),
    ("colocate_all_models hybrid_engine vllm_mode", ("placement",)),
    # Optimizer
    ("optim", ("training.optimizer",)),
    ("lr actor_learning_rate", ("training.learning_rate",)),
    ("critic_learning_rate", ("critic.learning_rate",)),
    ("lr_scheduler_type lr_scheduler warmup_style", ("training.schedule",)),
    ("lr_warmup_steps num_warmup_steps", ("training.warmup_steps",)),
    (
        "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio",
        ("warm-up is counted in optimizer steps: set `training.warmup_steps`",),
    ),
    ("l2", ("training.weight_decay",)),
    ("max_norm grad_clip", ("training.max_grad_norm",)),
    ("adam_betas adam_beta1 adam_beta2", ("training.betas",)),
    ("adam_epsilon", ("training.epsilon",)),
    ("aux_loss_coef moe_aux_loss_coeff output_router_logits", ("training.router_aux_loss_coef",)),
    ("adam_offload optimizer_offload param_offload cpu_offload", ("training.offload",)),
    ("packing_samples use_remove_padding", ("training.packing",)),
    ("ema_beta enable_ema", ("training.ema_decay",)),
    ("n_gpus_per_node actor_num_gpus_per_node", ("training.ranks",)),
    ("critic_num_gpus_per_node", ("critic.ranks",)),
    ("ref_num_gpus_per_node", ("reference.ranks",)),
    ("reward_num_gpus_per_node", ("reward_model.ranks",)),
    # Algorithm
    ("beta", ("preference.beta", "kto.beta", "algorithm.kl.coefficient")),
    ("init_kl_coef kl_coef kl_loss_coef", ("algorithm.kl.coefficient",)),
    ("use_kl_loss use_kl_in_reward", ("algorithm.kl.place",)),
    ("kl_estimator kl_loss_type kl_penalty", ("algorithm.kl.estimator",)),
    ("kl_target target_kl", ("algorithm.kl.target",)),
    ("kl_horizon", ("algorithm.kl.horizon",)),
    ("epsilon", (BOTH_CLIPS, "training.epsilon")),
    ("eps_clip eps_clip_low_high clip_ratio cliprange clip_range", (BOTH_CLIPS,)),
    ("clip_ratio_low", ("algorithm.clip_low",)),
    ("epsilon_high clip_ratio_high", ("algorithm.clip_high",)),
    ("clip_ratio_c", ("algorithm.dual_clip",)),
    ("cliprange_value", ("algorithm.value_clip",)),
    ("lambd lam", ("algorithm.gae_lambda",)),
    ("entropy_coeff entropy_loss_coef ent_coef", ("algorithm.entropy_coefficient",)),
    ("adv_estimator advantage_estimator", ("algorithm.advantage",)),
    ("loss_type", ("preference.loss", "algorithm.loss_aggregation")),
    ("policy_loss_type", ("algorithm.loss",)),
    ("loss_agg_mode", ("algorithm.loss_aggregation",)),
    ("critic_warmup freezing_actor_steps", ("algorithm.critic_warmup_steps",)),
    ("dynamic_filtering filter_groups.enable", ("algorithm.dynamic_sampling.enabled",)),
    ("mask_truncated_completions", ("algorithm.shaping.overlong_filter",)),
    ("overlong_penalty_factor overlong_buffer.penalty_factor", ("algorithm.shaping.overlong_factor",)),
    (
        "enable_vllm_is_correction vllm_importance_sampling_correction rollout_is",
        ("algorithm.importance_sampling.mode",),
    ),
    (
        "vllm_is_truncated_threshold vllm_importance_sampling_cap tis_imp_ratio_cap",
        ("algorithm.importance_sampling.cap",),
    ),
    ("rpo_alpha nll_loss_coef", ("preference.nll_coefficient",)),
    # Models
    ("pretrain model_name_or_path model_name model.name", ("model.path",)),
    ("critic_pretrain", ("critic.path",)),
    ("teacher_model teacher_model_name_or_path", ("distill.teacher", "teacher.path")),
    ("bf16", ("set `model.dtype=bfloat16`",)),
    ("fp16", ("there is no float16: set `model.dtype` to bfloat16 or float32",)),
    ("torch_dtype precision", ("model.dtype",)),
    ("attn_implementation", ("model.attention",)),
    ("enable_gradient_checkpointing", ("model.gradient_checkpointing",)),
    ("lora_rank lora_r", ("model.lora.rank",)),
    ("lora_alpha", ("model.lora.alpha",)),
    ("lora_dropout", ("model.lora.dropout",)),
    ("target_modules lora_target_modules", ("model.lora.targets",)),
    ("use_peft", ("set `model.lora.rank` above 0",)),
    ("load_in_4bit", ("model.lora.quantize",)),
    ("use_liger use_liger_kernel", ("model.liger",)),
    ("ds_tensor_parallel_size", ("model.tensor_parallel",)),
    ("ring_attn_size ulysses_sequence_parallel_size context_parallel_size", ("model.context_parallel",)),
    # Data and rewards
    ("train_files dataset dataset_name prompt_data", ("data.path",)),
    ("prompt_data_probs", ("data.mixture",)),
    ("val_files eval_dataset eval_data", ("evaluation.data",)),
    ("prompt_key input_key", ("data.prompt_column",)),
    ("label_key answer_key", ("data.label_column",)),
    ("output_key", ("data.completion_column",)),
    ("chosen_key", ("data.chosen_column",)),
    ("rejected_key", ("data.rejected_column",)),
    ("apply_chat_template", ("data.chat_template",)),
    ("filter_overlong_prompts truncation", ("data.too_long",)),
    (
        "reward_pretrain reward_model.model.path reward_funcs remote_rm_url custom_reward_function.path "
        "custom_reward_function.name",
        ("reward.function",),
    ),
    ("reward_weights", ("set `reward.parts`, with a weight in each",)),
    ("normalize_reward", ("reward.normalize",)),
    ("reward_clip_range", ("reward.clip",)),
    # The run
    ("save_steps save_freq", ("checkpoint.every",)),
    ("save_total_limit max_ckpt_num max_actor_ckpt_to_keep", ("checkpoint.keep",)),
    ("eval_steps test_freq", ("evaluation.every",)),
    ("logging_steps", ("every step is logged",)),
    ("output_dir save_path ckpt_path default_local_dir", ("folder",)),
    ("run_name experiment_name wandb_run_name", ("name",)),
    ("report_to logger", ("set `monitoring.wandb` to a project's name, or `monitoring.tensorboard`",)),
    ("use_wandb wandb_project project_name", ("monitoring.wandb",)),
    ("use_tensorboard", ("monitoring.tensorboard",)),
    (
        "resume_from_checkpoint load_checkpoint resume_mode resume_from_path",
        ("add --resume, and --name unless it is the run that was touched last",),
    ),
)

# Endings of keys that had another name here, and the name that they have.
RENAMED: dict[str, str] = {
    "groups_per_step": "prompts_per_step",
    "algorithm.weighting": "algorithm.loss_aggregation",
    "algorithm.old": "algorithm.old_logprobs",
    "algorithm.critic_only_steps": "algorithm.critic_warmup_steps",
    "algorithm.correction.kind": "algorithm.importance_sampling.mode",
    **{
        f"algorithm.correction.{name}": f"algorithm.importance_sampling.{name}"
        for name in ("cap", "low", "high", "sequence_low", "sequence_high")
    },
    "rollout.gpu_memory_share": "rollout.gpu_memory_utilization",
    **{
        f"{section}ring": f"{section}context_parallel"
        for section in ("model.", "critic.", "reference.", "teacher.", "reward_model.")
    },
}

FOREIGN_NAMES: dict[str, tuple[str, ...]] = {name: answers for names, answers in ROWS for name in names.split()}

FOREIGN_VERBS: dict[str, tuple[str, ...]] = {
    "train": ("sft", "dpo", "grpo"),
    "rl": ("grpo", "ppo"),
    "rlhf": ("grpo", "ppo"),
    "rlvr": ("grpo", "ppo"),
    "finetune": ("sft",),
    "pretrain": ("sft",),
    "rewardtrainer": ("rm",),
    "reward_model": ("rm",),
    "reward_modeling": ("rm",),
    "sample": ("generate",),
    "inference": ("generate",),
    "serve": ("serve-reward",),
    "merge": ("export",),
    "convert": ("export",),
    "preview": ("data",),
    "keys": ("config",),
}
