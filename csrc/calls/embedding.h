// What Python hands to the embedding kernels of a CPU and of a GPU: transformer_kernels/ops/embedding/_compiled.py
// names each field. Row i of y is dropout(LayerNorm(scale * weight[tokens[i]] + positions[position_ids[i]])):
// LayerNorm, positions and dropout are optional, and without position_ids row i has position i % length.
// An id outside its table gives NaN.
#pragma once
#include "types.h"

namespace transformer_kernels {

struct EmbeddingForward {
  int64_t dtype;  // of weight, positions, y: DTYPE_CODES
  Address weight, tokens, positions, position_ids, norm_weight, norm_bias, seed;
  double dropout_p;
  Address y, mean, rstd;  // mean, rstd (rows,) fp32, absent without LayerNorm
  int64_t rows, columns, length, vocabulary, position_count;
  double scale, eps;
  bool tokens_are_int64, position_ids_are_int64;  // else int32; on a CPU always int64
  bool weight_is_float32, bias_is_float32;  // of LayerNorm, else of `dtype`; on a CPU always float32
  int64_t device;
  Address stream;  // of a GPU

  template <class Visit> void fields(Visit&& visit) {
    visit("dtype", dtype), visit("weight", weight), visit("tokens", tokens), visit("positions", positions);
    visit("position_ids", position_ids), visit("norm_weight", norm_weight), visit("norm_bias", norm_bias);
    visit("seed", seed), visit("dropout_p", dropout_p), visit("y", y), visit("mean", mean), visit("rstd", rstd);
    visit("rows", rows), visit("columns", columns), visit("length", length), visit("vocabulary", vocabulary);
    visit("position_count", position_count), visit("scale", scale), visit("eps", eps);
    visit("tokens_are_int64", tokens_are_int64), visit("position_ids_are_int64", position_ids_are_int64);
    visit("weight_is_float32", weight_is_float32), visit("bias_is_float32", bias_is_float32);
    visit("device", device), visit("stream", stream);
  }
};

// ds, the gradient of the sum before LayerNorm, and with LayerNorm dnorm_weight and, where they are given, dnorm_bias.
// `partials`, where it is given: (2, partial_rows, columns) fp32.
struct EmbeddingBackward {
  int64_t dtype;
  Address dy, weight, tokens, positions, position_ids, norm_weight, mean, rstd, seed;
  double dropout_p;
  Address ds, dnorm_weight, dnorm_bias, partials;
  int64_t partial_rows, rows, columns, length, vocabulary, position_count;
  double scale;
  bool tokens_are_int64, position_ids_are_int64;
  bool weight_is_float32;  // and so are dnorm_weight and dnorm_bias
  int64_t device;
  Address stream;

  template <class Visit> void fields(Visit&& visit) {
    visit("dtype", dtype), visit("dy", dy), visit("weight", weight), visit("tokens", tokens);
    visit("positions", positions), visit("position_ids", position_ids), visit("norm_weight", norm_weight);
    visit("mean", mean), visit("rstd", rstd), visit("seed", seed), visit("dropout_p", dropout_p), visit("ds", ds);
    visit("dnorm_weight", dnorm_weight), visit("dnorm_bias", dnorm_bias), visit("partials", partials);
    visit("partial_rows", partial_rows), visit("rows", rows), visit("columns", columns), visit("length", length);
    visit("vocabulary", vocabulary), visit("position_count", position_count), visit("scale", scale);
    visit("tokens_are_int64", tokens_are_int64), visit("position_ids_are_int64", position_ids_are_int64);
    visit("weight_is_float32", weight_is_float32), visit("device", device), visit("stream", stream);
  }
};

}  // namespace transformer_kernels
