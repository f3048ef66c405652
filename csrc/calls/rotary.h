// What Python hands to the rotary kernel of a CPU and of a GPU:
// transformer_kernels/ops/rotary/_compiled.py names each field.
#pragma once
#include "types.h"

namespace transformer_kernels {

// q, k and their results (batch, heads or kv_heads, length, width), strides of all axes but the last, which is
// contiguous; k may be absent, with kv_heads 0, and the results may be q and k. cos, sin fp32 (length, half),
// `table_stride` elements apart for each sequence. sign -1 is the inverse rotation.
struct Rotary {
  int64_t dtype;  // of q, k and the results: DTYPE_CODES
  Address q, k, cos, sin, q_out, k_out;
  int64_t batch, heads, kv_heads, length, width, half;
  Extents<3> q_strides, k_strides, q_out_strides, k_out_strides;
  int64_t table_stride;
  bool interleaved;
  double sign;
  int64_t device;
  Address stream;  // of a GPU

  template <class Visit> void fields(Visit&& visit) {
    visit("dtype", dtype), visit("q", q), visit("k", k), visit("cos", cos), visit("sin", sin), visit("q_out", q_out);
    visit("k_out", k_out), visit("batch", batch), visit("heads", heads), visit("kv_heads", kv_heads);
    visit("length", length), visit("width", width), visit("half", half), visit("q_strides", q_strides);
    visit("k_strides", k_strides), visit("q_out_strides", q_out_strides), visit("k_out_strides", k_out_strides);
    visit("table_stride", table_stride), visit("interleaved", interleaved), visit("sign", sign);
    visit("device", device), visit("stream", stream);
  }
};

}  // namespace transformer_kernels
