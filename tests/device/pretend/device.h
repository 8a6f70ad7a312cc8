// The device as torch asks for it, and tensors of it as tensors of the CPU on the same memory.
#pragma once
#include "memory.h"

namespace {
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  Guard() = default;
  explicit Guard(DeviceType) {}
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device d) const override {
    Device o(DeviceType::CUDA, t_device);
    t_device = d.index() < 0 ? 0 : d.index();
    return o;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, t_device); }
  void setDevice(Device d) const override {
    if (d.index() >= 0) t_device = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) t_device = d.index();
  }
  c10::Stream getStream(Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getDefaultStream(Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, d);
  }
  c10::Stream getStreamFromGlobalPool(Device d, bool = false) const override {
    return c10::Stream(c10::Stream::DEFAULT, d);
  }
  c10::Stream getNewStream(Device d, int = 0) const override {
    return c10::Stream(c10::Stream::DEFAULT, d);
  }
  c10::Stream exchangeStream(c10::Stream s) const override { return s; }
  DeviceIndex deviceCount() const noexcept override { return (DeviceIndex)g_devices.load(); }
  void record(void** e, const c10::Stream&, const DeviceIndex,
              const c10::EventFlag) const override {
    static int x;
    *e = &x;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { sync("synchronize", "stream"); }
  void synchronizeEvent(void*) const override { sync("synchronize", "event"); }
  void synchronizeDevice(const DeviceIndex) const override { sync("synchronize", "device"); }
  bool isStreamCapturing(const c10::Stream&) const override { return false; }
};

struct Gen final : c10::GeneratorImpl {
  explicit Gen(DeviceIndex i, uint64_t seed = c10::default_rng_seed_val)
      : c10::GeneratorImpl(Device(DeviceType::CUDA, i), DispatchKeySet(DispatchKey::CUDA)),
        cpu(at::make_generator<at::CPUGeneratorImpl>(seed)) {}
  at::Generator cpu;
  void set_current_seed(uint64_t s) override { cpu.set_current_seed(s); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(cpu).seed(); }
  void set_state(const c10::TensorImpl& s) override { cpu.unsafeGetGeneratorImpl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override {
    auto* g = new Gen(device().index());
    g->cpu = cpu.clone();
    return g;
  }
};
std::vector<at::Generator>& generators() {
  static std::vector<at::Generator> g = [] {
    std::vector<at::Generator> v;
    for (int i = 0; i < 16; i++) v.push_back(at::make_generator<Gen>((DeviceIndex)i));
    return v;
  }();
  return g;
}
}  // namespace

namespace at {
struct PretendHooks final : CUDAHooksInterface {
  PretendHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const Generator& getDefaultGenerator(DeviceIndex i) const override {
    return generators()[i < 0 ? t_device : i];
  }
  Generator getNewGenerator(DeviceIndex i) const override {
    return at::make_generator<Gen>(i < 0 ? t_device : i);
  }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, t_device); }
  bool isPinnedPtr(const void* p) const override { return is_pinned_ptr(p); }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return t_device; }
  DeviceIndex deviceCount() const override { return g_devices; }
  void setCurrentDevice(DeviceIndex d) const override { t_device = d; }
  DeviceIndex getCurrentDevice() const override { return t_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto o = t_device;
    t_device = d;
    return o;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &g_allocator; }
  int getNumGPUs() const override { return g_devices; }
  void deviceSynchronize(DeviceIndex) const override { sync("synchronize", "device"); }
  long versionCUDART() const override { return 12080; }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PretendHooks);
}  // namespace at

namespace {
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

bool on_cuda(const Tensor& t) { return t.defined() && t.device().is_cuda(); }

// A CPU tensor on the very memory.
Tensor host(const Tensor& t) {
  if (!on_cuda(t)) return t;
  TORCH_INTERNAL_ASSERT(t.has_storage(), "pretend: a tensor without storage");
  auto storage = t.storage();
  auto* keep = new c10::Storage(storage);
  c10::DataPtr dp(
      const_cast<void*>(storage.data()), keep,
      [](void* p) { delete static_cast<c10::Storage*>(p); }, Device(DeviceType::CPU));
  c10::Storage s(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(dp),
                 c10::GetCPUAllocator(), true);
  auto r = at::detail::make_tensor<c10::TensorImpl>(std::move(s), DispatchKeySet(DispatchKey::CPU),
                                                    t.dtype());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) r._set_conj(true);
  if (t.is_neg()) r._set_neg(true);
  return r;
}

// A CUDA tensor with what a CPU kernel has made.
Tensor device(const Tensor& t, DeviceIndex index) {
  if (!t.defined()) return t;
  auto storage = t.storage();
  c10::DeviceGuard guard(Device(DeviceType::CUDA, index));
  auto dp = g_allocator.allocate(storage.nbytes());
  if (storage.nbytes()) memcpy(dp.get(), storage.data(), storage.nbytes());
  c10::Storage s(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(dp), &g_allocator,
                 true);
  auto r = at::detail::make_tensor<c10::TensorImpl>(std::move(s), DispatchKeySet(DispatchKey::CUDA),
                                                    t.dtype());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return r;
}

Tensor view_of(const Tensor& base, const Tensor& like) {
  auto r =
      at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                               DispatchKeySet(DispatchKey::CUDA), like.dtype());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                 like.storage_offset());
  return r;
}
}  // namespace
