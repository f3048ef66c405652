// attention: what Python calls. Tensors were checked there; here come the limits of these kernels.
#include "../build_info.h"
#include "../dtype.h"
#include "../registry.h"
#include "attention_launch.h"

namespace transformer_kernels {
namespace {

using namespace attention;

constexpr int64_t MAX_LENGTH = 1 << 29;  // so that sums of lengths, tiles and windows stay within int

template <class Tensor> bool is_aligned(const Tensor& tensor, int64_t element_bytes) {
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 && tensor.batch * element_bytes % 16 == 0 &&
         tensor.head * element_bytes % 16 == 0 && tensor.row * element_bytes % 16 == 0;
}

Strided strided(Address address, int64_t batch, int64_t head, int64_t row) {
  return {pointer<const void>(address), batch, head, row};
}

StridedOutput strided_output(Address address, int64_t batch, int64_t head, int64_t row) {
  return {pointer<void>(address), batch, head, row};
}

Arguments common_arguments(int64_t batches, int64_t query_heads, int64_t key_heads, int64_t query_length,
                           int64_t key_length, int64_t head_dim, Address mask, Address cu_seqlens, int64_t sequences,
                           Address bias, bool bias_is_float, int64_t bias_batch, int64_t bias_head, int64_t bias_row,
                           int64_t bias_column, Address seed, double dropout_p, double scale, bool causal,
                           int64_t window) {
  if (query_length > MAX_LENGTH || key_length > MAX_LENGTH)
    throw std::invalid_argument("attention: the cuda backend takes sequences of up to 536870912");
  Arguments arguments{};
  arguments.batches = static_cast<int>(batches);
  arguments.query_heads = static_cast<int>(query_heads);
  arguments.key_heads = static_cast<int>(key_heads);
  arguments.query_length = static_cast<int>(query_length);
  arguments.key_length = static_cast<int>(key_length);
  arguments.head_dim = static_cast<int>(head_dim);
  arguments.key_padding_mask = pointer<const uint8_t>(mask);
  arguments.cu_seqlens = pointer<const int>(cu_seqlens);
  arguments.sequences = static_cast<int>(sequences);
  arguments.bias = {pointer<const void>(bias), bias_batch, bias_head, bias_row, bias_column, bias_is_float};
  arguments.dropout = make_dropout(pointer<const void>(seed), dropout_p);
  arguments.scale = static_cast<float>(scale);
  arguments.causal = causal;
  arguments.window = static_cast<int>(std::min(window, query_length + key_length));
  return arguments;
}

// Which kernels: the fastest that take the call, or for tests and benchmarks one family by name.
enum class Path { AUTOMATIC = 0, GENERAL = 1, SHORT = 2, SM90 = 3 };

bool takes_short(const Arguments& arguments, int path) {
  const bool fits = arguments.head_dim <= 64 && arguments.key_length <= 256 && arguments.query_length <= 256 &&
                    !arguments.grad_bias.data && !arguments.cu_seqlens;
  if (static_cast<Path>(path) == Path::SHORT && !fits)
    throw std::invalid_argument(
        "attention: the short kernels take up to 256 queries and keys that are not packed, and head dimensions up to "
        "64");
  return fits && (static_cast<Path>(path) == Path::AUTOMATIC || static_cast<Path>(path) == Path::SHORT);
}

// The copy engine wants addresses and strides on 16 bytes and, to be safe, no axis that overlaps itself.
bool takes_sm90(const Arguments& arguments, int path, int device) {
  const auto is_plain = [](const Strided& tensor) { return tensor.row > 0 && tensor.head > 0 && tensor.batch > 0; };
  const bool fits = arguments.vectorized && (arguments.head_dim == 64 || arguments.head_dim == 128) &&
                    !arguments.bias.data && !arguments.dropout.seed && arguments.scale > 0.f &&
                    is_plain(arguments.query) && is_plain(arguments.key) && is_plain(arguments.value);
  if (static_cast<Path>(path) == Path::SM90) {
    if (!fits) throw std::invalid_argument("attention: the sm90 kernels do not take this call");
    return true;
  }
  if (!fits || static_cast<Path>(path) != Path::AUTOMATIC || architecture(device) != 90) return false;
  static const bool built = std::string(architectures()).find("sm_90a") != std::string::npos;
  return built || std::string(architectures()) == "emulated";
}

// Rows on 16 bytes are copied and written in pieces of 16 bytes, others element by element.
template <class... Tensors> bool can_vectorize(int dtype, int head_dim, const Tensors&... tensors) {
  const int64_t bytes = static_cast<DType>(dtype) == DType::FLOAT32 ? 4 : 2;
  return head_dim * bytes % 16 == 0 && (is_aligned(tensors, bytes) && ...);
}

void attention_forward(int dtype, Address query, int64_t query_batch, int64_t query_head, int64_t query_row,
                       Address key, int64_t key_batch, int64_t key_head, int64_t key_row, Address value,
                       int64_t value_batch, int64_t value_head, int64_t value_row, Address out, int64_t out_batch,
                       int64_t out_head, int64_t out_row, Address lse, int64_t batches, int64_t query_heads,
                       int64_t key_heads, int64_t query_length, int64_t key_length, int64_t head_dim, Address mask,
                       Address cu_seqlens, int64_t sequences, Address bias, bool bias_is_float, int64_t bias_batch,
                       int64_t bias_head, int64_t bias_row, int64_t bias_column, Address seed, double dropout_p,
                       double scale, bool causal, int64_t window, int device, Address stream, int path) {
  Arguments arguments = common_arguments(batches, query_heads, key_heads, query_length, key_length, head_dim, mask,
                                         cu_seqlens, sequences, bias, bias_is_float, bias_batch, bias_head, bias_row,
                                         bias_column, seed, dropout_p, scale, causal, window);
  arguments.query = strided(query, query_batch, query_head, query_row);
  arguments.key = strided(key, key_batch, key_head, key_row);
  arguments.value = strided(value, value_batch, value_head, value_row);
  arguments.out = strided_output(out, out_batch, out_head, out_row);
  arguments.lse = pointer<float>(lse);
  arguments.vectorized = can_vectorize(dtype, arguments.head_dim, arguments.query, arguments.key, arguments.value);
  arguments.vectorized_output = can_vectorize(dtype, arguments.head_dim, arguments.out);
  const Stream place{device, static_cast<uintptr_t>(stream)};
  dispatch_dtype(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    if constexpr (sizeof(T) == 2) {
      if (takes_short(arguments, path)) return launch_short_forward<T>(arguments, place);
      if (takes_sm90(arguments, path, device)) return launch_forward_sm90<T>(arguments, place);
    }
    launch_forward<T>(arguments, place);
  });
}
TK_EXPORT(attention_forward);

void attention_backward(int dtype, Address grad_out, int64_t grad_out_batch, int64_t grad_out_head,
                        int64_t grad_out_row, Address grad_lse, Address query, int64_t query_batch, int64_t query_head,
                        int64_t query_row, Address key, int64_t key_batch, int64_t key_head, int64_t key_row,
                        Address value, int64_t value_batch, int64_t value_head, int64_t value_row, Address out,
                        int64_t out_batch, int64_t out_head, int64_t out_row, Address lse, Address delta,
                        Address grad_query, int64_t grad_query_batch, int64_t grad_query_head, int64_t grad_query_row,
                        Address grad_key, int64_t grad_key_batch, int64_t grad_key_head, int64_t grad_key_row,
                        Address grad_value, int64_t grad_value_batch, int64_t grad_value_head, int64_t grad_value_row,
                        Address grad_bias, int64_t bias_batches, int64_t bias_heads, int64_t bias_rows,
                        int64_t bias_columns, int64_t batches, int64_t query_heads, int64_t key_heads,
                        int64_t query_length, int64_t key_length, int64_t head_dim, Address mask, Address cu_seqlens,
                        int64_t sequences, Address bias, bool bias_is_float, int64_t bias_batch, int64_t bias_head,
                        int64_t bias_row, int64_t bias_column, Address seed, double dropout_p, double scale,
                        bool causal, int64_t window, int device, Address stream, int path) {
  Arguments arguments = common_arguments(batches, query_heads, key_heads, query_length, key_length, head_dim, mask,
                                         cu_seqlens, sequences, bias, bias_is_float, bias_batch, bias_head, bias_row,
                                         bias_column, seed, dropout_p, scale, causal, window);
  arguments.query = strided(query, query_batch, query_head, query_row);
  arguments.key = strided(key, key_batch, key_head, key_row);
  arguments.value = strided(value, value_batch, value_head, value_row);
  arguments.grad_out = strided(grad_out, grad_out_batch, grad_out_head, grad_out_row);
  arguments.out = {pointer<void>(out), out_batch, out_head, out_row};
  arguments.grad_query = strided_output(grad_query, grad_query_batch, grad_query_head, grad_query_row);
  arguments.grad_key = strided_output(grad_key, grad_key_batch, grad_key_head, grad_key_row);
  arguments.grad_value = strided_output(grad_value, grad_value_batch, grad_value_head, grad_value_row);
  arguments.grad_bias = {pointer<void>(grad_bias), static_cast<int>(bias_batches), static_cast<int>(bias_heads),
                         static_cast<int>(bias_rows), static_cast<int>(bias_columns)};
  arguments.lse = pointer<float>(lse);
  arguments.delta = pointer<float>(delta);
  arguments.vectorized =
      can_vectorize(dtype, arguments.head_dim, arguments.query, arguments.key, arguments.value, arguments.grad_out);
  arguments.vectorized_output =
      can_vectorize(dtype, arguments.head_dim, arguments.grad_query, arguments.grad_key, arguments.grad_value);
  const Stream place{device, static_cast<uintptr_t>(stream)};
  const float* lse_gradient = pointer<const float>(grad_lse);
  dispatch_dtype(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    if constexpr (sizeof(T) == 2) {
      if (takes_short(arguments, path)) return launch_short_backward<T>(arguments, lse_gradient, place);
    }
    launch_backward<T>(arguments, lse_gradient, place);
  });
}
TK_EXPORT(attention_backward);

}  // namespace
}  // namespace transformer_kernels
