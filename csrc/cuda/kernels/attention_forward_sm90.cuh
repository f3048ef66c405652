// Flash attention, forward, for Hopper: a producer warp keeps the copy engine busy, two warp groups of consumers
// compute 64 queries each by wgmma (Shah et al., "FlashAttention-3", 2024, algorithm 1). The scores of the next tile
// are computed while the weights of the current one are multiplied by its values.
#pragma once
#include "../primitives/hopper.h"
#include "attention_forward.cuh"

namespace transformer_kernels::attention {

struct TensorMaps {
  TensorMap query, key, value;
};

// The copy engine fills columns from the head dimension of the call to HEAD_DIM with zeros.
template <int HEAD_DIM, bool READS> struct HopperShape {
  static constexpr int QUERIES = 128, KEYS = HEAD_DIM > 128 || READS ? 64 : 128, STAGES = 2;
  static constexpr bool ASKS_AHEAD = HEAD_DIM <= 128;  // else registers do not suffice
  static constexpr int HELD = ASKS_AHEAD ? KEYS / 8 : 1;  // groups of eight keys whose reads are in registers
  static constexpr int CONSUMERS = 2 * WARP_GROUP_SIZE, THREADS = CONSUMERS + WARP_GROUP_SIZE;
  static constexpr int PANELS = HEAD_DIM / PANEL_COLUMNS;
  static constexpr int TILE_BYTES = KEYS * HEAD_DIM * 2;  // of a key or a value tile
  static constexpr int BARRIERS = 1 + 4 * STAGES;
  static constexpr int TILES_BYTES = (QUERIES + 2 * STAGES * KEYS) * HEAD_DIM * 2;
  static constexpr int BARRIERS_END = shared_bytes_after<uint64_t>(BARRIERS, TILES_BYTES);
  static constexpr int NOTES_END =
      shared_bytes_after<float2>(CONSUMERS, shared_bytes_after<uint8_t>(STAGES* KEYS, BARRIERS_END));
  static constexpr int SHARED_BYTES =
      shared_bytes_after<PhiloxKeys>(1, shared_bytes_after<Interval>(QUERIES + 1, NOTES_END));
};

// Tiles with a real key, in order: producer and consumers iterate over the same list.
template <int KEYS> struct TileWalk {
  const uint8_t* mask;
  int key_length, tiles;
  int tile = 0, step = 0;          // `step` counts visited tiles; it determines stage and parity
  uint64_t low = 0, high = ~0ull;  // bits of the real keys: the tile's first 64, and the others

  TK_DEVICE void find(int from) {
    for (tile = from; tile < tiles; ++tile) {
      const int first = tile * KEYS;
      low = real_keys<64>(mask, first, key_length);
      if constexpr (KEYS > 64) high = first + 64 < key_length ? real_keys<64>(mask, first + 64, key_length) : 0;
      if (low || (KEYS > 64 && high)) return;
    }
  }
  TK_DEVICE void advance() {
    find(tile + 1);
    ++step;
  }
  TK_DEVICE bool has_hidden() const { return (low & high) != ~0ull; }
};

// Zeroes the rows of a value tile that are padding and, if packed sequences share it, rows with inf or NaN, and records
// the latter. Called by all consumers.
template <class T, int HEAD_DIM, int KEYS, int THREADS>
TK_DEVICE void quarantine_values(T* values, const TileWalk<KEYS>& walk, bool is_shared, uint8_t* tainted, int thread) {
  for (int row = thread / 4; row < KEYS; row += THREADS / 4) {
    const bool hidden = !((row < 64 ? walk.low : walk.high) >> row % 64 & 1);
    bool found = false;
    for (int panel = 0; panel < HEAD_DIM / PANEL_COLUMNS && (hidden || is_shared); ++panel) {
      const Tile<T, PANEL_COLUMNS> tile{values + panel * KEYS * PANEL_COLUMNS};
      for (int chunk = thread % 4; chunk < 8; chunk += 4) {
        T* elements = tile.chunk(row, chunk);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const bool finite = is_finite(to_float(elements[e]));
          found = found || !finite;
          if (hidden || !finite) store(elements + e, from_float<T>(0.f));
        }
      }
    }
    if (!is_shared) continue;
    found = quad_max(found ? 1.f : 0.f) > 0.f;
    if (thread % 4 == 0) tainted[row] = found && !hidden;
  }
  fence_for_async();
  named_barrier_sync(1, THREADS);
}

// A tile as the copy engine writes it: panels of 64 columns.
template <class T, int ROWS> struct Panels {
  T* data;

  TK_DEVICE T* at(int row, int column) const {
    const Tile<T, PANEL_COLUMNS> panel{data + column / PANEL_COLUMNS * ROWS * PANEL_COLUMNS};
    return panel.at(row, column % PANEL_COLUMNS);
  }
};

// Rotates the rows of a tile whose bits are set by the angles of tokens before `end`. Called by all consumers.
template <int HEAD_DIM, int THREADS, class T, int ROWS>
TK_DEVICE void rotate_panels(Panels<T, ROWS> tile, int first_row, int end, uint64_t low, uint64_t high,
                             const Angles& angles, int thread) {
  constexpr int LANES = HEAD_DIM / 16;  // each rotates 16 bytes of the first columns of pairs and 16 of the second
#pragma unroll 1
  for (int row = thread / LANES; row < ROWS; row += THREADS / LANES)
    if (first_row + row < end && ((row < 64 ? low : high) >> row % 64 & 1))
      rotate_row<LANES, T>(tile, row, angles, first_row + row, 1.f, thread % LANES);
  fence_for_async();
  named_barrier_sync(1, THREADS);
}

// One block owns 128 queries of one head. EXTRAS: Arguments::has_extras(). READS: scores depend on
// memory, for which tiles have half the keys.
template <class T, int HEAD_DIM, bool EXTRAS, bool READS>
__global__ void __launch_bounds__(HopperShape<HEAD_DIM, READS>::THREADS, 1)
    attention_forward_sm90_kernel(const __grid_constant__ TensorMaps maps, const Arguments arguments) {
#if defined(TK_HOPPER)
  using Shape = HopperShape<HEAD_DIM, READS>;
  constexpr int QUERIES = Shape::QUERIES, KEYS = Shape::KEYS, STAGES = Shape::STAGES, PANELS = Shape::PANELS;
  SharedMemory shared;
  T* const queries = shared.take<T, 1024>(QUERIES * HEAD_DIM);
  T* const key_stages = shared.take<T, 1024>(2 * STAGES * KEYS * HEAD_DIM);
  T* const value_stages = key_stages + STAGES * KEYS * HEAD_DIM;  // contiguous, as the descriptors require
  uint64_t* const barriers = shared.take<uint64_t>(Shape::BARRIERS);
  uint64_t *const queries_full = barriers, *const keys_full = barriers + 1, *const values_full = keys_full + STAGES;
  uint64_t *const keys_empty = values_full + STAGES, *const values_empty = keys_empty + STAGES;
  uint8_t* const tainted_stages = shared.take<uint8_t>(STAGES * KEYS);
  float2* const slots = shared.take<float2>(Shape::CONSUMERS);
  Interval* const seen = shared.take<Interval>(QUERIES + 1);
  PhiloxKeys* const round_keys = shared.take<PhiloxKeys>(1);

  const int query_tiles = (arguments.query_length + QUERIES - 1) / QUERIES;
  const int block_query = (query_tiles - 1 - static_cast<int>(blockIdx.x % query_tiles)) * QUERIES;
  const int head = blockIdx.x / query_tiles % arguments.query_heads;
  const int batch = blockIdx.x / query_tiles / arguments.query_heads;
  const int key_head = head / (arguments.query_heads / arguments.key_heads);
  const int last_query = min(block_query + QUERIES, arguments.query_length) - 1;
  const Interval first_sees = keys_seen_by(arguments, block_query), last_sees = keys_seen_by(arguments, last_query);
  const Interval whole = tiles_inside<KEYS>(seen_by_all(first_sees, last_sees));
  const TileRange tiles = tiles_touching<KEYS>(seen_by_any(first_sees, last_sees));
  TileWalk<KEYS> walk{padding_of(arguments, batch), arguments.key_length, tiles.end};
  if (threadIdx.x == 0) {
    constexpr int CONSUMER_WARPS = Shape::CONSUMERS / WARP_SIZE;
    barrier_init(queries_full, 1);
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(keys_full + stage, 1);
      barrier_init(values_full + stage, 1);
      barrier_init(keys_empty + stage, CONSUMER_WARPS);
      barrier_init(values_empty + stage, CONSUMER_WARPS);
    }
    barrier_init_fence();
    seen[QUERIES] = whole;
    if (EXTRAS) store_round_keys(round_keys, arguments);
  }
  __syncthreads();

  if (threadIdx.x < WARP_GROUP_SIZE) {
    give_registers<24>();
    if (threadIdx.x >= WARP_SIZE) return;
    const auto copy_tile = [&](T* tile, const TensorMap& map, int rows, int row, int from_head, uint64_t* full) {
      barrier_arrive_expecting(full, rows * HEAD_DIM * 2);
      for (int panel = 0; panel < PANELS; ++panel)
        copy_tensor_box(tile + panel * rows * PANEL_COLUMNS, map, panel * PANEL_COLUMNS, row, from_head, batch, full);
    };
    if (threadIdx.x == 0) copy_tile(queries, maps.query, QUERIES, block_query, head, queries_full);
    for (walk.find(tiles.first); walk.tile < walk.tiles; walk.advance()) {
      const int stage = walk.step % STAGES, parity = walk.step / STAGES % 2, row = walk.tile * KEYS;
      if (threadIdx.x == 0) {
        barrier_wait(keys_empty + stage, parity ^ 1);
        copy_tile(key_stages + stage * KEYS * HEAD_DIM, maps.key, KEYS, row, key_head, keys_full + stage);
        barrier_wait(values_empty + stage, parity ^ 1);
        copy_tile(value_stages + stage * KEYS * HEAD_DIM, maps.value, KEYS, row, key_head, values_full + stage);
      }
      __syncwarp();
    }
    return;
  }

  take_registers<240>();
  const int thread = threadIdx.x - WARP_GROUP_SIZE, lane = threadIdx.x % WARP_SIZE, warp_row = thread / WARP_SIZE * 16;
  const int group_row = __shfl_sync(ALL_LANES, thread / WARP_GROUP_SIZE, 0) * 64;  // in a uniform register
  const uint64_t queries_at = swizzled_descriptor(queries + group_row * PANEL_COLUMNS, 16);
  const uint64_t keys_at = swizzled_descriptor(key_stages, 16);
  constexpr uint64_t VALUES_FROM_KEYS = static_cast<uint64_t>(KEYS * PANEL_COLUMNS * 2 / 16 - 1) << 16;
  const uint64_t values_at = descriptor_after(keys_at, STAGES * Shape::TILE_BYTES) + VALUES_FROM_KEYS;
  AttendedRows<T, HEAD_DIM, EXTRAS> rows(arguments, batch, head, block_query + warp_row, seen + warp_row);
  WideScores<T, KEYS, Shape::HELD, READS, Shape::ASKS_AHEAD> scoring(arguments, batch, head, block_query + warp_row);
  Poison poison;
  float scores[KEYS / 8][4] = {};
  uint32_t probabilities[KEYS / 16][4] = {};
  const auto release = [&](uint64_t* empty) {
    __syncwarp();
    if (lane == 0) barrier_arrive(empty);
  };
  const auto start_scores = [&](const TileWalk<KEYS>& at) {  // scores = Q K^T
    const int stage = at.step % STAGES;
    const uint64_t stage_at = descriptor_after(keys_at, stage * Shape::TILE_BYTES);
    barrier_wait(keys_full + stage, at.step / STAGES % 2);
    if (arguments.angles.cos)
      rotate_panels<HEAD_DIM, Shape::CONSUMERS>(Panels<T, KEYS>{key_stages + stage * KEYS * HEAD_DIM}, at.tile * KEYS,
                                                arguments.key_length, at.low, at.high, angles_of(arguments, batch),
                                                thread);
    wgmma_pin(scores);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
      const int panel = step / 4, column = step % 4 * 16;
      Wgmma<T, KEYS>::from_shared(scores, descriptor_after(queries_at, (panel * QUERIES * PANEL_COLUMNS + column) * 2),
                                  descriptor_after(stage_at, (panel * KEYS * PANEL_COLUMNS + column) * 2), step > 0);
    }
    wgmma_commit();
  };
  // Tiles visible to all rows. With 256 columns of output no register is free for this range.
  const auto seen_whole = [&] { return HEAD_DIM > 128 ? seen[QUERIES] : whole; };
  const auto needs_mask = [&](const TileWalk<KEYS>& at) {
    return at.has_hidden() || !is_inside<1>(at.tile, seen_whole());
  };
  const auto start_values = [&](const TileWalk<KEYS>& at) {  // out += P V
    const int stage = at.step % STAGES;
    T* v = value_stages + stage * KEYS * HEAD_DIM;
    uint8_t* tainted = tainted_stages + stage * KEYS;
    barrier_wait(values_full + stage, at.step / STAGES % 2);
    const bool is_shared = is_packed(arguments) && needs_mask(at);
    if (is_shared || (padding_of(arguments, batch) && at.has_hidden()))
      quarantine_values<T, HEAD_DIM, KEYS, Shape::CONSUMERS>(v, at, is_shared, tainted, thread);
    if (is_shared)
      poison.note({rows.keys_of(0, 0), rows.keys_of(0, 1)}, at.tile * KEYS, KEYS,
                  [=](int row) { return tainted[row] != 0; });
    wgmma_pin(rows.out[0]);
    wgmma_pin(probabilities);
    wgmma_fence();
    const uint64_t stage_at = descriptor_after(values_at, stage * Shape::TILE_BYTES);
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step)
      Wgmma<T, HEAD_DIM>::from_registers(rows.out[0], probabilities[step],
                                         descriptor_after(stage_at, step * 16 * PANEL_COLUMNS * 2));
    wgmma_commit();
  };
  float shrink[2];
  const auto take_scores = [&](const TileWalk<KEYS>& at) {  // exponentials of the scores, with dropout
    const int first_key = at.tile * KEYS;
    if constexpr (EXTRAS) scoring.score(scores, first_key);
    if (needs_mask(at)) {
      rows.template hide_keys<64>(scores, 0, first_key, at.low);
      if constexpr (KEYS > 64) rows.template hide_keys<64>(scores, 8, first_key + 64, at.high);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      shrink[half] = rows.softmax[0].template update<T, EXTRAS>(scores, half, exponential_factor<T, EXTRAS>(arguments));
    if constexpr (EXTRAS) {
      rows.template drop<KEYS>(scores, first_key, 0, [&] { return *round_keys; });
    }
  };
  const auto pack_probabilities = [&] {
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        probabilities[step][e] =
            pack_pair<T>(scores[2 * step + e / 2][e % 2 * 2], scores[2 * step + e / 2][e % 2 * 2 + 1]);
  };

  barrier_wait(queries_full, 0);
  if (arguments.angles.cos)
    rotate_panels<HEAD_DIM, Shape::CONSUMERS>(Panels<T, QUERIES>{queries}, block_query, arguments.query_length, ~0ull,
                                              ~0ull, angles_of(arguments, batch), thread);
  walk.find(tiles.first);
  if (walk.tile < walk.tiles) {
    start_scores(walk);
    scoring.ask(walk.tile * KEYS);
    wgmma_wait<0>();
    wgmma_pin(scores);
    release(keys_empty + walk.step % STAGES);
    take_scores(walk);
    pack_probabilities();
    TileWalk<KEYS> previous = walk;
    for (walk.advance(); walk.tile < walk.tiles; walk.advance()) {
      start_scores(walk);
      start_values(previous);
      scoring.ask(walk.tile * KEYS);
      wgmma_wait<1>();
      wgmma_pin(scores);
      release(keys_empty + walk.step % STAGES);
      take_scores(walk);
      finish_before_wait(slots + thread, rows.softmax[0].total[0], rows.softmax[0].total[1]);
      wgmma_wait<0>();
      wgmma_pin(rows.out[0]);
      release(values_empty + previous.step % STAGES);
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) rows.out[0][n][e] *= shrink[e / 2];
      pack_probabilities();
      previous = walk;
    }
    start_values(previous);
    wgmma_wait<0>();
    wgmma_pin(rows.out[0]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) rows.add_poison(0, half, poison.found[half]);
  named_barrier_sync(1, Shape::CONSUMERS);  // both groups have read Q; its memory is reused for the output
  rows.finish(Tile<T, HEAD_DIM>{queries}, warp_row);
#endif
}

template <class T> void launch_forward_sm90(const Arguments& arguments, Stream stream) {
  const DeviceGuard guard(stream.device);  // a tensor map requires a context
  const auto map_of = [&](const Strided& tensor, int64_t length, int64_t heads, unsigned box_rows) {
    return tensor_map<T>(tensor.data, arguments.head_dim, length, heads, arguments.batches, tensor.row, tensor.head,
                         tensor.batch, box_rows);
  };
  const auto with_head_dim = [&](auto head_dim, auto extras, auto reads) {
    using Shape = HopperShape<head_dim.value, reads.value>;
    const TensorMaps maps{map_of(arguments.query, arguments.query_length, arguments.query_heads, Shape::QUERIES),
                          map_of(arguments.key, arguments.key_length, arguments.key_heads, Shape::KEYS),
                          map_of(arguments.value, arguments.key_length, arguments.key_heads, Shape::KEYS)};
    const int64_t blocks = ceil_div(arguments.query_length, Shape::QUERIES) * arguments.query_heads * arguments.batches;
    launch<attention_forward_sm90_kernel<T, head_dim.value, extras.value, reads.value>>(
        "attention_forward_sm90", grid_of(blocks), Shape::THREADS, Shape::SHARED_BYTES, stream, maps, arguments);
  };
  const auto with_extras = [&](auto extras, auto reads) {
    if (arguments.head_dim > 128) return with_head_dim(Constant<256>{}, std::true_type{}, reads);
    arguments.head_dim <= 64 ? with_head_dim(Constant<64>{}, extras, reads)
                             : with_head_dim(Constant<128>{}, extras, reads);
  };
  if (arguments.reads_scores()) return with_extras(std::true_type{}, std::true_type{});
  dispatch_extras(arguments, [&](auto extras) { with_extras(extras, std::false_type{}); });
}

}  // namespace transformer_kernels::attention
