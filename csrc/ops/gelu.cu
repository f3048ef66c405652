// Launchers of GELU. Shapes and dtypes were checked in Python.
#include "../registry.h"
#include "gelu_backward.cuh"
#include "gelu_forward.cuh"

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

void gelu_forward(Address x, Address y, int64_t count, bool tanh, int dtype, int device, Address stream) {
  dispatch_gelu(dtype, tanh, (x | y) % 16 == 0, [&](auto type, auto function, auto aligned) {
    using T = typename decltype(type)::type;
    using Function = typename decltype(function)::type;
    constexpr int V = decltype(aligned)::value ? ELEMENTS_PER_16_BYTES<T> : 1;
    launch<gelu_forward_kernel<Function, T, V>>("gelu_forward", gelu_grid(count, V), dim3(GELU_THREADS), 0,
                                                Stream{device, stream}, pointer<const T>(x), pointer<T>(y), count);
  });
}
TK_EXPORT(gelu_forward);

void gelu_backward(Address dy, Address x, Address dx, int64_t count, bool tanh, int dtype, int device, Address stream) {
  dispatch_gelu(dtype, tanh, (dy | x | dx) % 16 == 0, [&](auto type, auto function, auto aligned) {
    using T = typename decltype(type)::type;
    using Function = typename decltype(function)::type;
    constexpr int V = decltype(aligned)::value ? ELEMENTS_PER_16_BYTES<T> : 1;
    launch<gelu_backward_kernel<Function, T, V>>("gelu_backward", gelu_grid(count, V), dim3(GELU_THREADS), 0,
                                                 Stream{device, stream}, pointer<const T>(dy), pointer<const T>(x),
                                                 pointer<T>(dx), count);
  });
}
TK_EXPORT(gelu_backward);

}  // namespace
}  // namespace transformer_kernels
