// SPDX-License-Identifier: Apache-2.0
// The kernels without Python, called from several threads at once, each with several threads of its own. ThreadSanitizer
// watches for races; what each call writes must be the bits that one thread alone wrote. sanitize/threads.py builds and runs
// it.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/avx512vnni.h"
#include "conv/conv.h"
#include "detect/detect.h"
#include "block/epilogue.h"
#include "core/generic.h"
#include "block/max_pool.h"
#include "block/norm.h"
#include "core/parallel.h"
#include "core/path.h"
#include "block/pixels.h"
#include "core/pool.h"
#include "conv/self_check.h"

using namespace byteback;

namespace {

constexpr int kCallers = 3, kThreads = 3;

// Operands that every caller reads: filled once, before any thread is started.
struct Operands {
    std::vector<s8> bytes = std::vector<s8>(1 << 20);
    std::vector<f32> floats = std::vector<f32>(1 << 20), positive = std::vector<f32>(1 << 16);
    std::vector<u8> mask = std::vector<u8>(1 << 18);

    Operands() {
        u32 state = 1;
        const auto next = [&] { return state = state * 1664525u + 1013904223u; };
        for (s8& v : bytes) v = static_cast<s8>(static_cast<s32>(next() >> 16) % 128);
        for (f32& v : floats) v = static_cast<f32>(static_cast<s32>(next())) * 1e-9f;
        for (f32& v : positive) v = static_cast<f32>(next() >> 8) * 1e-7f + 0.5f;
        for (u8& v : mask) v = static_cast<u8>(next() >> 24);
    }
};

const Operands& given() {
    static const Operands all;
    return all;
}

// What one call wrote, to be compared byte by byte.
using Bytes = std::vector<char>;

template <class T>
class Room {
public:
    explicit Room(s64 count) : values_(static_cast<size_t>(count)) {}
    operator T*() { return values_.data(); }
    void add_to(Bytes& all) const {
        const char* from = reinterpret_cast<const char*>(values_.data());
        all.insert(all.end(), from, from + values_.size() * sizeof(T));
    }

private:
    std::vector<T> values_;
};

void add(Bytes& all, const Report& report) {
    const s64 numbers[] = {report.saturated, report.nonfinite};
    const char *from = reinterpret_cast<const char*>(numbers), *peak = reinterpret_cast<const char*>(&report.peak);
    all.insert(all.end(), from, from + sizeof(numbers));
    all.insert(all.end(), peak, peak + sizeof(f32));
}

struct Call {
    std::string name;
    std::function<Bytes(int threads)> run;
};

// ---- products ----

ConvShape convolution(s64 batch, s64 in, s64 out, s64 groups, s64 size, s64 kernel, s64 stride, s64 padding) {
    const s64 made = (size + 2 * padding - kernel) / stride + 1;
    return {batch,
            in,
            out,
            groups,
            {1, size, size},
            {1, kernel, kernel},
            {1, made, made},
            {1, stride, stride},
            {0, padding, padding},
            {1, 1, 1}};
}

struct Named {
    const char* name;
    ConvShape shape;
};

std::vector<Named> convolutions() {
    return {{"pointwise", convolution(4, 40, 50, 1, 13, 1, 1, 0)},
            {"stride", convolution(3, 20, 30, 1, 17, 3, 2, 1)},
            {"stride beyond the kernel", convolution(3, 9, 30, 1, 17, 1, 2, 0)},
            {"winograd", convolution(3, 24, 30, 1, 14, 3, 1, 1)},
            {"groups", convolution(2, 24, 36, 3, 11, 3, 1, 1)},
            {"depthwise", convolution(3, 40, 40, 40, 14, 3, 1, 1)},
            {"depthwise, stride", convolution(3, 40, 40, 40, 15, 5, 2, 2)},
            {"wide kernel", convolution(2, 8, 16, 1, 13, 7, 1, 3)}};
}

void add_products(Path path, std::vector<Call>& calls) {
    const s8 *a = given().bytes.data(), *b = a + (1 << 19);
    const Factor factor{given().positive.data(), 0, 1};
    for (const Named& named : convolutions()) {
        const ConvShape s = named.shape;
        const std::string of = std::string(" of ") + named.name;
        calls.push_back({"conv_output" + of, [=](int threads) {
                             Room<f32> y(s.batch * s.out_pixels() * s.out_channels);
                             Bytes all;
                             conv_output(path, s, a, b, factor, y, threads);
                             y.add_to(all);
                             return all;
                         }});
        calls.push_back({"conv_grad_input" + of, [=](int threads) {
                             Room<f32> dx(s.batch * s.in_pixels() * s.in_channels);
                             Bytes all;
                             conv_grad_input(path, s, a, b, factor, dx, threads);
                             dx.add_to(all);
                             return all;
                         }});
        calls.push_back({"conv_grad_weight" + of, [=](int threads) {
                             Room<f32> dw(s.out_channels * s.taps() * s.group_in());
                             Bytes all;
                             conv_grad_weight(path, s, a, b, factor, dw, threads);
                             dw.add_to(all);
                             return all;
                         }});
    }
}

// Products whose output goes to an epilogue: none on the generic path.
void add_finished(Path path, std::vector<Call>& calls) {
    for (const Named& named : convolutions()) {
        const ConvShape s = named.shape;
        calls.push_back({std::string("conv_with_epilogue of ") + named.name, [=](int threads) {
                             const s64 rows = s.batch * s.out_pixels(), channels = s.out_channels;
                             Room<f32> y(rows * channels);
                             Room<s8> q(rows * channels);
                             const f32* vectors = given().positive.data();
                             const Forward from{rows,    channels, nullptr,         vectors, vectors + channels,
                                                nullptr, 0.0f,     Activation::relu};
                             const Outcome to{y, nullptr, q, 900.0f, nullptr, Stored::f32, nullptr, nullptr, channels};
                             struct Context {
                                 Path path;
                                 ConvShape shape;
                                 int threads;
                             } context{path, s, threads};
                             const Report seen = avx2::with_epilogue(
                                 from, to, threads,
                                 [](const Epilogue& finish, void* given_context) {
                                     const Context& c = *static_cast<Context*>(given_context);
                                     const s8* operand = given().bytes.data();
                                     conv_with_epilogue(c.path, c.shape, operand, operand + (1 << 19),
                                                        {given().positive.data(), 0, 1}, finish, c.threads);
                                 },
                                 &context);
                             Bytes all;
                             y.add_to(all);
                             q.add_to(all);
                             add(all, seen);
                             return all;
                         }});
    }
    // 8 MB of output are counted on their way to memory.
    calls.push_back({"conv_with_stats", [=](int threads) {
                         const ConvShape s = convolution(1, 3, 32, 1, 260, 1, 1, 0);
                         Room<f32> y(s.out_pixels() * s.out_channels), low(s.out_channels), high(s.out_channels);
                         Room<f64> total(s.out_channels), squares(s.out_channels);
                         const s8* operand = given().bytes.data();
                         conv_with_stats(path, s, operand, operand + (1 << 19), {given().positive.data(), 0, 1}, y, Stored::f32,
                                         {total, squares, low, high}, threads);
                         Bytes all;
                         total.add_to(all), squares.add_to(all), low.add_to(all), high.add_to(all), y.add_to(all);
                         return all;
                     }});
}

// ---- elementwise ----

#define ELEMENTWISE(name, ...)                          \
    (path == Path::generic ? generic::name(__VA_ARGS__) \
     : path == Path::avx2  ? avx2::name(__VA_ARGS__)    \
                           : avx512vnni::name(__VA_ARGS__))

void add_statistics(Path path, std::vector<Call>& calls) {
    const f32 *x = given().floats.data(), *clips = given().positive.data();
    for (const Rows& rows : {Rows{1, 3000, 33, 0, 33, 1}, Rows{4, 700, 40, 28000, 40, 1}, Rows{4, 700, 40, 28000, 1, 700},
                             Rows{1, 30, 3000, 0, 3000, 1}}) {
        const s64 count = rows.count() * rows.channels, channels = rows.channels;
        for (const bool stochastic : {false, true})
            calls.push_back({"quantize", [=](int threads) {
                                 Room<s8> q(count);
                                 Bytes all;
                                 add(all, ELEMENTWISE(quantize, rows, x, {clips, 0, 1}, {stochastic, 7, 9}, q, threads));
                                 q.add_to(all);
                                 return all;
                             }});
        calls.push_back({"absmax", [=](int threads) {
                             Room<f32> each(channels), outer(rows.outer);
                             ELEMENTWISE(absmax, rows, x, each, threads);
                             ELEMENTWISE(absmax_outer, rows, x, outer, threads);
                             Bytes all;
                             each.add_to(all), outer.add_to(all);
                             return all;
                         }});
        calls.push_back({"moments", [=](int threads) {
                             Room<f32> peak(channels);
                             Room<f64> total(channels), squares(channels);
                             ELEMENTWISE(moments, rows, x, peak, total, squares, threads);
                             Bytes all;
                             peak.add_to(all), total.add_to(all), squares.add_to(all);
                             return all;
                         }});
        calls.push_back({"tail_count and terms", [=](int threads) {
                             Room<s64> counts(channels);
                             Room<f64> cosine(9), each(9 * channels), slope(5), dots(3);
                             ELEMENTWISE(tail_count, rows, x, {clips, 0, 1}, counts, threads);
                             ELEMENTWISE(cosine_terms, rows, x, {clips, 3, false}, true, cosine, threads);
                             ELEMENTWISE(channel_cosine_terms, rows, x, {clips, 3, true}, false, each, threads);
                             ELEMENTWISE(cosine_slope_terms, rows, x, 1.5f, slope, threads);
                             ELEMENTWISE(dot_terms, rows, x, given().bytes.data(), {clips, 0, 1}, dots, threads);
                             Bytes all;
                             counts.add_to(all), cosine.add_to(all), each.add_to(all), slope.add_to(all), dots.add_to(all);
                             return all;
                         }});
    }
    calls.push_back({"transpose", [=](int threads) {
                         Room<u8> bytes(3 * 150 * 131);
                         Room<u32> words(3 * 150 * 131);
                         ELEMENTWISE(transpose, {3, 150, 131}, given().mask.data(), bytes, threads);
                         ELEMENTWISE(transpose, {3, 150, 131}, reinterpret_cast<const u32*>(x), words, threads);
                         Bytes all;
                         bytes.add_to(all), words.add_to(all);
                         return all;
                     }});
}

void add_forward(Path path, std::vector<Call>& calls) {
    const f32 *x = given().floats.data(), *vectors = given().positive.data();
    const s64 rows = 1500, channels = 33, count = rows * channels;
    for (const Activation activation : {Activation::relu, Activation::silu, Activation::gelu})
        calls.push_back({"normalize", [=](int threads) {
                             const Forward from{rows, channels, x, vectors, vectors + channels, x + count, 0.0f, activation};
                             Room<f32> output(count);
                             Room<u8> mask(rows * mask_width(channels));
                             Room<s8> values(count), kept(count);
                             const Outcome to{output,
                                              activation == Activation::relu ? static_cast<u8*>(mask) : nullptr,
                                              values,
                                              2.0f,
                                              static_cast<s8*>(kept),
                                              Stored::s8,
                                              vectors,
                                              vectors + channels,
                                              channels};
                             Bytes all;
                             add(all, ELEMENTWISE(normalize, from, to, threads));
                             add(all, {0, 0, ELEMENTWISE(normalize_peak, from, threads)});
                             output.add_to(all), mask.add_to(all), values.add_to(all), kept.add_to(all);
                             return all;
                         }});
    calls.push_back({"channel_stats and pack_norm", [=](int threads) {
                         Room<f64> total(channels), squares(channels);
                         Room<f32> low(channels), high(channels);
                         Room<s8> kept(count);
                         ELEMENTWISE(channel_stats, rows, channels, x, Stored::f32, total, squares, low, high, threads);
                         const Outcome to{
                             nullptr, nullptr, nullptr, 0.0f, static_cast<s8*>(kept), Stored::s8, vectors, vectors + channels,
                             channels};
                         ELEMENTWISE(pack_norm, rows, channels, x, Stored::f32, to, threads);
                         Bytes all;
                         total.add_to(all), squares.add_to(all), low.add_to(all), high.add_to(all), kept.add_to(all);
                         return all;
                     }});
}

void add_backward(Path path, std::vector<Call>& calls) {
    const f32 *x = given().floats.data(), *vectors = given().positive.data();
    const s64 rows = 1500, channels = 33, count = rows * channels;
    for (const Gate gate : {Gate::mask, Gate::relu6, Gate::silu, Gate::gelu}) {
        const Backward from{rows,
                            channels,
                            x,
                            {x + count, Stored::f32, nullptr, nullptr},
                            vectors,
                            vectors + 40,
                            given().mask.data(),
                            gate,
                            vectors + 80,
                            vectors + 120,
                            vectors + 160};
        calls.push_back({"normalize_grad and its sums", [=](int threads) {
                             Room<f64> total(channels), dot(channels), squares(channels);
                             Room<f32> masked(count), dx(count);
                             ELEMENTWISE(normalize_grad_sums, from, total, dot, squares, masked, threads);
                             ELEMENTWISE(normalize_grad, from, dx, threads);
                             Bytes all;
                             total.add_to(all), dot.add_to(all), squares.add_to(all), masked.add_to(all), dx.add_to(all);
                             return all;
                         }});
        calls.push_back(
            {"normalize_grad_quantize and its pair", [=](int threads) {
                 Room<s8> one(count), two(count), each(count);
                 Room<f32> peak(channels);
                 Room<s64> over(channels), over_all(channels);
                 Report reports[2];
                 Bytes all;
                 add(all, ELEMENTWISE(normalize_grad_quantize, from, 2.0f, {true, 7, 9}, one, threads));
                 ELEMENTWISE(normalize_grad_quantize_pair, from, 2.0f, vectors, {true, 7, 9}, two, each, reports, threads);
                 add(all, reports[0]), add(all, reports[1]);
                 ELEMENTWISE(normalize_grad_tails, from, vectors, 1.0f, peak, over, over_all, threads);
                 ELEMENTWISE(tail_count_pair, rows, channels, x, vectors, 1.0f, over, over_all, threads);
                 one.add_to(all), two.add_to(all), each.add_to(all), peak.add_to(all), over.add_to(all), over_all.add_to(all);
                 return all;
             }});
    }
    calls.push_back({"quantize_pair", [=](int threads) {
                         Room<s8> one(count), each(count);
                         Report reports[2];
                         Bytes all;
                         ELEMENTWISE(quantize_pair, rows, channels, x, 2.0f, vectors, {true, 7, 9}, one, each, reports,
                                     threads);
                         add(all, reports[0]), add(all, reports[1]);
                         one.add_to(all), each.add_to(all);
                         return all;
                     }});
}

void add_images(Path path, std::vector<Call>& calls) {
    const f32* x = given().floats.data();
    calls.push_back({"max_pool", [=](int threads) {
                         const Windows p{2, 21, 20, 40, 3, 3, 2, 2, 1, 1, 1, 1, 11, 10};
                         Room<f32> y(2 * 11 * 10 * 40), dx(2 * 21 * 20 * 40);
                         Room<u8> taps(2 * 11 * 10 * 40);
                         ELEMENTWISE(max_pool, p, x, y, taps, threads);
                         ELEMENTWISE(max_pool_grad, p, x, taps, dx, threads);
                         Bytes all;
                         y.add_to(all), taps.add_to(all), dx.add_to(all);
                         return all;
                     }});
    calls.push_back({"pixels and roi_align", [=](int threads) {
                         const Pixels p{2, 21, 20, 40, 2, 2, 11, 10};
                         Room<f32> y(2 * 11 * 10 * 40), back(2 * 21 * 20 * 40);
                         take_pixels(p, x, y, threads);
                         spread_pixels(p, y, back, threads);
                         const f32 rois[] = {0, 1, 1, 9, 8, 1, 3, 4, 15, 12, 0, 0, 0, 20, 20};
                         const RoiShape shape{2, 21, 20, 40, 3, 7, 7, 0.9f, 2, true};
                         Room<f32> bins(3 * 49 * 40), gradient(2 * 21 * 20 * 40);
                         roi_align(shape, x, rois, bins, threads);
                         roi_align_grad(shape, bins, rois, gradient, threads);
                         Bytes all;
                         y.add_to(all), back.add_to(all), bins.add_to(all), gradient.add_to(all);
                         return all;
                     }});
}

// Blocks of several sizes, written whole while they are lent; some come back from another thread than took them.
Bytes use_pool(int) {
    std::vector<Block> held;
    for (int i = 0; i < 12; ++i) {
        const size_t bytes = (static_cast<size_t>(i % 4) << 20) + 100;
        const Block block = pool_lend(bytes, size_t{8} << 20);
        std::memset(block.memory, i, bytes);
        held.push_back(block);
        if (i % 3 == 0) pool_offer();
        if (i % 5 == 4) pool_release();
        pool_sizes();
        if (i % 2) {
            const Block back = held.front();
            held.erase(held.begin());
            std::thread([back] { pool_give_back(back); }).join();
        }
    }
    for (const Block& block : held) pool_give_back(block);
    return {};
}

// Every caller makes every call, each beginning elsewhere, so that different kernels run beside each other.
int run_beside_each_other(const std::vector<Call>& calls) {
    std::vector<Bytes> expected;
    for (const Call& call : calls) expected.push_back(call.run(1));
    std::vector<std::vector<std::string>> found(kCallers);
    std::vector<std::thread> callers;
    for (size_t caller = 0; caller < kCallers; ++caller)
        callers.emplace_back([&, caller] {
            for (size_t i = 0; i < calls.size(); ++i) {
                const size_t at = (i + caller * calls.size() / kCallers) % calls.size();
                if (calls[at].run(kThreads) != expected[at]) found[caller].push_back(calls[at].name);
            }
        });
    for (std::thread& caller : callers) caller.join();
    int differences = 0;
    for (const auto& names : found)
        for (const std::string& name : names) {
            std::printf("%s: not the bits of one thread alone\n", name.c_str());
            ++differences;
        }
    return differences;
}

// Two threads of a region write to one number: ThreadSanitizer must say so, or its silence means nothing.
int race() {
    s64 sum = 0;
    parallel_ranges(2, 100, [&](int, s64 begin, s64 end) {
        for (s64 i = begin; i < end; ++i) sum += i;
    });
    std::printf("%lld\n", static_cast<long long>(sum));
    return 0;
}

}  // namespace

int main(int count_of_arguments, char**) {
    if (count_of_arguments > 1) return race();
    size_t count = 0;
    int differences = 0;
    std::string paths;
    for (const Path path : {Path::generic, Path::avx2, Path::avx512vnni}) {
        if (!can_run(path)) continue;
        std::vector<Call> calls;
        add_products(path, calls);
        if (path != Path::generic) add_finished(path, calls);
        add_statistics(path, calls);
        add_forward(path, calls);
        add_backward(path, calls);
        add_images(path, calls);
        calls.push_back({"pool", use_pool});
        calls.push_back({"self_check", [=](int) {
                             const std::string said = self_check(path);
                             return Bytes(said.begin(), said.end());
                         }});
        differences += run_beside_each_other(calls);
        count += calls.size() * kCallers;
        paths += std::string(paths.empty() ? "" : ", ") + (path == Path::generic ? "generic"
                                                           : path == Path::avx2  ? "avx2"
                                                                                 : "avx512vnni");
    }
    std::printf("%zu calls by %d threads with %d threads each, %d differences, on paths %s\n", count, kCallers, kThreads,
                differences, paths.c_str());
    return differences ? 1 : 0;
}
