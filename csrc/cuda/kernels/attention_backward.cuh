// Flash attention, backward, deterministic and without atomics: each gradient has one owner. Probabilities are
// recomputed from the statistics of forward; with delta = rowsum(dO * O) - dlse, dS = P * (dP - delta), dP = dO V^T.
// One kernel computes delta, one loops over keys for dQ, one over queries for dK and dV, and one over heads and batches
// for the gradient of the bias.
#pragma once
#include "attention_launch.h"
#include "attention_scores.cuh"

namespace transformer_kernels::attention {

template <class T, int HEAD_DIM, bool SMALL = false> struct BackwardShape {
  static constexpr bool WIDE = HEAD_DIM > 128;
  static constexpr bool FLOAT = sizeof(T) == 4;
  static constexpr int OWNED = FLOAT && WIDE ? 32 : 64;  // rows that a block owns
  // Rows per step. Shared memory fits the 99 KiB of smaller GPUs, except fp32 above head dimension 128; SMALL fits the
  // 64 KiB of sm_75.
  static constexpr int STREAMED = SMALL ? 16 : FLOAT ? (HEAD_DIM > 64 ? 16 : 32) : WIDE ? 16 : HEAD_DIM > 64 ? 32 : 64;
  static constexpr int COLUMNS = WIDE ? HEAD_DIM / 2 : HEAD_DIM;  // of dK and dV per block, limited by registers
  static constexpr int THREADS = OWNED / 16 * WARP_SIZE;
  static constexpr int BLOCKS = WIDE ? 1 : 2;  // per multiprocessor; more would spill
  static constexpr int ROW_BYTES = HEAD_DIM * static_cast<int>(sizeof(T)),
                       TILE_BYTES = (2 * OWNED + 4 * STREAMED) * ROW_BYTES;
  // 16 bits at head dimension 64 without EXTRAS: exactly 49 KiB, so that two blocks fit the smaller GPUs.
  static constexpr int QUERY_BYTES = shared_bytes_after<uint8_t>(STREAMED, TILE_BYTES);
  static constexpr int key_value_bytes(bool extras) {
    return shared_bytes_after<float>((extras ? 6 : 4) * STREAMED, TILE_BYTES);
  }
  static constexpr int BIAS_BYTES =
      shared_bytes_after<float>(OWNED / 16 * STREAMED, (2 * OWNED + 2 * STREAMED) * ROW_BYTES);
};

// One warp owns a query: delta = rowsum(dout * out) - dlse.
template <class T>
__global__ void __launch_bounds__(128) attention_delta_kernel(const Arguments arguments, const float* dlse) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 4 + threadIdx.x / WARP_SIZE;
  if (row >= static_cast<int64_t>(arguments.batches) * arguments.query_heads * arguments.query_length) return;
  const int query = row % arguments.query_length, head = row / arguments.query_length % arguments.query_heads;
  const int batch = row / arguments.query_length / arguments.query_heads;
  const T* dout = rows_of<T>(arguments.dout, batch, head) + query * arguments.dout.row;
  const T* out = rows_of<T>(arguments.out, batch, head) + query * arguments.out.row;
  float sum = 0.f;
  for (int column = threadIdx.x % WARP_SIZE; column < arguments.head_dim; column += WARP_SIZE)
    sum = fmaf(to_float(dout[column]), to_float(out[column]), sum);
  sum = warp_sum(sum);
  if (threadIdx.x % WARP_SIZE != 0) return;
  arguments.delta[row] = dlse ? sum - dlse[row] : sum;
}

// One block owns OWNED queries of one head and loops over the keys, as forward does, for dQ = scale * dS K.
template <class T, int HEAD_DIM, bool EXTRAS, bool SMALL>
__global__ void __launch_bounds__(BackwardShape<T, HEAD_DIM, SMALL>::THREADS, BackwardShape<T, HEAD_DIM>::BLOCKS)
    attention_backward_query_kernel(const Arguments arguments) {
  using Shape = BackwardShape<T, HEAD_DIM, SMALL>;
  constexpr int QUERIES = Shape::OWNED, KEYS = Shape::STREAMED, THREADS = Shape::THREADS;
  SharedMemory shared;
  const Tile<T, HEAD_DIM> queries{shared.take<T, 1024>(QUERIES * HEAD_DIM)};
  const Tile<T, HEAD_DIM> douts{shared.take<T, 1024>(QUERIES * HEAD_DIM)};
  T* const key_stages = shared.take<T, 1024>(2 * KEYS * HEAD_DIM);
  T* const value_stages = shared.take<T, 1024>(2 * KEYS * HEAD_DIM);
  uint8_t* const tainted = shared.take<uint8_t>(KEYS);

  const int query_tiles = (arguments.query_length + QUERIES - 1) / QUERIES;
  const int query_tile = query_tiles - 1 - static_cast<int>(blockIdx.x % query_tiles);
  const int head = blockIdx.x / query_tiles % arguments.query_heads;
  const int batch = blockIdx.x / query_tiles / arguments.query_heads;
  const int key_head = head / (arguments.query_heads / arguments.key_heads);
  const T* key_rows = rows_of<T>(arguments.key, batch, key_head);
  const T* value_rows = rows_of<T>(arguments.value, batch, key_head);
  const uint8_t* mask = padding_of(arguments, batch);

  const int g = threadIdx.x % WARP_SIZE / 4, t = threadIdx.x % 4;
  const int block_query = query_tile * QUERIES, warp_row = threadIdx.x / WARP_SIZE * 16;
  const int warp_query = block_query + warp_row;
  const Interval keys[2] = {keys_seen_by(arguments, warp_query + g), keys_seen_by(arguments, warp_query + g + 8)};
  const int last_query = min(block_query + QUERIES, arguments.query_length) - 1;
  const Interval first_sees = keys_seen_by(arguments, block_query), last_sees = keys_seen_by(arguments, last_query);
  const Interval common = seen_by_all(first_sees, last_sees);
  const TileRange tiles = tiles_touching<KEYS>(seen_by_any(first_sees, last_sees));

  uint64_t bits = 0, next_bits = 0;
  int tile = next_tile<KEYS>(mask, tiles.first, tiles.end, arguments.key_length, bits);
  const auto load_keys_and_values = [&](int tile, int stage, uint64_t bits) {
    const Tile<T, HEAD_DIM> k{key_stages + stage * KEYS * HEAD_DIM}, v{value_stages + stage * KEYS * HEAD_DIM};
    load_tile<KEYS, THREADS>(k, key_rows, arguments.key.row, tile * KEYS, arguments.key_length, bits, arguments);
    load_tile<KEYS, THREADS>(v, value_rows, arguments.value.row, tile * KEYS, arguments.key_length, bits, arguments);
  };
  load_tile<QUERIES, THREADS>(queries, rows_of<T>(arguments.query, batch, head), arguments.query.row, block_query,
                              arguments.query_length, ~0ull, arguments);
  load_tile<QUERIES, THREADS>(douts, rows_of<T>(arguments.dout, batch, head), arguments.dout.row, block_query,
                              arguments.query_length, ~0ull, arguments);
  copy_async_commit();
  if (tile < tiles.end) load_keys_and_values(tile, 0, bits);
  copy_async_commit();
  if (arguments.angles.cos) {
    copy_async_wait<1>();
    rotate_tile<QUERIES, THREADS>(queries, block_query, arguments.query_length, ~0ull, angles_of(arguments, batch), 1.f,
                                  threadIdx.x);
  }

  const int64_t statistics = (static_cast<int64_t>(batch) * arguments.query_heads + head) * arguments.query_length;
  const float* row_statistics = statistics_of(arguments, batch, head);
  float largest[2], log_sum[2], delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = warp_query + g + 8 * half;
    const bool real = query < arguments.query_length;
    largest[half] = real ? row_statistics[query] : 0.f;
    log_sum[half] = real ? row_statistics[arguments.query_length + query] : 0.f;
    delta[half] = real ? arguments.delta[statistics + query] : 0.f;
  }

  float dq[HEAD_DIM / 8][4] = {};
  Poison poison;
  const float factor = exponential_factor<T, EXTRAS>(arguments);
  for (int stage = 0; tile < tiles.end; stage ^= 1) {
    const Tile<T, HEAD_DIM> k{key_stages + stage * KEYS * HEAD_DIM}, v{value_stages + stage * KEYS * HEAD_DIM};
    const int first_key = tile * KEYS;
    const int following = next_tile<KEYS>(mask, tile + 1, tiles.end, arguments.key_length, next_bits);
    if (following < tiles.end) load_keys_and_values(following, stage ^ 1, next_bits);
    copy_async_commit();
    copy_async_wait<1>();
    if (arguments.angles.cos)
      rotate_tile<KEYS, THREADS>(k, first_key, arguments.key_length, bits, angles_of(arguments, batch), 1.f,
                                 threadIdx.x);
    __syncthreads();

    const bool edge = !is_inside<KEYS>(first_key, common);
    if (edge && is_packed(arguments)) {
      quarantine<KEYS, THREADS>(k, [=](int row, bool found) { tainted[row] = found; });
      poison.note(keys, first_key, KEYS, [=](int row) { return tainted[row] != 0; });
    }
    float scores[KEYS / 8][4] = {}, gradients[KEYS / 8][4] = {};
    multiply_transposed<KEYS>(scores, queries, warp_row, k);  // [16, KEYS]
    multiply_transposed<KEYS>(gradients, douts, warp_row, v);  // [16, KEYS]: dP
    const uint32_t kept =
        kept_weights<EXTRAS, Fragment::QUERY_ROWS, KEYS>(arguments, batch, head, warp_query, first_key);
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (EXTRAS) gradients[n][e] = dropped_gradient(gradients[n][e], kept, 4 * n + e, arguments);
        gradients[n][e] -= delta[e / 2];
      }
    if constexpr (EXTRAS)
      score_gradients<T, Fragment::QUERY_ROWS>(scores, gradients, arguments, batch, head, warp_query, first_key);
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        gradients[n][e] *= probability<T, EXTRAS>(scores[n][e], largest[e / 2], log_sum[e / 2], factor);
      }
    if (edge || bits != ALL_KEYS<KEYS>) {
#pragma unroll
      for (int half = 0; half < 2; ++half) hide<KEYS>(gradients, half, bits & bits_of(keys[half], first_key), 0.f);
    }
    multiply<KEYS, HEAD_DIM>(dq, gradients, k, 0);  // [16, HEAD_DIM]
    __syncthreads();
    tile = following;
    bits = next_bits;
  }
  copy_async_wait<0>();
  __syncthreads();
  const float factors[2] = {arguments.scale + poison.found[0], arguments.scale + poison.found[1]};
  store_fragment<HEAD_DIM>(dq, factors, queries, warp_row, rows_of<T>(arguments.dq, batch, head), arguments.dq.row,
                           warp_query, arguments.query_length, 0, arguments, angles_of(arguments, batch));
}

// One block owns OWNED keys of one key head (and COLUMNS columns of their gradients) and loops over the queries of
// every query head of its group: dV = P^T dO, dK = scale * dS^T Q. Scores are transposed, keys along the rows, so that
// P^T and dS^T are operands in registers.
template <class T, int HEAD_DIM, bool EXTRAS, bool SMALL>
__global__ void __launch_bounds__(BackwardShape<T, HEAD_DIM, SMALL>::THREADS, BackwardShape<T, HEAD_DIM>::BLOCKS)
    attention_backward_key_value_kernel(const Arguments arguments) {
  using Shape = BackwardShape<T, HEAD_DIM, SMALL>;
  constexpr int KEYS = Shape::OWNED, QUERIES = Shape::STREAMED, THREADS = Shape::THREADS, COLUMNS = Shape::COLUMNS;
  constexpr int PARTS = HEAD_DIM / COLUMNS;
  SharedMemory shared;
  const Tile<T, HEAD_DIM> keys{shared.take<T, 1024>(KEYS * HEAD_DIM)};
  const Tile<T, HEAD_DIM> values{shared.take<T, 1024>(KEYS * HEAD_DIM)};
  T* const query_stages = shared.take<T, 1024>(2 * QUERIES * HEAD_DIM);
  T* const dout_stages = shared.take<T, 1024>(2 * QUERIES * HEAD_DIM);
  float* const largest_stages = shared.take<float>(2 * QUERIES);  // without EXTRAS: lse
  float* const delta_stages = shared.take<float>(2 * QUERIES);
  float* const log_sum_stages = EXTRAS ? shared.take<float>(2 * QUERIES) : nullptr;

  const int first_column = static_cast<int>(blockIdx.x % PARTS) * COLUMNS;
  const int key_tiles = (arguments.key_length + KEYS - 1) / KEYS;
  const int key_tile = blockIdx.x / PARTS % key_tiles;
  const int key_head = blockIdx.x / PARTS / key_tiles % arguments.key_heads;
  const int batch = blockIdx.x / PARTS / key_tiles / arguments.key_heads;
  const int group = arguments.query_heads / arguments.key_heads;
  const uint8_t* mask = padding_of(arguments, batch);

  const int g = threadIdx.x % WARP_SIZE / 4, t = threadIdx.x % 4;
  const int block_key = key_tile * KEYS, warp_row = threadIdx.x / WARP_SIZE * 16, warp_key = block_key + warp_row;
  const uint64_t bits = real_keys<KEYS>(mask, block_key, arguments.key_length);
  const bool warp_has_hidden = (bits >> warp_row & 0xffff) != 0xffff;
  Interval queries[2];  // that see this lane's keys
#pragma unroll
  for (int half = 0; half < 2; ++half) queries[half] = queries_seeing(arguments, warp_key + g + 8 * half);
  const Interval common = seen_by_warp(queries);  // queries that see all keys of the warp
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (!(bits >> (warp_row + g + 8 * half) & 1)) queries[half] = {1, 0};
  const int last_key = min(block_key + KEYS, arguments.key_length) - 1;
  const Interval first_seen = queries_seeing(arguments, block_key), last_seen = queries_seeing(arguments, last_key);
  const Interval visited = seen_by_any(first_seen, last_seen), block_common = seen_by_all(first_seen, last_seen);
  const TileRange range = bits ? tiles_touching<QUERIES>(visited) : TileRange{0, 0};
  const int tiles = range.end - range.first, steps = tiles * group;

  const auto load_step = [&](int step) {
    const int head = key_head * group + step / tiles, first_query = (range.first + step % tiles) * QUERIES;
    const Tile<T, HEAD_DIM> q{query_stages + step % 2 * QUERIES * HEAD_DIM};
    const Tile<T, HEAD_DIM> dout{dout_stages + step % 2 * QUERIES * HEAD_DIM};
    load_tile<QUERIES, THREADS>(q, rows_of<T>(arguments.query, batch, head), arguments.query.row, first_query,
                                visited.last + 1, ~0ull, arguments);
    load_tile<QUERIES, THREADS>(dout, rows_of<T>(arguments.dout, batch, head), arguments.dout.row, first_query,
                                visited.last + 1, ~0ull, arguments);
    const int64_t statistics = (static_cast<int64_t>(batch) * arguments.query_heads + head) * arguments.query_length;
    const float* largest = EXTRAS ? statistics_of(arguments, batch, head) : arguments.lse + statistics;
    for (int row = threadIdx.x; row < QUERIES; row += THREADS) {
      const int query = first_query + row;
      const bool real = query < arguments.query_length;
      copy_async_4(largest_stages + step % 2 * QUERIES + row, largest + (real ? query : 0), real);
      if (EXTRAS)
        copy_async_4(log_sum_stages + step % 2 * QUERIES + row, largest + (real ? arguments.query_length + query : 0),
                     real);
      copy_async_4(delta_stages + step % 2 * QUERIES + row, arguments.delta + (real ? statistics + query : 0), real);
    }
  };
  load_tile<KEYS, THREADS>(keys, rows_of<T>(arguments.key, batch, key_head), arguments.key.row, block_key,
                           arguments.key_length, bits, arguments);
  load_tile<KEYS, THREADS>(values, rows_of<T>(arguments.value, batch, key_head), arguments.value.row, block_key,
                           arguments.key_length, bits, arguments);
  copy_async_commit();
  if (steps > 0) load_step(0);
  copy_async_commit();
  if (arguments.angles.cos) {
    copy_async_wait<1>();
    rotate_tile<KEYS, THREADS>(keys, block_key, arguments.key_length, bits, angles_of(arguments, batch), 1.f,
                               threadIdx.x);
  }

  float dk[COLUMNS / 8][4] = {}, dv[COLUMNS / 8][4] = {};
  Poison poison;
  const float factor = exponential_factor<T, EXTRAS>(arguments);
  for (int step = 0; step < steps; ++step) {
    const int head = key_head * group + step / tiles, first_query = (range.first + step % tiles) * QUERIES;
    const Tile<T, HEAD_DIM> q{query_stages + step % 2 * QUERIES * HEAD_DIM};
    const Tile<T, HEAD_DIM> dout{dout_stages + step % 2 * QUERIES * HEAD_DIM};
    float* const largest = largest_stages + step % 2 * QUERIES;
    const float* log_sum = log_sum_stages + step % 2 * QUERIES;
    const float* delta = delta_stages + step % 2 * QUERIES;
    if (step + 1 < steps) load_step(step + 1);
    copy_async_commit();
    copy_async_wait<1>();
    if (arguments.angles.cos)
      rotate_tile<QUERIES, THREADS>(q, first_query, visited.last + 1, ~0ull, angles_of(arguments, batch), 1.f,
                                    threadIdx.x);
    __syncthreads();

    if (is_packed(arguments) && !is_inside<QUERIES>(first_query, block_common)) {
      const auto note = [=](int row, bool found) {
        if (found) largest[row] = NAN;  // as the weights of a non-finite query
      };
      quarantine<QUERIES, THREADS>(q, note);
      quarantine<QUERIES, THREADS>(dout, note);
      poison.note(queries, first_query, QUERIES, [=](int row) { return largest[row] != largest[row]; });
    }
    const bool edge = warp_has_hidden || !is_inside<QUERIES>(first_query, common);
    float scores[QUERIES / 8][4] = {}, gradients[QUERIES / 8][4] = {};
    multiply_transposed<QUERIES>(scores, keys, warp_row, q);  // [16 keys, QUERIES]
    multiply_transposed<QUERIES>(gradients, values, warp_row, dout);  // [16 keys, QUERIES]: dP^T
    const uint32_t kept =
        kept_weights<EXTRAS, Fragment::KEY_ROWS, QUERIES>(arguments, batch, head, first_query, warp_key);
#pragma unroll
    for (int n = 0; n < QUERIES / 8; ++n) {
      const Vector<float, 2> row_delta = load_vector<2>(delta + 8 * n + 2 * t);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (EXTRAS) gradients[n][e] = dropped_gradient(gradients[n][e], kept, 4 * n + e, arguments);
        gradients[n][e] -= row_delta[e % 2];
      }
    }
    if constexpr (EXTRAS)
      score_gradients<T, Fragment::KEY_ROWS>(scores, gradients, arguments, batch, head, first_query, warp_key);
#pragma unroll
    for (int n = 0; n < QUERIES / 8; ++n) {
      const Vector<float, 2> row_largest = load_vector<2>(largest + 8 * n + 2 * t);
      Vector<float, 2> row_log_sum{};
      if (EXTRAS) row_log_sum = load_vector<2>(log_sum + 8 * n + 2 * t);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float p = probability<T, EXTRAS>(scores[n][e], row_largest[e % 2], row_log_sum[e % 2], factor);
        scores[n][e] = !EXTRAS || (kept >> (4 * n + e) & 1) ? p : 0.f;
        gradients[n][e] *= p;
      }
    }
    if (edge) {  // a separate pass: otherwise each exponential gets a branch
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint64_t visible = bits_of(queries[half], first_query);
        hide<QUERIES>(scores, half, visible, 0.f);
        hide<QUERIES>(gradients, half, visible, 0.f);
      }
    }
    multiply<QUERIES, COLUMNS>(dv, scores, dout, first_column);  // [16 keys, COLUMNS]
    multiply<QUERIES, COLUMNS>(dk, gradients, q, first_column);  // [16 keys, COLUMNS]
    __syncthreads();
  }
  copy_async_wait<0>();
  __syncthreads();
  const float seen[2] = {poison.found[0], poison.found[1]};
  const float value_factors[2] = {arguments.dropout.keep_scale + seen[0], arguments.dropout.keep_scale + seen[1]};
  const float key_factors[2] = {arguments.scale + seen[0], arguments.scale + seen[1]};
  store_fragment<COLUMNS>(dv, value_factors, values, warp_row, rows_of<T>(arguments.dv, batch, key_head),
                          arguments.dv.row, warp_key, arguments.key_length, first_column, arguments);
  store_fragment<COLUMNS>(dk, key_factors, keys, warp_row, rows_of<T>(arguments.dk, batch, key_head), arguments.dk.row,
                          warp_key, arguments.key_length, first_column, arguments,
                          PARTS == 1 ? angles_of(arguments, batch) : Angles{});  // a part has one column of a pair
}

// One block owns up to OWNED queries x STREAMED keys of the gradient of the bias, dS summed over broadcast axes. It
// loops over batches, heads and, for a bias with one row for all queries, query tiles, in a fixed order. dS is
// recomputed with two products. A bias broadcast along the keys is handled in Python: only lse depends on it.
template <class T, int HEAD_DIM>
__global__ void __launch_bounds__(BackwardShape<T, HEAD_DIM>::THREADS, BackwardShape<T, HEAD_DIM>::BLOCKS)
    attention_backward_bias_kernel(const Arguments arguments) {
  using Shape = BackwardShape<T, HEAD_DIM>;
  constexpr int QUERIES = Shape::OWNED, KEYS = Shape::STREAMED, THREADS = Shape::THREADS, WARPS = THREADS / WARP_SIZE;
  SharedMemory shared;
  const Tile<T, HEAD_DIM> queries{shared.take<T, 1024>(QUERIES * HEAD_DIM)};
  const Tile<T, HEAD_DIM> douts{shared.take<T, 1024>(QUERIES * HEAD_DIM)};
  const Tile<T, HEAD_DIM> k{shared.take<T, 1024>(KEYS * HEAD_DIM)}, v{shared.take<T, 1024>(KEYS * HEAD_DIM)};
  float* const partial = shared.take<float>(WARPS * KEYS);

  const BiasGradient& out = arguments.dbias;
  const bool over_rows = out.rows == 1;
  const int query_tiles = (arguments.query_length + QUERIES - 1) / QUERIES;
  const int key_tiles = (arguments.key_length + KEYS - 1) / KEYS;
  int64_t block = blockIdx.x;
  const auto own = [&block](int parts) {
    const int part = static_cast<int>(block % parts);
    block /= parts;
    return part;
  };
  const int own_key_tile = own(key_tiles), own_query_tile = own(over_rows ? 1 : query_tiles);
  const int own_head = own(out.heads), own_batch = own(out.batches);
  const int first_key = own_key_tile * KEYS;

  const int g = threadIdx.x % WARP_SIZE / 4, t = threadIdx.x % 4, warp = threadIdx.x / WARP_SIZE, warp_row = warp * 16;
  float sum[KEYS / 8][4] = {};
  const int heads = out.heads == 1 ? arguments.query_heads : 1, batches = out.batches == 1 ? arguments.batches : 1;
  const int tiles_down = over_rows ? query_tiles : 1;
  for (int64_t step = 0; step < static_cast<int64_t>(batches) * heads * tiles_down; ++step) {
    const int query_tile = own_query_tile + step % tiles_down;
    const int head = own_head + step / tiles_down % heads;
    const int batch = own_batch + step / tiles_down / heads;
    const int block_query = query_tile * QUERIES, warp_query = block_query + warp_row;
    const int last_query = min(block_query + QUERIES, arguments.query_length) - 1;
    const Interval first_sees = keys_seen_by(arguments, block_query), last_sees = keys_seen_by(arguments, last_query);
    const Interval visited = seen_by_any(first_sees, last_sees);
    const uint64_t bits = real_keys<KEYS>(padding_of(arguments, batch), first_key, arguments.key_length);
    if (!bits || first_key > visited.last || first_key + KEYS <= visited.first) continue;
    const bool edge = bits != ALL_KEYS<KEYS> || block_query + QUERIES > arguments.query_length ||
                      !is_inside<KEYS>(first_key, seen_by_all(first_sees, last_sees));
    const int key_head = head / (arguments.query_heads / arguments.key_heads);
    load_tile<QUERIES, THREADS>(queries, rows_of<T>(arguments.query, batch, head), arguments.query.row, block_query,
                                arguments.query_length, ~0ull, arguments);
    load_tile<QUERIES, THREADS>(douts, rows_of<T>(arguments.dout, batch, head), arguments.dout.row, block_query,
                                arguments.query_length, ~0ull, arguments);
    load_tile<KEYS, THREADS>(k, rows_of<T>(arguments.key, batch, key_head), arguments.key.row, first_key,
                             arguments.key_length, bits, arguments);
    load_tile<KEYS, THREADS>(v, rows_of<T>(arguments.value, batch, key_head), arguments.value.row, first_key,
                             arguments.key_length, bits, arguments);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();

    float scores[KEYS / 8][4] = {}, gradients[KEYS / 8][4] = {};
    multiply_transposed<KEYS>(scores, queries, warp_row, k);  // [16, KEYS]
    multiply_transposed<KEYS>(gradients, douts, warp_row, v);  // [16, KEYS]: dP
    score_products<T>(scores, arguments, batch, head, warp_query, first_key);
    const uint32_t kept = kept_weights<true, Fragment::QUERY_ROWS, KEYS>(arguments, batch, head, warp_query, first_key);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = warp_query + g + 8 * half;
      const Interval seen = query < arguments.query_length ? keys_seen_by(arguments, query) : Interval{1, 0};
      const int64_t row = (static_cast<int64_t>(batch) * arguments.query_heads + head) * arguments.query_length +
                          min(query, last_query);
      const float* row_statistics = statistics_of(arguments, batch, head) + min(query, last_query);
      const float largest = row_statistics[0], log_sum = row_statistics[arguments.query_length];
      const float delta = arguments.delta[row];
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          const float grad_p = dropped_gradient(gradients[n][e], kept, 4 * n + e, arguments);
          gradients[n][e] = probability<T, true>(scores[n][e], largest, log_sum, UNIT<T>) * (grad_p - delta);
        }
      if (edge) hide<KEYS>(gradients, half, bits & bits_of(seen, first_key), 0.f);
    }
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[n][e] += gradients[n][e];
    __syncthreads();  // before the next step overwrites the tiles
  }

  const int64_t plane = (static_cast<int64_t>(own_batch) * out.heads + own_head) * out.rows * out.columns;
  const auto write = [&](int row, int column, float value) {
    const int64_t offset = plane + static_cast<int64_t>(row) * out.columns + column;
    if (row >= out.rows || column >= out.columns) return;
    if (arguments.bias.is_float) {
      static_cast<float*>(out.data)[offset] = value;
    } else {
      static_cast<T*>(out.data)[offset] = from_float<T>(value);
    }
  };
  const int first_row = own_query_tile * QUERIES + warp_row;
  if (over_rows) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float down = sum[n][e] + sum[n][2 + e];
#pragma unroll
        for (int distance = 4; distance < WARP_SIZE; distance *= 2) down += __shfl_xor_sync(ALL_LANES, down, distance);
        if (g == 0) partial[warp * KEYS + 8 * n + 2 * t + e] = down;
      }
    __syncthreads();
    for (int column = threadIdx.x; column < KEYS; column += THREADS) {
      float total = 0.f;
      for (int w = 0; w < WARPS; ++w) total += partial[w * KEYS + column];
      write(0, first_key + column, total);
    }
  } else {
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) write(first_row + g + 8 * (e / 2), first_key + 8 * n + 2 * t + e % 2, sum[n][e]);
  }
}

template <class T, int HEAD_DIM, bool EXTRAS, bool SMALL>
void launch_backward_products(const Arguments& arguments, Stream stream) {
  using Shape = BackwardShape<T, HEAD_DIM, SMALL>;
  const int64_t query_blocks =
      ceil_div(arguments.query_length, Shape::OWNED) * arguments.query_heads * arguments.batches;
  const int64_t key_blocks = ceil_div(arguments.key_length, Shape::OWNED) * arguments.key_heads * arguments.batches *
                             (HEAD_DIM / Shape::COLUMNS);
  launch<attention_backward_query_kernel<T, HEAD_DIM, EXTRAS, SMALL>>(
      "attention_backward_query", grid_of(query_blocks), Shape::THREADS, Shape::QUERY_BYTES, stream, arguments);
  launch<attention_backward_key_value_kernel<T, HEAD_DIM, EXTRAS, SMALL>>(
      "attention_backward_key_value", grid_of(key_blocks), Shape::THREADS, Shape::key_value_bytes(EXTRAS), stream,
      arguments);
}

template <class T> void launch_backward(const Arguments& arguments, const float* dlse, Stream stream) {
  const int64_t rows = static_cast<int64_t>(arguments.batches) * arguments.query_heads * arguments.query_length;
  launch<attention_delta_kernel<T>>("attention_delta", grid_of(ceil_div(rows, 4)), 128, 0, stream, arguments, dlse);
  dispatch_head_dim<T>(arguments, [&](auto head_dim, auto extras) {
    with_block_size<T, head_dim.value>(stream.device, [&](auto small) {
      launch_backward_products<T, head_dim.value, extras.value, small.value>(arguments, stream);
    });
  });
  if (!arguments.dbias.data) return;
  dispatch_head_dim<T>(arguments, [&](auto head_dim, auto) {
    using Shape = BackwardShape<T, head_dim.value>;
    const BiasGradient& out = arguments.dbias;
    const int64_t tiles =
        (out.rows == 1 ? 1 : ceil_div(out.rows, Shape::OWNED)) * ceil_div(out.columns, Shape::STREAMED);
    launch<attention_backward_bias_kernel<T, head_dim.value>>("attention_backward_bias",
                                                              grid_of(tiles * out.heads * out.batches), Shape::THREADS,
                                                              Shape::BIAS_BYTES, stream, arguments);
  });
}

}  // namespace transformer_kernels::attention
