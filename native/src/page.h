// The page that an engine shows to its same-host peers: who it is, whether it lives, and a version word for each cache slot and grant slot.
// A version only grows. Whoever forgets a cache or ends a grant advances its word first; a reader compares the word before and after its copy (design section 3).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "fd.h"
#include "status.h"

namespace ldr {

constexpr uint32_t kNumCacheSlots = 65536;
constexpr uint32_t kNumGrantSlots = 65536;

struct PageLayout;

class Page {
 public:
  ~Page();
  static Status create(uint64_t incarnation, std::unique_ptr<Page> *page_p);
  int fd() const;  // sealed: peers can map it for reading only
  uint64_t cma_nonce() const;               // random; lies in private memory of this process at cma_nonce_address()
  uint64_t cma_nonce_address() const;

  void hold_death_word();     // on the loop thread, which then lives as long as the engine
  void release_death_word();  // same thread; a peer sees the engine gone

  uint64_t cache_version(uint32_t slot) const;
  uint64_t grant_version(uint32_t slot) const;
  void advance_cache(uint32_t slot);
  void advance_grant(uint32_t slot);
  void advance_table();  // peers' copies of the cache table are old now

 private:
  Page() = default;
  PageLayout *layout_ = nullptr;
  Fd fd_;
  std::unique_ptr<uint64_t> nonce_;
};

class PeerPage {
 public:
  ~PeerPage();
  // Refuses anything that is not sealed, too small, or of another incarnation.
  static Status map(int fd, uint64_t incarnation, std::shared_ptr<PeerPage> *page_p);
  bool owner_gone() const;  // one load
  uint64_t cache_version(uint32_t slot) const;  // acquire
  uint64_t grant_version(uint32_t slot) const;
  uint64_t table_version() const;

 private:
  PeerPage() = default;
  const PageLayout *layout_ = nullptr;
};

}  // namespace ldr
