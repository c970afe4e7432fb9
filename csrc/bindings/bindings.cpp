// SPDX-License-Identifier: Apache-2.0
// With the other bindings_*.cpp the only file that knows Python. Tensors come as raw addresses (checked on the
// Python side, addresses.py), shapes as plain integers, and the interpreter's lock is released while a kernel runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>

#include "bindings/address.h"
#include "bindings/bindings_pool.h"
#include "conv/conv.h"
#include "core/generic.h"
#include "quantizer/ledger.h"
#include "conv/plan.h"
#include "elementwise/rows.h"
#include "conv/self_check.h"
#include "bindings/shape_numbers.h"
#ifdef BYTEBACK_AVX2
#include "core/avx2.h"
#endif

namespace nb = nanobind;
using namespace byteback;

void bind_norm(nb::module_&);    // bindings_norm.cpp
void bind_block(nb::module_&);   // bindings_block.cpp
void bind_pairs(nb::module_&);   // bindings_pairs.cpp
void bind_detect(nb::module_&);  // bindings_detect.cpp
void bind_pool(nb::module_&);    // bindings_pool.cpp

namespace {

using RowNumbers = std::array<s64, 6>;

Address address(const Lent& lent) { return reinterpret_cast<Address>(lent.memory); }

Rows rows_of(const RowNumbers& n) { return {n[0], n[1], n[2], n[3], n[4], n[5]}; }

using Product = const char* (*)(Path, const ConvShape&, const s8*, const s8*, Factor, f32*, int);

template <Product product>
const char* run_product(int path, const ShapeNumbers& shape, Address a, Address b, Address first, Address second, s64 row,
                        s64 column, Address result, int threads) {
    nb::gil_scoped_release unlocked;
    const GivenFactor factor(first, second, row, column);
    return product(static_cast<Path>(path), shape_of(shape), at<const s8>(a), at<const s8>(b), factor.get(), at<f32>(result),
                   threads);
}

std::tuple<std::string, std::string> explain(int path, int kind, const ShapeNumbers& shape) {
    const Plan plan = make_plan(shape_of(shape), static_cast<ProductKind>(kind), static_cast<Path>(path));
    return {name_of(plan.algorithm), plan.reason};
}

// What quantize reads and writes: the clips with their strides and number, the noise key (0 for rounding to nearest), the
// integers, the scales, the counts (saturated, non-finite) and max|x| (0 where nobody asks).
struct Quantize {
    PerScale clip;
    s64 clip_count;
    Address key, q, scale, counts, peak;

    void run(int path, const Rows& rows, const f32* x, int threads) const {
        const s64* words = at<const s64>(key);
        const Noise noise{key != 0, key ? static_cast<u32>(words[0]) : 0, key ? static_cast<u32>(words[1]) : 0};
        const Report r = BYTEBACK_CALL(quantize, rows, x, clip, noise, at<s8>(q), threads);
        for (s64 i = 0; i < clip_count; ++i)
            at<f32>(scale)[i] = is_live(clip.values[i]) ? clip.values[i] / static_cast<f32>(kMax) : 1.0f;
        at<s64>(counts)[0] = r.saturated;
        at<s64>(counts)[1] = r.nonfinite;
        if (peak) *at<f32>(peak) = r.peak;
    }
};

void quantize(int path, const RowNumbers& rows, Address x, Address clip, s64 clip_outer, s64 clip_channel, s64 clip_count,
              Address key, Address q, Address scale, Address counts, Address peak, int threads) {
    nb::gil_scoped_release unlocked;
    const PerScale clips{at<const f32>(clip), clip_outer, clip_channel};
    Quantize{clips, clip_count, key, q, scale, counts, peak}.run(path, rows_of(rows), at<const f32>(x), threads);
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

void absmax(int path, const RowNumbers& rows, Address x, Address result, int axis, int threads) {
    nb::gil_scoped_release unlocked;
    find_absmax(path, rows_of(rows), at<const f32>(x), at<f32>(result), axis, threads);
}

// absmax, then quantize with that clip: what most tensors need, in one call. Makes its results itself, as capsules: values,
// scale, clip, counts. Four tensors by PyTorch's own functions would cost more than a weight's quantization.
nb::tuple quantize_max(int path, const RowNumbers& numbers, Address x, int axis, Address key, nb::handle size, nb::handle strides,
                       nb::handle clip_size, nb::handle clip_strides, s64 limit, int threads) {
    static const nb::tuple& two = *new nb::tuple(nb::make_tuple(2));  // never destroyed: Python may be gone by then
    static const nb::tuple& one = *new nb::tuple(nb::make_tuple(1));
    const Lent values = lend_tensor(size, strides, kInt8, limit), scale = lend_tensor(clip_size, clip_strides, kFloat32, limit);
    const Lent clip = lend_tensor(clip_size, clip_strides, kFloat32, limit), counts = lend_tensor(two, one, kInt64, limit);
    {
        nb::gil_scoped_release unlocked;
        const Rows rows = rows_of(numbers);
        f32* peaks = static_cast<f32*>(clip.memory);
        find_absmax(path, rows, at<const f32>(x), peaks, axis, threads);
        const PerScale clips{peaks, axis == 0 ? 1 : 0, axis == 1 ? 1 : 0};
        const s64 count = axis == 0 ? rows.outer : axis == 1 ? rows.channels : 1;
        Quantize{clips, count, key, address(values), address(scale), address(counts), 0}.run(path, rows, at<const f32>(x), threads);
    }
    return nb::make_tuple(values.capsule, scale.capsule, clip.capsule, counts.capsule);
}

// Matrices of elements of 1 or 4 bytes.
void transpose(int path, s64 batch, s64 rows, s64 columns, int bytes, Address from, Address to, int threads) {
    nb::gil_scoped_release unlocked;
    const Matrices m{batch, rows, columns};
    if (bytes == 1)
        BYTEBACK_CALL(transpose, m, at<const u8>(from), at<u8>(to), threads);
    else
        BYTEBACK_CALL(transpose, m, at<const u32>(from), at<u32>(to), threads);
}

void moments(int path, const RowNumbers& rows, Address x, Address peak, Address sum, Address squares, int threads) {
    nb::gil_scoped_release unlocked;
    BYTEBACK_CALL(moments, rows_of(rows), at<const f32>(x), at<f32>(peak), at<f64>(sum), at<f64>(squares), threads);
}

void tail_count(int path, const RowNumbers& rows, Address x, Address threshold, s64 channel, Address counts, int threads) {
    nb::gil_scoped_release unlocked;
    const PerScale thresholds{at<const f32>(threshold), 0, channel};
    BYTEBACK_CALL(tail_count, rows_of(rows), at<const f32>(x), thresholds, at<s64>(counts), threads);
}

// clips: `count` candidates, for the whole tensor or for each channel; terms: of the tensor, or of each channel.
void cosine_terms(int path, const RowNumbers& rows, Address x, Address clips, s64 count, bool per_channel, bool stochastic,
                  Address terms, int threads) {
    nb::gil_scoped_release unlocked;
    const CandidateClips candidates{at<const f32>(clips), count, per_channel};
    if (per_channel)
        BYTEBACK_CALL(channel_cosine_terms, rows_of(rows), at<const f32>(x), candidates, stochastic, at<f64>(terms), threads);
    else
        BYTEBACK_CALL(cosine_terms, rows_of(rows), at<const f32>(x), candidates, stochastic, at<f64>(terms), threads);
}

void cosine_slope_terms(int path, const RowNumbers& rows, Address x, f32 clip, Address terms, int threads) {
    nb::gil_scoped_release unlocked;
    BYTEBACK_CALL(cosine_slope_terms, rows_of(rows), at<const f32>(x), clip, at<f64>(terms), threads);
}

void dot_terms(int path, const RowNumbers& rows, Address x, Address q, Address scale, s64 outer, s64 channel, Address terms,
               int threads) {
    nb::gil_scoped_release unlocked;
    const PerScale scales{at<const f32>(scale), outer, channel};
    BYTEBACK_CALL(dot_terms, rows_of(rows), at<const f32>(x), at<const s8>(q), scales, at<f64>(terms), threads);
}

// seed, layer and count are single int64 numbers; the key is two of them.
void make_noise_key(Address seed, Address layer, Address count, s64 rank, Address key) {
    const auto words = noise_key(static_cast<u64>(*at<const s64>(seed)), static_cast<u64>(*at<const s64>(count)),
                                 static_cast<u32>(*at<const s64>(layer)), static_cast<u32>(rank));
    std::copy(words.begin(), words.end(), at<s64>(key));
}

void put_in_ledger(const std::array<s64, 7>& rows, const std::array<s64, 5>& clips, const std::array<f64, 3>& columns,
                   f64 momentum) {
    const LedgerRows to{at<f32>(rows[0]), at<f32>(rows[1]), at<s64>(rows[2]), at<f32>(rows[3]),
                        at<f32>(rows[4]), at<f32>(rows[5]), rows[6]};
    LedgerEntry entry{at<const f32>(clips[0]), clips[1], at<const f32>(clips[2]), clips[3], clips[4], {}, momentum};
    std::copy(columns.begin(), columns.end(), entry.columns);
    write_ledger(to, entry);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Native kernels of Byteback; used through byteback.ops.";
    m.def("is_compiled", [](int path) { return is_compiled(static_cast<Path>(path)); });
    m.def("cpu_supports", [](int path) { return cpu_supports(static_cast<Path>(path)); });
    m.def("self_check", [](int path) { return self_check(static_cast<Path>(path)); });
    m.def("conv_output", &run_product<conv_output>);
    m.def("conv_grad_input", &run_product<conv_grad_input>);
    m.def("conv_grad_weight", &run_product<conv_grad_weight>);
    m.def("explain", &explain);
    m.def("quantize", &quantize);
    m.def("quantize_max", &quantize_max);
    m.def("absmax", &absmax);
    m.def("transpose", &transpose);
    m.def("moments", &moments);
    m.def("tail_count", &tail_count);
    m.def("cosine_terms", &cosine_terms);
    m.def("cosine_slope_terms", &cosine_slope_terms);
    m.def("dot_terms", &dot_terms);
    m.def("noise_key", &make_noise_key);
    m.def("write_ledger", &put_in_ledger);
    bind_norm(m);
    bind_block(m);
    bind_pairs(m);
    bind_detect(m);
    bind_pool(m);
}
