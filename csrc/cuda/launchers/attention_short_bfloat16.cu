#include "../kernels/attention_short.cuh"

namespace transformer_kernels::attention {

template int short_shared_bytes<bfloat16>(const Arguments&);
template void launch_short_forward<bfloat16>(const Arguments&, Stream);
template void launch_short_backward<bfloat16>(const Arguments&, const float*, Stream);

}  // namespace transformer_kernels::attention
