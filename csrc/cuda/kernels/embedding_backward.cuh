// ds, the gradient of the gathered rows: with LayerNorm its backward kernel over EmbeddingRows, applied to dropout(dy),
// else ds = dropout(dy) by embedding_rows_kernel.
#pragma once
#include "embedding_forward.cuh"
#include "layer_norm_backward.cuh"
