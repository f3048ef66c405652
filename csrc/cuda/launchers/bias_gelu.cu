// Launchers of bias and GELU in one pass, for activation.cu.
#include "bias_activation_launch.h"
#include "../kernels/gelu_functions.cuh"

namespace transformer_kernels {

void bias_gelu_forward(const ActivationForward& call) {
  const auto start = call.kind == GELU_TANH ? launch_bias_forward<GeluTanh> : launch_bias_forward<GeluErf>;
  start("bias_gelu_forward", call);
}

void bias_gelu_backward(const ActivationBackward& call) {
  const auto start = call.kind == GELU_TANH ? launch_bias_backward<GeluTanh> : launch_bias_backward<GeluErf>;
  start("bias_gelu_backward", "bias_gelu_backward_sums", call);
}

}  // namespace transformer_kernels
