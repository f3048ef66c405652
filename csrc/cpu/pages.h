// Memory that is written for the first time: the system clears each page as it is touched,
// which costs more than writing it.
#pragma once
#include <cstdint>

namespace transformer_kernels {

// Asks for pages of 2 MiB, 512 times as few, where a result of so many bytes is about to be written; Linux may refuse.
void expect_result(const void* memory, int64_t bytes);

}  // namespace transformer_kernels
