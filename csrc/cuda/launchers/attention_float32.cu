#include "../kernels/attention_backward.cuh"
#include "../kernels/attention_forward.cuh"

namespace transformer_kernels::attention {

template void launch_forward<float>(const Arguments&, Stream);
template void launch_backward<float>(const Arguments&, const float*, Stream);

}  // namespace transformer_kernels::attention
