// y = dropout(LayerNorm(scale * weight[token] + positions[place])), LayerNorm and positions optional, and the gradients.
#include "../rows.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

TK_INLINE bool is_row(int64_t id, int64_t count) { return static_cast<uint64_t>(id) < static_cast<uint64_t>(count); }

template <class T> struct Tables {
  const T *weight, *positions;  // positions may be null
  const int64_t *tokens, *places;  // places null: row i of the tokens has place i % length
  int64_t length, columns, token_count, place_count;
  float scale;

  TK_INLINE int64_t place(int64_t i) const { return places ? places[i] : i % length; }
  TK_INLINE bool knows(int64_t i) const {
    return is_row(tokens[i], token_count) && (!positions || is_row(place(i), place_count));
  }
  TK_INLINE const T* token_row(int64_t i) const { return weight + tokens[i] * columns; }
  TK_INLINE const T* place_row(int64_t i) const { return positions ? positions + place(i) * columns : nullptr; }

  template <class L> TK_INLINE Floats sum(const T* token, const T* place, int64_t j, L lanes) const {
    const Floats scaled = load(token + j, lanes) * scale;
    return place ? scaled + load(place + j, lanes) : scaled;
  }
};

// The sum of both tables' rows as floats in `out`, NaN where an id is in neither; returns its total.
template <class T> TK_INLINE float gather_row(const Tables<T>& tables, int64_t i, float* out) {
  const bool known = tables.knows(i);
  const T *token = known ? tables.token_row(i) : nullptr, *place = known ? tables.place_row(i) : nullptr;
  if (!known)
    for (int64_t j = 0; j < tables.columns; ++j) out[j] = NAN;
  else over_columns(tables.columns, [&](int64_t j, auto lanes, int) TK_LAMBDA { store(out + j, tables.sum(token, place, j, lanes), lanes); });
  return row_sum<true>(out, tables.columns);
}

}  // namespace

// tokens, places i64 (rows); y (rows, columns); mean, rstd f32 (rows). Address 0 stands for what is absent.
void embedding_forward(int64_t dtype, Address weight, Address tokens, Address positions, Address places, Address norm_weight,
                       Address norm_bias, Address seed, double p, Address y, Address mean, Address rstd, int64_t length,
                       int64_t rows, int64_t columns, int64_t token_count, int64_t place_count, float scale, float eps) {
  const Dropout dropout = make_dropout(at<const int64_t>(seed), p);
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Tables<T> tables{at<const T>(weight), at<const T>(positions), at<const int64_t>(tokens), at<const int64_t>(places),
                           length, columns, token_count, place_count, scale};
    const float *w = at<const float>(norm_weight), *b = at<const float>(norm_bias);
    T* result = result_at<T>(y, rows * columns);
    parallel_for(rows, (seed ? 8 : 3) * columns, [&](int64_t begin, int64_t end) {
      float* row = scratch<float>(ROW_SLOT, columns);
      for (int64_t i = begin; i < end; ++i) {
        T* to = result + i * columns;
        const float total = gather_row(tables, i, row);
        if (!w) {
          over_dropped_columns(dropout, static_cast<uint32_t>(i), columns, [&](int64_t j, auto lanes, int, auto drop) TK_LAMBDA {
            store(to + j, drop(load(row + j, lanes)), lanes);
          });
          continue;
        }
        const Moments m = moments<true>(row, total, columns, eps);
        at<float>(mean)[i] = m.mean, at<float>(rstd)[i] = m.rstd;
        over_dropped_columns(dropout, static_cast<uint32_t>(i), columns, [&](int64_t j, auto lanes, int, auto drop) TK_LAMBDA {
          store(to + j, drop(normalised(row, m, w, b, j, lanes)), lanes);
        });
      }
    });
  });
}

// ds, the gradient of the sum before LayerNorm, and dnorm_weight and dnorm_bias (address 0: not wanted).
void embedding_backward(int64_t dtype, Address dy, Address weight, Address tokens, Address positions, Address places,
                        Address norm_weight, Address mean, Address rstd, Address seed, double p, Address ds,
                        Address dnorm_weight, Address dnorm_bias, int64_t length, int64_t rows, int64_t columns,
                        int64_t token_count, int64_t place_count, float scale) {
  const Dropout dropout = make_dropout(at<const int64_t>(seed), p);
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Tables<T> tables{at<const T>(weight), at<const T>(positions), at<const int64_t>(tokens), at<const int64_t>(places),
                           length, columns, token_count, place_count, scale};
    const float* w = at<const float>(norm_weight);
    T* result = result_at<T>(ds, rows * columns);
    if (!w)
      return parallel_for(rows, 6 * columns, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          over_dropped_columns(dropout, static_cast<uint32_t>(i), columns, [&](int64_t j, auto lanes, int, auto drop) TK_LAMBDA {
            store(result + i * columns + j, drop(load(at<const T>(dy) + i * columns + j, lanes)), lanes);
          });
      });
    const float* sums = sums_over_rows(rows, 2 * columns, (seed ? 10 : 5) * columns, [&](float* own, int64_t begin, int64_t end) {
      float *row = scratch<float>(ROW_SLOT, 2 * columns), *came = row + columns;
      for (int64_t i = begin; i < end; ++i) {
        gather_row(tables, i, row);
        const Moments m{at<const float>(mean)[i], at<const float>(rstd)[i]};
        over_dropped_columns(dropout, static_cast<uint32_t>(i), columns, [&](int64_t j, auto lanes, int, auto drop) TK_LAMBDA {
          store(came + j, drop(load(at<const T>(dy) + i * columns + j, lanes)), lanes);
        });
        Projections means;
        project<true, 1>(row, came, &m, w, columns, own, own + columns, &means);
        over_columns(columns, [&](int64_t j, auto lanes, int) TK_LAMBDA {
          store(result + i * columns + j, norm_gradient(load(came + j, lanes), row, m, w, means, j, lanes), lanes);
        });
      }
    });
    add_parts(sums, parts_of(rows), 2 * columns, columns, at<float>(dnorm_weight));
    add_parts(sums + columns, parts_of(rows), 2 * columns, columns, at<float>(dnorm_bias));
  });
}

// table[id of row i] += scale * ds[i], in the order of the rows; table f32 (count, columns). ids null: row i has id i % length.
void scatter_rows(int64_t dtype, Address ds, Address ids, Address table, int64_t count, int64_t length, int64_t rows, int64_t columns, float scale) {
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
