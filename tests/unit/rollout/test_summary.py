"""What leaves a rollout worker: numbers of every episode, and arrays of those that can be trained on."""

from trueline.data.types import Completion, Outcome, Prompt, Trajectory
from trueline.rl.step import stored_samples
from trueline.rollout.summary import Parcels, SampledGroup, pack_group, summarise, summarise_group
from trueline.runtime.actors import Stored
from trueline.training.samples import families_of


def episode(tokens: list[int], reward: float | None, outcome: Outcome = Outcome.FINISHED) -> Trajectory:
    made = Trajectory(Prompt(0, [{"role": "user", "content": "?"}], label="x", source="a.jsonl"), 3)
    made.add_observation([1, 2])
    made.add_action(Completion.of(tokens, [-1.0] * len(tokens), 4, "stop"))
    made.outcome, made.reply = outcome, "said"
    if reward is not None:
        made.add_reward(reward)
    return made


def test_only_episodes_with_a_reward_have_arrays() -> None:
    failed = episode([5, 6, 7], None, Outcome.REWARD_ERROR)
    group = [episode([8], 0.5), failed, episode([9, 10], 1.0)]
    ranks, step, experts = pack_group(group)
    assert ranks["tokens"].tolist() == [1, 2, 8, 1, 2, 9, 10] and ranks["tokens"].dtype == "int32"
    assert ranks["mask"].tolist() == [False, False, True, False, False, True, True]
    assert step["token_rewards"].tolist() == [0, 0, 0.5, 0, 0, 0, 1.0]
    assert experts == {} and pack_group([failed]) == ({}, {}, {})
    known = [summarise(one) for one in group]
    assert [sum(part.length for part in one.sequences) for one in known] == [3, 0, 4]
    assert [one.sampled for one in known] == [1, 3, 2] and [one.newest for one in known] == [4, 0, 4]


def test_sequences_of_a_group_that_begin_alike_are_a_family() -> None:
    """Also in the numbers of a step, where families of several groups differ."""
    prompt, nowhere = list(range(3, 43)), Stored({})
    groups = []
    for first in (5, 6):
        failed, *fine = (episode([*prompt, *rest], 1.0) for rest in ([0], [first, 1, 2], [9]))
        failed.outcome = Outcome.REWARD_ERROR
        stranger = episode([first] * 50, 1.0)
        for one in (failed, stranger, *fine):
            one.group = first
        groups.append(SampledGroup(summarise_group([failed, fine[0], stranger, fine[1]]), Parcels(*[nowhere] * 5)))
    kin = families_of(stored_samples([group.with_rewards() for group in groups]))
    families = [one.family for one in kin]
    assert families[0] == families[2] != families[1] and families[3] == families[5] != families[4]
    assert len(set(families)) == 4 and min(one.prefix for one in kin) == 42


def test_a_failed_episode_brings_the_call_that_repeats_it() -> None:
    failed, fine = summarise(episode([5], None, Outcome.REWARD_ERROR)), summarise(episode([5], 1.0))
    assert (failed.call["reply"], failed.call["label"]) == ("said", "x") and fine.call == {}
