// out = (kept ? x * scale : 0) + residual, for parts of attention's weights too:
// heads and places are counted from elsewhere.
#include "../philox.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

// One row, whose first element is column `first`.
template <class T>
TK_INLINE void drop_row(const Dropout& dropout, uint32_t head, uint32_t row, int64_t first, int64_t columns,
                        float scale, const T* x, const T* residual, T* out) {
  const int skipped = static_cast<int>(first % COLUMNS_OF_COUNTER);
  const int64_t step = skipped ? COLUMNS_OF_GROUP - COLUMNS_OF_COUNTER : COLUMNS_OF_GROUP;
  for (int64_t group = 0; group < columns; group += step) {
    uint64_t bits = ~0ull;
    if (dropout.threshold)
      keep_bits<1>(dropout, head, row, 0, static_cast<uint32_t>((first + group) / COLUMNS_OF_COUNTER), 0, &bits);
    bits >>= skipped;
    const int64_t left = columns - group, count = left < step ? left : step;
    over_columns(count, [&](int64_t j, auto lanes, int) TK_LAMBDA {
      const Floats left_over = kept(static_cast<uint32_t>(bits >> j), load(x + group + j, lanes) * scale);
      store(out + group + j, residual ? left_over + load(residual + group + j, lanes) : left_over, lanes);
    });
  }
}

}  // namespace

// x, residual (or address 0), out (heads, rows, columns); element (h, r, c) is (first_head + h, first + r, first + c).
void dropout(int64_t dtype, Address x, Address residual, Address out, Address seed, double p, float scale,
             int64_t first_head, int64_t heads, int64_t rows, int64_t columns, int64_t first) {
  const Dropout chosen = make_dropout(at<const int64_t>(seed), p);
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_for(heads * rows, 4 * columns, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        drop_row(chosen, static_cast<uint32_t>(first_head + i / rows), static_cast<uint32_t>(first + i % rows), first,
                 columns, scale, at<const T>(x) + i * columns, residual ? at<const T>(residual) + i * columns : nullptr,
                 at<T>(out) + i * columns);
    });
  });
}

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(dropout)
