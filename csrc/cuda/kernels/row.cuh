// The layout of rows of a contiguous (M, N) tensor over threads, for kernels that reduce over rows.
#pragma once
#include <limits>

#include "../launch.h"
#include "../primitives/memory.h"
#include "../primitives/numbers.h"
#include "../primitives/reductions.h"

namespace transformer_kernels {

// THREADS threads own one row: a warp, or a block. Each has ITEMS elements in registers, in vectors of VECTOR elements;
// its vector v starts at column (v * THREADS + thread) * VECTOR, so accesses are coalesced. ITEMS = 0 is the layout for
// rows of any width, which are read in each pass.
template <class T_, int VECTOR_, int ITEMS_, int THREADS_> struct RowLayout {
  using T = T_;
  static constexpr int VECTOR = VECTOR_, ITEMS = ITEMS_, THREADS = THREADS_;
  static constexpr bool IN_REGISTERS = ITEMS > 0;
  static constexpr int VECTORS = IN_REGISTERS ? ITEMS / VECTOR : 1;
  static constexpr int CAPACITY = ITEMS * THREADS;
  static constexpr int WARPS = THREADS / WARP_SIZE;
  static constexpr int ROWS_PER_BLOCK = WARPS == 1 ? 4 : 1;
  static constexpr int BLOCK_THREADS = THREADS * ROWS_PER_BLOCK;
  static constexpr int SCRATCH = 2 * WARPS;  // floats of shared memory for the reductions
  static constexpr int SHARED_BYTES = shared_bytes_after<float>(SCRATCH);

  static TK_DEVICE int thread() { return static_cast<int>(threadIdx.x) % THREADS; }
  static TK_DEVICE int column(int v) { return (v * THREADS + thread()) * VECTOR; }
  static TK_DEVICE int64_t first_row() {
    return static_cast<int64_t>(blockIdx.x) * ROWS_PER_BLOCK + static_cast<int>(threadIdx.x) / THREADS;
  }
  // The block's shared memory for `reduce` and `sum_pair`, if it is not used otherwise.
  static TK_DEVICE float* scratch() {
    SharedMemory shared;
    return shared.take<float>(SCRATCH);
  }
  static int64_t blocks(int64_t rows) { return ceil_div(rows, ROWS_PER_BLOCK); }

  // Calls f(v, column) for each vector of this thread; v is always 0 in the layout for any width.
  template <class F> static TK_DEVICE void for_each_vector(int columns, F f) {
    if constexpr (IN_REGISTERS) {
#pragma unroll
      for (int v = 0; v < VECTORS; ++v)
        if (column(v) < columns) f(v, column(v));
    } else {
      for (int first = column(0); first < columns; first += THREADS * VECTOR) f(0, first);
    }
  }

  // Calls load(v, column) for all vectors of this thread, then use(v, column), so that the loads overlap. In the layout
  // for any width each vector is used after its load.
  template <class Load, class Use> static TK_DEVICE void load_and_use(int columns, Load load, Use use) {
    if constexpr (IN_REGISTERS) {
      for_each_vector(columns, load);
      for_each_vector(columns, use);
    } else {
      for_each_vector(columns, [&](int v, int column) {
        load(v, column);
        use(v, column);
      });
    }
  }

  // Every thread of the row returns the result. `scratch` is SCRATCH floats of shared memory.
  template <class Operation> static TK_DEVICE float reduce(float value, float* scratch) {
    if constexpr (WARPS == 1) {
      return warp_reduce<Operation>(value);
    } else {
      return block_reduce<Operation, WARPS>(value, scratch);
    }
  }
  static TK_DEVICE float2 sum_pair(float first, float second, float* scratch) {
    if constexpr (WARPS == 1) {
      return warp_sum_pair(make_float2(first, second));
    } else {
      return block_sum_pair<WARPS>(make_float2(first, second), scratch);
    }
  }
};

// Calls f(RowLayout<...>{}) with the layout for this width; 16-byte vectors only if every row is aligned. Layouts of
// single elements, which need one instruction each, have fewer elements per thread.
template <class T, class F> void dispatch_row_layout(int columns, bool aligned, F&& f) {
  constexpr int V = ELEMENTS_PER_16_BYTES<T>;
  if (aligned) {
    if (columns <= 256) return f(RowLayout<T, V, 8, 32>{});
    if (columns <= 512) return f(RowLayout<T, V, 16, 32>{});
    if (columns <= 1024) return f(RowLayout<T, V, 32, 32>{});
    if (columns <= 4096) return f(RowLayout<T, V, 16, 256>{});
    if (columns <= 8192) return f(RowLayout<T, V, 16, 512>{});
    return f(RowLayout<T, V, 0, 512>{});
  }
  if (columns <= 256) return f(RowLayout<T, 1, 8, 32>{});
  if (columns <= 1024) return f(RowLayout<T, 1, 8, 128>{});
  if (columns <= 4096) return f(RowLayout<T, 1, 8, 512>{});
  return f(RowLayout<T, 1, 0, 512>{});
}

// Limit on columns: 32-bit indices, which may exceed the row by a block of THREADS * VECTOR.
inline int row_length(int64_t columns) {
  constexpr int64_t LIMIT = std::numeric_limits<int>::max() - 4096;
  if (columns > LIMIT)
    throw std::invalid_argument("the cuda backend supports rows of up to " + std::to_string(LIMIT) + " elements; got " +
                                std::to_string(columns));
  return static_cast<int>(columns);
}

// Whether all of these contiguous (M, columns) tensors allow 16-byte vectors; null pointers are ignored.
template <class T, class... Pointers> bool all_aligned(int columns, const Pointers*... pointers) {
  const uintptr_t addresses = (uintptr_t{0} | ... | reinterpret_cast<uintptr_t>(pointers));
  return addresses % 16 == 0 && columns % ELEMENTS_PER_16_BYTES<T> == 0;
}

template <int VECTOR, class T> TK_DEVICE Vector<float, VECTOR> widened(const Vector<T, VECTOR>& values) {
  Vector<float, VECTOR> result;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) result[i] = to_float(values[i]);
  return result;
}

// A row input: the rows of x. A kernel loads a row once, or, in the layout for any width, first with `load_first` and
// then with `load_again`. Other types of this interface gather, add or apply dropout.
template <class T_> struct PlainRows {
  using T = T_;
  using Value = T_;  // the type in registers
  const T* x;
  int columns;

  template <int V> TK_DEVICE Vector<T, V> load_first(int64_t row, int column) const {
    return load_vector<V>(x + row * columns + column);
  }
  template <int V> TK_DEVICE Vector<T, V> load_again(int64_t row, int column) const {
    return load_first<V>(row, column);
  }
};

// A weight or bias of shape (N,), in the dtype of the rows or in fp32.
struct RowParameter {
  const void* data;
  bool is_float32;

  template <class T, int VECTOR> TK_DEVICE Vector<float, VECTOR> load_at(int column) const {
    if (is_float32) return load_vector<VECTOR>(static_cast<const float*>(data) + column);
    return widened<VECTOR>(load_vector<VECTOR>(static_cast<const T*>(data) + column));
  }
};

template <class T, int VECTOR> TK_DEVICE Vector<T, VECTOR> rounded(const Vector<float, VECTOR>& values) {
  Vector<T, VECTOR> result;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) result[i] = from_float<T>(values[i]);
  return result;
}

// A row output for fp32 results: the rows of y.
template <class T_> struct PlainOutput {
  using T = T_;
  T* y;
  int columns;

  template <int V> TK_DEVICE void store_at(int64_t row, int column, const Vector<float, V>& values) const {
    store_vector(y + row * columns + column, rounded<T, V>(values));
  }
};

}  // namespace transformer_kernels
