// What row kernels share: sums over rows, the moments of a row, and LayerNorm of one row forward and backward, or
// RMSNorm where CENTRED is false: its mean counts as 0, and there is no bias.
#pragma once
#include "pages.h"
#include "philox.h"

namespace transformer_kernels::TK_LEVEL {

// Where a result of `count` elements goes, which nobody has written to yet.
template <class T> TK_INLINE T* result_at(Address address, int64_t count) {
  expect_result(at<T>(address), count * static_cast<int64_t>(sizeof(T)));
  return at<T>(address);
}

// Prefetch data for reading or writing, AHEAD bytes or one row after a vector, into the second-level cache: the
// hardware prefetcher stops at a page of 4 KiB. `u` is the argument of over_columns: a line with several vectors is
// prefetched once.
constexpr int64_t AHEAD = 1024;
template <class T> TK_INLINE bool begins_line(int u) {
  constexpr int VECTORS = 64 / (WIDTH * static_cast<int>(sizeof(T)));
  return u % VECTORS == 0;
}
template <class T> TK_INLINE void fetch_ahead(const T* address, int u) {
  if (begins_line<T>(u)) __builtin_prefetch(reinterpret_cast<const char*>(address) + AHEAD);
}
template <class T> TK_INLINE void fetch_ahead_to_write(T* address, int u) {
  if (begins_line<T>(u)) __builtin_prefetch(reinterpret_cast<char*>(address) + AHEAD, 1);
}
template <class T> TK_INLINE void fetch_below(const T* address, int64_t columns, int u) {
  if (begins_line<T>(u)) __builtin_prefetch(address + columns, 0, 2);
}

// Whether results bypass the caches (non-temporal stores, without reading the line first): results of at least this
// size, which would be evicted from the second-level caches before use, in whole aligned vectors of float32.
constexpr int64_t BYTES_PAST_CACHES = int64_t{8} << 20;
template <class T>
TK_INLINE bool goes_past_caches(int64_t rows, int64_t columns, const T* result, const T* second = nullptr) {
#if defined(__AVX__)
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(result) | reinterpret_cast<uintptr_t>(second);
  return sizeof(T) == sizeof(float) && rows * columns * static_cast<int64_t>(sizeof(T)) >= BYTES_PAST_CACHES &&
         columns % WIDTH == 0 && addresses % sizeof(Floats) == 0;
#else
  return false;
#endif
}

template <class T, class L>
TK_INLINE void store_result(T* address, Floats value, L lanes, int u, [[maybe_unused]] bool past_caches) {
  if constexpr (sizeof(T) == sizeof(float)) {
#if defined(__AVX512F__)
    if (past_caches && lanes.count == WIDTH) return _mm512_stream_ps(reinterpret_cast<float*>(address), value);
#elif defined(__AVX__)
    if (past_caches && lanes.count == WIDTH) return _mm256_stream_ps(reinterpret_cast<float*>(address), value);
#endif
  }
  fetch_ahead_to_write(address, u);
  store(address, value, lanes);
}

// After the last non-temporal store: makes them visible to other threads before later stores of this thread.
TK_INLINE void finish_results([[maybe_unused]] bool past_caches) {
#if defined(__AVX__)
  if (past_caches) _mm_sfence();
#endif
}

// For longer rows only one row of x and of dy stays in the second-level cache between two passes over them.
constexpr int64_t NEAR_COLUMNS = 32768;

// Slots of scratch memory.
constexpr int ROW_SLOT = 0, SUMS_SLOT = 1;

// Sums over rows are computed over `parts_of(rows)` ranges and added in order: the bits depend on the shape alone. A
// small number of rows, which may be long, is still split for some threads.
constexpr int64_t ROWS_OF_A_PART = 64, MAX_PARTS = 64, MIN_ROWS_OF_A_PART = 8, MAX_SMALL_PARTS = 8;
inline int64_t parts_of(int64_t rows) {
  const int64_t parts = rows / ROWS_OF_A_PART, small = rows / MIN_ROWS_OF_A_PART;
  if (parts >= MAX_SMALL_PARTS) return parts < MAX_PARTS ? parts : MAX_PARTS;
  return small < 1 ? 1 : small < MAX_SMALL_PARTS ? small : MAX_SMALL_PARTS;
}

// Calls f(sums, begin, end) for each range of rows; sums[0 ... width) starts at 0 and is that range's own.
// Returns the first range's sums; the sums of range p begin p * width later.
template <class F> const float* sums_over_rows(int64_t rows, int64_t width, int64_t work, const F& f) {
  const int64_t parts = parts_of(rows);
  float* sums = scratch<float>(SUMS_SLOT, parts * width);
  parallel_for(parts, work * (rows / parts), [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) {
      memset(sums + p * width, 0, static_cast<size_t>(width) * sizeof(float));
      f(sums + p * width, rows * p / parts, rows * (p + 1) / parts);
    }
  });
  return sums;
}

// out[j] = the sum of sums[p * width + j] over the parts; nothing where out is null.
inline void add_parts(const float* sums, int64_t parts, int64_t width, int64_t columns, float* out) {
  if (!out) return;
  over_columns(columns, [&](int64_t j, auto lanes, int) TK_LAMBDA {
    Floats total = load(sums + j, lanes);
    for (int64_t p = 1; p < parts; ++p) total += load(sums + p * width + j, lanes);
    store(out + j, total, lanes);
  });
}

// Calls f(column, lanes, u, x -> dropout(x)) for the vectors of a row of counters (column / 8, row, 0, 0).
// u is the argument of over_sums if SUMMED, else of over_columns.
template <bool SUMMED = false, class F>
TK_INLINE void over_dropped_columns(const Dropout& dropout, uint32_t row, int64_t columns, const F& f) {
  constexpr int GROUPS = 2, VECTORS = COLUMNS_OF_GROUP / WIDTH;
  if (!dropout.threshold) {
    const auto all = [&](int64_t j, auto lanes, int u)
                         TK_LAMBDA { f(j, lanes, u, [](Floats x) TK_LAMBDA { return x; }); };
    if constexpr (SUMMED) return over_sums(columns, all);
    else return over_columns(columns, all);
  }
  for (int64_t group = 0; group < columns; group += GROUPS * COLUMNS_OF_GROUP) {
    uint64_t bits[GROUPS];
    keep_bits<GROUPS>(dropout, 0, row, 0, static_cast<uint32_t>(group / COLUMNS_OF_COUNTER), COUNTERS_OF_GROUP, bits);
    for (int v = 0; v < GROUPS * VECTORS; ++v) {
      const int64_t j = group + v * WIDTH;
      const uint32_t own = static_cast<uint32_t>(bits[v / VECTORS] >> (v % VECTORS * WIDTH));
      auto drop = [&](Floats x) TK_LAMBDA { return kept(own, x * dropout.scale); };
      const bool complete = j / SUM_LANES * SUM_LANES + SUM_LANES <= columns;
      const int u = complete ? v % SUMS : v % PARTS;
      if (j + WIDTH <= columns) f(j, Whole{}, u, drop);
      else if (j < columns) f(j, Part{static_cast<int>(columns - j)}, u, drop);
    }
  }
}

// The sum of f(column, lanes, u) over a row, in blocks whose sums are added: in a chain of additions as long as a wide
// row the rounding errors grow with the row.
template <class F> TK_INLINE float sum_over_columns(int64_t columns, const F& f) {
  constexpr int64_t BLOCK = 256 * SUM_LANES;
  Floats total[SUMS] = {};
  for (int64_t begin = 0; begin < columns; begin += BLOCK) {
    Floats block[SUMS] = {};
    over_sums(columns - begin < BLOCK ? columns - begin : BLOCK,
              [&](int64_t j, auto lanes, int u) TK_LAMBDA { block[u] += f(begin + j, lanes, u); });
    for (int u = 0; u < SUMS; ++u) total[u] += block[u];
  }
  return sum(total);
}

// The sum so far with one more vector, or of the squares, which is all that moments without centring need.
template <bool CENTRED> TK_INLINE Floats with_term(Floats total, Floats x) {
  return CENTRED ? total + x : fma(x, x, total);
}

template <bool CENTRED, class T> TK_INLINE float row_sum(const T* x, int64_t columns) {
  Floats total[SUMS] = {};
  over_sums(columns,
            [&](int64_t j, auto lanes, int u)
                TK_LAMBDA { total[u] = with_term<CENTRED>(total[u], load(x + j, lanes)); });
  return sum(total);
}

struct Moments {
  float mean, rstd;
};

// From the row's sum and, in a second pass, the squares around that mean and a correction of the mean.
template <bool CENTRED, class T> TK_INLINE Moments moments(const T* x, float total, int64_t columns, float eps) {
  const float count = static_cast<float>(columns), mean = total / count;
  if constexpr (!CENTRED) return {0.f, 1.f / __builtin_sqrtf(mean + eps)};
  Floats squares[SUMS] = {}, rests[SUMS] = {};
  over_sums(columns, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
    const Floats centred = load(x + j, lanes, mean) - mean;
    squares[u] = fma(centred, centred, squares[u]);
    rests[u] += centred;
  });
  const float rest = sum(rests) / count;
  return {mean + rest, 1.f / __builtin_sqrtf(sum(squares) / count - rest * rest + eps)};
}

// The normalised row at column j, times weight and plus bias where there are such.
template <class X, class L>
TK_INLINE Floats normalised(const X* x, const Moments& m, const float* weight, const float* bias, int64_t j, L lanes) {
  const Floats y = (load(x + j, lanes) - m.mean) * m.rstd;
  return bias ? fma(y, load(weight + j, lanes), load(bias + j, lanes)) : y * load(weight + j, lanes);
}

// What LayerNorm's gradient needs of a row: the means of g and of g * normalised x, where g = dy * weight.
struct Projections {
  float gradient, along;
};

// The total with R more vectors, in pairs: that rounds less often than one after the other.
template <int R> TK_INLINE Floats with_pairs(Floats total, const Floats (&terms)[R]) {
  if constexpr (R == 1) return total + terms[0];
#pragma GCC unroll 2
  for (int r = 0; r + 2 <= R; r += 2) total += terms[r] + terms[r + 1];
  return total;
}

// For R consecutive rows. Adds them to dweight and, CENTRED, dbias, which are sums of floats:
// each is read and written once for all R. Each row's sums are accumulated in VECTORS of SUM_LANES. dy(element, lanes).
template <bool CENTRED, int R, int VECTORS, class X, class G>
TK_INLINE void project(const X* x, const G& dy, const Moments* m, const float* weight, int64_t columns, float* dweight,
                       float* dbias, Projections* projections) {
  constexpr int OWN = VECTORS * PARTS;
  Floats a[R][OWN] = {}, b[R][OWN] = {};
  over_sums<VECTORS>(columns, [&](int64_t j, auto lanes, int u) TK_LAMBDA {
    const Floats w = load(weight + j, lanes);
    Floats came[R], along[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      came[r] = dy(r * columns + j, lanes);
      along[r] = came[r] * ((load(x + r * columns + j, lanes, m[r].mean) - m[r].mean) * m[r].rstd);
      b[r][u % OWN] = fma(along[r], w, b[r][u % OWN]);
      if constexpr (CENTRED) a[r][u % OWN] = fma(came[r], w, a[r][u % OWN]);
    }
    store(dweight + j, with_pairs(load(dweight + j, lanes), along), lanes);
    if constexpr (CENTRED) store(dbias + j, with_pairs(load(dbias + j, lanes), came), lanes);
  });
  for (int r = 0; r < R; ++r)
    projections[r] = {sum(a[r]) / static_cast<float>(columns), sum(b[r]) / static_cast<float>(columns)};
}

template <class X, class L>
TK_INLINE Floats norm_gradient(Floats dy, const X* x, const Moments& m, const float* weight, const Projections& p,
                               int64_t j, L lanes) {
  const Floats normal = (load(x + j, lanes) - m.mean) * m.rstd;
  return (dy * load(weight + j, lanes) - p.gradient - normal * p.along) * m.rstd;
}

}  // namespace transformer_kernels::TK_LEVEL
