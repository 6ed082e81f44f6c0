"""A training process that can start over as another worker: imports are paid once for many cases."""

from typing import Any

from trueline.training.worker import Worker, WorkerSpec


class RestartableWorker:
    def __init__(self) -> None:
        self.worker: Worker

    def restart(self, spec: WorkerSpec) -> None:
        """Its next calls are `listen` and `start`."""
        self.worker = Worker(spec)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)
