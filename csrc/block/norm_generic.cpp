// SPDX-License-Identifier: Apache-2.0
// The passes of norm.h in simple loops.
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "core/generic.h"
#include "block/norm.h"
#include "core/parallel.h"
#include "elementwise/rows.h"

namespace byteback::generic {

namespace {

template <class To, class From>
To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From), "the same bits in another type");
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
}

// ---- the functions of one element ------------------------------------------------------------------------------------

f32 power_of_two(s32 n) { return bits_as<f32>((n + 127) << 23); }

f32 exponential(f32 t) {
    if (std::isnan(t)) return t;
    t = t < kExpLowest ? kExpLowest : t > kExpHighest ? kExpHighest : t;
    const f32 n = std::nearbyint(t * kLog2E);
    const f32 r = (t - n * kLn2High) - n * kLn2Low;
    const f32 square = r * r, upper = kExp5 * r + kExp4, lower = kExp3 * r + kExp2;
    const f32 tail = upper * square + lower;
    return ((tail * square + r) + 1.0f) * power_of_two(static_cast<s32>(n));
}

// A NaN stays one; -0 becomes +0.
f32 above_zero(f32 z) { return z <= 0.0f ? 0.0f : z; }
f32 below_six(f32 z) { return z > 6.0f ? 6.0f : z; }

// What gelu and its derivative are made of (norm.h). A NaN stays one.
struct NormalTail {
    f32 x, e, m;

    explicit NormalTail(f32 z)
        : x(std::fabs(z) > kGeluEnd ? kGeluEnd : std::fabs(z)), e(exponential((x * x) * -0.5f)), m(kGelu6) {
        const f32 t = 1.0f / (1.0f + kGeluStretch * x);
        for (const f32 c : {kGelu5, kGelu4, kGelu3, kGelu2, kGelu1}) m = m * t + c;
        m = m * t;
    }
};

f32 gelu(f32 z) {
    const NormalTail tail(z);
    return above_zero(z) - tail.x * (tail.e * tail.m);
}

f32 gelu_slope(f32 z) {
    const NormalTail tail(z);
    const f32 u = tail.e * (tail.m - kGeluDensity * tail.x);
    return z < 0.0f ? u : 1.0f - u;
}

f32 activate(Activation activation, f32 z) {
    switch (activation) {
        case Activation::relu: return above_zero(z);
        case Activation::relu6: return below_six(above_zero(z));
        case Activation::hardswish: return (z * below_six(above_zero(z + 3.0f))) / 6.0f;
        case Activation::silu: return z / (1.0f + exponential(-z));
        case Activation::gelu: return gelu(z);
        default: return z;
    }
}

bool passes(Activation activation, f32 z) {
    return activation == Activation::relu ? z > 0.0f : activation == Activation::relu6 ? z > 0.0f && z < 6.0f : true;
}

f32 gated(Gate gate, bool bit, f32 g, f32 z) {
    switch (gate) {
        case Gate::mask: return bit ? g : 0.0f;
        case Gate::relu: return z > 0.0f ? g : 0.0f;
        case Gate::relu6: return z > 0.0f && z < 6.0f ? g : 0.0f;
        case Gate::hardswish: return g * (z < -3.0f ? 0.0f : z <= 3.0f ? z / 3.0f + 0.5f : 1.0f);
        case Gate::silu: {
            const f32 s = 1.0f / (1.0f + exponential(-z));
            return g * (s * (1.0f + z * (1.0f - s)));
        }
        case Gate::gelu: return g * gelu_slope(z);
        default: return g;
    }
}

// An element of floats that are not s8.
f32 real_at(const void* values, Stored kind, s64 at) {
    return kind == Stored::bf16 ? from_bf16(static_cast<const bf16*>(values)[at]) : static_cast<const f32*>(values)[at];
}

void set_real(void* values, Stored kind, s64 at, f32 x) {
    if (kind == Stored::bf16)
        static_cast<bf16*>(values)[at] = to_bf16(x);
    else
        static_cast<f32*>(values)[at] = x;
}

f32 kept_value(const Kept& x, s64 at, s64 c) {
    if (x.kind != Stored::s8) return real_at(x.values, x.kind, at);
    return static_cast<f32>(static_cast<const s8*>(x.values)[at]) * x.step[c] + x.centre[c];
}

void keep(const Outcome& to, f32 x, s64 at, s64 c) {
    if (to.kind == Stored::bf16) {
        static_cast<bf16*>(to.kept)[at] = to_bf16(x);
    } else {
        const f32 y = (x - to.centre[c]) * (1.0f / to.step[c]);
        static_cast<s8*>(to.kept)[at] = std::isnan(y) ? s8{0} : static_cast<s8>(std::nearbyint(clamped(y)));
    }
}

// ---- whole passes ----------------------------------------------------------------------------------------------------

f32 forward_z(const Forward& f, s64 at, s64 c) {
    f32 z = f.a[c] * real_at(f.x, f.x_kind, at);
    z = z + f.b[c];
    if (!f.residual) return z;
    if (f.residual_kind != Stored::s8) return z + real_at(f.residual, f.residual_kind, at);
    const f32 residual = static_cast<f32>(static_cast<const s8*>(f.residual)[at]) * f.residual_scale;
    return z + residual;
}

f32 masked_gradient(const Backward& b, s64 row, s64 c) {
    const s64 at = row * b.channels + c;
    f32 z = 0.0f;
    if (b.gate != Gate::open && b.gate != Gate::mask) z = b.a[c] * kept_value(b.x, at, c) + b.b[c];
    const bool bit = b.gate == Gate::mask && (b.mask[row * mask_width(b.channels) + c / 8] >> c % 8 & 1);
    return gated(b.gate, bit, real_at(b.g, b.g_kind, at), z);
}

f32 gradient(const Backward& b, s64 row, s64 c) {
    const f32 from_g = b.p[c] * masked_gradient(b, row, c);
    const f32 from_x = b.q[c] * kept_value(b.x, row * b.channels + c, c);
    return (from_g + from_x) + b.r[c];
}

// body(row, channel, report) over all elements; the threads' reports joined.
template <class Body>
Report each_element(s64 rows, s64 channels, int threads, const Body& body) {
    std::vector<Report> parts(threads > 1 ? threads : 1, Report{0, 0, 0.0f});
    parallel_ranges(threads, rows, [&](int thread, s64 begin, s64 end) {
        for (s64 row = begin; row < end; ++row)
            for (s64 c = 0; c < channels; ++c) body(row, c, parts[thread]);
    });
    Report all{0, 0, 0.0f};
    for (const Report& part : parts) all = joined(all, part);
    return all;
}

// The ordered sum of value(row, channel) for each channel: blocks of 64 rows, then the blocks as a halving tree.
template <class Value>
void ordered_sum(s64 rows, s64 channels, f64* sums, int threads, const Value& value) {
    const s64 count = ceil_div(rows, kStatisticsBlock);
    std::vector<f64> blocks((count ? count : 1) * channels, 0.0);
    parallel_for(threads, count * channels, [&](s64 item) {
        s64 row = item / channels * kStatisticsBlock;
        const s64 left = rows - row, c = item % channels;
        blocks[item] = sum_block(left < kStatisticsBlock ? left : kStatisticsBlock, [&] { return value(row++, c); });
    });
    add_tree(blocks.data(), count, channels, 0, channels);
    for (s64 c = 0; c < channels; ++c) sums[c] = blocks[c];
}

}  // namespace

void channel_stats(s64 rows, s64 channels, const void* x, Stored kind, f64* total, f64* squares, f32* low, f32* high,
                   int threads) {
    const auto value = [&](s64 row, s64 c) { return f64{real_at(x, kind, row * channels + c)}; };
    ordered_sum(rows, channels, total, threads, value);
    ordered_sum(rows, channels, squares, threads, [&](s64 row, s64 c) { return value(row, c) * value(row, c); });
    parallel_for(threads, channels, [&](s64 c) {
        f32 least = real_at(x, kind, c), most = least;
        for (s64 row = 1; row < rows; ++row) {
            const f32 v = real_at(x, kind, row * channels + c);
            if (v < least || std::isnan(v)) least = v;
            if (v > most || std::isnan(v)) most = v;
        }
        // Adding +0 leaves one kind of zero.
        low[c] = least + 0.0f, high[c] = most + 0.0f;
    });
}

f32 normalize_peak(const Forward& f, int threads) {
    const auto see = [&](s64 row, s64 c, Report& seen) {
        const f32 z = forward_z(f, row * f.channels + c, c);
        seen.peak = larger(seen.peak, std::fabs(activate(f.activation, z)));
    };
    return each_element(f.rows, f.channels, threads, see).peak;
}

Report normalize(const Forward& f, const Outcome& to, int threads) {
    if (to.mask) std::memset(to.mask, 0, f.rows * mask_width(f.channels));
    return each_element(f.rows, f.channels, threads, [&](s64 row, s64 c, Report& seen) {
        const s64 at = row * f.channels + c, result = row * to.pitch + c;
        const f32 z = forward_z(f, at, c), value = activate(f.activation, z);
        if (to.output) set_real(to.output, to.output_kind, result, value);
        if (to.mask && passes(f.activation, z)) to.mask[row * mask_width(f.channels) + c / 8] |= static_cast<u8>(1 << c % 8);
        if (to.values) to.values[result] = quantized(value, to.clip, -1.0f, seen);
        if (to.kept) keep(to, real_at(f.x, f.x_kind, at), at, c);
    });
}

void normalize_grad_sums(const Backward& b, f64* total, f64* dot, f64* squares, void* masked, int threads) {
    ordered_sum(b.rows, b.channels, total, threads, [&](s64 row, s64 c) { return f64{masked_gradient(b, row, c)}; });
    ordered_sum(b.rows, b.channels, dot, threads, [&](s64 row, s64 c) {
        return f64{masked_gradient(b, row, c)} * f64{kept_value(b.x, row * b.channels + c, c)};
    });
    if (squares)
        ordered_sum(b.rows, b.channels, squares, threads, [&](s64 row, s64 c) {
            const f64 g = masked_gradient(b, row, c);
            return g * g;
        });
    if (masked)
        each_element(b.rows, b.channels, threads, [&](s64 row, s64 c, Report&) {
            set_real(masked, masked_kind(b), row * b.channels + c, masked_gradient(b, row, c));
        });
}

void normalize_grad(const Backward& b, f32* dx, int threads) {
    each_element(b.rows, b.channels, threads, [&](s64 row, s64 c, Report&) { dx[row * b.channels + c] = gradient(b, row, c); });
}

Report normalize_grad_quantize(const Backward& b, f32 clip, Noise noise, s8* values, int threads) {
    return each_element(b.rows, b.channels, threads, [&](s64 row, s64 c, Report& seen) {
        const f32 u = noise.stochastic ? uniform(noise, b.channels, row, c) : -1.0f;
        values[row * b.channels + c] = quantized(gradient(b, row, c), clip, u, seen);
    });
}

void normalize_grad_tails(const Backward& b, const f32* each, f32 all, f32* peak, s64* over_each, s64* over_all, int threads) {
    parallel_for(threads, b.channels, [&](s64 c) {
        over_each[c] = over_all[c] = 0;
        peak[c] = 0.0f;
        for (s64 row = 0; row < b.rows; ++row) {
            const f32 size = std::fabs(gradient(b, row, c));
            peak[c] = larger(peak[c], size);
            over_each[c] += size > each[c];
            over_all[c] += size > all;
        }
    });
}

void tail_count_pair(s64 rows, s64 channels, const f32* x, const f32* each, f32 all, s64* over_each, s64* over_all,
                     int threads) {
    parallel_for(threads, channels, [&](s64 c) {
        over_each[c] = over_all[c] = 0;
        for (s64 row = 0; row < rows; ++row) {
            over_each[c] += std::fabs(x[row * channels + c]) > each[c];
            over_all[c] += std::fabs(x[row * channels + c]) > all;
        }
    });
}

void quantize_pair(s64 rows, s64 channels, const f32* x, f32 clip, const f32* clips, Noise noise, s8* by_tensor, s8* by_channel,
                   Report reports[2], int threads) {
    const Rows all{1, rows, channels, 0, channels, 1};
    reports[1] = quantize(all, x, PerScale{clips, 0, 1}, noise, by_channel, threads);
    reports[0] = {0, reports[1].nonfinite, reports[1].peak};
    if (by_tensor) reports[0] = quantize(all, x, PerScale{&clip, 0, 0}, noise, by_tensor, threads);
}

void normalize_grad_quantize_pair(const Backward& b, f32 clip, const f32* clips, Noise noise, s8* by_tensor, s8* by_channel,
                                  Report reports[2], int threads) {
    const auto copy = [&](s8* values, auto clip_of) {
        return each_element(b.rows, b.channels, threads, [&](s64 row, s64 c, Report& seen) {
            const f32 u = noise.stochastic ? uniform(noise, b.channels, row, c) : -1.0f;
            values[row * b.channels + c] = quantized(gradient(b, row, c), clip_of(c), u, seen);
        });
    };
    reports[1] = copy(by_channel, [&](s64 c) { return clips[c]; });
    reports[0] = {0, reports[1].nonfinite, reports[1].peak};
    if (by_tensor) reports[0] = copy(by_tensor, [&](s64) { return clip; });
}

void pack_norm(s64 rows, s64 channels, const void* x, Stored kind, const Outcome& to, int threads) {
    each_element(rows, channels, threads, [&](s64 row, s64 c, Report&) {
        const s64 at = row * channels + c;
        keep(to, real_at(x, kind, at), at, c);
    });
}

void add_waiting(s64 rows, s64 channels, const Waiting& from, const f32* x, f32* dx, int threads) {
    each_element(rows, channels, threads, [&](s64 row, s64 c, Report&) {
        const bool passes = !from.mask || (from.mask[row * mask_width(channels) + c / 8] >> c % 8 & 1);
        const s64 at = row * channels + c;
        dx[at] = x[at] + (passes ? real_at(from.g, from.kind, at) : 0.0f);
    });
}

}  // namespace byteback::generic
