// check_main [steps] [brief] [plant]: all checks, or the whole programs alone; `brief`: of whole programs one of each
// model; `plant` breaks one kernel, which must be noticed.
#include "check.h"
#include "pool.h"

namespace {

roofline::Kernels wrong;

// Off by one bit in one value.
void wrong_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
    roofline::portable_kernels()->rms_norm(x, weight, n, eps, out);
    out[n - 1] = check::float_of(check::bits_of(out[n - 1]) ^ 1);
}

}  // namespace

int main(int count, char** words) {
    bool steps_only = false, brief = false, plant = false;
    for (int i = 1; i < count; i++) {
        steps_only |= std::string(words[i]) == "steps";
        brief |= std::string(words[i]) == "brief";
        plant |= std::string(words[i]) == "plant";
    }
    const std::string best = roofline::isas()[0];
    wrong = *roofline::kernels_named(best);
    wrong.rms_norm = wrong_norm;
    check::Checker checker(plant ? best : "", &wrong);
    if (!steps_only) {
        const roofline::FloatMode mode;
        check::rows(checker);
        check::linears(checker);
        check::attention(checker);
        check::sampling(checker);
        check::states(checker);
    }
    check::steps(checker, brief);
    return checker.failures() ? 1 : 0;
}
