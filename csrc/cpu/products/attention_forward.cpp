// out and lse of attention: one pass over blocks of keys with a running maximum and sum (Dao 2023, algorithm 1).
#include "../reproducible.h"
#include "attention.h"
#include "attention_decode.h"
#include "pairs.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

constexpr int64_t CHUNK = 128;        // keys whose scores exist at one time
constexpr int64_t ROW_GROUP = 8;      // float32 keys, of which chunks begin at a multiple
constexpr int64_t SLACK = 16;         // rows after the scores: buffers at page multiples share few cache sets
// Blocks of queries that share each chunk of keys where keys and values exceed the second-level cache, and that size.
constexpr int64_t SHARING_BLOCKS = 4, CACHED_FLOATS = 65536;

enum Slot { POSITIONS = 8, KEY_ROWS, VALUE_ROWS, WORKSPACE, PARTIAL, NONFINITE };

// The softmax of a block so far: M, the largest scores, and S, the sums of weights; VKQ is in memory.
template <int REGISTERS> struct State {
  Floats M[REGISTERS], S[REGISTERS];
  State() {
    for (int n = 0; n < REGISTERS; ++n) M[n] = splat(-INFINITY), S[n] = splat(0.f);
  }
};

// Whether some element of `count` rows, `stride` elements from each other, is non-finite.
inline bool has_nonfinite(const float* rows, int64_t count, int64_t pitch, int64_t stride) {
  Floats all[4] = {};
  for (int64_t i = 0; i < count; ++i)
    over_columns(pitch, [&](int64_t d, auto lanes, int u) TK_LAMBDA {
      all[u] = fma(load(rows + i * stride + d, lanes), splat(0.f), all[u]);
    });
  const Floats any = (all[0] + all[1]) + (all[2] + all[3]);
  return lane_bits(any != any) != 0;
}

#if defined(__AVX512BF16__)
inline bool has_nonfinite(const Bfloat16* rows, int64_t count, int64_t pitch, int64_t) {
  const __m512i exponent = _mm512_set1_epi16(0x7F80);
  __mmask32 any = 0;
  for (int64_t i = 0; i < count * pitch; i += PAIR_DEPTH)
    any |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(rows + i), exponent), exponent);
  return any != 0;
}
#endif

// 0 * NaN is NaN, so a weight of 0 does not hide a value: non-finite packed values become zeros, and queries that
// attend to one of them get NaN (`propagate_nonfinite`). For keys visible to all lanes of a block this at most changes
// inf to NaN.
template <class T>
inline bool clear_nonfinite(T* values, int64_t count, int64_t pitch, uint8_t* nonfinite) {
  constexpr int64_t GROUP = 16;
  bool any = false;
  memset(nonfinite, 0, count);
  for (int64_t first = 0; first < count; first += GROUP) {
    const int64_t end = smaller(first + GROUP, count);
    if (!has_nonfinite(values + first * pitch, end - first, pitch, pitch)) continue;
    for (int64_t i = first; i < end; ++i)
      if (has_nonfinite(values + i * pitch, 1, pitch, pitch)) {
        any = true, nonfinite[i] = 1;
        memset(values + i * pitch, 0, sizeof(T) * pitch);
      }
  }
  return any;
}

// Scratch buffers of one thread in float32, as ggml names them: K and V as rows, all `key_rows` of a task or, where
// each is read once (`streamed`), the rows of one chunk; Q of a block transposed;
// KQ, the scores, which become weights; VKQ, the sums.
template <int LANE_REGISTERS> struct Wide {
  static constexpr int REGISTERS = LANE_REGISTERS;
  static constexpr int64_t SIZE = Block<REGISTERS>::SIZE;
  int64_t pitch;  // floats in a packed row
  bool streamed;
  float *keys, *values;                        // (key_rows, pitch)
  Matrix rows_of_keys, rows_of_values;         // the rows above, or the call's in place
  float *queries, *KQ, *blocks;  // (SIZE, pitch), (CHUNK, SIZE), of each block:
  float *transposed, *VKQ;          // (pitch, SIZE), (SIZE, pitch)
  uint16_t* bits;                    // (CHUNK, REGISTERS)
  Fetches fetches;

  Wide(const AttentionCall& call, const Options& options, int64_t key_rows, bool streams, int64_t sharing = 1)
      : pitch(options.pitch), streamed(streams), fetches(size_of_element(call) * call.width, REGISTERS == 1) {
    keys = scratch<float>(KEY_ROWS, key_rows * pitch);
    values = scratch<float>(VALUE_ROWS, key_rows * pitch);
    queries =
        scratch<float>(WORKSPACE, ((1 + 2 * sharing) * pitch + CHUNK + SLACK) * SIZE + (CHUNK * REGISTERS + 1) / 2);
    KQ = queries + SIZE * pitch;
    blocks = KQ + (CHUNK + SLACK) * SIZE;
    bits = reinterpret_cast<uint16_t*>(blocks + sharing * 2 * SIZE * pitch);
    choose(0);
  }
  void choose(int64_t block) {
    transposed = blocks + block * 2 * SIZE * pitch;
    VKQ = transposed + SIZE * pitch;
  }

  int64_t at_row(int64_t key) const { return streamed ? 0 : key; }
  // Where the chunks of keys [low, high) begin, and how many keys the one at `key` has: they end at multiples of CHUNK,
  // so that sums do not depend on the other queries of the block.
  static int64_t first_key(int64_t low) { return low / ROW_GROUP * ROW_GROUP; }
  static int64_t rows_at(int64_t key, int64_t high) { return smaller(CHUNK - key % CHUNK, high - key); }

  // Packs keys [from, to), and clears non-finite values where `nonfinite` is given to mark them.
  bool load_keys(const AttentionCall& call, int64_t batch, const Keys& some, int64_t kv_head, int64_t from, int64_t to,
                 uint8_t* nonfinite) {
    const Matrix own_keys = keys_in_place(call, call.k, batch, some, kv_head, pitch),
                 own_values = keys_in_place(call, call.v, batch, some, kv_head, pitch);
    rows_of_keys = own_keys.data ? Matrix{own_keys.at(from), own_keys.row} : Matrix{keys, pitch};
    if (!own_keys.data) widen_keys(call, call.k, batch, some, kv_head, from, to, pitch, keys);
    if (own_values.data) {
      rows_of_values = {own_values.at(from), own_values.row};
      if (!nonfinite || !has_nonfinite(rows_of_values.data, to - from, pitch, rows_of_values.row)) return false;
    }
    rows_of_values = {values, pitch};
    widen_keys(call, call.v, batch, some, kv_head, from, to, pitch, values);
    return nonfinite && clear_nonfinite(values, to - from, pitch, nonfinite);
  }

  void load_queries(const AttentionCall& call, const Options& options, int64_t batch, const Block<REGISTERS>& block) {
    const Matrix rows = rows_of_queries(call, call.q, batch, block, pitch, queries);
    transpose(rows, pitch, SIZE, options.scale < 0.f ? -1.f : 1.f, transposed, SIZE);
  }
  void clear_VKQ() const { memset(VKQ, 0, sizeof(float) * SIZE * pitch); }

  void score(const AttentionCall& call, int64_t key, int64_t rows, int registers) {
    product_in_pieces(MAX_SCORE_SUM, rows_of_keys.at(at_row(key)), rows_of_keys.row, transposed, SIZE, KQ, SIZE, rows,
                      registers, call.width, &fetches);
  }

  void put_weights(int64_t row, int n, Floats even, Floats odd) {
    store(KQ + row * SIZE + n * WIDTH, even), store(KQ + (row + 1) * SIZE + n * WIDTH, odd);
  }

  void add_values(const Block<REGISTERS>& block, int64_t key, int64_t rows, bool first, const float* alpha) {
    const float* from = rows_of_values.at(at_row(key));
    const int64_t used = block.count < 4 ? block.count : aligned(block.count, 4);  // lanes whose sums are wanted
    if (first)
      return product<false>(KQ, {1, SIZE}, from, rows_of_values.row, VKQ, pitch, used, pitch / WIDTH, rows, &fetches);
    for (int64_t i = 0; i < used; ++i)
      if (alpha[i] != 1.f)
        for (int64_t d = 0; d < pitch; d += WIDTH) store(VKQ + i * pitch + d, load(VKQ + i * pitch + d) * alpha[i]);
    product<true>(KQ, {1, SIZE}, from, rows_of_values.row, VKQ, pitch, used, pitch / WIDTH, rows, &fetches);
  }

  void write(const AttentionCall& call, int64_t batch, const Block<REGISTERS>& block, const float* inverse) const {
    by_dtype(call.dtype, [&](auto type) TK_LAMBDA {
      using T = typename decltype(type)::type;
      for (int64_t i = 0; i < block.count; ++i)
        narrow_row(VKQ + i * pitch, splat(inverse[i]), call.width,
                   row_of<T>(call.out, batch, block.head[i], block.query[i]));
    });
  }
};

#if defined(__AVX512BF16__)
// The same in bfloat16: K as rows, V transposed in chunks, weights rounded in pairs of keys, VKQ transposed.
template <int LANE_REGISTERS> struct Pairs {
  static constexpr int REGISTERS = LANE_REGISTERS;
  static constexpr int64_t SIZE = Block<REGISTERS>::SIZE;
  int64_t depth, height;  // of a row and of transposed rows
  bool streamed;
  Bfloat16 *keys, *values, *rows_of_values;  // (key_rows, depth), (chunks, height, CHUNK), (CHUNK, depth)
  Bfloat16* queries;                         // (SIZE, depth)
  float *KQ, *weights, *blocks;  // (CHUNK, SIZE), (CHUNK / 2, SIZE), of each block:
  float *transposed, *VKQ;          // (depth / 2, SIZE), (height, SIZE)
  uint16_t* bits;                    // (CHUNK, REGISTERS)
  Fetches fetches;
  const TileRegisters tiles;

  Pairs(const AttentionCall& call, const Options& options, int64_t key_rows, bool streams, int64_t sharing = 1)
      : depth(aligned(options.pitch, PAIR_DEPTH)), height(depth), streamed(streams),
        fetches(size_of_element(call) * call.width, REGISTERS == 1) {
    keys = scratch<Bfloat16>(KEY_ROWS, aligned(key_rows, PAIR_DEPTH) * depth);
    values = scratch<Bfloat16>(VALUE_ROWS, aligned(key_rows, CHUNK) * height);
    const int64_t size = SIZE * (depth / 2 + height);
    blocks = scratch<float>(
        WORKSPACE, sharing * size + SIZE * (CHUNK + CHUNK / 2) + (CHUNK + SIZE) * depth / 2 + CHUNK * REGISTERS / 2);
    KQ = blocks + sharing * size;
    weights = KQ + SIZE * CHUNK;
    rows_of_values = reinterpret_cast<Bfloat16*>(weights + SIZE * CHUNK / 2);
    queries = rows_of_values + CHUNK * depth;
    bits = reinterpret_cast<uint16_t*>(queries + SIZE * depth);
    choose(0);
  }
  void choose(int64_t block) {
    transposed = blocks + block * SIZE * (depth / 2 + height);
    VKQ = transposed + SIZE * depth / 2;
  }

  static int64_t first_key(int64_t low) { return low / PAIR_DEPTH * PAIR_DEPTH; }
  static int64_t rows_at(int64_t key, int64_t high) { return smaller(CHUNK - key % CHUNK, high - key); }

  bool load_keys(const AttentionCall& call, int64_t batch, const Keys& some, int64_t kv_head, int64_t from, int64_t to,
                 uint8_t* nonfinite) {
    bool any_nonfinite = false;
    Bfloat16* memory = memory_of_row<Bfloat16>(call, call.k);
    for (int64_t key = from; key < to; key += rows_at(key, to)) {
      const int64_t rows = rows_at(key, to), all = aligned(rows, PAIR_DEPTH);
      Bfloat16* row = keys + (streamed ? 0 : key * depth);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t position = row_of_key(some, key + i);
        copy_row(source_row(call, call.k, batch, kv_head, position, memory), call.width, depth, row + i * depth);
        copy_row(row_of<const Bfloat16>(call.v, batch, kv_head, position), call.width, depth,
                 rows_of_values + i * depth);
      }
      clear_rows(rows, all, depth, row), clear_rows(rows, all, depth, rows_of_values);
      if (nonfinite) any_nonfinite |= clear_nonfinite(rows_of_values, rows, depth, nonfinite + (key - from));
      transpose_rows(rows_of_values, all, depth, values_at(key), CHUNK);
    }
    return any_nonfinite;
  }

  void load_queries(const AttentionCall& call, const Options& options, int64_t batch, const Block<REGISTERS>& block) {
    Bfloat16* memory = memory_of_row<Bfloat16>(call, call.q);
    for (int64_t i = 0; i < block.count; ++i)
      copy_row(source_row(call, call.q, batch, block.head[i], block.query[i], memory), call.width, depth,
               queries + i * depth);
    clear_rows(block.count, SIZE, depth, queries);
    transpose_pairs(queries, SIZE, depth, options.scale < 0.f ? 0x80008000u : 0u, transposed, SIZE);
  }
  void clear_VKQ() const { memset(VKQ, 0, sizeof(float) * SIZE * height); }

  void score(const AttentionCall&, int64_t key, int64_t rows, int registers) {
    pair_product<false>(keys + (streamed ? 0 : key * depth), depth, transposed, SIZE, KQ, SIZE,
                        aligned(rows, PAIR_ROWS), registers, depth, &fetches);
  }

  void put_weights(int64_t row, int n, Floats even, Floats odd) {
    store(weights + row / 2 * SIZE + n * WIDTH, rounded_pairs(even, odd));
  }

  void add_values(const Block<REGISTERS>& block, int64_t key, int64_t rows, bool first, const float* alpha) {
    const int64_t all = aligned(rows, PAIR_DEPTH);
    const int used = block.registers();
    for (int64_t i = (rows + 1) / 2 * SIZE; i < all / 2 * SIZE; i += WIDTH) store(weights + i, splat(0.f));
    const Bfloat16* from = values_at(key) + (streamed ? 0 : key % CHUNK);
    if (first) return pair_product<false>(from, CHUNK, weights, SIZE, VKQ, SIZE, height, used, all, &fetches);
    for (int n = 0; n < used; ++n) {
      const Floats shrink = load(alpha + n * WIDTH);
      if (lane_bits(shrink != 1.f))
        for (int64_t d = 0; d < height; ++d)
          store(VKQ + d * SIZE + n * WIDTH, load(VKQ + d * SIZE + n * WIDTH) * shrink);
    }
    pair_product<true>(from, CHUNK, weights, SIZE, VKQ, SIZE, height, used, all, &fetches);
  }

  void write(const AttentionCall& call, int64_t batch, const Block<REGISTERS>& block, const float* inverse) const {
    for (int64_t first = 0; first < block.count; first += WIDTH)
      over_result_rows(VKQ + first, SIZE, height, load(inverse + first),
                       [&](int64_t lane, int64_t d, __m512i row) TK_LAMBDA {
        const int64_t i = first + lane;
        if (i < block.count && d < call.width)
          store_row_part(row_of<Bfloat16>(call.out, batch, block.head[i], block.query[i]), d, call.width, row);
      });
  }

 private:
  Bfloat16* values_at(int64_t key) const { return values + (streamed ? 0 : key / CHUNK * CHUNK * height); }
};
#endif

// Scores -> weights relative to the running maximum in the first REGISTERS registers; alpha: the factor of earlier
// sums. The maximum is subtracted before the change of base, which preserves the bits of large weights and keeps a bias
// of the lowest finite number finite.
template <int REGISTERS, class Operands>
inline void online_softmax(State<Operands::REGISTERS>& state, float factor, int64_t rows, bool dropped,
                           Operands& operands, float* alpha) {
  constexpr int64_t SIZE = Operands::SIZE;
  const float* KQ = operands.KQ;
  Floats top[2][REGISTERS], base[REGISTERS], total[2][REGISTERS];
  for (int n = 0; n < REGISTERS; ++n) top[0][n] = top[1][n] = state.M[n];
  for (int64_t row = 0; row + 2 <= rows; row += 2)
#pragma GCC unroll 8
    for (int i = 0; i < 2 * REGISTERS; ++i) {
      const int odd = i / REGISTERS, n = i % REGISTERS;
      top[odd][n] = maximum(load(KQ + (row + odd) * SIZE + n * WIDTH), top[odd][n]);
    }
  if (rows % 2)
    for (int n = 0; n < REGISTERS; ++n) top[0][n] = maximum(load(KQ + (rows - 1) * SIZE + n * WIDTH), top[0][n]);
  const Floats scale = splat(factor);
#pragma GCC unroll 4
  for (int n = 0; n < REGISTERS; ++n) {
    const Floats highest = maximum(top[0][n], top[1][n]);
    base[n] = highest == -INFINITY ? splat(0.f) : highest;
    const Floats shrink = exp2((state.M[n] - base[n]) * scale);
    store(alpha + n * WIDTH, shrink);
    state.S[n] = state.S[n] * shrink;
    state.M[n] = highest;
    total[0][n] = total[1][n] = splat(0.f);
  }
  const auto weight = [&](int64_t row, int n) TK_LAMBDA {
    return exp2((load(KQ + row * SIZE + n * WIDTH) - base[n]) * scale);
  };
  const auto left = [&](int64_t row, int n, Floats e) TK_LAMBDA {
    return dropped ? kept(operands.bits[row * Operands::REGISTERS + n], e) : e;
  };
  for (int64_t row = 0; row + 2 <= rows; row += 2)
#pragma GCC unroll 4
    for (int n = 0; n < REGISTERS; ++n) {
      const Floats even = weight(row, n), odd = weight(row + 1, n);
      total[0][n] += even, total[1][n] += odd;
      operands.put_weights(row, n, left(row, n, even), left(row + 1, n, odd));
    }
  if (rows % 2)
#pragma GCC unroll 4
    for (int n = 0; n < REGISTERS; ++n) {
      const Floats last = weight(rows - 1, n);
      total[0][n] += last;
      operands.put_weights(rows - 1, n, left(rows - 1, n, last), splat(0.f));
    }
  for (int n = 0; n < REGISTERS; ++n) state.S[n] += total[0][n] + total[1][n];
}

template <int REGISTERS>
inline void propagate_nonfinite(const Block<REGISTERS>& block, int64_t key, int64_t rows, const uint8_t* nonfinite,
                                State<REGISTERS>& state) {
  for (int64_t row = 0; row < rows; ++row)
    for (int n = 0; nonfinite[row] && n < REGISTERS; ++n)
      state.S[n] = sees(block, n, key + row) ? splat(NAN) : state.S[n];
}

// Flags of non-finite values, if some keys are masked.
struct NonFinite {
  uint8_t* rows;
  bool any = false;
  NonFinite(const AttentionCall& call, int64_t key_rows)
      : rows(smaller(call.left, call.right) < NO_LIMIT || call.key_ranges ? scratch<uint8_t>(NONFINITE, key_rows)
                                                                          : nullptr) {}
};

// A block of queries and the state of its softmax over its visible packed keys [first, end); `next` is the next one.
template <int REGISTERS> struct QueryTile {
  Block<REGISTERS> block;
  State<REGISTERS> state;
  int64_t first, next, end;
  void start(int64_t begin, int64_t to) { state = State<REGISTERS>(), first = next = begin, end = to; }
};

// Adds the next chunk of keys to a block's state and sums.
template <class Operands>
void attend(const AttentionCall& call, const Options& options, const Span& span, const Keys& keys, int64_t kv_head,
            QueryTile<Operands::REGISTERS>& tile, Operands& operands, NonFinite& nonfinite) {
  alignas(64) float alpha[Operands::SIZE];
  const auto& block = tile.block;
  const int64_t key = tile.next, rows = Operands::rows_at(key, tile.end);
  if (operands.streamed) {
    const auto position = [&](int64_t i) TK_LAMBDA { return HeadRow{kv_head, row_of_key(keys, i)}; };
    const int64_t next = key + CHUNK, end = smaller(next + CHUNK, tile.end);
    fetch(call, call.k, span.batch, 0, next, end, operands.fetches, position);
    fetch(call, call.v, span.batch, 0, next, end, operands.fetches, position);
    nonfinite.any = operands.load_keys(call, span.batch, keys, kv_head, key, key + rows, nonfinite.rows);
  }
  const int used = block.registers();
  operands.score(call, key, rows, used);
  float* KQ = operands.KQ;
  for (int n = 0; adjusts_scores(call, options) && n < used; ++n)
    adjust_scores(call, options, span, keys, block, n, key, key + rows, KQ);
  if (call.seed) draw_keys(call, options.dropout, span.batch, keys, block, key, key + rows, operands.bits);
  mask_keys(block, key, 0, smaller(rows, larger(0, block.all_low - key)), KQ);
  mask_keys(block, key, larger(0, smaller(rows, block.all_high - key)), rows, KQ);
  const float factor = weight_factor(call, options);
  if (used == 1) online_softmax<1>(tile.state, factor, rows, call.seed, operands, alpha);
  else online_softmax<Operands::REGISTERS>(tile.state, factor, rows, call.seed, operands, alpha);
  if (nonfinite.any) propagate_nonfinite(block, key, rows, nonfinite.rows + (operands.streamed ? 0 : key), tile.state);
  operands.add_values(block, key, rows, key == tile.first, alpha);
  tile.next = key + rows;
}

// Writes out, lse and statistics of a block.
template <class Operands>
void finish(const AttentionCall& call, const Options& options, const Span& span,
            const Block<Operands::REGISTERS>& block, const Operands& operands,
            const State<Operands::REGISTERS>& state) {
  alignas(64) float inverse[Operands::SIZE], top[Operands::SIZE], log_sum[Operands::SIZE];
  const float unit = adjusts_scores(call, options) ? 1.f : __builtin_fabsf(options.scale);
  for (int n = 0; n < Operands::REGISTERS; ++n) {
    const Floats total = state.S[n], none = splat(0.f);
    store(inverse + n * WIDTH, total == none ? none : options.dropout.scale / total);
    store(top + n * WIDTH, total == none ? splat(-INFINITY) : state.M[n] * unit);
    store(log_sum + n * WIDTH, total == none ? none : logarithm(total));
  }
  for (int64_t i = 0; i < block.count; ++i)
    write_sums(call, span.batch, block.head[i], block.query[i], top[i], log_sum[i]);
  operands.write(call, span.batch, block, inverse);
}

// One task owns every `parts`-th block of the queries that share one key head of one span.
template <class Operands>
void forward_task(const AttentionCall& call, const Options& options, int64_t task, int64_t parts) {
  constexpr int64_t SIZE = Operands::SIZE;
  const int64_t part = task % parts, kv_head = task / parts % call.kv_heads;
  const Span span = span_at(call, task / parts / call.kv_heads);
  const int64_t group = call.heads / call.kv_heads, rows = group * span.queries;
  if (part * SIZE >= rows) return;
  const Keys keys = keys_of(call, span, POSITIONS);
  const bool streamed = (part + parts) * SIZE >= rows;
  const int64_t key_rows = streamed ? CHUNK : keys.count;
  const int64_t sharing = key_rows * options.pitch > CACHED_FLOATS ? SHARING_BLOCKS : 1, step = parts * SIZE;
  Operands operands(call, options, key_rows, streamed, sharing);
  NonFinite nonfinite(call, key_rows);
  if (!streamed) nonfinite.any = operands.load_keys(call, span.batch, keys, kv_head, 0, keys.count, nonfinite.rows);
  QueryTile<Operands::REGISTERS> query_tiles[SHARING_BLOCKS];
  const auto key_position = [&](int64_t i) TK_LAMBDA { return HeadRow{kv_head, row_of_key(keys, i)}; };
  for (int64_t row = part * SIZE; row < rows; row += sharing * step) {
    const int64_t count = smaller(sharing, (rows - row + step - 1) / step);
    for (int64_t i = 0; i < count; ++i) {
      auto& block = query_tiles[i].block;
      const int64_t begin = row + i * step;
      set_block(block, call, span, keys, kv_head * group, begin, rows);
      operands.choose(i);
      operands.load_queries(call, options, span.batch, block);
      query_tiles[i].start(Operands::first_key(block.any_low), block.any_high);
      if (query_tiles[i].next >= query_tiles[i].end) operands.clear_VKQ();
      const auto query_position = [&](int64_t lane) TK_LAMBDA { return HeadRow{block.head[lane], block.query[lane]}; };
      const int64_t from = keys.count * begin / rows, to = keys.count * smaller(begin + SIZE, rows) / rows;
      fetch(call, call.k, span.batch, next_owner(call.k, call.kv_heads, kv_head, 1), from, to, operands.fetches,
            key_position);
      fetch(call, call.v, span.batch, next_owner(call.v, call.kv_heads, kv_head, 1), from, to, operands.fetches,
            key_position);
      // The next queries that use the buffers of this block; after the last ones, the next owner's.
      const int64_t next = begin + sharing * step, next_row = next < rows ? next : part * SIZE + i * step;
      fetch(call, call.q, span.batch, next < rows ? 0 : next_owner(call.q, call.kv_heads, kv_head, group), next_row,
            smaller(next_row + SIZE, rows), operands.fetches, [&](int64_t r) TK_LAMBDA {
        return HeadRow{kv_head * group + r / span.queries, span.first_query + r % span.queries};
      });
      fetch(call, call.out, span.batch, 0, 0, block.count, operands.fetches, query_position);
    }
    for (bool more = true; more;) {
      more = false;
      for (int64_t i = 0; i < count; ++i)
        if (query_tiles[i].next < query_tiles[i].end) {
          more = true;
          operands.choose(i);
          attend(call, options, span, keys, kv_head, query_tiles[i], operands, nonfinite);
        }
    }
    operands.fetches.finish();
    for (int64_t i = 0; i < count; ++i) {
      operands.choose(i);
      finish(call, options, span, query_tiles[i].block, operands, query_tiles[i].state);
    }
  }
}

// A small number of queries against many keys, in pieces of the keys that are combined for each key head ("owner").
template <int REGISTERS> struct Split {
  static constexpr int SIZE = Block<REGISTERS>::SIZE;
  int64_t rows, pieces, size;  // queries of an owner; floats of a piece: M (SIZE), S (SIZE), VKQ (rows, pitch)

  Split(const AttentionCall& call, int64_t pitch)
      : rows(call.heads / call.kv_heads * call.queries), pieces((call.keys + SPLIT_KEYS - 1) / SPLIT_KEYS),
        size(2 * SIZE + rows * pitch) {}
  float* memory(int64_t owners) const { return scratch<float>(PARTIAL, owners * pieces * size); }

  // The same as `piece` while decoding: all queries attend to the same keys.
  void decode(const AttentionCall& call, const Options& options, const Span& span, const Keys& keys, int64_t kv_head,
              const QueryTile<REGISTERS>& tile, float* result) const {
    const int64_t pitch = options.pitch;
    float* queries = scratch<float>(WORKSPACE, SIZE * (pitch + SPLIT_KEYS));
    widen_queries(call, call.q, span.batch, tile.block, pitch, queries);
    if (options.scale < 0.f)
      for (int64_t i = 0; i < tile.block.count * pitch; i += WIDTH) store(queries + i, -load(queries + i));
    for (int64_t i = 0; i < size; i += WIDTH) store(result + i, splat(i < SIZE ? -INFINITY : 0.f));
    if (tile.next < tile.end)
      decode_attention(call, span, keys, kv_head, tile.next, tile.end - tile.next, queries, tile.block.count, pitch,
                       weight_factor(call, options), queries + SIZE * pitch, result, result + SIZE, result + 2 * SIZE);
  }

  void piece(const AttentionCall& call, const Options& options, int64_t owner, int64_t index, float* result) const {
    const int64_t kv_head = owner % call.kv_heads, group = call.heads / call.kv_heads;
    const Span span = span_at(call, owner / call.kv_heads);
    const Keys keys = keys_of(call, span, POSITIONS);
    QueryTile<REGISTERS> tile;
    const Block<REGISTERS>& block = tile.block;
    const State<REGISTERS>& state = tile.state;
    set_block(tile.block, call, span, keys, kv_head * group, 0, rows);
    tile.start(larger(block.any_low, index * SPLIT_KEYS), smaller(block.any_high, (index + 1) * SPLIT_KEYS));
    if (is_decode(call, options)) return decode(call, options, span, keys, kv_head, tile, result);
    tile.first = tile.next = Wide<REGISTERS>::first_key(tile.next);
    Wide<REGISTERS> operands(call, options, CHUNK, true);
    NonFinite nonfinite(call, CHUNK);
    operands.load_queries(call, options, span.batch, block);
    if (tile.next >= tile.end) operands.clear_VKQ();
    while (tile.next < tile.end) attend(call, options, span, keys, kv_head, tile, operands, nonfinite);
    for (int n = 0; n < REGISTERS; ++n)
      store(result + n * WIDTH, state.M[n]), store(result + SIZE + n * WIDTH, state.S[n]);
    memcpy(result + 2 * SIZE, operands.VKQ, sizeof(float) * rows * options.pitch);
  }

  void combine(const AttentionCall& call, const Options& options, int64_t owner, const float* part) const {
    const int64_t kv_head = owner % call.kv_heads, group = call.heads / call.kv_heads;
    const Span span = span_at(call, owner / call.kv_heads);
    Block<REGISTERS> block;
    set_block(block, call, span, Keys{0, span.keys, nullptr, nullptr}, kv_head * group, 0, rows);
    const float factor = weight_factor(call, options);  // not 0: -inf * 0 is NaN
    State<REGISTERS> state;
    for (int64_t i = 0; i < pieces; ++i)
      for (int n = 0; n < REGISTERS; ++n) state.M[n] = maximum(load(part + i * size + n * WIDTH), state.M[n]);
    const Wide<REGISTERS> operands(call, options, CHUNK, true);
    for (int64_t i = 0; i < rows * options.pitch; i += WIDTH) store(operands.VKQ + i, splat(0.f));
    for (int64_t i = 0; i < pieces; ++i) {
      const float* each = part + i * size;
      alignas(64) float alpha[SIZE];
      for (int n = 0; n < REGISTERS; ++n) {
        const Floats finite = state.M[n] == -INFINITY ? splat(0.f) : state.M[n];
        const Floats shrink = exp2((load(each + n * WIDTH) - finite) * splat(factor));
        store(alpha + n * WIDTH, shrink);
        state.S[n] = fma(load(each + SIZE + n * WIDTH), shrink, state.S[n]);
      }
      for (int64_t row = 0; row < block.count; ++row)
        for (int64_t d = 0; d < options.pitch; d += WIDTH) {
          float* value = operands.VKQ + row * options.pitch + d;
          store(value, fma(load(each + 2 * SIZE + row * options.pitch + d), splat(alpha[row]), load(value)));
        }
    }
    finish(call, options, span, block, operands, state);
  }
};

template <class Operands> void forward(const AttentionCall& call, const Options& options) {
  constexpr int64_t SIZE = Operands::SIZE;
  const int64_t rows = call.heads / call.kv_heads * call.queries, owners = span_count(call) * call.kv_heads;
  const int64_t parts = parts_of(owners, call.cu_seqlens ? 1 : (rows + SIZE - 1) / SIZE);
  parallel_for(owners * parts, rows / parts * call.keys * call.width / (8 * span_count(call) / call.batch),
               [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) forward_task<Operands>(call, options, task, parts);
  });
}

// A task is an owner or, if there are fewer owners than threads, a piece. The pieces stored at a time then belong to
// one owner per thread, or to few owners.
template <int REGISTERS> void split_forward(const AttentionCall& call, const Options& options) {
  const int64_t owners = span_count(call) * call.kv_heads;
  const Split<REGISTERS> split(call, options.pitch);
  const int64_t pieces = split.pieces, work = SPLIT_KEYS * call.width;
  if (parts_of(owners, pieces) == 1)
    return parallel_for(owners, pieces * work, [&](int64_t begin, int64_t end) {
      float* own = split.memory(1);
      for (int64_t owner = begin; owner < end; ++owner) {
        for (int64_t i = 0; i < pieces; ++i) split.piece(call, options, owner, i, own + i * split.size);
        split.combine(call, options, owner, own);
      }
    });
  float* memory = split.memory(owners);
  parallel_for(owners * pieces, work, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task)
      split.piece(call, options, task / pieces, task % pieces, memory + task * split.size);
  });
  parallel_for(owners, pieces * split.size, [&](int64_t begin, int64_t end) {
    for (int64_t owner = begin; owner < end; ++owner)
      split.combine(call, options, owner, memory + owner * pieces * split.size);
  });
}

}  // namespace

void attention_forward(const AttentionCall& arguments) {
  const AttentionCall call = with_rotations(arguments);
  const Options options = options_of(call);
  if (call.cu_seqlens) clear_unattended(call);
  if (!span_count(call)) return;
  const int64_t rows = call.heads / call.kv_heads * call.queries;
  // In reproducible mode a query has the bits that it has among many, and pieces depend on WIDTH.
  const bool splits = !is_reproducible() && !call.cu_seqlens;
  if (splits && rows <= 2 * WIDTH && (call.keys > SPLIT_KEYS || is_decode(call, options)))
    return rows <= WIDTH ? split_forward<1>(call, options) : split_forward<2>(call, options);
#if defined(__AVX512BF16__)
  if (call.dtype == BFLOAT16 && rows > WIDTH) return forward<Pairs<2>>(call, options);
#endif
  const bool narrow = rows <= WIDTH || (call.right == 0 && call.keys <= 128);
  narrow ? forward<Wide<1>>(call, options) : forward<Wide<2>>(call, options);
}

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(attention_forward)
