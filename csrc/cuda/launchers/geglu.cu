// Launchers of GEGLU, for activation.cu.
#include "gated_launch.h"

namespace transformer_kernels {

void geglu_forward(const ActivationForward& call) {
  const auto start = call.kind == GELU_TANH ? launch_gated_forward<GeluTanh> : launch_gated_forward<GeluErf>;
  start("geglu_forward", call);
}

void geglu_backward(const ActivationBackward& call) {
  const auto start = call.kind == GELU_TANH ? launch_gated_backward<GeluTanh> : launch_gated_backward<GeluErf>;
  start("geglu_backward", call);
}

}  // namespace transformer_kernels
