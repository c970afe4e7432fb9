# SPDX-License-Identifier: Apache-2.0
"""agree: what several ranks remember afterwards. Two threads stand for two ranks, with an all_reduce that waits for both.

The oracle is one process that sees the data of all ranks. With real processes: tests/test_lr_ranks.py.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from byteback import Int8Conv2d, TensorRule
from byteback.nn import ranks
from byteback.ops.quantizer import DEVIATION, MEASURED, NONFINITE
from byteback.quantize import deviation_of
from byteback.recipes import PlainInt8, UnifiedInt8

RECIPES = ["plain-int8", "unified-int8", "distribution-adaptive-int8"]


class Together:
    """all_reduce of two threads; keeps what was asked for."""

    def __init__(self):
        self.barrier, self.lock, self.waiting, self.asked = threading.Barrier(2, timeout=60), threading.Lock(), [], []

    def all_reduce(self, tensor, op, group=None):
        with self.lock:
            self.waiting.append(tensor.clone())
        self.barrier.wait()
        both = torch.stack(self.waiting)
        self.barrier.wait()
        tensor.copy_(both.sum(0) if op == torch.distributed.ReduceOp.SUM else both.amax(0))
        with self.lock:
            self.waiting.clear()
            self.asked.append((op, tensor.dtype))
        self.barrier.wait()

    def agree(self, *sides):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(ranks.agree, sides))


@pytest.fixture
def together(monkeypatch):
    both = Together()
    monkeypatch.setattr(ranks.dist, "all_reduce", both.all_reduce)
    return both


def image(seed, scale=1.0):
    return scale * torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(seed))


def step(layer, seed, scale=1.0):
    output = layer(image(seed, scale))
    output.backward(scale * torch.randn(output.shape, generator=torch.Generator().manual_seed(seed + 50)))
    layer.quantizers.iteration.add_(1)


def pair(fresh, recipe):
    layers = [fresh(Int8Conv2d, 4, 6, 3, recipe=recipe) for _ in range(2)]
    for layer in layers:
        layer.hooked = True  # an optimizer's hook counts iterations
    return layers


@pytest.mark.parametrize("recipe", RECIPES)
def test_afterwards_both_remember_the_same(recipe, fresh, differing, together):
    one, other = pair(fresh, recipe)
    for number in range(12):  # over a second search
        step(one, number)
        step(other, number + 100, scale=1.5)
        assert differing(one, other) != []
        together.agree([one], [other])
        assert differing(one, other) == []
    assert int(one.quantizers.iteration) == 12 and int(one.quantizers.count) == 12


def test_two_collectives_over_one_tensor_each(fresh, together):
    one, other = pair(fresh, "distribution-adaptive-int8")
    step(one, 0), step(other, 1)
    together.agree([one], [other])
    assert sorted(together.asked, key=str) == sorted(
        [(torch.distributed.ReduceOp.SUM, torch.float64), (torch.distributed.ReduceOp.MAX, torch.int64)] * 2, key=str
    )


def test_the_deviation_is_that_of_all_data_together(fresh, together):
    """Rank 1 has the larger gradients, so its direction counts for more; the mean of two deviations would be something else."""
    one, other = pair(fresh, "unified-int8")
    step(one, 0), step(other, 1, scale=3.0)
    terms = [layer.quantizers.grad_output.unshared[0].tolist() for layer in (one, other)]
    assert all(row[MEASURED] == 1.0 for row in terms)
    expected = deviation_of(*(a + b for a, b in zip(terms[0][:3], terms[1][:3], strict=True)))
    alone = [float(layer.quantizers.grad_output.observed[0, DEVIATION]) for layer in (one, other)]
    together.agree([one], [other])
    for layer in (one, other):
        agreed = layer.quantizers.grad_output.observed[0, DEVIATION]
        assert agreed == torch.tensor(expected, dtype=torch.float32) and float(agreed) not in alone
        assert not layer.quantizers.grad_output.unshared.any(), "told once"
    assert one.learning_rate_factor() == other.learning_rate_factor() < 1.0


def test_what_nobody_measured_stays(fresh, together):
    one, other = pair(fresh, "unified-int8")
    step(one, 0), step(other, 1)
    together.agree([one], [other])
    before = one.quantizers.grad_output.observed.clone()
    step(one, 2), step(other, 3)  # between two searches
    assert not one.quantizers.grad_output.unshared.any()
    together.agree([one], [other])
    for layer in (one, other):
        assert torch.equal(layer.quantizers.grad_output.observed[:, DEVIATION], before[:, DEVIATION])


def test_a_zero_gradient_is_a_measurement_too(fresh, together):
    """Its deviation is 0: the last one must not linger."""
    one, other = pair(fresh, UnifiedInt8(observe_every=1, strict=True))
    for layer in (one, other):
        step(layer, 0)
        layer.quantizers.grad_output.observed[0, DEVIATION] = 0.5
        output = layer(image(1))
        output.backward(torch.zeros_like(output))
    together.agree([one], [other])
    assert float(one.quantizers.grad_output.observed[0, DEVIATION]) == 0.0


def test_a_rank_that_never_called_the_layer_learns_of_it(fresh, differing, together):
    one, other = pair(fresh, "distribution-adaptive-int8")
    step(one, 0)
    before = {name: buffer.clone() for name, buffer in one.named_buffers()}
    one.quantizers.iteration.zero_()
    together.agree([one], [other])
    assert differing(one, other) == []
    state = dict(other.named_buffers())
    assert all(torch.equal(state[name], value) for name, value in before.items() if "iteration" not in name)


@pytest.mark.parametrize(("per", "output"), [("tensor", True), ("C", False)])
def test_tracked_clips_are_those_of_the_whole_batch(per, output, fresh, together):
    recipe = PlainInt8(strict=True, input=TensorRule(per=per), output=output)
    one, other = pair(fresh, recipe)
    whole = fresh(Int8Conv2d, 4, 6, 3, recipe=recipe)
    for number in range(4):
        step(one, number), step(other, number + 100, scale=0.9)
        together.agree([one], [other])
        whole(torch.cat([image(number), image(number + 100, 0.9)]))
        for layer in (one, other):
            assert torch.equal(layer.quantizers.input.tracked, whole.quantizers.input.tracked), number


def held(layer, clip, at, initialized=1.0):
    quantizer = layer.quantizers.grad_output
    quantizer.clip[0], quantizer.updated_at[0], quantizer.initialized[0], quantizer.seen[0] = clip, at, initialized, 1.0


@pytest.mark.parametrize(
    ("one", "other", "agreed"),
    [
        ((2.0, 10), (3.0, 10), (3.0, 10)),
        ((2.0, 12), (3.0, 10), (2.0, 12)),  # searched again: an older, larger clip must not come back
        ((2.0, 0), (0.0, 0, 0.0), (2.0, 0)),  # nothing there on the other rank
        ((-2.0, 3), (-2.0, 3), (-2.0, 3)),  # a user's rule may remember what it likes
    ],
)
def test_of_clips_the_newest_search_counts_then_the_largest(one, other, agreed, fresh, together):
    layers = pair(fresh, "unified-int8")
    for layer, how in zip(layers, (one, other), strict=True):
        held(layer, *how)
    together.agree(*[[layer] for layer in layers])
    for layer in layers:
        quantizer = layer.quantizers.grad_output
        assert (float(quantizer.clip[0, 0]), int(quantizer.updated_at[0]), float(quantizer.initialized[0])) == (*agreed, 1.0)


def test_call_slots_stay_apart(fresh, differing, together):
    one, other = pair(fresh, "distribution-adaptive-int8")
    for layer, slots in ((one, (0, 2)), (other, (0, 1))):
        for slot in slots:
            for quantizer in layer.quantizers.each():
                quantizer.seen[slot], quantizer.clip[slot], quantizer.initialized[slot] = 1.0, 10.0 + slot, 1.0
    together.agree([one], [other])
    assert differing(one, other) == []
    for quantizer in one.quantizers.each():
        assert quantizer.clip[:, 0].tolist() == [10.0, 11.0, 12.0, *[0.0] * 5]
        assert quantizer.seen.tolist() == [1.0, 1.0, 1.0, *[0.0] * 5]


def test_nan_on_one_rank_is_known_to_both_once(fresh, together):
    sides = [pair(fresh, UnifiedInt8(on_nonfinite="skip", strict=True)) for _ in range(2)]
    output = sides[1][1](image(0))
    output.backward(torch.full_like(output, float("nan")))
    found = together.agree(*sides)
    assert found == [([sides[0][1]], None), ([sides[1][1]], None)], "the second layer, on both ranks"
    assert [int(side[1].quantizers.nonfinite) for side in sides] == [1, 1]
    assert together.agree(*sides) == [([], None), ([], None)]


def test_without_layers_nobody_is_asked(monkeypatch):
    monkeypatch.setattr(ranks.dist, "all_reduce", None)
    assert ranks.agree([]) == ([], None) and not ranks.met_nonfinite([])


def test_one_process_counts_nan_once(fresh):
    layer = fresh(Int8Conv2d, 4, 6, 3, recipe=UnifiedInt8(on_nonfinite="skip", strict=True))
    assert not ranks.are_several() and not ranks.met_nonfinite([layer])
    layer(torch.full((2, 4, 6, 6), float("nan")))
    assert layer.quantizers.input.unshared[0, NONFINITE] == 1.0
    assert ranks.met_nonfinite([layer]) and not ranks.met_nonfinite([layer])


def test_what_is_not_shared_yet_is_in_no_checkpoint_and_no_buffer(fresh):
    """DistributedDataParallel overwrites buffers with those of rank 0."""
    layer = fresh(Int8Conv2d, 4, 6, 3, recipe="unified-int8")
    step(layer, 0)
    assert layer.quantizers.grad_output.unshared.any()
    assert not any("unshared" in name for name in (*layer.state_dict(), *dict(layer.named_buffers())))
    state = layer.state_dict()
    for forget in (lambda: layer.load_state_dict(state), layer.quantizers.reset):
        layer.quantizers.grad_output.unshared.fill_(1.0)
        forget()
        assert not layer.quantizers.grad_output.unshared.any()


def test_it_moves_with_the_model_and_stays_float64(fresh):
    layer = fresh(Int8Conv2d, 4, 6, 3, recipe="unified-int8")
    own = layer.quantizers.grad_output
    own.unshared[0, 0] = 1.0 + 2.0**-40
    layer.quantizers.half()
    assert own.unshared.dtype == torch.float64 and float(own.unshared[0, 0]) == 1.0 + 2.0**-40
    layer.quantizers.to("meta")
    assert own.unshared.is_meta
    layer.quantizers.to_empty(device="cpu")
    assert not own.unshared.any() and own.unshared.dtype == torch.float64
