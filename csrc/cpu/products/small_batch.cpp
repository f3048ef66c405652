// y = x weight^T + bias for a small batch of rows, as in text generation,
// in the time of reading the weights once.
#include "../../calls/linear.h"
#include "../kernel.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

// Rows of the weights that are read at the same time, far apart from each other: several streams of addresses use more
// of the memory bandwidth than one. Their sums must stay in registers.
template <int M> constexpr int STREAMS = WIDTH == 16 ? (M == 4 ? 4 : 8) : 8 / M;
constexpr int64_t BYTES_AHEAD = 2048;

template <class T> struct Product {
  const T *x, *weight, *bias;
  T* y;
  int64_t rows, columns, depth;  // of y, and of the weights: (columns, depth)
};

// Columns n, n + stride, ... of M rows of y; R of them.
template <int M, int R, class T> TK_INLINE void dot(const Product<T>& p, int64_t row, int64_t n, int64_t stride) {
  Floats sums[R][M] = {};
  auto step = [&](int64_t k, auto lanes) TK_LAMBDA {
    Floats x[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) x[m] = load(p.x + (row + m) * p.depth + k, lanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const T* weight = p.weight + (n + r * stride) * p.depth + k;
      __builtin_prefetch(reinterpret_cast<const char*>(weight) + BYTES_AHEAD);
      const Floats w = load(weight, lanes);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sums[r][m] = fma(x[m], w, sums[r][m]);
    }
  };
  int64_t k = 0;
  for (; k + WIDTH <= p.depth; k += WIDTH) step(k, Whole{});
  if (k < p.depth) step(k, Part{static_cast<int>(p.depth - k)});
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const int64_t column = n + r * stride;
    const float bias = p.bias ? element(p.bias[column]) : 0.f;
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) store(p.y + (row + m) * p.columns + column, splat(sum(sums[r][m]) + bias), Part{1});
  }
}

template <int M, class T> void multiply(const Product<T>& p, int64_t row) {
  constexpr int R = STREAMS<M>;
  const int64_t stride = p.columns / R;
  parallel_for(stride, R * p.depth, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) dot<M, R>(p, row, n, stride);
  });
  for (int64_t n = stride * R; n < p.columns; ++n) dot<M, 1>(p, row, n, 0);
}

}  // namespace

void linear_small_batch(const LinearForward& call) {
  by_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Product<T> p{
        at<const T>(call.x), at<const T>(call.weight), at<const T>(call.bias), at<T>(call.y), call.M, call.N, call.K};
    int64_t row = 0;
    for (; row + 4 <= p.rows; row += 4) multiply<4>(p, row);
    if (p.rows - row == 3) multiply<3>(p, row);
    if (p.rows - row == 2) multiply<2>(p, row);
    if (p.rows - row == 1) multiply<1>(p, row);
  });
}

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(linear_small_batch)
