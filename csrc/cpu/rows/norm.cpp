// summed = dropout(x) + residual, y = LayerNorm(summed); without residual LayerNorm of x alone. And the gradients.
// If the address of the mean is null, it is RMSNorm.
#include "../../calls/norm.h"
#include "../rows.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

// Writes the rounded sum and returns its total over the row, or the sum of squares (RMSNorm).
template <bool CENTRED, class T, class X>
TK_INLINE float add_row(const X* x, const T* residual, const Dropout& dropout, int64_t row, int64_t columns,
                        T* summed) {
  Floats total[SUMS] = {};
  over_dropped_columns<true>(dropout, static_cast<uint32_t>(row), columns,
                             [&](int64_t j, auto lanes, int u, auto drop) TK_LAMBDA {
    const Floats each = as_stored<T>(drop(load(x + j, lanes)) + load(residual + j, lanes));
    fetch_ahead_to_write(summed + j, u);
    store(summed + j, each, lanes);
    total[u] = with_term<CENTRED>(total[u], lanes.count == WIDTH ? each : load(summed + j, lanes));
  });
  return sum(total);
}

// Calls f(Type<T>{}, Type<type of the operand that may be narrow>{}, Flag<whether it is centred>{}).
template <class F> TK_INLINE void by_norm(int64_t dtype, bool narrow, bool centred, const F& f) {
  const auto by_centring = [&](auto type, auto operand) {
    if (centred) return f(type, operand, Flag<true>{});
    return f(type, operand, Flag<false>{});
  };
  if (narrow) return by_centring(Type<float>{}, Type<Bfloat16>{});
  by_dtype(dtype, [&](auto type) { by_centring(type, type); });
}

// A result goes to `wide`, to `narrow`, or to both.
template <class T, class L>
TK_INLINE void store_both(T* wide, Bfloat16* narrow, int64_t index, Floats value, L lanes, int u, bool past_caches) {
  if (wide) store_result(wide + index, value, lanes, u, past_caches);
  if (narrow) fetch_ahead_to_write(narrow + index, u), store(narrow + index, value, lanes);
}

// Inputs and outputs of the gradients of rows;
// `dx` is null without dropout, `dsummed` if absent.
template <class T, class G> struct Gradients {
  const G* dy;
  const float* residual;
  const T *dsummed, *summed;
  const float *weight, *mean, *rstd;
  T *dx, *dresidual;
  Bfloat16* narrow;
  Dropout dropout;
  int64_t columns;
  bool past_caches;

  // Of y.
  template <class L> TK_INLINE Floats incoming(int64_t index, L lanes) const {
    const Floats came = load(dy + index, lanes);
    return residual ? came + load(residual + index, lanes) : came;
  }
};

// Rows longer than NEAR_COLUMNS are processed one at a time with four sums; shorter rows with one sum, one row or
// several at a time.
// For R rows from row i on, which are added to dweight and dbias.
template <bool CENTRED, int R, int VECTORS, class T, class G>
TK_INLINE void gradients_of(const Gradients<T, G>& all, int64_t i, float* dweight, float* dbias) {
  const int64_t columns = all.columns;
  Moments m[R];
  Projections means[R];
  for (int r = 0; r < R; ++r) m[r] = {CENTRED ? all.mean[i + r] : 0.f, all.rstd[i + r]};
  project<CENTRED, R, VECTORS>(all.summed + i * columns, [&](int64_t j, auto lanes) TK_LAMBDA {
    return all.incoming(i * columns + j, lanes);
  }, m, all.weight, columns, dweight, dbias, means);
  for (int r = 0; r < R; ++r) {
    const int64_t first = (i + r) * columns;
    over_dropped_columns(all.dropout, static_cast<uint32_t>(i + r), columns,
                         [&](int64_t j, auto lanes, int u, auto drop) TK_LAMBDA {
      Floats gradient =
          norm_gradient(all.incoming(first + j, lanes), all.summed + first, m[r], all.weight, means[r], j, lanes);
      if (all.dsummed) gradient += load(all.dsummed + first + j, lanes);
      fetch_below(all.dy + first + j, R * columns, u), fetch_below(all.summed + first + j, R * columns, u);
      store_result(all.dresidual + first + j, gradient, lanes, u, all.past_caches);
      if (all.dx || all.narrow) store_both(all.dx, all.narrow, first + j, drop(gradient), lanes, u, all.past_caches);
    });
  }
}

}  // namespace

void norm_forward(const NormForward& call) {
  const int64_t rows = call.rows, columns = call.columns;
  const float eps = static_cast<float>(call.eps);
  const Dropout dropout = make_dropout(at<const int64_t>(call.seed), call.dropout_p);
  by_norm(call.dtype, call.x_is_bfloat16, call.mean, [&](auto type, auto operand, auto centred) {
    using T = typename decltype(type)::type;
    using X = typename decltype(operand)::type;
    constexpr bool CENTRED = decltype(centred)::value;
    const float *w = at<const float>(call.weight), *b = at<const float>(call.bias);
    const X* from = at<const X>(call.x);
    const T* added = at<const T>(call.residual);
    T *result = result_at<T>(call.y, rows * columns), *sums = result_at<T>(call.summed, added ? rows * columns : 0);
    Bfloat16* narrow = result_at<Bfloat16>(call.narrow, rows * columns);
    const bool past_caches = goes_past_caches(rows, columns, result);
    parallel_for(rows, (call.seed ? 8 : 3) * columns, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i * columns;
        const auto normalise = [&](const auto* row, float total) TK_LAMBDA {
          const Moments m = moments<CENTRED>(row, total, columns, eps);
          if (CENTRED) at<float>(call.mean)[i] = m.mean;
          at<float>(call.rstd)[i] = m.rstd;
          over_columns(columns, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
            fetch_below(from + first + j, columns, u);
            if (added) fetch_below(added + first + j, columns, u);
            store_both(result, narrow, first + j, normalised(row, m, w, b, j, lanes), lanes, u, past_caches);
          });
        };
        if (added)
          normalise(sums + first, add_row<CENTRED>(from + first, added + first, dropout, i, columns, sums + first));
        else normalise(from + first, row_sum<CENTRED>(from + first, columns));
      }
      finish_results(past_caches);
    });
  });
}

// dweight and dbias: address 0 where they are not wanted.
void norm_backward(const NormBackward& call) {
  const int64_t rows = call.rows, columns = call.columns;
  by_norm(call.dtype, call.dy_is_bfloat16, call.mean, [&](auto type, auto operand, auto centred) {
    using T = typename decltype(type)::type;
    using G = typename decltype(operand)::type;
    constexpr bool CENTRED = decltype(centred)::value;
    const int64_t width = CENTRED ? 2 * columns : columns;
    T *dropped = result_at<T>(call.dx, rows * columns), *result = result_at<T>(call.dresidual, rows * columns);
    const Gradients<T, G> all{at<const G>(call.dy),
                              at<const float>(call.residual),
                              at<const T>(call.dsummed),
                              at<const T>(call.x),
                              at<const float>(call.weight),
                              at<const float>(call.mean),
                              at<const float>(call.rstd),
                              dropped,
                              result,
                              result_at<Bfloat16>(call.narrow, rows * columns),
                              make_dropout(at<const int64_t>(call.seed), call.dropout_p),
                              columns,
                              goes_past_caches(rows, columns, result, dropped)};
    const float* sums =
        sums_over_rows(rows, width, (call.seed ? 10 : 5) * columns, [&](float* own, int64_t begin, int64_t end) {
      float* bias = own + columns;
      int64_t i = begin;
      for (; columns > NEAR_COLUMNS && i < end; ++i) gradients_of<CENTRED, 1, 4>(all, i, own, bias);
      if constexpr (WIDTH == 16)  // the sums of four rows stay in registers
        for (; i + 4 <= end; i += 4) gradients_of<CENTRED, 4, 1>(all, i, own, bias);
      for (; i + 2 <= end; i += 2) gradients_of<CENTRED, 2, 1>(all, i, own, bias);
      if (i < end) gradients_of<CENTRED, 1, 1>(all, i, own, bias);
      finish_results(all.past_caches);
    });
    add_parts(sums, parts_of(rows), width, columns, at<float>(call.dweight));
    if (CENTRED) add_parts(sums + columns, parts_of(rows), width, columns, at<float>(call.dbias));
  });
}

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(norm_forward)
TK_KERNEL(norm_backward)
