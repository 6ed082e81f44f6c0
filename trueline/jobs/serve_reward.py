"""A reward model behind HTTP: loaded as a run loads it, and served until a signal stops it."""

import asyncio
import os
import secrets
import signal
import socket
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from trueline.config.base import ConfigError
from trueline.config.model import resolve_path
from trueline.config.reward import RewardPartConfig
from trueline.config.sampling import ServingConfig
from trueline.models.loading import check_model, load_chat
from trueline.plan.describe import model_line
from trueline.plan.inputs import resolve_run_as_model
from trueline.plan.resolve import RoleModel, check_engines, check_model_keys, check_ranks, rank_count, resolve_dtype
from trueline.rewards.model import ModelReward, check_reward_model, reward_model_head
from trueline.rewards.remote import THIS_MACHINE
from trueline.rewards.server import RewardServer
from trueline.runs.processes import open_processes, role_group
from trueline.runtime.actors import ActorFailure
from trueline.runtime.cluster import Machine, machine_at_hand
from trueline.runtime.placement import Layout
from trueline.training.group import ModelGroup
from trueline.usercode.http_server import open_port


@dataclass(frozen=True, slots=True)
class ServingPlan:
    config: ServingConfig
    role: RoleModel
    part: RewardPartConfig
    machine: Machine
    max_tokens: int


def serve(config: ServingConfig) -> int:
    """Load the model and serve requests until Ctrl-C or SIGTERM; return 1 if the model's processes fail."""
    config, taken = resolve_run_as_model(config)
    plan = plan_serving(config)
    with ExitStack() as stack:
        # While the model loads, both signals end it the same way.
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        listener = stack.enter_context(open_port(config.host, config.port))  # a taken port is refused before the load
        say("\n".join([*taken, model_line(plan.role.model.path, plan.role.facts, plan.role.model.dtype)]))
        try:
            logs, layout = Path(config.logs).resolve(), Layout(0, roles=(plan.role.layout(),))
            processes = stack.enter_context(open_processes(plan.machine, layout, logs, config.runtime))
            group = role_group(plan.role, processes, seed=0, timeout_seconds=config.timeout_seconds)
            group.start()
            asyncio.run(answer(plan, group, listener))
        except ActorFailure as error:
            say(f"error: {error}")
            return 1
    say("stopped")
    return 0


def plan_serving(config: ServingConfig) -> ServingPlan:
    """Fill in and check all that can be known without loading the model."""
    model = config.served_model()
    check_engines(config, "ranks")
    check_ranks("ranks", config.ranks, model)
    head = "reward"
    with suppress(ConfigError):  # one without a head is refused by the next check
        head = reward_model_head(resolve_path(model.path))
    facts, machine = check_model(model, head), machine_at_hand()
    check_model_keys(config.ranks, model, facts, "ranks")
    dtype = resolve_dtype(model.dtype, config.ranks, machine)
    model = model.with_keys({"dtype": dtype, "path": resolve_path(model.path)})
    part = RewardPartConfig(
        function=model.path, normalize=config.normalize, steps=config.steps, step_separator=config.step_separator
    )
    check_reward_model(part)
    world = rank_count(config.ranks, model, machine)
    limit = min(facts.context, config.ranks.tokens_per_pass() * model.context_parallel)
    if (config.max_tokens or 0) > limit:
        most = f"the model's context of {facts.context} and ranks.micro_batch_tokens={config.ranks.tokens_per_pass()}"
        raise ConfigError(f"max_tokens={config.max_tokens} is more than {limit}, which {most} allow: lower it")
    if machine.gpus and world > machine.gpus and config.runtime == "ray":
        raise ConfigError(f"ranks.ranks={world} need as many GPUs, there are {machine.gpus}: lower it")
    ranks = config.ranks.with_keys({"placement": "separate"})  # there is no policy to share with
    role = RoleModel("reward_model", "ranks", model, ranks, reward_model_head(model.path), facts, world)
    return ServingPlan(config, role, part, machine, config.max_tokens or limit)


async def answer(plan: ServingPlan, group: ModelGroup, listener: socket.socket) -> None:
    config = plan.config
    chat = load_chat(plan.role.model, config.chat_template)
    reward = ModelReward(group.score, chat, plan.part, max_tokens=plan.max_tokens, batch=config.batch)
    given = os.environ.get(config.token_variable, "").strip()
    token = given or secrets.token_urlsafe(32)
    server = RewardServer(reward, token=token, name=config.model.path, fatal=ActorFailure)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.end)
    host, port = listener.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    say(f"token      {f'that of the environment variable {config.token_variable}' if given else token}")
    if host not in THIS_MACHINE:
        say(f"warning: host={config.host} is open to the network and HTTP is not encrypted: put TLS in front of it")
    say(f"listening  http://{name}:{port}/score")
    await server.answer(listener)


def say(message: str) -> None:
    sys.stdout.write(message + "\n")
    sys.stdout.flush()
