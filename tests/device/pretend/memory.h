// Memory of the device, which is host memory full of garbage, and pinned memory of the host.
#pragma once
#include "state.h"

namespace {
struct Block {
  c10::DataPtr inner;
  int64_t n;
};
void free_block(void* p);

// Keeps what was freed, by size, as torch's allocator does: what is asked for in the same order and
// size comes to lie where it lay.
struct PretendAllocator final : c10::Allocator {
  std::mutex mutex;
  std::map<int64_t, std::vector<Block*>> cache;
  c10::DataPtr allocate(size_t n) override {
    int64_t rounded = (std::max<size_t>(n, 1) + 511) / 512 * 512;
    TORCH_CHECK_WITH(OutOfMemoryError, g_limit < 0 || g_alloc + rounded <= g_limit,
                     "CUDA out of memory. Tried to allocate ", n, " bytes (pretend device)");
    Block* b = taken(rounded);
    if (!b) b = new Block{c10::GetCPUAllocator()->allocate(rounded), rounded};
    // What lies about in device memory is not zeros.
    memset(b->inner.get(), 0xFF, rounded);
    track(rounded);
    return {b->inner.get(), b, &free_block, Device(DeviceType::CUDA, t_device)};
  }
  Block* taken(int64_t size) {
    std::lock_guard<std::mutex> l(mutex);
    auto& same = cache[size];
    if (same.empty()) return nullptr;
    Block* b = same.back();
    same.pop_back();
    return b;
  }
  void give_back(Block* b) {
    std::lock_guard<std::mutex> l(mutex);
    cache[b->n].push_back(b);
  }
  void empty() {
    std::lock_guard<std::mutex> l(mutex);
    for (auto& [size, blocks] : cache)
      for (Block* b : blocks) delete b;
    cache.clear();
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* d, const void* s, std::size_t n) const override {
    default_copy_data(d, s, n);
  }
};
PretendAllocator& g_allocator = *new PretendAllocator;  // never destroyed: tensors outlive statics
void free_block(void* p) {
  auto* b = static_cast<Block*>(p);
  track(-b->n);
  g_allocator.give_back(b);
}

struct PinnedBlock {
  c10::DataPtr inner;
};
void free_pinned(void* p) {
  auto* b = static_cast<PinnedBlock*>(p);
  {
    std::lock_guard<std::mutex> l(g_pin_mutex);
    g_pinned.erase((const char*)b->inner.get());
  }
  delete b;
}
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    auto* b = new PinnedBlock{c10::GetCPUAllocator()->allocate(n)};
    void* data = b->inner.get();
    if (data) {
      std::lock_guard<std::mutex> l(g_pin_mutex);
      g_pinned[(const char*)data] = n;
    }
    return {data, b, &free_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* d, const void* s, std::size_t n) const override {
    default_copy_data(d, s, n);
  }
};
PinnedAllocator g_pinned_allocator;
bool is_pinned_ptr(const void* p) {
  std::lock_guard<std::mutex> l(g_pin_mutex);
  auto it = g_pinned.upper_bound((const char*)p);
  if (it == g_pinned.begin()) return false;
  --it;
  return (const char*)p < it->first + std::max<size_t>(it->second, 1);
}
}  // namespace
