"""The text of every plan."""

from collections.abc import Collection
from dataclasses import replace

from trueline.algorithms.advantages import ADVANTAGES, has_teacher
from trueline.algorithms.entries import lookup
from trueline.algorithms.loss_aggregation import AGGREGATIONS
from trueline.algorithms.policy_losses import POLICY_LOSSES
from trueline.algorithms.shortcuts import fresh_old_logprobs, stream_obstacle, untested_draws
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.data import DifficultyConfig
from trueline.config.model import WORTHWHILE, ModelConfig, RanksConfig, TrainingConfig, sharing_obstacle
from trueline.config.rl import ResolvedRollout, RLConfig
from trueline.config.sampling import EvalConfig, GenerateConfig, RoundsConfig
from trueline.data.prompts import sample_of
from trueline.data.readers import renamed_roles
from trueline.environments.opening import describe_environment
from trueline.models.loading import ModelFacts
from trueline.models.lora import DEVIATION, arriving_share, first_change
from trueline.models.routing import KEY
from trueline.monitoring.timing import duration
from trueline.plan.findings import bits_lines
from trueline.plan.hardware import DEVICES, Devices
from trueline.plan.inputs import PromptSet
from trueline.plan.memory import GIB, SPARE, Forecast
from trueline.plan.offline import SupervisedPlan
from trueline.plan.resolve import adapter_doubt, adapter_obstacle, rate_line
from trueline.plan.rl import RLPlan, memory_bytes
from trueline.plan.sampling import Kind, SamplingPlan
from trueline.plan.time import expected_seconds, phase_seconds, sync_bytes, update_seconds
from trueline.runtime.cluster import Machine
from trueline.runtime.placement import Layout, place_processes
from trueline.training.engines.table import TRAIN_ENGINES, kept_gradients


def describe(plan: RLPlan | SupervisedPlan | SamplingPlan[Kind]) -> str:
    """Describe who gets what, the recipe, the batch arithmetic, estimates of memory and time, and all findings."""
    if isinstance(plan, RLPlan):
        lines = rl_lines(plan)
    else:
        lines = supervised_lines(plan) if isinstance(plan, SupervisedPlan) else sampling_lines(plan)
    return "\n".join([*lines, *bits_lines(plan.config, plan.machine), *warning_lines(plan)])


def describe_rounds(config: RoundsConfig, plan: SamplingPlan[GenerateConfig], prompts: int) -> str:
    """Describe rounds by the plan of their first samples, and how many prompts each has."""
    evaluates = " and eval" if config.evaluation.named_sets() else ""
    work = f"{config.rounds} rounds of {prompts} prompts, {config.samples} completions each; every round then runs "
    work += f"{config.trainer} on {config.learnt}{evaluates}"
    rate = rate_line(plan.facts.parameters, config.trained.task, config.model, config.training)
    notes = [*bits_lines(config, plan.machine), *warning_lines(plan)]
    return "\n".join([*sampling_lines(plan)[:-1], f"work       {work}", rate, *notes])


def describe_on_paper(plan: RLPlan | SupervisedPlan, devices: Devices) -> str:
    """Describe a plan for devices that are not here: no data is read, and phases are timed."""
    layout, model = plan.layout, plan.config.model
    if isinstance(plan, RLPlan):
        processes = process_lines(plan)
        batch = (
            f"batch      {plan.completions()} completions of {plan.rollout.max_new_tokens} tokens to prompts of "
            f"{plan.longest_prompt}; optimizer steps: {plan.config.minibatches * plan.config.epochs}\n"
            f"sync       {sync_bytes(plan) / 1e9:.1f} GB to each engine by {plan.transport()}"
        )
        overlaps = plan.rollout.extra_share() >= 1
        expected = expected_line(phase_seconds(plan, devices) if devices.tflops else {}, devices, overlaps)
    else:
        processes = [ranks_line("training", layout.policy_ranks, plan.config.training, model)]
        batch = f"batch      {plan.config.samples_per_step} rows of {plan.longest} tokens"
        expected = expected_line({"train": update_seconds(plan, devices)} if devices.tflops else {}, devices)
    return "\n".join(
        [
            machine_line(plan.machine) + f" ({devices.nodes} x {devices.gpus_of_node} x {devices.name})",
            model_line(model.path, plan.facts, model.dtype, model.lora.rank),
            *processes,
            *memory_lines(plan.forecast),
            *node_lines(layout, plan.machine),
            batch,
            expected,
            *warning_lines(plan),
        ]
    )


def warning_lines(plan: RLPlan | SupervisedPlan | SamplingPlan[Kind]) -> list[str]:
    return [f"warning: {finding.text()}" for finding in plan.findings]


# What all plans share


def machine_line(machine: Machine) -> str:
    devices = f"{machine.gpus} GPUs" if machine.gpus else f"{machine.cpus} CPU cores"
    name = f"cluster    {len(machine.nodes)} nodes, free on them" if machine.nodes else "machine   "
    return f"{name} {devices}, {machine.memory_bytes / GIB:.1f} GiB of memory free"


def node_lines(layout: Layout, machine: Machine, workers: int = 0) -> list[str]:
    """Return a line for each node of a cluster: the processes that run there."""
    if not machine.nodes:
        return []
    places = place_processes(layout, machine)
    kinds = {"policy": places.policy, **places.roles, "engine": places.engines}
    kinds["rollouts"] = places.rollout_workers(workers)
    lines = []
    for at in places.nodes():
        here = {kind: [number for number, node in enumerate(nodes) if node == at] for kind, nodes in kinds.items()}
        ends = {kind: dict.fromkeys((numbers[0], numbers[-1])) for kind, numbers in here.items() if numbers}
        processes = "; ".join(f"{kind} {'-'.join(map(str, both))}" for kind, both in ends.items())
        lines.append(f"node       {machine.nodes[at].address}: {processes}")
    return lines


def model_line(path: str, facts: ModelFacts, dtype: str, adapters: int = 0) -> str:
    lora = f", LoRA rank {adapters}" if adapters else ""
    return f"model      {path}: {facts.parameters / 1e6:.1f} M parameters, {dtype}{lora}"


def ranks_line(name: str, world: int, ranks: RanksConfig, model: ModelConfig) -> str:
    """Describe how a model is spread over processes; sharding and checkpointing concern trained models only."""
    trained, limit = isinstance(ranks, TrainingConfig), ranks.micro_batch_tokens
    parts = {
        f"{name:<10} {world} x {ranks.engine} rank": True,
        TRAIN_ENGINES[ranks.engine].words(ranks): trained,
        f"tensor {model.tensor_parallel} x context {model.context_parallel}": model.width() > 1,
        f"micro-batches of up to {limit} tokens" if limit else "micro-batches as memory allows": True,
        "gradient checkpointing": trained and bool(model.gradient_checkpointing),
        "compiled layers": isinstance(ranks, TrainingConfig) and bool(ranks.compile),
    }
    return ", ".join(part for part, applies in parts.items() if part and applies)


def sharing_line(ranks: RanksConfig, model: ModelConfig, family: str, *, pictures: bool = False) -> str:
    """Describe whether sequences that begin with the same prompt compute it once, or why not."""
    chosen = f"training.share_prefixes={str(ranks.share_prefixes).lower()}"
    obstacle = "it has pictures" if pictures else sharing_obstacle(ranks, model.context_parallel)
    if obstacle or not ranks.share_prefixes:
        return f"prefixes   each sequence of {family} computes the prompt again ({obstacle or chosen})"
    least = f", if that saves {WORTHWHILE:.0%} of a step's tokens" if ranks.share_prefixes == "auto" else ""
    return f"prefixes   the prompt of {family} is computed once in a pass{least} ({chosen})"


def engines_line(rollout: ResolvedRollout) -> str:
    seeds = "" if rollout.seeded else ", completions without seeds of their own (rollout.seeded=false)"
    return f"engines    {rollout.engines} x {rollout.engine}, tensor parallel {rollout.tensor_parallel}{seeds}"


def workers_lines(rollout: ResolvedRollout) -> list[str]:
    """Say where episodes run, unless they run in the run's own process."""
    return [f"workers    {rollout.workers} for rollouts: episodes, environments and rewards run in them"] * bool(
        rollout.workers
    )


def prompts_line(sets: Collection[PromptSet], rollout: ResolvedRollout, held_out: int | None = None) -> str:
    dropped = sum(one.dropped for one in sets)
    pictured = sum(bool(prompt.pictures) for one in sets for prompt in sample_of(one.prompts))
    renamed = renamed_roles(prompt.columns for one in sets for prompt in sample_of(one.prompts))
    sampled = sum(one.sampled or len(one.prompts) for one in sets) if any(one.sampled for one in sets) else 0
    some, longest = f" of {sampled} sampled" * bool(sampled), max(one.longest for one in sets)
    later = f"others are measured when drawn, and data.too_long decides above {rollout.max_prompt_tokens} tokens; "
    return (
        f"data       {sum(len(one.prompts) for one in sets)} prompts"
        + (f", {held_out} held out" if held_out is not None else "")
        + (f", {pictured}{some} with pictures" if pictured else "")
        + (f", {dropped}{some} too long and dropped" if dropped else "")
        + f"; longest prompt{some} {longest} tokens, {later * bool(sampled)}completions up to {rollout.max_new_tokens}"
        + (f"; roles: {renamed}" if renamed else "")
    )


def memory_lines(forecast: Forecast | None) -> list[str]:
    """Describe each phase on a GPU, and what was given up to make it fit."""
    if forecast is None or forecast.room.device == "cpu":
        return []
    room, choice = forecast.room, forecast.choice
    phases = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in room.phases(choice).items())
    fastest = replace(forecast, choice=forecast.quickest).largest()
    parts = {
        f"; engine share {choice.share:.3g}": room.engines > 0,
        "; optimizer moments on the host": choice.on_host,
        f"; the fastest keys would need {fastest}": not room.holds(forecast.quickest, 1 - SPARE),
    }
    notes = "".join(part for part, applies in parts.items() if applies)
    return [f"memory     {phases} of {room.size / GIB:.1f} GiB on each GPU{notes}"]


def expected_line(seconds: dict[str, float], devices: Devices, overlaps: bool = False) -> str:
    """Describe the seconds of each phase, or why there are none."""
    if not seconds and devices.name in DEVICES:
        return f"expected   no seconds: {devices.name} computes no bfloat16, which model.dtype=auto takes on GPUs"
    if not seconds:
        return "expected   no seconds: add the speed of the GPU to --devices, e.g. 1x80GiB@990TFLOPs"
    phases = ", ".join(f"{name} {float(f'{value:.2g}'):g} s" for name, value in seconds.items())
    total = f": {duration(expected_seconds(seconds, overlaps=overlaps))}" * (len(seconds) > 1)
    return f"expected   {phases}{total} a step; an estimate (docs/cluster.md)"


# Reinforcement learning


def rl_lines(plan: RLPlan) -> list[str]:
    config, layout, model = plan.config, plan.layout, plan.config.model
    sharing = "run side by side"
    if plan.shares_gpus():
        by = "by MPS" if plan.machine.mps else "without MPS, which makes both slower"
        sharing = f"share GPUs and {'take turns' if layout.in_turns else f'work at once, {by}'}"
    if config.runtime == "local":
        sharing = "run in this process"
    shown = any(prompt.pictures for source in plan.sources for prompt in sample_of(source.prompts))
    return [
        f"{machine_line(plan.machine)}; models and engines {sharing}",
        model_line(model.path, plan.facts, model.dtype, model.lora.rank),
        *process_lines(plan),
        *adapter_lines(config, plan.facts, plan.machine.gpus),
        *routing_lines(plan),
        *([sharing_line(config.training, model, "a group", pictures=shown)] if config.algorithm.group_size > 1 else []),
        *(rate_line(*one) for one in plan.rates()),
        *node_lines(layout, plan.machine, plan.rollout.workers),
        *memory_lines(plan.forecast),
        *recipe_lines(config),
        *stream_lines(plan),
        *batch_lines(plan),
        *plan.rewards.lines,
    ]


def process_lines(plan: RLPlan) -> list[str]:
    """Describe the processes of the policy, of every other model and of the engines, with the memory of each."""
    each = {name: f", about {size / GIB:.1f} GiB each" for name, size in memory_bytes(plan).items()}
    policy = ranks_line("policy", plan.layout.policy_ranks, plan.config.training, plan.config.model)
    roles = [
        ranks_line(role.name, role.world, role.ranks, role.model)
        + each[role.name]
        + ("" if role.model.path == plan.config.model.path else f": {role.model.path}")
        for role in plan.roles
    ]
    engines = engines_line(plan.rollout) + each["engine"]
    return [policy + each["policy"], *roles, engines, *workers_lines(plan.rollout)]


def adapter_lines(config: RLConfig, facts: ModelFacts, gpus: int) -> list[str]:
    """Describe how adapters reach the engines, and what rounding loses of an update where they are merged."""
    lora, dtype = config.model.lora, config.rollout.dtype
    if not lora.rank:
        return []
    if lora.adapter_only():
        return ["adapters   sent alone; engines apply them to the weights that they have loaded"]
    why = adapter_obstacle(config, gpus) or adapter_doubt(config, facts) or "model.lora.sync=merged"
    change = first_change(lora, config.training.peak_rate(), facts.hidden_size)
    arrives = arriving_share(change, dtype)
    return [
        f"adapters   merged into the weights that engines get ({why}); AdamW's first update changes weights by "
        f"{change:.1e}: {arrives:.0%} of it arrives, {1 - arrives:.0%} is lost in the rounding to {dtype} (for weights "
        f"of standard deviation {DEVIATION:g})"
    ]


def routing_lines(plan: RLPlan) -> list[str]:
    """Describe who chooses the experts of a token in a mixture."""
    words = {
        False: "engine and trainer choose experts independently",
        True: "the trainer sends tokens to the experts that the engine chose",
        "measure": "engine and trainer choose experts independently, and their choices are compared",
    }
    chosen = plan.config.training.replay_routing
    return [f"routing    {words[chosen]} ({KEY}={str(chosen).lower()})"] if plan.facts.experts else []


def recipe_lines(config: RLConfig) -> list[str]:
    """Describe the effective algorithm, after preset, files and overrides."""
    algorithm = config.algorithm
    advantage = lookup(ADVANTAGES, algorithm.advantage, "algorithm.advantage")
    loss = lookup(POLICY_LOSSES, algorithm.loss, "algorithm.loss")
    draws = f"not tested: {untested_draws(config)}" if untested_draws(config) else "tested"
    old_logprobs = "recomputed by the trainer" if algorithm.old_logprobs == "recompute" else "from the engine"
    if fresh_old_logprobs(config):
        old_logprobs = "current policy (one update per step)"
    return [
        f"advantage  {algorithm.advantage}: baseline is {advantage.words.format(algorithm)}"
        + describe_trace(algorithm, advantage.reads)
        + ("; per turn" if algorithm.credit == "turn" else "")
        + ("; whitened over the step's tokens" if algorithm.whiten else ""),
        f"loss       {algorithm.loss}: {loss.words.format(algorithm)}" + describe_terms(algorithm),
        f"averaging  {algorithm.loss_aggregation}: {AGGREGATIONS[algorithm.loss_aggregation].words}",
        f"KL         {describe_kl(algorithm)}",
        *teacher_lines(config),
        f"importance {algorithm.importance_sampling.mode} (engine vs. trainer){describe_mask(algorithm)}; "
        f"old log-probs: {old_logprobs}; draws {draws}",
    ]


def teacher_lines(config: RLConfig) -> list[str]:
    """Describe who teaches, what only the teacher reads, and what is compared."""
    asked, named = config.algorithm.distillation, [*config.teacher.paths.values(), config.teacher.path]
    if not has_teacher(config.algorithm):
        return []
    frozen = ", ".join(filter(None, named)) or "the starting policy"
    who = {"frozen": frozen, "policy": "the policy itself", "average": "the policy's moving average"}[asked.teacher]
    compared = f"its {asked.top_k} likeliest tokens and the rest" if asked.top_k else "the whole vocabulary"
    term = f"; {asked.divergence} divergence x {asked.coefficient:g} over {compared}" if asked.coefficient else ""
    return [f"teacher    {who}{f', with {asked.context}' if asked.reads_more() else ''}{term}"]


def describe_trace(algorithm: AlgorithmConfig, reads: tuple[str, ...]) -> str:
    adaptive = algorithm.length_adaptive
    trace = f"lambda 1 - 1/({adaptive:g} x length)" if adaptive else f"lambda {algorithm.gae_lambda:g}"
    gamma = f"; gamma {algorithm.gamma:g}" if "gamma" in reads else ""
    return gamma + (f", {trace}" if "gae_lambda" in reads else "")


def describe_terms(algorithm: AlgorithmConfig) -> str:
    terms = {
        "dual clip": algorithm.dual_clip,
        "entropy bonus": algorithm.entropy_coefficient,
        "NLL of good completions": algorithm.positive_nll,
        "NLL of the environment's answers": algorithm.observation_loss,
        "overlong penalty": algorithm.shaping.overlong_factor,
    }
    words = [f"{name} {value:g}" for name, value in terms.items() if value]
    share = algorithm.top_entropy_share
    words += [f"only the {share:.0%} of tokens with the highest entropy"] * (share < 1)
    words += ["rewards along a cosine of the length"] * (algorithm.shaping.cosine_correct is not None)
    words += ["truncated completions left out"] * algorithm.shaping.overlong_filter
    words += ["dynamic sampling"] * algorithm.dynamic_sampling.enabled
    return "".join(f"; {word}" for word in words)


def describe_mask(algorithm: AlgorithmConfig) -> str:
    limit = algorithm.importance_sampling.off_policy_mask
    return "" if limit is None else f", negative advantages masked beyond {limit:g} nats per token"


def describe_kl(algorithm: AlgorithmConfig) -> str:
    kl = algorithm.kl
    if kl.coefficient == 0:
        return "none, so no reference model is loaded"
    adaptive = f", adapting to {kl.target:g} nats per completion" if kl.target else ""
    kind = "k1, subtracted from each token's reward" if kl.place == "reward" else f"{kl.estimator}, added to the loss"
    return f"{kind}, coefficient {kl.coefficient:g}{adaptive}"


def stream_lines(plan: RLPlan) -> list[str]:
    """Describe whether complete groups are trained while others are sampled, or why not, on GPUs."""
    # The plan no longer knows whether the key was set.
    memory = "training.stream=false is set, or memory does not hold models and engines at once with the same passes"
    config = plan.config
    if config.training.stream:
        return ["stream     complete groups are trained while others are sampled; one optimizer step at the end"]
    if not plan.machine.gpus:
        return []
    without = "MPS cannot be started here" if plan.shares_gpus() and not plan.machine.mps else memory
    reason = stream_obstacle(config, kept_gradients(config.training)) or (
        without if plan.shares_gpus() else "training.stream=false"
    )
    return [f"stream     groups are trained when all are sampled: {reason}"]


def batch_lines(plan: RLPlan) -> list[str]:
    config, completions = plan.config, plan.completions()
    seconds = expected_seconds(phase_seconds(plan), overlaps=plan.rollout.extra_share() >= 1)
    return [
        prompts_line(plan.sources, plan.rollout, sum(len(prompts) for prompts in plan.evaluation_sets.values())),
        *reasoning_lines(plan),
        *resting_lines(config.data.difficulty),
        *describe_environment(config.environment, plan.chat, plan.rollout.longest(), plan.rollout.engine),
        f"batch      {config.prompts_per_step} prompts x {config.algorithm.group_size} completions = {completions} per "
        f"step, {config.minibatches * config.epochs} optimizer steps of {completions // config.minibatches}",
        f"length     {config.steps} steps = {config.steps * config.prompts_per_step / len(plan.prompts):.2g} epochs; "
        f"about {duration(seconds)} per step if completions have full length",
    ]


def resting_lines(difficulty: DifficultyConfig) -> list[str]:
    bounds = f"at most {difficulty.low:.0%} or at least {difficulty.high:.0%} of its completions pass"
    return [f"resting    a prompt rests if {bounds} (reward from {difficulty.pass_reward:g})"] * difficulty.enabled


def reasoning_lines(plan: RLPlan | SupervisedPlan | SamplingPlan[Kind]) -> list[str]:
    """Describe what the chat template does to the reasoning of replies."""
    reasoning = plan.chat.template.reasoning() if plan.chat.templated else ""
    return [f"reasoning  {reasoning}"] * bool(reasoning)


# Offline tasks and sampling jobs


def supervised_lines(plan: SupervisedPlan) -> list[str]:
    config, train, held_out = plan.config, plan.material.train, plan.material.held_out
    model = config.model
    counts = ", ".join(f"{count} {what}" for what, count in train.counts.items() if count and what != "rows")
    return [
        machine_line(plan.machine),
        model_line(model.path, plan.facts, model.dtype, model.lora.rank),
        ranks_line("training", plan.layout.policy_ranks, config.training, model),
        *([sharing_line(config.training, model, "a pair")] if train.task.samples_per_row > 1 else []),
        rate_line(plan.facts.parameters, config.task, model, config.training),
        *node_lines(plan.layout, plan.machine),
        *memory_lines(plan.forecast),
        f"data       {train.rows()} rows, longest {plan.longest} tokens" + (f" ({counts})" if counts else ""),
        *(f"format     {described}" for described in train.formats),
        *([f"held out   {held_out.rows()} rows"] if held_out else []),
        *reasoning_lines(plan),
        f"length     {plan.steps} steps of {config.samples_per_step} rows",
    ]


def sampling_lines(plan: SamplingPlan[Kind]) -> list[str]:
    config = plan.config
    rewards = ", ".join(part.function for part in config.reward.named_parts().values())
    return [
        machine_line(plan.machine),
        model_line(config.model.path, plan.facts, plan.rollout.dtype),
        engines_line(plan.rollout),
        *workers_lines(plan.rollout),
        f"reward     {rewards or ('from the environment' if config.has_reward() else 'none')}",
        *plan.rewards.lines,
        *describe_environment(config.environment, plan.chat, plan.rollout.longest(), plan.rollout.engine),
        prompts_line(plan.sets.values(), plan.rollout),
        *reasoning_lines(plan),
        f"work       {describe_work(plan)}",
    ]


def describe_work(plan: SamplingPlan[Kind]) -> str:
    config = plan.config
    if isinstance(config, EvalConfig):
        controls = config.evaluation
        return f"{plan.total} prompts, {controls.samples} completions each, temperature {controls.temperature:g}"
    assert isinstance(config, GenerateConfig)  # no other job samples
    kept = {
        "all": "all completions",
        "best": "the best of each prompt",
        "threshold": f"rewards from {config.threshold:g}",
    }
    shard = f" (shard {config.shard} of {config.shards})" if config.shards > 1 else ""
    pairs = ", and pairs of best and worst" if config.pairs else ""
    return f"{plan.total} prompts{shard}, {config.samples} completions each; keep {kept[config.keep]}{pairs}"
