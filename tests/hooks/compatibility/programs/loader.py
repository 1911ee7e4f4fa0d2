"""Training from a DataLoader with workers, forked or spawned, that start while a graph is alive."""

import sys

import torch
from torch.utils.data import DataLoader, Dataset

from model import batch, model, step


class Batches(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, seed):
        return batch(seed, "cpu")


def main():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    alive = net(batch(9)).sum()
    for data in DataLoader(Batches(), batch_size=None, num_workers=2, pin_memory=True, multiprocessing_context=sys.argv[1]):
        print(step(net, optimizer, data.cuda(non_blocking=True)))
    print(float(alive.detach()).hex())
    print("done")


if __name__ == "__main__":
    main()
