// Cross-entropy of rows of logits with class indices: the losses, their gradient, and the sum or mean of the losses.
//
// Options beyond smoothing (class weights, z-loss, a soft cap) have a separate path: a row's scores are computed in
// scratch memory, in fp32, and each option is tested outside of the loops.
#include "../../calls/loss.h"
#include "../rows.h"
#include "../vector_math.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

struct Softmax {
  float top, total;  // the largest logit, and the sum of exponentials relative to it
};

// `below` elements later the next row begins. The exponentials wait in `kept`, where it is given,
// for a gradient that goes to `out`.
template <class T, class Keep>
TK_INLINE Softmax row_softmax(const T* x, int64_t classes, int64_t below, Keep, float* kept, T* out) {
  Floats top[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
  over_columns(classes,
               [&](int64_t j, auto lanes, int u)
                   TK_LAMBDA { top[u] = maximum(load(x + j, lanes, -INFINITY), top[u]); });
  const float limit = largest(top);
  const float total = sum_over_columns(classes, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
    fetch_below(x + j, below, u);
    const Floats e = exponential(load(x + j, lanes, -INFINITY) - limit);
    if constexpr (Keep::value) __builtin_prefetch(out + j, 1, 2), store(kept + j, e, lanes);
    return e;
  });
  return {limit, total};
}

// out = factor * (softmax - the smoothed target), of exponentials(column, lanes, u).
template <class T, class F>
TK_INLINE void row_gradient(float logit, int64_t target, float top, float inverse, float factor, float smoothing,
                            int64_t classes, T* out, const F& exponentials) {
  const float share = factor * inverse, even = -factor * smoothing / static_cast<float>(classes);
  const float p = exponential(splat(logit - top))[0] * inverse;
  const float hit = factor * (p - smoothing / static_cast<float>(classes) - (1.f - smoothing));
  over_columns(classes, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
    store(out + j, fma(exponentials(j, lanes, u), splat(share), splat(even)), lanes);
  });
  store(out + target, splat(hit), Part{1});
}

// The terms of a row's loss besides its softmax: the logit of its class, and the mean distance of all logits from the
// largest.
struct Distances {
  float own, mean;
};

template <class T>
TK_INLINE Distances row_distances(const T* x, int64_t target, float top, float smoothing, int64_t classes) {
  // Relative to the largest logit: a constant that is added to all of them costs no digits.
  const float own = element(x[target]);
  if (smoothing == 0.f) return {own, 0.f};
  const float below =
      sum_over_columns(classes, [&](int64_t j, auto lanes, int) TK_LAMBDA { return top - load(x + j, lanes, top); });
  return {own, below / static_cast<float>(classes)};
}

TK_INLINE float row_loss(const Softmax& s, const Distances& d, float log_total, float smoothing) {
  const float loss = s.top - d.own + log_total;
  return smoothing == 0.f ? loss : (1.f - smoothing) * loss + smoothing * (d.mean + log_total);
}

// `weights`: (classes + 1), the last one is their mean, or null.
struct Options {
  const float* weights;
  float z_loss, cap;

  bool any() const { return weights || z_loss != 0.f || cap != 0.f; }
  template <class L> TK_INLINE Floats weight(int64_t j, L lanes) const {
    return weights ? load(weights + j, lanes) : splat(1.f);
  }
  TK_INLINE float weight(int64_t j) const { return weights ? weights[j] : 1.f; }
};

template <class Call> TK_INLINE Options options_of(const Call& call) {
  return {at<const float>(call.weights), static_cast<float>(call.z_loss), static_cast<float>(call.softcap)};
}

// What the options make of a row: its scores, of the class and of every class the share of the target, and their sum.
struct Terms {
  const float* scores;
  float own, even, share;
};

template <class T>
TK_INLINE Terms terms(const T* x, int64_t target, float smoothing, const Options& options, int64_t classes,
                      float* scores) {
  const float cap = options.cap, inverse = 1.f / cap;
  if (cap == 0.f)
    over_columns(classes, [&](int64_t j, auto lanes, int) TK_LAMBDA { store(scores + j, load(x + j, lanes), lanes); });
  else
    over_columns(classes, [&](int64_t j, auto lanes, int) TK_LAMBDA {
      store(scores + j, hyperbolic_tangent(load(x + j, lanes) * inverse) * cap, lanes);
    });
  const float own = (1.f - smoothing) * options.weight(target);
  return {scores, own, smoothing / static_cast<float>(classes), own + smoothing * options.weight(classes)};
}

TK_INLINE float loss_with_options(const Terms& row, int64_t target, const Softmax& s, float log_total,
                                  const Options& options, int64_t classes) {
  const float lse = s.top + log_total;
  const float below = row.even == 0.f ? 0.f : sum_over_columns(classes, [&](int64_t j, auto lanes, int) TK_LAMBDA {
    return (s.top - load(row.scores + j, lanes, s.top)) * options.weight(j, lanes);
  });
  return row.share * log_total + row.own * (s.top - row.scores[target]) + row.even * below + options.z_loss * lse * lse;
}

// out = factor * ((share + 2 z lse) softmax - the weighted target), through the cap.
template <class T>
TK_INLINE void gradient_with_options(const Terms& row, int64_t target, float top, float inverse, float factor,
                                     const Options& options, int64_t classes, T* out) {
  const float lse = top - logarithm(splat(inverse))[0], even = -factor * row.even,
              bend = options.cap == 0.f ? 0.f : 1.f / options.cap;
  const float share = factor * (row.share + 2.f * options.z_loss * lse) * inverse;
  over_columns(classes, [&](int64_t j, auto lanes, int) TK_LAMBDA {
    const Floats score = load(row.scores + j, lanes), bent = score * bend;
    const Floats gradient = fma(exponential(score - top), splat(share), options.weight(j, lanes) * even);
    store(out + j, gradient * (1.f - bent * bent), lanes);
  });
  const float score = row.scores[target], bent = score * bend;
  const float hit = exponential(splat(score - top))[0] * share + even * options.weight(target) - factor * row.own;
  store(out + target, splat(hit * (1.f - bent * bent)), Part{1});
}

// So many rows that stay in a cache make their logarithms together, in the lanes of a vector.
constexpr int64_t BATCH = 16, NARROW = 1024;

template <class T> TK_INLINE void scale(T* x, int64_t count, float factor) {
  over_columns(count, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
    fetch_ahead_to_write(x + j, u);
    store(x + j, load(x + j, lanes) * factor, lanes);
  });
}

// How many rows are not ignored.
inline float counted(const int64_t* targets, int64_t rows, int64_t ignored) {
  int64_t count = 0;
  for (int64_t i = 0; i < rows; ++i) count += targets[i] != ignored;
  return static_cast<float>(count);
}

}  // namespace

void cross_entropy_forward(const CrossEntropyForward& call) {
  const int64_t rows = call.rows, classes = call.classes, stride = call.stride, ignored = call.ignore_index;
  const float smoothing = static_cast<float>(call.smoothing);
  const Options options = options_of(call);
  const int64_t* classes_of = at<const int64_t>(call.targets);
  float *losses = at<float>(call.losses), *statistics = at<float>(call.statistics);
  const float factor = call.count ? 1.f / (*at<float>(call.count) = counted(classes_of, rows, ignored)) : 1.f;
  by_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* logits = at<const T>(call.logits);
    const bool in_place = call.dlogits == call.logits;
    T* dlogits = in_place ? at<T>(call.dlogits) : result_at<T>(call.dlogits, rows * classes);
    const int64_t pitch = in_place ? stride : classes;
    // one(row of the batch, logits, class, where the gradient goes),
    // and then finish(row, class, softmax, log of its sum, where).
    const auto over_rows = [&](int64_t begin, int64_t end, int64_t batch, const auto& one, const auto& finish)
                               TK_LAMBDA {
      Softmax softmax[BATCH];
      alignas(64) float log_totals[BATCH];
      for (float& total : log_totals) total = 1.f;
      for (int64_t first = begin; first < end; first += batch) {
        const int64_t size = first + batch < end ? batch : end - first;
        for (int64_t k = 0; k < size; ++k) {
          const int64_t i = first + k, target = classes_of[i];
          softmax[k] = target == ignored ? Softmax{0.f, 1.f} : one(k, logits + i * stride, target, dlogits + i * pitch);
          log_totals[k] = softmax[k].total;
        }
        for (int64_t k = 0; k < size; k += WIDTH) store(log_totals + k, logarithm(load(log_totals + k)));
        for (int64_t k = 0; k < size; ++k) {
          const int64_t i = first + k, target = classes_of[i];
          T* out = dlogits + i * pitch;
          if (statistics) statistics[i] = softmax[k].top, statistics[rows + i] = 1.f / softmax[k].total;
          losses[i] = target == ignored ? 0.f : finish(k, target, softmax[k], log_totals[k], out);
          if (target == ignored && dlogits) memset(out, 0, static_cast<size_t>(classes) * sizeof(T));
        }
      }
    };
    parallel_for(rows, (dlogits ? 10 : 5) * classes, [&](int64_t begin, int64_t end) {
      float* scratch_row = scratch<float>(ROW_SLOT, classes);
      if (!options.any()) {
        Distances distances[BATCH];
        return over_rows(begin, end, classes <= NARROW ? BATCH : 1,
                         [&](int64_t k, const T* x, int64_t target, T* out) TK_LAMBDA {
          const Softmax s = dlogits ? row_softmax(x, classes, stride, Flag<true>{}, scratch_row, out)
                                    : row_softmax(x, classes, stride, Flag<false>{}, scratch_row, out);
          distances[k] = row_distances(x, target, s.top, smoothing, classes);
          if (dlogits)
            row_gradient(distances[k].own, target, s.top, 1.f / s.total, factor, smoothing, classes, out,
                         [&](int64_t j, auto lanes, int) TK_LAMBDA { return load(scratch_row + j, lanes); });
          return s;
        }, [&](int64_t k, int64_t, const Softmax& s, float log_total, T*) TK_LAMBDA {
          return row_loss(s, distances[k], log_total, smoothing);
        });
      }
      Terms row{};
      over_rows(begin, end, 1, [&](int64_t, const T* x, int64_t target, T*) TK_LAMBDA {
        row = terms(x, target, smoothing, options, classes, scratch_row);
        return row_softmax(row.scores, classes, 0, Flag<false>{}, scratch_row, scratch_row);
      }, [&](int64_t, int64_t target, const Softmax& s, float log_total, T* out) TK_LAMBDA {
        const float loss = loss_with_options(row, target, s, log_total, options, classes);
        if (dlogits) gradient_with_options(row, target, s.top, 1.f / s.total, factor, options, classes, out);
        return loss;
      });
    });
  });
}

void cross_entropy_backward(const CrossEntropyBackward& call) {
  const int64_t rows = call.rows, classes = call.classes, ignored = call.ignore_index;
  const float smoothing = static_cast<float>(call.smoothing);
  const bool afterwards = call.scaled_afterwards;
  const Options options = options_of(call);
  by_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const float divisor = call.count ? *at<const float>(call.count) : 1.f;
    const float *top = at<const float>(call.statistics), *inverse = top + rows, *factors = at<const float>(call.dloss);
    const float later = afterwards ? *factors : 1.f;
    T* result = result_at<T>(call.dlogits, rows * classes);
    const auto over_rows = [&](int64_t begin, int64_t end, const auto& one) TK_LAMBDA {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t target = at<const int64_t>(call.targets)[i];
        T* out = result + i * classes;
        if (target == ignored) memset(out, 0, static_cast<size_t>(classes) * sizeof(T));
        else
          one(i, at<const T>(call.logits) + i * classes, target,
              (afterwards ? 1.f : factors[call.dloss_of_each_row ? i : 0]) / divisor, out);
        if (later != 1.f) scale(out, classes, later);
      }
    };
    parallel_for(rows, 5 * classes, [&](int64_t begin, int64_t end) {
      if (!options.any())
        return over_rows(begin, end, [&](int64_t i, const T* x, int64_t target, float factor, T* out) TK_LAMBDA {
          row_gradient(element(x[target]), target, top[i], inverse[i], factor, smoothing, classes, out,
                       [&](int64_t j, auto lanes, int u) TK_LAMBDA {
            fetch_ahead(x + j, u), fetch_ahead_to_write(out + j, u);
            return exponential(load(x + j, lanes) - top[i]);
          });
        });
      float* scores = scratch<float>(ROW_SLOT, classes);
      over_rows(begin, end, [&](int64_t i, const T* x, int64_t target, float factor, T* out) TK_LAMBDA {
        const Terms row = terms(x, target, smoothing, options, classes, scores);
        gradient_with_options(row, target, top[i], inverse[i], factor, options, classes, out);
      });
    });
  });
}

// dlogits times *dloss, in place.
void cross_entropy_scale(int64_t dtype, Address dloss, Address dlogits, int64_t count) {
  const float factor = *at<const float>(dloss);
  if (factor == 1.f) return;
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_for(count, 1, [&](int64_t begin, int64_t end) { scale(at<T>(dlogits) + begin, end - begin, factor); });
  });
}

void cross_entropy_sum(const CrossEntropySum& call) {
  double total = 0.0;
  for (int64_t i = 0; i < call.rows; ++i) total += static_cast<double>(at<const float>(call.losses)[i]);
  if (call.count)
    total /= static_cast<double>(*at<float>(call.count) =
                                     counted(at<const int64_t>(call.targets), call.rows, call.ignore_index));
  *at<float>(call.loss) = static_cast<float>(total);
}

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(cross_entropy_forward)
TK_KERNEL(cross_entropy_backward)
TK_KERNEL(cross_entropy_scale)
TK_KERNEL(cross_entropy_sum)
