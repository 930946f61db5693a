// Threads that end with the object that started them.
#pragma once
#include <sys/types.h>
#include <unistd.h>

#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace roofline {

// A child made by fork() has the object and not the threads. There nothing waits for them, and their handles are left
// alone: by now they may be those of threads that the child started itself.
class Threads {
   public:
    Threads() = default;
    Threads(const Threads&) = delete;
    ~Threads() { join(); }
    // Throws std::system_error where the system gives no more threads.
    template <class Body> void start(Body&& body) { handles_->emplace_back(std::forward<Body>(body)); }
    bool here() const { return process_ == getpid(); }
    pid_t process() const { return process_; }
    void join() {
        if (!here()) return (void)handles_.release();  // a handle that is destroyed before its thread ends the process
        if (!handles_) return;
        for (std::thread& thread : *handles_)
            if (thread.joinable()) thread.join();
    }

   private:
    const pid_t process_ = getpid();
    std::unique_ptr<std::vector<std::thread>> handles_ = std::make_unique<std::vector<std::thread>>();
};

}  // namespace roofline
