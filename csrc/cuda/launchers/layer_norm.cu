// Launchers of LayerNorm, for norm.cu.
#include "layer_norm_launch.h"

namespace transformer_kernels {

void layer_norm_forward(const NormForward& call) { launch_layer_norm_forward<true>(call); }
void layer_norm_backward(const NormBackward& call) { launch_layer_norm_backward<true>(call); }

}  // namespace transformer_kernels
