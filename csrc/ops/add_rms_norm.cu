// Launchers of dropout, addition and RMSNorm in one pass: add_layer_norm_launch.h says what they are given.
#include "add_layer_norm_launch.h"

namespace transformer_kernels {
namespace {

constexpr auto add_rms_norm_forward = launch_add_layer_norm_forward<false>;
constexpr auto add_rms_norm_backward = launch_add_layer_norm_backward<false>;
TK_EXPORT(add_rms_norm_forward);
TK_EXPORT(add_rms_norm_backward);

}  // namespace
}  // namespace transformer_kernels
