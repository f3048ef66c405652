// ds, the gradient of the gathered rows, with the dropout of the forward pass undone first: with LayerNorm by its backward
// kernel over EmbeddingRows, else ds = dropout(dy) by embedding_rows_kernel.
#pragma once
#include "embedding_forward.cuh"
#include "layer_norm_backward.cuh"
