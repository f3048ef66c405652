// The arguments of the attention kernels of a CPU and of a GPU, forward and backward:
// transformer_kernels/ops/attention/_compiled.py names each field. An absent tensor has address 0.
#pragma once
#include "types.h"

namespace transformer_kernels {

// A tensor (B, H, L, D) whose last axis is contiguous; strides in elements.
struct View {
  Address data;
  int64_t batch, head, row;
  bool rotated = false;  // its rows, by the angles of the call: set by the kernels of a CPU

  template <class Visit> void fields(Visit&& visit) {
    visit("data", data), visit("batch", batch), visit("head", head), visit("row", row);
  }
};

// Rotary positions: cos, sin fp32 (L, half), `stride` elements apart for each batch. q and k are rotated as they are
// read, dq and dk are rotated back as they are written.
struct AngleTables {
  Address cos, sin;
  int64_t stride, half;
  bool interleaved;

  template <class Visit> void fields(Visit&& visit) {
    visit("cos", cos), visit("sin", sin), visit("stride", stride), visit("half", half),
        visit("interleaved", interleaved);
  }
};

// lse (B, Hq, Lq) is a natural log, statistics (B, Hq, 2, Lq) the largest score of a row and the log of the sum of
// exp(score - largest); on a CPU each may be absent. From scale to cu_seqlens_k these are the fields of
// ops/attention/_call.py. Strides of the bias and of the slopes are 0 along a broadcast axis; cu_seqlens_k is
// cu_seqlens where keys are packed as the queries are.
struct AttentionCall {
  int64_t dtype;  // of q, k, v, out and their gradients: DTYPE_CODES
  View q, k, v, out;
  Address lse, statistics;
  int64_t batch, heads, kv_heads, queries, keys, width;
  double scale;
  int64_t left, right;  // visible keys before and after a query's own position; causal: right = 0
  double softcap;       // 0: none
  Address bias;
  bool bias_is_float32;                // else of `dtype`
  Extents<4> bias_sizes, bias_strides;  // sizes: of the scores, or 1
  Address mask;  // bytes, 1: visible; strides as for the bias
  Extents<4> mask_strides;
  Address key_ranges;  // int32 pairs (B, Hq, Lq, 2): the first visible key and the one after the last
  Extents<3> range_strides;  // in pairs, 0 along a broadcast axis
  Address alibi_slopes;
  Extents<2> slope_strides;                              // of batches and heads
  Address key_padding_mask, cu_seqlens, cu_seqlens_k;  // bytes (B, Lk), 1: a real token; int32 (sequences + 1)
  int64_t sequences;
  AngleTables angles;
  Address seed;
  double dropout_p;
  View dout, dq, dk, dv;  // backward; on a CPU dq, dk and dv may be absent
  Address dlse, dbias;    // dbias is contiguous, of the bias's dtype; on a CPU fp32
  Address delta;          // workspace of a GPU, as large as lse
  int64_t path, device;   // of a GPU: which kernels (csrc/cuda/launchers/attention.cu)
  Address stream;

  template <class Visit> void fields(Visit&& visit) {
    visit("dtype", dtype), visit("q", q), visit("k", k), visit("v", v), visit("out", out), visit("lse", lse);
    visit("statistics", statistics), visit("batch", batch), visit("heads", heads), visit("kv_heads", kv_heads);
    visit("queries", queries), visit("keys", keys), visit("width", width), visit("scale", scale), visit("left", left);
    visit("right", right), visit("softcap", softcap), visit("bias", bias), visit("bias_is_float32", bias_is_float32);
    visit("bias_sizes", bias_sizes), visit("bias_strides", bias_strides), visit("mask", mask);
    visit("mask_strides", mask_strides), visit("key_ranges", key_ranges), visit("range_strides", range_strides);
    visit("alibi_slopes", alibi_slopes);
    visit("slope_strides", slope_strides), visit("key_padding_mask", key_padding_mask), visit("cu_seqlens", cu_seqlens);
    visit("cu_seqlens_k", cu_seqlens_k), visit("sequences", sequences), visit("angles", angles), visit("seed", seed);
    visit("dropout_p", dropout_p), visit("dout", dout), visit("dq", dq), visit("dk", dk), visit("dv", dv);
    visit("dlse", dlse), visit("dbias", dbias), visit("delta", delta), visit("path", path), visit("device", device);
    visit("stream", stream);
  }
};

}  // namespace transformer_kernels
