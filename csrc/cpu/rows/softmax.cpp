// y = softmax(scale * x) over rows, with a mask and causality in the same pass, and its gradient.
#include "../rows.h"
#include "../vector_math.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

struct Mask {
  const uint8_t* data;  // null: nothing is masked
  int64_t sizes[3], strides[4];

  const uint8_t* row(int64_t i) const {
    const int64_t third = i % sizes[2], second = i / sizes[2] % sizes[1], first = i / sizes[2] / sizes[1];
    return data + first * strides[0] + second * strides[1] + third * strides[2];
  }
};

// The row's scores from column j on, those that are masked or do not exist -inf. SIMPLE: there is no mask, and scale > 0.
template <bool SIMPLE, class T, class L> TK_INLINE Floats scores(const T* x, const uint8_t* mask, int64_t step, float scale, int64_t j, L lanes) {
  Floats values = load(x + j, lanes, -INFINITY) * scale;
  if constexpr (!SIMPLE)
    for (int i = 0; i < WIDTH; ++i)
      if (i >= lanes.count || (mask && !mask[(j + i) * step])) values[i] = -INFINITY;
  return values;
}

template <bool SIMPLE, class T>
TK_INLINE void softmax_row(const T* x, const uint8_t* mask, int64_t step, bool safe, float scale, int64_t columns, int64_t seen, T* y, float* kept) {
  Floats top[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)}, total[4] = {};
  over_columns(seen, [&](int64_t j, auto lanes, int u) TK_LAMBDA { top[u] = maximum(scores<SIMPLE>(x, mask, step, scale, j, lanes), top[u]); });
  const float limit = largest(top), base = safe && limit == -INFINITY ? 0.f : limit;
  over_columns(seen, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
    fetch_below(x + j, columns), fetch_ahead_to_write(kept + j);
    const Floats e = exponential(scores<SIMPLE>(x, mask, step, scale, j, lanes) - base);
    store(kept + j, e, lanes);
    total[u] += lanes.count == WIDTH ? e : load(kept + j, lanes);
  });
  const float all = sum(total), factor = safe && all == 0.f ? 0.f : 1.f / all;
  over_columns(seen, [&](int64_t j, auto lanes, int) TK_LAMBDA { store(y + j, load(kept + j, lanes) * factor, lanes); });
  memset(y + seen, 0, static_cast<size_t>(columns - seen) * sizeof(T));
}

template <class T> void softmax_backward_row(const T* dy, const T* y, float scale, int64_t columns, T* dx) {
  Floats total[4] = {};
  over_columns(columns, [&](int64_t j, auto lanes, int u) TK_LAMBDA { total[u] = fma(load(dy + j, lanes), load(y + j, lanes), total[u]); });
  const float dot = sum(total);
  over_columns(columns, [&](int64_t j, auto lanes, int) TK_LAMBDA {
    fetch_below(dy + j, columns), fetch_below(y + j, columns), fetch_ahead_to_write(dx + j);
    store(dx + j, load(y + j, lanes) * (load(dy + j, lanes) - dot) * scale, lanes);
  });
}

}  // namespace

// x, y (rows, columns); mask_* describe a bool view (d0, d1, d2, columns) of the rows, or address 0. causal_rows: Lq, or 0.
void softmax_forward(int64_t dtype, Address x, Address y, Address mask, int64_t d0, int64_t d1, int64_t d2, int64_t s0,
                     int64_t s1, int64_t s2, int64_t s3, int64_t causal_rows, int64_t rows, int64_t columns, float scale) {
  const Mask view{at<const uint8_t>(mask), {d0, d1, d2}, {s0, s1, s2, s3}};
  const bool safe = view.data || causal_rows;
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    T* result = result_at<T>(y, rows * columns);
    parallel_for(rows, 8 * columns, [&](int64_t begin, int64_t end) {
      [[maybe_unused]] float* memory = scratch<float>(ROW_SLOT, sizeof(T) == 4 ? 0 : columns);
      const auto rows_of = [&](auto simple) TK_LAMBDA {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t last = causal_rows ? columns - causal_rows + i % causal_rows + 1 : columns;
          const int64_t seen = last < 0 ? 0 : last < columns ? last : columns;
          T* to = result + i * columns;
          float* kept = memory;
          if constexpr (sizeof(T) == 4) kept = to;  // where the exponentials are in the cache when they are normalised
          softmax_row<decltype(simple)::value>(at<const T>(x) + i * columns, view.data ? view.row(i) : nullptr, s3, safe, scale,
                                               columns, seen, to, kept);
        }
      };
      if (view.data || scale <= 0.f) rows_of(Flag<false>{});
      else rows_of(Flag<true>{});
    });
  });
}

// dx = scale * y * (dy - sum(dy * y)).
void softmax_backward(int64_t dtype, Address dy, Address y, Address dx, int64_t rows, int64_t columns, float scale) {
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    T* result = result_at<T>(dx, rows * columns);
    parallel_for(rows, 4 * columns, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        softmax_backward_row(at<const T>(dy) + i * columns, at<const T>(y) + i * columns, scale, columns, result + i * columns);
    });
  });
}

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(softmax_forward)
TK_KERNEL(softmax_backward)
