"""A whole update captured with torch.cuda.graph and replayed."""

import torch

from model import batch, model

net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
data = batch(1)


def update():
    optimizer.zero_grad(set_to_none=True)
    loss = (net(data) - data).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        update()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = update()
for seed in range(2, 6):
    data.copy_(batch(seed))
    graph.replay()
    print(float(loss.detach()).hex())
# Beside the graph, eager work that spills.
print([float((net(batch(seed)) - data).pow(2).mean().detach()).hex() for seed in (7, 8)])
print("done")
