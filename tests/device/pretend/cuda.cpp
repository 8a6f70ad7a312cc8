// A pretend CUDA device for a torch without CUDA. Tensors say `cuda:0`, have the CUDA dispatch key
// and compute on the CPU, on memory that is host memory. What a real device would refuse (tensors
// of two devices in one kernel, a generator of another device, a kernel that CUDA lacks) is refused;
// what it would wait for is counted.
#include <malloc.h>

#include "kernels.h"

namespace {
struct AtLoad {
  AtLoad() {
    // Memory that was freed stays with the process, or pages would be made anew for every kernel.
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    c10::SetAllocator(DeviceType::CUDA, &g_allocator, 255);
  }
} at_load;
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("has_cuda", [] { return at::detail::getCUDAHooks().hasCUDA(); });
  m.def("set_devices", [](int n) { g_devices = n; });
  m.def("devices", [] { return g_devices.load(); });
  m.def("device", [] { return (int)t_device; });
  m.def("set_device", [](int d) { t_device = d; });
  m.def("exchange_device", [](int d) {
    int o = t_device;
    t_device = d;
    return o;
  });
  m.def("allocated", [] { return g_alloc.load(); });
  m.def("peak", [] { return g_peak.load(); });
  m.def("reserved", [] { return g_reserved.load(); });
  m.def("empty_cache", [] {
    g_allocator.empty();
    g_reserved = g_alloc.load();
  });
  m.def("allocations", [] { return g_allocs.load(); });
  m.def("reset_peak", [] { g_peak = g_alloc.load(); });
  m.def("limit", [](int64_t n) { g_limit = n; });
  m.def("kernels", [] { return g_ops.load(); });
  m.def("syncs", [] { return g_syncs.load(); });
  m.def("log", [](bool on) {
    g_log = on;
    std::lock_guard<std::mutex> l(g_mutex);
    g_opcount.clear();
  });
  m.def("op_counts", [] {
    std::lock_guard<std::mutex> l(g_mutex);
    return g_opcount;
  });
  m.def("on_sync",
        [](pybind11::object f) { g_on_sync = f.is_none() ? nullptr : f.inc_ref().ptr(); });
  m.def("on_op", [](pybind11::object f) { g_on_op = f.is_none() ? nullptr : f.inc_ref().ptr(); });
  m.def("sync", [](const std::string& k, const std::string& op) { sync(k.c_str(), op); });
  m.def("generator", [](int i) { return generators()[i]; });
  m.def("resize_storage", [](const Tensor& t, int64_t n) {
    at::native::resize_bytes_cpu(t.storage().unsafeGetStorageImpl(), n);
  });
  m.def("host", [](const Tensor& t) { return host(t); });
  m.def("as_device", [](const Tensor& t, int i) { return device(t, i); });
}
