#include "proxies.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "engine.h"
#include "memory.h"
#include "sanitizers.h"

namespace emulation {

__thread bool fences_spread = false;

namespace {

struct Piece {
  uint16_t writer;      // of the last ordinary store: thread + 1, or 0
  uint16_t its_fences;  // that thread's fences before the store
  uint32_t seen_at;     // all fences of the block when the async proxy last accessed these bytes
};
constexpr size_t PIECE_BYTES = 16;

struct Proxies {
  std::vector<Piece> pieces{SHARED_ARENA_BYTES / PIECE_BYTES};
  std::vector<char> async_view = std::vector<char>(SHARED_ARENA_BYTES);  // the bytes as the async proxy last read them
  std::vector<KnownFences> known;  // by thread
  std::unordered_map<const void*, KnownFences> published;  // by barrier
  uint32_t fences = 0;
};

Proxies& state() {
  static thread_local Proxies proxies;
  return proxies;
}

size_t offset_of(const void* shared) {
  return static_cast<size_t>(static_cast<const char*>(shared) - current_block().shared);
}

template <class F> void for_pieces(size_t offset, size_t bytes, F f) {
  for (size_t piece = offset / PIECE_BYTES; piece <= (offset + bytes - 1) / PIECE_BYTES; ++piece) f(piece);
}

void join(KnownFences& into, const KnownFences& from) {
  into.resize(std::max(into.size(), from.size()));
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

}  // namespace

void open_piece(size_t offset, size_t bytes) {
  Proxies& proxies = state();
  for_pieces(offset, bytes, [&](size_t piece) { proxies.pieces[piece] = Piece{}; });
  std::memcpy(&proxies.async_view[offset], current_block().shared + offset, bytes);
}

void note_ordinary_store(const void* shared, size_t bytes) {
  Proxies& proxies = state();
  const unsigned thread = current_thread().linear;
  const uint16_t its_fences = fences_spread ? proxies.known[thread][thread] : uint16_t{0};
  for_pieces(offset_of(shared), bytes, [&](size_t piece) {
    proxies.pieces[piece].writer = static_cast<uint16_t>(thread + 1);
    proxies.pieces[piece].its_fences = its_fences;
  });
}

void note_async_store(const void* shared, size_t bytes) {
  const IgnoreAccesses ignore;
  Proxies& proxies = state();
  const size_t offset = offset_of(shared);
  for_pieces(offset, bytes, [&](size_t piece) { proxies.pieces[piece] = {0, 0, proxies.fences}; });
  std::memcpy(&proxies.async_view[offset], shared, bytes);
}

void fence_async_proxy() {
  const IgnoreAccesses ignore;
  Proxies& proxies = state();
  const unsigned thread = current_thread().linear;
  if (!fences_spread) proxies.known.assign(current_block().thread_count, KnownFences(current_block().thread_count));
  fences_spread = true;
  ++proxies.known[thread][thread];
  ++proxies.fences;
}

KnownFences fences_known_to(unsigned first, unsigned count) {
  if (!fences_spread) return {};
  const std::vector<KnownFences>& known = state().known;
  KnownFences least = known[first];
  for (unsigned thread = first + 1; thread < first + count; ++thread)
    for (size_t i = 0; i < least.size(); ++i) least[i] = std::min(least[i], known[thread][i]);
  return least;
}

void check_fenced(const void* shared, size_t bytes, const KnownFences& known, const char* what) {
  const IgnoreAccesses ignore;
  Proxies& proxies = state();
  for_pieces(offset_of(shared), bytes, [&](size_t piece) {
    Piece& mine = proxies.pieces[piece];
    const unsigned writer = mine.writer - 1u;
    if (mine.writer && (known.empty() || known[writer] <= mine.its_fences)) {
      const bool fenced = fences_spread && proxies.known[writer][writer] > mine.its_fences;
      fail("%s touches shared memory that thread %u wrote by an ordinary store without %s", what, writer,
           fenced ? "a barrier after its fence_for_async" : "fence_for_async");
    }
    char* seen = &proxies.async_view[piece * PIECE_BYTES];
    const char* now = current_block().shared + piece * PIECE_BYTES;
    if (std::memcmp(seen, now, PIECE_BYTES)) {
      if (!mine.writer && mine.seen_at == proxies.fences)
        fail("%s touches shared memory that ordinary stores wrote without fence_for_async", what);
      std::memcpy(seen, now, PIECE_BYTES);
    }
    mine.seen_at = proxies.fences;
  });
}

void forget_fences() {
  if (!fences_spread) return;
  fences_spread = false;
  state().published.clear();
  state().fences = 0;
}

void publish_fences(const void* barrier) { join(state().published[barrier], state().known[current_thread().linear]); }

void learn_fences(const void* barrier) {
  const auto found = state().published.find(barrier);
  if (found != state().published.end()) join(state().known[current_thread().linear], found->second);
}

}  // namespace emulation
