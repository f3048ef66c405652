// Launchers of cross-entropy. Shapes and dtypes were checked in Python.
#include "../dtype.h"
#include "../registry.h"
#include "cross_entropy_backward.cuh"
#include "cross_entropy_forward.cuh"

namespace transformer_kernels {
namespace {

constexpr int SUM_THREADS = 512;

template <class Layout, bool GRADIENT, class Loss, class... Arguments>
void launch_rows(int64_t rows, Stream place, Loss kind, Arguments... arguments) {
  const dim3 grid = grid_of(Layout::blocks(rows)), block(Layout::BLOCK_THREADS);
  if constexpr (Layout::HELD) {
    launch<cross_entropy_forward_kernel<Layout, GRADIENT>>("cross_entropy_forward", grid, block, Layout::SHARED_BYTES,
                                                           place, arguments...);
  } else {
    launch<cross_entropy_forward_any_width_kernel<Layout, GRADIENT, Loss>>(
        "cross_entropy_forward_any_width", grid, block, Layout::SHARED_BYTES, place, arguments..., kind);
  }
}

// Calls f(layout, loss): with options beyond smoothing in the layout for any width, whatever the width is.
template <class T, class F> void dispatch_loss(const WeightedLoss& options, int columns, bool aligned, F&& f) {
  if (!options.weights && options.z_loss == 0.0f && options.cap == 0.0f)
    return dispatch_row_layout<T>(columns, aligned, [&](auto layout) { f(layout, SmoothedLoss{}); });
  if (aligned) return f(RowLayout<T, ELEMENTS_PER_16_BYTES<T>, 0, 512>{}, options);
  return f(RowLayout<T, 1, 0, 512>{}, options);
}

// logits (rows, classes), rows `stride` elements apart; targets, losses (rows). statistics (2, rows), or 0: then the
// gradient of the sum of losses is written over the logits. weights (classes + 1), behind them their mean, or 0.
void cross_entropy_forward(Address logits, Address targets, Address losses, Address statistics, int64_t rows,
                           int64_t classes, int64_t stride, int64_t ignore_index, double smoothing, Address weights,
                           double z_loss, double cap, int dtype, int device, Address stream) {
  const int apart = row_length(stride);
  const WeightedLoss options{pointer<const float>(weights), static_cast<float>(z_loss), static_cast<float>(cap)};
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    T* values = pointer<T>(logits);
    dispatch_loss<T>(options, apart, all_aligned<T>(apart, values), [&](auto layout, auto kind) {
      using Layout = decltype(layout);
      const auto start = [&](auto gradient) {
        launch_rows<Layout, decltype(gradient)::value>(
            rows, Stream{device, stream}, kind, values, pointer<const int64_t>(targets), pointer<float>(losses),
            pointer<float>(statistics), rows, static_cast<int>(classes), apart, ignore_index,
            static_cast<float>(smoothing));
      };
      statistics ? start(std::false_type{}) : start(std::true_type{});
    });
  });
}
TK_EXPORT(cross_entropy_forward);

// losses, targets (rows); loss and count are single numbers, count 0 for the sum.
void cross_entropy_sum(Address losses, Address targets, Address loss, Address count, int64_t rows,
                       int64_t ignore_index, int device, Address stream) {
  launch<sum_losses_kernel<SUM_THREADS>>("cross_entropy_sum", dim3(1), dim3(SUM_THREADS),
                                         shared_bytes_after<float>(2 * SUM_THREADS / WARP_SIZE),
                                         Stream{device, stream}, pointer<const float>(losses),
                                         pointer<const int64_t>(targets), pointer<float>(loss), pointer<float>(count),
                                         rows, ignore_index);
}
TK_EXPORT(cross_entropy_sum);

// logits, dlogits (rows, classes) contiguous; dloss (rows) or one number; count 0 unless it divides dloss.
void cross_entropy_backward(Address dloss, bool dloss_of_each_row, Address logits, Address targets, Address statistics,
                            Address count, Address dlogits, int64_t rows, int64_t classes, int64_t ignore_index,
                            double smoothing, Address weights, double z_loss, double cap, int dtype, int device,
                            Address stream) {
  const int n = row_length(classes);
  const WeightedLoss options{pointer<const float>(weights), static_cast<float>(z_loss), static_cast<float>(cap)};
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* values = pointer<const T>(logits);
    T* result = pointer<T>(dlogits);
    dispatch_loss<T>(options, n, all_aligned<T>(n, values, result), [&](auto layout, auto kind) {
      using Layout = decltype(layout);
      launch<cross_entropy_backward_kernel<Layout, decltype(kind)>>(
          "cross_entropy_backward", grid_of(Layout::blocks(rows)), dim3(Layout::BLOCK_THREADS), 0,
          Stream{device, stream}, pointer<const float>(dloss), dloss_of_each_row, values,
          pointer<const int64_t>(targets), pointer<const float>(statistics), pointer<const float>(count), result, rows,
          n, ignore_index, static_cast<float>(smoothing), kind);
    });
  });
}
TK_EXPORT(cross_entropy_backward);

}  // namespace
}  // namespace transformer_kernels
