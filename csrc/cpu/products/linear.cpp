// y = activation(x W^T + bias) and its gradients: the products of a small transformer, whose weights fit in the
// second-level cache, with all that surrounds a product done while its tile is in registers or the first-level cache.
// float32, and bfloat16 by vdpbf16ps, or widened where the processor lacks it.
#include "linear.h"

namespace transformer_kernels::TK_LEVEL {
#if defined(__AMX_BF16__)
// weight_gradient.cpp
void weight_gradient_by_tiles(const LinearBackwardWeight& call);
#endif
namespace {

enum Slot { PANELS = 8, RESULT, SUMS, LEFT, PRODUCT };

constexpr int64_t ROWS_OF_BLOCK = 48;  // rows of the left operand that are multiplied with one panel after the other
// Products that one register accumulates; longer sums are sums of such partial sums. With 512 the error exceeds twice
// MKL's at K = 1024.
// A panel with this many steps stays in the first-level cache, or, with wide registers, in the second.
constexpr int64_t MAX_SUM = FUSES ? 256 : 32;
// Floats of a weight that are packed at a time: they stay in a cache while all rows are multiplied with them.
constexpr int64_t MAX_PACKED = 1 << 20;
// Rows of x up to which x is packed and not the weight: beside any weight, and beside one of at least LARGE_WEIGHT
// elements, which does not stay in a cache.
constexpr int64_t SMALL_BATCH = 64, MEDIUM_BATCH = 256, LARGE_WEIGHT = 1 << 17;
constexpr int64_t DEPTH_STEPS = 96;  // steps of x and dz whose products one tile of a weight gradient adds up
constexpr int64_t PAIRED_COLUMNS = 32;  // a multiple of which is packed of the left operand of a weight gradient
constexpr int LINES_AHEAD = 4;  // of each operand of a weight gradient, fetched each 16 steps
constexpr int64_t MIN_OWN_ROWS = 24;  // rows of dweight that are worth packing x for
constexpr int64_t MAX_OWN_ROWS = 168 * LINEAR_ROWS;  // rows whose columns of dz stay in the second-level cache

// The type that the micro-kernel reads and writes for a T: bfloat16 only if the processor multiplies it.
#if defined(__AVX512BF16__)
template <class T> struct Multiplied : Type<T> {};
#else
template <class T> struct Multiplied : Type<float> {};
#endif

// The gradient of a residual and its sum with the product, which is written instead of the product. Float32, with the
// row stride of the result.
struct Residual {
  const float* gradient = nullptr;
  float* sum = nullptr;

  TK_INLINE Residual at(int64_t index) const { return sum ? Residual{gradient + index, sum + index} : Residual{}; }
  // The product is rounded to T before it is added.
  template <class T, class L> TK_INLINE void put(int64_t index, Floats product, L lanes) const {
    store(sum + index, as_stored<T>(product) + load(gradient + index, lanes), lanes);
  }
};

// One panel's columns of a result, with row stride `pitch`.
template <class Z> struct Columns {
  Z* to;
  int64_t pitch, count;
  Residual residual = {};
};

// z = left (rows, steps) panel + added, or max(z, 0); the row stride of left is `pitch`.
// Without `added` z grows by the product.
template <int N, class T>
__attribute__((noinline)) void strip(const T* left, int64_t pitch, int64_t rows, int64_t steps, const float* panel,
                                     const float* added, bool relu, Columns<T> z) {
  const int64_t last = z.count - (N - 1) * WIDTH;
  over_tiles(rows, [&](int64_t r, auto count) TK_LAMBDA {
    constexpr int M = decltype(count)::value;
    Floats sum[M][N];
    T* to = z.to + r * z.pitch;
    const T *a = left + r * pitch, *below = a + M * pitch;
    sums_of_tile(a, {pitch, PER_STEP<T>}, panel, steps, to, z.pitch, sum, [&](int64_t k) TK_LAMBDA {
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) __builtin_prefetch(below + m * pitch + k * PER_STEP<T>);
      if (const Residual line = z.residual.at((r + k / LINE) * z.pitch); line.sum && k < M * LINE)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
          __builtin_prefetch(line.gradient + n * WIDTH), __builtin_prefetch(line.sum + n * WIDTH, 1);
    });
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        T* here = to + m * z.pitch + n * WIDTH;
        const int64_t index = (r + m) * z.pitch + n * WIDTH;
        auto finish = [&](auto lanes) TK_LAMBDA {
          const Floats value = sum[m][n] + (added ? load(added + n * WIDTH) : load(here, lanes));
          if (z.residual.sum) return z.residual.template put<T>(index, value, lanes);
          store(here, relu ? (value < 0.f ? splat(0.f) : value) : value, lanes);
        };
        if (n + 1 < N || last == WIDTH) finish(Whole{});
        else finish(Part{static_cast<int>(last)});
      }
  });
}

// Rows that are read next: their lines are prefetched into the second-level cache during products of earlier rows.
struct Ahead {
  const char* row;
  // Bytes read per row, stride in bytes, remaining rows, and the offset in the current row.
  int64_t width, pitch, rows, at;

  TK_INLINE void fetch() {
    if (rows <= 0) return;
    __builtin_prefetch(row + at, 0, 2);
    at += 4 * LINE;
    if (at < width) return;
    at = 0, row += pitch, --rows;
  }
};
template <class T> Ahead ahead(const T* from, int64_t width, int64_t pitch, int64_t rows) {
  constexpr int64_t SIZE = sizeof(T);
  return {reinterpret_cast<const char*>(from), width * SIZE, pitch * SIZE, rows, 0};
}

// total (rows, N registers), with the row stride of a panel, += left^T panel; `pitch` is the stride of left's steps.
template <int N, class L>
__attribute__((noinline)) void add_strip(const L* left, int64_t pitch, int64_t rows, int64_t steps, const float* panel,
                                         float* total, Ahead (&next)[2]) {
  over_tiles(rows, [&](int64_t r, auto count) TK_LAMBDA {
    constexpr int M = decltype(count)::value;
    Floats sum[M][N];
    float* to = total + r * PANEL;
    sums_of_tile(left + r * PER_STEP<L>, {PER_STEP<L>, pitch}, panel, steps, to, PANEL, sum, [&](int64_t) TK_LAMBDA {
      for (int line = 0; line < LINES_AHEAD; ++line) next[0].fetch(), next[1].fetch();
    });
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) store(to + m * PANEL + n * WIDTH, load(to + m * PANEL + n * WIDTH) + sum[m][n]);
  });
}

// Rows (depth, columns) with stride `pitch` -> the steps that add_strip reads, with stride `to_pitch`: rows widened if
// `to` is not null, or pairs of rows as words. part (columns) += their sums, of widened rows in pairs of pairs.
template <class T>
void pack_left(float, const T* rows, int64_t pitch, int64_t depth, int64_t columns, float* to, int64_t to_pitch,
               float* part) {
  constexpr int64_t ROWS = 8;
  for (int64_t r = 0; r < depth; r += ROWS)
    over_columns(columns, [&](int64_t n, auto lanes, int) TK_LAMBDA {
      const auto row = [&](int64_t i) TK_LAMBDA {
        const Floats x = load(rows + (r + i) * pitch + n, lanes);
        if (to) store(to + (r + i) * to_pitch + n, x, lanes);
        return x;
      };
      Floats sum = row(0);
      if (r + ROWS <= depth) {
        const Floats two = sum + row(1), four = two + (row(2) + row(3)), other = row(4) + row(5);
        sum = four + (other + (row(6) + row(7)));
      } else {
        for (int64_t i = 1; i < depth - r; ++i) sum += row(i);
      }
      store(part + n, load(part + n, lanes) + sum, lanes);
    });
}
#if defined(__AVX512BF16__)
void pack_left(Bfloat16, const Bfloat16* rows, int64_t pitch, int64_t depth, int64_t columns, Bfloat16* to,
               int64_t to_pitch, float* part) {
  const __m512bh ones = bits_of<__m512bh>(_mm512_set1_epi32(0x3F803F80));
  for (int64_t r = 0; r < depth; r += 2, to += to_pitch)
    for (int64_t n = 0; n < columns; n += PAIR_DEPTH) {
      const Bfloat16* even = rows + r * pitch;
      Floats words[2];
      interleave(row_part(even, n, columns),
                 r + 1 < depth ? row_part(even + pitch, n, columns) : _mm512_setzero_si512(), words[0], words[1]);
      for (int h = 0; h < 2; ++h) {
        _mm512_storeu_ps(to + 2 * (n + h * WIDTH), (__m512)words[h]);
        float* sums = part + n + h * WIDTH;
        store(sums, (Floats)_mm512_dpbf16_ps((__m512)load(sums), bits_of<__m512bh>(words[h]), ones));
      }
    }
}
#endif
int64_t panels_of(int64_t columns) { return (columns + PANEL - 1) / PANEL; }
int64_t registers_of(int64_t columns) { return (columns + WIDTH - 1) / WIDTH; }

// Rows as the micro-kernel reads them: in place, or widened, or with a zero behind an odd number of elements. Rows a
// multiple of half a page apart share few sets of the first-level cache: narrow registers,
// which read them for many panels, copy them.
template <class L> struct Rows {
  const L* data;
  int64_t pitch;
};
template <class L, class T> Rows<L> readable(Rows<T> rows, int64_t count, int64_t depth) {
  const bool crowded = WIDTH < 16 && rows.pitch * static_cast<int64_t>(sizeof(L)) % 2048 == 0;
  const int64_t pitch = steps_of<L>(depth) * PER_STEP<L> + (crowded ? LINE : 0);
  if constexpr (sizeof(L) == sizeof(T))
    if (pitch == depth) return rows;
  L* copy = scratch<L>(LEFT, ROWS_OF_BLOCK * pitch);
  for (int64_t r = 0; r < count; ++r) {
    if (pitch > depth) memset(copy + r * pitch + depth, 0, sizeof(L));
    over_columns(depth, [&](int64_t j, auto lanes, int) TK_LAMBDA {
      store(copy + r * pitch + j, load(rows.data + r * rows.pitch + j, lanes), lanes);
    });
  }
  return {copy, pitch};
}

// z (rows, N) = left (rows, depth) panels + added, or its sum with the residual; then finish(Columns) after each panel.
// Without `added` z grows by the product. The row stride of z is `pitch`.
template <class T, class F>
void multiply(Rows<T> left, int64_t rows, int64_t depth, const float* panels, int64_t N, const float* added, bool relu,
              T* z, int64_t pitch, const Residual& residual, const F& finish) {
  using L = typename Multiplied<T>::type;
  constexpr bool WIDENED = sizeof(L) != sizeof(T);
  const Rows<L> operand = readable<L>(left, rows, depth);
  const int64_t steps = steps_of<L>(depth), longest = sizeof(L) == 2 ? steps : MAX_SUM;
  L* wide = WIDENED ? scratch<L>(RESULT, ROWS_OF_BLOCK * PANEL) : nullptr;
  for (int64_t n = 0; n < N; n += PANEL) {
    const Columns<T> part{z + n, pitch, smaller(PANEL, N - n)};
    Columns<L> sums;
    if constexpr (WIDENED) sums = {wide, PANEL, part.count};
    else sums = part;
    by_count(registers_of(part.count), [&](auto registers) {
      for (int64_t k = 0; k < steps; k += longest) {
        const int64_t some = smaller(longest, steps - k);
        const float* panel = panels + n * steps + k * PANEL;
        const bool ends = k + some == steps;
        if (ends && !WIDENED) sums.residual = residual.at(n);
        strip<decltype(registers)::value>(operand.data + k, operand.pitch, rows, some, panel,
                                          k || !added ? nullptr : added + n, relu && ends, sums);
      }
    });
    if constexpr (WIDENED)
      for (int64_t r = 0; r < rows; ++r)
        over_columns(part.count, [&](int64_t j, auto lanes, int) TK_LAMBDA {
          const Floats value = load(wide + r * PANEL + j, lanes);
          const int64_t index = r * pitch + n + j;
          if (residual.sum) residual.template put<T>(index, value, lanes);
          else store(z + index, value, lanes);
        });
    finish(n, part);
  }
}

template <class F> void over_row_blocks(int64_t M, int64_t work_of_row, const F& f) {
  parallel_for((M + ROWS_OF_BLOCK - 1) / ROWS_OF_BLOCK, ROWS_OF_BLOCK * work_of_row, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      f(block * ROWS_OF_BLOCK, smaller(ROWS_OF_BLOCK, M - block * ROWS_OF_BLOCK));
  });
}

const float* widened_bias(const float* bias, int64_t N) {
  float* added = scratch<float>(SUMS, aligned(N, WIDTH));
  memset(added, 0, sizeof(float) * aligned(N, WIDTH));
  if (bias) memcpy(added, bias, sizeof(float) * N);
  return added;
}

template <class T, class W>
void forward(const T* x, const W* weight, const float* bias, T* y, T* before, int64_t M, int64_t N, int64_t K,
             int64_t activation) {
  using L = typename Multiplied<T>::type;
  const int64_t size = PANEL * steps_of<L>(K), most = larger(1, MAX_PACKED / size), total = panels_of(N);
  const float* added = widened_bias(bias, N);
  for (int64_t first = 0; first < total; first += most) {
    const int64_t count = smaller(most, total - first), column = first * PANEL;
    float* panels = scratch<float>(PANELS, count * size);
    parallel_for(count, size, [&](int64_t begin, int64_t end) {
      pack_transposed(L{}, weight + column * K, N - column, K, begin, end, panels);
    });
    const int64_t columns = smaller(count * PANEL, N - column);
    over_row_blocks(M, columns * K / 4, [&](int64_t row, int64_t rows) {
      T *z = (before ? before : y) + row * N + column, *result = y + row * N + column;
      multiply(Rows<T>{x + row * K, K}, rows, K, panels, columns, added + column, activation == RELU, z, N, {},
               [&](int64_t n, Columns<T> sums) {
        for (int64_t r = 0; r < rows && before; ++r)
          over_columns(sums.count, [&](int64_t j, auto lanes, int) TK_LAMBDA {
            store(result + r * N + n + j, activated(load(sums.to + r * N + j, lanes), activation), lanes);
          });
      });
    });
  }
}

// The same for a small batch, whose weight would take as long to pack as to multiply: x is packed instead, and the weight
// is read in place, once. Blocks of y^T (N, M) are computed and transposed; the order of the additions is the same.
void forward_of_small_batch(const float* x, const float* weight, const float* bias, float* y, float* before, int64_t M,
                            int64_t N, int64_t K, int64_t activation) {
  const int64_t count = panels_of(M), size = PANEL * K, pitch = count * PANEL;
  float* panels = scratch<float>(PANELS, count * size);
  parallel_for(count, size, [&](int64_t begin, int64_t end) { pack_transposed(0.f, x, M, K, begin, end, panels); });
  over_row_blocks(N, M * K / 4, [&](int64_t row, int64_t rows) {
    float* block = scratch<float>(RESULT, ROWS_OF_BLOCK * pitch);
    for (int64_t r = 0; r < aligned(rows, WIDTH); ++r)
      for (int64_t m = 0; m < pitch; m += WIDTH)
        store(block + r * pitch + m, splat(bias && r < rows ? bias[row + r] : 0.f));
    multiply(Rows<float>{weight + row * K, K}, rows, K, panels, M, nullptr, false, block, pitch, {},
             [](int64_t, Columns<float>) {});
    alignas(64) float square[WIDTH * WIDTH];
    for (int64_t m = 0; m < M; m += WIDTH)
      for (int64_t n = 0; n < rows; n += WIDTH) {
        transpose_square(block + n * pitch + m, pitch, 1.f, square, WIDTH);
        const Part lanes{static_cast<int>(smaller(WIDTH, rows - n))};
        for (int64_t i = 0; i < smaller(WIDTH, M - m); ++i) {
          const int64_t to = (m + i) * N + row + n;
          const Floats sum = load(square + i * WIDTH);
          if (before) store(before + to, sum, lanes);
          store(y + to, activated(sum, activation), lanes);
        }
      }
  });
}

// With a residual's gradient dx goes into no memory of its own: only their sum is written.
template <class T, class W>
void backward_data(const T* dy, const T* saved, const W* weight, T* dz, T* dx, const Residual& residual, int64_t M,
                   int64_t N, int64_t K, int64_t activation) {
  using L = typename Multiplied<T>::type;
  const int64_t count = panels_of(K);
  const bool multiplies = dx || residual.sum;
  // The sums over N are computed in parts: dx holds the float32 sums of the earlier ones.
  const bool in_parts = dx && sizeof(T) == sizeof(float);
  const int64_t most = in_parts ? larger(1, MAX_PACKED / (count * PANEL * MAX_SUM)) * MAX_SUM : N;
  const float* added = widened_bias(nullptr, K);
  for (int64_t from = 0; from < N; from += most) {
    const int64_t depth = smaller(most, N - from), size = PANEL * steps_of<L>(depth);
    float* panels = multiplies ? scratch<float>(PANELS, count * size) : nullptr;
    parallel_for(multiplies ? count : 0, size, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) pack_panel(L{}, weight + from * K, depth, K, p, panels + p * size);
    });
    over_row_blocks(M, (multiplies ? depth * K : 8 * N) / 4, [&](int64_t row, int64_t rows) {
      if (dz && from == 0)
        by_activation(activation, [&](auto kind) TK_LAMBDA {
          over_columns(rows * N, [&, first = row * N](int64_t j, auto lanes, int) TK_LAMBDA {
            const int64_t i = first + j;
            store(dz + i, load(dy + i, lanes) * slope(load(saved + i, lanes), decltype(kind)::value), lanes);
          });
        });
      if (!multiplies) return;
      const Residual last = from + depth == N ? residual.at(row * K) : Residual{};
      T* product = dx ? dx + row * K : scratch<T>(PRODUCT, ROWS_OF_BLOCK * K);
      multiply(Rows<T>{(dz ? dz : dy) + row * N + from, N}, rows, depth, panels, K, from ? nullptr : added, false,
               product, K, last, [](int64_t, Columns<T>) {});
    });
    if (!multiplies) return;
  }
}

// A task owns some rows of one panel of dweight and adds up the rows of x in steps. Rows of 32 bits are read in place by
// wide registers, others packed: an odd number of lines apart, as whole pages apart they would share few sets of a
// cache. A thread computes its tasks of the same rows together, so that their dz stays in the second-level cache.
template <class T, class W>
void backward_weight(const T* dz, const T* x, W* dweight, float* dbias, int64_t M, int64_t N, int64_t K) {
  using L = typename Multiplied<T>::type;
  constexpr int64_t DEPTH = DEPTH_STEPS * PER_STEP<L>;
  constexpr bool PACKED = sizeof(T) == 2 || WIDTH < 16;  // narrow panels are many, and each reads all of dz
  const int64_t threads = thread_count(), share = aligned((N + threads - 1) / threads, LINEAR_ROWS);
  const int64_t panels = dweight ? panels_of(K) : 1;
  // By panels each is packed by one thread, and dz, which all pack, is narrower.
  const bool by_panels = K > N && panels % threads == 0;
  const int64_t own = smaller(by_panels ? N : larger(share, MIN_OWN_ROWS), MAX_OWN_ROWS), parts = (N + own - 1) / own;
  const int64_t together = own < MAX_OWN_ROWS ? parts * panels : panels;
  const auto compute = [&](int64_t begin, int64_t end) {
    const int64_t kept = aligned(own, PAIRED_COLUMNS) + LINE, pitch = PACKED ? kept * PER_STEP<L> : N;
    float* right = scratch<float>(PANELS, DEPTH_STEPS * PANEL);
    L* packed = PACKED ? scratch<L>(LEFT, DEPTH_STEPS * pitch) : nullptr;
    float* total = scratch<float>(RESULT, (end - begin) * own * PANEL);
    float* sums = scratch<float>(SUMS, (2 * (end - begin) + 1) * kept);
    float* part = sums + 2 * (end - begin) * kept;
    memset(total, 0, sizeof(float) * (end - begin) * own * PANEL);
    memset(sums, 0, sizeof(float) * 2 * (end - begin) * kept);
    for (int64_t m = 0; m < M; m += DEPTH) {
      const int64_t first = begin / panels * own, later = smaller(DEPTH, M - m - DEPTH),
                    last = smaller(N, ((end - 1) / panels + 1) * own);
      Ahead next[2] = {ahead(dz + (m + DEPTH) * N + first, last - first, N, later),
                       ahead(x + (m + DEPTH) * K, K, K, later)};
      for (int64_t task = begin; task < end; ++task) {
        const int64_t n = task / panels * own, p = task % panels, rows = smaller(own, N - n),
                      depth = smaller(DEPTH, M - m);
        if ((PACKED || dbias) && (p == 0 || task == begin)) {
          memset(part, 0, sizeof(float) * kept);
          pack_left(L{}, dz + m * N + n, N, depth, rows, packed, pitch, part);
          float *sum = sums + (task - begin) * 2 * kept, *excess = sum + kept;
          for (int64_t j = 0; j < rows; ++j) {  // compensated: a batch has many blocks of rows (W. Kahan, 1965)
            const float added = part[j] - excess[j], next_sum = sum[j] + added, lost = (next_sum - sum[j]) - added;
            excess[j] = lost == lost ? lost : 0.f, sum[j] = next_sum;  // NaN after an infinity
          }
        }
        if (!dweight) continue;
        const L* left = packed;
        if constexpr (!PACKED) left = dz + m * N + n;
        pack_panel(L{}, x + m * K, depth, K, p, right);
        by_count(registers_of(smaller(PANEL, K - p * PANEL)), [&](auto registers) {
          add_strip<decltype(registers)::value>(left, pitch, rows, steps_of<L>(depth), right,
                                                total + (task - begin) * own * PANEL, next);
        });
      }
    }
    for (int64_t task = begin; task < end; ++task) {
      const int64_t n = task / panels * own, p = task % panels, rows = smaller(own, N - n);
      if (p == 0 && dbias) memcpy(dbias + n, sums + (task - begin) * 2 * kept, sizeof(float) * rows);
      for (int64_t r = 0; r < rows && dweight; ++r) {
        const float* from = total + ((task - begin) * own + r) * PANEL;
        over_columns(smaller(PANEL, K - p * PANEL), [&](int64_t j, auto lanes, int) TK_LAMBDA {
          store(dweight + (n + r) * K + p * PANEL + j, load(from + j, lanes), lanes);
        });
      }
    }
  };
  parallel_for(parts * panels, own * (dweight ? PANEL : 1) * M / 4, [&](int64_t begin, int64_t end) {
    for (int64_t next = begin; begin < end; begin = next)
      compute(begin, next = smaller(end, (begin / together + 1) * together));
  });
}

// Calls f(T{}, W{}) with the types of x and of the weight: float and float, bfloat16 and either.
template <class F> void by_types(int64_t dtype, bool weight_is_float32, const F& f) {
  if (dtype == FLOAT32) return f(float{}, float{});
  if (weight_is_float32) return f(Bfloat16{}, float{});
  f(Bfloat16{}, Bfloat16{});
}

}  // namespace

void linear_forward(const LinearForward& call) {
  by_types(call.dtype, call.weight_is_float32, [&](auto type, auto weight_type) {
    using T = decltype(type);
    using W = decltype(weight_type);
    const T* x = at<const T>(call.x);
    const W* weight = at<const W>(call.weight);
    const float* bias = at<const float>(call.bias);
    T *y = at<T>(call.y), *before = at<T>(call.before);
    if constexpr (sizeof(T) == sizeof(float))
      if (call.M <= (call.N * call.K < LARGE_WEIGHT ? SMALL_BATCH : MEDIUM_BATCH))
        return forward_of_small_batch(x, weight, bias, y, before, call.M, call.N, call.K, call.activation);
    forward(x, weight, bias, y, before, call.M, call.N, call.K, call.activation);
  });
}

void linear_backward_data(const LinearBackwardData& call) {
  by_types(call.dtype, call.weight_is_float32, [&](auto type, auto weight_type) {
    using T = decltype(type);
    backward_data(at<const T>(call.dy), at<const T>(call.saved), at<const decltype(weight_type)>(call.weight),
                  at<T>(call.dz), at<T>(call.dx), Residual{at<const float>(call.residual), at<float>(call.sum)}, call.M,
                  call.N, call.K, call.activation);
  });
}

void linear_backward_weight(const LinearBackwardWeight& call) {
#if defined(__AMX_BF16__)
  if (call.dtype != FLOAT32 && call.dweight) return weight_gradient_by_tiles(call);
#endif
  by_types(call.dtype, call.weight_is_float32, [&](auto type, auto weight_type) {
    using T = decltype(type);
    backward_weight(at<const T>(call.dz), at<const T>(call.x), at<decltype(weight_type)>(call.dweight),
                    at<float>(call.dbias), call.M, call.N, call.K);
  });
}

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(linear_forward)
TK_KERNEL(linear_backward_data)
TK_KERNEL(linear_backward_weight)
