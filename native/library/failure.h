// What ends a call of the library: a status and a line with cause and remedy.
#pragma once
#include <stdexcept>
#include <string>

#include "roofline.h"

namespace roofline {

struct Failure : std::runtime_error {
    Failure(rl_status status, const std::string& line) : std::runtime_error(line), status(status) {}
    rl_status status;
};

}  // namespace roofline
