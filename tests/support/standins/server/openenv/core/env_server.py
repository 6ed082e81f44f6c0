"""OpenEnv's server as far as its protocol goes: GET /schema, and a session over the WebSocket /ws."""

import inspect
import json
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect


class Action(BaseModel):
    model_config = ConfigDict(extra="forbid")
    metadata: dict[str, Any] = {}


class Observation(Action):
    done: bool = False
    reward: bool | int | float | None = None


class State(BaseModel):
    episode_id: str | None = None
    step_count: int = 0


class Environment:
    SUPPORTS_CONCURRENT_SESSIONS = False

    def close(self) -> None: ...


def create_app(
    env: Callable[[], Any], action_cls: type[Action], observation_cls: type[Observation], **options: Any
) -> Starlette:
    room, sessions = options.get("max_concurrent_envs", 1), 0

    async def schema(request: Request) -> Response:
        kinds = {"action": action_cls, "observation": observation_cls, "state": State}
        return JSONResponse({name: kind.model_json_schema() for name, kind in kinds.items()})

    def answer(world: Any, message: dict[str, Any]) -> dict[str, Any]:
        try:
            if message["type"] == "reset":
                known = inspect.signature(world.reset).parameters
                seen = world.reset(**{name: value for name, value in message["data"].items() if name in known})
            else:
                seen = world.step(action_cls.model_validate(message["data"]))
        except ValidationError as error:
            return failure("VALIDATION_ERROR", "Invalid message", errors=error.errors())
        except Exception as error:  # noqa: BLE001  (as the library does it)
            return failure("EXECUTION_ERROR", str(error))
        shown = seen.model_dump(exclude={"reward", "done"})
        return {"type": "observation", "data": {"observation": shown, "reward": seen.reward, "done": seen.done}}

    async def session(socket: WebSocket) -> None:
        nonlocal sessions
        await socket.accept()
        if sessions == room:
            await socket.send_text(json.dumps(failure("CAPACITY_REACHED", f"Server at capacity: {room}/{room}")))
            await socket.close()
            return
        world, sessions = env(), sessions + 1
        try:
            while (message := json.loads(await socket.receive_text()))["type"] != "close":
                await socket.send_text(json.dumps(answer(world, message), default=str))
            world.close()
            await socket.close()
        except WebSocketDisconnect:
            world.close()
        finally:
            sessions -= 1

    return Starlette(routes=[Route("/schema", schema), WebSocketRoute("/ws", session)])


def failure(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}
