// Shared memory with poison and red zones, checked vector accesses, asynchronous copies.
#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "engine.h"
#include "proxies.h"
#include "sanitizers.h"

namespace emulation {
namespace {

constexpr unsigned char UNINITIALISED = 0xff;  // NaN in fp32, fp16 and bf16
constexpr unsigned char RED_ZONE = 0xa5;

bool in_shared_memory(const void* pointer) {
  const Block& block = current_block();
  const ptrdiff_t offset = static_cast<const char*>(pointer) - block.shared;
  return block.shared && offset >= 0 && offset < static_cast<ptrdiff_t>(SHARED_ARENA_BYTES);
}

void check_access(const void* address, size_t bytes, size_t alignment, const char* what) {
  if (reinterpret_cast<uintptr_t>(address) % alignment)
    fail("misaligned %zu-byte %s at %p: the address must be a multiple of %zu", bytes, what, address, alignment);
  if (is_poisoned(address, bytes)) fail("%zu-byte %s at %p is outside its buffer", bytes, what, address);
}

void land(const AsyncCopy& copy) {
  note_write(copy.destination, copy.bytes);
  if (copy.filled) note_read(copy.source, copy.filled);
  const IgnoreAccesses ignore;
  if (copy.filled) std::memcpy(copy.destination, copy.source, copy.filled);
  std::memset(static_cast<char*>(copy.destination) + copy.filled, 0, copy.bytes - copy.filled);
}

}  // namespace

void note_load(const void* address, size_t bytes, size_t alignment) {
  check_access(address, bytes, alignment, "load");
  note_read(address, bytes);
  if (in_shared_memory(address)) return;
  count(GLOBAL_LOADS);
  count(GLOBAL_LOAD_BYTES, bytes);
}

void note_store(void* address, size_t bytes, size_t alignment) {
  check_access(address, bytes, alignment, "store");
  note_write(address, bytes);
  if (in_shared_memory(address)) {
    const IgnoreAccesses ignore;
    note_ordinary_store(address, bytes);
    return;
  }
  count(GLOBAL_STORES);
  count(GLOBAL_STORE_BYTES, bytes);
}

uint32_t shared_address(const void* pointer) {
  if (!in_shared_memory(pointer)) fail("%p is not an address in shared memory", pointer);
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - current_block().shared);
}

void check_taken(const void* shared, size_t bytes, const char* what) {
  const size_t first = shared_address(shared);
  for (const SharedPiece& piece : current_block().pieces)
    if (first >= piece.offset && first + bytes <= piece.offset + piece.bytes) return;
  fail("%s touches %zu bytes of shared memory that are not of one piece", what, bytes);
}

void open_shared_memory(Block& block) {
  const IgnoreAccesses ignore;
  forget_fences();
#if defined(EMULATION_THREAD_SANITIZER)
  free_shared_memory(block);  // blocks must not appear to share memory
#endif
  if (!block.shared) {
    void* arena = nullptr;
    if (posix_memalign(&arena, 1024, SHARED_ARENA_BYTES)) throw std::bad_alloc();
    block.shared = static_cast<char*>(arena);
  }
  block.pieces.clear();
  poison(block.shared, SHARED_ARENA_BYTES);
}

// Finds writes between the pieces, which only AddressSanitizer reports immediately.
void close_shared_memory(Block& block) {
  const IgnoreAccesses ignore;
  unpoison(block.shared, SHARED_ARENA_BYTES);
  if (!block.error.empty()) return;
  for (const SharedPiece& piece : block.pieces) {
    const auto* before = reinterpret_cast<const unsigned char*>(block.shared + piece.offset - RED_ZONE_BYTES);
    const auto* after = reinterpret_cast<const unsigned char*>(block.shared + piece.offset + piece.bytes);
    for (size_t i = 0; i < RED_ZONE_BYTES; ++i)
      if (before[i] != RED_ZONE || after[i] != RED_ZONE) {
        block.error = "a store went past a piece of shared memory of " + std::to_string(piece.bytes) +
                      " bytes [block (" + std::to_string(block.index.x) + ", " + std::to_string(block.index.y) + ", " +
                      std::to_string(block.index.z) + ")]";
        return;
      }
  }
}

void free_shared_memory(Block& block) {
  const IgnoreAccesses ignore;
  if (!block.shared) return;
  unpoison(block.shared, SHARED_ARENA_BYTES);
  std::free(block.shared);
  block.shared = nullptr;
}

void* take_shared(size_t bytes, size_t alignment) {
  const IgnoreAccesses ignore;
  Block& block = current_block();
  Thread& self = current_thread();
  self.device_cursor = (self.device_cursor + alignment - 1) / alignment * alignment + bytes;
  if (self.device_cursor > block.shared_bytes)
    fail("the kernel takes %zu bytes of dynamic shared memory, the launch gave %zu", self.device_cursor,
         block.shared_bytes);
  const size_t offset = (self.emulated_cursor + RED_ZONE_BYTES + alignment - 1) / alignment * alignment;
  self.emulated_cursor = offset + bytes + RED_ZONE_BYTES;
  if (self.emulated_cursor > SHARED_ARENA_BYTES) fail("the emulation's arena of shared memory is full");
  char* piece = block.shared + offset;
  if (self.pieces_taken == block.pieces.size()) {  // the first thread to take this piece
    block.pieces.push_back({bytes, offset});
    unpoison(piece - RED_ZONE_BYTES, bytes + 2 * RED_ZONE_BYTES);
    std::memset(piece - RED_ZONE_BYTES, RED_ZONE, RED_ZONE_BYTES);
    std::memset(piece, UNINITIALISED, bytes);
    std::memset(piece + bytes, RED_ZONE, RED_ZONE_BYTES);
    open_piece(offset, bytes);
    poison(piece - RED_ZONE_BYTES, RED_ZONE_BYTES);
    poison(piece + bytes, RED_ZONE_BYTES);
  } else if (block.pieces[self.pieces_taken].bytes != bytes || block.pieces[self.pieces_taken].offset != offset) {
    fail("threads take different pieces of shared memory");
  }
  ++self.pieces_taken;
  return piece;
}

void copy_async(void* shared, const void* global, unsigned bytes, unsigned filled) {
  check_access(shared, bytes, bytes, "asynchronous store");
  if (filled) check_access(global, filled, bytes, "asynchronous load");
  shared_address(shared);
  count(ASYNC_COPY_BYTES, filled);
  count(GLOBAL_LOAD_BYTES, filled);
  if (filled) count(GLOBAL_LOADS);
  note_ordinary_store(shared, bytes);
  const AsyncCopy copy{shared, global, bytes, filled, current_thread().open_group};
  if (current_block().architecture < 80) return land(copy);  // through registers, without cp.async
  // Until the wait the contents are undefined: poison, or, in some random schedules, the copied data.
  if (current_block().schedule.kind == ScheduleKind::RANDOM && next_random() % 2) {
    land(copy);
  } else {
    note_write(shared, bytes);
    const IgnoreAccesses ignore;
    std::memset(shared, UNINITIALISED, bytes);
  }
  const IgnoreAccesses ignore;
  current_thread().copies.push_back(copy);
}

void copy_async_commit() { ++current_thread().open_group; }

void copy_async_wait(unsigned pending) {
  Thread& self = current_thread();
  auto first_pending = std::find_if(self.copies.begin(), self.copies.end(),
                                    [&](const AsyncCopy& copy) { return copy.group + pending >= self.open_group; });
  for (auto copy = self.copies.begin(); copy != first_pending; ++copy) land(*copy);
  const IgnoreAccesses ignore;
  self.copies.erase(self.copies.begin(), first_pending);
}

}  // namespace emulation
