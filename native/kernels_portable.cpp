#define ISA_NAMESPACE portable_isa
#include "isa/portable.h"
#include "sampler_impl.h"

namespace roofline {
const Kernels* portable_kernels() { return &portable_isa::kTable; }
}  // namespace roofline
