// Shared by the attention kernels: visibility, swizzled tiles, matrix products on tiles.
//
// Fragment convention. A warp computes 16 rows at a time. With g = lane / 4 and t = lane % 4, element [n][e] of a
// result `float c[N / 8][4]` is row g + 8 * (e / 2), column 8 * n + 2 * t + e % 2: the accumulator layout of
// mma.m16n8k16. The fp32 products below use the same ownership with plain FMA, so that masks and softmax are written
// once for every type.
#pragma once
#include <type_traits>

#include "../primitives/matrix.h"
#include "../primitives/memory.h"
#include "../primitives/numbers.h"
#include "../primitives/philox.h"
#include "../primitives/reductions.h"
#include "attention_arguments.h"
#include "rotary.cuh"

namespace transformer_kernels::attention {

template <class T> TK_DEVICE const T* rows_of(const Strided& tensor, int batch, int head) {
  return static_cast<const T*>(tensor.data) + batch * tensor.batch + head * tensor.head;
}

template <class T> TK_DEVICE T* rows_of(const StridedOutput& tensor, int batch, int head) {
  return static_cast<T*>(tensor.data) + batch * tensor.batch + head * tensor.head;
}

// This batch's row of the key padding mask, or null.
TK_DEVICE const uint8_t* padding_of(const Arguments& arguments, int batch) {
  const uint8_t* mask = arguments.key_padding_mask;
  return mask ? mask + static_cast<int64_t>(batch) * arguments.key_length : nullptr;
}

// Statistics of a head: per query the maximum of its scores (-inf if fully masked), then, query_length floats later,
// the log of the sum of exp(score - maximum). Their sum, lse, loses the log for large scores.
TK_DEVICE float* statistics_of(const Arguments& arguments, int batch, int head) {
  return arguments.statistics +
         (static_cast<int64_t>(batch) * arguments.query_heads + head) * 2 * arguments.query_length;
}

// ---- visibility

struct Interval {
  int first, last;  // inclusive; empty if first > last
};

// The packed sequence of a token, by bisection; after the last sequence an empty interval at its end. The interval is
// within the tokens for any cu_seqlens. Both ends are monotonic in the token.
TK_DEVICE Interval sequence_of(const Arguments& arguments, int token) {
  const int* starts = arguments.cu_seqlens;
  int low = 0, high = arguments.sequences + 1;  // the first start after the token is in [low, high]
  while (low < high) {
    const int middle = (low + high) / 2;
    if (load(starts + middle) <= token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const auto start = [&](int sequence) { return min(max(load(starts + sequence), 0), arguments.key_length); };
  return {start(max(low - 1, 0)), start(min(low, arguments.sequences)) - 1};
}

// Whether a tile may have rows of several sequences, whose inf and NaN must not reach each other.
TK_DEVICE bool is_packed(const Arguments& arguments) { return arguments.cu_seqlens; }

// Whether causality or a window hides any key.
TK_DEVICE bool hides_by_position(const Arguments& arguments) {
  return arguments.left < arguments.key_length - 1 || arguments.right < arguments.query_length - 1;
}

// The keys visible to a query by packing, causality and window. Both ends are monotonic in the query.
TK_DEVICE Interval keys_seen_by(const Arguments& arguments, int query) {
  const int aligned = query + arguments.key_length - arguments.query_length;
  const Interval keys = arguments.cu_seqlens ? sequence_of(arguments, query) : Interval{0, arguments.key_length - 1};
  return {max(keys.first, aligned - arguments.left), min(keys.last, aligned + arguments.right)};
}

// The queries that see a key, the inverse relation. Both ends are monotonic in the key.
TK_DEVICE Interval queries_seeing(const Arguments& arguments, int key) {
  const int aligned = key + arguments.query_length - arguments.key_length;
  const Interval queries = arguments.cu_seqlens ? sequence_of(arguments, key) : Interval{0, arguments.query_length - 1};
  return {max(queries.first, aligned - arguments.right), min(queries.last, aligned + arguments.left)};
}

// The intersection and the union of the intervals of a range of rows, from those of its first and last row.
TK_DEVICE Interval seen_by_all(const Interval& first, const Interval& last) { return {last.first, first.last}; }
TK_DEVICE Interval seen_by_any(const Interval& first, const Interval& last) { return {first.first, last.last}; }

// The intersection for a warp's 16 rows, of which each lane owns rows g and g + 8.
TK_DEVICE Interval seen_by_warp(const Interval (&rows)[2]) {
  return {__shfl_sync(ALL_LANES, rows[1].first, WARP_SIZE - 1), __shfl_sync(ALL_LANES, rows[0].last, 0)};
}

// The tiles of ROWS rows that intersect an interval.
struct TileRange {
  int first, end;
};
template <int ROWS> TK_DEVICE TileRange tiles_touching(const Interval& interval) {
  if (interval.first > interval.last) return {0, 0};
  return {interval.first / ROWS, interval.last / ROWS + 1};
}

// The tiles of ROWS rows that are contained in an interval.
template <int ROWS> TK_DEVICE Interval tiles_inside(const Interval& interval) {
  return {(interval.first + ROWS - 1) / ROWS, (interval.last + 1) / ROWS - 1};
}

// Whether COUNT rows starting at `first` are all in the interval.
template <int COUNT> TK_DEVICE bool is_inside(int first, const Interval& interval) {
  return first >= interval.first && first + COUNT - 1 <= interval.last;
}

// Bit i: row first + i is in the interval.
TK_DEVICE uint64_t bits_of(const Interval& interval, int first) {
  const int low = max(interval.first - first, 0), high = min(interval.last - first, 63);
  return low > high ? 0 : ~0ull << low & ~0ull >> (63 - high);
}

// Replaces a lane's elements of row `half` of a fragment, starting at the first_tile-th 8 columns, in columns whose bit
// is not set. Bits at fixed positions are moved to predicates several at a time, unlike comparisons of columns with
// limits.
template <int COLUMNS, int TILES>
TK_DEVICE void hide(float (&fragment)[TILES][4], int half, uint64_t visible, float value, int first_tile = 0) {
  const uint64_t mine = visible >> threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      fragment[first_tile + n][2 * half + e] = mine >> (8 * n + e) & 1 ? fragment[first_tile + n][2 * half + e] : value;
}

template <int KEYS> constexpr uint64_t ALL_KEYS = KEYS == 64 ? ~0ull : (1ull << KEYS % 64) - 1;

// Bit k: key first + k exists and is not padding. Every lane returns all bits; `mask` is a row of the mask.
template <int KEYS> TK_DEVICE uint64_t real_keys(const uint8_t* mask, int first, int key_length) {
  static_assert(KEYS <= 64, "one bit per key");
  if (!mask) return first + KEYS <= key_length ? ALL_KEYS<KEYS> : (1ull << (key_length - first)) - 1;
  const int lane = threadIdx.x % WARP_SIZE;
  uint64_t bits = 0;
#pragma unroll
  for (int part = 0; part < KEYS; part += 32) {
    const int key = first + part + lane;
    const bool real = part + lane < KEYS && key < key_length && mask[key];
    bits |= static_cast<uint64_t>(__ballot_sync(ALL_LANES, real)) << part;
  }
  return bits;
}

// The first tile of KEYS keys in [tile, tiles) with a real key, or `tiles`; `bits` is set to its real keys.
template <int KEYS> TK_DEVICE int next_tile(const uint8_t* mask, int tile, int tiles, int key_length, uint64_t& bits) {
  for (; tile < tiles; ++tile) {
    bits = real_keys<KEYS>(mask, tile * KEYS, key_length);
    if (bits) break;
  }
  return tile;
}

// ---- tiles in shared memory

// ROWS x COLUMNS elements in 16-byte chunks. Chunks are permuted within their row so that a chunk of eight consecutive
// rows (one ldmatrix phase) is in eight different groups of banks.
template <class T, int COLUMNS_> struct Tile {
  static constexpr int COLUMNS = COLUMNS_;
  static constexpr int CHUNK = 16 / sizeof(T);
  static constexpr int CHUNKS = COLUMNS / CHUNK;
  static_assert(CHUNKS % 4 == 0, "a row is a multiple of 64 bytes");
  T* data;

  TK_DEVICE T* chunk(int row, int index) const {
    const int twist = CHUNKS % 8 == 0 ? row % 8 : row / 2 % 4;  // two rows of 64 bytes share a line of banks
    return data + (row * CHUNKS + (index ^ twist)) * CHUNK;
  }
  TK_DEVICE T* at(int row, int column) const { return chunk(row, column / CHUNK) + column % CHUNK; }
};

// Starts an asynchronous copy of ROWS rows starting at first_row; rows from `row_end` on, rows whose bit is 0 and
// columns from head_dim on are set to zero. Rows that are not aligned to 16 bytes are copied synchronously, element by
// element. `thread` is the index among the participating threads.
template <int ROWS, int THREADS, class T, int COLUMNS>
TK_DEVICE void load_tile(Tile<T, COLUMNS> tile, const T* rows, int64_t stride, int first_row, int row_end,
                         uint64_t bits, const Arguments& arguments, int thread) {
  using Shape = Tile<T, COLUMNS>;
  constexpr int STEP = THREADS / Shape::CHUNKS, COUNT = ROWS / STEP;  // a thread copies one chunk of every STEP-th row
  static_assert(THREADS % Shape::CHUNKS == 0 && ROWS % STEP == 0, "the threads share whole rows");
  const unsigned first = static_cast<unsigned>(thread) / Shape::CHUNKS;
  const unsigned chunk = static_cast<unsigned>(thread) % Shape::CHUNKS;
  const int column = static_cast<int>(chunk) * Shape::CHUNK;
  const int left = row_end - first_row - static_cast<int>(first);
  const T* source = rows + (first_row + static_cast<int>(first)) * stride + column;
  const uint64_t mine = bits >> first;
  if (arguments.vectorized) {
    const bool inside = column < arguments.head_dim;
#pragma unroll(COUNT > 8 ? 4 : COUNT)
    for (int i = 0; i < COUNT; ++i, source += STEP * stride) {
      const bool real = inside && i * STEP < left && (mine >> i * STEP & 1);
      copy_async_16(tile.chunk(static_cast<int>(first + i * STEP), static_cast<int>(chunk)), real ? source : rows,
                    real);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < COUNT; ++i, source += STEP * stride) {
    const bool real = i * STEP < left && (mine >> i * STEP & 1);
    T* destination = tile.chunk(static_cast<int>(first + i * STEP), static_cast<int>(chunk));
#pragma unroll
    for (int e = 0; e < Shape::CHUNK; ++e)
      destination[e] = real && column + e < arguments.head_dim ? source[e] : from_float<T>(0.f);
  }
}

TK_DEVICE bool is_finite(float value) { return (float_bits(value) & 0x7f800000u) != 0x7f800000u; }

template <class T> TK_DEVICE void store_pair(T* destination, float first, float second) {
  if constexpr (sizeof(T) == 2) {
    store(reinterpret_cast<uint32_t*>(destination), pack_pair<T>(first, second));
  } else {
    store_vector(destination, Vector<T, 2>{{first, second}});
  }
}

template <int ROWS, int THREADS, class T, int COLUMNS>
TK_DEVICE void load_tile(Tile<T, COLUMNS> tile, const T* rows, int64_t stride, int first_row, int row_end,
                         uint64_t bits, const Arguments& arguments) {
  load_tile<ROWS, THREADS>(tile, rows, stride, first_row, row_end, bits, arguments, threadIdx.x);
}

// The angles of one sequence's tokens.
TK_DEVICE Angles angles_of(const Arguments& arguments, int batch) {
  Angles angles = arguments.angles;
  if (!angles.cos) return angles;
  angles.cos += batch * angles.batch;
  angles.sin += batch * angles.batch;
  return angles;
}

// Rotates V pairs of a row by the angles of its token.
template <int V, int LANES, class T, class Rows>
TK_DEVICE void rotate_row_by(Rows tile, int row, const Angles& angles, int64_t token, float sign, int lane) {
  const int half = angles.half;
#pragma unroll 1
  for (int pair = lane * V; pair < half; pair += LANES * V) {
    T* const first = tile.at(row, angles.interleaved ? 2 * pair : pair);
    T* const second = tile.at(row, angles.interleaved ? 2 * pair + V : half + pair);
    const Vector<float, V> cos = load_vector<V>(angles.cos + token * half + pair);
    const Vector<float, V> sin = load_vector<V>(angles.sin + token * half + pair);
    Vector<T, V> x[2] = {load_vector<V>(first), load_vector<V>(second)};
    if (angles.interleaved) {
      rotate_pairs<true>(x, cos, sin, sign);
    } else {
      rotate_pairs<false>(x, cos, sin, sign);
    }
    store_vector(first, x[0]);
    store_vector(second, x[1]);
  }
}

// Rotates a row of a tile, shared by LANES threads.
template <int LANES, class T, class Rows>
TK_DEVICE void rotate_row(Rows tile, int row, const Angles& angles, int64_t token, float sign, int lane) {
  if (angles.vectorized) {
    rotate_row_by<ELEMENTS_PER_16_BYTES<T>, LANES, T>(tile, row, angles, token, sign, lane);
  } else {
    rotate_row_by<1, LANES, T>(tile, row, angles, token, sign, lane);
  }
}

// Rotates rows in place (inverse if sign is -1), rounded as by `rotary`, after load_tile with the same arguments and
// after this thread's copies have completed. A warp rotates what its own lanes copied, so no barrier is needed before
// the one that publishes the copies, except for rows of more than 32 chunks.
template <int ROWS, int THREADS, class T, int COLUMNS>
TK_DEVICE void rotate_tile(Tile<T, COLUMNS> tile, int first_row, int row_end, uint64_t bits, const Angles& angles,
                           float sign, int thread) {
  using Shape = Tile<T, COLUMNS>;
  constexpr int LANES = Shape::CHUNKS / 2;  // each rotates a chunk of first columns of pairs and one of second columns
  constexpr int THREADS_PER_ROW = Shape::CHUNKS < THREADS ? Shape::CHUNKS : THREADS, STEP = THREADS / THREADS_PER_ROW;
  if constexpr (THREADS_PER_ROW > WARP_SIZE) {
    __syncthreads();
  } else {
    __syncwarp();
  }
  thread = computed_late(thread);
  const int lane = thread % LANES;
#pragma unroll 1
  for (int row = thread / THREADS_PER_ROW + thread % THREADS_PER_ROW / LANES * STEP; row < ROWS;
       row += THREADS_PER_ROW / LANES * STEP) {
    if (first_row + row >= row_end || !(bits >> row & 1)) continue;
    rotate_row<LANES, T>(tile, row, angles, first_row + row, sign, lane);
  }
}

// Writes a warp's 16 rows (tile rows starting at first_row) to global memory.
template <class T, int COLUMNS>
TK_DEVICE void store_rows(Tile<T, COLUMNS> tile, int tile_row, T* rows, int64_t stride, int first_row, int row_end,
                          int first_column, const Arguments& arguments) {
  using Shape = Tile<T, COLUMNS>;
  for (int i = threadIdx.x % 32; i < 16 * Shape::CHUNKS; i += 32) {
    const int row = i / Shape::CHUNKS, column = first_column + i % Shape::CHUNKS * Shape::CHUNK;
    if (first_row + row >= row_end || column >= arguments.head_dim) continue;
    const T* source = tile.chunk(tile_row + row, i % Shape::CHUNKS);
    T* destination = rows + (first_row + row) * stride + column;
    if (arguments.vectorized_output) {
      store_vector(destination, load_vector<Shape::CHUNK>(source));
    } else {
#pragma unroll
      for (int e = 0; e < Shape::CHUNK; ++e)
        if (column + e < arguments.head_dim) destination[e] = source[e];
    }
  }
}

// Applies the inverse rotation to a warp's 16 rows of a gradient (tile rows starting at tile_row).
template <class T, int COLUMNS>
TK_DEVICE void rotate_slab(Tile<T, COLUMNS> tile, int tile_row, int first_row, int row_end, const Angles& angles) {
  rotate_tile<16, WARP_SIZE>(Tile<T, COLUMNS>{tile.data + tile_row * COLUMNS}, first_row, row_end, ~0ull, angles, -1.f,
                             threadIdx.x % WARP_SIZE);
}

// Stores a warp's fragment, row r times factor[r / 8], to 16 rows of a tile starting at first_column.
template <int COLUMNS, class T, int TILE_COLUMNS>
TK_DEVICE void stage_fragment(const float (&fragment)[COLUMNS / 8][4], const float (&factor)[2],
                              Tile<T, TILE_COLUMNS> tile, int tile_row, int first_column) {
  const int g = threadIdx.x % WARP_SIZE / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      store_pair(tile.at(tile_row + g + 8 * half, first_column + 8 * n + 2 * t), fragment[n][2 * half] * factor[half],
                 fragment[n][2 * half + 1] * factor[half]);
}

// Stores a warp's fragment, row r times factor[r / 8], to its 16 rows of a tile and from there to global memory in
// 16-byte chunks, with the inverse rotation if there are angles. No other warp may use those rows of the tile.
template <int COLUMNS, class T, int TILE_COLUMNS>
TK_DEVICE void store_fragment(const float (&fragment)[COLUMNS / 8][4], const float (&factor)[2],
                              Tile<T, TILE_COLUMNS> tile, int tile_row, T* rows, int64_t stride, int first_row,
                              int row_end, int first_column, const Arguments& arguments,
                              const Angles& rotated_by = {}) {
  const Tile<T, COLUMNS> staged{tile.data};
  stage_fragment<COLUMNS>(fragment, factor, staged, tile_row, 0);
  if (rotated_by.cos) rotate_slab(staged, tile_row, first_row, row_end, rotated_by);
  __syncwarp();
  store_rows(staged, tile_row, rows, stride, first_row, row_end, first_column, arguments);
}

// Writes a warp's fragment times `factor` directly to global memory, for parts too narrow to stage in shared memory.
template <class T, int COLUMNS>
TK_DEVICE void store_scaled(const float (&fragment)[COLUMNS / 8][4], float factor, T* rows, int64_t stride,
                            int first_row, int row_end, int first_column, const Arguments& arguments) {
  const int g = threadIdx.x % WARP_SIZE / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + g + 8 * half;
    if (row >= row_end) continue;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) {
      const int column = first_column + 8 * n + 2 * t;
      T* destination = rows + row * stride + column;
      const float first = fragment[n][2 * half] * factor, second = fragment[n][2 * half + 1] * factor;
      if (arguments.vectorized_output) {
        if (column < arguments.head_dim) store_pair(destination, first, second);
      } else {
        if (column < arguments.head_dim) destination[0] = from_float<T>(first);
        if (column + 1 < arguments.head_dim) destination[1] = from_float<T>(second);
      }
    }
  }
}

// Replaces inf and NaN in a tile by zeros and calls note(row, whether the row had any). If packed sequences share a
// tile, a product would propagate them between sequences, since 0 * NaN is NaN. Called by all threads of the block;
// ends with a barrier.
template <int ROWS, int THREADS, class T, int COLUMNS, class Note>
TK_DEVICE void quarantine(Tile<T, COLUMNS> tile, Note note) {
  for (int row = threadIdx.x / 4; row < ROWS; row += THREADS / 4) {
    bool found = false;
    for (int chunk = threadIdx.x % 4; chunk < Tile<T, COLUMNS>::CHUNKS; chunk += 4) {
      T* elements = tile.chunk(row, chunk);
#pragma unroll
      for (int e = 0; e < Tile<T, COLUMNS>::CHUNK; ++e) {
        if (is_finite(to_float(elements[e]))) continue;
        elements[e] = from_float<T>(0.f);
        found = true;
      }
    }
    found = quad_max(found ? 1.f : 0.f) > 0.f;
    if (threadIdx.x % 4 == 0) note(row, found);
  }
  __syncthreads();
}

// NaN if `seen` has a non-finite row, else 0. The lanes of a quad check different rows; all return the result.
template <class IsNoted> TK_DEVICE float poison_seen(const Interval& seen, int first, int count, IsNoted is_noted) {
  float found = 0.f;
#pragma unroll 1
  for (int row = threadIdx.x % 4; row < count; row += 4)
    if (is_noted(row) && first + row >= seen.first && first + row <= seen.last) found = NAN;
  return quad_sum(found);
}

// The same for this lane's two rows of a fragment.
struct Poison {
  float found[2] = {0.f, 0.f};

  template <class IsNoted>
  TK_DEVICE void note(const Interval (&seen)[2], int first, int count, IsNoted is_noted) {
    for (int half = 0; half < 2; ++half) found[half] += poison_seen(seen[half], first, count, is_noted);
  }
};

// ---- products; a warp computes 16 rows

// For SLABS times 16 rows: c[16, N] += a[16 rows from a_row, COLUMNS] @ b[N, COLUMNS]^T. Fragments of b are loaded
// once.
template <int N, int SLABS, class T, int COLUMNS, class = std::enable_if_t<sizeof(T) == 2>>
TK_DEVICE void multiply_transposed(float (&c)[SLABS][N / 8][4], Tile<T, COLUMNS> a, int a_row, Tile<T, COLUMNS> b) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int k = 0; k < COLUMNS / 16; ++k) {
    uint32_t left[SLABS][4];
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab)
      ldmatrix_x4(left[slab], a.chunk(a_row + 16 * slab + lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int n = 0; n < N / 16; ++n) {
      uint32_t right[4];
      ldmatrix_x4(right, b.chunk(16 * n + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab) {
        mma_m16n8k16<T>(c[slab][2 * n], left[slab], right[0], right[1]);
        mma_m16n8k16<T>(c[slab][2 * n + 1], left[slab], right[2], right[3]);
      }
    }
  }
}

// The same: c[16, COLUMNS] += p[16, N] @ b[N, COLUMNS from first_column], p in registers and rounded to T
template <int N, int COLUMNS, int SLABS, class T, int TILE_COLUMNS, class = std::enable_if_t<sizeof(T) == 2>>
TK_DEVICE void multiply(float (&c)[SLABS][COLUMNS / 8][4], const float (&p)[SLABS][N / 8][4], Tile<T, TILE_COLUMNS> b,
                        int first_column) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int k = 0; k < N / 16; ++k) {
    uint32_t left[SLABS][4];
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        left[slab][e] = pack_pair<T>(p[slab][2 * k + e / 2][e % 2 * 2], p[slab][2 * k + e / 2][e % 2 * 2 + 1]);
#pragma unroll
    for (int n = 0; n < COLUMNS / 16; ++n) {
      uint32_t right[4];
      ldmatrix_x4_transposed(right, b.chunk(16 * k + lane % 16, first_column / 8 + 2 * n + lane / 16));
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab) {
        mma_m16n8k16<T>(c[slab][2 * n], left[slab], right[0], right[1]);
        mma_m16n8k16<T>(c[slab][2 * n + 1], left[slab], right[2], right[3]);
      }
    }
  }
}

// c[16, COLUMNS] += a[16 rows from a_row, N from first_n] @ b[N from first_n, COLUMNS from first_column], both from
// shared memory
template <int N, int COLUMNS, class T, int A_COLUMNS, int TILE_COLUMNS, class = std::enable_if_t<sizeof(T) == 2>>
TK_DEVICE void multiply(float (&c)[COLUMNS / 8][4], Tile<T, A_COLUMNS> a, int a_row, Tile<T, TILE_COLUMNS> b,
                        int first_column, int first_n) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll 2
  for (int k = first_n / 16; k < (first_n + N) / 16; ++k) {
    uint32_t left[4];
    ldmatrix_x4(left, a.chunk(a_row + lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int n = 0; n < COLUMNS / 16; ++n) {
      uint32_t right[4];
      ldmatrix_x4_transposed(right, b.chunk(16 * k + lane % 16, first_column / 8 + 2 * n + lane / 16));
      mma_m16n8k16<T>(c[2 * n], left, right[0], right[1]);
      mma_m16n8k16<T>(c[2 * n + 1], left, right[2], right[3]);
    }
  }
}

// c[16, COLUMNS] += a[N, 16 columns from a_column]^T @ b[N, COLUMNS]
template <int N, class T, int A_COLUMNS, int COLUMNS, class = std::enable_if_t<sizeof(T) == 2>>
TK_DEVICE void multiply_left_transposed(float (&c)[COLUMNS / 8][4], Tile<T, A_COLUMNS> a, int a_column,
                                        Tile<T, COLUMNS> b) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll 2
  for (int k = 0; k < N / 16; ++k) {
    uint32_t left[4];
    ldmatrix_x4_transposed(left, a.chunk(16 * k + lane % 8 + lane / 16 * 8, a_column / 8 + lane / 8 % 2));
#pragma unroll
    for (int n = 0; n < COLUMNS / 16; ++n) {
      uint32_t right[4];
      ldmatrix_x4_transposed(right, b.chunk(16 * k + lane % 16, 2 * n + lane / 16));
      mma_m16n8k16<T>(c[2 * n], left, right[0], right[1]);
      mma_m16n8k16<T>(c[2 * n + 1], left, right[2], right[3]);
    }
  }
}

TK_DEVICE float dot(const Vector<float, 4>& a, const Vector<float, 4>& b, float sum) {
  return fmaf(a[3], b[3], fmaf(a[2], b[2], fmaf(a[1], b[1], fmaf(a[0], b[0], sum))));
}

// fp32: both operands from shared memory, 16 bytes at a time; lanes of equal t read the same rows of b.
template <int N, int COLUMNS>
TK_DEVICE void multiply_transposed(float (&slabs)[1][N / 8][4], Tile<float, COLUMNS> a, int a_row,
                                   Tile<float, COLUMNS> b) {
  const int g = threadIdx.x % WARP_SIZE / 4, t = threadIdx.x % 4;
  float (&c)[N / 8][4] = slabs[0];
#pragma unroll(COLUMNS > 64 ? 1 : 2)
  for (int chunk = 0; chunk < COLUMNS / 4; ++chunk) {
    const Vector<float, 4> upper = load_vector<4>(a.chunk(a_row + g, chunk));
    const Vector<float, 4> lower = load_vector<4>(a.chunk(a_row + g + 8, chunk));
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Vector<float, 4> right = load_vector<4>(b.chunk(8 * n + 2 * t + e, chunk));
        c[n][e] = dot(upper, right, c[n][e]);
        c[n][2 + e] = dot(lower, right, c[n][2 + e]);
      }
  }
}

// fp32: the elements of p are exchanged within their quad of lanes. The tile is summed from 0, SUMMED columns at a
// time, and then accumulated in c: one chain of a thousand rows would have several times the rounding error of a
// blocked product.
template <int N, int COLUMNS, int TILE_COLUMNS>
TK_DEVICE void multiply(float (&slabs)[1][COLUMNS / 8][4], const float (&weights)[1][N / 8][4],
                        Tile<float, TILE_COLUMNS> b, int first_column) {
  constexpr int SUMMED = COLUMNS < 64 ? COLUMNS : 64;
  const int lane = threadIdx.x % WARP_SIZE, t = lane % 4;
  float (&c)[COLUMNS / 8][4] = slabs[0];
  const float (&p)[N / 8][4] = weights[0];
#pragma unroll
  for (int part = 0; part < COLUMNS; part += SUMMED) {
    float sum[SUMMED / 8][4] = {};
#pragma unroll
    for (int k = 0; k < N / 8; ++k)
#pragma unroll 1
      for (int owner = 0; owner < 4; ++owner)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float upper = __shfl_sync(ALL_LANES, p[k][e], lane / 4 * 4 + owner);
          const float lower = __shfl_sync(ALL_LANES, p[k][2 + e], lane / 4 * 4 + owner);
          const int row = 8 * k + 2 * owner + e;
#pragma unroll
          for (int n = 0; n < SUMMED / 8; ++n) {
            const Vector<float, 2> right = load_vector<2>(b.at(row, first_column + part + 8 * n + 2 * t));
            sum[n][0] = fmaf(upper, right[0], sum[n][0]);
            sum[n][1] = fmaf(upper, right[1], sum[n][1]);
            sum[n][2] = fmaf(lower, right[0], sum[n][2]);
            sum[n][3] = fmaf(lower, right[1], sum[n][3]);
          }
        }
#pragma unroll
    for (int n = 0; n < SUMMED / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) c[part / 8 + n][e] += sum[n][e];
  }
}

// One slab of rows.
template <int N, class T, int COLUMNS>
TK_DEVICE void multiply_transposed(float (&c)[N / 8][4], Tile<T, COLUMNS> a, int a_row, Tile<T, COLUMNS> b) {
  multiply_transposed<N>(reinterpret_cast<float (&)[1][N / 8][4]>(c), a, a_row, b);
}
template <int N, int COLUMNS, class T, int TILE_COLUMNS>
TK_DEVICE void multiply(float (&c)[COLUMNS / 8][4], const float (&p)[N / 8][4], Tile<T, TILE_COLUMNS> b,
                        int first_column) {
  multiply<N, COLUMNS>(reinterpret_cast<float (&)[1][COLUMNS / 8][4]>(c),
                       reinterpret_cast<const float (&)[1][N / 8][4]>(p), b, first_column);
}

}  // namespace transformer_kernels::attention
