// out and lse of attention: one pass over blocks of keys with a running maximum and sum (Dao 2023, algorithm 1).
#include "attention.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

constexpr int64_t CHUNK = 128;        // keys whose scores exist at one time
constexpr int64_t SLACK = 16;         // rows that a product may read or write behind the last
constexpr int64_t SPLIT_KEYS = 1024;  // a block of queries against more keys than this is split among threads

enum Slot { POSITIONS = 8, KEY_ROWS, VALUE_ROWS, WORKSPACE, PARTIAL, BROKEN };

// The softmax of a block so far; sums of weighted values are kept in memory beside it.
template <int REGISTERS> struct State {
  Floats top[REGISTERS], total[REGISTERS];
};

template <int REGISTERS> struct Workspace {
  static constexpr int SIZE = Block<REGISTERS>::SIZE;
  float *queries, *transposed, *scores, *values;  // (SIZE, pitch), (width, SIZE), (CHUNK, SIZE), (SIZE, pitch)
  uint16_t* bits;                                 // (CHUNK, REGISTERS)

  explicit Workspace(int64_t pitch) {
    queries = scratch<float>(WORKSPACE, (3 * pitch + CHUNK + SLACK) * SIZE + (CHUNK * REGISTERS + 1) / 2);
    transposed = queries + SIZE * pitch;
    values = transposed + SIZE * pitch;
    scores = values + SIZE * pitch;
    bits = reinterpret_cast<uint16_t*>(scores + (CHUNK + SLACK) * SIZE);
  }
};

// Keys and values as float32 rows: all of a task's, or those of one chunk where nothing else will read them again.
struct Packed {
  float *keys, *values;
  uint8_t* broken;  // values that are not finite, null where every query sees every key
  bool streamed, any_broken;
};

// Hides the keys [key, key + rows) from the lanes that do not see them.
template <int REGISTERS>
inline void hide(const Block<REGISTERS>& block, int64_t key, int64_t from, int64_t to, float* scores) {
  for (int64_t row = from; row < to; ++row)
    for (int n = 0; n < REGISTERS; ++n) {
      float* score = scores + row * Block<REGISTERS>::SIZE + n * WIDTH;
      store(score, sees(block, n, key + row) ? load(score) : splat(-INFINITY));
    }
}

// Scores -> weights relative to the running maximum; alpha: what earlier sums are multiplied by. The maximum is taken off
// before the change of base, which keeps the bits of large weights, and a bias of the lowest number finite.
template <int REGISTERS>
inline void weigh(State<REGISTERS>& state, float factor, int64_t rows, bool dropped, const uint16_t* bits, float* scores,
                  float* alpha) {
  constexpr int SIZE = Block<REGISTERS>::SIZE;
  Floats top[2][REGISTERS], base[REGISTERS], total[2][REGISTERS];
  for (int n = 0; n < REGISTERS; ++n) top[0][n] = top[1][n] = state.top[n];
  for (int64_t row = 0; row + 2 <= rows; row += 2)
#pragma GCC unroll 4
    for (int i = 0; i < 2 * REGISTERS; ++i)
      top[i / REGISTERS][i % REGISTERS] = maximum(load(scores + row * SIZE + i * WIDTH), top[i / REGISTERS][i % REGISTERS]);
  if (rows % 2)
    for (int n = 0; n < REGISTERS; ++n) top[0][n] = maximum(load(scores + (rows - 1) * SIZE + n * WIDTH), top[0][n]);
  const Floats scale = splat(factor);
#pragma GCC unroll 2
  for (int n = 0; n < REGISTERS; ++n) {
    const Floats highest = maximum(top[0][n], top[1][n]);
    base[n] = highest == -INFINITY ? splat(0.f) : highest;
    const Floats shrink = exp2((state.top[n] - base[n]) * scale);
    store(alpha + n * WIDTH, shrink);
    state.total[n] = state.total[n] * shrink;
    state.top[n] = highest;
    total[0][n] = total[1][n] = splat(0.f);
  }
  const auto weight = [&](int64_t row, int n) TK_LAMBDA {
    float* score = scores + row * SIZE + n * WIDTH;
    const Floats e = exp2((load(score) - base[n]) * scale);
    store(score, dropped ? kept(bits[row * REGISTERS + n], e) : e);
    return e;
  };
  for (int64_t row = 0; row + 2 <= rows; row += 2)
#pragma GCC unroll 4
    for (int i = 0; i < 2 * REGISTERS; ++i) total[i / REGISTERS][i % REGISTERS] += weight(row + i / REGISTERS, i % REGISTERS);
  if (rows % 2)
#pragma GCC unroll 2
    for (int n = 0; n < REGISTERS; ++n) total[0][n] += weight(rows - 1, n);
  for (int n = 0; n < REGISTERS; ++n) state.total[n] += total[0][n] + total[1][n];
}

// Whether some element of `count` packed rows is infinite or NaN.
inline bool is_broken(const float* rows, int64_t count, int64_t pitch) {
  Floats all = splat(0.f);
  for (int64_t i = 0; i < count * pitch; i += WIDTH) all = fma(load(rows + i), splat(0.f), all);
  return lane_bits(all != all) != 0;
}

// 0 * NaN is NaN, so a weight of 0 does not hide a value: packed values that are not finite become zeros, and whoever sees
// one of them gets NaN (see `spoil`). For keys that all lanes of a block see this changes inf to NaN at most.
inline bool clear_broken(float* values, int64_t count, int64_t pitch, uint8_t* broken) {
  constexpr int64_t GROUP = 16;
  bool any = false;
  memset(broken, 0, count);
  for (int64_t first = 0; first < count; first += GROUP) {
    const int64_t end = smaller(first + GROUP, count);
    if (!is_broken(values + first * pitch, end - first, pitch)) continue;
    for (int64_t i = first; i < end; ++i)
      if (is_broken(values + i * pitch, 1, pitch)) {
        any = broken[i] = 1;
        memset(values + i * pitch, 0, sizeof(float) * pitch);
      }
  }
  return any;
}

template <int REGISTERS>
inline void spoil(const Block<REGISTERS>& block, int64_t key, int64_t rows, const uint8_t* broken, State<REGISTERS>& state) {
  for (int64_t row = 0; row < rows; ++row)
    for (int n = 0; broken[row] && n < REGISTERS; ++n)
      state.total[n] = sees(block, n, key + row) ? splat(NAN) : state.total[n];
}

// Adds the packed keys [low, high) to a block's state and sums.
template <int REGISTERS>
void attend(const AttentionCall& call, const Options& options, const Span& span, const Keys& keys, int64_t kv_head,
            const Block<REGISTERS>& block, Packed& packed, int64_t low, int64_t high,
            Workspace<REGISTERS>& work, State<REGISTERS>& state) {
  constexpr int SIZE = Block<REGISTERS>::SIZE;
  const int64_t pitch = options.pitch, used = block.count < 4 ? block.count : aligned(block.count, 4);
  const float magnitude = __builtin_fabsf(options.scale) * LOG2_E, smallest = 1.17549435e-38f;
  alignas(64) float alpha[SIZE];
  for (int64_t key = low; key < high; key += CHUNK) {
    const int64_t rows = smaller(CHUNK, high - key);
    if (packed.streamed) {
      const auto place = [&](int64_t i) TK_LAMBDA { return Place{kv_head, row_of_key(keys, i)}; };
      const int64_t next = key + CHUNK, end = smaller(next + CHUNK, high);
      fetch(call, call.k, span.batch, 0, next, end, place);
      fetch(call, call.v, span.batch, 0, next, end, place);
      widen_keys(call, call.k, span.batch, keys, kv_head, key, key + rows, pitch, packed.keys);
      widen_keys(call, call.v, span.batch, keys, kv_head, key, key + rows, pitch, packed.values);
      if (packed.broken) packed.any_broken = clear_broken(packed.values, rows, pitch, packed.broken);
    }
    const int64_t at_row = packed.streamed ? 0 : key * pitch;
    product<false>(packed.keys + at_row, {pitch, 1}, work.transposed, SIZE, work.scores, SIZE, aligned(rows, 8), REGISTERS,
                   call.width);
    if (adjusts_scores(call, options)) adjust_scores(call, options, span, keys, block, key, key + rows, work.scores);
    if (call.seed) draw_keys(call, options.dropout, span.batch, keys, block, key, key + rows, work.bits);
    hide(block, key, 0, smaller(rows, larger(0, block.all_low - key)), work.scores);
    hide(block, key, larger(0, smaller(rows, block.all_high - key)), rows, work.scores);
    const float factor = adjusts_scores(call, options) ? LOG2_E : magnitude > smallest ? magnitude : smallest;
    weigh(state, factor, rows, call.seed, work.bits, work.scores, alpha);
    if (packed.any_broken) spoil(block, key, rows, packed.broken + (packed.streamed ? 0 : key), state);
    const float* values = packed.values + at_row;
    if (key == low) {
      product<false>(work.scores, {1, SIZE}, values, pitch, work.values, pitch, used, pitch / WIDTH, rows);
      continue;
    }
    for (int64_t i = 0; i < used; ++i)
      if (alpha[i] != 1.f)
        for (int64_t d = 0; d < pitch; d += WIDTH)
          store(work.values + i * pitch + d, load(work.values + i * pitch + d) * alpha[i]);
    product<true>(work.scores, {1, SIZE}, values, pitch, work.values, pitch, used, pitch / WIDTH, rows);
  }
}

// Writes out and lse of a block.
template <int REGISTERS>
void finish(const AttentionCall& call, const Options& options, const Span& span, const Block<REGISTERS>& block,
            const float* values, const State<REGISTERS>& state) {
  constexpr int SIZE = Block<REGISTERS>::SIZE;
  alignas(64) float inverse[SIZE], lse[SIZE];
  const float unit = adjusts_scores(call, options) ? 1.f : __builtin_fabsf(options.scale);
  for (int n = 0; n < REGISTERS; ++n) {
    const Floats total = state.total[n], none = splat(0.f);
    store(inverse + n * WIDTH, total == none ? none : options.dropout.scale / total);
    store(lse + n * WIDTH, total == none ? splat(-INFINITY) : state.top[n] * unit + logarithm(total));
  }
  for (int64_t i = 0; i < block.count; ++i)
    at<float>(call.lse)[(span.batch * call.heads + block.head[i]) * call.queries + block.query[i]] = lse[i];
  by_dtype(call.dtype, [&](auto type) TK_LAMBDA {
    using T = typename decltype(type)::type;
    for (int64_t i = 0; i < block.count; ++i)
      narrow_row(values + i * options.pitch, splat(inverse[i]), call.width, row_of<T>(call.out, span.batch, block.head[i], block.query[i]));
  });
}

template <int REGISTERS>
void prepare(const AttentionCall& call, const Options& options, const Span& span, const Block<REGISTERS>& block,
             Workspace<REGISTERS>& work, State<REGISTERS>& state) {
  widen_queries(call, call.q, span.batch, block, options.pitch, work.queries);
  transpose(work.queries, options.pitch, Block<REGISTERS>::SIZE, options.scale < 0.f ? -1.f : 1.f, work.transposed,
            Block<REGISTERS>::SIZE);
  for (int64_t i = 0; i < Block<REGISTERS>::SIZE * options.pitch; i += WIDTH) store(work.values + i, splat(0.f));
  for (int n = 0; n < REGISTERS; ++n) state.top[n] = splat(-INFINITY), state.total[n] = splat(0.f);
}

// One task owns every `parts`-th block of the queries that share one key head of one span.
template <int REGISTERS>
void forward_task(const AttentionCall& call, const Options& options, int64_t task, int64_t parts) {
  constexpr int SIZE = Block<REGISTERS>::SIZE;
  const int64_t part = task % parts, kv_head = task / parts % call.kv_heads;
  const Span span = span_at(call, task / parts / call.kv_heads);
  const int64_t group = call.heads / call.kv_heads, rows = group * span.queries, pitch = options.pitch;
  if (part * SIZE >= rows) return;
  const Keys keys = keys_of(call, span, POSITIONS);
  const bool streamed = (part + parts) * SIZE >= rows;
  const int64_t held = (streamed ? CHUNK : keys.count) + SLACK;
  const bool hides = call.causal || call.window >= 0;
  Packed packed{scratch<float>(KEY_ROWS, held * pitch), scratch<float>(VALUE_ROWS, held * pitch),
                hides ? scratch<uint8_t>(BROKEN, held) : nullptr, streamed, false};
  if (!streamed) {
    widen_keys(call, call.k, span.batch, keys, kv_head, 0, keys.count, pitch, packed.keys);
    widen_keys(call, call.v, span.batch, keys, kv_head, 0, keys.count, pitch, packed.values);
    if (hides) packed.any_broken = clear_broken(packed.values, keys.count, pitch, packed.broken);
  }
  Workspace<REGISTERS> work(pitch);
  Block<REGISTERS> block;
  State<REGISTERS> state;
  const auto key_place = [&](int64_t i) TK_LAMBDA { return Place{kv_head, row_of_key(keys, i)}; };
  const auto query_place = [&](int64_t i) TK_LAMBDA { return Place{block.head[i], block.query[i]}; };
  for (int64_t row = part * SIZE; row < rows; row += parts * SIZE) {
    set_block(block, call, span, keys, kv_head * group, row, rows);
    prepare(call, options, span, block, work, state);
    const int64_t from = keys.count * row / rows, to = keys.count * smaller(row + SIZE, rows) / rows;
    fetch(call, call.k, span.batch, next_owner(call.k, call.kv_heads, kv_head, 1), from, to, key_place);
    fetch(call, call.v, span.batch, next_owner(call.v, call.kv_heads, kv_head, 1), from, to, key_place);
    fetch(call, call.q, span.batch, next_owner(call.q, call.kv_heads, kv_head, group), 0, block.count, query_place);
    fetch<true>(call, call.out, span.batch, 0, 0, block.count, query_place);
    attend(call, options, span, keys, kv_head, block, packed, block.any_low, block.any_high, work, state);
    finish(call, options, span, block, work.values, state);
  }
}

// Few queries against many keys. One task owns one piece of the keys; then the pieces of each head are put together.
template <int REGISTERS> struct Split {
  static constexpr int SIZE = Block<REGISTERS>::SIZE;
  int64_t pieces, size;  // floats of a piece: top, total, sums
  float* memory;

  Split(const AttentionCall& call, int64_t pitch) {
    pieces = (call.keys + SPLIT_KEYS - 1) / SPLIT_KEYS;
    size = SIZE * (2 + pitch);
    memory = scratch<float>(PARTIAL, call.batch * call.kv_heads * pieces * size);
  }

  void piece(const AttentionCall& call, const Options& options, int64_t task) const {
    const int64_t index = task % pieces, kv_head = task / pieces % call.kv_heads, group = call.heads / call.kv_heads;
    const Span span = span_at(call, task / pieces / call.kv_heads);
    const Keys keys = keys_of(call, span, POSITIONS);
    const int64_t held = (CHUNK + SLACK) * options.pitch;
    Packed packed{scratch<float>(KEY_ROWS, held), scratch<float>(VALUE_ROWS, held),
                  call.causal || call.window >= 0 ? scratch<uint8_t>(BROKEN, CHUNK + SLACK) : nullptr, true, false};
    Workspace<REGISTERS> work(options.pitch);
    Block<REGISTERS> block;
    State<REGISTERS> state;
    set_block(block, call, span, keys, kv_head * group, 0, group * span.queries);
    prepare(call, options, span, block, work, state);
    const int64_t low = larger(block.any_low, index * SPLIT_KEYS), high = smaller(block.any_high, (index + 1) * SPLIT_KEYS);
    attend(call, options, span, keys, kv_head, block, packed, low, high, work, state);
    float* result = memory + task * size;
    for (int n = 0; n < REGISTERS; ++n) store(result + n * WIDTH, state.top[n]), store(result + SIZE + n * WIDTH, state.total[n]);
    memcpy(result + 2 * SIZE, work.values, sizeof(float) * SIZE * options.pitch);
  }

  void join(const AttentionCall& call, const Options& options, int64_t task) const {
    const int64_t kv_head = task % call.kv_heads, group = call.heads / call.kv_heads;
    const Span span = span_at(call, task / call.kv_heads);
    Block<REGISTERS> block;
    set_block(block, call, span, Keys{0, span.keys, nullptr, nullptr}, kv_head * group, 0, group * span.queries);
    const float* part = memory + task * pieces * size;
    const float factor = adjusts_scores(call, options) ? LOG2_E : __builtin_fabsf(options.scale) * LOG2_E;
    State<REGISTERS> state;
    for (int n = 0; n < REGISTERS; ++n) state.top[n] = splat(-INFINITY), state.total[n] = splat(0.f);
    for (int64_t i = 0; i < pieces; ++i)
      for (int n = 0; n < REGISTERS; ++n) state.top[n] = maximum(load(part + i * size + n * WIDTH), state.top[n]);
    Workspace<REGISTERS> work(options.pitch);
    for (int64_t i = 0; i < SIZE * options.pitch; i += WIDTH) store(work.values + i, splat(0.f));
    for (int64_t i = 0; i < pieces; ++i) {
      const float* each = part + i * size;
      alignas(64) float alpha[SIZE];
      for (int n = 0; n < REGISTERS; ++n) {
        const Floats finite = state.top[n] == -INFINITY ? splat(0.f) : state.top[n];
        const Floats shrink = exp2((load(each + n * WIDTH) - finite) * splat(factor));
        store(alpha + n * WIDTH, shrink);
        state.total[n] = fma(load(each + SIZE + n * WIDTH), shrink, state.total[n]);
      }
      for (int64_t row = 0; row < block.count; ++row)
        for (int64_t d = 0; d < options.pitch; d += WIDTH) {
          float* value = work.values + row * options.pitch + d;
          store(value, fma(load(each + 2 * SIZE + row * options.pitch + d), splat(alpha[row]), load(value)));
        }
    }
    finish(call, options, span, block, work.values, state);
  }
};

template <int REGISTERS> void forward(const AttentionCall& call, const Options& options) {
  constexpr int64_t SIZE = Block<REGISTERS>::SIZE;
  const int64_t rows = call.heads / call.kv_heads * call.queries, owners = span_count(call) * call.kv_heads;
  if (!call.starts && rows <= SIZE && call.keys > SPLIT_KEYS) {
    const Split<REGISTERS> split(call, options.pitch);
    parallel_for(owners * split.pieces, SPLIT_KEYS * call.width, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) split.piece(call, options, task);
    });
    parallel_for(owners, split.pieces * split.size, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) split.join(call, options, task);
    });
    return;
  }
  const int64_t parts = parts_of(owners, call.starts ? 1 : (rows + SIZE - 1) / SIZE);
  parallel_for(owners * parts, rows / parts * call.keys * call.width / (8 * span_count(call) / call.batch), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) forward_task<REGISTERS>(call, options, task, parts);
  });
}

// Tokens behind the last of packed sequences see nothing.
void clear_filler(const AttentionCall& call) {
  by_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t head = 0; head < call.heads; ++head)
      for (int64_t row = at<int32_t>(call.starts)[call.sequences]; row < call.queries; ++row) {
        memset(row_of<T>(call.out, 0, head, row), 0, sizeof(T) * call.width);
        at<float>(call.lse)[head * call.queries + row] = -INFINITY;
      }
  });
}

}  // namespace

// The call's tensors as an AttentionCall; scale of q k^T; the probability of dropout; what bounds scores, 0 without.
void attention_forward(Address packed_call, double scale, double dropout_p, double softcap) {
  const AttentionCall& call = *at<const AttentionCall>(packed_call);
  const Options options = options_of(call, scale, dropout_p, softcap);
  if (call.starts) clear_filler(call);
  const bool narrow = call.heads / call.kv_heads * call.queries <= WIDTH || (call.causal && call.keys <= 128);
  narrow ? forward<1>(call, options) : forward<2>(call, options);
}

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(attention_forward)
