// What the pretend device counts and refuses: memory, kernels, waits of the host.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/op_registration/op_registration.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;

std::atomic<int> g_devices{1};
thread_local DeviceIndex t_device = 0;
std::atomic<int64_t> g_alloc{0}, g_peak{0}, g_reserved{0}, g_allocs{0};
int64_t g_limit = -1;           // bytes, -1: none
std::atomic<int64_t> g_ops{0};  // kernels launched
std::atomic<int64_t> g_syncs{0};
bool g_log = false;  // count per op
std::map<std::string, int64_t> g_opcount;
std::mutex g_mutex;
PyObject* g_on_sync = nullptr;  // callable(kind, op)
PyObject* g_on_op = nullptr;    // callable(op)
std::mutex g_pin_mutex;
std::map<const char*, size_t> g_pinned;
thread_local int t_inside = 0;  // in a kernel of ours

void raise_to(std::atomic<int64_t>& most, int64_t value) {
  int64_t old = most;
  while (value > old && !most.compare_exchange_weak(old, value)) {
  }
}

void track(int64_t n) {
  auto now = g_alloc.fetch_add(n) + n;
  if (n > 0) {
    g_allocs++;
    raise_to(g_peak, now);
    raise_to(g_reserved, now);
  }
}

void call_py(PyObject* f, const std::string& a, const std::string& b) {
  if (!f) return;
  pybind11::gil_scoped_acquire gil;
  try {
    pybind11::reinterpret_borrow<pybind11::object>(f)(a, b);
  } catch (pybind11::error_already_set& e) {
    e.restore();
    throw python_error();
  }
}

void sync(const char* kind, const std::string& op) {
  g_syncs++;
  call_py(g_on_sync, kind, op);
}

void launched(const std::string& op) {
  g_ops++;
  if (g_log) {
    std::lock_guard<std::mutex> l(g_mutex);
    g_opcount[op]++;
  }
  if (g_on_op) call_py(g_on_op, op, "");
}
}  // namespace
