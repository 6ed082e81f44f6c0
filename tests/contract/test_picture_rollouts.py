"""Engines that sample from prompts with pictures: the tokens, the pixels and the log-probs of the trainer."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.model_table import WITH_PICTURES, check_cell
from tests.support.pictures import make_picture, make_tiny_idefics, png
from tests.support.ranks import started
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.data.batching import Budget, pack_samples, plan_micro_batches
from trueline.data.chat import ChatFormat, OpenPrompt
from trueline.data.pictures import Picture, blank_picture
from trueline.data.types import Completion, Sample
from trueline.models.loading import load_chat
from trueline.rollout.engine import EngineSpec, NextTurn, SamplingParams
from trueline.rollout.hf_engine import HFEngine
from trueline.rollout.pool import EnginePool, RolloutKey, SequencePlace
from trueline.runtime.actors import LocalActor, Stored
from trueline.runtime.event_loop import EventLoop
from trueline.sync.weights import STRANGE
from trueline.training.worker import Worker, WorkerSpec

TOLERANCE = 1e-4
SPEC = EngineSpec("", "float32", 256, 1, 16, 0, 0.3, False, False, False, lean_logprobs=True, pictures=4)
PARAMS = SamplingParams(1.0, 8, (), seed=3)
# Longer than a block of the prefix cache.
ASKED = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " or" * 20}, {"type": "image"}]}]
Run = Callable[[Awaitable[Any]], Any]


def picture(seed: int, size: tuple[int, int] = (40, 24)) -> Picture:
    return Picture(png(make_picture(seed, *size)), *size)


PICTURES = picture(1), picture(2, (60, 64))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_idefics(tmp_path_factory.mktemp("model"), head_dim=32)  # the smallest for vLLM


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    loop = EventLoop(60.0)
    yield lambda work: loop.run(work, "a test's request")  # type: ignore[arg-type]
    loop.stop()


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[dict[str, Any]]:
    from tests.support import vllm_here

    spec = replace(SPEC, model=str(model))
    yield {"hf": HFEngine(spec), "vllm": vllm_here.EngineHere(spec)}
    vllm_here.release()


@pytest.fixture(params=["hf", "vllm"])
def engine(request: pytest.FixtureRequest, engines: dict[str, Any]) -> Any:
    return engines[request.param]


@pytest.fixture(scope="module")
def trainer(model: Path) -> Worker:
    keys = {"engine": "torch", "learning_rate": 1e-12}
    config = ModelConfig(path=str(model), dtype="float32", train_vision="all")
    return started(Worker(WorkerSpec(config, TrainingConfig.parse(keys), 0, 1, 100, 0)))


@pytest.fixture(scope="module")
def chat(model: Path) -> ChatFormat:
    return load_chat(ModelConfig(path=str(model)), "auto")


@pytest.fixture(scope="module")
def prompt(chat: ChatFormat) -> OpenPrompt:
    return chat.begin(ASKED, (), PICTURES)


def by_trainer(trainer: Worker, tokens: list[int], pictures: tuple[Picture, ...]) -> torch.Tensor:
    """[T - 1] log-probs of tokens[1:]."""
    sample = Sample(torch.tensor(tokens), torch.arange(len(tokens)) > 0, pictures=pictures)
    plan = plan_micro_batches([len(tokens)], 1, Budget(10_000, None, True), 1)
    return torch.from_numpy(trainer.score(pack_samples([sample]), plan[0], 1.0))[1:]


def test_prompts_have_the_tokens_and_logprobs_of_the_trainer(
    engine: Any, trainer: Worker, prompt: OpenPrompt, run: Run
) -> None:
    assert prompt.shown is not None and len(prompt.shown.brief) < len(prompt.tokens)
    scores = torch.tensor(run(engine.score(prompt.tokens, prompt.shown)))
    assert (scores - by_trainer(trainer, prompt.tokens, PICTURES)).abs().max() < TOLERANCE


@pytest.mark.models
def test_completions_have_the_logprobs_of_the_trainer(
    engine: Any, engines: dict[str, Any], trainer: Worker, prompt: OpenPrompt, run: Run
) -> None:
    """Requests of several lengths and pictures at once, as groups send them."""
    other = replace(prompt.shown, pictures=(PICTURES[0], picture(7, (60, 64))))

    async def sample() -> list[Completion]:
        shown = [prompt.shown, other, prompt.shown, None]
        prompts = [prompt.tokens, prompt.tokens, [*prompt.tokens, 20, 21], [9, 10, 11]]
        calls = zip(prompts, shown, strict=True)
        made = (engine.generate(one, PARAMS, f"r{at}", seen) for at, (one, seen) in enumerate(calls))
        return list(await asyncio.gather(*made))

    found = run(sample())
    seen = [PICTURES, other.pictures, PICTURES, ()]
    for before, one, pictures in zip(
        [prompt.tokens] * 2 + [[*prompt.tokens, 20, 21], [9, 10, 11]], found, seen, strict=True
    ):
        expected = by_trainer(trainer, [*before, *one.tokens.tolist()], pictures)[len(before) - 1 :]
        assert (torch.from_numpy(one.logprobs) - expected).abs().max() < TOLERANCE
    assert (found[0].logprobs != found[1].logprobs).any()
    if engine is engines["vllm"]:
        check_cell(WITH_PICTURES["idefics3"], "vLLM", "exact")


def test_a_later_turn_continues_the_same_sequence(engine: Any, trainer: Worker, prompt: OpenPrompt, run: Run) -> None:
    """Pictures come by reference with the first turn; later ones send only what is new."""
    assert prompt.shown is not None
    first = run(engine.generate_turn(NextTurn("talk", 0, prompt.tokens, Stored(prompt.shown)), PARAMS, "turn-0"))
    said = [*prompt.tokens, *first.tokens.tolist()]
    then = run(engine.generate_turn(NextTurn("talk", len(said), [20, 21]), PARAMS, "turn-1"))
    whole = [*said, 20, 21, *then.tokens.tolist()]
    expected = by_trainer(trainer, whole, PICTURES)[len(said) + 1 :]
    assert (torch.from_numpy(then.logprobs) - expected).abs().max() < TOLERANCE


def follow(chat: ChatFormat, before: OpenPrompt, reply: Completion, *pictures: Picture) -> OpenPrompt:
    """Return the prompt that shows more pictures behind a reply."""
    said = {"role": "assistant", "content": chat.reply_text(reply.tokens.tolist())}
    content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": "and"}]
    following = chat.follow(before, said, [{"role": "user", "content": content}], int(reply.tokens[-1]), pictures)
    assert following is not None
    return following


@pytest.mark.parametrize("asked", ["with pictures", "without"])
def test_later_turns_show_more_pictures(
    asked: str, engine: Any, trainer: Worker, chat: ChatFormat, prompt: OpenPrompt, run: Run
) -> None:
    """They are sent with their turn; the engine has those before, and all of them give the trainer's log-probs."""
    start = prompt if asked == "with pictures" else chat.begin([{"role": "user", "content": "what?"}])
    known, shown, name = list(start.tokens), start.shown, f"more {asked}"
    first = NextTurn(name, 0, known, Stored(shown) if shown else None)
    turn, reply = start, run(engine.generate_turn(first, PARAMS, f"{name}-0"))
    pictures = PICTURES if asked == "with pictures" else ()
    for number, new in enumerate(
        [(picture(5, (64, 40)), picture(6)), (), (picture(7, (30, 50)),)][asked != "without" :]
    ):
        known += reply.tokens.tolist()
        turn = follow(chat, turn, reply, *new)
        added = NextTurn(name, len(known), turn.tokens, None, turn.shown)
        reply = run(engine.generate_turn(added, PARAMS, f"{name}-{number + 1}"))
        known, pictures = [*known, *turn.tokens], pictures + new
        expected = by_trainer(trainer, [*known, *reply.tokens.tolist()], pictures)[len(known) - 1 :]
        assert (torch.from_numpy(reply.logprobs) - expected).abs().max() < TOLERANCE
    # The engine knows pictures by now that the tokens before them do not show: it asks for all.
    assert run(engine.generate_turn(added, PARAMS, f"{name}-again")) is None


@pytest.mark.parametrize("wrong", ["exchanged", "left out"])
def test_other_pictures_on_the_way_are_noticed(
    wrong: str, engine: Any, trainer: Worker, prompt: OpenPrompt, run: Run
) -> None:
    """The start-up probe scores a prompt with pictures, and refuses a gap of more than STRANGE."""
    assert prompt.shown is not None
    pictures = PICTURES[::-1] if wrong == "exchanged" else (PICTURES[0], blank_picture())
    try:
        scores = torch.tensor(run(engine.score(prompt.tokens, replace(prompt.shown, pictures=pictures))))
    except (RuntimeError, ValueError) as refusal:  # where they have more or fewer tokens
        assert re.search("other tokens|do not match", str(refusal))
    else:
        assert (scores - by_trainer(trainer, prompt.tokens, PICTURES)).abs().mean() > STRANGE


@pytest.mark.parametrize("name", ["too many placeholders", "another token"])
def test_vllm_refuses_to_sample_from_other_tokens_than_the_trainer_s(
    name: str, engines: dict[str, Any], prompt: OpenPrompt, run: Run
) -> None:
    assert prompt.shown is not None
    tokens, brief = list(prompt.tokens), list(prompt.shown.brief)
    if name == "another token":
        brief[-1] += 1
    shown = replace(prompt.shown, brief=brief if name == "another token" else tokens)
    with pytest.raises((RuntimeError, ValueError), match=r"first difference at token \d+|placeholder"):
        run(engines["vllm"].generate(tokens, PARAMS, name, shown))


def test_nothing_that_old_weights_saw_outlives_an_update(
    engines: dict[str, Any], trainer: Worker, prompt: OpenPrompt, run: Run
) -> None:
    """The tower and the projector change, and nothing else: the same picture has other log-probs, the trainer's."""
    engine, weights = engines["vllm"], dict(trainer.copy_weights())
    before = torch.tensor(run(engine.score(prompt.tokens, prompt.shown)))
    run(engine.generate(prompt.tokens, PARAMS, "fill", prompt.shown))  # fills both caches
    seen = {name: tensor for name, tensor in weights.items() if "vision" in name or "connector" in name}
    try:
        run(engine.load([(name, tensor * (1.5 if name in seen else 1.0)) for name, tensor in weights.items()], 1))
        sampled = run(engine.generate(prompt.tokens, PARAMS, "after", prompt.shown))
        after = torch.tensor(run(engine.score(prompt.tokens, prompt.shown)))
    finally:
        run(engine.load(list(weights.items()), 2))
    with torch.no_grad():
        parameters = dict(trainer.model.named_parameters())
        for name in seen:
            parameters[name].mul_(1.5)
        whole = [*prompt.tokens, *sampled.tokens.tolist()]
        expected = by_trainer(trainer, whole, PICTURES)
        for name in seen:
            parameters[name].div_(1.5)
    assert seen and (after - before).abs().mean() > STRANGE and sampled.cached == 0
    assert (after - expected[: len(after)]).abs().max() < TOLERANCE
    assert (torch.from_numpy(sampled.logprobs) - expected[len(after) :]).abs().max() < TOLERANCE


def test_an_image_token_that_was_sampled_last_has_its_logprob(
    engine: Any, trainer: Worker, prompt: OpenPrompt, run: Run
) -> None:
    """It ends the completion; the trainer learns it, and does not look for its picture."""
    token = max(prompt.tokens, key=prompt.tokens.count)
    tokens = [*prompt.tokens, 20]
    score = run(engine.score(tokens, prompt.shown))[-1]
    assert by_trainer(trainer, tokens, PICTURES)[-1] == pytest.approx(score, abs=TOLERANCE)
    assert by_trainer(trainer, [*prompt.tokens, token], PICTURES)[-1] < 0


def test_a_group_sends_its_pictures_once(model: Path, prompt: OpenPrompt, run: Run) -> None:
    sent: list[tuple[str, Any]] = []

    class Noting(LocalActor[Any]):
        async def call(self, method: Any, *args: Any, **named: Any) -> Any:
            sent.append((method.__name__, args))
            return await super().call(method, *args, **named)

    engine: Any = Noting("engine", HFEngine(replace(SPEC, model=str(model))))
    pool = EnginePool([engine], takes_groups=True)

    async def sample(places: list[SequencePlace | None]) -> list[Completion]:
        with pool.keep_group(0):
            keys = [RolloutKey(0, at, seed=at) for at in range(4)]
            calls = zip(keys, places, strict=True)
            asked = (pool.generate(prompt.tokens, PARAMS, key, 0, place, prompt.shown) for key, place in calls)
            return list(await asyncio.gather(*asked))

    assert len(run(sample([None] * 4))) == 4
    groups = [args for name, args in sent if name == "generate_group"]
    assert len(groups) == 1 and groups[0][3] is prompt.shown
    sent.clear()
    assert len(run(sample([SequencePlace(1, 0)] * 4))) == 4
    stored = [args[0].shown for name, args in sent if name == "generate_turn"]
    assert len(stored) == 4 and all(one is stored[0] for one in stored), "one reference for all episodes"
    assert not pool.shown


def test_a_turn_sends_its_own_pictures_alone(model: Path, chat: ChatFormat, prompt: OpenPrompt, run: Run) -> None:
    """And all of them to an engine that has forgotten the sequence, with the same result."""
    sent: list[NextTurn] = []

    class Noting(LocalActor[Any]):
        async def call(self, method: Any, *args: Any, **named: Any) -> Any:
            sent.append(args[0])
            return await super().call(method, *args, **named)

    engine = HFEngine(replace(SPEC, model=str(model)))
    actor: Any = Noting("engine", engine)
    pool, key = EnginePool([actor], takes_groups=True), RolloutKey(0, 0, seed=3)

    async def play(forgets: bool) -> Completion:
        with pool.keep_group(0):
            first = await pool.generate(prompt.tokens, PARAMS, key, 0, SequencePlace(1, 0, prompt.shown), prompt.shown)
            known = [*prompt.tokens, *first.tokens.tolist()]
            more = follow(chat, prompt, first, picture(5))
            assert more.shown is not None
            if forgets:
                engine.book.sequences.clear()
            place, whole = SequencePlace(1, len(known), more.shown), more.shown.behind(prompt.shown, known)
            return await pool.generate([*known, *more.tokens], PARAMS, key, 1, place, whole)

    expected = run(play(forgets=False))
    assert [one.added and one.added.pictures for one in sent] == [None, (picture(5),)]
    assert sent[0].shown is not None and sent[1].shown is None
    sent.clear()
    again = run(play(forgets=True))
    stored = sent[-1].shown
    assert len(sent) == 3 and stored is not None and stored.fetch().pictures == (*PICTURES, picture(5))
    assert (again.tokens == expected.tokens).all() and (again.logprobs == expected.logprobs).all()
