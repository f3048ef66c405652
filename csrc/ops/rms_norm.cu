// Launchers of RMSNorm: layer_norm_launch.h says what they are given.
#include "layer_norm_launch.h"

namespace transformer_kernels {
namespace {

constexpr auto rms_norm_forward = launch_layer_norm_forward<false>;
constexpr auto rms_norm_backward = launch_layer_norm_backward<false>;
TK_EXPORT(rms_norm_forward);
TK_EXPORT(rms_norm_backward);

}  // namespace
}  // namespace transformer_kernels
