"""A vLLM engine that writes down every completion it samples: what it was given, and what it said."""

import json
import os
from pathlib import Path

from trueline.data.pictures import Shown
from trueline.data.types import Completion
from trueline.rollout.engine import SamplingParams
from trueline.rollout.vllm_engine import VllmEngine

RECORD = "ENGINE_RECORD"  # environment variable with the file


class RecordingEngine(VllmEngine):
    async def generate(
        self, tokens: list[int], params: SamplingParams, request: str, shown: Shown | None = None
    ) -> Completion:
        completion = await super().generate(tokens, params, request, shown)
        row = {"request": request, "given": tokens, "said": completion.tokens.tolist()}
        with Path(os.environ[RECORD]).open("a") as file:
            file.write(json.dumps(row) + "\n")
        return completion
