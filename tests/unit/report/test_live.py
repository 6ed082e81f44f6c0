"""The page of a run that goes on: behind a token, to be read only, and made anew when its files change."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from tests.support.memory import memory_counted
from tests.support.run_folders import made_folder, make_run
from trueline.cli import main
from trueline.config.run import MonitoringConfig
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.trackers import Tracker
from trueline.report.live import HOST, LiveServer
from trueline.usercode.http_server import open_port

TOKEN = "a-token"


def served(folder: RunFolder, ask: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def scenario() -> None:
        server = LiveServer({"run": folder}, TOKEN)
        with open_port(HOST, 0) as listener:
            serving = asyncio.create_task(server.serve([listener]))
            async with httpx.AsyncClient(
                base_url=f"http://{HOST}:{listener.getsockname()[1]}", trust_env=False
            ) as client:
                await ask(client)
            server.end()
            await serving

    asyncio.run(scenario())


def test_memory_does_not_grow_with_the_texts_of_transcripts(tmp_path: Path) -> None:
    """As many are shown of 500 as of 2,500: what the others hold is read past, and only counted."""
    row = {"purpose": "train", "reward": 0.5, "reply": "y" * 7000, "tokens": [{"text": ["word"] * 60}]}
    peaks, sizes, shown = [], [], []
    for steps in (500, 2500):
        folder = RunFolder(tmp_path / str(steps))
        folder.path.mkdir()
        folder.metrics.write_text('{"step": 1}\n')
        folder.transcripts.write_text("".join(json.dumps({"step": step} | row) + "\n" for step in range(steps)))
        with memory_counted() as peak:
            shown.append(json.loads(LiveServer({"run": folder}, TOKEN).latest()[1])["runs"][0])
        peaks.append(peak())
        sizes.append(folder.transcripts.stat().st_size)
    assert [run["transcript_count"] for run in shown] == [500, 2500]
    assert [sum(run["histograms"]["train"]) for run in shown] == [500, 2500]
    assert [len(run["transcripts"]) for run in shown] == [300, 300] and all(run["tokens"] for run in shown)
    assert sizes[1] - sizes[0] > 10 * 2**20
    assert peaks[1] - peaks[0] < 0.15 * (sizes[1] - sizes[0])


def test_a_picture_is_shown_as_soon_as_a_transcript_names_it(tmp_path: Path) -> None:
    folder, name = made_folder(tmp_path / "run", "grpo", 2), f"pictures/{0:064x}.png"
    server, tracker = LiveServer({"run": folder}, TOKEN), Tracker(folder, MonitoringConfig(tensorboard=False))
    assert json.loads(server.latest()[1])["runs"][0]["pictures"] == {}
    tracker.show(1, [{"images": [name]}], {name: b"one"})
    assert json.loads(server.latest()[1])["runs"][0]["pictures"] == {name: "data:image/png;base64,b25l"}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "run", 5)


def test_only_those_who_know_the_token_are_answered(folder: RunFolder) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        near = (f"/{TOKEN}", f"/{TOKEN}x/", f"/{TOKEN}/config.yaml")
        for path in ("/", "/data", "/wrong/", "/wrong/data", "/%C3%A9/", *near):
            answer = await client.get(path)
            assert answer.status_code == 404 and "reward" not in answer.text
        for method in ("POST", "PUT", "DELETE"):
            assert (await client.request(method, f"/{TOKEN}/")).status_code == 404
        answer = await client.get(f"/{TOKEN}/")
        assert answer.status_code == 200 and "connect-src 'self'" in answer.text and "reward/mean" in answer.text
        assert answer.headers["cache-control"] == "no-store" and answer.headers["referrer-policy"] == "no-referrer"

    served(folder, ask)


def test_content_comes_again_only_when_it_has_changed(folder: RunFolder) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        content = (await client.get(f"/{TOKEN}/data")).json()
        known = f"/{TOKEN}/data?known={content['stamp']}"
        assert (await client.get(known)).status_code == 204
        with folder.metrics.open("a") as lines:
            lines.write('{"step": 6, "reward/mean": 0.75}\n{"step": 7, "rew')
        changed = (await client.get(known)).json()
        assert changed["stamp"] != content["stamp"]
        assert changed["runs"][0]["series"]["step"][-1] == 6 and changed["runs"][0]["facts"]["reward"] == "0.75"

    served(folder, ask)


def test_watch_prints_its_address_and_ends_with_ctrl_c(folder: RunFolder) -> None:
    command = [sys.executable, "-m", "trueline.cli", "watch", str(folder.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        assert lines[0] == "watching run; Ctrl-C ends it\n"
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{43}/\n", lines[1])
        assert httpx.get(lines[1].strip(), trust_env=False).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_a_port_that_is_taken_is_named(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with open_port(HOST, 0) as listener:
        port = listener.getsockname()[1]
        assert main(["watch", str(folder.path), "--port", str(port)]) == 2
    assert f"port={port}" in capsys.readouterr().err
