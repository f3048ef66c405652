#include "../kernels/attention_forward_sm90.cuh"

namespace transformer_kernels::attention {

template void launch_forward_sm90<float16>(const Arguments&, bool, Stream);
template void launch_forward_sm90<bfloat16>(const Arguments&, bool, Stream);

}  // namespace transformer_kernels::attention
