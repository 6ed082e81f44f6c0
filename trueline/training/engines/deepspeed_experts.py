"""Experts of a mixture divided over ranks, by the parts of DeepSpeed's AutoEP that send tokens to them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trueline.training.engines.deepspeed_config import without_mlflow
from trueline.training.engines.tensor_cuts import Cuts

with without_mlflow():
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer, _AllToAllV, compute_split_plan
    from deepspeed.moe.utils import is_moe_param
    from deepspeed.utils import groups


class DividedExperts(AutoEPMoELayer):  # type: ignore[misc]
    """This rank's experts of a layer: tokens travel to the ranks that have theirs, and the results back.

    AutoEP replaces the whole block, with a router of its own and renamed tensors. Here the router and the names stay
    Transformers', and so do routing replay, the loss that balances experts, checkpoints and weight sync. DeepSpeed
    treats layers of AutoEP's class as mixtures: ranks with the same experts average gradients and shard them.
    """

    def __init__(self, experts: Any, size: int, place: int) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.ep_size, self.ep_group_name = experts.num_experts, size, group_name(size)
        experts.num_experts //= size
        self.own = (experts,)  # in a tuple, so that its tensors have no second name
        for name, whole in list(experts.named_parameters(recurse=False)):
            part: Any = nn.Parameter(whole.detach().chunk(size)[place].clone(), requires_grad=whole.requires_grad)
            part.allreduce, part.group_name = False, self.ep_group_name
            part.ds_zero_placement_family, part.ds_zero_partition_group_name = "autoep_expert", self.ep_group_name
            self.register_parameter(name, part)
            setattr(experts, name, part)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:  # [T, hidden], [T, k], [T, k]
        own, top = self.num_experts // self.ep_size, chosen.shape[-1]
        order = chosen.flatten().argsort(stable=True)  # by expert, and so by rank
        plan = compute_split_plan(chosen, self.num_experts, self.ep_size, own, self.ep_group)
        rows = _AllToAllV.apply(self.ep_group, hidden[order // top], plan.input_splits, plan.output_splits)
        done = self._compute(rows, plan.local_counts_by_source)
        back = _AllToAllV.apply(self.ep_group, done, plan.output_splits, plan.input_splits)
        results = torch.empty_like(back).index_copy(0, order, back).view(*chosen.shape, -1)
        return (results * weights[..., None]).sum(1).to(hidden.dtype)

    def _compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the results of rows that lie by sender and then by expert; `counts` [senders, own] tells how many."""
        length, (senders, own) = len(rows), counts.shape
        numbers = torch.arange(own, device=rows.device).repeat(senders)
        numbers = numbers.repeat_interleave(counts.flatten(), output_size=length)
        # Without a row there would be no gradient of these experts, and no backward pass of the exchange.
        missing = int(length == 0)
        rows, numbers = nn.functional.pad(rows, (0, 0, 0, missing)), nn.functional.pad(numbers, (0, missing))
        return self.own[0](rows, numbers[:, None], rows.new_ones(len(rows), 1))[:length]  # type: ignore[no-any-return]


def group_name(size: int) -> str:
    """Return DeepSpeed's name of the groups of ranks that divide experts."""
    return f"ep_size_{size}"


def divide_experts(model: nn.Module, size: int) -> Cuts:
    """Keep this rank's experts of every layer, and return how they are cut; consecutive ranks divide them."""
    if group_name(size) not in groups._get_expert_parallel_group_dict():  # they last as long as the process
        groups._create_expert_and_data_parallel(size)
    group = groups._get_expert_parallel_group(group_name(size))
    place = dist.get_rank(group)
    for block in list(model.modules()):
        if (experts := block._modules.get("experts")) is not None:
            block.experts = DividedExperts(experts, size, place)
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, DividedExperts)]
    dims = {f"{name}.{part}": 0 for name, layer in layers for part in layer._parameters}
    return Cuts(size, dims, group, place, alike=False)


def group_experts(optimizer: torch.optim.Optimizer, size: int) -> None:
    """Move experts into parameter groups of their own, as ZeRO demands."""
    for group in list(optimizer.param_groups):
        experts = [parameter for parameter in group["params"] if is_moe_param(parameter)]
        if experts:
            group["params"] = [parameter for parameter in group["params"] if not is_moe_param(parameter)]
            optimizer.add_param_group(group | {"params": experts, "moe": True, "name": group_name(size)})
