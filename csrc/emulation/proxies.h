// Visibility of ordinary stores to wgmma and the copy engine (the async proxy): the writing thread must have called
// fence_for_async since the store, and a barrier after that fence must have reached the thread that starts them. PTX
// ISA, "Async proxy".
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulation {

// A thread's count of its fences, and the counts of others that barriers have published to it.
using KnownFences = std::vector<uint16_t>;

void open_piece(size_t offset, size_t bytes);  // of the block's shared memory, newly poisoned
void note_ordinary_store(const void* shared, size_t bytes);
void note_async_store(const void* shared, size_t bytes);
void fence_async_proxy();

// The fences known to all of the `count` threads from `first` on.
KnownFences fences_known_to(unsigned first, unsigned count);
// Fails unless `what` may access every byte. Stores that no primitive reported are detected by changed bytes; one fence
// of any thread since the last access makes them valid.
void check_fenced(const void* shared, size_t bytes, const KnownFences& known, const char* what);

void forget_fences();  // at the start of a block

}  // namespace emulation
