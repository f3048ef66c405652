#include "build_info.h"

namespace transformer_kernels {

const char* source_hash() { return TK_SOURCE_HASH; }
const char* architectures() { return TK_ARCHITECTURES; }

}  // namespace transformer_kernels
