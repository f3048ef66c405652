// Scratch memory, for tests. No result depends on unwritten scratch, but arithmetic on it costs a hundred cycles where
// it holds denormals, even if its results are dropped.
#pragma once
#include <cstdint>

namespace transformer_kernels {

void fill_scratch(int64_t word);    // the word written to memory at each request; -1: none
unsigned long long kept_scratch();  // bytes that this thread keeps
bool denormal_operand();            // whether this thread computed with a denormal operand since it last asked

}  // namespace transformer_kernels
