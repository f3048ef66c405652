// summed = dropout(x) + residual, y = LayerNorm(summed); without residual LayerNorm of x alone. And the gradients.
#include "../rows.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

// Writes the sum and returns its total over the row, as rounded.
template <class T>
TK_INLINE float add_row(const T* x, const T* residual, const Dropout& dropout, int64_t row, int64_t columns, T* summed) {
  Floats total[4] = {};
  over_dropped_columns(dropout, static_cast<uint32_t>(row), columns, [&](int64_t j, auto lanes, int u, auto drop) TK_LAMBDA {
    const Floats each = as_stored<T>(drop(load(x + j, lanes)) + load(residual + j, lanes));
    store(summed + j, each, lanes);
    total[u] += lanes.count == WIDTH ? each : load(summed + j, lanes);
  });
  return sum(total);
}

}  // namespace

// x, residual, summed, y (rows, columns); weight, bias f32 (columns); mean, rstd f32 (rows). Address 0: bias, seed, and for
// LayerNorm alone residual and summed, are absent.
void layer_norm_forward(int64_t dtype, Address x, Address residual, Address weight, Address bias, Address seed, double p,
                        Address summed, Address y, Address mean, Address rstd, int64_t rows, int64_t columns, float eps) {
  const Dropout dropout = make_dropout(at<const int64_t>(seed), p);
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const float *w = at<const float>(weight), *b = at<const float>(bias);
    const T* added = at<const T>(residual);
    parallel_for(rows, (seed ? 8 : 3) * columns, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i * columns;
        const T* row = at<const T>(x) + first;
        float total;
        if (added) {
          total = add_row(row, added + first, dropout, i, columns, at<T>(summed) + first);
          row = at<const T>(summed) + first;
        } else {
          total = row_sum(row, columns);
        }
        const Moments m = moments(row, total, columns, eps);
        at<float>(mean)[i] = m.mean, at<float>(rstd)[i] = m.rstd;
        T* to = at<T>(y) + first;
        over_columns(columns, [&](int64_t j, auto lanes, int) TK_LAMBDA { store(to + j, normalised(row, m, w, b, j, lanes), lanes); });
      }
    });
  });
}

// From dy and, or address 0, dsummed: dresidual, the gradient of the sum; with a seed dx = its dropout too; dweight and
// dbias, both f32 (address 0: not wanted).
void layer_norm_backward(int64_t dtype, Address dy, Address dsummed, Address summed, Address weight, Address mean,
                         Address rstd, Address seed, double p, Address dx, Address dresidual, Address dweight, Address dbias,
                         int64_t rows, int64_t columns) {
  const Dropout dropout = make_dropout(at<const int64_t>(seed), p);
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const float* w = at<const float>(weight);
    const float* sums = sums_over_rows(rows, 2 * columns, (seed ? 10 : 5) * columns, [&](float* own, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i * columns;
        const T *row = at<const T>(summed) + first, *came = at<const T>(dy) + first, *more = at<const T>(dsummed);
        const Moments m{at<const float>(mean)[i], at<const float>(rstd)[i]};
        const Projections means = projections(row, m, w, columns, own, own + columns, [&](const auto& each) TK_LAMBDA {
          over_columns(columns, [&](int64_t j, auto lanes, int u) TK_LAMBDA { each(j, lanes, u, load(came + j, lanes)); });
        });
        T *to = at<T>(dresidual) + first, *branch = at<T>(dx) + first;
        over_dropped_columns(dropout, static_cast<uint32_t>(i), columns, [&](int64_t j, auto lanes, int, auto drop) TK_LAMBDA {
          Floats gradient = norm_gradient(load(came + j, lanes), row, m, w, means, j, lanes);
          if (more) gradient += load(more + first + j, lanes);
          store(to + j, gradient, lanes);
          if (dropout.threshold) store(branch + j, drop(gradient), lanes);
        });
      }
    });
    add_parts(sums, parts_of(rows), 2 * columns, columns, at<float>(dweight));
    add_parts(sums + columns, parts_of(rows), 2 * columns, columns, at<float>(dbias));
  });
}

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(layer_norm_forward)
TK_KERNEL(layer_norm_backward)
