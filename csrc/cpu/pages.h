// Memory that is written for the first time: the system clears each page as it is touched,
// which costs more than writing it.
#pragma once
#include <cstdint>

namespace transformer_kernels {

// Requests pages of 2 MiB (instead of 4 KiB) for a result of at least this size; Linux may refuse.
void expect_result(const void* memory, int64_t bytes);

}  // namespace transformer_kernels
