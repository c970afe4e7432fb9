// SPDX-License-Identifier: Apache-2.0
// The two int8 copies of a gradient, for Python (ops/backends/cpu): of a float tensor, or of the gradient of a fused block,
// which is not stored. In each pair, one copy has a single clip for the tensor, the other has clips per channel.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <tuple>
#include <vector>

#include "bindings/magnitude_clips.h"
#include "bindings/structs.h"
#include "block/norm.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace byteback;

// One int8 copy of a tensor.
struct QuantizedTo {
    Address values, scale, counts, peak;
};

namespace {

void tail_count_pair(int path, s64 rows, s64 channels, Address x, Address each, Address all, Address over_each,
                     Address over_all, int threads) {
    nb::gil_scoped_release unlocked;
    BYTEBACK_CALL(tail_count_pair, rows, channels, at<const f32>(x), at<const f32>(each), *at<const f32>(all),
                  at<s64>(over_each), at<s64>(over_all), threads);
}

void normalize_grad_tails(int path, const Backward& from, Address each, Address all, Address peak, Address over_each,
                          Address over_all, int threads) {
    nb::gil_scoped_release unlocked;
    BYTEBACK_CALL(normalize_grad_tails, from, at<const f32>(each), *at<const f32>(all), at<f32>(peak), at<s64>(over_each),
                  at<s64>(over_all), threads);
}

// peak, total and squares: max|x|, sum and sum of squares of each channel
std::tuple<f64, f64> magnitude_clips(int path, const MagnitudeClips& rule, s64 rows, s64 channels, Address x, Address peak,
                                     Address total, Address squares, Address clip, Address clips, int threads) {
    nb::gil_scoped_release unlocked;
    const auto count_tails = [&](const f32* each, f32 one, s64* tail, s64* tail_one) {
        BYTEBACK_CALL(tail_count_pair, rows, channels, at<const f32>(x), each, one, tail, tail_one, threads);
        return at<const f32>(peak);
    };
    return choose_both(rows, channels, at<const f64>(total), at<const f64>(squares), rule, at<f32>(clip), at<f32>(clips),
                       count_tails);
}

void write_report(const Report& report, const f32* clips, s64 count, const QuantizedTo& to) {
    write_scales(clips, count, at<f32>(to.scale));
    write_counts(report, to.counts);
    *at<f32>(to.peak) = report.peak;
}

void quantize_pair(int path, const QuantizedTo& one, const QuantizedTo& each, s64 rows, s64 channels, Address x, Address clip,
                   Address clips, Address key, int threads) {
    nb::gil_scoped_release unlocked;
    Report reports[2];
    BYTEBACK_CALL(quantize_pair, rows, channels, at<const f32>(x), *at<const f32>(clip), at<const f32>(clips), noise_of(key),
                  at<s8>(one.values), at<s8>(each.values), reports, threads);
    write_report(reports[0], at<const f32>(clip), 1, one);
    write_report(reports[1], at<const f32>(clips), channels, each);
}

void normalize_grad_quantize_pair(int path, const Backward& from, const QuantizedTo& one, const QuantizedTo& each, Address clip,
                                  Address clips, Address key, int threads) {
    nb::gil_scoped_release unlocked;
    Report reports[2];
    BYTEBACK_CALL(normalize_grad_quantize_pair, from, *at<const f32>(clip), at<const f32>(clips), noise_of(key),
                  at<s8>(one.values), at<s8>(each.values), reports, threads);
    write_report(reports[0], at<const f32>(clip), 1, one);
    write_report(reports[1], at<const f32>(clips), from.channels, each);
}

// The copy of dx by clips that are a ratio of each channel's max|dx|.
void normalize_grad_quantize_by_ratio(int path, const Backward& from, const QuantizedTo& to, f32 ratio, Address key,
                                      Address clips, int threads) {
    nb::gil_scoped_release unlocked;
    const size_t width = static_cast<size_t>(from.channels);
    f32* bounds = at<f32>(clips);
    std::vector<f32> sigma(width, 0.0f);
    std::vector<s64> tail(width), tail_one(width);  // not asked for: the pass is as long as memory takes
    BYTEBACK_CALL(normalize_grad_tails, from, sigma.data(), 0.0f, bounds, tail.data(), tail_one.data(), threads);
    for (s64 c = 0; c < from.channels; ++c) bounds[c] *= ratio;
    Report reports[2];
    BYTEBACK_CALL(normalize_grad_quantize_pair, from, 0.0f, bounds, noise_of(key), nullptr, at<s8>(to.values), reports,
                  threads);
    write_report(reports[1], bounds, from.channels, to);
}

// Clips and copies of dx at once, from the sum and the sum of squares of each channel of dx; values and scale are 0 where no
// copy by one clip is wanted. The shares that are Gaussian, how many values each copy cut off, and how many are not finite.
std::tuple<f64, f64, s64, s64, s64> gradient_pair(int path, const Backward& from, const MagnitudeClips& rule, Address total,
                                                  Address squares, Address key, Address clip, Address clips, Address values,
                                                  Address scale, Address values_each, Address scale_each, int threads) {
    nb::gil_scoped_release unlocked;
    std::vector<f32> peak(static_cast<size_t>(from.channels));
    const auto count_tails = [&](const f32* each, f32 one, s64* tail, s64* tail_one) {
        BYTEBACK_CALL(normalize_grad_tails, from, each, one, peak.data(), tail, tail_one, threads);
        return static_cast<const f32*>(peak.data());
    };
    const auto [one, each] = choose_both(from.rows, from.channels, at<const f64>(total), at<const f64>(squares), rule,
                                         at<f32>(clip), at<f32>(clips), count_tails);
    Report reports[2];
    BYTEBACK_CALL(normalize_grad_quantize_pair, from, *at<const f32>(clip), at<const f32>(clips), noise_of(key), at<s8>(values),
                  at<s8>(values_each), reports, threads);
    if (values) write_scales(at<const f32>(clip), 1, at<f32>(scale));
    write_scales(at<const f32>(clips), from.channels, at<f32>(scale_each));
    return {one, each, reports[0].saturated, reports[1].saturated, reports[0].nonfinite};
}

}  // namespace

void bind_pairs(nb::module_& m) {
    nb::class_<QuantizedTo>(m, "QuantizedTo")
        .def(
            "__init__",
            [](QuantizedTo* made, Address values, Address scale, Address counts, Address peak) {
                new (made) QuantizedTo{values, scale, counts, peak};
            },
            nb::kw_only(), "values"_a, "scale"_a, "counts"_a, "peak"_a);
    nb::class_<MagnitudeClips>(m, "MagnitudeClips")
        .def(
            "__init__",
            [](MagnitudeClips* made, f64 threshold, f64 keep, f64 add, Address before_one, Address before_each) {
                new (made) MagnitudeClips{threshold, static_cast<f32>(keep), static_cast<f32>(add), before_one, before_each};
            },
            nb::kw_only(), "threshold"_a, "keep"_a, "add"_a, "before_one"_a, "before_each"_a);
    m.def("tail_count_pair", &tail_count_pair, "path"_a, nb::kw_only(), "rows"_a, "channels"_a, "x"_a, "each"_a, "all"_a,
          "over_each"_a, "over_all"_a, "threads"_a);
    m.def("normalize_grad_tails", &normalize_grad_tails, "path"_a, "backward"_a, nb::kw_only(), "each"_a, "all"_a, "peak"_a,
          "over_each"_a, "over_all"_a, "threads"_a);
    m.def("magnitude_clips", &magnitude_clips, "path"_a, "rule"_a, nb::kw_only(), "rows"_a, "channels"_a, "x"_a, "peak"_a,
          "total"_a, "squares"_a, "clip"_a, "clips"_a, "threads"_a);
    m.def("gradient_pair", &gradient_pair, "path"_a, "backward"_a, "rule"_a, nb::kw_only(), "total"_a, "squares"_a, "key"_a,
          "clip"_a, "clips"_a, "values"_a, "scale"_a, "values_each"_a, "scale_each"_a, "threads"_a);
    m.def("normalize_grad_quantize_by_ratio", &normalize_grad_quantize_by_ratio, "path"_a, "backward"_a, "to"_a, nb::kw_only(),
          "ratio"_a, "key"_a, "clips"_a, "threads"_a);
    m.def("quantize_pair", &quantize_pair, "path"_a, "one"_a, "each"_a, nb::kw_only(), "rows"_a, "channels"_a, "x"_a, "clip"_a,
          "clips"_a, "key"_a, "threads"_a);
    m.def("normalize_grad_quantize_pair", &normalize_grad_quantize_pair, "path"_a, "backward"_a, "one"_a, "each"_a,
          nb::kw_only(), "clip"_a, "clips"_a, "key"_a, "threads"_a);
}
