// What Python hands to the norm kernels of a CPU and of a GPU: transformer_kernels/ops/norm/_compiled.py names each
// field. Rows are (rows, columns) and contiguous, parameters (columns,); address 0 is an absent tensor.
#pragma once
#include "types.h"

namespace transformer_kernels {

// s = dropout(x) + residual, or x without a residual; y = LayerNorm(s), or without a mean RMSNorm(s).
// On a CPU, in float32, casts are fused: x may be bfloat16, and `narrow`, y in bfloat16, may be written in addition to
// y or instead of it.
struct NormForward {
  int64_t dtype;  // of x, residual, summed, y: DTYPE_CODES
  Address x, residual, weight, bias, seed;
  double dropout_p;
  Address summed, y, mean, rstd;  // mean, rstd (rows,) fp32
  Address narrow;
  bool x_is_bfloat16;
  int64_t rows, columns;
  double eps;
  bool weight_is_float32, bias_is_float32;  // else of `dtype`; on a CPU always float32
  int64_t device;
  Address stream;  // of a GPU

  template <class Visit> void fields(Visit&& visit) {
    visit("dtype", dtype), visit("x", x), visit("residual", residual), visit("weight", weight), visit("bias", bias);
    visit("seed", seed), visit("dropout_p", dropout_p), visit("summed", summed), visit("y", y), visit("mean", mean);
    visit("rstd", rstd), visit("narrow", narrow), visit("x_is_bfloat16", x_is_bfloat16), visit("rows", rows);
    visit("columns", columns), visit("eps", eps);
    visit("weight_is_float32", weight_is_float32), visit("bias_is_float32", bias_is_float32);
    visit("device", device), visit("stream", stream);
  }
};

// From dy and dsummed, which may be absent: dresidual, the gradient of s, which is `x` here; with a seed dx, its
// dropout, too; dweight and dbias. `partials`, where it is given: (1 or, with a mean, 2, partial_rows, columns) fp32.
// On a CPU, in float32, dy may be bfloat16, dy + residual be the gradient of y, and dx be absent beside `narrow`, dx in
// bfloat16.
struct NormBackward {
  int64_t dtype;
  Address dy, dsummed, x, weight, mean, rstd, seed;
  double dropout_p;
  bool added;  // whether forward had a residual
  Address dx, dresidual, dweight, dbias, partials;
  Address residual, narrow;
  bool dy_is_bfloat16;
  int64_t partial_rows, rows, columns;
  bool weight_is_float32;  // and so are dweight and dbias
  int64_t device;
  Address stream;

  template <class Visit> void fields(Visit&& visit) {
    visit("dtype", dtype), visit("dy", dy), visit("dsummed", dsummed), visit("x", x), visit("weight", weight);
    visit("mean", mean), visit("rstd", rstd), visit("seed", seed), visit("dropout_p", dropout_p), visit("added", added);
    visit("dx", dx), visit("dresidual", dresidual), visit("dweight", dweight), visit("dbias", dbias);
    visit("partials", partials), visit("residual", residual), visit("narrow", narrow);
    visit("dy_is_bfloat16", dy_is_bfloat16), visit("partial_rows", partial_rows), visit("rows", rows);
    visit("columns", columns);
    visit("weight_is_float32", weight_is_float32), visit("device", device), visit("stream", stream);
  }
};

}  // namespace transformer_kernels
