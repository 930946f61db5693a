#define ISA_NAMESPACE avx2_isa
#include "isa/avx2.h"
#include "sampler_impl.h"

namespace roofline {
const Kernels* avx2_kernels() { return &avx2_isa::kTable; }
}  // namespace roofline
