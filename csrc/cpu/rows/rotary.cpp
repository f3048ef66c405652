// Rotary positions: pairs (a, b) of columns become (a cos - b sin, b cos + a sin) by the angle of their token.
#include "../rotary.h"
#include "../rows.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

constexpr int64_t TOKENS = 16;  // of a task: their angles stay in the first-level cache for all heads

// How far apart the sequences, heads and rows of a tensor (batch, heads, length, width) are; its last axis is contiguous.
struct Distances {
  int64_t batch, head, row;

  TK_INLINE int64_t to(int64_t sequence, int64_t h, int64_t i) const { return sequence * batch + h * head + i * row; }
};

// The heads of q or k, and where they are written, which may be the same place.
template <class T> struct Heads {
  const T* x;
  T* out;
  int64_t count;
  Distances from, to;
};

}  // namespace

// q, k and their results (batch, heads or kv_heads, length, width): any strides but of the last axis; results may be q and k.
// cos, sin f32 (length, half), `table_stride` apart for each sequence. `sign` -1 turns the other way.
void rotary(int64_t dtype, Address q, Address k, Address cos, Address sin, Address q_out, Address k_out, int64_t batch,
            int64_t heads, int64_t kv_heads, int64_t length, int64_t width, int64_t half, int64_t q_batch, int64_t q_head,
            int64_t q_row, int64_t k_batch, int64_t k_head, int64_t k_row, int64_t q_out_batch, int64_t q_out_head,
            int64_t q_out_row, int64_t k_out_batch, int64_t k_out_head, int64_t k_out_row, int64_t table_stride,
            bool interleaved, float sign) {
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Heads<T> all[2] = {
        {at<const T>(q), at<T>(q_out), heads, {q_batch, q_head, q_row}, {q_out_batch, q_out_head, q_out_row}},
        {at<const T>(k), at<T>(k_out), kv_heads, {k_batch, k_head, k_row}, {k_out_batch, k_out_head, k_out_row}}};
    const int64_t blocks = (length + TOKENS - 1) / TOKENS;
    parallel_for(batch * blocks, 3 * TOKENS * (heads + kv_heads) * width, [&](int64_t begin, int64_t end) {
      float* memory = scratch<float>(ROW_SLOT, TOKENS * 4 * half);
      Factors factors[TOKENS];
      for (int64_t task = begin; task < end; ++task) {
        const int64_t sequence = task / blocks, first = task % blocks * TOKENS;
        const int64_t tokens = first + TOKENS < length ? TOKENS : length - first;
        const int64_t row = sequence * table_stride + first * half;
        for (int64_t i = 0; i < tokens; ++i) {
          const float *c = at<const float>(cos) + row + i * half, *s = at<const float>(sin) + row + i * half;
          factors[i] = interleaved ? spread(c, s, half, memory + i * 4 * half) : Factors{c, s, half, false};
        }
        for (const Heads<T>& each : all)
          for (int64_t h = 0; h < each.count; ++h)
            for (int64_t i = 0; i < tokens; ++i)
              turn(each.x + each.from.to(sequence, h, first + i), each.out + each.to.to(sequence, h, first + i), factors[i],
                   sign, width);
      }
    });
  });
}

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(rotary)
