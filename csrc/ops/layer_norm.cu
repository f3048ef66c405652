// Launchers of LayerNorm: layer_norm_launch.h says what they are given.
#include "layer_norm_launch.h"

namespace transformer_kernels {
namespace {

constexpr auto layer_norm_forward = launch_layer_norm_forward<true>;
constexpr auto layer_norm_backward = launch_layer_norm_backward<true>;
TK_EXPORT(layer_norm_forward);
TK_EXPORT(layer_norm_backward);

}  // namespace
}  // namespace transformer_kernels
