// The norms' entry points from Python. Each of the four has its own file, compiled in parallel.
#include "../../calls/norm.h"
#include "../../registry.h"

namespace transformer_kernels {

void layer_norm_forward(const NormForward& call);
void layer_norm_backward(const NormBackward& call);
void rms_norm_forward(const NormForward& call);
void rms_norm_backward(const NormBackward& call);
void add_layer_norm_forward(const NormForward& call);
void add_layer_norm_backward(const NormBackward& call);
void add_rms_norm_forward(const NormForward& call);
void add_rms_norm_backward(const NormBackward& call);

namespace {

void norm_forward(const NormForward& call) {
  if (call.residual) return call.mean ? add_layer_norm_forward(call) : add_rms_norm_forward(call);
  return call.mean ? layer_norm_forward(call) : rms_norm_forward(call);
}
TK_EXPORT(norm_forward);

void norm_backward(const NormBackward& call) {
  if (call.added) return call.mean ? add_layer_norm_backward(call) : add_rms_norm_backward(call);
  return call.mean ? layer_norm_backward(call) : rms_norm_backward(call);
}
TK_EXPORT(norm_backward);

}  // namespace
}  // namespace transformer_kernels
