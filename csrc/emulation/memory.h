// The CPU implementation of cuda/primitives/memory.h and cuda/primitives/matrix.h.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulation {

// One thread's load or store of `bytes`: checks the alignment, counts, and reports to the sanitizers.
void note_load(const void* address, size_t bytes, size_t alignment);
void note_store(void* address, size_t bytes, size_t alignment);

// The offset of a pointer in the block's shared memory, as an address of the device's shared window.
uint32_t shared_address(const void* pointer);
// Fails unless these bytes are within one piece.
void check_taken(const void* shared, size_t bytes, const char* what);
// The block's next piece of dynamic shared memory, poisoned with NaN patterns, with red zones around it.
void* take_shared(size_t bytes, size_t alignment);

void copy_async(void* shared, const void* global, unsigned bytes, unsigned filled);
void copy_async_commit();
void copy_async_wait(unsigned pending);

void ldmatrix_x4(uint32_t* registers, const void* shared_row, bool transposed);
void mma_m16n8k16_bfloat16(float* d, const uint32_t* a, uint32_t b0, uint32_t b1);
void mma_m16n8k16_float16(float* d, const uint32_t* a, uint32_t b0, uint32_t b1);
void mma_m16n8k8_tf32(float* d, const uint32_t* a, uint32_t b0, uint32_t b1);

}  // namespace emulation
