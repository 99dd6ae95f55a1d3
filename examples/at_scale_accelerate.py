"""A rule in a training loop of Accelerate. The scope is around the loop, which is unchanged.

Run:     python examples/at_scale_accelerate.py
Prints:  the table of hits.
Needs:   pip install '.[torch]' accelerate
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import regrad.torch


def leaky(dy, x):
    return dy * torch.where(x > 0, 1.0, 0.25)


def main():
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, x[:, :1].abs()), batch_size=16)

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with regrad.torch.gradient_override_map({"Relu": leaky}) as used:
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
    used.assert_fired()
    print(used.table())


if __name__ == "__main__":
    main()
