// Rotary positions: pairs (a, b) of columns become (a cos - b sin, b cos + a sin) by the angle of their token.
#include "../../calls/rotary.h"
#include "../rotary.h"
#include "../rows.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

constexpr int64_t TOKENS = 16;  // of a task: their angles stay in the first-level cache for all heads

TK_INLINE int64_t offset(const Extents<3>& strides, int64_t sequence, int64_t head, int64_t row) {
  return sequence * strides.at[0] + head * strides.at[1] + row * strides.at[2];
}

// The heads of q or k, and where they are written, which may be the same memory.
template <class T> struct Heads {
  const T* x;
  T* out;
  int64_t count;
  Extents<3> strides, out_strides;
};

}  // namespace

void rotary(const Rotary& call) {
  const int64_t batch = call.batch, length = call.length, width = call.width, half = call.half;
  const float sign = static_cast<float>(call.sign);
  by_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Heads<T> all[2] = {
        {at<const T>(call.q), at<T>(call.q_out), call.heads, call.q_strides, call.q_out_strides},
        {at<const T>(call.k), at<T>(call.k_out), call.kv_heads, call.k_strides, call.k_out_strides}};
    const int64_t blocks = (length + TOKENS - 1) / TOKENS;
    parallel_for(batch * blocks, 3 * TOKENS * (call.heads + call.kv_heads) * width, [&](int64_t begin, int64_t end) {
      float* memory = scratch<float>(ROW_SLOT, TOKENS * 4 * half);
      Factors factors[TOKENS];
      for (int64_t task = begin; task < end; ++task) {
        const int64_t sequence = task / blocks, first = task % blocks * TOKENS;
        const int64_t tokens = first + TOKENS < length ? TOKENS : length - first;
        const int64_t row = sequence * call.table_stride + first * half;
        for (int64_t i = 0; i < tokens; ++i) {
          const float *c = at<const float>(call.cos) + row + i * half, *s = at<const float>(call.sin) + row + i * half;
          factors[i] = call.interleaved ? spread(c, s, half, memory + i * 4 * half) : Factors{c, s, half, false};
        }
        for (const Heads<T>& each : all)
          for (int64_t h = 0; h < each.count; ++h)
            for (int64_t i = 0; i < tokens; ++i)
              rotate(each.x + offset(each.strides, sequence, h, first + i),
                     each.out + offset(each.out_strides, sequence, h, first + i), factors[i], sign, width);
      }
    });
  });
}

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(rotary)
