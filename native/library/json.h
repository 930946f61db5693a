// JSON as Roofline's own files have it: read whole, looked up by name.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace roofline {

struct Json {
    enum Kind { Null, False, True, Number, String, Array, Object } kind = Null;
    double number = 0;  // NaN: no whole number
    std::string text;   // of a string, as UTF-8
    std::vector<Json> items;
    std::vector<std::pair<std::string, Json>> members;

    // Throws std::invalid_argument: not JSON.
    static Json parse(const std::string& text);
    // A member of an object, null without one.
    const Json& operator[](const char* name) const;
    // The value; each throws std::invalid_argument where it has another kind.
    const std::string& string() const;
    long long integer() const;
    bool boolean() const;
};

}  // namespace roofline
