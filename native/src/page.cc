#include "page.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <new>

#include "auth.h"
#include "shared_memory.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace ldr {

constexpr uint64_t kPageMagic = 0x316567615072646cull;  // "ldrPage1"

// As both processes see it. The death word is the lock word of a robust mutex: the kernel marks it when its owner, the loop thread, dies, by a kill too.
struct PageLayout {
  uint64_t magic;
  uint64_t incarnation;
  pthread_mutex_t death_mutex;
  std::atomic<uint64_t> table_version;
  std::atomic<uint64_t> cache_versions[kNumCacheSlots];
  std::atomic<uint64_t> grant_versions[kNumGrantSlots];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

namespace {

constexpr int kOwnerDied = 0x40000000;  // FUTEX_OWNER_DIED

Status make_death_mutex(pthread_mutex_t *mutex) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  errno = pthread_mutex_init(mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  return errno ? fail_errno(LDR_ERR_SYSTEM, "robust mutex of the engine page") : Status::success();
}

// What the caller writes next, into memory that is free again, must not be seen before the word: on weakly ordered machines the addition alone does not see to that.
void advance(std::atomic<uint64_t> &version) {
  version.fetch_add(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

}  // namespace

Status Page::create(uint64_t incarnation, std::unique_ptr<Page> *page_p) {
  std::unique_ptr<Page> page(new Page);
  page->fd_ = Fd(make_private([] { return memfd_create("ldr-page", MFD_CLOEXEC | MFD_ALLOW_SEALING); }));
  if (!page->fd_ || ftruncate(page->fd_.get(), sizeof(PageLayout)) < 0) return fail_errno(LDR_ERR_SYSTEM, "memfd of the engine page");
  void *memory = mmap(nullptr, sizeof(PageLayout), PROT_READ | PROT_WRITE, MAP_SHARED, page->fd_.get(), 0);
  if (memory == MAP_FAILED) return fail_errno(LDR_ERR_SYSTEM, "mmap of the engine page");
  page->layout_ = static_cast<PageLayout *>(memory);
  if (fcntl(page->fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) < 0)
    return fail_errno(LDR_ERR_SYSTEM, "seals of the engine page (Linux 5.1 or newer is needed)");
  page->layout_->magic = kPageMagic;
  page->layout_->incarnation = incarnation;
  if (Status status = make_death_mutex(&page->layout_->death_mutex); !status.ok()) return status;
  page->nonce_ = std::make_unique<uint64_t>();
  if (Status status = random_bytes(page->nonce_.get(), sizeof(uint64_t)); !status.ok()) return status;
  *page_p = std::move(page);
  return Status::success();
}

Page::~Page() {
  if (layout_) munmap(layout_, sizeof(PageLayout));
}

int Page::fd() const { return fd_.get(); }
uint64_t Page::cma_nonce() const { return *nonce_; }
uint64_t Page::cma_nonce_address() const { return reinterpret_cast<uintptr_t>(nonce_.get()); }

void Page::hold_death_word() { pthread_mutex_lock(&layout_->death_mutex); }
void Page::release_death_word() { pthread_mutex_unlock(&layout_->death_mutex); }

uint64_t Page::cache_version(uint32_t slot) const { return layout_->cache_versions[slot].load(std::memory_order_acquire); }
uint64_t Page::grant_version(uint32_t slot) const { return layout_->grant_versions[slot].load(std::memory_order_acquire); }
void Page::advance_cache(uint32_t slot) { advance(layout_->cache_versions[slot]); }
void Page::advance_grant(uint32_t slot) { advance(layout_->grant_versions[slot]); }
void Page::advance_table() { advance(layout_->table_version); }

Status PeerPage::map(int fd, uint64_t incarnation, std::shared_ptr<PeerPage> *page_p) {
  struct stat info;
  if (fstat(fd, &info) < 0) return fail_errno(LDR_ERR_LINK_FAILED, "fstat of the peer's page");
  if (!is_sealed(fd) || size_t(info.st_size) < sizeof(PageLayout))
    return fail(LDR_ERR_LINK_FAILED, "the peer's page is not sealed or has %lld bytes, expected %zu", (long long)info.st_size, sizeof(PageLayout));
  void *memory = mmap(nullptr, sizeof(PageLayout), PROT_READ, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return fail_errno(LDR_ERR_LINK_FAILED, "mmap of the peer's page");
  std::shared_ptr<PeerPage> page(new PeerPage);
  page->layout_ = static_cast<const PageLayout *>(memory);
  if (page->layout_->magic != kPageMagic || page->layout_->incarnation != incarnation)
    return fail(LDR_ERR_LINK_FAILED, "the peer's page belongs to another engine");
  *page_p = std::move(page);
  return Status::success();
}

PeerPage::~PeerPage() {
  if (layout_) munmap(const_cast<PageLayout *>(layout_), sizeof(PageLayout));
}

bool PeerPage::owner_gone() const {
  int word = __atomic_load_n(&layout_->death_mutex.__data.__lock, __ATOMIC_ACQUIRE);
  return word == 0 || word & kOwnerDied;
}

uint64_t PeerPage::cache_version(uint32_t slot) const { return slot < kNumCacheSlots ? layout_->cache_versions[slot].load(std::memory_order_acquire) : ~0ull; }
uint64_t PeerPage::grant_version(uint32_t slot) const { return slot < kNumGrantSlots ? layout_->grant_versions[slot].load(std::memory_order_acquire) : ~0ull; }
uint64_t PeerPage::table_version() const { return layout_->table_version.load(std::memory_order_acquire); }

}  // namespace ldr
