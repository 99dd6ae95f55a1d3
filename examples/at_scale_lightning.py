"""A rule in a model that Lightning trains: the scope is around `fit`.

Run:     python examples/at_scale_lightning.py
Prints:  the table of hits.
Needs:   pip install '.[torch]' lightning
"""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import regrad.torch


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def training_step(self, batch):
        x, y = batch
        return (self.last(torch.relu(self.first(x))) - y).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    x = torch.randn(64, 4)
    batches = DataLoader(TensorDataset(x, x[:, :1].abs()), batch_size=16)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", barebones=True)
    leaky = {"Relu": lambda dy, x: dy * torch.where(x > 0, 1.0, 0.25)}
    with regrad.torch.gradient_override_map(leaky) as used:
        trainer.fit(Model(), batches)
    used.assert_fired()
    print(used.table())


if __name__ == "__main__":
    main()
