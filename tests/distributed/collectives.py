"""What the collectives give on this rank, as JSON; run in several ranks by test_ranks.py."""

import json
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist

from heedful import DataError
from heedful.data.batches import AdaptiveMicroBatch
from heedful.distributed import ranks
from heedful.distributed.ranks import own_random_numbers
from heedful.types import MicroBatch


def refuse(error):
    raise error


def raised(work):
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main():
    ranks.join(torch.device("cpu"), timedelta(seconds=300))
    ranks.join(torch.device("cpu"), timedelta(seconds=300))  # once is enough
    here = ranks.rank()
    found = {"rank": here, "size": ranks.size(), "first": ranks.is_first()}

    mixed = [
        torch.full((3,), 1.0 + here),
        torch.full((2, 2), 10.0 + here, dtype=torch.float64),
        torch.full((5,), 256.0 if here else 1.0, dtype=torch.bfloat16),
        torch.arange(6.0).view(2, 3).T * (1 + here),  # not contiguous
        torch.tensor([float("nan") if here else 1.0, 2.0]),
    ]
    ranks.add(mixed)
    found["added"] = [tensor.flatten().tolist() for tensor in mixed]
    ranks.BUCKET = 4  # several messages, and tensors larger than one
    many = [torch.full((count,), float(here + count)) for count in (3, 1, 2, 9, 4)]
    ranks.add(many)
    found["in buckets"] = [tensor.tolist() for tensor in many]

    both, mine, nobody, frozen = (torch.nn.Parameter(torch.zeros(2)) for _ in range(4))
    both.grad = torch.tensor([1.0, 2.0]) * (1 + here)
    if here == 1:
        mine.grad = torch.tensor([5.0, 6.0])
    frozen.requires_grad_(False)
    ranks.add_gradients([both, mine, nobody, frozen])
    found["gradients"] = [None if p.grad is None else p.grad.tolist() for p in (both, mine, nobody, frozen)]

    costs = [5.0, 1.0, 4.0, 4.0, 2.0]
    rows = ranks.shard_indices(costs)
    numbers = torch.tensor([[float(row), costs[row]] for row in rows])
    found["rows"] = rows
    found["whole"] = ranks.all_gather_rows(numbers, rows, 5).tolist()
    found["whole flags"] = ranks.all_gather_rows(numbers[:, 0] > 1, rows, 5).tolist()
    few = [0] if here == 0 else []
    found["one row"] = ranks.all_gather_rows(torch.full((len(few), 2), 7.0), few, 1).tolist()

    found["shared"] = ranks.broadcast({"中文": here})
    found["gathered"] = ranks.gather(("秩", here))
    found["by first"] = ranks.on_rank_zero(lambda: [here, "第一"])
    found["refused"] = raised(lambda: ranks.on_rank_zero(lambda: refuse(DataError("坏 line 3"))))
    found["any"] = [ranks.any_of(here == 1), ranks.any_of(False)]
    found["largest"] = ranks.largest(-3.0 - here)
    same = {"code": "abc", "data": "d" if here == 0 else "e"}
    found["differs"] = raised(lambda: ranks.check_same(same, {"code": "install it", "data": "copy it"}))
    found["same"] = raised(lambda: ranks.check_same({"code": "abc"}, {"code": "install it"}))
    torch.manual_seed(3)
    streams = []
    for _ in range(2):
        with own_random_numbers():
            streams.append(torch.rand(2).tolist())
    found["streams"] = ranks.gather(streams)
    found["common again"] = ranks.gather(torch.rand(2).tolist())
    found["put together"] = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]) + 10 * here
    ranks.all_gather_into(found["put together"], [torch.tensor([here])], torch.tensor([0, 1]))
    found["put together"] = found["put together"][:2].tolist()
    found["merged"] = ranks.merged({here: "秩"})
    with ranks.alone():
        found["alone"] = [ranks.size(), ranks.total(5.0), ranks.shard_indices([1.0, 1.0])]
    reduce, left = dist.all_reduce, [torch.OutOfMemoryError("CUDA out of memory.")] * here

    def full_once(*arguments, **options):
        return refuse(left.pop()) if left else reduce(*arguments, **options)

    with patch.object(dist, "all_reduce", full_once):
        found["rows at a time"] = AdaptiveMicroBatch().run(lambda limit: limit.rows, MicroBatch(8), rows=8)
    ranks.leave()
    found["after"] = ranks.size()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
