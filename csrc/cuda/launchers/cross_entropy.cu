// Launchers of cross-entropy. Shapes and dtypes were checked in Python.
#include "../../calls/loss.h"
#include "../dtype.h"
#include "../../registry.h"
#include "../kernels/cross_entropy_backward.cuh"
#include "../kernels/cross_entropy_forward.cuh"

namespace transformer_kernels {
namespace {

constexpr int SUM_THREADS = 512;

template <class Layout, bool GRADIENT, class Loss, class... Arguments>
void launch_rows(int64_t rows, Stream stream, Loss kind, Arguments... arguments) {
  const dim3 grid = grid_of(Layout::blocks(rows)), block(Layout::BLOCK_THREADS);
  if constexpr (Layout::IN_REGISTERS) {
    launch<cross_entropy_forward_kernel<Layout, GRADIENT>>("cross_entropy_forward", grid, block, Layout::SHARED_BYTES,
                                                           stream, arguments...);
  } else {
    launch<cross_entropy_forward_any_width_kernel<Layout, GRADIENT, Loss>>(
        "cross_entropy_forward_any_width", grid, block, Layout::SHARED_BYTES, stream, arguments..., kind);
  }
}

// Calls f(layout, loss); options other than smoothing always use the layout for any width.
template <class T, class F> void dispatch_loss(const WeightedLoss& options, int columns, bool aligned, F&& f) {
  if (!options.weights && options.z_loss == 0.0f && options.cap == 0.0f)
    return dispatch_row_layout<T>(columns, aligned, [&](auto layout) { f(layout, SmoothedLoss{}); });
  if (aligned) return f(RowLayout<T, ELEMENTS_PER_16_BYTES<T>, 0, 512>{}, options);
  return f(RowLayout<T, 1, 0, 512>{}, options);
}

template <class Call> WeightedLoss options_of(const Call& call) {
  return {pointer<const float>(call.weights), static_cast<float>(call.z_loss), static_cast<float>(call.softcap)};
}

void cross_entropy_forward(const CrossEntropyForward& call) {
  if (call.count || (call.dlogits && call.dlogits != call.logits))
    throw std::invalid_argument("cross_entropy_forward: on a GPU dlogits must be the logits, and count absent");
  const int stride = row_length(call.stride);
  dispatch_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    T* logits = pointer<T>(call.logits);
    dispatch_loss<T>(options_of(call), stride, all_aligned<T>(stride, logits), [&](auto layout, auto kind) {
      using Layout = decltype(layout);
      const auto start = [&](auto gradient) {
        launch_rows<Layout, decltype(gradient)::value>(
            call.rows, stream_of(call), kind, logits, pointer<const int64_t>(call.targets), pointer<float>(call.losses),
            pointer<float>(call.statistics), call.rows, static_cast<int>(call.classes), stride, call.ignore_index,
            static_cast<float>(call.smoothing));
      };
      call.dlogits ? start(std::true_type{}) : start(std::false_type{});
    });
  });
}
TK_EXPORT(cross_entropy_forward);

void cross_entropy_sum(const CrossEntropySum& call) {
  launch<sum_losses_kernel<SUM_THREADS>>(
      "cross_entropy_sum", dim3(1), dim3(SUM_THREADS), shared_bytes_after<float>(2 * SUM_THREADS / WARP_SIZE),
      stream_of(call), pointer<const float>(call.losses), pointer<const int64_t>(call.targets),
      pointer<float>(call.loss), pointer<float>(call.count), call.rows, call.ignore_index);
}
TK_EXPORT(cross_entropy_sum);

void cross_entropy_backward(const CrossEntropyBackward& call) {
  const int n = row_length(call.classes);
  dispatch_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* values = pointer<const T>(call.logits);
    T* result = pointer<T>(call.dlogits);
    dispatch_loss<T>(options_of(call), n, all_aligned<T>(n, values, result), [&](auto layout, auto kind) {
      using Layout = decltype(layout);
      launch<cross_entropy_backward_kernel<Layout, decltype(kind)>>(
          "cross_entropy_backward", grid_of(Layout::blocks(call.rows)), dim3(Layout::BLOCK_THREADS), 0, stream_of(call),
          pointer<const float>(call.dloss), call.dloss_of_each_row, values, pointer<const int64_t>(call.targets),
          pointer<const float>(call.statistics), pointer<const float>(call.count), result, call.rows, n,
          call.ignore_index, static_cast<float>(call.smoothing), kind);
    });
  });
}
TK_EXPORT(cross_entropy_backward);

}  // namespace
}  // namespace transformer_kernels
