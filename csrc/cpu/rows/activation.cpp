// y = activation(x + bias) and its gradient: ReLU, GELU, and GELU by tanh. y = activation(gate) * up and its gradients:
// SiLU, GELU, and GELU by tanh.
#include "../../calls/activation.h"
#include "../rows.h"
#include "../vector_math.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

struct Relu {  // its gradient needs no x: dx = dy where y > 0
  static TK_INLINE Floats value(Floats x) { return x < 0.f ? splat(0.f) : x; }
  static TK_INLINE Floats gradient(Floats dy, Floats y) { return y <= 0.f ? splat(0.f) : dy; }
};

struct ValueAndSlope {
  Floats value, slope;
};

struct Gelu {  // x Phi(x)
  static TK_INLINE Floats value(Floats x) { return x * normal(x).cumulative; }
  static TK_INLINE Floats gradient(Floats dy, Floats x) { return dy * both(x).slope; }
  static TK_INLINE ValueAndSlope both(Floats x) {
    const Normal n = normal(x);
    return {x * n.cumulative, fma(x, n.density, n.cumulative)};
  }
};

struct Silu {  // x s(x), s(x) = 1 / (1 + exp(-x))
  static TK_INLINE Floats value(Floats x) { return x / (exponential(-x) + 1.f); }
  static TK_INLINE ValueAndSlope both(Floats x) {
    const Floats e = exponential(-magnitude(x)), larger = 1.f / (e + 1.f), smaller = e * larger;
    const Floats y = x * (x < 0.f ? smaller : larger);
    return {y, fma(y, x < 0.f ? larger : smaller, x < 0.f ? smaller : larger)};
  }
};

struct GeluTanh {  // x (1 + tanh(u)) / 2 = x s(2 u), s(v) = 1 / (1 + exp(-v)), u = sqrt(2 / pi) (x + 0.044715 x^3)
  static constexpr float LINEAR = 1.5957691216f, CUBIC = LINEAR * 0.044715f;  // of 2 u
  static TK_INLINE Floats twice(Floats x) { return x * fma(x * x, splat(CUBIC), splat(LINEAR)); }  // 2 u
  static TK_INLINE Floats value(Floats x) { return x / (exponential(-twice(x)) + 1.f); }
  static TK_INLINE Floats gradient(Floats dy, Floats x) { return dy * both(x).slope; }
  static TK_INLINE ValueAndSlope both(Floats x) {
    // What rounding takes from 2 u would be a relative error of exp(2 u): it is kept, to first order.
    constexpr float LINEAR_REST = static_cast<float>(1.5957691216057308 - LINEAR);
    const Floats square = x * x, factor = fma(square, splat(CUBIC), splat(LINEAR)), v = x * factor;
    const Floats factor_rest = fma(square, splat(CUBIC), splat(LINEAR) - factor) + LINEAR_REST;
    const Floats rest = fma(x, factor, -v) + x * factor_rest, e0 = exponential(-magnitude(v));
    const Floats e = fma(e0, v < 0.f ? rest : -rest, e0), smaller = e / (e + 1.f), larger = 1.f - smaller;
    const Floats rise = x * fma(square, splat(3.f * CUBIC), splat(LINEAR));  // s and 1 - s are `larger` and `smaller`
    const Floats s = v < 0.f ? smaller : larger;
    return {x * s, fma(larger * smaller, rise, s)};
  }
};

// Calls f(activation) for one that is not gated.
template <class F> TK_INLINE void by_kind(int64_t kind, const F& f) {
  if (kind == RELU) return f(Relu{});
  if (kind == GELU) return f(Gelu{});
  return f(GeluTanh{});
}

// The same for the activation of a gate.
template <class F> TK_INLINE void by_gate(int64_t kind, const F& f) {
  if (kind == SILU) return f(Silu{});
  if (kind == GELU) return f(Gelu{});
  return f(GeluTanh{});
}

constexpr int64_t BLOCK = 4096, WORK = 8;  // elements of a task without bias; the cost of an element

// f(element, lanes, u) is the result at these elements.
template <class T, class F> void over_blocks(T* result, int64_t count, const F& f) {
  const bool past_caches = goes_past_caches(1, count, result);
  parallel_for((count + BLOCK - 1) / BLOCK, WORK * BLOCK, [&](int64_t first, int64_t last) {
    const int64_t begin = first * BLOCK, end = last * BLOCK < count ? last * BLOCK : count;
    over_columns(end - begin, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
      store_result(result + begin + j, f(begin + j, lanes, u), lanes, u, past_caches);
    });
    finish_results(past_caches);
  });
}

// The layout of a gated activation's operands: `up` (rows, columns) like gate, or, if null, after each row of gate.
template <class T> struct Gated {
  const T *gate, *up;
  int64_t rows, columns;

  // Calls f(offset in (rows, columns), the same in gate, lanes, u).
  template <class F> void each(const F& f) const {
    const int64_t size = up ? BLOCK : columns, count = rows * columns;
    parallel_for((count + size - 1) / size, WORK * size, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t begin = i * size, end = begin + size < count ? begin + size : count,
                      index = up ? begin : 2 * begin;
        over_columns(end - begin, [&](int64_t j, auto lanes, int u) TK_LAMBDA { f(begin + j, index + j, lanes, u); });
      }
    });
  }
  template <class Element> Element* second(Element* first, Element* separate) const {
    return up ? separate : first + columns;
  }
};

void plain_forward(const ActivationForward& call) {
  const int64_t rows = call.rows, columns = call.columns;
  by_kind(call.kind, [&](auto activation) {
    by_dtype(call.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      const T* from = at<const T>(call.x);
      const float* b = at<const float>(call.bias);
      T* to = result_at<T>(call.y, rows * columns);
      if (!b)
        return over_blocks(to, rows * columns, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
          fetch_ahead(from + j, u);
          return activation.value(load(from + j, lanes));
        });
      parallel_for(rows, WORK * columns, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          over_columns(columns, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
            fetch_ahead(from + i * columns + j, u), fetch_ahead_to_write(to + i * columns + j, u);
            store(to + i * columns + j, activation.value(load(from + i * columns + j, lanes) + load(b + j, lanes)),
                  lanes);
          });
      });
    });
  });
}

void plain_backward(const ActivationBackward& call) {
  const int64_t rows = call.rows, columns = call.columns;
  by_kind(call.kind, [&](auto activation) {
    by_dtype(call.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      const T *came = at<const T>(call.dy), *x = at<const T>(call.x);
      const float* b = at<const float>(call.bias);
      T* to = result_at<T>(call.dx, rows * columns);
      if (!b && !call.dbias)
        return over_blocks(to, rows * columns, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
          fetch_ahead(came + j, u), fetch_ahead(x + j, u);
          return activation.gradient(load(came + j, lanes), load(x + j, lanes));
        });
      const float* sums = sums_over_rows(rows, columns, WORK * columns, [&](float* own, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          over_columns(columns, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
            const int64_t here = i * columns + j;
            fetch_ahead(x + here, u), fetch_ahead(came + here, u), fetch_ahead_to_write(to + here, u);
            const Floats at_x = b ? load(x + here, lanes) + load(b + j, lanes) : load(x + here, lanes);
            const Floats gradient = activation.gradient(load(came + here, lanes), at_x);
            store(to + here, gradient, lanes);
            store(own + j, load(own + j, lanes) + gradient, lanes);
          });
      });
      add_parts(sums, parts_of(rows), columns, columns, at<float>(call.dbias));
    });
  });
}

void gated_forward(const ActivationForward& call) {
  const int64_t rows = call.rows, columns = call.columns;
  by_gate(call.kind, [&](auto activation) {
    by_dtype(call.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      const Gated<T> from{at<const T>(call.x), at<const T>(call.up), rows, columns};
      const T* factor = from.second(from.gate, from.up);
      T* to = result_at<T>(call.y, rows * columns);
      from.each([&](int64_t j, int64_t index, auto lanes, int u) TK_LAMBDA {
        fetch_ahead(from.gate + index, u), fetch_ahead(factor + index, u), fetch_ahead_to_write(to + j, u);
        store(to + j, activation.value(load(from.gate + index, lanes)) * load(factor + index, lanes), lanes);
      });
    });
  });
}

void gated_backward(const ActivationBackward& call) {
  const int64_t rows = call.rows, columns = call.columns;
  by_gate(call.kind, [&](auto activation) {
    by_dtype(call.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      const Gated<T> from{at<const T>(call.x), at<const T>(call.up), rows, columns};
      const T *came = at<const T>(call.dy), *factor = from.second(from.gate, from.up);
      T* to = result_at<T>(call.dx, (from.up ? 1 : 2) * rows * columns);
      T* to_factor = from.second(to, result_at<T>(call.dup, rows * columns));
      from.each([&](int64_t j, int64_t index, auto lanes, int u) TK_LAMBDA {
        fetch_ahead(came + j, u), fetch_ahead(from.gate + index, u), fetch_ahead(factor + index, u);
        fetch_ahead_to_write(to + index, u), fetch_ahead_to_write(to_factor + index, u);
        const Floats gradient = load(came + j, lanes);
        const ValueAndSlope gated = activation.both(load(from.gate + index, lanes));
        store(to + index, gradient * load(factor + index, lanes) * gated.slope, lanes);
        store(to_factor + index, gradient * gated.value, lanes);
      });
    });
  });
}

}  // namespace

void activation_forward(const ActivationForward& call) { call.gated ? gated_forward(call) : plain_forward(call); }
void activation_backward(const ActivationBackward& call) { call.gated ? gated_backward(call) : plain_backward(call); }

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(activation_forward)
TK_KERNEL(activation_backward)
