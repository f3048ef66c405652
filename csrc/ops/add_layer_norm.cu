// Launchers of dropout, addition and LayerNorm in one pass: add_layer_norm_launch.h says what they are given.
#include "add_layer_norm_launch.h"

namespace transformer_kernels {
namespace {

constexpr auto add_layer_norm_forward = launch_add_layer_norm_forward<true>;
constexpr auto add_layer_norm_backward = launch_add_layer_norm_backward<true>;
TK_EXPORT(add_layer_norm_forward);
TK_EXPORT(add_layer_norm_backward);

}  // namespace
}  // namespace transformer_kernels
