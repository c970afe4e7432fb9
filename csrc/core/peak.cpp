// SPDX-License-Identifier: Apache-2.0
#include "core/peak.h"

#include <algorithm>
#include <chrono>
#include <numeric>

#include "core/parallel.h"
#include "core/path.h"

namespace byteback {
namespace {

constexpr f64 kBurst = 2e-4;  // seconds: most bursts end before another process gets the core
constexpr int kBursts = 75;

struct Instruction {
    const char* name;
    Path path;
    s64 (*multiply)(s64 rounds);
};

f64 seconds_of(const Instruction& instruction, s64 rounds, s64& products) {
    const auto start = std::chrono::steady_clock::now();
    products = instruction.multiply(rounds);
    return std::chrono::duration<f64>(std::chrono::steady_clock::now() - start).count();
}

// The median over the bursts of one thread. The best burst would be one that ran while the other half of its core was idle.
f64 gmacs_of_thread(const Instruction& instruction, s64 rounds) {
    std::vector<f64> gmacs;
    for (int burst = 0; burst < kBursts; ++burst) {
        s64 products;
        const f64 seconds = seconds_of(instruction, rounds, products);
        gmacs.push_back(static_cast<f64>(products) / seconds / 1e9);
    }
    std::nth_element(gmacs.begin(), gmacs.begin() + kBursts / 2, gmacs.end());
    return gmacs[kBursts / 2];
}

// The sum over threads, each by its own clock: so no time counts in which a thread was not there yet.
f64 measure(const Instruction& instruction, int threads) {
    s64 rounds = 1024, products;
    while (seconds_of(instruction, rounds, products) < kBurst) rounds *= 2;
    std::vector<f64> gmacs(static_cast<size_t>(threads));
    parallel_ranges(threads, threads,
                    [&](int thread, s64, s64) { gmacs[static_cast<size_t>(thread)] = gmacs_of_thread(instruction, rounds); });
    return std::accumulate(gmacs.begin(), gmacs.end(), 0.0);
}

}  // namespace

std::vector<Peak> measure_peaks(int threads) {
    const std::vector<Instruction> instructions = {
#ifdef BYTEBACK_AVX2
        {"vpmaddubsw ymm", Path::avx2, avx2::multiply_quads},
        {"vpmaddwd ymm", Path::avx2, avx2::multiply_pairs},
        {"vfmadd231ps ymm", Path::avx2, avx2::multiply_floats},
#endif
#ifdef BYTEBACK_AVX512VNNI
        {"vpdpbusd ymm", Path::avx512vnni, avx512vnni::multiply_quads_256},
        {"vpdpbusd zmm", Path::avx512vnni, avx512vnni::multiply_quads_512},
        {"vpdpwssd zmm", Path::avx512vnni, avx512vnni::multiply_pairs_512},
        {"vfmadd231ps zmm", Path::avx512vnni, avx512vnni::multiply_floats_512},
#endif
    };
    std::vector<Peak> peaks;
    for (const Instruction& instruction : instructions)
        if (can_run(instruction.path)) peaks.push_back({instruction.name, measure(instruction, threads > 1 ? threads : 1)});
    return peaks;
}

}  // namespace byteback
