#include "../kernels/attention_backward.cuh"
#include "../kernels/attention_forward.cuh"

namespace transformer_kernels::attention {

template void launch_forward<float16>(const Arguments&, Stream);
template void launch_backward<float16>(const Arguments&, const float*, Stream);

}  // namespace transformer_kernels::attention
