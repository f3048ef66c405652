// Rows of tables, their sum, LayerNorm and dropout, and the gradients.
#include "../../calls/embedding.h"
#include "../rows.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

TK_INLINE bool is_row(int64_t id, int64_t count) { return static_cast<uint64_t>(id) < static_cast<uint64_t>(count); }

constexpr int64_t ROWS_AHEAD = 2;  // of the token table, at arbitrary addresses

template <class T> struct Tables {
  const T *weight, *positions;  // positions may be null
  const int64_t *tokens, *position_ids;  // position_ids null: row i has position i % length
  int64_t rows, length, columns, vocabulary, position_count;
  float scale;

  TK_INLINE int64_t position(int64_t i) const { return position_ids ? position_ids[i] : i % length; }
  TK_INLINE bool contain(int64_t i) const {
    return is_row(tokens[i], vocabulary) && (!positions || is_row(position(i), position_count));
  }
  TK_INLINE const T* token_row(int64_t i) const { return weight + tokens[i] * columns; }
  TK_INLINE const T* position_row(int64_t i) const { return positions ? positions + position(i) * columns : nullptr; }

  TK_INLINE void fetch(int64_t i) const {
    if (i >= rows || !is_row(tokens[i], vocabulary)) return;
    constexpr int64_t LINE = 64 / sizeof(T);
    for (int64_t j = 0; j < columns; j += LINE) __builtin_prefetch(token_row(i) + j);
  }

  template <class L> TK_INLINE Floats sum(const T* token, const T* position, int64_t j, L lanes) const {
    const Floats scaled = load(token + j, lanes) * scale;
    return position ? scaled + load(position + j, lanes) : scaled;
  }
};

template <class T, class Call> TK_INLINE Tables<T> tables_of(const Call& call) {
  return {at<const T>(call.weight),
          at<const T>(call.positions),
          at<const int64_t>(call.tokens),
          at<const int64_t>(call.position_ids),
          call.rows,
          call.length,
          call.columns,
          call.vocabulary,
          call.position_count,
          static_cast<float>(call.scale)};
}

// The sum of both tables' rows as floats in `out`, NaN where an id is in neither; returns its total.
template <class T> TK_INLINE float gather_row(const Tables<T>& tables, int64_t i, float* out) {
  tables.fetch(i + ROWS_AHEAD);
  const bool in_range = tables.contain(i);
  const T *token = in_range ? tables.token_row(i) : nullptr, *position = in_range ? tables.position_row(i) : nullptr;
  if (!in_range)
    for (int64_t j = 0; j < tables.columns; ++j) out[j] = NAN;
  else
    over_columns(tables.columns, [&](int64_t j, auto lanes, int) TK_LAMBDA {
      store(out + j, tables.sum(token, position, j, lanes), lanes);
    });
  return row_sum<true>(out, tables.columns);
}

}  // namespace

void embedding_forward(const EmbeddingForward& call) {
  const int64_t rows = call.rows, columns = call.columns;
  const float eps = static_cast<float>(call.eps);
  const Dropout dropout = make_dropout(at<const int64_t>(call.seed), call.dropout_p);
  by_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Tables<T> tables = tables_of<T>(call);
    const float *w = at<const float>(call.norm_weight), *b = at<const float>(call.norm_bias);
    T* result = result_at<T>(call.y, rows * columns);
    parallel_for(rows, (call.seed ? 8 : 3) * columns, [&](int64_t begin, int64_t end) {
      float* row = scratch<float>(ROW_SLOT, columns);
      for (int64_t i = begin; i < end; ++i) {
        T* to = result + i * columns;
        const float total = gather_row(tables, i, row);
        if (!w) {
          over_dropped_columns(
              dropout, static_cast<uint32_t>(i), columns,
              [&](int64_t j, auto lanes, int, auto drop)
                  TK_LAMBDA { store(to + j, drop(load(row + j, lanes)), lanes); });
          continue;
        }
        const Moments m = moments<true>(row, total, columns, eps);
        at<float>(call.mean)[i] = m.mean, at<float>(call.rstd)[i] = m.rstd;
        over_dropped_columns(dropout, static_cast<uint32_t>(i), columns,
                             [&](int64_t j, auto lanes, int, auto drop) TK_LAMBDA {
          store(to + j, drop(normalised(row, m, w, b, j, lanes)), lanes);
        });
      }
    });
  });
}

void embedding_backward(const EmbeddingBackward& call) {
  const int64_t rows = call.rows, columns = call.columns;
  const Dropout dropout = make_dropout(at<const int64_t>(call.seed), call.dropout_p);
  by_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* dy = at<const T>(call.dy);
    const float* w = at<const float>(call.norm_weight);
    T* result = result_at<T>(call.ds, rows * columns);
    if (!w)
      return parallel_for(rows, 6 * columns, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          over_dropped_columns(dropout, static_cast<uint32_t>(i), columns,
                               [&](int64_t j, auto lanes, int, auto drop) TK_LAMBDA {
            store(result + i * columns + j, drop(load(dy + i * columns + j, lanes)), lanes);
          });
      });
    const Tables<T> tables = tables_of<T>(call);
    const float* sums =
        sums_over_rows(rows, 2 * columns, (call.seed ? 10 : 5) * columns, [&](float* own, int64_t begin, int64_t end) {
      float *row = scratch<float>(ROW_SLOT, 2 * columns), *came = row + columns;
      for (int64_t i = begin; i < end; ++i) {
        gather_row(tables, i, row);
        const Moments m{at<const float>(call.mean)[i], at<const float>(call.rstd)[i]};
        over_dropped_columns(dropout, static_cast<uint32_t>(i), columns,
                             [&](int64_t j, auto lanes, int, auto drop) TK_LAMBDA {
          store(came + j, drop(load(dy + i * columns + j, lanes)), lanes);
        });
        Projections means;
        project<true, 1, 4>(row, [&](int64_t j, auto lanes) TK_LAMBDA { return load(came + j, lanes); }, &m, w, columns,
                            own, own + columns, &means);
        over_columns(columns, [&](int64_t j, auto lanes, int) TK_LAMBDA {
          store(result + i * columns + j, norm_gradient(load(came + j, lanes), row, m, w, means, j, lanes), lanes);
        });
      }
    });
    add_parts(sums, parts_of(rows), 2 * columns, columns, at<float>(call.dnorm_weight));
    add_parts(sums + columns, parts_of(rows), 2 * columns, columns, at<float>(call.dnorm_bias));
  });
}

// table[id of row i] += scale * ds[i], in the order of the rows; table f32 (count, columns).
// ids null: row i has id i % length.
void scatter_rows(int64_t dtype, Address ds, Address ids, Address table, int64_t count, int64_t length, int64_t rows,
                  int64_t columns, float scale) {
  constexpr int64_t BLOCK = 16;  // columns of a task
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t* id = at<const int64_t>(ids);
    parallel_for((columns + BLOCK - 1) / BLOCK, 2 * rows * BLOCK, [&](int64_t first, int64_t last) {
      const int64_t begin = first * BLOCK, end = last * BLOCK < columns ? last * BLOCK : columns;
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t own = id ? id[i] : i % length;
        if (!is_row(own, count)) continue;
        float* to = at<float>(table) + own * columns + begin;
        const T* from = at<const T>(ds) + i * columns + begin;
        over_columns(end - begin, [&](int64_t j, auto lanes, int) TK_LAMBDA {
          store(to + j, fma(load(from + j, lanes), splat(scale), load(to + j, lanes)), lanes);
        });
      }
    });
  });
}

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(embedding_forward)
TK_KERNEL(embedding_backward)
TK_KERNEL(scatter_rows)
