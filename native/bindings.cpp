// Python's view of the core. Large data crosses as addresses; calls that compute release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "executable.h"
#include "memory.h"
#include "roofs.h"

namespace nb = nanobind;
void bind_roofs(nb::module_& module);  // roofs.cpp
using namespace nb::literals;

namespace roofline {
void bind_kernels(nb::module_& m);

namespace {

template <class T> using Array = nb::ndarray<const T, nb::c_contig, nb::device::cpu>;
template <class T> using Output = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

int64_t integer_of(nb::handle d, const char* name) { return nb::cast<int64_t>(d[name]); }

// The fields of `Lowered`, and of the `AttentionKind`s and `TurnedTable`s in it (backends/cpu/lowered.py), by name.
ModelShape shape_of(const nb::dict& d) {
    const auto integer = [&d](const char* name) { return integer_of(d, name); };
    const auto list = [&d](const char* name, size_t count) {
        auto v = nb::cast<std::vector<int64_t>>(d[name]);
        if (v.size() != count) throw std::invalid_argument(std::string(name) + " has another number of numbers");
        return v;
    };
    ModelShape s;
    s.image_bytes = integer("nbytes"), s.matrix_bytes = integer("matrix_bytes");
    s.table = integer("table"), s.positions = integer("positions"), s.vocab = integer("vocab");
    const auto logits = list("logits", 4), arena = list("arena", 3);
    s.logits = {logits[0], logits[1], logits[2], logits[3]};
    std::copy(arena.begin(), arena.end(), s.arena);
    for (nb::handle each : d["attentions"])
        s.attentions.push_back({integer_of(each, "group"), integer_of(each, "layers"), integer_of(each, "heads"), integer_of(each, "kv_heads"),
                                integer_of(each, "head_dim"), integer_of(each, "value_dim"), nb::cast<double>(each["q_scale"]),
                                nb::cast<double>(each["eps"])});
    for (nb::handle each : d["tables"]) s.tables.push_back({integer_of(each, "turned"), nb::cast<bool>(each["interleaved"])});
    return s;
}

class PyCode {
   public:
    PyCode(Array<int64_t> numbers, nb::dict shape, bool exchanges)
        : code(std::vector<int64_t>(numbers.data(), numbers.data() + numbers.size()), shape_of(shape), exchanges) {}
    const Code code;
};

// A field of a record as numpy describes it: name and format.
using Field = std::pair<const char*, const char*>;
template <class T> constexpr const char* kNumpyFormat = "<i8";
template <> constexpr const char* kNumpyFormat<double> = "<f8";
template <> constexpr const char* kNumpyFormat<Ref> = "(4,)<i8";
#define ROOFLINE_FIELD(type, name, kind) {#name, kNumpyFormat<type>},

class PyExecutable {
   public:
    // table, factors: the rope tables, and what rows are multiplied by, of more positions than the image's, or None; sizes:
    // the fields of StepSizes.
    PyExecutable(const std::string& isa, int threads, const PyCode& code, Array<uint8_t> image, nb::object table, nb::object factors, const Memory& arena,
                 const Memory& cache, const Memory* state, bool int8, Array<int32_t> batch, std::vector<int64_t> fields, std::vector<int64_t> sizes) {
        if (fields.size() != kFieldCount || sizes.size() != 7) throw std::invalid_argument("the batch layout does not match this build");
        const StepSizes step{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]};
        const int64_t lengths[kFieldCount] = {16, step.tokens, step.tokens, step.segments + 1, step.segments, step.segments + 1, step.pages, step.rows,
                                              step.tokens, step.segments, step.segments, step.segments, step.segments};
        for (int i = 0; i < kFieldCount; i++)
            if (fields[i] < 0 || lengths[i] < 0 || fields[i] + lengths[i] > (int64_t)batch.size())
                throw std::invalid_argument("the batch is smaller than the largest step");
        const ModelShape& shape = code.code.shape();
        if (code.code.arena_bytes(step.tokens, step.rows) > (int64_t)arena.bytes() || step.cache_pages < 0 ||
            code.code.page_bytes(int8) * step.cache_pages > (int64_t)cache.bytes())
            throw std::invalid_argument("the arena or the cache is smaller than the largest step");
        const int64_t slot_bytes = 4 * code.code.state_values();
        if (slot_bytes > 0 && (step.state_slots < 1 || !state || step.state_slots > (int64_t)state->bytes() / slot_bytes))
            throw std::invalid_argument("there is no memory for the slots of recurrent state");
        if (shape.image_bytes > (int64_t)image.size()) throw std::invalid_argument("the image is smaller than the code says");
        const float* rope = shape.table < 0 ? nullptr : (const float*)(image.data() + shape.table);
        int64_t positions = shape.positions;
        if (rope && !table.is_none()) {
            table_ = nb::cast<Array<float>>(table);
            rope = table_.data(), positions = (int64_t)table_.size() / shape.turned_before(shape.tables.size());
        }
        if (rope && step.positions > positions) throw std::invalid_argument("the rope table has fewer positions than are served");
        if (!factors.is_none()) factors_ = nb::cast<Array<float>>(factors);
        if (!factors.is_none() && step.positions > (int64_t)factors_.size()) throw std::invalid_argument("there are factors of fewer positions than are served");
        core_ = std::make_unique<Executable>(
            kernels_named(isa), threads, code.code,
            Places{image.data(), rope, positions, factors.is_none() ? nullptr : factors_.data(), arena.data(), cache.data(),
                   state ? (float*)state->data() : nullptr, int8, batch.data(), std::move(fields)}, step);
    }

    size_t forward(size_t from) {
        nb::gil_scoped_release release;
        return core_->forward(from);
    }

    nb::ndarray<nb::numpy, float, nb::ndim<2>> logits() {
        return nb::ndarray<nb::numpy, float, nb::ndim<2>>(core_->logits(), {(size_t)core_->rows(), (size_t)core_->vocab()}, nb::find(this));
    }

    void sample(Array<float> temperature, Array<int32_t> top_k, Array<float> top_p, Array<float> min_p, Array<uint64_t> seed,
                Array<int32_t> sample_index, Array<int32_t> position, Array<float> repetition, Array<float> presence, Array<float> frequency,
                Array<int32_t> hist_start, Array<int32_t> hist_ids, Array<int32_t> hist_counts, Array<int32_t> bias_start, Array<int32_t> bias_ids,
                Array<float> bias_values, Array<int32_t> logprobs, nb::object mask, Output<int32_t> ids, Output<float> logprob, Output<int32_t> top_ids,
                Output<float> top_logprobs, int width, nb::object which) {
        const int rows = core_->rows(), vocab = core_->vocab(), words = (vocab + 31) / 32;
        for (const size_t size : {temperature.size(), top_k.size(), top_p.size(), min_p.size(), seed.size(), sample_index.size(), position.size(),
                                  repetition.size(), presence.size(), frequency.size(), logprobs.size(), ids.size(), logprob.size()})
            if ((int64_t)size != rows) throw std::invalid_argument("sample takes one entry for each logit row of the step");
        if ((int64_t)top_ids.size() < (int64_t)rows * width || (int64_t)top_logprobs.size() < (int64_t)rows * width)
            throw std::invalid_argument("there is no room for so many logprobs");
        check_lists(hist_start, hist_ids, hist_counts.size(), rows, vocab);
        check_lists(bias_start, bias_ids, bias_values.size(), rows, vocab);
        const uint32_t* masks = nullptr;
        Array<uint32_t> mask_array;
        if (!mask.is_none()) {
            mask_array = nb::cast<Array<uint32_t>>(mask);
            if ((int64_t)mask_array.size() != (int64_t)rows * words) throw std::invalid_argument("the mask does not cover rows x vocabulary");
            masks = mask_array.data();
        }
        std::vector<int32_t> chosen(rows);  // whose entries in the results are written
        std::iota(chosen.begin(), chosen.end(), 0);
        if (!which.is_none()) {
            const auto some = nb::cast<Array<int32_t>>(which);
            chosen.assign(some.data(), some.data() + some.size());
            for (const int32_t row : chosen)
                if (row < 0 || row >= rows) throw std::invalid_argument("there is no such logit row to sample");
        }
        std::vector<SampleRow> list;
        list.reserve(chosen.size());
        for (const int32_t i : chosen) {
            const int h0 = hist_start.data()[i], h1 = hist_start.data()[i + 1], b0 = bias_start.data()[i], b1 = bias_start.data()[i + 1];
            list.push_back({core_->logits() + (int64_t)i * vocab, nullptr, nullptr, vocab, temperature.data()[i], top_p.data()[i], min_p.data()[i],
                            repetition.data()[i], presence.data()[i], frequency.data()[i], top_k.data()[i], seed.data()[i], sample_index.data()[i],
                            position.data()[i], hist_ids.data() + h0, hist_counts.data() + h0, h1 - h0, bias_ids.data() + b0, bias_values.data() + b0,
                            b1 - b0, masks ? masks + (int64_t)i * words : nullptr, std::min({logprobs.data()[i], width, vocab}), -1, 0.0f,
                            top_ids.data() + (int64_t)i * width, top_logprobs.data() + (int64_t)i * width});
        }
        {
            nb::gil_scoped_release release;
            core_->sample(list);
        }
        for (size_t i = 0; i < list.size(); i++) {
            ids.data()[chosen[i]] = list[i].id;
            logprob.data()[chosen[i]] = list[i].logprob;
        }
    }

    void choose(size_t op, int regime, const std::string& variant) { core_->choose(op, regime, variant); }

    // parts: int64 [parts][7]: group, first, column, columns, rank, and where A and B begin in `data`; scales: one for
    // each; gains: int64 [parts], where the gains of the columns begin, behind which their shifts follow, or -1; none:
    // no part has any.
    void set_adapter(size_t slot, Array<float> data, Array<int64_t> parts, Array<float> scales,
                     std::optional<Array<int64_t>> gains) {
        if (parts.size() != scales.size() * 7 || (gains && gains->size() != scales.size()))
            throw std::invalid_argument("a part of an adapter has seven numbers, a scale and a place of gains");
        Adapter adapter;
        const auto inside = [&data](int64_t place, int64_t rows, int64_t columns) {
            const int64_t size = (int64_t)data.size();
            if (place < 0 || rows < 1 || columns < 1 || place > size || rows > (size - place) / columns)
                throw std::invalid_argument("a matrix of the adapter lies outside its memory");
        };
        for (size_t i = 0; i < scales.size(); i++) {
            const int64_t* n = parts.data() + 7 * i;
            const int64_t place = gains ? gains->data()[i] : -1;
            inside(n[5], n[4], core_->group_width(n[0]));
            inside(n[6], n[4], n[3]);
            if (place >= 0) inside(place, 2, n[3]);
            const float* gain = place < 0 ? nullptr : data.data() + place;
            adapter.push_back(
                {n[0], n[1], n[2], n[3], n[4], data.data() + n[5], data.data() + n[6], gain, scales.data()[i]});
        }
        core_->set_adapter(slot, adapter);
        if (adapter.empty())
            adapters_.erase(slot);
        else
            adapters_[slot] = data;
    }

    nb::tuple expert_counts() const {  // the fields of ExpertCounts
        const Executable::ExpertCounts& counts = core_->expert_counts();
        return nb::make_tuple(counts.rows, counts.read, counts.layers);
    }

    bool timing() const { return core_->timing; }
    void set_timing(bool on) { core_->timing = on; }
    std::vector<double> op_seconds() const { return core_->op_seconds; }

   private:
    // A list of ids for each row, one behind the other: each within the vocabulary, as they are places in a row of logits.
    static void check_lists(const Array<int32_t>& start, const Array<int32_t>& ids, size_t values, int rows, int vocab) {
        const int32_t* at = start.data();
        bool fits = (int64_t)start.size() == rows + 1 && at[0] >= 0;
        for (int i = 0; fits && i < rows; i++) fits = at[i] <= at[i + 1];
        fits = fits && (size_t)at[rows] <= std::min(ids.size(), values);
        for (int i = fits ? at[0] : 0; fits && i < at[rows]; i++) fits = ids.data()[i] >= 0 && ids.data()[i] < vocab;
        if (!fits) throw std::invalid_argument("sample is given ids that are not in the vocabulary, or lists that do not fit the rows");
    }

    Array<float> table_, factors_;
    std::map<size_t, Array<float>> adapters_;  // their memory, by slot
    std::unique_ptr<Executable> core_;
};

void pack(int format, Array<uint8_t> file, int64_t rows, int64_t k, uintptr_t out, int threads) {
    if (format < 0 || format >= (int)Format::Count) throw std::invalid_argument("unknown weight format");
    const Format f = (Format)format;
    const FormatInfo& i = info(f);
    if (k % i.block || (!is_float(f) && k % 32) || (int64_t)file.size() != rows * (k / i.block) * i.block_bytes)
        throw std::invalid_argument("the tensor's bytes do not match its shape");
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    const uint8_t* data = file.data();
    nb::gil_scoped_release release;
    std::atomic<int64_t> next{0};
    auto job = [&] {
        for (int64_t t; (t = next.fetch_add(8)) < tiles;)
            pack_tiles(f, data, rows, k, t, std::min(tiles, t + 8), (uint8_t*)out + t * tile_bytes(f, k));
    };
    std::vector<std::thread> workers;
    for (int t = 1; t < threads; t++) workers.emplace_back(job);
    job();
    for (auto& w : workers) w.join();
}

}  // namespace

}  // namespace roofline

NB_MODULE(_native, m) {
    using namespace roofline;
    nb::class_<Memory>(m, "Memory")
        .def(nb::init<size_t>(), "bytes"_a)
        .def_prop_ro("address", [](Memory& s) { return (uintptr_t)s.data(); })
        .def_prop_ro("nbytes", &Memory::bytes)
        .def("view", [](Memory& s) { return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(s.data(), {s.bytes()}, nb::find(&s)); });
    nb::class_<Mapping>(m, "Mapping")
        .def(nb::init<const std::string&, size_t>(), "path"_a, "bytes"_a)
        .def_prop_ro("address", [](Mapping& s) { return (uintptr_t)s.data(); })
        .def_prop_ro("nbytes", &Mapping::bytes)
        .def("view", [](Mapping& s) { return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(s.data(), {s.bytes()}, nb::find(&s)); })
        .def("settle", &Mapping::settle, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<PyCode>(m, "Code")
        .def(nb::init<Array<int64_t>, nb::dict, bool>(), "numbers"_a, "shape"_a, "exchanges"_a = false)
        .def_prop_ro("both_ways", [](const PyCode& self) { return self.code.both_ways(); })
        .def_prop_ro("slot_bytes", [](const PyCode& self) { return 4 * self.code.state_values(); });
    nb::class_<PyExecutable>(m, "Executable")
        .def(nb::init<const std::string&, int, const PyCode&, Array<uint8_t>, nb::object, nb::object, const Memory&, const Memory&, const Memory*, bool,
                      Array<int32_t>, std::vector<int64_t>, std::vector<int64_t>>(),
             nb::keep_alive<1, 5>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>(), nb::keep_alive<1, 12>(), "isa"_a,
             "threads"_a, "code"_a, "image"_a, "table"_a.none(), "factors"_a.none(), "arena"_a, "cache"_a, "state"_a.none(), "int8"_a, "batch"_a,
             "fields"_a, "sizes"_a)
        .def("forward", &PyExecutable::forward, "start"_a = 0)
        .def("logits", &PyExecutable::logits)
        .def("sample", &PyExecutable::sample, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seed"_a, "sample_index"_a, "position"_a,
             "repetition"_a, "presence"_a, "frequency"_a, "hist_start"_a, "hist_ids"_a, "hist_counts"_a, "bias_start"_a, "bias_ids"_a, "bias_values"_a,
             "logprobs"_a, "mask"_a.none(), "ids"_a, "logprob"_a, "top_ids"_a, "top_logprobs"_a, "width"_a, "which"_a.none() = nb::none())
        .def("set_adapter", &PyExecutable::set_adapter, "slot"_a, "data"_a, "parts"_a, "scales"_a,
             "gains"_a = nb::none())
        .def("expert_counts", &PyExecutable::expert_counts)
        .def("choose", &PyExecutable::choose, "op"_a, "regime"_a, "variant"_a)
        .def_prop_rw("timing", &PyExecutable::timing, &PyExecutable::set_timing)
        .def("op_seconds", &PyExecutable::op_seconds);
    m.def("pack", &pack, "format"_a, "file"_a, "rows"_a, "k"_a, "out"_a, "threads"_a);
    m.def("tile_bytes", [](int format, int64_t k) { return tile_bytes((Format)format, k); }, "format"_a, "k"_a);
    m.def("format_names", [] {
        std::vector<std::string> names;
        for (const FormatInfo& i : kFormats) names.push_back(i.name);
        return names;
    });
    m.def("isas", &isas);
    m.def("versions", [] { return std::make_pair(kLayoutVersion, kCodeVersion); });  // of packed weights and of code
    m.def("operations", [] {  // names, by number
        std::vector<std::string> names;
        for (const Operation& operation : kOperations) names.push_back(operation.name);
        return names;
    });
    m.def("record_fields", [] { return std::vector<Field>{ROOFLINE_RECORD(ROOFLINE_FIELD)}; });
    m.def("piece_fields", [] { return std::vector<Field>{ROOFLINE_PIECE(ROOFLINE_FIELD)}; });
    m.def("compiler", [] { return ROOFLINE_COMPILER; });
    m.def("build_id", [] { return ROOFLINE_BUILD_ID; });
    bind_kernels(m);
    ::bind_roofs(m);
}
