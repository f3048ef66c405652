// What the attention kernels are told.
#pragma once
#include "../primitives/philox.h"

namespace transformer_kernels::attention {

struct Strided {
  const void* data;
  int64_t batch, head, row;  // strides in elements; the last axis is contiguous
};

struct StridedOutput {
  void* data;
  int64_t batch, head, row;
};

struct Bias {
  const void* data;                  // null: no bias
  int64_t batch, head, row, column;  // strides in elements, 0 along a broadcast axis
  bool is_float;                     // else of the element type of query
};

struct BiasGradient {
  void* data;                         // contiguous, of the bias's own type
  int batches, heads, rows, columns;  // its shape: each that of the scores, or 1
};

struct Arguments {
  Strided query, key, value, grad_out;
  StridedOutput out, grad_query, grad_key, grad_value;
  Bias bias;
  BiasGradient grad_bias;
  float* lse;                       // [batch, query head, query], natural log
  float* delta;                     // [batch, query head, query], rowsum(grad_out * out) - grad_lse
  const uint8_t* key_padding_mask;  // [batch, key], 1 = a real token, or null
  const int* cu_seqlens;            // [sequences + 1], the first token of each packed sequence and one more, or null
  Dropout dropout;
  float scale;
  int batches, query_heads, key_heads, query_length, key_length, head_dim;
  int sequences;  // packed ones
  int window;     // 0: none
  bool causal;
  bool vectorized;         // rows of query, key, value and grad_out lie on 16 bytes
  bool vectorized_output;  // and so do those of what is written
};

}  // namespace transformer_kernels::attention
