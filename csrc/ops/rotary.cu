// Launcher of rotary positions. Shapes, strides and dtypes were checked in Python.
#include "../dtype.h"
#include "../registry.h"
#include "rotary.cuh"

namespace transformer_kernels {
namespace {

// Calls f(INTERLEAVED as a constant, how many pairs a thread owns as a constant).
template <class T, class F> void dispatch_rotary(bool interleaved, bool aligned, F&& f) {
  constexpr std::integral_constant<int, ELEMENTS_PER_16_BYTES<T>> wide{};
  constexpr std::integral_constant<int, 1> single{};
  if (interleaved) return aligned ? f(std::true_type{}, wide) : f(std::true_type{}, single);
  return aligned ? f(std::false_type{}, wide) : f(std::false_type{}, single);
}

// q, k and their results (batch, heads or kv_heads, length, width): any strides but of the last axis; results may be q and k.
// cos, sin fp32 (length, half), `table_stride` apart for each sequence. sign -1 turns the other way. kv_heads may be 0.
void rotary(int dtype, int device, Address stream, Address q, Address k, Address cos, Address sin, Address q_out,
            Address k_out, int64_t batch, int64_t heads, int64_t kv_heads, int64_t length, int64_t width, int64_t half,
            int64_t q_batch, int64_t q_head, int64_t q_row, int64_t k_batch, int64_t k_head, int64_t k_row,
            int64_t q_out_batch, int64_t q_out_head, int64_t q_out_row, int64_t k_out_batch, int64_t k_out_head,
            int64_t k_out_row, int64_t table_stride, bool interleaved, double sign) {
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const RotaryHeads<T> queries{pointer<const T>(q), pointer<T>(q_out), static_cast<int>(heads), q_batch, q_head, q_row,
                                 q_out_batch, q_out_head, q_out_row};
    const RotaryHeads<T> keys{pointer<const T>(k), pointer<T>(k_out), static_cast<int>(kv_heads), k_batch, k_head, k_row,
                              k_out_batch, k_out_head, k_out_row};
    const Address addresses = q | k | cos | sin | q_out | k_out;
    const int64_t distances = width | half | q_batch | q_head | q_row | k_batch | k_head | k_row | q_out_batch |
                              q_out_head | q_out_row | k_out_batch | k_out_head | k_out_row;
    const bool aligned = addresses % 16 == 0 && distances % ELEMENTS_PER_16_BYTES<T> == 0;
    dispatch_rotary<T>(interleaved, aligned, [&](auto alternate, auto vector) {
      constexpr int V = decltype(vector)::value;
      int lanes = 1;
      while (lanes < ROTARY_THREADS && lanes * V < half) lanes *= 2;
      const int64_t tiles = ceil_div(length, static_cast<int64_t>(ROTARY_THREADS / lanes));
      launch<rotary_kernel<decltype(alternate)::value, T, V>>(
          "rotary", grid_of(tiles * (heads + kv_heads) * batch), dim3(ROTARY_THREADS), 0,
          Stream{device, stream}, queries, keys, pointer<const float>(cos), pointer<const float>(sin), length,
          static_cast<int>(width), static_cast<int>(half), table_stride, lanes, tiles, static_cast<float>(sign));
    });
  });
}
TK_EXPORT(rotary);

}  // namespace
}  // namespace transformer_kernels
