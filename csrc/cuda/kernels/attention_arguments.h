// The arguments of the attention kernels, which launchers/attention.cu derives from a call (csrc/calls/attention.h).
#pragma once
#include "../primitives/philox.h"

namespace transformer_kernels::attention {

template <class Pointer> struct Rows {
  Pointer data;
  int64_t batch, head, row;  // strides in elements; the last axis is contiguous
};
using Strided = Rows<const void*>;
using StridedOutput = Rows<void*>;

struct Bias {
  const void* data;                  // null: no bias
  bool is_float;                     // else of the element type of query
  bool is_slope;                     // a slope, by which the distance between query and key is multiplied
  int64_t batch, head, row, column;  // strides in elements, 0 along a broadcast axis
};

struct BiasGradient {
  void* data;                         // contiguous, of the bias's own type
  int batches, heads, rows, columns;  // its shape: the sizes of the scores, or 1
};

// Rotary positions, by which queries and keys are rotated in shared memory after they were read.
struct Angles {
  const float* cos = nullptr;  // (length, half), a row for each token; null: none are rotated
  const float* sin = nullptr;
  int64_t batch = 0;  // stride in elements, 0 where all sequences share a table
  int half = 0;       // how many pairs of columns a row has
  bool interleaved = false;
  bool vectorized = false;  // pairs and tables lie on 16 bytes
};

struct Arguments {
  Strided query, key, value, dout;
  StridedOutput out, dq, dk, dv;
  Bias bias;
  Angles angles;
  BiasGradient dbias;
  float* lse;                       // [batch, query head, query], natural log
  float* delta;                     // [batch, query head, query], rowsum(dout * out) - dlse
  float* statistics;                // [batch, query head, 2, query]: see statistics_of()
  const uint8_t* key_padding_mask;  // [batch, key], 1 = a real token, or null
  const int* cu_seqlens;            // [sequences + 1], the first token of each packed sequence and one more, or null
  Dropout dropout;
  float scale;
  float softcap;  // 0: none
  int batches, query_heads, key_heads, query_length, key_length, head_dim;
  int sequences;  // packed ones
  int left, right;  // how many keys before and after its own position a query sees; causal: right = 0
  bool vectorized;         // rows of query, key, value and dout lie on 16 bytes
  bool vectorized_output;  // rows of out, dq, dk and dv lie on 16 bytes

  // Whether anything but a positive scale happens to products or weights.
  bool has_extras() const { return bias.data || dropout.seed || scale <= 0.f || softcap > 0.f; }
  // Whether scores depend on memory besides queries and keys.
  bool reads_scores() const { return bias.data; }
};

}  // namespace transformer_kernels::attention
