// The visible keys of each query, read from a dense mask: one interval per row, among the keys visible to any row.
#include "../kernel.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

constexpr int64_t VECTOR_BYTES = 64;
constexpr int COLUMNS_SLOT = 0, RANKS_SLOT = 1;

template <class T> struct Vector {
  typedef T type __attribute__((vector_size(VECTOR_BYTES), aligned(1), may_alias));
  static constexpr int64_t SIZE = VECTOR_BYTES / sizeof(T);
};

TK_INLINE bool any_bit(Vector<uint64_t>::type bits) {
#if defined(__AVX512F__)
  return _mm512_test_epi64_mask((__m512i)bits, (__m512i)bits) != 0;
#else
  uint64_t all = 0;
  for (int i = 0; i < 8; ++i) all |= bits[i];
  return all != 0;
#endif
}

// Elements are compared as bits: `used` of them with `value`.
template <class T> struct Pattern {
  T used, value;
  TK_INLINE bool matches(T element) const { return (element & used) == value; }
};

// Whether 256 bytes match.
template <class T> TK_INLINE bool all_match(const T* from, Pattern<T> pattern) {
  using V = typename Vector<T>::type;
  V others = {};
  for (int i = 0; i < 4; ++i)
    others |= (*reinterpret_cast<const V*>(from + i * Vector<T>::SIZE) & pattern.used) ^ pattern.value;
  return !any_bit((Vector<uint64_t>::type)others);
}

// How many of the first elements match, up to the first that does not.
template <class T> TK_INLINE int64_t leading(const T* row, int64_t count, Pattern<T> pattern) {
  constexpr int64_t STEP = 4 * Vector<T>::SIZE;
  int64_t i = 0;
  while (i + STEP <= count && all_match(row + i, pattern)) i += STEP;
  while (i < count && pattern.matches(row[i])) ++i;
  return i;
}

template <class T> TK_INLINE int64_t trailing(const T* row, int64_t count, Pattern<T> pattern) {
  constexpr int64_t STEP = 4 * Vector<T>::SIZE;
  int64_t i = count;
  while (i >= STEP && all_match(row + i - STEP, pattern)) i -= STEP;
  while (i > 0 && pattern.matches(row[i - 1])) --i;
  return count - i;
}

template <class T> TK_INLINE int64_t matching(const T* row, int64_t count, Pattern<T> pattern) {
  using V = typename Vector<T>::type;
  constexpr int64_t SIZE = Vector<T>::SIZE, LIMIT = sizeof(T) == 1 ? 255 : 65535;  // that a lane counts
  int64_t total = 0, i = 0;
  while (i + SIZE <= count) {
    const int64_t steps = (count - i) / SIZE < LIMIT ? (count - i) / SIZE : LIMIT;
    V counts = {};
    for (int64_t step = 0; step < steps; ++step, i += SIZE)
      counts -= (V)((*reinterpret_cast<const V*>(row + i) & pattern.used) == (pattern.value + V{}));
    for (int64_t lane = 0; lane < SIZE; ++lane) total += counts[lane];
  }
  for (; i < count; ++i) total += pattern.matches(row[i]);
  return total;
}

// A row's visible keys: their number, the first one and the one after the last; OTHER: values besides 0 and one hiding
// value. `hidden` contains the bits of that value, if it occurs.
struct Seen {
  static constexpr int64_t OTHER = -1;
  int64_t first = 0, end = 0, count = 0;
  uint64_t hidden = 0;
};

// A bool row: nonzero is visible.
TK_INLINE Seen seen_in(const uint8_t* row, int64_t keys, bool) {
  const Pattern<uint8_t> hides{0xFF, 0};
  Seen seen;
  seen.first = leading(row, keys, hides);
  if (seen.first == keys) return {};
  seen.end = keys - trailing(row, keys, hides);
  seen.count = seen.end - seen.first - matching(row + seen.first, seen.end - seen.first, hides);
  return seen;
}

// A floating row: 0 is visible, one other value hides.
template <class T> TK_INLINE Seen seen_in(const T* row, int64_t keys, T magnitude) {
  const Pattern<T> shows{magnitude, 0};
  const Seen unknown{0, 0, Seen::OTHER, 0};
  const bool first_hidden = !shows.matches(row[0]), last_hidden = !shows.matches(row[keys - 1]);
  Seen seen{0, keys, 0, first_hidden ? row[0] : last_hidden ? row[keys - 1] : T{0}};
  if (first_hidden) seen.first = leading(row, keys, Pattern<T>{static_cast<T>(~T{0}), static_cast<T>(seen.hidden)});
  if (seen.first == keys) return {0, 0, 0, seen.hidden};
  if (last_hidden) seen.end -= trailing(row, keys, Pattern<T>{static_cast<T>(~T{0}), static_cast<T>(seen.hidden)});
  const int64_t count = seen.end - seen.first;
  if (count <= 0 || !shows.matches(row[seen.first]) || !shows.matches(row[seen.end - 1])) return unknown;
  seen.count = matching(row + seen.first, count, shows);
  if (seen.count == count) return seen;
  if (!seen.hidden) seen.hidden = row[seen.first + leading(row + seen.first, count, shows)];
  const Pattern<T> hides{static_cast<T>(~T{0}), static_cast<T>(seen.hidden)};
  return seen.count + matching(row + seen.first, count, hides) == count ? seen : unknown;
}

// The rows of a mask (batches, heads, queries, keys); an axis of size 1 is broadcast.
template <class T> struct Mask {
  const T* data;
  int64_t batches, heads, queries, keys, batch_stride, head_stride, row_stride;
  T magnitude;

  const T* row(int64_t index) const {
    return data + index / queries / heads * batch_stride + index / queries % heads * head_stride +
           index % queries * row_stride;
  }
  Seen seen(int64_t index) const {
    if constexpr (sizeof(T) == 1) return seen_in(row(index), keys, true);
    else return seen_in(row(index), keys, magnitude);
  }
};

// Marks in `columns` (keys) the keys visible to any row of a batch.
constexpr int64_t LANES = 64;
template <class T> void mark_columns(const Mask<T>& mask, int64_t batch, uint8_t* columns) {
  const int64_t rows = mask.heads * mask.queries;
  memset(columns, 0, mask.keys);
  for (int64_t i = 0; i < rows; ++i) {
    const T* row = mask.row(batch * rows + i);
    int64_t key = 0;
    for (; key + LANES <= mask.keys; key += LANES) {
      typedef uint8_t Octets __attribute__((vector_size(LANES), aligned(1), may_alias));
      typedef T Elements __attribute__((vector_size(LANES * sizeof(T)), aligned(1), may_alias));
      const auto zero = (*reinterpret_cast<const Elements*>(row + key) & mask.magnitude) == T{0};
      const Octets shown = (Octets) __builtin_convertvector(sizeof(T) == 1 ? ~zero : zero, Octets);
      *reinterpret_cast<Octets*>(columns + key) |= shown & 1;
    }
    for (; key < mask.keys; ++key) columns[key] |= ((row[key] & mask.magnitude) == 0) != (sizeof(T) == 1);
  }
}

// What is found out about the rows of one batch, all of it true until a row contradicts.
struct Found {
  bool exact = true, whole = true, causal = true;
};

// Whether the visible keys of each row of a batch are its whole interval; all keys; the keys up to its own position.
Found compare_rows(const int32_t* ranges, const int32_t* counts, int64_t heads, int64_t queries, int64_t keys,
                   const int32_t* rank) {
  Found found;
  const auto columns_before = [&](int64_t key) { return rank ? rank[key] : key; };
  for (int64_t i = 0; i < heads * queries; ++i) {
    const int64_t first = ranges[2 * i], end = ranges[2 * i + 1], position = i % queries + 1 + keys - queries,
                  own_end = position < 0      ? 0
                            : position < keys ? position
                                              : keys;
    found.exact &= counts[i] == columns_before(end) - columns_before(first);
    found.whole &= counts[i] == columns_before(keys);
    found.causal &= counts[i] == columns_before(own_end) && (end <= own_end || counts[i] == 0);
  }
  return found;
}

struct Summary {
  int64_t understood, whole, causal, has_columns, has_empty_rows;
  uint64_t hidden;
};

template <class T>
void find(const Mask<T>& mask, int32_t* ranges, uint8_t* columns, int32_t* counts, uint64_t* hidden, Summary& summary) {
  const int64_t of_batch = mask.heads * mask.queries, rows = mask.batches * of_batch;
  parallel_for(rows, mask.keys * static_cast<int64_t>(sizeof(T)) / 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Seen seen = mask.seen(i);
      ranges[2 * i] = static_cast<int32_t>(seen.first), ranges[2 * i + 1] = static_cast<int32_t>(seen.end);
      counts[i] = static_cast<int32_t>(seen.count), hidden[i] = seen.hidden;
      if (seen.count == Seen::OTHER) break;
    }
  });
  summary = {0, 1, 1, 0, 0, 0};
  for (int64_t i = 0; i < rows; ++i) {
    if (counts[i] == Seen::OTHER || (hidden[i] && summary.hidden && hidden[i] != summary.hidden)) return;
    summary.hidden = hidden[i] ? hidden[i] : summary.hidden;
    if (counts[i] == 0) {  // where the previous row ends, so that a block of rows with it has no more visible keys
      summary.has_empty_rows = 1;
      ranges[2 * i] = ranges[2 * i + 1] = i % mask.queries ? ranges[2 * i - 1] : 0;
    }
    summary.has_columns |= counts[i] != ranges[2 * i + 1] - ranges[2 * i];
  }
  int32_t* rank = summary.has_columns ? scratch<int32_t>(RANKS_SLOT, mask.keys + 1) : nullptr;
  for (int64_t batch = 0; batch < mask.batches; ++batch) {
    if (rank) {
      uint8_t* own = columns + batch * mask.keys;
      mark_columns(mask, batch, own);
      rank[0] = 0;
      for (int64_t key = 0; key < mask.keys; ++key) rank[key + 1] = rank[key] + own[key];
    }
    const int64_t first = batch * of_batch;
    const Found found = compare_rows(ranges + 2 * first, counts + first, mask.heads, mask.queries, mask.keys, rank);
    if (!found.exact) return;
    summary.whole &= found.whole, summary.causal &= found.causal;
  }
  summary.understood = 1;
}

}  // namespace

// ranges int32 (batches, heads, queries, 2): the first visible key of each row and the one after its last;
// columns (batches, keys): the keys visible to any row of a batch, written if rows have gaps; work: 16 bytes per row;
// found: a Summary. `size` of an element in bytes: 1 is bool, others are floating.
void mask_ranges(int64_t size, Address data, int64_t batches, int64_t heads, int64_t queries, int64_t keys,
                 int64_t batch_stride, int64_t head_stride, int64_t row_stride, Address ranges, Address columns,
                 Address work, Address found) {
  const int64_t rows = batches * heads * queries;
  uint64_t* hidden = at<uint64_t>(work);
  int32_t* counts = reinterpret_cast<int32_t*>(hidden + rows);
  const auto run = [&](auto element) {
    using T = decltype(element);
    const T magnitude = static_cast<T>(~T{0}) >> (sizeof(T) > 1);
    const Mask<T> mask{at<const T>(data), batches,     heads,      queries,  keys,
                       batch_stride,      head_stride, row_stride, magnitude};
    find(mask, at<int32_t>(ranges), at<uint8_t>(columns), counts, hidden, *at<Summary>(found));
  };
  if (size == 1) return run(uint8_t{});
  if (size == 2) return run(uint16_t{});
  if (size == 4) return run(uint32_t{});
  return run(uint64_t{});
}

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(mask_ranges)
