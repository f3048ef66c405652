// Launchers of softmax. Shapes, strides and dtypes were checked in Python.
#include "../dtype.h"
#include "../registry.h"
#include "softmax_backward.cuh"
#include "softmax_forward.cuh"

namespace transformer_kernels {
namespace {

// x, y (rows, columns) contiguous. mask: 0, or bytes of shape (size0, size1, size2, columns) with these strides.
// queries: 0, or the rows of one causal matrix.
void softmax_forward(Address x, Address y, Address mask, int64_t size0, int64_t size1, int64_t size2, int64_t stride0,
                     int64_t stride1, int64_t stride2, int64_t stride3, int64_t queries, int64_t rows, int64_t columns,
                     double scale, int dtype, int device, Address stream) {
  const int n = row_length(columns);
  SoftmaxMask seen{pointer<const uint8_t>(mask), {size0, size1, size2}, {stride0, stride1, stride2, stride3},
                   stride3 == 1 && (mask | stride0 | stride1 | stride2) % 8 == 0, queries > 0, queries};
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* input = pointer<const T>(x);
    T* output = pointer<T>(y);
    dispatch_row_layout<T>(n, all_aligned<T>(n, input, output), [&](auto layout) {
      using Layout = decltype(layout);
      const dim3 grid = grid_of(Layout::blocks(rows)), block(Layout::BLOCK_THREADS);
      const Stream place{device, stream};
      if constexpr (Layout::HELD) {
        launch<softmax_forward_kernel<Layout>>("softmax_forward", grid, block, Layout::SHARED_BYTES, place, input,
                                               output, rows, n, seen, static_cast<float>(scale));
      } else {
        launch<softmax_forward_any_width_kernel<Layout>>("softmax_forward_any_width", grid, block,
                                                         Layout::SHARED_BYTES, place, input, output, n, seen,
                                                         static_cast<float>(scale));
      }
    });
  });
}
TK_EXPORT(softmax_forward);

void softmax_backward(Address dy, Address y, Address dx, int64_t rows, int64_t columns, double scale, int dtype,
                      int device, Address stream) {
  const int n = row_length(columns);
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T *gradient = pointer<const T>(dy), *output = pointer<const T>(y);
    T* result = pointer<T>(dx);
    dispatch_row_layout<T>(n, all_aligned<T>(n, gradient, output, result), [&](auto layout) {
      using Layout = decltype(layout);
      launch<softmax_backward_kernel<Layout>>("softmax_backward", grid_of(Layout::blocks(rows)),
                                              dim3(Layout::BLOCK_THREADS), Layout::SHARED_BYTES,
                                              Stream{device, stream}, gradient, output, result, rows, n,
                                              static_cast<float>(scale));
    });
  });
}
TK_EXPORT(softmax_backward);

}  // namespace
}  // namespace transformer_kernels
