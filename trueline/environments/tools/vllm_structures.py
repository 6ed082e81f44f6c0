"""Structures of replies as vLLM knows them: a JSON schema, or one between two texts."""

import json
from functools import lru_cache
from typing import Final

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

from trueline.environments.base import Structure

BACKEND: Final = "xgrammar"  # an engine of vLLM keeps the first backend that a request names
KEPT = 1000  # checked structures


def vllm_structure(structure: Structure | None) -> StructuredOutputsParams | None:
    if structure is None:
        return None
    if not structure.begin:
        return StructuredOutputsParams(json=structure.schema)
    content = {"type": "json_schema", "json_schema": json.loads(structure.schema)}
    form = {"type": "tag", "begin": structure.begin, "content": content, "end": structure.end}
    return StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", "format": form}))


@lru_cache(KEPT)
def check_structure(structure: Structure) -> str:
    """Return why vLLM would refuse a structure; empty if it would not."""
    try:
        validate_xgrammar_grammar(SamplingParams(structured_outputs=vllm_structure(structure)))
    except (VLLMValidationError, ValueError, RecursionError) as error:  # of vLLM 0.26, ValueError alone
        return str(error)
    return ""
