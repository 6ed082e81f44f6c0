"""Proof that engines hold the trainer's weights, by bit patterns in the engines' own layout."""

from trueline.runtime.fingerprints import ADAPTERS, Holding, LiveSums, wrap_int64

# By engine, by process, by the engine's own name of a weight.
Held = list[list[dict[str, Holding]]]
Sums = list[list[dict[str, int]]]


class SyncFailure(RuntimeError):
    """An engine does not hold the weights that were sent."""


class EngineProof:
    """The weights that engines loaded from the checkpoint, and what their sum must be after every update."""

    def __init__(self, own: Held, adapter_only: bool = False) -> None:
        self.own, self.adapter_only = own, adapter_only
        self.packed = sum(not size for _, size in own[0][0].values())  # weights that cannot be read any more
        self.shared = [shared_weights(processes) for processes in own]  # all processes hold them; they count once
        self.summed = False  # engine sums can be compared with the trainer's
        self.first = LiveSums()  # the trainer's sums at the start
        self.fixed = 0  # the part of an engine's sum that is no weight of the trainer

    def find_split_weights(self, noise: Held) -> None:
        """Find the split weights while engines hold noise: split parts of zeros look the same in every process."""
        self.shared = [shared_weights(processes) for processes in noise]

    def check_same(self, held: Held) -> None:
        """Refuse an engine whose weights differ from those that it loaded itself."""
        for engine, (own, now) in enumerate(zip(self.own, held, strict=True)):
            for process, (before, after) in enumerate(zip(own, now, strict=True)):
                if wrong := [name for name in before if before[name][0] != after[name][0]]:
                    raise SyncFailure(
                        f"process {process} of engine {engine} loaded the checkpoint itself, and holds other weights "
                        f"after the trainer sent the same checkpoint: {len(wrong)} of {len(before)} differ, among them "
                        f"{wrong[0]}. Names, shapes or types differ between the trainer's model and the engine's"
                    )

    def start(self, live: LiveSums, held: Sums) -> None:
        """Find out, with proven weights, whether sums can be compared after every update."""
        self.first = live
        if self.adapter_only:
            self._check_adapters(live.adapters, held)
        extra = [wrap_int64(self._sum(engine, processes) - live.plain) for engine, processes in enumerate(held)]
        self.fixed = live.fixed if live.fixed in extra else 0
        wrong = [engine for engine, found in enumerate(extra) if found != self.fixed]
        self.summed = not wrong
        if wrong and not self.packed and all(len(engine) == 1 for engine in held):
            raise SyncFailure(
                f"engine {wrong[0]} holds other weights than the trainer at the start (the sums of their bit "
                "patterns differ)"
            )

    def _sum(self, engine: int, processes: list[dict[str, int]]) -> int:
        first, *others = processes
        parts = [bits for one in others for name, bits in one.items() if name not in self.shared[engine] | {ADAPTERS}]
        return wrap_int64(sum(first.values()) - first.get(ADAPTERS, 0) + sum(parts))

    def check_sum(self, live: LiveSums, held: Sums) -> None:
        """Compare the weights of every engine with the trainer's current sums."""
        if self.adapter_only:  # the trainer's other weights are frozen, so the sums of engines must stay the same
            self._check_adapters(live.adapters, held)
            live = live._replace(plain=self.first.plain)
        elif live.adapters != self.first.adapters and live.plain == self.first.plain:
            raise SyncFailure("the adapters were trained, but the initial weights were sent: they were not merged")
        if not self.summed:
            return
        for engine, processes in enumerate(held):
            if self._sum(engine, processes) != wrap_int64(live.plain + self.fixed):
                raise SyncFailure(
                    f"after the update engine {engine} holds other weights than the trainer (the sums of their bit "
                    "patterns differ): a weight is missing, from another version or altered"
                )

    def _check_adapters(self, live: int, held: Sums) -> None:
        """Compare separate adapters; adapters that are split over processes have no common sum."""
        for engine, processes in enumerate(held):
            if len(processes) == 1 and processes[0][ADAPTERS] != live:
                raise SyncFailure(
                    f"after the update engine {engine} holds other adapters than the trainer (the sums of their bit "
                    "patterns differ): one is missing, from another version or has no layer there"
                )

    def limits(self, differs: str) -> list[str]:
        """Return what this proof does not cover."""
        found = ["only adapters are sent"] if self.adapter_only else []
        if differs and not self.adapter_only:
            found.append(f"weights are not compared with the checkpoint, because {differs}")
        if self.packed:
            found.append(f"{self.packed} weights are packed by the engine: only their transfer is checked")
        elif not self.summed:
            found.append("sums cannot be compared in this layout: only the transfer of later updates is checked")
        return found


def shared_weights(processes: list[dict[str, Holding]]) -> set[str]:
    """Return the weights of which all processes of an engine hold the same bits."""
    return {name for name in processes[0] if len({one[name][0] for one in processes}) == 1}
