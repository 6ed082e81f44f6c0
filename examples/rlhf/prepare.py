"""Make a small random model and sums to add, for the pipeline; nothing is downloaded.

python examples/rlhf/prepare.py rlhf
"""

import random
import sys
from pathlib import Path

from trueline.demo.material import HELD_OUT, make_model, write_rows

CARELESS = 0.5  # share of the teacher's sums that are wrong
SLIPS = (-10, -1, 1, 10)

folder = Path(sys.argv[1])
folder.mkdir(parents=True)
parameters = make_model(folder / "model", seed=0)
generator = random.Random(0)
pairs = [(left, right) for left in range(1000) for right in range(10)]
generator.shuffle(pairs)
held_out, practice = pairs[:HELD_OUT], pairs[HELD_OUT:]
slips = [generator.choice(SLIPS) if generator.random() < CARELESS else 0 for _ in practice]
write_rows(folder / "held_out.jsonl", held_out, [left + right for left, right in held_out])
write_rows(folder / "practice.jsonl", practice, [left + right for left, right in practice])
write_rows(folder / "teacher.jsonl", practice, [sum(pair) + slip for pair, slip in zip(practice, slips, strict=True)])
sys.stdout.write(f"{folder}: a model of {parameters:,} parameters, teacher.jsonl, practice.jsonl, held_out.jsonl\n")
