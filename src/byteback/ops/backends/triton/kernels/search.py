# SPDX-License-Identifier: Apache-2.0
"""The search of a clip in device memory: which candidates are tried, and which is best (recipes/direction_search.py: grid).

`work` is float64: 16 ratios (0: unused), their 16 deviations, and the result. Candidates are float32, because the clip that is
tried is a float32 product. `flags` is the schedule (search.py); single numbers and lists of float64 are in memory.
"""

import triton
import triton.language as tl

from byteback.ops.backends.triton.kernels.ledger import deviation_of

_TINY = tl.constexpr(2.0**-100)
KNOWN, SEARCHES, OBSERVES, CHANGES, AGAIN, NEAR, COARSE, READS = (tl.constexpr(number) for number in range(8))
_DEVIATIONS = tl.constexpr(16)
_RESULT = tl.constexpr(32)


@triton.jit
def refit(memory, used, remembered, counts, peak, flags, band, SLOT, ENTRIES, BANDED: tl.constexpr):
    """A held clip that is not within a factor of band of ratio · max|g| becomes that."""
    tl.store(flags + AGAIN, tl.load(flags) * 0)
    if BANDED:
        if (tl.load(flags + KNOWN) != 0) & (tl.load(counts + 1) == 0):
            ratio = tl.load(memory + SLOT * ENTRIES)
            fitting = tl.load(peak) * ratio
            wide = fitting.to(tl.float64)
            off = tl.load(used).to(tl.float64) / tl.where(wide > 0.0, wide, wide * 0.0 + 1.0)
            if (wide > 0.0) & ((off < tl.load(band)) | (off > tl.load(band + 1))):
                tl.store(used, fitting)
                tl.store(remembered + 1, fitting)
                tl.store(counts, tl.load(counts) * 0)
                tl.store(flags + CHANGES, tl.load(flags) * 0 + 1)
                tl.store(flags + AGAIN, tl.load(flags) * 0 + 1)


@triton.jit
def decide(memory, counts, largest, flags, work, tried, limits, factors, SLOT, ENTRIES, NUMEL):
    """Searches if a search is due or too much saturates, and proposes candidates around the last ratio if it is due.

    limits: the saturated share, the lowest ratio.
    """
    bad = tl.load(counts + 1)
    share = tl.load(counts).to(tl.float64) / (bad * 0 + NUMEL).to(tl.float64)
    stale = (tl.load(flags + KNOWN) != 0) & (share > tl.load(limits))
    searches = ((tl.load(flags + SEARCHES) != 0) | stale) & (bad == 0)
    size = tl.load(largest)
    near = searches & (tl.load(flags + NEAR) != 0) & (stale == 0) & (size >= _TINY)
    tl.store(flags + SEARCHES, searches.to(tl.int32))
    tl.store(flags + READS, (searches | (tl.load(flags + OBSERVES) != 0)).to(tl.int32))
    tl.store(flags + NEAR, near.to(tl.int32))
    tl.store(flags + COARSE, (searches & (near == 0) & (size >= _TINY)).to(tl.int32))
    i = tl.arange(0, 16)
    around = tl.load(memory + SLOT * ENTRIES).to(tl.float64)
    ratio = around * tl.load(factors + i)
    lowest = tl.load(limits + 1)
    ratio = tl.where(ratio < lowest, lowest, ratio)
    ratio = tl.where(ratio > 1.0, 1.0, ratio)
    ratio = tl.where((tl.load(factors + i) > 0.0) & near, ratio, 0.0)
    tl.store(work + i, ratio)
    tl.store(tried + i, ratio.to(tl.float32))


@triton.jit
def _best(ratio, away, tie):
    """Returns the largest ratio whose deviation is the least, or differs from it by at most `tie`."""
    valid = ratio > 0.0
    least = tl.min(tl.where(valid, away, float("inf")), 0)
    return tl.max(tl.where(valid & (away <= least + tie), ratio, 0.0), 0)


@triton.jit
def _vertex(ratio, away, best):
    """Returns the minimum of the parabola through `best` and its neighbours; `best` itself at an end or on a tie."""
    below = tl.max(tl.where((ratio > 0.0) & (ratio < best), ratio, 0.0), 0)
    above = tl.min(tl.where(ratio > best, ratio, float("inf")), 0)
    inner = (below > 0.0) & (above < float("inf"))
    here = tl.min(tl.where(ratio == best, away, float("inf")), 0)
    down = tl.min(tl.where(ratio == below, away, float("inf")), 0) - here
    up = tl.min(tl.where(ratio == above, away, float("inf")), 0) - here
    inner = inner & (down > 0.0) & (up > 0.0)
    u, v = tl.where(inner, below - best, -1.0), tl.where(inner, above - best, 1.0)
    down, up = tl.where(inner, down, 1.0), tl.where(inner, up, 1.0)
    return tl.where(inner, best + (u * u * up - v * v * down) / (2.0 * (u * up - v * down)), best)


@triton.jit
def _measured(terms, work, FIRST: tl.constexpr):
    """Writes the deviations of the candidates from FIRST on, and returns all ratios and deviations."""
    i = tl.arange(0, 16)
    ratio = tl.load(work + i)
    new = (i >= FIRST) & (ratio > 0.0)
    at = terms + (i - FIRST) * 3
    xq, qq = tl.load(at, mask=new, other=0.0), tl.load(at + 1, mask=new, other=0.0)
    xx = tl.load(at + 2, mask=new, other=0.0)
    away = tl.where(new, deviation_of(xq, qq, xx), tl.load(work + _DEVIATIONS + i))
    tl.store(work + _DEVIATIONS + i, away)
    return ratio, away


@triton.jit
def judge_near(terms, flags, work, tried, coarse, tie):
    """Accepts a minimum inside the small grid or at 1. Otherwise proposes the coarse grid."""
    if tl.load(flags + NEAR) != 0:
        ratio, away = _measured(terms, work, 0)
        best = _best(ratio, away, tl.load(tie))
        lowest = tl.min(tl.where(ratio > 0.0, ratio, float("inf")), 0)
        accepted = (best == 1.0) | ((lowest < best) & (best < tl.max(ratio, 0)))
        tl.store(work + _RESULT, _vertex(ratio, away, best))
        tl.store(flags + COARSE, (accepted == 0).to(tl.int32))
    if tl.load(flags + COARSE) != 0:
        i = tl.arange(0, 16)
        tl.store(work + i, tl.load(coarse + i))
        tl.store(tried + i, tl.load(coarse + i).to(tl.float32))


@triton.jit
def judge_coarse(terms, flags, work, tried, tie, step, lowest, FINE: tl.constexpr):
    """Proposes the fine grid between the neighbours of the best."""
    if tl.load(flags + COARSE) == 0:
        return
    ratio, away = _measured(terms, work, 0)
    best = _best(ratio, away, tl.load(tie))
    low, high = best * tl.load(step), best / tl.load(step)
    low = tl.where(low < tl.load(lowest), tl.load(lowest), low)
    high = tl.where(high > 1.0, 1.0, high)
    i = tl.arange(0, 8)
    count = tl.zeros((8,), tl.float64) + (FINE + 1)
    finer = low + (high - low) * (i + 1).to(tl.float64) / count
    tl.store(work + 8 + i, finer)
    tl.store(tried + i, finer.to(tl.float32))


@triton.jit
def judge_fine(terms, flags, work, tie):
    if tl.load(flags + COARSE) == 0:
        return
    ratio, away = _measured(terms, work, 8)
    tl.store(work + _RESULT, _vertex(ratio, away, _best(ratio, away, tl.load(tie))))


@triton.jit
def accept(
    flags, work, peak, largest, used, remembered, counts, iteration, EVERY, C,
    AFTER_ZERO: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Sets the clip ratio · max|g| after a search, of the tensor or of each channel."""
    searches = tl.load(flags + SEARCHES) != 0
    tl.store(flags + AGAIN, searches.to(tl.int32))
    i = tl.arange(0, B)
    if searches:
        tiny = tl.load(largest) < _TINY
        ratio = tl.load(work + _RESULT).to(tl.float32)
        ratio = tl.where(tiny, ratio * 0.0 + 1.0, ratio)
        clip = tl.load(peak + i, mask=i < C, other=0.0)
        clip = tl.where(tiny, clip, clip * ratio)
        tl.store(used + i, clip, mask=i < C)
        tl.store(counts, tl.load(counts) * 0)
        remembers = tl.load(flags + SEARCHES)
        if AFTER_ZERO:
            remembers = remembers * (tiny == 0).to(tl.int32)
        tl.store(flags + SEARCHES, remembers)
        tl.store(flags + CHANGES, remembers)
        tl.store(remembered + 1 + i, clip, mask=i < C)
        tl.store(remembered, ratio)
    observes = tl.load(iteration) % EVERY == 0
    tl.store(flags + OBSERVES, (observes | (tl.load(flags + SEARCHES) != 0)).to(tl.int32))
