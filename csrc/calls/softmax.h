// What Python hands to the softmax kernels of a CPU and of a GPU: transformer_kernels/ops/softmax/_compiled.py names
// each field. x, y and their gradients are (rows, columns) and contiguous.
#pragma once
#include "types.h"

namespace transformer_kernels {

// y = softmax(scale * x). The mask, bytes or absent, is a view (sizes[0], sizes[1], sizes[2], columns) over the rows.
// causal_rows: the rows of one causal matrix, or 0.
struct SoftmaxForward {
  int64_t dtype;  // of x, y: DTYPE_CODES
  Address x, y, mask;
  Extents<3> mask_sizes;
  Extents<4> mask_strides;
  int64_t causal_rows, rows, columns;
  double scale;
  int64_t device;
  Address stream;  // of a GPU

  template <class Visit> void fields(Visit&& visit) {
    visit("dtype", dtype), visit("x", x), visit("y", y), visit("mask", mask), visit("mask_sizes", mask_sizes);
    visit("mask_strides", mask_strides), visit("causal_rows", causal_rows), visit("rows", rows);
    visit("columns", columns), visit("scale", scale), visit("device", device), visit("stream", stream);
  }
};

// dx = scale * y * (dy - sum(dy * y)).
struct SoftmaxBackward {
  int64_t dtype;
  Address dy, y, dx;
  int64_t rows, columns;
  double scale;
  int64_t device;
  Address stream;

  template <class Visit> void fields(Visit&& visit) {
    visit("dtype", dtype), visit("dy", dy), visit("y", y), visit("dx", dx), visit("rows", rows);
    visit("columns", columns), visit("scale", scale), visit("device", device), visit("stream", stream);
  }
};

}  // namespace transformer_kernels
