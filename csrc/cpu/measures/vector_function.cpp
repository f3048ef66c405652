// The functions of vector_math.h over an array, for the test of their bounds.
#include "../vector_math.h"

namespace transformer_kernels::TK_LEVEL {

// kind: 0 e^x, 1 the normal distribution's cumulative function, 2 its density, 3 tanh x.
void vector_function(int64_t kind, Address x, Address y, int64_t count) {
  parallel_for(count, 8, [&](int64_t begin, int64_t end) {
    const float* from = at<const float>(x) + begin;
    float* to = at<float>(y) + begin;
    over_columns(end - begin, [&](int64_t j, auto lanes, int) TK_LAMBDA {
      const Floats each = load(from + j, lanes);
      if (kind == 0) store(to + j, exponential(each), lanes);
      else if (kind == 3) store(to + j, hyperbolic_tangent(each), lanes);
      else store(to + j, kind == 1 ? normal(each).cumulative : normal(each).density, lanes);
    });
  });
}

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(vector_function)
