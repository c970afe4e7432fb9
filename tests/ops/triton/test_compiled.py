# SPDX-License-Identifier: Apache-2.0
"""torch.compile on CUDA tensors, as far as fake tensors can show it: what it traces, and what the operators return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import byteback
from byteback import ops
from interpreted import interpreting
from same_bits import assert_same_bits

ONE = (1, 1, 1, 1)


def test_operators_know_their_results_on_cuda() -> None:
    with FakeTensorMode():

        def fake(*size: int, dtype: torch.dtype = torch.int8) -> Tensor:
            return torch.empty(size, dtype=dtype, device="cuda")

        one, numbers = fake(*ONE, dtype=torch.float32), [fake(1, dtype=torch.int64) for _ in range(3)]
        x, w, g, geometry = fake(20, 3, 8, 8), fake(5, 3, 3, 3), fake(20, 5, 8, 8), (1, 1, 1)
        key = ops.noise_key(*numbers)
        q = ops.quantize(fake(20, 3, 8, 8, dtype=torch.float32), one, key)
        made = {
            "key": (key, (2,)),
            "values": (q.values, (20, 3, 8, 8)),
            "output": (ops.conv_int8(x, one, w, one, *geometry), (20, 5, 8, 8)),
            "grad_input": (ops.conv_int8_grad_input(g, one, w, one, [20, 3, 8, 8], *geometry), (20, 3, 8, 8)),
            "grad_weight": (ops.conv_int8_grad_weight(g, one, x, one, [5, 3, 3, 3], *geometry), (5, 3, 3, 3)),
            "packed": (ops.conv_int8_grad_weight(fake(2, 8, 8, 5, 16), one, x, one, [5, 3, 3, 3], *geometry), (5, 3, 3, 3)),
            "matmul": (ops.matmul_int8(fake(4, 3), fake(1, 1, dtype=torch.float32), fake(3, 6), one.view(1, 1)), (4, 6)),
        }
        for name, (result, size) in made.items():
            assert result.device.type == "cuda" and tuple(result.shape) == size, name


def on_fake_cuda(model: nn.Module) -> nn.Module:
    """Replaces all tensors of a model. Without a GPU, PyTorch cannot record gradients of CUDA tensors."""

    def fake(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device="cuda")

    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(fake(parameter), requires_grad=False)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = fake(buffer)
        if hasattr(module, "unshared"):
            module.unshared = fake(module.unshared)
    return model


@pytest.mark.slow  # it starts torch.compile
def test_a_layer_on_cuda_is_one_graph() -> None:
    model = byteback.prepare(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)), "unified-int8")
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        output = torch.compile(on_fake_cuda(model), backend=backend, fullgraph=True)(torch.empty(2, 3, 8, 8, device="cuda"))
    assert output.device.type == "cuda" and output.shape == (2, 8, 4, 4)
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if str(node.target).startswith("byteback.")]
    assert called == ["byteback.quantize_remembering", "byteback.quantize_fresh", "byteback.conv_int8"]


@pytest.mark.slow  # it starts torch.compile
def test_a_compiled_step_has_the_bits_of_the_cpu() -> None:
    """The compiled graph calls the operators, which run the kernels in Triton's interpreter."""

    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = byteback.prepare(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 5, 3, 2)), byteback.PlainInt8())
        x = torch.randn(16, 3, 5, 5).contiguous(memory_format=torch.channels_last)
        torch.compile(model, backend="eager")(x).square().mean().backward()
        return [*(each.grad for each in model.parameters() if each.grad is not None), *model.state_dict().values()]

    expected = trained()
    with interpreting():
        found = trained()
    assert_same_bits(found, expected)
