// Launchers of bias and GELU in one pass: bias_activation_launch.h says what they are given.
#include "bias_activation_launch.h"
#include "gelu_functions.cuh"

namespace transformer_kernels {
namespace {

void bias_gelu_forward(Address x, Address bias, Address y, int64_t rows, int64_t columns, bool tanh,
                       bool bias_is_float32, int dtype, int device, Address stream) {
  const auto start = tanh ? launch_bias_forward<GeluTanh> : launch_bias_forward<GeluErf>;
  start("bias_gelu_forward", x, bias, y, rows, columns, bias_is_float32, dtype, Stream{device, stream});
}
TK_EXPORT(bias_gelu_forward);

void bias_gelu_backward(Address dy, Address x, Address bias, Address dx, Address dbias, Address partials,
                        int64_t partial_rows, int64_t rows, int64_t columns, bool tanh, bool bias_is_float32, int dtype,
                        int device, Address stream) {
  const auto start = tanh ? launch_bias_backward<GeluTanh> : launch_bias_backward<GeluErf>;
  start("bias_gelu_backward", "bias_gelu_backward_sums", dy, x, bias, dx, dbias, partials, partial_rows, rows, columns,
        bias_is_float32, dtype, Stream{device, stream});
}
TK_EXPORT(bias_gelu_backward);

}  // namespace
}  // namespace transformer_kernels
