// Launchers of dropout, addition and LayerNorm in one pass, for norm.cu.
#include "add_layer_norm_launch.h"

namespace transformer_kernels {

void add_layer_norm_forward(const NormForward& call) { launch_add_layer_norm_forward<true>(call); }
void add_layer_norm_backward(const NormBackward& call) { launch_add_layer_norm_backward<true>(call); }

}  // namespace transformer_kernels
