// Cross-entropy of rows of logits with class indices: the losses, their gradient, and the sum or mean of the losses.
#include "../rows.h"
#include "../vector_math.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

struct Softmax {
  float top, total;  // the largest logit, and the sum of exponentials relative to it
};

template <class T> TK_INLINE Softmax row_softmax(const T* x, int64_t classes) {
  Floats top[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)}, total[4] = {};
  over_columns(classes, [&](int64_t j, auto lanes, int u) TK_LAMBDA { top[u] = maximum(load(x + j, lanes, -INFINITY), top[u]); });
  const float limit = largest(top);
  over_columns(classes, [&](int64_t j, auto lanes, int u) TK_LAMBDA { total[u] += exponential(load(x + j, lanes, -INFINITY) - limit); });
  return {limit, sum(total)};
}

// out = factor * (softmax - the smoothed target), which may lie where x does.
template <class T>
TK_INLINE void row_gradient(const T* x, int64_t target, float top, float inverse, float factor, float smoothing, int64_t classes, T* out) {
  const float share = factor * inverse, even = -factor * smoothing / static_cast<float>(classes);
  const float p = __builtin_expf(element(x[target]) - top) * inverse;
  const float hit = factor * (p - smoothing / static_cast<float>(classes) - (1.f - smoothing));
  over_columns(classes, [&](int64_t j, auto lanes, int) TK_LAMBDA {
    store(out + j, fma(exponential(load(x + j, lanes) - top), splat(share), splat(even)), lanes);
  });
  store(out + target, splat(hit), Part{1});
}

template <class T> TK_INLINE float row_loss(const T* x, int64_t target, const Softmax& s, float smoothing, int64_t classes) {
  // Relative to the largest logit: a constant that is added to all of them costs no digits.
  const float log_total = __builtin_logf(s.total), loss = s.top - element(x[target]) + log_total;
  if (smoothing == 0.f) return loss;
  Floats below[4] = {};
  over_columns(classes, [&](int64_t j, auto lanes, int u) TK_LAMBDA { below[u] += s.top - load(x + j, lanes, s.top); });
  return (1.f - smoothing) * loss + smoothing * (sum(below) / static_cast<float>(classes) + log_total);
}

}  // namespace

// logits (rows, classes) at `stride`; targets i64 (rows); losses f32 (rows). With `statistics` f32 (2, rows) the largest logit
// and 1 / sum of each row go there; without (address 0) the gradient of the sum of losses takes the logits' place.
void cross_entropy_forward(int64_t dtype, Address logits, int64_t stride, Address targets, Address losses,
                           Address statistics, int64_t rows, int64_t classes, int64_t ignored, float smoothing) {
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_for(rows, (statistics ? 5 : 10) * classes, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        T* x = at<T>(logits) + i * stride;
        const int64_t target = at<const int64_t>(targets)[i];
        if (target == ignored) {
          at<float>(losses)[i] = 0.f;
          if (!statistics) memset(x, 0, static_cast<size_t>(classes) * sizeof(T));
          continue;
        }
        const Softmax s = row_softmax(x, classes);
        at<float>(losses)[i] = row_loss(x, target, s, smoothing, classes);
        if (statistics) at<float>(statistics)[i] = s.top, at<float>(statistics)[rows + i] = 1.f / s.total;
        else row_gradient(x, target, s.top, 1.f / s.total, 1.f, smoothing, classes, x);
      }
    });
  });
}

// dlogits from dloss, f32: of each row, or one for all that is divided by *count where that is given.
void cross_entropy_backward(int64_t dtype, Address dloss, bool of_each_row, Address count, Address logits, Address targets,
                            Address statistics, Address dlogits, int64_t rows, int64_t classes, int64_t ignored, float smoothing) {
  by_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const float divisor = count ? *at<const float>(count) : 1.f;
    parallel_for(rows, 5 * classes, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t target = at<const int64_t>(targets)[i];
        T* out = at<T>(dlogits) + i * classes;
        if (target == ignored) {
          memset(out, 0, static_cast<size_t>(classes) * sizeof(T));
          continue;
        }
        const float factor = at<const float>(dloss)[of_each_row ? i : 0] / divisor;
        const float *top = at<const float>(statistics), *inverse = top + rows;
        row_gradient(at<const T>(logits) + i * classes, target, top[i], inverse[i], factor, smoothing, classes, out);
      }
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
