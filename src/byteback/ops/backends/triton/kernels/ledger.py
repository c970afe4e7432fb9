# SPDX-License-Identifier: Apache-2.0
"""The state of a quantizer, read and written in device memory by one program (reference/quantizer.py: write).

Columns of `observed`: SATURATED 0, DEVIATION 1, OWN 2, CLIP 3, WORST_CHANNEL 4, then more diagnostics of the clip rule.
Columns of `unshared`: XQ 0, QQ 1, XX 2, MEASURED 3, NONFINITE 4 (its rows: ops/refusals.py).
"""

import triton
import triton.language as tl


@triton.jit
def deviation_of(xq, qq, xx):
    """Returns 1 - cosine in float64 (ops/quantizer.py: deviation_of)."""
    square = qq * xx
    norm = tl.where(square > 0.0, tl.sqrt(tl.where(square > 0.0, square, square * 0.0 + 1.0)), 0.0)
    cosine = tl.where(norm > 0.0, xq / tl.where(norm > 0.0, norm, norm * 0.0 + 1.0), 0.0)
    away = 1.0 - cosine
    return tl.where(xx > 0.0, tl.where(away > 0.0, away, 0.0), 0.0)


@triton.jit
def due(initialized, updated_at, iteration, flags, SLOT, PERIOD, EVERY, HOLDS: tl.constexpr):
    """Writes the schedule of a step (search.py): KNOWN, SEARCHES, OBSERVES, CHANGES, AGAIN, NEAR, COARSE."""
    now = tl.load(iteration)
    known = tl.load(initialized + SLOT) != 0.0
    fresh = known & (now - tl.load(updated_at + SLOT) < PERIOD)
    zero = (now * 0).to(tl.int32)
    tl.store(flags + 2, (now % EVERY == 0).to(tl.int32))
    if HOLDS:
        tl.store(flags, fresh.to(tl.int32))
        tl.store(flags + 1, (fresh == 0).to(tl.int32))
        tl.store(flags + 3, zero)
        tl.store(flags + 5, (known & (fresh == 0)).to(tl.int32))
    else:
        tl.store(flags, zero)
        tl.store(flags + 1, zero)
        tl.store(flags + 3, zero + 1)
        tl.store(flags + 5, zero)
    tl.store(flags + 4, zero)
    tl.store(flags + 6, zero)


@triton.jit
def _flag(unshared, bad, now, ORDER):
    """Flags the error of a tensor that was not finite, unless one is flagged (rows REFUSED to ORDER of NONFINITE)."""
    if (bad > 0) & (tl.load(unshared + 9) == 0.0):
        tl.store(unshared + 9, (bad * 0 + 1).to(tl.float64))
        tl.store(unshared + 14, bad.to(tl.float64))
        tl.store(unshared + 19, now.to(tl.float64))
        tl.store(unshared + 24, (bad * 0 + ORDER).to(tl.float64))


@triton.jit(do_not_specialize=["ORDER"])
def flag(unshared, counts, iteration, ORDER):
    _flag(unshared, tl.load(counts + 1), tl.load(iteration), ORDER)


@triton.jit(do_not_specialize=["ORDER"])  # it is another number in each launch
def write(
    clip, initialized, updated_at, observed, seen, tracked, nonfinite, unshared,
    used, remembered, changed, searched, measured, terms, counts, own, worst, iteration,
    SLOT, ENTRIES, COLUMNS, USED, REMEMBERED, KEEP, ADD, NUMEL, ORDER,
    REMEMBER: tl.constexpr, TRACKS: tl.constexpr, DIAGNOSTICS: tl.constexpr, WORST: tl.constexpr,
    RAISES: tl.constexpr, COUNTS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Writes one step of a quantizer, or, if the tensor was not finite, only counts and flags it."""
    bad = tl.load(counts + 1)
    now = tl.load(iteration)
    if COUNTS:
        met = tl.load(nonfinite)
        tl.store(nonfinite, met + (bad > 0).to(met.dtype))
        tl.store(unshared + 4, tl.load(unshared + 4) + (bad > 0).to(tl.float64))
        if RAISES:
            _flag(unshared, bad, now, ORDER)
    if REMEMBER:
        if bad == 0:
            i = tl.arange(0, B)
            kept, entries = tl.load(remembered + i, mask=i < REMEMBERED, other=0.0), i < ENTRIES
            if tl.load(changed) != 0:
                # Clips per sample have no fixed number: then the largest is remembered.
                if REMEMBERED != ENTRIES:
                    kept = tl.zeros_like(kept) + tl.max(kept, 0)
                tl.store(clip + SLOT * ENTRIES + i, kept, mask=entries)
                tl.store(initialized + SLOT, 1.0)
            if tl.load(searched) != 0:
                tl.store(updated_at + SLOT, now)
            applied = tl.load(used + i, mask=i < USED, other=0.0)
            row = observed + SLOT * COLUMNS
            share = tl.load(counts).to(tl.float64) / (bad * 0 + NUMEL).to(tl.float64)
            tl.store(row, share.to(tl.float32))
            if (tl.load(measured) != 0) | (tl.load(searched) != 0):
                xq, qq, xx = tl.load(terms), tl.load(terms + 1), tl.load(terms + 2)
                tl.store(row + 1, deviation_of(xq, qq, xx).to(tl.float32))
                tl.store(unshared + SLOT * 5, xq)
                tl.store(unshared + SLOT * 5 + 1, qq)
                tl.store(unshared + SLOT * 5 + 2, xx)
                tl.store(unshared + SLOT * 5 + 3, tl.full((), 1.0, tl.float64))
                if WORST:
                    tl.store(row + 4, tl.load(worst).to(tl.float32))
            if DIAGNOSTICS > 0:
                tl.store(row + 2, tl.load(own).to(tl.float32))
            tl.store(row + 3, tl.max(applied, 0))
            if TRACKS:
                if USED != ENTRIES:
                    applied = tl.zeros_like(applied) + tl.max(applied, 0)
                before = tl.load(tracked + SLOT * ENTRIES + i, mask=entries, other=0.0)
                averaged = before * KEEP + applied * ADD
                now_tracked = tl.where(tl.load(seen + SLOT) != 0.0, averaged, applied)
                tl.store(tracked + SLOT * ENTRIES + i, now_tracked, mask=entries)
            tl.store(seen + SLOT, 1.0)


@triton.jit
def void(q, scale, counts, TOTAL, SCALES, FILL, B: tl.constexpr):
    """Sets integers to 0 and scales to FILL if the tensor was not finite."""
    if tl.load(counts + 1) == 0:
        return
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(q + at, tl.zeros((B,), tl.int8), mask=at < TOTAL)
    tl.store(scale + at, tl.zeros((B,), tl.float32) + FILL, mask=at < SCALES)
