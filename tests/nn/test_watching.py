# SPDX-License-Identifier: Apache-2.0
"""Predictions are recorded by the thread that makes them, and by no other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

import byteback
from byteback.nn.watching import Seen, recorded

COUNT = 3


def model() -> nn.Module:
    torch.manual_seed(0)
    net = byteback.models.build("resnet8", image_size=8, num_classes=10, in_channels=1)
    byteback.prepare(net, byteback.PlainInt8())
    net(torch.randn(8, 1, 8, 8))
    return net.eval()


def images(number: int) -> torch.Tensor:
    return torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(number))


@torch.no_grad()
def test_threads_record_their_own_predictions_and_not_those_of_others() -> None:
    net = model()

    def alone(number: int) -> Seen:
        with recorded() as seen:
            net(images(number))
        return seen

    expected = [alone(number) for number in range(COUNT)]
    assert not all(torch.equal(expected[0].inputs[key], expected[1].inputs[key]) for key in expected[0].inputs)
    all_record, all_are_done = threading.Barrier(COUNT + 1), threading.Barrier(COUNT + 1)

    @torch.no_grad()
    def together(number: int) -> Seen:
        with recorded() as seen:
            all_record.wait(60.0)
            net(images(number))
            all_are_done.wait(60.0)
        return seen

    with ThreadPoolExecutor(COUNT) as pool:
        waiting = [pool.submit(together, number) for number in range(COUNT)]
        all_record.wait(60.0)
        net(images(COUNT))  # this thread records nothing
        all_are_done.wait(60.0)
        found = [made.result() for made in waiting]
    for seen, own in zip(found, expected, strict=True):
        for values, others in ((seen.inputs, own.inputs), (seen.residuals, own.residuals)):
            assert list(values) == list(others) and len(values) >= 3
            assert all(torch.equal(values[key], others[key]) for key in others)


@torch.no_grad()
def test_recording_ends_with_its_block() -> None:
    net = model()
    with recorded() as outer:
        with recorded() as inner:
            net(images(0))
        assert inner.inputs and not outer.inputs
        net(images(1))
    count = len(outer.residuals)
    net(images(2))
    assert outer.inputs.keys() == inner.inputs.keys() and len(outer.residuals) == count > 0
