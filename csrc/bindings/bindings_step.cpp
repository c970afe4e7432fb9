// SPDX-License-Identifier: Apache-2.0
// The training step of a fused block, one call for each direction (ops/backends/cpu/block_step.py): the kernels that single
// operators call, in the same order and with the same bits, and between them what a step does with a few numbers: the noise
// key, the clip rule's memory, what quantizers write down. Through Python that took longer than the kernels of a small layer.
//
// What stays the same from step to step is made once: BlockPlan for the shapes, ForwardTensors and BackwardTensors for
// parameters and buffers, GradientPlan for the clip rule.
// A step passes activations and gradients, and gets its results as DLPack capsules.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "bindings/bindings_pool.h"
#include "bindings/magnitude_clips.h"
#include "bindings/normalize_batch.h"
#include "bindings/structs.h"
#include "core/generic.h"
#include "quantizer/ledger.h"
#ifdef BYTEBACK_AVX2
#include "core/avx512vnni.h"
#endif

namespace nb = nanobind;
using namespace nb::literals;
using namespace byteback;

// What does not change for tensors of one shape. Convolutions with the weight in KRSC order write and read all of it densely.
struct BlockPlan {
    ConvShape conv;
    ForwardPass pass;
    Gate gate;            // of the gradient
    Rows weight;          // in memory, as floats
    bool weight_is_last;  // KRSC already, else KCRS
    bool int8, floats, mask;
    s64 observe_every;  // iterations between two measurements of the input's direction
    f64 eps;            // of the norm
    Layout output, weight_values, grad_input, grad_weight;
};

// One call slot of a quantizer's buffers; tracked is 0 where it has none.
struct QuantizerRow {
    Address clip, initialized, updated_at, observed, tracked, seen;
    s64 entries;
    f64 momentum;

    bool is_initialized() const { return initialized && *at<const f32>(initialized) != 0.0f; }

    // remembered: `entries` numbers for the next step, null to keep those there; share: of the values that saturated;
    // own: the clip rule's diagnostic, NaN for none.
    void write(const f32* used, s64 count, const f32* remembered, f64 share, f64 own) const {
        const f32 none = std::numeric_limits<f32>::quiet_NaN();
        const LedgerRows to{at<f32>(remembered ? clip : 0),
                            at<f32>(initialized),
                            nullptr,
                            at<f32>(observed),
                            at<f32>(tracked),
                            at<f32>(seen),
                            entries};
        write_ledger(to,
                     {used, count, remembered, entries, 0, {static_cast<f32>(share), none, static_cast<f32>(own)}, momentum});
    }
};

// The parameters and buffers that a call site reads and writes in its forward pass, and in its backward pass.
struct ForwardTensors {
    Address weight, gamma, beta, running_mean, running_var;
    QuantizerRow input;
    Address iteration;  // a single int64 number
};

struct BackwardTensors {
    QuantizerRow gradient, per_channel;
    Address seed, layer, count, iteration;  // single int64 numbers
};

// held   a clip that the rule holds, corrected by the rule itself where it no longer fits
// ratio  a ratio of each channel's maximum
// pair   magnitude-aware clips of the tensor and of its channels
enum class Clips { held, ratio, pair };

struct GradientPlan {
    Clips kind;
    bool stochastic;
    s64 observe_every;  // iterations between two measurements of the direction
    s64 period;         // iterations between two searches
    f64 band;           // a held clip may be this many times too large or too small; 0 for any
    f64 saturated;      // a larger share of saturated values asks for another search
    f64 threshold;      // of magnitude-aware clips
    f32 keep, add;
    bool for_tensor;  // pair: a copy by the tensor's clip for grad_input; else both products use the one per channel

    // Whether this step needs the floats of the gradient: for a search, or to measure its direction.
    bool needs_floats(const BackwardTensors& of, s64 now) const {
        if (now % observe_every == 0) return true;
        if (kind == Clips::pair) return false;
        return !of.gradient.is_initialized() || now - *at<const s64>(of.gradient.updated_at) >= period;
    }

    bool is_stale(const Report& seen, s64 count) const {
        return static_cast<f64>(seen.saturated) / static_cast<f64>(count) > saturated;
    }

    f32 fitting(f32 ratio, f32 peak) const { return static_cast<f32>(static_cast<f64>(peak) * static_cast<f64>(ratio)); }

    bool fits(f32 ratio, f32 clip, f32 peak) const {
        if (band == 0.0) return true;
        const f32 best = fitting(ratio, peak);
        const f64 off = best > 0.0f ? static_cast<f64>(clip) / static_cast<f64>(best) : 1.0;
        return 1.0 / band <= off && off <= band;
    }
};

namespace {

constexpr ElementType kUint8{1, 8}, kBfloat16{4, 16}, kFloat64{2, 64};

ElementType type_of(Stored kind) { return kind == Stored::s8 ? kInt8 : kind == Stored::bf16 ? kBfloat16 : kFloat32; }

// Results for Python, in order: capsules, or None.
class Results {
public:
    explicit Results(s64 limit) : limit_(limit) {}

    template <class T>
    T* add(const Layout& layout, ElementType type, bool wanted = true, Stay stay = Stay::within_step) {
        if (!wanted) {
            list_.append(nb::none());
            return nullptr;
        }
        const Lent lent = lend_tensor(layout, type, limit_, stay);
        list_.append(lent.capsule);
        return static_cast<T*>(lent.memory);
    }

    // Instead of a None.
    template <class T>
    T* put(size_t place, const Layout& layout, ElementType type) {
        const Lent lent = lend_tensor(layout, type, limit_);
        list_[place] = lent.capsule;
        return static_cast<T*>(lent.memory);
    }

    nb::list list() { return list_; }

private:
    s64 limit_;
    nb::list list_;
};

// Memory that lives as long as a call.
class Scratch {
public:
    Scratch(s64 bytes, s64 limit) : block_(pool_lend(static_cast<size_t>(bytes), static_cast<size_t>(limit))) {}
    ~Scratch() { pool_give_back(block_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    s8* get() const { return static_cast<s8*>(block_.memory); }

private:
    Block block_;
};

Address address(const void* memory) { return reinterpret_cast<Address>(memory); }

Layout matrix(s64 rows, s64 columns) { return {2, {rows, columns}, {columns, 1}}; }

Layout ones(int axes) {
    Layout made{axes, {}, {}};
    for (int i = 0; i < axes; ++i) made.shape[i] = made.strides[i] = 1;
    return made;
}

// The weight as int8 by its maximum, KRSC. Whether all of it is finite.
bool quantize_weight(int path, const BlockPlan& plan, const f32* weight, s8* values, f32* scale, int threads) {
    const Rows& rows = plan.weight;
    const s64 count = rows.count() * rows.channels;
    f32 peak;
    BYTEBACK_CALL(absmax_outer, (Rows{1, count, 1, count, 1, 1}), weight, &peak, threads);
    const PerScale clip{&peak, 0, 0};
    const Noise none{false, 0, 0};
    Report seen;
    if (plan.weight_is_last) {
        seen = BYTEBACK_CALL(quantize, rows, weight, clip, none, values, threads);
    } else {
        std::vector<s8> planes(static_cast<size_t>(count));
        seen = BYTEBACK_CALL(quantize, rows, weight, clip, none, planes.data(), threads);
        BYTEBACK_CALL(transpose, (Matrices{rows.outer, rows.channels, rows.inner}), reinterpret_cast<const u8*>(planes.data()),
                      reinterpret_cast<u8*>(values), threads);
    }
    write_scales(&peak, 1, scale);
    return seen.nonfinite == 0;
}

// The results: the kernel's name, and y, the weight's values and scale, a, b, mean, invstd, peak, values, scale, counts,
// output, mask, kept, step, centre. None, and nothing was written, where the direction of the input is to be measured,
// and where the input or the weight is not finite.
nb::object block_forward(int path, const BlockPlan& plan, const ForwardTensors& of, Address x, Address x_scale, Address x_clip,
                         Address x_counts, Address residual, f64 momentum, s64 limit, int threads) {
    const s64* seen = at<const s64>(x_counts);
    if (seen[1] || *at<const s64>(of.iteration) % plan.observe_every == 0) return nb::none();
    const s64 channels = plan.pass.channels, rows = plan.pass.rows, inputs = plan.conv.batch * plan.conv.in_pixels();
    const Layout vector{1, {channels}, {1}};
    Results made(limit);
    void* y = made.add<void>(plan.output, type_of(plan.pass.x));
    s8* weight = made.add<s8>(plan.weight_values, kInt8);
    f32* weight_scale = made.add<f32>(ones(plan.output.axes), kFloat32);
    f32 *a = made.add<f32>(vector, kFloat32), *b = made.add<f32>(vector, kFloat32);
    f64 *mean = made.add<f64>(vector, kFloat64), *invstd = made.add<f64>(vector, kFloat64);
    f32* peak = made.add<f32>(ones(0), kFloat32);
    s8* values = made.add<s8>(plan.output, kInt8, plan.int8);
    f32* scale = made.add<f32>(ones(plan.output.axes), kFloat32, plan.int8);
    s64* counts = made.add<s64>({1, {2}, {1}}, kInt64, plan.int8);
    void* output = made.add<void>(plan.output, type_of(plan.pass.output), plan.floats);
    u8* mask = made.add<u8>(matrix(rows, mask_width(channels)), kUint8, plan.mask);
    void* kept = made.add<void>(plan.output, type_of(plan.pass.kept), plan.pass.kept != Stored::f32);
    const bool steps = plan.pass.kept == Stored::s8;
    f32 *step = made.add<f32>(vector, kFloat32, steps), *centre = made.add<f32>(vector, kFloat32, steps);
    const char* kernel = nullptr;
    {
        nb::gil_scoped_release unlocked;
        if (!quantize_weight(path, plan, at<const f32>(of.weight), weight, weight_scale, threads))
            kernel = "";
        else {
            const s64 count = inputs * plan.conv.in_channels;
            const f32* clip = at<const f32>(x_clip);
            of.input.write(clip, 1, clip, static_cast<f64>(seen[0]) / static_cast<f64>(count), NAN);
            const BatchGiven given{address(y),     of.gamma, of.beta, 0,        of.running_mean,
                                   of.running_var, residual, 0,       plan.eps, momentum};
            const BatchMade to{address(a),      address(b),     address(mean),   address(invstd), address(peak),
                               address(values), address(scale), address(counts), address(output), address(mask),
                               address(kept),   address(step),  address(centre)};
            const Operands operands{x, address(weight), x_scale, address(weight_scale), 0, 0};
            kernel = conv_and_normalize(path, plan.conv, plan.pass, operands, given, to, threads);
        }
    }
    if (!*kernel) return nb::none();
    return nb::make_tuple(kernel, made.list());
}

// ---- backward ----

struct GradientCall {
    int path;
    const BlockPlan& plan;
    const BackwardTensors& of;
    const GradientPlan& how;
    Backward from;
    const f64 *total, *squares;  // sums of dx, for pairs
    Noise noise;
    const s8 *x, *w;
    f32 x_scale, w_scale;
    Waiting waiting;  // added to grad_input
    void* grad_input;
    Stored grad_input_kind;
    f32* grad_weight;
    s64 limit;
    int threads;

    s64 channels() const { return from.channels; }
    s64 count() const { return from.rows * from.channels; }
    f64 share(const Report& seen) const { return static_cast<f64>(seen.saturated) / static_cast<f64>(count()); }

    void multiply(const s8* for_input, Factor input_factor, const s8* for_weight, Factor weight_factor) const {
        const Path chosen = static_cast<Path>(path);
        conv_grad_input_sum(chosen, plan.conv, for_input, w, input_factor, waiting, grad_input, grad_input_kind, threads);
        conv_grad_weight(chosen, plan.conv, for_weight, x, weight_factor, grad_weight, threads);
    }

    // Both products with a scale for each channel: of a depthwise convolution.
    void multiply_depthwise(const s8* values, const std::vector<f32>& scales) const {
        std::vector<f32> input(scales), weight(scales);
        for (f32& factor : input) factor *= w_scale;
        for (f32& factor : weight) factor *= x_scale;
        multiply(values, {input.data(), 0, 1}, values, {weight.data(), 1, 0});
    }

    // Each returns whether it is done; else the clip is to be chosen anew, or the gradient is not finite.

    bool by_held_clip() const {
        const f32* memory = at<const f32>(of.gradient.clip);
        f32 kept[2] = {memory[0], memory[1]}, &clip = kept[1];
        const Scratch values(count(), limit);
        const auto quantized = [&] { return BYTEBACK_CALL(normalize_grad_quantize, from, clip, noise, values.get(), threads); };
        Report seen = quantized();
        if (seen.nonfinite) return false;
        const bool fits = how.fits(kept[0], clip, seen.peak);
        if (!fits) {
            clip = how.fitting(kept[0], seen.peak);
            seen = quantized();
        }
        if (how.is_stale(seen, count())) return false;
        f32 scale;
        write_scales(&clip, 1, &scale);
        of.gradient.write(&clip, 1, fits ? nullptr : kept, share(seen), NAN);
        const f32 input = scale * w_scale, weight = scale * x_scale;
        multiply(values.get(), {&input, 0, 0}, values.get(), {&weight, 0, 0});
        return true;
    }

    bool by_ratio() const {
        const size_t width = static_cast<size_t>(channels());
        const f32 ratio = *at<const f32>(of.gradient.clip);
        std::vector<f32> clips(width), sigma(width, 0.0f), scales(width);
        std::vector<s64> tail(width), tail_one(width);  // not asked for: the pass is as long as memory takes
        BYTEBACK_CALL(normalize_grad_tails, from, sigma.data(), 0.0f, clips.data(), tail.data(), tail_one.data(), threads);
        for (f32& clip : clips) clip *= ratio;
        const Scratch values(count(), limit);
        Report reports[2];
        BYTEBACK_CALL(normalize_grad_quantize_pair, from, 0.0f, clips.data(), noise, nullptr, values.get(), reports, threads);
        if (reports[1].nonfinite || how.is_stale(reports[1], count())) return false;
        write_scales(clips.data(), channels(), scales.data());
        of.gradient.write(clips.data(), channels(), nullptr, share(reports[1]), NAN);
        multiply_depthwise(values.get(), scales);
        return true;
    }

    bool by_pair() const {
        const QuantizerRow &one = of.gradient, &each = of.per_channel;
        const size_t width = static_cast<size_t>(channels());
        const MagnitudeClips rule{how.threshold, how.keep, how.add, one.is_initialized() ? one.clip : 0,
                                  each.is_initialized() ? each.clip : 0};
        std::vector<f32> peak(width), clips(width), scales(width);
        f32 clip;
        const auto count_tails = [&](const f32* of_each, f32 of_all, s64* tail, s64* tail_one) {
            BYTEBACK_CALL(normalize_grad_tails, from, of_each, of_all, peak.data(), tail, tail_one, threads);
            return static_cast<const f32*>(peak.data());
        };
        const auto [gaussian, gaussian_each] =
            choose_both(from.rows, from.channels, total, squares, rule, &clip, clips.data(), count_tails);
        const Scratch values_each(count(), limit), values(how.for_tensor ? count() : 1, limit);
        Report reports[2];
        BYTEBACK_CALL(normalize_grad_quantize_pair, from, clip, clips.data(), noise, how.for_tensor ? values.get() : nullptr,
                      values_each.get(), reports, threads);
        if (reports[0].nonfinite || reports[1].nonfinite) return false;
        write_scales(clips.data(), channels(), scales.data());
        if (how.for_tensor) one.write(&clip, 1, &clip, share(reports[0]), gaussian);
        each.write(clips.data(), channels(), clips.data(), share(reports[1]), gaussian_each);
        if (!how.for_tensor) {
            multiply_depthwise(values_each.get(), scales);
            return true;
        }
        f32 scale;
        write_scales(&clip, 1, &scale);
        const f32 input = scale * w_scale;
        for (f32& factor : scales) factor *= x_scale;
        multiply(values.get(), {&input, 0, 0}, values_each.get(), {scales.data(), 1, 0});
        return true;
    }

    bool run() const { return how.kind == Clips::held ? by_held_clip() : how.kind == Clips::ratio ? by_ratio() : by_pair(); }
};

// g: with g_kind, how it is stored. mask and a to centre as block_forward made them; kept is y where it was kept as floats.
// waiting: a gradient that is added to grad_input, how it is stored, and its mask; rounds: grad_input is bfloat16. The results:
// whether the products are there, the iteration, the two words of the noise key, and q, r, the gradients of gamma and beta, the
// masked gradient, Σdx and Σdx² (pairs), grad_input, grad_weight. q and r are None where the products are there.
nb::tuple block_backward(int path, const BlockPlan& plan, const BackwardTensors& of, const GradientPlan& how, Address g,
                         int g_kind, Address x, Address x_scale, Address w, Address w_scale, Address mask, Address a, Address b,
                         Address mean, Address invstd, Address kept, Address step, Address centre, Address waiting,
                         Address waiting_mask, int waiting_kind, bool rounds, bool want_masked, s64 rank, bool counts_iteration,
                         s64 limit, int threads) {
    const s64 channels = plan.pass.channels, rows = plan.pass.rows, now = *at<const s64>(of.iteration);
    const bool pairs = how.kind == Clips::pair, multiplies = !how.needs_floats(of, now);
    const Layout vector{1, {channels}, {1}};
    Results made(limit);
    // Where the products are there, nobody asks for q and r, and two tensors take longer than their arithmetic.
    std::vector<f32> own(multiplies ? 2 * static_cast<size_t>(channels) : 0);
    f32 *q = made.add<f32>(vector, kFloat32, !multiplies), *r = made.add<f32>(vector, kFloat32, !multiplies);
    if (multiplies) q = own.data(), r = q + channels;
    f32 *gamma = made.add<f32>(vector, kFloat32), *beta = made.add<f32>(vector, kFloat32);
    Backward from{
        rows,      channels, at<const void>(g), {},      at<const f32>(a),           at<const f32>(b), at<const u8>(mask),
        plan.gate, nullptr,  nullptr,           nullptr, static_cast<Stored>(g_kind)};
    void* masked = made.add<void>(plan.output, type_of(masked_kind(from)), want_masked);
    f64 *dx_total = made.add<f64>(vector, kFloat64, pairs), *dx_squares = made.add<f64>(vector, kFloat64, pairs);
    const Stored sum = rounds ? Stored::bf16 : Stored::f32;
    void* grad_input = made.add<void>(plan.grad_input, type_of(sum), multiplies);
    f32* grad_weight = made.add<f32>(plan.grad_weight, kFloat32, multiplies, Stay::beyond_step);
    u64 words[2];
    bool done = false;
    {
        nb::gil_scoped_release unlocked;
        const Stored kind = plan.pass.kept == Stored::f32 ? plan.pass.x : plan.pass.kept;  // or y itself
        from.x = {at<const void>(kept), kind, at<const f32>(step), at<const f32>(centre)};
        std::vector<f64> seen(3 * static_cast<size_t>(channels));
        f64 *total = seen.data(), *dot = total + channels, *squares = pairs ? dot + channels : nullptr;
        BYTEBACK_CALL(normalize_grad_sums, from, total, dot, squares, masked, threads);
        const NormSums counted{channels, rows, from.a, at<const f64>(mean), at<const f64>(invstd), total, dot};
        norm_gradient(counted, {q, r, gamma, beta});
        if (pairs) gradient_sums({counted, squares, q, r, plan.eps}, dx_total, dx_squares);
        if (masked) from.g = masked, from.g_kind = masked_kind(from), from.gate = Gate::open, from.mask = nullptr;
        from.p = from.a, from.q = q, from.r = r;

        s64* count = at<s64>(of.count);
        const auto key = noise_key(static_cast<u64>(*at<const s64>(of.seed)), static_cast<u64>(*count),
                                   static_cast<u32>(*at<const s64>(of.layer)), static_cast<u32>(rank));
        words[0] = key[0], words[1] = key[1];
        ++*count;
        if (counts_iteration) ++*at<s64>(of.iteration);
        if (multiplies)
            done = GradientCall{path,
                                plan,
                                of,
                                how,
                                from,
                                dx_total,
                                dx_squares,
                                {how.stochastic, key[0], key[1]},
                                at<const s8>(x),
                                at<const s8>(w),
                                *at<const f32>(x_scale),
                                *at<const f32>(w_scale),
                                {at<const void>(waiting), at<const u8>(waiting_mask), static_cast<Stored>(waiting_kind)},
                                grad_input,
                                sum,
                                grad_weight,
                                limit,
                                threads}
                       .run();
    }
    if (multiplies && !done) {
        std::copy_n(q, channels, made.put<f32>(0, vector, kFloat32));
        std::copy_n(r, channels, made.put<f32>(1, vector, kFloat32));
    }
    return nb::make_tuple(done, now, words[0], words[1], made.list());
}

void make_plan(BlockPlan* made, const ConvShape& conv, const ForwardPass& forward, int gate, const Rows& weight,
               bool weight_is_last, bool int8, bool floats, bool mask, s64 observe_every, f64 eps, nb::handle output,
               nb::handle weight_values, nb::handle grad_input, nb::handle grad_weight) {
    const auto layout = [](nb::handle of) { return layout_of(of[0], of[1]); };  // size and strides
    new (made) BlockPlan{conv,
                         forward,
                         static_cast<Gate>(gate),
                         weight,
                         weight_is_last,
                         int8,
                         floats,
                         mask,
                         observe_every,
                         eps,
                         layout(output),
                         layout(weight_values),
                         layout(grad_input),
                         layout(grad_weight)};
}

}  // namespace

void bind_step(nb::module_& m) {
    nb::class_<BlockPlan>(m, "BlockPlan")
        .def("__init__", &make_plan, nb::kw_only(), "conv"_a, "forward"_a, "gate"_a, "weight"_a, "weight_is_last"_a, "int8"_a,
             "floats"_a, "mask"_a, "observe_every"_a, "eps"_a, "output"_a, "weight_values"_a, "grad_input"_a, "grad_weight"_a);
    nb::class_<QuantizerRow>(m, "QuantizerRow")
        .def(
            "__init__",
            [](QuantizerRow* made, Address clip, Address initialized, Address updated_at, Address observed, Address tracked,
               Address seen, s64 entries, f64 momentum) {
                new (made) QuantizerRow{clip, initialized, updated_at, observed, tracked, seen, entries, momentum};
            },
            nb::kw_only(), "clip"_a, "initialized"_a, "updated_at"_a, "observed"_a, "tracked"_a, "seen"_a, "entries"_a,
            "momentum"_a);
    nb::class_<ForwardTensors>(m, "ForwardTensors")
        .def(
            "__init__",
            [](ForwardTensors* made, Address weight, Address gamma, Address beta, Address running_mean, Address running_var,
               const QuantizerRow& input, Address iteration) {
                new (made) ForwardTensors{weight, gamma, beta, running_mean, running_var, input, iteration};
            },
            nb::kw_only(), "weight"_a, "gamma"_a, "beta"_a, "running_mean"_a, "running_var"_a, "input"_a, "iteration"_a);
    nb::class_<BackwardTensors>(m, "BackwardTensors")
        .def(
            "__init__",
            [](BackwardTensors* made, const QuantizerRow& gradient, const QuantizerRow& per_channel, Address seed,
               Address layer, Address count,
               Address iteration) { new (made) BackwardTensors{gradient, per_channel, seed, layer, count, iteration}; },
            nb::kw_only(), "gradient"_a, "per_channel"_a, "seed"_a, "layer"_a, "count"_a, "iteration"_a);
    nb::class_<GradientPlan>(m, "GradientPlan")
        .def(
            "__init__",
            [](GradientPlan* made, int kind, bool stochastic, s64 observe_every, s64 period, f64 band, f64 saturated,
               f64 threshold, f64 keep, f64 add, bool for_tensor) {
                new (made) GradientPlan{static_cast<Clips>(kind),
                                        stochastic,
                                        observe_every,
                                        period,
                                        band,
                                        saturated,
                                        threshold,
                                        static_cast<f32>(keep),
                                        static_cast<f32>(add),
                                        for_tensor};
            },
            nb::kw_only(), "kind"_a, "stochastic"_a, "observe_every"_a, "period"_a = 1, "band"_a = 0.0,
            "saturated"_a = std::numeric_limits<f64>::infinity(), "threshold"_a = 0.0, "keep"_a = 0.0, "add"_a = 0.0,
            "for_tensor"_a = true);
    // Positional: these are the calls that small layers wait for.
    m.def("block_forward", &block_forward);
    m.def("block_backward", &block_backward);
}
