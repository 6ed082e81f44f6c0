from tests.support.mistakes.home import GRPO, Mistake

MISTAKES: list[Mistake] = [
    (["train"], r"unknown verb 'train'; "),
    (["GRPOTrainer"], r"unknown verb 'GRPOTrainer'; did you mean 'grpo'"),
    ([*GRPO, "--num_generations", "8"], r"unknown option --num_generations; .*key=value.*algorithm.group_size"),
    ([*GRPO, "steps"], r"'steps' is not an override: write section.key=value"),
    ([*GRPO, "rollout.max_new_token=8"], r"unknown key 'rollout.max_new_token'; did you mean 'rollout.max_new_t"),
    ([*GRPO, "per_device_train_batch_size=8"], r"unknown key 'per_device_train_batch_size'; .*`prompts_per_step`"),
    ([*GRPO, "learning_rate=1e-5"], r"unknown key 'learning_rate'; did you mean 'training.learning_rate'"),
    ([*GRPO, "training.learning_rate=fast"], r"training.learning_rate: .*number.*\(got 'fast'\)"),
    ([*GRPO, "steps=0"], r"steps: .*greater than.*\(got 0\)"),
    ([*GRPO, "rollout.engine=vlm"], r"rollout.engine=vlm.*vllm"),
    ([*GRPO, "--config", "bad.yaml"], r"--config bad.yaml: not valid YAML"),
    ([*GRPO, "--config", "list.yaml"], r"--config list.yaml: expected `key: value` lines, found list"),
    ([*GRPO, "--config", "none.yaml"], r"--config none.yaml: cannot be read .*give a YAML file"),
    ([*GRPO, "algorithm.group_size=1"], r"algorithm.advantage=\w+ compares .*algorithm.group_size"),
    ([*GRPO, "minibatches=3"], r"minibatches=3 does not divide the 4 \w+ of a step"),
    ([*GRPO, "runtime=ray", "training.ranks=400"], r"needs about .* GiB of memory .*training.ranks"),
    (
        [*GRPO, "--num_generations", "8", "--per_device_train_batch_size", "4", "--bf16", "True", "beta=0.1"],
        r"--num_generations; .*group_size'\? unknown option --per_device_train_batch_size; .*`prompts_per_step`.* "
        r"unknown option --bf16; .*`model.dtype=bfloat16` unknown key 'beta'; did you mean 'algorithm.kl.coefficient'",
    ),
    ([*GRPO, "--model", "none"], r"--model model is ignored: --model none follows it"),
    ([*GRPO, "--steps=0"], r"unknown option --steps=0; keys are written as key=value; did you mean 'steps'"),
    ([*GRPO, "--name"], r"argument --name: expected one argument"),
    ([*GRPO, "--config", "twice.yaml"], r"'training.learning_rate' is in lines 3 and 5: delete one of them"),
    ([*GRPO, "evaluation.sets={a: x, a: y}"], r"the key 'a' is twice in line 1: delete one of them"),
    ([*GRPO, "--resume", "runs/none"], r"runs/none is not a run that can be resumed"),
    ([*GRPO, "--resume", "begun"], r"runs/begun is a run of sft: resume it with the verb that started it"),
    (
        ["eval", "--model", "model", "--data", "a", "--eval-data", "b"],
        r"--eval-data b: --data already sets evaluation.data=a",
    ),
    (["eval", "--model", "model"], r"evaluation.data is empty: name prompts"),
    (["doctor", "--deep", "gpro"], r"unknown verb 'gpro'; did you mean 'grpo'"),
    (["--model", "model", "grpo"], r"--model needs a verb before it"),
]
