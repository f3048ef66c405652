// The arguments of the linear kernels of a CPU: transformer_kernels/ops/linear/_cpu.py names each field. x is (M, K),
// the weight (N, K), y (M, N), all contiguous; an absent tensor has address 0.
#pragma once
#include "types.h"

namespace transformer_kernels {

// y = activation(x weight^T + bias), and where `before` is given the sums before the activation,
// which GELU's gradient needs.
struct LinearForward {
  int64_t dtype;           // of x, y, before: DTYPE_CODES; float32 or bfloat16, in linear_small_batch any
  bool weight_is_float32;  // else of `dtype`
  Address x, weight, bias, y, before;  // bias fp32, in linear_small_batch of `dtype`
  int64_t M, N, K, activation;         // the index in ACTIVATIONS

  template <class Visit> void fields(Visit&& visit) {
    visit("dtype", dtype), visit("weight_is_float32", weight_is_float32), visit("x", x), visit("weight", weight);
    visit("bias", bias), visit("y", y), visit("before", before), visit("M", M), visit("N", N), visit("K", K);
    visit("activation", activation);
  }
};

// dz = dy activation'(saved) and dx = dz weight; with `sum`, fp32, sum = dx + residual instead of dx.
struct LinearBackwardData {
  int64_t dtype;
  bool weight_is_float32;
  Address dy, saved, weight, dz, dx, residual, sum;
  int64_t M, N, K, activation;

  template <class Visit> void fields(Visit&& visit) {
    visit("dtype", dtype), visit("weight_is_float32", weight_is_float32), visit("dy", dy), visit("saved", saved);
    visit("weight", weight), visit("dz", dz), visit("dx", dx), visit("residual", residual), visit("sum", sum);
    visit("M", M), visit("N", N), visit("K", K), visit("activation", activation);
  }
};

// dweight = dz^T x and dbias, fp32, the sums of dz over its rows.
struct LinearBackwardWeight {
  int64_t dtype;
  bool weight_is_float32;  // and so is dweight
  Address dz, x, dweight, dbias;
  int64_t M, N, K;

  template <class Visit> void fields(Visit&& visit) {
    visit("dtype", dtype), visit("weight_is_float32", weight_is_float32), visit("dz", dz), visit("x", x);
    visit("dweight", dweight), visit("dbias", dbias), visit("M", M), visit("N", N), visit("K", K);
  }
};

}  // namespace transformer_kernels
