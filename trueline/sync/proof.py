"""What engines must hold, told by bit patterns in their own layout: without names, maps or tolerances."""

from typing import NamedTuple

from trueline.runtime.fingerprints import Holding, wrapped

# By engine, by process, by the engine's own name of a weight.
Held = list[list[dict[str, Holding]]]
Sums = list[list[dict[str, int]]]
ADAPTERS = "adapters"  # in place of a weight's name: the sum of all adapters that a process holds beside its weights


class LiveSums(NamedTuple):
    """Bit sums of what the trainer has."""

    plain: int = 0  # weights, adapters merged unless they are apart
    adapters: int = 0
    fixed: int = 0  # numbers that training does not change; an engine may hold them among its weights


class SyncFailure(RuntimeError):
    """An engine does not hold the weights that were sent."""


class EngineProof:
    """The weights that engines loaded by themselves, and what their sum must be after every update."""

    def __init__(self, own: Held, apart: bool = False) -> None:
        self.own, self.apart = own, apart
        weights = [(name, size) for name, (_, size) in own[0][0].items()]
        self.names = [name for name, _ in weights]
        self.packed = [name for name, size in weights if not size]  # nothing of them is left to read
        self.alike = [held_alike(processes) for processes in own]  # what all processes hold whole counts once in a sum
        self.summed = False  # the sum of what an engine holds can be compared with the trainer's
        self.first = LiveSums()  # the trainer's sums at the start
        self.fixed = 0  # the part of an engine's sum that is no weight of the trainer's

    def tell_cut(self, noise: Held) -> None:
        """Learn from noise in place of the weights what is cut: parts of zeros are alike in every process as well."""
        self.alike = [held_alike(processes) for processes in noise]

    def check_same(self, held: Held) -> None:
        """Refuse an engine whose weights are not those that it had loaded itself."""
        for engine, (own, now) in enumerate(zip(self.own, held, strict=True)):
            for process, (before, after) in enumerate(zip(own, now, strict=True)):
                wrong = [name for name in before if before[name][0] != after[name][0]]
                if wrong:
                    raise SyncFailure(
                        f"process {process} of engine {engine} loaded the checkpoint itself, and holds other weights "
                        f"once the trainer has sent the same: {len(wrong)} of {len(before)}, among them {wrong[0]}. "
                        "Names, shapes or types do not agree between the trainer's model and the engine's"
                    )

    def start(self, live: LiveSums, held: Sums) -> None:
        """See, on weights that are proven, whether sums can be compared after every update."""
        self.first = live
        if self.apart:
            self._check_adapters(live.adapters, held)
        more = [wrapped(self._sum(engine, processes) - live.plain) for engine, processes in enumerate(held)]
        self.fixed = live.fixed if live.fixed in more else 0
        equal = [found == self.fixed for found in more]
        self.summed = all(equal)
        whole = not self.packed and all(len(engine) == 1 for engine in held)
        if whole and not self.summed:
            raise SyncFailure(
                f"engine {equal.index(False)} holds other weights than the trainer at the start (the sums of their bit "
                "patterns differ)"
            )

    def _sum(self, engine: int, processes: list[dict[str, int]]) -> int:
        first, *others = processes
        parts = [bits for one in others for name, bits in one.items() if name not in self.alike[engine] | {ADAPTERS}]
        return wrapped(sum(first.values()) - first.get(ADAPTERS, 0) + sum(parts))

    def check_sum(self, live: LiveSums, held: Sums) -> None:
        """Compare what every engine holds with the trainer's own weights, which are `live` now."""
        if self.apart:
            self._check_adapters(live.adapters, held)
        elif live.adapters != self.first.adapters and live.plain == self.first.plain:
            raise SyncFailure(
                "the adapters were trained, and what was sent is the model they started from: they were not merged"
            )
        if not self.summed:
            return
        for engine, processes in enumerate(held):
            if self._sum(engine, processes) != wrapped(live.plain + self.fixed):
                raise SyncFailure(
                    f"after the update engine {engine} holds other weights than the trainer (the sums of their bit "
                    "patterns differ): a weight was left out, came from another version or was altered on its way"
                )

    def _check_adapters(self, live: int, held: Sums) -> None:
        """Compare adapters that engines hold beside their weights; divided among processes, they have no common sum."""
        for engine, processes in enumerate(held):
            if len(processes) == 1 and processes[0][ADAPTERS] != live:
                raise SyncFailure(
                    f"after the update engine {engine} holds other adapters than the trainer (the sums of their bit "
                    "patterns differ): one was left out, came from another version or has no layer there"
                )

    def describe(self, differs: str) -> str:
        """Say what is proven, and what is not."""
        said = [f"{len(self.names) - len(self.packed)} weights in each of {len(self.own)} engine(s)"]
        if self.apart:
            said += ["stay as loaded, and adapters are sent"]
        else:
            said += (
                [f"are not compared with the checkpoint ({differs})"]
                if differs
                else ["overwritten, sent, the same bits"]
            )
        if self.packed:
            said += [f"{len(self.packed)} more are packed away by the engine: proven by what it received"]
        if not self.summed and not self.packed:
            said += ["their sum cannot be compared in this layout: later updates are proven by what was received"]
        return ", ".join(said)


def held_alike(processes: list[dict[str, Holding]]) -> set[str]:
    """Return the weights of which all processes of an engine hold the same bits."""
    return {name for name in processes[0] if len({one[name][0] for one in processes}) == 1}
