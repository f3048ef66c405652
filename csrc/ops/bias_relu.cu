// Launchers of bias and ReLU in one pass: bias_activation_launch.h says what they are given.
#include "bias_activation_launch.h"
#include "relu_functions.cuh"

namespace transformer_kernels {
namespace {

void bias_relu_forward(Address x, Address bias, Address y, int64_t rows, int64_t columns, bool bias_is_float32,
                       int dtype, int device, Address stream) {
  launch_bias_forward<Relu>("bias_relu_forward", x, bias, y, rows, columns, bias_is_float32, dtype,
                            Stream{device, stream});
}
TK_EXPORT(bias_relu_forward);

void bias_relu_backward(Address dy, Address y, Address dx, Address dbias, Address partials, int64_t partial_rows,
                        int64_t rows, int64_t columns, bool bias_is_float32, int dtype, int device, Address stream) {
  launch_bias_backward<Relu>("bias_relu_backward", "bias_relu_backward_sums", dy, y, Address{0}, dx, dbias, partials,
                             partial_rows, rows, columns, bias_is_float32, dtype, Stream{device, stream});
}
TK_EXPORT(bias_relu_backward);

}  // namespace
}  // namespace transformer_kernels
