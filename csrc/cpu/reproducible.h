// Whether results have the same bits at every level: kernels then leave out a way that depends on the width of a
// register. Set by backends/cpu.py.
#pragma once

namespace transformer_kernels {

bool is_reproducible();
void reproduce(bool on);

}  // namespace transformer_kernels
