"""The thresholds of findings, in one place."""

from typing import NamedTuple


class Limits(NamedTuple):
    watch: float  # beyond it, a number is to be watched
    bad: float

    def above(self, value: float) -> str:
        return "bad" if value > self.bad else "watch" if value > self.watch else "fine"

    def below(self, value: float) -> str:
        return "bad" if value < self.bad else "watch" if value < self.watch else "fine"


# Thresholds of a run's rules. Sigmas are standard errors beyond which chance does not explain a change, although a run
# is checked after each of 300 steps; docs/metrics.md shows how often sound runs get there.
WINDOW = 5  # steps at the start that are compared with those at the end
STREAK = 2 * WINDOW  # steps in a row
SIGMAS, GAINED, HELD_OUT_SIGMAS = Limits(3.5, 5.0), 3.0, 4.5
REWARD_FALL = Limits(0.1, 0.2)  # of the standard deviation of rewards
ENTROPY_FALL, ENTROPY_COLLAPSE = 0.1, 0.01  # of its start; of its value five steps before
ENTROPY_RISE = (1.5, 0.5)  # times its start, plus nats
GAP_FACTOR, GAP_EXTRA, GAP_TINY = Limits(2, 5), Limits(0.01, 0.02), (10, 1e-4)  # times the start, plus nats
DRAWS, DRAWS_SIGMAS, DRAWS_ROOT = Limits(0.03, 0.1), 5.0, 10.0  # effect; z; least root of the variance
EFFECTIVE = Limits(0.5, 0.1)  # share of the tokens
RARE = 1e-5  # chance of a streak
UNIFORM, EQUAL_STEPS, EQUAL_OF = 0.9, 4, 2 * STREAK  # share of the groups; steps, of the last so many
TRUNCATED, TRUNCATED_RISE, ALWAYS_TRUNCATED = Limits(0.2, 0.8), Limits(0.3, 0.5), 0.95  # shares of the completions
CUT_OFF = 0.5  # share of truncated completions in the first step or a job
REPEATED, MOSTLY_REPEATED = 0.2, 0.6  # above the start; of a completion
GRADIENT_STEPS, SPIKE, SPIKES = 4 * WINDOW, 10.0, 3  # first step; times the 90th percentile; in the last window
CLIPPED = Limits(0.3, 0.6)  # share of the tokens
LONGER = 2  # times the length at the start
LENGTH_BIAS = 0.1  # by how much shorter what is trained may be than what is drawn
TAUGHT = Limits(0.25, 0.01)  # shares of the completions
LOSS_RISE = Limits(0.1, 0.3)  # of the loss at the start
UNIFORM_STEPS = (10, 100)  # in a row, after which equal rewards are reported again
STALLED_STEPS, STALLED_CHANGE = 20, 0.01  # steps; of the weights' norm
FIRST_STEPS = 2  # some tensors get their first gradient only in the second step, such as a LoRA's first matrix

# Thresholds of the doctor.
LONG_LABEL, MANY = 8, 0.5  # characters that a prompt hardly holds by chance; share of the rows
LONG_ROWS = Limits(0.05, 0.5)  # shares of the rows
PICTURES_FILL = 0.5  # of the context
MANY_EPOCHS = 100
TEMPERATURES = (0.5, 1.5)
DISK = Limits(0.8, 1.0)  # of the free space
