// SPDX-License-Identifier: Apache-2.0
#include "block/pass_check.h"

#include <cstring>
#include <vector>

#include "block/max_pool.h"
#include "block/norm.h"
#include "contract.h"
#include "core/generic.h"
#ifdef BYTEBACK_AVX512VNNI
#include "core/avx512vnni.h"
#endif

namespace byteback {
#ifdef BYTEBACK_AVX512VNNI
namespace {

struct Tensor {
    s64 rows, channels;
    std::vector<f32> x, g, vector;  // vector: a number for each channel, several times over
    std::vector<bf16> x_rounded, g_rounded;

    Tensor(s64 all_rows, s64 all_channels) : rows(all_rows), channels(all_channels) {
        u32 state = 1;
        fill(state, x, rows * channels, 4.0f);
        fill(state, g, rows * channels, 0.25f);
        fill(state, vector, 8 * channels, 1.0f);
        for (const f32 value : x) x_rounded.push_back(to_bf16(value));
        for (const f32 value : g) g_rounded.push_back(to_bf16(value));
    }

    // From -size to size, some zeros among them.
    static void fill(u32& state, std::vector<f32>& values, s64 count, f32 size) {
        for (s64 i = 0; i < count; ++i) {
            state = state * 1664525u + 1013904223u;
            const f32 value = static_cast<f32>(static_cast<s32>(state)) * (size / 2147483648.0f);
            values.push_back(state >> 28 == 7 ? 0.0f : value);
        }
    }

    const f32* vectors(s64 index) const { return vector.data() + index * channels; }
    size_t count() const { return x.size(); }
};

// Everything that a call writes, as bytes.
class Results {
public:
    template <class T>
    T* room(size_t count) {
        parts_.emplace_back(count * sizeof(T) + 1, 0);
        return reinterpret_cast<T*>(parts_.back().data());
    }
    void see(const Report& report) {
        *room<s64>(1) = report.saturated;
        *room<s64>(1) = report.nonfinite;
        *room<f32>(1) = report.peak;
    }
    bool operator==(const Results& other) const { return parts_ == other.parts_; }

private:
    std::vector<std::vector<char>> parts_;
};

// Whether call(results, own) writes the same with the functions of the path, `own`, and with those of the generic one.
template <class Call>
bool agree(const Call& call) {
    Results expected, got;
    call(expected, false);
    call(got, true);
    return expected == got;
}

#define BYTEBACK_EITHER(name, ...) (own ? avx512vnni::name(__VA_ARGS__) : generic::name(__VA_ARGS__))

bool quantize_agrees(const Tensor& t, bool stochastic) {
    return agree([&](Results& to, bool own) {
        const Rows last{1, t.rows, t.channels, 0, t.channels, 1}, first{1, t.rows, t.channels, 0, 1, t.rows};
        const f32 clip = 3.0f;
        for (const Rows& rows : {last, first})
            to.see(BYTEBACK_EITHER(quantize, rows, t.x.data(), {&clip, 0, 0}, {stochastic, 5, 7}, to.room<s8>(t.count()), 1));
    });
}

bool cosine_agrees(const Tensor& t, bool stochastic) {
    return agree([&](Results& to, bool own) {
        const Rows rows{1, t.rows, t.channels, 0, t.channels, 1};
        const f32 clips[2] = {1.5f, 3.0f};
        f64* terms = to.room<f64>(static_cast<size_t>(6 * t.channels));
        BYTEBACK_EITHER(channel_cosine_terms, rows, t.x.data(), {clips, 2, false}, stochastic, terms, 1);
    });
}

bool forward_agrees(const Tensor& t, Activation activation) {
    return agree([&](Results& to, bool own) {
        const Forward from{t.rows, t.channels, t.x.data(), t.vectors(0), t.vectors(1), t.g.data(), 0.0f, activation};
        const std::vector<f32> step(static_cast<size_t>(t.channels), 0.05f);
        const size_t masks = static_cast<size_t>(t.rows * mask_width(t.channels));
        const Outcome outcome{to.room<f32>(t.count()),
                              to.room<u8>(masks),
                              to.room<s8>(t.count()),
                              2.0f,
                              to.room<s8>(t.count()),
                              Stored::s8,
                              step.data(),
                              t.vectors(2),
                              t.channels};
        to.see(BYTEBACK_EITHER(normalize, from, outcome, 1));
        *to.room<f32>(1) = BYTEBACK_EITHER(normalize_peak, from, 1);
        Outcome words{};
        words.kept = to.room<u16>(t.count()), words.kind = Stored::bf16, words.pitch = t.channels;
        BYTEBACK_EITHER(pack_norm, t.rows, t.channels, t.x.data(), Stored::f32, words, 1);
    });
}

// The same of floats that are stored as bf16.
bool rounded_forward_agrees(const Tensor& t, Activation activation) {
    return agree([&](Results& to, bool own) {
        Forward from{t.rows, t.channels, t.x_rounded.data(), t.vectors(0), t.vectors(1), t.g_rounded.data(), 0.0f, activation};
        from.x_kind = from.residual_kind = Stored::bf16;
        const std::vector<f32> step(static_cast<size_t>(t.channels), 0.05f);
        Outcome outcome{to.room<bf16>(t.count()),
                        to.room<u8>(static_cast<size_t>(t.rows * mask_width(t.channels))),
                        to.room<s8>(t.count()),
                        2.0f,
                        to.room<s8>(t.count()),
                        Stored::s8,
                        step.data(),
                        t.vectors(2),
                        t.channels};
        outcome.output_kind = Stored::bf16;
        to.see(BYTEBACK_EITHER(normalize, from, outcome, 1));
        *to.room<f32>(1) = BYTEBACK_EITHER(normalize_peak, from, 1);
        outcome.output = to.room<f32>(t.count()), outcome.output_kind = Stored::f32;
        to.see(BYTEBACK_EITHER(normalize, from, outcome, 1));
        BYTEBACK_EITHER(pack_norm, t.rows, t.channels, t.x_rounded.data(), Stored::bf16, outcome, 1);
    });
}

bool backward_agrees(const Tensor& t, Gate gate) {
    return agree([&](Results& to, bool own) {
        const size_t channels = static_cast<size_t>(t.channels);
        const Backward from{t.rows,       t.channels,   t.g.data(),  {t.x.data(), Stored::f32, nullptr, nullptr},
                            t.vectors(0), t.vectors(1), nullptr,     gate,
                            t.vectors(2), t.vectors(3), t.vectors(4)};
        const std::vector<f32> clips(channels, 1.0f);
        f64* const sums[3] = {to.room<f64>(channels), to.room<f64>(channels), to.room<f64>(channels)};
        BYTEBACK_EITHER(normalize_grad_sums, from, sums[0], sums[1], sums[2], nullptr, 1);
        BYTEBACK_EITHER(normalize_grad, from, to.room<f32>(t.count()), 1);
        Report reports[2];
        s8 *first = to.room<s8>(t.count()), *second = to.room<s8>(t.count());
        BYTEBACK_EITHER(normalize_grad_quantize_pair, from, 0.9f, clips.data(), {true, 5, 7}, first, second, reports, 1);
        to.see(reports[0]), to.see(reports[1]);
        f32* peak = to.room<f32>(channels);
        s64 *each = to.room<s64>(channels), *all = to.room<s64>(channels);
        BYTEBACK_EITHER(normalize_grad_tails, from, clips.data(), 0.5f, peak, each, all, 1);
        to.see(BYTEBACK_EITHER(normalize_grad_quantize, from, 0.9f, {true, 5, 7}, to.room<s8>(t.count()), 1));
    });
}

bool statistics_agree(const Tensor& t) {
    return agree([&](Results& to, bool own) {
        const size_t n = static_cast<size_t>(t.channels);
        f64 *total = to.room<f64>(n), *squares = to.room<f64>(n);
        f32 *low = to.room<f32>(n), *high = to.room<f32>(n);
        BYTEBACK_EITHER(channel_stats, t.rows, t.channels, t.x.data(), Stored::f32, total, squares, low, high, 1);
        f64 *total_rounded = to.room<f64>(n), *squares_rounded = to.room<f64>(n);
        f32 *low_rounded = to.room<f32>(n), *high_rounded = to.room<f32>(n);
        BYTEBACK_EITHER(channel_stats, t.rows, t.channels, t.x_rounded.data(), Stored::bf16, total_rounded, squares_rounded,
                        low_rounded, high_rounded, 1);
        const std::vector<f32> clips(n, 3.0f);
        s64 *each = to.room<s64>(n), *all = to.room<s64>(n);
        BYTEBACK_EITHER(tail_count_pair, t.rows, t.channels, t.x.data(), clips.data(), 2.0f, each, all, 1);
        Report reports[2];
        s8 *first = to.room<s8>(t.count()), *second = to.room<s8>(t.count());
        const Noise none{false, 0, 0};
        BYTEBACK_EITHER(quantize_pair, t.rows, t.channels, t.x.data(), 2.0f, clips.data(), none, first, second, reports, 1);
        to.see(reports[0]), to.see(reports[1]);
        const Windows windows{1, 5, 7, t.channels, 3, 3, 2, 2, 1, 1, 1, 1, 3, 4};
        f32* largest = to.room<f32>(12 * n);
        u8* taps = to.room<u8>(12 * n);
        BYTEBACK_EITHER(max_pool, windows, t.x.data(), largest, taps, 1);
    });
}

#undef BYTEBACK_EITHER

std::string check(const Tensor& t) {
    for (bool stochastic : {false, true}) {
        if (!quantize_agrees(t, stochastic)) return "quantize";
        if (!cosine_agrees(t, stochastic)) return "cosine_terms";
    }
    for (Activation activation : {Activation::none, Activation::relu, Activation::silu})
        if (!forward_agrees(t, activation) || !rounded_forward_agrees(t, activation)) return "the forward pass of a block";
    for (Gate gate : {Gate::open, Gate::relu, Gate::silu})
        if (!backward_agrees(t, gate)) return "the backward pass of a block";
    return statistics_agree(t) ? "" : "the statistics of a block";
}

}  // namespace

std::string pass_check(Path path) {
    if (path != Path::avx512vnni) return "";
    // Rows that end inside a vector and inside a block of statistics, and such that do not.
    for (const Tensor& t : {Tensor(67, 37), Tensor(64, 32), Tensor(36, 136)}) {
        const std::string found = check(t);
        if (!found.empty()) return found + " differs from the generic path";
    }
    return "";
}
#else
std::string pass_check(Path) { return ""; }
#endif

}  // namespace byteback
