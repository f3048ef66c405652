// y = softmax(scale * x) over rows, with a mask and causality in the same pass, and its gradient.
#include "../../calls/softmax.h"
#include "../rows.h"
#include "../vector_math.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

// The bytes of row i of the mask; null where there is no mask.
TK_INLINE const uint8_t* mask_row(const SoftmaxForward& call, int64_t i) {
  if (!call.mask) return nullptr;
  const auto& [sizes] = call.mask_sizes;
  const auto& [strides] = call.mask_strides;
  const int64_t third = i % sizes[2], second = i / sizes[2] % sizes[1], first = i / sizes[2] / sizes[1];
  return at<const uint8_t>(call.mask) + first * strides[0] + second * strides[1] + third * strides[2];
}

// The row's scores from column j on, -inf if masked or out of bounds.
// SIMPLE: there is no mask, and scale > 0.
template <bool SIMPLE, class T, class L>
TK_INLINE Floats scores(const T* x, const uint8_t* mask, int64_t step, float scale, int64_t j, L lanes) {
  Floats values = load(x + j, lanes, -INFINITY) * scale;
  if constexpr (!SIMPLE)
    for (int i = 0; i < WIDTH; ++i)
      if (i >= lanes.count || (mask && !mask[(j + i) * step])) values[i] = -INFINITY;
  return values;
}

template <bool SIMPLE, class T>
TK_INLINE void softmax_row(const T* x, const uint8_t* mask, int64_t step, bool safe, float scale, int64_t columns,
                           int64_t seen, T* y, float* kept, bool past_caches) {
  Floats top[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
  Floats total[SUMS] = {};
  over_columns(seen, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
    top[u] = maximum(scores<SIMPLE>(x, mask, step, scale, j, lanes), top[u]);
  });
  const float limit = largest(top), base = safe && limit == -INFINITY ? 0.f : limit;
  over_sums(seen, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
    fetch_below(x + j, columns, u), fetch_ahead_to_write(kept + j, u);
    const Floats e = exponential(scores<SIMPLE>(x, mask, step, scale, j, lanes) - base);
    store(kept + j, e, lanes);
    total[u] += lanes.count == WIDTH ? e : load(kept + j, lanes);
  });
  const float all = sum(total), factor = safe && all == 0.f ? 0.f : 1.f / all;
  over_columns(seen, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
    store_result(y + j, load(kept + j, lanes) * factor, lanes, u, past_caches);
  });
  memset(y + seen, 0, static_cast<size_t>(columns - seen) * sizeof(T));
}

template <class T>
void softmax_backward_row(const T* dy, const T* y, float scale, int64_t columns, T* dx, bool past_caches) {
  Floats total[SUMS] = {};
  over_sums(columns, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
    total[u] = fma(load(dy + j, lanes), load(y + j, lanes), total[u]);
  });
  const float dot = sum(total);
  over_columns(columns, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
    if (columns <= NEAR_COLUMNS) fetch_below(dy + j, columns, u), fetch_below(y + j, columns, u);
    store_result(dx + j, load(y + j, lanes) * (load(dy + j, lanes) - dot) * scale, lanes, u, past_caches);
  });
}

}  // namespace

void softmax_forward(const SoftmaxForward& call) {
  const int64_t rows = call.rows, columns = call.columns, causal_rows = call.causal_rows;
  const float scale = static_cast<float>(call.scale);
  const bool safe = call.mask || causal_rows;
  by_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    T* result = result_at<T>(call.y, rows * columns);
    const bool past_caches = goes_past_caches(rows, columns, result);
    parallel_for(rows, 8 * columns, [&](int64_t begin, int64_t end) {
      [[maybe_unused]] float* memory = scratch<float>(ROW_SLOT, sizeof(T) == 4 && !past_caches ? 0 : columns);
      const auto rows_of = [&](auto simple) TK_LAMBDA {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t last = causal_rows ? columns - causal_rows + i % causal_rows + 1 : columns;
          const int64_t seen = last < 0 ? 0 : last < columns ? last : columns;
          T* to = result + i * columns;
          float* kept = memory;
          if constexpr (sizeof(T) == 4)
            if (!past_caches) kept = to;  // where the exponentials are in the cache when they are normalised
          softmax_row<decltype(simple)::value>(at<const T>(call.x) + i * columns, mask_row(call, i),
                                               call.mask_strides.at[3], safe, scale, columns, seen, to, kept,
                                               past_caches);
        }
      };
      if (call.mask || scale <= 0.f) rows_of(Flag<false>{});
      else rows_of(Flag<true>{});
      finish_results(past_caches);
    });
  });
}

void softmax_backward(const SoftmaxBackward& call) {
  const int64_t rows = call.rows, columns = call.columns;
  const float scale = static_cast<float>(call.scale);
  by_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    T* result = result_at<T>(call.dx, rows * columns);
    const bool past_caches = goes_past_caches(rows, columns, result);
    parallel_for(rows, 4 * columns, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        softmax_backward_row(at<const T>(call.dy) + i * columns, at<const T>(call.y) + i * columns, scale, columns,
                             result + i * columns, past_caches);
      finish_results(past_caches);
    });
  });
}

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(softmax_forward)
TK_KERNEL(softmax_backward)
