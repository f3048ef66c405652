// attention's entry points from Python, which has checked the tensors; limits of these kernels are checked here.
#include "../build_info.h"
#include "../dtype.h"
#include "../primitives/memory.h"
#include "../registry.h"
#include "attention_launch.h"

namespace transformer_kernels {
namespace {

using namespace attention;

constexpr int64_t MAX_LENGTH = 1 << 29;  // sums of lengths, tiles and windows fit an int

// What Python hands over, forward and backward: Launch in transformer_kernels/ops/attention/_cuda.py.
struct AttentionLaunch {
  int dtype, device, path;
  Address stream;
  Arguments arguments;
  const void* seed;
  double dropout_p;
  const float* dlse;
  int64_t query_length, key_length, left, right;

  template <class Visit> void fields(Visit&& visit) {
    Arguments& a = arguments;
    visit("q", a.query);
    visit("k", a.key);
    visit("v", a.value);
    visit("out", a.out);
    visit("lse", a.lse);
    visit("statistics", a.statistics);
    visit("dtype", dtype);
    visit("batches", a.batches);
    visit("query_heads", a.query_heads);
    visit("key_heads", a.key_heads);
    visit("query_length", query_length);
    visit("key_length", key_length);
    visit("head_dim", a.head_dim);
    visit("key_padding_mask", a.key_padding_mask);
    visit("cu_seqlens", a.cu_seqlens);
    visit("sequences", a.sequences);
    visit("bias", a.bias);
    visit("angles", a.angles);
    visit("seed", seed);
    visit("dropout_p", dropout_p);
    visit("scale", a.scale);
    visit("softcap", a.softcap);
    visit("left", left);
    visit("right", right);
    visit("device", device);
    visit("stream", stream);
    visit("path", path);
    visit("dout", a.dout);
    visit("dlse", dlse);
    visit("delta", a.delta);
    visit("dq", a.dq);
    visit("dk", a.dk);
    visit("dv", a.dv);
    visit("dbias", a.dbias);
  }
};
TK_EXPORT_STRUCTURE(AttentionLaunch);

template <class Tensor> bool is_aligned(const Tensor& tensor, int64_t element_bytes) {
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 && tensor.batch * element_bytes % 16 == 0 &&
         tensor.head * element_bytes % 16 == 0 && tensor.row * element_bytes % 16 == 0;
}

// Rows aligned to 16 bytes are copied and written in 16-byte chunks, others element by element.
template <class... Tensors> bool can_vectorize(int dtype, int head_dim, const Tensors&... tensors) {
  const int64_t bytes = static_cast<DType>(dtype) == DType::FLOAT32 ? 4 : 2;
  return head_dim * bytes % 16 == 0 && (is_aligned(tensors, bytes) && ...);
}

// The stride of an axis of size one is irrelevant and may be odd: it is replaced by that of a contiguous tensor, which
// preserves the alignment of rows.
template <class Tensor>
void replace_unused_strides(Tensor& tensor, int64_t batches, int64_t heads, int64_t length, int64_t head_dim) {
  if (batches == 1) tensor.batch = heads * length * head_dim;
  if (heads == 1) tensor.head = length * head_dim;
  if (length == 1) tensor.row = head_dim;
}

// The arguments of the kernels, completed by what follows from the call.
Arguments complete(const AttentionLaunch& call) {
  if (call.query_length > MAX_LENGTH || call.key_length > MAX_LENGTH)
    throw std::invalid_argument("attention: the cuda backend takes sequences of up to 536870912");
  Arguments arguments = call.arguments;
  arguments.query_length = static_cast<int>(call.query_length);
  arguments.key_length = static_cast<int>(call.key_length);
  const int64_t tokens = call.query_length + call.key_length;
  arguments.left = static_cast<int>(std::min(call.left, tokens));
  arguments.right = static_cast<int>(std::min(call.right, tokens));
  const auto replace = [&](int heads, int64_t length, auto&... tensors) {
    (replace_unused_strides(tensors, arguments.batches, heads, length, arguments.head_dim), ...);
  };
  replace(arguments.query_heads, call.query_length, arguments.query, arguments.out, arguments.dout, arguments.dq);
  replace(arguments.key_heads, call.key_length, arguments.key, arguments.value, arguments.dk, arguments.dv);
  arguments.dropout = make_dropout(call.seed, call.dropout_p);
  arguments.vectorized =
      can_vectorize(call.dtype, arguments.head_dim, arguments.query, arguments.key, arguments.value) &&
      (!arguments.dout.data || can_vectorize(call.dtype, arguments.head_dim, arguments.dout));
  arguments.vectorized_output =
      arguments.dout.data ? can_vectorize(call.dtype, arguments.head_dim, arguments.dq, arguments.dk, arguments.dv)
                          : can_vectorize(call.dtype, arguments.head_dim, arguments.out);
  Angles& angles = arguments.angles;
  angles.vectorized = angles.half % (static_cast<DType>(call.dtype) == DType::FLOAT32 ? 4 : 8) == 0 &&
                      rows_are_aligned(angles.cos, angles.half) && rows_are_aligned(angles.sin, angles.half);
  return arguments;
}

// Selects the kernels: the fastest that support the call, or, in tests and benchmarks, a family by name.
enum class Path { AUTOMATIC = 0, GENERAL = 1, SHORT = 2, SM90 = 3 };

template <class T> bool takes_short(const Arguments& arguments, const AttentionLaunch& call) {
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

// The copy engine wants addresses and strides on 16 bytes and, to be safe, no axis that overlaps itself.
bool takes_sm90(const Arguments& arguments, const AttentionLaunch& call) {
  const auto is_plain = [](const Strided& tensor) { return tensor.row > 0 && tensor.head > 0 && tensor.batch > 0; };
  const bool fits = arguments.vectorized && is_plain(arguments.query) && is_plain(arguments.key) &&
                    is_plain(arguments.value) &&
                    (!arguments.bias.data || has_pairs(arguments.bias, arguments.key_length));
  static const bool emulated = std::string(architectures()) == "emulated";
  static const bool built = emulated || std::string(architectures()).find("sm_90a") != std::string::npos;
  const int gpu = architecture(call.device);
  if (static_cast<Path>(call.path) == Path::SM90) {
    if (!fits) throw std::invalid_argument("attention: the sm90 kernels do not take this call");
    if (gpu != 90 || !built)
      throw std::invalid_argument("attention: the sm90 kernels run on sm_90 and in a build for sm_90a only; this is sm_" +
                                  std::to_string(gpu) + ", built for " + architectures());
    return true;
  }
  return fits && static_cast<Path>(call.path) == Path::AUTOMATIC && gpu == 90 && built;
}

void attention_forward(AttentionLaunch call) {
  const Arguments arguments = complete(call);
  const Stream place = stream_of(call);
  dispatch_dtype(call.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    if constexpr (sizeof(T) == 2) {
      if (takes_short<T>(arguments, call)) return launch_short_forward<T>(arguments, place);
      if (takes_sm90(arguments, call)) return launch_forward_sm90<T>(arguments, place);
    }
    launch_forward<T>(arguments, place);
  });
}
TK_EXPORT(attention_forward);

void attention_backward(AttentionLaunch call) {
  const Arguments arguments = complete(call);
  const Stream place = stream_of(call);
  dispatch_dtype(call.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    if constexpr (sizeof(T) == 2) {
      if (takes_short<T>(arguments, call)) return launch_short_backward<T>(arguments, call.dlse, place);
    }
    launch_backward<T>(arguments, call.dlse, place);
  });
}
TK_EXPORT(attention_backward);

}  // namespace
}  // namespace transformer_kernels
