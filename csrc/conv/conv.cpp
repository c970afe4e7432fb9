// SPDX-License-Identifier: Apache-2.0
#include "conv/conv.h"

#include <vector>

#include "contract.h"
#include "core/generic.h"
#include "core/pool.h"
#include "conv/plan.h"
#ifdef BYTEBACK_AVX2
#include "core/avx2.h"
#endif
#ifdef BYTEBACK_AVX512VNNI
#include "core/avx512vnni.h"
#endif

namespace byteback {

namespace {

// By a vector kernel: its name, or null where there is none.
const char* vector_output(Path path, const ConvShape& s, const s8* x, const s8* w, Factor factor, f32* y, int threads,
                          const Epilogue* finish) {
#ifdef BYTEBACK_AVX2
    const Plan plan = make_plan(s, ProductKind::output, path);
    switch (plan.algorithm) {
        case Algorithm::depthwise: avx2::depthwise_output(s, x, w, factor, y, threads, finish); return "avx2/depthwise";
        case Algorithm::winograd: avx2::winograd_output(s, x, w, factor, y, threads, finish); return "avx2/winograd";
        case Algorithm::gemm: {
            const bool nonnegative = !avx2::any_negative(x, s.batch * s.in_pixels() * s.in_channels, threads);
            avx2::gemm_output(s, x, w, factor, y, nonnegative, threads, finish);
            return nonnegative ? "avx2/gemm_u8" : "avx2/gemm_s16";
        }
#ifdef BYTEBACK_AVX512VNNI
        case Algorithm::depthwise_vnni:
            avx512vnni::depthwise_output(s, x, w, factor, y, threads, finish);
            return "avx512vnni/depthwise";
        case Algorithm::direct_vnni: avx512vnni::direct_output(s, x, w, factor, y, threads, finish); return "avx512vnni/direct";
        case Algorithm::gemm_vnni: avx512vnni::gemm_output(s, x, w, factor, y, threads, finish); return "avx512vnni/gemm_s8";
        case Algorithm::winograd_vnni:
            avx512vnni::winograd_output(s, x, w, factor, y, threads, finish);
            return "avx512vnni/winograd";
#endif
        default: break;
    }
#endif
    (void)path, (void)s, (void)x, (void)w, (void)factor, (void)y, (void)threads, (void)finish;
    return nullptr;
}

}  // namespace

const char* conv_output(Path path, const ConvShape& s, const s8* x, const s8* w, Factor factor, f32* y, int threads) {
    const ScratchScope scope;
    if (const char* kernel = vector_output(path, s, x, w, factor, y, threads, nullptr)) return kernel;
    generic::conv_output(s, x, w, factor, y, threads);
    return "generic/direct";
}

const char* conv_with_epilogue(Path path, const ConvShape& s, const s8* x, const s8* w, Factor factor, const Epilogue& finish,
                               int threads) {
    const ScratchScope scope;
    return vector_output(path, s, x, w, factor, nullptr, threads, &finish);
}

#ifdef BYTEBACK_AVX2
namespace {

// vector_output for a function that takes an epilogue.
struct OutputCall {
    Path path;
    const ConvShape& s;
    const s8 *x, *w;
    Factor factor;
    int threads;
    const char* kernel;

    static void run(const Epilogue& finish, void* context) {
        OutputCall& c = *static_cast<OutputCall*>(context);
        c.kernel = vector_output(c.path, c.s, c.x, c.w, c.factor, nullptr, c.threads, &finish);
    }
};

}  // namespace
#endif

const char* conv_output_bf16(Path path, const ConvShape& s, const s8* x, const s8* w, Factor factor, bf16* y, int threads) {
    const ScratchScope scope;
#ifdef BYTEBACK_AVX2
    OutputCall call{path, s, x, w, factor, threads, nullptr};
    if (path != Path::generic) avx2::with_rounding(s.out_channels, y, &OutputCall::run, &call);
    if (call.kernel) return call.kernel;
#endif
    std::vector<f32> wide(static_cast<size_t>(s.batch * s.out_pixels() * s.out_channels));
    const char* kernel = conv_output(path, s, x, w, factor, wide.data(), threads);
    for (const f32 value : wide) *y++ = to_bf16(value);
    return kernel;
}

#ifdef BYTEBACK_AVX2
namespace {

constexpr s64 kCounted = 2 << 20;         // elements of an output that does not wait in the caches for its next reader
constexpr s64 kTwoRowsBytes = 512 << 10;  // of an image: a depthwise kernel collects two rows of it

// Kernels whose threads sum all channels of neighbouring pixels.
bool sums_whole_rows(Algorithm algorithm) {
    return algorithm == Algorithm::gemm || algorithm == Algorithm::gemm_vnni || algorithm == Algorithm::direct_vnni;
}

bool gives_whole_rows(const ConvShape& s, Algorithm algorithm) {
    if (algorithm == Algorithm::depthwise || algorithm == Algorithm::depthwise_vnni)
        return 2 * s.out[2] * s.out_channels * 4 <= kTwoRowsBytes;
    return s.groups == 1 && sums_whole_rows(algorithm);
}

}  // namespace
#endif

const char* conv_with_stats(Path path, const ConvShape& s, const s8* x, const s8* w, Factor factor, void* y, Stored kind,
                            const Statistics& to, int threads) {
    const ScratchScope scope;
#ifdef BYTEBACK_AVX2
    const s64 rows = s.batch * s.out_pixels();
    const bool large = kind == Stored::bf16 || rows * s.out_channels >= kCounted;  // bf16 needs an epilogue in any case
    if (!large || !gives_whole_rows(s, make_plan(s, ProductKind::output, path).algorithm)) return nullptr;
    OutputCall call{path, s, x, w, factor, threads, nullptr};
    auto* with_statistics = &avx2::with_statistics;
#ifdef BYTEBACK_AVX512VNNI
    if (path == Path::avx512vnni) with_statistics = &avx512vnni::with_statistics;
#endif
    with_statistics(rows, s.out_channels, y, kind, to, threads, &OutputCall::run, &call);
    return call.kernel;
#else
    (void)path, (void)s, (void)x, (void)w, (void)factor, (void)y, (void)kind, (void)to, (void)threads;
    return nullptr;
#endif
}

namespace {

// By a vector kernel: its name, or null where there is none.
const char* vector_grad_input(Path path, const ConvShape& s, const s8* g, const s8* w, Factor factor, f32* dx, int threads,
                              const Epilogue* finish) {
#ifdef BYTEBACK_AVX2
    switch (make_plan(s, ProductKind::grad_input, path).algorithm) {
        case Algorithm::depthwise: avx2::depthwise_grad_input(s, g, w, factor, dx, threads); return "avx2/depthwise";
        case Algorithm::winograd: avx2::winograd_grad_input(s, g, w, factor, dx, threads); return "avx2/winograd";
        case Algorithm::gemm: avx2::gemm_grad_input(s, g, w, factor, dx, threads, finish); return "avx2/gemm_s16";
#ifdef BYTEBACK_AVX512VNNI
        case Algorithm::depthwise_vnni:
            avx512vnni::depthwise_grad_input(s, g, w, factor, dx, threads);
            return "avx512vnni/depthwise";
        case Algorithm::direct_vnni:
            avx512vnni::direct_grad_input(s, g, w, factor, dx, threads, finish);
            return "avx512vnni/direct";
        case Algorithm::gemm_vnni:
            avx512vnni::gemm_grad_input(s, g, w, factor, dx, threads, finish);
            return "avx512vnni/gemm_s8";
        case Algorithm::winograd_vnni:
            avx512vnni::winograd_grad_input(s, g, w, factor, dx, threads);
            return "avx512vnni/winograd";
#endif
        default: break;
    }
#endif
    (void)path, (void)s, (void)g, (void)w, (void)factor, (void)dx, (void)threads, (void)finish;
    return nullptr;
}

// By a vector kernel whose rows come whole and in order, so that the sum is written at once; else null.
const char* grad_input_with_waiting(Path path, const ConvShape& s, const s8* g, const s8* w, Factor factor,
                                    const Waiting& waiting, void* dx, Stored kind, int threads) {
#ifdef BYTEBACK_AVX2
    const bool dense = s.stride[0] * s.stride[1] * s.stride[2] == 1 && s.groups == 1;
    const Algorithm algorithm = make_plan(s, ProductKind::grad_input, path).algorithm;
    if (!dense || !sums_whole_rows(algorithm)) return nullptr;
    const char* kernel = nullptr;
    const auto multiply = [&](const Epilogue& finish) {
        kernel = vector_grad_input(path, s, g, w, factor, nullptr, threads, &finish);
    };
    avx2::with_waiting(
        s.batch * s.in_pixels(), s.in_channels, waiting, dx, kind,
        [](const Epilogue& finish, void* context) { (*static_cast<decltype(multiply)*>(context))(finish); },
        const_cast<void*>(static_cast<const void*>(&multiply)));
    return kernel;
#else
    (void)path, (void)s, (void)g, (void)w, (void)factor, (void)waiting, (void)dx, (void)kind, (void)threads;
    return nullptr;
#endif
}

}  // namespace

const char* conv_grad_input(Path path, const ConvShape& s, const s8* g, const s8* w, Factor factor, f32* dx, int threads) {
    const ScratchScope scope;
    if (const char* kernel = vector_grad_input(path, s, g, w, factor, dx, threads, nullptr)) return kernel;
    generic::conv_grad_input(s, g, w, factor, dx, threads);
    return "generic/direct";
}

const char* conv_grad_input_sum(Path path, const ConvShape& s, const s8* g, const s8* w, Factor factor, const Waiting& waiting,
                                void* to, Stored kind, int threads) {
    if (!waiting.g && kind == Stored::f32) return conv_grad_input(path, s, g, w, factor, static_cast<f32*>(to), threads);
    const ScratchScope scope;
    if (const char* kernel = grad_input_with_waiting(path, s, g, w, factor, waiting, to, kind, threads)) return kernel;
    if (kind == Stored::bf16) {
        std::vector<f32> wide(static_cast<size_t>(s.batch * s.in_pixels() * s.in_channels));
        const char* kernel = conv_grad_input_sum(path, s, g, w, factor, waiting, wide.data(), Stored::f32, threads);
        for (size_t i = 0; i < wide.size(); ++i) static_cast<bf16*>(to)[i] = to_bf16(wide[i]);
        return kernel;
    }
    f32* dx = static_cast<f32*>(to);
    const char* kernel = conv_grad_input(path, s, g, w, factor, dx, threads);
#ifdef BYTEBACK_AVX2
    if (path != Path::generic) {
        avx2::add_waiting(s.batch * s.in_pixels(), s.in_channels, waiting, dx, dx, threads);
        return kernel;
    }
#endif
    generic::add_waiting(s.batch * s.in_pixels(), s.in_channels, waiting, dx, dx, threads);
    return kernel;
}

const char* conv_grad_weight(Path path, const ConvShape& s, const s8* g, const s8* x, Factor factor, f32* dw, int threads) {
    const ScratchScope scope;
#ifdef BYTEBACK_AVX2
    switch (make_plan(s, ProductKind::grad_weight, path).algorithm) {
        case Algorithm::depthwise: avx2::depthwise_grad_weight(s, g, x, factor, dw, threads); return "avx2/depthwise";
        case Algorithm::winograd: avx2::winograd_grad_weight(s, g, x, factor, dw, threads); return "avx2/winograd";
        case Algorithm::gemm: {
            const bool nonnegative = !avx2::any_negative(x, s.batch * s.in_pixels() * s.in_channels, threads);
            avx2::gemm_grad_weight(s, g, x, factor, dw, nonnegative, threads);
            return nonnegative ? "avx2/gemm_u8" : "avx2/gemm_s16";
        }
#ifdef BYTEBACK_AVX512VNNI
        case Algorithm::depthwise_vnni:
            avx512vnni::depthwise_grad_weight(s, g, x, factor, dw, threads);
            return "avx512vnni/depthwise";
        case Algorithm::direct_vnni: avx512vnni::direct_grad_weight(s, g, x, factor, dw, threads); return "avx512vnni/direct";
        case Algorithm::gemm_vnni: avx512vnni::gemm_grad_weight(s, g, x, factor, dw, threads); return "avx512vnni/gemm_s8";
        case Algorithm::winograd_vnni:
            avx512vnni::winograd_grad_weight(s, g, x, factor, dw, threads);
            return "avx512vnni/winograd";
#endif
        default: break;
    }
#endif
    (void)path;
    generic::conv_grad_weight(s, g, x, factor, dw, threads);
    return "generic/direct";
}

}  // namespace byteback
