"""Scorers and judges against a real HTTP server in a thread."""

import asyncio
import socket
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest

from tests.support.scripted import Reply, Serve, said
from tests.support.scripted import serve as serve
from trueline.config.base import ConfigError
from trueline.config.reward import JudgeConfig, RemoteConfig, RewardConfig, RewardPartConfig
from trueline.rewards.base import Reward, RewardFailure, RewardTimeout, RewardUnreachable
from trueline.rewards.remote import (
    LONGEST_WAIT,
    JudgeReward,
    ScorerReward,
    check_judge,
    check_scorer,
    fill_prompt,
    retry_after,
)

SECRET = "s3cret-token"


def lengths(body: dict[str, Any], number: int) -> Reply:
    """A working scorer: the reward is the reply's length."""
    return 200, {}, {"rewards": [len(call["reply"]) for call in body["calls"]]}


def remote(**settings: Any) -> RemoteConfig:
    return RemoteConfig(**{"backoff_seconds": 0.01, "attempts": 3, **settings})


def scorer(url: str, *, batch: int = 64, timeout: float = 20, **settings: Any) -> ScorerReward:
    return ScorerReward(f"{url}/score", RewardPartConfig(remote=remote(**settings)), timeout, batch=batch)


def results(reward: Reward, replies: list[str]) -> list[Any]:
    """Of calls that are made at once; a failure takes its place in the list."""

    async def ask() -> list[Any]:
        calls = [reward.score({"reply": reply, "prompt": "p", "label": None, "level": 2}) for reply in replies]
        found = await asyncio.gather(*calls, return_exceptions=True)
        await reward.stop()
        return list(found)

    return asyncio.run(ask())


def failure(reward: Reward, kind: type[RewardFailure]) -> str:
    [found] = results(reward, ["a"])
    assert type(found) is kind, repr(found)
    return str(found)


def test_calls_travel_whole_and_rewards_come_back_in_order(serve: Serve) -> None:
    server = serve(lengths)
    assert results(scorer(server.url), ["aaa", "", "aé"]) == [3.0, 0.0, 2.0]
    [asked] = server.asked
    assert asked["path"] == "/score"
    assert asked["calls"][2] == {"reply": "aé", "prompt": "p", "label": None, "level": 2}


def test_waiting_calls_share_a_request(serve: Serve) -> None:
    server = serve(lengths)
    replies = ["a" * number for number in range(10)]
    assert results(scorer(server.url, batch=4, concurrency=1), replies) == [float(number) for number in range(10)]
    assert [len(asked["calls"]) for asked in server.asked] == [4, 4, 2]


def test_no_more_requests_than_allowed(serve: Serve) -> None:
    def slow(body: dict[str, Any], number: int) -> Reply:
        time.sleep(0.05)
        return lengths(body, number)

    server = serve(slow)
    assert results(scorer(server.url, batch=1, concurrency=3), ["a"] * 9) == [1.0] * 9
    assert len(server.asked) == 9
    assert 1 < server.busiest <= 3


@pytest.mark.parametrize("status", [429, 500, 503])
def test_busy_servers_are_asked_again(serve: Serve, status: int) -> None:
    server = serve(lambda body, number: lengths(body, number) if number else (status, {}, "busy"))
    assert results(scorer(server.url), ["aa"]) == [2.0]
    assert len(server.asked) == 2


def test_the_server_says_how_long_to_wait(serve: Serve) -> None:
    server = serve(lambda body, number: lengths(body, number) if number else (429, {"Retry-After": "1"}, ""))
    started = time.monotonic()
    assert results(scorer(server.url, backoff_seconds=0), ["aa"]) == [2.0]
    assert time.monotonic() - started >= 1


def test_retry_after_is_a_number_or_a_date_and_has_a_limit() -> None:
    def wait(value: str) -> float | None:
        return retry_after(httpx.Response(429, headers={"Retry-After": value}))

    assert wait("7") == 7
    assert wait("86400") == LONGEST_WAIT
    assert wait(format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)) == pytest.approx(29.5, abs=1)
    assert wait("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert wait("soon") is None
    assert retry_after(httpx.Response(429)) is None


def test_unreachable_after_the_last_try(serve: Serve) -> None:
    server = serve(lambda body, number: (502, {}, "no upstream"))
    message = failure(scorer(server.url, attempts=4), RewardUnreachable)
    assert len(server.asked) == 4
    assert message == f"{server.url}/score: status 502: no upstream (4 tries)"


def test_a_refused_connection_is_tried_again_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    message = failure(scorer(f"http://127.0.0.1:{port}"), RewardUnreachable)
    assert f"http://127.0.0.1:{port}/score: ConnectError" in message and "(3 tries)" in message


def test_waits_double(serve: Serve) -> None:
    """0.1, 0.2 and 0.4 seconds, each give or take a quarter; equal waits would make 0.375 at the most."""
    server = serve(lambda body, number: (500, {}, ""))
    started = time.monotonic()
    failure(scorer(server.url, attempts=4, backoff_seconds=0.1), RewardUnreachable)
    assert time.monotonic() - started >= 0.7 * 0.75


def test_time_limit_is_for_all_tries(serve: Serve) -> None:
    def hanging(body: dict[str, Any], number: int) -> Reply:
        server.released.wait(10)
        return lengths(body, number)

    server = serve(hanging)
    message = failure(scorer(server.url, timeout=0.3), RewardTimeout)
    assert message == f"{server.url}/score: no response within reward.timeout_seconds=0.3"
    busy = serve(lambda body, number: (503, {"Retry-After": "30"}, ""))
    failure(scorer(busy.url, timeout=0.3), RewardTimeout)


def test_waiting_for_ones_turn_is_not_timed(serve: Serve) -> None:
    def slow(body: dict[str, Any], number: int) -> Reply:
        time.sleep(0.2)
        return lengths(body, number)

    server = serve(slow)
    assert results(scorer(server.url, batch=1, concurrency=1, timeout=3.0), ["a"] * 20) == [1.0] * 20


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ((404, {}, "no such page"), "status 404: no such page"),
        ((307, {"Location": "http://elsewhere/"}, ""), "status 307"),
        ((200, {}, "<html>"), "no JSON came back: <html>"),
        ((200, {}, [1.0]), "with 1 of them expected, got [1.0]"),
        ((200, {}, {"scores": [1.0]}), "with 1 of them expected, got {'scores': [1.0]}"),
        ((200, {}, {"rewards": [1.0, 2.0]}), "with 1 of them expected, got {'rewards': [1.0, 2.0]}"),
        ((200, {}, '{"rewards": [NaN]}'), "a reward must be a finite number, got nan"),
        ((200, {}, '{"rewards": [1e999]}'), "a reward must be a finite number, got inf"),
        ((200, {}, {"rewards": [10**400]}), "a reward must be a finite number, got 1000"),
        ((200, {}, {"rewards": ["1"]}), "a reward must be a finite number, got '1'"),
        ((200, {}, {"rewards": [{"error": "it hurts"}]}), "it hurts"),
    ],
)
def test_what_cannot_be_a_reward_is_a_failure_at_once(serve: Serve, reply: Reply, said: str) -> None:
    server = serve(lambda body, number: reply)
    message = failure(scorer(server.url), RewardFailure)
    assert message.startswith(f"{server.url}/score: ") and said in message
    assert len(message) < 700
    assert len(server.asked) == 1


def test_an_error_of_one_call_is_not_that_of_its_neighbours(serve: Serve) -> None:
    server = serve(lambda body, number: (200, {}, {"rewards": [0.5, {"error": "too rude"}, True]}))
    first, second, third = results(scorer(server.url), ["a", "b", "c"])
    assert (first, third) == (0.5, 1.0)
    assert isinstance(second, RewardFailure) and str(second).endswith("too rude")


def test_token_is_sent_and_never_shown(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="httpx")
    monkeypatch.setenv("SCORER_TOKEN", f"{SECRET}\n")  # as `export T=$(cat file)` may leave it in other shells
    echo = f"you sent Bearer {SECRET}"
    replies: list[Reply] = [(status, {}, echo) for status in (403, 500, 200)]
    for reply in [*replies, (200, {}, {"rewards": [{"error": echo}]}), (200, {}, {"rewards": [echo]})]:
        server = serve(lambda body, number, reply=reply: reply)
        [found] = results(scorer(server.url, token_variable="SCORER_TOKEN"), ["a"])
        assert set(server.tokens) == {f"Bearer {SECRET}"}
        assert isinstance(found, RewardFailure) and "you sent Bearer ***" in str(found)
        assert SECRET not in str(found)
    assert SECRET not in caplog.text


@pytest.mark.parametrize("query", [f"key={SECRET}%2F&v=1", f"?key={SECRET}%2F&v=1\n"])
def test_the_query_is_sent_and_never_shown(
    serve: Serve, query: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setenv("SCORER_QUERY", query)
    echo = f"1 bad /score?key={SECRET}%2F&v=1, {SECRET}%2F, {SECRET}/"
    server = serve(lambda body, number: (403, {}, echo))
    told = failure(scorer(server.url, query_variable="SCORER_QUERY"), RewardFailure)
    assert told == f"{server.url}/score: status 403: 1 bad /score?***, ***, ***"
    assert server.asked[0]["path"] == f"/score?key={SECRET}%2F&v=1"
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "address",
    [
        *("http://me:{}@host/", "http://me:{}@host:port/", "https://{}@host"),
        *("http://host/score?key={}", "http://host?{}", "HTTP://host/#{}"),
    ],
)
@pytest.mark.parametrize("tree", ["function", "judge.url", "parts.a.function"])
def test_an_address_with_a_secret_is_in_no_configuration(address: str, tree: str) -> None:
    with pytest.raises(ConfigError, match=r"remote\.token_variable.* or remote\.query_variable") as refused:
        RewardConfig.load([], [f"{tree}={address.format(SECRET)}"])
    assert str(refused.value).startswith(f"{tree}: ")
    assert SECRET not in str(refused.value)


def test_checks_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    part = RewardPartConfig(function="http://127.0.0.1/score", remote=RemoteConfig(token_variable="NO_SUCH_TOKEN"))
    with pytest.raises(ConfigError, match="NO_SUCH_TOKEN: export it before the start"):
        check_scorer(part)
    monkeypatch.setenv("NO_SUCH_TOKEN", "sécret")
    with pytest.raises(ConfigError, match="no HTTP header can hold") as refused:
        check_scorer(part)
    assert "sécret" not in str(refused.value)
    monkeypatch.setenv("NO_SUCH_TOKEN", SECRET)
    check_scorer(part)
    for address in ("http://", "127.0.0.1:80", "ftp://host/", "http://host:port"):
        with pytest.raises(ConfigError, match="not an address"):
            check_scorer(RewardPartConfig(function=address))
    missing = RewardPartConfig(function="http://127.0.0.1/score", remote=RemoteConfig(query_variable="NO_SUCH_QUERY"))
    with pytest.raises(ConfigError, match=r"remote\.query_variable=NO_SUCH_QUERY: .* export it before the start"):
        check_scorer(missing)


def test_stopping_answers_those_who_wait(serve: Serve) -> None:
    def hanging(body: dict[str, Any], number: int) -> Reply:
        server.released.wait(10)
        return lengths(body, number)

    server = serve(hanging)

    async def stop_early() -> list[Any]:
        reward = scorer(server.url, batch=1, concurrency=1)
        waiting = [asyncio.create_task(reward.score({"reply": "a"})) for _ in range(2)]
        await asyncio.sleep(0.1)
        await reward.stop()
        late = await asyncio.gather(reward.score({"reply": "a"}), return_exceptions=True)
        return [*await asyncio.gather(*waiting, return_exceptions=True), *late]

    found = asyncio.run(stop_early())
    assert [type(one) for one in found] == [RewardUnreachable] * 3


def test_a_caller_that_gives_up_leaves_the_others_alone(serve: Serve) -> None:
    server = serve(lengths)

    async def give_up() -> float:
        reward = scorer(server.url)
        leaves, stays = (asyncio.create_task(reward.score({"reply": reply})) for reply in ("a", "aaa"))
        await asyncio.sleep(0)
        leaves.cancel()
        return await stays

    assert asyncio.run(give_up()) == 3.0


# Judges


def judge(url: str, address: RemoteConfig | None = None, **settings: Any) -> JudgeReward:
    config = JudgeConfig(url=f"{url}/v1/", model="wise", **settings)
    return JudgeReward(RewardPartConfig(function="judge", remote=address or remote(), judge=config), 20)


def test_a_judges_number_times_the_scale(serve: Serve) -> None:
    server = serve(said("Grade: 7.5 of 10"))
    assert results(judge(server.url), ["it {depends}"]) == [pytest.approx(0.75)]
    [asked] = server.asked
    assert (asked["path"], asked["model"], asked["temperature"]) == ("/v1/chat/completions", "wise", 0)
    [message] = asked["messages"]
    assert message["role"] == "user"
    assert "[Request]\np\n" in message["content"] and "[Reply]\nit {depends}\n" in message["content"]


def test_a_judge_that_refuses_a_temperature_is_asked_without(serve: Serve) -> None:
    def answer(body: dict[str, Any], number: int) -> Any:
        if "temperature" not in body:
            return said("5")(body, number)
        return 400, {}, {"error": {"message": "Unsupported value: 'temperature' does not support 0 with this model."}}

    server = serve(answer)
    assert results(judge(server.url, remote(concurrency=1)), ["a", "b", "c"]) == [0.5] * 3
    assert ["temperature" in asked for asked in server.asked] == [True, False, False, False]  # it is remembered


def test_a_judges_temperature_and_other_refusals(serve: Serve) -> None:
    server = serve(said("5"))
    assert [results(judge(server.url, temperature=one), ["a"]) for one in (None, 0.5)] == [[0.5]] * 2
    assert [asked.get("temperature") for asked in server.asked] == [None, 0.5]
    wrong = serve(lambda body, number: (400, {}, {"error": {"message": "no such model"}}))
    [failed] = results(judge(wrong.url), ["a"])
    assert isinstance(failed, RewardFailure) and "no such model" in str(failed) and len(wrong.asked) == 1


def test_a_judge_is_asked_with_its_query(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_QUERY", "version=1")
    server = serve(said("5"))
    assert results(judge(server.url, remote(query_variable="JUDGE_QUERY")), ["a"]) == [0.5]
    assert server.asked[0]["path"] == "/v1/chat/completions?version=1"


def test_a_judges_own_pattern(serve: Serve) -> None:
    server = serve(said("3 points are wrong, so <grade>-2</grade>"))
    assert results(judge(server.url, pattern="<grade>(.*?)</grade>", scale=1), ["a"]) == [-2.0]


@pytest.mark.parametrize("text", ["I would rather not say" + "." * 5000, "", None, ["7"]])
def test_no_number_is_a_failure(serve: Serve, text: Any) -> None:
    message = failure(judge(serve(said(text)).url), RewardFailure)
    assert "finds no number in: " in message and len(message) < 700


@pytest.mark.parametrize("pattern", ["(seven)", "7(x)?", "(1e999)"])
def test_what_is_found_must_be_a_finite_number(serve: Serve, pattern: str) -> None:
    server = serve(said("seven 7 1e999"))
    assert "finds no number in: seven 7" in failure(judge(server.url, pattern=pattern), RewardFailure)


def test_a_grade_is_finite_after_its_scale_too(serve: Serve) -> None:
    server = serve(said("1e308"))
    assert "finds no number in" in failure(judge(server.url, pattern="(.+)", scale=10.0), RewardFailure)


def test_judges_that_fail(serve: Serve) -> None:
    strange = serve(lambda body, number: (200, {}, {"choices": []}))
    assert "no chat completion came back: {'choices': []}" in failure(judge(strange.url), RewardFailure)
    busy = serve(lambda body, number: (503, {}, "loading"))
    assert "status 503: loading (3 tries)" in failure(judge(busy.url), RewardUnreachable)


def test_a_judge_is_asked_by_so_many_at_a_time(serve: Serve) -> None:
    def slow(body: dict[str, Any], number: int) -> Reply:
        time.sleep(0.05)
        return said("5")(body, number)

    server = serve(slow)
    assert results(judge(server.url, remote(concurrency=2)), ["a"] * 6) == [pytest.approx(0.5)] * 6
    assert len(server.asked) == 6 and server.busiest == 2


def test_only_named_fields_are_filled() -> None:
    call = {"reply": "{label} and {x}", "label": 4, "facts": {"a": [1, "é"]}}
    assert fill_prompt('{"grade": {reply}} {{label}} {label} {1} {} {facts}', call) == (
        '{"grade": {label} and {x}} {label} 4 {1} {} {"a": [1, "é"]}'
    )
    with pytest.raises(RewardFailure, match=r"no value for {label}"):
        fill_prompt("{label}", {"reply": "a", "label": None})


def judged(**settings: Any) -> RewardPartConfig:
    return RewardPartConfig(function="judge", judge={"url": "http://127.0.0.1:1/v1", "model": "wise", **settings})


def test_judges_are_checked_before_the_start() -> None:
    given = ["reply", "prompt", "messages"]
    check_judge(judged(), given)
    check_judge(judged(prompt="{reply} {level} {label} {{brackets}}"), [*given, "level", "label"])
    wrong: dict[str, dict[str, Any]] = {
        r"no value for {level}; there are messages, prompt, reply: .* write {{level}}": {"prompt": "{reply} {level}"},
        "no value for {label}": {"prompt": "{reply} {label}"},
        "does not show the reply": {"prompt": "{prompt} {{reply}}"},
        "judge.model is empty": {"model": ""},
        "judge.url=: not an address": {"url": ""},
        "not a regular expression": {"pattern": "("},
        "has no group": {"pattern": r"\d+"},
    }
    for message, settings in wrong.items():
        with pytest.raises(ConfigError, match=message):
            check_judge(judged(**settings), given)


# Before the start


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_a_server_that_is_not_there_is_refused_by_its_address() -> None:
    url = f"http://127.0.0.1:{closed_port()}/v1"
    with pytest.raises(
        ConfigError, match=rf"reward.function={url}: the server cannot be reached \(.*refused\): start it"
    ):
        check_scorer(RewardPartConfig(function=url), probe=True)
    with pytest.raises(ConfigError, match=rf"judge.url={url}: the server cannot be reached \(.*refused\): start it"):
        check_judge(judged(url=url), ["reply", "prompt"], probe=True)
    check_scorer(RewardPartConfig(function=url))
    check_judge(judged(url=url), ["reply", "prompt"])


def test_a_scorer_is_asked_for_no_rewards_with_its_token(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_TOKEN", SECRET)
    server = serve(lengths)
    part = RewardPartConfig(function=f"{server.url}/score", remote=remote(token_variable="SCORER_TOKEN"))
    check_scorer(part, probe=True)
    assert server.asked == [{"path": "/score", "calls": []}] and server.tokens == [f"Bearer {SECRET}"]
    for status, message in (
        (401, "does not accept what SCORER_TOKEN holds .status 401.*reward.remote.token_variable"),
        (404, "the server has no such path .status 404"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            refusing = serve(lambda body, number, status=status: (status, {}, "no"))  # type: ignore[misc]
            check_scorer(part.with_keys({"function": refusing.url}), probe=True)
        assert SECRET not in str(caught.value)
    busy = serve(lambda body, number: (503, {}, "loading"))  # it may well be up when it is needed
    check_scorer(part.with_keys({"function": busy.url}), probe=True)


def test_a_judge_that_lacks_its_model_is_refused(serve: Serve) -> None:
    models = {"data": [{"id": "wise"}, {"id": "wiser"}]}
    server = serve(lambda body, number: (200, {}, models))
    check_judge(judged(url=f"{server.url}/v1"), ["reply", "prompt"], probe=True)
    assert [one["path"] for one in server.asked] == ["/v1/models"]
    with pytest.raises(
        ConfigError, match=r"judge.model=wize: .* has no such model; it has wise, wiser: name one"
    ) as caught:
        check_judge(judged(url=f"{server.url}/v1", model="wize"), ["reply", "prompt"], probe=True)
    assert f"{server.url}/v1 has" in str(caught.value)
    for answer in ((404, {}, "no list"), (200, {}, {"object": "list"}), (200, {}, {"data": []}), (500, {}, "broken")):
        other = serve(lambda body, number, answer=answer: answer)  # type: ignore[misc]
        check_judge(judged(url=other.url, model="wize"), ["reply", "prompt"], probe=True)
    locked = serve(lambda body, number: (401, {}, "who?"))
    with pytest.raises(ConfigError, match=r"the server asks for a token \(status 401\): name the environment variable"):
        check_judge(judged(url=locked.url), ["reply", "prompt"], probe=True)


def test_a_server_that_takes_its_time_is_not_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(body: dict[str, Any], number: int) -> Reply:
        server.released.wait()
        return 200, {}, {}

    monkeypatch.setattr("trueline.rewards.remote.PROBE_SECONDS", 0.2)
    server = serve(waits)
    check_scorer(RewardPartConfig(function=server.url), probe=True)
    check_judge(judged(url=server.url), ["reply", "prompt"], probe=True)
    assert len(server.asked) == 2
