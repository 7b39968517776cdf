"""Exchange values between the tensor-parallel and pipeline-parallel ranks of an engine."""

from typing import Any, TypeVar

import torch

T = TypeVar("T")


def of_all_ranks(mine: T) -> list[T]:
    """Return the values of all ranks, by pipeline stage, then by tensor-parallel rank. Every rank must call this."""
    from vllm.distributed import get_pp_group, get_tp_group

    return [one for stage in _of_group(_of_group(mine, get_tp_group()), get_pp_group()) for one in stage]


def _of_group(mine: T, group: Any) -> list[T]:
    every = [mine] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(every, mine, group=group.cpu_group)
    return every
