// SPDX-License-Identifier: Apache-2.0
// Adds a gradient that waits to another one: to the rows of grad_input while they are written, or in a pass of its own. The sum
// is float32, or rounded to bfloat16 once.
// Compiled once per path, behind its vectors.
#pragma once

#include "block/epilogue.h"
#include "block/vector/norm_rows.h"

namespace byteback::BYTEBACK_PATH {

namespace {

struct Addition {
    Waiting from;
    s64 channels;
    void* to;
    Stored kind;  // of the sum
    bool stream;

    // Elements e .. of the row whose first one is `at` and whose mask begins at m: value + what waits.
    template <class Lanes>
    BYTEBACK_INLINE void vector(const f32* value, s64 at, s64 m, s64 e, Lanes lanes) const {
        Floats sum = lanes.load(value + e);
        if (from.g) {
            Floats g = load_stored(from.g, from.kind, at + e, lanes);
            if (from.mask) g = kept(lanes.mask(from.mask + m + e / 8), g);
            sum = sum + g;
        }
        store_stored(to, kind, at + e, sum, lanes, stream);
    }

    // `count` rows, or all of them as one where no row ends within a byte of the mask.
    void rows(s64 first, s64 count, const f32* values) const {
        const bool together = !from.mask || channels % 8 == 0;
        const s64 length = together ? count * channels : channels;
        for (s64 row = first; row < first + count; row += length / channels, values += length) {
            const s64 at = row * channels, m = row * mask_width(channels);
            s64 e = 0;
            for (; e + kLanes <= length; e += kLanes) vector(values, at, m, e, AllLanes{});
            if (e < length) vector(values, at, m, e, FirstLanes(length - e));
        }
    }
};

void add_rows(const Epilogue& all, s64 row, s64 rows, s64, s64, const f32* y) {
    static_cast<const Addition*>(all.state)->rows(row, rows, y);
    end_streams();  // behind what was streamed
}

}  // namespace

void with_waiting(s64 rows, s64 channels, const Waiting& from, void* dx, Stored kind, void (*body)(const Epilogue&, void*),
                  void* context) {
    Addition addition{from, channels, dx, kind, should_stream(dx, kind, rows, channels)};
    Epilogue epilogue{};
    epilogue.from.rows = rows, epilogue.from.channels = channels;
    epilogue.state = &addition, epilogue.in_order = true, epilogue.finish = &add_rows;
    body(epilogue, context);
}

void add_waiting(s64 rows, s64 channels, const Waiting& from, const f32* x, f32* dx, int threads) {
    const Addition addition{from, channels, dx, Stored::f32, false};
    const s64 each = ceil_div(kUnitWork, channels);
    parallel_parts(useful_threads(threads, rows * channels), ceil_div(rows, each), [&](s64 begin, s64 end) {
        const s64 last = end * each < rows ? end * each : rows;
        addition.rows(begin * each, last - begin * each, x + begin * each * channels);
    });
}

}  // namespace byteback::BYTEBACK_PATH
