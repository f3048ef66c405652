// Gradients of attention: weights recomputed tile by tile (Dao 2023, algorithm 2), from a row's largest score and the
// log of its sum, which are stored separately: their sum, lse, would lose the log where scores are large.
#include "attention_backward.h"

namespace transformer_kernels::TK_LEVEL {
namespace {

void set_ranges(QueryBlock& block) {
  for (int n = 0; n < REGISTERS; ++n) {
    const int32_t *low = block.lanes.low + n * WIDTH, *high = block.lanes.high + n * WIDTH;
    block.any_low[n] = block.all_low[n] = low[0], block.any_high[n] = block.all_high[n] = high[0];
    for (int i = 1; i < WIDTH; ++i) {
      block.any_low[n] = smaller(block.any_low[n], low[i]), block.all_low[n] = larger(block.all_low[n], low[i]);
      block.any_high[n] = larger(block.any_high[n], high[i]), block.all_high[n] = smaller(block.all_high[n], high[i]);
    }
    if (n * WIDTH >= block.lanes.count) block.any_high[n] = block.any_low[n];
  }
}

// sum(out dout) of one query.
float output_product(const AttentionCall& call, int64_t batch, int64_t head, int64_t row) {
  Floats total[PARTS] = {};
  by_dtype(call.dtype, [&](auto type) TK_LAMBDA {
    using T = typename decltype(type)::type;
    const T *out = row_of<const T>(call.out, batch, head, row), *dout = row_of<const T>(call.dout, batch, head, row);
    over_sums<1>(call.width, [&](int64_t d, auto lanes, int u) TK_LAMBDA {
      total[u] = fma(load(out + d, lanes), load(dout + d, lanes), total[u]);
    });
  });
  return sum(total);
}

template <class Operands>
void load_block(QueryBlock& block, const AttentionCall& call, const Options& options, const Span& span, float* memory,
                const Operands& operands) {
  block.whole = block.lanes.any_low / CHUNK == (block.lanes.any_high - 1) / CHUNK;
  block.base = memory, block.log_sum = block.base + SIZE, block.delta = block.log_sum + SIZE,
  block.memory = block.delta + SIZE;
  for (int64_t i = 0; i < SIZE; ++i) {
    block.base[i] = INFINITY, block.delta[i] = block.log_sum[i] = 0.f;
    if (i >= block.lanes.count) continue;
    const int64_t head = block.lanes.head[i], query = block.lanes.query[i],
                  row = (span.batch * call.heads + head) * call.queries + query;
    const float* statistics = statistics_of(call, span.batch, head, query);
    const float product = block.whole ? 0.f : output_product(call, span.batch, head, query);
    if (statistics[0] != -INFINITY) block.base[i] = statistics[0];
    block.log_sum[i] = statistics[call.queries];
    block.delta[i] = product - (call.dlse ? at<const float>(call.dlse)[row] : 0.f);
  }
  operands.load_queries(call, options, span.batch, block);
  set_ranges(block);
}

// Conversion of a score to a weight.
struct Weighing {
  float factor, keep;  // of a score, which becomes a natural exponent, and of a weight kept by dropout
  bool dropped;
};

// S^T and dP^T of rows [from, to) and one register -> dropped P^T, dS^T;
// HIDDEN: some keys are masked in some lanes.
template <bool HIDDEN>
inline void differentiate(const QueryBlock& block, const Weighing& how, int n, int64_t key, int64_t from, int64_t to,
                          Tile& tile) {
  const Floats factor = splat(how.factor), delta = load(block.delta + n * WIDTH), keep = splat(how.keep);
  const Floats top = load(block.base + n * WIDTH), log_sum = load(block.log_sum + n * WIDTH);
  for (int64_t row = from; row < to; ++row) {
    float *weight = tile.weights + row * SIZE + n * WIDTH, *gradient = tile.gradients + row * SIZE + n * WIDTH;
    Floats p = exp2((fma(load(weight), factor, -top) - log_sum) * LOG2_E), dp = load(gradient);
    const uint32_t bits = how.dropped ? tile.bits[row * REGISTERS + n] : 0;
    if (how.dropped) dp = kept(bits, dp) * keep;
    Floats ds = p * (dp - delta);
    if (HIDDEN) {
      const auto seen = sees(block.lanes, n, key + row);
      p = seen ? p : splat(0.f), ds = seen ? ds : splat(0.f);
    }
    store(weight, how.dropped ? kept(bits, p) : p);
    store(gradient, ds);
  }
}

// The same if the tile contains all visible keys of a register's queries, which are [whole_from, whole_to) for each of
// them: a query's sum of weights and sum(out dout) are computed from this tile, so that they cancel the rounding of its
// scores.
inline void differentiate_whole(const QueryBlock& block, const Weighing& how, int n, int64_t key, int64_t whole_from,
                                int64_t whole_to, Tile& tile) {
  const Floats keep = splat(how.keep), none = splat(0.f), lowest = splat(-INFINITY);
  Floats top = lowest, total = none, product = none;
  const auto seen = [&](int64_t row, Floats x, Floats hidden) TK_LAMBDA {
    return row >= whole_from && row < whole_to ? x : sees(block.lanes, n, key + row) ? x : hidden;
  };
  for (int64_t row = tile.low[n]; row < tile.high[n]; ++row)
    top = maximum(seen(row, load(tile.weights + row * SIZE + n * WIDTH), lowest), top);
  top = top == lowest ? none : top;
  for (int64_t row = tile.low[n]; row < tile.high[n]; ++row) {
    float *weight = tile.weights + row * SIZE + n * WIDTH, *gradient = tile.gradients + row * SIZE + n * WIDTH;
    const Floats p = seen(row, exp2((load(weight) - top) * (how.factor * LOG2_E)), none);
    Floats dp = seen(row, load(gradient), none);
    if (how.dropped) dp = kept(tile.bits[row * REGISTERS + n], dp) * keep;
    total += p, product = fma(p, dp, product);
    store(weight, p), store(gradient, dp);
  }
  const Floats inverse = total == none ? none : 1.f / total,
               delta = fma(product, inverse, load(block.delta + n * WIDTH));
  for (int64_t row = tile.low[n]; row < tile.high[n]; ++row) {
    float *weight = tile.weights + row * SIZE + n * WIDTH, *gradient = tile.gradients + row * SIZE + n * WIDTH;
    const Floats p = load(weight) * inverse;
    store(gradient, seen(row, p * (load(gradient) - delta), none));
    store(weight, how.dropped ? kept(tile.bits[row * REGISTERS + n], p) : p);
  }
}

// S^T and dP^T of registers n and n + 1: for the keys visible to both, then for the keys visible to one.
template <class Operands>
void score_pair(const AttentionCall& call, const Operands& operands, const QueryBlock& block, int n, Tile& tile) {
  const auto score = [&](int64_t from, int64_t to, int first, int count) {
    if (from < to) operands.score(call, block, from, to - from, first, count, tile);
  };
  int64_t low[2], high[2];
  for (int i = 0; i < 2; ++i) {
    low[i] = tile.low[n + i] / Operands::SCORE_ROWS * Operands::SCORE_ROWS;
    high[i] = tile.is_empty(n + i) ? low[i] : aligned(tile.high[n + i], Operands::SCORE_ROWS);
  }
  const int64_t from = larger(low[0], low[1]), to = smaller(high[0], high[1]);
  if (from >= to) return score(low[0], high[0], n, 1), score(low[1], high[1], n + 1, 1);
  score(smaller(low[0], low[1]), from, low[0] < low[1] ? n : n + 1, 1);
  score(from, to, n, 2);
  score(to, larger(high[0], high[1]), high[0] > high[1] ? n : n + 1, 1);
}

// P^T and dS^T of a block of queries and the packed keys [key, key + rows), 0 where a key is masked. False
// if all are masked.
template <class Operands>
bool fill_tile(const AttentionCall& call, const Options& options, const Span& span, const Keys& keys, int64_t key,
               int64_t rows, const Operands& operands, QueryBlock& block, Tile& tile) {
  bool any = false;
  for (int n = 0; n < REGISTERS; ++n) {
    tile.low[n] = larger(0, smaller(rows, block.any_low[n] - key));
    tile.high[n] = larger(tile.low[n], smaller(rows, block.any_high[n] - key));
    any |= !tile.is_empty(n);
  }
  if (!any) return false;
  for (int n = 0; n < REGISTERS; n += 2) score_pair(call, operands, block, n, tile);
  const bool adjusts = adjusts_scores(call, options);
  for (int n = 0; adjusts && n < REGISTERS; ++n) {
    const int64_t low = tile.low[n], at = low * SIZE;
    adjust_scores(call, options, span, keys, block.lanes, n, key + low, key + tile.high[n], tile.weights + at,
                  tile.cap_slopes ? tile.cap_slopes + at : nullptr);
  }
  if (call.seed) draw_keys(call, options.dropout, span.batch, keys, block.lanes, key, key + rows, tile.bits);
  const Weighing how{adjusts ? 1.f : __builtin_fabsf(options.scale), options.dropout.scale, call.seed != 0};
  for (int n = 0; n < REGISTERS; ++n) {
    const int64_t low = tile.low[n], high = tile.high[n];
    const int64_t whole_from = larger(low, smaller(high, block.all_low[n] - key));
    const int64_t whole_to = larger(whole_from, smaller(high, block.all_high[n] - key));
    if (block.whole) {
      differentiate_whole(block, how, n, key, whole_from, whole_to, tile);
      continue;
    }
    differentiate<true>(block, how, n, key, low, whole_from, tile);
    differentiate<false>(block, how, n, key, whole_from, whole_to, tile);
    differentiate<true>(block, how, n, key, whole_to, high, tile);
  }
  return true;
}

// dS^T of capped scores -> dS^T of the scores before the cap.
void uncap(Tile& tile) {
  for (int n = 0; n < REGISTERS; ++n)
    for (int64_t at = tile.low[n] * SIZE + n * WIDTH; at < tile.high[n] * SIZE; at += SIZE)
      store(tile.gradients + at, load(tile.gradients + at) * load(tile.cap_slopes + at));
}

template <class T, class Operands>
void write_key_gradients(const AttentionCall& call, const Options& options, const Span& span, const Keys& keys,
                         int64_t kv_head, int64_t key, int64_t rows, const Operands& operands) {
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t row = row_of_key(keys, key + i);
    if (call.dk.data) {
      narrow_row(operands.dkeys + i * operands.pitch, splat(options.scale), call.width,
                 row_of<T>(call.dk, span.batch, kv_head, row));
      finish_row<T>(call, call.dk, span.batch, kv_head, row);
    }
    if (call.dv.data)
      narrow_row(operands.dvalues + i * operands.pitch, splat(options.dropout.scale), call.width,
                 row_of<T>(call.dv, span.batch, kv_head, row));
  }
}

// Zeros for the gradients of unattended rows [from, to) of a head; with ranks, only for padded rows.
template <class T>
void clear(const AttentionCall& call, const View& tensor, int64_t batch, int64_t head, int64_t from, int64_t to,
           const int32_t* rank) {
  if (!tensor.data) return;
  for (int64_t i = 0; i < to - from; ++i)
    if (!rank || rank[i + 1] == rank[i]) memset(row_of<T>(tensor, batch, head, from + i), 0, sizeof(T) * call.width);
}

// The share of a task: every `parts`-th chunk of the keys, or every `parts`-th block of the queries, or all of both.
struct Share {
  bool queries, keys;  // whose gradients
  int64_t part, parts;
};

// The current tile of a task: block `index` of `blocks` and the `rows` keys from `key` on, which are cached in this
// pass; the next pass replaces them by the keys from `next_key` on.
struct Step {
  int64_t key, rows, next_key, index, blocks;
  bool first_pass, last_pass;
};

// Prefetches during a tile's products, shortly before use so that the lines are not evicted: the operands of the next
// block of queries (after the last, the next owner's first), the keys of the next pass or owner, and the gradients that
// are written next.
void fetch_ahead(const AttentionCall& call, const Span& span, const Keys& keys, int64_t kv_head, const Step& step,
                 const QueryBlock* blocks, const Share& share, Fetches& fetches) {
  const int64_t group = call.heads / call.kv_heads;
  const bool last_block = step.index + 1 == step.blocks;
  if (last_block) {
    const auto position = [&](int64_t i) TK_LAMBDA { return HeadRow{kv_head, row_of_key(keys, i)}; };
    const int64_t from = step.last_pass ? step.key : smaller(step.next_key, keys.count);
    const int64_t to = step.last_pass ? step.key + step.rows : smaller(step.next_key + CHUNK, keys.count);
    fetch(call, call.k, span.batch, step.last_pass ? next_owner(call.k, call.kv_heads, kv_head, 1) : 0, from, to,
          fetches, position);
    fetch(call, call.v, span.batch, step.last_pass ? next_owner(call.v, call.kv_heads, kv_head, 1) : 0, from, to,
          fetches, position);
    if (share.keys) fetch(call, call.dk, span.batch, 0, step.key, step.key + step.rows, fetches, position);
    if (share.keys) fetch(call, call.dv, span.batch, 0, step.key, step.key + step.rows, fetches, position);
  }
  const auto over_part = [&](const Queries& lanes, const auto& f) TK_LAMBDA {
    const auto position = [&](int64_t i) TK_LAMBDA { return HeadRow{lanes.head[i], lanes.query[i]}; };
    f(lanes.count * step.key / keys.count, lanes.count * smaller(step.key + CHUNK, keys.count) / keys.count, position);
  };
  if (last_block ? step.last_pass : step.first_pass)
    over_part(blocks[last_block ? 0 : step.index + 1].lanes,
              [&](int64_t from, int64_t to, const auto& position) TK_LAMBDA {
      const auto read = [&](const View& tensor) TK_LAMBDA {
        fetch(call, tensor, span.batch, last_block ? next_owner(tensor, call.kv_heads, kv_head, group) : 0, from, to,
              fetches, position);
      };
      read(call.q), read(call.dout);
      if (keys.count > CHUNK) read(call.out);
    });
  if (share.queries && step.last_pass)
    over_part(blocks[step.index].lanes, [&](int64_t from, int64_t to, const auto& position) TK_LAMBDA {
      fetch(call, call.dq, span.batch, 0, from, to, fetches, position);
    });
}

template <class Operands>
void write_query_gradients(const AttentionCall& call, const Options& options, const Span& span, const QueryBlock& block,
                           const Operands& operands) {
  by_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    operands.template write_queries<T>(call, span.batch, block, options.scale);
    for (int64_t lane = 0; lane < block.lanes.count; ++lane)
      finish_row<T>(call, call.dq, span.batch, block.lanes.head[lane], block.lanes.query[lane]);
  });
}

// One task owns its share of the gradients of one key head of one span, and of the query heads that use it.
template <class Operands>
void backward_task(const AttentionCall& call, const Options& options, const Span& span, int64_t kv_head,
                   const Share& share) {
  const int64_t group = call.heads / call.kv_heads, total = group * span.queries;
  const Keys keys = keys_of(call, span, POSITIONS);
  const int64_t block_step = share.keys ? 1 : share.parts, first_block = share.keys ? 0 : share.part;
  const int64_t blocks = ((total + SIZE - 1) / SIZE - first_block + block_step - 1) / block_step;
  if (blocks <= 0 && !share.keys) return;
  const int64_t chunk_step = share.queries ? 1 : share.parts, first_chunk = share.queries ? 0 : share.part;
  const int64_t chunks = ((keys.count + CHUNK - 1) / CHUNK - first_chunk + chunk_step - 1) / chunk_step;
  const int64_t cached_chunks = larger(1, smaller(chunks, CACHED_FLOATS / (CHUNK * options.pitch)));
  Fetches fetches(size_of_element(call) * call.width, false);
  Operands operands(options, cached_chunks, &fetches);
  QueryBlock* block = scratch<QueryBlock>(LANES_OF_BLOCKS, blocks);
  float* memory = scratch<float>(QUERY_BLOCKS, blocks * operands.floats_of_block());
  for (int64_t i = 0; i < blocks; ++i)
    set_block(block[i].lanes, call, span, keys, kv_head * group, (first_block + i * block_step) * SIZE, total);
  Tile tile(options.softcap > 0.f);
  for (int64_t first = 0; first == 0 || first < chunks; first += cached_chunks) {
    const bool first_pass = first == 0, last_pass = first + cached_chunks >= chunks;
    const auto over_cached_chunks = [&](const auto& f) TK_LAMBDA {  // f(key, rows) with the operands at that chunk
      for (int64_t i = first; i < smaller(chunks, first + cached_chunks); ++i) {
        const int64_t key = (first_chunk + i * chunk_step) * CHUNK;
        operands.select_chunk(i - first, key);
        f(key, smaller(CHUNK, keys.count - key));
      }
    };
    over_cached_chunks(
        [&](int64_t key, int64_t rows) { operands.load_keys(call, span.batch, keys, kv_head, key, rows); });
    if (share.keys) operands.clear_key_gradients();
    for (int64_t i = 0; i < blocks; ++i) {
      if (first_pass) load_block(block[i], call, options, span, memory + i * operands.floats_of_block(), operands);
      over_cached_chunks([&](int64_t key, int64_t rows) {
        const int64_t next_key = key + cached_chunks * chunk_step * CHUNK;
        fetch_ahead(call, span, keys, kv_head, {key, rows, next_key, i, blocks, first_pass, last_pass}, block, share,
                    fetches);
        if (!fill_tile(call, options, span, keys, key, rows, operands, block[i], tile)) return fetches.finish();
        if (tile.cap_slopes) uncap(tile);
        operands.complete(rows, tile);
        if (share.queries) operands.add_query_gradients(block[i], tile);
        if (share.keys) operands.add_key_gradients(call, rows, block[i], tile);
        fetches.finish();
      });
      if (last_pass && share.queries) write_query_gradients(call, options, span, block[i], operands);
    }
    if (share.keys)
      by_dtype(call.dtype, [&](auto type) {
        over_cached_chunks([&](int64_t key, int64_t rows) {
          write_key_gradients<typename decltype(type)::type>(call, options, span, keys, kv_head, key, rows, operands);
        });
      });
  }
  by_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (share.keys && share.part == 0 && keys.rank) {
      clear<T>(call, call.dk, span.batch, kv_head, span.first_key, span.first_key + span.keys, keys.rank);
      clear<T>(call, call.dv, span.batch, kv_head, span.first_key, span.first_key + span.keys, keys.rank);
    }
  });
}

// If threads would be idle, gradients of keys and of queries are computed separately, which repeats two of seven
// products.
template <class Operands> void backward(const AttentionCall& call, const Options& options) {
  const int64_t owners = span_count(call) * call.kv_heads, threads = thread_count();
  const int64_t rows = call.heads / call.kv_heads * call.queries, rounds = (owners + threads - 1) / threads;
  const bool queries = call.dq.data, keys = call.dk.data || call.dv.data;
  const bool separate =
      queries && keys && !call.cu_seqlens && 5 * owners < 4 * rounds * threads && owners < 4 * threads;
  const int64_t parts = separate || !(queries && keys)
                            ? parts_of(owners, smaller((rows + SIZE - 1) / SIZE, (call.keys + CHUNK - 1) / CHUNK))
                            : 1;
  const int64_t kinds = separate ? 2 : 1, tasks = owners * parts * kinds;
  const int64_t length = call.cu_seqlens ? call.queries / span_count(call) + 1 : call.keys;
  parallel_for(tasks, rows * length / parts * call.width / 4, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t owner = task / (parts * kinds), kind = task % kinds, part = task / kinds % parts;
      const Span span = span_at(call, owner / call.kv_heads);
      backward_task<Operands>(call, options, span, owner % call.kv_heads,
                              {queries && (!separate || kind == 0), keys && (!separate || kind == 1), part, parts});
    }
  });
}

void clear_filler(const AttentionCall& call) {
  const int64_t from = at<int32_t>(call.cu_seqlens)[call.sequences],
                from_key = at<int32_t>(call.cu_seqlens_k)[call.sequences];
  by_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t head = 0; head < call.heads; ++head) clear<T>(call, call.dq, 0, head, from, call.queries, nullptr);
    for (int64_t head = 0; head < call.kv_heads; ++head) {
      clear<T>(call, call.dk, 0, head, from_key, call.keys, nullptr);
      clear<T>(call, call.dv, 0, head, from_key, call.keys, nullptr);
    }
  });
}

// Adds a tile's dS to the gradient of the bias, which has size 1 along a broadcast axis.
void add_bias_gradient(const AttentionCall& call, const Keys& keys, const QueryBlock& block, const Tile& tile,
                       int64_t key, int64_t rows, float* dbias) {
  const int64_t *sizes = call.bias_sizes.at, columns = sizes[3];
  const bool dense = columns > 1 && sizes[2] > 1 && !keys.position;
  alignas(64) float square[SUM_LANES * SUM_LANES];
  for (int64_t lane = 0; lane < block.lanes.count; lane += SUM_LANES)
    for (int64_t row = 0; row < rows; row += SUM_LANES) {
      for (int64_t i = 0; i < SUM_LANES; i += WIDTH)
        for (int64_t j = 0; j < SUM_LANES; j += WIDTH)
          transpose_square(tile.gradients + (row + j) * SIZE + lane + i, SIZE, 1.f, square + i * SUM_LANES + j,
                           SUM_LANES);
      const int64_t some = smaller(SUM_LANES, rows - row), used = smaller(SUM_LANES, block.lanes.count - lane);
      const bool joined = sizes[2] == 1;  // all queries have one row: the sums of a square make the long sum accurate
      for (int64_t i = 1; joined && i < used; ++i)
        for (int64_t j = 0; j < SUM_LANES; j += WIDTH)
          store(square + j, load(square + j) + load(square + i * SUM_LANES + j));
      for (int64_t i = 0; i < (joined ? 1 : used); ++i) {
        float* to = dbias + (joined ? 0 : block.lanes.query[lane + i] * columns);
        const float* from = square + i * SUM_LANES;
        if (dense && some == SUM_LANES) {
          to += keys.first + key + row;
          for (int64_t j = 0; j < SUM_LANES; j += WIDTH) store(to + j, load(to + j) + load(from + j));
        } else if (columns > 1) {
          for (int64_t j = 0; j < some; ++j) to[row_of_key(keys, key + row + j)] += from[j];
        } else {
          float sum = 0.f;
          for (int64_t j = 0; j < some; ++j) sum += from[j];
          *to += sum;
        }
      }
    }
}

// The gradient of the bias recomputes the scores: one task owns a stretch of it and adds up all that
// was broadcast there, always in the same order.
void bias_gradient(const AttentionCall& call, const Options& options) {
  const int64_t* sizes = call.bias_sizes.at;
  const int64_t blocks = sizes[2] > 1 && !call.cu_seqlens ? (call.queries + SIZE - 1) / SIZE : 1;
  const int64_t tasks = sizes[0] * sizes[1] * blocks, group = call.heads / call.kv_heads;
  parallel_for(tasks, call.batch * call.heads * call.queries * call.keys / tasks * call.width / 8,
               [&](int64_t begin, int64_t end) {
    Wide operands(options, 1, nullptr);
    QueryBlock* block = scratch<QueryBlock>(LANES_OF_BLOCKS, 1);
    float* memory = scratch<float>(QUERY_BLOCKS, operands.floats_of_block());
    Tile tile(options.softcap > 0.f);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t bias_batch = task / blocks / sizes[1], bias_head = task / blocks % sizes[1];
      float* dbias = at<float>(call.dbias) + (bias_batch * sizes[1] + bias_head) * sizes[2] * sizes[3];
      const int64_t first = task % blocks * SIZE, own_rows = blocks > 1 ? smaller(SIZE, sizes[2] - first) : sizes[2];
      memset(dbias + first * sizes[3], 0, sizeof(float) * own_rows * sizes[3]);
      for (int64_t index = 0; index < span_count(call); ++index) {
        const Span span = span_at(call, index);
        if (sizes[0] > 1 && span.batch != bias_batch) continue;
        const Keys keys = keys_of(call, span, POSITIONS);
        const int64_t last = blocks > 1 ? smaller(first + SIZE, span.queries) : span.queries;
        for (int64_t head = sizes[1] > 1 ? bias_head : 0; head < (sizes[1] > 1 ? bias_head + 1 : call.heads); ++head)
          for (int64_t query = first; query < last; query += SIZE) {
            set_block(block->lanes, call, span, keys, head, query, span.queries);
            load_block(*block, call, options, span, memory, operands);
            for (int64_t key = 0; key < keys.count; key += CHUNK) {
              const int64_t rows = smaller(CHUNK, keys.count - key);
              operands.load_keys(call, span.batch, keys, head / group, key, rows);
              if (!fill_tile(call, options, span, keys, key, rows, operands, *block, tile)) continue;
              operands.complete(rows, tile);
              add_bias_gradient(call, keys, *block, tile, key, rows, dbias);
            }
          }
      }
    }
  });
}

}  // namespace

void attention_backward(const AttentionCall& arguments) {
  const AttentionCall call = with_rotations(arguments);
  const Options options = options_of(call);
  if (call.cu_seqlens) clear_filler(call);
  if (span_count(call) && (call.dq.data || call.dk.data || call.dv.data)) {
#if defined(__AVX512BF16__)
    call.dtype == BFLOAT16 ? backward<Pairs>(call, options) : backward<Wide>(call, options);
#else
    backward<Wide>(call, options);
#endif
  }
  if (call.dbias) bias_gradient(call, options);
}

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(attention_backward)
