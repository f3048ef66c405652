// y = activation(x W^T + bias) and its gradients: the products of a small transformer, whose weights fit in the
// second-level cache, with all that surrounds a product done while its tile is in the first.
#include "linear.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

enum Slot { PANELS = 8, LEFT, RESULT, SUMS };

constexpr int64_t DEPTH = 256;  // rows of x and dy that one step of a weight gradient adds up

// The rows [begin, begin + rows) of the left operand as float32, and how far apart they are.
template <class T> const float* left_rows(const T* x, int64_t begin, int64_t rows, int64_t columns) {
  if constexpr (sizeof(T) == 4) return x + begin * columns;
  float* wide = scratch<float>(LEFT, (ROWS_OF_BLOCK + SLACK_ROWS) * columns + WIDTH);
  for (int64_t r = 0; r < rows; ++r) widen(x + (begin + r) * columns, columns, columns, wide + r * columns);
  return wide;
}

// Calls f(row, column, value, lanes) for a block's result: rows of panels[p] times the left rows, a tile at a time.
template <class F>
void multiply(const float* left, int64_t rows, int64_t K, const float* panels, int64_t N, const F& f) {
  float* tile = scratch<float>(RESULT, (ROWS_OF_BLOCK + SLACK_ROWS) * PANEL);
  for (int64_t n = 0; n < N; n += PANEL) {
    product<false>(left, {K, 1}, panels + n * K, PANEL, tile, PANEL, rows, 2, K);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < PANEL; j += WIDTH) {
        const int64_t some = N - n - j;
        if (some >= WIDTH) f(r, n + j, load(tile + r * PANEL + j), Whole{});
        else if (some > 0) f(r, n + j, load(tile + r * PANEL + j), Part{static_cast<int>(some)});
      }
  }
}

template <class F> void over_row_blocks(int64_t M, int64_t work_of_row, const F& f) {
  parallel_for((M + ROWS_OF_BLOCK - 1) / ROWS_OF_BLOCK, ROWS_OF_BLOCK * work_of_row, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      f(block * ROWS_OF_BLOCK, smaller(ROWS_OF_BLOCK, M - block * ROWS_OF_BLOCK));
  });
}

}  // namespace

// x (M, K), weight (N, K), bias (N) or address 0 -> y (M, N), and where `before` is not 0 the sums before the activation.
void linear_forward(int64_t dtype, Address x, int64_t weight_dtype, Address weight, int64_t bias_dtype, Address bias,
                    Address y, Address before, int64_t M, int64_t N, int64_t K, int64_t activation) {
  const int64_t count = (N + PANEL - 1) / PANEL;
  float* panels = scratch<float>(PANELS, count * PANEL * K);
  float* added = scratch<float>(SUMS, aligned(N, WIDTH));
  by_dtype(weight_dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_for(count, PANEL * K, [&](int64_t begin, int64_t end) { pack_transposed(at<const T>(weight), N, K, begin, end, panels); });
  });
  by_dtype(bias_dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (bias) widen(at<const T>(bias), N, aligned(N, WIDTH), added);
    else memset(added, 0, sizeof(float) * aligned(N, WIDTH));
  });
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    over_row_blocks(M, N * K / 4, [&](int64_t row, int64_t rows) {
      multiply(left_rows(at<const T>(x), row, rows, K), rows, K, panels, N, [&](int64_t r, int64_t n, Floats value, auto lanes) TK_LAMBDA {
        const Floats z = value + load(added + n);
        if (before) store(at<T>(before) + (row + r) * N + n, z, lanes);
        store(at<T>(y) + (row + r) * N + n, activated(z, activation), lanes);
      });
    });
  });
}

// dz (M, N) = dy activation'(saved) and dx (M, K) = dz W. dz is written where its address is not 0; dx likewise.
void linear_backward_data(int64_t dtype, Address dy, Address saved, int64_t weight_dtype, Address weight, Address dz,
                          Address dx, int64_t M, int64_t N, int64_t K, int64_t activation) {
  const int64_t count = (K + PANEL - 1) / PANEL;
  float* panels = scratch<float>(PANELS, count * PANEL * N);
  if (dx)
    by_dtype(weight_dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      parallel_for(count, PANEL * N, [&](int64_t begin, int64_t end) { pack_rows(at<const T>(weight), N, K, K, begin, end, panels); });
    });
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    over_row_blocks(M, (dx ? N * K : 8 * N) / 4, [&](int64_t row, int64_t rows) {
      if (dz)
        for (int64_t i = row * N; i < (row + rows) * N; i += WIDTH) {
          const Part some{static_cast<int>(smaller(WIDTH, (row + rows) * N - i))};
          store(at<T>(dz) + i, load(at<const T>(dy) + i, some) * slope(load(at<const T>(saved) + i, some), activation), some);
        }
      if (!dx) return;
      multiply(left_rows(at<const T>(dz ? dz : dy), row, rows, N), rows, N, panels, K, [&](int64_t r, int64_t k, Floats value, auto lanes) TK_LAMBDA {
        store(at<T>(dx) + (row + r) * K + k, value, lanes);
      });
    });
  });
}

// dweight (N, K) = dz^T x and dbias (N) = sums of dz. One task owns some rows of dweight and adds up the rows of x in
// steps of DEPTH; addresses 0 are not wanted.
void linear_backward_weight(int64_t dtype, Address dz, Address x, int64_t weight_dtype, Address dweight,
                            int64_t bias_dtype, Address dbias, int64_t M, int64_t N, int64_t K) {
  const int64_t threads = thread_count(), share = aligned((N + threads - 1) / threads, 16), pitch = aligned(K, PANEL);
  const int64_t own = share < 16 ? 16 : smaller(share, 128), panels = pitch / PANEL;
  parallel_for((N + own - 1) / own, own * K * M / 4, [&](int64_t begin, int64_t end) {
    float* right = scratch<float>(PANELS, DEPTH * pitch);
    float* left = scratch<float>(LEFT, DEPTH * aligned(own, WIDTH));
    float* total = scratch<float>(RESULT, (own + SLACK_ROWS) * pitch);
    float* sums = scratch<float>(SUMS, 2 * aligned(own, WIDTH));
    for (int64_t task = begin; task < end; ++task) {
      const int64_t n0 = task * own, rows = smaller(own, N - n0), wide = aligned(rows, WIDTH);
      float* part = sums + aligned(own, WIDTH);
      memset(total, 0, sizeof(float) * (own + SLACK_ROWS) * pitch);
      memset(sums, 0, sizeof(float) * aligned(own, WIDTH));
      for (int64_t m0 = 0; m0 < M; m0 += DEPTH) {
        const int64_t depth = smaller(DEPTH, M - m0);
        memset(part, 0, sizeof(float) * wide);
        by_dtype(dtype, [&](auto type) {
          using T = typename decltype(type)::type;
          for (int64_t m = 0; m < depth; ++m) {
            widen(at<const T>(dz) + (m0 + m) * N + n0, rows, wide, left + m * wide);
            for (int64_t i = 0; i < wide; i += WIDTH) store(part + i, load(part + i) + load(left + m * wide + i));
          }
          if (dweight) pack_rows(at<const T>(x) + m0 * K, depth, K, K, 0, panels, right);
        });
        for (int64_t i = 0; i < wide; i += WIDTH) store(sums + i, load(sums + i) + load(part + i));
        for (int64_t p = 0; p < panels && dweight; ++p)
          product<true>(left, {1, wide}, right + p * depth * PANEL, PANEL, total + p * PANEL, pitch, rows, 2, depth);
      }
      by_dtype(weight_dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        for (int64_t n = 0; n < rows && dweight; ++n)
          over_columns(K, [&](int64_t k, auto lanes, int) TK_LAMBDA { store(at<T>(dweight) + (n0 + n) * K + k, load(total + n * pitch + k), lanes); });
      });
      by_dtype(bias_dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        if (dbias) over_columns(rows, [&](int64_t n, auto lanes, int) TK_LAMBDA { store(at<T>(dbias) + n0 + n, load(sums + n), lanes); });
      });
    }
  });
}

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(linear_forward)
TK_KERNEL(linear_backward_data)
TK_KERNEL(linear_backward_weight)
