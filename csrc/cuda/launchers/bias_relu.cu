// Launchers of bias and ReLU in one pass, for activation.cu.
#include "bias_activation_launch.h"
#include "../kernels/relu_functions.cuh"

namespace transformer_kernels {

void bias_relu_forward(const ActivationForward& call) { launch_bias_forward<Relu>("bias_relu_forward", call); }

void bias_relu_backward(const ActivationBackward& call) {
  launch_bias_backward<Relu>("bias_relu_backward", "bias_relu_backward_sums", call);
}

}  // namespace transformer_kernels
