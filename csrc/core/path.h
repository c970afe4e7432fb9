// SPDX-License-Identifier: Apache-2.0
// A path is a set of kernels for one kind of machine. Every path gives the same bits; a better one is only faster.
//
//   generic      portable C++, always there
//   avx2         x86-64 with AVX2 and FMA
//   avx512vnni   the same with AVX-512 VNNI (Ice Lake, Zen 4 and later)
//
// A path can run here if it was compiled in and the CPU has what it needs. This file is the only one that asks the CPU.
#pragma once

namespace byteback {

enum class Path { generic, avx2, avx512vnni };

bool is_compiled(Path);
bool cpu_supports(Path);
inline bool can_run(Path path) { return is_compiled(path) && cpu_supports(path); }

}  // namespace byteback
