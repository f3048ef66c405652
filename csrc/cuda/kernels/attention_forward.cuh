// Flash attention, forward: Q in shared memory, loop over tiles of K and V (Dao, "FlashAttention-2", 2023, algorithm
// 1). Matrix products by mma.sync for fp16 and bf16, by FMA for fp32; statistics in fp32.
#pragma once
#include "attention_launch.h"
#include "attention_scores.cuh"

namespace transformer_kernels::attention {

// A warp has SLABS times 16 queries. SMALL fits the 64 KiB of sm_75.
template <class T, int HEAD_DIM, int SLABS, bool SMALL> struct ForwardShape {
  static constexpr bool WIDE = HEAD_DIM > 128;
  static constexpr int QUERIES = (sizeof(T) == 4 && WIDE ? 32 : 64) * SLABS;
  static constexpr int KEYS = sizeof(T) == 4 ? (WIDE ? 16 : 32) : (SMALL || HEAD_DIM * SLABS > 128 ? 32 : 64);
  static constexpr int THREADS = QUERIES / 16 / SLABS * WARP_SIZE;
  static constexpr int SHARED_BYTES = shared_bytes_after<uint8_t>(
      KEYS, shared_bytes_after<Interval>(QUERIES, (QUERIES + 4 * KEYS) * HEAD_DIM * static_cast<int>(sizeof(T))));
};

// Blocks per multiprocessor that fit the registers: more would spill, and without a bound the compiler permits fewer.
template <int HEAD_DIM, int SLABS>
constexpr int FORWARD_BLOCKS = HEAD_DIM > 128          ? 1
                               : HEAD_DIM * SLABS > 64 ? 2
                                                       : 3;

// A fragment's running maximum and sum of exponentials per row; this lane's rows are g and g + 8.
struct OnlineSoftmax {
  float maximum[2] = {-INFINITY, -INFINITY};
  float total[2] = {0.f, 0.f};  // of this lane's columns until the final reduction

  // Replaces scores by exponentials and returns the factor for earlier results. With SCALED the scores are final and
  // the maximum is subtracted first, so that a bias near -FLT_MAX remains finite; else one FMA applies `factor`, the
  // scale.
  template <class T, bool SCALED, int TILES> TK_DEVICE float update(float (&scores)[TILES][4], int half, float factor) {
    float highest = maximum[half];
#pragma unroll
    for (int n = 0; n < TILES; ++n) highest = fmaxf(highest, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
    highest = quad_max(highest);
    const float base = highest == -INFINITY ? 0.f : highest;
    const float shrink = exponential<T>((maximum[half] - base) * factor);
    maximum[half] = highest;
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        scores[n][e] =
            exponential<T>(SCALED ? (scores[n][e] - base) * factor : fmaf(scores[n][e], factor, -base * factor));
        sum += scores[n][e];
      }
    total[half] = total[half] * shrink + sum;
    return shrink;
  }
};

// The state of a warp for its SLABS times 16 queries of one head.
template <class T, int HEAD_DIM, bool SCALED, int SLABS = 1> struct AttendedRows {
  const Arguments& arguments;
  int batch, head, first_query;
  Interval* keys;  // visible keys of the warp's rows; in shared memory because few tiles need them
  float out[SLABS][HEAD_DIM / 8][4] = {};
  OnlineSoftmax softmax[SLABS];

  TK_DEVICE AttendedRows(const Arguments& arguments_, int batch_, int head_, int first_query_, Interval* keys_)
      : arguments(arguments_), batch(batch_), head(head_), first_query(first_query_), keys(keys_) {
    const int lane = threadIdx.x % WARP_SIZE;
    if (lane < 16 * SLABS) keys[lane] = keys_seen_by(arguments, first_query + lane);
    __syncwarp();
  }

  // Processes KEYS keys. `queries` contains the rows starting at tile_row; without `edge` every row sees all real keys.
  template <int KEYS>
  TK_DEVICE void add(Tile<T, HEAD_DIM> queries, int tile_row, Tile<T, HEAD_DIM> k, Tile<T, HEAD_DIM> v, int first_key,
                     uint64_t bits, bool edge) {
    float scores[SLABS][KEYS / 8][4] = {};
    multiply_transposed<KEYS>(scores, queries, tile_row, k);  // [16, KEYS] each
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
      if constexpr (SCALED) score_products<T>(scores[slab], arguments, batch, head, first_query + 16 * slab, first_key);
      if (edge || bits != ALL_KEYS<KEYS>) hide_keys<KEYS>(scores[slab], 0, first_key, bits, slab);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shrink =
            softmax[slab].template update<T, SCALED>(scores[slab], half, exponential_factor<T, SCALED>(arguments));
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n) {
          out[slab][n][2 * half] *= shrink;
          out[slab][n][2 * half + 1] *= shrink;
        }
      }
      if constexpr (SCALED) drop<KEYS>(scores[slab], first_key, slab, [&] { return arguments.dropout.keys(); });
    }
    multiply<KEYS, HEAD_DIM>(out, scores, v, 0);  // [16, HEAD_DIM] each
  }

  // Applies dropout to the weights of KEYS keys. `round_keys` returns the PhiloxKeys of the seed.
  template <int KEYS, class F>
  TK_DEVICE void drop(float (&scores)[KEYS / 8][4], int first_key, int slab, F round_keys) {
    drop_weights<KEYS>(scores, arguments, batch, head, first_query + 16 * slab, first_key, round_keys);
  }

  // Masks KEYS keys, starting at a fragment's first_tile-th 8 columns, for this lane's rows.
  template <int KEYS, int TILES>
  TK_DEVICE void hide_keys(float (&scores)[TILES][4], int first_tile, int first_key, uint64_t bits, int slab = 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      hide<KEYS>(scores, half, bits & bits_of(keys_of(slab, half), first_key), -INFINITY, first_tile);
  }

  TK_DEVICE Interval keys_of(int slab, int half) const {
    return keys[16 * slab + threadIdx.x % WARP_SIZE / 4 + 8 * half];
  }

  // Adds the result of poison_seen() to a row. No product with the values may be in progress.
  TK_DEVICE void add_poison(int slab, int half, float seen) {
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      out[slab][n][2 * half] += seen;
      out[slab][n][2 * half + 1] += seen;
    }
  }

  // Divides by the sums and writes out and lse. Overwrites the warp's rows of `staging`.
  TK_DEVICE void finish(Tile<T, HEAD_DIM> staging, int tile_row) {
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) finish_slab(staging, tile_row + 16 * slab, slab);
  }

 private:
  TK_DEVICE void finish_slab(Tile<T, HEAD_DIM> staging, int tile_row, int slab) {
    const int g = threadIdx.x % WARP_SIZE / 4, t = threadIdx.x % 4;
    float normaliser[2], totals[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      totals[half] = quad_sum(softmax[slab].total[half]);
      normaliser[half] = totals[half] == 0.f ? 0.f : arguments.dropout.keep_scale / totals[half];
    }
    store_fragment<HEAD_DIM>(out[slab], normaliser, staging, tile_row, rows_of<T>(arguments.out, batch, head),
                             arguments.out.row, first_query + 16 * slab, arguments.query_length, 0, arguments);
    // After the output, to save registers; three lanes of a quad store one statistic each.
    const int64_t rows = (static_cast<int64_t>(batch) * arguments.query_heads + head) * arguments.query_length;
    float* const target =
        t == 0 ? arguments.lse + rows : arguments.statistics + 2 * rows + (t == 1 ? 0 : arguments.query_length);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = totals[half];
      const int query = first_query + 16 * slab + g + 8 * half;
      if (t == 3 || query >= arguments.query_length) continue;
      const float highest = softmax[slab].maximum[half], natural = SCALED ? highest : highest * arguments.scale;
      const float largest = total == 0.f ? -INFINITY : natural, log_sum = total == 0.f ? 0.f : logf(total);
      target[query] = t == 0 ? largest + log_sum : t == 1 ? largest : log_sum;
    }
  }
};

// One block owns QUERIES queries of one head; each warp owns SLABS times 16 of them. EXTRAS:
// Arguments::has_extras(), or fp32. Masks and partial tiles affect only boundary tiles.
template <class T, int HEAD_DIM, bool EXTRAS, int SLABS, bool SMALL>
__global__ void __launch_bounds__(ForwardShape<T, HEAD_DIM, SLABS, SMALL>::THREADS, FORWARD_BLOCKS<HEAD_DIM, SLABS>)
    attention_forward_kernel(const Arguments arguments) {
  using Shape = ForwardShape<T, HEAD_DIM, SLABS, SMALL>;
  constexpr int QUERIES = Shape::QUERIES, KEYS = Shape::KEYS, THREADS = Shape::THREADS;
  SharedMemory shared;
  const Tile<T, HEAD_DIM> queries{shared.take<T, 1024>(QUERIES * HEAD_DIM)};
  T* const key_stages = shared.take<T, 1024>(2 * KEYS * HEAD_DIM);
  T* const value_stages = shared.take<T, 1024>(2 * KEYS * HEAD_DIM);
  Interval* const seen = shared.take<Interval>(QUERIES);
  uint8_t* const tainted = shared.take<uint8_t>(KEYS);

  const int query_tiles = (arguments.query_length + QUERIES - 1) / QUERIES;
  const int query_tile = query_tiles - 1 - static_cast<int>(blockIdx.x % query_tiles);  // the longest causal rows first
  const int head = blockIdx.x / query_tiles % arguments.query_heads;
  const int batch = blockIdx.x / query_tiles / arguments.query_heads;
  const int key_head = head / (arguments.query_heads / arguments.key_heads);
  const T* key_rows = rows_of<T>(arguments.key, batch, key_head);
  const T* value_rows = rows_of<T>(arguments.value, batch, key_head);
  const uint8_t* mask = padding_of(arguments, batch);

  const int block_query = query_tile * QUERIES, warp_row = threadIdx.x / WARP_SIZE * 16 * SLABS;
  AttendedRows<T, HEAD_DIM, EXTRAS, SLABS> rows(arguments, batch, head, block_query + warp_row, seen + warp_row);
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
  copy_async_commit();
  if (tile < tiles.end) load_keys_and_values(tile, 0, bits);
  copy_async_commit();
  if (arguments.angles.cos) {
    copy_async_wait<1>();
    rotate_tile<QUERIES, THREADS>(queries, block_query, arguments.query_length, ~0ull, angles_of(arguments, batch), 1.f,
                                  threadIdx.x);
  }

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
      quarantine<KEYS, THREADS>(v, [=](int row, bool found) { tainted[row] = found; });
#pragma unroll
      for (int half = 0; half < 2 * SLABS; ++half)
        rows.add_poison(
            half / 2, half % 2,
            poison_seen(rows.keys_of(half / 2, half % 2), first_key, KEYS, [=](int row) { return tainted[row] != 0; }));
    }
    rows.template add<KEYS>(queries, warp_row, k, v, first_key, bits, edge);
    __syncthreads();  // before the next step overwrites the stage read in this one
    tile = following;
    bits = next_bits;
  }
  copy_async_wait<0>();
  __syncthreads();  // without tiles, copies of Q by other threads may complete only here
  rows.finish(queries, warp_row);
}

// Whether warps process 32 queries each: each fragment of keys or values loaded from shared memory is then used in two
// products. There are half as many blocks, which must fill the GPU. At head dimension 128 such warps would spill.
inline bool takes_two_slabs(const Arguments& arguments, int device) {
  const int64_t blocks = ceil_div(arguments.query_length, 128) * arguments.query_heads * arguments.batches;
  return arguments.query_length > 64 && blocks >= 2 * multiprocessor_count(device);
}

template <class T> void launch_forward(const Arguments& arguments, Stream stream) {
  dispatch_head_dim<T>(arguments, [&](auto head_dim, auto extras) {
    const auto with_slabs = [&](auto slabs, auto small) {
      using Shape = ForwardShape<T, head_dim.value, slabs.value, small.value>;
      const int64_t blocks =
          ceil_div(arguments.query_length, Shape::QUERIES) * arguments.query_heads * arguments.batches;
      launch<attention_forward_kernel<T, head_dim.value, extras.value, slabs.value, small.value>>(
          "attention_forward", grid_of(blocks), Shape::THREADS, Shape::SHARED_BYTES, stream, arguments);
    };
    if constexpr (sizeof(T) == 2 && head_dim.value == 64) {
      if (takes_two_slabs(arguments, stream.device)) return with_slabs(Constant<2>{}, std::false_type{});
    }
    with_block_size<T, head_dim.value>(stream.device, [&](auto small) { with_slabs(Constant<1>{}, small); });
  });
}

}  // namespace transformer_kernels::attention
