from tests.support.mistakes.home import GRPO, Mistake

MISTAKES: list[Mistake] = [
    (["train"], 2, r"unknown verb 'train'; "),
    (["GRPOTrainer"], 2, r"unknown verb 'GRPOTrainer'; did you mean 'grpo'"),
    ([*GRPO, "--num_generations", "8"], 2, r"unknown option --num_generations; .*key=value.*algorithm.group_size"),
    ([*GRPO, "steps"], 2, r"'steps' is not an override: write it as section.key=value"),
    ([*GRPO, "rollout.max_new_token=8"], 2, r"unknown key 'rollout.max_new_token'; did you mean 'rollout.max_new_t"),
    ([*GRPO, "per_device_train_batch_size=8"], 2, r"unknown key 'per_device_train_batch_size'; .*`prompts_per_step`"),
    ([*GRPO, "learning_rate=1e-5"], 2, r"unknown key 'learning_rate'; did you mean 'training.learning_rate'"),
    ([*GRPO, "training.learning_rate=fast"], 2, r"training.learning_rate: .*number.*\(got 'fast'\)"),
    ([*GRPO, "steps=0"], 2, r"steps: .*greater than.*\(got 0\)"),
    ([*GRPO, "rollout.engine=vlm"], 2, r"rollout.engine=vlm.*vllm"),
    ([*GRPO, "--config", "bad.yaml"], 2, r"--config bad.yaml: not valid YAML"),
    ([*GRPO, "--config", "list.yaml"], 2, r"--config list.yaml: expected `key: value` lines, found list"),
    ([*GRPO, "--config", "none.yaml"], 2, r"--config none.yaml: cannot be read .*give a YAML file"),
    ([*GRPO, "algorithm.group_size=1"], 2, r"algorithm.advantage=\w+ compares .*algorithm.group_size"),
    ([*GRPO, "minibatches=3"], 2, r"minibatches=3 does not divide the 4 \w+ of a step"),
    ([*GRPO, "runtime=ray", "training.ranks=400"], 2, r"needs about .* GiB of memory .*training.ranks"),
]
