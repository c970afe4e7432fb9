// SPDX-License-Identifier: Apache-2.0
// How fast this machine multiplies and adds at best: the instructions that kernels multiply with, over and over, on operands
// that never leave the registers. Data sheets do not say it: clocks vary, and some CPUs split a 512-bit instruction in two.
#pragma once

#include <vector>

#include "core/types.h"

namespace byteback {

struct Peak {
    const char* instruction;
    f64 gmacs;  // billions of multiplications, each with its addition, per second
};

// Of every instruction below that can run here, with all threads at work. Takes some 20 ms for each.
std::vector<Peak> measure_peaks(int threads);

}  // namespace byteback

// Each makes `rounds` rounds, at least one, of its instruction, and returns the number of multiplications.
namespace byteback::avx2 {
s64 multiply_quads(s64 rounds);   // vpmaddubsw, vpmaddwd, vpaddd: u8 times s8, as gemm_u8 does
s64 multiply_pairs(s64 rounds);   // vpmaddwd, vpaddd: s16 times s16, as gemm_s16 and Winograd do
s64 multiply_floats(s64 rounds);  // vfmadd231ps
}  // namespace byteback::avx2

namespace byteback::avx512vnni {
s64 multiply_quads_256(s64 rounds);  // vpdpbusd: u8 times s8
s64 multiply_quads_512(s64 rounds);
s64 multiply_pairs_512(s64 rounds);   // vpdpwssd: s16 times s16
s64 multiply_floats_512(s64 rounds);  // vfmadd231ps
}  // namespace byteback::avx512vnni
