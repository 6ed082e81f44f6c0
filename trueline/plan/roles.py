"""The models that a run loads besides its policy."""

from dataclasses import dataclass, replace

from trueline.algorithms.needs import needs
from trueline.config.base import ConfigError
from trueline.config.model import FrozenConfig, ModelConfig, Role
from trueline.config.reward import RewardConfig
from trueline.config.rl import RLConfig
from trueline.models.loading import PAPER, ModelFacts, check_model, load_tokenizer
from trueline.plan.resolve import resolve_path
from trueline.rewards.combined import kind_of
from trueline.rewards.model import reward_model_head
from trueline.runtime.placement import RoleRanks


@dataclass(frozen=True, slots=True)
class RoleModel:
    """A model besides the policy."""

    name: str
    section: str  # of the configuration
    model: ModelConfig
    ranks: Role
    head: str
    facts: ModelFacts
    world: int  # ranks

    def layout(self) -> RoleRanks:
        return RoleRanks(self.name, self.world, self.ranks.placement == "shared", self.model.width())

    def spread(self, policy_ranks: int) -> "RoleModel":
        """Take as many of the policy's ranks as whole copies fill, unless ranks are configured."""
        if self.ranks.ranks is not None or self.ranks.placement == "separate":
            return self
        return replace(self, world=max(policy_ranks // self.world, 1) * self.world)


def own_gpus(roles: list[RoleModel]) -> int:
    """Count the GPUs of models that share with no one."""
    return sum(role.world for role in roles if role.ranks.placement == "separate")


def roles_of(config: RLConfig) -> list[RoleModel]:
    """Return the models that algorithm and rewards need, one copy of each; one that they do not need is not loaded."""
    algorithm, policy = config.algorithm, config.model
    reward_roles = reward_models(config.reward, config.reward_model, policy)
    roles = list(reward_roles)
    if algorithm.needs_reference() and not policy.lora.rank:  # a policy with adapters is its own reference
        roles.append(role_model("reference", policy.path, config.reference, policy))
    if "teacher" in needs(algorithm):
        check_teacher(config)
        roles.append(role_model("teacher", config.teacher.path, config.teacher, policy))
    if "critic" in needs(algorithm):
        start = critic_start(config, reward_roles)
        roles.append(role_model("critic", start, config.critic, policy, head="value"))
    return roles


def reward_models(rewards: RewardConfig, ranks: FrozenConfig, policy: ModelConfig) -> list[RoleModel]:
    """Return one role for each reward that is a model on this machine."""
    parts = {name: part for name, part in rewards.named_parts().items() if kind_of(part) == "model"}
    return [
        role_model(
            reward_model_name(name, rewards), part.function, ranks, policy, head=reward_model_head(part.function)
        )
        for name, part in parts.items()
    ]


def reward_model_name(part: str, rewards: RewardConfig) -> str:
    return f"reward_model-{part}" if rewards.parts else "reward_model"


def role_model(name: str, path: str, ranks: Role, policy: ModelConfig, *, head: str = "language") -> RoleModel:
    section = name.partition("-")[0]
    model = ranks.model_like(policy, resolve_path(path))
    try:
        facts = check_model(model, head)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    return RoleModel(name, section, model, ranks, head, facts, ranks.ranks or model.width())


def critic_start(config: RLConfig, reward_roles: list[RoleModel]) -> str:
    """Return the critic's start: the named model, a reward model that reads the policy's tokens, or the policy."""
    named, policy = config.critic.path, config.model
    if named is not None:
        role_model("critic", named, config.critic, policy, head="value")  # it is there at all
        if not reads_alike(named, policy):
            raise ConfigError(f"critic.path={named}: its tokenizer is not that of model.path={policy.path}")
        return named
    able = [one.model.path for one in reward_roles if one.head == "reward" and reads_alike(one.model.path, policy)]
    return able[0] if able else policy.path


def check_teacher(config: RLConfig) -> None:
    path = config.teacher.path
    if not path:
        raise ConfigError("teacher.path is empty: name the model to learn from, e.g. teacher.path=path/to/folder")
    if not reads_alike(path, config.model):
        raise ConfigError(f"teacher.path={path}: its tokenizer is not that of model.path={config.model.path}")


def reads_alike(path: str, policy: ModelConfig) -> bool:
    """Tell whether a model has the policy's tokens; on paper that is taken for granted."""
    if policy.path.startswith(PAPER):
        return True
    return bool(load_tokenizer(policy.with_keys({"path": path})).get_vocab() == load_tokenizer(policy).get_vocab())
