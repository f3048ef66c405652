// What Python hands to the activation kernels of a CPU and of a GPU: transformer_kernels/ops/activation/_compiled.py
// names each field. Rows are (rows, columns) and contiguous, the bias is (columns,); address 0 is an absent tensor.
#pragma once
#include "types.h"

namespace transformer_kernels {

enum ActivationKind : int64_t { RELU, GELU, GELU_TANH, SILU };  // KINDS in _compiled.py

// y = f(x + bias), or, gated, y = f(x) * up.
// Without up, the rows of x are (2 * columns): first the gate, then up.
struct ActivationForward {
  int64_t dtype;  // of x, up, y: DTYPE_CODES
  int64_t kind;
  bool gated;
  Address x, bias, up, y;
  int64_t rows, columns;
  bool bias_is_float32;  // else of `dtype`; on a CPU always float32
  int64_t device;
  Address stream;  // of a GPU

  template <class Visit> void fields(Visit&& visit) {
    visit("dtype", dtype), visit("kind", kind), visit("gated", gated), visit("x", x), visit("bias", bias);
    visit("up", up), visit("y", y), visit("rows", rows), visit("columns", columns);
    visit("bias_is_float32", bias_is_float32), visit("device", device), visit("stream", stream);
  }
};

// dx, and dbias unless its address is null; or, gated, dx and dup, both in dx without up. For RELU x is y, and the bias
// may be absent. `partials`, if given: (partial_rows, columns) fp32.
struct ActivationBackward {
  int64_t dtype, kind;
  bool gated;
  Address dy, x, bias, up, dx, dbias, dup, partials;
  int64_t partial_rows, rows, columns;
  bool bias_is_float32;  // and so is dbias
  int64_t device;
  Address stream;

  template <class Visit> void fields(Visit&& visit) {
    visit("dtype", dtype), visit("kind", kind), visit("gated", gated), visit("dy", dy), visit("x", x);
    visit("bias", bias), visit("up", up), visit("dx", dx), visit("dbias", dbias), visit("dup", dup);
    visit("partials", partials), visit("partial_rows", partial_rows), visit("rows", rows), visit("columns", columns);
    visit("bias_is_float32", bias_is_float32), visit("device", device), visit("stream", stream);
  }
};

}  // namespace transformer_kernels
