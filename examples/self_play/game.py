"""Self-play: the model poses sums as the proposer, and answers them as the solver.

    bash examples/self_play/run.sh FOLDER

The proposer earns what the solver misses, so it looks for sums that the solver cannot do yet. Held-out rows name a
sum; then only the solver plays.
"""

import random
import re


class Sums:
    roles = ("solver", "proposer")  # the reward of the first one is the run's

    def reset(self, prompt: str, sum: str = "") -> dict[str, object]:
        self.posed = True
        return self.ask(sum) if sum else {"role": "proposer", "messages": prompt}

    def step(self, reply: str, role: str) -> dict[str, object]:
        if role == "proposer":
            self.posed = bool(re.fullmatch(r"\d\+\d", reply))
            return self.ask(reply if self.posed else f"{random.randint(0, 9)}+{random.randint(0, 9)}")
        right = float(reply == str(self.left + self.right))
        proposer = 1 - right if self.posed else -1.0
        return {"reward": {"solver": right, "proposer": proposer}, "done": True, "metrics": {"posed": self.posed}}

    def ask(self, sum: str) -> dict[str, object]:
        self.left, self.right = map(int, sum.split("+"))
        return {"role": "solver", "messages": f"{sum}="}
