"""An engine that only samples, as one behind somebody else's server would."""

from trueline.data.types import Completion
from trueline.rollout.engine import EngineSpec, RequestBook, SamplingEngine, SamplingParams
from trueline.rollout.engines import RolloutRow


class SamplingOnly(SamplingEngine):
    """Replies with three tokens of its seed."""

    def __init__(self, spec: EngineSpec) -> None:
        self.book = RequestBook(self.generate)

    async def generate(self, tokens: list[int], params: SamplingParams, request: str) -> Completion:
        count = min(params.max_new_tokens, 3)
        sampled = [100 + ((params.seed or 0) + at) % 100 for at in range(count)]
        return Completion.of(sampled, [-1.0] * count, 0, "stop")


ROW = RolloutRow("tests.support.sampling_only:SamplingOnly", local=True, takes_weights=False, proofs=())
