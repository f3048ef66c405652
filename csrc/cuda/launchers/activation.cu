// The activations' entry points from Python. Each of the five has its own file, compiled in parallel.
#include "../../calls/activation.h"
#include "../../registry.h"

namespace transformer_kernels {

void gelu_forward(const ActivationForward& call);
void gelu_backward(const ActivationBackward& call);
void bias_gelu_forward(const ActivationForward& call);
void bias_gelu_backward(const ActivationBackward& call);
void bias_relu_forward(const ActivationForward& call);
void bias_relu_backward(const ActivationBackward& call);
void swiglu_forward(const ActivationForward& call);
void swiglu_backward(const ActivationBackward& call);
void geglu_forward(const ActivationForward& call);
void geglu_backward(const ActivationBackward& call);

namespace {

void activation_forward(const ActivationForward& call) {
  if (call.gated) return call.kind == SILU ? swiglu_forward(call) : geglu_forward(call);
  if (call.kind == RELU) return bias_relu_forward(call);
  return call.bias ? bias_gelu_forward(call) : gelu_forward(call);
}
TK_EXPORT(activation_forward);

void activation_backward(const ActivationBackward& call) {
  if (call.gated) return call.kind == SILU ? swiglu_backward(call) : geglu_backward(call);
  if (call.kind == RELU) return bias_relu_backward(call);
  return call.bias ? bias_gelu_backward(call) : gelu_backward(call);
}
TK_EXPORT(activation_backward);

}  // namespace
}  // namespace transformer_kernels
