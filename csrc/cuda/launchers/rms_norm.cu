// Launchers of RMSNorm, for norm.cu.
#include "layer_norm_launch.h"

namespace transformer_kernels {

void rms_norm_forward(const NormForward& call) { launch_layer_norm_forward<false>(call); }
void rms_norm_backward(const NormBackward& call) { launch_layer_norm_backward<false>(call); }

}  // namespace transformer_kernels
