// Launchers of dropout, addition and RMSNorm in one pass, for norm.cu.
#include "add_layer_norm_launch.h"

namespace transformer_kernels {

void add_rms_norm_forward(const NormForward& call) { launch_add_layer_norm_forward<false>(call); }
void add_rms_norm_backward(const NormBackward& call) { launch_add_layer_norm_backward<false>(call); }

}  // namespace transformer_kernels
