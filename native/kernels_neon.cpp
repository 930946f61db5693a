#define ISA_NAMESPACE neon_isa
#include "isa/neon.h"
#include "sampler_impl.h"

namespace roofline {
const Kernels* neon_kernels() { return &neon_isa::kTable; }
}  // namespace roofline
