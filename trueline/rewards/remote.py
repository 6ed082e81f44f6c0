"""Rewards over HTTP: scorers and LLM judges."""

import asyncio
import difflib
import json
import logging
import math
import os
import random
import re
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from trueline.config.base import ConfigError
from trueline.config.reward import RemoteConfig, RewardPartConfig
from trueline.rewards.base import IMAGES, BatchedReward, Call, RewardFailure, RewardTimeout, RewardUnreachable, Score

CONNECT_SECONDS, PROBE_SECONDS = 10, 5  # to connect; for a response before the start
SHOWN_MODELS = 5  # in a message
LONGEST_WAIT = 60  # seconds that a server's Retry-After is followed
LONGEST_RESPONSE = 500  # characters in an error
SHORTEST_SECRET = 6  # characters of a value in a query; shorter ones, such as version=1, are in any text
THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
logging.getLogger("httpx").setLevel(logging.WARNING)  # below, it logs addresses with their query
FIELD = re.compile(r"\{\{(\w+)\}\}|\{([^\W\d]\w*)\}")  # {{name}} stands for the text {name}


def check_scorer(part: RewardPartConfig, *, probe: bool = False) -> None:
    """Refuse an address or a token that cannot be used; a probe sends a request without calls."""
    check_address(part.function, "function")
    secrets_of(part.remote)
    if probe:
        response = first_response("POST", part.function, part.remote, "reward.function", {"calls": []})
        if response is not None and response.status_code == 404:
            raise ConfigError(f"reward.function={part.function}: the server has no such path (status 404): correct it")


def check_judge(part: RewardPartConfig, available: Collection[str], *, probe: bool = False) -> None:
    """Refuse a wrong address, model or pattern, and a prompt with values that no row has; a probe lists the models."""
    judge = part.judge
    check_judge_server(part)
    try:
        groups = re.compile(judge.pattern).groups
    except re.error as error:
        raise ConfigError(f"judge.pattern={judge.pattern}: not a regular expression: {error}") from None
    if groups == 0:
        raise ConfigError(f"judge.pattern={judge.pattern} has no group: put brackets around the number")
    check_prompt("judge.prompt", judge.prompt, available)
    if probe:
        check_judge_model(part)


def check_judge_server(part: RewardPartConfig) -> None:
    """Refuse a judge without an address, a model or the secrets that its keys name."""
    check_address(part.judge.url, "judge.url")
    if not part.judge.model:
        raise ConfigError("judge.model is empty: name the model of the LLM judge")
    secrets_of(part.remote)


def check_prompt(key: str, prompt: str, available: Collection[str], shown: Collection[str] = ("reply",)) -> None:
    """Refuse a judge's prompt with values that no row has, or without one of those that it has to show."""
    named = {match[2] for match in FIELD.finditer(prompt)} - {None}
    if missing := sorted(named.difference(available)):
        raise ConfigError(
            f"{key}: no value for {{{missing[0]}}}; there are {', '.join(sorted(available))}: name a column, "
            f"set data.label_column, or write {{{{{missing[0]}}}}} for the text itself"
        )
    for name in shown:
        if name not in named:
            raise ConfigError(f"{key} does not show the {name}: put {{{name}}} into it")


def check_judge_model(part: RewardPartConfig) -> None:
    judge, listed = part.judge, []
    response = first_response("GET", f"{judge.url.rstrip('/')}/models", part.remote, "judge.url")
    with suppress(ValueError, KeyError, TypeError):  # not every server has such a list
        listed = [str(one["id"]) for one in response.json()["data"]] if response is not None else []
    if listed and judge.model not in listed:
        near = difflib.get_close_matches(judge.model, listed, SHOWN_MODELS, cutoff=0) or listed[:SHOWN_MODELS]
        shown = ", ".join(near) + " and others" * (len(listed) > len(near))
        raise ConfigError(
            f"judge.model={judge.model}: {judge.url} has no such model; it has {shown}: name one of them "
            "(reward.probe=false starts all the same)"
        )


def first_response(method: str, url: str, remote: RemoteConfig, key: str, body: Any = None) -> httpx.Response | None:
    """Send one request, and refuse a server that cannot be reached or wants another token; None: it is too slow."""
    named, (token, query) = f"{key}={url.removesuffix('/models')}", secrets_of(remote)
    address = httpx.URL(url).copy_with(query=query.encode()) if query else httpx.URL(url)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with httpx.Client(headers=headers, timeout=PROBE_SECONDS, trust_env=address.host not in THIS_MACHINE) as client:
            response = client.request(method, address, json=body)
    except (httpx.ReadTimeout, httpx.WriteTimeout):
        return None
    except httpx.RequestError as error:
        why, remedy = str(error) or type(error).__name__, "start it, or correct its address"
        message = f"{named}: the server cannot be reached ({why}): {remedy} (reward.probe=false starts all the same)"
        raise ConfigError(message) from None
    if response.status_code in (401, 403):
        sent = f"does not accept what {remote.token_variable} holds" if token else "asks for a token"
        remedy = "name the environment variable that holds it in reward.remote.token_variable"
        raise ConfigError(f"{named}: the server {sent} (status {response.status_code}): {remedy}")
    return response


def check_address(url: str, key: str) -> None:
    with suppress(httpx.InvalidURL):
        if httpx.URL(url).scheme in ("http", "https") and httpx.URL(url).host:
            return
    raise ConfigError(f"{key}={url}: not an address; write it as http://host:port/path")


def secrets_of(remote: RemoteConfig) -> list[str]:
    """Return token and query from the environment, empty where none is configured."""
    secrets = []
    for key, name in {"token_variable": remote.token_variable, "query_variable": remote.query_variable}.items():
        secret = "" if name is None else os.environ.get(name, "").strip()
        if name is not None and not secret:
            raise ConfigError(f"remote.{key}={name}: the environment has no {name}: export it before the start")
        if not secret.isascii() or (secret and not secret.isprintable()):
            raise ConfigError(f"remote.{key}={name}: its value has characters that no HTTP header can hold")
        secrets.append(secret.removeprefix("?") if key == "query_variable" else secret)
    return secrets


class Refusal(RewardFailure):
    """The server calls a request wrong."""


class RemoteAddress:
    """One address, with retries while it is busy or broken. Messages never show its token and query."""

    def __init__(self, url: str, remote: RemoteConfig, timeout_seconds: float) -> None:
        token, query = secrets_of(remote)
        self.url, self.remote, self.timeout_seconds = httpx.URL(url), remote, timeout_seconds
        if query:
            self.url = self.url.copy_with(query=query.encode())
        port = f":{self.url.port}" if self.url.port else ""
        self.name = f"{self.url.scheme}://{self.url.host}{port}{self.url.path}"  # without what may be secret in it
        values = (*self.url.params.values(), *re.findall(r"=([^&]+)", query))  # as they are meant, and as they are sent
        self.secrets = [token, query, *(value for value in values if len(value) >= SHORTEST_SECRET)]
        self.client = httpx.AsyncClient(
            headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {}),
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=remote.concurrency),
            trust_env=self.url.host not in THIS_MACHINE,  # a machine reaches itself without a proxy
        )

    async def post(self, body: Any) -> Any:
        """Post a body, and return the JSON of the response; the time limit is for all attempts together."""
        async with self.deadline():
            response = await self._try(json.dumps(body, default=str).encode())
        if not response.is_success:
            failure = self.failure(f"status {response.status_code}: {response.text}")
            raise Refusal(str(failure)) if response.status_code in (400, 422) else failure
        try:
            return response.json()
        except ValueError:
            raise self.failure(f"no JSON came back: {response.text}") from None

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.timeout_seconds):
                yield
        except TimeoutError:
            message = f"{self.name}: no response within reward.timeout_seconds={self.timeout_seconds:g}"
            raise RewardTimeout(message) from None

    async def _try(self, content: bytes) -> httpx.Response:
        problem = ""
        for tried in range(self.remote.attempts):
            try:
                response = await self.client.post(self.url, content=content)
            except httpx.RequestError as error:
                problem, wait = f"{type(error).__name__} {self._redact(str(error))}".strip(), None
            else:
                if response.status_code != 429 and response.status_code < 500:
                    return response
                problem, wait = f"status {response.status_code}: {self._redact(response.text)}", retry_after(response)
            if tried + 1 < self.remote.attempts:
                backoff = self.remote.backoff_seconds * 2**tried * random.uniform(0.75, 1.25)
                await asyncio.sleep(backoff if wait is None else wait)
        raise RewardUnreachable(f"{self.name}: {problem} ({self.remote.attempts} tries)")

    def failure(self, message: str) -> RewardFailure:
        return RewardFailure(f"{self.name}: {self._redact(message)}")

    def _redact(self, text: str) -> str:
        """Return a text without secrets, which a server may repeat, and not too long."""
        for secret in filter(None, self.secrets):
            text = text.replace(secret, "***")
        return text if len(text) <= LONGEST_RESPONSE else text[:LONGEST_RESPONSE] + "..."


def retry_after(response: httpx.Response) -> float | None:
    """Return the seconds of Retry-After, a number or a date."""
    text = response.headers.get("Retry-After", "")
    try:
        seconds = float(text) if text.isdigit() else (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):  # none, not a date, or one without a time zone
        return None
    return min(max(seconds, 0.0), LONGEST_WAIT)


class ScorerReward(BatchedReward):
    """A server that takes {"calls": [...]} and returns {"rewards": [number or {"error": "..."}, ...]}."""

    def __init__(self, url: str, part: RewardPartConfig, timeout_seconds: float, *, batch: int) -> None:
        self.address = RemoteAddress(url, part.remote, timeout_seconds)
        super().__init__(self._score_batch, batch, part.remote.concurrency, self.address.client.aclose)

    async def _score_batch(self, calls: list[Call]) -> list[Score]:
        response = await self.address.post({"calls": calls})
        rewards = response.get("rewards") if isinstance(response, dict) else None
        if not isinstance(rewards, list) or len(rewards) != len(calls):
            raise self.address.failure(f'{{"rewards": [...]}} with {len(calls)} of them expected, got {response!r}')
        return [self._reward(reward) for reward in rewards]

    def _reward(self, reward: Any) -> Score:
        if isinstance(reward, dict) and "error" in reward:
            return self.address.failure(str(reward["error"]))
        if isinstance(reward, bool | int | float) and abs(reward) <= sys.float_info.max:  # not so for NaN
            return float(reward)
        return self.address.failure(f"a reward must be a finite number, got {reward!r}")


class Judge:
    """An LLM behind an OpenAI-compatible address, to which prompts go."""

    def __init__(self, part: RewardPartConfig, timeout_seconds: float) -> None:
        self.model = part.judge.model
        self.temperature = part.judge.temperature  # None: not sent
        self.address = RemoteAddress(f"{part.judge.url.rstrip('/')}/chat/completions", part.remote, timeout_seconds)

    async def answer(self, prompt: str, call: Call) -> str | None:
        """Return the text of the judge's completion, if it has one; the pictures of the call go along."""
        sent = self.temperature
        seen = [{"type": "image_url", "image_url": {"url": url}} for url in call.get(IMAGES, [])]
        shown = [*seen, {"type": "text", "text": prompt}] if seen else prompt
        body = {"model": self.model, "messages": [{"role": "user", "content": shown}]}
        try:
            response = await self.address.post(body if sent is None else body | {"temperature": sent})
        except Refusal as refusal:  # servers of reasoning models refuse a temperature
            if sent is None or "temperature" not in str(refusal):
                raise
            self.temperature = None
            response = await self.address.post(body)
        try:
            text = response["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise self.address.failure(f"no chat completion came back: {response!r}") from None
        return text if isinstance(text, str) else None


class JudgeReward(BatchedReward):
    """An LLM judge; the number in its completion is the reward."""

    def __init__(self, part: RewardPartConfig, timeout_seconds: float) -> None:
        self.keys, self.judge = part.judge, Judge(part, timeout_seconds)
        super().__init__(self._score_batch, 1, part.remote.concurrency, self.judge.address.client.aclose)

    async def _score_batch(self, calls: list[Call]) -> list[Score]:
        (call,) = calls
        text = await self.judge.answer(fill_prompt(self.keys.prompt, call), call)
        match, number = re.search(self.keys.pattern, text or ""), math.nan
        with suppress(ValueError, TypeError):  # the group matched other text, or nothing
            number = float(match[1]) * self.keys.scale if match else math.nan
        if not math.isfinite(number):
            raise self.judge.address.failure(f"judge.pattern={self.keys.pattern} finds no number in: {text}")
        return [number]


def fill_prompt(prompt: str, call: Call, key: str = "judge.prompt") -> str:
    """Fill in each {name} of a prompt once; braces in values, and other braces, stay as they are."""

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return f"{{{match[1]}}}"
        if (found := call.get(match[2])) is None:
            raise RewardFailure(f"{key}: this row has no value for {{{match[2]}}}")
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)

    return FIELD.sub(value, prompt)
