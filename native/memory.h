// Anonymous memory on huge pages: packed weights, KV cache and arena live here.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>

namespace roofline {

class Memory {
   public:
    explicit Memory(size_t bytes) : bytes_((bytes + kHuge - 1) / kHuge * kHuge) {
        // One huge page more, so that the region can start on a boundary; untouched pages cost nothing.
        mapped_ = bytes_ + kHuge;
        base_ = (uint8_t*)mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base_ == MAP_FAILED) throw std::bad_alloc();
        data_ = (uint8_t*)(((uintptr_t)base_ + kHuge - 1) / kHuge * kHuge);
        madvise(data_, bytes_, MADV_HUGEPAGE);
    }
    ~Memory() { munmap(base_, mapped_); }
    Memory(const Memory&) = delete;
    uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }

   private:
    static constexpr size_t kHuge = 2 << 20;
    size_t bytes_, mapped_ = 0;
    uint8_t *base_ = nullptr, *data_ = nullptr;
};

}  // namespace roofline
