"""The line of prompt groups, with an engine and a reward that do as they are told."""

import asyncio
import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from heapq import heappush
from itertools import permutations
from random import Random
from statistics import fmean
from typing import Any, cast

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.tool_calls import TOOL_TALK, TOOL_TEMPLATE, TOOLS
from trueline.config.algorithm import DynamicSamplingConfig
from trueline.config.data import DifficultyConfig
from trueline.config.reward import RewardPartConfig
from trueline.data.chat import ChatFormat
from trueline.data.loader import Order
from trueline.data.pictures import Shown
from trueline.data.types import INTERRUPTED, Completion, Outcome, Prompt
from trueline.environments.base import Environment, EpisodeResult, Policy, Structure
from trueline.environments.single_turn import SingleTurn
from trueline.monitoring.ledger import Ledger, LedgerFailure, Pools
from trueline.rewards.base import PolicyError, RewardFailure, RewardTimeout, RewardUnreachable
from trueline.rewards.combined import CombinedReward
from trueline.rollout.engine import SamplingParams, derive_seed, sample_in_parts
from trueline.rollout.episode import Episodes
from trueline.rollout.failures import EngineCrashLoop, EngineLost, FailureBudget, NothingToLearn, RolloutFailure
from trueline.rollout.groups import GroupSampler, SamplerSpec
from trueline.rollout.pool import EnginePool, RolloutKey, load_metrics
from trueline.rollout.rollouts import InFlightGroup, RolloutPlan, Rollouts
from trueline.rollout.session import EpisodeLimits
from trueline.runtime.actors import ActorDeath, ActorFailure
from trueline.runtime.event_loop import EventLoop, Interrupted

PROMPTS = [Prompt(number, [{"role": "user", "content": f"{number:02d}"}], label=number) for number in range(40)]
STOP = 2
AS_THEY_COME = DynamicSamplingConfig()


class FakeEngine:
    """Answers at once, or after as many turns of the loop as `delay` says for the prompt."""

    def __init__(self) -> None:
        self.version = 0
        self.name = "fake"
        self.requests: list[tuple[str, int | None]] = []
        self.running = 0
        self.most_running = 0
        self.delay: Callable[[list[int]], float] = lambda tokens: 0.0
        self.parts: dict[str, list[int]] = {}  # of requests: tokens of each part; a negative number waits for `go_on`
        self.go_on = asyncio.Event()

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        return await getattr(self, method.__name__)(*args)

    async def generate(
        self, tokens: list[int], params: SamplingParams, request: str, shown: Shown | None = None
    ) -> Completion:
        self.requests.append((request, params.seed))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        version, parts = self.version, self.parts.get(request.partition(".")[0], [])
        part = parts.pop(0) if parts else 0
        await (self.go_on.wait() if part < 0 else asyncio.sleep(self.delay(tokens)))
        self.running -= 1
        if part:
            return Completion.of([70] * abs(part), [-0.1] * abs(part), version, INTERRUPTED if parts else "stop")
        return Completion.of([70, 71, STOP], [-0.1, -0.2, -0.3], version, "stop", cached=len(tokens) // 2)

    def submit(self, method: Callable[..., Any], *args: Any) -> Any:
        raise NotImplementedError

    def stop(self) -> None:
        pass


class FakeReward:
    """1 for every answer, except the first ones of prompts that `failing` names: those many fail."""

    def __init__(self, failing: dict[int, int], error: type[Exception] = RewardFailure) -> None:
        self.failing, self.error = dict(failing), error

    async def score(self, call: dict[str, Any]) -> float:
        left = self.failing.get(call["label"], 0)
        if left:
            self.failing[call["label"]] = left - 1
            raise self.error(f"no reward for {call['label']}")
        return 1.0

    async def stop(self) -> None:
        pass


class MixedReward(FakeReward):
    """Answers to prompts in `different` are worth 0, 1, 2, ...; all others are worth their prompt's parity."""

    def __init__(self, different: set[int]) -> None:
        super().__init__({})
        self.different, self.given = different, Counter[int]()

    async def score(self, call: dict[str, Any]) -> float:
        prompt = int(call["label"])
        self.given[prompt] += 1
        return float(self.given[prompt] - 1 if prompt in self.different else prompt % 2)


@pytest.fixture
def build(loop: EventLoop, tokenizer: PreTrainedTokenizerFast) -> Iterator[Callable[..., tuple[Rollouts, FakeEngine]]]:
    made: list[Rollouts] = []

    def make(
        staleness: int = 0,
        groups: int = 2,
        size: int = 3,
        reward: FakeReward | None = None,
        share: float = 1.0,
        position: int = 0,
        seeded: bool = True,
        greedy: bool = False,
        dynamic: DynamicSamplingConfig = AS_THEY_COME,
        drop_old: bool = False,
        ledger: Ledger | None = None,
        start: bool = True,
        rows: int = len(PROMPTS),
        **more: Any,
    ) -> tuple[Rollouts, FakeEngine]:
        engine, scorer = FakeEngine(), reward or FakeReward({})
        rewards = CombinedReward({"reward": (scorer, RewardPartConfig(function="fake"))}, policy_error=-1.0)
        episodes = Episodes(EnginePool([engine]), ChatFormat(tokenizer, use_template=False), EpisodeLimits(512))
        params, seed = SamplingParams(1.0, 8, (STOP,)), 0 if seeded else None
        rollouts = Rollouts(
            GroupSampler(episodes, lambda: SingleTurn(rewards), SamplerSpec(params, size, seed, "train", greedy)),
            PROMPTS[:rows],
            Order(rows, seed=0, shuffle=False, position=position),
            RolloutPlan(groups, staleness, dynamic, drop_old, **more),
            FailureBudget(share, groups * size),
            loop,
            ledger or Ledger(drawn=position, fates={"trained": position}),
        )
        made.append(rollouts)
        if start:
            rollouts.start(0)
        return rollouts, engine

    yield make
    for rollouts in made:
        loop.run(end(rollouts), "ending what a test left behind")


async def end(rollouts: Rollouts) -> None:
    for one in rollouts.running.values():
        one.task.cancel()
    await asyncio.gather(*(one.task for one in rollouts.running.values()), return_exceptions=True)


def prompt_ids(groups: list[list[Any]]) -> list[int]:
    return [group[0].prompt.id for group in groups]


def test_groups_come_in_the_order_of_the_data_whichever_ends_first(build: Any) -> None:
    rollouts, engine = build(groups=4, start=False)
    engine.delay = lambda tokens: 0.1 - 0.025 * (tokens[-1] % 4)
    rollouts.start(0)
    assert prompt_ids(rollouts.take(4)) == [0, 1, 2, 3]
    rollouts.release(0)
    assert prompt_ids(rollouts.take(4)) == [4, 5, 6, 7]


def test_a_trajectory_has_tokens_mask_and_reward(build: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    rollouts, _ = build(groups=1)
    (group,) = rollouts.take(1)
    assert len(group) == 3
    for trajectory in group:
        prompt = tokenizer("00")["input_ids"]
        assert trajectory.tokens.tolist() == [*prompt, 70, 71, STOP]
        assert trajectory.mask.tolist() == [False] * len(prompt) + [True] * 3
        assert trajectory.reply == tokenizer.decode([70, 71])
        assert (trajectory.reward, trajectory.outcome, trajectory.group) == (1.0, Outcome.FINISHED, 0)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_trained_answer_lags_more_than_the_bound_and_the_line_is_used_in_full(build: Any, staleness: int) -> None:
    """The loop of a run: take, train (a version more), publish, release."""
    rollouts, engine = build(staleness=staleness)
    lags = []
    for step in range(8):
        groups = rollouts.take(2)
        lags += [step - trajectory.oldest_version() for group in groups for trajectory in group]
        engine.version = step + 1
        rollouts.release(engine.version)
    assert max(lags) == staleness
    assert min(lags) >= 0


def test_any_choice_of_eligible_groups_lets_none_expire_and_no_other_does(build: Any) -> None:
    """A group may be taken now if the rest, by whichever expire first, still fit into the steps that they have left."""

    def fits(left: list[int], places: int, version: int) -> bool:
        later = sorted(left)[places:] if places else sorted(left)
        return all(number < (last - version) * 2 for number, last in enumerate(later)) and places >= 0

    rollouts, _ = build(staleness=3)
    random, seen = Random(0), set()
    for _ in range(300):
        rollouts.version, wanted = 5, random.randint(1, 2)
        lasts = [random.randint(5, 8) for _ in range(random.randint(1, 9))]
        rollouts.expiring = Counter(lasts)
        if not fits(lasts, wanted, 5):
            continue  # some expire whatever is taken
        able = [last for last in set(lasts) if fits(sorted_without(lasts, last), wanted - 1, 5)]
        assert sorted(rollouts._eligible(wanted)) == sorted(able), (lasts, wanted)
        seen.add(len(able) == len(set(lasts)))
    assert seen == {True, False}


def sorted_without(values: list[int], one: int) -> list[int]:
    rest = sorted(values)
    rest.remove(one)
    return rest


def trained(rollouts: Rollouts, groups: list[list[Any]]) -> list[int]:
    """Give groups that were taken their fate, and return their prompts."""
    rollouts.ledger.close([group[0].group for group in groups], "trained")
    return prompt_ids(groups)


def slow(tokenizer: PreTrainedTokenizerFast, *prompts: int) -> Callable[[list[int]], float]:
    """Delay answers to these prompts until the loop has nothing else to do for a while."""
    late = [tokenizer(f"{prompt:02d}")["input_ids"] for prompt in prompts]
    return lambda tokens: 1.0 if tokens in late else 0.0


def test_what_is_ready_is_trained_first_until_the_rest_would_be_too_old(
    build: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    rollouts, engine = build(staleness=1, start=False)
    engine.delay = slow(tokenizer, 0, 3)
    rollouts.start(0)
    assert trained(rollouts, rollouts.take(2)) == [1, 2]
    rollouts.release(1)
    assert trained(rollouts, rollouts.take(2)) == [0, 3]  # 4 and 5 are ready, and may wait for another version
    rollouts.release(2)
    assert trained(rollouts, rollouts.take(2)) == [4, 5]
    assert rollouts.ledger.balance() == "8 prompts sampled: 6 trained, 2 in flight"


def test_what_would_be_too_old_can_be_dropped(build: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    rollouts, engine = build(staleness=1, drop_old=True, start=False)
    engine.delay = slow(tokenizer, 0)
    rollouts.start(0)
    assert trained(rollouts, rollouts.take(2)) == [1, 2]
    rollouts.release(1)
    assert trained(rollouts, rollouts.take(2)) == [3, 4]
    assert rollouts.dropped.too_old == 0
    rollouts.release(2)
    assert rollouts.dropped.too_old == rollouts.dropped.group_count() == 1
    assert rollouts.ledger.row() == {"trained": [1, 2, 3, 4], "too_old": [0]}
    assert rollouts.ledger.balance() == "9 prompts sampled: 4 trained, 1 too old, 4 in flight"


def test_what_was_drawn_of_groups_that_are_too_old_is_counted(build: Any) -> None:
    """One answer is done, one was handed back in part by an update, and nothing is known of the third."""
    rollouts, engine = build(staleness=1, drop_old=True, start=False)
    engine.parts = {"train-0-0-0": [9], "train-0-1-0": [5, -1], "train-0-2-0": [-1]}
    rollouts.start(0)
    assert trained(rollouts, rollouts.take(2)) == [1, 2]
    rollouts.release(1)
    assert trained(rollouts, rollouts.take(2)) == [3, 4] and rollouts.dropped.lengths == [3] * 6
    rollouts.release(2)
    assert rollouts.dropped.lengths == [9, 5]
    rollouts.take(2)
    assert rollouts.dropped.lengths == [9, 5, *[3] * 6]
    assert not rollouts.sampler.episodes.pool.sampled.get(1)  # of groups that are done nothing is kept


def test_a_group_that_is_done_too_late_is_counted_whole(build: Any) -> None:
    rollouts, engine = build(staleness=1, drop_old=True, start=False)
    engine.parts = {f"train-0-{index}-0": [-7 - index] for index in range(3)}
    rollouts.start(0)
    assert trained(rollouts, rollouts.take(2)) == [1, 2]
    rollouts.release(1)
    assert trained(rollouts, rollouts.take(2)) == [3, 4]
    engine.go_on.set()
    rollouts.loop.run(asyncio.wait([next(iter(rollouts.running.values())).task]), "the late group")
    rollouts.release(2)
    assert rollouts.dropped.lengths == [7, 8, 9]


def test_prompts_that_were_under_way_come_again_first(build: Any) -> None:
    saved = Ledger(drawn=9, under_way={8: 28, 2: 22}, fates={"trained": 7})
    rollouts, engine = build(groups=2, position=9, ledger=Ledger.of(json.loads(json.dumps(asdict(saved)))))
    assert trained(rollouts, rollouts.take(2)) == [22, 28]
    assert {name.split("-")[1] for name, _ in engine.requests} == {"2", "8"}  # their seeds are those of their numbers
    rollouts.release(1)
    assert trained(rollouts, rollouts.take(2)) == [9, 10]
    assert rollouts.ledger.balance() == "11 prompts sampled, all trained"


def test_a_prompt_has_one_fate(build: Any) -> None:
    ledger = Ledger()
    assert [ledger.draw(row) for row in (5, 6)] == [0, 1]
    ledger.close([0], "trained")
    for numbers in ([0], [2]):
        with pytest.raises(LedgerFailure, match=f"prompt {numbers[0]} is failed"):
            ledger.close(numbers, "failed")
    ledger.drawn += 1
    with pytest.raises(LedgerFailure, match="3 prompts sampled: 1 trained, 1 in flight"):
        ledger.balance()


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_more_groups_are_under_way_than_the_line_holds(build: Any, staleness: int) -> None:
    rollouts, engine = build(staleness=staleness, start=False)
    engine.delay = lambda tokens: 0.005
    rollouts.start(0)
    for _ in range(4):
        rollouts.take(2)
        rollouts.release(0)
    assert engine.most_running <= (staleness + 1) * 2 * 3


def test_nothing_is_sampled_between_take_and_release_of_a_synchronous_run(build: Any) -> None:
    rollouts, engine = build(staleness=0)
    rollouts.take(2)
    asked = len(engine.requests)
    assert asked == 2 * 3
    assert engine.running == 0
    rollouts.release(0)
    rollouts.take(2)
    assert len(engine.requests) == 2 * asked


def test_every_answer_has_its_own_request_and_its_own_seed(build: Any) -> None:
    rollouts, engine = build(groups=4)
    rollouts.take(4)
    names, seeds = zip(*engine.requests, strict=True)
    assert len(set(names)) == len(set(seeds)) == 12
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_seeds_depend_on_the_place_in_the_data_alone(build: Any) -> None:
    first, early = build(groups=4)
    first.take(4)
    second, late = build(groups=2, position=2)
    second.take(2)
    assert dict(early.requests).items() >= dict(late.requests).items()


def test_seeds_can_be_left_out(build: Any) -> None:
    rollouts, engine = build(seeded=False)
    rollouts.take(2)
    assert {seed for _, seed in engine.requests} == {None}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RewardFailure, Outcome.REWARD_ERROR),
        (RewardTimeout, Outcome.REWARD_TIMEOUT),
        (RewardUnreachable, Outcome.INFRA_ERROR),
        (ActorFailure, Outcome.INFRA_ERROR),
        (ZeroDivisionError, Outcome.ENVIRONMENT_ERROR),
    ],
)
def test_an_answer_without_a_reward_leaves_its_group(build: Any, error: type[Exception], outcome: Outcome) -> None:
    rollouts, _ = build(reward=FakeReward({1: 1}, error))
    first, second = rollouts.take(2)
    assert (len(first), len(second)) == (3, 2)
    assert all(trajectory.reward == 1.0 for trajectory in [*first, *second])
    assert (rollouts.dropped.completions, rollouts.dropped.groups) == (1, 0)
    example = next(iter(rollouts.budget.causes.values())).first
    assert (example.outcome, example.reward) == (outcome, None)
    assert example.error.strip().endswith("no reward for 1")


class CutOff(Environment):
    """Leaves out the first episodes of prompts that `cut` names: those many."""

    def __init__(self, cut: dict[int, int]) -> None:
        self.cut = cut

    async def play(self, policy: Policy, prompt: Prompt) -> EpisodeResult:
        await policy.reply(prompt.messages)
        self.cut[prompt.label] = left = self.cut.get(prompt.label, 0) - 1
        return EpisodeResult(1.0, left_out=left >= 0, metrics={"environment/left": float(left)})


def test_episodes_that_are_left_out_leave_their_group_and_are_no_failures(build: Any) -> None:
    rollouts, _ = build(groups=2, size=3, share=0.0, start=False)
    rollouts.sampler = replace(rollouts.sampler, environment=lambda cut={0: 1, 1: 2}: CutOff(cut))
    rollouts.start(0)
    groups = rollouts.take(2)
    assert [(group[0].prompt.id, len(group)) for group in groups] == [(0, 2), (2, 3)]
    assert all(one.reward == 1.0 for group in groups for one in group)
    dropped = rollouts.dropped
    assert (dropped.left_out, dropped.completions, dropped.groups) == (3, 0, 1)
    assert len(dropped.metrics) == 3 and all(one["environment/left"] >= 0 for one in dropped.metrics)
    assert rollouts.ledger.fates == {"trained": 0, "left_out": 1}


def test_a_run_that_leaves_everything_out_ends_and_says_why(build: Any) -> None:
    rollouts, _ = build(groups=1, size=2, dynamic=DynamicSamplingConfig(max_batches=3), start=False)
    rollouts.sampler = replace(rollouts.sampler, environment=lambda: CutOff(dict.fromkeys(range(40), 9)))
    rollouts.start(0)
    with pytest.raises(NothingToLearn, match=r"episodes of 4 groups in a row .*set environment.truncated=judge"):
        rollouts.take(1)


def test_a_run_whose_rewards_all_fail_ends_whatever_share_may_fail(build: Any) -> None:
    rollouts, _ = build(groups=1, size=2, share=1.0, reward=FakeReward(dict.fromkeys(range(40), 10_000)))
    with pytest.raises(
        RolloutFailure, match=r"101 groups in a row have too few rewards .*Most frequent:\n202 x reward_er"
    ):
        rollouts.take(1)


def test_a_greedy_answer_that_is_left_out_drops_its_group(build: Any) -> None:
    rollouts, _ = build(groups=1, size=2, greedy=True, start=False)
    rollouts.sampler = replace(rollouts.sampler, environment=lambda cut={0: 3}: CutOff(cut))
    rollouts.start(0)
    (group,) = rollouts.take(1)
    assert group[0].prompt.id == 1 and rollouts.dropped.left_out == 2


def test_what_the_policy_itself_did_wrong_keeps_the_reward_set_for_it(build: Any) -> None:
    rollouts, _ = build(reward=FakeReward({1: 1}, PolicyError))
    first, second = rollouts.take(2)
    assert (len(first), len(second)) == (3, 3)
    wrong = [one for one in second if one.outcome is Outcome.POLICY_ERROR]
    assert [(one.reward, one.error) for one in wrong] == [(-1.0, "no reward for 1")]
    assert rollouts.dropped.completions == 0


def test_the_greedy_answer_is_the_baseline_and_not_trained_on(build: Any) -> None:
    rollouts, engine = build(size=2, greedy=True, reward=MixedReward({0, 1}))
    for group in rollouts.take(2):
        assert len(group) == 2
        assert {one.baseline for one in group} <= {0.0, 1.0, 2.0} - {one.reward for one in group}
    assert sum(name.startswith("greedy-") for name, _ in engine.requests) == 2


def test_a_failed_greedy_answer_drops_its_group(build: Any) -> None:
    """Of three calls to the reward for prompt 0 all fail, so the baseline fails too; prompt 1 is fine."""
    rollouts, _ = build(size=2, greedy=True, reward=FakeReward({0: 3}))
    assert prompt_ids(rollouts.take(2)) == [1, 2]


def test_dynamic_sampling_replaces_groups_of_one_reward(build: Any) -> None:
    rollouts, _ = build(reward=MixedReward({1, 4, 7, 8}), dynamic=DynamicSamplingConfig(enabled=True))
    assert prompt_ids(rollouts.take(2)) == [1, 4]
    assert rollouts.dropped.uniform == [0.0, 0.0, 1.0]  # prompts 0, 2 and 3
    assert rollouts.dropped.group_count() == 3
    rollouts.release(0)
    assert prompt_ids(rollouts.take(2)) == [7, 8]


def test_dynamic_sampling_ends_and_leaves_nothing_stale_behind(build: Any) -> None:
    """Three batches of two groups hold one that teaches; what else was sampled is used up, not kept for later."""
    rollouts, _ = build(reward=MixedReward({3, 6, 7}), dynamic=DynamicSamplingConfig(enabled=True, max_batches=3))
    assert prompt_ids(rollouts.take(2)) == [3]
    assert not rollouts.running
    rollouts.release(0)
    assert prompt_ids(rollouts.take(2)) == [6, 7]


def test_dynamic_sampling_without_any_group_says_so(build: Any) -> None:
    rollouts, _ = build(reward=MixedReward(set()), dynamic=DynamicSamplingConfig(enabled=True, max_batches=2))
    with pytest.raises(NothingToLearn, match="none of 4 groups has completions with different rewards"):
        rollouts.take(2)


def test_a_group_left_with_one_answer_is_replaced_by_the_next_prompt(build: Any) -> None:
    rollouts, _ = build(reward=FakeReward({0: 2}))
    assert prompt_ids(rollouts.take(2)) == [1, 2]
    assert (rollouts.dropped.completions, rollouts.dropped.groups) == (2, 1)
    rollouts.release(0)
    assert (rollouts.dropped.completions, rollouts.dropped.groups) == (0, 0)
    assert prompt_ids(rollouts.take(2)) == [3, 4]


def test_a_replacement_keeps_its_place_in_an_asynchronous_line(build: Any) -> None:
    rollouts, _ = build(staleness=1, reward=FakeReward({1: 3}))
    assert prompt_ids(rollouts.take(2)) == [0, 2]
    rollouts.release(0)
    assert prompt_ids(rollouts.take(2)) == [3, 4]
    assert rollouts.order.position == 7  # 0 to 3, the replacement of 1, and two released


def test_a_group_of_one_survives_alone(build: Any) -> None:
    rollouts, _ = build(size=1, reward=FakeReward({0: 1}))
    groups = rollouts.take(2)
    assert prompt_ids(groups) == [1, 2]
    assert [len(group) for group in groups] == [1, 1]


def test_too_many_failures_stop_the_run_with_their_reasons(build: Any) -> None:
    """Two of a hundred answers are allowed; the third failure is one too many."""
    rollouts, _ = build(reward=FakeReward({0: 1, 1: 2}), share=0.02)
    with pytest.raises(RolloutFailure) as caught:
        rollouts.take(2)
    message = str(caught.value)
    for part in ("3 of the last 6 completions", "max_failure_share=0.02 of 100", "3 x reward_error: no reward for"):
        assert part in message


def test_failures_within_the_budget_are_tolerated_step_by_step(build: Any) -> None:
    """Five failures in thirty answers stay within a twentieth of a hundred; the sixth does not."""
    rollouts, _ = build(reward=FakeReward(dict.fromkeys(range(0, 40, 2), 1)), share=0.05)
    for _ in range(5):
        groups = rollouts.take(2)
        assert [len(group) for group in groups] == [2, 3]
        rollouts.release(0)
    with pytest.raises(RolloutFailure):
        rollouts.take(2)


def test_dynamic_sampling_draws_no_more_than_it_may_look_at(build: Any) -> None:
    """Prompts 2 and 5 alone are useful: the last of six groups completes the step, and none is drawn in vain."""
    dynamic = DynamicSamplingConfig(enabled=True, max_batches=3)
    rollouts, engine = build(reward=MixedReward({2, 5}), dynamic=dynamic)
    assert [group[0].prompt.label for group in rollouts.take(2)] == [2, 5]
    assert (rollouts.ledger.drawn, len(engine.requests)) == (6, 18)


def test_groups_that_are_not_done_in_time_are_broken_off(build: Any, loop: EventLoop) -> None:
    rollouts, engine = build(staleness=1, start=False)
    engine.delay = lambda tokens: 3600
    rollouts.start(0)
    groups = list(rollouts.running.values())
    loop.timeout_seconds = 0.05
    with pytest.raises(RolloutFailure, match=r"sampling 3 completions of a prompt: not done within timeout_seconds=0"):
        rollouts.take(2)
    loop.timeout_seconds = 60
    loop.run(asyncio.wait([one.task for one in groups]), "the end of the groups")
    assert len(groups) == 4 and all(one.task.cancelled() for one in groups) and not rollouts.running


def test_an_engine_that_fails_is_heard(build: Any) -> None:
    rollouts, engine = build(start=False)

    async def broken(*args: Any) -> Completion:
        raise ConnectionError("engine lost")

    engine.generate = broken
    rollouts.start(0)
    with pytest.raises(ConnectionError, match="engine lost"):
        rollouts.take(2)


def test_waiting_has_an_end_that_says_what_was_waited_for() -> None:
    loop = EventLoop(timeout_seconds=0.05)
    with pytest.raises(ActorFailure, match=r"sampling three groups: not done within timeout_seconds"):
        loop.run(asyncio.sleep(30), "sampling three groups")
    assert loop.run(asyncio.sleep(0, "fine"), "again") == "fine"
    loop.stop()


def test_an_interrupt_breaks_off_what_waits_and_what_begins_to_wait_later(loop: EventLoop) -> None:
    """The coroutine has ended by then, so that nothing changes the ledger while it is saved."""
    ended: list[str] = []

    async def waiting() -> None:
        try:
            loop.interrupt()
            await asyncio.Event().wait()
        finally:
            ended.append("waiting")

    for _ in range(2):
        with pytest.raises(Interrupted):
            loop.run_until_interrupted(waiting(), "sampling")
    assert ended == ["waiting"]
    assert loop.run(asyncio.sleep(0, "fine"), "what ends the run") == "fine"


def test_stopping_ends_what_is_still_under_way() -> None:
    """Otherwise Python complains on the user's screen about every task that was left behind."""
    loop = EventLoop(timeout_seconds=5)
    tasks: list[asyncio.Task[None]] = []

    async def begin() -> None:
        tasks.append(asyncio.create_task(asyncio.sleep(1000)))

    loop.run(begin(), "starting")
    loop.stop()
    assert tasks[0].cancelled()


def test_a_cut_answer_is_scored_and_marked(build: Any) -> None:
    rollouts, engine = build(groups=1, start=False)

    async def cut(*args: Any) -> Completion:
        return Completion.of([70], [-0.1], 0, "length")

    engine.generate = cut
    rollouts.start(0)
    (group,) = rollouts.take(1)
    assert {(trajectory.outcome, trajectory.reward) for trajectory in group} == {(Outcome.TRUNCATED, 1.0)}


def test_answers_to_one_prompt_go_to_one_engine() -> None:
    """To the one with least to do, and elsewhere only while that is full."""
    for room, expected in ((100, [{"0", "2"}, {"1", "3"}]), (4, [{"0", "2", "3"}, {"0", "1"}])):
        engines = [FakeEngine(), FakeEngine()]
        pool = EnginePool(engines, room)

        async def ask(pool: EnginePool) -> None:
            sizes = {0: (6, 30), 1: (6, 40), 2: (1, 90), 3: (1, 1)}  # answers, tokens of each
            await asyncio.gather(
                *(
                    pool.generate([1, 2], SamplingParams(1.0, tokens, ()), RolloutKey(group, index))
                    for group, (count, tokens) in sizes.items()
                    for index in range(count)
                )
            )

        for engine in engines:
            engine.delay = lambda tokens: 0.01
        asyncio.run(ask(pool))
        asked = [{name.split("-")[1] for name, _ in engine.requests} for engine in engines]
        assert asked == expected
        assert not pool.group_engines and not pool.groups
        found = load_metrics([pool.flush_loads()])
        assert [found[f"engine/{place}/requests"] for place in (0, 1)] == [len(engine.requests) for engine in engines]
        assert found["engine/0/tokens_under_way_max"] >= 4 * 31 and found["engine/1/cached_share"] == 0.5
        assert not any(load_metrics([pool.flush_loads()]).values())


def test_an_episode_shows_the_prompts_tools(tokenizer: PreTrainedTokenizerFast) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = TOOL_TEMPLATE
    rewards = CombinedReward({"reward": (FakeReward({}), RewardPartConfig(function="fake"))}, policy_error=-1.0)
    episodes = Episodes(EnginePool([FakeEngine()]), ChatFormat(own, use_template=True), EpisodeLimits(512))
    prompt = Prompt(0, TOOL_TALK[:3], tools=TOOLS)
    run = episodes.run(SingleTurn(rewards), prompt, RolloutKey(0, 0, None), SamplingParams(1.0, 8, (STOP,)))
    shown = own.decode(asyncio.run(run).tokens[:-3])
    assert shown.startswith("<tools>add;</s>") and shown.endswith("<tool>2</s>\n<assistant>")


class MortalEngine(FakeEngine):
    """Dies at its request number `last`, and stays dead until it is `revived`."""

    last = 10**9

    async def generate(
        self, tokens: list[int], params: SamplingParams, request: str, shown: Shown | None = None
    ) -> Completion:
        if len(self.requests) >= self.last:
            raise ActorDeath(f"{self.name}.generate: its process died (7 of 8)")
        return await super().generate(tokens, params, request)


async def come_back(pool: EnginePool) -> None:
    """As if lost engines had been started again, and sent the newest weights."""
    pool.restarted.update(pool.lost)
    await pool.readmit()


def test_what_a_lost_engine_had_to_answer_another_does() -> None:
    engines = [MortalEngine(), MortalEngine()]
    pool = EnginePool(engines)
    engines[0].last = 1

    async def ask() -> list[Completion]:
        calls = [pool.generate([1], SamplingParams(1.0, 5, ()), RolloutKey(0, index)) for index in range(4)]
        return list(await asyncio.gather(*calls))

    assert len(asyncio.run(ask())) == 4
    assert [len(engine.requests) for engine in engines] == [1, 3]
    assert list(pool.lost) == [0] and pool.engine_lost.is_set() and pool.available.is_set()


def test_without_engines_training_waits_and_all_else_is_told(loop: EventLoop) -> None:
    engine = MortalEngine()
    pool = EnginePool([engine])
    engine.last = 0
    params = SamplingParams(1.0, 5, ())
    with pytest.raises(EngineLost, match="its process died"):  # nobody starts engines of a job again
        loop.run(pool.generate([1], params, RolloutKey(0, 0, purpose="generate")), "asking")
    pool.is_supervised = True
    with pytest.raises(EngineLost, match="its process died"):
        loop.run(pool.generate([1], params, RolloutKey(0, 0, purpose="evaluate")), "asking")
    waiting = asyncio.run_coroutine_threadsafe(pool.generate([1], params, RolloutKey(0, 0, purpose="train")), loop.loop)
    engine.last = 10**9

    async def restore() -> bool:
        await asyncio.sleep(0.05)
        before = waiting.done()
        await come_back(pool)
        return before

    assert not loop.run(restore(), "restoring")
    assert len(waiting.result(10).tokens) == 3
    assert not pool.lost and not pool.engine_lost.is_set()


def test_a_step_goes_on_with_what_it_had_when_an_engine_was_lost(build: Any, loop: EventLoop) -> None:
    rollouts, engine = build(groups=3, start=False)
    pool, examine = rollouts.sampler.episodes.pool, rollouts._is_trainable

    def lose_after_the_first(one: Any) -> bool:
        rollouts._is_trainable = examine
        pool.mark_lost(0, ActorDeath("gone"), 0)
        return bool(examine(one))

    rollouts._is_trainable = lose_after_the_first
    rollouts.start(0)
    with pytest.raises(EngineLost, match="gone"):
        rollouts.take(3)
    assert len(rollouts.ready) == 1
    loop.run(come_back(pool), "restoring")
    assert prompt_ids(rollouts.take(3)) == [0, 1, 2]
    assert not rollouts.ready and len(engine.requests) == 9


def test_engines_that_die_of_one_cause_again_and_again_end_the_run(loop: EventLoop) -> None:
    pool = EnginePool([FakeEngine(), FakeEngine()])
    for number in (1, 2, 3):
        loop.run(come_back(pool), "restoring")
        for place in (0, 1):
            pool.mark_lost(place, ActorDeath(f"error {number} of 5"), 0)
        error = EngineCrashLoop if number == 3 else AssertionError  # these engines cannot be restarted
        with pytest.raises(error) as caught:
            loop.run(pool.restart(1), "renewing")
    assert "engines died 3 times in one step. The last error: error 3 of 5" in str(caught.value)


@pytest.mark.parametrize("structure", [None, Structure("{}")])
def test_an_answer_of_a_structure_begins_anew_where_it_was_cut_off(structure: Structure | None) -> None:
    asked: list[tuple[list[int], int, str]] = []
    seeds: list[int | None] = []

    async def sample(tokens: list[int], params: SamplingParams, request: str) -> Completion:
        asked.append((tokens, params.max_new_tokens, request))
        seeds.append(params.seed)
        return Completion.of([len(asked)], [-1.0], len(asked), INTERRUPTED if len(asked) < 3 else "stop")

    params = SamplingParams(1.0, 10, (), seed=5, structure=structure)
    answer = asyncio.run(sample_in_parts(sample, [9], params, "r", lambda: True))
    if structure:
        assert asked == [([9], 10, "r"), ([9], 10, "r.1"), ([9], 10, "r.2")]
        assert (answer.tokens.tolist(), answer.versions.tolist(), answer.finish_reason) == ([3], [3], "stop")
    else:
        assert asked == [([9], 10, "r"), ([9, 1], 9, "r.1"), ([9, 1, 2], 8, "r.2")]
        assert answer.tokens.tolist() == [1, 2, 3]
    assert seeds[0] == 5 and len(set(seeds)) == 3 and derive_seed(None, 1) is None


# Steps that are streamed


class Held:
    """Lets a test decide which prompts have ended: those up to which `free` says, in an order of its own."""

    def __init__(self, rollouts: Rollouts, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast) -> None:
        self.rollouts, self.gates = rollouts, {}
        self.prompts = {tuple(tokenizer.encode(f"{number:02d}")): number for number in range(len(PROMPTS))}
        plain = engine.generate

        async def generate(
            tokens: list[int], params: SamplingParams, request: str, shown: Shown | None = None
        ) -> Completion:
            await self.gate(self.number(tokens)).wait()
            return await plain(tokens, params, request)

        engine.generate = generate  # type: ignore[method-assign]

    def number(self, tokens: list[int]) -> int:
        return next(number for text, number in self.prompts.items() if tuple(tokens[-len(text) :]) == text)

    def gate(self, number: int) -> asyncio.Event:
        return self.gates.setdefault(number, asyncio.Event())

    def free(self, *numbers: int) -> None:
        for number in numbers:
            self.rollouts.loop.loop.call_soon_threadsafe(self.gate(number).set)

    def free_later(self, *numbers: int) -> None:
        """Free prompts when all that can be done before is done."""
        for number in numbers:
            loop = self.rollouts.loop.loop
            loop.call_soon_threadsafe(loop.call_later, 0.3, self.gate(number).set)


@pytest.fixture
def held(build: Any, tokenizer: PreTrainedTokenizerFast) -> Callable[..., tuple[Rollouts, Held]]:
    def make(*free: int, **named: Any) -> tuple[Rollouts, Held]:
        rollouts, engine = build(start=False, **named)
        held = Held(rollouts, engine, tokenizer)
        rollouts.start(0)
        held.free(*free)
        return rollouts, held

    return make


def test_complete_groups_are_given_away_while_others_are_sampled(held: Any) -> None:
    rollouts, gates = held(2, groups=4)
    seen: list[list[int]] = []

    def train(part: list[Any]) -> bool:
        seen.append(prompt_ids(part))
        gates.free(*{2: [3], 3: [0, 1]}.get(seen[-1][0], []))
        return True

    assert prompt_ids(rollouts.stream(4, train, least=1)) == [0, 1, 2, 3]
    assert seen[:2] == [[2], [3]]
    assert len({number for part in seen for number in part}) == sum(map(len, seen))  # none of them twice
    rollouts.release(0)
    gates.free(4, 5, 6, 7)
    assert prompt_ids(rollouts.stream(4, lambda part: True, least=10**6)) == [4, 5, 6, 7]


def test_parts_have_as_many_tokens_as_they_should(held: Any) -> None:
    """Each group samples 9 tokens."""
    rollouts, gates = held(0, 2, groups=4)
    seen: list[list[int]] = []

    def train(part: list[Any]) -> bool:
        seen.append(prompt_ids(part))
        gates.free(1, 3)
        return True

    rollouts.stream(4, train, least=18)
    assert seen[0] == [0, 2] and len(seen) == 1


def test_no_part_follows_one_that_could_not_be_trained(held: Any) -> None:
    rollouts, gates = held(0, groups=3)
    seen: list[list[int]] = []

    def train(part: list[Any]) -> bool:
        seen.append(prompt_ids(part))
        gates.free(1)
        gates.free_later(2)
        return False

    assert prompt_ids(rollouts.stream(3, train, least=1)) == [0, 1, 2]
    assert seen == [[0]]


def test_only_groups_that_the_step_will_have_are_given_away(held: Any) -> None:
    """Two useful groups are wanted. Prompts 0 and 1 are uniform, so four more are sampled: 4 and 5 end first, but 2 and
    3 may still fill both places.
    """
    dynamic = DynamicSamplingConfig(enabled=True, max_batches=4)
    rollouts, gates = held(0, 1, 4, 5, groups=2, reward=MixedReward({2, 3, 4, 5}), dynamic=dynamic)
    seen: list[int] = []

    def train(part: list[Any]) -> bool:
        seen.extend(prompt_ids(part))
        gates.free_later(2)
        return True

    gates.free_later(3)
    assert prompt_ids(rollouts.stream(2, train, least=1)) == [2, 3]
    assert seen == [3]


def test_a_group_that_is_not_trained_is_not_given_away_and_counted_once(held: Any) -> None:
    """Prompt 1 has one reward of three. It ends before prompt 0, behind which it waits to be looked at."""
    rollouts, gates = held(1, groups=3, reward=FakeReward({1: 2}))
    seen: list[int] = []

    def train(part: list[Any]) -> bool:
        seen.extend(prompt_ids(part))
        gates.free_later(0, 3)
        return True

    gates.free_later(2)
    assert prompt_ids(rollouts.stream(3, train, least=1)) == [0, 2, 3]
    assert 1 not in seen and seen[0] == 2 and rollouts.dropped.groups == 1 and rollouts.dropped.completions == 2
    assert rollouts.ledger.fates["failed"] == 1


def test_an_interrupt_ends_a_stream_and_keeps_its_prompts(held: Any, loop: EventLoop) -> None:
    rollouts, _ = held(0, groups=3)

    def train(part: list[Any]) -> bool:
        loop.interrupt()
        return True

    with pytest.raises(Interrupted):
        rollouts.stream(3, train, least=1)
    assert rollouts.taking is None and sorted(rollouts.ledger.under_way) == [0, 1, 2]


def test_an_engine_that_is_lost_does_not_make_a_stream_forget_what_it_gave_away(held: Any) -> None:
    rollouts, gates = held(0, groups=3)
    seen: list[int] = []

    def train(part: list[Any]) -> bool:
        seen.extend(prompt_ids(part))
        rollouts.sampler.pool.lost["fake"] = "gone"
        rollouts.loop.loop.call_soon_threadsafe(rollouts.sampler.pool.engine_lost.set)
        return True

    with pytest.raises(EngineLost):
        rollouts.stream(3, train, least=1)
    rollouts.sampler.pool.lost.clear()
    rollouts.loop.loop.call_soon_threadsafe(rollouts.sampler.pool.engine_lost.clear)
    gates.free(1, 2)
    assert prompt_ids(rollouts.stream(3, lambda part: seen.extend(prompt_ids(part)) is None, least=1)) == [0, 1, 2]
    assert seen.count(0) == 1


# More groups than a step needs, and the order in which they are taken


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5])
def test_no_group_is_passed_more_often_than_the_window_lets_it(build: Any, window: int | None) -> None:
    """In each order in which six groups can end, one is taken as soon as that passes nobody too often."""
    rollouts, _ = build(staleness=5, start=False, window=window)
    most, nothing = 0, cast(Any, None)
    for order in permutations(range(6)):
        rollouts.running = {number: InFlightGroup(number, 5, nothing, 0) for number in range(6)}
        rollouts.expiring, rollouts.finished = Counter({5: 6}), {5: []}
        taken, ended, passed, expected = list[int](), list[int](), [0] * 6, list[int]()
        for number in order:
            heappush(rollouts.finished[5], number)
            ended.append(number)
            while one := rollouts._take_finished(6 - len(taken)):
                taken.append(one.number)
            while able := [
                last
                for last in ended
                if last not in expected
                and all(passed[older] + 1 < (window or 99) for older in range(last) if older not in expected)
            ]:
                expected.append(min(able))
                for older in range(min(able)):
                    passed[older] += older not in expected
        assert taken == expected and sorted(taken) == list(range(6))
        most = max(most, *passed)
    assert most == (5 if window is None else window - 1)


def test_the_oldest_group_is_waited_for_though_others_are_done(held: Any) -> None:
    rollouts, gates = held(1, 2, 3, staleness=3, groups=1, window=3)
    assert [trained(rollouts, rollouts.take(1)) for _ in range(2)] == [[1], [2]]
    gates.free_later(0)
    assert [trained(rollouts, rollouts.take(1)) for _ in range(2)] == [[0], [3]]


def test_a_group_that_is_sampled_again_may_not_be_passed_as_often_once_more(build: Any) -> None:
    saved = Ledger(drawn=9, under_way={8: 8, 2: 2, 3: 3}, fates={"trained": 6})
    rollouts, _ = build(staleness=1, position=9, ledger=saved, window=3)
    assert {number: one.passed for number, one in rollouts.running.items()} == {2: 4, 3: 4, 8: 0, 9: 0}


@pytest.mark.parametrize(
    ("share", "groups", "capacity"), [(None, 4, 12), (0, 4, 4), (0.25, 4, 5), (0.3, 10, 13), (1.5, 3, 8), (2, 4, 12)]
)
def test_so_many_more_groups_are_sampled_than_a_step_needs(share: float | None, groups: int, capacity: int) -> None:
    assert RolloutPlan(groups, 2, extra_share=share).capacity() == capacity


def test_the_first_groups_of_more_than_needed_are_taken_and_the_rest_goes_on(build: Any, tokenizer: Any) -> None:
    rollouts, engine = build(staleness=1, groups=4, extra_share=0.25, start=False)
    engine.delay = slow(tokenizer, 1)
    rollouts.start(0)
    assert trained(rollouts, rollouts.take(4)) == [0, 2, 3, 4]
    assert len(engine.requests) == 5 * 3
    engine.version = 1
    rollouts.release(1)
    assert len(rollouts.running) == 5
    groups = rollouts.take(4)
    assert trained(rollouts, groups) == [1, 5, 6, 7]
    assert {one.oldest_version() for one in groups[0]} == {0} and len(engine.requests) == 9 * 3  # nothing twice


def test_the_lengths_of_what_is_taken_are_compared_with_those_of_what_was_drawn(build: Any) -> None:
    """Group 0 has answers of 9 tokens, all others of 3: the first step is biased, and the second makes up for it."""
    rollouts, engine = build(staleness=1, start=False)
    engine.parts = {f"train-0-{index}-0": [-9] for index in range(3)}
    rollouts.start(0)
    assert trained(rollouts, rollouts.take(2)) == [1, 2] and rollouts.dropped.length_bias is None
    rollouts.release(1)
    rollouts.loop.loop.call_soon_threadsafe(engine.go_on.set)
    assert trained(rollouts, rollouts.take(2)) == [0, 3]
    assert rollouts.dropped.length_bias == pytest.approx(3 / 4.5 - 1)  # of groups 0 to 3
    rollouts.release(2)
    rollouts.take(2)
    assert rollouts.dropped.length_bias == pytest.approx(6 / 3 - 1)  # of 0 and 3, instead of 4 and 5
    assert len(rollouts.bias.cohorts) == 1  # what is settled is forgotten


def test_groups_that_are_dropped_count_as_drawn_with_what_is_known_of_them(build: Any) -> None:
    rollouts, engine = build(staleness=1, drop_old=True, start=False)
    engine.parts = {"train-0-0-0": [9], "train-0-1-0": [5, -1], "train-0-2-0": [-1]}
    rollouts.start(0)
    for version in (1, 2):
        rollouts.take(2)
        rollouts.release(version)
    rollouts.take(2)
    assert rollouts.dropped.length_bias == pytest.approx(fmean([3 / fmean([*[3] * 9, 9, 5]) - 1, 0]))


def test_a_synchronous_run_has_no_such_bias(build: Any) -> None:
    dynamic = DynamicSamplingConfig(enabled=True)
    rollouts, _ = build(reward=MixedReward(set(range(0, 40, 3))), dynamic=dynamic)
    for _ in range(3):
        rollouts.take(2)
        assert rollouts.dropped.length_bias is None and not rollouts.bias.cohorts
        rollouts.release(0)


# Rows that rest


class ChangingReward(FakeReward):
    """Rewards of a row differ, or are all 0 or 1, as chance says of the row and the version of the policy."""

    def __init__(self, kinds: str = "ehm", seed: int = 0) -> None:
        super().__init__({})
        self.kinds, self.seed, self.version, self.given = kinds, seed, 0, Counter[int]()

    async def score(self, call: dict[str, Any]) -> float:
        row = int(call["label"])
        self.given[row] += 1
        kind = Random(f"{row} {self.version} {self.seed}").choice(self.kinds)
        return {"e": 1.0, "h": 0.0}.get(kind, float(self.given[row] % 2))


def live(rollouts: Rollouts, engine: FakeEngine, reward: ChangingReward, steps: range) -> list[tuple[str, list[Any]]]:
    """Go through steps of a run; return the ledger after each, as a checkpoint holds it, and what was trained."""
    found = []
    for step in steps:
        groups = rollouts.take(rollouts.plan.prompts_per_step)
        rollouts.judge(groups)
        trained(rollouts, groups)
        rollouts.ledger.row()
        rollouts.ledger.balance()
        found.append((json.dumps(asdict(rollouts.ledger)), [group[0].group for group in groups]))
        engine.version = reward.version = step + 1
        rollouts.release(step + 1)
    return found


RESTS = DifficultyConfig(enabled=True, rest=1, longest_rest=3)


@pytest.mark.parametrize("dynamic", [AS_THEY_COME, DynamicSamplingConfig(enabled=True)])
def test_a_run_killed_after_any_step_has_the_same_pools_and_ledger(build: Any, dynamic: DynamicSamplingConfig) -> None:
    given = {"groups": 3, "size": 2, "rows": 9, "dynamic": dynamic, "difficulty": RESTS}
    whole = live(*(run := build(reward=(reward := ChangingReward()), **given)), reward, range(12))
    fates = run[0].ledger.fates
    assert fates["skipped_easy"] > 3 and fates["skipped_hard"] > 3 and ("uniform" in fates) is dynamic.enabled
    for killed in range(11):
        ledger = Ledger.of(json.loads(whole[killed][0]))
        reward = ChangingReward()
        reward.version = killed + 1
        resumed, engine = build(reward=reward, ledger=ledger, position=ledger.drawn, start=False, **given)
        resumed.start(killed + 1)
        assert live(resumed, engine, reward, range(killed + 1, 12)) == whole[killed + 1 :]


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_an_asynchronous_run_judges_and_skips_each_number_once(
    build: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, seed: int, drop: bool
) -> None:
    """Killed at random: what a checkpoint counts, its pools have seen, and nothing else."""
    events = Counter[str]()

    def count(name: str) -> None:
        plain = getattr(Pools, name)

        def spy(pools: Pools, *args: Any) -> Any:
            found = plain(pools, *args)
            events[name] += found != ""
            return found

        monkeypatch.setattr(Pools, name, spy)

    for name in ("judge", "skip"):
        count(name)
    chance, ledger, step = Random(seed), Ledger(), 0
    dynamic = DynamicSamplingConfig(enabled=seed == 1)
    given = {"staleness": 2, "groups": 3, "size": 2, "rows": 10, "drop_old": drop, "difficulty": RESTS}
    for _ in range(4):
        reward = ChangingReward(seed=seed)
        reward.version, seen = step, events.copy()
        rollouts, engine = build(
            reward=reward, ledger=ledger, position=ledger.drawn, start=False, dynamic=dynamic, **given
        )
        engine.delay = slow(tokenizer, 3) if drop else lambda tokens: chance.choice([0, 0, 0.02])
        rollouts.start(step)
        steps = chance.randint(2, 6)
        before = live(rollouts, engine, reward, range(step, step + steps))
        ledger, step = Ledger.of(json.loads(before[-1][0])), step + steps
        assert rollouts.ledger.drawn >= ledger.drawn  # it went on after its last checkpoint, which the kill undoes
        later = sum(rollouts.ledger.fates.get(fate, 0) - ledger.fates.get(fate, 0) for fate in SKIPPED)
        events["skip"] -= later
        assert events["judge"] == ledger.fates["trained"] + ledger.fates.get("uniform", 0) > seen["judge"]
        assert events["skip"] == sum(ledger.fates.get(fate, 0) for fate in SKIPPED)
    assert events["skip"] > 10  # and, where old groups are dropped, some have usually become too old


SKIPPED = ("skipped_easy", "skipped_hard")


def test_only_completions_with_a_reward_are_judged_and_groups_without_enough_are_not(build: Any) -> None:
    """Of row 0 one answer fails and two pass; row 1 has a single reward; row 2 passes as a policy error does not."""
    rollouts, _ = build(groups=2, reward=FakeReward({0: 1, 1: 2}), difficulty=RESTS)
    groups = rollouts.take(2)
    assert prompt_ids(groups) == [0, 2]
    rollouts.judge(groups)
    assert rollouts.ledger.pools == Pools({0: 1, 2: 1}, left={0: 1, 2: 1})


def test_a_row_passes_by_its_task_reward(build: Any) -> None:
    """Answers to row 0 are worth 0, 1 and 2, and those to row 1 are worth 1."""
    for bound, easy, hard in ((1.0, [1], []), (0.0, [0, 1], []), (2.0, [], [1]), (3.0, [], [0, 1])):
        rollouts, _ = build(reward=MixedReward({0}), difficulty=replaced(RESTS, pass_reward=bound))
        rollouts.judge(rollouts.take(2))
        assert [[*rollouts.ledger.pools.easy], [*rollouts.ledger.pools.hard]] == [easy, hard], bound
    rollouts, _ = build(reward=MixedReward({0}), difficulty=replaced(RESTS, high=0.6))
    rollouts.judge(rollouts.take(2))
    assert [*rollouts.ledger.pools.easy] == [0, 1]  # two thirds of row 0 pass


def replaced(config: DifficultyConfig, **keys: Any) -> DifficultyConfig:
    return DifficultyConfig.parse(config.model_dump() | keys)


def test_without_the_key_nothing_is_judged_and_nothing_rests(build: Any) -> None:
    ledger = Ledger(pools=Pools({0: 3}, left={0: 3}))
    rollouts, _ = build(reward=ChangingReward("e"), ledger=ledger)
    groups = rollouts.take(2)
    rollouts.judge(groups)
    assert prompt_ids(groups) == [0, 1] and ledger.pools == Pools({0: 3}, left={0: 3})


@pytest.mark.parametrize("staleness", [0, 1])
def test_where_all_rows_rest_some_come_back_early_and_the_run_goes_on(build: Any, staleness: int) -> None:
    reward = ChangingReward("h")
    difficulty = DifficultyConfig(enabled=True, rest=6, longest_rest=100)
    rollouts, engine = build(staleness, rows=5, size=2, reward=reward, difficulty=difficulty)
    woken = []
    for step in range(10):
        live(rollouts, engine, reward, range(step, step + 1))
        woken.append(rollouts.dropped.woken)
    assert sum(woken[:1]) == 0 < sum(woken[4:])
    assert rollouts.ledger.fates["trained"] == 20
    assert rollouts.ledger.fates["skipped_hard"] <= 5 * (rollouts.ledger.drawn - rollouts.ledger.fates["skipped_hard"])
    assert rollouts.order.position == rollouts.ledger.drawn  # a resumed run goes on at the same place


@pytest.mark.parametrize("seed", range(2))
def test_pools_at_least_halve_the_share_of_groups_with_equal_rewards(build: Any, seed: int) -> None:
    """Of 12 rows a third is always solved, a third never, and a third half of the time."""

    class Known(ChangingReward):
        async def score(self, call: dict[str, Any]) -> float:
            return (1.0, 0.0, float(chance.random() < 0.5))[int(call["label"]) % 3]

    shares = []
    for enabled in (True, False):
        chance, reward = Random(seed), Known()
        given = {"groups": 4, "size": 6, "rows": 12, "difficulty": DifficultyConfig(enabled=enabled)}
        rollouts, _ = build(reward=reward, **given)
        uniform = list[bool]()
        for step in range(45):
            groups = rollouts.take(4)
            uniform += [len({one.reward for one in group}) == 1 for group in groups]
            rollouts.judge(groups)
            trained(rollouts, groups)
            rollouts.release(step + 1)
        shares.append(fmean(uniform))
    assert 0.6 < shares[1] < 0.75 and 0.05 < shares[0] <= shares[1] / 2
