// Opens bundles (docs/reference/bundle.md): what is read and checked at every start.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "executable.h"
#include "memory.h"

namespace roofline {

// code.bin.
struct BundleCode {
    Code code;
    int32_t bos_id;  // -1: none
    std::vector<int32_t> eos_ids;
    std::string weights_hash, program_hash;  // hexadecimal

    const ModelShape& shape() const { return code.shape(); }
};

// The first rows of a matrix as the source had them, and where the packed ones begin in the image.
struct TruthSample {
    std::string format, tensor, raw;
    int64_t rows, columns, place;
};

struct Bundle {
    std::string path, name, id;
    std::string no_tokenizer = "its source had none";  // why
    bool add_bos = false, has_tokenizer = false;
    std::vector<std::pair<std::string, std::string>> hashes;  // of each file but the manifest: SHA-256 in hexadecimal
    std::unique_ptr<BundleCode> code;
    std::vector<TruthSample> truth;
};

// Versions, sizes, checksum and places are right. Throws Failure.
Bundle open_bundle(const std::string& path);

// Every file has the hash that the manifest says. Throws Failure, naming the first that has not.
void verify_bundle(const std::string& path);

// A whole file of a bundle. Throws Failure.
std::string read_file(const std::string& folder, const std::string& name);

// A file of a bundle that the system does not give, for the reason `error`, an errno: what is used up, or forbidden, is
// no fault of the bundle. done: what was tried, as in "cannot be read".
struct Failure file_failure(const std::string& folder, const std::string& name, const char* done, int error);

// "PATH is a bundle that cannot be used: REASON. Compile it again ...", as a Failure to throw.
struct Failure bundle_failure(const std::string& path, const std::string& reason);

// The image in memory: the file's own pages where they are huge, else a copy on pages that are.
class Image {
  public:
    Image(const std::string& path, size_t bytes);  // begins to read
    const uint8_t* settle();                       // waits; the address that holds from then on

  private:
    std::unique_ptr<Mapping> file_;
    std::unique_ptr<Memory> copy_;
};

// The packed bytes at `image` are what this build makes of the source's, and the kernels compute with them what the
// portable ones do. Throws Failure.
void check_truth(const Bundle& bundle, const uint8_t* image, const Kernels* kernels);

}  // namespace roofline
