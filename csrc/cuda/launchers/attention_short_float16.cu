#include "../kernels/attention_short.cuh"

namespace transformer_kernels::attention {

template int short_shared_bytes<float16>(const Arguments&);
template void launch_short_forward<float16>(const Arguments&, Stream);
template void launch_short_backward<float16>(const Arguments&, const float*, Stream);

}  // namespace transformer_kernels::attention
