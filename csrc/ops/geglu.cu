// Launchers of GEGLU: gated_launch.h says what they are given.
#include "gated_launch.h"

namespace transformer_kernels {
namespace {

void geglu_forward(bool tanh, int dtype, int device, Address stream, Address gate, Address up, Address y, int64_t rows,
                   int64_t columns) {
  const auto start = tanh ? launch_gated_forward<GeluTanh> : launch_gated_forward<GeluErf>;
  start("geglu_forward", gate, up, y, rows, columns, dtype, Stream{device, stream});
}
TK_EXPORT(geglu_forward);

void geglu_backward(bool tanh, int dtype, int device, Address stream, Address dy, Address gate, Address up, Address dgate,
                    Address dup, int64_t rows, int64_t columns) {
  const auto start = tanh ? launch_gated_backward<GeluTanh> : launch_gated_backward<GeluErf>;
  start("geglu_backward", dy, gate, up, dgate, dup, rows, columns, dtype, Stream{device, stream});
}
TK_EXPORT(geglu_backward);

}  // namespace
}  // namespace transformer_kernels
