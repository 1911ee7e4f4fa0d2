"""Two processes with NCCL: fully sharded (FSDP2) or data-parallel (DDP), as the argument says."""

import os
import sys

import torch
import torch.distributed as distributed

from model import batch, model, skip, step

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
net = model()
if sys.argv[1] == "ddp":
    net = torch.nn.parallel.DistributedDataParallel(net, device_ids=[rank])
else:
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        skip("this PyTorch has no fully_shard")
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
losses = [step(net, optimizer, batch(10 * seed + rank)) for seed in range(4)]
every = [None] * distributed.get_world_size()
distributed.all_gather_object(every, losses)
distributed.destroy_process_group()
if rank == 0:
    print(every)
    print("done")
