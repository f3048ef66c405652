// The scores of attention: what happens to a fragment of products Q K^T until they are weights, and its gradient. An
// option of the scores is applied here and nowhere else: kernels call score_products(), score_gradients() and, for
// tiles of wgmma, WideScores. EXTRAS: Arguments::has_extras(); without them the exponential applies the scale.
#pragma once
#include "attention_tiles.cuh"

namespace transformer_kernels::attention {

// exp(score - largest - log_sum). `score` is q k, or with SCALED scale * q k + bias; then a bias of -inf may have
// masked every key of a row (`largest` is -inf). Without a bias only masks hide keys, by selection.
template <class T, bool SCALED> TK_DEVICE float probability(float score, float largest, float log_sum, float factor) {
  if (!SCALED) return exponential<T>(fmaf(score, factor, -(largest + log_sum) * UNIT<T>));
  const float base = largest == -INFINITY ? INFINITY : largest;  // exp(-inf) is 0
  return exponential<T>(fmaf(score - base, factor, -log_sum * factor));
}

template <class T> TK_DEVICE float bias_at(const Arguments& arguments, int batch, int head, int query, int key) {
  const Bias& bias = arguments.bias;
  if (query >= arguments.query_length || key >= arguments.key_length) return 0.f;
  const int64_t offset = batch * bias.batch + head * bias.head + query * bias.row + key * bias.column;
  if (bias.is_float) {
    const float value = static_cast<const float*>(bias.data)[offset];
    return bias.is_slope ? -value * abs(query + arguments.key_length - arguments.query_length - key) : value;
  }
  return to_float(static_cast<const T*>(bias.data)[offset]);
}

template <int TILES> TK_DEVICE void scale_scores(float (&scores)[TILES][4], float scale) {
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[n][e] *= scale;
}

// tanh of a score computed from operands of type T: tanhf, accurate for small results, only for fp32; it needs more
// registers.
template <class T> TK_DEVICE float tanh_of(float x) {
  if constexpr (sizeof(T) == 4) return tanhf(x);
  const float decay = fast_exp2(-2.f * LOG2_E * fabsf(x)), size = __fdividef(1.f - decay, 1.f + decay);
  return x < 0.f ? -size : size;
}

// softcap * tanh(score / softcap), before the bias.
template <class T, int TILES> TK_DEVICE void cap_scores(float (&scores)[TILES][4], float softcap) {
  const float inverse = 1.f / softcap;
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[n][e] = softcap * tanh_of<T>(scores[n][e] * inverse);
}

// The same, and multiplies `gradients`, which become dS, by the derivative 1 - tanh^2.
template <class T, int TILES>
TK_DEVICE void cap_scores(float (&scores)[TILES][4], float softcap, float (&gradients)[TILES][4]) {
  const float inverse = 1.f / softcap;
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float ratio = tanh_of<T>(scores[n][e] * inverse);
      scores[n][e] = softcap * ratio;
      gradients[n][e] *= 1.f - ratio * ratio;
    }
}

// scale * product, or its softcap
template <class T, int TILES> TK_DEVICE void scale_and_cap(float (&products)[TILES][4], const Arguments& arguments) {
  scale_scores(products, arguments.scale);
  if (arguments.softcap > 0.f) cap_scores<T>(products, arguments.softcap);
}

// What the rows of a fragment are; its columns are the other.
enum class Fragment { QUERY_ROWS, KEY_ROWS };

template <class T, Fragment KIND, int TILES>
TK_DEVICE void add_bias(float (&scores)[TILES][4], const Arguments& arguments, int batch, int head, int first_query,
                        int first_key) {
  const int g = threadIdx.x % WARP_SIZE / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = g + 8 * (e / 2), column = 8 * n + 2 * t + e % 2;
      scores[n][e] += KIND == Fragment::QUERY_ROWS
                          ? bias_at<T>(arguments, batch, head, first_query + row, first_key + column)
                          : bias_at<T>(arguments, batch, head, first_query + column, first_key + row);
    }
}

// The scores of a fragment of products: scaled, capped and biased. Masks are applied by hide().
template <class T, int TILES>
TK_DEVICE void score_products(float (&products)[TILES][4], const Arguments& arguments, int batch, int head,
                              int first_query, int first_key) {
  scale_and_cap<T>(products, arguments);
  if (arguments.bias.data) add_bias<T, Fragment::QUERY_ROWS>(products, arguments, batch, head, first_query, first_key);
}

// The same, and multiplies `gradients`, which become dS, by the derivative of the scores by the scaled products.
template <class T, Fragment KIND, int TILES>
TK_DEVICE void score_gradients(float (&products)[TILES][4], float (&gradients)[TILES][4], const Arguments& arguments,
                               int batch, int head, int first_query, int first_key) {
  scale_scores(products, arguments.scale);
  if (arguments.softcap > 0.f) cap_scores<T>(products, arguments.softcap, gradients);
  if (arguments.bias.data) add_bias<T, KIND>(products, arguments, batch, head, first_query, first_key);
}

// The factor of scores in the exponential. Without EXTRAS it includes the scale, which nothing else applies.
template <class T, bool EXTRAS> TK_DEVICE float exponential_factor(const Arguments& arguments) {
  return EXTRAS ? UNIT<T> : arguments.scale * UNIT<T>;
}

// One step of a bit transpose over lanes: exchanges bits at `upper` of the lower lane with the bits `shift` below them
// of the upper lane, `distance` lanes away.
TK_DEVICE uint32_t exchange_bits(uint32_t bits, uint32_t upper, int shift, int distance) {
  const uint32_t other = __shfl_xor_sync(ALL_LANES, bits, distance);
  return threadIdx.x & distance ? (bits & upper) | (other & upper) >> shift
                                : (bits & ~upper) | (other & ~upper) << shift;
}

// The dropout mask of a fragment of queries (rows) and keys (columns starting at first_key): bit 4 * n + e, 1 if kept.
// One philox call covers eight adjacent keys of a query, two in each lane of a quad. Each lane therefore computes one
// of the four rows of eight keys in 16 keys of the fragment, and the lanes transpose pairs of bits.
template <int KEYS>
TK_DEVICE uint32_t kept_query_rows(const Dropout& dropout, const PhiloxKeys& round_keys, int head, int first_query,
                                   int first_key) {
  static_assert(KEYS % 16 == 0 && KEYS <= 64, "one bit per element, eight by each draw");
  const int g = threadIdx.x % WARP_SIZE / 4, t = threadIdx.x % 4;
  uint32_t kept = 0;
#pragma unroll
  for (int pair = 0; pair < KEYS / 16; ++pair)
    kept |= dropout.kept(round_keys, first_key / 8 + 2 * pair + t / 2, first_query + g + 8 * (t % 2), head) << 8 * pair;
  kept = exchange_bits(kept, 0xccccccccu, 2, 1);
  return exchange_bits(kept, 0xf0f0f0f0u, 4, 2);
}

template <int KEYS>
TK_DEVICE uint32_t kept_query_rows(const Arguments& arguments, int head, int first_query, int first_key) {
  return kept_query_rows<KEYS>(arguments.dropout, arguments.dropout.keys(), head, first_query, first_key);
}

// The same for a fragment of keys (rows) and queries (columns). The eight keys of a philox call are in the eight lanes
// of equal t, which own the elements of eight calls in 16 queries.
template <int QUERIES>
TK_DEVICE uint32_t kept_key_rows(const Arguments& arguments, int head, int first_query, int first_key) {
  static_assert(QUERIES % 16 == 0 && QUERIES <= 64, "one bit per element, eight by each draw");
  const int g = threadIdx.x % WARP_SIZE / 4, t = threadIdx.x % 4;
  const int group = first_key / 8 + g / 2 % 2, query = first_query + 8 * (g / 4) + 2 * t + g % 2;
  uint32_t kept = 0;
#pragma unroll
  for (int pair = 0; pair < QUERIES / 16; ++pair)
    kept |= arguments.dropout.kept(arguments.dropout.keys(), group, query + 16 * pair, head) << 8 * pair;
  kept = exchange_bits(kept, 0xaaaaaaaau, 1, 4);
  kept = exchange_bits(kept, 0xccccccccu, 2, 8);
  return exchange_bits(kept, 0xf0f0f0f0u, 4, 16);
}

// The weights that dropout keeps, as bits, in a fragment of each kind; all without EXTRAS or dropout.
template <bool EXTRAS, Fragment KIND, int COLUMNS>
TK_DEVICE uint32_t kept_weights(const Arguments& arguments, int batch, int head, int first_query, int first_key) {
  if (!EXTRAS || !arguments.dropout.seed) return ~0u;
  const int index = batch * arguments.query_heads + head;
  if constexpr (KIND == Fragment::QUERY_ROWS) {
    return kept_query_rows<COLUMNS>(arguments, index, first_query, first_key);
  } else {
    return kept_key_rows<COLUMNS>(arguments, index, first_query, first_key);
  }
}

// The gradient of a weight before dropout; `element` is its bit in `kept`.
TK_DEVICE float dropped_gradient(float gradient, uint32_t kept, int element, const Arguments& arguments) {
  return kept >> element & 1 ? gradient * arguments.dropout.keep_scale : 0.f;
}

// Computes the keys of the rounds once for a block.
TK_DEVICE void store_round_keys(PhiloxKeys* keys, const Arguments& arguments) {
  if (arguments.dropout.seed) *keys = arguments.dropout.keys();
}

// Sets the weights of KEYS keys that dropout does not keep to zero. `round_keys` returns the PhiloxKeys of the seed.
template <int KEYS, class F>
TK_DEVICE void drop_weights(float (&weights)[KEYS / 8][4], const Arguments& arguments, int batch, int head,
                            int first_query, int first_key, F round_keys) {
  if (!arguments.dropout.seed) return;
  constexpr int TOGETHER = KEYS < 64 ? KEYS : 64;
  const PhiloxKeys keys_of_rounds = round_keys();
#pragma unroll
  for (int part = 0; part < KEYS; part += TOGETHER) {
    const uint32_t kept = kept_query_rows<TOGETHER>(
        arguments.dropout, keys_of_rounds, batch * arguments.query_heads + head, first_query, first_key + part);
#pragma unroll
    for (int n = 0; n < TOGETHER / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& weight = weights[part / 8 + n][e];
        weight = kept >> (4 * n + e) & 1 ? weight : 0.f;
      }
  }
}

// The bias of this lane's two rows for a tile of keys, also from a slope and distances. Adjacent keys are loaded in
// pairs: `ask` starts the loads of HELD groups of eight keys, which overlap with the computation of scores.
template <class T, int KEYS, int HELD> struct BiasTile {
  const Bias& bias;
  int keys, distance;  // from this lane's first column: keys, and the distance of key 0 from the first row's query
  float slope = 0.f;
  const char* rows[2];
  uint32_t pairs[HELD][2][2];  // float32 fills both words, 16 bits one

  TK_DEVICE BiasTile(const Arguments& arguments, int batch, int head, int first_query) : bias(arguments.bias) {
    const int query = first_query + threadIdx.x % WARP_SIZE / 4, column = threadIdx.x % 4 * 2;
    const int64_t plane = batch * bias.batch + head * bias.head;
    keys = arguments.key_length - column;
    distance = query + keys - arguments.query_length;
    if (bias.is_slope) slope = load(static_cast<const float*>(bias.data) + plane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // rows after the last one read its bias; they are not written
      const int row = min(query + 8 * half, arguments.query_length - 1);
      rows[half] = static_cast<const char*>(bias.data) + (plane + row * bias.row + column) * (bias.is_float ? 4 : 2);
    }
  }

  TK_DEVICE void ask(int first_key) {
    if (bias.is_slope) return;
    const int left = keys - first_key;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (bias.is_float) {
        const auto* row = reinterpret_cast<const uint32_t*>(rows[half]) + first_key;
#pragma unroll
        for (int n = 0; n < HELD; ++n) {
          const auto pair = 8 * n < left ? load_vector<2>(row + 8 * n) : Vector<uint32_t, 2>{{0, 0}};
          pairs[n][half][0] = pair[0];
          pairs[n][half][1] = pair[1];
        }
      } else {
        const auto* row = reinterpret_cast<const uint32_t*>(rows[half]) + first_key / 2;
#pragma unroll
        for (int n = 0; n < HELD; ++n) pairs[n][half][0] = 8 * n < left ? load(row + 4 * n) : 0;
      }
    }
  }

  // Adds a tile's bias. The loads of the first keys have been started; this starts the others.
  TK_DEVICE void add_to(float (&scores)[KEYS / 8][4], int first_key) {
#pragma unroll
    for (int first = 0; first < KEYS / 8; first += HELD) {
      if (first) ask(first_key + 8 * first);
      add_held(scores, first, first_key + 8 * first);
    }
  }

 private:
  TK_DEVICE void add_held(float (&scores)[KEYS / 8][4], int first_tile, int first_key) const {
    const auto add = [&](auto pair_of) {
#pragma unroll
      for (int n = 0; n < HELD; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 pair = pair_of(n, half);
          scores[first_tile + n][2 * half] += pair.x;
          scores[first_tile + n][2 * half + 1] += pair.y;
        }
    };
    if (bias.is_slope) {
      const float away = static_cast<float>(distance - first_key);
      add([&](int n, int half) {
        const float first = away + static_cast<float>(8 * half - 8 * n);
        return make_float2(-slope * fabsf(first), -slope * fabsf(first - 1.f));
      });
    } else if (bias.is_float) {
      add([&](int n, int half) { return make_float2(bits_float(pairs[n][half][0]), bits_float(pairs[n][half][1])); });
    } else {
      add([&](int n, int half) { return unpack_pair<T>(pairs[n][half][0]); });
    }
  }
};
template <class T, int HELD> struct BiasTile<T, 0, HELD> {
  TK_DEVICE BiasTile(const Arguments&, int, int, int) {}
};

// The scores of this lane's two rows of wgmma's tiles. READS: they depend on memory, a bias. AHEAD: its loads are
// started by ask(), for HELD groups of eight keys; else neither a tile's bias nor its address fits into registers.
template <class T, int KEYS, int HELD, bool READS, bool AHEAD> struct WideScores {
  const Arguments& arguments;
  int batch, head, first_query;
  BiasTile<T, READS && AHEAD ? KEYS : 0, HELD> bias;

  TK_DEVICE WideScores(const Arguments& arguments_, int batch_, int head_, int first_query_)
      : arguments(arguments_), batch(batch_), head(head_), first_query(first_query_),
        bias(arguments_, batch_, head_, first_query_) {}

  TK_DEVICE void ask(int first_key) {
    if constexpr (READS && AHEAD) bias.ask(first_key);
  }

  TK_DEVICE void score(float (&products)[KEYS / 8][4], int first_key) {
    scale_and_cap<T>(products, arguments);
    if constexpr (READS && AHEAD) {
      bias.add_to(products, first_key);
    } else if constexpr (READS) {
      BiasTile<T, KEYS, HELD> asked_now(arguments, computed_late(batch), computed_late(head),
                                        computed_late(first_query));
      asked_now.ask(first_key);
      asked_now.add_to(products, first_key);
    }
  }
};

}  // namespace transformer_kernels::attention
