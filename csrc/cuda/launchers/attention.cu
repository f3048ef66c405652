// attention's entry points from Python, which has checked the tensors; limits of these kernels are checked here.
#include "../build_info.h"
#include "../../calls/attention.h"
#include "../dtype.h"
#include "../primitives/memory.h"
#include "../../registry.h"
#include "../kernels/attention_launch.h"

namespace transformer_kernels {
namespace {

using namespace attention;

constexpr int64_t MAX_LENGTH = 1 << 29;  // sums of lengths, tiles and windows fit an int

template <class Tensor> bool is_aligned(const Tensor& tensor, int64_t element_bytes) {
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 && tensor.batch * element_bytes % 16 == 0 &&
         tensor.head * element_bytes % 16 == 0 && tensor.row * element_bytes % 16 == 0;
}

// Rows aligned to 16 bytes are copied and written in 16-byte chunks, others element by element.
template <class... Tensors> bool can_vectorize(int dtype, int head_dim, const Tensors&... tensors) {
  const int64_t bytes = static_cast<DType>(dtype) == DType::FLOAT32 ? 4 : 2;
  return head_dim * bytes % 16 == 0 && (is_aligned(tensors, bytes) && ...);
}

// The stride of an axis of size one is irrelevant and may be odd: it is replaced by the stride of a contiguous tensor,
// which preserves the alignment of rows.
template <class Tensor>
void replace_unused_strides(Tensor& tensor, int64_t batches, int64_t heads, int64_t length, int64_t head_dim) {
  if (batches == 1) tensor.batch = heads * length * head_dim;
  if (heads == 1) tensor.head = length * head_dim;
  if (length == 1) tensor.row = head_dim;
}

template <class Pointer> Rows<Pointer> rows_of(const View& view) {
  return {reinterpret_cast<Pointer>(view.data), view.batch, view.head, view.row};
}

Bias bias_of(const AttentionCall& call) {
  if (call.alibi_slopes)
    return {
        pointer<const float>(call.alibi_slopes), true, true, call.slope_strides.at[0], call.slope_strides.at[1], 0, 0};
  const int64_t* strides = call.bias_strides.at;
  return {pointer<const void>(call.bias), call.bias_is_float32, false, strides[0], strides[1], strides[2], strides[3]};
}

// The arguments of the kernels, with values derived from the call.
Arguments arguments_of(const AttentionCall& call) {
  if (call.queries > MAX_LENGTH || call.keys > MAX_LENGTH)
    throw std::invalid_argument("attention: the cuda backend takes sequences of up to 536870912");
  const auto narrow = [](int64_t value) { return static_cast<int>(value); };
  const int64_t* sizes = call.bias_sizes.at;
  const int dtype = narrow(call.dtype);
  Arguments arguments{};
  arguments.query = rows_of<const void*>(call.q), arguments.key = rows_of<const void*>(call.k);
  arguments.value = rows_of<const void*>(call.v), arguments.dout = rows_of<const void*>(call.dout);
  arguments.out = rows_of<void*>(call.out), arguments.dq = rows_of<void*>(call.dq);
  arguments.dk = rows_of<void*>(call.dk), arguments.dv = rows_of<void*>(call.dv);
  arguments.bias = bias_of(call);
  arguments.dbias = {pointer<void>(call.dbias), narrow(sizes[0]), narrow(sizes[1]), narrow(sizes[2]), narrow(sizes[3])};
  arguments.lse = pointer<float>(call.lse), arguments.delta = pointer<float>(call.delta);
  arguments.statistics = pointer<float>(call.statistics);
  arguments.key_padding_mask = pointer<const uint8_t>(call.key_padding_mask);
  arguments.cu_seqlens = pointer<const int>(call.cu_seqlens), arguments.sequences = narrow(call.sequences);
  arguments.dropout = make_dropout(pointer<const void>(call.seed), call.dropout_p);
  arguments.scale = static_cast<float>(call.scale), arguments.softcap = static_cast<float>(call.softcap);
  arguments.batches = narrow(call.batch), arguments.query_heads = narrow(call.heads);
  arguments.key_heads = narrow(call.kv_heads), arguments.head_dim = narrow(call.width);
  arguments.query_length = narrow(call.queries), arguments.key_length = narrow(call.keys);
  arguments.left = narrow(std::min(call.left, call.queries + call.keys));
  arguments.right = narrow(std::min(call.right, call.queries + call.keys));
  const auto replace = [&](int heads, int64_t length, auto&... tensors) {
    (replace_unused_strides(tensors, arguments.batches, heads, length, arguments.head_dim), ...);
  };
  replace(arguments.query_heads, call.queries, arguments.query, arguments.out, arguments.dout, arguments.dq);
  replace(arguments.key_heads, call.keys, arguments.key, arguments.value, arguments.dk, arguments.dv);
  arguments.vectorized = can_vectorize(dtype, arguments.head_dim, arguments.query, arguments.key, arguments.value) &&
                         (!arguments.dout.data || can_vectorize(dtype, arguments.head_dim, arguments.dout));
  arguments.vectorized_output = arguments.dout.data
                                    ? can_vectorize(dtype, arguments.head_dim, arguments.dq, arguments.dk, arguments.dv)
                                    : can_vectorize(dtype, arguments.head_dim, arguments.out);
  const AngleTables& tables = call.angles;
  Angles& angles = arguments.angles;
  angles = {pointer<const float>(tables.cos), pointer<const float>(tables.sin), tables.stride, narrow(tables.half),
            tables.interleaved};
  angles.vectorized = angles.half % (static_cast<DType>(dtype) == DType::FLOAT32 ? 4 : 8) == 0 &&
                      rows_are_aligned(angles.cos, angles.half) && rows_are_aligned(angles.sin, angles.half);
  return arguments;
}

// Selects the kernels: the fastest that support the call, or, in tests and benchmarks, a family by name.
enum class Path { AUTOMATIC = 0, GENERAL = 1, SHORT = 2, SM90 = 3, SM90_PERSISTENT = 4 };

template <class T> bool takes_short(const Arguments& arguments, const AttentionCall& call) {
  const Path path = static_cast<Path>(call.path);
  const bool fits = arguments.head_dim <= 64 && arguments.key_length <= 256 && arguments.query_length <= 256 &&
                    !arguments.dbias.data && !arguments.cu_seqlens;
  if (path == Path::SHORT && !fits)
    throw std::invalid_argument(
        "attention: the short kernels take up to 256 queries and keys that are not packed, and head dimensions up to "
        "64");
  const bool selected = path == Path::AUTOMATIC || path == Path::SHORT;
  if (!fits || !selected) return false;
  const int needed = short_shared_bytes<T>(arguments), given = shared_memory_per_block(call.device);
  if (path == Path::SHORT && needed > given)
    throw std::invalid_argument("attention: the short kernels need " + std::to_string(needed) +
                                " bytes of shared memory for this call; this GPU gives a block " +
                                std::to_string(given));
  return needed <= given;
}

// The sm90 kernels read a bias in pairs of adjacent keys; a slope is a scalar.
bool has_pairs(const Bias& bias, int key_length) {
  const int64_t bytes = bias.is_float ? 4 : 2;
  return bias.is_slope || (bias.column == 1 && key_length % 2 == 0 && bias.row % 2 == 0 && bias.head % 2 == 0 &&
                           bias.batch % 2 == 0 && reinterpret_cast<uintptr_t>(bias.data) % (2 * bytes) == 0);
}

// The copy engine requires addresses and strides of 16 bytes; axes that overlap themselves are excluded too. A persistent
// grid takes no bias and head dimensions up to 128.
bool takes_sm90(const Arguments& arguments, const AttentionCall& call) {
  const Path path = static_cast<Path>(call.path);
  const auto is_plain = [](const Strided& tensor) { return tensor.row > 0 && tensor.head > 0 && tensor.batch > 0; };
  const bool fits = arguments.vectorized && is_plain(arguments.query) && is_plain(arguments.key) &&
                    is_plain(arguments.value) &&
                    (!arguments.bias.data || has_pairs(arguments.bias, arguments.key_length)) &&
                    (path != Path::SM90_PERSISTENT || (!arguments.bias.data && arguments.head_dim <= 128));
  static const bool emulated = std::string(architectures()) == "emulated";
  static const bool built = emulated || std::string(architectures()).find("sm_90a") != std::string::npos;
  const int gpu = architecture(call.device);
  if (path == Path::SM90 || path == Path::SM90_PERSISTENT) {
    if (!fits) throw std::invalid_argument("attention: the sm90 kernels do not take this call");
    if (gpu != 90 || !built)
      throw std::invalid_argument(
          "attention: the sm90 kernels run on sm_90 and in a build for sm_90a only; this is sm_" + std::to_string(gpu) +
          ", built for " + architectures());
    return true;
  }
  return fits && path == Path::AUTOMATIC && gpu == 90 && built;
}

void attention_forward(const AttentionCall& call) {
  const Arguments arguments = arguments_of(call);
  const Stream stream = stream_of(call);
  dispatch_dtype(call.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    if constexpr (sizeof(T) == 2) {
      if (takes_short<T>(arguments, call)) return launch_short_forward<T>(arguments, stream);
      if (takes_sm90(arguments, call)) {
        const bool persistent = static_cast<Path>(call.path) == Path::SM90_PERSISTENT;
        return launch_forward_sm90<T>(arguments, persistent, stream);
      }
    }
    launch_forward<T>(arguments, stream);
  });
}
TK_EXPORT(attention_forward);

void attention_backward(const AttentionCall& call) {
  const Arguments arguments = arguments_of(call);
  const Stream stream = stream_of(call);
  dispatch_dtype(call.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    if constexpr (sizeof(T) == 2) {
      if (takes_short<T>(arguments, call))
        return launch_short_backward<T>(arguments, pointer<const float>(call.dlse), stream);
    }
    launch_backward<T>(arguments, pointer<const float>(call.dlse), stream);
  });
}
TK_EXPORT(attention_backward);

}  // namespace
}  // namespace transformer_kernels
