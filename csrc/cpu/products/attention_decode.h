// Decoding, one query per head: keys and values are read in place, once for the heads that share them, with columns in
// the lanes. Several streams of addresses use more of the memory bandwidth than one,
// so rows far apart are read at the same time.
#pragma once
#include "attention.h"

namespace transformer_kernels::TK_LEVEL {

constexpr int64_t MAX_DECODE_GROUP = 8;      // query heads of a key head; more of them fill the lanes of a register
constexpr int64_t SPLIT_KEYS = 1024;  // keys of one piece
constexpr int64_t SHORT_SUM = 128;    // values that one register adds up

// Rows of keys that are read at the same time for M queries, and registers of a row of values:
// the sums must stay in registers.
template <int M> constexpr int STREAMS = WIDTH == 16 ? (M < 3 ? 8 : 4) : (M < 2 ? 8 : M < 3 ? 4 : 2);
template <int M> constexpr int VALUE_REGISTERS = STREAMS<M>;
constexpr int VALUE_STREAMS = 4;

template <int V> struct Number {
  static constexpr int value = V;
};

// Rows of K or V from a packed key on, of type T.
template <class T> struct Rows {
  const AttentionCall& call;
  const View& tensor;
  const Keys& keys;
  int64_t batch, head, first, ahead;  // ahead: elements from a row to the one that is fetched with it

  Rows(const AttentionCall& all, const View& heads, const Keys& some, int64_t of_batch, int64_t of_head, int64_t from)
      : call(all), tensor(heads), keys(some), batch(of_batch), head(of_head), first(from) {
    constexpr int64_t BYTES_AHEAD = 2048;
    ahead = (BYTES_AHEAD / static_cast<int64_t>(sizeof(T)) / call.width + 1) * tensor.row;
  }
  TK_INLINE const T* at_key(int64_t i) const {
    return row_of<const T>(tensor, batch, head, row_of_key(keys, first + i));
  }
  template <class L> TK_INLINE Floats read(const T* element, L lanes) const {
    __builtin_prefetch(element + ahead);
    return load(element, lanes);
  }
};

// M queries against a piece of the keys: scores (M, SPLIT_KEYS), which become weights;
// weighted sums of values (M, pitch).
template <int M, class T> struct DecodeQueries {
  Rows<T> keys, values;
  const float* queries;
  float *scores, *sums;
  int64_t width, pitch;

  template <int R> TK_INLINE void score(int64_t i, int64_t stride) const {
    const T* key[R];
    Floats total[R][M] = {};
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) key[r] = keys.at_key(i + r * stride);
    auto step = [&](int64_t d, auto lanes) TK_LAMBDA {
      Floats query[M];
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) query[m] = load(queries + m * pitch + d);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Floats row = keys.read(key[r] + d, lanes);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) total[r][m] = fma(query[m], row, total[r][m]);
      }
    };
    int64_t d = 0;
    for (; d + WIDTH <= width; d += WIDTH) step(d, Whole{});
    if (d < width) step(d, Part{static_cast<int>(width - d)});
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) scores[m * SPLIT_KEYS + i + r * stride] = sum(total[r][m]);
  }

  // Adds the values of rows i, i + stride, ... (R of them), i < end, in N registers from column d on.
  template <int R, int N, class L> TK_INLINE void add(int64_t i, int64_t end, int64_t stride, int64_t d,
                                                      L lanes) const {
    Floats total[M][N] = {};
    for (; i < end; ++i)
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const T* value = values.at_key(i + r * stride) + d;
        Floats weight[M];
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) weight[m] = splat(scores[m * SPLIT_KEYS + i + r * stride]);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          const Floats row = values.read(value + n * WIDTH, lanes);
#pragma GCC unroll 4
          for (int m = 0; m < M; ++m) total[m][n] = fma(weight[m], row, total[m][n]);
        }
      }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        float* to = sums + m * pitch + d + n * WIDTH;
        store(to, load(to) + total[m][n]);
      }
  }

  template <int R> void add_rows(int64_t i, int64_t end, int64_t stride) const {
    constexpr int N = VALUE_REGISTERS<M>;
    for (; i < end; i += SHORT_SUM / R) {
      const int64_t to = smaller(end, i + SHORT_SUM / R);
      int64_t d = 0;
      for (; d + N * WIDTH <= width; d += N * WIDTH) add<R, N>(i, to, stride, d, Whole{});
      for (; d + WIDTH <= width; d += WIDTH) add<R, 1>(i, to, stride, d, Whole{});
      if (d < width) add<R, 1>(i, to, stride, d, Part{static_cast<int>(width - d)});
    }
  }

  // Against `count` keys: the largest product of each query, and the sum of weights relative to it.
  void attend(int64_t count, float factor, float* largest_products, float* weight_sums) const {
    constexpr int R = STREAMS<M>;
    for (int64_t i = 0; i < count / R; ++i) score<R>(i, count / R);
    for (int64_t i = count / R * R; i < count; ++i) score<1>(i, 0);
    for (int m = 0; m < M; ++m) {
      float* own = scores + m * SPLIT_KEYS;
      Floats top[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
      Floats total[SUMS] = {};
      over_columns(count, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
        top[u] = maximum(load(own + j, lanes, -INFINITY), top[u]);
      });
      largest_products[m] = largest(top);
      const float base = largest_products[m] == -INFINITY ? 0.f : largest_products[m];
      over_sums(count, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
        const Floats weight = exp2((load(own + j, lanes, -INFINITY) - base) * factor);
        store(own + j, weight, lanes);
        total[u] += weight;
      });
      weight_sums[m] = sum(total);
    }
    add_rows<VALUE_STREAMS>(0, count / VALUE_STREAMS, count / VALUE_STREAMS);
    add_rows<1>(count / VALUE_STREAMS * VALUE_STREAMS, count, 0);
  }
};

// Whether each head has one query, and neither scores nor weights are changed.
inline bool is_decode(const AttentionCall& call, const Options& options) {
  return call.queries == 1 && call.heads <= MAX_DECODE_GROUP * call.kv_heads && !call.cu_seqlens && !call.seed &&
         !call.k.rotated && !adjusts_scores(call, options) && !(call.key_ranges && call.range_strides.at[1]);
}

// Calls attend() for packed keys [from, from + count) with `heads` packed rows of queries,
// four at a time; sums start at 0.
inline void decode_attention(const AttentionCall& call, const Span& span, const Keys& keys, int64_t kv_head,
                             int64_t from, int64_t count, const float* queries, int64_t heads, int64_t pitch,
                             float factor, float* scores, float* largest_products, float* weight_sums, float* sums) {
  by_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Rows<T> k(call, call.k, keys, span.batch, kv_head, from), v(call, call.v, keys, span.batch, kv_head, from);
    const auto some = [&](auto number, int64_t m) {
      const DecodeQueries<decltype(number)::value, T> queries_of_piece{
          k, v, queries + m * pitch, scores, sums + m * pitch, call.width, pitch};
      queries_of_piece.attend(count, factor, largest_products + m, weight_sums + m);
    };
    int64_t m = 0;
    for (; m + 4 <= heads; m += 4) some(Number<4>{}, m);
    if (heads - m == 3) some(Number<3>{}, m);
    if (heads - m == 2) some(Number<2>{}, m);
    if (heads - m == 1) some(Number<1>{}, m);
  });
}

}  // namespace transformer_kernels::TK_LEVEL
