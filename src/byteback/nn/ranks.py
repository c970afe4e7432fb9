# SPDX-License-Identifier: Apache-2.0
"""Gives the int8 layers of all ranks the same state before the optimizer takes a step.

Each rank quantizes its own data, so each measures its own direction deviation and clips. Learning-rate factors computed from
them would differ between ranks, and so would the weights after the step. There are two collectives, each over one flat tensor:

    SUM   x·x̂, x̂·x̂ and x·x of every tensor that was measured since the last step. The cosine of the sums is the one that a
          single process with the whole batch would measure. Also the number of tensors with NaN or Inf, errors that were
          deferred (flags.py), and call slots in use.
    MAX   all other state of a layer: counters, flags, the new deviation, clips. The clip of the newest search is used, and of
          several the largest. The maximum of the ranks' averages is the average of their largest clips, so a tracked clip is
          that of the whole batch.

MAX returns one of its arguments, so all ranks get the same bits, whatever the order in which a backend adds. Both collectives
run in the hook of the optimizer. They must not run in forward or backward, because a rank without data for a layer would not
call them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from byteback.nn import flags
from byteback.nn.layers.layer import Int8Layer
from byteback.nn.layers.numerics import LayerNumerics
from byteback.ops.refusals import MET, first
from byteback.quantize import CALL_SLOTS, DEVIATION, MEASURED, NONFINITE, QQ, XQ, XX, NonFiniteError, Quantizer, deviation_of

_WORD = 32
_MASK = (1 << _WORD) - 1


def are_several(group: Any = None) -> bool:
    """Whether the group of this process has several ranks (default: the group of all ranks)."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def met_nonfinite(layers: Sequence[Int8Layer]) -> bool:
    """Whether a layer of this process quantized NaN or Inf since the last call."""
    unshared = [quantizer.unshared for quantizer in _quantizers(layers)]
    met = bool(unshared) and bool(_stack(unshared)[:, 0, NONFINITE].any())
    if met:
        for own in unshared:
            own[0, NONFINITE] = 0.0
    return met


@torch.no_grad()
def agree(layers: Sequence[Int8Layer], group: Any = None) -> tuple[list[Int8Layer], NonFiniteError | None]:
    """Gives the layers of all ranks the same state.

    Returns the layers that met NaN or Inf on any rank since the last call, and the error that a rank has deferred, if there is
    one: all ranks get it. Every rank of the group must call it with the same layers in the same order.
    """
    quantizers = _quantizers(layers)
    if not quantizers:
        return [], None
    kept = [layer.quantizers for layer in layers]
    weights = kept if flags.any_defers(kept) else []  # their flags, in rows after those of the quantizers
    unshared = [quantizer.unshared for quantizer in quantizers] + [weight.unshared for weight in weights]
    own = _stack(unshared)
    seen = _stack([quantizer.seen for quantizer in quantizers]).unsqueeze(-1)
    seen = torch.cat([seen, seen.new_zeros(len(weights), *seen.shape[1:])])
    sums = torch.cat([own, seen.to(own.dtype)], dim=-1)
    dist.all_reduce(sums, dist.ReduceOp.SUM, group)
    torch._foreach_zero_(unshared)
    count = len(quantizers)
    _write_deviations(quantizers, sums[:count])
    _take_largest(_Kept.of(kept, quantizers, sums[:count, :, -1]), sums.device, group)
    columns = sums[..., NONFINITE].tolist()
    met = iter(columns[:count])
    bad = [layer for layer in layers if sum([next(met)[MET] for _ in layer.quantizers.each()])]
    return bad, first(columns, [holder.name() for holder in flags.holders(kept)]) if weights else None


def _quantizers(layers: Sequence[Int8Layer]) -> list[Quantizer]:
    return [quantizer for layer in layers for quantizer in layer.quantizers.each()]


def _stack(tensors: list[Tensor]) -> Tensor:
    """Stacks tensors on the device of the first one: a model may be on several devices."""
    return torch.stack([tensor.to(tensors[0].device) for tensor in tensors])


def _write_deviations(quantizers: list[Quantizer], sums: Tensor) -> None:
    """Writes the deviations of the sums. A tensor that no rank measured since the last step keeps its deviation."""
    measured = sums[..., MEASURED].nonzero()
    rows = sums[measured[:, 0], measured[:, 1]].tolist()
    for (index, slot), row in zip(measured.tolist(), rows, strict=True):
        quantizers[index].observed[slot, DEVIATION] = deviation_of(row[XQ], row[QQ], row[XX])


class _Kept(NamedTuple):
    """All state of the layers: the buffers themselves, or views of them."""

    clips: list[Tensor]  # a row for each call slot, an entry for each scale
    initialized: list[Tensor]
    updated_at: list[Tensor]
    floats: list[Tensor]  # not negative
    counters: list[Tensor]

    @staticmethod
    def of(layers: list[LayerNumerics], quantizers: list[Quantizer], used: Tensor) -> _Kept:
        kept = _Kept([], [], [], [], [n for layer in layers for n in (layer.count, layer.iteration, layer.nonfinite)])
        for quantizer, slots in zip(quantizers, used.tolist(), strict=True):
            own: dict[str, Any] = quantizer._buffers  # faster than nn.Module.__getattr__
            clip, tracked = own["clip"], own["tracked"]
            if clip.shape[1] > 1:  # only slots that at least one rank has used
                rows = max((slot + 1 for slot, ranks in enumerate(slots) if ranks), default=0)
                clip, tracked = clip[:rows], None if tracked is None else tracked[:rows]
            kept.clips.append(clip)
            kept.initialized.append(own["initialized"])
            kept.updated_at.append(own["updated_at"])
            kept.floats.extend((own["observed"], own["seen"]) if tracked is None else (own["observed"], own["seen"], tracked))
        return kept


def _take_largest(kept: _Kept, device: torch.device, group: Any) -> None:
    """Computes one MAX over all state, as int64: floats that are not negative have the same order as their bits."""
    # The upper bits are the iteration of a clip's search, so that the newest search is used; 0 if there is no clip.
    searches = (_flat(kept.updated_at, device) + 1) * (_flat(kept.initialized, device) > 0)
    scales = [[clip.shape[1]] * clip.shape[0] + [0] * (CALL_SLOTS - clip.shape[0]) for clip in kept.clips]
    parts = [
        searches.repeat_interleave(torch.tensor(scales, device=device).flatten()) << _WORD | _bits(_flat(kept.clips, device)),
        searches,
        _bits(_flat(kept.floats, device)),
        _flat(kept.counters, device),
    ]
    flat = torch.cat(parts)
    dist.all_reduce(flat, dist.ReduceOp.MAX, group)
    clips, searches, floats, counters = flat.split([part.numel() for part in parts])
    _write(kept.clips, _floats(clips))
    _write(kept.updated_at, (searches - 1).clamp(min=0))
    _write(kept.initialized, (searches > 0).float())
    _write(kept.floats, _floats(floats))
    _write(kept.counters, counters)


def _flat(tensors: list[Tensor], device: torch.device) -> Tensor:
    return _flatten_dense_tensors([tensor.to(device) for tensor in tensors])


def _write(tensors: list[Tensor], flat: Tensor) -> None:
    torch._foreach_copy_(tensors, list(_unflatten_dense_tensors(flat, tensors)))


def _bits(floats: Tensor) -> Tensor:
    return floats.view(torch.int32).to(torch.int64) & _MASK


def _floats(bits: Tensor) -> Tensor:
    half = 1 << (_WORD - 1)
    return (((bits + half) & _MASK) - half).to(torch.int32).view(torch.float32)
