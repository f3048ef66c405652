// What attention's two passes share. Scores are transposed, a row of S^T for each key with one query in each lane:
// maxima, sums and masks are computed lane by lane, a hidden key costs nothing, and K and V are read in place,
// row by row; only the queries have to be transposed.
#pragma once
#include "../../calls/attention.h"
#include "../rotary.h"
#include "lanes.h"
#include "product.h"

namespace transformer_kernels::TK_LEVEL {

constexpr float LOG2_E = 1.44269504088896340736f;
constexpr int64_t NO_LIMIT = 1 << 30;         // of ops/attention/_call.py

struct Options {
  float scale, softcap;  // softcap: 0 without
  Dropout dropout;
  int64_t pitch;  // floats in a packed row
};

inline Options options_of(const AttentionCall& call) {
  return {static_cast<float>(call.scale), static_cast<float>(call.softcap),
          make_dropout(at<const int64_t>(call.seed), call.dropout_p), aligned(call.width, WIDTH)};
}

// The call with the tensors marked that its angles rotate.
inline AttentionCall with_rotations(AttentionCall call) {
  call.q.rotated = call.k.rotated = call.dq.rotated = call.dk.rotated = call.angles.cos != 0;
  return call;
}

// The number of tasks into which the blocks of one owner are split for load balance. No result depends on it.
inline int64_t parts_of(int64_t owners, int64_t blocks) {
  constexpr int64_t TASKS_OF_A_THREAD = 4;
  const int64_t wanted = TASKS_OF_A_THREAD * thread_count();
  return owners >= wanted || thread_count() < 2 ? 1 : smaller(blocks, (wanted + owners - 1) / owners);
}

// A range that is computed independently: a batch, or one packed sequence, with the first rows of its queries and keys.
struct Span {
  int64_t batch, first_query, queries, first_key, keys;
};

TK_INLINE int64_t span_count(const AttentionCall& call) { return call.cu_seqlens ? call.sequences : call.batch; }

TK_INLINE Span span_at(const AttentionCall& call, int64_t index) {
  if (!call.cu_seqlens) return {index, 0, call.queries, 0, call.keys};
  const int32_t *starts = at<int32_t>(call.cu_seqlens) + index, *key_starts = at<int32_t>(call.cu_seqlens_k) + index;
  return {0, starts[0], starts[1] - starts[0], key_starts[0], key_starts[1] - key_starts[0]};
}

// The keys of a span that padding leaves, packed: `position` of each among the span's, which begin at row `first`, null
// where they are its first; the `rank` of each position among the packed, null where nothing is padded.
struct Keys {
  int64_t first, count;
  const int32_t *position, *rank;
};

// The row of a packed key.
TK_INLINE int64_t row_of_key(const Keys& keys, int64_t key) {
  return keys.first + (keys.position ? keys.position[key] : key);
}

inline Keys keys_of(const AttentionCall& call, const Span& span, int slot) {
  if (!call.key_padding_mask) return {span.first_key, span.keys, nullptr, nullptr};
  const uint8_t* present = at<const uint8_t>(call.key_padding_mask) + span.batch * call.keys + span.first_key;
  int32_t* position = scratch<int32_t>(slot, 2 * span.keys + 1);
  int32_t* rank = position + span.keys;
  int32_t count = 0;
  for (int64_t j = 0; j < span.keys; ++j) {
    rank[j] = count;
    position[count] = static_cast<int32_t>(j);
    count += present[j] != 0;
  }
  rank[span.keys] = count;
  if (count == span.keys) return {span.first_key, span.keys, nullptr, nullptr};
  const bool leading = count == 0 || position[count - 1] == count - 1;
  return {span.first_key, count, leading ? nullptr : position, rank};
}

// The queries in the lanes of one block: head, row and visible packed keys [low, high) of each lane.
// Query heads that share a key head are consecutive, so that a block may contain several of them.
template <int REGISTERS>
struct Block {
  static constexpr int SIZE = REGISTERS * WIDTH;
  alignas(64) int32_t head[SIZE], query[SIZE], low[SIZE], high[SIZE];
  int64_t count;                     // lanes that are used; the others repeat the first
  int64_t any_low, any_high;         // keys visible to any lane
  int64_t all_low, all_high;         // keys visible to all lanes
  TK_INLINE int registers() const { return static_cast<int>((count + WIDTH - 1) / WIDTH); }  // with used lanes
};

// Takes from each lane the keys outside its range; the others are positions in the span.
template <int REGISTERS>
inline void limit_keys(Block<REGISTERS>& block, const AttentionCall& call, const Span& span) {
  const int64_t* stride = call.range_strides.at;
  const int32_t first = static_cast<int32_t>(span.first_key), last = static_cast<int32_t>(span.keys);
  for (int i = 0; i < Block<REGISTERS>::SIZE; ++i) {
    const int32_t* range = at<int32_t>(call.key_ranges) +
                           2 * (span.batch * stride[0] + block.head[i] * stride[1] + block.query[i] * stride[2]);
    const int32_t from = range[0] - first, to = range[1] - first;
    block.low[i] = smaller(last, larger(block.low[i], from)), block.high[i] = larger(0, smaller(block.high[i], to));
  }
}

template <int REGISTERS>
inline void set_block(Block<REGISTERS>& block, const AttentionCall& call, const Span& span, const Keys& keys,
                      int64_t first_head, int64_t first_row, int64_t rows) {
  constexpr int SIZE = Block<REGISTERS>::SIZE;
  block.count = smaller(SIZE, rows - first_row);
  int32_t head = static_cast<int32_t>(first_head + first_row / span.queries);
  const int32_t begin = static_cast<int32_t>(span.first_query), end = begin + static_cast<int32_t>(span.queries);
  int32_t query = begin + static_cast<int32_t>(first_row % span.queries);
  for (int64_t done = 0; done < block.count;) {
    const int64_t run = smaller(block.count - done, end - query);
    for (int64_t i = 0; i < run; ++i)
      block.head[done + i] = head, block.query[done + i] = query + static_cast<int32_t>(i);
    done += run, ++head, query = begin;
  }
  for (int64_t i = block.count; i < SIZE; ++i) block.head[i] = block.head[0], block.query[i] = block.query[0];
  const int32_t last = static_cast<int32_t>(span.keys), shift = last - end;
  const int64_t all = span.keys + span.queries;
  const int32_t behind = static_cast<int32_t>(smaller(call.left, all)),
                ahead = static_cast<int32_t>(smaller(call.right, all)) + 1;
  for (int i = 0; i < SIZE; ++i) {
    const int32_t position = block.query[i] + shift, from = position - behind, to = position + ahead;
    block.low[i] = from > 0 ? (from < last ? from : last) : 0;
    block.high[i] = to < last ? (to > 0 ? to : 0) : last;
  }
  if (call.key_ranges) limit_keys(block, call, span);
  if (keys.rank)
    for (int i = 0; i < SIZE; ++i) block.low[i] = keys.rank[block.low[i]], block.high[i] = keys.rank[block.high[i]];
  int32_t least_low = block.low[0], most_low = least_low, least_high = block.high[0], most_high = least_high;
  for (int i = 0; i < SIZE; ++i) {
    least_low = block.low[i] < least_low ? block.low[i] : least_low;
    most_low = block.low[i] > most_low ? block.low[i] : most_low;
    least_high = block.high[i] < least_high ? block.high[i] : least_high;
    most_high = block.high[i] > most_high ? block.high[i] : most_high;
  }
  block.any_low = least_low, block.all_low = most_low, block.all_high = least_high;
  block.any_high = most_high > least_low ? most_high : least_low;
}

// The lanes of register n to which the key is visible.
template <int REGISTERS> TK_INLINE auto sees(const Block<REGISTERS>& block, int n, int64_t key) {
  const Ints position = splat_int(static_cast<int32_t>(key));
  return (position >= load_ints(block.low + n * WIDTH)) & (position < load_ints(block.high + n * WIDTH));
}

// The largest score of a row, -inf if it has no visible key;
// `queries` floats later, the log of its sum of exp(score - largest).
TK_INLINE float* statistics_of(const AttentionCall& call, int64_t batch, int64_t head, int64_t query) {
  return at<float>(call.statistics) + (batch * call.heads + head) * 2 * call.queries + query;
}

template <class T> TK_INLINE T* row_of(const View& tensor, int64_t batch, int64_t head, int64_t row) {
  return at<T>(tensor.data) + batch * tensor.batch + head * tensor.head + row * tensor.row;
}

constexpr int ROTATED_SLOT = 14, ANGLES_SLOT = 15;

// A row rotated by its angles, or back where sign is -1; `out` may be x.
template <class T>
TK_INLINE void rotate_row(const AttentionCall& call, const T* x, T* out, int64_t batch, int64_t row, float sign) {
  const AngleTables& angles = call.angles;
  const int64_t at_row = batch * angles.stride + row * angles.half;
  const float *cos = at<const float>(angles.cos) + at_row, *sin = at<const float>(angles.sin) + at_row;
  const Factors factors = angles.interleaved
                              ? spread(cos, sin, angles.half, scratch<float>(ANGLES_SLOT, 4 * angles.half))
                              : Factors{cos, sin, angles.half, false};
  rotate(x, out, factors, sign, call.width);
}

// Memory for one rotated row; null if rows are read in place.
template <class T> TK_INLINE T* memory_of_row(const AttentionCall& call, const View& tensor) {
  return tensor.rotated ? scratch<T>(ROTATED_SLOT, call.width) : nullptr;
}

// The row to read: in place, or rotated in `memory`.
template <class T>
TK_INLINE const T* source_row(const AttentionCall& call, const View& tensor, int64_t batch, int64_t head, int64_t row,
                              T* memory) {
  const T* from = row_of<const T>(tensor, batch, head, row);
  if (!memory) return from;
  rotate_row(call, from, memory, batch, row, 1.f);
  return memory;
}

// Rotates back a row of a gradient that was written.
template <class T>
TK_INLINE void finish_row(const AttentionCall& call, const View& gradient, int64_t batch, int64_t head, int64_t row) {
  if (!gradient.rotated) return;
  T* written = row_of<T>(gradient, batch, head, row);
  rotate_row(call, written, written, batch, row, -1.f);
}

// One row as float32, padded with zeros to whole registers.
template <class T> TK_INLINE void widen_row(const T* from, int64_t width, float* to) {
  int64_t d = 0;
  for (; d + WIDTH <= width; d += WIDTH) store(to + d, load(from + d));
  if (d < width) store(to + d, load(from + d, Part{static_cast<int>(width - d)}));
}

template <class T> TK_INLINE void narrow_row(const float* from, Floats factor, int64_t width, T* to) {
  int64_t d = 0;
  for (; d + WIDTH <= width; d += WIDTH) store(to + d, load(from + d) * factor);
  if (d < width) store(to + d, load(from + d) * factor, Part{static_cast<int>(width - d)});
}

// The distance from an element to the same one of the next owner (key head, then batch), which is fetched while this
// one is computed, since heads of a packed projection are short pieces that the processor's
// own prefetching does not follow.
TK_INLINE int64_t next_owner(const View& tensor, int64_t owners, int64_t owner, int64_t heads) {
  return owner + 1 < owners ? heads * tensor.head : tensor.batch - owner * heads * tensor.head;
}

struct HeadRow {
  int64_t head, row;
};

TK_INLINE int64_t size_of_element(const AttentionCall& call) { return call.dtype == FLOAT32 ? 4 : 2; }

// Has the rows at position(from) ... position(to - 1), moved by `ahead` elements, fetched.
template <class F>
TK_INLINE void fetch(const AttentionCall& call, const View& tensor, int64_t batch, int64_t ahead, int64_t from,
                     int64_t to, Fetches& fetches, const F& position) {
  if (!tensor.data) return;
  const int64_t size = size_of_element(call);
  const View bytes{tensor.data + ahead * size, size * tensor.batch, size * tensor.head, size * tensor.row};
  for (int64_t i = from; i < to; ++i) {
    const auto [head, row] = position(i);
    fetches.add(row_of<const char>(bytes, batch, head, row));
  }
}

// Products that one register accumulates; the scores of wider heads are sums of such partial sums.
constexpr int64_t MAX_SCORE_SUM = 128;

// C = A B with row stride `a_row` of A, where no register accumulates more than `longest` of the K products.
TK_INLINE void product_in_pieces(int64_t longest, const float* a, int64_t a_row, const float* b, int64_t b_row,
                                 float* c, int64_t c_row, int64_t M, int64_t registers, int64_t K, Fetches* fetches) {
  const int64_t first = smaller(K, longest);
  product<false>(a, {a_row, 1}, b, b_row, c, c_row, M, registers, first, fetches);
  for (int64_t k = first; k < K; k += longest)
    product<true>(a + k, {a_row, 1}, b + k * b_row, b_row, c, c_row, M, registers, smaller(longest, K - k), fetches);
}

// Rows of float32 and their stride.
struct Matrix {
  const float* data = nullptr;
  int64_t row = 0;
  TK_INLINE const float* at(int64_t i) const { return data + i * row; }
};

// Whether products can read the rows of a head in place.
// Strides that are multiples of 2 KiB would map the rows to few cache sets.
TK_INLINE bool has_readable_rows(const AttentionCall& call, const View& tensor, int64_t pitch) {
  constexpr int64_t CONFLICT = 512;  // floats
  return call.dtype == FLOAT32 && !tensor.rotated && call.width == pitch &&
         (tensor.row == pitch || tensor.row % CONFLICT);
}

// The packed keys of a tensor if they can be read in place, else null.
TK_INLINE Matrix keys_in_place(const AttentionCall& call, const View& tensor, int64_t batch, const Keys& keys,
                               int64_t kv_head, int64_t pitch) {
  const bool readable = has_readable_rows(call, tensor, pitch) && !keys.position;
  return readable ? Matrix{row_of<const float>(tensor, batch, kv_head, keys.first), tensor.row} : Matrix{};
}

// Packed keys [from, to) of a tensor in rows of `pitch` float32.
inline void widen_keys(const AttentionCall& call, const View& tensor, int64_t batch, const Keys& keys, int64_t kv_head,
                       int64_t from, int64_t to, int64_t pitch, float* packed) {
  by_dtype(call.dtype, [&](auto type) TK_LAMBDA {
    using T = typename decltype(type)::type;
    T* memory = memory_of_row<T>(call, tensor);
    for (int64_t key = from; key < to; ++key)
      widen_row(source_row<T>(call, tensor, batch, kv_head, row_of_key(keys, key), memory), call.width,
                packed + (key - from) * pitch);
  });
}

// The rows of a block's queries; rows without a query are zero.
template <int REGISTERS>
inline void widen_queries(const AttentionCall& call, const View& tensor, int64_t batch, const Block<REGISTERS>& block,
                          int64_t pitch, float* packed) {
  by_dtype(call.dtype, [&](auto type) TK_LAMBDA {
    using T = typename decltype(type)::type;
    T* memory = memory_of_row<T>(call, tensor);
    for (int64_t i = 0; i < block.count; ++i)
      widen_row(source_row<T>(call, tensor, batch, block.head[i], block.query[i], memory), call.width,
                packed + i * pitch);
  });
  for (int64_t i = block.count; i < Block<REGISTERS>::SIZE; ++i)
    for (int64_t d = 0; d < pitch; d += WIDTH) store(packed + i * pitch + d, splat(0.0f));
}

// The same in `packed`, or in place if possible.
template <int REGISTERS>
inline Matrix rows_of_queries(const AttentionCall& call, const View& tensor, int64_t batch,
                              const Block<REGISTERS>& block, int64_t pitch, float* packed) {
  constexpr int64_t LAST = Block<REGISTERS>::SIZE - 1;
  if (has_readable_rows(call, tensor, pitch) && block.count > LAST && block.head[0] == block.head[LAST])
    return {row_of<const float>(tensor, batch, block.head[0], block.query[0]), tensor.row};
  widen_queries(call, tensor, batch, block, pitch, packed);
  return {packed, pitch};
}

// to[c][r] = from[r][c] for `rows` rows, a multiple of the lanes, of `columns` columns, another; times `factor`.
inline void transpose(const Matrix& from, int64_t columns, int64_t rows, float factor, float* to, int64_t to_pitch) {
  for (int64_t r = 0; r < rows; r += WIDTH)
    for (int64_t c = 0; c < columns; c += WIDTH)
      transpose_square(from.at(r) + c, from.row, factor, to + c * to_pitch + r, to_pitch);
}

// Dropout: bit l of bits[key * REGISTERS + n] says whether the weight of lane l of register n survives; eight columns
// come from one philox counter. Even lanes and odd lanes are drawn in two registers of 64-bit products.
template <int REGISTERS> struct Draw {
  int64_t group = -1;
  uint16_t bits[8 * REGISTERS];
};

template <int REGISTERS>
inline void draw_group(Draw<REGISTERS>& draw, const AttentionCall& call, const Dropout& dropout, int64_t batch,
                       const Block<REGISTERS>& block, int64_t group) {
  draw.group = group;
  const Ints head = splat_int(static_cast<int32_t>(batch * call.heads));
  for (int n = 0; n < REGISTERS; ++n) {
    const Words row = (Words)load_ints(block.query + n * WIDTH);
    const Words column = (Words)(load_ints(block.head + n * WIDTH) + head);
    Words words[4];
    philox_lanes(dropout.seed, static_cast<uint32_t>(group), row, column, words);
    const Words threshold = splat_word(dropout.threshold);
    for (int w = 0; w < 4; ++w) {
      draw.bits[(2 * w) * REGISTERS + n] = lane_bits((words[w] & 0xFFFFu) >= threshold);
      draw.bits[(2 * w + 1) * REGISTERS + n] = lane_bits((words[w] >> 16) >= threshold);
    }
  }
}

template <int REGISTERS>
inline void draw_keys(const AttentionCall& call, const Dropout& dropout, int64_t batch, const Keys& keys,
                      const Block<REGISTERS>& block, int64_t from, int64_t to, uint16_t* bits) {
  Draw<REGISTERS> draw;
  for (int64_t key = from; key < to; ++key) {
    const int64_t column = row_of_key(keys, key);
    if (column >> 3 != draw.group) draw_group(draw, call, dropout, batch, block, column >> 3);
    for (int n = 0; n < REGISTERS; ++n) bits[(key - from) * REGISTERS + n] = draw.bits[(column & 7) * REGISTERS + n];
  }
}

// An element of a mask, read as a term of the score: 0 for a visible key, -inf for a hidden one.
struct Shown {
  uint8_t byte;
};
TK_INLINE float element(Shown x) { return x.byte ? 0.f : -INFINITY; }
TK_INLINE Floats load(const Shown* from) {
  typedef uint8_t Octets __attribute__((vector_size(WIDTH)));
  Octets bytes;
  memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Words) == 0u ? splat(-INFINITY) : splat(0.f);
}
TK_INLINE Floats load(const Shown* from, Part part) {
  Shown edge[WIDTH] = {};
  memcpy(edge, from, part.count);
  return load(edge);
}

// What is added to scores: elements of a dtype, a broadcast axis of stride 0.
struct Added {
  static constexpr int64_t SHOWN = -1;  // the dtype of a mask
  Address data;
  const int64_t* stride;
  int64_t dtype;
};

template <class F> TK_INLINE void by_dtype(const Added& added, const F& f) {
  if (added.dtype == Added::SHOWN) return f(Type<Shown>{});
  by_dtype(added.dtype, f);
}

// Scores of the packed keys [from, to) and the lanes of register n become scale * score + bias, mask and ALiBi terms.
template <int REGISTERS>
inline void add_to_scores(const Added& added, int64_t batch, const Keys& keys, const Block<REGISTERS>& block, int n,
                          float scale, int64_t from, int64_t to, float* scores) {
  constexpr int SIZE = Block<REGISTERS>::SIZE;
  const int64_t* stride = added.stride;
  const bool dense = stride[3] == 1 && !keys.position;
  const Floats factor = splat(scale);
  alignas(64) float rows[WIDTH * WIDTH], columns[WIDTH * WIDTH];
  by_dtype(added, [&](auto type) TK_LAMBDA {
    using T = typename decltype(type)::type;
    for (int64_t key = from; key < to; key += WIDTH) {
      const int64_t some = smaller(WIDTH, to - key);
      for (int lane = 0; lane < WIDTH; ++lane) {
        const int64_t head = block.head[n * WIDTH + lane], row = block.query[n * WIDTH + lane];
        const T* bias = at<const T>(added.data) + batch * stride[0] + head * stride[1] + row * stride[2];
        if (dense && some == WIDTH) store(rows + lane * WIDTH, load(bias + keys.first + key));
        else if (dense) store(rows + lane * WIDTH, load(bias + keys.first + key, Part{static_cast<int>(some)}));
        else
          for (int64_t i = 0; i < WIDTH; ++i)
            rows[lane * WIDTH + i] = i < some ? element(bias[row_of_key(keys, key + i) * stride[3]]) : 0.0f;
      }
      transpose_square(rows, WIDTH, 1.0f, columns, WIDTH);
      for (int64_t i = 0; i < some; ++i) {
        float* score = scores + (key - from + i) * SIZE + n * WIDTH;
        store(score, fma(load(score), factor, load(columns + i * WIDTH)));
      }
    }
  });
}

// The same for scale * score - slope * |distance|.
template <int REGISTERS>
inline void add_distances(const AttentionCall& call, const Span& span, const Keys& keys, const Block<REGISTERS>& block,
                          int n, float scale, int64_t from, int64_t to, float* scores) {
  const float* slopes = at<const float>(call.alibi_slopes) + span.batch * call.slope_strides.at[0];
  const Ints shift = splat_int(static_cast<int32_t>(span.first_key + span.keys - span.first_query - span.queries));
  const Floats factor = splat(scale);
  Floats slope;
  for (int lane = 0; lane < WIDTH; ++lane)
    slope[lane] = -slopes[block.head[n * WIDTH + lane] * call.slope_strides.at[1]];
  const Ints position = load_ints(block.query + n * WIDTH) + shift;
  for (int64_t key = from; key < to; ++key) {
    const Ints distance = position - splat_int(static_cast<int32_t>(row_of_key(keys, key)));
    float* score = scores + (key - from) * Block<REGISTERS>::SIZE + n * WIDTH;
    store(score, fma(slope, magnitude(__builtin_convertvector(distance, Floats)), load(score) * factor));
  }
}

// A register of each of `rows` rows becomes softcap * tanh(scale * product / softcap);
// slopes, if wanted, the derivative of the cap.
inline void cap_scores(const Options& options, int64_t rows, int64_t pitch, float* scores, float* slopes) {
  const Floats inner = splat(__builtin_fabsf(options.scale) / options.softcap), outer = splat(options.softcap);
  for (int64_t i = 0; i < rows * pitch; i += pitch) {
    const Floats tangent = hyperbolic_tangent(load(scores + i) * inner);
    store(scores + i, tangent * outer);
    if (slopes) store(slopes + i, fma(-tangent, tangent, splat(1.f)));
  }
}

// Whether anything but the scale is done to scores before their softmax.
TK_INLINE bool adjusts_scores(const AttentionCall& call, const Options& options) {
  return call.bias || call.mask || call.alibi_slopes || options.softcap > 0.f;
}

// Products of the packed keys [from, to) with the queries of a block's register n become scores: scaled, capped, with
// all that is added.
template <int REGISTERS>
inline void adjust_scores(const AttentionCall& call, const Options& options, const Span& span, const Keys& keys,
                          const Block<REGISTERS>& block, int n, int64_t from, int64_t to, float* scores,
                          float* cap_slopes = nullptr) {
  constexpr int64_t SIZE = Block<REGISTERS>::SIZE;
  float scale = __builtin_fabsf(options.scale);
  if (options.softcap > 0.f) {
    cap_scores(options, to - from, SIZE, scores + n * WIDTH, cap_slopes ? cap_slopes + n * WIDTH : nullptr);
    scale = 1.f;
  }
  const auto add = [&](const Added& added) TK_LAMBDA {
    add_to_scores(added, span.batch, keys, block, n, scale, from, to, scores), scale = 1.f;
  };
  if (call.bias) add({call.bias, call.bias_strides.at, call.bias_is_float32 ? FLOAT32 : call.dtype});
  if (call.mask) add({call.mask, call.mask_strides.at, Added::SHOWN});
  if (call.alibi_slopes) add_distances(call, span, keys, block, n, scale, from, to, scores);
}

// Masks the scores of keys [key, key + rows) in the lanes to which they are not visible.
template <int REGISTERS>
inline void mask_keys(const Block<REGISTERS>& block, int64_t key, int64_t from, int64_t to, float* KQ) {
  for (int64_t row = from; row < to; ++row)
    for (int n = 0; n < block.registers(); ++n) {
      float* score = KQ + row * Block<REGISTERS>::SIZE + n * WIDTH;
      store(score, sees(block, n, key + row) ? load(score) : splat(-INFINITY));
    }
}

// What scores are multiplied by as exponents of 2: never 0 or denormal.
TK_INLINE float weight_factor(const AttentionCall& call, const Options& options) {
  const float magnitude = __builtin_fabsf(options.scale) * LOG2_E, smallest = 1.17549435e-38f;
  return adjusts_scores(call, options) ? LOG2_E : magnitude > smallest ? magnitude : smallest;
}

// lse, its tangent and statistics of a row, each where it is given.
TK_INLINE void write_sums(const AttentionCall& call, int64_t batch, int64_t head, int64_t query, float top,
                          float log_sum, float change = 0.f) {
  const int64_t row = (batch * call.heads + head) * call.queries + query;
  if (call.lse) at<float>(call.lse)[row] = top + log_sum;
  if (call.dlse) at<float>(call.dlse)[row] = change;
  if (!call.statistics) return;
  float* statistics = statistics_of(call, batch, head, query);
  statistics[0] = top, statistics[call.queries] = log_sum;
}

// Zeros for tokens after the last packed sequence, which attend to no key.
inline void clear_unattended(const AttentionCall& call) {
  by_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t head = 0; head < call.heads; ++head)
      for (int64_t row = at<int32_t>(call.cu_seqlens)[call.sequences]; row < call.queries; ++row) {
        memset(row_of<T>(call.out, 0, head, row), 0, sizeof(T) * call.width);
        if (call.dout.data) memset(row_of<T>(call.dout, 0, head, row), 0, sizeof(T) * call.width);
        write_sums(call, 0, head, row, -INFINITY, 0.f);
      }
  });
}

}  // namespace transformer_kernels::TK_LEVEL
