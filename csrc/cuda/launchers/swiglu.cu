// Launchers of SwiGLU, for activation.cu.
#include "gated_launch.h"
#include "../kernels/silu_functions.cuh"

namespace transformer_kernels {

void swiglu_forward(const ActivationForward& call) { launch_gated_forward<Silu>("swiglu_forward", call); }
void swiglu_backward(const ActivationBackward& call) { launch_gated_backward<Silu>("swiglu_backward", call); }

}  // namespace transformer_kernels
