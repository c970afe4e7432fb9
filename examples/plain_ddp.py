# SPDX-License-Identifier: Apache-2.0
"""INT8 training with DistributedDataParallel, in a loop of your own:

    torchrun --nproc-per-node 2 examples/plain_ddp.py

The order is: prepare, wrap, create the optimizer, connect.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from digits import batches, network
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import byteback


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = byteback.prepare(network(), "unified-int8")
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    byteback.scale_learning_rates(optimizer, model)  # the ranks agree on clips and factors in step()
    for epoch in range(2):
        for images, labels in batches(epoch, rank=rank, ranks=ranks):
            loss = F.cross_entropy(parallel(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss.detach())
            if rank == 0:
                print(f"loss {loss.item() / ranks:.6f}", flush=True)
    dist.barrier()
    os._exit(0)  # threads of gloo may abort a process that cleans up (pytorch#179291)


if __name__ == "__main__":
    main()
