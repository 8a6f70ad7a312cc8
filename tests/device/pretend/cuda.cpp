// A pretend CUDA device for a torch without CUDA. Tensors say `cuda:0`, have the CUDA dispatch key
// and compute on the CPU, on memory that is host memory. What a real device would refuse (tensors
// of two devices in one kernel, a generator of another device, a host synchronisation while a graph
// is captured, a kernel that CUDA lacks) is refused; what it would wait for is counted.
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
  m.def("private_bytes", [] { return g_private.load(); });
  // A kernel that is written in Python, and is given tensors of the host on the very memory.
  m.def("kernel", [](const std::string& name, pybind11::object body, std::vector<Tensor> args) {
    launched(name);
    auto run = [](PyObject* f, const std::vector<Tensor>& args) {
      pybind11::gil_scoped_acquire gil;
      Inside in;
      std::vector<Tensor> hosts;
      for (auto& t : args) hosts.push_back(host(t));
      pybind11::reinterpret_borrow<pybind11::object>(f)(hosts);
    };
    run(body.ptr(), args);
    if (!capturing()) return;
    std::vector<Tensor> kept;
    for (auto& t : args) kept.push_back(at_address(t));
    PyObject* f = body.inc_ref().ptr();  // never given back: graphs die without the GIL
    g_capture->work.push_back([run, f, kept] { run(f, kept); });
  });
  m.def("sync", [](const std::string& k, const std::string& op) { sync(k.c_str(), op); });
  m.def("generator", [](int i) { return generators()[i]; });
  m.def("capturing", &capturing);
  pybind11::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def_property_readonly("kernels", [](const Graph& g) { return g.kernels; })
      .def("replay", [](Graph& g) {
        pybind11::gil_scoped_release r;
        TORCH_CHECK(!g_capture, "replay while capturing");
        for (auto& w : g.work) w();
        g_ops++;
      });
  m.def("begin_capture", [](bool global) {
    TORCH_CHECK(!g_capture, "already capturing");
    g_allocator.remember();
    g_capture = std::make_shared<Graph>();
    g_capturing_thread = std::this_thread::get_id();
    g_capture_is_global = global;
  });
  m.def("end_capture", [] {
    auto g = g_capture;
    g_capture = nullptr;
    g_allocator.restore();
    TORCH_CHECK(!g->broken, "CUDA error: operation failed due to a previous error during capture");
    return g;
  });
  m.def("resize_storage", [](const Tensor& t, int64_t n) {
    at::native::resize_bytes_cpu(t.storage().unsafeGetStorageImpl(), n);
  });
  m.def("host", [](const Tensor& t) { return host(t); });
  m.def("as_device", [](const Tensor& t, int i) { return device(t, i); });
}
