"""Makes what the pipeline starts from: a small random model and sums to add; nothing is downloaded.

python examples/rlhf/prepare.py rlhf
"""

import sys
from pathlib import Path

from trueline.demo.material import make_data, make_model

folder = Path(sys.argv[1])
folder.mkdir(parents=True)
parameters = make_model(folder / "model", seed=0)
make_data(folder, seed=0)
sys.stdout.write(f"{folder}: a model of {parameters:,} parameters, teacher.jsonl, practice.jsonl, held_out.jsonl\n")
