// Launchers of softmax. Shapes, strides and dtypes were checked in Python.
#include "../../calls/softmax.h"
#include "../dtype.h"
#include "../../registry.h"
#include "../kernels/softmax_backward.cuh"
#include "../kernels/softmax_forward.cuh"

namespace transformer_kernels {
namespace {

void softmax_forward(const SoftmaxForward& call) {
  const int n = row_length(call.columns);
  const auto& [sizes] = call.mask_sizes;
  const auto& [strides] = call.mask_strides;
  const bool vectors = strides[3] == 1 && (call.mask | strides[0] | strides[1] | strides[2]) % 8 == 0;
  const SoftmaxMask mask{pointer<const uint8_t>(call.mask),
                         {sizes[0], sizes[1], sizes[2]},
                         {strides[0], strides[1], strides[2], strides[3]},
                         vectors,
                         call.causal_rows > 0,
                         call.causal_rows};
  dispatch_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* input = pointer<const T>(call.x);
    T* output = pointer<T>(call.y);
    dispatch_row_layout<T>(n, all_aligned<T>(n, input, output), [&](auto layout) {
      using Layout = decltype(layout);
      const dim3 grid = grid_of(Layout::blocks(call.rows)), block(Layout::BLOCK_THREADS);
      const Stream stream = stream_of(call);
      if constexpr (Layout::IN_REGISTERS) {
        launch<softmax_forward_kernel<Layout>>("softmax_forward", grid, block, Layout::SHARED_BYTES, stream, input,
                                               output, call.rows, n, mask, static_cast<float>(call.scale));
      } else {
        launch<softmax_forward_any_width_kernel<Layout>>("softmax_forward_any_width", grid, block, Layout::SHARED_BYTES,
                                                         stream, input, output, n, mask,
                                                         static_cast<float>(call.scale));
      }
    });
  });
}
TK_EXPORT(softmax_forward);

void softmax_backward(const SoftmaxBackward& call) {
  const int n = row_length(call.columns);
  dispatch_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T *gradient = pointer<const T>(call.dy), *output = pointer<const T>(call.y);
    T* result = pointer<T>(call.dx);
    dispatch_row_layout<T>(n, all_aligned<T>(n, gradient, output, result), [&](auto layout) {
      using Layout = decltype(layout);
      launch<softmax_backward_kernel<Layout>>("softmax_backward", grid_of(Layout::blocks(call.rows)),
                                              dim3(Layout::BLOCK_THREADS), Layout::SHARED_BYTES, stream_of(call),
                                              gradient, output, result, call.rows, n, static_cast<float>(call.scale));
    });
  });
}
TK_EXPORT(softmax_backward);

}  // namespace
}  // namespace transformer_kernels
