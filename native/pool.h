// Threads that run a step together: parked between steps, and within a step meeting at barriers that spin briefly and
// then sleep, so that a busy machine costs a tile and not a time slice.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "threads.h"

namespace roofline {

// Flush-to-zero, nearest-even arithmetic for the time a thread computes for us; the caller's setting comes back after.
class FloatMode {
   public:
    FloatMode();
    ~FloatMode();

   private:
    uint64_t saved_;
};

class Barrier {
   public:
    explicit Barrier(int count) : count_(count) {}
    void wait();

   private:
    const int count_;
    alignas(64) std::atomic<int32_t> arrived_{0};
    alignas(64) std::atomic<int32_t> generation_{0};
    std::atomic<int32_t> sleepers_{0};  // spares the wake call where everybody still spins
};

class Pool {
   public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    int threads() const { return threads_; }
    Barrier& barrier() { return barrier_; }
    // Runs job(worker) on every thread, the caller being worker 0, and returns when all are done. Throws
    // std::runtime_error in a child made by fork(), where the threads are not.
    void run(const std::function<void(int)>& job);

   private:
    void work(int worker);
    void stop();
    void place();
    const int threads_;
    std::vector<int> cpus_;               // where this process may run
    std::vector<std::atomic<int>> ids_;   // kernel's id of each worker, 0 until it runs
    int caller_cpu_ = -1;
    Barrier barrier_;
    const std::function<void(int)>* job_ = nullptr;
    alignas(64) std::atomic<int32_t> epoch_{0};
    alignas(64) std::atomic<int32_t> running_{0};
    std::atomic<int32_t> sleepers_{0};
    std::atomic<bool> stop_{false};
    Threads workers_;
};

}  // namespace roofline
