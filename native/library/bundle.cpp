#include "bundle.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>

#include "failure.h"
#include "json.h"
#include "sha256.h"

namespace roofline {
namespace {

constexpr int64_t kFormat = 2, kShapedFormat = 3, kManifestFormat = 3, kByteOrder = 0x0102030405060708;
constexpr size_t kHead = 56, kFixed = 328;  // where the checksum begins, and what has a fixed place
constexpr double kHugeShare = 0.9;          // of the file on huge pages; with less it is copied

struct Reason : std::runtime_error {  // why a bundle cannot be used, without its path
    using std::runtime_error::runtime_error;
};

void demand(bool holds, const char* reason) {
    if (!holds) throw Reason(reason);
}

uint32_t crc32(const std::string& data, size_t from) {  // zlib's
    uint32_t table[256];
    for (uint32_t i = 0; i < 256; i++) {
        table[i] = i;
        for (int bit = 0; bit < 8; bit++) table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xEDB88320u : 0);
    }
    uint32_t crc = ~0u;
    for (size_t i = from; i < data.size(); i++) crc = crc >> 8 ^ table[(crc ^ (uint8_t)data[i]) & 255];
    return ~crc;
}

class Fields {
  public:
    Fields(const std::string& data, size_t at) : data_(data), at_(at) {}
    int64_t next() {
        int64_t value;
        std::memcpy(&value, data_.data() + at_, 8);
        at_ += 8;
        return value;
    }
    double real() {
        const int64_t bits = next();
        double value;
        std::memcpy(&value, &bits, 8);
        return value;
    }
    std::string hex(int bytes) {
        std::string out;
        for (int i = 0; i < bytes; i++) {
            const uint8_t byte = (uint8_t)data_[at_++];
            out += {"0123456789abcdef"[byte >> 4], "0123456789abcdef"[byte & 15]};
        }
        return out;
    }

  private:
    const std::string& data_;
    size_t at_;
};

std::vector<int64_t> numbers(const std::string& data, int64_t at, int64_t count) {
    const int64_t size = (int64_t)data.size();
    demand(at >= 0 && at <= size && at % 8 == 0 && count >= 0 && count <= (size - at) / 8,
           "code.bin names a place outside itself");
    std::vector<int64_t> out((size_t)count);
    if (count > 0) std::memcpy(out.data(), data.data() + at, (size_t)count * 8);
    return out;
}

// The format; those of models with several attentions have a table of them behind what all have.
int64_t read_head(const std::string& data) {
    demand(data.size() >= kFixed && data.compare(0, 8, "RLBUNDLE") == 0, "code.bin is not the code of a bundle");
    Fields f(data, 8);
    demand(f.next() == kByteOrder, "code.bin was written on a machine of the other byte order");
    const int64_t format = f.next(), layout = f.next(), code = f.next();
    std::ostringstream versions;
    if (format != kFormat && format != kShapedFormat)
        versions << "code.bin has format " << format << ", this library reads formats " << kFormat << " and " << kShapedFormat;
    else if (layout != kLayoutVersion || code != kCodeVersion)
        versions << "code.bin has layout " << layout << " and code " << code << ", this library runs layout "
                 << kLayoutVersion << " and code " << kCodeVersion;
    demand(versions.str().empty(), versions.str().c_str());
    demand(f.next() == (int64_t)data.size(), "code.bin has another size than it says");
    demand((uint32_t)f.next() == crc32(data, kHead), "the checksum of code.bin is wrong");
    return format;
}

// All attentions and rope tables of a model, in place of those that `m` has.
void read_shapes(const std::string& data, ModelShape& m) {
    const std::vector<int64_t> counts = numbers(data, kFixed, 2);
    const auto between = [](int64_t count) { return count >= 0 && count <= 1 << 12; };
    demand(between(counts[0]) && between(counts[1]), "code.bin has more attentions or rope tables than there can be");
    numbers(data, kFixed + 16, 8 * counts[0] + 2 * counts[1]);  // refuses a table that is cut off
    Fields f(data, kFixed + 16);
    m.attentions.assign((size_t)counts[0], {});
    for (AttentionShape& a : m.attentions) {
        for (int64_t* field : {&a.group, &a.layers, &a.heads, &a.kv_heads, &a.head_dim, &a.value_dim}) *field = f.next();
        a.q_scale = f.real();
        a.eps = f.real();
    }
    m.tables.assign((size_t)counts[1], {});
    for (RopeShape& table : m.tables) {
        table.turned = f.next();
        table.interleaved = f.next() != 0;
    }
}

std::unique_ptr<BundleCode> read_code(const std::string& data) {
    const int64_t format = read_head(data);
    ModelShape m;
    AttentionShape first;
    Fields f(data, kHead);
    for (int64_t* field : {&m.image_bytes, &m.matrix_bytes, &m.table, &m.positions, &m.vocab}) *field = f.next();
    for (int64_t* field : {&m.logits.id, &m.logits.base, &m.logits.per_token, &m.logits.per_row}) *field = f.next();
    for (int64_t& bytes : m.arena) bytes = f.next();
    int64_t tables = 0;
    RopeShape table;
    for (int64_t* field : {&first.layers, &first.heads, &first.kv_heads, &first.head_dim, &tables, &table.turned}) *field = f.next();
    table.interleaved = f.next() != 0;
    first.q_scale = f.real();
    first.eps = f.real();
    demand(tables >= 0 && tables <= 1 << 12, "code.bin has more rope tables than there can be");
    m.attentions = {first};
    m.tables.assign((size_t)tables, table);
    if (format == kShapedFormat) read_shapes(data, m);
    const int64_t eos_at = f.next(), eos_count = f.next(), bos_id = f.next(), code_at = f.next(), code_count = f.next();
    const std::string weights_hash = f.hex(32), program_hash = f.hex(32);
    std::vector<int32_t> eos_ids;
    for (const int64_t id : numbers(data, eos_at, eos_count)) {
        demand(id >= 0 && id < m.vocab, "code.bin has an end-of-generation id outside the vocabulary");
        eos_ids.push_back((int32_t)id);
    }
    demand(bos_id >= -1 && bos_id < m.vocab, "code.bin has a beginning-of-text id outside the vocabulary");
    try {
        return std::make_unique<BundleCode>(BundleCode{Code(numbers(data, code_at, code_count), m, false),
                                                       (int32_t)bos_id, eos_ids, weights_hash, program_hash});
    } catch (const std::invalid_argument& error) {
        throw Reason(std::string("code.bin: ") + error.what());
    }
}

// The manifest's part that a start needs. What it is the hash of is checked by `roofline doctor --verify`.
void read_manifest(Bundle& bundle) {
    Json manifest;
    try {
        const std::string text = read_file(bundle.path, "manifest.json");
        if (text.empty()) throw Reason("manifest.json is empty");
        manifest = Json::parse(text);
        const long long format = manifest["format"].integer();
        if (format != kManifestFormat)
            throw Reason("it has format " + std::to_string(format) + ", this library reads format " +
                         std::to_string(kManifestFormat));
        if (manifest["target"].string() != "cpu")
            throw Reason("it was lowered for '" + manifest["target"].text + "', this library runs 'cpu'");
        bundle.name = manifest["name"].string();
        bundle.id = manifest["id"].string();
        for (const auto& [name, entry] : manifest["files"].members) {
            if (name.empty() || name[0] == '.' || name.find('/') != std::string::npos)
                throw Reason("manifest.json names a file outside the bundle");
            struct stat status;
            const std::string file = bundle.path + "/" + name;
            if (stat(file.c_str(), &status) != 0) throw file_failure(bundle.path, name, "found", errno);
            const long long bytes = entry["bytes"].integer();
            if (status.st_size != bytes)
                throw Reason(name + " has " + std::to_string(status.st_size) + " bytes instead of " +
                             std::to_string(bytes));
            bundle.has_tokenizer |= name == "tokenizer.bin";
            bundle.hashes.emplace_back(name, entry["sha256"].string());
        }
        const Json& generation = manifest["generation"];
        if (bundle.has_tokenizer)
            bundle.add_bos = generation["add_bos"].boolean();
        else if (generation["missing"].kind == Json::String)
            bundle.no_tokenizer = generation["missing"].text;
        const std::string raw = read_file(bundle.path, "truth.bin");
        size_t at = 0;
        for (const Json& entry : manifest["truth"].items) {
            if (entry.items.size() != 6) throw Reason("manifest.json is damaged");
            const auto& e = entry.items;
            TruthSample sample{e[0].string(), e[1].string(), "", e[2].integer(), e[3].integer(), e[4].integer()};
            const long long bytes = e[5].integer();
            if (bytes < 0 || (size_t)bytes > raw.size() - at) throw Reason("truth.bin is too short");
            sample.raw = raw.substr(at, (size_t)bytes);
            at += (size_t)bytes;
            bundle.truth.push_back(std::move(sample));
        }
    } catch (const std::invalid_argument& error) {
        throw Reason(std::string("manifest.json cannot be read (") + error.what() + ")");
    }
}

void check_sample(const Bundle& bundle, const TruthSample& sample, const uint8_t* image, const Kernels* kernels) {
    Format f = Format::Count;
    for (int i = 0; i < (int)Format::Count; i++)
        if (sample.format == kFormats[i].name) f = (Format)i;
    if (f == Format::Count) return;  // it was turned into one of ours, of which there is another sample
    const FormatInfo& i = info(f);
    const int64_t rows = sample.rows, k = sample.columns;
    if (rows < 1 || rows > kTileRows || k < 1 || k > 1 << 24 || k % i.block || (!is_float(f) && k % 32) ||
        (int64_t)sample.raw.size() != rows * (k / i.block) * i.block_bytes || sample.place < 0 ||
        sample.place > bundle.code->shape().image_bytes - (int64_t)tile_bytes(f, k))
        throw bundle_failure(bundle.path, "truth.bin does not fit weights.bin");
    const uint8_t* tile = image + sample.place;
    std::vector<uint8_t> packed(tile_bytes(f, k));
    pack_tiles(f, (const uint8_t*)sample.raw.data(), rows, k, 0, 1, packed.data());
    if (std::memcmp(packed.data(), tile, packed.size()) != 0)
        throw bundle_failure(bundle.path, "weights.bin does not hold what " + sample.tensor + " was in its source");
    std::vector<float> x((size_t)k), y(2 * kTileRows);
    for (int64_t c = 0; c < k; c++) x[(size_t)c] = (float)((c * 37 + 11) % 127 - 63) / 32.0f;
    int side = 0;
    for (const Kernels* each : {kernels, portable_kernels()}) {
        std::vector<uint8_t> row(Quantised::row_bytes(std::max<int64_t>(k, 32), 1) + 64);
        Linear a{};
        a.format = f, a.weight = tile, a.rows = rows, a.k = k, a.tokens = 1, a.xf = x.data();
        a.x = Quantised{row.data(), 1, k, 1};
        if (!is_float(f)) each->quantise(x.data(), a.x, 0);
        a.y = y.data() + kTileRows * side++, a.ldy = kTileRows;
        FloatMode mode;
        each->linear(a, 0, 1);
    }
    if (std::memcmp(y.data(), y.data() + kTileRows, (size_t)rows * 4) != 0)
        throw Failure(RL_ERROR_UNSUPPORTED, std::string(kernels->isa) + " kernels are wrong on this chip for " +
                                                sample.format +
                                                ". Set the option isa to a lower instruction set, and report this.");
}

}  // namespace

Failure bundle_failure(const std::string& path, const std::string& reason) {
    return Failure(RL_ERROR_BUNDLE, path + " is a bundle that cannot be used: " + reason +
                                        ". Compile it again: roofline compile MODEL -o " + path);
}

Failure file_failure(const std::string& folder, const std::string& name, const char* done, int error) {
    const std::string file = folder + "/" + name + " cannot be " + done, reason = std::string(" (") + std::strerror(error) + ")";
    switch (error) {
        case EMFILE:
        case ENFILE:
            return Failure(RL_ERROR_MEMORY, file + ": too many files are open" + reason + ". Close some, or raise the limit (ulimit -n).");
        case ENOMEM:
        case EAGAIN:
            return Failure(RL_ERROR_MEMORY, file + ": memory is used up" + reason + ". Free some, or raise the limit (ulimit -v, -l).");
        case EACCES:
        case EPERM:
            return Failure(RL_ERROR_BUNDLE, file + reason + ". Give this user the right to read it.");
        default:
            return bundle_failure(folder, name + " cannot be " + done + reason);
    }
}

namespace {

// A file of a bundle, read from its start to its end.
class File {
  public:
    File(const std::string& folder, const std::string& name) : folder_(folder), name_(name) {
        // A pipe that nobody writes would be waited for: it is refused below.
        number_ = open((folder + "/" + name).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (number_ < 0) throw file_failure(folder, name, "opened", errno);
        struct stat status;
        if (fstat(number_, &status) == 0 && S_ISREG(status.st_mode)) return;
        close(number_);
        throw bundle_failure(folder, name + " is no file, but a folder, a pipe or a device");
    }
    ~File() { close(number_); }
    File(const File&) = delete;
    // The bytes that were put at `out`: 0 at the end.
    size_t read(char* out, size_t bytes) {
        for (;;) {
            const ssize_t count = ::read(number_, out, bytes);
            if (count >= 0) return (size_t)count;
            if (errno != EINTR) throw file_failure(folder_, name_, "read", errno);
        }
    }

  private:
    const std::string &folder_, &name_;
    int number_;
};

}  // namespace

std::string read_file(const std::string& folder, const std::string& name) {
    File file(folder, name);
    std::string data;
    std::vector<char> slice(1 << 16);
    while (const size_t count = file.read(slice.data(), slice.size())) data.append(slice.data(), count);
    return data;
}

Bundle open_bundle(const std::string& path) {
    struct stat status;
    if (stat((path + "/code.bin").c_str(), &status) != 0 && stat((path + "/weights.bin").c_str(), &status) != 0) {
        if (errno != ENOENT && errno != ENOTDIR) throw file_failure(path, "code.bin", "found", errno);
        throw Failure(RL_ERROR_BUNDLE, path + " is no bundle: there is no code.bin (" + std::strerror(errno) +
                                           "). Make one: roofline compile MODEL -o " + path);
    }
    Bundle bundle;
    bundle.path = path;
    try {
        read_manifest(bundle);
        bundle.code = read_code(read_file(path, "code.bin"));
        demand(
            stat((path + "/weights.bin").c_str(), &status) == 0 && status.st_size == bundle.code->shape().image_bytes,
            "code.bin belongs to another weights.bin");
    } catch (const Reason& reason) {
        throw bundle_failure(path, reason.what());
    }
    return bundle;
}

void verify_bundle(const std::string& path) {
    const Bundle bundle = open_bundle(path);
    std::vector<char> slice(1 << 20);
    for (const auto& [name, wanted] : bundle.hashes) {
        File file(path, name);
        Sha256 hash;
        while (const size_t count = file.read(slice.data(), slice.size())) hash.add((const uint8_t*)slice.data(), count);
        if (hash.hex() != wanted) throw bundle_failure(path, name + " is not as it was written: its hash is wrong");
    }
}

Image::Image(const std::string& path, size_t bytes) {
    try {
        file_ = std::make_unique<Mapping>(path + "/weights.bin", bytes);
    } catch (const FileError& error) {
        throw file_failure(path, "weights.bin", "mapped", error.code().value());
    } catch (const std::invalid_argument&) {
        throw bundle_failure(path, "weights.bin has another size than code.bin says");
    }
}

const uint8_t* Image::settle() {
    const size_t huge = file_->settle(), bytes = file_->bytes();
    if (huge >= kHugeShare * bytes || bytes < kHuge) return file_->data();
    copy_ = std::make_unique<Memory>(bytes);
    std::memcpy(copy_->data(), file_->data(), bytes);
    file_.reset();
    return copy_->data();
}

void check_truth(const Bundle& bundle, const uint8_t* image, const Kernels* kernels) {
    for (const TruthSample& sample : bundle.truth) check_sample(bundle, sample, image, kernels);
}

}  // namespace roofline
