"""An engine that only samples, as one behind somebody else's server would."""

from trueline.data.pictures import Shown
from trueline.data.types import Completion
from trueline.rollout.engine import EngineSpec, RequestBook, SamplingEngine, SamplingParams
from trueline.rollout.engines import RolloutRow


class SamplingOnly(SamplingEngine):
    """Repeats its prompt."""

    def __init__(self, spec: EngineSpec) -> None:
        self.book = RequestBook(self.generate)

    async def generate(
        self, tokens: list[int], params: SamplingParams, request: str, shown: Shown | None = None
    ) -> Completion:
        return Completion.of(tokens, [-1.0] * len(tokens), 0, "stop")


ROW = RolloutRow("tests.support.sampling_only:SamplingOnly", local=True, takes_weights=False, proofs=())
