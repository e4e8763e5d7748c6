#include "shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>

#include "check.h"

using namespace ldr;
using ldr_test::test;

namespace {

uint64_t as_number(const void *pointer) { return reinterpret_cast<uint64_t>(pointer); }

struct Allocation {
  explicit Allocation(uint64_t size_bytes) { CHECK_OK(shared_alloc(size_bytes, &address, &huge_bytes)); }
  ~Allocation() { CHECK_OK(shared_free(address)); }
  void *address = nullptr;
  uint64_t huge_bytes = 12345;
};

void zeroed_and_aligned() {
  constexpr uint64_t kSize = (6u << 20) + 5;
  Allocation memory(kSize);
  CHECK_EQ(as_number(memory.address) % 4096, 0u);
  CHECK_EQ(as_number(memory.address) % (2u << 20), 0u);
  CHECK(memory.huge_bytes <= 6u << 20);
  CHECK_EQ(memory.huge_bytes % (2u << 20), 0u);
  auto *bytes = static_cast<uint8_t *>(memory.address);
  for (uint64_t i = 0; i < kSize; ++i) CHECK(bytes[i] == 0);
  memset(bytes, 0xA5, kSize);
  CHECK_EQ(bytes[kSize - 1], 0xA5);
}

void small_is_not_huge() {
  Allocation memory(1);
  CHECK_EQ(memory.huge_bytes, 0u);
  static_cast<uint8_t *>(memory.address)[4095] = 1;
}

void nonsense_is_refused() {
  void *address = nullptr;
  CHECK_CODE(shared_alloc(0, &address, nullptr), LDR_ERR_INVALID);
  CHECK_CODE(shared_alloc(UINT64_MAX, &address, nullptr), LDR_ERR_INVALID);
  CHECK_CODE(shared_alloc(4096, nullptr, nullptr), LDR_ERR_INVALID);
  CHECK(address == nullptr);
  int on_stack = 0;
  CHECK_CODE(shared_free(&on_stack), LDR_ERR_INVALID);
  CHECK_CODE(shared_free(nullptr), LDR_ERR_INVALID);
  CHECK_OK(shared_alloc(4096, &address, nullptr));
  CHECK_CODE(shared_free(static_cast<uint8_t *>(address) + 1), LDR_ERR_INVALID);
  CHECK_OK(shared_free(address));
  CHECK_CODE(shared_free(address), LDR_ERR_INVALID);
}

void find_and_free() {
  uint64_t id = 0, offset = 0;
  uint64_t old_id = 0, old_address = 0;
  {
    Allocation a(8192), b(8192);
    uint64_t base = as_number(a.address);
    CHECK(shared_find(base + 100, 200, &id, &offset));
    CHECK_EQ(offset, 100u);
    CHECK(id != 0);
    uint64_t id_b = 0;
    CHECK(shared_find(as_number(b.address), 8192, &id_b, &offset));
    CHECK_EQ(offset, 0u);
    CHECK(id != id_b);
    CHECK(shared_find(base, 8192, &id, &offset));
    CHECK(!shared_find(base, 8193, &id, &offset));
    CHECK(!shared_find(base + 8191, 2, &id, &offset));
    CHECK(!shared_find(base + 1, UINT64_MAX, &id, &offset));
    CHECK(!shared_find(1, 1, &id, &offset));
    CHECK(!shared_find(UINT64_MAX, 1, &id, &offset));
    old_id = id;
    old_address = base;
  }
  CHECK(!shared_find(old_address, 1, &id, &offset));
  CHECK(!shared_fd(old_id));
  Allocation again(8192);
  CHECK(shared_find(as_number(again.address), 1, &id, &offset));
  CHECK(id > old_id);
}

void descriptor_reaches_the_same_bytes() {
  Allocation memory(3u << 20);
  auto *bytes = static_cast<uint8_t *>(memory.address);
  bytes[2'500'000] = 77;
  uint64_t id = 0, offset = 0;
  CHECK(shared_find(as_number(bytes + 2'500'000), 1, &id, &offset));
  Fd fd = shared_fd(id);
  CHECK(bool(fd));
  CHECK(fcntl(fd.get(), F_GETFD) & FD_CLOEXEC);
  struct stat info;
  CHECK_EQ(fstat(fd.get(), &info), 0);
  CHECK_EQ(uint64_t(info.st_size), uint64_t(3u << 20));
  void *other = mmap(nullptr, size_t(info.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  CHECK(other != MAP_FAILED);
  CHECK_EQ(static_cast<uint8_t *>(other)[offset], 77);
  static_cast<uint8_t *>(other)[0] = 5;
  CHECK_EQ(bytes[0], 5);
  munmap(other, size_t(info.st_size));
}

void sealed_for_good() {
  Allocation memory(8192);
  uint64_t id = 0, offset = 0;
  CHECK(shared_find(as_number(memory.address), 1, &id, &offset));
  Fd fd = shared_fd(id);
  CHECK(is_sealed(fd.get()));
  CHECK_EQ(fcntl(fd.get(), F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  CHECK_EQ(ftruncate(fd.get(), 0), -1);
  CHECK_EQ(errno, EPERM);
  CHECK_EQ(ftruncate(fd.get(), 1 << 20), -1);

  Fd unsealed(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK(!is_sealed(unsealed.get()));
  CHECK_EQ(fcntl(unsealed.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  CHECK(!is_sealed(unsealed.get()));
  CHECK(!is_sealed(STDIN_FILENO));
  CHECK(!is_sealed(-1));
}

// fork() while another thread allocates and frees: the child finds the table whole and unlocked, or the alarm ends it.
void forked_in_the_middle() {
  std::atomic<bool> stop{false};
  std::thread worker([&] {
    while (!stop) {
      Allocation memory(16u << 20);
      memset(memory.address, 1, 16u << 20);
    }
  });
  Allocation kept(4096);
  for (int i = 0; i < 40; ++i) {
    pid_t pid = fork();
    if (pid == 0) {
      alarm(5);
      uint64_t id = 0, offset = 0;
      bool found = shared_find(as_number(kept.address), 4096, &id, &offset);
      _exit(found && shared_fd(id) ? 0 : 1);
    }
    int status = 0;
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  stop = true;
  worker.join();
}

}  // namespace

int main() {
  test("zeroed and aligned", zeroed_and_aligned);
  test("small is not huge", small_is_not_huge);
  test("nonsense is refused", nonsense_is_refused);
  test("find and free", find_and_free);
  test("the descriptor reaches the same bytes", descriptor_reaches_the_same_bytes);
  test("sealed for good", sealed_for_good);
#ifndef __SANITIZE_THREAD__  // it wants no fork of a process with threads
  fork_generation();  // installs the fork handlers, as any engine does
  test("forked in the middle", forked_in_the_middle);
#endif
}
