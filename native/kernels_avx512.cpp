#define ISA_NAMESPACE avx512_isa
#include "isa/avx512.h"
#include "sampler_impl.h"

namespace roofline {
const Kernels* avx512_kernels() { return &avx512_isa::kTable; }
}  // namespace roofline
