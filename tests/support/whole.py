"""Whole tensors of a training state, from what each rank holds."""

import torch
import torch.distributed as dist
from torch import Tensor

from trueline.training.engines.engine import AVERAGE, TrainEngine


def whole_state(engine: TrainEngine) -> dict[str, Tensor]:
    """Every `tensor/part`; if a rank does not hold all of them, all ranks must call this together."""
    held = [(one.name, one.region, one.values.cpu().clone()) for one in engine.state_shards()]
    ranks = [held]
    if any(len(values) < torch.Size(region.shape).numel() for _, region, values in held):
        ranks = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, held)
    whole = {name: torch.full((torch.Size(region.shape).numel(),), torch.nan) for name, region, _ in held}
    for name, region, values in (shard for rank in ranks for shard in rank):
        region.lay(values, whole[name])
    assert not [name for name, tensor in whole.items() if tensor.isnan().any()]
    return {name: whole[name].view(region.shape) for name, region, _ in held}


def averages(engine: TrainEngine) -> dict[str, Tensor]:
    suffix = f"/{AVERAGE}"
    return {key.removesuffix(suffix): one for key, one in whole_state(engine).items() if key.endswith(suffix)}
