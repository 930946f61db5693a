#include "pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <stdexcept>
#include <string>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace roofline {
namespace {

constexpr auto kSpin = std::chrono::microseconds(20);    // then the core is offered to others
constexpr auto kYield = std::chrono::microseconds(500);  // then the thread sleeps: waking it costs tens of microseconds

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void sleep_while(std::atomic<int32_t>& word, int32_t value) {
    syscall(SYS_futex, reinterpret_cast<int32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_all(std::atomic<int32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<int32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Waits until `word` differs from `value`: spins at most kSpin, yields until kYield, then sleeps. A sleeper is counted before it looks at the
// word a last time, and the other side changes the word before it looks at the count: no wake-up can be missed.
void await_change(std::atomic<int32_t>& word, int32_t value, std::atomic<int32_t>& sleepers) {
    const auto start = std::chrono::steady_clock::now();
    for (auto waited = kYield - kYield; waited < kYield; waited = std::chrono::duration_cast<decltype(waited)>(std::chrono::steady_clock::now() - start)) {
        for (int i = 0; i < 64; i++) {
            if (word.load(std::memory_order_acquire) != value) return;
            relax();
        }
        if (waited > kSpin) sched_yield();
    }
    sleepers.fetch_add(1);
    while (word.load() == value) sleep_while(word, value);
    sleepers.fetch_sub(1);
}

}  // namespace

#if defined(__x86_64__)
FloatMode::FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr((0x1f80u | 0x8040u)); }  // masked exceptions, FTZ, DAZ
FloatMode::~FloatMode() { _mm_setcsr((unsigned)saved_); }
#elif defined(__aarch64__)
FloatMode::FloatMode() {
    // FZ flushes denormals. DN gives every NaN the same bits: without it they depend on the order of the operands.
    constexpr uint64_t kFlush = 1 << 24, kDefaultNan = 1 << 25;
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(kFlush | kDefaultNan) : "memory");
}
FloatMode::~FloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved_) : "memory"); }
#else
FloatMode::FloatMode() : saved_(0) {}
FloatMode::~FloatMode() {}
#endif

void Barrier::wait() {
    if (count_ == 1) return;
    const int32_t generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
        arrived_.store(0, std::memory_order_relaxed);
        generation_.fetch_add(1);
        if (sleepers_.load() > 0) wake_all(generation_);
        return;
    }
    await_change(generation_, generation, sleepers_);
}

Pool::Pool(int threads) : threads_(threads), ids_(threads), barrier_(threads) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0)
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
            if (CPU_ISSET(cpu, &allowed)) cpus_.push_back(cpu);
    try {
        for (int i = 1; i < threads; i++) workers_.start([this, i] { work(i); });
    } catch (...) {
        stop();  // threads left joinable would end the process
        throw;
    }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
    stop_.store(true);
    epoch_.fetch_add(1, std::memory_order_release);
    wake_all(epoch_);
    workers_.join();
}

// Where every core has a thread, the workers keep off the caller's core. Left alone, the kernel may wake a worker on the
// core of the thread that wakes it and leave it there for tens of milliseconds: both then share one core.
void Pool::place() {
    if (threads_ == 1 || cpus_.size() > (size_t)threads_ || cpus_.size() < 2) return;
    const int here = sched_getcpu();
    if (here == caller_cpu_) return;
    size_t next = 0;
    for (int i = 1; i < threads_; i++) {
        const int id = ids_[i].load(std::memory_order_acquire);
        if (id == 0) return;  // it has not started yet: at the next step
        if (cpus_[next % cpus_.size()] == here) next++;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpus_[next++ % cpus_.size()], &one);
        sched_setaffinity(id, sizeof one, &one);
    }
    caller_cpu_ = here;
}

void Pool::run(const std::function<void(int)>& job) {
    if (threads_ > 1 && !workers_.here())  // it would wait for them for ever
        throw std::runtime_error("the threads of this model are in process " + std::to_string(workers_.process()) + ", and this is its fork " +
                                 std::to_string(getpid()));
    place();
    job_ = &job;
    running_.store(threads_ - 1, std::memory_order_relaxed);
    if (threads_ > 1) {
        epoch_.fetch_add(1);
        if (sleepers_.load() > 0) wake_all(epoch_);
    }
    {
        FloatMode mode;
        job(0);
    }
    for (int32_t left; (left = running_.load(std::memory_order_acquire)) != 0;) await_change(running_, left, sleepers_);
}

void Pool::work(int worker) {
    FloatMode mode;
    ids_[worker].store((int)syscall(SYS_gettid), std::memory_order_release);
    int32_t seen = 0;
    for (;;) {
        await_change(epoch_, seen, sleepers_);
        seen = epoch_.load(std::memory_order_acquire);
        if (stop_.load()) return;
        (*job_)(worker);
        if (running_.fetch_sub(1) == 1 && sleepers_.load() > 0) wake_all(running_);
    }
}

}  // namespace roofline
