"""Small networks of snntorch, spikingjelly, norse and sinabs, with a surrogate of theirs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

STEPS, BATCH, INPUTS, HIDDEN, CLASSES = 8, 4, 12, 24, 5


class Net(NamedTuple):
    """A network of a peer.

    Args:
        model: The module, with parameters of a fixed seed. It returns the spikes of all steps.
        key: The Function of autograd of its spikes, which is the key of our rule.
        dtype: The dtype in which the peer computes.
        moved: The threshold that the Function takes away itself.
    """

    model: nn.Module
    key: Any
    dtype: torch.dtype
    moved: float = 0.0


def inputs(dtype: torch.dtype, seed: int) -> torch.Tensor:
    torch.manual_seed(1000 + seed)
    return torch.rand(STEPS, BATCH, INPUTS, dtype=dtype)


class Layers(nn.Module):
    """Two linear layers with neurons, which are called once for each step.

    Args:
        neuron: A function that makes the neurons of a layer.
        step: A function of neurons, their input and their state that returns spikes and a state.
        begin: A function of the module that is called before the first step.
    """

    def __init__(
        self, neuron: Any, step: Callable[..., Any], begin: Callable[..., Any] = lambda _: None
    ) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.hidden, self.out = neuron(), neuron()
        self.step, self.begin = step, begin

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        self.begin(self)
        states, spikes = [None, None], []
        for x in xs:
            z, states[0] = self.step(self.hidden, self.first(x), states[0])
            z, states[1] = self.step(self.out, self.second(z), states[1])
            spikes.append(z)
        return torch.stack(spikes)


def snntorch_net(spikes: Any, name: str) -> Net:
    import snntorch
    from snntorch import surrogate

    chosen = {"spike_grad": spikes(name)} if name else {}
    neuron = lambda: snntorch.Leaky(beta=0.5, threshold=0.25, **chosen)  # noqa: E731
    step = lambda n, x, state: n(x, n.reset_mem() if state is None else state)  # noqa: E731
    return Net(Layers(neuron, step), surrogate.ATan, torch.float32)


def spikingjelly_net(spikes: Any, name: str) -> Net:
    from spikingjelly.activation_based import functional, neuron, surrogate

    chosen = {"surrogate_function": spikes(name)} if name else {}
    made = lambda: neuron.LIFNode(tau=2.0, v_threshold=0.15, **chosen)  # noqa: E731
    step = lambda n, x, _: (n(x), None)  # noqa: E731
    return Net(Layers(made, step, functional.reset_net), surrogate.sigmoid, torch.float64)


def norse_net(spikes: Any, name: str) -> Net:
    from norse.torch import LIFCell, LIFParameters
    from norse.torch.functional.superspike import SuperSpike

    method, alpha = eval(name) if name else ("super", 100.0)
    p = LIFParameters(
        v_th=torch.tensor(0.05, dtype=torch.float64), method=method,
        alpha=torch.tensor(alpha, dtype=torch.float64),
    )  # fmt: skip
    return Net(Layers(lambda: LIFCell(p=p), lambda n, x, s: n(x, s)), SuperSpike, torch.float64)


def sinabs_net(spikes: Any, name: str) -> Net:
    from sinabs import activation
    from sinabs.layers import LIF

    kind = activation.SingleSpike
    chosen = {"surrogate_grad_fn": eval(name, dict(vars(activation)))} if name else {}

    class Sequence(nn.Module):
        """The same layers, on sequences."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, CLASSES)
            self.hidden, self.out = (
                LIF(tau_mem=10.0, spike_fn=kind, norm_input=False, **chosen) for _ in range(2)
            )

        def forward(self, xs: torch.Tensor) -> torch.Tensor:
            for layer in (self.hidden, self.out):
                layer.reset_states()
            z = self.hidden(self.first(8 * xs.transpose(0, 1)))
            return self.out(self.second(4 * z)).transpose(0, 1)

    return Net(Sequence(), kind, torch.float32, moved=1.0)


NETS = {"snntorch": snntorch_net, "spikingjelly": spikingjelly_net, "norse": norse_net,
        "sinabs": sinabs_net}  # fmt: skip


def built(package: str, spikes: Any, name: str, seed: int) -> Net:
    """Return the network of a peer with a surrogate of the peer; with its default for ""."""
    torch.manual_seed(seed)
    net = NETS[package](spikes, name)
    return net._replace(model=net.model.to(net.dtype))
