// Launcher of rotary positions. Shapes, strides and dtypes were checked in Python.
#include "../../calls/rotary.h"
#include "../dtype.h"
#include "../../registry.h"
#include "../kernels/rotary.cuh"

namespace transformer_kernels {
namespace {

// Calls f(INTERLEAVED as a constant, pairs per thread as a constant).
template <class T, class F> void dispatch_rotary(bool interleaved, bool aligned, F&& f) {
  constexpr std::integral_constant<int, ELEMENTS_PER_16_BYTES<T>> wide{};
  constexpr std::integral_constant<int, 1> single{};
  if (interleaved) return aligned ? f(std::true_type{}, wide) : f(std::true_type{}, single);
  return aligned ? f(std::false_type{}, wide) : f(std::false_type{}, single);
}

void rotary(const Rotary& call) {
  const int64_t length = call.length, half = call.half, heads = call.heads + call.kv_heads;
  dispatch_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    Address addresses = call.cos | call.sin;
    int64_t distances = call.width | half;
    const auto heads_of = [&](Address x, Address out, int64_t count, const Extents<3>& from, const Extents<3>& to) {
      addresses |= x | out;
      for (int axis = 0; axis < 3; ++axis) distances |= from.at[axis] | to.at[axis];
      return RotaryHeads<T>{pointer<const T>(x),
                            pointer<T>(out),
                            static_cast<int>(count),
                            from.at[0],
                            from.at[1],
                            from.at[2],
                            to.at[0],
                            to.at[1],
                            to.at[2]};
    };
    const RotaryHeads<T> queries = heads_of(call.q, call.q_out, call.heads, call.q_strides, call.q_out_strides);
    const RotaryHeads<T> keys = heads_of(call.k, call.k_out, call.kv_heads, call.k_strides, call.k_out_strides);
    const bool aligned = addresses % 16 == 0 && distances % ELEMENTS_PER_16_BYTES<T> == 0;
    dispatch_rotary<T>(call.interleaved, aligned, [&](auto alternate, auto vector) {
      constexpr int V = decltype(vector)::value;
      int lanes = 1;
      while (lanes < ROTARY_THREADS && lanes * V < half) lanes *= 2;
      const int64_t tiles = ceil_div(length, static_cast<int64_t>(ROTARY_THREADS / lanes));
      launch<rotary_kernel<decltype(alternate)::value, T, V>>(
          "rotary", grid_of(tiles * heads * call.batch), dim3(ROTARY_THREADS), 0, stream_of(call), queries, keys,
          pointer<const float>(call.cos), pointer<const float>(call.sin), length, static_cast<int>(call.width),
          static_cast<int>(half), call.table_stride, lanes, tiles, static_cast<float>(call.sign));
    });
  });
}
TK_EXPORT(rotary);

}  // namespace
}  // namespace transformer_kernels
