// Facts about the build, defined by the build system. In a separate file, so that a change of any source recompiles
// one line and not all of module.cpp.
#pragma once

namespace transformer_kernels {

const char* source_hash();     // of csrc, as transformer_kernels/backends/build.py computes it
const char* architectures();   // "sm_80 sm_90a compute_80", or "emulated"

}  // namespace transformer_kernels
