// Rotates pairs (a, b) of columns by the angle of their token: (a cos - b sin, b cos + a sin).
#pragma once
#include "../launch.h"
#include "../primitives/memory.h"
#include "../primitives/numbers.h"

namespace transformer_kernels {

inline constexpr int ROTARY_THREADS = 256;

// The heads of q or k, x (batch, count, length, width), and the output, which may be the same memory; both with a
// contiguous last axis.
template <class T> struct RotaryHeads {
  const T* x;
  T* out;
  int count;
  int64_t batch_stride, head_stride, row_stride, out_batch_stride, out_head_stride, out_row_stride;
};

// Rotates V pairs: adjacent elements of x[0], x[1] if interleaved, else elements of x[0] with those of x[1]; sign -1 is
// the inverse.
template <bool INTERLEAVED, class T, int V>
TK_DEVICE void rotate_pairs(Vector<T, V> (&x)[2], const Vector<float, V>& cos, const Vector<float, V>& sin,
                            float sign) {
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const int at_a = INTERLEAVED ? 2 * i : i, at_b = INTERLEAVED ? 2 * i + 1 : V + i;  // of the 2 V elements
    const float a = to_float(x[at_a / V][at_a % V]), b = to_float(x[at_b / V][at_b % V]), signed_sin = sin[i] * sign;
    x[at_a / V][at_a % V] = from_float<T>(a * cos[i] - b * signed_sin);
    x[at_b / V][at_b % V] = from_float<T>(b * cos[i] + a * signed_sin);
  }
}

// One block owns ROTARY_THREADS / lanes tokens of one head of q or, after those, of k; `lanes` threads share a token
// and process V pairs at a time, then V of the columns after the pairs. Blocks are ordered by tile, head and sequence.
// cos, sin (length, half), with stride `table_stride` between sequences; sign -1 is the inverse.
template <bool INTERLEAVED, class T, int V>
__global__ void __launch_bounds__(ROTARY_THREADS)
    rotary_kernel(RotaryHeads<T> q, RotaryHeads<T> k, const float* __restrict__ cos, const float* __restrict__ sin,
                  int64_t length, int width, int half, int64_t table_stride, int lanes, int64_t tiles, float sign) {
  const int64_t tile = blockIdx.x % tiles, head_of_all = blockIdx.x / tiles;
  const int64_t batch = head_of_all / (q.count + k.count);
  const int either = static_cast<int>(head_of_all % (q.count + k.count));
  const bool is_query = either < q.count;
  const int head = is_query ? either : either - q.count;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int64_t row = tile * (ROTARY_THREADS / lanes) + static_cast<int>(threadIdx.x) / lanes;
  if (row >= length) return;
  // Field by field: a reference to one of two parameters would copy both to local memory.
  const T* from = (is_query ? q.x : k.x) + batch * (is_query ? q.batch_stride : k.batch_stride) +
                  head * (is_query ? q.head_stride : k.head_stride) + row * (is_query ? q.row_stride : k.row_stride);
  T* to = (is_query ? q.out : k.out) + batch * (is_query ? q.out_batch_stride : k.out_batch_stride) +
          head * (is_query ? q.out_head_stride : k.out_head_stride) +
          row * (is_query ? q.out_row_stride : k.out_row_stride);
  const int64_t angles = batch * table_stride + row * half;

  for (int pair = lane * V; pair < half; pair += lanes * V) {
    const int first = INTERLEAVED ? 2 * pair : pair, second = INTERLEAVED ? first + V : half + pair;
    Vector<T, V> x[2] = {load_vector<V>(from + first), load_vector<V>(from + second)};
    rotate_pairs<INTERLEAVED>(x, load_vector<V>(cos + angles + pair), load_vector<V>(sin + angles + pair), sign);
    store_vector(to + first, x[0]);
    store_vector(to + second, x[1]);
  }
  for (int column = 2 * half + lane * V; column < width; column += lanes * V)
    store_vector(to + column, load_vector<V>(from + column));
}

}  // namespace transformer_kernels
