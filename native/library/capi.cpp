// The border: handles and pointers are checked, exceptions become statuses.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>

#include "engine.h"
#include "failure.h"

namespace roofline {
namespace {

thread_local char last_error[1024] = "";

rl_status failed(rl_status status, const char* line) {
    std::snprintf(last_error, sizeof last_error, "%s", line);
    return status;
}

template <class Call>
rl_status guarded(Call&& call) noexcept {
    try {
        return call();
    } catch (const Failure& failure) {
        return failed(failure.status, failure.what());
    } catch (const std::bad_alloc&) {
        return failed(RL_ERROR_MEMORY, "memory is used up: lower cache_tokens or max_sequences, or free some");
    } catch (const std::system_error& error) {
        return failed(
            RL_ERROR_MEMORY,
            (std::string("threads cannot be started: lower the option threads, or raise the limit of threads, ulimit -u (") +
             error.what() + ")")
                .c_str());
    } catch (const std::exception& error) {
        return failed(RL_ERROR_INTERNAL, error.what());
    } catch (...) {
        return failed(RL_ERROR_INTERNAL, "an unknown exception");
    }
}

// The engines that are open. A handle is a number that is never given twice and is looked up here, so that one that was
// closed is refused, and an engine lives until the last call on it returns. Never freed: threads may still call while
// the process ends.
struct Open {
    struct Opened {
        std::shared_ptr<Engine> engine;
        pid_t process;  // whose threads it has: not those of a child made by fork()
    };
    uintptr_t last = 0;
    std::map<const rl_engine*, Opened> engines;
};

std::mutex open_lock;
Open* open_engines = nullptr;  // made by the first rl_open

// A fork waits for the lock, so that the child never has it held by a thread which is not there.
[[maybe_unused]] const int watched = pthread_atfork([] { open_lock.lock(); }, [] { open_lock.unlock(); }, [] { open_lock.unlock(); });

// The caller holds the lock.
Open::Opened& look_up(const rl_engine* handle) {
    if (!handle) throw Failure(RL_ERROR_INVALID, "the engine is NULL: it was never opened, or is closed");
    if (!open_engines || (uintptr_t)handle > open_engines->last)
        throw Failure(RL_ERROR_INVALID, "the engine is none that rl_open gave");
    const auto entry = open_engines->engines.find(handle);
    if (entry == open_engines->engines.end())
        throw Failure(RL_ERROR_INVALID, "the engine is closed: open its bundle again with rl_open");
    return entry->second;
}

std::shared_ptr<Engine> engine_of(const rl_engine* handle) {
    const std::lock_guard<std::mutex> hold(open_lock);
    const Open::Opened& opened = look_up(handle);
    if (opened.process != getpid())
        throw Failure(RL_ERROR_INVALID, "the engine was opened in process " + std::to_string(opened.process) +
                                            ", and this is its fork " + std::to_string(getpid()) +
                                            ", without its threads: open the bundle in the process that uses it");
    return opened.engine;
}

void demand(const void* pointer, const char* name) {
    if (!pointer) throw Failure(RL_ERROR_INVALID, std::string(name) + " is NULL");
}

// A caller's struct, which may be of an older library (shorter) or of a newer one (longer, if it uses nothing new).
template <class T>
T read_struct(const T* given, const T& defaults, const char* name) {
    T own = defaults;
    if (!given) return own;
    const size_t size = given->size;
    const uint8_t* bytes = (const uint8_t*)given;
    if (size < sizeof(size_t) || size > 4096)
        throw Failure(RL_ERROR_INVALID,
                      std::string(name) + ": its size is not set; begin with the macro of roofline.h");
    std::memcpy(&own, given, std::min(size, sizeof(T)));
    for (size_t i = sizeof(T); i < size; i++)
        if (bytes[i])
            throw Failure(RL_ERROR_UNSUPPORTED, std::string(name) + " uses a field of a newer library; this is " +
                                                    std::to_string(RL_VERSION));
    own.size = sizeof(T);
    return own;
}

}  // namespace
}  // namespace roofline

using namespace roofline;

extern "C" {

int rl_version(void) { return RL_VERSION; }

const char* rl_last_error(void) { return last_error; }

rl_status rl_open(const char* path, const rl_options* options, rl_engine** engine) {
    return guarded([&] {
        demand(path, "path");
        demand(engine, "engine");
        auto opened = std::make_shared<Engine>(path, read_struct(options, rl_options RL_OPTIONS, "options"));
        const std::lock_guard<std::mutex> hold(open_lock);
        if (!open_engines) open_engines = new Open;
        rl_engine* handle = (rl_engine*)(open_engines->last + 1);
        open_engines->engines.emplace(handle, Open::Opened{std::move(opened), getpid()});
        open_engines->last++;
        *engine = handle;
        return RL_OK;
    });
}

rl_status rl_close(rl_engine** engine) {
    return guarded([&] {
        if (!engine || !*engine) return RL_OK;
        std::shared_ptr<Engine> last;
        {
            const std::lock_guard<std::mutex> hold(open_lock);
            last = std::move(look_up(*engine).engine);
            open_engines->engines.erase(*engine);
        }
        *engine = nullptr;
        return RL_OK;  // the engine is freed here, or where another thread's call on it returns
    });
}

rl_status rl_verify(const char* path) {
    return guarded([&] {
        demand(path, "path");
        verify_bundle(path);
        return RL_OK;
    });
}

rl_status rl_info(rl_engine* engine, rl_model_info* info) {
    return guarded([&] {
        const auto open = engine_of(engine);
        demand(info, "info");
        if (info->size < sizeof(size_t))
            throw Failure(RL_ERROR_INVALID, "info: its size is not set: info.size = sizeof(rl_model_info)");
        rl_model_info own{};
        open->describe(own);
        own.size = std::min(info->size, sizeof own);
        std::memcpy(info, &own, own.size);
        return RL_OK;
    });
}

rl_status rl_submit(rl_engine* engine, const int32_t* ids, size_t count, const rl_sampling* sampling,
                    rl_request* request) {
    return guarded([&] {
        const auto open = engine_of(engine);
        demand(request, "request");
        if (count > 0) demand(ids, "ids");
        *request = open->submit(ids, count, read_struct(sampling, rl_sampling RL_SAMPLING, "sampling"));
        return RL_OK;
    });
}

rl_status rl_step(rl_engine* engine, rl_event* events, size_t capacity, size_t* count) {
    return guarded([&] {
        const auto open = engine_of(engine);
        demand(events, "events");
        demand(count, "count");
        if (capacity == 0) throw Failure(RL_ERROR_INVALID, "capacity is 0: there must be room for an event");
        return open->step(events, capacity, count);
    });
}

rl_status rl_abort(rl_engine* engine, rl_request request) {
    return guarded([&] {
        engine_of(engine)->abort(request);
        return RL_OK;
    });
}

rl_status rl_decode(rl_engine* engine, const int32_t* ids, size_t count, char* buffer, size_t capacity,
                    size_t* length) {
    return guarded([&] {
        const auto open = engine_of(engine);
        demand(length, "length");
        if (count > 0) demand(ids, "ids");
        if (capacity > 0) demand(buffer, "buffer");
        const std::string bytes = open->decode(ids, count);
        if (capacity > 0) std::memcpy(buffer, bytes.data(), std::min(bytes.size(), capacity));
        *length = bytes.size();
        return RL_OK;
    });
}

}  // extern "C"
