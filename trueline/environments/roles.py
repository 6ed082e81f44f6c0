"""Self-play: an environment whose class names `roles`, all of which the policy plays."""

import re
from typing import Any

from trueline.usercode.failures import NoSuchFunction, WrongResult

NAME = re.compile(r"[A-Za-z]\w*")  # as part of a metric's name
STEP = (
    'the role that replies next and what it is told, such as {"role": "solver", "messages": "2+3="}, or the reward of '
    'every role, such as {"reward": {"solver": 1.0, "proposer": 0.0}, "done": True}'
)


def declared_roles(kind: type, has: dict[str, Any]) -> list[str]:
    """Return the roles that a class names; none if the policy is itself."""
    found = has.get("roles")
    if found is None:
        return []
    is_list = isinstance(found, list | tuple) and all(isinstance(one, str) and NAME.fullmatch(one) for one in found)
    if not is_list or len({*found}) != len(found) or len(found) < 2:
        wanted = 'name two or more, such as roles = ("solver", "proposer"), in letters, digits and underscores'
        raise NoSuchFunction(f"{kind.__name__}.roles is {found!r:.80}: {wanted}")
    return list(found)


def take_role(returned: Any, roles: list[str], method: str) -> tuple[str, Any]:
    """Return the role that replies next, or nothing if the episode is done, and the rest of what a method returned."""
    if not roles:
        return "", returned
    if not isinstance(returned, dict):
        raise WrongResult(f"`{method}` returned {returned!r:.80}, but this class has roles: return {STEP}")
    rest = {name: value for name, value in returned.items() if name != "role"}
    role, done = returned.get("role"), bool(returned.get("done"))
    if (role is not None) if done else (role not in roles):
        wanted = "nobody replies after done=True" if done else f"name one of {', '.join(roles)}, which replies next"
        raise WrongResult(f"`{method}` returned the role {role!r:.80}: {wanted}")
    return role or "", rest


def rewards_by_role(reward: Any, roles: list[str], *, done: bool) -> dict[str, Any]:
    """Return the reward of each role; at the end every role has one, and before it those that earn something."""
    if not isinstance(reward, dict):
        if not done and reward == 0:
            return {}
        raise WrongResult(f"`step` returned the reward {reward!r:.80}: return {STEP}")
    if unknown := [role for role in reward if role not in roles]:
        raise WrongResult(f"`step` returned a reward for {unknown[0]!r:.80}, which is none of {', '.join(roles)}")
    if done and (missing := [role for role in roles if role not in reward]):
        raise WrongResult(f"`step` ended the episode without a reward for {missing[0]!r}: every role needs one")
    return {role: reward[role] for role in roles if role in reward}
