"""The policy as a function in another process: `await policy(messages)` asks it through its endpoint."""

from functools import cache
from typing import Any

import httpx

from trueline.data.messages import Message, Tool

UNLIMITED = httpx.Limits(max_connections=None, max_keepalive_connections=None)


@cache
def plain_http() -> httpx.Client:
    """Return the one client of this process: to make one takes longer than to ask."""
    return httpx.Client(timeout=None, trust_env=False, limits=UNLIMITED)


@cache
def async_http() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=None, trust_env=False, limits=UNLIMITED)


class OutOfTurns(Exception):
    """The episode may have no more replies; it need not be caught."""


def request_of(messages: list[Message] | str, tools: list[Tool]) -> dict[str, Any]:
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return {"model": "policy", "messages": said, **({"tools": tools} if tools else {})}


def message_of(response: httpx.Response) -> Message:
    found = response.json()
    if response.status_code != 200:
        raise OutOfTurns(found["error"]["message"])
    message: Message = found["choices"][0]["message"]
    return message


class AsyncRemotePolicy:
    """Asked with a list of messages or a text, it returns the text of its reply."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.headers = f"{url}/chat/completions", {"Authorization": f"Bearer {key}"}

    async def __call__(self, messages: list[Message] | str) -> str:
        return str((await self.message(messages))["content"] or "")

    async def message(self, messages: list[Message] | str, tools: list[Tool] | None = None) -> Message:
        """Return the whole message, with the tools that it calls."""
        asked = request_of(messages, tools or [])
        return message_of(await async_http().post(self.url, json=asked, headers=self.headers))


class RemotePolicy(AsyncRemotePolicy):
    """The same for functions that are not asynchronous."""

    def __call__(self, messages: list[Message] | str) -> str:  # type: ignore[override]
        return str(self.message(messages)["content"] or "")

    def message(self, messages: list[Message] | str, tools: list[Tool] | None = None) -> Message:  # type: ignore[override]
        asked = request_of(messages, tools or [])
        return message_of(plain_http().post(self.url, json=asked, headers=self.headers))
