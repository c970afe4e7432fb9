# SPDX-License-Identifier: Apache-2.0
"""The table of activations: every way to write one is found in the graph, runs in a block and gives PyTorch's values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import byteback
from byteback import ops
from byteback.convert.graph import find_blocks
from byteback.nn.fused.activations import BY_CALL, BY_MODULE, BY_TARGET, TABLE, WITH_MASK
from byteback.nn.fused.block import FusedBlock

LIMITS = {nn.Hardtanh: (0.0, 6.0), F.hardtanh: (0.0, 6.0)}
CALLS = [(name, call) for call, (name, _) in BY_CALL.items()]
MODULES = list(BY_MODULE.items())


class Net(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.act = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), act
        self.unused = nn.Conv2d(8, 8, 3)  # a model needs an int8 layer to be prepared

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


def function(call: Any) -> Callable[[Tensor], Tensor]:
    """The call as a model writes it: a method is looked up on the tensor, which torch.fx needs."""
    if call in (Tensor.relu, Tensor.relu_):
        return lambda x: getattr(x, call.__name__)()
    return lambda x: call(x, *LIMITS.get(call, ()))


def check(net: Net, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_blocks(net).blocks["conv"].activation == name
    runs: list[Any] = []
    original = FusedBlock.apply
    monkeypatch.setattr(FusedBlock, "apply", lambda *args: runs.append(args[6].activation) or original(*args))
    x = torch.randn(4, 4, 9, 9, generator=torch.Generator().manual_seed(1))
    exact = net(x)
    # The input stays float, so that only the block's own arithmetic is between the two.
    output = byteback.prepare(net, byteback.PlainInt8(first_conv=False))(x)
    assert runs == [name]
    torch.testing.assert_close(output + 0.0, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[f"{name}-{getattr(call, '__qualname__', call)}" for name, call in CALLS])
def test_calls(name: str, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check(Net(function(call)), name, monkeypatch)


@pytest.mark.parametrize(("module", "name"), MODULES, ids=[module.__name__ for module, _ in MODULES])
def test_modules(module: type[nn.Module], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(Net(module(*LIMITS.get(module, ()))), name, monkeypatch)


@pytest.mark.parametrize("act", [nn.GELU("tanh"), nn.Hardtanh(), nn.Hardtanh(0.0, 5.0)], ids=str)
def test_other_arguments_are_another_activation(act: nn.Module) -> None:
    """Also where the graph pass saw one that fits, and the model changed since."""
    fits: nn.Module = nn.GELU() if isinstance(act, nn.GELU) else nn.Hardtanh(0.0, 6.0)
    net = Net(fits)
    x = torch.randn(4, 4, 9, 9, generator=torch.Generator().manual_seed(1))
    exact = act(net.norm(net.conv(x)))
    model = byteback.prepare(net, byteback.PlainInt8(first_conv=False))
    vars(fits).update({name: value for name, value in vars(act).items() if name in ("approximate", "min_val", "max_val")})
    torch.testing.assert_close(model(x) + 0.0, exact, rtol=1e-5, atol=1e-5)


def test_the_table_has_what_ops_has() -> None:
    assert ("none", *(row.name for row in TABLE)) == ops.ACTIVATIONS
    assert WITH_MASK == ("relu", "relu6")
    assert BY_TARGET["relu_"] == "relu" and BY_TARGET[F.silu] == "silu"
