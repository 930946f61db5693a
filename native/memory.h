// Memory on huge pages: anonymous for the KV cache, the arena and weights packed at load; a file's own pages for bundles.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#include "threads.h"

namespace roofline {

inline constexpr size_t kHuge = 2 << 20;

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
    size_t bytes_, mapped_ = 0;
    uint8_t *base_ = nullptr, *data_ = nullptr;
};

// Why the system does not give a file, as distinct from a thread.
struct FileError : std::system_error {
    FileError(int error, const std::string& path) : std::system_error(error, std::generic_category(), path) {}
};

// A file mapped read-only. Its pages are read, and mapped where they are in memory already, by a thread of its own while
// the caller goes on. The advice must come before the first read of a page: one read without it stays small until dropped.
class Mapping {
   public:
    // Throws FileError when the file cannot be mapped, std::invalid_argument when it has another size, and
    // std::system_error when there is no thread to read it.
    Mapping(const std::string& path, size_t bytes) : bytes_(bytes), mapped_((bytes + kHuge - 1) / kHuge * kHuge + kHuge) {
        const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (file < 0) throw FileError(errno, path);
        struct stat status;
        if (fstat(file, &status) != 0 || (size_t)status.st_size != bytes || bytes == 0) {
            close(file);
            throw std::invalid_argument(path + " does not have its size");
        }
        // Reserved first, so that the file can start on a boundary of huge pages.
        base_ = (uint8_t*)mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        void* at = MAP_FAILED;
        if (base_ != MAP_FAILED) {
            data_ = (uint8_t*)(((uintptr_t)base_ + kHuge - 1) / kHuge * kHuge);
            at = mmap(data_, bytes, PROT_READ, MAP_PRIVATE | MAP_FIXED, file, 0);
        }
        const int error = errno;
        close(file);
        if (at == MAP_FAILED) {
            if (base_ != MAP_FAILED) munmap(base_, mapped_);
            throw FileError(error, path);
        }
        madvise(data_, bytes, MADV_HUGEPAGE);
        try {
            reader_.start([this] { populate(); });
        } catch (...) {
            munmap(base_, mapped_);
            throw;
        }
    }
    ~Mapping() {
        settle();
        munmap(base_, mapped_);
    }
    Mapping(const Mapping&) = delete;
    const uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }
    // Waits until every page is in memory; the bytes of them that lie on huge pages.
    size_t settle() {
        reader_.join();
        return huge_;
    }

   private:
    void populate() {
        constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, Linux 5.14; older kernels: a byte of each page
        if (madvise(data_, bytes_, kPopulateRead) != 0)
            for (size_t i = 0; i < bytes_; i += 4096) (void)*(volatile const uint8_t*)(data_ + i);
        count_huge();
    }
    // The kernel's account of this mapping.
    void count_huge() {
        FILE* maps = fopen("/proc/self/smaps", "re");
        if (!maps) return;
        char line[512];
        bool ours = false;
        while (fgets(line, sizeof line, maps)) {
            unsigned long first, last, kilobytes;
            if (sscanf(line, "%lx-%lx ", &first, &last) == 2) ours = first >= (uintptr_t)data_ && first < (uintptr_t)data_ + bytes_;
            if (ours && sscanf(line, "FilePmdMapped: %lu kB", &kilobytes) == 1) huge_ += kilobytes << 10;
        }
        fclose(maps);
    }
    size_t bytes_, mapped_, huge_ = 0;
    uint8_t *base_ = nullptr, *data_ = nullptr;
    Threads reader_;
};

}  // namespace roofline
