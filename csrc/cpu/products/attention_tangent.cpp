// out and lse of attention and their tangents dout and dlse, given the tangents of q, k and v (dq, dk and dv of the
// call): the forward pass, in which each score s has a tangent s' = scale (k q' + k' q). Of weights w = exp(s),
// lse' = sum(w s') / sum(w) and out' = (sum(w s' v) + sum(w v')) / sum(w) - lse' out.
#include "attention.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

constexpr int64_t CHUNK = 64;  // keys whose scores exist at one time
constexpr int64_t SLACK = 16;  // rows between buffers: at multiples of a page they would share few cache sets

enum Slot { POSITIONS = 8, KEY_ROWS, WORKSPACE };

// Of a block and the keys so far: the largest scores, the sums of weights and of weights times tangents of scores.
template <int REGISTERS> struct Sums {
  Floats top[REGISTERS], weights[REGISTERS], changes[REGISTERS];
  Sums() {
    for (int n = 0; n < REGISTERS; ++n) top[n] = splat(-INFINITY), weights[n] = changes[n] = splat(0.f);
  }
};

// Scratch buffers of one thread in float32. The tangents of q, k and v, dq, dk and dv, may be absent.
template <int LANE_REGISTERS> struct Tile {
  static constexpr int REGISTERS = LANE_REGISTERS;
  static constexpr int64_t SIZE = Block<REGISTERS>::SIZE;
  int64_t pitch;  // floats in a packed row
  Matrix k, v, dk, dv;  // all packed keys: the call's rows, or copies
  float *rows, *q, *dq, *out, *dout;  // of queries: (SIZE, pitch), transposed (pitch, SIZE) twice, (SIZE, pitch)
  float *weights, *changes, *cap_slopes;  // (CHUNK, SIZE): S^T then P^T, S'^T then (P S')^T, where scores are capped
  uint16_t* bits;  // (CHUNK, REGISTERS)

  explicit Tile(const Options& options) : pitch(options.pitch) {
    const int64_t of_queries = SIZE * pitch, of_scores = (CHUNK + SLACK) * SIZE;
    rows = scratch<float>(WORKSPACE, 5 * of_queries + 3 * of_scores + (CHUNK * REGISTERS + 1) / 2);
    q = rows + of_queries, dq = q + of_queries, out = dq + of_queries, dout = out + of_queries;
    weights = dout + of_queries, changes = weights + of_scores, cap_slopes = changes + of_scores;
    bits = reinterpret_cast<uint16_t*>(cap_slopes + of_scores);
  }

  void load_keys(const AttentionCall& call, int64_t batch, const Keys& keys, int64_t kv_head) {
    float* copies = scratch<float>(KEY_ROWS, 4 * keys.count * pitch);
    const auto rows_of = [&](const View& tensor, int64_t index) {
      if (!tensor.data) return Matrix{};
      const Matrix own = keys_in_place(call, tensor, batch, keys, kv_head, pitch);
      if (own.data) return own;
      float* packed = copies + index * keys.count * pitch;
      widen_keys(call, tensor, batch, keys, kv_head, 0, keys.count, pitch, packed);
      return Matrix{packed, pitch};
    };
    k = rows_of(call.k, 0), v = rows_of(call.v, 1), dk = rows_of(call.dk, 2), dv = rows_of(call.dv, 3);
  }

  void load_queries(const AttentionCall& call, const Options& options, int64_t batch, const Block<REGISTERS>& block) {
    const float sign = options.scale < 0.f ? -1.f : 1.f;
    transpose(rows_of_queries(call, call.q, batch, block, pitch, rows), pitch, SIZE, sign, q, SIZE);
    if (call.dq.data) transpose(rows_of_queries(call, call.dq, batch, block, pitch, rows), pitch, SIZE, sign, dq, SIZE);
    memset(out, 0, sizeof(float) * 2 * SIZE * pitch);
  }

  // S^T and, but for the scale, S'^T of keys [key, key + count).
  void score(const AttentionCall& call, int64_t key, int64_t count, int registers) const {
    product_in_pieces(MAX_SCORE_SUM, k.at(key), k.row, q, SIZE, weights, SIZE, count, registers, call.width, nullptr);
    if (call.dq.data)
      product_in_pieces(MAX_SCORE_SUM, k.at(key), k.row, dq, SIZE, changes, SIZE, count, registers, call.width,
                        nullptr);
    else memset(changes, 0, sizeof(float) * count * SIZE);
    for (int64_t d = 0; call.dk.data && d < call.width; d += MAX_SCORE_SUM)
      product<true>(dk.at(key) + d, {dk.row, 1}, q + d * SIZE, SIZE, changes, SIZE, count, registers,
                    smaller(MAX_SCORE_SUM, call.width - d), nullptr);
  }

  // Multiplies the sums by alpha, then adds the values and their tangents of keys [key, key + count).
  void add_values(const AttentionCall& call, const Block<REGISTERS>& block, int64_t key, int64_t count,
                  const float* alpha) const {
    const int64_t used = block.count < 4 ? block.count : aligned(block.count, 4);  // lanes whose sums are wanted
    for (int64_t i = 0; i < used; ++i)
      if (alpha[i] != 1.f)
        for (int64_t d = i * pitch; d < (i + 1) * pitch; d += WIDTH)
          store(out + d, load(out + d) * alpha[i]), store(dout + d, load(dout + d) * alpha[i]);
    const auto add = [&](const float* by, const Matrix& values, float* to) {
      product<true>(by, {1, SIZE}, values.at(key), values.row, to, pitch, used, pitch / WIDTH, count, nullptr);
    };
    add(weights, v, out);
    if (call.dq.data || call.dk.data) add(changes, v, dout);
    if (call.dv.data) add(weights, dv, dout);
  }
};

// Scores and their tangents -> the factors of the values, relative to the largest score so far, in register n;
// alpha: the factor of earlier sums.
template <class Tile>
void weigh(const AttentionCall& call, const Options& options, int n, int64_t count, const Tile& tile,
           Sums<Tile::REGISTERS>& sums, float* alpha) {
  constexpr int64_t SIZE = Tile::SIZE;
  const Floats factor = splat(weight_factor(call, options)), scale = splat(__builtin_fabsf(options.scale));
  Floats top = sums.top[n], total = splat(0.f), change = splat(0.f);
  for (int64_t at = n * WIDTH; at < count * SIZE; at += SIZE) top = maximum(load(tile.weights + at), top);
  const Floats base = top == -INFINITY ? splat(0.f) : top;
  for (int64_t row = 0; row < count; ++row) {
    const int64_t at = row * SIZE + n * WIDTH;
    Floats weight = exp2((load(tile.weights + at) - base) * factor), slope = scale;
    if (options.softcap > 0.f) slope = slope * load(tile.cap_slopes + at);
    Floats product = weight * (load(tile.changes + at) * slope);
    total += weight, change += product;
    if (call.seed) {
      const uint32_t bits = tile.bits[row * Tile::REGISTERS + n];
      weight = kept(bits, weight), product = kept(bits, product);
    }
    store(tile.weights + at, weight), store(tile.changes + at, product);
  }
  const Floats shrink = exp2((sums.top[n] - base) * factor);
  store(alpha + n * WIDTH, shrink);
  sums.weights[n] = fma(sums.weights[n], shrink, total), sums.changes[n] = fma(sums.changes[n], shrink, change);
  sums.top[n] = top;
}

// Adds the packed keys [key, key + count).
template <class Tile>
void attend(const AttentionCall& call, const Options& options, const Span& span, const Keys& keys,
            const Block<Tile::REGISTERS>& block, int64_t key, int64_t count, const Tile& tile,
            Sums<Tile::REGISTERS>& sums) {
  alignas(64) float alpha[Tile::SIZE];
  const int used = block.registers();
  tile.score(call, key, count, used);
  for (int n = 0; adjusts_scores(call, options) && n < used; ++n)
    adjust_scores(call, options, span, keys, block, n, key, key + count, tile.weights, tile.cap_slopes);
  if (call.seed) draw_keys(call, options.dropout, span.batch, keys, block, key, key + count, tile.bits);
  mask_keys(block, key, 0, smaller(count, larger(0, block.all_low - key)), tile.weights);
  mask_keys(block, key, larger(0, smaller(count, block.all_high - key)), count, tile.weights);
  for (int n = 0; n < used; ++n) weigh(call, options, n, count, tile, sums, alpha);
  tile.add_values(call, block, key, count, alpha);
}

template <class Tile>
void finish(const AttentionCall& call, const Options& options, const Span& span, const Block<Tile::REGISTERS>& block,
            const Tile& tile, const Sums<Tile::REGISTERS>& sums) {
  alignas(64) float inverse[Tile::SIZE], top[Tile::SIZE], log_sum[Tile::SIZE], change[Tile::SIZE];
  const Floats unit = splat(adjusts_scores(call, options) ? 1.f : __builtin_fabsf(options.scale)), none = splat(0.f);
  for (int n = 0; n < block.registers(); ++n) {
    const Floats total = sums.weights[n];
    store(inverse + n * WIDTH, total == none ? none : options.dropout.scale / total);
    store(top + n * WIDTH, total == none ? splat(-INFINITY) : sums.top[n] * unit);
    store(log_sum + n * WIDTH, total == none ? none : logarithm(total));
    store(change + n * WIDTH, total == none ? none : sums.changes[n] / total);
  }
  by_dtype(call.dtype, [&](auto type) TK_LAMBDA {
    using T = typename decltype(type)::type;
    for (int64_t i = 0; i < block.count; ++i) {
      const int64_t head = block.head[i], query = block.query[i];
      float *out = tile.out + i * tile.pitch, *dout = tile.dout + i * tile.pitch;
      const Floats kept = splat(inverse[i]), rate = splat(-change[i]);
      for (int64_t d = 0; d < tile.pitch; d += WIDTH) {
        const Floats value = load(out + d) * kept;
        store(out + d, value), store(dout + d, fma(value, rate, load(dout + d) * kept));
      }
      narrow_row(out, splat(1.f), call.width, row_of<T>(call.out, span.batch, head, query));
      narrow_row(dout, splat(1.f), call.width, row_of<T>(call.dout, span.batch, head, query));
      write_sums(call, span.batch, head, query, top[i], log_sum[i], change[i]);
    }
  });
}

// One task owns every `parts`-th block of the queries that share one key head of one span.
template <int REGISTERS>
void tangent_task(const AttentionCall& call, const Options& options, int64_t task, int64_t parts) {
  constexpr int64_t SIZE = Block<REGISTERS>::SIZE;
  const int64_t part = task % parts, kv_head = task / parts % call.kv_heads;
  const Span span = span_at(call, task / parts / call.kv_heads);
  const int64_t group = call.heads / call.kv_heads, rows = group * span.queries;
  if (part * SIZE >= rows) return;
  const Keys keys = keys_of(call, span, POSITIONS);
  Tile<REGISTERS> tile(options);
  tile.load_keys(call, span.batch, keys, kv_head);
  Block<REGISTERS> block;
  for (int64_t row = part * SIZE; row < rows; row += parts * SIZE) {
    set_block(block, call, span, keys, kv_head * group, row, rows);
    tile.load_queries(call, options, span.batch, block);
    Sums<REGISTERS> sums;
    for (int64_t key = block.any_low, count; key < block.any_high; key += count) {
      count = smaller(CHUNK - key % CHUNK, block.any_high - key);
      attend(call, options, span, keys, block, key, count, tile, sums);
    }
    finish(call, options, span, block, tile, sums);
  }
}

template <int REGISTERS> void tangent(const AttentionCall& call, const Options& options) {
  constexpr int64_t SIZE = Block<REGISTERS>::SIZE;
  const int64_t rows = call.heads / call.kv_heads * call.queries, owners = span_count(call) * call.kv_heads;
  const int64_t parts = parts_of(owners, call.cu_seqlens ? 1 : (rows + SIZE - 1) / SIZE);
  parallel_for(owners * parts, rows / parts * call.keys * call.width / (3 * span_count(call) / call.batch),
               [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) tangent_task<REGISTERS>(call, options, task, parts);
  });
}

}  // namespace

void attention_tangent(const AttentionCall& arguments) {
  const AttentionCall call = with_rotations(arguments);
  const Options options = options_of(call);
  if (call.cu_seqlens) clear_unattended(call);
  if (!span_count(call)) return;
  const int64_t rows = call.heads / call.kv_heads * call.queries;
  const bool narrow = rows <= WIDTH || (call.right == 0 && call.keys <= 128);
  narrow ? tangent<1>(call, options) : tangent<2>(call, options);
}

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(attention_tangent)
