// SPDX-License-Identifier: Apache-2.0
// The elementwise passes of the fused training block: convolution → BatchNorm → (residual add) → activation → int8.
// The PyTorch version is in src/byteback/ops/backends/reference. Every float32 operation rounds once, in the order written.
//
// Tensors are dense channels-last rows (pixels in N, D, H, W order) of channels. Vectors have one float32 per channel.
// A mask has one bit per element, 1 where the gradient passes: byte c / 8 of a row of ceil(C / 8) bytes, bit c % 8.
#pragma once

#include "core/elementwise.h"

namespace byteback {

enum class Activation { none, relu, relu6, hardswish, silu, gelu };  // the numbers of ops/activations.py

// How a tensor of floats is stored. As the kept input of BatchNorm, s8 is x = float(q) * step[c] + centre[c]; as a residual, it
// is float(q) * scale.
enum class Stored { f32, bf16, s8 };

struct Kept {
    const void* values;
    Stored kind;
    const f32* step;
    const f32* centre;
};

// z = a * x + b, + residual where there is one; the value is activation(z).
struct Forward {
    s64 rows, channels;
    const void* x;
    const f32 *a, *b;
    const void* residual;
    f32 residual_scale;  // of s8
    Activation activation;
    Stored x_kind = Stored::f32;  // f32 or bf16
    Stored residual_kind = Stored::f32;
};

// What one forward pass writes; null where it is not wanted.
struct Outcome {
    void* output;
    u8* mask;
    s8* values;  // by `clip`, to nearest
    f32 clip;
    void* kept;  // x as bf16 or as round((x - centre) * (1 / step)), for backward
    Stored kind;
    const f32 *step, *centre;
    s64 pitch;  // elements from one row of output and values to the next; more than channels where others share the row
    Stored output_kind = Stored::f32;  // f32 or bf16
};

// What decides which gradient passes: everything, the bits of a mask, or z = a * x + b again.
enum class Gate { open, mask, relu, relu6, hardswish, silu, gelu };

// gm = g where the gate is open, else +0; for a smooth activation gm = g * activation'(z). dx = (p * gm + q * x) + r.
struct Backward {
    s64 rows, channels;
    const void* g;
    Kept x;
    const f32 *a, *b;
    const u8* mask;
    Gate gate;
    const f32 *p, *q, *r;
    Stored g_kind = Stored::f32;  // f32 or bf16
};

// How gm is stored: as g, of which it is a part. The product with a slope is f32.
inline Stored masked_kind(const Backward& from) {
    const bool smooth = from.gate == Gate::hardswish || from.gate == Gate::silu || from.gate == Gate::gelu;
    return smooth ? Stored::f32 : from.g_kind;
}

// A gradient that is added to another one: g where the mask is set, else +0; all of g without a mask.
struct Waiting {
    const void* g;
    const u8* mask;
    Stored kind = Stored::f32;  // f32 or bf16
};

inline s64 mask_width(s64 channels) { return (channels + 7) / 8; }

// exp(t) = 2^n * e^r, n = round(t * log2 e), r = (t - n * kLn2High) - n * kLn2Low; n * kLn2High is exact.
// e^r = ((c5 r + c4) r² + (c3 r + c2)) r² + r + 1 with the smallest greatest error for |r| <= ln2 / 2: 1.1e-7, 1.9e-7 with all
// roundings. t is clamped: at the lower end 1 + exp(t) is 1, at the upper end n is 128, whose 2^n has the bits of infinity.
constexpr f32 kExpLowest = -87.0f, kExpHighest = 89.0f;
constexpr f32 kLog2E = 1.44269504088896341f;
constexpr f32 kLn2High = 0.693359375f, kLn2Low = -2.12194440054690583e-4f;
constexpr f32 kExp2 = 0.499992311000824f, kExp3 = 0.16667115688323975f;
constexpr f32 kExp4 = 0.04189033433794975f, kExp5 = 0.008312501944601536f;

// gelu, with x = min(|z|, kGeluEnd), e = exp(-x² / 2), and the tail of the normal distribution as Φ(-x) = e * m(x):
//     gelu(z) = max(z, 0) - x * (e * m)        gelu'(z) = u for z < 0, else 1 - u, with u = e * (m - x / sqrt(2π))
// m = t (c1 + t (c2 + ... t c6)), t = 1 / (1 + kGeluStretch * x), with the smallest greatest error of e * m: 2.3e-8. With all
// roundings value and derivative are off by at most 2.5e-7 for |z| <= 10. Beyond the end x * e is below 1e-30, and no
// subnormal number.
constexpr f32 kGeluEnd = 12.0f, kGeluStretch = 0.28125f, kGeluDensity = 0.3989422804014327f;
constexpr f32 kGelu1 = 0.115496784f, kGelu2 = 0.07827214f, kGelu3 = 0.24149361f;
constexpr f32 kGelu4 = -0.199391f, kGelu5 = 0.36526638f, kGelu6 = -0.1011379f;

#define BYTEBACK_NORM_FUNCTIONS                                                                                                \
    /* Per channel Σx, Σx² (ordered sums), min x and max x (NaN if any element is). */                                         \
    void channel_stats(s64 rows, s64 channels, const void* x, Stored, f64* total, f64* squares, f32* low, f32* high,           \
                       int threads);                                                                                           \
    f32 normalize_peak(const Forward&, int threads);                                                                           \
    Report normalize(const Forward&, const Outcome&, int threads);                                                             \
    /* Per channel Σgm, Σ gm·x and Σgm² (ordered sums); the last of them, and gm itself (masked_kind), where their places */   \
    /* are not null. */                                                                                                        \
    void normalize_grad_sums(const Backward&, f64* total, f64* dot, f64* squares, void* masked, int threads);                  \
    void normalize_grad(const Backward&, f32* dx, int threads);                                                                \
    Report normalize_grad_quantize(const Backward&, f32 clip, Noise, s8* values, int threads);                                 \
    /* Per channel max|dx| (NaN if any element is), how many |dx| exceed each[c], and how many exceed `all`. */                \
    void normalize_grad_tails(const Backward&, const f32* each, f32 all, f32* peak, s64* over_each, s64* over_all,             \
                              int threads);                                                                                    \
    /* Per channel, how many |x| exceed each[c], and how many exceed `all`. */                                                 \
    void tail_count_pair(s64 rows, s64 channels, const f32* x, const f32* each, f32 all, s64* over_each, s64* over_all,        \
                         int threads);                                                                                         \
    /* Two int8 copies with the same noise: by one clip (none where by_tensor is null), and by a clip per channel. */          \
    /* Both reports have the same peak. */                                                                                     \
    void quantize_pair(s64 rows, s64 channels, const f32* x, f32 clip, const f32* clips, Noise, s8* by_tensor, s8* by_channel, \
                       Report reports[2], int threads);                                                                        \
    /* The same of dx, which is never written. */                                                                              \
    void normalize_grad_quantize_pair(const Backward&, f32 clip, const f32* clips, Noise, s8* by_tensor, s8* by_channel,       \
                                      Report reports[2], int threads);                                                         \
    /* x as it is kept for backward, by itself. */                                                                             \
    void pack_norm(s64 rows, s64 channels, const void* x, Stored, const Outcome&, int threads);

// dx = x + what waits; x may be dx.
#define BYTEBACK_ADD_WAITING void add_waiting(s64 rows, s64 channels, const Waiting&, const f32* x, f32* dx, int threads);

namespace generic {
BYTEBACK_NORM_FUNCTIONS
BYTEBACK_ADD_WAITING
}  // namespace generic

namespace avx2 {
BYTEBACK_NORM_FUNCTIONS
BYTEBACK_ADD_WAITING
}  // namespace avx2

namespace avx512vnni {
BYTEBACK_NORM_FUNCTIONS
using avx2::add_waiting;  // as long as memory takes
}  // namespace avx512vnni

#undef BYTEBACK_ADD_WAITING

}  // namespace byteback
