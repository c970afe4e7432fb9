// SPDX-License-Identifier: Apache-2.0
// The part of OpenMP that csrc/core/parallel.h uses, by std::thread. ThreadSanitizer knows how those are started and joined;
// gcc's own libgomp is not instrumented, and ThreadSanitizer would report a race wherever it hands work over. The driver is
// linked with this instead of libgomp.
#include <thread>
#include <vector>

namespace {
thread_local int own_number = 0, own_count = 1;
}

extern "C" {

int omp_get_thread_num() { return own_number; }
int omp_get_num_threads() { return own_count; }

// What gcc makes of `#pragma omp parallel num_threads(count)`.
void GOMP_parallel(void (*body)(void*), void* data, unsigned count, unsigned) {
    std::vector<std::thread> others;
    for (unsigned i = 1; i < count; ++i)
        others.emplace_back([=] {
            own_number = static_cast<int>(i);
            own_count = static_cast<int>(count);
            body(data);
        });
    const int number = own_number, threads = own_count;
    own_number = 0;
    own_count = static_cast<int>(count);
    body(data);
    for (std::thread& other : others) other.join();
    own_number = number;
    own_count = threads;
}
}
