// SPDX-License-Identifier: Apache-2.0
// Quantization and statistics for Python (ops/backends/cpu/quantize.py, statistics.py), and the arithmetic of csrc/quantizer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "bindings/bindings_pool.h"
#include "bindings/structs.h"
#include "core/generic.h"
#include "quantizer/ledger.h"
#ifdef BYTEBACK_AVX2
#include "core/avx512vnni.h"
#endif

namespace nb = nanobind;
using namespace nb::literals;
using namespace byteback;

namespace {

// What quantize reads and writes: the clips with their strides and number, the noise key (0 for rounding to nearest), the
// integers, the scales, the counts (saturated, non-finite) and max|x| (0 where nobody asks).
struct Quantize {
    PerScale clip;
    s64 clip_count;
    Address key, values, scale, counts, peak;

    void run(int path, const Rows& rows, const f32* x, int threads) const {
        const Report seen = BYTEBACK_CALL(quantize, rows, x, clip, noise_of(key), at<s8>(values), threads);
        write_scales(clip.values, clip_count, at<f32>(scale));
        write_counts(seen, counts);
        if (peak) *at<f32>(peak) = seen.peak;
    }
};

void quantize(int path, const Rows& rows, Address x, Address clip, s64 clip_count, s64 sample_stride, s64 channel_stride,
              Address key, Address values, Address scale, Address counts, Address peak, int threads) {
    nb::gil_scoped_release unlocked;
    const PerScale clips{at<const f32>(clip), sample_stride, channel_stride};
    Quantize{clips, clip_count, key, values, scale, counts, peak}.run(path, rows, at<const f32>(x), threads);
}

// axis: 0 per sample, 1 per channel, -1 over everything. Needs dense rows.
void find_absmax(int path, const Rows& rows, const f32* x, f32* result, int axis, int threads) {
    const s64 all = rows.count() * rows.channels;
    const Rows one{1, all, 1, all, 1, 1};
    if (axis == 1)
        BYTEBACK_CALL(absmax, rows, x, result, threads);
    else
        BYTEBACK_CALL(absmax_outer, axis == 0 ? rows : one, x, result, threads);
}

void absmax(int path, const Rows& rows, int axis, Address x, Address result, int threads) {
    nb::gil_scoped_release unlocked;
    find_absmax(path, rows, at<const f32>(x), at<f32>(result), axis, threads);
}

// How tensors of one shape are quantized by their maximum: made once for the shape.
struct QuantizePlan {
    Rows rows;
    int axis;
    Layout values, clip;
};

void make_quantize_plan(QuantizePlan* made, const Rows& rows, int axis, nb::handle size, nb::handle strides,
                        nb::handle clip_size, nb::handle clip_strides) {
    new (made) QuantizePlan{rows, axis, layout_of(size, strides), layout_of(clip_size, clip_strides)};
}

// absmax, then quantize with that clip: what most tensors need, in one call. Makes its results itself, as capsules: values,
// scale, clip, counts. Four tensors by PyTorch's own functions would cost more than a weight's quantization.
nb::tuple quantize_max(int path, const QuantizePlan& plan, Address x, Address key, s64 limit, int threads) {
    static const Layout two{1, {2}, {1}};
    const Lent values = lend_tensor(plan.values, kInt8, limit), scale = lend_tensor(plan.clip, kFloat32, limit);
    const Lent clip = lend_tensor(plan.clip, kFloat32, limit), counts = lend_tensor(two, kInt64, limit);
    const auto address = [](const Lent& lent) { return reinterpret_cast<Address>(lent.memory); };
    {
        nb::gil_scoped_release unlocked;
        const Rows& rows = plan.rows;
        const int axis = plan.axis;
        f32* peaks = static_cast<f32*>(clip.memory);
        find_absmax(path, rows, at<const f32>(x), peaks, axis, threads);
        const PerScale clips{peaks, axis == 0 ? 1 : 0, axis == 1 ? 1 : 0};
        const s64 count = axis == 0 ? rows.outer : axis == 1 ? rows.channels : 1;
        Quantize{clips, count, key, address(values), address(scale), address(counts), 0}.run(path, rows, at<const f32>(x),
                                                                                             threads);
    }
    return nb::make_tuple(values.capsule, scale.capsule, clip.capsule, counts.capsule);
}

// Matrices of elements of 1 or 4 bytes.
void transpose(int path, s64 batch, s64 rows, s64 columns, int bytes, Address source, Address result, int threads) {
    nb::gil_scoped_release unlocked;
    const Matrices m{batch, rows, columns};
    if (bytes == 1)
        BYTEBACK_CALL(transpose, m, at<const u8>(source), at<u8>(result), threads);
    else
        BYTEBACK_CALL(transpose, m, at<const u32>(source), at<u32>(result), threads);
}

void moments(int path, const Rows& rows, Address x, Address peak, Address total, Address squares, int threads) {
    nb::gil_scoped_release unlocked;
    BYTEBACK_CALL(moments, rows, at<const f32>(x), at<f32>(peak), at<f64>(total), at<f64>(squares), threads);
}

void tail_count(int path, const Rows& rows, Address x, Address threshold, s64 channel_stride, Address counts, int threads) {
    nb::gil_scoped_release unlocked;
    const PerScale thresholds{at<const f32>(threshold), 0, channel_stride};
    BYTEBACK_CALL(tail_count, rows, at<const f32>(x), thresholds, at<s64>(counts), threads);
}

// clips: `count` candidates, for the whole tensor or for each channel; terms: of the tensor, or of each channel.
void cosine_terms(int path, const Rows& rows, Address x, Address clips, s64 count, bool per_channel, bool stochastic,
                  Address terms, int threads) {
    nb::gil_scoped_release unlocked;
    const CandidateClips candidates{at<const f32>(clips), count, per_channel};
    if (per_channel)
        BYTEBACK_CALL(channel_cosine_terms, rows, at<const f32>(x), candidates, stochastic, at<f64>(terms), threads);
    else
        BYTEBACK_CALL(cosine_terms, rows, at<const f32>(x), candidates, stochastic, at<f64>(terms), threads);
}

void cosine_slope_terms(int path, const Rows& rows, Address x, f32 clip, Address terms, int threads) {
    nb::gil_scoped_release unlocked;
    BYTEBACK_CALL(cosine_slope_terms, rows, at<const f32>(x), clip, at<f64>(terms), threads);
}

void dot_terms(int path, const Rows& rows, Address x, Address values, Address scale, s64 sample_stride, s64 channel_stride,
               Address terms, int threads) {
    nb::gil_scoped_release unlocked;
    const PerScale scales{at<const f32>(scale), sample_stride, channel_stride};
    BYTEBACK_CALL(dot_terms, rows, at<const f32>(x), at<const s8>(values), scales, at<f64>(terms), threads);
}

// seed, layer and count are single int64 numbers; the key is two of them.
void make_noise_key(Address seed, Address layer, Address count, s64 rank, Address key) {
    const auto words = noise_key(static_cast<u64>(*at<const s64>(seed)), static_cast<u64>(*at<const s64>(count)),
                                 static_cast<u32>(*at<const s64>(layer)), static_cast<u32>(rank));
    std::copy(words.begin(), words.end(), at<s64>(key));
}

// clip to seen: one row of a quantizer's buffers, 0 where nothing is to be written.
void put_in_ledger(Address clip, Address initialized, Address updated_at, Address observed, Address tracked, Address seen,
                   s64 channels, Address used, s64 used_count, Address remembered, s64 remembered_count, s64 iteration,
                   f32 saturated, f32 deviation, f32 own, f64 momentum) {
    const LedgerRows to{
        at<f32>(clip), at<f32>(initialized), at<s64>(updated_at), at<f32>(observed), at<f32>(tracked), at<f32>(seen), channels};
    write_ledger(to, {at<const f32>(used),
                      used_count,
                      at<const f32>(remembered),
                      remembered_count,
                      iteration,
                      {saturated, deviation, own},
                      momentum});
}

// Copies many small tensors, which are in other places from time to time, to places that stay.
struct CopyPlan {
    std::vector<Address> to;
    std::vector<size_t> bytes;
};

void make_copy_plan(CopyPlan* made, const std::vector<Address>& to, const std::vector<size_t>& bytes) {
    if (to.size() != bytes.size()) throw std::invalid_argument("copy: a size for each tensor, please");
    new (made) CopyPlan{to, bytes};
}

void copy_all(const CopyPlan& plan, const std::vector<Address>& from) {
    if (from.size() != plan.to.size()) throw std::invalid_argument("copy: another number of tensors than in the plan");
    for (size_t i = 0; i < from.size(); ++i)
        if (plan.bytes[i]) std::memcpy(at<u8>(plan.to[i]), at<const u8>(from[i]), plan.bytes[i]);
}

}  // namespace

void bind_quantize(nb::module_& m) {
    nb::class_<CopyPlan>(m, "CopyPlan").def("__init__", &make_copy_plan, nb::kw_only(), "to"_a, "bytes"_a);
    m.def("copy_all", &copy_all);
    nb::class_<QuantizePlan>(m, "QuantizePlan")
        .def("__init__", &make_quantize_plan, nb::kw_only(), "rows"_a, "axis"_a, "size"_a, "strides"_a, "clip_size"_a,
             "clip_strides"_a);
    m.def("quantize", &quantize, "path"_a, "rows"_a, nb::kw_only(), "x"_a, "clip"_a, "clip_count"_a, "sample_stride"_a,
          "channel_stride"_a, "key"_a, "values"_a, "scale"_a, "counts"_a, "peak"_a, "threads"_a);
    m.def("quantize_max", &quantize_max, "path"_a, "plan"_a, nb::kw_only(), "x"_a, "key"_a, "limit"_a, "threads"_a);
    m.def("absmax", &absmax, "path"_a, "rows"_a, nb::kw_only(), "axis"_a, "x"_a, "result"_a, "threads"_a);
    m.def("transpose", &transpose, "path"_a, nb::kw_only(), "batch"_a, "rows"_a, "columns"_a, "bytes"_a, "source"_a, "result"_a,
          "threads"_a);
    m.def("moments", &moments, "path"_a, "rows"_a, nb::kw_only(), "x"_a, "peak"_a, "total"_a, "squares"_a, "threads"_a);
    m.def("tail_count", &tail_count, "path"_a, "rows"_a, nb::kw_only(), "x"_a, "threshold"_a, "channel_stride"_a, "counts"_a,
          "threads"_a);
    m.def("cosine_terms", &cosine_terms, "path"_a, "rows"_a, nb::kw_only(), "x"_a, "clips"_a, "count"_a, "per_channel"_a,
          "stochastic"_a, "terms"_a, "threads"_a);
    m.def("cosine_slope_terms", &cosine_slope_terms, "path"_a, "rows"_a, nb::kw_only(), "x"_a, "clip"_a, "terms"_a,
          "threads"_a);
    m.def("dot_terms", &dot_terms, "path"_a, "rows"_a, nb::kw_only(), "x"_a, "values"_a, "scale"_a, "sample_stride"_a,
          "channel_stride"_a, "terms"_a, "threads"_a);
    m.def("noise_key", &make_noise_key, nb::kw_only(), "seed"_a, "layer"_a, "count"_a, "rank"_a, "key"_a);
    m.def("write_ledger", &put_in_ledger, nb::kw_only(), "clip"_a, "initialized"_a, "updated_at"_a, "observed"_a, "tracked"_a,
          "seen"_a, "entries"_a, "used"_a, "used_count"_a, "remembered"_a, "remembered_count"_a, "iteration"_a, "saturated"_a,
          "deviation"_a, "own"_a, "momentum"_a);
}
