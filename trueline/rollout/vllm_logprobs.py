"""Log-probs of sampled tokens, kept on the device where vLLM samples, and fetched once when a request ends.

vLLM's own way copies them to the host in every step, and handles each of them in Python.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from trueline.rollout.engine import SamplingParams

PROOFS = 8  # requests of a kind whose log-probs must be vLLM's own, bit for bit, before others do without those
MOST_BYTES = 2**28  # of a device's memory, which no plan reckons with
SHAPELESS = ("max_new_tokens", "stop", "experts")  # parameters that are nothing to the sampler
Ended = tuple[str, int, int]  # a request's name in vLLM's workers, the tokens of its prompt, and those sampled


class LogprobStore:
    """Log-probs by request and place in its sequence. A step only queues work for the device, and waits for nothing."""

    def __init__(self, rows: int, length: int, device: torch.device) -> None:
        self.unused = length + 1  # the column of what is sampled in vain
        self.values = torch.zeros(rows, length + 2, device=device)
        self.free = list(range(rows))
        self.slots: dict[str, int] = {}  # of requests that have not ended, preempted ones included
        self.batch: list[str] = []
        self.rows = torch.zeros(0, dtype=torch.long, device=device)  # of the requests in the batch
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def record(self, batch: list[str], places: Tensor, in_vain: Tensor, logprobs: Tensor) -> None:
        """Keep a log-prob of each request, at the place of its token in the sequence, unless that is `in_vain`.

        A prompt that is read in parts gets a token after each; when a preempted request is read again, the places of
        such tokens hold log-probs already.
        """
        if batch != self.batch:
            self._enter(batch)
        columns = torch.where(in_vain, self.unused, places).clamp(max=self.unused)
        self.values[self.rows, columns.long()] = logprobs

    def _enter(self, batch: list[str]) -> None:
        self.batch = list(batch)  # vLLM changes its list in place
        slots = torch.tensor([self._slot(name) for name in batch], pin_memory=self.stream is not None)
        self.rows = slots.to(self.values.device, non_blocking=True)

    def _slot(self, name: str) -> int:
        if name not in self.slots:
            if not self.free:
                self._grow()
            self.slots[name] = self.free.pop()
        return self.slots[name]

    def _grow(self) -> None:
        rows = len(self.values)
        self.values = torch.cat([self.values, torch.zeros_like(self.values[: rows // 4 + 1])])
        self.free += range(rows, len(self.values))
        if self.stream is not None:  # it reads the new memory, which is filled after the steps before
            self.stream.wait_stream(torch.cuda.current_stream(self.values.device))

    def take(self, ended: list[Ended]) -> list[list[float]]:
        """Return the log-probs of requests, and forget these; one that never ran has none.

        The host has their tokens, so the device has their log-probs: another stream need not wait for a running step.
        """
        if not ended:
            return []
        with self._reading():
            parts = [self._part(*one) for one in ended]
            found = torch.cat(parts).cpu().split([len(part) for part in parts])
        self.free += [self.slots.pop(name) for name, *_ in ended if name in self.slots]
        return [part.tolist() for part in found]

    def _reading(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _part(self, name: str, start: int, count: int) -> Tensor:
        return self.values[self.slots[name], start : start + count] if name in self.slots else self.values[0, :0]


def keep_by_first_runner(runner: Any, store: LogprobStore) -> None:
    """Let vLLM's V1 model runner compute the log-probs of all requests, and pass on those that were asked for."""
    sample: Callable[..., Any] = runner._sample

    def sample_and_keep(*given: Any) -> Any:
        batch, settings = runner.input_batch, runner.input_batch.sampling_metadata
        asked, settings.max_num_logprobs = settings.max_num_logprobs, 0
        output, rows = sample(*given), slice(batch.num_reqs)
        settings.max_num_logprobs = asked  # it serves later steps too
        in_vain = runner.discard_request_mask.gpu[rows]
        store.record(batch.req_ids, runner.seq_lens[rows], in_vain, output.logprobs_tensors.logprobs[:, 0])
        if asked is None:
            output.logprobs_tensors = None
        return output

    runner._sample = sample_and_keep


def keep_by_second_runner(runner: Any, store: LogprobStore) -> None:
    """Do the same in vLLM's V2 model runner."""
    sample: Callable[..., Any] = runner.sample
    states = runner.sampler.sampling_states
    asked: Callable[[Any], int] = states.max_num_logprobs  # negative: none

    def sample_and_keep(hidden: Tensor, batch: Any, *given: Any) -> Any:
        output, sampled, rejected = sample(hidden, batch, *given)
        places = batch.seq_lens[: batch.num_reqs]  # behind them, padding
        store.record(batch.req_ids, places, sampled == 0, output.logprobs_tensors.logprobs[:, 0])
        if asked(batch.idx_mapping_np) < 0:
            output.logprobs_tensors = None
        return output, sampled, rejected

    states.max_num_logprobs = lambda rows: max(asked(rows), 0)
    runner.sample = sample_and_keep


def keep_logprobs(runner: Any, config: Any) -> LogprobStore | str:
    """Keep log-probs from now on, or return why that cannot be."""
    rows, length = config.scheduler_config.max_num_seqs, config.model_config.max_model_len
    if config.speculative_config is not None:
        return "speculative decoding samples several tokens in a step"
    if (size := 4 * rows * length) > MOST_BYTES:
        return f"{rows} sequences of {length} tokens would take {size / 2**30:.1f} GiB of the device's memory"
    keep = keep_by_first_runner if has(runner, "_sample") else keep_by_second_runner
    if not (fits_first(runner) if keep is keep_by_first_runner else fits_second(runner)):
        return f"this version of vLLM samples in another way ({type(runner).__module__})"
    store = LogprobStore(rows, length, runner.device)
    keep(runner, store)
    return store


def fits_first(runner: Any) -> bool:
    known = has(runner, "input_batch", "seq_lens", "discard_request_mask") and isinstance(runner.seq_lens, Tensor)
    return known and has(runner.input_batch, "req_ids", "num_reqs", "sampling_metadata")


def fits_second(runner: Any) -> bool:
    known = has(runner, "sample", "sampler") and has(runner.sampler, "sampling_states")
    return known and has(runner.sampler.sampling_states, "max_num_logprobs")


def has(owner: object, *names: str) -> bool:
    return set(names) <= set(dir(owner))


def kind_of(params: SamplingParams) -> frozenset[str]:
    """Name what shapes the distribution of a request, or ends it; requests of one kind prove each other."""
    plain = asdict(SamplingParams(1.0, 1, ()))
    kind = {name for name, value in asdict(params).items() if value != plain[name]}.difference(SHAPELESS)
    return frozenset(kind | {"greedy"} if params.temperature == 0 else kind)


class Trust:
    """Tells which requests do without vLLM's own log-probs; others have both, and prove that they are equal."""

    def __init__(self, obstacle: str = "") -> None:
        self.doubt = obstacle  # why vLLM is asked for all log-probs
        self.proven: Counter[frozenset[str]] = Counter()

    def covers(self, params: SamplingParams) -> bool:
        return not self.doubt and self.proven[kind_of(params)] >= PROOFS

    def compare(self, params: SamplingParams, own: list[float], kept: list[float]) -> None:
        """Count a proof, or trust none of them any more."""
        if own == kept:
            self.proven[kind_of(params)] += bool(own)
        else:
            pairs = enumerate(zip(own, kept, strict=False))
            place = next((at for at, (one, other) in pairs if one != other), min(len(own), len(kept)))
            what = ", ".join(sorted(kind_of(params))) or "plain sampling"
            self.doubt = f"those kept on the device differ from token {place} of {len(own)} on ({what})"
