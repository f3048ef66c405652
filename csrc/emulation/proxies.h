// Who may touch shared memory after an ordinary store: wgmma and the copy engine (the async proxy) only when the thread
// that wrote has called fence_for_async since, and a barrier after that fence has reached whoever starts them. PTX ISA,
// "Async proxy".
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulation {

// A thread's own count of its fences, and what it knows of the others' by the barriers between them.
using KnownFences = std::vector<uint16_t>;

void open_piece(size_t offset, size_t bytes);  // of the block's shared memory, freshly poisoned
void note_ordinary_store(const void* shared, size_t bytes);
void note_async_store(const void* shared, size_t bytes);
void fence_async_proxy();

// What all of `count` threads from `first` on know.
KnownFences fences_known_to(unsigned first, unsigned count);
// Fails unless every byte may be touched by `what`. Stores that no primitive reported show by their bytes: one fence of
// whatever thread since the last look excuses them.
void check_fenced(const void* shared, size_t bytes, const KnownFences& known, const char* what);

void forget_fences();  // when a block begins

}  // namespace emulation
