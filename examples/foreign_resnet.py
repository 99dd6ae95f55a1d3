"""Guided backprop and deconvnet on a ResNet written in PyTorch, without editing it.

The network is a small version of torchvision's. `BasicBlock` calls one in-place ReLU module twice,
and the head uses `F.relu`. A module hook fails for the first and does not find the second.
`regrad.torch.gradient_override_map` replaces the gradient of the op, however it is called. Then
follows the sanity check of Adebayo et al.: the last layer is replaced by random numbers (ten
times). A saliency that explains the prediction must change.

                 dx, for y = relu(x)
    gradient     dy where x > 0                  (torch's own)
    deconvnet    dy where dy > 0
    guided       dy where x > 0 and dy > 0

Run:     python examples/foreign_resnet.py [--quick]      (needs torch and scikit-learn)
Prints:  test accuracy on handwritten digits; the calls that the override matched and the calls that
         kept their gradient; for each method the median cosine between the saliencies before and
         after (1 means no change). Draws out/foreign_resnet.png.
Source:  He et al., "Deep Residual Learning for Image Recognition", 2015, arXiv 1512.03385.
         Zeiler and Fergus, 2013, arXiv 1311.2901. Springenberg et al., 2014, arXiv 1412.6806.
         Adebayo et al., "Sanity Checks for Saliency Maps", 2018, arXiv 1810.03292.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import regrad as rg
import regrad.torch

# -- a third-party model ---------------------------------------------------------------------------


def conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = conv3x3(inputs, outputs, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = conv3x3(1, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = BasicBlock(width, width)
        self.layer2 = BasicBlock(width, 2 * width, stride=2)
        self.layer3 = BasicBlock(2 * width, 4 * width, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Linear(4 * width, 4 * width)
        self.fc2 = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc2(F.relu(self.fc1(x)))


def train(model: nn.Module, x: Tensor, labels: Tensor, epochs: int, batch: int = 64) -> None:
    model.train()
    adam = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(batch):
            adam.zero_grad()
            F.cross_entropy(model(x[rows]), labels[rows]).backward()
            adam.step()
    model.eval()


# -- saliency --------------------------------------------------------------------------------------

METHODS = {
    "gradient": {},
    "deconvnet": {"Relu": rg.rules.deconvnet_relu},
    "guided": {"Relu": rg.rules.guided_relu},
}


def saliency(model: nn.Module, images: Tensor, classes: Tensor, rules: dict):
    """Return the gradient of each image's logit of the given class, and the rules' report."""
    x = images.clone().requires_grad_()
    with regrad.torch.gradient_override_map(rules) as used:
        logits = model(x)
    logits.gather(1, classes[:, None]).sum().backward()
    used.assert_fired()
    return x.grad.numpy(), used


def randomised(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    other.fc2.reset_parameters()
    return other


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.sum(a * b, axis=1) / np.maximum(norms, 1e-30)


def draw(images, before, after, medians, path: Path) -> None:
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    columns = [("image", images)]
    for name, median in medians.items():
        columns += [(name, before[name]), (f"last layer random\ncosine {median:.3f}", after[name])]
    figure, panels = plt.subplots(
        len(images), len(columns), figsize=(11, 1.6 * len(images) + 0.9), layout="constrained"
    )
    for column, (title, values) in zip(panels.T, columns, strict=True):
        column[0].set_title(title, fontsize=10)
        for axes, pixels in zip(column, values, strict=False):
            limit = abs(pixels).max()
            style = ("gray", 0) if title == "image" else ("RdBu_r", -limit)
            axes.imshow(pixels[0], cmap=style[0], vmin=style[1], vmax=limit)
            axes.set(xticks=[], yticks=[])
    figure.supxlabel(
        "red: more ink here raises the predicted class; blue: lowers it · the cosine with the "
        "saliency to its left is the median over test images and ten draws",
        fontsize=9,
    )
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=130)


def main(quick: bool = False) -> dict[str, float]:
    """Train, compare the methods, draw; return the median cosines."""
    digits = load_digits()
    x = (digits.images[:, None] / 16).astype(np.float32)
    split = train_test_split(x, digits.target, random_state=0, stratify=digits.target)
    x_train, x_test, labels_train, labels_test = map(torch.from_numpy, split)
    torch.manual_seed(0)
    model = ResNet()
    train(model, x_train, labels_train, epochs=2 if quick else 8)
    with torch.no_grad():
        predicted = model(x_test).argmax(1)
    print(f"test accuracy {(predicted == labels_test).float().mean():.1%}\n")

    images = x_test[: 30 if quick else 200]
    predicted = predicted[: len(images)]
    others = [randomised(model) for _ in range(10)]
    before, after, medians = {}, {}, {}
    for name, rules in METHODS.items():
        before[name], used = saliency(model, images, predicted, rules)
        redone = [saliency(other, images, predicted, rules)[0] for other in others]
        after[name] = redone[0]
        medians[name] = float(np.median([cosines(before[name], other) for other in redone]))
    print(f"Overridden (used.table()):\n\n{used.table()}\n")
    print(f"With torch's own gradient (used.untouched()):\n\n{used.untouched()}\n")
    for name, median in medians.items():
        print(f"{name:>10}: median cosine with a random last layer {median:.3f}")
    draw(x_test[:3].numpy(), before, after, medians, Path("out/foreign_resnet.png"))
    return medians


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
