// Flash attention, forward, for Hopper: a producer warp keeps the copy engine busy, two warp groups of consumers
// compute 64 queries each by wgmma (Shah et al., "FlashAttention-3", 2024, algorithms 1 and 2). The scores of the next
// tile are computed while the weights of the current one are multiplied by its values. A persistent grid has one block
// per multiprocessor: the producer copies the next tile of queries and its keys while consumers finish the current one.
#pragma once
#include "../primitives/hopper.h"
#include "attention_forward.cuh"

namespace transformer_kernels::attention {

struct TensorMaps {
  TensorMap query, key, value;
};

// The copy engine fills columns from the head dimension of the call to HEAD_DIM with zeros.
template <int HEAD_DIM, bool EXTRAS, bool READS, bool PERSISTENT> struct HopperShape {
  static constexpr bool NARROW = HEAD_DIM > 128 || READS || (PERSISTENT && EXTRAS && HEAD_DIM > 64);  // by registers
  static constexpr int GROUP_QUERIES = 64, QUERIES = 2 * GROUP_QUERIES;
  static constexpr int KEYS = NARROW ? 64 : 128, STAGES = 2;
  static constexpr int QUERY_STAGES = PERSISTENT ? 2 : 1;
  static constexpr bool ASKS_AHEAD = HEAD_DIM <= 128;  // else registers do not suffice
  static constexpr int HELD = ASKS_AHEAD ? KEYS / 8 : 1;  // groups of eight keys whose reads are in registers
  static constexpr int CONSUMERS = 2 * WARP_GROUP_SIZE, THREADS = CONSUMERS + WARP_GROUP_SIZE;
  static constexpr int CONSUMER_WARPS = CONSUMERS / WARP_SIZE;
  static constexpr int PANELS = HEAD_DIM / PANEL_COLUMNS;
  static constexpr int TILE_BYTES = KEYS * HEAD_DIM * 2;  // of a key or a value tile
  static constexpr int BARRIERS = 2 * QUERY_STAGES + 4 * STAGES;
  static constexpr int TILES_BYTES = (QUERY_STAGES * QUERIES + 2 * STAGES * KEYS) * HEAD_DIM * 2;
  static constexpr int BARRIERS_END = shared_bytes_after<uint64_t>(BARRIERS, TILES_BYTES);
  static constexpr int NOTES_END =
      shared_bytes_after<float2>(CONSUMERS, shared_bytes_after<uint8_t>(STAGES* KEYS, BARRIERS_END));
  static constexpr int SHARED_BYTES =
      shared_bytes_after<PhiloxKeys>(1, shared_bytes_after<Interval>(QUERIES + CONSUMER_WARPS, NOTES_END));
};

// The tile of queries of a block in a round of a persistent grid. Odd rounds are reversed, so that blocks share the
// long and the short rows of causal attention.
TK_DEVICE unsigned tile_of_round(unsigned round) {
  return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

// A tile of queries of one head, and the tiles of keys that its rows see.
template <int QUERIES, int KEYS> struct QueryTile {
  int first_query, head, key_head, batch;
  Interval whole;  // tiles of keys visible to all rows
  TileRange keys;

  TK_DEVICE QueryTile(const Arguments& arguments, unsigned index) {
    const unsigned query_tiles = (arguments.query_length + QUERIES - 1) / QUERIES;
    first_query = static_cast<int>(query_tiles - 1 - index % query_tiles) * QUERIES;
    head = static_cast<int>(index / query_tiles % arguments.query_heads);
    batch = static_cast<int>(index / query_tiles / arguments.query_heads);
    key_head = head / (arguments.query_heads / arguments.key_heads);
    const int last_query = min(first_query + QUERIES, arguments.query_length) - 1;
    const Interval first_sees = keys_seen_by(arguments, first_query), last_sees = keys_seen_by(arguments, last_query);
    whole = tiles_inside<KEYS>(seen_by_all(first_sees, last_sees));
    keys = tiles_touching<KEYS>(seen_by_any(first_sees, last_sees));
  }
};

// Named barriers of the consumers; those from GROUP and TURN on have one for each group.
namespace barrier_of { inline constexpr int CONSUMERS = 1, GROUP = 2, TURN = 4; }

// Tiles with a real key, in order: producer and consumers iterate over the same list.
template <int KEYS> struct TileWalk {
  const uint8_t* mask;
  int key_length, tiles;
  int tile = 0, step = 0;  // `step` counts visited tiles; it determines stage and parity
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
  named_barrier_sync(barrier_of::CONSUMERS, THREADS);
}

// A tile as the copy engine writes it: panels of 64 columns.
template <class T, int ROWS> struct Panels {
  T* data;

  TK_DEVICE T* at(int row, int column) const {
    const Tile<T, PANEL_COLUMNS> panel{data + column / PANEL_COLUMNS * ROWS * PANEL_COLUMNS};
    return panel.at(row, column % PANEL_COLUMNS);
  }
};

// Rotates the rows of a tile whose bits are set by the angles of tokens before `end`. Called by all of a barrier.
template <int HEAD_DIM, int THREADS, class T, int ROWS>
TK_DEVICE void rotate_panels(Panels<T, ROWS> tile, int first_row, int end, uint64_t low, uint64_t high,
                             const Angles& angles, int thread, int barrier) {
  constexpr int LANES = HEAD_DIM / 16;  // each rotates 16 bytes of the first columns of pairs and 16 of the second
#pragma unroll 1
  for (int row = thread / LANES; row < ROWS; row += THREADS / LANES)
    if (first_row + row < end && ((row < 64 ? low : high) >> row % 64 & 1))
      rotate_row<LANES, T>(tile, row, angles, first_row + row, 1.f, thread % LANES);
  fence_for_async();
  named_barrier_sync(barrier, THREADS);
}

// One block owns 128 queries of one head at a time. EXTRAS: Arguments::has_extras(). READS: scores depend on
// memory, for which tiles have half the keys.
template <class T, int HEAD_DIM, bool EXTRAS, bool READS, bool PERSISTENT>
__global__ void __launch_bounds__(HopperShape<HEAD_DIM, EXTRAS, READS, PERSISTENT>::THREADS, 1)
    attention_forward_sm90_kernel(const __grid_constant__ TensorMaps maps, const Arguments arguments,
                                  const unsigned tiles) {
#if defined(TK_HOPPER)
  using Shape = HopperShape<HEAD_DIM, EXTRAS, READS, PERSISTENT>;
  constexpr int QUERIES = Shape::QUERIES, KEYS = Shape::KEYS, STAGES = Shape::STAGES, PANELS = Shape::PANELS;
  constexpr int GROUP_QUERIES = Shape::GROUP_QUERIES, QUERY_STAGES = Shape::QUERY_STAGES;
  constexpr int CONSUMER_WARPS = Shape::CONSUMER_WARPS;
  SharedMemory shared;
  T* const query_stages = shared.take<T, 1024>(QUERY_STAGES * QUERIES * HEAD_DIM);  // a tile for each group
  T* const key_stages = shared.take<T, 1024>(2 * STAGES * KEYS * HEAD_DIM);
  T* const value_stages = key_stages + STAGES * KEYS * HEAD_DIM;  // contiguous, as the descriptors require
  uint64_t* const barriers = shared.take<uint64_t>(Shape::BARRIERS);
  uint64_t *const queries_full = barriers, *const queries_empty = queries_full + QUERY_STAGES;
  uint64_t *const keys_full = queries_empty + QUERY_STAGES, *const values_full = keys_full + STAGES;
  uint64_t *const keys_empty = values_full + STAGES, *const values_empty = keys_empty + STAGES;
  uint8_t* const tainted_stages = shared.take<uint8_t>(STAGES * KEYS);
  float2* const slots = shared.take<float2>(Shape::CONSUMERS);
  Interval* const seen = shared.take<Interval>(QUERIES + CONSUMER_WARPS);
  PhiloxKeys* const round_keys = shared.take<PhiloxKeys>(1);

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < QUERY_STAGES; ++stage) {
      barrier_init(queries_full + stage, QUERIES / GROUP_QUERIES);
      barrier_init(queries_empty + stage, CONSUMER_WARPS);
    }
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(keys_full + stage, 1);
      barrier_init(values_full + stage, 1);
      barrier_init(keys_empty + stage, CONSUMER_WARPS);
      barrier_init(values_empty + stage, CONSUMER_WARPS);
    }
    barrier_init_fence();
    if (EXTRAS) store_round_keys(round_keys, arguments);
  }
  __syncthreads();

  int step = 0;  // of keys and values, in all tiles
  if (threadIdx.x < WARP_GROUP_SIZE) {
    give_registers<PERSISTENT ? 40 : 24>();
    if (threadIdx.x >= WARP_SIZE) return;
    for (unsigned round = 0; PERSISTENT ? tile_of_round(round) < tiles : round < 1; ++round) {
      const QueryTile<QUERIES, KEYS> tile(arguments, PERSISTENT ? tile_of_round(round) : blockIdx.x);
      const auto copy_rows = [&](T* rows, const TensorMap& map, int count, int row, int head, uint64_t* full) {
        barrier_arrive_expecting(full, count * HEAD_DIM * 2);
        for (int panel = 0; panel < PANELS; ++panel)
          copy_tensor_box(rows + panel * count * PANEL_COLUMNS, map, panel * PANEL_COLUMNS, row, head, tile.batch,
                          full);
      };
      if (threadIdx.x == 0) {
        const int stage = round % QUERY_STAGES;
        if (PERSISTENT) barrier_wait(queries_empty + stage, round / QUERY_STAGES % 2 ^ 1);
        for (int row = 0; row < QUERIES; row += GROUP_QUERIES)
          copy_rows(query_stages + (stage * QUERIES + row) * HEAD_DIM, maps.query, GROUP_QUERIES,
                    tile.first_query + row, tile.head, queries_full + stage);
      }
      TileWalk<KEYS> walk{padding_of(arguments, tile.batch), arguments.key_length, tile.keys.end, 0, step};
      for (walk.find(tile.keys.first); walk.tile < walk.tiles; walk.advance()) {
        const int stage = walk.step % STAGES, parity = walk.step / STAGES % 2, row = walk.tile * KEYS;
        if (threadIdx.x == 0) {
          barrier_wait(keys_empty + stage, parity ^ 1);
          copy_rows(key_stages + stage * KEYS * HEAD_DIM, maps.key, KEYS, row, tile.key_head, keys_full + stage);
          barrier_wait(values_empty + stage, parity ^ 1);
          copy_rows(value_stages + stage * KEYS * HEAD_DIM, maps.value, KEYS, row, tile.key_head, values_full + stage);
        }
        __syncwarp();
      }
      step = walk.step;
    }
    return;
  }

  take_registers<PERSISTENT ? 232 : 240>();
  const int thread = threadIdx.x - WARP_GROUP_SIZE, lane = threadIdx.x % WARP_SIZE, warp = thread / WARP_SIZE;
  const int group = __shfl_sync(ALL_LANES, thread / WARP_GROUP_SIZE, 0);  // in a uniform register
  // Opaque, for which descriptors of queries stay in uniform registers; with 256 columns of output none is free.
  const int own = (HEAD_DIM > 128 ? group : computed_late(group)) * GROUP_QUERIES;
  const uint64_t queries_at = swizzled_descriptor(query_stages + own * HEAD_DIM, 16);
  const uint64_t keys_at = swizzled_descriptor(key_stages, 16);
  constexpr uint64_t VALUES_FROM_KEYS = static_cast<uint64_t>(KEYS * PANEL_COLUMNS * 2 / 16 - 1) << 16;
  const uint64_t values_at = descriptor_after(keys_at, STAGES * Shape::TILE_BYTES) + VALUES_FROM_KEYS;
  Interval* const seen_by_warp = seen + warp * 17;  // of 16 rows, then by all of the tile
  const auto release = [&](uint64_t* empty) {
    __syncwarp();
    if (lane == 0) barrier_arrive(empty);
  };
  const auto wait_for_turn = [&] {
    if (PERSISTENT) named_barrier_sync(barrier_of::TURN + group, Shape::CONSUMERS);
  };
  const auto pass_turn = [&] {
    if (PERSISTENT) named_barrier_arrive(barrier_of::TURN + (group ^ 1), Shape::CONSUMERS);
  };
  if (group == 1) pass_turn();
  for (unsigned round = 0; PERSISTENT ? tile_of_round(round) < tiles : round < 1; ++round) {
    const QueryTile<QUERIES, KEYS> tile(arguments, PERSISTENT ? tile_of_round(round) : blockIdx.x);
    const int query_stage = round % QUERY_STAGES, batch = tile.batch, first_query = tile.first_query + warp * 16;
    const uint64_t tile_at = descriptor_after(queries_at, query_stage * QUERIES * HEAD_DIM * 2);
    T* const queries = query_stages + (query_stage * QUERIES + group * GROUP_QUERIES) * HEAD_DIM;
    if (lane == 0) seen_by_warp[16] = tile.whole;
    AttendedRows<T, HEAD_DIM, EXTRAS> rows(arguments, batch, tile.head, first_query, seen_by_warp);
    WideScores<T, KEYS, Shape::HELD, READS, Shape::ASKS_AHEAD> scoring(arguments, batch, tile.head, first_query);
    Poison poison;
    float scores[KEYS / 8][4] = {};
    uint32_t probabilities[KEYS / 16][4] = {};
    const auto prepare_keys = [&](const TileWalk<KEYS>& at) {
      const int stage = at.step % STAGES;
      barrier_wait(keys_full + stage, at.step / STAGES % 2);
      if (arguments.angles.cos)
        rotate_panels<HEAD_DIM, Shape::CONSUMERS>(Panels<T, KEYS>{key_stages + stage * KEYS * HEAD_DIM}, at.tile * KEYS,
                                                  arguments.key_length, at.low, at.high, angles_of(arguments, batch),
                                                  thread, barrier_of::CONSUMERS);
    };
    const auto start_scores = [&](const TileWalk<KEYS>& at) {  // scores = Q K^T
      const uint64_t stage_at = descriptor_after(keys_at, at.step % STAGES * Shape::TILE_BYTES);
      wgmma_pin(scores);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < HEAD_DIM / 16; ++step) {
        const int panel = step / 4, column = step % 4 * 16;
        Wgmma<T, KEYS>::from_shared(scores,
                                    descriptor_after(tile_at, (panel * GROUP_QUERIES * PANEL_COLUMNS + column) * 2),
                                    descriptor_after(stage_at, (panel * KEYS * PANEL_COLUMNS + column) * 2), step > 0);
      }
      wgmma_commit();
    };
    // Tiles visible to all rows. With 256 columns of output no register is free for this range.
    const auto seen_whole = [&] { return HEAD_DIM > 128 ? seen_by_warp[16] : tile.whole; };
    const auto needs_mask = [&](const TileWalk<KEYS>& at) {
      return at.has_hidden() || !is_inside<1>(at.tile, seen_whole());
    };
    const auto prepare_values = [&](const TileWalk<KEYS>& at) {
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
    };
    const auto start_values = [&](const TileWalk<KEYS>& at) {  // out += P V
      const uint64_t stage_at = descriptor_after(values_at, at.step % STAGES * Shape::TILE_BYTES);
      wgmma_pin(rows.out[0]);
      wgmma_pin(probabilities);
      wgmma_fence();
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
        shrink[half] =
            rows.softmax[0].template update<T, EXTRAS>(scores, half, exponential_factor<T, EXTRAS>(arguments));
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

    barrier_wait(queries_full + query_stage, round / QUERY_STAGES % 2);
    if (arguments.angles.cos)
      rotate_panels<HEAD_DIM, WARP_GROUP_SIZE>(
          Panels<T, GROUP_QUERIES>{queries}, tile.first_query + group * GROUP_QUERIES, arguments.query_length, ~0ull,
          ~0ull, angles_of(arguments, batch), thread % WARP_GROUP_SIZE, barrier_of::GROUP + group);
    TileWalk<KEYS> walk{padding_of(arguments, batch), arguments.key_length, tile.keys.end, 0, step};
    walk.find(tile.keys.first);
    if (walk.tile < walk.tiles) {
      prepare_keys(walk);
      start_scores(walk);
      scoring.ask(walk.tile * KEYS);
      wgmma_wait<0>();
      wgmma_pin(scores);
      release(keys_empty + walk.step % STAGES);
      take_scores(walk);
      pack_probabilities();
      TileWalk<KEYS> previous = walk;
      for (walk.advance(); walk.tile < walk.tiles; walk.advance()) {
        prepare_keys(walk);
        if (PERSISTENT) prepare_values(previous);
        wait_for_turn();
        start_scores(walk);
        if (!PERSISTENT) prepare_values(previous);
        start_values(previous);
        pass_turn();
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
      prepare_values(previous);
      start_values(previous);
      wgmma_wait<0>();
      wgmma_pin(rows.out[0]);
      if (PERSISTENT) release(values_empty + previous.step % STAGES);
      step = walk.step;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) rows.add_poison(0, half, poison.found[half]);
    // The group has read its queries; their memory is reused for the output.
    named_barrier_sync(barrier_of::GROUP + group, WARP_GROUP_SIZE);
    rows.finish(Tile<T, HEAD_DIM>{queries}, warp % 4 * 16);
    if (!PERSISTENT) return;
    fence_for_async();
    release(queries_empty + query_stage);
  }
  if (group == 0) wait_for_turn();  // the last arrival of the other group
#endif
}

template <class T> void launch_forward_sm90(const Arguments& arguments, bool persistent, Stream stream) {
  const DeviceGuard guard(stream.device);  // a tensor map requires a context
  const auto map_of = [&](const Strided& tensor, int64_t length, int64_t heads, unsigned box_rows) {
    return tensor_map<T>(tensor.data, arguments.head_dim, length, heads, arguments.batches, tensor.row, tensor.head,
                         tensor.batch, box_rows);
  };
  const auto with_head_dim = [&](auto head_dim, auto extras, auto reads, auto persistent) {
    using Shape = HopperShape<head_dim.value, extras.value, reads.value, persistent.value>;
    const TensorMaps maps{map_of(arguments.query, arguments.query_length, arguments.query_heads, Shape::GROUP_QUERIES),
                          map_of(arguments.key, arguments.key_length, arguments.key_heads, Shape::KEYS),
                          map_of(arguments.value, arguments.key_length, arguments.key_heads, Shape::KEYS)};
    const int64_t tiles = ceil_div(arguments.query_length, Shape::QUERIES) * arguments.query_heads * arguments.batches;
    const dim3 grid = grid_of(tiles);
    const auto blocks = static_cast<unsigned>(multiprocessor_count(stream.device));
    launch<attention_forward_sm90_kernel<T, head_dim.value, extras.value, reads.value, persistent.value>>(
        "attention_forward_sm90", persistent.value && blocks < grid.x ? dim3(blocks) : grid, Shape::THREADS,
        Shape::SHARED_BYTES, stream, maps, arguments, grid.x);
  };
  const auto with_extras = [&](auto extras, auto reads, auto persistent) {
    if constexpr (!persistent.value) {
      if (arguments.head_dim > 128) return with_head_dim(Constant<256>{}, std::true_type{}, reads, persistent);
    }
    arguments.head_dim <= 64 ? with_head_dim(Constant<64>{}, extras, reads, persistent)
                             : with_head_dim(Constant<128>{}, extras, reads, persistent);
  };
  if (arguments.reads_scores()) return with_extras(std::true_type{}, std::true_type{}, std::false_type{});
  dispatch_extras(arguments, [&](auto extras) {
    persistent ? with_extras(extras, std::false_type{}, std::true_type{})
               : with_extras(extras, std::false_type{}, std::false_type{});
  });
}

}  // namespace transformer_kernels::attention
