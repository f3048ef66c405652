// Launchers of SwiGLU: gated_launch.h says what they are given.
#include "gated_launch.h"
#include "silu_functions.cuh"

namespace transformer_kernels {
namespace {

void swiglu_forward(int dtype, int device, Address stream, Address gate, Address up, Address y, int64_t rows,
                    int64_t columns) {
  launch_gated_forward<Silu>("swiglu_forward", gate, up, y, rows, columns, dtype, Stream{device, stream});
}
TK_EXPORT(swiglu_forward);

void swiglu_backward(int dtype, int device, Address stream, Address dy, Address gate, Address up, Address dgate,
                     Address dup, int64_t rows, int64_t columns) {
  launch_gated_backward<Silu>("swiglu_backward", dy, gate, up, dgate, dup, rows, columns, dtype, Stream{device, stream});
}
TK_EXPORT(swiglu_backward);

}  // namespace
}  // namespace transformer_kernels
