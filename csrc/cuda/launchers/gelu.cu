// Launchers of GELU, for activation.cu. Shapes and dtypes were checked in Python.
#include "../../calls/activation.h"
#include "../../registry.h"
#include "../kernels/gelu_backward.cuh"
#include "../kernels/gelu_forward.cuh"

namespace transformer_kernels {
namespace {

// Calls f(Type<T>, Type<Function>, whether 16-byte vectors are allowed as a constant).
template <class F> void dispatch_gelu(int dtype, bool tanh, bool aligned, F&& f) {
  dispatch_dtype(dtype, [&](auto type) {
    if (tanh && aligned) return f(type, Type<GeluTanh>{}, std::true_type{});
    if (tanh) return f(type, Type<GeluTanh>{}, std::false_type{});
    if (aligned) return f(type, Type<GeluErf>{}, std::true_type{});
    return f(type, Type<GeluErf>{}, std::false_type{});
  });
}

dim3 gelu_grid(int64_t count, int vector) {
  return grid_of(ceil_div(count, static_cast<int64_t>(GELU_THREADS) * vector));
}

}  // namespace

void gelu_forward(const ActivationForward& call) {
  const int64_t count = call.rows * call.columns;
  dispatch_gelu(call.dtype, call.kind == GELU_TANH, (call.x | call.y) % 16 == 0,
                [&](auto type, auto function, auto aligned) {
    using T = typename decltype(type)::type;
    using Function = typename decltype(function)::type;
    constexpr int V = decltype(aligned)::value ? ELEMENTS_PER_16_BYTES<T> : 1;
    launch<gelu_forward_kernel<Function, T, V>>("gelu_forward", gelu_grid(count, V), dim3(GELU_THREADS), 0,
                                                stream_of(call), pointer<const T>(call.x), pointer<T>(call.y), count);
  });
}

void gelu_backward(const ActivationBackward& call) {
  const int64_t count = call.rows * call.columns;
  dispatch_gelu(call.dtype, call.kind == GELU_TANH, (call.dy | call.x | call.dx) % 16 == 0,
                [&](auto type, auto function, auto aligned) {
    using T = typename decltype(type)::type;
    using Function = typename decltype(function)::type;
    constexpr int V = decltype(aligned)::value ? ELEMENTS_PER_16_BYTES<T> : 1;
    launch<gelu_backward_kernel<Function, T, V>>("gelu_backward", gelu_grid(count, V), dim3(GELU_THREADS), 0,
                                                 stream_of(call), pointer<const T>(call.dy), pointer<const T>(call.x),
                                                 pointer<T>(call.dx), count);
  });
}

}  // namespace transformer_kernels
