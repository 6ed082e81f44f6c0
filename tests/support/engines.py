"""Training engines as the contract suites run them: a short name, and the keys of `training` behind it."""

from trueline.config.base import Tree

ZERO = {f"zero{stage}": {"engine": "deepspeed", "deepspeed": {"zero_stage": stage}} for stage in range(4)}
FSDP2: dict[str, Tree] = {
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2-kept": {"engine": "fsdp2", "fsdp2": {"reshard": False}},
    "fsdp2-late": {"engine": "fsdp2", "fsdp2": {"reduce_each_pass": False}},
    "fsdp2-copies": {"engine": "fsdp2", "replicas": 2},
}
EXPERTS: dict[str, Tree] = {  # of a mixture, divided over two ranks
    f"zero{stage}-experts": {"engine": "deepspeed", "deepspeed": {"zero_stage": stage, "expert_parallel": 2}}
    for stage in range(4)
}
ENGINES: dict[str, Tree] = {"torch": {"engine": "torch"}, **ZERO, **FSDP2, **EXPERTS}
