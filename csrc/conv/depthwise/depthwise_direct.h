// SPDX-License-Identifier: Apache-2.0
// Depthwise 3x3 products pixel by pixel, a lane (16 channels; 32 with 512 bits) at a time, directly from the int8 image.
//
// There are no row pairs, so only the result is written, in whole cache lines. Speed relative to the stencil over row pairs, on
// the layers of MobileNetV2: 1.3 to 1.7x with stride 2, 1.0 to 1.2x with stride 1. A tap outside the image reads zeros.
// The three taps of a row: two products fit int16 together (2 * 127 * 127 = 32258), and one vpmaddwd multiplies the third and
// adds the sum of the two, (x2, x0 w0 + x1 w1) · (w2, 1), into int32.
//
// For depthwise.h only. Compiled once per path, after its vectors.
#pragma once

#include "conv/depthwise/depthwise_pairs.h"
#include "block/epilogue.h"

namespace byteback {
namespace {

// A 3x3 correlation of planes: destination (i, j) meets sources (i * stride - before + r, j * stride - before + s).
struct Direct {
    s64 frames, frames_per_sample, channels;
    s64 from[2], to[2], before[2];
    bool flipped;  // the taps run backwards: grad_input with stride 1
};

// Asked of what is a stencil already.
bool is_direct(const ConvShape& s) { return s.kernel[1] == 3 && s.in_channels % kLane == 0; }

// [block of kLane channels][row of taps][kRowTaps]
void pack_direct(s64 channels, bool flipped, const s8* w, s16* packed) {
    for (s64 block = 0; block < channels; block += kLane)
        for (s64 r = 0; r < 3; ++r, packed += kRowTaps) {
            for (s64 c = 0; c < kLane; ++c)
                for (s64 t = 0; t < 3; ++t) packed[t * kLane + c] = w[(block + c) * 9 + (flipped ? 8 - 3 * r - t : 3 * r + t)];
            pack_row_taps(packed);
        }
}

// One pixel, anywhere: from[t] points at the source of tap t, or at zeros.
template <bool Stream>
void direct_pixel(const s8* const (&from)[9], const s16* weights, const f32* factors, f32* out, s64 channels) {
    for (s64 c = 0; c < channels; c += kLane, weights += 3 * kRowTaps) {
        Wide sum;
        unroll<3>([&](auto r) BYTEBACK_ALWAYS {
            const auto x = [&](int t) BYTEBACK_ALWAYS { return widen_bytes(from[3 * r + t] + c); };
            if constexpr (r == 0)
                sum.set_row(x(0), x(1), x(2), weights);
            else
                sum.add_row(x(0), x(1), x(2), weights + r * kRowTaps);
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
        unroll<Stride + 3>([&](auto r) BYTEBACK_ALWAYS {
            const s8* at = row[r] + c;
            const V x0 = widen_bytes(at), x1 = widen_bytes(at + channels), x2 = widen_bytes(at + 2 * channels);
            unroll<2>([&](auto k) BYTEBACK_ALWAYS {
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
        : p_(p), C_(p.channels), source_(source), weights_(weights), factor_(factor), destination_(destination),
          finish_(finish), whole_(finish && finish->in_order), width_(whole_ ? p.to[1] : 1),
          memory_(scratch<ThreadScratch>(
              static_cast<size_t>(Carver::bytes<s8>(3 * C_) + Carver::bytes<f32>(C_) + Carver::bytes<f32>(2 * width_ * C_)))),
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
        if (Stream) end_streams();
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
        const s64 kept = count * width_;
        if (whole_) (*finish_)(pixels[0], kept, 0, C_, own_);
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
        if (stream)
            DirectRun<Stride, true>(p, source, weights, factor, destination, finish).pairs(begin, end);
        else
            DirectRun<Stride, false>(p, source, weights, factor, destination, finish).pairs(begin, end);
    });
}

}  // namespace
}  // namespace byteback
