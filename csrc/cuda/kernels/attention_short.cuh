// Short sequences (up to 256 keys and queries, head dimensions up to 64, 16-bit types): one block has all keys and
// values of a head in shared memory. Forward needs no barrier between tiles; backward computes the scores once for all
// three gradients (five products instead of seven) and delta, in one launch instead of three.
#pragma once
#include "attention_backward.cuh"
#include "attention_forward.cuh"

namespace transformer_kernels::attention {

template <class T, int HEAD_DIM, int KEYS_> struct ShortShape {
  static constexpr int KEYS = KEYS_;  // all of them; padded
  static constexpr int QUERIES = 64;  // per step of the backward pass
  static constexpr int SCORE_KEYS =
      KEYS * HEAD_DIM > 128 * 64 ? 32 : 64;  // per block of scores in backward, limited by registers
  static constexpr int WARPS = KEYS < 128 ? 4 : 8;
  static constexpr int THREADS = WARPS * WARP_SIZE;
  static constexpr int ELEMENT = sizeof(T);
  static constexpr int KEY_BYTES = 2 * KEYS * HEAD_DIM * ELEMENT + KEYS / 8;
  static constexpr int FORWARD_BYTES =
      shared_bytes_after<Interval>(16 * WARPS, shared_bytes_after<T, 1024>(16 * WARPS * HEAD_DIM, KEY_BYTES));
  static constexpr int BACKWARD_BYTES = shared_bytes_after<float>(
      QUERIES, shared_bytes_after<T, 1024>(4 * QUERIES * HEAD_DIM + 2 * QUERIES * KEYS, KEY_BYTES));
};

// The keys of one head, their values and padding.
template <class T, int HEAD_DIM, int KEYS> struct ResidentKeys {
  Tile<T, HEAD_DIM> k, v;
  uint64_t* bits;  // in shared memory; bit i of word w: key 64 * w + i is real

  template <int THREADS> TK_DEVICE void load(const Arguments& arguments, int batch, int key_head) {
    const T* key_rows = rows_of<T>(arguments.key, batch, key_head);
    const T* value_rows = rows_of<T>(arguments.value, batch, key_head);
#pragma unroll
    for (int block = 0; block < KEYS / 64; ++block) {
      const int first_key = 64 * block;
      const uint64_t real = real_from(arguments, batch, first_key);
      if (threadIdx.x == 0) bits[block] = real;
      load_tile<64, THREADS>(from(k, first_key), key_rows, arguments.key.row, first_key, arguments.key_length, real,
                             arguments);
      load_tile<64, THREADS>(from(v, first_key), value_rows, arguments.value.row, first_key, arguments.key_length, real,
                             arguments);
    }
  }

  // Called after this thread's copies have completed; a barrier must follow.
  template <int THREADS> TK_DEVICE void rotate(const Arguments& arguments, int batch) {
#pragma unroll 1
    for (int first_key = 0; first_key < KEYS; first_key += 64)
      rotate_tile<64, THREADS>(from(k, first_key), first_key, arguments.key_length,
                               real_from(arguments, batch, first_key), angles_of(arguments, batch), 1.f, threadIdx.x);
  }

  static TK_DEVICE uint64_t real_from(const Arguments& arguments, int batch, int first_key) {
    return first_key < arguments.key_length
               ? real_keys<64>(padding_of(arguments, batch), first_key, arguments.key_length)
               : 0;
  }
  static TK_DEVICE Tile<T, HEAD_DIM> from(Tile<T, HEAD_DIM> tile, int first_key) {
    return {tile.data + first_key * HEAD_DIM};
  }
  TK_DEVICE uint64_t bits_from(int first_key) const { return bits[first_key / 64] >> first_key % 64; }
};

// One block owns one query head; each warp owns every WARPS-th slab of 16 queries.
template <class T, int HEAD_DIM, int KEYS>
__global__ void __launch_bounds__(ShortShape<T, HEAD_DIM, KEYS>::THREADS, 1)
    attention_short_forward_kernel(const Arguments arguments) {
  using Shape = ShortShape<T, HEAD_DIM, KEYS>;
  constexpr int THREADS = Shape::THREADS;
  SharedMemory shared;
  ResidentKeys<T, HEAD_DIM, KEYS> keys;
  keys.k.data = shared.take<T, 1024>(KEYS * HEAD_DIM);
  keys.v.data = shared.take<T, 1024>(KEYS * HEAD_DIM);
  keys.bits = shared.take<uint64_t>(KEYS / 64);
  const Tile<T, HEAD_DIM> queries{shared.take<T, 1024>(16 * Shape::WARPS * HEAD_DIM)};
  Interval* const seen_by_rows = shared.take<Interval>(16 * Shape::WARPS);

  const int head = blockIdx.x % arguments.query_heads, batch = blockIdx.x / arguments.query_heads;
  const int warp_row = threadIdx.x / WARP_SIZE * 16;
  const Tile<T, HEAD_DIM> slab{queries.data + warp_row * HEAD_DIM};
  const auto load_slab = [&](int query) {
    load_tile<16, WARP_SIZE>(slab, rows_of<T>(arguments.query, batch, head), arguments.query.row, query,
                             arguments.query_length, ~0ull, arguments, threadIdx.x % WARP_SIZE);
    copy_async_commit();
  };
  load_slab(warp_row);
  keys.template load<THREADS>(arguments, batch, head / (arguments.query_heads / arguments.key_heads));
  copy_async_commit();
  copy_async_wait<0>();
  if (arguments.angles.cos) keys.template rotate<THREADS>(arguments, batch);
  __syncthreads();

  for (int query = warp_row; query < arguments.query_length; query += 16 * Shape::WARPS) {
    copy_async_wait<0>();
    if (arguments.angles.cos)
      rotate_tile<16, WARP_SIZE>(slab, query, arguments.query_length, ~0ull, angles_of(arguments, batch), 1.f,
                                 threadIdx.x % WARP_SIZE);
    __syncwarp();
    AttendedRows<T, HEAD_DIM, true> rows(arguments, batch, head, query, seen_by_rows + warp_row);
    const bool hides = hides_by_position(arguments);
    const Interval seen{keys_seen_by(arguments, query).first, keys_seen_by(arguments, query + 15).last};
#pragma unroll 1
    for (int first_key = 0; first_key < KEYS; first_key += 64) {
      const uint64_t bits = keys.bits_from(first_key);
      if (!bits || first_key > seen.last || first_key + 63 < seen.first) continue;
      rows.template add<64>(slab, 0, keys.from(keys.k, first_key), keys.from(keys.v, first_key), first_key, bits,
                            hides);
    }
    __syncwarp();
    rows.finish(slab, 0);
    __syncwarp();  // before the next slab overwrites this one
    if (query + 16 * Shape::WARPS < arguments.query_length) load_slab(query + 16 * Shape::WARPS);
  }
}

// delta = rowsum(dout * out) - dlse of ROWS queries; dout is in shared memory.
template <int ROWS, int THREADS, class T, int HEAD_DIM>
TK_DEVICE void row_deltas(const Arguments& arguments, const float* dlse, int batch, int head, int first_query,
                          Tile<T, HEAD_DIM> dout, float* delta) {
  constexpr int LANES = THREADS / ROWS;
  const int row = threadIdx.x / LANES, query = first_query + row;
  float sum = 0.f;
  if (query < arguments.query_length) {
    const T* out = rows_of<T>(arguments.out, batch, head) + query * arguments.out.row;
    for (int column = threadIdx.x % LANES; column < arguments.head_dim; column += LANES)
      sum = fmaf(to_float(*dout.at(row, column)), to_float(out[column]), sum);
    if (dlse && threadIdx.x % LANES == 0)
      sum -= dlse[(static_cast<int64_t>(batch) * arguments.query_heads + head) * arguments.query_length + query];
  }
  sum = warp_reduce<Sum, LANES>(sum);
  if (threadIdx.x % LANES == 0) delta[row] = sum;
}

// P (after dropout, without 1 / (1 - p)) and dS of 16 queries (tile rows starting at `row`) and WIDTH keys.
template <int WIDTH, class T, int HEAD_DIM, int KEYS>
TK_DEVICE void short_score_gradients(const Arguments& arguments, int batch, int head, int tile_query, int row,
                                     int first_key, const ResidentKeys<T, HEAD_DIM, KEYS>& keys, Tile<T, HEAD_DIM> q,
                                     Tile<T, HEAD_DIM> dout, const float* delta, Tile<T, KEYS> probabilities,
                                     Tile<T, KEYS> gradients) {
  const int g = threadIdx.x % WARP_SIZE / 4, t = threadIdx.x % 4;
  const int first_query = tile_query + row;
  const uint64_t bits = keys.bits_from(first_key) & ALL_KEYS<WIDTH>;
  const Interval first_sees = keys_seen_by(arguments, first_query),
                 last_sees = keys_seen_by(arguments, first_query + 15);
  const bool any = bits && first_key <= last_sees.last && first_key + WIDTH > first_sees.first;
  const bool edge = !any || bits != ALL_KEYS<WIDTH> || !is_inside<WIDTH>(first_key, seen_by_all(first_sees, last_sees));
  float scores[WIDTH / 8][4] = {}, grad_scores[WIDTH / 8][4] = {};
  uint32_t kept = ~0u;
  if (any) {
    multiply_transposed<WIDTH>(scores, q, row, keys.from(keys.k, first_key));              // [16, WIDTH]
    multiply_transposed<WIDTH>(grad_scores, dout, row, keys.from(keys.v, first_key));  // [16, WIDTH]: dP
    kept = kept_weights<true, Fragment::QUERY_ROWS, WIDTH>(arguments, batch, head, first_query, first_key);
  }
#pragma unroll
  for (int n = 0; n < WIDTH / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float grad_p = dropped_gradient(grad_scores[n][e], kept, 4 * n + e, arguments);
      grad_scores[n][e] = grad_p - delta[row + g + 8 * (e / 2)];
    }
  if (any)
    score_gradients<T, Fragment::QUERY_ROWS>(scores, grad_scores, arguments, batch, head, first_query, first_key);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = first_query + g + 8 * half;
    const bool real = any && query < arguments.query_length;
    const Interval seen = real ? keys_seen_by(arguments, query) : Interval{1, 0};
    const float* statistics = statistics_of(arguments, batch, head) + (real ? query : 0);
    const float largest = real ? statistics[0] : 0.f, log_sum = real ? statistics[arguments.query_length] : 0.f;
#pragma unroll
    for (int n = 0; n < WIDTH / 8; ++n)
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        const float p = probability<T, true>(scores[n][e], largest, log_sum, UNIT<T>);
        scores[n][e] = kept >> (4 * n + e) & 1 ? p : 0.f;
        grad_scores[n][e] *= p;
      }
    if (edge) {
      const uint64_t visible = bits & bits_of(seen, first_key);
      hide<WIDTH>(scores, half, visible, 0.f);
      hide<WIDTH>(grad_scores, half, visible, 0.f);
    }
#pragma unroll
    for (int n = 0; n < WIDTH / 8; ++n) {
      const int key_column = first_key + 8 * n + 2 * t;
      store_pair(probabilities.at(row + g + 8 * half, key_column), scores[n][2 * half], scores[n][2 * half + 1]);
      store_pair(gradients.at(row + g + 8 * half, key_column), grad_scores[n][2 * half], grad_scores[n][2 * half + 1]);
    }
  }
}

// One block owns one key head: its dK and dV, and dQ of every query head of its group. Per 64 queries, each warp first
// computes blocks of 16 queries x SCORE_KEYS keys of P and dS in shared memory, then accumulates dK and dV of its keys
// and computes a part of dQ.
template <class T, int HEAD_DIM, int KEYS>
__global__ void __launch_bounds__(ShortShape<T, HEAD_DIM, KEYS>::THREADS, 1)
    attention_short_backward_kernel(const Arguments arguments, const float* dlse) {
  using Shape = ShortShape<T, HEAD_DIM, KEYS>;
  constexpr int QUERIES = Shape::QUERIES, SCORE_KEYS = Shape::SCORE_KEYS;
  constexpr int WARPS = Shape::WARPS, THREADS = Shape::THREADS;
  constexpr int OWNED = KEYS / 16 / WARPS;                      // slabs of 16 keys per warp
  constexpr int COLUMNS = HEAD_DIM / (WARPS / (QUERIES / 16));  // of dQ per warp
  SharedMemory shared;
  ResidentKeys<T, HEAD_DIM, KEYS> keys;
  keys.k.data = shared.take<T, 1024>(KEYS * HEAD_DIM);
  keys.v.data = shared.take<T, 1024>(KEYS * HEAD_DIM);
  keys.bits = shared.take<uint64_t>(KEYS / 64);
  T* const query_stages = shared.take<T, 1024>(2 * QUERIES * HEAD_DIM);
  T* const dout_stages = shared.take<T, 1024>(2 * QUERIES * HEAD_DIM);
  const Tile<T, KEYS> probabilities{shared.take<T, 1024>(QUERIES * KEYS)};
  const Tile<T, KEYS> gradients{shared.take<T, 1024>(QUERIES * KEYS)};
  float* const delta = shared.take<float>(QUERIES);

  const int key_head = blockIdx.x % arguments.key_heads, batch = blockIdx.x / arguments.key_heads;
  const int group = arguments.query_heads / arguments.key_heads;
  const int tiles = (arguments.query_length + QUERIES - 1) / QUERIES;
  const int warp = threadIdx.x / WARP_SIZE;
  const auto load_step = [&](int step) {
    const int head = key_head * group + step / tiles, first_query = step % tiles * QUERIES;
    const Tile<T, HEAD_DIM> q{query_stages + step % 2 * QUERIES * HEAD_DIM};
    const Tile<T, HEAD_DIM> dout{dout_stages + step % 2 * QUERIES * HEAD_DIM};
    load_tile<QUERIES, THREADS>(q, rows_of<T>(arguments.query, batch, head), arguments.query.row, first_query,
                                arguments.query_length, ~0ull, arguments);
    load_tile<QUERIES, THREADS>(dout, rows_of<T>(arguments.dout, batch, head), arguments.dout.row, first_query,
                                arguments.query_length, ~0ull, arguments);
    copy_async_commit();
  };
  keys.template load<THREADS>(arguments, batch, key_head);
  copy_async_commit();
  load_step(0);
  if (arguments.angles.cos) {
    copy_async_wait<1>();
    keys.template rotate<THREADS>(arguments, batch);
  }

  const float key_factors[2] = {arguments.scale, arguments.scale};
  float dk[OWNED][HEAD_DIM / 8][4] = {}, dv[OWNED][HEAD_DIM / 8][4] = {};
  for (int step = 0; step < tiles * group; ++step) {
    const int head = key_head * group + step / tiles, first_query = step % tiles * QUERIES;
    const Tile<T, HEAD_DIM> q{query_stages + step % 2 * QUERIES * HEAD_DIM};
    const Tile<T, HEAD_DIM> dout{dout_stages + step % 2 * QUERIES * HEAD_DIM};
    copy_async_wait<0>();
    if (arguments.angles.cos)
      rotate_tile<QUERIES, THREADS>(q, first_query, arguments.query_length, ~0ull, angles_of(arguments, batch), 1.f,
                                    threadIdx.x);
    __syncthreads();  // also: the stage, P and dS of the last step may be overwritten
    if (step + 1 < tiles * group) load_step(step + 1);
    row_deltas<QUERIES, THREADS>(arguments, dlse, batch, head, first_query, dout, delta);
    __syncthreads();

#pragma unroll 1
    for (int block = warp; block < QUERIES / 16 * (KEYS / SCORE_KEYS); block += WARPS)
      short_score_gradients<SCORE_KEYS>(arguments, batch, head, first_query, block % (QUERIES / 16) * 16,
                                        block / (QUERIES / 16) * SCORE_KEYS, keys, q, dout, delta, probabilities,
                                        gradients);
    __syncthreads();

#pragma unroll
    for (int slab = 0; slab < OWNED; ++slab) {
      const int own_key = (warp * OWNED + slab) * 16;
      if (!(keys.bits_from(own_key) & ALL_KEYS<16>)) continue;
      multiply_left_transposed<QUERIES>(dv[slab], probabilities, own_key, dout);  // [16 keys, HEAD_DIM]
      multiply_left_transposed<QUERIES>(dk[slab], gradients, own_key, q);               // [16 keys, HEAD_DIM]
    }
    const int row = warp % (QUERIES / 16) * 16, column = warp / (QUERIES / 16) * COLUMNS;
    float dq[COLUMNS / 8][4] = {};
#pragma unroll 1
    for (int first_key = 0; first_key < KEYS; first_key += 64)
      if (keys.bits_from(first_key))
        multiply<64, COLUMNS>(dq, gradients, row, keys.k, column, first_key);  // [16 queries, COLUMNS]
    T* const dq_rows = rows_of<T>(arguments.dq, batch, head);
    if (!arguments.angles.cos) {
      store_scaled<T, COLUMNS>(dq, arguments.scale, dq_rows, arguments.dq.row, first_query + row,
                               arguments.query_length, column, arguments);
      continue;
    }
    __syncthreads();  // Q has been read and is overwritten with dQ
    stage_fragment<COLUMNS>(dq, key_factors, q, row, column);
    __syncthreads();
    if (warp >= QUERIES / 16) continue;
    rotate_slab(q, row, first_query + row, arguments.query_length, angles_of(arguments, batch));
    __syncwarp();
    store_rows(q, row, dq_rows, arguments.dq.row, first_query + row, arguments.query_length, 0, arguments);
  }
  copy_async_wait<0>();
  __syncthreads();
  const float value_factors[2] = {arguments.dropout.keep_scale, arguments.dropout.keep_scale};
#pragma unroll
  for (int slab = 0; slab < OWNED; ++slab) {
    const int own_key = (warp * OWNED + slab) * 16;
    store_fragment<HEAD_DIM>(dv[slab], value_factors, keys.v, own_key, rows_of<T>(arguments.dv, batch, key_head),
                             arguments.dv.row, own_key, arguments.key_length, 0, arguments);
    store_fragment<HEAD_DIM>(dk[slab], key_factors, keys.k, own_key, rows_of<T>(arguments.dk, batch, key_head),
                             arguments.dk.row, own_key, arguments.key_length, 0, arguments,
                             angles_of(arguments, batch));
  }
}

// Calls f(head dimension, keys) with the smallest compiled shape.
template <class F> void dispatch_short(const Arguments& arguments, F&& f) {
  const auto with_keys = [&](auto head_dim) {
    if (arguments.key_length <= 64) return f(head_dim, Constant<64>{});
    if (arguments.key_length <= 128) return f(head_dim, Constant<128>{});
    f(head_dim, Constant<256>{});
  };
  arguments.head_dim <= 32 ? with_keys(Constant<32>{}) : with_keys(Constant<64>{});
}

template <class T> int short_shared_bytes(const Arguments& arguments) {
  int bytes = 0;
  dispatch_short(arguments, [&](auto head_dim, auto keys) {
    using Shape = ShortShape<T, head_dim.value, keys.value>;
    bytes = arguments.dout.data ? Shape::BACKWARD_BYTES : Shape::FORWARD_BYTES;
  });
  return bytes;
}

template <class T> void launch_short_forward(const Arguments& arguments, Stream stream) {
  dispatch_short(arguments, [&](auto head_dim, auto keys) {
    using Shape = ShortShape<T, head_dim.value, keys.value>;
    launch<attention_short_forward_kernel<T, head_dim.value, keys.value>>(
        "attention_short_forward", grid_of(static_cast<int64_t>(arguments.batches) * arguments.query_heads),
        Shape::THREADS, Shape::FORWARD_BYTES, stream, arguments);
  });
}

template <class T> void launch_short_backward(const Arguments& arguments, const float* dlse, Stream stream) {
  dispatch_short(arguments, [&](auto head_dim, auto keys) {
    using Shape = ShortShape<T, head_dim.value, keys.value>;
    launch<attention_short_backward_kernel<T, head_dim.value, keys.value>>(
        "attention_short_backward", grid_of(static_cast<int64_t>(arguments.batches) * arguments.key_heads),
        Shape::THREADS, Shape::BACKWARD_BYTES, stream, arguments, dlse);
  });
}

}  // namespace transformer_kernels::attention
