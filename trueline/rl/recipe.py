"""The effective algorithm in five lines, after preset, files and overrides."""

from trueline.config.algorithm import AlgorithmConfig
from trueline.config.rl import RLConfig

BASELINES = {
    "gae": "the critic's value",
    "reinforce": "none",
    "group_norm": "the group's mean, divided by its deviation",
    "group_mean": "the group's mean",
    "leave_one_out": "the mean of the group's other answers",
    "greedy_baseline": "the reward of the greedy answer",
    "batch_mean": "the mean of the step's answers",
    "teacher": "none; the teacher's log-prob minus the policy's, token by token",
}
CLIPS = {
    "ppo_clip": "ratio clipped to [1 - {0.clip_low:g}, 1 + {0.clip_high:g}]",
    "gspo": "ratio of the whole answer clipped to [1 - {0.clip_low:g}, 1 + {0.clip_high:g}]",
    "cispo": "ratio capped at {0.ratio_cap:g}, every token keeps its gradient",
    "reinforce": "ratio capped at {0.ratio_cap:g}",
    "sapo": "soft gate around ratio 1",
    "gmpo": "geometric mean of the answer's clipped ratios",
}
AVERAGES = {
    "token_mean": "every sampled token of a minibatch counts the same",
    "sequence_mean": "every answer counts the same, its tokens share that",
    "constant": "sums of tokens over answers x rollout.max_new_tokens",
    "sequence_sum": "sums of tokens over answers",
}


def describe_recipe(config: RLConfig) -> str:
    algorithm = config.algorithm
    return "\n".join(
        [
            f"advantage  {algorithm.advantage}: baseline is {BASELINES.get(algorithm.advantage, 'your own')}"
            + describe_trace(algorithm)
            + ("; whitened over the step's tokens" if algorithm.whiten else ""),
            f"loss       {algorithm.loss}: {CLIPS.get(algorithm.loss, 'your own').format(algorithm)}"
            + describe_terms(algorithm),
            f"averaging  {algorithm.weighting}: {AVERAGES[algorithm.weighting]}",
            f"KL         {describe_kl(algorithm)}",
            f"correction {algorithm.correction.kind} (engine against trainer); old log-probs: "
            + ("computed again by the trainer" if algorithm.old == "recompute" else "the engine's"),
        ]
    )


def describe_trace(algorithm: AlgorithmConfig) -> str:
    if algorithm.advantage not in ("gae", "reinforce"):
        return ""
    adaptive = algorithm.length_adaptive
    trace = f"lambda 1 - 1/({adaptive:g} x length)" if adaptive else f"lambda {algorithm.gae_lambda:g}"
    return f"; gamma {algorithm.gamma:g}" + (f", {trace}" if algorithm.advantage == "gae" else "")


def describe_terms(algorithm: AlgorithmConfig) -> str:
    terms = {
        "dual clip": algorithm.dual_clip,
        "entropy bonus": algorithm.entropy_coefficient,
        "NLL of good answers": algorithm.positive_nll,
        "overlong punishment": algorithm.shaping.overlong_factor,
    }
    said = [f"{name} {value:g}" for name, value in terms.items() if value]
    if algorithm.shaping.overlong_filter:
        said.append("truncated answers left out")
    if algorithm.dynamic_sampling.enabled:
        said.append("dynamic sampling")
    return "".join(f"; {word}" for word in said)


def describe_kl(algorithm: AlgorithmConfig) -> str:
    kl = algorithm.kl
    if kl.coefficient == 0:
        return "none, so no reference model is loaded"
    adaptive = f", adapting to {kl.target:g} nats per answer" if kl.target else ""
    kind = "k1 off every token's reward" if kl.place == "reward" else f"{kl.estimator} as a term of the loss"
    return f"{kind}, coefficient {kl.coefficient:g}{adaptive}"
