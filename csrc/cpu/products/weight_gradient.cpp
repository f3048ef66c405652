// The weight gradient of a linear layer in bfloat16 by AMX tiles, dweight = dz^T x, summed in float32: a sum over many
// rows, of which both operands have one beside the other. The operand with fewer columns, the left one, is transposed
// as it is packed; of the right one pairs of rows are.
#include "../../calls/linear.h"
#include "lanes.h"
#include "pairs.h"
#include "product.h"

#if defined(__AMX_BF16__)
namespace transformer_kernels::TK_LEVEL {
namespace {

enum Slot { LEFT = 8, RIGHT, TOTAL, PANEL_SUMS };

constexpr int64_t DEPTH = 512;       // rows that are packed and multiplied together
constexpr int64_t PANEL = 32;        // columns of a panel, to a multiple of which each operand is filled up
constexpr int64_t NEAR_PANELS = 16;  // of the right operand, packed together: they fit into the second-level cache

// Unpacked rows (rows, columns).
struct Operand {
  const Bfloat16* data;
  int64_t columns;
};

// With strides of whole pages, rows and panels would share few cache sets.
constexpr int64_t LEFT_ROW = DEPTH + PAIR_DEPTH;
constexpr int64_t PANEL_SIZE = (DEPTH / 2 + 1) * PANEL;  // words of a packed panel
constexpr int64_t AHEAD_ROWS = 16;
constexpr int LEFT_COLUMNS = 8;  // transposed together

using Left = Bfloat16;
int64_t left_size(int64_t height) { return height * LEFT_ROW; }

// PAIR_DEPTH rows of eight columns -> eight rows.
// Each quarter of a register contains eight rows, transposed separately.
TK_INLINE void transpose_eight(const Bfloat16* from, int64_t pitch, Bfloat16* to) {
  __m512i r[8], s[8];
  const auto row = [&](int i) TK_LAMBDA { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * pitch)); };
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_mask_broadcast_i32x4(_mm512_castsi128_si512(row(i)), 0x00F0, row(8 + i));
    r[i] = _mm512_mask_broadcast_i32x4(r[i], 0x0F00, row(16 + i));
    r[i] = _mm512_mask_broadcast_i32x4(r[i], 0xF000, row(24 + i));
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2)
    s[i] = _mm512_unpacklo_epi16(r[i], r[i + 1]), s[i + 1] = _mm512_unpackhi_epi16(r[i], r[i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // r[4 g + j]: columns 2 j and 2 j + 1 of rows 4 g ... 4 g + 3
    const int from_row = i / 2 * 4 + i % 2;
    r[2 * i] = _mm512_unpacklo_epi32(s[from_row], s[from_row + 2]),
          r[2 * i + 1] = _mm512_unpackhi_epi32(s[from_row], s[from_row + 2]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    _mm512_storeu_si512(to + 2 * j * LEFT_ROW, _mm512_unpacklo_epi64(r[j], r[4 + j]));
    _mm512_storeu_si512(to + (2 * j + 1) * LEFT_ROW, _mm512_unpackhi_epi64(r[j], r[4 + j]));
  }
}

// Rows [row, row + depth) -> their transpose (height, depth), filled up with zeros.
void pack_left(const Operand& left, int64_t row, int64_t depth, int64_t height, Left* to) {
  for (int64_t i = 0; i < depth; i += PAIR_DEPTH)
    for (int64_t c = 0; c < height; c += LEFT_COLUMNS) {
      const Bfloat16* from = left.data + (row + i) * left.columns + c;
      if (i + PAIR_DEPTH <= depth && c + LEFT_COLUMNS <= left.columns) {
        for (int64_t r = 0; r < LEFT_COLUMNS; ++r)
          __builtin_prefetch(from + (PAIR_DEPTH + c % PANEL + r) * left.columns);
        transpose_eight(from, left.columns, to + c * LEFT_ROW + i);
        continue;
      }
      Bfloat16 edge[PAIR_DEPTH * LEFT_COLUMNS] = {};
      for (int64_t r = 0; r < smaller(PAIR_DEPTH, depth - i); ++r)
        for (int64_t j = 0; j < smaller(LEFT_COLUMNS, left.columns - c); ++j)
          edge[r * LEFT_COLUMNS + j] = from[r * left.columns + j];
      transpose_eight(edge, LEFT_COLUMNS, to + c * LEFT_ROW + i);
    }
}

// Rows [row, row + depth) of `panels` panels from column `first` on -> words of two rows' columns,
// a panel after the other.
void pack_right(const Operand& right, int64_t row, int64_t depth, int64_t first, int64_t panels, float* to) {
  const int64_t width = right.columns - first, filled = aligned(depth, PAIR_DEPTH);
  for (int64_t i = 0; i < depth; i += 2) {
    const Bfloat16 *even = right.data + (row + i) * right.columns + first, *odd = even + right.columns;
    for (int64_t p = 0; p < panels; ++p) {
      Floats one, two;
      __builtin_prefetch(even + AHEAD_ROWS * right.columns + p * PANEL),
          __builtin_prefetch(odd + AHEAD_ROWS * right.columns + p * PANEL);
      interleave(row_part(even, p * PANEL, width),
                 i + 1 < depth ? row_part(odd, p * PANEL, width) : _mm512_setzero_si512(), one, two);
      float* pair = to + p * PANEL_SIZE + i / 2 * PANEL;
      store(pair, one), store(pair + WIDTH, two);
    }
  }
  for (int64_t p = 0, pair = (depth + 1) / 2; p < panels; ++p)
    memset(to + p * PANEL_SIZE + pair * PANEL, 0, sizeof(float) * static_cast<size_t>((filled / 2 - pair) * PANEL));
}

TK_INLINE __m512 with_pairs(__m512 total, const void* pairs) {
  return _mm512_dpbf16_ps(total, bits_of<__m512bh>(_mm512_loadu_si512(pairs)),
                          bits_of<__m512bh>(_mm512_set1_epi32(0x3F803F80)));
}

// sums (height) += column sums of the packed operand.
void add_left(const Left* left, int64_t depth, int64_t height, float* sums) {
  for (int64_t c = 0; c < height; ++c) {
    __m512 total = _mm512_setzero_ps();
    for (int64_t i = 0; i < depth; i += PAIR_DEPTH) total = with_pairs(total, left + c * LEFT_ROW + i);
    sums[c] += sum((Floats)total);
  }
}

void add_right(const float* panel, int64_t depth, float* sums) {
  for (int64_t j = 0; j < PANEL; j += WIDTH) {
    __m512 total = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < (depth + 1) / 2; ++pair) total = with_pairs(total, panel + pair * PANEL + j);
    store(sums + j, load(sums + j) + (Floats)total);
  }
}

template <bool ADD> void multiply(const Left* left, const float* panel, int64_t depth, int64_t height, float* total) {
  pair_strip<2, ADD>(left, LEFT_ROW, panel, PANEL, total, PANEL, height, aligned(depth, PAIR_DEPTH));
}

// total (height, PANEL) -> dweight (N, K), of which it is columns from `first` on, or, transposed, rows.
template <class T>
void write(const float* total, int64_t height, int64_t first, bool transposed, T* dweight, int64_t N, int64_t K) {
  alignas(64) float square[WIDTH * WIDTH];
  const int64_t rows = transposed ? smaller(PANEL, N - first) : height,
                columns = transposed ? height : smaller(PANEL, K - first);
  T* to = dweight + (transposed ? first * K : first);
  for (int64_t i = 0; i < rows; i += WIDTH)
    for (int64_t j = 0; j < columns; j += WIDTH) {
      const Part some{static_cast<int>(smaller(WIDTH, columns - j))};
      if (transposed) transpose_square(total + j * PANEL + i, PANEL, 1.f, square, WIDTH);
      for (int64_t r = 0; r < smaller(WIDTH, rows - i); ++r)
        store(to + (i + r) * K + j, load(transposed ? square + r * WIDTH : total + (i + r) * PANEL + j), some);
    }
}

}  // namespace

// dz and x in bf16. A task owns a panel of the right operand.
void weight_gradient_by_tiles(const LinearBackwardWeight& call) {
  const int64_t M = call.M, N = call.N, K = call.K;
  const bool transposed = N > K;
  const Operand rows{at<const Bfloat16>(call.dz), N}, inputs{at<const Bfloat16>(call.x), K};
  const Operand &left = transposed ? inputs : rows, &right = transposed ? rows : inputs;
  const int64_t height = aligned(left.columns, PANEL), panels = aligned(right.columns, PANEL) / PANEL;
  parallel_for(panels, left.columns * PANEL * M / 64, [&](int64_t begin, int64_t end) {
    Left* packed = scratch<Left>(LEFT, left_size(height));
    float* near = scratch<float>(RIGHT, smaller(NEAR_PANELS, end - begin) * PANEL_SIZE);
    float* totals = scratch<float>(TOTAL, (end - begin) * height * PANEL);
    const bool sums_left = call.dbias && !transposed && begin == 0, sums_right = call.dbias && transposed;
    float* sums = scratch<float>(PANEL_SUMS, larger(height, (end - begin) * PANEL));
    memset(sums, 0, sizeof(float) * static_cast<size_t>(larger(height, (end - begin) * PANEL)));
    const TileRegisters registers;
    for (int64_t m = 0; m < M; m += DEPTH) {
      const int64_t depth = smaller(DEPTH, M - m);
      pack_left(left, m, depth, height, packed);
      if (sums_left) add_left(packed, depth, height, sums);
      for (int64_t p = begin; p < end; ++p) {
        const float* panel = near + (p - begin) % NEAR_PANELS * PANEL_SIZE;
        if (panel == near) pack_right(right, m, depth, p * PANEL, smaller(NEAR_PANELS, end - p), near);
        if (sums_right) add_right(panel, depth, sums + (p - begin) * PANEL);
        float* total = totals + (p - begin) * height * PANEL;
        if (m) multiply<true>(packed, panel, depth, height, total);
        else multiply<false>(packed, panel, depth, height, total);
      }
    }
    for (int64_t p = begin; p < end; ++p) {
      const float* total = totals + (p - begin) * height * PANEL;
      if (call.weight_is_float32) write(total, left.columns, p * PANEL, transposed, at<float>(call.dweight), N, K);
      else write(total, left.columns, p * PANEL, transposed, at<Bfloat16>(call.dweight), N, K);
    }
    if (sums_left) memcpy(at<float>(call.dbias), sums, sizeof(float) * static_cast<size_t>(N));
    if (sums_right)
      memcpy(at<float>(call.dbias) + begin * PANEL, sums,
             sizeof(float) * static_cast<size_t>(smaller(end * PANEL, N) - begin * PANEL));
  });
}

}  // namespace transformer_kernels::TK_LEVEL
#endif
