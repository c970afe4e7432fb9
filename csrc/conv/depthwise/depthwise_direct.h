// SPDX-License-Identifier: Apache-2.0
// Depthwise 3x3 products pixel by pixel, 16 channels at a time, straight from the int8 image.
//
// No row pairs are made, so nothing is written but the result, in whole cache lines. Against the stencil over row pairs, on the
// layers of MobileNetV2: 1.3 to 1.7x with stride 2, 1.0 to 1.2x with stride 1. A tap beyond the image reads zeros.
// The three taps of a row: two products fit int16 together (2 * 127 * 127 = 32258), and one vpmaddwd multiplies the third and
// adds the sum of the two, (x2, x0 w0 + x1 w1) · (w2, 1), into int32.
//
// For depthwise_avx2.cpp only: it holds AVX2 code, so everything is in an anonymous namespace.
#pragma once

#include "conv/depthwise/depthwise_pairs.h"
#include "block/epilogue.h"

namespace byteback::avx2 {
namespace {

constexpr s64 kLane = 16;  // channels that are taken together: a cache line of results

// A 3x3 correlation of planes: destination (i, j) meets sources (i * stride - before + r, j * stride - before + s).
struct Direct {
    s64 frames, frames_per_sample, channels;
    s64 from[2], to[2], before[2];
    bool flipped;  // the taps run backwards: grad_input with stride 1
};

// Asked of what is a stencil already.
bool is_direct(const ConvShape& s) { return s.kernel[1] == 3 && s.in_channels % kLane == 0; }

constexpr s64 kRowTaps = 4 * kLane;  // int16 values that a row of taps takes for 16 channels

// [block of 16 channels][row of taps][w0, w1, low (w2, 1), high (w2, 1)]
void pack_direct(s64 channels, bool flipped, const s8* w, s16* packed) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (s64 block = 0; block < channels; block += kLane)
        for (s64 r = 0; r < 3; ++r, packed += kRowTaps) {
            for (s64 c = 0; c < kLane; ++c)
                for (s64 t = 0; t < 3; ++t) packed[t * kLane + c] = w[(block + c) * 9 + (flipped ? 8 - 3 * r - t : 3 * r + t)];
            const __m256i third = load(packed + 2 * kLane);
            store(packed + 2 * kLane, _mm256_unpacklo_epi16(third, ones));
            store(packed + 3 * kLane, _mm256_unpackhi_epi16(third, ones));
        }
}

// The sums of 16 channels, eight and eight, as floats.
template <bool Stream>
[[gnu::always_inline]] inline void write_lane(__m256i first, __m256i second, const f32* factors, f32* out) {
    const __m256 y[2] = {_mm256_mul_ps(_mm256_cvtepi32_ps(first), _mm256_load_ps(factors)),
                         _mm256_mul_ps(_mm256_cvtepi32_ps(second), _mm256_load_ps(factors + 8))};
    for (int i = 0; i < 2; ++i) Stream ? _mm256_stream_ps(out + 8 * i, y[i]) : _mm256_storeu_ps(out + 8 * i, y[i]);
}

// Sums of 16 channels in int32. Unpacking works within halves: low has channels 0..3 and 8..11.
struct Wide {
    __m256i low, high;

    // A row of taps, its weights as packed.
    [[gnu::always_inline]] void set_row(__m256i x0, __m256i x1, __m256i x2, const s16* w) {
        const __m256i two = _mm256_add_epi16(_mm256_mullo_epi16(x0, load(w)), _mm256_mullo_epi16(x1, load(w + kLane)));
        low = _mm256_madd_epi16(_mm256_unpacklo_epi16(x2, two), load(w + 2 * kLane));
        high = _mm256_madd_epi16(_mm256_unpackhi_epi16(x2, two), load(w + 3 * kLane));
    }
    [[gnu::always_inline]] void add_row(__m256i x0, __m256i x1, __m256i x2, const s16* w) {
        Wide more;
        more.set_row(x0, x1, x2, w);
        low = _mm256_add_epi32(low, more.low);
        high = _mm256_add_epi32(high, more.high);
    }

    template <bool Stream>
    void write(const f32* factors, f32* out) const {
        write_lane<Stream>(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31), factors, out);
    }
};

[[gnu::always_inline]] inline __m256i widen_bytes(const s8* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// One pixel, anywhere: from[t] points at the source of tap t, or at zeros.
template <bool Stream>
void direct_pixel(const s8* const (&from)[9], const s16* weights, const f32* factors, f32* out, s64 channels) {
    for (s64 c = 0; c < channels; c += kLane, weights += 3 * kRowTaps) {
        Wide sum;
        unroll<3>([&](auto r) BYTEBACK_INLINE {
            const auto x = [&](int t) BYTEBACK_INLINE { return widen_bytes(from[3 * r + t] + c); };
            if constexpr (r == 0) sum.set_row(x(0), x(1), x(2), weights);
            else sum.add_row(x(0), x(1), x(2), weights + r * kRowTaps);
        });
        sum.write<Stream>(factors + c, out + c);
    }
}

// Two pixels, one below the other, within the columns of the image. row[r] points at the leftmost source of row r or at zeros.
template <int Stride, bool Stream>
void direct_two(const s8* const (&row)[Stride + 3], const s16* weights, const f32* factors, f32* const (&out)[2],
                s64 channels) {
    for (s64 c = 0; c < channels; c += kLane, weights += 3 * kRowTaps) {
        Wide sum[2];
        unroll<Stride + 3>([&](auto r) BYTEBACK_INLINE {
            const s8* at = row[r] + c;
            const __m256i x0 = widen_bytes(at), x1 = widen_bytes(at + channels), x2 = widen_bytes(at + 2 * channels);
            unroll<2>([&](auto k) BYTEBACK_INLINE {
                constexpr int t = r - k * Stride;
                if constexpr (t == 0) sum[k].set_row(x0, x1, x2, weights);
                if constexpr (t == 1 || t == 2) sum[k].add_row(x0, x1, x2, weights + t * kRowTaps);
            });
        });
        for (int k = 0; k < 2; ++k) sum[k].write<Stream>(factors + c, out[k] + c);
    }
}

// One thread's share: pairs of rows.
template <int Stride, bool Stream>
class DirectRun {
public:
    DirectRun(const Direct& p, const s8* source, const s16* weights, Factor factor, f32* destination, const Epilogue* finish)
        : p_(p), C_(p.channels), source_(source), weights_(weights), factor_(factor), destination_(destination), finish_(finish),
          whole_(finish && finish->in_order), width_(whole_ ? p.to[1] : 1),
          memory_(scratch<ThreadScratch>(static_cast<size_t>(Carver::bytes<s8>(3 * C_) + Carver::bytes<f32>(C_) +
                                                             Carver::bytes<f32>(2 * width_ * C_)))),
          zeros_(memory_.take<s8>(3 * C_)), factors_(memory_.take<f32>(C_)), own_(memory_.take<f32>(2 * width_ * C_)) {
        std::memset(zeros_, 0, static_cast<size_t>(3 * C_));
        first_ = std::clamp<s64>(ceil_div(std::max<s64>(p.before[1], 0), Stride), 0, p.to[1]);
        const s64 reach = p.from[1] - 3 + p.before[1];  // where the last whole column starts
        last_ = std::clamp<s64>(reach < 0 ? 0 : reach / Stride + 1, first_, p.to[1]);
    }

    void pairs(s64 begin, s64 end) {
        const s64 per_frame = ceil_div(p_.to[0], 2);
        s64 sample = -1;
        for (s64 at = begin; at < end; ++at) {
            const s64 frame = at / per_frame;
            if (sample < 0 || (factor_.row && frame / p_.frames_per_sample != sample)) {
                sample = frame / p_.frames_per_sample;
                fill_factors(factor_, sample, C_, factors_);
            }
            pair(frame, at % per_frame * 2);
        }
        if (Stream) _mm_sfence();
    }

private:
    void pair(s64 frame, s64 i) const {
        const s8* image = source_ + frame * p_.from[0] * p_.from[1] * C_;
        const s64 top = i * Stride - p_.before[0];
        const s8* rows[Stride + 3];
        for (s64 r = 0; r < Stride + 3; ++r)
            rows[r] = top + r >= 0 && top + r < p_.from[0] ? image + (top + r) * p_.from[1] * C_ : nullptr;
        const s64 pixels[2] = {(frame * p_.to[0] + i) * p_.to[1], (frame * p_.to[0] + i + 1) * p_.to[1]};
        const int count = i + 1 < p_.to[0] ? 2 : 1;
        for (s64 column = 0; column < p_.to[1]; ++column) {
            const s64 here = whole_ ? column : 0;
            f32* to[2] = {own_ + here * C_, own_ + (width_ + here) * C_};  // with an epilogue the product stays here
            if (!finish_)
                for (int k = 0; k < count; ++k) to[k] = destination_ + (pixels[k] + column) * C_;
            if (column < first_ || column >= last_ || count < 2) {
                one_by_one(rows, column, to, count);
            } else {
                const s8* row[Stride + 3];
                for (int r = 0; r < Stride + 3; ++r)
                    row[r] = rows[r] ? rows[r] + (column * Stride - p_.before[1]) * C_ : zeros_;
                direct_two<Stride, Stream>(row, weights_, factors_, to, C_);
            }
            if (finish_ && !whole_)
                for (int k = 0; k < count; ++k) (*finish_)(pixels[k] + column, 1, 0, C_, to[k]);
        }
        if (whole_) (*finish_)(pixels[0], count * width_, 0, C_, own_);
    }

    void one_by_one(const s8* const (&rows)[Stride + 3], s64 column, f32* const (&to)[2], int count) const {
        const s64 left = column * Stride - p_.before[1];
        for (int k = 0; k < count; ++k) {
            const s8* from[9];
            for (int r = 0; r < 3; ++r)
                for (int s = 0; s < 3; ++s) {
                    const s8* row = rows[k * Stride + r];
                    from[3 * r + s] = row && left + s >= 0 && left + s < p_.from[1] ? row + (left + s) * C_ : zeros_;
                }
            direct_pixel<Stream>(from, weights_, factors_, to[k], C_);
        }
    }

    const Direct& p_;
    const s64 C_;
    const s8* const source_;
    const s16* const weights_;
    const Factor factor_;
    f32* const destination_;
    const Epilogue* const finish_;
    const bool whole_;  // the epilogue gets two rows of the image at once
    const s64 width_;   // pixels of one of them that are kept
    Carver memory_;
    s8* const zeros_;
    f32* const factors_;
    f32* const own_;
    s64 first_, last_;  // the columns whose sources are all in the image
};

template <int Stride>
void direct(const Direct& p, const s8* source, const s8* w, Factor factor, f32* destination, int threads,
            const Epilogue* finish = nullptr) {
    const size_t count = static_cast<size_t>(p.channels / kLane * 3 * kRowTaps);
    s16* weights = reinterpret_cast<s16*>(scratch<SharedScratch>(count * sizeof(s16)));
    pack_direct(p.channels, p.flipped, w, weights);
    const s64 bytes = p.frames * p.to[0] * p.to[1] * p.channels * static_cast<s64>(sizeof(f32));
    const bool stream = !finish && bytes >= kStreamBytes && reinterpret_cast<uintptr_t>(destination) % 64 == 0;
    parallel_parts(threads, p.frames * ceil_div(p.to[0], 2), [&](s64 begin, s64 end) {
        if (stream) DirectRun<Stride, true>(p, source, weights, factor, destination, finish).pairs(begin, end);
        else DirectRun<Stride, false>(p, source, weights, factor, destination, finish).pairs(begin, end);
    });
}

}  // namespace
}  // namespace byteback::avx2
