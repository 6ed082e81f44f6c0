"""A reward model behind HTTP: the same numbers as without, and nothing for those who should not have them."""

import asyncio
import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from torch import Tensor

from tests.support.reward_models import CONTEXT, local_group, make_reward_model
from tests.support.tool_calls import TOOL_TALK, TOOLS
from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig
from trueline.config.reward import RemoteConfig, RewardPartConfig
from trueline.config.sampling import ServingConfig
from trueline.data.chat import ChatFormat
from trueline.data.types import Sample
from trueline.models.loading import load_tokenizer
from trueline.rewards.base import Call, Reward, RewardFailure, RewardUnreachable
from trueline.rewards.model import ModelReward
from trueline.rewards.remote import ScorerReward
from trueline.rewards.server import RewardServer
from trueline.training.group import ModelGroup
from trueline.usercode.http_server import MAX_BYTES, SETTINGS, open_port

TOKEN = "a-token-for-tests"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
PATIENCE = 600  # seconds, on a busy machine too
CALL = {"reply": "5", "prompt": "2+3=", "messages": [{"role": "user", "content": "2+3="}], "label": "5"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("model"), "reward")


@pytest.fixture(scope="module")
def group(folder: Path) -> ModelGroup:
    return local_group(folder, "reward")


def model_reward(folder: Path, score: Callable[[list[Sample]], list[Tensor]]) -> ModelReward:
    chat = ChatFormat(load_tokenizer(ModelConfig(path=str(folder))), use_template=True)
    return ModelReward(score, chat, RewardPartConfig(function=str(folder)), max_tokens=CONTEXT, batch=64)


class ModelGone(RuntimeError):
    """Stands for the failure of the model's process."""


@contextmanager
def served(make: Callable[[], Reward]) -> Iterator[str]:
    """The address of a server in a thread with an event loop of its own, which is stopped afterwards."""
    listener = open_port("127.0.0.1", 0)
    servers: list[RewardServer] = []
    ready = threading.Event()

    async def main() -> None:
        servers.append(RewardServer(make(), token=TOKEN, name="my model", fatal=ModelGone))
        ready.set()
        await servers[0].answer(listener)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        servers[0].end()
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def url(folder: Path, group: ModelGroup) -> Iterator[str]:
    with served(lambda: model_reward(folder, group.score)) as address:
        yield address


def post(url: str, content: Any, **headers: str) -> httpx.Response:
    body = content if isinstance(content, str | bytes) else json.dumps(content)
    return httpx.post(f"{url}/score", content=body, headers=AUTHORIZED | headers, trust_env=False, timeout=20)


def scored(reward: Reward, calls: list[Call]) -> list[Any]:
    async def ask() -> list[Any]:
        found = await asyncio.gather(*(reward.score(call) for call in calls), return_exceptions=True)
        await reward.stop()
        return list(found)

    return asyncio.run(ask())


def scorer(url: str, monkeypatch: pytest.MonkeyPatch, token: str = TOKEN, batch: int = 64) -> ScorerReward:
    monkeypatch.setenv("TEST_REWARD_TOKEN", token)
    remote = RemoteConfig(token_variable="TEST_REWARD_TOKEN", attempts=2, backoff_seconds=0.01)
    return ScorerReward(f"{url}/score", RewardPartConfig(remote=remote), 20, batch=batch)


def test_health_needs_no_token(url: str) -> None:
    found = httpx.get(f"{url}/health", trust_env=False)
    assert (found.status_code, found.json()) == (200, {"status": "ok", "model": "my model"})
    assert httpx.get(f"{url}/score", trust_env=False).status_code == 404


def test_same_rewards_over_the_wire(url: str, folder: Path, group: ModelGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [CALL | {"reply": "5" * length, "column": [length]} for length in range(9)]
    here = scored(model_reward(folder, group.score), calls)
    assert all(isinstance(reward, float) for reward in here) and len(set(here)) == len(here)
    assert scored(scorer(url, monkeypatch), calls) == pytest.approx(here, abs=1e-6)
    assert scored(scorer(url, monkeypatch, batch=1), calls) == pytest.approx(here, abs=1e-6)


def test_requests_of_several_clients_share_a_batch(folder: Path, group: ModelGroup) -> None:
    sizes: list[int] = []
    first, second = threading.Event(), threading.Event()

    def score(samples: list[Sample]) -> list[Tensor]:
        sizes.append(len(samples))
        first.set()
        assert second.wait(PATIENCE)
        return group.score(samples)

    found: list[Any] = []
    made: list[ModelReward] = []

    def make() -> ModelReward:
        made.append(model_reward(folder, score))
        return made[0]

    with served(make) as address:
        clients = [threading.Thread(target=lambda: found.append(post(address, {"calls": [CALL] * 2}).json()))]
        clients[0].start()
        assert first.wait(PATIENCE)  # the model is busy with the first request while three more arrive
        for _ in range(3):
            clients.append(threading.Thread(target=lambda: found.append(post(address, {"calls": [CALL]}).json())))
            clients[-1].start()
        with httpx.Client(trust_env=False) as client:
            assert client.get(f"{address}/health").status_code == 200  # it still answers others
        while len(made[0].open) < 3:
            time.sleep(0.01)
        second.set()
        for client_thread in clients:
            client_thread.join(PATIENCE)
    assert sizes == [2, 3]
    assert sorted(len(one["rewards"]) for one in found) == [1, 1, 1, 2]


def test_no_rewards_without_the_token(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for sent in ({}, {"Authorization": TOKEN}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": "Bearer é"}):
        headers = {name: value.encode() for name, value in sent.items()}
        refused = httpx.post(f"{url}/score", json={"calls": [CALL]}, headers=headers, trust_env=False)
        assert refused.status_code == 401
        assert TOKEN not in refused.text
    for headers in ({}, {"Connection": "close"}):
        large = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
        large.request("POST", "/score", body=b" " * (MAX_BYTES // 2), headers=headers)
        assert large.getresponse().status == 401  # the connection stays whole meanwhile
        large.close()
    [failed] = scored(scorer(url, monkeypatch, token="another-token"), [CALL])
    assert isinstance(failed, RewardFailure) and "status 401" in str(failed) and "another-token" not in str(failed)


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        ("{", 400, "not valid JSON"),
        (b"\xff", 400, "not valid JSON"),
        ("[" * 100_000, 400, "not valid JSON"),
        ([CALL], 400, '{"calls": [...]}'),
        ({"calls": CALL}, 400, '{"calls": [...]}'),
        (b" " * (MAX_BYTES + 1), 413, f"more than {MAX_BYTES}"),
    ],
)
def test_bad_requests_are_refused(url: str, content: Any, status: int, said: str) -> None:
    refused = post(url, content)
    assert refused.status_code == status
    assert said in refused.json()["error"]


def test_requests_in_chunks_are_read_within_the_bound(url: str) -> None:
    body = json.dumps({"calls": [CALL]}).encode()
    for pieces, status in (([body[:9], body[9:]], 200), ([b" " * 2**20] * (MAX_BYTES // 2**20 + 1), 413)):
        answer = httpx.post(f"{url}/score", content=iter(pieces), headers=AUTHORIZED, trust_env=False)
        assert answer.status_code == status
    assert "more than" in answer.json()["error"]
    assert httpx.post(f"{url}/score", content=iter([body]), trust_env=False).status_code == 401


def test_requests_of_two_lengths_and_to_no_known_path(url: str) -> None:
    both = HALF.replace(b"\r\n\r\nabc", b"\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
    with beginning(url, both) as connection:  # chunks count then
        assert connection.recv(100).startswith(b"HTTP/1.1 4")
    for path in ("/other", "/score/", "/health"):
        unknown = httpx.post(f"{url}{path}", json={}, headers=AUTHORIZED, trust_env=False)
        assert unknown.status_code == 404
        assert unknown.json()["error"] == f"{path}: there are POST /score and GET /health"


@pytest.mark.parametrize(("length", "status"), [("9" * 13, 413), ("9" * 5000, 400)])
def test_a_length_beyond_all_bounds_is_refused(
    url: str, length: str, status: int, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    connection.request("POST", "/score", headers=AUTHORIZED | {"Content-Length": length})
    assert connection.getresponse().status == status
    connection.close()
    assert not said(caplog) and not capfd.readouterr().err


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("uvicorn")]


def test_errors_of_single_calls_stand_in_their_place(url: str) -> None:
    calls: list[Any] = [
        CALL,
        CALL | {"reply": "5" * CONTEXT},
        {"messages": CALL["messages"]},
        CALL | {"messages": []},
        CALL | {"messages": [{"role": "user", "content": None}]},
        CALL | {"messages": [{"role": "assistant", "tool_calls": [{"name": 3}]}]},
        CALL | {"tools": "hammer"},
        "5",
        CALL | {"reply": "half \ud800"},
        CALL | {"messages": [{"role": "user", "content": "\udfff"}]},
        CALL,
    ]
    answer = post(url, {"calls": calls})
    assert answer.status_code == 200
    good, long, no_reply, no_messages, no_content, no_name, no_tools, text, *halves, again = answer.json()["rewards"]
    assert good == again and isinstance(good, float)
    assert f"its limit of {CONTEXT}" in long["error"]
    assert '"reply"' in no_reply["error"] and '"reply"' in text["error"]
    assert ["no valid text" in half["error"] for half in halves] == [True] * 2
    assert '"messages"' in no_messages["error"] and '"messages"' in no_content["error"]
    assert "expected a function name" in no_name["error"] and "'tools'" in no_tools["error"]
    assert post(url, {"calls": []}).json() == {"rewards": []}


def beginning(url: str, sent: bytes) -> socket.socket:
    """A connection on which the first bytes of a request are sent."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(sent)
    return connection


HALF = f"POST /score HTTP/1.1\r\nHost: me\r\nContent-Length: 100\r\nAuthorization: Bearer {TOKEN}\r\n\r\nabc".encode()


def test_a_client_that_goes_away_harms_nobody(
    url: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for sent in (b"", HALF, b"nonsense\r\n\r\n"):
        beginning(url, sent).close()
    assert post(url, {"calls": [CALL]}).status_code == 200
    assert not said(caplog) and not capfd.readouterr().err


def test_a_client_that_falls_silent_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trueline.usercode.http_server.IDLE_SECONDS", 0.2)
    with beginning(url, HALF) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_stopping_waits_for_no_silent_client(folder: Path, group: ModelGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "timeout_graceful_shutdown", 0.2)
    with served(lambda: model_reward(folder, group.score)) as address:
        half, silent = beginning(address, HALF), beginning(address, b"")
        assert post(address, {"calls": [CALL]}).status_code == 200  # and so the two were heard before
    with half, silent:
        assert half.recv(100).startswith(b"HTTP/1.1 503")
        assert silent.recv(100) == b""


def test_several_requests_go_over_one_connection(url: str) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    for _ in range(2):
        connection.request("POST", "/score", body=json.dumps({"calls": [CALL]}), headers=AUTHORIZED)
        answer = connection.getresponse()
        assert len(json.loads(answer.read())["rewards"]) == 1 and not answer.will_close
    connection.close()


def test_a_broken_model_is_no_ones_reward(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def score(samples: list[Sample]) -> list[Tensor]:
        raise RuntimeError("out of memory")

    with served(lambda: model_reward(folder, score)) as address:
        assert post(address, {"calls": [CALL]}).status_code == 500
        [failed] = scored(scorer(address, monkeypatch), [CALL])
    assert isinstance(failed, RewardUnreachable) and "out of memory" in str(failed) and "(2 tries)" in str(failed)


def test_a_model_that_is_gone_ends_the_server(folder: Path) -> None:
    def score(samples: list[Sample]) -> list[Tensor]:
        raise ModelGone("rank 0 died")

    async def main() -> httpx.Response:
        with open_port("127.0.0.1", 0) as listener:
            server = RewardServer(model_reward(folder, score), token=TOKEN, name="my model", fatal=ModelGone)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            client = asyncio.create_task(asyncio.to_thread(post, url, {"calls": [CALL]}))
            with pytest.raises(ModelGone, match="rank 0 died"):
                await server.answer(listener)
            return await client

    answer = asyncio.run(main())
    assert answer.status_code == 500 and answer.json() == {"error": "ModelGone: rank 0 died"}


def test_signals_and_logs_are_left_alone(folder: Path, group: ModelGroup, caplog: pytest.LogCaptureFixture) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)

    async def main() -> list[Any]:
        with open_port("127.0.0.1", 0) as listener:
            server = RewardServer(model_reward(folder, group.score), token=TOKEN, name="my model", fatal=ModelGone)
            serving = asyncio.create_task(server.answer(listener))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            before = [signal.getsignal(number) for number in numbers]
            assert (await asyncio.to_thread(post, url, {"calls": [CALL]})).status_code == 200
            during = [signal.getsignal(number) for number in numbers]
            server.end()
            await serving
            return [before == during]

    with caplog.at_level("DEBUG"):
        assert asyncio.run(main()) == [True]
    assert not said(caplog)


def test_stopping_tells_those_who_wait_to_try_again(folder: Path, group: ModelGroup) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def score(samples: list[Sample]) -> list[Tensor]:
        begun.set()
        assert go_on.wait(10)
        return group.score(samples)

    found: list[httpx.Response] = []
    with served(lambda: model_reward(folder, score)) as address:
        client = threading.Thread(target=lambda: found.append(post(address, {"calls": [CALL]})))
        client.start()
        assert begun.wait(10)
        threading.Timer(0.5, go_on.set).start()
    client.join(10)
    assert found[0].status_code == 503
    with pytest.raises(httpx.ConnectError):
        post(address, {"calls": [CALL]})


def test_a_taken_port_is_named() -> None:
    with open_port("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"port={port}: cannot listen there .*in use\): choose .*a port that is free"
        ):
            open_port("127.0.0.1", port)


def test_configuration() -> None:
    assert ServingConfig().ranks.engine == "torch"
    assert ServingConfig.parse({"runtime": "ray"}).ranks.engine == "deepspeed"
    with pytest.raises(ConfigError, match=r"ranks\.ranks=3 is not a multiple of its tensor_parallel=2"):
        ServingConfig.parse({"runtime": "ray", "ranks": {"ranks": 3, "tensor_parallel": 2}})


def test_calls_and_tools_reach_the_reward() -> None:
    class Recorder:
        calls: ClassVar[list[Call]] = []

        async def score(self, call: Call) -> float:
            self.calls.append(call)
            return 1.0

        async def stop(self) -> None: ...

    with served(Recorder) as address:
        written = {"role": "assistant", "tool_calls": json.dumps(TOOL_TALK[1]["tool_calls"])}
        sent = CALL | {"messages": [TOOL_TALK[0], written, TOOL_TALK[2]], "tools": json.dumps(TOOLS)}
        assert post(address, {"calls": [sent]}).json() == {"rewards": [1.0]}
    assert Recorder.calls == [CALL | {"messages": TOOL_TALK[:3], "tools": TOOLS}]
