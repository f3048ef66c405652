// A tile of attention's backward pass, and its operands: in float32,
// and in bfloat16 where the processor multiplies that.
#pragma once
#include "attention.h"
#include "pairs.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

constexpr int64_t SIZE = 64;             // queries of a tile
constexpr int REGISTERS = SIZE / WIDTH;
using Queries = Block<REGISTERS>;
constexpr int64_t CHUNK = 64;            // keys of a tile
constexpr int64_t SLACK = 16;            // rows between buffers: at page multiples they would share few cache sets
constexpr int64_t SMALL_BLOCK = 16;      // queries
constexpr int64_t SHORT_SUM = 16;        // columns that one register adds up for a small block
// Floats of keys, of values and of each one's gradients that stay in the second-level cache with a block of queries:
// all blocks are read from memory once for these keys, not once for each chunk.
constexpr int64_t CACHED_FLOATS = 32768;

enum Slot { POSITIONS = 8, CHUNK_ROWS, TILE, QUERY_BLOCKS, LANES_OF_BLOCKS };

// A block of queries: visible keys and statistics of each lane. Operands store more in `memory`.
struct QueryBlock {
  Queries lanes;
  int64_t any_low[REGISTERS], any_high[REGISTERS], all_low[REGISTERS], all_high[REGISTERS];
  bool whole;                   // all keys visible to any lane are in one tile
  // (SIZE): largest score, +inf in rows without keys; log of the sum; sum(out dout), unless whole, - dlse
  float *base, *log_sum, *delta;
  Matrix q, dout;               // (SIZE, pitch), of Wide: in `memory`, or the call's in place
  float* memory;
  static constexpr int64_t FLOATS = 3 * SIZE;
};

// The scores of one tile.
struct Tile {
  float *weights, *gradients;  // (CHUNK + SLACK, SIZE): S^T then P^T, dP^T then dS^T
  float* cap_slopes;           // (CHUNK, SIZE), null where scores are not capped
  uint16_t* bits;              // (CHUNK, REGISTERS)
  int64_t low[REGISTERS], high[REGISTERS];  // the rows visible to any lane of a register
  explicit Tile(bool capped) {
    const int64_t size = (CHUNK + SLACK) * SIZE, slopes = capped ? CHUNK * SIZE : 0;
    weights = scratch<float>(TILE, 2 * size + slopes + CHUNK * REGISTERS / 2);
    gradients = weights + size;
    cap_slopes = capped ? gradients + size : nullptr;
    bits = reinterpret_cast<uint16_t*>(gradients + size + slopes);
  }
  bool is_empty(int n) const { return low[n] >= high[n]; }
};

// Calls f(begin, end, first, last) for runs of rows in steps of STEP, some of them visible to registers [first, last).
template <int STEP, class F> TK_INLINE void over_key_runs(const Tile& tile, int64_t rows, const F& f) {
  int64_t begin = 0;
  int first = 0, last = 0;
  for (int64_t row = 0; row < rows; row += STEP) {
    int low = REGISTERS, high = 0;
    for (int n = 0; n < REGISTERS; ++n)
      if (tile.low[n] < row + STEP && tile.high[n] > row && !tile.is_empty(n)) low = n < low ? n : low, high = n + 1;
    if (low > high) low = high = 0;
    if (row && (low != first || high != last)) {
      if (first < last) f(begin, row, first, last);
      begin = row;
    }
    first = low, last = high;
  }
  if (first < last) f(begin, aligned(rows, STEP), first, last);
}

// Calls f(n, count) for adjacent registers with the same visible keys, at least one.
template <class F> TK_INLINE void over_query_runs(const Tile& tile, const F& f) {
  for (int n = 0, end; n < REGISTERS; n = end) {
    for (end = n + 1; end < REGISTERS && tile.low[end] == tile.low[n] && tile.high[end] == tile.high[n];) ++end;
    if (!tile.is_empty(n)) f(n, end - n);
  }
}

// Scratch buffers in float32: keys, values and their gradients, for all cached chunks and for one; q and dout of a
// block of queries, both also transposed, and dq.
struct Wide {
  static constexpr int SCORE_ROWS = 1, ROWS = 8;  // keys whose scores, and whose gradients, are computed together
  int64_t pitch, size;            // floats in a row, and of each tensor in `buffers`
  float* buffers;                    // keys, values, dkeys, dvalues: (chunks * CHUNK + SLACK, pitch)
  float *dkeys, *dvalues;
  Matrix keys, values, own_keys, own_values;  // own: the call's, where they can be read in place
  Fetches* fetches;

  Wide(const Options& options, int64_t chunks, Fetches* to_fetch)
      : pitch(options.pitch), size((chunks * CHUNK + SLACK) * pitch), buffers(scratch<float>(CHUNK_ROWS, 4 * size)),
        fetches(to_fetch) {
    select_chunk(0, 0);
  }
  void select_chunk(int64_t chunk, int64_t key) {
    float* packed = buffers + chunk * CHUNK * pitch;
    dkeys = packed + 2 * size, dvalues = dkeys + size;
    place_keys(packed, key);
  }
  void place_keys(const float* packed, int64_t key) {
    keys = own_keys.data ? Matrix{own_keys.at(key), own_keys.row} : Matrix{packed, pitch};
    values = own_values.data ? Matrix{own_values.at(key), own_values.row} : Matrix{packed + size, pitch};
  }
  void clear_key_gradients() const { memset(buffers + 2 * size, 0, sizeof(float) * 2 * size); }
  int64_t floats_of_block() const { return QueryBlock::FLOATS + 5 * SIZE * pitch; }
  float* q_transposed(const QueryBlock& block) const { return block.memory + 2 * SIZE * pitch; }
  float* dout_transposed(const QueryBlock& block) const { return block.memory + 3 * SIZE * pitch; }
  float* dq(const QueryBlock& block) const { return block.memory + 4 * SIZE * pitch; }

  void load_queries(const AttentionCall& call, const Options& options, int64_t batch, QueryBlock& block) const {
    block.dout = rows_of_queries(call, call.dout, batch, block.lanes, pitch, block.memory + SIZE * pitch);
    block.q = rows_of_queries(call, call.q, batch, block.lanes, pitch, block.memory);
    memset(dq(block), 0, sizeof(float) * SIZE * pitch);
    transpose(block.q, pitch, SIZE, options.scale < 0.f ? -1.f : 1.f, q_transposed(block), SIZE);
    transpose(block.dout, pitch, SIZE, 1.f, dout_transposed(block), SIZE);
  }

  void load_keys(const AttentionCall& call, int64_t batch, const Keys& some, int64_t kv_head, int64_t key,
                 int64_t rows) {
    own_keys = keys_in_place(call, call.k, batch, some, kv_head, pitch),
    own_values = keys_in_place(call, call.v, batch, some, kv_head, pitch);
    if (!own_keys.data) widen_keys(call, call.k, batch, some, kv_head, key, key + rows, pitch, dkeys - 2 * size);
    if (!own_values.data) widen_keys(call, call.v, batch, some, kv_head, key, key + rows, pitch, dvalues - 2 * size);
    place_keys(dkeys - 2 * size, key);
  }

  // S^T and dP^T of `count` keys from `low` on and of `registers` queries.
  void score(const AttentionCall& call, const QueryBlock& block, int64_t low, int64_t count, int n, int registers,
             Tile& tile) const {
    const int64_t column = n * WIDTH, at_tile = low * SIZE + column;
    // Where eager PyTorch's own sums are short.
    const int64_t longest = block.lanes.count <= SMALL_BLOCK ? SHORT_SUM : MAX_SCORE_SUM;
    const auto multiply = [&](const Matrix& rows, const float* columns, float* to) TK_LAMBDA {
      product_in_pieces(longest, rows.at(low), rows.row, columns + column, SIZE, to + at_tile, SIZE, count, registers,
                        call.width, fetches);
    };
    multiply(keys, q_transposed(block), tile.weights), multiply(values, dout_transposed(block), tile.gradients);
  }

  // Weights and gradients of fully masked scores, up to whole groups or registers of rows, become 0.
  void complete(int64_t rows, Tile& tile) const {
    for (int n = 0; n < REGISTERS; ++n)
      for (int64_t row = 0; row < aligned(rows, larger(ROWS, SUM_LANES)); ++row)
        if (row < tile.low[n] || row >= tile.high[n])
          store(tile.weights + row * SIZE + n * WIDTH, splat(0.f)),
              store(tile.gradients + row * SIZE + n * WIDTH, splat(0.f));
  }

  // dV += P^T dO and dK += dS^T Q, from the registers with visible keys in a group.
  void add_key_gradients(const AttentionCall& call, int64_t rows, const QueryBlock& block, const Tile& tile) const {
    over_key_runs<ROWS>(tile, rows, [&](int64_t begin, int64_t end, int first, int last) TK_LAMBDA {
      const int64_t query = first * WIDTH, from = begin * SIZE + query, depth = (last - first) * WIDTH;
      if (call.dv.data)
        product<true>(tile.weights + from, {SIZE, 1}, block.dout.at(query), block.dout.row, dvalues + begin * pitch,
                      pitch, end - begin, pitch / WIDTH, depth, fetches);
      if (call.dk.data)
        product<true>(tile.gradients + from, {SIZE, 1}, block.q.at(query), block.q.row, dkeys + begin * pitch, pitch,
                      end - begin, pitch / WIDTH, depth, fetches);
    });
  }

  // dQ += dS K.
  void add_query_gradients(const QueryBlock& block, const Tile& tile) const {
    over_query_runs(tile, [&](int n, int count) TK_LAMBDA {
      const int64_t low = tile.low[n];
      product<true>(tile.gradients + low * SIZE + n * WIDTH, {1, SIZE}, keys.at(low), keys.row,
                    dq(block) + n * WIDTH * pitch, pitch, count * WIDTH, pitch / WIDTH, tile.high[n] - low, fetches);
    });
  }

  template <class T>
  void write_queries(const AttentionCall& call, int64_t batch, const QueryBlock& block, float scale) const {
    for (int64_t i = 0; i < block.lanes.count; ++i)
      narrow_row(dq(block) + i * pitch, splat(scale), call.width,
                 row_of<T>(call.dq, batch, block.lanes.head[i], block.lanes.query[i]));
  }
};

#if defined(__AVX512BF16__)
// The same in bfloat16. P^T and dS^T are rounded as rows, which multiply q and dout, and dS^T also in pairs of rows,
// which the transposed keys multiply; dq is transposed.
struct Pairs {
  static constexpr int SCORE_ROWS = PAIR_ROWS, ROWS = PAIR_ROWS;
  int64_t pitch, size;
  // dkeys and dvalues, then in bfloat16 keys, values and keys transposed: (chunks * CHUNK + SLACK, pitch)
  float* buffers;
  Bfloat16 *keys, *values, *keys_transposed;  // of one chunk: the last (pitch, CHUNK)
  float *dkeys, *dvalues;
  Bfloat16 *weights, *gradients, *rows_of_queries;  // (CHUNK, SIZE) twice, (SIZE, pitch)
  float* gradient_pairs;                            // (CHUNK / 2, SIZE)
  Fetches* fetches;
  const TileRegisters tiles;

  Pairs(const Options& options, int64_t chunks, Fetches* to_fetch)
      : pitch(aligned(options.pitch, PAIR_DEPTH)), size((chunks * CHUNK + SLACK) * pitch),
        buffers(scratch<float>(CHUNK_ROWS, 2 * size + 3 * size / 2 + SIZE * pitch / 2 + 3 * CHUNK * SIZE / 2)),
        fetches(to_fetch) {
    gradient_pairs = buffers + 2 * size + 3 * size / 2;
    weights = reinterpret_cast<Bfloat16*>(gradient_pairs + CHUNK * SIZE / 2), gradients = weights + CHUNK * SIZE;
    rows_of_queries = gradients + CHUNK * SIZE;
    select_chunk(0, 0);
  }
  void select_chunk(int64_t chunk, int64_t) {
    dkeys = buffers + chunk * CHUNK * pitch, dvalues = dkeys + size;
    keys = reinterpret_cast<Bfloat16*>(buffers + 2 * size) + chunk * CHUNK * pitch;
    values = keys + size, keys_transposed = values + size;
  }
  void clear_key_gradients() const { memset(buffers, 0, sizeof(float) * 2 * size); }
  int64_t floats_of_block() const { return QueryBlock::FLOATS + 3 * SIZE * pitch; }
  // (pitch / 2, SIZE) words, (SIZE / 2, pitch) words, both of each; (pitch, SIZE) float32
  float* q_transposed(const QueryBlock& block) const { return block.memory; }
  float* dout_transposed(const QueryBlock& block) const { return block.memory + SIZE * pitch / 2; }
  float* q(const QueryBlock& block) const { return block.memory + SIZE * pitch; }
  float* dout(const QueryBlock& block) const { return block.memory + 3 * SIZE * pitch / 2; }
  float* dq(const QueryBlock& block) const { return block.memory + 2 * SIZE * pitch; }

  void load_side(const AttentionCall& call, const View& tensor, int64_t batch, const Queries& lanes, uint32_t sign,
                 float* transposed, float* pairs) const {
    Bfloat16* memory = memory_of_row<Bfloat16>(call, tensor);
    for (int64_t i = 0; i < lanes.count; ++i)
      copy_row(source_row(call, tensor, batch, lanes.head[i], lanes.query[i], memory), call.width, pitch,
               rows_of_queries + i * pitch);
    clear_rows(lanes.count, SIZE, pitch, rows_of_queries);
    transpose_pairs(rows_of_queries, SIZE, pitch, sign, transposed, SIZE);
    pair_rows(rows_of_queries, SIZE, pitch, pairs);
  }

  void load_queries(const AttentionCall& call, const Options& options, int64_t batch, const QueryBlock& block) const {
    load_side(call, call.q, batch, block.lanes, options.scale < 0.f ? 0x80008000u : 0u, q_transposed(block), q(block));
    load_side(call, call.dout, batch, block.lanes, 0u, dout_transposed(block), dout(block));
    memset(dq(block), 0, sizeof(float) * SIZE * pitch);
  }

  void load_keys(const AttentionCall& call, int64_t batch, const Keys& some, int64_t kv_head, int64_t key,
                 int64_t rows) const {
    Bfloat16* memory = memory_of_row<Bfloat16>(call, call.k);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t position = row_of_key(some, key + i);
      copy_row(source_row(call, call.k, batch, kv_head, position, memory), call.width, pitch, keys + i * pitch);
      copy_row(row_of<const Bfloat16>(call.v, batch, kv_head, position), call.width, pitch, values + i * pitch);
    }
    const int64_t all = aligned(rows, PAIR_DEPTH);
    clear_rows(rows, all, pitch, keys), clear_rows(rows, all, pitch, values);
    transpose_rows(keys, all, pitch, keys_transposed, CHUNK);
  }

  void score(const AttentionCall&, const QueryBlock& block, int64_t low, int64_t count, int n, int registers,
             Tile& tile) const {
    const int64_t column = n * WIDTH, at_tile = low * SIZE + column;
    pair_product<false>(keys + low * pitch, pitch, q_transposed(block) + column, SIZE, tile.weights + at_tile, SIZE,
                        count, registers, pitch, fetches);
    pair_product<false>(values + low * pitch, pitch, dout_transposed(block) + column, SIZE, tile.gradients + at_tile,
                        SIZE, count, registers, pitch, fetches);
  }

  void complete(int64_t rows, Tile& tile) const {
    for (int64_t row = 0; row < aligned(rows, PAIR_DEPTH); row += 2)
      for (int n = 0; n < REGISTERS; ++n) {
        Floats p[2], ds[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          const bool seen = row + i >= tile.low[n] && row + i < tile.high[n];
          const int64_t from = (row + i) * SIZE + n * WIDTH;
          p[i] = seen ? load(tile.weights + from) : splat(0.f), ds[i] = seen ? load(tile.gradients + from) : splat(0.f);
          store(weights + from, p[i]), store(gradients + from, ds[i]);
        }
        store(gradient_pairs + row / 2 * SIZE + n * WIDTH, rounded_pairs(ds[0], ds[1]));
      }
  }

  void add_key_gradients(const AttentionCall& call, int64_t rows, const QueryBlock& block, const Tile& tile) const {
    over_key_runs<ROWS>(tile, rows, [&](int64_t begin, int64_t end, int first, int last) TK_LAMBDA {
      first = first / 2 * 2;
      const int64_t from = begin * SIZE + first * WIDTH, queries = first * WIDTH / 2 * pitch,
                    depth = aligned((last - first) * WIDTH, PAIR_DEPTH);
      if (call.dv.data)
        pair_product<true>(weights + from, SIZE, dout(block) + queries, pitch, dvalues + begin * pitch, pitch,
                           end - begin, pitch / WIDTH, depth, fetches);
      if (call.dk.data)
        pair_product<true>(gradients + from, SIZE, q(block) + queries, pitch, dkeys + begin * pitch, pitch, end - begin,
                           pitch / WIDTH, depth, fetches);
    });
  }

  void add_query_gradients(const QueryBlock& block, const Tile& tile) const {
    over_query_runs(tile, [&](int n, int count) TK_LAMBDA {
      const int64_t low = tile.low[n] / PAIR_DEPTH * PAIR_DEPTH, depth = aligned(tile.high[n] - low, PAIR_DEPTH);
      pair_product<true>(keys_transposed + low, CHUNK, gradient_pairs + low / 2 * SIZE + n * WIDTH, SIZE,
                         dq(block) + n * WIDTH, SIZE, pitch, count, depth, fetches);
    });
  }

  template <class T>
  void write_queries(const AttentionCall& call, int64_t batch, const QueryBlock& block, float scale) const {
    for (int64_t first = 0; first < block.lanes.count; first += WIDTH)
      over_result_rows(dq(block) + first, SIZE, pitch, splat(scale), [&](int64_t lane, int64_t d, __m512i row) TK_LAMBDA {
        const int64_t i = first + lane;
        if (i < block.lanes.count && d < call.width)
          store_row_part(row_of<Bfloat16>(call.dq, batch, block.lanes.head[i], block.lanes.query[i]), d, call.width,
                         row);
      });
  }
};
#endif

}  // namespace
}  // namespace transformer_kernels::TK_LEVEL
