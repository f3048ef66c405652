// Cross-entropy of rows of logits with class indices: the losses, their gradient, and the sum or mean of the losses.
//
// Options beyond smoothing (class weights, z-loss, a soft cap) take a way of their own: a row's scores are made in scratch
// memory, in fp32, and what is done to them asks for each option outside of its loops.
#include "../rows.h"
#include "../vector_math.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

struct Softmax {
  float top, total;  // the largest logit, and the sum of exponentials relative to it
};

// `below` elements later the next row begins.
template <class T> TK_INLINE Softmax row_softmax(const T* x, int64_t classes, int64_t below) {
  Floats top[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)}, total[4] = {};
  over_columns(classes, [&](int64_t j, auto lanes, int u) TK_LAMBDA { top[u] = maximum(load(x + j, lanes, -INFINITY), top[u]); });
  const float limit = largest(top);
  over_columns(classes, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
    fetch_below(x + j, below);
    total[u] += exponential(load(x + j, lanes, -INFINITY) - limit);
  });
  return {limit, sum(total)};
}

// out = factor * (softmax - the smoothed target), which may lie where x does.
template <class T>
TK_INLINE void row_gradient(const T* x, int64_t target, float top, float inverse, float factor, float smoothing, int64_t classes, T* out) {
  const float share = factor * inverse, even = -factor * smoothing / static_cast<float>(classes);
  const float p = __builtin_expf(element(x[target]) - top) * inverse;
  const float hit = factor * (p - smoothing / static_cast<float>(classes) - (1.f - smoothing));
  over_columns(classes, [&](int64_t j, auto lanes, int) TK_LAMBDA {
    fetch_ahead(x + j), fetch_ahead_to_write(out + j);
    store(out + j, fma(exponential(load(x + j, lanes) - top), splat(share), splat(even)), lanes);
  });
  store(out + target, splat(hit), Part{1});
}

template <class T>
TK_INLINE float row_loss(const T* x, int64_t target, const Softmax& s, float log_total, float smoothing, int64_t classes) {
  // Relative to the largest logit: a constant that is added to all of them costs no digits.
  const float loss = s.top - element(x[target]) + log_total;
  if (smoothing == 0.f) return loss;
  Floats below[4] = {};
  over_columns(classes, [&](int64_t j, auto lanes, int u) TK_LAMBDA { below[u] += s.top - load(x + j, lanes, s.top); });
  return (1.f - smoothing) * loss + smoothing * (sum(below) / static_cast<float>(classes) + log_total);
}

struct Options {
  const float* weights;  // (classes + 1), behind them their mean; or null
  float z_loss, cap;     // 0: none

  bool any() const { return weights || z_loss != 0.f || cap != 0.f; }
  template <class L> TK_INLINE Floats weight(int64_t j, L lanes) const { return weights ? load(weights + j, lanes) : splat(1.f); }
  TK_INLINE float weight(int64_t j) const { return weights ? weights[j] : 1.f; }
};

// What the options make of a row: its scores, of the class and of every class the share of the target, and their sum.
struct Terms {
  const float* scores;
  float own, even, share;
};

template <class T> TK_INLINE Terms terms(const T* x, int64_t target, float smoothing, const Options& options, int64_t classes, float* scores) {
  const float cap = options.cap, inverse = 1.f / cap;
  if (cap == 0.f) over_columns(classes, [&](int64_t j, auto lanes, int) TK_LAMBDA { store(scores + j, load(x + j, lanes), lanes); });
  else over_columns(classes, [&](int64_t j, auto lanes, int) TK_LAMBDA {
    store(scores + j, hyperbolic_tangent(load(x + j, lanes) * inverse) * cap, lanes);
  });
  const float own = (1.f - smoothing) * options.weight(target);
  return {scores, own, smoothing / static_cast<float>(classes), own + smoothing * options.weight(classes)};
}

TK_INLINE float loss_with_options(const Terms& row, int64_t target, const Softmax& s, float log_total, const Options& options,
                                  int64_t classes) {
  const float lse = s.top + log_total;
  Floats below[4] = {};
  if (row.even != 0.f)
    over_columns(classes, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
      below[u] = fma(s.top - load(row.scores + j, lanes, s.top), options.weight(j, lanes), below[u]);
    });
  return row.share * log_total + row.own * (s.top - row.scores[target]) + row.even * sum(below) + options.z_loss * lse * lse;
}

// out = factor * ((share + 2 z lse) softmax - the weighted target), through the cap.
template <class T>
TK_INLINE void gradient_with_options(const Terms& row, int64_t target, float top, float inverse, float factor, const Options& options,
                                     int64_t classes, T* out) {
  const float lse = top - __builtin_logf(inverse), even = -factor * row.even, bend = options.cap == 0.f ? 0.f : 1.f / options.cap;
  const float share = factor * (row.share + 2.f * options.z_loss * lse) * inverse;
  over_columns(classes, [&](int64_t j, auto lanes, int) TK_LAMBDA {
    const Floats score = load(row.scores + j, lanes), bent = score * bend;
    const Floats gradient = fma(exponential(score - top), splat(share), options.weight(j, lanes) * even);
    store(out + j, gradient * (1.f - bent * bent), lanes);
  });
  const float score = row.scores[target], bent = score * bend;
  const float hit = __builtin_expf(score - top) * share + even * options.weight(target) - factor * row.own;
  store(out + target, splat(hit * (1.f - bent * bent)), Part{1});
}

// A logarithm is a call, before which every vector register is given up: so many rows that stay in a cache make theirs together.
constexpr int64_t BATCH = 16, NARROW = 1024;

}  // namespace

// logits (rows, classes) at `stride`; targets i64 (rows); losses f32 (rows). With `statistics` f32 (2, rows) the largest score
// and 1 / sum of each row go there; without (address 0) the gradient of the sum of losses takes the logits' place.
// weights: f32 (classes + 1), behind them their mean, or address 0; z_loss, cap: 0 for none.
void cross_entropy_forward(int64_t dtype, Address logits, int64_t stride, Address targets, Address losses,
                           Address statistics, int64_t rows, int64_t classes, int64_t ignored, float smoothing,
                           Address weights, float z_loss, float cap) {
  const Options options{at<const float>(weights), z_loss, cap};
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto over_rows = [&](int64_t begin, int64_t end, int64_t batch, const auto& softmax_of, const auto& finish) TK_LAMBDA {
      const int64_t* classes_of = at<const int64_t>(targets);
      Softmax softmax[BATCH];
      float log_totals[BATCH];
      for (int64_t first = begin; first < end; first += batch) {
        const int64_t count = first + batch < end ? batch : end - first;
        for (int64_t k = 0; k < count; ++k) {
          const int64_t target = classes_of[first + k];
          softmax[k] = target == ignored ? Softmax{0.f, 1.f} : softmax_of(at<T>(logits) + (first + k) * stride, target);
        }
        for (int64_t k = 0; k < count; ++k) log_totals[k] = __builtin_logf(softmax[k].total);
        for (int64_t k = 0; k < count; ++k) {
          const int64_t i = first + k, target = classes_of[i];
          T* x = at<T>(logits) + i * stride;
          if (statistics) at<float>(statistics)[i] = softmax[k].top, at<float>(statistics)[rows + i] = 1.f / softmax[k].total;
          if (target != ignored) at<float>(losses)[i] = finish(x, target, softmax[k], log_totals[k]);
          else {
            at<float>(losses)[i] = 0.f;
            if (!statistics) memset(x, 0, static_cast<size_t>(classes) * sizeof(T));
          }
        }
      }
    };
    parallel_for(rows, (statistics ? 5 : 10) * classes, [&](int64_t begin, int64_t end) {
      if (!options.any())
        return over_rows(begin, end, classes <= NARROW ? BATCH : 1,
            [&](const T* x, int64_t) TK_LAMBDA { return row_softmax(x, classes, stride); },
            [&](T* x, int64_t target, const Softmax& s, float log_total) TK_LAMBDA {
              const float loss = row_loss(x, target, s, log_total, smoothing, classes);
              if (!statistics) row_gradient(x, target, s.top, 1.f / s.total, 1.f, smoothing, classes, x);
              return loss;
            });
      float* scores = scratch<float>(ROW_SLOT, classes);
      Terms row{};
      over_rows(begin, end, 1,
          [&](const T* x, int64_t target) TK_LAMBDA {
            row = terms(x, target, smoothing, options, classes, scores);
            return row_softmax(row.scores, classes, 0);
          },
          [&](T* x, int64_t target, const Softmax& s, float log_total) TK_LAMBDA {
            const float loss = loss_with_options(row, target, s, log_total, options, classes);
            if (!statistics) gradient_with_options(row, target, s.top, 1.f / s.total, 1.f, options, classes, x);
            return loss;
          });
    });
  });
}

// dlogits from dloss, f32: of each row, or one for all that is divided by *count where that is given.
void cross_entropy_backward(int64_t dtype, Address dloss, bool of_each_row, Address count, Address logits, Address targets,
                            Address statistics, Address dlogits, int64_t rows, int64_t classes, int64_t ignored, float smoothing,
                            Address weights, float z_loss, float cap) {
  const Options options{at<const float>(weights), z_loss, cap};
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const float divisor = count ? *at<const float>(count) : 1.f;
    const float *top = at<const float>(statistics), *inverse = top + rows;
    T* result = result_at<T>(dlogits, rows * classes);
    const auto over_rows = [&](int64_t begin, int64_t end, const auto& one) TK_LAMBDA {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t target = at<const int64_t>(targets)[i];
        T* out = result + i * classes;
        if (target == ignored) memset(out, 0, static_cast<size_t>(classes) * sizeof(T));
        else one(i, at<const T>(logits) + i * classes, target, at<const float>(dloss)[of_each_row ? i : 0] / divisor, out);
      }
    };
    parallel_for(rows, 5 * classes, [&](int64_t begin, int64_t end) {
      if (!options.any())
        return over_rows(begin, end, [&](int64_t i, const T* x, int64_t target, float factor, T* out) TK_LAMBDA {
          row_gradient(x, target, top[i], inverse[i], factor, smoothing, classes, out);
        });
      float* scores = scratch<float>(ROW_SLOT, classes);
      over_rows(begin, end, [&](int64_t i, const T* x, int64_t target, float factor, T* out) TK_LAMBDA {
        const Terms row = terms(x, target, smoothing, options, classes, scores);
        gradient_with_options(row, target, top[i], inverse[i], factor, options, classes, out);
      });
    });
  });
}

// loss = the sum of the losses; with a place for it *count = the rows that are not ignored, and the loss is their mean.
void cross_entropy_sum(Address losses, Address targets, Address loss, Address count, int64_t rows, int64_t ignored) {
  double total = 0.0;
  int64_t counted = 0;
  for (int64_t i = 0; i < rows; ++i) {
    total += static_cast<double>(at<const float>(losses)[i]);
    counted += at<const int64_t>(targets)[i] != ignored;
  }
  *at<float>(loss) = static_cast<float>(count ? total / static_cast<double>(counted) : total);
  if (count) *at<float>(count) = static_cast<float>(counted);
}

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(cross_entropy_forward)
TK_KERNEL(cross_entropy_backward)
TK_KERNEL(cross_entropy_sum)
