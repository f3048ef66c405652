// loss = log(sum exp(x - max)) - (x_target - max) of each row, in fp32; optionally the gradient overwrites the row.
#pragma once
#include "row.cuh"

namespace transformer_kernels {

// The target of a row: a class, or -1 if ignored or out of range (stray).
struct RowTarget {
  int column;
  bool ignored, stray;

  TK_DEVICE RowTarget(int64_t target, int classes, int64_t ignore_index)
      : column(static_cast<int>(target)), ignored(target == ignore_index), stray(target < 0 || target >= classes) {
    stray = stray && !ignored;
    if (ignored || stray) column = -1;
  }
  // The factor of the row's gradient: 0 for an ignored row, NaN for a stray one.
  TK_DEVICE float scale(float scale) const { return ignored ? 0.0f : stray ? NAN : scale; }
};

// The terms of a row's loss, relative to the row's maximum to avoid cancellation of large logits.
struct RowTerms {
  float log_total;  // log(sum exp(x - max))
  float picked;     // x_target - max
  float mean;       // mean(x - max), read with smoothing only

  TK_DEVICE float loss(const RowTarget& target, float smoothing) const {
    float loss = log_total - picked;
    if (smoothing > 0.0f) loss = (1.0f - smoothing) * loss + smoothing * (log_total - mean);
    return target.ignored ? 0.0f : target.stray ? NAN : loss;
  }
};

// scale (p - smoothed target) at a column; 0 if scale is 0, also for non-finite p.
TK_DEVICE float cross_entropy_gradient(float p, int column, const RowTarget& target, float scale, float smoothing,
                                       float uniform) {
  const float wanted = (column == target.column ? 1.0f - smoothing : 0.0f) + uniform;
  return scale == 0.0f ? 0.0f : scale * (p - wanted);
}

// The loss of a row in any-width kernels, with smoothing only. `factor`, one number per row, multiplies p in the
// gradient.
struct SmoothedLoss {
  TK_DEVICE float score(float logit) const { return logit; }
  TK_DEVICE float weight(int) const { return 1.0f; }
  TK_DEVICE float loss(const RowTerms& terms, const RowTarget& target, float smoothing, int, float) const {
    return terms.loss(target, smoothing);
  }
  TK_DEVICE float factor(const RowTarget&, float, int, float) const { return 1.0f; }
  TK_DEVICE float gradient(float p, float, int column, const RowTarget& target, float, float scale, float smoothing,
                           float uniform) const {
    return cross_entropy_gradient(p, column, target, scale, smoothing, uniform);
  }
};

// The loss of a row with class weights (classes + 1, the last one their mean) or null, a z-loss and a soft cap, 0 for
// none. Compiled into the kernels for any width only.
struct WeightedLoss {
  const float* weights;
  float z_loss, cap;

  TK_DEVICE float score(float logit) const { return cap == 0.0f ? logit : cap * tanhf(logit / cap); }
  TK_DEVICE float weight(int column) const { return weights ? load(weights + column) : 1.0f; }
  TK_DEVICE float own(const RowTarget& target, float smoothing) const {
    return target.column < 0 ? 0.0f : (1.0f - smoothing) * weight(target.column);
  }
  TK_DEVICE float loss(const RowTerms& terms, const RowTarget& target, float smoothing, int classes,
                       float maximum) const {
    if (target.ignored || target.stray) return target.ignored ? 0.0f : NAN;
    const float picked = own(target, smoothing), lse = maximum + terms.log_total;
    const float share = picked + smoothing * weight(classes);
    return share * terms.log_total - picked * terms.picked - smoothing * terms.mean + z_loss * lse * lse;
  }
  TK_DEVICE float factor(const RowTarget& target, float smoothing, int classes, float lse) const {
    return own(target, smoothing) + smoothing * weight(classes) + 2.0f * z_loss * lse;
  }
  TK_DEVICE float gradient(float p, float score, int column, const RowTarget& target, float factor, float scale,
                           float smoothing, float uniform) const {
    const float wanted = ((column == target.column ? 1.0f - smoothing : 0.0f) + uniform) * weight(column);
    const float bent = cap == 0.0f ? 0.0f : score / cap;
    return scale == 0.0f ? 0.0f : scale * (factor * p - wanted) * (1.0f - bent * bent);
  }
};

// Logits in fp32, -inf after the last class.
template <class T, int VECTOR>
TK_DEVICE Vector<float, VECTOR> scores_of(const Vector<T, VECTOR>& logits, int column, int classes) {
  Vector<float, VECTOR> scores;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) scores[i] = column + i < classes ? to_float(logits[i]) : -INFINITY;
  return scores;
}

// One group of Layout::THREADS threads owns one row in registers: the logits are read once. Rows have stride `stride`;
// columns beyond the classes are ignored, and set to 0 in the gradient.
template <class Layout, bool GRADIENT>
__global__ void __launch_bounds__(Layout::BLOCK_THREADS, 1)
    cross_entropy_forward_kernel(typename Layout::T* logits, const int64_t* __restrict__ targets,
                                 float* __restrict__ losses, float* __restrict__ statistics, int64_t rows, int classes,
                                 int stride, int64_t ignore_index, float smoothing) {
  using T = typename Layout::T;
  constexpr int V = Layout::VECTOR;
  float* scratch = Layout::scratch();
  const int64_t row = Layout::first_row();
  if (row >= rows) return;
  const RowTarget target(load(targets + row), classes, ignore_index);
  logits += row * stride;

  Vector<T, V> loaded[Layout::VECTORS];
  Vector<float, V> values[Layout::VECTORS];  // logits, then exponentials
  float maximum = -INFINITY;
  const auto read = [&](int v, int column) { loaded[v] = load_vector<V>(logits + column); };
  Layout::load_and_use(stride, read, [&](int v, int column) {
    values[v] = scores_of(loaded[v], column, classes);
#pragma unroll
    for (int i = 0; i < V; ++i) maximum = fmaxf(maximum, values[v][i]);
  });
  maximum = Layout::template reduce<Max>(maximum, scratch);

  float total = 0.0f, picked = 0.0f, distance = 0.0f;
  Layout::for_each_vector(stride, [&](int v, int column) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float score = values[v][i] - maximum;
      values[v][i] = fast_exp2(score * LOG2_E);
      total += values[v][i];
      if (column + i == target.column) picked = score;
      if (column + i < classes) distance += score;
    }
  });
  const float2 sums = Layout::sum_pair(total, picked, scratch);
  if (smoothing > 0.0f) distance = Layout::template reduce<Sum>(distance, scratch);
  const RowTerms terms{logf(sums.x), sums.y, distance / static_cast<float>(classes)};
  if (Layout::thread() == 0) store(losses + row, terms.loss(target, smoothing));

  const float inverse = 1.0f / sums.x;
  if constexpr (GRADIENT) {
    const float scale = target.scale(1.0f), uniform = smoothing / static_cast<float>(classes);
    Layout::for_each_vector(stride, [&](int v, int column) {
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float p = values[v][i] * inverse;
        values[v][i] =
            column + i < classes ? cross_entropy_gradient(p, column + i, target, scale, smoothing, uniform) : 0.0f;
      }
      store_vector(logits + column, rounded<T, V>(values[v]));
    });
  } else if (Layout::thread() == 0) {
    store(statistics + row, maximum);
    store(statistics + rows + row, inverse);
  }
}

// One block owns one row of any width and reads it once for the running maximum and sum (Milakov and Gimelshein 2018),
// once more for the gradient.
template <class Layout, bool GRADIENT, class Loss>
__global__ void __launch_bounds__(Layout::BLOCK_THREADS, 1)
    cross_entropy_forward_any_width_kernel(typename Layout::T* logits, const int64_t* __restrict__ targets,
                                           float* __restrict__ losses, float* __restrict__ statistics, int64_t rows,
                                           int classes, int stride, int64_t ignore_index, float smoothing, Loss kind) {
  using T = typename Layout::T;
  constexpr int V = Layout::VECTOR;
  float* scratch = Layout::scratch();
  const int64_t row = Layout::first_row();
  const RowTarget target(load(targets + row), classes, ignore_index);
  logits += row * stride;
  const float chosen = target.column < 0 ? 0.0f : kind.score(to_float(load(logits + target.column)));
  float anchor = smoothing > 0.0f ? kind.score(to_float(load(logits))) : 0.0f;  // avoids cancellation
  if (!(fabsf(anchor) < INFINITY)) anchor = 0.0f;

  float maximum = -INFINITY, total = 0.0f, distance = 0.0f;  // total is 0 while maximum is -inf
  Layout::for_each_vector(stride, [&](int, int column) {
    Vector<float, V> scores = scores_of(load_vector<V>(logits + column), column, classes);
    float highest = maximum;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (column + i < classes) scores[i] = kind.score(scores[i]);
      highest = fmaxf(highest, scores[i]);
    }
    const float shift = highest == -INFINITY ? 0.0f : highest;
    total *= fast_exp2((maximum - shift) * LOG2_E);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      total += fast_exp2((scores[i] - shift) * LOG2_E);
      if (smoothing > 0.0f && column + i < classes) distance += kind.weight(column + i) * (scores[i] - anchor);
    }
    maximum = highest;
  });
  const float highest = Layout::template reduce<Max>(maximum, scratch);
  total *= fast_exp2((maximum - highest) * LOG2_E);
  const float2 sums = Layout::sum_pair(total, distance, scratch);
  const RowTerms terms{logf(sums.x), chosen - highest,
                       sums.y / static_cast<float>(classes) - kind.weight(classes) * (highest - anchor)};
  if (Layout::thread() == 0) store(losses + row, kind.loss(terms, target, smoothing, classes, highest));

  const float inverse = 1.0f / sums.x;
  if constexpr (GRADIENT) {
    const float scale = target.scale(1.0f), uniform = smoothing / static_cast<float>(classes);
    const float factor = kind.factor(target, smoothing, classes, highest + terms.log_total);
    Layout::for_each_vector(stride, [&](int, int column) {
      Vector<float, V> values = scores_of(load_vector<V>(logits + column), column, classes);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float score = kind.score(values[i]), p = fast_exp2((score - highest) * LOG2_E) * inverse;
        values[i] = column + i < classes
                        ? kind.gradient(p, score, column + i, target, factor, scale, smoothing, uniform)
                        : 0.0f;
      }
      store_vector(logits + column, rounded<T, V>(values));
    });
  } else if (Layout::thread() == 0) {
    store(statistics + row, highest);
    store(statistics + rows + row, inverse);
  }
}

// One block owns all losses: their sum, or, unless `count` is null, their mean over the rows that are not ignored.
template <int THREADS>
__global__ void __launch_bounds__(THREADS, 1)
    sum_losses_kernel(const float* __restrict__ losses, const int64_t* __restrict__ targets, float* __restrict__ loss,
                      float* __restrict__ count, int64_t rows, int64_t ignore_index) {
  constexpr int WARPS = THREADS / WARP_SIZE;
  SharedMemory shared;
  float* scratch = shared.take<float>(2 * WARPS);
  float total = 0.0f, counted = 0.0f;
  for (int64_t row = static_cast<int>(threadIdx.x); row < rows; row += THREADS) {
    total += load(losses + row);
    if (count && load(targets + row) != ignore_index) counted += 1.0f;
  }
  const float2 sums = block_sum_pair<WARPS>(make_float2(total, counted), scratch);
  if (threadIdx.x != 0) return;
  store(loss, count ? sums.x / sums.y : sums.x);
  if (count) store(count, sums.y);
}

}  // namespace transformer_kernels
